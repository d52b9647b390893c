"""FastWeightsAttention: against the original and a naive layer, and every way to mask, cut and compile it."""

import sys

import keras
import numpy as np
import oracles
import pytest
import tensorflow as tf
from delta_oracle import delta_rule as naive_delta_rule
from harness import (
    TOLERANCES,
    assert_causal,
    assert_ignores_padding,
    assert_same_cache,
    assert_same_when_compiled,
    assert_streams,
    assert_streams_in_loop,
    assert_streams_padded_rows,
    loop_over_tokens,
    normal,
    padding_masks,
    policies,
    stream,
    value_and_gradients,
    with_fixed_dropout,
)
from oracles import assert_close, directional_derivative
from test_short_convolution import naive_short_convolution

from favor_keras import FastWeightsAttention
from favor_keras.models import DecoderBlock
from favor_keras.ops.kernels import KERNELS

SIZE, HIDDEN, HEADS, HEAD_SIZE = 6, 12, 3, 4

# Every option in one of them at least, and every feature map.
VARIANTS = {
    "paper": {},
    "dpfp2": {"nu": 2, "short_convolution": 4, "output_gate": True, "use_bias": True},
    "recommended": {"feature_map": "l2", "short_convolution": 4, "output_norm": True},
    "gated": {"feature_map": "l2", "use_decay": True, "output_gate": True, "short_convolution": 4},
    "elu_sum": {"feature_map": "elu", "update_rule": "sum"},
    "relu_normalized_sum": {"feature_map": "relu", "update_rule": "normalized_sum", "short_convolution": 4},
    "softmax": {"feature_map": "softmax", "nb_random_features": 16, "use_decay": True},
}
MAIN_VARIANTS = ("paper", "dpfp2", "gated", "relu_normalized_sum", "softmax")
HALF_POLICIES = ("mixed_bfloat16", "mixed_float16")
variants = pytest.mark.parametrize("variant", VARIANTS)


def make_layer(variant="paper", **options):
    """A layer no weight of which has a value that hides a fault: no bias is 0, no scale is 1."""
    # Initializers draw their seeds when they are made.
    keras.utils.set_random_seed(0)
    settings = {"bias_initializer": keras.initializers.RandomNormal(stddev=0.3), "seed": 1}
    layer = FastWeightsAttention(HIDDEN, HEADS, **{**settings, **VARIANTS[variant], **options})
    layer.build([None, None, SIZE])
    if layer.output_norm:
        layer.norm.scale.assign(np.linspace(0.5, 1.5, HEAD_SIZE))
    if layer.use_decay:
        layer.step_bias.assign([-3.0, -1.0, 1.0])
    return layer


# The original.


def assign_heads(dense, kernel, dtype="float64"):
    """Set a kernel given as a matrix, head-major."""
    dense.kernel.assign(np.reshape(kernel, dense.kernel.shape).astype(dtype))


both_precisions = pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])


@both_precisions
@pytest.mark.parametrize("nu", [1, 2, 3])
def test_layer_and_its_gradients_equal_the_original(reference, nu, dtype, tolerance):
    prefix = f"attention_nu{nu}_"
    arrays = {k.removeprefix(prefix): v for k, v in reference("fast_weights").items() if k.startswith(prefix)}
    layer = FastWeightsAttention(24, 3, nu=nu, dtype=dtype)
    layer.build(arrays["input"].shape)
    names = ("query", "key", "value", "beta", "output")
    for name in names:
        assign_heads(getattr(layer, f"{name}_dense"), arrays[f"{name}_kernel"])
    layer.output_dense.bias.assign(arrays["output_bias"])

    inputs = tf.constant(arrays["input"], dtype)
    variables = {f"d{name}_kernel": getattr(layer, f"{name}_dense").kernel for name in names[:4]}
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = layer(inputs)
    gradients = tape.gradient(output, {"dinput": inputs, **variables}, tf.constant(arrays["cotangent"], dtype))
    assert output.dtype == dtype
    assert_close(output, arrays["output"], tolerance)
    assert set(gradients) == {name for name in arrays if name.startswith("d")}
    for name, gradient in gradients.items():
        assert_close(np.reshape(gradient, arrays[name].shape), arrays[name], tolerance)


