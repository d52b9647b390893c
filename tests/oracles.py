"""What the tests compare with: float64 NumPy, written from the formulas, nothing shared with favor_keras.

The oracles are as naive as the formulas: all pairs of positions at once, exp() of numbers as they
come. Gradients are derived by hand or are `directional_derivative`s, which also check the former.
"""

import math

import numpy as np


def assert_close(actual, expected, tolerance, smallest_scale=0.0):
    """max |actual - expected| <= tolerance * max |expected|, that maximum being at least `smallest_scale`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    scale = np.max(np.abs(expected), initial=smallest_scale)
    error = np.max(np.abs(actual - expected), initial=0.0)
    assert error <= tolerance * scale, f"error {error:.2e} at scale {scale:.2e}, tolerance {tolerance:.0e}"


def relative_error(actual, expected):
    """The relative Frobenius error."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def directional_derivative(function, arguments, directions):
    """d function(*(arguments + e directions)) / de at 0, exact to rounding, by a step along the imaginary axis."""
    step = 1e-30
    return np.imag(function(*(x + 1j * step * d for x, d in zip(arguments, directions)))) / step


# Linear attention. The denominator is the numerator of values that are all 1, so it is one more
# column of both. exp() of log scales up to 700 fits in float64.


def linear_attention(
    query_features, key_features, value, key_log_scale=None, initial_state=None, *, causal=False, normalize=True
):
    """The output [B, T, H, D] and the final state, a dict of numerator, denominator, log_scale."""
    key_log_scale, before, log_scale_before = _with_defaults(key_features, value, key_log_scale, initial_state)
    factors = _pair_factors(query_features, key_log_scale, causal)
    sums = _sums(query_features, key_features, value, factors, before, log_scale_before)
    output = sums[..., :-1] * _inverse(sums[..., -1:]) if normalize else sums[..., :-1]

    log_scale = _final_log_scale(log_scale_before, key_log_scale)
    kept, added = _state_factors(log_scale, log_scale_before, key_log_scale)
    after = kept[..., None, None] * before
    after = after + np.einsum("bsh,bshm,bshd->bhmd", added, key_features, _with_ones(value))
    return output, {"numerator": after[..., :-1], "denominator": after[..., -1], "log_scale": log_scale}


def linear_attention_gradients(
    query_features,
    key_features,
    value,
    key_log_scale,
    initial_state,
    d_output,
    d_numerator,
    d_denominator,
    *,
    causal=False,
    normalize=True,
):
    """The gradients of the sum of output, final numerator and final denominator times their cotangents.

    Returns a dict over query, key, value, key_log_scale, numerator and denominator (of the initial
    state). The log scales of the two states are constants.
    """
    key_log_scale, before, log_scale_before = _with_defaults(key_features, value, key_log_scale, initial_state)
    factors = _pair_factors(query_features, key_log_scale, causal)
    sums = _sums(query_features, key_features, value, factors, before, log_scale_before)
    if normalize:
        inverse = _inverse(sums[..., -1:])
        d_total = -np.sum(d_output * sums[..., :-1], axis=-1, keepdims=True) * inverse**2
        d_sums = np.concatenate([d_output * inverse, d_total], axis=-1)
    else:
        d_sums = np.concatenate([d_output, np.zeros_like(d_output[..., :1])], axis=-1)

    values = _with_ones(value)
    products = np.einsum("bthm,bshm->bhts", query_features, key_features)
    d_weights = np.einsum("bthd,bshd->bhts", d_sums, values)
    d_products = d_weights * factors
    d_query = np.einsum("bhts,bshm->bthm", d_products, key_features)
    d_query = d_query + np.einsum("bh,bthd,bhmd->bthm", np.exp(log_scale_before), d_sums, before)
    d_key = np.einsum("bhts,bthm->bshm", d_products, query_features)
    d_values = np.einsum("bhts,bthd->bshd", products * factors, d_sums)
    d_log_scale = np.einsum("bhts,bhts->bsh", d_products, products)
    d_before = np.einsum("bh,bthm,bthd->bhmd", np.exp(log_scale_before), query_features, d_sums)

    log_scale = _final_log_scale(log_scale_before, key_log_scale)
    kept, added = _state_factors(log_scale, log_scale_before, key_log_scale)
    d_after = np.concatenate([d_numerator, d_denominator[..., None]], axis=-1)
    d_key += np.einsum("bsh,bhmd,bshd->bshm", added, d_after, values)
    d_values += np.einsum("bsh,bhmd,bshm->bshd", added, d_after, key_features)
    d_log_scale += np.einsum("bsh,bhmd,bshm,bshd->bsh", added, d_after, key_features, values, optimize=True)
    d_before += kept[..., None, None] * d_after
    return {
        "query": d_query,
        "key": d_key,
        "value": d_values[..., :-1],
        "key_log_scale": d_log_scale,
        "numerator": d_before[..., :-1],
        "denominator": d_before[..., -1],
    }


