"""The places of positions in a cache of fixed length: which are written, and which are seen.

A cache has n places for what a sequence in pieces needs of its earlier positions. The positions that a mask keeps take
the places in their order, from the number of places taken before, which can be another one for every example.
"""

import tensorflow as tf


def places_of(key_mask, start):
    """The places, from `start` [B] on, of the positions that a mask [B, T] keeps: [B, T]."""
    return start[:, None] + tf.cumsum(tf.cast(key_mask, tf.int32), axis=1) - 1


def sees(places, size):
    """Whether a position at its place [B, T] sees each of `size` places, causally: [B, T, size]."""
    return tf.range(size) <= places[..., None]


def put_in_place(buffer, x, start, key_mask):
    """`buffer` [B, n, ...], from place `start` [B] on with the positions of x [B, T, ...] that are kept."""
    if x.shape[1] == 0 or buffer.shape[1] == 0:
        return buffer
    if x.shape[1] == 1:
        return _put_one_in_place(buffer, x, start, key_mask)
    which = tf.range(tf.shape(buffer)[1]) - start[:, None]
    is_new = (which >= 0) & (which < count(key_mask)[:, None])
    which = tf.clip_by_value(which, 0, tf.shape(x)[1] - 1)
    x = tf.gather(x, tf.gather(kept_first(key_mask), which, batch_dims=1), batch_dims=1)
    is_new = tf.reshape(is_new, tf.concat([tf.shape(is_new), tf.ones([x.shape.rank - 2], tf.int32)], axis=0))
    filled = tf.where(is_new, x, buffer)
    filled.set_shape(buffer.shape)  # as a loop requires that carries it
    return filled


def check_room(places, size, name):
    """Raise a ValueError, in eager mode, if a place lies behind the last of a cache; `name` is what set its size."""
    if tf.executing_eagerly():
        length = int(tf.reduce_max(places)) + 1
        if length > size:
            raise ValueError(f"the cache has room for {name}={size} positions, received {length} in all")


def kept_first(key_mask):
    """The indices of a mask [B, T], those of the kept positions before the others, each in their order."""
    return tf.argsort(tf.cast(~key_mask, tf.int32), axis=1, stable=True)


def count(key_mask):
    """How many positions a mask [B, T] keeps: [B]."""
    return tf.reduce_sum(tf.cast(key_mask, tf.int32), axis=1)


def _put_one_in_place(buffer, x, start, key_mask):
    """`put_in_place` of one position, as in generation: a loop can write it without a copy of the buffer."""
    place = tf.clip_by_value(start, 0, tf.shape(buffer)[1] - 1)
    is_new = tf.reshape(key_mask[:, 0] & (place == start), [-1] + [1] * (x.shape.rank - 2))
    row = tf.where(is_new, x[:, 0], tf.gather(buffer, place, axis=1, batch_dims=1))
    return tf.tensor_scatter_nd_update(buffer, tf.stack([tf.range(tf.shape(place)[0]), place], axis=1), row)
