"""GMLPBlock and SpatialGatingUnit: against naive layers, and every way to mask, cut, compile and save them."""

import functools
import inspect
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import (
    TOLERANCES,
    WAYS,
    RoundTrip,
    assert_causal,
    assert_ignores_padding,
    assert_same_after_reloading,
    assert_same_cache,
    assert_same_when_compiled,
    assert_streams,
    assert_streams_in_loop,
    assert_streams_padded_rows,
    normal,
    policies,
    stream,
    value_and_gradients,
    with_fixed_dropout,
)
from oracles import assert_close, directional_derivative
from test_short_convolution import naive_short_convolution

from favor_keras import CausalLM, GMLPBlock, SpatialGatingUnit
from favor_keras.ops.kernels import ReluKernel

SIZE, D_FFN, SEQ_LEN = 6, 8, 12

OPTIONS = {
    "plain": {},
    "toeplitz": {"gating_weights": "toeplitz", "num_heads": 2},
    "attention": {"attention_size": 4, "num_heads": 2},
    "relu_attention": {"attention_size": 4, "attention_kernel": "relu"},
    "softmax_kernel": {"attention_size": 4, "attention_kernel": "softmax"},
    "convolution": {"short_convolution": 3, "attention_size": 4, "gating_weights": "toeplitz"},
}
all_options = pytest.mark.parametrize("option", OPTIONS)
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])


def make_block(option="plain", causal=True, **options):
    """A block in which nothing is at its starting value, and the gate weighs as much as the rest."""
    settings = {"activation": "silu", "seed": 1, **OPTIONS[option], **options}
    block = GMLPBlock(D_FFN, SEQ_LEN, causal, **settings)
    block.build([None, None, SIZE])
    randomize(block)
    return block


def randomize(layer):
    rng = np.random.default_rng(0)
    for weight in layer.trainable_weights:
        weight.assign(0.5 * rng.normal(size=weight.shape) + ("gamma" in weight.path))


def make_unit(causal=True, **options):
    unit = SpatialGatingUnit(SEQ_LEN, causal, **options)
    unit.build([None, None, 2 * SIZE])
    randomize(unit)
    return unit


# The block, written from its formulas in float64.


def weights_of(block):
    return {weight.path.split("/", 1)[1]: weight for weight in block.trainable_weights}


def naive_block(block, weights, inputs, mask=None, visibility_mask=None):
    """Row by row of the batch: cut out what is masked, and put the outputs back among the inputs."""
    output = np.array(inputs + 0 * next(iter(weights.values())).ravel()[0])
    for row in range(len(inputs)):
        kept = np.arange(inputs.shape[1]) if mask is None else np.flatnonzero(mask[row])
        visible = np.tri(len(kept), dtype=bool) if block.causal else np.ones([len(kept)] * 2, bool)
        if visibility_mask is not None:
            pairs = visibility_mask if visibility_mask.ndim == 2 else visibility_mask[row]
            visible = visible & pairs[np.ix_(kept, kept)]
        output[row, kept] += naive_branch(block, weights, inputs[row, kept], visible)
    return output


def naive_branch(block, weights, x, visible):
    def norm(x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}/gamma"] + weights[f"{name}/beta"]

    def dense(x, name):
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    length = len(x)
    x = norm(x, "norm")
    if block.short_convolution:
        x = naive_short_convolution(x[None], weights["convolution/kernel"])[0][0]
    hidden = dense(x, "proj1")
    u, v = np.split(hidden / (1 + np.exp(-hidden)), 2, axis=-1)
    v = norm(v, "sgu/norm")
    matrices = weights["sgu/weight"] if block.num_heads > 1 else weights["sgu/weight"][None]
    biases = weights["sgu/bias"] if block.num_heads > 1 else weights["sgu/bias"][None]
    if block.gating_weights == "toeplitz":
        places = np.arange(length)
        matrices = matrices[:, places[:, None] - places + block.seq_len - 1]
    matrices = matrices[:, :length, :length] * visible
    shares = np.split(v, block.num_heads, axis=-1)
    gate = np.concatenate([m @ share + b[:length, None] for m, share, b in zip(matrices, shares, biases)], axis=-1)
    if block.attention_size:
        gate = gate + dense(naive_attention(block, dense(x, "attention/qkv"), visible), "attention/output_dense")
    return dense(u * gate, "proj2")


