"""DPFP, the deterministic parameter-free projection: a feature map without random numbers.

With r = relu([x, -x]), which has 2 K entries of which at most K are not zero, the features are the
products of the entries that stand i = 1, ..., nu places apart (the first entry follows the last):

    features[i, j] = r[j] r[j - i]

A product is not zero only if both of its entries are positive, so vectors that point in different
directions share few features. The paper numbers each product by its other factor, as r[j] r[j + i]:
the same products in another order, and so the same kernel. The order here is the original code's.
"""

import tensorflow as tf

from favor_keras.ops.precision import full_precision


def dpfp(x, nu=1, normalize=True, epsilon=1e-6):
    """Deterministic parameter-free projection: 2 nu K non-negative features of a vector of size K.

        features = concat_{i = 1..nu}(r * roll(r, i)),    r = relu([x, -x])

    and, normalised, features / (sum(features) + epsilon). Where all products are zero, as of a zero
    vector or one with a single entry, so are the features. Half precision is computed in float32.

    Args:
        x: [..., K], floating-point.
        nu: the number of shifts, from 1 to 2 K - 1.
        normalize: divide by the sum of the features, which keys of the delta rule need.
        epsilon: a positive number that is added to the sum.

    Returns:
        The features [..., 2 nu K] in the dtype of `x`.

    Raises:
        ValueError: if `x` is not floating-point or its last size is unknown, `nu` is not an integer
            in its range, or `epsilon` is not positive.

    References:
        arXiv:2102.11174, section 5.3

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops.dpfp import dpfp
    >>> dpfp(tf.constant([[3.0, 1.0, -2.0]]), normalize=False).numpy().tolist()
    [[6.0, 3.0, 0.0, 0.0, 0.0, 0.0]]
    >>> dpfp(tf.ones([2, 10, 4, 16]), nu=3).shape
    TensorShape([2, 10, 4, 96])
    """
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating:
        raise ValueError(f"x must be floating-point, received {x.dtype.name}")
    if not x.shape.rank or x.shape[-1] is None:
        raise ValueError(f"x must be [..., size] of a known size, received the shape {x.shape}")
    largest = 2 * x.shape[-1] - 1
    if not isinstance(nu, int) or not 1 <= nu <= largest:
        raise ValueError(f"nu must be an integer from 1 to {largest} for x of the shape {x.shape}, received {nu!r}")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, received {epsilon!r}")
    data = tf.cast(x, full_precision(x))
    rectified = tf.nn.relu(tf.concat([data, -data], axis=-1))
    features = tf.concat([rectified * tf.roll(rectified, shift, axis=-1) for shift in range(1, nu + 1)], axis=-1)
    return tf.cast(sum_normalized(features, epsilon) if normalize else features, x.dtype)


def sum_normalized(features, epsilon=1e-6):
    """features / (sum(features) + epsilon), over the last axis."""
    return features / (tf.reduce_sum(features, axis=-1, keepdims=True) + epsilon)
