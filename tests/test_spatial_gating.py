"""The spatial gating op against sums written out in NumPy, in every way that it can be cut and masked."""

import functools
import itertools
import sys

import numpy as np
import pytest
import tensorflow as tf
from harness import assert_same_when_compiled, normal, padding_masks
from oracles import assert_close, directional_derivative

from favor_keras.ops.spatial_gating import (
    lower_triangular_matmul,
    softmax_attention,
    spatial_gating,
    zero_state,
)

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
B, D, N = 2, 4, 9  # batch, channels, the size of W

both_precisions = pytest.mark.parametrize("dtype", ["float64", "float32"])
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
# (toeplitz, heads); None is a weight without an axis of heads
kinds_of_weight = pytest.mark.parametrize(
    ("toeplitz", "heads"),
    [(False, None), (False, 2), (True, None), (True, 2)],
    ids=["full", "heads", "toeplitz", "both"],
)


def make_arguments(length, toeplitz=False, heads=None, batch_size=B):
    """u, v, weight, bias, added gate; numbers that are exact in float32."""
    rng = np.random.default_rng(length)
    front = () if heads is None else (heads,)
    sizes = (2 * N - 1,) if toeplitz else (N, N)
    shapes = [(batch_size, length, D)] * 2 + [(*front, *sizes), (*front, N), (batch_size, length, D)]
    return [rng.normal(size=shape).astype("float32").astype("float64") for shape in shapes]


def matrices_of(weight, toeplitz, heads):
    """[H, n, n] from any kind of weight."""
    weight = weight if heads else weight[None]
    if not toeplitz:
        return weight
    places = np.arange(N)
    return np.stack([[[w[i - j + N - 1] for j in places] for i in places] for w in weight])


def naive_gating(
    u, v, weight, bias, added, *, causal=False, toeplitz=False, heads=None, key_mask=None, visibility_mask=None
):
    """Row by row of the batch: cut out what is masked, sum over the pairs, and put the outputs back."""
    matrices, biases = matrices_of(weight, toeplitz, heads), bias if heads else bias[None]
    batch_size, length, channels = v.shape
    mask = np.ones([batch_size, length], bool) if key_mask is None else key_mask
    pairs = np.ones([length, length], bool) if visibility_mask is None else visibility_mask
    pairs = np.broadcast_to(pairs, [batch_size, length, length])
    output = np.zeros(v.shape, np.result_type(u, v, weight, bias, added))
    for row, kept in enumerate(map(np.flatnonzero, mask)):
        for channel in range(channels):
            head = channel * len(matrices) // channels
            for i, t in enumerate(kept):
                gate = biases[head, i] + added[row, t, channel]
                for j, s in enumerate(kept):
                    if pairs[row, t, s] and (j <= i or not causal):
                        gate = gate + matrices[head, i, j] * v[row, s, channel]
                output[row, t, channel] = u[row, t, channel] * gate
    return output


def gate(u, v, weight, bias, added=None, heads=None, **options):
    return spatial_gating(u, v, weight, bias, added_gate=added, **options)


def make_masks(length):
    rng = np.random.default_rng(1)
    return {
        "no_mask": {},
        "key_mask": {"key_mask": rng.uniform(size=[B, length]) < 0.7},
        "visibility": {"visibility_mask": rng.uniform(size=[length, length]) < 0.7},
        "visibility_per_example": {"visibility_mask": rng.uniform(size=[B, length, length]) < 0.7},
        "both": {
            "key_mask": rng.uniform(size=[B, length]) < 0.7,
            "visibility_mask": rng.uniform(size=[length, length]) < 0.7,
        },
    }


