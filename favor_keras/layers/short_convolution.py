import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_positive
from favor_keras.layers.masks import checked_key_mask, zero_where_masked
from favor_keras.ops.causal_convolution import causal_convolution
from favor_keras.ops.precision import full_precision


@keras.saving.register_keras_serializable(package="favor_keras")
class ShortConvolution(keras.layers.Layer):
    """A causal depthwise convolution along the sequence, then SiLU.

        y_t = silu(sum_{i < width} kernel_i * x_{t - width + 1 + i}),

    each channel by itself, with zeros before the first position. A mixer of long range whose
    queries, keys and values go through it first sees every position together with its neighbours.

    Masked positions are passed over, not read as zeros: each position sees the last `width - 1`
    that are there, so padding on either side or inside changes nothing.

    Args:
        width: number of positions that an output sees, at least 1.
        kernel_initializer: default uniform within +-1 / sqrt(width).
        **kwargs: name, dtype and trainable.

    Call arguments:
        inputs: [B, T, channels].
        mask: boolean [B, T] or None.
        history: the `width - 1` inputs before the first, [B, width - 1, channels]; None is zeros.

    Returns:
        `(outputs, history)`: [B, T, channels], and the last `width - 1` inputs for the next call.

    Raises:
        ValueError: if `width` is not a positive integer, or a shape is not as described.

    Example:

    >>> import keras
    >>> from favor_keras.layers import ShortConvolution
    >>> outputs, history = ShortConvolution(4)(keras.ops.ones([2, 10, 8]))
    >>> outputs.shape, history.shape
    (TensorShape([2, 10, 8]), TensorShape([2, 3, 8]))
    """

    def __init__(self, width, kernel_initializer=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        check_positive("width", width)
        self.width = width
        if kernel_initializer is None:
            kernel_initializer = keras.initializers.RandomUniform(-(width**-0.5), width**-0.5)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.supports_masking = True

    def build(self, inputs_shape):
        if len(inputs_shape) != 3:
            raise ValueError(f"inputs must be [batch, length, channels], received shape {tuple(inputs_shape)}")
        self.kernel = self.add_weight(
            name="kernel", shape=(self.width, inputs_shape[-1]), initializer=self.kernel_initializer
        )

    def call(self, inputs, mask=None, history=None):
        inputs = tf.cast(inputs, self.compute_dtype)
        mask = checked_key_mask(mask, inputs, "mask")
        inputs = zero_where_masked(inputs, mask)
        if history is None:
            history = tf.zeros([tf.shape(inputs)[0], self.width - 1, inputs.shape[-1]], inputs.dtype)
        history = tf.cast(history, inputs.dtype)
        expected = tf.TensorShape([inputs.shape[0], self.width - 1, inputs.shape[2]])
        if not history.shape.is_compatible_with(expected):
            raise ValueError(f"history must have the shape {expected}, received {history.shape}")
        if mask is None:
            inputs = tf.concat([history, inputs], axis=1)
            history = inputs[:, -(self.width - 1) :] if self.width > 1 else inputs[:, :0]
            history.set_shape(expected)
            return self._convolve(inputs), history
        kept_first = tf.argsort(tf.cast(~mask, tf.int32), axis=1, stable=True)
        inputs = tf.concat([history, tf.gather(inputs, kept_first, batch_dims=1)], axis=1)
        place = tf.cumsum(tf.cast(mask, tf.int32), axis=1)
        outputs = tf.gather(self._convolve(inputs), tf.maximum(place - 1, 0), batch_dims=1)
        last = tf.reduce_sum(tf.cast(mask, tf.int32), axis=1, keepdims=True) + tf.range(self.width - 1)
        return zero_where_masked(outputs, mask), tf.gather(inputs, last, batch_dims=1)

    def _convolve(self, inputs):
        dtype = full_precision(inputs)
        outputs = causal_convolution(tf.cast(inputs, dtype), tf.cast(self.kernel, dtype))
        return tf.cast(tf.nn.silu(outputs), inputs.dtype)

    def compute_output_shape(self, inputs_shape, mask_shape=None, history_shape=None):
        return tuple(inputs_shape), (inputs_shape[0], self.width - 1, inputs_shape[-1])

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
