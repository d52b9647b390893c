"""Kernel transformations: the features by themselves."""

import keras
import numpy as np
import oracles
import pytest
import tensorflow as tf
from oracles import assert_close

from favor_keras import create_projection_matrix, relu_kernel_transformation, softmax_kernel_transformation
from favor_keras.ops import GeneralizedKernel, KernelTransformation, ReluKernel, SoftmaxKernel
from favor_keras.ops.kernels import get_kernel

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
KERNELS = {"softmax": softmax_kernel_transformation, "relu": relu_kernel_transformation}
both_kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
queries_and_keys = pytest.mark.parametrize("is_query", [True, False], ids=["query", "key"])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@queries_and_keys
def test_softmax_features_are_the_original_ones(reference, is_query, dtype):
    arrays = reference("favor")
    data = tf.constant(arrays["query" if is_query else "key"], dtype)
    features = softmax_kernel_transformation(data, is_query, tf.constant(arrays["projection"], dtype))
    assert features.dtype == dtype
    assert_close(features, arrays["softmax_query_features" if is_query else "softmax_key_features"], TOLERANCE[dtype])


def test_generalized_and_trigonometric_features_are_the_original_ones(reference):
    arrays = reference("favor")
    names = [name for name in arrays if name.startswith("generalized_features_")]
    assert len(names) == 11
    for name in names:
        # The original ReLU features have no 1 / sqrt(M) there; those of `ReluKernel` are tested below.
        function = name.removeprefix("generalized_features_")
        kernel = GeneralizedKernel(tf.nn.relu if function == "relu" else function)
        assert_close(kernel(arrays["query"], True, arrays["projection"]), arrays[name], 1e-9)
    assert_close(get_kernel("softmax_trig")(arrays["query"], True, arrays["projection"]), arrays["trig_features"], 1e-9)


@pytest.mark.parametrize("stabilizer", [None, 0.0, 0.5])
@queries_and_keys
def test_relu_features(is_query, stabilizer):
    data, projection = normal(2, 5, 3, 4), normal(6, 4, seed=1)
    added = 1e-3 if stabilizer is None else stabilizer
    features = relu_kernel_transformation(data, is_query, None, stabilizer)
    assert_close(features, np.maximum(data, 0) + added, 1e-12)
    features = relu_kernel_transformation(data, is_query, projection, stabilizer)
    assert_close(features, np.maximum(data @ projection.T, 0) / np.sqrt(6) + added, 1e-12)


@queries_and_keys
def test_scaled_softmax_features_are_those_of_the_paper_with_the_maximum_taken_out(is_query):
    data, projection = normal(2, 5, 3, 4), normal(6, 4, seed=1)
    arguments = tf.constant(data), is_query, tf.constant(projection), 0.0
    features, log_scale = softmax_kernel_transformation.scaled_features(*arguments)
    assert_close(np.max(features, axis=-1), np.ones([2, 5, 3]), 1e-12)
    assert_close(features * np.exp(log_scale)[..., None], oracles.softmax_features(data, projection), 1e-12)


@pytest.mark.parametrize("stabilizer", [None, 0.5])
@queries_and_keys
def test_softmax_stabilizer_is_added_to_the_exponentials(is_query, stabilizer):
    arguments = tf.constant(normal(2, 5, 3, 4)), is_query, tf.constant(normal(6, 4, seed=1))
    added = 1e-6 if stabilizer is None else stabilizer
    called, called_without = (softmax_kernel_transformation(*arguments, s) for s in (stabilizer, 0.0))
    assert_close(called * np.sqrt(6), called_without * np.sqrt(6) + added, 1e-12)
    scaled, scaled_without = (
        softmax_kernel_transformation.scaled_features(*arguments, s)[0] for s in (stabilizer, 0.0)
    )
    assert_close(scaled, scaled_without + added, 1e-12)


@both_kernels
@queries_and_keys
def test_scaled_features_treat_every_position_alone_C1(kernel, is_query):
    data, projection = tf.constant(normal(2, 9, 3, 4)), tf.constant(normal(6, 4, seed=1))
    features, log_scale = kernel.scaled_features(data, is_query, projection)
    for t in (0, 4, 8):
        alone, alone_log_scale = kernel.scaled_features(data[:, t : t + 1], is_query, projection)
        assert_close(alone[:, 0], features[:, t], 1e-12)
        if log_scale is not None:
            assert_close(alone_log_scale[:, 0], log_scale[:, t], 1e-12)


@both_kernels
def test_features_stay_within_reach_for_large_data_N5(kernel):
    projection = create_projection_matrix(32, 16)
    for data in (
        tf.zeros([1, 4, 2, 16]),
        tf.fill([1, 4, 2, 16], 1e4),
        tf.constant(1e4 * normal(1, 4, 2, 16), tf.float32),
    ):
        for is_query in (True, False):
            features, log_scale = kernel.scaled_features(data, is_query, projection)
            assert np.all(np.isfinite(features)) and np.min(features) > 0
            assert log_scale is None or np.all(np.isfinite(log_scale))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@both_kernels