class OriginalTransformer(keras.layers.Layer):
    """The original's stack: residual around attention of the input itself, pre-norm ReLU feed-forward, final norm."""

    def __init__(self, arrays, dtype):
        super().__init__(dtype=dtype, autocast=False)
        self.blocks = [self._block(arrays, f"transformer_weight/layers.{i}.") for i in range(2)]
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype)
        self.norm.build([None, None, 24])
        self.norm.set_weights([arrays["transformer_weight/norm.weight"], arrays["transformer_weight/norm.bias"]])

    def _block(self, arrays, prefix):
        mixer = FastWeightsAttention(24, 3, dtype=self.dtype_policy)
        block = DecoderBlock(mixer, 48, normalize_mixer_input=False, activation="relu", dtype=self.dtype_policy)
        block.build([None, None, 24])
        for name in ("query", "key", "value"):
            assign_heads(getattr(mixer, f"{name}_dense"), arrays[f"{prefix}attn.{name}.linear.weight"].T)
        assign_heads(mixer.beta_dense, arrays[f"{prefix}attn.gate.0.linear.weight"].T)
        assign_heads(mixer.output_dense, arrays[f"{prefix}attn.output.weight"].T)
        mixer.output_dense.bias.assign(arrays[f"{prefix}attn.output.bias"])
        for layer, name in (
            (block.feed_forward_norm, "norm_ff"),
            (block.expand, "feed_forward.layer1"),
            (block.contract, "feed_forward.layer2"),
        ):
            layer.set_weights([arrays[f"{prefix}{name}.weight"].T, arrays[f"{prefix}{name}.bias"]])
        return block

    def init_cache(self, batch_size, max_length=None):
        return [block.init_cache(batch_size) for block in self.blocks]

    def call(self, x, cache=None):
        new_caches = []
        for i, block in enumerate(self.blocks):
            if cache is None:
                x = block(x)
            else:
                x, new_cache = block(x, cache=cache[i])
                new_caches.append(new_cache)
        return self.norm(x) if cache is None else (self.norm(x), new_caches)


@both_precisions
def test_blocks_can_be_the_original_transformer(reference, dtype, tolerance):
    arrays = reference("fast_weights")
    transformer, inputs = OriginalTransformer(arrays, dtype), tf.constant(arrays["transformer_input"], dtype)
    assert_close(transformer(inputs), arrays["transformer_output"], tolerance)
    cache, outputs = transformer.init_cache(2), []
    for t in range(inputs.shape[1]):
        output, cache = transformer(inputs[:, t : t + 1], cache=cache)
        outputs.append(output)
    assert_close(tf.concat(outputs, axis=1), arrays["transformer_output"], tolerance)


# The layer, written from its formulas in float64.


def weights_of(layer):
    """{name: variable} of all weights that the layer has."""
    weights = {}
    for name in ("query", "key", "value", "output", "beta", "decay", "gate"):
        dense = getattr(layer, f"{name}_dense", None)
        if dense is not None:
            weights[f"{name}_kernel"] = dense.kernel
            if dense.bias is not None:
                weights[f"{name}_bias"] = dense.bias
    if layer.short_convolution:
        weights |= {f"{n}_convolution": getattr(layer, f"{n}_convolution").kernel for n in ("query", "key", "value")}
    if layer.use_decay:
        weights |= {"log_rate": layer.log_rate, "step_bias": layer.step_bias}
    if layer.output_norm:
        weights["norm_scale"] = layer.norm.scale
    assert {id(w) for w in weights.values()} == {id(w) for w in layer.trainable_weights}
    return weights


def silu(x):
    return x / (1 + np.exp(-x))


def rectify(x):
    return np.where(np.real(x) > 0, x, 0)


