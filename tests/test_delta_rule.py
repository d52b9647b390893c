"""The delta rule in chunks against the loop over tokens, in every mode that it can run in."""

import functools
import pathlib
import subprocess
import sys
import time

import delta_oracle
import numpy as np
import pytest
import tensorflow as tf
from oracles import assert_close, directional_derivative

from favor_keras.ops.delta_rule import delta_rule
from favor_keras.ops.dpfp import dpfp

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
B, H, K, D = 2, 2, 5, 3

both_precisions = pytest.mark.parametrize("dtype", ["float64", "float32"])
variants = pytest.mark.parametrize("variant", ["plain", "state", "gated", "gated_state"])


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make_arguments(length, variant):
    """Two dicts of arrays that are exact in float32: arguments and cotangents.

    Keys are at most of length 1, some twice in a row; strengths are 0, 1 or between; decays are 0, -20 or between.
    """
    rng = np.random.default_rng(length)

    def exact(x):
        return x.astype("float32").astype("float64")

    def normal(*shape):
        return exact(rng.normal(size=shape))

    key = exact(unit(rng.normal(size=[B, length, H, K])) * rng.choice([0.5, 1.0], size=[B, length, H, 1]))
    key[:, 1::3] = key[:, : length - 1 : 3]
    arguments = {
        "query": normal(B, length, H, K),
        "key": key,
        "value": normal(B, length, H, D),
        "beta": exact(np.clip(rng.uniform(-0.3, 1.3, size=[B, length, H]), 0.0, 1.0)),
    }
    if "gated" in variant:
        arguments["log_decay"] = exact(rng.choice([0.0, -0.01, -0.3, -2.0, -20.0], size=[B, length, H]))
    if "state" in variant:
        arguments["initial_state"] = normal(B, H, K, D)
    return arguments, {"output": normal(B, length, H, D), "state": normal(B, H, K, D)}


def to_tensors(arrays, dtype):
    return tf.nest.map_structure(lambda x: tf.constant(x, dtype), arrays)


def apply(arguments, **options):
    return delta_rule(**arguments, return_state=True, **options)


def apply_and_differentiate(arguments, cotangents, **options):
    """Output, final state, and the gradients of all arguments."""
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        output, state = apply(arguments, **options)
    gradients = tape.gradient([output, state], arguments, [cotangents["output"], cotangents["state"]])
    return output, state, gradients


def naive_results(arguments, cotangents):
    gradients = delta_oracle.delta_rule_gradients(cotangents["output"], cotangents["state"], **arguments)
    return *delta_oracle.delta_rule(**arguments), {name: gradients[name] for name in arguments}


def check(results, expected, dtype):
    output, state, gradients = results
    assert output.dtype == dtype and state.dtype == dtype
    assert_close(output, expected[0], TOLERANCE[dtype])
    assert_close(state, expected[1], TOLERANCE[dtype])
    assert gradients.keys() == expected[2].keys()
    for name, gradient in gradients.items():
        # A gradient may cancel to 0, but the terms that cancel are of size 1.
        assert_close(gradient, expected[2][name], TOLERANCE[dtype], smallest_scale=1.0)


@variants
def test_oracle_gradients_are_derivatives_of_the_oracle(variant):
    arguments, cotangents = make_arguments(6, variant)
    gradients = naive_results(arguments, cotangents)[2]

    def loss(*values):
        output, state = delta_oracle.delta_rule(**dict(zip(arguments, values)))
        return np.sum(cotangents["output"] * output) + np.sum(cotangents["state"] * state)

    rng = np.random.default_rng(1)
    for name in arguments:
        directions = [rng.normal(size=x.shape) * (name == other) for other, x in arguments.items()]
        derivative = directional_derivative(loss, arguments.values(), directions)
        assert_close(np.sum(gradients[name] * directions[list(arguments).index(name)]), derivative, 1e-12)


def test_oracle_is_the_gated_delta_rule_as_its_paper_writes_it():
    """S_t = S_{t-1} (a_t (I - b_t k_t k_t^T)) + b_t v_t k_t^T, for the transposed state [D, K]."""
    arguments, _ = make_arguments(6, "gated_state")
    state = np.swapaxes(arguments["initial_state"], -1, -2)
    for t in range(6):
        key, value = arguments["key"][:, t, :, :, None], arguments["value"][:, t, :, :, None]
        beta, decay = arguments["beta"][:, t, :, None, None], np.exp(arguments["log_decay"][:, t, :, None, None])
        key_row = np.swapaxes(key, -1, -2)
        state = state @ (decay * (np.eye(K) - beta * key @ key_row)) + beta * value @ key_row
    assert_close(np.swapaxes(delta_oracle.delta_rule(**arguments)[1], -1, -2), state, 1e-12)