def naive_attention(block, qkv, visible):
    query, key, value = np.split(qkv, 3, axis=-1)
    size = query.shape[-1]
    if block.attention_kernel is None:
        attention = np.exp(query @ key.T / np.sqrt(size))
    elif isinstance(block.attention_kernel, ReluKernel):
        attention = (np.where(np.real(query) > 0, query, 0) + 1e-3) @ (np.where(np.real(key) > 0, key, 0) + 1e-3).T
    else:
        projection = block.attention.projection_matrix.numpy().astype("float64")

        def features(x):
            """Positive random features with each position's own reference; the factor of the keys."""
            x = x / size**0.25
            projected = x @ projection.T
            largest = np.take_along_axis(projected, np.real(projected).argmax(axis=-1)[:, None], axis=-1)
            return np.exp(projected - largest) + 1e-6, np.exp(largest[:, 0] - (x**2).sum(axis=-1) / 2)

        (query_features, _), (key_features, factor) = features(query), features(key)
        attention = query_features @ key_features.T * factor
    attention = attention * visible
    total = attention.sum(axis=-1, keepdims=True)
    return np.divide(attention, total, out=np.zeros_like(attention), where=total != 0) @ value


def sees_pairs(option):
    """Whether a block with this option takes a mask over pairs."""
    return not OPTIONS[option].keys() & {"attention_kernel", "short_convolution"}


@all_options
@causal_or_not
def test_masked_block_and_all_its_gradients_equal_the_naive_block(option, causal):
    block = make_block(option, causal, dtype="float64")
    rng = np.random.default_rng(0)
    inputs, cotangent = rng.normal(size=[2, 2, 7, SIZE])
    masks = {"mask": rng.uniform(size=[2, 7]) < 0.7}
    if sees_pairs(option):
        masks["visibility_mask"] = rng.uniform(size=[2, 7, 7]) < 0.7
    variables = weights_of(block)
    arrays = {name: weight.numpy() for name, weight in variables.items()}
    x = tf.constant(inputs)
    with tf.GradientTape() as tape:
        tape.watch(x)
        output = block(x, **masks)
    gradients = tape.gradient(output, [x, *(v.value for v in variables.values())], tf.constant(cotangent))
    assert_close(output, naive_block(block, arrays, inputs, **masks), 1e-9)

    def loss(inputs, *weights):
        return np.sum(cotangent * naive_block(block, dict(zip(arrays, weights)), inputs, **masks))

    arguments = [inputs, *arrays.values()]
    for i, gradient in enumerate(gradients):
        directions = [np.zeros_like(argument) for argument in arguments]
        directions[i] = rng.normal(size=arguments[i].shape)
        expected = directional_derivative(loss, arguments, directions)
        assert_close(np.sum(tf.convert_to_tensor(gradient) * directions[i]), expected, 1e-9, smallest_scale=1.0)


@policies
@all_options
def test_block_equals_the_naive_block_in_every_precision_H3(option, policy):
    """At lengths 1, seq_len - 1 and seq_len, causal and not."""
    for causal in (True, False):
        block = make_block(option, causal, dtype=policy)
        arrays = {name: weight.numpy().astype("float64") for name, weight in weights_of(block).items()}
        for length in (1, SEQ_LEN - 1, SEQ_LEN):
            inputs = normal(2, length, SIZE)
            output = block(inputs)
            assert output.dtype == block.compute_dtype
            expected = naive_block(block, arrays, inputs.numpy().astype("float64"))
            assert_close(tf.cast(output, "float32"), expected, 2 * TOLERANCES[policy])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@causal_or_not
