"""The spatial gating unit of gMLP: half of the channels, mixed along the sequence, gates the other half.

    output_i = u_i * (sum_j W_ij v_j + b_i),    W [n, n], b [n],

elementwise in the channels, over all j or, if causal, over j <= i. A sequence shorter than n uses
the leading block of W. With H heads, W [H, n, n] and b [H, n], head h mixes the h-th D / H channels. A
Toeplitz W is given by its 2 n - 1 diagonals w, from the upper right corner to the lower left:
W_ij = w_{i - j + n - 1}.

W is tied to places in the sequence. A key mask gives the places to the positions that it keeps, as
if the others had been cut out, so padding on either side or inside changes nothing. The state of a
sequence in pieces is v at the places so far, and their number:

    gate_inputs [B, n, D],    position [B].

One W serves the whole batch, unless every example has its own places in it (in pieces) or its own
mask over pairs: then each takes the rows of W that it needs, [H, B, T, S].
"""

import tensorflow as tf

from favor_keras.ops.cache_places import check_room, count, kept_first, places_of, put_in_place, sees
from favor_keras.ops.masks import checked_mask
from favor_keras.ops.precision import full_precision

# Smaller blocks save more of the upper triangle, but are slower than what they save.
CAUSAL_BLOCK_SIZE = 256

STATE_NAMES = ("gate_inputs", "position")


def zero_state(batch_size, length, size, dtype="float32"):
    """The state before the first token, with room for `length` tokens of `size` channels."""
    return {"gate_inputs": tf.zeros([batch_size, length, size], dtype), "position": tf.zeros([batch_size], dtype)}


def spatial_gating(
    u,
    v,
    weight,
    bias,
    *,
    causal=False,
    toeplitz=False,
    key_mask=None,
    visibility_mask=None,
    added_gate=None,
    initial_state=None,
):
    """The gate of gMLP, output_i = u_i * (sum_j W_ij v_j + b_i + a_i).

    Computed in the dtype of `v`. B and T may be unknown. A causal gate costs about half of a full one.

    Args:
        u: [B, T, D], what is gated.
        v: [B, T, D], what the gate is made of.
        weight: W, [n, n] or [H, n, n] with n >= T, or w, [2 n - 1] or [H, 2 n - 1], if `toeplitz`.
            H must divide D.
        bias: b, [n] or [H, n].
        causal: whether position i sees the positions j <= i only. The rest of W is not read, and
            its gradient is exactly 0.
        toeplitz: whether `weight` holds the diagonals of W.
        key_mask: [B, T], 1 to keep, 0 for positions that are passed over: the others take places as
            if these had been cut out, and the outputs here are 0.
        visibility_mask: [T, T] or [B, T, T], 1 where position i (the last axis but one) sees j.
        added_gate: a, [B, T, D], or None.
        initial_state: `zero_state`, or the new state of the piece before. Only if causal, and
            without `visibility_mask`.

    Returns:
        [B, T, D]; with `initial_state` also the new state. Outputs past the room of the state are
        NaN inside a graph, where no error can be raised.

    Raises:
        ValueError: for shapes that do not fit together, more than n positions, masks with numbers
            other than 0 and 1, too many positions for the state (these two in eager mode only), and
            a state without `causal` or with a visibility mask.

    References:
        arXiv:2105.08050

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import spatial_gating
    >>> v = tf.reshape(tf.range(1.0, 5.0), [1, 4, 1])
    >>> output = spatial_gating(tf.ones_like(v), v, tf.ones([6, 6]), tf.zeros([6]), causal=True)
    >>> output[0, :, 0].numpy().tolist()
    [1.0, 3.0, 6.0, 10.0]
    """
    u, v, weight, bias = _checked(u, v, weight, bias, toeplitz)
    if added_gate is not None:
        added_gate = tf.convert_to_tensor(added_gate)
        if not added_gate.shape.is_compatible_with(v.shape):
            raise ValueError(f"added_gate must have the shape {v.shape} of v, received {added_gate.shape}")
    key_mask = checked_mask(key_mask, "key_mask", v.shape[:2])
    visibility_mask = checked_visibility_mask(visibility_mask, v)
    if v.shape[1] == 0:
        return u if initial_state is None else (u, initial_state)
    new_state = None
    if initial_state is not None:
        _check_state(initial_state, v, bias, causal, visibility_mask)
        gate, new_state = _gate_by_rows(v, weight, bias, causal, toeplitz, key_mask, visibility_mask, initial_state)
    elif visibility_mask is None or (visibility_mask.shape.rank == 2 and key_mask is None):
        gate = _gate_by_one_matrix(v, weight, bias, causal, toeplitz, key_mask, visibility_mask)
    else:
        empty = zero_state(tf.shape(v)[0], tf.shape(v)[1], v.shape[2], v.dtype)
        gate, _ = _gate_by_rows(v, weight, bias, causal, toeplitz, key_mask, visibility_mask, empty)
    output = u * (gate if added_gate is None else gate + added_gate)
    if key_mask is not None:
        output = tf.where(key_mask[..., None], output, tf.zeros_like(output))
    return output if initial_state is None else (output, new_state)