def naive_features(layer, x):
    if layer.feature_map == "dpfp":
        r = rectify(np.concatenate([x, -x], axis=-1))
        features = np.concatenate([r * np.roll(r, i, axis=-1) for i in range(1, layer.nu + 1)], axis=-1)
        return features / (np.sum(features, axis=-1, keepdims=True) + 1e-6)
    if layer.feature_map == "l2":
        squares = np.sum(silu(x) ** 2, axis=-1, keepdims=True)
        return silu(x) / np.sqrt(np.where(np.real(squares) > 1e-6, squares, 1e-6))
    kernel = {id(KERNELS[name]): name for name in ("elu", "relu", "softmax")}[id(layer.feature_map)]
    if kernel == "elu":
        features = np.where(np.real(x) > 0, x + 1, np.exp(np.where(np.real(x) > 0, 0, x)))
        largest = np.take_along_axis(features, np.real(features).argmax(axis=-1)[..., None], axis=-1)
        features = features / np.where(np.real(largest) < 1, largest, 1)
    elif kernel == "relu":
        features = rectify(x) + 1e-3
    else:
        projection = layer.projection_matrix.numpy().astype("float64")
        projected = np.einsum("bthd,md->bthm", x / x.shape[-1] ** 0.25, projection)
        largest = np.take_along_axis(projected, np.real(projected).argmax(axis=-1)[..., None], axis=-1)
        features = np.exp(projected - largest) + 1e-6
    return features / (np.sum(features, axis=-1, keepdims=True) + 1e-6)


def naive_layer(layer, weights, inputs, mask=None, rounded=lambda x: x):
    """The layer token by token, given every weight as an array; heads and their features are `rounded`."""
    mask = np.ones(inputs.shape[:2]) if mask is None else mask

    def heads(name):
        x = np.einsum("bte,ehd->bthd", inputs, weights[f"{name}_kernel"]) + weights.get(f"{name}_bias", 0.0)
        if not layer.short_convolution:
            return rounded(x)
        flat = rounded(x).reshape(*x.shape[:2], -1)
        flat, _ = naive_short_convolution(flat, rounded(weights[f"{name}_convolution"]), mask)
        return rounded(flat.reshape(x.shape))

    query, key = (rounded(naive_features(layer, heads(name))) for name in ("query", "key"))
    value = heads("value")
    if layer.update_rule == "delta":
        beta = mask[..., None] / (1 + np.exp(-inputs @ weights["beta_kernel"]))
        log_decay = None
        if layer.use_decay:
            step = np.log(1 + np.exp(inputs @ weights["decay_kernel"] + weights["step_bias"]))
            log_decay = np.where(mask[..., None], -np.exp(weights["log_rate"]) * step, 0)
        read, _ = naive_delta_rule(query, key, value, beta, log_decay)
    else:
        hidden = np.where(mask, 0, -np.inf)[..., None] + np.zeros(HEADS)
        normalize = layer.update_rule == "normalized_sum"
        read, _ = oracles.linear_attention(query, key, value, hidden, causal=True, normalize=normalize)
    if layer.output_norm:
        read = read / np.sqrt(np.mean(read**2, axis=-1, keepdims=True) + 1e-5) * weights["norm_scale"]
    if layer.output_gate:
        read = read * silu(np.einsum("bte,ehd->bthd", inputs, weights["gate_kernel"]))
    output = np.einsum("bthd,hde->bte", read, weights["output_kernel"]) + weights["output_bias"]
    return output * mask[..., None]


def naive_output(layer, inputs, mask=None):
    weights = {name: w.numpy().astype("float64") for name, w in weights_of(layer).items()}
    # Features divided by their sum jump where all but one vanish: the rounding of half precision has to be the layer's.
    half = tf.as_dtype(layer.compute_dtype).size == 2

    def rounded(x):
        return np.float64(tf.cast(x, layer.compute_dtype)) if half else x

    projected = {name: rounded(w) for name, w in weights.items() if name.split("_")[0] in ("query", "key", "value")}
    return naive_layer(layer, {**weights, **projected}, np.asarray(inputs, "float64"), mask, rounded)


