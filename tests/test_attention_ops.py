"""FAVOR+ attention: the original numbers, exact attention, causality, and the cost of long sequences."""

import functools
import os
import pathlib
import time

import numpy as np
import oracles
import pytest
import tensorflow as tf
from harness import run_in_fresh_process, value_and_gradients
from oracles import assert_close, directional_derivative, relative_error

import favor_keras
from favor_keras import (
    causal_denominator,
    causal_numerator,
    create_projection_matrix,
    favor_attention,
    linear_attention,
    noncausal_denominator,
    noncausal_numerator,
)
from favor_keras.ops import ReluKernel, SoftmaxKernel, delta_rule, spatial_gating
from favor_keras.ops.attention import kernel_attention

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
both_precisions = pytest.mark.parametrize("dtype", TOLERANCE)
both_kernels = pytest.mark.parametrize("kernel", ["softmax", "relu"])
causal_and_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])


def normal(*shape, deviation=1.0, seed=0):
    return deviation * np.random.default_rng([seed, *shape]).normal(size=shape)


def differentiate(function, inputs, cotangent):
    """function(*inputs) and the gradients of sum(cotangent * function(*inputs))."""
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        result = function(*inputs)
    return result, tape.gradient(result, inputs, tf.cast(cotangent, result.dtype))


# The original numbers.


def original_softmax_features(data, is_query, projection_matrix):
    """As users of the original code have it: the maximum for keys is over the whole sequence."""
    data = data * data.shape[-1] ** -0.25
    projected = tf.einsum("bthd,md->bthm", data, projection_matrix)
    half_norm = tf.reduce_sum(data**2, axis=-1, keepdims=True) / 2
    maximum = tf.reduce_max(projected, axis=[-1] if is_query else [-1, -3], keepdims=True)
    return (tf.exp(projected - half_norm - maximum) + 1e-6) * projection_matrix.shape[0] ** -0.5


@pytest.mark.parametrize("dtype, chunk_size", [("float64", None), ("float64", 5), ("float32", None)])
@pytest.mark.parametrize("direction", ["causal", "noncausal"])
@pytest.mark.parametrize("name", ["relu_identity", "relu_projected", "softmax_stabilizer0", "softmax"])
def test_reference_outputs_and_gradients(reference, name, direction, chunk_size, dtype):
    arrays = reference("favor")
    kernel, projection, stabilizer = {
        "relu_identity": ("relu", None, None),
        "relu_projected": ("relu", arrays["projection"], None),
        "softmax_stabilizer0": ("softmax", arrays["projection"], 0.0),
        "softmax": (original_softmax_features, arrays["projection"], None),
    }[name]
    projection = None if projection is None else tf.constant(projection, dtype)
    causal = direction == "causal"

    def attend(query, key, value):
        if chunk_size is None and stabilizer is None:
            return favor_attention(query, key, value, kernel, causal, projection)
        options = {"numerical_stabilizer": stabilizer, "chunk_size": chunk_size}
        return kernel_attention(query, key, value, kernel, projection, causal=causal, **options)[0]

    inputs = [tf.constant(arrays[x], dtype) for x in ("query", "key", "value")]
    output, gradients = differentiate(attend, inputs, arrays["cotangent"])
    assert output.dtype == dtype
    assert_close(output, arrays[f"{name}_{direction}_output"], TOLERANCE[dtype])
    for gradient, source in zip(gradients, ("query", "key", "value"), strict=True):
        assert_close(gradient, arrays[f"{name}_{direction}_d{source}"], TOLERANCE[dtype])


@both_precisions
def test_reference_prefix_sums(reference, dtype):
    arrays = reference("favor")
    inputs = [tf.constant(arrays[f"prefix_{x}"], dtype) for x in ("qs", "ks", "vs")]
    for name, function, sources in (
        ("numerator", causal_numerator, ("qs", "ks", "vs")),
        ("denominator", causal_denominator, ("qs", "ks")),
    ):
        cotangent = arrays[f"prefix_{name}_cotangent"]
        result, gradients = differentiate(function, inputs[: len(sources)], cotangent)
        assert result.dtype == dtype
        assert_close(result, arrays[f"prefix_{name}"], TOLERANCE[dtype])
        for gradient, source in zip(gradients, sources, strict=True):
            assert_close(gradient, arrays[f"prefix_{name}_d{source}"], TOLERANCE[dtype])


