"""Depthwise convolution along the sequence: every channel by itself, over a few positions.

It is a sum of `width` shifted products. TensorFlow's own depthwise convolution is faster in a graph
but many times slower under XLA on a CPU; automatic differentiation of the sum pads every shift
anew. Its gradient is the same sum with the kernel turned round, which pads once.
"""

import tensorflow as tf

from favor_keras.ops.precision import full_precision


def causal_convolution(inputs, kernel):
    """y_t = sum_{i < W} kernel_i * x_{t + i}, with the W - 1 positions before the first in front.

    Computed in float64 for float64 inputs and in float32 otherwise.

    Args:
        inputs: x, [B, T + W - 1, channels].
        kernel: [W, channels], in the dtype of `inputs`.

    Returns:
        [B, T, channels], in the dtype of `inputs`.

    Raises:
        ValueError: for other shapes or dtypes, or fewer than W - 1 positions.

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import causal_convolution
    >>> x = tf.reshape(tf.range(5.0), [1, 5, 1])
    >>> causal_convolution(x, tf.ones([2, 1]))[0, :, 0].numpy().tolist()
    [1.0, 3.0, 5.0, 7.0]
    """
    inputs = tf.convert_to_tensor(inputs)
    kernel = tf.convert_to_tensor(kernel)
    if kernel.shape.rank != 2 or inputs.shape.rank != 3 or not kernel.shape[1:].is_compatible_with(inputs.shape[2:]):
        raise ValueError(
            "inputs must be [batch, length, channels] and kernel [width, channels], "
            f"received {inputs.shape} and {kernel.shape}"
        )
    if inputs.dtype != kernel.dtype:
        raise ValueError(f"inputs and kernel must have one dtype, received {inputs.dtype.name} and {kernel.dtype.name}")
    width = kernel.shape[0]
    if inputs.shape[1] is not None and inputs.shape[1] < width - 1:
        raise ValueError(f"inputs must have at least width - 1 = {width - 1} positions, received {inputs.shape[1]}")

    def shifts(inputs):
        # Ends counted from the end: XLA knows the shape even where the length depends on a loop.
        return [inputs[:, i : (i - width + 1) or None] for i in range(width)]

    def convolve(inputs, kernel):
        return tf.add_n([kernel[i] * shifted for i, shifted in enumerate(shifts(inputs))])

    @tf.custom_gradient
    def convolution(inputs, kernel):
        def gradient(d_outputs):
            d_inputs = convolve(tf.pad(d_outputs, [[0, 0], [width - 1, width - 1], [0, 0]]), kernel[::-1])
            return d_inputs, tf.stack([tf.reduce_sum(d_outputs * x, axis=[0, 1]) for x in shifts(inputs)])

        return convolve(inputs, kernel), gradient

    dtype = full_precision(inputs)
    outputs = tf.cast(convolution(tf.cast(inputs, dtype), tf.cast(kernel, dtype)), inputs.dtype)
    known_length = None if inputs.shape[1] is None else inputs.shape[1] - width + 1
    outputs.set_shape([inputs.shape[0], known_length, inputs.shape[2]])
    return outputs