def test_reference_block(reference, causal, dtype, tolerance):
    arrays, kind = reference("gmlp"), "causal" if causal else "full"
    inputs = tf.constant(arrays["block_input"], dtype)
    block = GMLPBlock(d_ffn=20, seq_len=21, causal=causal, dtype=dtype)
    block.build(inputs.shape)
    for weight in block.weights:
        weight.assign(arrays["block_" + weight.path.split("/", 1)[1].replace("/", "_")])
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = block(inputs)
    gradient = tape.gradient(output, inputs, tf.constant(arrays[f"block_{kind}_cotangent"], dtype))
    assert_close(output, arrays[f"block_{kind}_output"], tolerance)
    assert_close(gradient, arrays[f"block_{kind}_dinput"], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@causal_or_not
def test_reference_unit(reference, causal, dtype, tolerance):
    arrays = reference("gmlp")
    unit = SpatialGatingUnit(seq_len=21, causal=causal, dtype=dtype)
    unit.build([None, None, 20])
    for weight in unit.weights:
        weight.assign(arrays["block_sgu_" + weight.path.split("/", 1)[1].replace("/", "_")])
    output = unit(tf.constant(arrays["sgu_input"], dtype))
    assert_close(output, arrays["sgu_causal_output" if causal else "sgu_full_output"], tolerance)


def test_the_upper_triangle_is_not_trained():
    block = make_block()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(block(normal(2, SEQ_LEN, SIZE)) ** 2)
    gradient = tape.gradient(loss, block.sgu.weight.value).numpy()
    assert np.all((gradient != 0) == np.tri(SEQ_LEN))


# PREFIX, PAD, STREAM, XLA, ROUND.


@pytest.mark.parametrize(
    ("option", "policy", "dropout"),
    [(option, "float32", 0.0) for option in OPTIONS]
    + [(option, policy, 0.1) for option in ("attention", "convolution") for policy in TOLERANCES],
)
def test_C9_no_output_depends_on_later_inputs(option, policy, dropout):
    """Without a mask, with one that keeps all, and with padding."""
    block = make_block(option, dropout=dropout, survival_probability=1 - dropout, dtype=policy)
    inputs = normal(2, SEQ_LEN, SIZE)
    masks = [None, np.ones([2, SEQ_LEN], bool), np.random.default_rng(1).uniform(size=[2, SEQ_LEN]) < 0.8]
    for mask, length in zip([None, *masks], [SEQ_LEN - 1, *[SEQ_LEN] * 3]):

        def apply(x, mask=mask):
            mask = None if mask is None else mask[:, : x.shape[1]]
            return tf.cast(block(x, mask=mask, training=dropout > 0), "float32")

        if dropout:
            apply = with_fixed_dropout(block, apply)
        assert_causal(apply, inputs[:, :length], TOLERANCES[policy], cut=not dropout)


@pytest.mark.parametrize(
    ("causal", "length"),
    [(True, 1), (True, SEQ_LEN - 5), (True, SEQ_LEN - 4), (False, SEQ_LEN - 4)],  # 4 less than with the padding
)
@all_options
def test_padding_is_not_there(option, causal, length):
    block = make_block(option, causal)
    variables = [v.value for v in block.trainable_weights]
    assert_ignores_padding(lambda x, mask: block(x, mask=mask), normal(2, length, SIZE), variables=variables)


@causal_or_not
@pytest.mark.parametrize("option", list(filter(sees_pairs, OPTIONS)))
def test_padding_is_not_there_under_a_mask_over_pairs(option, causal):
    block = make_block(option, causal)
    inputs, pairs = normal(2, 5, SIZE), np.random.default_rng(0).uniform(size=[2, 5, 5]) < 0.6
    expected = block(inputs, visibility_mask=pairs)
    for row in range(2):
        kept = [0, 2, 3, 6, 7]
        padded, mask = np.full([1, 8, SIZE], 1e3, "float32"), np.zeros([1, 8], bool)
        padded[0, kept], mask[0, kept] = inputs[row], True
        wide = np.random.default_rng(1).uniform(size=[8, 8]) < 0.5
        wide[np.ix_(kept, kept)] = pairs[row]
        output = block(padded, mask=mask, visibility_mask=wide)
        assert_close(output[0].numpy()[kept], expected[row], 1e-5)


def test_padding_keeps_its_input_whatever_it_is():
    block = make_block("attention")
    inputs = np.full([2, 5, SIZE], np.inf, "float32")
    inputs[:, :3] = normal(2, 3, SIZE)
    mask = np.arange(5) < [[3], [0]]
    output, (gradient,) = value_and_gradients(lambda x: block(x, mask=mask), [tf.constant(inputs)])
    assert np.array_equal(output[0].numpy()[~mask], inputs[~mask])
    assert_close(output[0][0, :3], block(inputs[:1, :3])[0], 1e-5)
    assert np.all(np.isfinite(gradient[0, :3]))


def test_masks_over_pairs_equal_masks_of_the_same_content():
    """[T, T] for all examples, or one each; the lower triangle is causal; empty rows see nothing."""
    causal, full = make_block("attention", True), make_block("attention", False)
    inputs = normal(2, 7, SIZE)
    triangle = np.tri(7)
    assert_close(full(inputs, visibility_mask=triangle), causal(inputs), 1e-5)
    assert_close(full(inputs, visibility_mask=np.stack([triangle] * 2)), causal(inputs), 1e-5)
    assert_close(full(inputs, visibility_mask=np.ones([7, 7], "int32")), full(inputs), 1e-5)
    assert_close(causal(inputs, visibility_mask=np.ones([7, 7], bool)), causal(inputs), 1e-5)
    others_changed = tf.concat([inputs[:, :1], 10 * inputs[:, 1:]], axis=1)
    for pairs in (np.eye(7), np.zeros([7, 7])):
        output = full(inputs, visibility_mask=pairs)
        assert_close(full(others_changed, visibility_mask=pairs)[:, 0], output[:, 0], 1e-6)
        assert np.all(np.isfinite(output))


@pytest.mark.parametrize(
    ("option", "policy"),
    [(option, "float32") for option in OPTIONS]
    + [(option, policy) for option in ("attention", "relu_attention") for policy in TOLERANCES if policy != "float32"],
)
def test_D5_pieces_equal_the_whole(option, policy):
    block = make_block(option, dtype=policy)
    assert_streams(block, normal(2, SEQ_LEN, SIZE), TOLERANCES[policy])


@all_options
def test_D5_token_by_token_at_every_length(option):
    block = make_block(option)
    for length in (1, SEQ_LEN - 1):  # the test above does it at seq_len
        inputs = normal(3, length, SIZE)
        outputs, cache = stream(block, inputs, [1] * length)
        assert_close(outputs, block(inputs), 1e-5)
        assert_same_cache(cache, stream(block, inputs, [length])[1], 1e-5)


@all_options
def test_D5_padded_rows_of_different_lengths_stream_as_they_do_alone(option):
    assert_streams_padded_rows(make_block(option), normal(3, SEQ_LEN, SIZE), [1, 5, 1, 3, 2])


@pytest.mark.parametrize("option", ["convolution", "relu_attention"])
def test_D5_token_by_token_in_a_compiled_loop(option):
    assert_streams_in_loop(make_block(option), normal(2, 7, SIZE))


def test_D5_the_unit_streams_alone():
    unit = make_unit(gating_weights="toeplitz", num_heads=3)
    assert_streams(unit, normal(2, SEQ_LEN, 2 * SIZE))
    assert_streams_padded_rows(unit, normal(3, SEQ_LEN, 2 * SIZE), [1, 5, 1, 3, 2])


def test_D9_beams_can_be_reordered():
    block = make_block("convolution")
    inputs, order = normal(3, SEQ_LEN, SIZE), [2, 2, 0]
    _, cache = stream(block, inputs[:, :5], [5])
    reordered = {name: tf.gather(tensor, order) for name, tensor in cache.items()}
    output, _ = block(inputs[:, 5:], cache=reordered)
    expected = block(tf.concat([tf.gather(inputs[:, :5], order), inputs[:, 5:]], axis=1))
    assert_close(output, expected[:, 5:], 1e-5)


def test_D10_a_step_does_not_get_slower_or_larger_with_the_position():
    block = GMLPBlock(64, 1024, causal=True, attention_size=16)
    block.build([None, None, 16])
    step = tf.function(lambda x, cache: block(x, cache=cache), autograph=False)
    cache = block.init_cache(1)
    sizes = {name: tensor.shape for name, tensor in cache.items()}
    token = normal(1, 1, 16)
    times = {}
    for position in (10.0, 1000.0):
        cache["position"] = tf.constant([position])
        _, new_cache = step(token, cache)
        assert {name: tensor.shape for name, tensor in new_cache.items()} == sizes
        samples = []
        for _ in range(20):
            start = time.perf_counter()
            step(token, cache)[0].numpy()
            samples.append(time.perf_counter() - start)
        times[position] = min(samples)
    assert times[1000.0] < 2 * times[10.0]


@pytest.mark.parametrize(
    ("option", "causal", "length"),
    [(option, True, SEQ_LEN - 1) for option in OPTIONS]
    + [("plain", True, 1), ("plain", True, SEQ_LEN), ("toeplitz", False, 1), ("attention", False, SEQ_LEN)],
)
def test_same_in_a_graph_and_under_xla(option, causal, length):
    block = make_block(option, causal)
    mask = np.arange(length) != [[3], [SEQ_LEN - 2]]
    variables = [v.value for v in block.trainable_weights]
    assert_same_when_compiled(lambda x: block(x, mask=mask), [normal(2, length, SIZE)], variables)


def models_to_save():
    """{name: (model, inputs of lengths)}: every option among them, causal and not, with masks and without."""
    x, tokens = keras.Input([None, SIZE]), keras.Input([None], dtype="int32")
    options = {**OPTIONS["softmax_kernel"], **OPTIONS["toeplitz"], "short_convolution": 3}
    y = GMLPBlock(D_FFN, SEQ_LEN, True, seed=3, dropout=0.1, survival_probability=0.9, **options)(x)
    masked = keras.layers.Embedding(9, SIZE, mask_zero=True)(tokens)
    for option in ("plain", "attention"):
        masked = GMLPBlock(D_FFN, SEQ_LEN, seed=3, **OPTIONS[option])(masked)
    options = {"d_ffn": D_FFN, **OPTIONS["relu_attention"]}
    language_model = CausalLM(9, SIZE, 1, 2, mixer="amlp", mixer_options=options, max_length=SEQ_LEN)
    language_model.build((None, None))
    rng = np.random.default_rng(0)

    def ids(length):
        return rng.integers(0, 9, size=[2, length]).astype("int32") * (np.arange(length) % 3 > 0) + np.eye(1, length, 0)

    return {
        "causal": (keras.Model(x, SpatialGatingUnit(SEQ_LEN, True)(y)), lambda n: rng.normal(size=[2, n, SIZE])),
        "masked": (keras.Model(tokens, masked), ids),
        "language_model": (language_model, ids),
    }


def test_reloaded_models_are_the_same_in_a_fresh_process(tmp_path):
    """At lengths 1, seq_len - 1 and seq_len."""
    round_trip, models = RoundTrip(tmp_path), models_to_save()
    rng = np.random.default_rng(0)
    for name, (model, make_inputs) in models.items():
        for weight in model.trainable_weights:
            weight.assign_add(0.1 * rng.normal(size=weight.shape))
        dtype = "float32" if name == "causal" else "int32"
        examples = [(make_inputs(length).astype(dtype),) for length in (1, SEQ_LEN - 1, SEQ_LEN)]
        signature = [keras.InputSpec(shape=(None, None), dtype="int32")] if name == "language_model" else None
        round_trip.add(name, model, examples, signature)
    results = round_trip.run()
    for name in models:
        for way in WAYS:
            assert_same_after_reloading(results, way, name)


# Lengths.


def test_H3_H12_fit_and_predict_at_every_length_in_turn():
    """gMLP and aMLP, causal and not."""
    blocks = [make_block("plain"), make_block("attention"), make_block("attention", causal=False)]
    model = keras.Sequential([keras.Input([None, SIZE]), *blocks])
    model.compile("sgd", "mse")
    for length in (SEQ_LEN, 1, SEQ_LEN - 1, SEQ_LEN):
        inputs = normal(2, length, SIZE).numpy()
        model.fit(inputs, inputs, verbose=0)
        expected = functools.reduce(lambda x, block: block(x), blocks, inputs)
        assert np.all(np.isfinite(expected))
        assert_close(model.predict(inputs, verbose=0), expected, 1e-5)


@all_options
def test_H2_shorter_inputs_are_the_first_rows_and_longer_ones_an_error(option):
    block = make_block(option)
    inputs = normal(2, SEQ_LEN + 1, SIZE)
    whole = block(inputs[:, :SEQ_LEN])
    assert_close(block(inputs[:, :5]), whole[:, :5], 1e-5)
    message = f"seq_len={SEQ_LEN} positions, received {SEQ_LEN + 1}"
    with pytest.raises(ValueError, match=message):
        block(inputs)
    with pytest.raises(ValueError, match=message):
        block(keras.Input([SEQ_LEN + 1, SIZE]))
    with pytest.raises(ValueError, match=message):
        keras.Sequential([keras.Input([None, SIZE]), block]).predict(inputs, verbose=0)
    with pytest.raises(ValueError, match=message):
        make_unit()(normal(2, SEQ_LEN + 1, 2 * SIZE))


@pytest.mark.parametrize("option", ["plain", "attention", "convolution"])
def test_D12_stepping_past_seq_len_is_an_error(option):
    block = make_block(option)
    inputs = normal(2, SEQ_LEN, SIZE)
    _, cache = stream(block, inputs, [SEQ_LEN - 1, 1])
    with pytest.raises(ValueError, match=f"seq_len={SEQ_LEN} positions, received {SEQ_LEN + 1} in all"):
        block(inputs[:, :1], cache=cache)
    with pytest.raises(ValueError, match=f"seq_len={SEQ_LEN} positions, received {SEQ_LEN + 3} in all"):
        block(inputs[:, :3], cache=cache, mask=np.array([[1, 1, 1], [0, 1, 0]]))
    with pytest.raises(ValueError, match=f"max_length .* seq_len={SEQ_LEN} positions, received {SEQ_LEN + 1}"):
        block.init_cache(2, SEQ_LEN + 1)
    output, full = block(inputs[:, :2], cache=cache, mask=np.zeros([2, 2]))  # padding needs no room
    assert np.array_equal(output, inputs[:, :2])
    assert_same_cache(full, cache, 0.0)
    late, _ = tf.function(lambda x: block(x, cache=cache), autograph=False)(inputs[:, :1])
    assert np.all(np.isnan(late))


# The numbers of weights, and what they start as.


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("gating_weights", ["full", "toeplitz"])
@pytest.mark.parametrize(("attention_size", "width"), [(0, 0), (5, 3)])
def test_A11_the_number_of_weights_is_that_of_the_formula(gating_weights, num_heads, attention_size, width):
    d, f, n, a = 6, 16, 9, attention_size
    block = GMLPBlock(
        f, n, gating_weights=gating_weights, num_heads=num_heads, attention_size=a, short_convolution=width
    )
    block.build([None, None, d])
    gate = num_heads * (n * n + n if gating_weights == "full" else 3 * n - 1)
    attention = 3 * (d * a + a) + (a * f + f) // 2 if a else 0
    assert block.sgu.count_params() == f + gate
    assert block.count_params() == 2 * d + (d * f + f) + f + gate + (f * d // 2 + d) + attention + width * d
    assert len(block.trainable_weights) == len(block.weights)


def test_S17_random_features_are_saved_but_not_trained():
    block = make_block("softmax_kernel")
    assert [weight.path.split("/", 1)[1] for weight in block.non_trainable_weights] == ["attention/projection_matrix"]
    other = make_block("softmax_kernel", seed=2)
    assert np.any(block.attention.projection_matrix != other.attention.projection_matrix)


@pytest.mark.parametrize("options", [{}, {"gating_weights": "toeplitz", "num_heads": 4}], ids=["full", "toeplitz"])
@causal_or_not
def test_a_new_block_is_close_to_a_feed_forward_layer(options, causal):
    """Another token moves an output by less than 2 %, of its size and of the branch's."""
    keras.utils.set_random_seed(0)
    block = GMLPBlock(512, 64, causal, **options)
    inputs = normal(1, 64, 128)
    output = block(inputs)
    for j in (0, 20, 62):
        others = np.arange(64) != j
        replaced = tf.where(others[:, None], inputs, normal(1, 64, 128, seed=1))
        change = np.linalg.norm((block(replaced) - output)[0], axis=-1)[others]
        assert np.all(change < 0.02 * np.linalg.norm(output[0], axis=-1)[others])
        assert np.all(change < 0.02 * np.linalg.norm((output - inputs)[0], axis=-1)[others])
        assert np.any(change > 1e-5)


def test_gates_start_near_zero_with_a_bias_of_one():
    unit = SpatialGatingUnit(64)
    unit.build([None, None, 8])
    weight = unit.weight.numpy()
    assert np.all(np.abs(weight) <= 0.01) and 0.0055 < weight.std() < 0.006
    assert np.all(unit.bias.numpy() == 1)


# Stochastic depth and dropout.


def branch_of(block, inputs):
    return block(inputs) - inputs


@policies
def test_stochastic_depth_keeps_the_mean_and_drops_whole_samples(policy):
    block = make_block(survival_probability=0.7, dtype=policy)
    inputs = tf.cast(tf.repeat(normal(1, 3, SIZE), 4000, axis=0), block.compute_dtype)
    branch = tf.cast(branch_of(block, inputs), "float32")[0].numpy()
    change = tf.cast(block(inputs, training=True) - inputs, "float32").numpy()
    dropped = np.all(change == 0, axis=(1, 2))
    standard_error = np.sqrt(0.7 * 0.3 / 4000)
    assert abs(np.mean(~dropped) - 0.7) < 4 * standard_error
    tolerance = 4 * TOLERANCES[policy]  # the difference of output and input loses a few digits
    assert_close(change[~dropped], np.broadcast_to(branch / 0.7, change[~dropped].shape), tolerance)
    assert_close(change.mean(axis=0), branch, 4 * standard_error / 0.7 + tolerance)


def test_stochastic_depth_is_off_in_inference_and_depends_on_the_seed():
    inputs = normal(64, 3, SIZE)

    def draws(**options):
        block = make_block(survival_probability=0.5, **options)
        assert np.array_equal(block(inputs), make_block()(inputs))
        return [block(inputs, training=True).numpy() for _ in range(2)]

    first, again = draws(), draws()
    assert np.array_equal(first, again)
    assert np.any(first[0] != first[1])
    assert np.any(first[0] != draws(seed=2)[0])
    never = make_block(survival_probability=1.0)
    assert np.array_equal(never(inputs, training=True), never(inputs))


def test_dropout_keeps_the_mean_and_is_not_that_of_stochastic_depth():
    inputs = tf.repeat(normal(1, 1, SIZE), 4000, axis=0)
    plain = branch_of(make_block(), inputs)
    block = make_block(dropout=0.3)
    assert np.array_equal(block(inputs), make_block()(inputs))
    change = (block(inputs, training=True) - inputs).numpy()
    assert_close(np.mean(change == 0), 0.3, 0.05)
    assert_close(change.mean(axis=0), plain[0], 0.1)
    both = make_block(dropout=0.5, survival_probability=0.5)
    kept = (both(inputs, training=True) - inputs).numpy()[:, 0] != 0
    assert_close(kept[kept.any(axis=1)].mean(axis=0), np.full(SIZE, 0.5), 0.1)


# Masks, dtypes and shapes.


@policies
@pytest.mark.parametrize("option", ["attention", "relu_attention"])
def test_P6_an_empty_row_is_finite_in_every_precision(option, policy):
    block = make_block(option, dtype=policy)
    mask = np.array([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], bool)
    outputs, gradients = value_and_gradients(
        lambda x: block(x, mask=mask), [100 * normal(3, 4, SIZE)], [v.value for v in block.trainable_weights]
    )
    assert all(np.all(np.isfinite(tf.cast(x, "float32"))) for x in (*outputs, *gradients))


@policies
def test_C6_P4_masks_of_every_dtype_mean_keep(policy):
    block = make_block("attention", dtype=policy)
    inputs = normal(2, 5, SIZE)
    mask = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1]])
    pairs = np.random.default_rng(0).uniform(size=[5, 5]) < 0.5
    expected = block(inputs, mask=mask.astype(bool), visibility_mask=pairs)
    for dtype in ("int32", "float32", "float16"):
        masks = {"mask": mask.astype(dtype), "visibility_mask": pairs.astype(dtype)}
        assert np.array_equal(tf.cast(block(inputs, **masks), "float32"), tf.cast(expected, "float32"))
    all_kept, no_mask = block(inputs, mask=np.ones([2, 5])), block(inputs)
    assert_close(tf.cast(all_kept, "float32"), tf.cast(no_mask, "float32"), TOLERANCES[policy])
    assert np.array_equal(block(inputs, mask=np.zeros([2, 5])), tf.cast(inputs, block.compute_dtype))


