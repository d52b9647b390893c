"""The cache of the original Performer code: keys "k" and values "v", [B, S, H, D].

It grows with every call, or has a fixed length of which `decode_loop_step` positions are written.
"""

import tensorflow as tf

from favor_keras.ops.cache_places import put_in_place


def written_mask(keys, decode_loop_step):
    """[1, S], True where a cache of fixed length is written; None for a growing one."""
    if decode_loop_step is None:
        return None
    return tf.range(tf.shape(keys)[1])[None] < decode_loop_step


def append_keys(cache, key, value, decode_loop_step):
    """The cache with the new keys and values, [B, T, H, D], behind those that it has.

    Raises:
        ValueError: if a cache of fixed length is of another batch size, or has no room for them (seen in eager mode
            only).
    """
    new = {"k": tf.cast(key, cache["k"].dtype), "v": tf.cast(value, cache["v"].dtype)}
    if decode_loop_step is None:
        return {name: tf.concat([cache[name], new[name]], axis=1) for name in new}
    length, count = cache["k"].shape[1], key.shape[1]
    step = tf.get_static_value(decode_loop_step)
    if None not in (length, count, step) and step + count > length:
        raise ValueError(f"decode_loop_step: a cache of length {length} has no room for {count} positions after {step}")
    if not cache["k"].shape[:1].is_compatible_with(key.shape[:1]):
        raise ValueError(f"cache must have the batch size of source, {key.shape[0]}, received {cache['k'].shape[0]}")
    start = tf.fill(tf.shape(key)[:1], tf.reshape(tf.cast(decode_loop_step, tf.int32), []))
    kept = tf.ones(tf.shape(key)[:2], tf.bool)
    return {name: put_in_place(cache[name], new[name], start, kept) for name in new}