@causal_or_not
def test_reference_values(reference, causal):
    arrays = reference("gmlp")
    u, v = np.split(arrays["sgu_input"], 2, axis=-1)
    v = (v - v.mean(axis=-1, keepdims=True)) / np.sqrt(v.var(axis=-1, keepdims=True) + 1e-5)
    v = v * arrays["block_sgu_norm_gamma"] + arrays["block_sgu_norm_beta"]
    expected = arrays["sgu_causal_output" if causal else "sgu_full_output"]
    for dtype, tolerance in TOLERANCE.items():
        inputs = (tf.constant(x, dtype) for x in (u, v, arrays["block_sgu_weight"], arrays["block_sgu_bias"]))
        output = spatial_gating(*inputs, causal=causal)
        assert output.dtype == dtype
        assert_close(output, expected, tolerance)


@both_precisions
@kinds_of_weight
@causal_or_not
@pytest.mark.parametrize("masks", make_masks(1))
@pytest.mark.parametrize("length", [1, N - 1, N])
def test_equals_the_naive_sums(length, masks, causal, toeplitz, heads, dtype):
    arguments = make_arguments(length, toeplitz, heads)
    options = {"causal": causal, "toeplitz": toeplitz, "heads": heads, **make_masks(length)[masks]}
    output = gate(*(tf.constant(x, dtype) for x in arguments), **options)
    assert_close(output, naive_gating(*arguments, **options), TOLERANCE[dtype], smallest_scale=1.0)


@kinds_of_weight
@causal_or_not
@pytest.mark.parametrize("masks", make_masks(1))
def test_gradients_equal_the_naive_ones(masks, causal, toeplitz, heads):
    """Every number of every argument, by its derivative in the naive sums."""
    length = 5
    arguments = make_arguments(length, toeplitz, heads)
    options = {"causal": causal, "toeplitz": toeplitz, "heads": heads, **make_masks(length)[masks]}
    cotangent = np.random.default_rng(0).normal(size=arguments[0].shape)
    tensors = [tf.constant(x) for x in arguments]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        output = gate(*tensors, **options)
    gradients = tape.gradient(output, tensors, tf.constant(cotangent))
    for i, gradient in enumerate(gradients):
        # The output is linear in each argument (times another), so a random direction for each is enough.
        for seed in range(3):
            directions = [np.zeros_like(x) for x in arguments]
            directions[i] = np.random.default_rng(seed).normal(size=arguments[i].shape)
            expected = directional_derivative(
                lambda *x: np.sum(cotangent * naive_gating(*x, **options)), arguments, directions
            )
            assert_close(np.sum(tf.convert_to_tensor(gradient) * directions[i]), expected, 1e-9, smallest_scale=1.0)


@pytest.mark.parametrize("pieces", ["whole", "step"])
@pytest.mark.parametrize("toeplitz", [False, True], ids=["full", "toeplitz"])
def test_causal_upper_triangle_is_neither_read_nor_trained(toeplitz, pieces):
    u, v, weight, bias, _ = (tf.constant(x) for x in make_arguments(N - 1, toeplitz))
    read = np.arange(2 * N - 1) >= N - 1 if toeplitz else np.tri(N, dtype=bool)
    unread_is_nan = tf.where(read, weight, np.nan)
    options = {"causal": True, "toeplitz": toeplitz}
    if pieces == "step":
        options["initial_state"] = zero_state(B, N, D, "float64")
    with tf.GradientTape() as tape:
        tape.watch(unread_is_nan)
        output = tf.nest.flatten(spatial_gating(u, v, unread_is_nan, bias, **options))[-1 if pieces == "whole" else 0]
    gradient = tf.convert_to_tensor(tape.gradient(output, unread_is_nan)).numpy()
    expected = spatial_gating(u, v, weight, bias, causal=True, toeplitz=toeplitz)
    assert_close(output, expected, 1e-12)
    assert np.all(gradient[~read] == 0)
    used = np.arange(2 * N - 1) < 2 * N - 2 if toeplitz else np.arange(N)[:, None] < N - 1  # by N - 1 positions
    assert np.all(gradient[read & used] != 0)


# The triangular product in blocks.


@pytest.fixture
def blocks_of_four(monkeypatch):
    # By its module's name: the package has a function of the same name.
    monkeypatch.setattr(sys.modules[spatial_gating.__module__], "CAUSAL_BLOCK_SIZE", 4)


