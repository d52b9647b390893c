"""The short convolution, as an op and as a layer, against loops over positions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import (
    TOLERANCES,
    assert_causal,
    assert_ignores_padding,
    assert_same_when_compiled,
    normal,
    padding_masks,
    policies,
    value_and_gradients,
)
from oracles import assert_close, directional_derivative

from favor_keras.layers import ShortConvolution
from favor_keras.ops import causal_convolution

WIDTHS = (1, 2, 4)
widths = pytest.mark.parametrize("width", WIDTHS)


def naive_convolution(inputs, kernel):
    """y_t = sum_i kernel_i * x_{t + i}: [B, T + W - 1, C] -> [B, T, C]."""
    length = inputs.shape[1] - len(kernel) + 1
    return np.stack([np.sum(kernel * inputs[:, t : t + len(kernel)], axis=1) for t in range(length)], axis=1)


def naive_short_convolution(inputs, kernel, mask=None, history=None):
    """SiLU of the convolution over the kept positions of every row, 0 elsewhere; and the new history."""
    batch_size, length, channels = inputs.shape
    width = len(kernel)
    mask = np.ones([batch_size, length], bool) if mask is None else mask.astype(bool)
    history = np.zeros([batch_size, width - 1, channels]) if history is None else history
    outputs, new_history = np.zeros_like(inputs), np.zeros_like(history, dtype=inputs.dtype)
    for row in range(batch_size):
        kept = [*history[row]]
        for t in np.flatnonzero(mask[row]):
            kept.append(inputs[row, t])
            seen = kept[len(kept) - width :]
            y = sum(kernel[i] * x for i, x in enumerate(seen))
            outputs[row, t] = y / (1 + np.exp(-y))
        new_history[row] = np.reshape(kept[len(kept) - width + 1 :], [width - 1, channels])
    return outputs, new_history


@widths
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_convolution_and_its_gradients_equal_the_naive_sum(width, dtype, tolerance):
    rng = np.random.default_rng(width)
    inputs, kernel, d_outputs = (rng.normal(size=shape) for shape in ([2, 8 + width, 3], [width, 3], [2, 9, 3]))
    arguments = tf.constant(inputs, dtype), tf.constant(kernel, dtype)
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        outputs = causal_convolution(*arguments)
    gradients = tape.gradient(outputs, arguments, tf.constant(d_outputs, dtype))
    assert_close(outputs, naive_convolution(inputs, kernel), tolerance)
    directions = [rng.normal(size=x.shape) for x in (inputs, kernel)]
    expected = np.sum(d_outputs * directional_derivative(naive_convolution, (inputs, kernel), directions))
    assert_close(sum(np.sum(g * d) for g, d in zip(gradients, directions)), expected, 10 * tolerance)


def test_convolution_has_second_derivatives():
    inputs, kernel = normal(2, 7, 3), normal(4, 3, seed=1)

    def gradient_norm(convolve, inputs, kernel):
        _, gradients = value_and_gradients(lambda x, w: convolve(x, w) ** 2, (inputs, kernel))
        return tf.add_n([tf.reduce_sum(g**2) for g in gradients])

    def shifted_sum(inputs, kernel):
        return sum(kernel[i] * inputs[:, i : i + 4] for i in range(4))

    _, gradients = value_and_gradients(lambda *x: gradient_norm(causal_convolution, *x), (inputs, kernel))
    _, expected = value_and_gradients(lambda *x: gradient_norm(shifted_sum, *x), (inputs, kernel))
    for actual, exact in zip(gradients, expected):
        assert_close(actual, exact, 1e-5)


def test_H15_convolution_of_masked_pieces_is_the_same_when_compiled():
    layer = ShortConvolution(4)
    layer.build([None, None, 3])

    def function(inputs, history, mask):
        return layer(inputs, mask=mask, history=history)

    mask = tf.constant(padding_masks(2, 5, 4)["interior"], "float32")
    assert_same_when_compiled(function, (normal(2, 9, 3), normal(2, 3, 3, seed=1), mask), layer.trainable_variables)


@widths
@pytest.mark.parametrize("masked", [False, True], ids=["no_mask", "mask"])
@pytest.mark.parametrize("with_history", [False, True], ids=["no_history", "history"])
def test_layer_equals_a_loop_over_positions(width, masked, with_history):
    layer = ShortConvolution(width, dtype="float64")
    inputs = np.random.default_rng(0).normal(size=[3, 9, 2])
    history = np.random.default_rng(1).normal(size=[3, width - 1, 2]) if with_history else None
    mask = np.random.default_rng(2).uniform(size=[3, 9]) < 0.6 if masked else None
    if masked:
        mask[0] = False
    outputs, new_history = layer(inputs, mask=mask, history=history)
    expected, expected_history = naive_short_convolution(inputs, layer.kernel.numpy(), mask, history)
    assert_close(outputs, expected, 1e-13)
    assert_close(new_history, expected_history, 1e-13)


@policies
def test_C4_layer_is_causal(policy):
    layer = ShortConvolution(4, dtype=policy)
    assert_causal(lambda x: layer(x)[0], normal(2, 11, 3), TOLERANCES[policy])


@policies
def test_M2_layer_passes_over_padding(policy):
    layer = ShortConvolution(4, dtype=policy)
    layer.build([None, None, 3])
    assert_ignores_padding(
        lambda x, mask: layer(x, mask=mask)[0], normal(2, 7, 3), TOLERANCES[policy], layer.trainable_variables
    )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_P1_half_precision_is_rounded_once(policy):
    layer = ShortConvolution(4, dtype=policy)
    inputs = tf.cast(normal(2, 50, 30), layer.compute_dtype)
    outputs, _ = layer(inputs)
    kernel = tf.cast(layer.kernel, layer.compute_dtype)
    inputs, kernel, outputs = (np.float64(tf.cast(x, "float32")) for x in (inputs, kernel, outputs))
    exact, _ = naive_short_convolution(inputs, kernel)
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[layer.compute_dtype]
    error = np.abs(outputs - exact)
    assert np.all(error <= 0.501 * unit * np.abs(exact) + 1e-7)


def test_M9_nothing_behind_the_mask_reaches_outputs_or_gradients():
    layer, inputs = ShortConvolution(4), normal(2, 7, 3)
    layer.build([None, None, 3])
    mask = padding_masks(2, 4, 3)["interior"]

    def results(content):
        filled = tf.where(mask[..., None], inputs, content)
        return value_and_gradients(lambda x: layer(x, mask=mask), (filled,), layer.trainable_variables)

    for result, expected in zip(tf.nest.flatten(results(np.nan)), tf.nest.flatten(results(0.0))):
        assert np.array_equal(result, expected)


@widths
def test_D2_pieces_of_padded_rows_equal_the_whole(width):
    layer, inputs = ShortConvolution(width), normal(3, 10, 2)
    mask = np.random.default_rng(0).uniform(size=[3, 10]) < 0.6
    whole, final = layer(inputs, mask=mask)
    for sizes in ([1] * 10, [1, 9], [5, 5], [3, 6, 1]):
        pieces, history = [], None
        for start, size in zip(np.cumsum([0, *sizes]), sizes):
            piece = slice(start, start + size)
            outputs, history = layer(inputs[:, piece], mask=mask[:, piece], history=history)
            pieces.append(outputs)
        assert_close(tf.concat(pieces, axis=1), whole, 1e-6)
        assert_close(history, final, 1e-6)


def test_default_kernel_is_uniform_within_one_over_root_width():
    layer = ShortConvolution(4)
    layer.build([None, None, 10_000])
    kernel = layer.kernel.numpy()
    assert np.abs(kernel).max() <= 0.5
    assert_close(kernel.std(), 0.5 / 3**0.5, 0.02)


def test_S15_config_makes_the_same_layer():
    layer = ShortConvolution(3, kernel_initializer="ones", name="mine", trainable=False, dtype="mixed_float16")
    again = ShortConvolution.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.width, again.name, again.trainable, again.dtype_policy.name) == (3, "mine", False, "mixed_float16")
    again.build([None, None, 2])
    assert np.all(again.kernel.numpy() == 1) and again.kernel.dtype == "float32"
    assert again.compute_dtype == "float16" and again.trainable_weights == []


def test_H13_symbolic_shapes():
    outputs, history = ShortConvolution(4)(keras.Input([None, 6]))
    assert outputs.shape == (None, None, 6) and history.shape == (None, 3, 6)
    assert ShortConvolution(4).compute_output_shape((None, None, 6)) == ((None, None, 6), (None, 3, 6))


@pytest.mark.parametrize("width", [0, -1, 2.5, "4", None, True])
def test_width_must_be_a_positive_integer(width):
    with pytest.raises(ValueError, match=f"width must be a positive integer, received {width!r}"):
        ShortConvolution(width)


@pytest.mark.parametrize("shape", [(2, 8), (1, 9), (9,), (2, 9, 9)], ids=str)
def test_M5_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="mask"):
        ShortConvolution(4)(normal(2, 9, 3), mask=np.ones(shape))


@pytest.mark.parametrize("shape", [(2, 2, 3), (2, 4, 3), (1, 3, 3), (2, 3, 4), (3, 3)], ids=str)
def test_history_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="history"):
        ShortConvolution(4)(normal(2, 9, 3), history=normal(*shape))


@pytest.mark.parametrize("shape", [(9, 3), (2, 9, 3, 1)], ids=str)
def test_A1_inputs_of_another_rank_are_refused(shape):
    with pytest.raises(ValueError, match="inputs must be .batch, length, "):
        ShortConvolution(4)(normal(*shape))


@pytest.mark.parametrize(
    ("inputs_shape", "kernel_shape"),
    [((9, 3), (4, 3)), ((2, 9, 3), (4, 1)), ((2, 9, 3), (4, 2)), ((2, 9, 3), (4,)), ((2, 2, 3), (4, 3))],
    ids=str,
)
def test_shapes_that_the_op_cannot_convolve_are_refused(inputs_shape, kernel_shape):
    with pytest.raises(ValueError, match="kernel|inputs"):
        causal_convolution(normal(*inputs_shape), normal(*kernel_shape))


def test_inputs_and_kernel_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="inputs and kernel must have one dtype, received float32 and bfloat16"):
        causal_convolution(normal(2, 9, 3), tf.cast(normal(4, 3), "bfloat16"))


def test_no_positions_leave_the_history_alone():
    layer = ShortConvolution(4)
    _, history = layer(normal(2, 5, 6), mask=np.ones([2, 5], bool))
    outputs, same = layer(normal(2, 0, 6), mask=np.ones([2, 0], bool), history=history)
    assert outputs.shape == [2, 0, 6] and np.array_equal(same, history)
