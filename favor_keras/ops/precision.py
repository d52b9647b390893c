"""The precision in which the library computes: float32 for half-precision data, else the data's own."""

import tensorflow as tf


def full_precision(tensor):
    """The dtype in which to compute on `tensor`: float64 for float64, float32 for all others."""
    return tf.float64 if tensor.dtype == tf.float64 else tf.float32