@variants
def test_masked_layer_and_all_its_gradients_equal_the_naive_layer(variant):
    layer = make_layer(variant, dtype="float64")
    rng = np.random.default_rng(0)
    inputs, d_output = rng.normal(size=[2, 7, SIZE]), rng.normal(size=[2, 7, HIDDEN])
    mask = rng.uniform(size=[2, 7]) < 0.7
    variables = weights_of(layer)
    with tf.GradientTape() as tape:
        x = tf.constant(inputs)
        tape.watch(x)
        output = layer(x, mask=mask)
    gradients = tape.gradient(output, [x, *variables.values()], tf.constant(d_output))

    def naive(x, *weights):
        return naive_layer(layer, dict(zip(variables, weights)), x, mask)

    points = inputs, *(v.numpy() for v in variables.values())
    assert_close(output, naive(*points), 1e-11)
    for i, gradient in enumerate(gradients):
        directions = [rng.normal(size=p.shape) if i == j else np.zeros(p.shape) for j, p in enumerate(points)]
        expected = np.sum(d_output * directional_derivative(naive, points, directions))
        assert_close(np.sum(gradient * directions[i]), expected, 1e-8, smallest_scale=1e-3)


@pytest.mark.parametrize("variant", ["paper", "recommended", "gated", "relu_normalized_sum"])
@policies
def test_layer_equals_the_naive_layer_in_every_precision(policy, variant):
    layer = make_layer(variant, dtype=policy)
    # 70 tokens are more than one chunk of the scan.
    inputs = tf.cast(normal(2, 70, SIZE), layer.compute_dtype)
    output = layer(inputs)
    assert output.dtype == layer.compute_dtype
    assert_close(output, naive_output(layer, inputs), TOLERANCES[policy])


# Causality and masks.

MASKS = {"no_mask": None, "ones": np.ones([2, 11]), "random": np.random.default_rng(3).uniform(size=[2, 11]) < 0.7}


@pytest.mark.parametrize(
    ("variant", "policy", "mask"),
    [
        *((variant, "float32", "random") for variant in VARIANTS),
        ("paper", "float32", "no_mask"),
        ("paper", "float32", "ones"),
        *(("gated", policy, "random") for policy in HALF_POLICIES),
    ],
)
def test_C1_C9_no_output_depends_on_later_inputs(variant, policy, mask):
    layer, mask = make_layer(variant, dtype=policy), MASKS[mask]
    assert_causal(
        lambda x: layer(x, mask=None if mask is None else mask[:, : x.shape[1]]),
        normal(2, 11, SIZE),
        TOLERANCES[policy],
    )


def test_C4_training_with_dropout_is_causal_compiled_or_not():
    for policy, jit_compile in (("float32", False), ("mixed_bfloat16", True)):
        layer = make_layer("gated", attention_dropout=0.1, dtype=policy)
        apply = tf.function(lambda x, layer=layer: layer(x, training=True), autograph=False, jit_compile=jit_compile)
        assert_causal(with_fixed_dropout(layer, apply), normal(2, 11, SIZE), TOLERANCES[policy], cut=False)


def test_C8_the_edges_of_chunks_are_causal():
    layer, inputs = make_layer("paper"), normal(1, 130, SIZE)
    whole = layer(inputs)
    for t in (63, 64, 65, 128, 129):
        assert_close(layer(inputs[:, :t]), whole[:, :t], 1e-5)
        later = tf.concat([inputs[:, :t], 10 * inputs[:, t:]], axis=1)
        assert_close(layer(later)[:, :t], whole[:, :t], 1e-5)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_C6_P4_masks_of_every_dtype_mean_keep(policy):
    layer, inputs = make_layer("gated", dtype=policy), normal(2, 7, SIZE)
    mask = np.array([[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]])
    expected = layer(inputs, mask=mask.astype(bool)).numpy()
    for dtype in ("bool", "int32", "uint8", "float16", "bfloat16", "float32", "float64"):
        assert np.array_equal(layer(inputs, mask=tf.cast(mask, dtype)), expected), dtype
    assert_close(layer(inputs, mask=np.ones_like(mask)), layer(inputs), TOLERANCES[policy])
    assert np.all(layer(inputs, mask=np.zeros_like(mask)) == 0)
    assert np.all(expected[mask == 0] == 0) and np.all(np.any(expected[mask == 1] != 0, axis=-1))


