"""Other ways to compute what the library computes, written for comparison only.

Of those for causal linear attention the first two take features and values with the time first, [T, B, H, M] and
[T, B, H, D], because that is the layout in which they are fastest. All compute

    o_i = sum_{j<=i} (q_i . k_j) v_j / sum_{j<=i} q_i . k_j.
"""

import tensorflow as tf


def per_step_attention(query_features, key_features, value):
    """The running sums of arXiv:2009.14794, appendix B.1: one group of graph nodes per token.

    This is the algorithm of the original Performer code, with its gradient: a second loop, backwards in time,
    that takes the sums apart again by subtraction. The graph grows with T.
    """
    numerator = _per_step_numerator(query_features, key_features, value)
    denominator = _per_step_denominator(query_features, key_features)
    return numerator / denominator[..., None]


@tf.custom_gradient
def _per_step_numerator(queries, keys, values):
    steps = range(queries.shape[0])
    state = tf.zeros([*keys.shape[1:], values.shape[-1]], values.dtype)
    outputs = []
    for t in steps:
        state += _outer(keys[t], values[t])
        outputs.append(tf.einsum("bhm,bhmd->bhd", queries[t], state))
    final_state = state

    def gradient(d_outputs):
        state, d_state = final_state, tf.zeros_like(final_state)
        d_queries, d_keys, d_values = [], [], []
        for t in reversed(steps):
            d_queries.append(tf.einsum("bhmd,bhd->bhm", state, d_outputs[t]))
            d_state += _outer(queries[t], d_outputs[t])
            d_keys.append(tf.einsum("bhmd,bhd->bhm", d_state, values[t]))
            d_values.append(tf.einsum("bhmd,bhm->bhd", d_state, keys[t]))
            state -= _outer(keys[t], values[t])
        return tuple(tf.stack(d[::-1]) for d in (d_queries, d_keys, d_values))

    return tf.stack(outputs), gradient


@tf.custom_gradient
def _per_step_denominator(queries, keys):
    steps = range(queries.shape[0])
    state = tf.zeros_like(keys[0])
    outputs = []
    for t in steps:
        state += keys[t]
        outputs.append(tf.reduce_sum(queries[t] * state, axis=-1))
    final_state = state

    def gradient(d_outputs):
        state, d_state = final_state, tf.zeros_like(final_state)
        d_queries, d_keys = [], []
        for t in reversed(steps):
            d_output = d_outputs[t][..., None]
            d_queries.append(state * d_output)
            d_state += queries[t] * d_output
            d_keys.append(d_state)
            state -= keys[t]
        return tuple(tf.stack(d[::-1]) for d in (d_queries, d_keys))

    return tf.stack(outputs), gradient


def _outer(keys, values):
    return tf.einsum("bhm,bhd->bhmd", keys, values)


def cumulative_sum_attention(query_features, key_features, value):
    """The running sums of all positions at once: a tensor [T, B, H, M, D], and TensorFlow's own gradient."""
    states = tf.cumsum(tf.einsum("tbhm,tbhd->tbhmd", key_features, value), axis=0)
    numerator = tf.einsum("tbhm,tbhmd->tbhd", query_features, states)
    denominator = tf.reduce_sum(query_features * tf.cumsum(key_features, axis=0), axis=-1)
    return numerator / denominator[..., None]


def quadratic_attention(query_features, key_features, value):
    """The weights of all pairs, [B, H, T, T], for features [B, T, H, M]."""
    weights = tf.linalg.band_part(tf.einsum("bthm,bshm->bhts", query_features, key_features), -1, 0)
    output = tf.einsum("bhts,bshd->bthd", weights, value)
    return output / tf.transpose(tf.reduce_sum(weights, axis=-1), [0, 2, 1])[..., None]


def softmax_attention(query, key, value):
    """What the softmax kernels approximate: every query sees all keys. [B, T, H, K], [B, S, H, K], [B, S, H, D]."""
    logits = tf.einsum("bthk,bshk->bhts", query, key) / tf.sqrt(tf.cast(tf.shape(key)[-1], query.dtype))
    return tf.einsum("bhts,bshd->bthd", tf.nn.softmax(logits), value)


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
