"""Linear attention: attention whose weights are products of features, so that its cost is linear.

With features f(q_i) of the queries, features f(k_j) and log scales s_j of the keys,

    o_i = sum_j exp(s_j) (f(q_i) . f(k_j)) v_j / sum_j exp(s_j) (f(q_i) . f(k_j)),

over all j, or over j <= i if causal. The sums over j do not depend on i but through their end, so
they are states that are carried along the sequence:

    numerator[m, d] = sum_j exp(s_j - m) f(k_j)[m] v_j[d]
    denominator[m]  = sum_j exp(s_j - m) f(k_j)[m]
    log_scale m     = max_j s_j

m cancels in the quotient. It is a running maximum so that every exp() has an argument <= 0 and none
can overflow, whatever the scales are, and so that no output depends on a later key. Because it
cancels it carries no gradient. A key with s_j = -inf is not there; a query that sees no key gets 0.

Inside a chunk the causal sums are masked products of [C, C]; what came before the chunk enters by
its state. With c_i the running maximum within the chunk, of which m_i is that or the one before it,

    o = exp(c_i - m_i) (Q K^T * W) V + exp(m_before - m_i) Q numerator,
    W_ij = exp(s_j - c_i) for j <= i, else 0.

W has the shape of the scales: without any it is the same for all sequences and heads.
"""

import math

import tensorflow as tf

from favor_keras.ops.chunk_scan import scan_chunks
from favor_keras.ops.precision import full_precision

# Chunks of 64 are the fastest, with M and D around 64 to 128. A sequence so long that the states between
# the chunks fill the memory is cut into longer ones.
CAUSAL_CHUNK_SIZE = 64
LONG_SEQUENCE, LONG_CAUSAL_CHUNK_SIZE = 32_768, 128
NONCAUSAL_CHUNK_SIZE = 1024

STATE_NAMES = ("numerator", "denominator", "log_scale")


def zero_state(batch_size, num_heads, num_features, value_size, dtype="float32"):
    """The state of linear attention before the first token.

    Returns:
        A dict of `numerator` [B, H, M, D], `denominator` [B, H, M] and `log_scale` [B, H].
    """
    return {
        "numerator": tf.zeros([batch_size, num_heads, num_features, value_size], dtype),
        "denominator": tf.zeros([batch_size, num_heads, num_features], dtype),
        "log_scale": tf.fill([batch_size, num_heads], tf.constant(-math.inf, dtype)),
    }


def absorb(state, key_features, value, key_log_scale):
    """The state after more keys: [B, H, C, M], [B, H, C, D], [B, H, C]. A state of None is that before the first."""
    log_scale = tf.stop_gradient(tf.reduce_max(key_log_scale, axis=-1, keepdims=True))
    key_features *= tf.exp(key_log_scale - _finite(log_scale))[..., None]
    numerator = tf.matmul(key_features, value, transpose_a=True)
    sums = numerator, tf.reduce_sum(key_features, axis=2)[..., None], log_scale[..., None]
    if state is not None:
        sums = _add((state["numerator"], state["denominator"][..., None], _log_scale_of(state)), sums)
    numerator, denominator, log_scale = sums
    log_scale = tf.broadcast_to(log_scale[..., 0, 0], tf.shape(key_features)[:2])
    return {"numerator": numerator, "denominator": denominator[..., 0], "log_scale": log_scale}


def read(state, query_features):
    """What queries [B, H, C, M] find in a state.

    Returns:
        Numerator [B, H, C, D] and denominator [B, H, C, 1], both over exp(m), and m [B, H, 1, 1].
    """
    numerator = tf.matmul(query_features, state["numerator"])
    denominator = tf.matmul(query_features, state["denominator"][..., None])
    return numerator, denominator, _log_scale_of(state)


def read_causal(state, query_features, key_features, value, key_log_scale):
    """Like `read`, of the state (or None) and of the chunk's own keys up to each query; m_i fits [B, H, C, 1]."""
    size = tf.shape(query_features)[2]
    visible = tf.linalg.band_part(tf.ones([size, size], tf.bool), -1, 0)
    visible_scales = tf.where(visible, key_log_scale[..., None, :], -math.inf)
    log_scale = tf.stop_gradient(tf.reduce_max(visible_scales, axis=-1, keepdims=True))
    weights = tf.matmul(query_features, key_features, transpose_b=True)
    weights *= tf.exp(visible_scales - _finite(log_scale))
    sums = tf.matmul(weights, value), tf.reduce_sum(weights, axis=-1, keepdims=True), log_scale
    return sums if state is None else _add(read(state, query_features), sums)


def _add(first, second):
    """Two pairs of numerator and denominator, each over exp(its m), added; all over exp(the greater m)."""
    numerators, denominators, log_scales = zip(first, second)
    log_scale = tf.maximum(*log_scales)
    factors = [tf.exp(m - _finite(log_scale)) for m in log_scales]
    numerator, denominator = (factors[0] * x + factors[1] * y for x, y in (numerators, denominators))
    return numerator, denominator, log_scale