@pytest.mark.parametrize(
    ("variant", "policy"),
    [
        *((variant, "float32") for variant in MAIN_VARIANTS),
        *(("gated", policy) for policy in HALF_POLICIES),
    ],
)
def test_M1_M2_M9_padding_is_not_there(variant, policy):
    layer = make_layer(variant, dtype=policy)
    assert_ignores_padding(
        lambda x, mask: layer(x, mask=mask), normal(2, 8, SIZE), TOLERANCES[policy], layer.trainable_variables
    )


@pytest.mark.parametrize("variant", ["dpfp2", "gated", "relu_normalized_sum"])
def test_M9_nothing_behind_the_mask_reaches_outputs_or_gradients(variant):
    layer = make_layer(variant)
    inputs, mask = normal(2, 7, SIZE), np.array([[1, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1]], bool)

    def results(content):
        return value_and_gradients(
            lambda x: layer(x, mask=mask), (tf.where(mask[..., None], inputs, content),), layer.trainable_variables
        )

    content = tf.constant([1e6, np.inf, np.nan, -np.inf, 1e30, -1e6])
    for result, expected in zip(tf.nest.flatten(results(content)), tf.nest.flatten(results(0.0))):
        assert np.array_equal(result, expected)


@variants
def test_a_padded_step_leaves_the_memory_untouched_and_outputs_zero(variant):
    layer = make_layer(variant)
    _, before = stream(layer, normal(2, 9, SIZE), [9])
    padding = normal(2, 5, SIZE, seed=1)
    outputs, after = layer(padding, mask=np.zeros([2, 5]), cache=before)
    assert np.all(outputs == 0) and set(after) == set(before)
    for name, tensor in before.items():
        assert np.array_equal(after[name], tensor), name
    # One row goes on, the other is padded.
    outputs, after = layer(padding, mask=np.array([[0] * 5, [1] * 5]), cache=before)
    for name, tensor in before.items():
        assert np.array_equal(after[name][0], tensor[0])
        assert name == "log_scale" or np.any(after[name][1] != tensor[1])
    assert np.all(outputs[0] == 0) and np.all(np.any(outputs[1] != 0, axis=-1))


@pytest.mark.parametrize("variant", ["recommended", "gated", "relu_normalized_sum"])
def test_M15_a_sample_that_is_all_masked_gives_zeros_and_finite_gradients(variant):
    layer, inputs, mask = make_layer(variant), normal(3, 7, SIZE), np.ones([3, 7], bool)
    mask[1] = False
    (output,), gradients = value_and_gradients(lambda x: layer(x, mask=mask), (inputs,), layer.trainable_variables)
    assert np.all(output[1] == 0) and all(np.all(np.isfinite(g)) for g in gradients)
    assert_close(tf.gather(output, [0, 2]), layer(tf.gather(inputs, [0, 2])), 1e-5)


@pytest.mark.parametrize("shape", [(2, 8), (2, 6), (1, 7), (7,), (2, 7, 7), (2, 1, 7, 7)], ids=str)
def test_M5_M6_H5_masks_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"mask must have the shape \[batch, length\]"):
        make_layer()(normal(2, 7, SIZE), mask=np.ones(shape))


def test_M5_M6_other_masks_are_refused():
    for number in (0.5, 2, -1, np.nan):
        with pytest.raises(ValueError, match=r"mask must contain only 1 \(keep\) and 0 \(leave out\)"):
            make_layer()(normal(2, 7, SIZE), mask=np.full([2, 7], number))
    with pytest.raises((TypeError, ValueError), match="attention_mask"):
        make_layer()(normal(2, 7, SIZE), attention_mask=np.tri(7)[None])


