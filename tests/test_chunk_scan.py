"""`scan_chunks` on a recurrence with two states, two inputs and two constants, none of which it is linear in."""

import functools
import gc
import weakref

import numpy as np
import oracles
import pytest
import tensorflow as tf
from harness import normal, value_and_gradients
from oracles import assert_close, directional_derivative

from favor_keras.ops import chunk_scan, delta_rule, linear_attention, scan_chunks

B, D = 2, 3


def make_arguments(length):
    """The arguments of `oracles.gated_sums`, cotangents of its results, and a direction for every argument."""
    rng = np.random.default_rng(length)
    arguments = {
        "total": rng.normal(size=[B, D]),
        "memory": rng.normal(size=[B]),
        "x": rng.normal(size=[B, length, D]),
        "log_gate": rng.normal(size=[1, length]),
        "matrix": rng.normal(size=[D, D]),
        "decay": np.array(0.3),
    }
    cotangents = [rng.normal(size=shape) for shape in ([B, length, D], [B, D], [B])]
    directions = {name: rng.normal(size=x.shape) for name, x in arguments.items()}
    return arguments, cotangents, directions


def to_tensors(arrays):
    return tf.nest.map_structure(tf.constant, arrays)


def step(state, chunk, constants):
    total, memory = state
    matrix, decay = constants
    gate = tf.exp(chunk["log_gate"])
    memories = memory[:, None] * tf.exp(-decay * tf.cumsum(gate, axis=1))
    increments = (gate * memories)[..., None] * tf.tanh(tf.einsum("bcd,de->bce", chunk["x"], matrix))
    output = (total[:, None] + tf.cumsum(increments, axis=1)) * memories[..., None]
    return output, (total + tf.reduce_sum(increments, axis=1), memory * tf.exp(-decay * tf.reduce_sum(gate, axis=1)))


def scan(total, memory, x, log_gate, matrix, decay, chunk_size=4):
    """The arguments and results of `oracles.gated_sums`. A gate of 0 leaves the state alone, so it pads."""
    output, (total, memory) = scan_chunks(
        step,
        (total, memory),
        {"x": x, "log_gate": log_gate},
        (matrix, decay),
        chunk_size=chunk_size,
        output_dtype=x.dtype,
        pad_values={"x": 0.0, "log_gate": -np.inf},
    )
    return output, total, memory


def weighted_sum(results, cotangents):
    return sum(tf.reduce_sum(cotangent * result) for cotangent, result in zip(cotangents, results))


def slopes(order, arguments, cotangents, directions, chunk_size=4):
    """[d^n loss / de^n for n = 0..order] of the loss at arguments + e directions."""
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        if order == 0:
            return [weighted_sum(scan(*arguments.values(), chunk_size=chunk_size), cotangents)]
        lower = slopes(order - 1, arguments, cotangents, directions, chunk_size)
    gradients = tape.gradient(lower[-1], arguments)
    return [*lower, sum(tf.reduce_sum(gradients[name] * directions[name]) for name in arguments)]


def naive_slope(arguments, cotangents, directions):
    """d loss / de of the oracle."""

    def loss(*arguments):
        return sum(np.sum(cotangent * result) for cotangent, result in zip(cotangents, oracles.gated_sums(*arguments)))

    return directional_derivative(loss, arguments.values(), directions.values())


def set_few_chunks(monkeypatch, graph, xla):
    monkeypatch.setattr(chunk_scan, "FEW_CHUNKS", {"graph": graph, "xla": xla})


