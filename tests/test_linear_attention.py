"""Linear attention against the naive sums over all pairs, in every mode that it can run in."""

import functools

import numpy as np
import oracles
import pytest
import tensorflow as tf
from oracles import assert_close, directional_derivative

from favor_keras.ops import linear_attention

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
B, H, M, D = 2, 2, 5, 3
INPUTS = ("query", "key", "value", "key_log_scale")
SUMS = ("numerator", "denominator")

with_and_without_state = pytest.mark.parametrize("with_state", [False, True], ids=["no_state", "state"])
both_precisions = pytest.mark.parametrize("dtype", ["float64", "float32"])


def make_arguments(length, source_length=None, scale_deviation=50.0, with_state=False):
    """Three dicts of arrays that are exact in float32: inputs, initial state (maybe empty), cotangents."""
    rng = np.random.default_rng(length)
    source_length = length if source_length is None else source_length

    def exact(x):
        return x.astype("float32").astype("float64")

    def normal(*shape):
        return exact(rng.normal(size=shape))

    def positive(*shape):
        return exact(rng.uniform(0.1, 1.1, size=shape))

    inputs = {
        "query": positive(B, length, H, M),
        "key": positive(B, source_length, H, M),
        "value": normal(B, source_length, H, D),
        "key_log_scale": exact(scale_deviation * normal(B, source_length, H)),
    }
    cotangents = {"output": normal(B, length, H, D), "numerator": normal(B, H, M, D), "denominator": normal(B, H, M)}
    state = {}
    if with_state:
        # A head whose past outweighs all its keys, two where neither does, and one without a past.
        log_scale = np.array([[4.0 * scale_deviation, scale_deviation], [0.0, -np.inf]])
        state = {"numerator": normal(B, H, M, D), "denominator": positive(B, H, M), "log_scale": log_scale}
    return inputs, state, cotangents


def to_tensors(arrays, dtype):
    return tf.nest.map_structure(lambda x: tf.constant(x, dtype), arrays)


def attend(inputs, state, **options):
    return linear_attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        key_log_scale=inputs["key_log_scale"],
        initial_state=state or None,
        return_state=True,
        **options,
    )


def attend_and_differentiate(inputs, state, cotangents, **options):
    """Output, final state, and the gradients of everything that has one."""
    with tf.GradientTape() as tape:
        tape.watch((inputs, state))
        output, final_state = attend(inputs, state, **options)
        results = {"output": output, **{name: final_state[name] for name in SUMS}}
    sources = inputs | {name: state[name] for name in SUMS if name in state}
    return output, final_state, tape.gradient(results, sources, cotangents, unconnected_gradients="zero")


def naive_results(arguments, **options):
    inputs, state, cotangents = arguments
    output, final_state = oracles.linear_attention(*inputs.values(), state, **options)
    return (
        output,
        final_state,
        oracles.linear_attention_gradients(*inputs.values(), state, *cotangents.values(), **options),
    )


def check(results, expected, dtype):
    output, state, gradients = results
    expected_output, expected_state, expected_gradients = expected
    assert output.dtype == dtype and all(tensor.dtype == dtype for tensor in state.values())
    assert_close(output, expected_output, TOLERANCE[dtype])
    for name, tensor in state.items():
        if name == "log_scale":
            np.testing.assert_array_equal(tensor, expected_state[name])
        else:
            assert_close(tensor, expected_state[name], TOLERANCE[dtype])
    for name, gradient in gradients.items():
        # A gradient may cancel to 0, but the terms that cancel are of size 1.
        assert_close(gradient, expected_gradients[name], TOLERANCE[dtype], smallest_scale=1.0)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "unnormalized"])
