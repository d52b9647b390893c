"""The delta rule: a fast-weights memory that replaces what a key stands for instead of adding to it.

The state S [K, D] is a linear map from keys to values. Every token reads what its key stands for,
and moves that towards its own value by the strength beta_t:

    S_t = S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - S_{t-1}^T k_t),    y_t = S_t^T q_t

The gated delta rule first lets the whole memory fade, by exp(g_t) with g_t <= 0:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)

In a chunk that starts from S, with the decay W_tj = exp(g_{j+1} + ... + g_t) from token j to token
t >= j and w_t = exp(g_1 + ... + g_t) from the start, S_t = w_t S + sum_{j<=t} W_tj k_j u_j^T. Put
into the formula for u_t, it gives one triangular system for all u of the chunk:

    (I + A) U = diag(beta) (V - diag(w) K S),    A_tj = beta_t W_tj (k_t . k_j) for j < t, else 0
    Y = diag(w) Q S + (Q K^T * W) U              (W_tj = 0 for j > t)
    S' = w_C S + K^T diag(W_C) U                 (W_C is the last row of W)

It is solved by substitution. The series (I - A)(I + A^2)(I + A^4)... is exact too, but for equal keys
the powers of A grow like binomial coefficients and float32 loses every digit.
"""

import tensorflow as tf

from favor_keras.ops.chunk_scan import scan_chunks
from favor_keras.ops.precision import full_precision

# Halving it halves the products of [C, C] and doubles the number of chunks: the two about cancel out from 32 to 64.
CHUNK_SIZE = 64


def delta_rule(
    query,
    key,
    value,
    beta,
    *,
    log_decay=None,
    initial_state=None,
    return_state=False,
    chunk_size=None,
):
    """The delta rule, plain or gated, in time and memory that grow linearly with the length.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,    y_t = S_t^T q_t

    g is `log_decay`. Computed in float64 for float64 values and in float32 otherwise; the output has
    the dtype of `value`. B and T may be unknown.

    Keys must not be longer than 1 in the Euclidean norm: `dpfp` features, which are normalised by
    their sum, or keys divided by their norm. With beta_t |k_t|^2 > 2 a write makes its error larger
    and the state grows without bound.

    Args:
        query: q, [B, T, H, K].
        key: k, [B, T, H, K].
        value: v, [B, T, H, D].
        beta: the strength of each write, from 0 to 1, [B, T, H]. A token with 0 leaves the state alone
            (but for its decay): the way to mask tokens.
        log_decay: g, at most 0, [B, T, H]. None is 0, the delta rule without a gate.
        initial_state: the state before the first token, [B, H, K, D]; None is zeros.
        return_state: also return the state after the last token.
        chunk_size: how many tokens are computed at once; None picks a good number. Changes speed
            and memory, not the answer.

    Returns:
        The output [B, T, H, D]; with `return_state` also the state [B, H, K, D], float32 (float64
        for float64 values).

    Raises:
        ValueError: if shapes or dtypes do not fit together, or `chunk_size` is not a positive integer.

    References:
        arXiv:2102.11174 (the delta rule), arXiv:2406.06484 (in chunks), arXiv:2412.06464 (gated)

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops.delta_rule import delta_rule
    >>> from favor_keras.ops.dpfp import dpfp
    >>> x = tf.random.normal([2, 10, 4, 16])
    >>> key, beta = dpfp(x), tf.fill([2, 10, 4], 0.5)
    >>> first, state = delta_rule(
    ...     key[:, :6], key[:, :6], x[:, :6], beta[:, :6], return_state=True)
    >>> rest = delta_rule(key[:, 6:], key[:, 6:], x[:, 6:], beta[:, 6:], initial_state=state)
    >>> tf.concat([first, rest], axis=1).shape
    TensorShape([2, 10, 4, 16])

    A key that is written twice stands for what was written last:

    >>> key = tf.ones([1, 2, 1, 1])
    >>> value = tf.constant([3.0, 5.0])[None, :, None, None]
    >>> tf.squeeze(delta_rule(key, key, value, tf.ones([1, 2, 1]))).numpy().tolist()
    [3.0, 5.0]
    """
    inputs = {"query": query, "key": key, "value": value, "beta": beta}
    if log_decay is not None:
        inputs["log_decay"] = log_decay
    inputs, state = _checked(inputs, initial_state)
    value_dtype, dtype = inputs["value"].dtype, state.dtype

    def step(state, chunk, _):
        output, state = advance(state, **{name: _heads_first(x, dtype) for name, x in chunk.items()})
        return tf.cast(_heads_first(output, dtype), value_dtype), state

    output, state = scan_chunks(
        step,
        state,
        inputs,
        chunk_size=CHUNK_SIZE if chunk_size is None else chunk_size,
        output_dtype=value_dtype,
        nothing_before=initial_state is None,
    )
    return (output, state) if return_state else output