def test_noncausal_sums_are_time_first_and_take_another_length():
    qs, ks, vs = normal(5, 2, 3, 4), normal(7, 2, 3, 4), normal(7, 2, 3, 6)
    numerator, gradients = differentiate(noncausal_numerator, (qs, ks, vs), np.ones([5, 2, 3, 6]))
    assert_close(numerator, np.einsum("tbhm,sbhm,sbhd->tbhd", qs, ks, vs), 1e-12)
    assert_close(gradients[0], np.einsum("sbhm,sbhd,t->tbhm", ks, vs, np.ones(5)), 1e-12)
    assert_close(noncausal_denominator(qs, ks), np.einsum("tbhm,sbhm->tbh", qs, ks), 1e-12)


@causal_and_not
@pytest.mark.parametrize("stabilizer", [1e-6, 1e-2])
def test_stabilized_softmax_attention(causal, stabilizer):
    """The stabilizer is added to every key's features before they are scaled; gradients along random directions."""
    arguments = normal(3, 2, 9, 2, 4)
    projection = normal(6, 4)
    cotangent, directions = normal(2, 9, 2, 4), normal(3, 2, 9, 2, 4, seed=1)

    def naive(*arguments):
        return oracles.stabilized_softmax_attention(*arguments, projection, stabilizer, causal)

    def attend(*arguments):
        options = {"numerical_stabilizer": stabilizer, "causal": causal, "chunk_size": 4}
        return kernel_attention(*arguments, "softmax", tf.constant(projection), **options)[0]

    output, gradients = differentiate(attend, arguments, cotangent)
    assert_close(output, naive(*arguments), 1e-9)
    for i, gradient in enumerate(gradients):
        only = [direction * (i == j) for j, direction in enumerate(directions)]
        derivative = np.sum(cotangent * directional_derivative(naive, arguments, only))
        assert_close(np.sum(gradient * directions[i]), derivative, 1e-9)


@causal_and_not
def test_softmax_attention_is_the_formula_without_any_maximum_C3(causal):
    query, key, value = normal(3, 1, 16, 2, 16, deviation=0.5)
    projection = create_projection_matrix(64, 16).numpy()
    features = (oracles.softmax_features(x, projection) for x in (query, key))
    expected = oracles.linear_attention(*features, value, causal=causal)[0]
    assert_close(favor_attention(query, key, value, "softmax", causal, projection), expected, 1e-3)


@causal_and_not
def test_unnormalized_softmax_attention_is_the_sum_of_the_features_of_the_paper(causal):
    query, key, value = normal(3, 1, 9, 2, 8)
    projection = normal(16, 8)
    features = (oracles.softmax_features(x, projection) for x in (query, key))
    expected = oracles.linear_attention(*features, value, causal=causal, normalize=False)[0]
    options = {"causal": causal, "normalize": False, "numerical_stabilizer": 0.0, "chunk_size": 4}
    assert_close(kernel_attention(query, key, value, "softmax", projection, **options)[0], expected, 1e-9)


@both_kernels
@causal_and_not
def test_gradient_flows_through_the_projection(kernel, causal):
    """Chunked equals the attention of features that a plain function computes for the whole sequence."""
    arguments = *normal(3, 1, 9, 2, 4), normal(6, 4)

    def attend(query, key, value, projection):
        return kernel_attention(
            query, key, value, kernel, projection, causal=causal, chunk_size=4, numerical_stabilizer=0.0
        )[0]

    def attend_with_function(query, key, value, projection):
        def features(data, is_query, projection_matrix):
            instance = {"softmax": SoftmaxKernel(), "relu": ReluKernel()}[kernel]
            return instance(data, is_query, projection_matrix, 0.0)

        return favor_attention(query, key, value, features, causal, projection)

    cotangent = normal(1, 9, 2, 4)
    actual, expected = (differentiate(f, arguments, cotangent) for f in (attend, attend_with_function))
    assert_close(actual[0], expected[0], 1e-9)
    for gradient, wanted in zip(actual[1], expected[1], strict=True):
        assert_close(gradient, wanted, 1e-9)


# Exact attention, which the softmax kernel estimates.


draw_projection = functools.cache(create_projection_matrix)


@causal_and_not
@pytest.mark.parametrize("length", [2, 4, 8, 10, 32])
def test_softmax_kernel_estimates_attention_at_every_length_N10(length, causal):
    errors = []
    for seed in range(10):
        query, key, value = normal(3, 1, length, 1, 16, deviation=0.5, seed=seed).astype("float32")
        output = favor_attention(query, key, value, "softmax", causal, draw_projection(1024, 16, seed))
        errors.append(relative_error(output, oracles.softmax_attention(query, key, value, causal)))
    assert np.mean(errors) < 0.3