@pytest.mark.parametrize("causal, source_length", [(True, 6), (False, 6), (False, 9)])
def test_oracle_gradients_are_derivatives_of_the_oracle(causal, source_length, normalize):
    inputs, state, cotangents = make_arguments(6, source_length, scale_deviation=2.0, with_state=True)
    options = {"causal": causal, "normalize": normalize}
    gradients = naive_results((inputs, state, cotangents), **options)[2]

    def loss(*arguments):
        state_arguments = dict(zip(SUMS, arguments[4:])) | {"log_scale": state["log_scale"]}
        output, final_state = oracles.linear_attention(*arguments[:4], state_arguments, **options)
        return sum(
            np.sum(cotangents[name] * x) for name, x in {"output": output, **final_state}.items() if name in cotangents
        )

    arguments = [*inputs.values(), *(state[name] for name in SUMS)]
    rng = np.random.default_rng(1)
    for i, name in enumerate((*INPUTS, *SUMS)):
        directions = [rng.normal(size=x.shape) if i == j else np.zeros_like(x) for j, x in enumerate(arguments)]
        derivative = directional_derivative(loss, arguments, directions)
        assert_close(np.sum(gradients[name] * directions[i]), derivative, 1e-12)


@functools.lru_cache(maxsize=1)
def causal_case(length, with_state):
    arguments = make_arguments(length, with_state=with_state)
    return arguments, naive_results(arguments, causal=True)


@functools.cache
def causal_function_of_unknown_shapes(with_state):
    arguments = to_tensors(make_arguments(4, with_state=with_state), "float32")
    signature = tf.nest.map_structure(lambda x: tf.TensorSpec([None, None, *x.shape[2:]], x.dtype), arguments)
    return tf.function(functools.partial(attend_and_differentiate, causal=True), signature)


@both_precisions
@with_and_without_state
@pytest.mark.parametrize("length", [*range(1, 10), 31, 63, 64, 65, 127, 128, 129, 257, 1021])
def test_causal_equals_naive_at_every_length_H6_H7(length, with_state, dtype):
    arguments, expected = causal_case(length, with_state)
    arguments = to_tensors(arguments, dtype)
    if dtype == "float64":
        check(attend_and_differentiate(*arguments, causal=True), expected, dtype)
    else:
        check(causal_function_of_unknown_shapes(with_state)(*arguments), expected, dtype)


@pytest.mark.parametrize("length", range(1, 11))
def test_causal_equals_naive_around_the_edges_of_chunks_C8_H7(length):
    arguments, expected = causal_case(length, True)
    check(attend_and_differentiate(*to_tensors(arguments, "float64"), causal=True, chunk_size=3), expected, "float64")


def test_long_sequences_are_finite_and_equal_those_in_other_chunks():
    arguments = [to_tensors(part, "float64") for part in make_arguments(65_537, with_state=True)]
    in_graph = tf.function(functools.partial(attend_and_differentiate, causal=True), autograph=False)
    results = in_graph(*arguments)
    assert all(np.all(np.isfinite(gradient)) for gradient in results[2].values())
    check(results, in_graph(*arguments, chunk_size=1024), "float64")


@both_precisions
@with_and_without_state
@pytest.mark.parametrize("chunk_size", [None, 8], ids=["one_chunk", "chunks"])
@pytest.mark.parametrize("length, source_length", [(1, 1), (5, 17), (17, 5), (25, 25)])
def test_noncausal_equals_naive(length, source_length, chunk_size, with_state, dtype):
    arguments = make_arguments(length, source_length, with_state=with_state)
    results = attend_and_differentiate(*to_tensors(arguments, dtype), chunk_size=chunk_size)
    check(results, naive_results(arguments), dtype)


@both_precisions
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_unnormalized_equals_naive(causal, dtype):
    options = {"causal": causal, "normalize": False}
    arguments = make_arguments(13, scale_deviation=2.0, with_state=True)
    results = attend_and_differentiate(*to_tensors(arguments, dtype), chunk_size=4, **options)
    check(results, naive_results(arguments, **options), dtype)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_no_log_scale_is_a_log_scale_of_zero(causal):
    inputs, state, cotangents = make_arguments(13, scale_deviation=0.0, with_state=True)
    expected = naive_results((inputs, state, cotangents), causal=causal)
    inputs = to_tensors(inputs, "float64") | {"key_log_scale": None}
    output, final_state = attend(inputs, to_tensors(state, "float64"), causal=causal, chunk_size=4)
    assert_close(output, expected[0], 1e-12)
    assert_close(final_state["numerator"], expected[1]["numerator"], 1e-12)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize("shape", [(1, 13, 1), (B, 13, 1), (1, 13, H), (B, 1, H), (1, 1, 1)], ids=str)