@pytest.mark.parametrize("few_chunks", [1, 4], ids=["loop", "few_chunks_without"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("length", [1, 2, 5, 7, 9])
def test_equals_the_recurrence_forward_and_backward(length, chunk_size, few_chunks, monkeypatch):
    set_few_chunks(monkeypatch, few_chunks, few_chunks)
    arguments, cotangents, directions = make_arguments(length)
    tensors = to_tensors(arguments)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        results = scan(*tensors.values(), chunk_size=chunk_size)
        loss = weighted_sum(results, cotangents)
    for result, expected in zip(results, oracles.gated_sums(*arguments.values()), strict=True):
        assert_close(result, expected, 1e-12)
    for name, gradient in tape.gradient(loss, tensors).items():
        only = {other: directions[other] * (other == name) for other in directions}
        assert_close(np.sum(gradient * directions[name]), naive_slope(arguments, cotangents, only), 1e-9)


@pytest.mark.parametrize("few_chunks", [1, 4], ids=["loop", "few_chunks_without"])
def test_nothing_before_is_known_where_there_is_no_loop(few_chunks, monkeypatch):
    set_few_chunks(monkeypatch, few_chunks, few_chunks)
    is_known = []

    def running_sum(state, chunk, constants):
        is_known.append(state is None)
        sums = tf.cumsum(chunk, axis=1) + (0.0 if state is None else state[:, None])
        return sums, sums[:, -1]

    x = tf.reshape(tf.range(6.0), [1, 6])
    options = {"chunk_size": 2, "output_dtype": "float32", "nothing_before": True}
    sums, total = scan_chunks(running_sum, tf.zeros([1]), x, **options)
    assert sums.numpy().tolist() == [[0.0, 1.0, 3.0, 6.0, 10.0, 15.0]] and total.numpy().tolist() == [15.0]
    assert is_known == ([False] * 3 if few_chunks == 1 else [True, False, False])


SHORT = {
    "linear_attention": lambda q, k, v, log_scale: linear_attention(
        tf.exp(q), tf.exp(k), v, key_log_scale=log_scale, causal=True, return_state=True
    ),
    "delta_rule": lambda q, k, v, strength: delta_rule(
        q, tf.math.l2_normalize(k, axis=-1), v, tf.sigmoid(strength), return_state=True
    ),
}


def has_loop(function, arguments):
    graph = function.get_concrete_function(arguments).graph.as_graph_def()
    return bool({node.op for node in graph.node} & {"While", "StatelessWhile"})


@pytest.mark.parametrize(("jit_compile", "longest"), [(False, 256), (True, 128)], ids=["graph", "xla"])
@pytest.mark.parametrize("op", SHORT)
def test_many_chunks_have_a_loop(op, jit_compile, longest, monkeypatch):
    set_few_chunks(monkeypatch, 4, 2)
    for length, expected in ((longest, False), (longest + 1, True)):
        arguments = [tf.TensorSpec([2, length, 3, 5])] * 3 + [tf.TensorSpec([2, length, 3])]
        function = tf.function(lambda arguments: SHORT[op](*arguments), autograph=False, jit_compile=jit_compile)
        assert has_loop(function, arguments) == expected


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("length", [65, 256])
@pytest.mark.parametrize("op", SHORT)
def test_few_chunks_need_no_loop_and_give_the_same(op, length, jit_compile, monkeypatch):
    arguments = [normal(2, length, 3, 5, seed=seed) for seed in range(3)] + [normal(2, length, 3)]
    results = {}
    for few_chunks in (1, 4):
        set_few_chunks(monkeypatch, few_chunks, few_chunks)
        function = tf.function(
            functools.partial(value_and_gradients, SHORT[op]), autograph=False, jit_compile=jit_compile
        )
        results[few_chunks] = tf.nest.flatten(function(arguments))
        assert has_loop(function, arguments) == (few_chunks == 1)
    for result, expected in zip(results[4], results[1], strict=True):
        assert_close(result, expected, 1e-5)


def naive_higher_slopes(arguments, cotangents, directions):
    """The second and third derivative of the oracle: finite differences of its first."""

    def first(distance):
        moved = {name: x + distance * directions[name] for name, x in arguments.items()}
        return naive_slope(moved, cotangents, directions)

    return (first(1e-5) - first(-1e-5)) / 2e-5, (first(1e-3) - 2 * first(0.0) + first(-1e-3)) / 1e-6


def test_derivatives_of_higher_order_eager():
    arguments = make_arguments(9)
    second, third = slopes(3, *to_tensors(arguments))[2:]
    expected_second, expected_third = naive_higher_slopes(*arguments)
    assert_close(second, expected_second, 1e-8)
    assert_close(third, expected_third, 1e-4)


def test_derivative_under_xla_H15_H16():
    arguments = make_arguments(9)
    function = tf.function(functools.partial(slopes, 1), autograph=False, jit_compile=True)
    assert_close(function(*to_tensors(arguments))[1], naive_slope(*arguments), 1e-12)


@pytest.mark.parametrize("used", range(3), ids=["output", "total", "memory"])
def test_gradients_where_one_result_is_used(used):
    arguments, cotangents, directions = make_arguments(9)
    for i, cotangent in enumerate(cotangents):
        cotangent *= i == used
    expected = naive_slope(arguments, cotangents, directions)
    tensors = to_tensors(arguments)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = tf.reduce_sum(cotangents[used] * scan(*tensors.values())[used])
    gradients = tape.gradient(loss, tensors)
    assert_close(sum(np.sum(gradients[name] * directions[name]) for name in tensors), expected, 1e-12)


@pytest.mark.parametrize("length", [3, 9])
def test_step_without_output(length):
    """It returns no output; states and their gradients are as ever."""
    arguments, _, _ = make_arguments(length)
    x, log_gate = arguments["x"], arguments["log_gate"]
    tensors = to_tensors(x), to_tensors(log_gate)

    def only_state(state, chunk, constants):
        x, log_gate = chunk
        return None, {"sum": state["sum"] + tf.reduce_sum(x * tf.exp(log_gate)[..., None], axis=1)}

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        state = {"sum": tf.zeros([B, D], "float64")}
        output, state = scan_chunks(
            only_state, state, tensors, chunk_size=4, output_dtype=None, pad_values=(0.0, -np.inf)
        )
    assert output is None
    assert_close(state["sum"], np.sum(x * np.exp(log_gate)[..., None], axis=1), 1e-12)
    d_x, d_log_gate = tape.gradient(state["sum"], tensors)
    assert_close(d_x, np.broadcast_to(np.exp(log_gate)[..., None], x.shape), 1e-12)
    assert_close(d_log_gate, np.exp(log_gate) * x.sum(axis=(0, 2))[None], 1e-12)


def test_without_state_it_maps_chunks():
    x = np.random.default_rng(0).normal(size=[B, 9, D])
    tensor = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        output, state = scan_chunks(
            lambda state, chunk, constants: (tf.sin(chunk), state), (), tensor, chunk_size=4, output_dtype="float64"
        )
    assert state == ()
    assert_close(output, np.sin(x), 1e-12)
    assert_close(tape.gradient(output, tensor), np.cos(x), 1e-12)


def test_the_tape_keeps_no_tensor_of_a_step_alive():
    """The forward pass keeps the inputs and the states between chunks, nothing else."""
    x = tf.random.stateless_normal([B, 9, D], [0, 0])
    squares = []

    def square_twice(state, chunk, constants):
        square = tf.square(chunk)
        squares.append(weakref.ref(square))
        return tf.square(square), state

    with tf.GradientTape() as tape:
        tape.watch(x)
        output, _ = scan_chunks(square_twice, (), x, chunk_size=4, output_dtype="float32")
    gc.collect()
    assert len(squares) == 3
    assert all(square() is None for square in squares)
    assert_close(tape.gradient(output, x), 4 * x.numpy() ** 3, 1e-6)


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_an_input_that_the_step_ignores_has_gradient_zero(chunk_size):
    x = tf.ones([B, 9, D])
    with tf.GradientTape() as tape:
        tape.watch(x)
        output, _ = scan_chunks(
            lambda state, chunk, constants: (chunk[0], state),
            (),
            (x, 2 * x),
            chunk_size=chunk_size,
            output_dtype="float32",
        )
        loss = tf.reduce_sum(output)
    np.testing.assert_array_equal(tape.gradient(loss, x), np.ones([B, 9, D]))


@pytest.mark.parametrize(
    "length, chunk_size, expected", [(9, 100, 9), (9, 9, 9), (9, 8, 5), (9, 4, 3), (10, 4, 4), (9, 1, 1)]
)
def test_chunks_are_as_even_as_they_can_be(length, chunk_size, expected):
    sizes = set()

    def measure(state, chunk, constants):
        sizes.add(chunk.shape[1])
        return chunk, state

    x = tf.random.stateless_normal([1, length], [0, 0])
    output, _ = scan_chunks(measure, (), x, chunk_size=chunk_size, output_dtype="float32")
    assert sizes == {expected}
    np.testing.assert_array_equal(output, x)


@pytest.mark.parametrize("known_length", [True, False], ids=["known", "unknown"])
def test_empty_sequence(known_length):
    arguments = to_tensors(make_arguments(0)[0])
    function = scan
    if not known_length:
        unknown = {"x": [B, None, D], "log_gate": [1, None]}
        function = tf.function(
            scan,
            [tf.TensorSpec(unknown.get(name, x.shape), x.dtype) for name, x in arguments.items()],
            autograph=False,
        )
    output, total, memory = function(*arguments.values())
    assert output.shape == [B, 0, D]
    np.testing.assert_array_equal(total, arguments["total"])
    np.testing.assert_array_equal(memory, arguments["memory"])


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, "4", None])
def test_bad_chunk_size(chunk_size):
    with pytest.raises(ValueError, match="chunk_size must be a positive integer, received"):
        scan(*to_tensors(make_arguments(3)[0]).values(), chunk_size=chunk_size)