def _gate_by_one_matrix(v, weight, bias, causal, toeplitz, key_mask, visibility_mask):
    length = _length(v)
    if key_mask is not None:
        start = tf.zeros([tf.shape(v)[0]], tf.int32)
        places = places_of(key_mask, start)
        v = put_in_place(tf.zeros_like(v), v, start, key_mask)
    matrix = _toeplitz_block(weight, length) if toeplitz else weight[:, :length, :length]
    if visibility_mask is not None:
        matrix = tf.where(visibility_mask, matrix, tf.zeros_like(matrix))
    # [H, T, B * D / H] makes one matrix product per head.
    heads = tf.transpose(_split_heads(v, weight.shape[0]), [2, 1, 0, 3])
    columns = tf.reshape(heads, tf.concat([tf.shape(heads)[:2], [-1]], axis=0))
    mixed = lower_triangular_matmul(matrix, columns) if causal else tf.matmul(matrix, columns)
    mixed = tf.transpose(tf.reshape(mixed, tf.shape(heads)), [2, 1, 0, 3])
    gate = tf.reshape(mixed + tf.transpose(bias[:, :length])[..., None], tf.shape(v))
    return gate if key_mask is None else tf.gather(gate, tf.maximum(places, 0), batch_dims=1)


def _gate_by_rows(v, weight, bias, causal, toeplitz, key_mask, visibility_mask, state):
    """The gate of v, which comes after what is in `state`, and the new state."""
    if key_mask is None:
        key_mask = tf.ones(tf.shape(v)[:2], tf.bool)
    start, inputs = tf.cast(state["position"], tf.int32), state["gate_inputs"]
    size = _length(inputs)
    places = places_of(key_mask, start)
    check_room(places, size, "seq_len")
    inputs = put_in_place(inputs, tf.cast(v, inputs.dtype), start, key_mask)
    rows = tf.clip_by_value(places, 0, size - 1)  # padding in front of the first token has no place
    matrix = _toeplitz_rows(weight, rows, size) if toeplitz else tf.gather(weight, rows, axis=1)[..., :size]
    visible = sees(places, size) if causal else True
    if visibility_mask is not None:
        pairs = tf.broadcast_to(visibility_mask, tf.shape(matrix)[1:])
        visible &= tf.gather(pairs, kept_first(key_mask), axis=2, batch_dims=1)
    matrix = tf.where(visible, matrix, tf.zeros_like(matrix))
    mixed = tf.einsum("hbts,bshd->bthd", matrix, _split_heads(tf.cast(inputs, v.dtype), weight.shape[0]))
    gate = tf.reshape(mixed + tf.transpose(tf.gather(bias, rows, axis=1), [1, 2, 0])[..., None], tf.shape(v))
    gate = tf.where((places < size)[..., None], gate, tf.constant(float("nan"), gate.dtype))
    position = state["position"] + tf.cast(count(key_mask), state["position"].dtype)
    position.set_shape(state["position"].shape)
    return gate, {"gate_inputs": inputs, "position": position}


def lower_triangular_matmul(matrix, x):
    """The lower triangle of `matrix` [H, T, T] times x [H, T, N], in blocks of rows up to the diagonal.

    The upper triangle is not read, and its gradient is exactly 0.
    """
    length = _length(x)
    starts = [0] if tf.is_tensor(length) else range(0, length, CAUSAL_BLOCK_SIZE)
    ends = [*starts[1:], length]

    @tf.custom_gradient
    def product(matrix, x):
        def gradient(d_product):
            d_matrix, d_x = [], []
            for start, end in zip(starts, ends):
                block = tf.matmul(d_product[:, start:end], x[:, :end], transpose_b=True)
                block = tf.linalg.band_part(block, -1, start)
                d_matrix.append(tf.pad(block, [[0, 0], [0, 0], [0, length - end]]))
                block = tf.linalg.band_part(matrix[:, start:, start:end], -1, 0)
                d_x.append(tf.matmul(block, d_product[:, start:], transpose_a=True))
            return tf.concat(d_matrix, axis=1), tf.concat(d_x, axis=1)

        blocks = [tf.linalg.band_part(matrix[:, start:end, :end], -1, start) for start, end in zip(starts, ends)]
        return tf.concat([tf.matmul(block, x[:, :end]) for block, end in zip(blocks, ends)], axis=1), gradient

    return product(matrix, x)


