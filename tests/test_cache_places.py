"""Writing into a cache, against a loop over its places."""

import numpy as np
import pytest
import tensorflow as tf

from favor_keras import SelfAttention
from favor_keras.ops.cache_places import put_in_place


def naive(buffer, x, start, kept):
    buffer = buffer.copy()
    for row in range(len(x)):
        place = start[row]
        for position in np.flatnonzero(kept[row]):
            if 0 <= place < buffer.shape[1]:
                buffer[row, place] = x[row, position]
            place += 1
    return buffer


@pytest.mark.parametrize("mode", ["eager", "graph", "xla", "unknown shapes"])
@pytest.mark.parametrize("length", [1, 3])
def test_kept_positions_take_the_places_from_the_start_on(length, mode):
    generator = np.random.default_rng(length)
    start = np.array([0, 2, 4, 5, 9, -1], "int32")  # the last ones have no room, and no place
    buffer, x = generator.normal(size=[6, 5, 2]), generator.normal(size=[6, length, 2])
    for kept in (np.ones([6, length], bool), generator.uniform(size=[6, length]) < 0.5):
        function = put_in_place
        if mode != "eager":
            arguments = [tf.TensorSpec([None, None, 2], "float64")] * 2
            arguments += [tf.TensorSpec([None], "int32"), tf.TensorSpec([None, None], "bool")]
            signature = arguments if mode == "unknown shapes" else None
            function = tf.function(put_in_place, signature, autograph=False, jit_compile=mode == "xla")
        result = function(*map(tf.constant, (buffer, x, start, kept)))
        np.testing.assert_array_equal(result, naive(buffer, x, start, kept))


def test_gradients_go_to_what_is_in_the_cache_in_the_end():
    buffer, x = tf.ones([2, 3, 1]), tf.ones([2, 1, 1])
    cotangent = tf.constant([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]])
    with tf.GradientTape() as tape:
        tape.watch([buffer, x])
        result = put_in_place(buffer, x, tf.constant([1, 0]), tf.constant([[True], [False]]))
    d_buffer, d_x = tape.gradient(result, [buffer, x], cotangent)
    assert tf.squeeze(d_buffer).numpy().tolist() == [[1.0, 0.0, 3.0], [4.0, 5.0, 6.0]]
    assert tf.squeeze(d_x).numpy().tolist() == [2.0, 0.0]


def test_a_cache_without_places_stays_as_it_is():
    assert (
        put_in_place(tf.zeros([2, 0, 3]), tf.ones([2, 1, 3]), tf.constant([0, 1]), tf.ones([2, 1], "bool")).shape[1]
        == 0
    )


def test_a_cache_of_keys_and_values_takes_one_step_for_all_rows():
    layer = SelfAttention(8, 2, causal=True, seed=1)
    inputs = tf.constant(np.random.default_rng(0).normal(size=[2, 1, 8]), "float32")
    layer(inputs)
    cache = {name: tf.random.stateless_normal([2, 6, 2, 4], seed=[0, 1]) for name in "kv"}
    call = tf.function(lambda step: layer(inputs, cache=cache, decode_loop_step=step), autograph=False)
    expected, _ = layer(inputs, cache=cache, decode_loop_step=3)
    for step in (tf.constant(3), tf.constant([3])):
        np.testing.assert_allclose(call(step)[0], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="cache must have the batch size of source, 2, received 1"):
        layer(inputs, cache={name: tensor[:1] for name, tensor in cache.items()}, decode_loop_step=3)
