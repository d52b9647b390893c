"""How well random features approximate exact softmax attention, for queries and keys at hand."""

import tensorflow as tf

from favor_keras.ops.attention import kernel_attention
from favor_keras.ops.kernels import get_kernel
from favor_keras.ops.projections import draw_projection


def approximation_error(
    query,
    key,
    value,
    num_features=(16, 64, 256, 1024),
    kernel="softmax",
    projection_matrix_type="orthogonal",
    projection_scaling=0,
    causal=False,
    num_draws=5,
    seed=0,
):
    """The relative errors |approximate - exact| / |exact| (Frobenius norms) against softmax attention.

    Args:
        query, key, value: [B, T, H, K], [B, S, H, K], [B, S, H, D]. The exact attention divides
            q . k by sqrt(K). All T x S weights are computed, so keep T and S small.
        num_features: numbers of rows of the projection to try.
        kernel: "softmax", "softmax_hyperbolic" or "softmax_trig".
        projection_matrix_type: "orthogonal", "givens" or "iid".
        projection_scaling: 0 for row lengths drawn from chi(K), 1 for sqrt(K).
        causal: whether a query sees only the keys up to it.
        num_draws: number of projections to average the errors over.
        seed: integer that they are drawn from.

    Returns:
        A list of one dict per number of features: `num_features`, `matrix_error` (of the attention
        weights) and `output_error`, Python numbers.

    Raises:
        ValueError: for a kernel that does not estimate softmax attention.

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.diagnostics import approximation_error
    >>> query, key, value = 0.5 * tf.random.stateless_normal([3, 1, 32, 2, 16], seed=[0, 1])
    >>> few, many = approximation_error(query, key, value, num_features=(16, 1024))
    >>> many["output_error"] < 0.3 < few["matrix_error"]
    True
    """
    if not str(kernel).startswith("softmax"):
        raise ValueError(f"kernel must be one that estimates softmax attention, received {kernel!r}")
    query, key, value = map(tf.convert_to_tensor, (query, key, value))
    exact_weights = _softmax_weights(query, key, causal)
    exact_output = tf.einsum("bhts,bshd->bthd", exact_weights, value)
    # Attention to the identity returns the weights, which have no other form of their own.
    identity = tf.eye(tf.shape(key)[1], dtype=value.dtype)[None, :, None]
    identity = tf.broadcast_to(identity, tf.concat([tf.shape(key)[:3], tf.shape(key)[1:2]], axis=0))
    both = tf.concat([identity, value], axis=-1)

    def errors(rows, draw):
        seeds = [seed, draw]
        matrix = draw_projection(rows, key.shape[-1], seeds, kind=projection_matrix_type, scaling=projection_scaling)
        result, _ = kernel_attention(query, key, both, get_kernel(kernel), matrix, causal=causal)
        weights, output = tf.split(result, [key.shape[1], value.shape[-1]], axis=-1)
        return (
            _relative_error(tf.transpose(weights, [0, 2, 1, 3]), exact_weights),
            _relative_error(output, exact_output),
        )

    rows_of_results = []
    for rows in num_features:
        draws = [errors(rows, draw) for draw in range(num_draws)]
        matrix_error, output_error = (sum(each) / num_draws for each in zip(*draws))
        rows_of_results.append({"num_features": rows, "matrix_error": matrix_error, "output_error": output_error})
    return rows_of_results


def layer_approximation_error(layer, query, source=None, **options):
    """`approximation_error` for the queries, keys and values that a layer makes of its inputs.

    Args:
        layer: a built `FavorAttention`, `SelfAttention` or `keras.layers.MultiHeadAttention`. (The
            short convolution of a layer that has one is left out.)
        query: [B, T, features].
        source: [B, S, features]; None is `query`.
        **options: arguments of `approximation_error`.

    Returns:
        See `approximation_error`.

    Example:

    >>> import keras
    >>> from favor_keras import SelfAttention
    >>> from favor_keras.diagnostics import layer_approximation_error
    >>> layer = SelfAttention(16, num_heads=2, kernel_transformation="softmax")
    >>> inputs = keras.random.normal([1, 12, 16], seed=0)
    >>> _ = layer(inputs)
    >>> [row["num_features"] for row in layer_approximation_error(layer, inputs, num_features=(32, 512))]
    [32, 512]
    """
    source = query if source is None else source
    heads = layer.query_dense(query), layer.key_dense(source), layer.value_dense(source)
    return approximation_error(*(tf.cast(x, "float32") for x in heads), **options)


def _softmax_weights(query, key, causal):
    logits = tf.einsum("bthk,bshk->bhts", query, key) / tf.sqrt(tf.cast(tf.shape(key)[-1], query.dtype))
    if causal:
        visible = tf.linalg.band_part(tf.ones(tf.shape(logits)[-2:], tf.bool), -1, 0)
        logits = tf.where(visible, logits, -float("inf"))
    return tf.nn.softmax(logits)


def _relative_error(approximate, exact):
    return float(tf.norm(approximate - exact) / tf.norm(exact))