def _with_defaults(key_features, value, key_log_scale, initial_state):
    """Log scales [B, S, H], the initial sums [B, H, M, D + 1] and their log scale [B, H]."""
    batch_size, length, num_heads, num_features = key_features.shape
    if key_log_scale is None:
        key_log_scale = np.zeros([batch_size, length, num_heads])
    if not initial_state:
        before = np.zeros([batch_size, num_heads, num_features, value.shape[-1] + 1])
        return key_log_scale, before, np.full([batch_size, num_heads], -np.inf)
    before = np.concatenate([initial_state["numerator"], initial_state["denominator"][..., None]], axis=-1)
    return key_log_scale, before, initial_state["log_scale"]


def _with_ones(value):
    return np.concatenate([value, np.ones_like(value[..., :1])], axis=-1)


def _pair_factors(query_features, key_log_scale, causal):
    """exp(s_j) where query i sees key j, else 0: [B, H, T, S]."""
    length, source_length = query_features.shape[1], key_log_scale.shape[1]
    visible = np.tri(length, source_length) if causal else np.ones([length, source_length])
    return np.einsum("bsh,ts->bhts", np.exp(key_log_scale), visible)


def _sums(query_features, key_features, value, factors, before, log_scale_before):
    """Numerator and denominator of every query: [B, T, H, D + 1]."""
    products = np.einsum("bthm,bshm->bhts", query_features, key_features)
    sums = np.einsum("bhts,bshd->bthd", products * factors, _with_ones(value))
    return sums + np.einsum("bh,bthm,bhmd->bthd", np.exp(log_scale_before), query_features, before)


def _inverse(x):
    """1 / x, and 0 where x is 0: a query that sees no key gets zeros."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)


def _final_log_scale(log_scale_before, key_log_scale):
    return np.maximum(log_scale_before, np.max(np.real(key_log_scale), axis=1, initial=-np.inf))


def _state_factors(log_scale, log_scale_before, key_log_scale):
    """What the initial sums [B, H] and the keys [B, S, H] are multiplied by in the final state."""
    reference = np.where(np.isinf(log_scale), 0.0, log_scale)
    return np.exp(log_scale_before - reference), np.exp(key_log_scale - reference[:, None])


# Kernels and attention, from the formulas of the FAVOR+ paper and its original code.


def softmax_attention(query, key, value, causal=False, scale=None):
    """Exact attention, softmax(q . k * scale), scale 1 / sqrt(D) by default."""
    scores = np.einsum("bthd,bshd->bhts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = np.where(np.tri(query.shape[1], key.shape[1]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(axis=-1, keepdims=True), value)


def softmax_features(data, projection):
    """exp(W x - |x|^2 / 2) / sqrt(M), x = data / D^(1/4), and no maximum or stabilizer."""
    data = data * data.shape[-1] ** -0.25
    exponent = np.einsum("bthd,md->bthm", data, projection) - np.sum(data**2, axis=-1, keepdims=True) / 2
    return np.exp(exponent) / math.sqrt(len(projection))


def stabilized_softmax_attention(query, key, value, projection, stabilizer, causal):
    """FAVOR+ attention with exp(W x - max_m(W x)) + stabilizer as the features of every query and key.

    A key's features count exp(max_m(W x) - |x|^2 / 2) times.
    """

    def features(data):
        data = data * data.shape[-1] ** -0.25
        projected = np.einsum("bthd,md->bthm", data, projection)
        # The maximum as a differentiable function: its derivative is that of the largest entry.
        largest = np.argmax(np.real(projected), axis=-1)[..., None]
        maximum = np.take_along_axis(projected, largest, axis=-1)
        return np.exp(projected - maximum) + stabilizer, maximum[..., 0] - np.sum(data**2, axis=-1) / 2

    key_features, key_log_scale = features(key)
    return linear_attention(features(query)[0], key_features, value, key_log_scale, causal=causal)[0]


def arc_cosine_kernel(query, key):
    """E[relu(w . q) relu(w . k)] for Gaussian w: the kernel that projected ReLU features estimate."""
    norms = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1)
    angle = np.arccos(np.clip(np.sum(query * key, axis=-1) / norms, -1, 1))
    return norms * (np.sin(angle) + (math.pi - angle) * np.cos(angle)) / (2 * math.pi)


# A recurrence for `scan_chunks`, one token at a time.


def gated_sums(total, memory, x, log_gate, matrix, decay):
    """m_t = m_(t-1) exp(-c g_t),  s_t = s_(t-1) + g_t m_t tanh(x_t A),  output s_t m_t,  g = exp(log_gate).

    total s [B, D], memory m [B], x [B, T, D], log_gate [1, T], matrix A [D, D], decay c []. Returns
    the outputs [B, T, D] and the final total and memory.
    """
    outputs = [np.zeros([len(x), 0, x.shape[-1]])]
    for t in range(x.shape[1]):
        gate = np.exp(log_gate[0, t])
        memory = memory * np.exp(-decay * gate)
        total = total + gate * memory[:, None] * np.tanh(x[:, t] @ matrix)
        outputs.append((total * memory[:, None])[:, None])
    return np.concatenate(outputs, axis=1), total, memory