@both_precisions
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 33])
def test_equals_the_original(reference, chunk_size, dtype):
    arrays = reference("fast_weights")
    names = ("query", "key", "value", "beta", "initial_state")
    arguments = to_tensors({name: arrays[f"delta_{name}"] for name in names}, dtype)
    output, state = apply(arguments, chunk_size=chunk_size)
    assert_close(output, arrays["delta_output"], TOLERANCE[dtype])
    assert_close(state, arrays["delta_final_state"], TOLERANCE[dtype])


@both_precisions
@pytest.mark.parametrize("nu", [1, 2, 3])
def test_fast_weights_attention_equals_the_original(reference, nu, dtype):
    arrays = reference("fast_weights")
    prefix = f"attention_nu{nu}_"
    kernels = {name: f"{name}_kernel" for name in ("query", "key", "value", "beta")}
    weights = {"input": arrays[prefix + "input"]} | {name: arrays[prefix + name] for name in kernels.values()}
    weights = to_tensors(weights, dtype)
    output_kernel, bias, cotangent = (
        tf.constant(arrays[prefix + name], dtype) for name in ("output_kernel", "output_bias", "cotangent")
    )
    with tf.GradientTape() as tape:
        tape.watch(weights)
        projected = {name: tf.tensordot(weights["input"], weights[kernel], 1) for name, kernel in kernels.items()}
        beta = tf.sigmoid(projected.pop("beta"))
        heads = {name: tf.reshape(x, [*beta.shape, -1]) for name, x in projected.items()}
        memory = delta_rule(dpfp(heads["query"], nu), dpfp(heads["key"], nu), heads["value"], beta, chunk_size=8)
        output = tf.tensordot(tf.reshape(memory, weights["input"].shape), output_kernel, 1) + bias
    assert_close(output, arrays[prefix + "output"], TOLERANCE[dtype])
    for name, gradient in tape.gradient(output, weights, cotangent).items():
        assert_close(gradient, arrays[f"{prefix}d{name}"], TOLERANCE[dtype])


@functools.lru_cache(maxsize=1)
def case(length, variant):
    arguments = make_arguments(length, variant)
    return arguments, naive_results(*arguments)


@functools.cache
def function_of_unknown_shapes(variant):
    arguments = to_tensors(make_arguments(4, variant), "float32")
    signature = tf.nest.map_structure(lambda x: tf.TensorSpec([None, None, *x.shape[2:]], x.dtype), arguments)
    return tf.function(apply_and_differentiate, signature)


