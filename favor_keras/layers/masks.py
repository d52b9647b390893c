"""Key masks [B, S]: 1 or True where a position is there, 0 or False where it is padding."""

import math

import tensorflow as tf


def checked_mask(mask, tensor, name):
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
            f"{name} must have the shape [batch, length] = {tensor.shape[:2]}, received {mask.shape}. Linear "
            "attention can mask whole positions only; a mask over pairs needs exact attention."
        )
    if tf.executing_eagerly() and not bool(
        tf.reduce_all((mask == tf.cast(True, mask.dtype)) | (mask == tf.cast(False, mask.dtype)))
    ):
        raise ValueError(f"{name} must contain only 1 (keep) and 0 (leave out), received other numbers")
    return tf.cast(mask, tf.bool)


def log_scale_of(mask, dtype):
    """0 where the mask keeps a key, -inf where it leaves it out: [B, S] -> [B, S, 1]."""
    return tf.where(mask, tf.constant(0.0, dtype), tf.constant(-math.inf, dtype))[..., None]


def zero_where_masked(x, mask):
    """`x` [B, T, ...] with zeros (also for NaN and infinity) where `mask` [B, T] is False."""
    if mask is None:
        return x
    shape = tf.concat([tf.shape(mask), tf.ones([x.shape.rank - 2], tf.int32)], axis=0)
    return tf.where(tf.reshape(mask, shape), x, tf.zeros_like(x))