def test_softmax_kernel_divides_by_the_square_root_of_the_size_N12():
    for seed in range(5):
        query, key, value = normal(3, 1, 32, 1, 32, deviation=0.5, seed=seed).astype("float32")
        output = favor_attention(query, key, value, "softmax", False, create_projection_matrix(4096, 32, seed))
        assert relative_error(output, oracles.softmax_attention(query, key, value)) < 0.12
        assert relative_error(output, oracles.softmax_attention(query, key, value, scale=1.0)) > 0.5


@pytest.mark.parametrize("size, num_features, most", [(16, 45, 0.46), (16, 256, 0.21), (64, 267, 0.52)])
def test_accuracy_with_usual_numbers_of_features_Q5(size, num_features, most):
    """D ln D and 256 features, queries and keys of unlike seeds; the bounds are 1.5 times the errors to expect."""
    length = 64 if size == 64 else 32
    errors = []
    for seed in range(10):
        query, key, value = (normal(1, length, 1, size, deviation=0.5, seed=10 * seed + i) for i in range(3))
        output = favor_attention(
            query, key, value, "softmax", False, create_projection_matrix(num_features, size, seed)
        )
        errors.append(relative_error(output, oracles.softmax_attention(query, key, value)))
    assert np.mean(errors) < most


# Extreme inputs.


EXTREMES = {
    "zero_queries": lambda x: (0 * x, x),
    "zero_keys": lambda x: (x, 0 * x),
    "huge": lambda x: (np.full_like(x, 1e4), np.full_like(x, 1e4)),
    "huge_random": lambda x: (1e4 * x, 1e4 * x[:, ::-1]),
    "equal_rows": lambda x: (np.broadcast_to(x[:, :1], x.shape), np.broadcast_to(x[:, :1], x.shape)),
}


@causal_and_not
@both_kernels
@pytest.mark.parametrize("extreme", EXTREMES)
def test_rows_of_attention_sum_to_one_N5(extreme, kernel, causal):
    length = 70
    query, key = EXTREMES[extreme](normal(1, length, 2, 8).astype("float32"))
    value = np.broadcast_to(np.eye(length, dtype="float32")[:, None], [1, length, 2, length])
    projection = create_projection_matrix(32, 8)
    output, gradients = differentiate(
        lambda *inputs: favor_attention(*inputs, kernel, causal, projection), (query, key, value), value
    )
    assert np.all(np.isfinite(output)) and all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert_close(np.sum(output, axis=-1), np.ones([1, length, 2]), 1e-3)
    if extreme in ("zero_keys", "huge", "equal_rows"):
        equal = np.tri(length) / np.arange(1, length + 1)[:, None] if causal else np.full([length, length], 1 / length)
        assert_close(output[0, :, 0], equal, 1e-3)


@causal_and_not
@both_kernels
def test_zeros_at_length_33728_N15(kernel, causal):
    zeros = tf.zeros([1, 33_728, 1, 8])
    value = tf.concat([zeros, zeros + 1.5], axis=-1)
    projection = create_projection_matrix(16, 8)
    attend = tf.function(lambda *inputs: favor_attention(*inputs, kernel, causal, projection), autograph=False)
    output = attend(zeros, zeros, value)
    assert not np.any(output[..., :8])
    # Up to 527 chunks are added to the sums one after another, each rounded to 2^-24 of it.
    assert_close(output[..., 8:], zeros + 1.5, 527 * 2.0**-24)


@causal_and_not
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_in_half_precision_N6(dtype, causal):
    inputs = [tf.cast(normal(1, 8192, 1, 8, deviation=s, seed=i), dtype) for i, s in enumerate((1.0, 1.0, 10.0))]
    attend = tf.function(lambda *inputs: favor_attention(*inputs, "relu", causal), autograph=False)
    output = attend(*inputs)
    assert output.dtype == dtype
    output = tf.cast(output, tf.float32)
    assert np.all(np.isfinite(output))
    expected = attend(*(tf.cast(x, tf.float32) for x in inputs))
    assert relative_error(output, expected) < 5e-2