def test_M8_a_square_mask_is_batch_by_length():
    layer, inputs = make_layer("recommended"), normal(8, 8, SIZE)
    mask = np.random.default_rng(0).uniform(size=[8, 8]) < 0.5
    for given in (mask, mask.T):
        assert_close(layer(inputs, mask=given), naive_output(layer, inputs, given), 1e-5)


def test_M11_M13_implicit_masks_reach_the_layer_and_go_on_without_a_warning(recwarn):
    layer, ids = make_layer("gated"), np.array([[3, 1, 2, 0, 0], [0, 5, 0, 1, 1]])
    embed = keras.layers.Embedding(9, SIZE, mask_zero=True)
    tokens = keras.Input([None], dtype="int32")
    model = keras.Model(tokens, layer(embed(tokens)))
    embedded = tf.identity(embed(ids))
    expected = layer(embedded, mask=ids != 0)
    output = layer(embed(ids))
    assert_close(output, expected, 1e-6)
    assert np.array_equal(output._keras_mask, ids != 0)
    assert_close(model(ids), expected, 1e-6)
    assert_close(model.predict(ids, verbose=0), expected, 1e-6)
    zeros = tf.where((ids != 0)[..., None], embedded, 0.0)
    assert_close(layer(keras.layers.Masking()(zeros)), expected, 1e-6)
    with_cache, cache = layer(keras.layers.Masking()(zeros), cache=layer.init_cache(2))
    assert_close(with_cache, expected, 1e-6)
    assert_same_cache(cache, layer(embedded, mask=ids != 0, cache=layer.init_cache(2))[1], 1e-6)
    assert not [w for w in recwarn if "mask" in str(w.message).lower()]


# Decoding.


@pytest.mark.parametrize(
    ("variant", "policy"),
    [
        *((variant, "float32") for variant in MAIN_VARIANTS),
        *(("gated", policy) for policy in HALF_POLICIES),
    ],
)
def test_D1_D2_D5_pieces_equal_the_whole(variant, policy):
    # The dropout must not act in inference.
    layer = make_layer(variant, attention_dropout=0.1, dtype=policy)
    assert_streams(layer, normal(2, 10, SIZE), TOLERANCES[policy])


@pytest.mark.parametrize(
    ("variant", "sizes"), [("gated", [1] * 9), ("relu_normalized_sum", [4, 1, 4])], ids=["tokens", "pieces"]
)
def test_D2_padded_rows_of_different_lengths_stream_as_they_do_alone(variant, sizes):
    assert_streams_padded_rows(make_layer(variant), normal(3, 9, SIZE), sizes)


def test_D1_D2_D5_token_by_token_in_a_compiled_loop():
    layer, inputs = make_layer("gated"), normal(2, 70, SIZE)
    assert_streams_in_loop(layer, inputs)
    whole, final = stream(layer, inputs, [70])
    for sizes in ([1, 69], [5, 26, 39], [64, 1, 5]):
        outputs, cache = stream(layer, inputs, sizes)
        assert_close(outputs, whole, 1e-5)
        assert_same_cache(cache, final, 1e-5)


def test_D1_token_by_token_under_xla():
    layer, inputs = make_layer("recommended"), normal(2, 9, SIZE)
    outputs, cache = loop_over_tokens(layer, jit_compile=True)(inputs)
    expected, expected_cache = stream(layer, inputs, [9])
    assert_close(outputs, expected, 1e-5)
    assert_same_cache(cache, expected_cache, 1e-5)


@pytest.mark.parametrize("variant", ["paper", "gated", "relu_normalized_sum"])
def test_D6_D9_D10_first_token_beams_and_the_size_of_the_cache(variant):
    layer, inputs, order = make_layer(variant), normal(3, 8, SIZE), [2, 0, 2, 1]
    whole = layer(inputs)
    first, _ = layer(inputs[:, :1], cache=layer.init_cache(3))
    assert_close(first, whole[:, :1], 1e-5)
    assert_close(layer(inputs[:, :1], cache=None), whole[:, :1], 1e-5)

    empty = layer.init_cache(3)
    _, cache = layer(inputs[:, :5], cache=empty)
    assert {name: tensor.shape for name, tensor in cache.items()} == {name: c.shape for name, c in empty.items()}
    cache = {name: tf.gather(tensor, order) for name, tensor in cache.items()}
    outputs, _ = layer(tf.gather(inputs, order)[:, 5:], cache=cache)
    assert_close(outputs, tf.gather(whole, order)[:, 5:], 1e-5)


