"""The delta rule one token at a time: what `delta_rule` is measured against."""

import tensorflow as tf


def scan_delta_rule(query, key, value, beta):
    """The delta rule from the zero state, by `tf.scan` over the tokens.

        S_t = S_{t-1} + k_t (beta_t (v_t - S_{t-1}^T k_t))^T,    y_t = S_t^T q_t

    Args:
        query, key: [B, T, H, K].
        value: [B, T, H, D], of the dtype of `query` and `key`.
        beta: [B, T, H], of the same dtype.

    Returns:
        The output [B, T, H, D].
    """

    def step(carried, token):
        state, _ = carried
        query, key, value, beta = token
        error = value - tf.linalg.matvec(state, key, transpose_a=True)
        state += key[..., :, None] * (beta[..., None] * error)[..., None, :]
        return state, tf.linalg.matvec(state, query, transpose_a=True)

    batch_size, _, num_heads, key_size = tf.unstack(tf.shape(key))
    state = tf.zeros([batch_size, num_heads, key_size, tf.shape(value)[3]], value.dtype)
    tokens = [tf.transpose(x, [1, 0, *range(2, x.shape.rank)]) for x in (query, key, value, beta)]
    _, outputs = tf.scan(step, tokens, initializer=(state, tf.zeros_like(value[:, 0])))
    return tf.transpose(outputs, [1, 0, 2, 3])