def product_and_gradients(matrix, x, cotangent):
    with tf.GradientTape() as tape:
        tape.watch((matrix, x))
        product = lower_triangular_matmul(matrix, x)
    return product, *tape.gradient(product, (matrix, x), cotangent)


@pytest.mark.parametrize("known_length", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("length", range(1, 14))
def test_triangular_product_around_the_edges_of_blocks(blocks_of_four, length, known_length):
    rng = np.random.default_rng(length)
    matrix, (x, cotangent) = rng.normal(size=[2, length, length]), rng.normal(size=[2, 2, length, 3])
    function = product_and_gradients
    if not known_length:
        specs = [tf.TensorSpec([None, None, None], tf.float64), *[tf.TensorSpec([None, None, 3], tf.float64)] * 2]
        function = tf.function(product_and_gradients, specs, autograph=False)
    product, d_matrix, d_x = function(*map(tf.constant, (matrix, x, cotangent)))
    assert_close(product, np.tril(matrix) @ x, 1e-12)
    assert_close(d_matrix, np.tril(cotangent @ x.swapaxes(1, 2)), 1e-12)
    assert np.all(np.triu(d_matrix, 1) == 0)
    assert_close(d_x, np.tril(matrix).swapaxes(1, 2) @ cotangent, 1e-12)


def test_triangular_product_has_second_derivatives(blocks_of_four):
    rng = np.random.default_rng(0)
    matrix, x = tf.constant(rng.normal(size=[1, 6, 6])), tf.constant(rng.normal(size=[1, 6, 2]))

    def slope_of(product):
        with tf.GradientTape() as outer:
            outer.watch((matrix, x))
            with tf.GradientTape() as inner:
                inner.watch((matrix, x))
                loss = tf.reduce_sum(tf.sin(product(matrix, x)))
            slope = sum(tf.reduce_sum(g**2) for g in inner.gradient(loss, (matrix, x)))
        return outer.gradient(slope, (matrix, x))

    expected = slope_of(lambda matrix, x: tf.linalg.band_part(matrix, -1, 0) @ x)
    for actual, wanted in zip(slope_of(lower_triangular_matmul), expected):
        assert_close(actual, wanted, 1e-12)


def test_lengths_on_both_sides_of_a_block_agree():
    """A sequence of one block, and the same with more positions behind it, in blocks of the real size."""
    u, v = normal(1, 600, 2), normal(1, 600, 2, seed=1)
    weight, bias = normal(600, 600, seed=2), normal(600, seed=3)
    whole = spatial_gating(u, v, weight, bias, causal=True)
    for length in (255, 256, 257, 513):
        part = spatial_gating(u[:, :length], v[:, :length], weight, bias, causal=True)
        assert_close(part, whole[:, :length], 1e-5)
    assert_close(whole[0], u[0] * (np.tril(weight) @ v[0] + bias[:, None]), 1e-5)


# Places: what a key mask and a state do to them.


@kinds_of_weight
@causal_or_not
def test_masked_positions_are_not_there(causal, toeplitz, heads):
    length = 5
    arguments = [tf.constant(x) for x in make_arguments(length, toeplitz, heads)]
    u, v, weight, bias, added = arguments
    expected = gate(*arguments, causal=causal, toeplitz=toeplitz)
    for mask in padding_masks(B, length, N - length).values():

        def padded(x, mask=mask):
            filled = np.full([B, N, D], np.nan)
            filled[mask] = x.numpy().reshape(-1, D)
            return tf.constant(filled)

        options = {"causal": causal, "toeplitz": toeplitz, "key_mask": mask}
        output = gate(padded(u), padded(v), weight, bias, padded(added), **options)
        assert_close(output.numpy()[mask].reshape(expected.shape), expected, 1e-12)
        assert np.all(output.numpy()[~mask] == 0)


@both_precisions
@kinds_of_weight
@pytest.mark.parametrize("masked", [False, True], ids=["no_mask", "key_mask"])
def test_pieces_equal_the_whole(masked, toeplitz, heads, dtype):
    arguments = [tf.constant(x, dtype) for x in make_arguments(N, toeplitz, heads)]
    mask = make_masks(N)["key_mask"]["key_mask"]
    options = {"causal": True, "toeplitz": toeplitz}
    whole = gate(*arguments, **options, **({"key_mask": mask} if masked else {}))
    u, v, weight, bias, added = arguments
    for splits in ([], [1], [4, 5], list(range(1, N))):
        state, outputs = zero_state(B, N, D, dtype), []
        for piece in itertools.starmap(slice, itertools.pairwise([0, *splits, N])):
            mask_option = {"key_mask": mask[:, piece]} if masked else {}
            output, state = gate(
                u[:, piece], v[:, piece], weight, bias, added[:, piece], initial_state=state, **options, **mask_option
            )
            outputs.append(output)
        assert_close(tf.concat(outputs, axis=1), whole, TOLERANCE[dtype])
        counts = mask.sum(axis=1) if masked else [N, N]
        assert np.array_equal(state["position"], counts)
        for row, count in enumerate(counts):
            kept = v[row].numpy()[mask[row] if masked else slice(None)]
            assert np.array_equal(state["gate_inputs"][row, :count], kept)
            assert not np.any(state["gate_inputs"][row, count:])


def test_a_full_state_is_an_error_or_nan_in_a_graph_D12():
    u, v, weight, bias, _ = (tf.constant(x, "float32") for x in make_arguments(3))
    _, state = spatial_gating(u, v, weight, bias, causal=True, initial_state=zero_state(B, 4, D))
    step = functools.partial(spatial_gating, u[:, :2], v[:, :2], weight, bias, causal=True, initial_state=state)
    with pytest.raises(ValueError, match="seq_len=4 positions, received 5"):
        step()
    for compile_it in (False, True):
        output, _ = tf.function(step, autograph=False, jit_compile=compile_it)()
        assert np.all(np.isfinite(output[:, 0])) and np.all(np.isnan(output[:, 1]))


# Modes and dtypes.


@pytest.mark.parametrize(
    ("masks", "toeplitz"),
    [("key_mask", False), ("visibility", True), ("both", False), ("both", True)],
    ids=["key_mask-full", "visibility-toeplitz", "both-full", "both-toeplitz"],
)
def test_same_in_a_graph_and_under_xla(masks, toeplitz):
    u, v, weight, bias, added = (tf.constant(x, "float32") for x in make_arguments(6, toeplitz, 2))
    options = make_masks(6)[masks]
    weight, bias = tf.Variable(weight), tf.Variable(bias)

    def function(u, v, added):
        causal = gate(u, v, weight, bias, added, causal=True, toeplitz=toeplitz, **options)
        return causal, gate(u, v, weight, bias, added, toeplitz=toeplitz, **options)

    assert_same_when_compiled(function, (u, v, added), (weight, bias))


@pytest.mark.parametrize("toeplitz", [False, True], ids=["full", "toeplitz"])
@causal_or_not
def test_too_long_a_sequence_of_unknown_length_is_an_error_in_a_graph_H2(causal, toeplitz):
    u, _, weight, bias, _ = (tf.constant(x, "float32") for x in make_arguments(N, toeplitz))
    function = tf.function(
        lambda u, v: spatial_gating(u, v, weight, bias, causal=causal, toeplitz=toeplitz),
        [tf.TensorSpec([None, None, D])] * 2,
        autograph=False,
    )
    assert function(u, u).shape == [B, N, D]
    longer = tf.concat([u, u[:, :1]], axis=1)
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(longer, longer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_output_has_the_dtype_of_v(dtype):
    arguments = [tf.constant(x, dtype) for x in make_arguments(N)]
    expected = gate(*(tf.cast(x, "float32") for x in arguments), causal=True)
    output = gate(*arguments, causal=True)
    assert output.dtype == dtype
    assert_close(tf.cast(output, "float32"), expected, {"float16": 4e-3, "bfloat16": 3e-2}[dtype])


# The attention of aMLP.


def naive_attention(query, key, value, visible):
    output = np.zeros([*query.shape[:2], value.shape[2]])
    for b, i in np.ndindex(*query.shape[:2]):
        seen = np.flatnonzero(visible[b, i])
        weights = np.exp([query[b, i] @ key[b, j] / np.sqrt(query.shape[2]) for j in seen])
        output[b, i] = sum((w * value[b, j] for w, j in zip(weights, seen)), start=np.zeros(value.shape[2])) / max(
            weights.sum(), 1e-300
        )
    return output


@both_precisions
def test_softmax_attention_equals_the_naive_one_and_is_zero_for_empty_rows(dtype):
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=[B, 4, 5]), rng.normal(size=[B, 6, 5]), rng.normal(size=[B, 6, 3])
    visible = rng.uniform(size=[B, 4, 6]) < 0.6
    visible[0, 2] = False
    output = softmax_attention(*(tf.constant(x, dtype) for x in (query, key, value)), visible)
    assert output.dtype == dtype
    assert_close(output, naive_attention(query, key, value, visible), TOLERANCE[dtype])
    assert not np.any(output[0, 2])


def test_softmax_attention_in_half_precision_is_finite_P6():
    query, key, value = (tf.cast(100 * normal(B, 4, 5, seed=seed), "float16") for seed in range(3))
    visible = tf.constant(np.tri(4, k=-1, dtype=bool))  # the first query sees nothing
    with tf.GradientTape() as tape:
        tape.watch((query, key, value))
        output = softmax_attention(query, key, value, visible)
    gradients = tape.gradient(output, (query, key, value))
    assert output.dtype == "float16" and not np.any(output[:, 0])
    assert all(np.all(np.isfinite(x)) for x in (output, *gradients))


def zeros(*shape, dtype="float32"):
    return tf.zeros(shape, dtype)


GOOD = {"u": zeros(2, 5, 4), "v": zeros(2, 5, 4), "weight": zeros(9, 9), "bias": zeros(9)}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"v": zeros(2, 5, 3)}, "u and v must be"),
        ({"u": zeros(5, 4), "v": zeros(5, 4)}, "u and v must be"),
        ({"v": zeros(2, 5, 4, dtype="float64")}, "one dtype"),
        ({"weight": zeros(9, 8)}, "weight and bias must be \\[n, n\\]"),
        ({"toeplitz": True}, "weight and bias must be \\[2 n - 1\\]"),
        ({"weight": zeros(2, 9, 9)}, "weight and bias must be"),
        ({"weight": zeros(3, 9, 9), "bias": zeros(3, 9)}, "divisible by the heads"),
        ({"weight": zeros(4, 4), "bias": zeros(4)}, "u and v must have at most seq_len=4 positions, received 5"),
        ({"key_mask": zeros(2, 6)}, "key_mask must have the shape \\(2, 5\\), received \\(2, 6\\)"),
        ({"key_mask": zeros(2, 5) + 0.5}, "key_mask must contain only 1 .* and 0"),
        ({"visibility_mask": zeros(2, 5)}, "visibility_mask must have the shape \\(5, 5\\) or \\(2, 5, 5\\)"),
        ({"added_gate": zeros(2, 5, 8)}, "added_gate must have the shape"),
        ({"initial_state": zero_state(2, 9, 4)}, "initial_state needs causal=True"),
        (
            {"initial_state": zero_state(2, 9, 4), "causal": True, "visibility_mask": zeros(5, 5)},
            "visibility_mask cannot be combined",
        ),
        ({"initial_state": {"position": zeros(2)}, "causal": True}, "received \\['position'\\]"),
        ({"initial_state": zero_state(2, 9, 3), "causal": True}, "initial_state\\['gate_inputs'\\] must be"),
        (
            {"initial_state": zero_state(2, 10, 4), "causal": True},
            "initial_state must have at most seq_len=9 positions, received 10",
        ),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        spatial_gating(**{**GOOD, **bad})