@functools.cache
def compiled_for_long_sequences():
    """Value and gradients, of which eager mode would run every operation of every chunk by itself."""

    @tf.function
    def run(arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            output, state = apply(arguments)
        return output, state, tape.gradient(output, arguments)

    return run


@variants
@pytest.mark.parametrize("length", [*range(1, 10), 31, 63, 64, 65, 127, 128, 129, 257, 1021])
def test_equals_the_loop_at_every_length_H6_H7(length, variant):
    arguments, expected = case(length, variant)
    check(apply_and_differentiate(*to_tensors(arguments, "float64")), expected, "float64")
    check(function_of_unknown_shapes(variant)(*to_tensors(arguments, "float32")), expected, "float32")


@pytest.mark.parametrize("variant", ["state", "gated_state"])
@pytest.mark.parametrize("length, chunk_size", [*((length, 3) for length in range(1, 11)), (21, 1), (21, 8), (21, 100)])
def test_any_chunk_size_gives_the_same_H7(length, chunk_size, variant):
    arguments, expected = case(length, variant)
    check(apply_and_differentiate(*to_tensors(arguments, "float64"), chunk_size=chunk_size), expected, "float64")


@pytest.mark.parametrize("variant", ["state", "gated_state"])
def test_same_in_every_mode_H15(compiled, variant):
    arguments = to_tensors(make_arguments(13, variant), "float32")
    function = functools.partial(apply_and_differentiate, chunk_size=5)
    tf.nest.map_structure(
        lambda actual, expected: assert_close(actual, expected, 1e-5, smallest_scale=1.0),
        compiled(function, *arguments),
        function(*arguments),
    )


@both_precisions
@pytest.mark.parametrize("variant", ["state", "gated_state"])
@pytest.mark.parametrize("splits", [[1], [5], [31], [63], [5, 31, 32, 34]], ids=str)
def test_in_pieces_equals_whole_D2(splits, variant, dtype):
    arguments = to_tensors(make_arguments(64, variant)[0], dtype)
    output, final_state = apply(arguments, chunk_size=16)
    state, pieces = arguments.pop("initial_state"), []
    for start, end in zip([0, *splits], [*splits, 64]):
        piece = {name: x[:, start:end] for name, x in arguments.items()}
        piece, state = apply(piece, initial_state=state, chunk_size=16)
        pieces.append(piece)
    assert_close(tf.concat(pieces, axis=1), output, TOLERANCE[dtype])
    assert_close(state, final_state, TOLERANCE[dtype])


@pytest.mark.parametrize("variant", ["plain", "gated"])
def test_token_by_token_equals_whole_D5(variant):
    arguments = to_tensors(make_arguments(20, variant)[0], "float32")
    output, final_state = apply(arguments, chunk_size=8)
    state, tokens = None, []
    for t in range(20):
        token, state = apply({name: x[:, t : t + 1] for name, x in arguments.items()}, initial_state=state)
        tokens.append(token)
    assert_close(tf.concat(tokens, axis=1), output, 1e-5)
    assert_close(state, final_state, 1e-5)


@pytest.mark.parametrize("variant", ["state", "gated_state"])
@pytest.mark.parametrize("prefix", [1, 2, 10, 20])
def test_output_depends_on_nothing_later(prefix, variant):
    arguments, _ = make_arguments(21, variant)
    later = {name: x.copy() for name, x in arguments.items()}
    for name in arguments.keys() - {"initial_state", "beta"}:
        later[name][:, prefix:] *= 10
    later["beta"][:, prefix:] = 1 - later["beta"][:, prefix:]
    output = apply(to_tensors(arguments, "float32"), chunk_size=8)[0]
    np.testing.assert_array_equal(apply(to_tensors(later, "float32"), chunk_size=8)[0][:, :prefix], output[:, :prefix])
    shorter = {name: x if name == "initial_state" else x[:, :prefix] for name, x in arguments.items()}
    assert_close(apply(to_tensors(shorter, "float32"), chunk_size=8)[0], output[:, :prefix], 1e-5)


@both_precisions
@pytest.mark.parametrize("variant", ["state", "gated_state"])
def test_tokens_of_strength_zero_are_not_there(variant, dtype):
    arguments, _ = make_arguments(20, variant)
    there = np.arange(20) % 3 != 1
    arguments["beta"][:, ~there] = 0
    if variant == "gated_state":
        arguments["log_decay"][:, ~there] = 0
    arguments["key"][:, ~there] *= 100
    kept = {name: x if name == "initial_state" else x[:, there] for name, x in arguments.items()}
    output, state = apply(to_tensors(arguments, dtype), chunk_size=8)
    expected, expected_state = delta_oracle.delta_rule(**kept)
    assert_close(output.numpy()[:, there], expected, TOLERANCE[dtype])
    assert_close(state, expected_state, TOLERANCE[dtype])


@pytest.mark.parametrize("variant", ["plain", "state"])
def test_log_decay_of_zero_is_exactly_none(variant):
    arguments, cotangents = to_tensors(make_arguments(21, variant), "float32")
    expected = apply_and_differentiate(arguments, cotangents, chunk_size=8)
    gated = arguments | {"log_decay": tf.zeros_like(arguments["beta"])}
    output, state, gradients = apply_and_differentiate(gated, cotangents, chunk_size=8)
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(state, expected[1])
    for name in arguments:
        assert_close(gradients[name], expected[2][name], 1e-6)


@both_precisions
@pytest.mark.parametrize("log_decay", [0.0, -1e-3, -1.0, -20.0, -np.inf])
def test_constant_decay_neither_overflows_nor_cancels(log_decay, dtype):
    arguments, cotangents = make_arguments(150, "gated_state")
    arguments["log_decay"] = np.full_like(arguments["beta"], np.float32(log_decay))
    with np.errstate(invalid="raise"):
        expected = naive_results(arguments, cotangents)
    check(apply_and_differentiate(*to_tensors((arguments, cotangents), dtype)), expected, dtype)


def test_weak_decay_after_strong_decay_keeps_its_digits():
    """Sums of log decays from the start of the chunk reach -1,000, where float32 has no 1e-5 any more."""
    arguments, cotangents = make_arguments(64, "gated_state")
    arguments["log_decay"] = np.float32(np.where(np.arange(64) < 50, -20.0, -1e-3))[None, :, None] * np.ones([B, 1, H])
    check(
        apply_and_differentiate(*to_tensors((arguments, cotangents), "float32")),
        naive_results(arguments, cotangents),
        "float32",
    )


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.01])
def test_identical_unit_keys_do_not_drift(strength):
    """The state along the key is the running average x_t = x_{t-1} + beta (v_t - x_{t-1}), however long."""
    length, rng = 4096, np.random.default_rng(0)
    key = np.broadcast_to(unit(rng.normal(size=[8])), [1, length, 1, 8])
    value = rng.normal(size=[1, length, 1, 2])
    beta = np.full([1, length, 1], strength)
    average, averages = np.zeros(2), []
    for v in value[0, :, 0]:
        average = average + strength * (v - average)
        averages.append(average)
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        arguments = to_tensors({"query": key, "key": key, "value": value, "beta": beta}, dtype)
        output, state, _ = compiled_for_long_sequences()(arguments)
        assert_close(output[0, :, 0], averages, tolerance)
        assert_close(state[0, 0], key[0, 0, 0][:, None] * average, tolerance)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("variant", ["state", "gated_state"])