@causal_and_not
@pytest.mark.parametrize("projection", [None, np.abs(normal(6, 4))], ids=["identity", "projected"])
def test_relu_features_that_are_all_zero_N7(projection, causal):
    """With the stabilizer all keys weigh the same; without it there is nothing to divide by, and zeros come out."""
    data, value = normal(2, 1, 9, 2, 4)
    data = -np.abs(data)
    output = favor_attention(data, data, value, "relu", causal, projection)
    means = np.cumsum(value, axis=1) / np.arange(1, 10)[:, None, None]
    assert_close(output, means if causal else np.broadcast_to(means[:, -1:], value.shape), 1e-9)

    def attend(*inputs):
        options = {"causal": causal, "numerical_stabilizer": 0.0, "chunk_size": 4}
        return kernel_attention(*inputs, "relu", projection, **options)[0]

    output, gradients = differentiate(attend, (data, data, value), np.ones_like(value))
    assert not np.any(output)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


# Causality.


def causal_paths():
    """Functions of query, key and value [B, T, H, 16] to an output [B, T, ...]."""
    projection = create_projection_matrix(64, 16)

    def kernel_path(kernel, matrix, **options):
        return lambda query, key, value: kernel_attention(query, key, value, kernel, matrix, causal=True, **options)[0]

    def log_scale_path(query, key, value):
        scale = 50 * value[..., 0]
        return linear_attention(
            tf.exp(-(query**2)), tf.exp(-(key**2)), value, key_log_scale=scale, causal=True, chunk_size=4
        )

    def time_first(function):
        def path(*batch_first):
            result = function(*(tf.transpose(x, [1, 0, 2, 3]) for x in batch_first))
            return tf.transpose(result, [1, 0, *range(2, result.shape.rank)])

        return path

    return {
        "softmax": kernel_path("softmax", projection),
        "softmax_chunks": kernel_path("softmax", projection, chunk_size=4),
        "softmax_unstabilized": kernel_path("softmax", projection, chunk_size=4, numerical_stabilizer=0.0),
        "relu": kernel_path("relu", None),
        "relu_chunks": kernel_path("relu", projection, chunk_size=5),
        "relu_single_tokens": kernel_path("relu", None, chunk_size=1),
        "linear_attention": log_scale_path,
        "causal_numerator": time_first(causal_numerator),
        "causal_denominator": time_first(lambda qs, ks, vs: causal_denominator(qs, ks)),
    }


CAUSAL_PATHS = causal_paths()
every_causal_path = pytest.mark.parametrize("path", CAUSAL_PATHS.values(), ids=CAUSAL_PATHS)


@every_causal_path
@pytest.mark.parametrize("factor", [10.0, 1e4])
def test_no_output_depends_on_the_last_token_C1(path, factor):
    inputs = normal(3, 2, 16, 2, 16).astype("float32")
    expected = path(*inputs)
    for changed in (["key"], ["value"], ["query", "key", "value"]):
        factors = np.array([factor if name in changed else 1.0 for name in ("query", "key", "value")], "float32")
        last = factors[:, None, None, None, None] * inputs[:, :, -1:]
        output = path(*np.concatenate([inputs[:, :, :-1], last], axis=2))
        assert np.max(np.abs(output[:, :-1] - expected[:, :-1])) < 1e-6
        assert np.all(np.isfinite(output))