@policies
def test_a_step_as_a_functional_model_keeps_a_float32_state(policy):
    layer = make_layer("gated", dtype=policy)
    cache = {n: keras.Input(c.shape[1:], dtype="float32", name=n) for n, c in layer.init_cache(1).items()}
    x = keras.Input([None, SIZE], name="x")
    model = keras.Model({"x": x, **cache}, layer(x, cache=cache))
    inputs, outputs, state = normal(2, 16, SIZE), [], layer.init_cache(2)
    for start in range(0, 16, 4):
        output, state = model({"x": inputs[:, start : start + 4], **state})
        outputs.append(output)
    expected, expected_state = stream(layer, inputs, [4] * 4)
    assert_close(tf.concat(outputs, axis=1), expected, 1e-6)
    assert_same_cache(state, expected_state, 1e-6)


@pytest.mark.parametrize("variant", ["gated", "relu_normalized_sum"])
def test_other_caches_are_refused_by_name(variant):
    layer, inputs = make_layer(variant), normal(2, 3, SIZE)
    cache = layer.init_cache(2)
    incomplete = {name: tensor for name, tensor in cache.items() if name != "key_inputs"}
    for wrong in (incomplete, {**cache, "position": tf.zeros([2])}, list(cache.values()), tf.zeros([2])):
        with pytest.raises(ValueError, match="cache must be a dict of .*key_inputs.* received"):
            layer(inputs, cache=wrong)
    for name, other in layer.init_cache(3).items():
        # The op calls the layer's state its initial state.
        with pytest.raises(ValueError, match="initial_state" if name == "fast_weights" else name):
            layer(inputs, cache={**cache, name: other})


# Range and precision.


@policies
@pytest.mark.parametrize("variant", ["paper", "gated"])
def test_N1_N6_large_inputs_give_finite_results_and_a_bounded_memory(variant, policy):
    layer = make_layer(variant, dtype=policy)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output, cache = layer(x, cache=layer.init_cache(1))
            # Small, as a loss is: gradients of half precision must not overflow by the sum over 4096 tokens.
            loss = tf.reduce_mean(tf.cast(output, "float32") ** 2)
        return output, cache["fast_weights"], tape.gradient(loss, [x, *layer.trainable_variables])

    for scale in (0.0, 5.0):
        output, memory, gradients = run(scale * normal(1, 4096, SIZE))
        assert np.abs(memory).max() < 100
        assert all(np.all(np.isfinite(np.float32(x))) for x in [output, *gradients])


@pytest.mark.parametrize("feature_map", [*sorted(set(KERNELS) - {"dpfp"}), "dpfp", "l2"])
def test_N1_no_feature_map_lets_the_memory_grow(feature_map):
    layer = make_layer(feature_map=feature_map)
    for scale in (0.0, 5.0):
        inputs = scale * normal(1, 512, SIZE)
        outputs, cache = layer(inputs, cache=layer.init_cache(1))
        assert np.all(np.isfinite(outputs)) and np.abs(cache["fast_weights"]).max() < 100


@pytest.mark.parametrize("variant", ["paper", "relu_normalized_sum"])
def test_P1_equal_keys_for_a_long_time_stay_exact(variant):
    layer, exact = (make_layer(variant, dtype=dtype) for dtype in ("mixed_float16", "float32"))
    inputs = tf.repeat(normal(1, 1, SIZE), 4096, axis=1)
    _, cache = layer(inputs, cache=layer.init_cache(1))
    assert_close(layer(inputs), exact(inputs), TOLERANCES["mixed_float16"])
    assert all(np.all(np.isfinite(tensor)) for tensor in cache.values())


# Shapes and compilers.


