"""Attention functions made from options, as in the original JAX code."""

import tensorflow as tf

from favor_keras.ops.attention import kernel_attention
from favor_keras.ops.kernels import GeneralizedKernel, get_kernel
from favor_keras.ops.projections import draw_projection


def make_fast_softmax_attention(
    qkv_dim,
    renormalize_attention=True,
    numerical_stabilizer=1e-6,
    nb_features=256,
    ortho_features=True,
    ortho_scaling=0,
    redraw_features=False,
    unidirectional=False,
    nonnegative_features=True,
    seed=0,
):
    """A function that approximates softmax attention by random features.

    Args:
        qkv_dim: size K of queries and keys.
        renormalize_attention: divide by the sum of the weights; without it the output is
            sum_j K(q_i, k_j) v_j for the estimate K of exp(q . k / sqrt(K)).
        numerical_stabilizer: number added to the positive features; with trigonometric features,
            twice this is added to denominators no larger than this.
        nb_features: number of rows in the random projection.
        ortho_features: orthogonal rows, or independent ones.
        ortho_scaling: 0 for row lengths drawn from chi(K), 1 for sqrt(K).
        redraw_features: the function then takes `draw`, a number for each of which it draws a
            projection of its own (and draws in every call; in a layer, use its `redraw`).
        unidirectional: causal.
        nonnegative_features: positive features; False for trigonometric ones.
        seed: integer that the projections are drawn from.

    Returns:
        `attention_fn(query, key, value, draw=0)` on [B, T, H, K], [B, S, H, K], [B, S, H, D].

    Raises:
        ValueError: for a `draw` other than 0 without `redraw_features`, and for sizes that are not
            positive integers.

    References:
        arXiv:2009.14794

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import make_fast_softmax_attention
    >>> attention_fn = make_fast_softmax_attention(16, nb_features=64, unidirectional=True)
    >>> attention_fn(*tf.random.normal([3, 1, 10, 2, 16])).shape
    TensorShape([1, 10, 2, 16])
    """
    stabilizers = "numerical_stabilizer" if nonnegative_features else "denominator_stabilizer"
    return _make_attention(
        qkv_dim,
        get_kernel("softmax" if nonnegative_features else "softmax_trig"),
        nb_features,
        "orthogonal" if ortho_features else "iid",
        ortho_scaling,
        redraw_features,
        seed,
        normalize=renormalize_attention,
        causal=unidirectional,
        **{stabilizers: numerical_stabilizer},
    )


def make_fast_generalized_attention(
    qkv_dim,
    renormalize_attention=True,
    numerical_stabilizer=0.0,
    nb_features=256,
    features_type="deterministic",
    kernel_fn=tf.nn.relu,
    kernel_epsilon=1e-3,
    redraw_features=False,
    unidirectional=False,
    seed=0,
):
    """A function that attends with the features kernel_fn(W x) + kernel_epsilon.

    Args:
        qkv_dim, renormalize_attention, nb_features, redraw_features, unidirectional, seed: see
            `make_fast_softmax_attention`.
        numerical_stabilizer: twice this is added to denominators no larger than this.
        features_type: "deterministic" for features of the data themselves (W is the identity),
            "ortho" or "iid" for random projections.
        kernel_fn: elementwise function of a tensor, or a name that `GeneralizedKernel` takes.
        kernel_epsilon: number added to the features.

    Returns:
        `attention_fn(query, key, value, draw=0)` on [B, T, H, K], [B, S, H, K], [B, S, H, D].

    Raises:
        ValueError: for an unknown `features_type`, and as `make_fast_softmax_attention`.

    References:
        arXiv:2009.14794

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import make_fast_generalized_attention
    >>> attention_fn = make_fast_generalized_attention(16, features_type="ortho", kernel_fn=tf.abs)
    >>> attention_fn(*tf.random.normal([3, 1, 10, 2, 16])).shape
    TensorShape([1, 10, 2, 16])
    """
    directions = {"deterministic": None, "ortho": "orthogonal", "iid": "iid"}
    if features_type not in directions:
        raise ValueError(f"features_type must be one of {sorted(directions)}, received {features_type!r}")
    return _make_attention(
        qkv_dim,
        GeneralizedKernel(kernel_fn),
        nb_features,
        directions[features_type],
        0,
        redraw_features,
        seed,
        normalize=renormalize_attention,
        causal=unidirectional,
        numerical_stabilizer=kernel_epsilon,
        denominator_stabilizer=numerical_stabilizer,
    )


def _make_attention(qkv_dim, kernel, nb_features, kind, scaling, redraw_features, seed, **options):
    if redraw_features and kind is None:
        raise ValueError("redraw_features needs random features, received features_type='deterministic'")

    def projection(draw):
        return None if kind is None else draw_projection(nb_features, qkv_dim, [seed, draw], kind=kind, scaling=scaling)

    first_projection = projection(0)

    def attention_fn(query, key, value, draw=0):
        if redraw_features:
            matrix = projection(draw)
        elif isinstance(draw, int) and draw == 0:
            matrix = first_projection
        else:
            raise ValueError(f"draw needs redraw_features=True, received draw={draw!r}")
        return kernel_attention(query, key, value, kernel, matrix, **options)[0]

    return attention_fn