@pytest.mark.parametrize("layer", [make_block, make_unit])
def test_M5_masks_of_another_shape_or_content_are_refused(layer):
    layer = layer()
    inputs = normal(2, 5, SIZE if isinstance(layer, GMLPBlock) else 2 * SIZE)
    for shape in ([2, 6], [5], [2, 5, 5]):
        with pytest.raises(ValueError, match="mask must have the shape"):
            layer(inputs, mask=np.ones(shape, bool))
    for shape in ([2, 5], [3, 5, 5], [5, 6]):
        with pytest.raises(ValueError, match="visibility_mask must have the shape"):
            layer(inputs, visibility_mask=np.ones(shape, bool))
    for name, shape in (("mask", [2, 5]), ("visibility_mask", [5, 5])):
        with pytest.raises(ValueError, match=f"{name} must contain only"):
            layer(inputs, **{name: np.full(shape, 0.5)})


def test_M11_masks_of_an_embedding_reach_the_block_and_go_on():
    embedding = keras.layers.Embedding(9, SIZE, mask_zero=True)
    block = make_block("attention")
    tokens = np.array([[1, 2, 3, 0, 0], [4, 0, 5, 6, 0]])
    inputs = keras.Input([None], dtype="int32")
    model = keras.Model(inputs, block(embedding(inputs)))
    expected = block(embedding(tokens).numpy(), mask=tokens != 0)
    assert_close(model(tokens), expected, 1e-6)
    mean = keras.layers.GlobalAveragePooling1D()
    assert_close(mean(block(embedding(tokens))), mean(expected, mask=tokens != 0), 1e-6)
    cached, _ = block(embedding(tokens), cache=block.init_cache(2))
    assert_close(cached, expected, 1e-6)
    pairs = np.ones([5, 5], bool)
    assert_close(block(embedding(tokens), visibility_mask=pairs), expected, 1e-6)


