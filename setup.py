from pathlib import Path

from setuptools import find_packages, setup

# tensorflow-datasets imports importlib_resources without declaring it.
EXAMPLES = ["matplotlib", "tensorflow-datasets", "importlib_resources", "flask", "waitress"]

setup(
    name="favor-keras",
    version="0.1.0",
    description="Keras layers whose cost grows linearly with the length of the sequence",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["favor_keras", "favor_keras.*"]),
    python_requires=">=3.11",
    install_requires=["tensorflow>=2.21", "keras>=3.15.1,<4", "numpy"],
    extras_require={"examples": EXAMPLES, "test": [*EXAMPLES, "pytest", "pytest-xdist"]},
)