def _toeplitz_block(diagonals, length):
    """The leading block [H, T, T] of the Toeplitz matrices with the diagonals [H, 2 n - 1]."""
    middle = diagonals.shape[1] // 2
    # Row 0 read backwards, the rest behind it, and a gap: each row starts one later in its repetition.
    around = diagonals[:, middle - length + 1 : middle + length][:, ::-1]
    repeated = tf.tile(tf.pad(around, [[0, 0], [0, 1]]), [1, length])[:, : length * (2 * length - 1)]
    return tf.reshape(repeated, [-1, length, 2 * length - 1])[:, :, length - 1 :]


def _toeplitz_rows(diagonals, rows, size):
    """The rows [B, T] of the same matrices, up to column `size`: [H, B, T, size]."""
    return tf.gather(diagonals, rows[..., None] - tf.range(size) + diagonals.shape[1] // 2, axis=1)


def softmax_attention(query, key, value, visible):
    """softmax(Q K^T / sqrt(K)) V over the keys that are visible, with one head, in full precision.

    Args:
        query, key, value: [B, T, K], [B, S, K], [B, S, D].
        visible: boolean, broadcastable to [B, T, S]. A query that sees no key gets zeros.

    Returns:
        [B, T, D], in the dtype of `value`.
    """
    dtype = full_precision(value)
    query, key = tf.cast(query, dtype), tf.cast(key, dtype)
    scores = tf.matmul(query, key, transpose_b=True) * float(query.shape[-1]) ** -0.5
    # The smallest number, not -inf, of which the softmax of an empty row would be NaN.
    weights = tf.nn.softmax(tf.where(visible, scores, dtype.min))
    weights = tf.where(visible, weights, tf.zeros_like(weights))
    return tf.cast(tf.matmul(weights, tf.cast(value, dtype)), value.dtype)


def _split_heads(x, num_heads):
    return tf.reshape(x, [*tf.unstack(tf.shape(x)[:2]), num_heads, x.shape[2] // num_heads])


def _length(x):
    return tf.shape(x)[1] if x.shape[1] is None else x.shape[1]


def checked_visibility_mask(mask, x):
    """`checked_mask` of a mask over pairs of the positions of x [B, T, D]: [T, T] or [B, T, T]."""
    pairs = [x.shape[1], x.shape[1]]
    return checked_mask(mask, "visibility_mask", pairs, [x.shape[0], *pairs])


def check_length(name, length, seq_len):
    """Raise a ValueError if a length, if it is known, exceeds the length that a gate is made for."""
    if length is not None and length > seq_len:
        raise ValueError(f"{name} must have at most seq_len={seq_len} positions, received {length}")


def _checked(u, v, weight, bias, toeplitz):
    u, v = tf.convert_to_tensor(u), tf.convert_to_tensor(v)
    weight, bias = tf.cast(weight, v.dtype), tf.cast(bias, v.dtype)
    shapes = f"received u {u.shape}, v {v.shape}, weight {weight.shape}, bias {bias.shape}"
    if u.shape.rank != 3 or v.shape.rank != 3 or not u.shape.is_compatible_with(v.shape) or u.dtype != v.dtype:
        raise ValueError(
            f"u and v must be [batch, length, channels] of one dtype, {shapes}, {u.dtype.name}, {v.dtype.name}"
        )
    if bias.shape.rank == 1:
        weight, bias = weight[None], bias[None]
    num_heads, seq_len = bias.shape
    sizes = [num_heads, 2 * seq_len - 1] if toeplitz else [num_heads, seq_len, seq_len]
    if not weight.shape.is_compatible_with(sizes):
        expected = "[2 n - 1] and [n]" if toeplitz else "[n, n] and [n]"
        raise ValueError(f"weight and bias must be {expected}, or both with heads in front, {shapes}")
    if v.shape[2] % num_heads:
        raise ValueError(f"the channels must be divisible by the heads of weight, {shapes}")
    check_length("u and v", v.shape[1], seq_len)
    return u, v, weight, bias


def _check_state(state, v, bias, causal, visibility_mask):
    if not causal:
        raise ValueError("initial_state needs causal=True, received causal=False")
    if visibility_mask is not None:
        raise ValueError("visibility_mask cannot be combined with initial_state, received both")
    if not isinstance(state, dict) or set(state) != set(STATE_NAMES):
        received = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"initial_state must be a dict of {sorted(STATE_NAMES)}, received {received}")
    shape = state["gate_inputs"].shape
    if not shape.is_compatible_with([v.shape[0], None, v.shape[2]]):
        raise ValueError(f"initial_state['gate_inputs'] must be [batch, n, channels] of v {v.shape}, received {shape}")
    check_length("initial_state", shape[1], bias.shape[1])