def test_log_scale_broadcasts_and_its_gradient_sums(shape, causal):
    inputs, state, cotangents = make_arguments(13, with_state=True)
    scale = inputs["key_log_scale"][: shape[0], : shape[1], : shape[2]]
    inputs["key_log_scale"] = np.broadcast_to(scale, [B, 13, H])
    output, final_state, gradients = naive_results((inputs, state, cotangents), causal=causal)
    inputs["key_log_scale"] = scale
    results = attend_and_differentiate(*to_tensors((inputs, state, cotangents), "float64"), causal=causal, chunk_size=4)
    summed = tuple(axis for axis in range(3) if shape[axis] == 1)
    gradients["key_log_scale"] = gradients["key_log_scale"].sum(axis=summed, keepdims=True)
    check(results, (output, final_state, gradients), "float64")


def test_same_in_every_mode_H15_H16(compiled):
    arguments = to_tensors(make_arguments(13, scale_deviation=5.0, with_state=True), "float32")
    function = functools.partial(attend_and_differentiate, causal=True, chunk_size=4)
    tf.nest.map_structure(
        lambda actual, expected: assert_close(actual, expected, 1e-5),
        compiled(function, *arguments),
        function(*arguments),
    )


@pytest.mark.parametrize("splits", [[1], [5], [31], [64], [69], [5, 64, 65], [1, 2, 3, 4]], ids=str)
@both_precisions
def test_causal_in_pieces_equals_whole_D2(splits, dtype):
    inputs, state, _ = make_arguments(70, with_state=True)
    inputs, state = to_tensors((inputs, state), dtype)
    output, final_state = attend(inputs, state, causal=True)
    pieces = []
    for start, end in zip([0, *splits], [*splits, 70]):
        piece, state = attend({name: x[:, start:end] for name, x in inputs.items()}, state, causal=True)
        pieces.append(piece)
    assert_close(tf.concat(pieces, axis=1), output, TOLERANCE[dtype])
    for name in final_state:
        assert_close(state[name], final_state[name], TOLERANCE[dtype])


def test_causal_token_by_token_equals_whole_D5_D6():
    inputs, _, _ = make_arguments(20)
    inputs = to_tensors(inputs, "float32")
    output, final_state = attend(inputs, None, causal=True, chunk_size=8)
    state, tokens = None, []
    for t in range(20):
        token, state = attend({name: x[:, t : t + 1] for name, x in inputs.items()}, state, causal=True)
        tokens.append(token)
    assert_close(tf.concat(tokens, axis=1), output, 1e-5)
    for name in final_state:
        assert_close(state[name], final_state[name], 1e-5)


@pytest.mark.parametrize("split", [1, 9, 16])
def test_noncausal_sources_in_pieces_equal_whole(split):
    inputs, state, _ = make_arguments(6, 17, with_state=True)
    inputs, state = to_tensors((inputs, state), "float64")
    output, final_state = attend(inputs, state)
    sources = ("key", "value", "key_log_scale")
    _, state = attend(inputs | {name: inputs[name][:, :split] for name in sources}, state)
    last, state = attend(inputs | {name: inputs[name][:, split:] for name in sources}, state)
    assert_close(last, output, 1e-12)
    for name in final_state:
        assert_close(state[name], final_state[name], 1e-12)


