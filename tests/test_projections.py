"""Random projections: orthogonal blocks, row lengths, and directions that are uniform on the sphere.

The distributions are tested by statistics of fixed seeds. Bounds are 5 standard errors of the
statistic under the distribution that is claimed, or 2.2 / sqrt(n) for the largest difference of two
distribution functions (exceeded by chance with probability 1e-4). Each statistic is also shown to
reject the mistake that it is there to find.
"""

import math

import numpy as np
import pytest
import tensorflow as tf
from oracles import assert_close

from favor_keras import create_projection_matrix

haar_and_givens = pytest.mark.parametrize("struct_mode", [False, True], ids=["haar", "givens"])


def rotations(num_blocks, d, struct_mode=False, seed=0):
    """The orthogonal blocks [num_blocks, d, d] of a projection whose rows all have the length sqrt(d)."""
    projection = create_projection_matrix(num_blocks * d, d, seed, scaling=1, struct_mode=struct_mode)
    return projection.numpy().astype("float64").reshape(num_blocks, d, d) / math.sqrt(d)


def qr_without_signs(num_blocks, d):
    """The mistake: orthogonal matrices from QR, with the signs that the decomposition happens to have."""
    return np.linalg.qr(np.random.default_rng(0).normal(size=[num_blocks, d, d])).Q


def standard_error(samples):
    return np.std(samples) / math.sqrt(len(samples))


def distribution_gap(samples, distribution):
    """max |empirical - distribution| of the distribution functions (Kolmogorov and Smirnov), times sqrt(n)."""
    expected = distribution(np.sort(samples))
    n = len(samples)
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))


def normal_distribution(x):
    return np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in x])


def chi_squared_distribution(x, d):
    """For even d."""
    terms = [(x / 2) ** k / math.factorial(k) for k in range(d // 2)]
    return 1 - np.exp(-x / 2) * sum(terms)


@haar_and_givens
@pytest.mark.parametrize("m, d", [(1, 1), (1, 4), (4, 4), (3, 5), (12, 5), (20, 8)])
def test_shape_and_dtype(m, d, struct_mode):
    for scaling in (0, 1):
        projection = create_projection_matrix(m, d, scaling=scaling, struct_mode=struct_mode)
        assert projection.shape == [m, d] and projection.dtype == "float32"
        assert np.all(np.isfinite(projection))


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 16, 64])
@haar_and_givens
def test_blocks_are_orthogonal(struct_mode, d):
    blocks = rotations(3, d, struct_mode)
    assert_close(blocks @ blocks.transpose(0, 2, 1), np.broadcast_to(np.eye(d), [3, d, d]), 1e-5)


@haar_and_givens
def test_rows_of_chi_lengths_are_orthogonal_and_unequal(struct_mode):
    block = create_projection_matrix(8, 8, struct_mode=struct_mode).numpy().astype("float64")
    products = block @ block.T
    lengths = np.sqrt(np.diag(products))
    assert_close(products / np.outer(lengths, lengths), np.eye(8), 1e-5)
    assert np.std(lengths) > 0.1


@haar_and_givens
def test_scaling_1_makes_rows_of_length_sqrt_d(struct_mode):
    projection = create_projection_matrix(24, 8, scaling=1, struct_mode=struct_mode)
    assert_close(np.linalg.norm(projection, axis=1), np.full(24, math.sqrt(8)), 1e-6)


@haar_and_givens
def test_scaling_0_draws_row_lengths_from_chi_of_d(struct_mode):
    d, n = 8, 16000
    squares = np.sum(create_projection_matrix(n, d, struct_mode=struct_mode).numpy().astype("float64") ** 2, axis=1)
    # Chi squared of d degrees has mean d, variance 2 d and excess kurtosis 12 / d.
    assert abs(np.mean(squares) - d) < 5 * math.sqrt(2 * d / n)
    assert abs(np.var(squares) - 2 * d) < 5 * 2 * d * math.sqrt((2 + 12 / d) / n)
    assert distribution_gap(squares, lambda x: chi_squared_distribution(x, d)) < 2.2
    # Nor do the lengths of one block depend on each other.
    blocks = squares.reshape(-1, d) - d
    correlations = blocks.T @ blocks / len(blocks) / (2 * d) - np.eye(d)
    assert np.max(np.abs(correlations[~np.eye(d, dtype=bool)])) < 5 / math.sqrt(len(blocks))


