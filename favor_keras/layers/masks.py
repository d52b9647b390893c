"""Key masks [B, S]: 1 or True where a position is there, 0 or False where it is padding."""

import math

import numpy as np
import tensorflow as tf

from favor_keras.ops.masks import checked_mask


def checked_key_mask(mask, tensor, name):
    """`mask` as a boolean tensor [B, S] that fits `tensor` [B, S, ...]; None stays None.

    Raises:
        ValueError: for another rank, another length, or numbers other than 0 and 1 (which can be
            seen in eager mode only).
    """
    if mask is None:
        return None
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank != 2 or not mask.shape.is_compatible_with(tensor.shape[:2]):
        raise ValueError(
            f"{name} must have the shape [batch, length] = {tensor.shape[:2]}, one number per position (a mask over "
            f"pairs of positions needs exact attention), received {mask.shape}"
        )
    return checked_mask(mask, name, tensor.shape[:2])


def key_bias(bias, source, causal, dtype):
    """A bias of the logarithms of attention weights as a log scale of the keys: [B, S, H].

    Args:
        bias: [B, H, 1, S] (B and H may be 1), or a constant [B, 1 or H, T, S] that is the same for
            all T, or that is so but for numbers below -1e8 where s > t, if `causal`.
        source: [B, S, ...].

    Raises:
        ValueError: for any other bias: linear attention cannot add one that depends on both.
    """
    bias = tf.cast(bias, dtype)
    if bias.shape.rank != 4 or not tf.TensorShape(bias.shape[3]).is_compatible_with(tf.TensorShape(source.shape[1])):
        raise ValueError(
            f"bias must be [batch, heads, 1, source length] for a source {source.shape}, received {bias.shape}"
        )
    if bias.shape[2] != 1:
        bias = tf.constant(_row_of_constant(bias, causal), dtype)
    return tf.transpose(bias[:, :, 0], [0, 2, 1])


def _row_of_constant(bias, causal):
    """The one row that all rows of a constant bias [B, H, T, S] are, where they are visible."""
    values = tf.get_static_value(bias)
    refusal = (
        "bias must depend on the source position alone, [batch, heads, 1, source length]: linear attention cannot "
        f"add one that depends on the query too. Received {bias.shape}"
    )
    if values is None:
        raise ValueError(f"{refusal}, not a constant, so that its rows cannot be compared")
    last = values[:, :, -1:]
    same = values == last
    if causal and values.shape[2] == values.shape[3]:
        hidden = np.triu(np.ones(values.shape[2:], bool), 1)
        same |= hidden & (values < -1e8)
    if not same.all():
        raise ValueError(f"{refusal}, whose rows differ")
    return last


def log_scale_of(mask, dtype):
    """0 where the mask keeps a key, -inf where it leaves it out: [B, S] -> [B, S, 1]."""
    return tf.where(mask, tf.constant(0.0, dtype), tf.constant(-math.inf, dtype))[..., None]


def zero_where_masked(x, mask):
    """`x` [B, T, ...] with zeros (also for NaN and infinity) where `mask` [B, T] is False."""
    if mask is None:
        return x
    shape = tf.concat([tf.shape(mask), tf.ones([x.shape.rank - 2], tf.int32)], axis=0)
    return tf.where(tf.reshape(mask, shape), x, tf.zeros_like(x))