@every_causal_path
def test_a_prefix_is_computed_as_if_it_were_all_C1_C8(path):
    length = 16
    inputs = normal(3, 2, length, 2, 16)
    output = path(*inputs)
    for t in (1, 3, 4, 5, length // 2, length - 1):
        assert_close(path(*inputs[:, :, :t]), output[:, :t], 1e-9)


def test_the_original_features_do_look_ahead():
    """So the tests above would find it."""
    inputs = normal(3, 2, 16, 2, 16)
    projection = tf.cast(create_projection_matrix(64, 16), tf.float64)
    expected = favor_attention(*inputs, original_softmax_features, True, projection)
    inputs[:, :, -1] *= 10
    output = favor_attention(*inputs, original_softmax_features, True, projection)
    assert np.max(np.abs(output[:, :-1] - expected[:, :-1])) > 0.1


@pytest.mark.parametrize("kernel", ["softmax", "relu", original_softmax_features], ids=["softmax", "relu", "function"])
def test_other_source_lengths_H4(kernel):
    query, key, value = normal(2, 5, 3, 8), normal(2, 9, 3, 8), normal(2, 9, 3, 6)
    projection = tf.constant(normal(16, 8))
    output = favor_attention(query, key, value, kernel, False, projection)
    assert output.shape == [2, 5, 3, 6]
    assert_close(favor_attention(query[:, 2:3], key, value, kernel, False, projection), output[:, 2:3], 1e-9)
    with pytest.raises(ValueError, match="causal attention needs one length for query and key"):
        favor_attention(query, key, value, kernel, True, projection)


@both_kernels
@pytest.mark.parametrize("splits", [[1], [4], [7], [1, 2, 3]], ids=str)
def test_pieces_with_a_state_equal_the_whole_D2(kernel, splits):
    inputs, projection = normal(3, 2, 9, 2, 4), normal(6, 4)
    output, final_state = kernel_attention(*inputs, kernel, projection, causal=True, chunk_size=4)
    state, pieces = None, []
    for start, end in zip([0, *splits], [*splits, 9], strict=True):
        piece, state = kernel_attention(
            *inputs[:, :, start:end], kernel, projection, causal=True, chunk_size=4, initial_state=state
        )
        pieces.append(piece)
    assert_close(tf.concat(pieces, axis=1), output, 1e-9)
    for name in final_state:
        assert_close(state[name], final_state[name], 1e-9)


# Modes, and the cost of length.


@pytest.mark.parametrize("compiled", ["xla_unknown_shapes"], indirect=True)
def test_noncausal_attention_under_xla_H16(compiled):
    projection = create_projection_matrix(16, 8)
    inputs = [tf.constant(x, tf.float32) for x in (normal(2, 9, 3, 8), normal(2, 13, 3, 8), normal(2, 13, 3, 6))]
    cotangent = tf.constant(normal(2, 9, 3, 6), tf.float32)

    def run(query, key, value):
        return differentiate(
            lambda *inputs: kernel_attention(*inputs, "softmax", projection, chunk_size=4)[0],
            (query, key, value),
            cotangent,
        )

    tf.nest.map_structure(
        lambda actual, expected: assert_close(actual, expected, 1e-5), compiled(run, *inputs), run(*inputs)
    )


@pytest.mark.parametrize("kernel, dtype", [("softmax", "bfloat16"), ("relu", "float16")])
@causal_and_not
def test_half_precision_is_computed_in_float32_and_cast_back(kernel, causal, dtype):
    inputs = [tf.cast(x, dtype) for x in normal(3, 2, 9, 2, 8)]
    projection, cotangent = create_projection_matrix(16, 8), tf.cast(normal(2, 9, 2, 8), dtype)

    def attend(query, key, value):
        return kernel_attention(query, key, value, kernel, projection, causal=causal, chunk_size=4)[0]

    output, gradients = differentiate(attend, inputs, cotangent)
    expected = differentiate(attend, [tf.cast(x, tf.float32) for x in inputs], cotangent)
    for actual, wanted in zip((output, *gradients), (expected[0], *expected[1]), strict=True):
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, tf.cast(wanted, dtype))


def test_arrays_and_their_precision():
    projection = normal(6, 4)
    for dtype in ("float64", "float32"):
        inputs = normal(3, 1, 9, 2, 4).astype(dtype)
        assert favor_attention(*inputs, "softmax", True, projection).dtype == dtype
        assert favor_attention(*inputs, "softmax", True, tf.cast(projection, tf.float32)).dtype == dtype


def long_paths():
    projection = create_projection_matrix(8, 4)
    return {
        "softmax": lambda query, key, value: favor_attention(query, key, value, "softmax", True, projection),
        "relu_noncausal": lambda query, key, value: favor_attention(query, key, value, "relu", False),
        "linear_attention": lambda query, key, value: linear_attention(
            query, key, value, key_log_scale=key[..., 0], causal=True
        ),
    }


LONG_PATHS = long_paths()


