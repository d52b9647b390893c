"""Random projection matrices W [m, d] for FAVOR+: rows whose directions are uniform on the sphere.

Orthogonal rows estimate the softmax kernel with less variance than independent ones. At most d rows
can be orthogonal, so W is a stack of independent d x d blocks. A block's directions come from the
QR decomposition of a Gaussian matrix or from a product of random Givens rotations; the row lengths
are drawn like those of Gaussian vectors, chi(d), or are all sqrt(d).

All numbers come from a stateless generator whose output is the same in eager mode, in a graph and
under XLA.
"""

import math

import tensorflow as tf

GENERATOR = "philox"


def create_projection_matrix(m, d, seed=0, scaling=0, struct_mode=False):
    """A random matrix [m, d], float32, in blocks of d orthogonal rows.

    Args:
        m: number of rows (random features).
        d: number of columns (size of a head).
        seed: an integer, or an integer tensor of shape [] or [2]. The matrix is a function of the
            seed alone. The first rows do not depend on m.
        scaling: 0 for row lengths drawn from chi(d), the lengths of Gaussian vectors; 1 for sqrt(d).
        struct_mode: build the blocks from random Givens rotations instead of QR: cheaper, and
            nearly but not exactly uniform.

    Returns:
        A float32 tensor [m, d].

    Raises:
        ValueError: if `m` or `d` is not a positive integer or `scaling` is neither 0 nor 1.

    References:
        arXiv:2009.14794, section 2.4

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import create_projection_matrix
    >>> projection = create_projection_matrix(12, 8, seed=1, scaling=1)
    >>> products = projection[:8] @ tf.transpose(projection[:8])
    >>> bool(tf.reduce_max(tf.abs(products - 8.0 * tf.eye(8))) < 1e-4)
    True
    """
    kind = "givens" if struct_mode else "orthogonal"
    return draw_projection(m, d, seed, kind=kind, scaling=scaling)


def draw_projection(m, d, seed=0, *, kind="orthogonal", scaling=0):
    """A random matrix [m, d]: `create_projection_matrix` with a choice of the row directions.

    Args:
        m, d, seed, scaling: see `create_projection_matrix`.
        kind: "orthogonal" (QR), "givens" (random Givens rotations) or "iid" (independent rows).

    Raises:
        ValueError: for an unknown kind, and as `create_projection_matrix`.
    """
    for name, size in (("m", m), ("d", d)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, received {size!r}")
    if scaling not in (0, 1):
        raise ValueError(f"scaling must be 0 (chi(d) lengths) or 1 (sqrt(d) lengths), received {scaling!r}")
    seed = _checked_seed(seed)
    if kind not in DIRECTIONS:
        raise ValueError(f"kind must be one of {sorted(DIRECTIONS)}, received {kind!r}")
    directions_seed, lengths_seed = _seeds(seed, 2)
    num_blocks = math.ceil(m / d)
    directions = tf.reshape(DIRECTIONS[kind](num_blocks, d, directions_seed), [num_blocks * d, d])[:m]
    if scaling == 1:
        return directions * math.sqrt(d)
    return directions * tf.norm(_normal([num_blocks * d, d], lengths_seed)[:m], axis=1, keepdims=True)


def iid_blocks(num_blocks, d, seed):
    """Independent unit vectors [num_blocks, d, d], uniform on the sphere."""
    return tf.math.l2_normalize(_normal([num_blocks, d, d], seed), axis=-1)


def haar_blocks(num_blocks, d, seed):
    """Orthogonal matrices [num_blocks, d, d], uniform under the Haar measure.

    QR of a Gaussian matrix is uniform only once the signs of R's diagonal are made positive.
    """
    q, r = tf.linalg.qr(_normal([num_blocks, d, d], seed))
    signs = tf.where(tf.linalg.diag_part(r) < 0, -1.0, 1.0)
    return q * signs[:, None, :]


def givens_blocks(num_blocks, d, seed):
    """Orthogonal matrices [num_blocks, d, d]: products of about d ceil(ln d) random Givens rotations.

    A random permutation pairs the d rows; the pairs are disjoint, so a round turns d / 2 of them
    at once, each by an angle of its own.
    """
    num_rounds = 2 * math.ceil(math.log(d))
    sign_seed, *round_seeds = _seeds(seed, 1 + num_rounds)
    # A row that no rotation has turned must not always point the same way.
    matrix = tf.where(_uniform([num_blocks, d, 1], sign_seed) < 0.5, -1.0, 1.0) * tf.eye(d)
    for round_seed in round_seeds:
        order_seed, angle_seed = _seeds(round_seed, 2)
        order = tf.argsort(_uniform([num_blocks, d], order_seed), axis=1, stable=True)
        first, second, rest = tf.split(order, [d // 2, d // 2, d % 2], axis=1)
        angle = 2 * math.pi * _uniform([num_blocks, d // 2, 1], angle_seed)
        x, y = (tf.gather(matrix, rows, batch_dims=1) for rows in (first, second))
        cos, sin = tf.cos(angle), tf.sin(angle)
        turned = [cos * x - sin * y, sin * x + cos * y, tf.gather(matrix, rest, batch_dims=1)]
        # `order` sends position to row; sorting it sends the turned rows back to their places.
        matrix = tf.gather(tf.concat(turned, axis=1), tf.argsort(order, axis=1), batch_dims=1)
    return matrix


DIRECTIONS = {"orthogonal": haar_blocks, "givens": givens_blocks, "iid": iid_blocks}


def _checked_seed(seed):
    expected = "seed must be an integer or an integer tensor of shape [] or [2]"
    try:
        tensor = tf.convert_to_tensor(seed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}, received {seed!r}") from error
    if not tensor.dtype.is_integer or tensor.shape not in ([], [2]):
        raise ValueError(f"{expected}, received {seed!r}")
    return tensor


def _seeds(seed, count):
    """`count` independent seeds [2] made from one of shape [] or [2]."""
    seed = tf.cast(seed, tf.int64)
    if seed.shape.rank == 0:  # of the public functions, where [seed, 0] is the first of many draws
        seed = tf.stack([seed, tf.zeros_like(seed)])
    fold_in = tf.random.experimental.stateless_fold_in
    return [fold_in(seed, tf.constant(i, tf.int64), alg=GENERATOR) for i in range(count)]


def _uniform(shape, seed):
    """Numbers in (0, 1), multiples of 2^-24 and half a step, made from the generator's integers.

    TensorFlow's own floating-point numbers depend on whether XLA makes them; the integers do not.
    """
    bits = tf.random.stateless_uniform(shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg=GENERATOR)
    return (tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32) + 0.5) * 2.0**-24


def _normal(shape, seed):
    """Standard normal numbers, by the Box-Muller transform of uniform ones."""
    radius_seed, angle_seed = _seeds(seed, 2)
    radius = tf.sqrt(-2.0 * tf.math.log(_uniform(shape, radius_seed)))
    return radius * tf.cos(2 * math.pi * _uniform(shape, angle_seed))