@both_precisions
@with_and_without_state
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_masked_keys_are_not_there_M2(causal, with_state, dtype):
    inputs, state, cotangents = make_arguments(13, with_state=with_state)
    masked = np.random.default_rng(0).uniform(size=[B, 13, H]) < 0.4
    masked[:, :5, 0] = True  # the first chunk of a head is empty, and part of the second
    inputs["key_log_scale"] = np.where(masked, -np.inf, inputs["key_log_scale"])
    for name in ("key", "value"):
        inputs[name] = np.where(masked[..., None], 100 * inputs[name], inputs[name])
    arguments = inputs, state, cotangents
    results = attend_and_differentiate(*to_tensors(arguments, dtype), causal=causal, chunk_size=4)
    check(results, naive_results(arguments, causal=causal), dtype)
    for name in ("key", "value", "key_log_scale"):
        assert not np.any(results[2][name].numpy()[masked])


@both_precisions
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "unnormalized"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_queries_that_see_no_key_get_exactly_zero_M15(causal, normalize, dtype):
    inputs, state, cotangents = make_arguments(13, scale_deviation=2.0)
    inputs["key_log_scale"][0, :6] = -np.inf
    inputs["key_log_scale"][1, :, 1] = -np.inf
    arguments, options = (inputs, state, cotangents), {"causal": causal, "normalize": normalize}
    results = attend_and_differentiate(*to_tensors(arguments, dtype), chunk_size=4, **options)
    check(results, naive_results(arguments, **options), dtype)
    assert not np.any(results[0][1, :, 1])
    assert not np.any(results[1]["numerator"][1, 1]) and results[1]["log_scale"][1, 1] == -np.inf
    assert np.any(results[0][0, :6]) != causal