def gradient_function(path, length):
    """The traced function for the gradients with respect to three tensors [1, T, 1, 4]."""

    def gradients(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(tf.square(path(*inputs)))
        return tape.gradient(loss, inputs)

    return tf.function(gradients, [tf.TensorSpec([1, length, 1, 4])] * 3, autograph=False)


def count_nodes(function):
    graph = function.get_concrete_function().graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


@pytest.mark.parametrize("name", LONG_PATHS)
def test_graph_does_not_grow_with_length_F1(name):
    # One chunk needs no loop, and without causality 1,024 tokens are one chunk.
    short = 2048 if name == "relu_noncausal" else 1024
    path = LONG_PATHS[name]
    assert count_nodes(gradient_function(path, short)) == count_nodes(gradient_function(path, 65_536))


def test_first_call_at_length_65536_is_hardly_slower_than_the_second_F1():
    function = gradient_function(LONG_PATHS["softmax"], 65_536)
    inputs = [tf.constant(x, tf.float32) for x in normal(3, 1, 65_536, 1, 4)]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        gradients = function(*inputs)
        seconds.append(time.perf_counter() - start)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert seconds[0] - seconds[1] < 10


def test_no_array_grows_in_a_loop_H16():
    """Under XLA a TensorArray of dynamic size silently comes out empty."""
    sources = list(pathlib.Path(favor_keras.__file__).parent.rglob("*.py"))
    assert any(path.name == "chunk_scan.py" for path in sources)
    assert not [path for path in sources if "dynamic_size=True" in path.read_text(encoding="utf-8")]


def compile_with_all_optimizations():
    """Values and gradients of every op that XLA compiles, in a graph and under XLA."""
    assert not os.environ["XLA_FLAGS"]
    x = [tf.constant(y, tf.float32) for y in normal(4, 2, 150, 3, 8)]
    weight = tf.constant(normal(150, 150), tf.float32) / 150
    ops = {
        "relu": lambda q, k, v, _: favor_attention(q, k, v, "relu", causal=True),
        "softmax": lambda q, k, v, p: favor_attention(q, k, v, "softmax", causal=True, projection_matrix=p[0, :6, 0]),
        "noncausal": lambda q, k, v, _: favor_attention(q, k, v, "relu", causal=False),
        "delta_rule": lambda q, k, v, b: delta_rule(q, tf.math.l2_normalize(k, -1), v, tf.sigmoid(b[..., 0])),
        "spatial_gating": lambda u, v, *_: spatial_gating(
            *(tf.reshape(y, [2, 150, 24]) for y in (u, v)), weight, tf.ones([150]), causal=True
        ),
    }
    for name, op in ops.items():
        graph, compiled = (
            tf.function(functools.partial(value_and_gradients, op), autograph=False, jit_compile=jit_compile)(x)
            for jit_compile in (False, True)
        )
        for result, expected in zip(tf.nest.flatten(compiled), tf.nest.flatten(graph), strict=True):
            assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max(), name


def test_all_optimizations_of_xla_leave_the_results_alone_H15():
    run_in_fresh_process("test_attention_ops", "compile_with_all_optimizations", XLA_FLAGS="")


# Bad arguments. `linear_attention` has its own; these are those of a kernel.


@pytest.mark.parametrize(
    "kernel, projection, message",
    [
        ("softmax", None, "projection_matrix.*received None"),
        ("softmax", np.ones([6, 3]), r"projection_matrix must be \[features, 4\]"),
        ("relu", np.ones([6, 3]), r"projection_matrix must be \[features, 4\]"),
        ("relu", np.ones([4]), r"projection_matrix must be \[features, 4\]"),
        ("sofmax", None, "kernel_transformation must be one of .*received 'sofmax'"),
        (None, None, "kernel_transformation must be one of .*received None"),
    ],
)
@pytest.mark.parametrize("length", [5, 200], ids=["one_chunk", "chunks"])
def test_bad_kernels_and_projections_are_named(kernel, projection, message, length):
    with pytest.raises(ValueError, match=message):
        favor_attention(*normal(3, 1, length, 2, 4), kernel, True, projection)


@pytest.mark.parametrize(
    "shapes",
    [[(7, 2, 4)] * 3, [(1, 7, 2, 4), (1, 7, 2, 4), (1, 6, 2, 4)], [(1, 7, 2, 4), (1, 7, 2, 5), (1, 7, 2, 4)]],
    ids=str,
)
@both_kernels
def test_bad_shapes_are_named(kernel, shapes):
    with pytest.raises(
        ValueError, match="query, key and value must be|key and value must agree|query and key must agree"
    ):
        favor_attention(*(np.ones(shape, "float32") for shape in shapes), kernel, False, create_projection_matrix(8, 4))


@both_kernels
def test_bad_dtypes_are_named(kernel):
    projection = create_projection_matrix(8, 4)
    for dtypes in (["int32"] * 3, ["float32", "float32", "float64"], ["float16", "float32", "float32"]):
        with pytest.raises(ValueError, match="one floating-point dtype, received"):
            favor_attention(*(np.ones([1, 7, 2, 4], dtype) for dtype in dtypes), kernel, False, projection)