def _log_scale_of(state):
    return tf.stop_gradient(state["log_scale"])[..., None, None]


def attend(
    query,
    key,
    value,
    featurize,
    constants=(),
    *,
    num_features,
    key_log_scale=None,
    causal=False,
    normalize=True,
    initial_state=None,
    chunk_size=None,
    denominator_stabilizer=0.0,
):
    """Linear attention whose features are computed chunk by chunk, and so are never stored whole.

    Args:
        query, key, value: [B, T, H, K], [B, S, H, K], [B, S, H, D].
        featurize: `featurize(data, is_query, constants) -> (features, log_scale)` for data
            [B, H, C, K]: [B, H, C, M] and [B, H, C], or None for 0. It must treat every position
            alone. The log scale of a query cancels and is used only without `normalize`.
        constants: tensors for `featurize`, through which gradients flow.
        num_features: M.
        key_log_scale, causal, normalize, initial_state, chunk_size: see `linear_attention`.
        denominator_stabilizer: twice this is added to denominators (of sums scaled by exp(-m)) no
            larger than this, which features of both signs can give.

    Returns:
        The output [B, T, H, D] and the state after the last key.
    """
    query, key, value = _checked(query, key, value, causal)
    dtype = full_precision(value)
    source = {"key": key, "value": value, "log_scale": _checked_log_scale(key_log_scale, key, dtype)}
    state = _checked_state(initial_state, key, num_features, value, dtype)
    queries = {"query": query}
    pads = {"query": 0.0, "key": 0.0, "value": 0.0, "log_scale": -math.inf}

    def query_features(chunk, constants):
        return featurize(_heads_first(chunk["query"], dtype), True, constants)

    def key_features(chunk, constants):
        features, log_scale = featurize(_heads_first(chunk["key"], dtype), False, constants)
        given = tf.transpose(chunk["log_scale"], [0, 2, 1])
        return features, _heads_first(chunk["value"], dtype), given if log_scale is None else log_scale + given

    def finish(sums, query_log_scale):
        numerator, denominator, log_scale = sums
        if normalize:
            if denominator_stabilizer:
                small = tf.abs(denominator) <= denominator_stabilizer
                denominator += 2 * denominator_stabilizer * tf.cast(small, dtype)
            output = tf.math.divide_no_nan(numerator, denominator)
        else:
            output = numerator * tf.exp(
                log_scale if query_log_scale is None else log_scale + query_log_scale[..., None]
            )
        return tf.cast(tf.transpose(output, [0, 2, 1, 3]), value.dtype)

    def causal_step(state, chunk, constants):
        queries, query_log_scale = query_features(chunk, constants)
        keys = key_features(chunk, constants)
        return finish(read_causal(state, queries, *keys), query_log_scale), absorb(state, *keys)

    def absorb_step(state, chunk, constants):
        return None, absorb(state, *key_features(chunk, constants))

    def read_step(state, chunk, constants):
        source_state, constants = constants
        queries, query_log_scale = query_features(chunk, constants)
        return finish(read(source_state, queries), query_log_scale), state

    def scan(step, state, inputs, constants, output_dtype, default_chunk_size):
        return scan_chunks(
            step,
            state,
            inputs,
            constants,
            chunk_size=default_chunk_size if chunk_size is None else chunk_size,
            output_dtype=output_dtype,
            pad_values={name: pads[name] for name in inputs},
            nothing_before=initial_state is None,
        )

    if causal:
        inputs = {**queries, **source}
        is_long = query.shape[1] is not None and query.shape[1] >= LONG_SEQUENCE
        default_chunk_size = LONG_CAUSAL_CHUNK_SIZE if is_long else CAUSAL_CHUNK_SIZE
        return scan(causal_step, state, inputs, constants, value.dtype, default_chunk_size)
    _, state = scan(absorb_step, state, source, constants, None, NONCAUSAL_CHUNK_SIZE)
    output, _ = scan(read_step, (), queries, (state, constants), value.dtype, NONCAUSAL_CHUNK_SIZE)
    return output, state