@pytest.mark.parametrize("known_length", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_empty_sequence_returns_the_initial_state(causal, known_length):
    inputs, state, _ = make_arguments(0, with_state=True)
    expected = oracles.linear_attention(*inputs.values(), state)[1]
    inputs, state = to_tensors((inputs, state), "float32")
    function = functools.partial(attend, causal=causal)
    if not known_length:
        specs = {name: tf.TensorSpec([None, None, *x.shape[2:]], x.dtype) for name, x in inputs.items()}
        function = tf.function(function, [specs, tf.nest.map_structure(tf.type_spec_from_value, state)])
    output, final_state = function(inputs, state)
    assert output.shape == [B, 0, H, D]
    for name in state:
        np.testing.assert_array_equal(final_state[name], expected[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_half_precision_is_computed_in_float32_and_cast_back(causal, dtype):
    def cast(arrays, dtype):
        return tf.nest.map_structure(lambda x: tf.cast(x, dtype), arrays)

    inputs, state, cotangents = make_arguments(13, scale_deviation=2.0, with_state=True)
    inputs, state = cast(inputs, dtype), cast(state, "float32")
    cotangents = {name: tf.cast(x, dtype if name == "output" else "float32") for name, x in cotangents.items()}
    arguments = inputs, state, cotangents
    results = attend_and_differentiate(*arguments, causal=causal, chunk_size=4)
    expected = attend_and_differentiate(*cast(arguments, "float32"), causal=causal, chunk_size=4)
    assert results[0].dtype == dtype
    assert all(tensor.dtype == "float32" for tensor in results[1].values())
    assert all(results[2][name].dtype == dtype for name in INPUTS)
    tf.nest.map_structure(
        lambda actual, wanted: np.testing.assert_array_equal(actual, tf.cast(wanted, actual.dtype)), results, expected
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_second_derivatives(causal):
    """The derivative of all gradients along random directions, from the oracle's gradients."""
    arguments = make_arguments(7, scale_deviation=2.0, with_state=True)
    inputs, state, cotangents = arguments
    rng = np.random.default_rng(1)
    variables = inputs | {name: state[name] for name in SUMS}
    directions = {name: rng.normal(size=x.shape) for name, x in variables.items()}

    def naive_gradients(*values):
        values = dict(zip(variables, values))
        new_state = {name: values.pop(name) for name in SUMS} | {"log_scale": state["log_scale"]}
        gradients = oracles.linear_attention_gradients(*values.values(), new_state, *cotangents.values(), causal=causal)
        return np.concatenate([gradients[name].ravel() for name in variables])

    def product_with_hessian(inputs, state, cotangents):
        with tf.GradientTape() as tape:
            tape.watch((inputs, state))
            gradients = attend_and_differentiate(inputs, state, cotangents, causal=causal, chunk_size=3)[2]
            slope = sum(tf.reduce_sum(gradients[name] * directions[name]) for name in variables)
        return tape.gradient(slope, inputs | {name: state[name] for name in SUMS})

    products = product_with_hessian(*to_tensors(arguments, "float64"))
    expected = directional_derivative(naive_gradients, variables.values(), directions.values())
    assert_close(np.concatenate([np.ravel(products[name]) for name in variables]), expected, 1e-9)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_one_tensor_as_query_key_and_value(in_graph):
    """Its gradients are sums over its three places, and so are their derivatives."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0.1, 1.1, size=[B, 7, H, M])
    cotangent, direction = rng.normal(size=[2, B, 7, H, M])
    zeros = np.zeros([B, H, M, M]), np.zeros([B, H, M])

    def naive_gradient(x):
        gradients = oracles.linear_attention_gradients(x, x, x, None, None, cotangent, *zeros, causal=True)
        return gradients["query"] + gradients["key"] + gradients["value"]

    def derivatives(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(cotangent * linear_attention(x, x, x, causal=True, chunk_size=3))
            gradient = inner.gradient(loss, x)
            slope = tf.reduce_sum(gradient * direction)
        return gradient, outer.gradient(slope, x)

    function = tf.function(derivatives, autograph=False) if in_graph else derivatives
    gradient, product = function(tf.constant(x))
    assert_close(gradient, naive_gradient(x), 1e-9)
    assert_close(product, directional_derivative(naive_gradient, [x], [direction]), 1e-9)


def zeros(*shape, dtype="float32"):
    return tf.zeros(shape, dtype)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ([zeros(7, 2, 4)] * 3, {}, "query, key and value must be"),
        ([zeros(1, 7, 2, 4, dtype="int32")] * 3, {}, "floating-point dtype, received int32"),
        ([zeros(1, 7, 2, 4), zeros(1, 7, 2, 4), zeros(1, 7, 2, 4, dtype="float64")], {}, "one floating-point dtype"),
        ([zeros(1, 7, 2, 4), zeros(1, 7, 2, 4), zeros(1, 6, 2, 4)], {}, "key and value must agree"),
        ([zeros(1, 7, 2, 5), zeros(1, 7, 2, 4), zeros(1, 7, 2, 4)], {}, "query and key must agree"),
        ([zeros(1, 7, 3, 4), zeros(1, 7, 2, 4), zeros(1, 7, 2, 4)], {}, "query and key must agree"),
        (
            [zeros(1, 6, 2, 4), zeros(1, 7, 2, 4), zeros(1, 7, 2, 4)],
            {"causal": True},
            "causal attention needs one length",
        ),
        ([zeros(1, 7, 2, 4)] * 3, {"key_log_scale": zeros(1, 7)}, "key_log_scale must be"),
        ([zeros(1, 7, 2, 4)] * 3, {"key_log_scale": zeros(1, 6, 2)}, "key_log_scale must be"),
        ([zeros(1, 7, 2, 4)] * 3, {"initial_state": zeros(1)}, "initial_state must be a dict"),
        ([zeros(1, 7, 2, 4)] * 3, {"initial_state": {"numerator": zeros(1)}}, "received \\['numerator'\\]"),
        (
            [zeros(1, 7, 2, 4)] * 3,
            {
                "initial_state": {
                    "numerator": zeros(1, 2, 4, 4),
                    "denominator": zeros(1, 2, 5),
                    "log_scale": zeros(1, 2),
                }
            },
            "initial_state\\['denominator'\\] must have the shape \\(1, 2, 4\\), received \\(1, 2, 5\\)",
        ),
        ([zeros(1, 7, 2, 4)] * 3, {"chunk_size": 0}, "chunk_size must be a positive integer, received 0"),
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*arguments, **options)
