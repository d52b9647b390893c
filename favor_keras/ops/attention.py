"""FAVOR+ attention: `linear_attention` on the features of a kernel; and the original prefix sums."""

import keras
import tensorflow as tf

from favor_keras.ops.kernels import KernelTransformation, get_kernel
from favor_keras.ops.linear_attention import attend, linear_attention
from favor_keras.ops.precision import full_precision


def favor_attention(query, key, value, kernel_transformation, causal, projection_matrix=None):
    """FAVOR+ attention, in time and memory that grow linearly with the length.

        o_i = sum_j (f(q_i) . f(k_j)) v_j / sum_j (f(q_i) . f(k_j)),

    over all keys, or over j <= i if causal. Exact softmax attention divides q . k by sqrt(D); the
    softmax kernel does it itself. Computed in float64 for float64 values and in float32 otherwise.

    Args:
        query: [B, T, H, K].
        key: [B, S, H, K].
        value: [B, S, H, D].
        kernel_transformation: a kernel's name ("softmax", "relu"), a `KernelTransformation`, or a
            function `(data, is_query, projection_matrix) -> features`. The features of a kernel
            object are computed chunk by chunk and never stored whole; a function may look across
            positions, so it is called once for the whole sequence (and if it looks ahead, so does
            the attention).
        causal: whether query i sees the keys j <= i only. Needs S = T.
        projection_matrix: W [M, K], or None. The softmax kernel needs one.

    Returns:
        [B, T, H, D], in the dtype of `value`. A query that sees no key gets zeros.

    Raises:
        ValueError: for shapes that do not fit together, `causal` with S other than T, an unknown
            kernel, or the softmax kernel without a projection matrix.

    References:
        arXiv:2009.14794

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras import create_projection_matrix, favor_attention
    >>> query, key, value = 0.5 * tf.random.stateless_normal([3, 1, 32, 2, 16], seed=[0, 1])
    >>> projection = create_projection_matrix(1024, 16)
    >>> output = favor_attention(query, key, value, "softmax", False, projection)
    >>> weights = tf.nn.softmax(tf.einsum("bthd,bshd->bhts", query, key) / 16 ** 0.5)
    >>> exact = tf.einsum("bhts,bshd->bthd", weights, value)
    >>> bool(tf.norm(output - exact) / tf.norm(exact) < 0.3)
    True
    """
    return kernel_attention(query, key, value, kernel_transformation, projection_matrix, causal=causal)[0]


def kernel_attention(
    query, key, value, kernel_transformation, projection_matrix=None, *, numerical_stabilizer=None, **options
):
    """`favor_attention` with a state and the options of `linear_attention`; returns output and state.

    `numerical_stabilizer` None is the kernel's own.
    """
    kernel = get_kernel(kernel_transformation)
    if any(isinstance(x, keras.KerasTensor) for x in (query, key, value)):
        raise ValueError(
            "query, key and value must be tensors, received a symbolic KerasTensor: in a Functional model use the "
            "layer FavorAttention"
        )
    query, key, value = map(tf.convert_to_tensor, (query, key, value))
    if not isinstance(kernel, KernelTransformation):
        stabilizer = {} if numerical_stabilizer is None else {"numerical_stabilizer": numerical_stabilizer}
        features = (
            kernel(x, is_query, projection_matrix, **stabilizer) for x, is_query in ((query, True), (key, False))
        )
        return linear_attention(*features, value, return_state=True, **options)

    constants = () if projection_matrix is None else (tf.cast(projection_matrix, full_precision(value)),)

    def featurize(data, is_query, constants):
        return kernel.scaled_features(data, is_query, *(constants or (None,)), numerical_stabilizer)

    num_features = kernel.num_features(key.shape[-1], *(matrix.shape[0] for matrix in constants))
    return attend(
        query,
        key,
        value,
        featurize,
        constants,
        num_features=num_features,
        **{"denominator_stabilizer": kernel.denominator_stabilizer, **options},
    )


def causal_numerator(qs, ks, vs):
    """The causal prefix sums sum_{j<=i} (q_i . k_j) v_j, time first as in the original code.

    Args:
        qs: query features [T, B, H, M].
        ks: key features [T, B, H, M].
        vs: values [T, B, H, D].

    Returns:
        [T, B, H, D].

    References:
        arXiv:2009.14794, appendix B.1

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras import causal_numerator
    >>> ones = tf.ones([3, 1, 1, 2])
    >>> causal_numerator(ones, ones, ones)[:, 0, 0, 0].numpy().tolist()
    [2.0, 4.0, 6.0]
    """
    return _unnormalized(qs, ks, vs, causal=True)


def causal_denominator(qs, ks):
    """The causal prefix sums sum_{j<=i} q_i . k_j: [T, B, H, M], [T, B, H, M] -> [T, B, H].

    References:
        arXiv:2009.14794, appendix B.1

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras import causal_denominator
    >>> ones = tf.ones([3, 1, 1, 2])
    >>> causal_denominator(ones, ones)[:, 0, 0].numpy().tolist()
    [2.0, 4.0, 6.0]
    """
    return _unnormalized(qs, ks, tf.ones_like(ks[..., :1]), causal=True)[..., 0]


def noncausal_numerator(qs, ks, vs):
    """The sums sum_j (q_i . k_j) v_j: [T, B, H, M], [S, B, H, M], [S, B, H, D] -> [T, B, H, D].

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras import noncausal_numerator
    >>> ones = tf.ones([3, 1, 1, 2])
    >>> noncausal_numerator(ones, ones, ones)[:, 0, 0, 0].numpy().tolist()
    [6.0, 6.0, 6.0]
    """
    return _unnormalized(qs, ks, vs, causal=False)


def noncausal_denominator(qs, ks):
    """The sums sum_j q_i . k_j: [T, B, H, M], [S, B, H, M] -> [T, B, H].

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras import noncausal_denominator
    >>> ones = tf.ones([3, 1, 1, 2])
    >>> noncausal_denominator(ones, ones)[:, 0, 0].numpy().tolist()
    [6.0, 6.0, 6.0]
    """
    return _unnormalized(qs, ks, tf.ones_like(ks[..., :1]), causal=False)[..., 0]


def _unnormalized(qs, ks, vs, causal):
    batch_first = (tf.transpose(x, [1, 0, 2, 3]) for x in (qs, ks, vs))
    sums = linear_attention(*batch_first, causal=causal, normalize=False)
    return tf.transpose(sums, [1, 0, 2, 3])