def linear_attention(
    query_features,
    key_features,
    value,
    *,
    key_log_scale=None,
    causal=False,
    normalize=True,
    initial_state=None,
    return_state=False,
    chunk_size=None,
):
    """Attention by features, in time and memory that grow linearly with the length.

        o_i = sum_j exp(s_j) (f(q_i) . f(k_j)) v_j / sum_j exp(s_j) (f(q_i) . f(k_j))

    over all keys, or over j <= i if causal. Computed in float64 for float64 values and in float32
    otherwise; the output has the dtype of `value`. B, T and S may be unknown.

    Args:
        query_features: f(q), [B, T, H, M].
        key_features: f(k), [B, S, H, M].
        value: v, [B, S, H, D].
        key_log_scale: s, broadcastable to [B, S, H]; None is 0. A key with -inf is left out of both
            sums: the way to mask keys. A query that sees no key gets zeros.
        causal: whether query i sees the keys j <= i only. Needs S = T.
        normalize: False leaves the denominator out: o_i is the first sum.
        initial_state: a state as returned, of keys that come before the first (all queries see
            them), or None.
        return_state: also return the state after the last key.
        chunk_size: how many tokens are computed at once; None picks a good number. Changes speed
            and memory, not the answer.

    Returns:
        The output [B, T, H, D]; with `return_state` also a dict: `numerator` [B, H, M, D] and
        `denominator` [B, H, M], the sums over the keys of exp(s_j - m) f(k_j) v_j and
        exp(s_j - m) f(k_j), and `log_scale` [B, H], m = max_j s_j, through which no gradient flows.

    Raises:
        ValueError: if shapes do not fit together, or `causal` with S other than T.

    References:
        arXiv:2006.16236, arXiv:2009.14794

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import linear_attention
    >>> features = tf.random.uniform([2, 10, 4, 16])
    >>> value = tf.random.normal([2, 10, 4, 8])
    >>> first, state = linear_attention(
    ...     features[:, :6], features[:, :6], value[:, :6], causal=True, return_state=True)
    >>> rest = linear_attention(
    ...     features[:, 6:], features[:, 6:], value[:, 6:], causal=True, initial_state=state)
    >>> tf.concat([first, rest], axis=1).shape
    TensorShape([2, 10, 4, 8])
    """
    output, state = attend(
        query_features,
        key_features,
        value,
        lambda features, is_query, constants: (features, None),
        num_features=key_features.shape[-1],
        key_log_scale=key_log_scale,
        causal=causal,
        normalize=normalize,
        initial_state=initial_state,
        chunk_size=chunk_size,
    )
    return (output, state) if return_state else output


def _heads_first(x, dtype):
    """[B, C, H, ...] -> [B, H, C, ...], in the dtype of the sums."""
    return tf.cast(tf.transpose(x, [0, 2, 1, 3]), dtype)


def _finite(log_scale):
    """The maximum to subtract: 0 where no key is visible and the maximum is -inf."""
    return tf.where(tf.math.is_inf(log_scale), tf.zeros_like(log_scale), log_scale)


def _checked(query, key, value, causal):
    query, key, value = map(tf.convert_to_tensor, (query, key, value))
    shapes = f"received query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.shape.rank == key.shape.rank == value.shape.rank == 4:
        raise ValueError(f"query, key and value must be [batch, length, heads, size], {shapes}")
    if not query.dtype == key.dtype == value.dtype or not value.dtype.is_floating:
        dtypes = f"{query.dtype.name}, {key.dtype.name} and {value.dtype.name}"
        raise ValueError(f"query, key and value must have one floating-point dtype, received {dtypes}")
    if not key.shape[:3].is_compatible_with(value.shape[:3]):
        raise ValueError(f"key and value must agree in batch, length and heads, {shapes}")
    query_sizes = tf.TensorShape([query.shape[0], query.shape[2], query.shape[3]])
    if not query_sizes.is_compatible_with([key.shape[0], key.shape[2], key.shape[3]]):
        raise ValueError(f"query and key must agree in batch, heads and size, {shapes}")
    if causal and not tf.TensorShape(query.shape[1]).is_compatible_with(tf.TensorShape(key.shape[1])):
        raise ValueError(f"causal attention needs one length for query and key, {shapes}")
    return query, key, value


def _checked_log_scale(key_log_scale, key, dtype):
    if key_log_scale is None:
        return tf.zeros([1, tf.shape(key)[1], 1], dtype)
    key_log_scale = tf.cast(key_log_scale, dtype)
    sizes = [(1, None, known) for known in key.shape[:3]]
    if key_log_scale.shape.rank != 3 or not all(
        given in allowed or known is None for given, allowed, known in zip(key_log_scale.shape, sizes, key.shape)
    ):
        raise ValueError(
            f"key_log_scale must be [batch, length, heads] of the keys {key.shape}, with 1 to broadcast, "
            f"received {key_log_scale.shape}"
        )
    if key_log_scale.shape[1] == 1:
        key_log_scale = tf.repeat(key_log_scale, tf.shape(key)[1], axis=1)
    return key_log_scale


def _checked_state(state, key, num_features, value, dtype):
    batch_size, _, num_heads, _ = tf.unstack(tf.shape(key))
    expected = zero_state(batch_size, num_heads, num_features, tf.shape(value)[3], dtype)
    sizes = [key.shape[0], key.shape[2], num_features, value.shape[3]]
    for name, tensor in expected.items():
        tensor.set_shape(sizes[: tensor.shape.rank])
    if state is None:
        return expected
    if not isinstance(state, dict) or set(state) != set(expected):
        received = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"initial_state must be a dict of {sorted(expected)}, received {received}")
    state = {name: tf.cast(tensor, dtype) for name, tensor in state.items()}
    for name, tensor in state.items():
        if not tensor.shape.is_compatible_with(expected[name].shape):
            raise ValueError(
                f"initial_state[{name!r}] must have the shape {expected[name].shape}, received {tensor.shape}"
            )
        tensor.set_shape(expected[name].shape)
    return state