def advance(state, query, key, value, beta, log_decay=None):
    """Read and write one chunk of [B, H, C, ...]: the output [B, H, C, D] and the state after it.

    A state of None is that before the first token.
    """
    beta = beta[..., None]
    # Keys and queries meet the same matrices, and two small products cost more than one large one.
    both = tf.concat([key, query], axis=2)
    overlaps, scores = tf.split(tf.matmul(both, key, transpose_b=True), 2, axis=2)
    remembered, output = (0.0, 0.0) if state is None else tf.split(tf.matmul(both, state), 2, axis=2)
    if log_decay is not None:
        decay, decay_from_start = _decays(log_decay)
        overlaps, scores = decay * overlaps, decay * scores
        remembered, output = decay_from_start * remembered, decay_from_start * output
    on_diagonal = tf.eye(tf.shape(key)[2], dtype=tf.bool)
    system = tf.where(on_diagonal, tf.ones([], value.dtype), beta * overlaps)
    updates = tf.linalg.triangular_solve(system, beta * (value - remembered))  # reads the lower triangle only
    output += tf.matmul(tf.linalg.band_part(scores, -1, 0), updates)
    if log_decay is not None:
        updates *= tf.exp(tf.cumsum(log_decay, axis=-1, exclusive=True, reverse=True))[..., None]
    written = tf.matmul(key, updates, transpose_a=True)
    if state is None:
        return output, written
    if log_decay is not None:
        state *= tf.exp(tf.reduce_sum(log_decay, axis=-1))[..., None, None]
    return output, state + written


def _decays(log_decay):
    """W [B, H, C, C], in its lower triangle, and w [B, H, C, 1]."""
    tokens = tf.range(tf.shape(log_decay)[-1])
    after = tokens[:, None] > tokens
    # One sum per pair of tokens: the difference of two sums from the start would have the error of both.
    between = tf.cumsum(tf.where(after, log_decay[..., None], tf.zeros([], log_decay.dtype)), axis=-2)
    return tf.exp(between), tf.exp(tf.cumsum(log_decay, axis=-1))[..., None]


def _heads_first(x, dtype):
    """[B, C, H, ...] -> [B, H, C, ...] in the given dtype; and back."""
    return tf.cast(tf.transpose(x, [0, 2, 1, *range(3, x.shape.rank)]), dtype)


_SIZES = {
    "query": ("batch", "length", "heads", "key size"),
    "key": ("batch", "length", "heads", "key size"),
    "value": ("batch", "length", "heads", "value size"),
    "beta": ("batch", "length", "heads"),
    "log_decay": ("batch", "length", "heads"),
    "initial_state": ("batch", "heads", "key size", "value size"),
}


def _checked(inputs, initial_state):
    """The inputs as tensors and the state to start from."""
    inputs = {name: tf.convert_to_tensor(x) for name, x in inputs.items()}
    _check_dtypes(inputs)
    dtype = full_precision(inputs["value"])
    if initial_state is not None:
        initial_state = tf.cast(initial_state, dtype)
        sizes = _known_sizes({**inputs, "initial_state": initial_state})
    else:
        sizes = _known_sizes(inputs)
        batch_size, _, num_heads, key_size = tf.unstack(tf.shape(inputs["key"]))
        initial_state = tf.zeros([batch_size, num_heads, key_size, tf.shape(inputs["value"])[3]], dtype)
    initial_state.set_shape([sizes.get(size) for size in _SIZES["initial_state"]])
    return inputs, initial_state


def _check_dtypes(inputs):
    for name, x in inputs.items():
        if not x.dtype.is_floating:
            raise ValueError(f"{name} must be floating-point, received {x.dtype.name}")
    dtypes = [inputs[name].dtype.name for name in ("query", "key", "value")]
    if len(set(dtypes)) > 1:
        raise ValueError(f"query, key and value must have one dtype, received {', '.join(dtypes)}")


def _known_sizes(tensors):
    """The static sizes by their names, on which all tensors must agree."""
    sizes = {}
    for name, tensor in tensors.items():
        expected = ", ".join(f"{size} {sizes[size]}" if size in sizes else size for size in _SIZES[name])
        rank = len(_SIZES[name])
        if tensor.shape.rank != rank or not tensor.shape.is_compatible_with(map(sizes.get, _SIZES[name])):
            raise ValueError(f"{name} must be [{expected}], received the shape {tensor.shape}")
        sizes.update((size, known) for size, known in zip(_SIZES[name], tensor.shape) if known is not None)
    return sizes