@all_options
def test_M13_no_warnings_on_masked_inputs(option):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = make_block(option)
        block(keras.layers.Masking()(normal(2, 5, SIZE)))
        block(keras.layers.Masking()(normal(2, 5, SIZE)), cache=block.init_cache(2))


@all_options
def test_P9_sublayers_and_weights_have_the_dtype_of_the_layer(option):
    block = make_block(option, dtype="bfloat16")
    for layer in block._flatten_layers():
        assert layer.dtype_policy.name == "bfloat16"
    assert {weight.dtype for weight in block.trainable_weights} == {"bfloat16"}
    assert {tensor.dtype for tensor in block.init_cache(2).values()} == {tf.float32}


@all_options
def test_H13_symbolic_shapes_and_dtypes(option):
    block = make_block(option, dtype="mixed_bfloat16")
    assert block.compute_output_shape((None, None, SIZE)) == (None, None, SIZE)
    symbolic = keras.Input([None, SIZE])
    symbolic_cache = {name: keras.KerasTensor(c.shape, c.dtype) for name, c in block.init_cache(2).items()}
    output, cache = block(symbolic, cache=symbolic_cache)
    assert output.shape == (None, None, SIZE) and output.dtype == "bfloat16"
    real = block(normal(2, 3, SIZE), cache=block.init_cache(2))[1]
    assert set(cache) == set(real)
    for name, tensor in real.items():
        assert (cache[name].shape, cache[name].dtype) == (tuple(tensor.shape), tensor.dtype.name)
    unit = make_unit()
    assert unit(keras.Input([None, 2 * SIZE])).shape == (None, None, SIZE)


