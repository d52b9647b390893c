"""The cache of the original Performer code: keys "k" and values "v", [B, S, H, D].

It grows with every call, or has a fixed length of which `decode_loop_step` positions are written.
"""

import tensorflow as tf


def written_mask(keys, decode_loop_step):
    """[1, S], True where a cache of fixed length is written; None for a growing one."""
    if decode_loop_step is None:
        return None
    return tf.range(tf.shape(keys)[1])[None] < decode_loop_step


def append_keys(cache, key, value, decode_loop_step):
    """The cache with the new keys and values, [B, T, H, D], behind those that it has.

    Raises:
        ValueError: if a cache of fixed length has no room for them (seen in eager mode only).
    """
    new = {"k": tf.cast(key, cache["k"].dtype), "v": tf.cast(value, cache["v"].dtype)}
    if decode_loop_step is None:
        return {name: tf.concat([cache[name], new[name]], axis=1) for name in new}
    length, count = cache["k"].shape[1], key.shape[1]
    step = tf.get_static_value(decode_loop_step)
    if None not in (length, count, step) and step + count > length:
        raise ValueError(f"decode_loop_step: a cache of length {length} has no room for {count} positions after {step}")
    return {name: _write(cache[name], new[name], decode_loop_step) for name in new}


def _write(tensor, new, start):
    offset = tf.range(tf.shape(tensor)[1]) - start
    count = tf.shape(new)[1]
    is_new = (offset >= 0) & (offset < count)
    return tf.where(is_new[:, None, None], tf.gather(new, tf.clip_by_value(offset, 0, count - 1), axis=1), tensor)
