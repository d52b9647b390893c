"""Random features as estimators of exp(x . y): unbiased, with the variance that theory gives."""

import numpy as np
import oracles
import pytest
import tensorflow as tf

from favor_keras.ops import get_kernel
from favor_keras.ops.attention import kernel_attention
from favor_keras.ops.projections import draw_projection

SIZE, ROWS, DRAWS = 8, 16, 40_000
SOFTMAX_KERNELS = ["softmax", "softmax_hyperbolic", "softmax_trig"]


def pair(norm, cosine):
    """Two vectors of one length with a given cosine between them."""
    x = np.zeros(SIZE)
    y = np.zeros(SIZE)
    x[0] = norm
    y[0], y[1] = norm * cosine, norm * np.sqrt(1 - cosine**2)
    return x, y


def estimates(kernel, x, y, kind="iid"):
    """Estimates of exp(x . y) by DRAWS independent projections of ROWS rows each, in float64."""
    matrix = tf.cast(draw_projection(ROWS * DRAWS, SIZE, seed=3, kind=kind), tf.float64)

    def features(data, is_query):
        # The kernel divides by D^(1/4), since attention is of exp(q . k / sqrt(D)).
        scaled, log_scale = get_kernel(kernel).scaled_features(tf.constant(data * SIZE**0.25), is_query, matrix, 0.0)
        return scaled.numpy() * np.exp(log_scale.numpy())

    # The features of one row stand ROWS * DRAWS places apart; each set of rows is a DRAWS-th of all.
    products = (features(x, True) * features(y, False)).reshape(-1, DRAWS, ROWS)
    return DRAWS * products.sum(axis=(0, 2))


def mean_squared_error(kernel, x, y):
    """Lemma 2 of arXiv:2009.14794, of ROWS independent rows."""
    exact, sum_norm, difference_norm = np.exp(x @ y), np.sum((x + y) ** 2), np.sum((x - y) ** 2)
    positive = np.exp(sum_norm) * exact**2 * (1 - np.exp(-sum_norm)) / ROWS
    return {
        "softmax": positive,
        "softmax_hyperbolic": (1 - np.exp(-sum_norm)) / 2 * positive,
        "softmax_trig": np.exp(sum_norm) / exact**2 * (1 - np.exp(-difference_norm)) ** 2 / (2 * ROWS),
    }[kernel]


@pytest.mark.parametrize("kind", ["iid", "orthogonal"])
@pytest.mark.parametrize("kernel", SOFTMAX_KERNELS)
@pytest.mark.parametrize("cosine", [-0.5, 0.3, 0.9])
def test_features_are_unbiased(kernel, kind, cosine):
    x, y = pair(0.7, cosine)
    drawn = estimates(kernel, x, y, kind)
    standard_error = drawn.std() / np.sqrt(DRAWS)
    assert abs(drawn.mean() - np.exp(x @ y)) < 4 * standard_error
    assert standard_error < 0.01 * np.exp(x @ y)


@pytest.mark.parametrize("kernel", SOFTMAX_KERNELS)
@pytest.mark.parametrize("norm, cosine", [(0.5, 0.3), (0.7, -0.5), (0.7, 0.8)])
def test_mean_squared_error_is_that_of_the_closed_form(kernel, norm, cosine):
    x, y = pair(norm, cosine)
    measured = np.mean((estimates(kernel, x, y) - np.exp(x @ y)) ** 2)
    assert abs(measured / mean_squared_error(kernel, x, y) - 1) < 0.1


@pytest.mark.parametrize("kernel", SOFTMAX_KERNELS)
@pytest.mark.parametrize("kind", ["orthogonal", "givens"])
def test_orthogonal_rows_have_less_error_than_independent_ones(kernel, kind):
    x, y = pair(0.7, 0.3)
    errors = {k: np.mean((estimates(kernel, x, y, k) - np.exp(x @ y)) ** 2) for k in (kind, "iid")}
    assert errors[kind] < 0.98 * errors["iid"]


def output_error(rows, scaling, draws=40, size=16, length=32):
    generator = np.random.default_rng(0)
    query, key = 0.5 * generator.normal(size=(2, 1, length, 1, size))
    value = 0.5 * generator.normal(size=(1, length, 1, size))
    exact = oracles.softmax_attention(query, key, value)
    errors = []
    for draw in range(draws):
        matrix = tf.cast(draw_projection(rows, size, seed=draw, scaling=scaling), tf.float64)
        errors.append(np.mean((kernel_attention(query, key, value, "softmax", matrix)[0] - exact) ** 2))
    return np.mean(errors)


@pytest.mark.parametrize("rows", [16, 256])
def test_rows_of_length_sqrt_d_give_less_output_error_than_chi_rows(rows):
    fixed, drawn = output_error(rows, scaling=1), output_error(rows, scaling=0)
    print(f"output MSE with {rows} rows: sqrt(d) {fixed:.2e}, chi {drawn:.2e}")
    assert fixed < drawn