@pytest.mark.parametrize("scaling", [2, -1, 0.5, None, "chi"])
def test_other_scalings_are_refused(scaling):
    with pytest.raises(ValueError, match="scaling must be 0 .* or 1 .*, received"):
        create_projection_matrix(4, 4, scaling=scaling)


@pytest.mark.parametrize(
    "m, d, name", [(0, 4, "m"), (-1, 4, "m"), (2.0, 4, "m"), (4, 0, "d"), (4, "4", "d"), (4, None, "d")]
)
def test_bad_sizes_are_named(m, d, name):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, received"):
        create_projection_matrix(m, d)


def haar_statistics(blocks):
    """Deviations from the Haar measure, in standard errors of each; 5 is the most that chance allows.

    Under it the matrix is symmetric in distribution under changes of sign, E tr Q = 0, E (tr Q)^2 = 1,
    E (tr Q)^4 = 3, E tr Q^2 = 1, and rows and columns are uniform on the sphere: mean 0, second
    moments 1 / d and fourth moments 3 / (d (d + 2)).
    """
    n, d, _ = blocks.shape
    traces = np.trace(blocks, axis1=1, axis2=2)
    samples = {
        "first entry": np.sign(blocks[:, 0, 0]),
        "trace": traces,
        "squared trace": traces**2 - 1,
        "fourth power of the trace": traces**4 - 3,
        "trace of the square": np.einsum("nij,nji->n", blocks, blocks) - 1,
        "determinant": np.linalg.det(blocks),
    }
    deviations = {name: abs(np.mean(x)) / max(standard_error(x), 1e-9) for name, x in samples.items()}
    for name, x in (("mean", blocks), ("square", blocks**2 - 1 / d), ("fourth power", blocks**4 - 3 / (d * (d + 2)))):
        deviations[f"{name} of the entries"] = np.max(np.abs(x.mean(axis=0))) / np.max(x.std(axis=0)) * math.sqrt(n)
    return deviations


@pytest.mark.parametrize("d", [4, 7])
def test_haar_blocks_are_uniform(d):
    deviations = haar_statistics(rotations(6000, d))
    assert max(deviations.values()) < 5, deviations


@pytest.mark.parametrize("d", [4, 7])
def test_statistics_reject_qr_without_signs(d):
    deviations = haar_statistics(qr_without_signs(6000, d))
    for name in ("first entry", "trace", "mean of the entries"):
        assert deviations[name] > 20, deviations


@pytest.mark.parametrize("d", [1, 2, 5])
def test_rows_are_gaussian(d):
    """A uniform direction times a length from chi(d) is a Gaussian vector, so every entry is a normal number."""
    projection = create_projection_matrix(4000 * d, d).numpy().astype("float64")
    for column in projection[::d].T:
        assert distribution_gap(column, normal_distribution) < 2.2


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 16])
def test_givens_blocks_are_nearly_isotropic(d):
    """E w = 0 and d E w w^T = 1 for every row w of a block, up to a bias of 0.3, and 5 standard errors."""
    blocks = rotations(4000, d, struct_mode=True)
    n = len(blocks)
    means = blocks.mean(axis=0)
    assert np.max(np.abs(means)) < 0.05 + 5 / math.sqrt(d * n)
    moments = d * np.einsum("nij,nik->ijk", blocks, blocks) / n
    errors = np.abs(moments - np.eye(d))
    assert np.max(errors) < 0.3 + 5 * np.max(np.std(d * blocks**2, axis=0)) / math.sqrt(n)
    # Over all rows of a block the bias is gone: they are an orthogonal basis.
    assert_close(moments.mean(axis=0), np.eye(d), 1e-4)