def test_H13_time_distributed():
    inputs = normal(2, 3, 5, SIZE)
    block = make_block()
    assert_close(keras.layers.TimeDistributed(block)(inputs)[:, 1], block(inputs[:, 1]), 1e-6)


@all_options
def test_S9_S11_build_makes_all_weights(option):
    block = make_block(option)
    before = [weight.path for weight in block.weights]
    block(normal(2, 3, SIZE))
    assert [weight.path for weight in block.weights] == before


@pytest.mark.parametrize(
    "layer",
    [
        GMLPBlock(
            16,
            7,
            True,
            "relu",
            "toeplitz",
            2,
            attention_size=4,
            attention_kernel=ReluKernel(),
            short_convolution=2,
            survival_probability=0.9,
            dropout=0.2,
            seed=5,
        ),
        GMLPBlock(16, 7),
        SpatialGatingUnit(7, True, "toeplitz", 2),
    ],
    ids=["block", "default_block", "unit"],
)
def test_S15_config_is_complete(layer):
    config = layer.get_config()
    arguments = set(inspect.signature(type(layer)).parameters) - {"kwargs"}
    assert set(config) == arguments | {"name", "trainable", "dtype"}
    revived = type(layer).from_config({**config, "name": "z", "trainable": False, "dtype": "float32"})
    expected = {**config, "name": "z", "trainable": False, "dtype": revived.get_config()["dtype"]}
    assert revived.get_config() == expected


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_ffn": 7}, "d_ffn must be even"),
        ({"d_ffn": 0}, "d_ffn must be a positive integer"),
        ({"num_heads": 3}, "divisible by num_heads, received 8 and num_heads=3"),
        ({"num_heads": 0}, "num_heads must be a positive integer, received 0"),
        ({"seq_len": 0}, "seq_len must be a positive integer, received 0"),
        ({"gating_weights": "band"}, "gating_weights must be one of .*received 'band'"),
        ({"attention_size": -1}, "attention_size must be 0 or a positive integer"),
        ({"attention_kernel": "relu"}, "attention_kernel needs attention_size > 0"),
        ({"attention_size": 4, "attention_kernel": "band"}, "must be one of"),
        ({"attention_size": 4, "attention_kernel": lambda data, *rest: data}, "attention_kernel must be None"),
        ({"short_convolution": 1.5}, "short_convolution must be 0 or a positive integer"),
        ({"survival_probability": 0.0}, "survival_probability must be in"),
        ({"dropout": 1.0}, "dropout must be in"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else None,  # a function in it has another name in every process
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GMLPBlock(**{"d_ffn": D_FFN, "seq_len": SEQ_LEN, **options})


def test_odd_sizes_and_other_ranks_are_refused():
    with pytest.raises(ValueError, match="even number of features"):
        SpatialGatingUnit(8)(normal(2, 5, 7))
    with pytest.raises(ValueError, match="num_heads=4"):
        SpatialGatingUnit(8, num_heads=4)(normal(2, 5, 12))
    for layer in (SpatialGatingUnit(8), GMLPBlock(8, 8)):
        with pytest.raises(ValueError, match="inputs must be \\[batch, length, features\\]"):
            layer(normal(2, 8))


def test_masks_over_pairs_are_refused_where_they_cannot_be_followed():
    pairs = np.ones([5, 5], bool)
    inputs = normal(2, 5, SIZE)
    for option, reason in (("convolution", "short_convolution"), ("relu_attention", "attention_kernel")):
        with pytest.raises(ValueError, match=f"visibility_mask must be None with {reason}"):
            make_block(option)(inputs, visibility_mask=pairs)
    block = make_block()
    with pytest.raises(ValueError, match="visibility_mask cannot be combined"):
        block(inputs, visibility_mask=pairs, cache=block.init_cache(2))


def test_caches_of_other_layers_are_refused():
    block, inputs = make_block("attention"), normal(2, 5, SIZE)
    with pytest.raises(ValueError, match="cache must be a dict of .*attention_keys.*received"):
        block(inputs, cache=make_block().init_cache(2))
    with pytest.raises(ValueError, match="cache must be of the batch size 2 of inputs, received 3"):
        block(inputs, cache=block.init_cache(3))
    with pytest.raises(ValueError, match="causal"):
        make_block(causal=False).init_cache(2)
    with pytest.raises(ValueError, match="causal"):
        make_block(causal=False)(inputs, cache=make_block().init_cache(2))
    with pytest.raises(ValueError, match="needs a built layer"):
        GMLPBlock(8, 8, causal=True).init_cache(2)


@all_options
def test_no_positions_give_none_and_leave_the_cache_alone(option):
    block, inputs = make_block(option), normal(2, 3, SIZE)
    assert block(inputs[:, :0]).shape == [2, 0, SIZE]
    _, cache = block(inputs, cache=block.init_cache(2))
    output, same = block(inputs[:, :0], cache=cache)
    assert output.shape == [2, 0, SIZE]
    assert_same_cache(same, cache, 1e-6)
