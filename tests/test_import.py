"""Importing the package where Keras does not run on TensorFlow: the error says what to do."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import favor_keras

ROOT = pathlib.Path(favor_keras.__file__).parents[1]
ADVICE = r"ImportError: .*[Ss]et .*KERAS_BACKEND=tensorflow before Keras is first imported"


def import_error(code="import favor_keras", folder=None, **environment):
    """The last line that a new interpreter prints when it fails to run `code`."""
    variables = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    variables |= environment
    variables["PYTHONPATH"] = os.pathsep.join([*([str(folder)] if folder else []), str(ROOT)])
    process = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert process.returncode == 1, process.stderr
    return process.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("backend", ["jax", "torch", "numpy"])
def test_another_backend(backend):
    """Whether that backend is installed (Keras comes up with it) or not (Keras fails to import)."""
    message = import_error(KERAS_BACKEND=backend)
    assert re.match(ADVICE, message), message
    assert repr(backend) in message


def test_another_backend_that_is_not_installed():
    message = import_error("import sys; sys.modules['jax'] = None; import favor_keras", KERAS_BACKEND="jax")
    assert re.match(ADVICE, message), message


def test_another_backend_that_is_installed(tmp_path):
    (tmp_path / "keras.py").write_text("class backend:\n    backend = staticmethod(lambda: 'jax')\n")
    message = import_error(folder=tmp_path, KERAS_BACKEND="jax")
    assert re.match(ADVICE, message), message
    assert "'jax'" in message


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "not_installed"])
def test_another_backend_chosen_in_the_configuration_file(tmp_path, installed):
    configuration = {"backend": "jax", "floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last"}
    (tmp_path / "keras.json").write_text(json.dumps(configuration))
    if installed:
        (tmp_path / "keras.py").write_text("class backend:\n    backend = staticmethod(lambda: 'jax')\n")
    code = "import sys; sys.modules['jax'] = None; import favor_keras"
    message = import_error(code, folder=tmp_path if installed else None, KERAS_HOME=str(tmp_path))
    assert re.match(ADVICE, message), message


def test_keras_that_is_missing_altogether_is_reported_as_such():
    message = import_error("import sys; sys.modules['keras'] = None; import favor_keras", KERAS_BACKEND="tensorflow")
    assert "KERAS_BACKEND" not in message and "keras" in message
