"""DPFP against the original's features and the definition, and where there is nothing to normalise."""

import numpy as np
import pytest
import tensorflow as tf
from oracles import assert_close, directional_derivative

from favor_keras.ops.dpfp import dpfp


def naive_dpfp(x, nu, epsilon=None):
    """Product by product. The sign of a complex x is that of its real part."""
    rectified = np.concatenate([np.where(x.real > 0, x, 0), np.where(x.real < 0, -x, 0)], axis=-1)
    size = rectified.shape[-1]
    products = [rectified[..., j] * rectified[..., (j - i) % size] for i in range(1, nu + 1) for j in range(size)]
    features = np.stack(products, axis=-1)
    return features if epsilon is None else features / (features.sum(axis=-1, keepdims=True) + epsilon)


def features_and_gradient(x, cotangent, **options):
    with tf.GradientTape() as tape:
        tape.watch(x)
        features = dpfp(x, **options)
    return features, tape.gradient(features, x, cotangent)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("nu", [1, 2, 3])
def test_equals_the_original_in_values_and_order(reference, nu, dtype, tolerance):
    arrays = reference("fast_weights")
    x = tf.constant(arrays[f"dpfp_nu{nu}_input"], dtype)
    assert_close(dpfp(x, nu, normalize=False), arrays[f"dpfp_nu{nu}_features"], tolerance)
    assert_close(dpfp(x, nu), arrays[f"dpfp_nu{nu}_normalized"], tolerance)


@pytest.mark.parametrize("epsilon", [None, 1e-6, 0.1], ids=lambda epsilon: f"epsilon_{epsilon}")
@pytest.mark.parametrize("size, nu", [(1, 1), (2, 3), (5, 4), (5, 9)])
def test_values_and_gradient_equal_the_definition(size, nu, epsilon):
    x, direction = np.random.default_rng(size).normal(size=[2, 3, 4, size])
    cotangent = np.random.default_rng(nu).normal(size=[3, 4, 2 * nu * size])
    options = {"normalize": False} if epsilon is None else {"epsilon": epsilon}
    features, gradient = features_and_gradient(tf.constant(x), cotangent, nu=nu, **options)
    assert_close(features, naive_dpfp(x, nu, epsilon), 1e-12)
    slope = directional_derivative(lambda x: np.sum(cotangent * naive_dpfp(x, nu, epsilon)), [x], [direction])
    assert_close(np.sum(gradient * direction), slope, 1e-9, smallest_scale=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("nu", [1, 3])
def test_zero_and_one_sparse_vectors_give_finite_zeros(nu, dtype):
    x = tf.cast(np.concatenate([np.zeros([1, 4]), 5 * np.eye(4), -5 * np.eye(4)]), dtype)
    features, gradient = features_and_gradient(x, tf.ones([9, 8 * nu], dtype), nu=nu)
    assert features.dtype == dtype
    assert not np.any(features) and not np.any(gradient)


@pytest.mark.parametrize("nu", [1, 3])
def test_tiny_and_huge_vectors_are_finite(nu):
    x = np.random.default_rng(0).normal(size=[20, 8]) * np.logspace(-30, 15, 20)[:, None]
    features, gradient = features_and_gradient(tf.constant(x, "float32"), tf.ones([20, 16 * nu]), nu=nu)
    assert_close(features, naive_dpfp(x, nu, 1e-6), 1e-6)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32_and_cast_back(dtype):
    x = tf.cast(np.random.default_rng(0).normal(size=[30, 8]), dtype)
    features = dpfp(x, 2)
    assert features.dtype == dtype
    np.testing.assert_array_equal(features, tf.cast(dpfp(tf.cast(x, "float32"), 2), dtype))


def test_normalized_features_are_weights():
    features = dpfp(np.random.default_rng(0).normal(size=[30, 8]), 2).numpy()
    assert np.all(features >= 0)
    assert_close(features.sum(axis=-1), np.ones(30), 1e-4)


def test_same_in_every_mode(compiled):
    rng = np.random.default_rng(0)
    x, cotangent = tf.constant(rng.normal(size=[2, 5, 3, 4])), tf.constant(rng.normal(size=[2, 5, 3, 16]))

    def function(x, cotangent):
        return features_and_gradient(x, cotangent, nu=2)

    for actual, expected in zip(compiled(function, x, cotangent), function(x, cotangent)):
        assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize(
    "x, options, message",
    [
        (tf.ones([2, 4], "int32"), {}, "x must be floating-point, received int32"),
        (tf.ones([]), {}, r"x must be \[..., size\] of a known size, received the shape \(\)"),
        (tf.ones([2, 4]), {"nu": 0}, "nu must be an integer from 1 to 7 .* received 0"),
        (tf.ones([2, 4]), {"nu": 8}, "nu must be an integer from 1 to 7 .* received 8"),
        (tf.ones([2, 4]), {"nu": 1.0}, "nu must be an integer from 1 to 7 .* received 1.0"),
        (tf.ones([2, 4]), {"epsilon": 0.0}, "epsilon must be positive, received 0.0"),
    ],
)
def test_bad_arguments_are_named(x, options, message):
    with pytest.raises(ValueError, match=message):
        dpfp(x, **options)


def test_unknown_size_is_refused():
    with pytest.raises(ValueError, match="x must be .* of a known size"):
        tf.function(dpfp).get_concrete_function(tf.TensorSpec([2, None]))