def test_half_precision_is_computed_in_float32_and_cast_back(variant, dtype):
    arguments, cotangents = make_arguments(13, variant)
    state, d_state = arguments.pop("initial_state"), cotangents.pop("state")
    halves = to_tensors((arguments, cotangents), dtype)
    states = to_tensors((state, d_state), "float32")
    singles = tf.nest.map_structure(lambda x: tf.cast(x, "float32"), halves)

    def run(arguments, cotangents):
        arguments, cotangents = arguments | {"initial_state": states[0]}, cotangents | {"state": states[1]}
        return apply_and_differentiate(arguments, cotangents, chunk_size=4)

    results, expected = run(*halves), run(*singles)
    assert results[0].dtype == dtype and results[1].dtype == "float32"
    tf.nest.map_structure(
        lambda actual, wanted: np.testing.assert_array_equal(actual, tf.cast(wanted, actual.dtype)), results, expected
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("normalization", ["dpfp", "unit"])
def test_large_inputs_stay_finite_with_normalized_keys_N1(normalization, dtype):
    rng = np.random.default_rng(0)
    x = tf.cast(5 * rng.normal(size=[1, 4096, 2, 16]), dtype)
    key = dpfp(x) if normalization == "dpfp" else tf.cast(unit(np.float64(x)), dtype)
    beta = tf.cast(rng.uniform(size=[1, 4096, 2]), dtype)
    arguments = {"query": key, "key": key, "value": x, "beta": beta}
    output, state, gradients = compiled_for_long_sequences()(arguments)
    assert output.dtype == dtype and state.dtype == "float32"
    assert np.max(np.abs(state)) < 100
    assert all(np.all(np.isfinite(np.float32(x))) for x in [output, *gradients.values()])


@pytest.mark.parametrize("known_length", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("variant", ["state", "gated_state"])
def test_empty_sequence_returns_the_initial_state(variant, known_length):
    arguments = to_tensors(make_arguments(0, variant)[0], "float32")
    signature = {name: tf.TensorSpec([None, None, *x.shape[2:]]) for name, x in arguments.items()}
    function = apply if known_length else tf.function(apply, [signature])
    output, state = function(arguments)
    assert output.shape == [B, 0, H, D]
    np.testing.assert_array_equal(state, arguments["initial_state"])


@pytest.mark.parametrize("variant", ["state", "gated_state"])
def test_second_derivatives(variant):
    """The derivative of all gradients along random directions, from the oracle's gradients."""
    arguments, cotangents = make_arguments(7, variant)
    rng = np.random.default_rng(1)
    directions = {name: rng.normal(size=x.shape) for name, x in arguments.items()}

    def naive_gradients(*values):
        gradients = naive_results(dict(zip(arguments, values)), cotangents)[2]
        return np.concatenate([gradients[name].ravel() for name in arguments])

    tensors = to_tensors(arguments, "float64")
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        gradients = apply_and_differentiate(tensors, cotangents, chunk_size=3)[2]
        slope = sum(tf.reduce_sum(gradients[name] * directions[name]) for name in arguments)
    products = tape.gradient(slope, tensors)
    expected = directional_derivative(naive_gradients, arguments.values(), directions.values())
    assert_close(np.concatenate([np.ravel(products[name]) for name in arguments]), expected, 1e-9)


def count_nodes(function):
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function)


def test_graph_does_not_grow_with_the_length():
    def gradients(length):
        arguments = {name: tf.TensorSpec([1, length, 1, 4]) for name in ("query", "key", "value")}
        arguments["beta"] = tf.TensorSpec([1, length, 1])
        cotangents = {"output": tf.TensorSpec([1, length, 1, 4]), "state": tf.TensorSpec([1, 1, 4, 4])}
        return tf.function(apply_and_differentiate).get_concrete_function(arguments, cotangents)

    assert count_nodes(gradients(1024)) == count_nodes(gradients(65536))


def test_first_call_at_65536_tokens_is_not_much_slower_than_the_second():
    rng = np.random.default_rng(0)
    key = tf.constant(unit(rng.normal(size=[1, 65536, 1, 4])), "float32")
    arguments = {"query": key, "key": key, "value": key, "beta": tf.fill([1, 65536, 1], 0.5)}
    cotangents = {"output": key, "state": tf.ones([1, 1, 4, 4])}
    function, seconds = tf.function(apply_and_differentiate), []
    for _ in range(2):
        start = time.perf_counter()
        assert np.all(np.isfinite(function(arguments, cotangents)[0]))
        seconds.append(time.perf_counter() - start)
    assert seconds[0] < seconds[1] + 10


MEMORY_SCRIPT = """
import pathlib
import tensorflow as tf
from favor_keras.ops.delta_rule import delta_rule

@tf.function
def gradients(query, key, value, beta):
    with tf.GradientTape() as tape:
        tape.watch([query, key, value, beta])
        output = delta_rule(query, key, value, beta)
    return tape.gradient(output, [query, key, value, beta])

def peak():
    # Not by getrusage, whose peak a process inherits from the one that started it.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

for length in (4096, 16384):
    x = tf.math.l2_normalize(tf.random.normal([1, length, 4, 64]), axis=-1)
    gradients(x, x, x, tf.fill([1, length, 4], 0.5))
    print(peak())
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="the system does not tell the peak memory")
def test_backward_memory_is_small_and_linear_F7():
    """16,384 states of 4 heads would be 1 GB, and autodiff of a loop over tokens keeps several of them."""
    result = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    short, long = map(float, result.stdout.split())
    assert short < 1500
    assert long - short < 500


def zeros(*shape, dtype="float32"):
    return tf.zeros(shape, dtype)


GOOD = {"query": zeros(1, 7, 2, 4), "key": zeros(1, 7, 2, 4), "value": zeros(1, 7, 2, 3), "beta": zeros(1, 7, 2)}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"query": zeros(7, 2, 4)}, r"query must be \[batch, length, heads, key size\], received .* \(7, 2, 4\)"),
        ({"key": zeros(1, 7, 2, 5)}, r"key must be \[batch 1, length 7, heads 2, key size 4\], .* \(1, 7, 2, 5\)"),
        ({"key": zeros(1, 6, 2, 4)}, r"key must be \[batch 1, length 7, .* \(1, 6, 2, 4\)"),
        ({"value": zeros(1, 7, 3, 3)}, r"value must be \[batch 1, length 7, heads 2, value size\], .* \(1, 7, 3, 3\)"),
        ({"beta": zeros(1, 7, 2, 1)}, r"beta must be \[batch 1, length 7, heads 2\], .* \(1, 7, 2, 1\)"),
        ({"beta": zeros(1, 7, 1)}, r"beta must be \[batch 1, length 7, heads 2\], .* \(1, 7, 1\)"),
        ({"log_decay": zeros(2, 7, 2)}, r"log_decay must be \[batch 1, length 7, heads 2\], .* \(2, 7, 2\)"),
        ({"initial_state": zeros(1, 2, 3, 4)}, r"initial_state must be \[batch 1, heads 2, key size 4, value size 3\]"),
        ({"value": zeros(1, 7, 2, 3, dtype="float64")}, "query, key and value must have one dtype, .* float64"),
        ({"beta": zeros(1, 7, 2, dtype="bool")}, "beta must be floating-point, received bool"),
        ({"chunk_size": 0}, "chunk_size must be a positive integer, received 0"),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        delta_rule(**GOOD | bad)