@haar_and_givens
def test_blocks_are_independent(struct_mode):
    d = 8
    blocks = rotations(2000, d, struct_mode)
    products = np.abs(blocks[:, None, 0] @ blocks[:1, 0].T).squeeze()
    assert np.max(products[1:]) < 1 - 1e-4
    # Entries of neighbouring blocks: 1 / d is the variance of each.
    correlations = d * np.einsum("nij,nkl->ijkl", blocks[:-1], blocks[1:]) / len(blocks[1:])
    assert np.max(np.abs(correlations)) < 5.5 / math.sqrt(len(blocks) - 1) + (0.06 if struct_mode else 0)


@pytest.mark.parametrize("scaling", [0, 1])
@haar_and_givens
def test_first_rows_do_not_depend_on_the_number_of_rows(struct_mode, scaling):
    rows = create_projection_matrix(40, 8, 3, scaling, struct_mode)
    for m in (1, 7, 8, 9, 24):
        assert_close(create_projection_matrix(m, 8, 3, scaling, struct_mode), rows[:m], 1e-6)


def dependence_of_lengths_and_directions(directions, lengths):
    """The largest correlation of a squared row length and a squared entry of the row's direction, times sqrt(n)."""
    x = lengths.reshape(-1, 1) ** 2
    y = directions.reshape(len(x), -1) ** 2
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    correlations = np.mean(x * y, axis=0) / (x.std(axis=0) * y.std(axis=0))
    return np.max(np.abs(correlations)) * math.sqrt(len(x))


@haar_and_givens
def test_lengths_and_directions_share_no_random_numbers(struct_mode):
    d, m = 4, 24000
    projection = create_projection_matrix(m, d, 5, 0, struct_mode).numpy()
    lengths = np.linalg.norm(projection, axis=1, keepdims=True)
    directions = projection / lengths
    assert_close(directions, create_projection_matrix(m, d, 5, 1, struct_mode) / math.sqrt(d), 1e-5)
    assert dependence_of_lengths_and_directions(directions, lengths) < 5

    # The mistake: the lengths of the rows of the very matrix whose QR gives the directions.
    gaussian = np.random.default_rng(0).normal(size=[m // d, d, d])
    shared_lengths = np.linalg.norm(gaussian, axis=2)
    assert dependence_of_lengths_and_directions(np.linalg.qr(gaussian).Q, shared_lengths) > 20


@haar_and_givens
def test_the_seed_alone_decides_in_every_mode_H1(struct_mode):
    def draw(seed):
        return create_projection_matrix(4, 2, seed, struct_mode=struct_mode)

    def draw_twice(seed):
        return draw(3), draw(seed)

    expected = draw(3)
    np.testing.assert_array_equal(draw(3), expected)
    for function in (draw_twice, tf.function(draw_twice, autograph=False)):
        for dtype in ("int32", "int64"):
            for projection in function(tf.constant(3, dtype)):
                assert_close(projection, expected, 1e-6)
    for projection in tf.function(draw_twice, autograph=False, jit_compile=True)(tf.constant(3)):
        assert_close(projection, expected, 1e-6)


@haar_and_givens
def test_seeds_of_two_numbers(struct_mode):
    def draw(seed):
        return create_projection_matrix(8, 4, seed, struct_mode=struct_mode)

    expected = draw([3, 1])
    assert_close(tf.function(draw, autograph=False)(tf.constant([3, 1])), expected, 1e-6)
    assert np.max(np.abs(expected - draw([3, 2]))) > 0.1
    assert np.max(np.abs(expected - draw([2, 1]))) > 0.1


@pytest.mark.parametrize("scaling", [0, 1])
@haar_and_givens
def test_different_seeds_differ(struct_mode, scaling):
    projections = [create_projection_matrix(8, 4, seed, scaling, struct_mode) for seed in (0, 1, 2, -1, 2**31, 2**40)]
    for i, first in enumerate(projections):
        for second in projections[:i]:
            assert np.max(np.abs(first - second)) > 0.1


def test_global_seed_plays_no_part():
    tf.random.set_seed(1)
    first = create_projection_matrix(8, 4)
    tf.random.set_seed(2)
    np.testing.assert_array_equal(create_projection_matrix(8, 4), first)


@pytest.mark.parametrize("seed", [1.5, [1, 2, 3], "1", None], ids=str)
def test_bad_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be"):
        create_projection_matrix(4, 4, seed)
