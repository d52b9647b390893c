"""Quiet logs, and what several test files need."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("AUTOGRAPH_VERBOSITY", "0")
# XLA compiles the same programs in half the time. What it makes of them with all optimizations is checked by
# test_attention_ops.py in a process of its own.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import functools  # noqa: E402
import pathlib  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

from favor_keras.ops import chunk_scan  # noqa: E402

# The sequences of the tests are short, and must go through the loop of long ones. What a sequence of few chunks does
# without the loop is tested in test_chunk_scan.py.
chunk_scan.FEW_CHUNKS = {"graph": 1, "xla": 1}

# Each makes something that takes a minute, for many of its tests.
FILES_THAT_SHARE_FIXTURES = ("test_char_lm.py", "test_export.py", "test_saving.py", "test_serve.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Runs the tests of a file that shares fixtures in one process, and each of the others wherever there is time."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return file if file.endswith(FILES_THAT_SHARE_FIXTURES) else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    """The longest tests first: else one process would work on them alone in the end."""
    items.sort(key=lambda item: item.path.name != "test_strategies.py")


@pytest.fixture(autouse=True)
def initial_weights():
    """Every test has the same initial weights, whichever tests ran before."""
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def reference():
    """reference("favor") is the dict of arrays in data/favor_reference.npz, all float64."""

    @functools.cache
    def load(name):
        with np.load(pathlib.Path(__file__).parent / "data" / f"{name}_reference.npz") as arrays:
            return dict(arrays)

    return load


@pytest.fixture(params=["graph", "xla", "graph_unknown_shapes", "xla_unknown_shapes"])
def compiled(request):
    """compiled(function, *arguments): the function's results when it runs compiled, one test per way.

    With unknown shapes the first two axes of every argument are unknown: batch, and length or heads.
    """

    def specification(x):
        return tf.TensorSpec([None, None, *x.shape[2:]][: x.shape.rank], x.dtype)

    def run(function, *arguments):
        signature = None
        if request.param.endswith("unknown_shapes"):
            signature = tf.nest.map_structure(specification, arguments)
        jit_compile = request.param.startswith("xla")
        return tf.function(function, signature, autograph=False, jit_compile=jit_compile)(*arguments)

    return run