@pytest.mark.parametrize("variant", ["paper", "gated", "relu_normalized_sum"])
def test_H6_H7_H12_any_length_in_turn_eager_and_in_one_graph(variant):
    layer = make_layer(variant)
    graph = tf.function(layer, [tf.TensorSpec([None, None, SIZE])], autograph=False)
    for length in (50, 1, 9, 67, 50):
        inputs = normal(2, length, SIZE, seed=length)
        expected = naive_output(layer, inputs)
        assert_close(layer(inputs), expected, 1e-5)
        assert_close(graph(inputs), expected, 1e-5)


def test_H13_symbolic_shapes_and_dtypes():
    for variant in ("paper", "gated", "relu_normalized_sum"):
        layer, x = make_layer(variant, dtype="mixed_float16"), keras.Input([None, SIZE])
        output = layer(x)
        assert (output.shape, output.dtype) == ((None, None, HIDDEN), "float16")
        assert layer.compute_output_shape(x.shape) == (None, None, HIDDEN)
        spec = layer.compute_output_spec(x)
        assert (spec.shape, spec.dtype) == ((None, None, HIDDEN), "float16")
        cache = {n: keras.Input(c.shape[1:], dtype="float32") for n, c in layer.init_cache(1).items()}
        output, new_cache = layer(x, cache=cache)
        assert output.shape == (None, None, HIDDEN)
        assert {n: (c.shape, c.dtype) for n, c in new_cache.items()} == {
            n: (c.shape, "float32") for n, c in cache.items()
        }
    lines = []
    keras.Model(x, layer(x)).summary(print_fn=lambda line, line_break=None: lines.append(line))
    assert f"(None, None, {HIDDEN})" in "".join(lines)


def test_H13_time_distributed():
    layer = make_layer("gated")
    distributed = keras.layers.TimeDistributed(layer)
    assert distributed(keras.Input([None, None, SIZE])).shape == (None, None, None, HIDDEN)
    inputs = normal(2, 3, 7, SIZE)
    assert_close(distributed(inputs), tf.stack([layer(inputs[:, i]) for i in range(3)], axis=1), 1e-6)


def test_H15_masked_layer_is_the_same_in_a_graph_and_under_xla(monkeypatch):
    # Several chunks, and smaller ones compile faster.
    monkeypatch.setattr(sys.modules["favor_keras.ops.delta_rule"], "CHUNK_SIZE", 4)
    layer = make_layer("dpfp2", use_decay=True, output_norm=True)
    mask = tf.constant(padding_masks(2, 6, 3)["interior"], "int32")
    assert_same_when_compiled(
        lambda x, mask: layer(x, mask=mask),
        (normal(2, 9, SIZE), mask),
        layer.trainable_variables,
        unknown_shapes=True,
    )


def test_F1_the_graph_of_a_training_step_does_not_grow_with_the_length():
    layer = make_layer("gated")

    def count(length):
        def step(x):
            return value_and_gradients(lambda x: layer(x, training=True), (x,), layer.trainable_variables)

        graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([2, length, SIZE])).graph
        definition = graph.as_graph_def()
        return len(definition.node) + sum(len(function.node_def) for function in definition.library.function)

    assert abs(count(512) / count(2048) - 1) < 0.05


def test_A1_other_inputs_are_refused():
    for shape in ((2, SIZE), (2, 3, 4, SIZE), (SIZE,)):
        for layer in (make_layer(), FastWeightsAttention(HIDDEN, HEADS)):
            with pytest.raises(ValueError, match=r"\[batch, length, features\]"):
                layer(normal(*shape))
    with pytest.raises(ValueError, match="features"):
        make_layer()(normal(2, 7, SIZE + 3))
    assert FastWeightsAttention(24, 4)(normal(1, 240, 24)).shape == (1, 240, 24)


def test_A2_batch_comes_first():
    assert "[batch, length" in FastWeightsAttention.__doc__
    with pytest.raises(ValueError, match="batch, length"):
        make_layer()(normal(7, 2, SIZE), mask=np.ones([2, 7]))
