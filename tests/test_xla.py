import sys

import keras
import pytest
import tensorflow as tf

from favor_keras.ops.xla import is_xla


def seen_by(call, jit_compile):
    """What `is_xla` says while `tf.function` traces `call(seen)`."""
    seen = []
    tf.function(lambda: call(seen), jit_compile=jit_compile, autograph=False)()
    return seen


def in_a_loop(seen):
    def body(n):
        seen.append(is_xla())
        return n + 1

    return tf.while_loop(lambda n: n < 3, body, [0])


def in_an_inner_function(seen):
    return tf.function(lambda: in_a_loop(seen))()


def test_eager():
    assert not is_xla()


@pytest.mark.parametrize("call", [in_a_loop, in_an_inner_function])
@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_graph_and_xla(call, jit_compile):
    assert seen_by(call, jit_compile) == [bool(jit_compile)]
    assert not is_xla()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit(jit_compile):
    seen = []

    class Spy(keras.layers.Layer):
        def call(self, inputs):
            seen.append(is_xla())
            return inputs

    inputs = keras.Input([2])
    model = keras.Model(inputs, keras.layers.Dense(1)(Spy()(inputs)))
    model.compile("sgd", "mse", jit_compile=jit_compile)
    seen.clear()
    model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
    assert set(seen) == {jit_compile}


def test_tensorflow_that_does_not_tell(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow.python.ops.control_flow_util", None)
    assert seen_by(lambda seen: seen.append(is_xla()), True) == [False]