@queries_and_keys
@pytest.mark.parametrize("x", [-8.0, -30.0])
def test_features_are_positive_in_half_precision_N9(kernel, is_query, x, dtype):
    features = kernel(tf.fill([1, 4, 2, 16], tf.cast(x, dtype)), is_query, create_projection_matrix(256, 16))
    assert features.dtype == dtype
    assert np.min(tf.cast(features, tf.float32)) > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@both_kernels
def test_half_precision_is_computed_in_float32_and_cast_back(kernel, dtype):
    data = tf.cast(normal(2, 5, 3, 16), dtype)
    projection = create_projection_matrix(32, 16)
    for matrix in (projection, tf.cast(projection, tf.float64)):
        features = kernel(data, False, matrix)
        assert features.dtype == dtype
        np.testing.assert_array_equal(features, tf.cast(kernel(tf.cast(data, tf.float32), False, projection), dtype))


@both_kernels
def test_features_take_arrays_and_any_number_of_positions(kernel):
    data, projection = normal(2, 5, 3, 4), normal(6, 4, seed=1)
    expected = kernel(data, False, projection)
    assert expected.dtype == "float64" and expected.shape == [2, 5, 3, 6]
    signature = [tf.TensorSpec([None, None, 3, 4], "float64")]
    unknown = tf.function(lambda data: kernel(data, False, projection), signature, autograph=False)
    assert unknown.get_concrete_function().output_shapes == [None, None, 3, 6]
    assert_close(unknown(data), expected, 1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_products_of_features_are_unbiased_estimates_of_the_kernel(name):
    """The mean over 2,000 independent blocks of orthogonal rows is within 5 standard errors."""
    size, num_blocks = 8, 2000
    query, key = 0.7 * normal(2, 1, 1, 1, size)
    projection = create_projection_matrix(num_blocks * size, size)
    products = num_blocks * size * np.ones(num_blocks * size)  # features have a factor 1 / sqrt(M) each
    for data, is_query in ((query, True), (key, False)):
        features, log_scale = KERNELS[name].scaled_features(
            tf.constant(data), is_query, tf.cast(projection, "float64"), 0.0
        )
        products *= np.ravel(features) * (1.0 if log_scale is None else np.exp(log_scale).item())
    estimates = products.reshape(num_blocks, size).mean(axis=1)
    kernel = {
        "softmax": np.exp(np.sum(query * key) / np.sqrt(size)),
        "relu": oracles.arc_cosine_kernel(query, key).item(),
    }
    assert abs(np.mean(estimates) - kernel[name]) < 5 * np.std(estimates) / np.sqrt(num_blocks)


def test_docstring_names_the_axes_of_the_maxima_C3():
    text = " ".join(SoftmaxKernel.__doc__.split())
    assert "for queries the maximum over the M features of each position" in text
    assert "for keys the maximum over all positions and features of a head" in text
    assert text.count("which cancels because") == 2


def test_softmax_needs_a_projection():
    with pytest.raises(ValueError, match="projection_matrix.*received None"):
        softmax_kernel_transformation(normal(1, 2, 1, 4), True)


@both_kernels
@pytest.mark.parametrize("shape", [(6, 5), (4,), (1, 6, 4)], ids=str)
def test_bad_projection_shape(kernel, shape):
    with pytest.raises(ValueError, match=r"projection_matrix must be \[features, 4\] for data"):
        kernel(normal(1, 2, 1, 4), True, np.ones(shape))


@pytest.mark.parametrize("name", ["Softmax", "", None, 3])
def test_unknown_kernel(name):
    with pytest.raises(
        ValueError, match=f"kernel_transformation must be one of .*'relu'.*'softmax'.*received {name!r}"
    ):
        get_kernel(name)


def test_kernels_by_name_object_and_function():
    assert get_kernel("softmax") is softmax_kernel_transformation
    assert get_kernel("relu") is relu_kernel_transformation
    for kernel in (ReluKernel(), lambda data, is_query, projection_matrix: data):
        assert get_kernel(kernel) is kernel


@both_kernels
def test_kernels_round_trip_through_serialization_S12(kernel):
    config = keras.saving.serialize_keras_object(kernel)
    assert config["registered_name"].startswith("favor_keras>")
    loaded = keras.saving.deserialize_keras_object(config)
    assert type(loaded) is type(kernel) and isinstance(loaded, KernelTransformation)
    data, projection = normal(2, 5, 3, 4), normal(6, 4, seed=1)
    np.testing.assert_array_equal(loaded(data, True, projection), kernel(data, True, projection))


@keras.saving.register_keras_serializable(package="test_kernels")
class PowerKernel(ReluKernel):
    """A kernel with an argument, as a user would write it."""

    def __init__(self, exponent):
        self.exponent = exponent

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        features, log_scale = super().scaled_features(data, is_query, projection_matrix, numerical_stabilizer)
        return features**self.exponent, log_scale

    def get_config(self):
        return {"exponent": self.exponent}


def test_own_kernel_round_trips_with_its_argument():
    loaded = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(PowerKernel(3.0)))
    assert isinstance(loaded, PowerKernel)
    assert_close(loaded(np.full([1, 1, 1, 1], 2.0), True), np.full([1, 1, 1, 1], 2.001**3), 1e-12)
