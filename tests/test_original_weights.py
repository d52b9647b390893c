"""Weights of the original models: loaded models compute what the originals computed, or nothing is loaded."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import assert_close

from favor_keras import CausalLM, FastWeightsAttention, GMLPBlock
from favor_keras.models import DecoderBlock
from favor_keras.original_weights import load_fast_weights_transformer, load_gmlp_block, load_gmlp_model

ORIGINAL_MIXER = {"feature_map": "dpfp", "short_convolution": 0, "output_norm": False}
ORIGINAL_BLOCK = {"normalize_mixer_input": False, "activation": "relu"}
VOCABULARY, HIDDEN, HEADS, FEED_FORWARD, LAYERS = 7, 6, 3, 10, 2
GATE_SIZE, LENGTH = 8, 9

both_precisions = pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])


@keras.saving.register_keras_serializable(package="favor_keras_tests")
def original_mixer(hidden_size, num_heads, **options):
    return FastWeightsAttention(hidden_size, num_heads, **options)


def fast_weights_model(**options):
    settings = {
        "vocabulary_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "feed_forward_size": FEED_FORWARD,
        "mixer": "fast_weights",
        "mixer_options": ORIGINAL_MIXER,
        "block_options": ORIGINAL_BLOCK,
    }
    return CausalLM(**{**settings, **options})


def gmlp_model(**options):
    settings = {
        "num_layers": LAYERS,
        "num_heads": 1,
        "mixer": "gmlp",
        "mixer_options": {"d_ffn": 2 * GATE_SIZE, "gating_weights": "full"},
        "max_length": LENGTH,
    }
    return CausalLM(VOCABULARY, HIDDEN, **{**settings, **options})


def random_arrays(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def shapes_around_blocks(vocabulary_size=VOCABULARY, size=HIDDEN):
    return {
        "src_embed.weight": (vocabulary_size, size),
        "norm.weight": (size,),
        "norm.bias": (size,),
        "generator.weight": (vocabulary_size, size),
        "generator.bias": (vocabulary_size,),
    }


def fast_weights_arrays():
    layer = {
        "attn.query.linear.weight": (HIDDEN, HIDDEN),
        "attn.key.linear.weight": (HIDDEN, HIDDEN),
        "attn.value.linear.weight": (HIDDEN, HIDDEN),
        "attn.gate.0.linear.weight": (HEADS, HIDDEN),
        "attn.output.weight": (HIDDEN, HIDDEN),
        "attn.output.bias": (HIDDEN,),
        "feed_forward.layer1.weight": (FEED_FORWARD, HIDDEN),
        "feed_forward.layer1.bias": (FEED_FORWARD,),
        "feed_forward.layer2.weight": (HIDDEN, FEED_FORWARD),
        "feed_forward.layer2.bias": (HIDDEN,),
        "norm_self_attn.weight": (HIDDEN,),
        "norm_self_attn.bias": (HIDDEN,),
        "norm_ff.weight": (HIDDEN,),
        "norm_ff.bias": (HIDDEN,),
    }
    layers = {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return random_arrays({**shapes_around_blocks(), **layers})


def gmlp_block_shapes():
    return {
        "norm.weight": (HIDDEN,),
        "norm.bias": (HIDDEN,),
        "proj1.weight": (2 * GATE_SIZE, HIDDEN),
        "proj1.bias": (2 * GATE_SIZE,),
        "sgu.norm.weight": (GATE_SIZE,),
        "sgu.norm.bias": (GATE_SIZE,),
        "sgu.weight": (LENGTH, LENGTH),
        "sgu.bias": (LENGTH,),
        "proj2.weight": (HIDDEN, GATE_SIZE),
        "proj2.bias": (HIDDEN,),
    }


def gmlp_arrays():
    layers = {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in gmlp_block_shapes().items()}
    return random_arrays({**shapes_around_blocks(), **layers})


LOADERS = {
    "fast_weights": (load_fast_weights_transformer, fast_weights_model, fast_weights_arrays),
    "gmlp": (load_gmlp_model, gmlp_model, gmlp_arrays),
}
all_loaders = pytest.mark.parametrize(("load", "make_model", "make_arrays"), LOADERS.values(), ids=LOADERS)


# What the originals computed.


@both_precisions
@pytest.mark.parametrize("mixer", ["name", "function"])
def test_fast_weights_transformer_computes_what_the_original_does(reference, mixer, dtype, tolerance):
    prefix, reference_arrays = "transformer_weight/", reference("fast_weights")
    arrays = {k.removeprefix(prefix): v for k, v in reference_arrays.items() if k.startswith(prefix)}
    options = {"mixer": original_mixer, "mixer_options": {}} if mixer == "function" else {}
    model = fast_weights_model(hidden_size=24, feed_forward_size=48, dtype=dtype, **options)
    embedding_and_head = random_arrays(shapes_around_blocks(size=24))
    load_fast_weights_transformer(model, {**embedding_and_head, **arrays})
    x = tf.constant(reference_arrays["transformer_input"], dtype)
    for block in model.blocks:
        x = block(x)
    assert_close(model.norm(x), reference_arrays["transformer_output"], tolerance)


def reference_gmlp_arrays(reference):
    """The block's arrays as PyTorch has them."""
    stored = reference("gmlp")
    return {
        "norm.weight": stored["block_norm_gamma"],
        "norm.bias": stored["block_norm_beta"],
        "proj1.weight": stored["block_proj1_kernel"].T,
        "proj1.bias": stored["block_proj1_bias"],
        "sgu.norm.weight": stored["block_sgu_norm_gamma"],
        "sgu.norm.bias": stored["block_sgu_norm_beta"],
        "sgu.weight": stored["block_sgu_weight"],
        "sgu.bias": stored["block_sgu_bias"],
        "proj2.weight": stored["block_proj2_kernel"].T,
        "proj2.bias": stored["block_proj2_bias"],
    }


@both_precisions
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_gmlp_block_computes_what_the_original_does(reference, causal, dtype, tolerance):
    block = GMLPBlock(d_ffn=20, seq_len=21, causal=causal, dtype=dtype)
    block.build((None, None, 12))
    load_gmlp_block(block, reference_gmlp_arrays(reference))
    expected = reference("gmlp")["block_causal_output" if causal else "block_full_output"]
    assert_close(block(tf.constant(reference("gmlp")["block_input"], dtype)), expected, tolerance)


# The same with the whole models, written from the formulas in float64.


def layer_norm(x, arrays, name):
    centred = x - x.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normed * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]


def linear(x, arrays, name):
    y = np.einsum("...i,oi->...o", x, arrays[f"{name}.weight"])
    return y + arrays[f"{name}.bias"] if f"{name}.bias" in arrays else y


def naive_features(x, nu):
    x = np.maximum(np.concatenate([x, -x], axis=-1), 0)
    features = np.concatenate([x * np.roll(x, shift, axis=-1) for shift in range(1, nu + 1)], axis=-1)
    return features / (features.sum(axis=-1, keepdims=True) + 1e-6)


def naive_attention(x, arrays, name, nu):
    """One sequence [T, d], one position at a time."""
    query, key, value = (
        linear(x, arrays, f"{name}.{part}.linear").reshape(len(x), HEADS, -1) for part in ("query", "key", "value")
    )
    query, key = naive_features(query, nu), naive_features(key, nu)
    beta = 1 / (1 + np.exp(-linear(x, arrays, f"{name}.gate.0.linear")))
    memory, rows = np.zeros([HEADS, value.shape[-1], key.shape[-1]]), []
    for t in range(len(x)):
        known = np.einsum("hvk,hk->hv", memory, key[t])
        memory = memory + np.einsum("hv,hk->hvk", beta[t][:, None] * (value[t] - known), key[t])
        rows.append(np.einsum("hvk,hk->hv", memory, query[t]).ravel())
    return linear(np.array(rows), arrays, f"{name}.output")


def naive_fast_weights_layer(x, arrays, name, nu):
    x = x + naive_attention(x, arrays, f"{name}.attn", nu)
    hidden = np.maximum(linear(layer_norm(x, arrays, f"{name}.norm_ff"), arrays, f"{name}.feed_forward.layer1"), 0)
    return x + linear(hidden, arrays, f"{name}.feed_forward.layer2")


def naive_gmlp_layer(x, arrays, name):
    z = linear(layer_norm(x, arrays, f"{name}.norm"), arrays, f"{name}.proj1")
    z = z * (1 + tf.math.erf(z / np.sqrt(2)).numpy()) / 2
    u, v = np.split(z, 2, axis=-1)
    weight = np.tril(arrays[f"{name}.sgu.weight"][: len(x), : len(x)])
    gate = weight @ layer_norm(v, arrays, f"{name}.sgu.norm") + arrays[f"{name}.sgu.bias"][: len(x), None]
    return x + linear(u * gate, arrays, f"{name}.proj2")


def naive_logits(ids, arrays, layer):
    x = arrays["src_embed.weight"][ids]
    for i in range(LAYERS):
        x = layer(x, arrays, f"layers.{i}")
    return linear(layer_norm(x, arrays, "norm"), arrays, "generator")


IDS = np.array([3, 0, 6, 6, 1, 5, 2])


@pytest.mark.parametrize("nu", [1, 2])
def test_logits_of_a_whole_fast_weights_model(nu):
    model, arrays = fast_weights_model(mixer_options={**ORIGINAL_MIXER, "nu": nu}), fast_weights_arrays()
    load_fast_weights_transformer(model, arrays)
    expected = naive_logits(IDS, arrays, lambda x, arrays, name: naive_fast_weights_layer(x, arrays, name, nu))
    assert_close(model(IDS[None])[0], expected, 1e-5)


def test_logits_of_a_whole_gmlp_model():
    model, arrays = gmlp_model(), gmlp_arrays()
    load_gmlp_model(model, arrays)
    assert_close(model(IDS[None])[0], naive_logits(IDS, arrays, naive_gmlp_layer), 1e-5)


# Every weight has its array.


@all_loaders
def test_every_weight_is_an_array_of_its_own(load, make_model, make_arrays):
    """As the arrays are random, a weight of the same numbers in any order has that array and no other."""
    model, arrays = make_model(), make_arrays()
    load(model, arrays)
    used = {name: array for name, array in arrays.items() if "norm_self_attn" not in name}
    weights = {weight.path: weight.numpy() for weight in model.trainable_weights}
    assert len(weights) == len(used)

    def fingerprints(group):
        return sorted(tuple(np.sort(np.asarray(array, "float32"), axis=None)) for array in group.values())

    assert fingerprints(weights) == fingerprints(used)


def test_fast_weights_kernels_are_transposed_head_by_head():
    model, arrays = fast_weights_model(dtype="float64"), fast_weights_arrays()
    load_fast_weights_transformer(model, arrays)
    assert np.array_equal(model.embedding.embeddings, arrays["src_embed.weight"])
    assert np.array_equal(model.head.kernel, arrays["generator.weight"].T)
    assert np.array_equal(model.norm.gamma, arrays["norm.weight"])
    for i, block in enumerate(model.blocks):
        size = HIDDEN // HEADS
        for head in range(HEADS):
            rows = slice(head * size, (head + 1) * size)
            for part in ("query", "key", "value"):
                kernel = getattr(block.mixer, f"{part}_dense").kernel
                assert np.array_equal(kernel[:, head], arrays[f"layers.{i}.attn.{part}.linear.weight"][rows].T)
            output = block.mixer.output_dense.kernel[head]
            assert np.array_equal(output, arrays[f"layers.{i}.attn.output.weight"][:, rows].T)
            gate = arrays[f"layers.{i}.attn.gate.0.linear.weight"][head]
            assert np.array_equal(block.mixer.beta_dense.kernel[:, head], gate)
        assert np.array_equal(block.expand.kernel, arrays[f"layers.{i}.feed_forward.layer1.weight"].T)
        assert np.array_equal(block.contract.bias, arrays[f"layers.{i}.feed_forward.layer2.bias"])
        assert np.array_equal(block.feed_forward_norm.beta, arrays[f"layers.{i}.norm_ff.bias"])


# Names and files.


def published_names(arrays):
    def rename(name):
        name = name.replace("attn.gate.", "attn.interpolation_weight.")
        return name if name.startswith(("src_embed", "generator")) else f"transformer.{name}"

    return {rename(name): array for name, array in arrays.items()}


@all_loaders
@pytest.mark.parametrize("way", ["npz", "published_names", "float16", "without_unused"])
def test_other_ways_to_give_the_arrays(load, make_model, make_arrays, way, tmp_path):
    expected, model, arrays = make_model(), make_model(), make_arrays()
    if way == "float16":
        arrays = {name: array.astype("float16") for name, array in arrays.items()}
    load(expected, arrays)
    if way == "npz":
        np.savez(tmp_path / "arrays.npz", **arrays)
        arrays = np.load(tmp_path / "arrays.npz")
    elif way == "published_names":
        arrays = published_names(arrays)
        assert any(name.startswith("transformer.layers.1.") for name in arrays)
    elif way == "without_unused":
        arrays = {name: array for name, array in arrays.items() if "norm_self_attn" not in name}
    load(model, arrays)
    for weight, expected_weight in zip(model.weights, expected.weights, strict=True):
        assert np.array_equal(weight, expected_weight)


# What does not fit.


def replaced(arrays, **changes):
    """`arrays` with entries replaced, those of None left out."""
    return {name: array for name, array in {**arrays, **changes}.items() if array is not None}


@all_loaders
def test_one_error_lists_everything_and_nothing_is_loaded(load, make_model, make_arrays):
    model = make_model()
    model.build((None, None))
    before = [weight.numpy() for weight in model.weights]
    changes = {
        "norm.bias": None,
        "layers.2.norm.weight": np.ones(HIDDEN),
        "generator.weight": np.ones([HIDDEN, VOCABULARY]),
        "src_embed.weight": np.ones([VOCABULARY, HIDDEN], int),
        "transformer.norm.weight": np.ones(HIDDEN),
    }
    with pytest.raises(ValueError) as error:
        load(model, replaced(make_arrays(), **changes))
    assert str(error.value) == (
        "arrays do not fit the weights: generator.weight must have the shape (7, 6), received (6, 7); "
        "layers.2.norm.weight is unknown; norm.bias is missing; norm.weight is there 2 times; "
        "src_embed.weight must have a floating dtype, received int64"
    )
    for weight, value in zip(model.weights, before, strict=True):
        assert np.array_equal(weight, value)


@all_loaders
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_any_one_fault_is_enough(load, make_model, make_arrays, fault):
    model, arrays = make_model(num_layers=1), make_arrays()
    arrays = {name: array for name, array in arrays.items() if not name.startswith("layers.1.")}
    for name in arrays:
        if "norm_self_attn" not in name:
            wrong = {"missing": {name: None}, "unknown": {f"{name}_": arrays[name]}, "shape": {name: arrays[name][:-1]}}
            with pytest.raises(ValueError, match=f"^arrays do not fit the weights: {name}_? [^;]*$"):
                load(model, replaced(arrays, **wrong[fault]))
    load(model, arrays)


def test_unused_norms_of_a_layer_that_is_not_there_are_unknown():
    arrays = {**fast_weights_arrays(), "layers.2.norm_self_attn.bias": np.ones(HIDDEN)}
    with pytest.raises(ValueError, match=r"^arrays do not fit the weights: layers.2.norm_self_attn.bias is unknown$"):
        load_fast_weights_transformer(fast_weights_model(), arrays)


def test_a_block_is_not_half_loaded():
    block, arrays = GMLPBlock(2 * GATE_SIZE, LENGTH), random_arrays(gmlp_block_shapes())
    with pytest.raises(ValueError, match="^block must be built"):
        load_gmlp_block(block, arrays)
    block.build((None, None, HIDDEN))
    before = [weight.numpy() for weight in block.weights]
    wrong = {"proj2.bias": None, "sgu.weight": np.ones([LENGTH, LENGTH + 1])}
    with pytest.raises(ValueError, match="^arrays do not fit.*: proj2.bias is missing; sgu.weight must have the shape"):
        load_gmlp_block(block, replaced(arrays, **wrong))
    assert all(np.array_equal(weight, value) for weight, value in zip(block.weights, before, strict=True))


@all_loaders
def test_arrays_must_be_a_mapping(load, make_model, make_arrays):
    with pytest.raises(ValueError, match="^arrays must be a mapping.*received list"):
        load(make_model(), list(make_arrays().items()))


OTHER_FAST_WEIGHTS_MODELS = {
    "feature_map": {"mixer_options": {**ORIGINAL_MIXER, "feature_map": "l2"}},
    "update_rule": {"mixer_options": {**ORIGINAL_MIXER, "update_rule": "sum"}},
    "short_convolution": {"mixer_options": {**ORIGINAL_MIXER, "short_convolution": 4}},
    "output_norm": {"mixer_options": {**ORIGINAL_MIXER, "output_norm": True}},
    "output_gate": {"mixer_options": {**ORIGINAL_MIXER, "output_gate": True}},
    "use_decay": {"mixer_options": {**ORIGINAL_MIXER, "use_decay": True}},
    "use_bias": {"mixer_options": {**ORIGINAL_MIXER, "use_bias": True}},
    "normalize_mixer_input": {"block_options": {"activation": "relu"}},
    "activation": {"block_options": {"normalize_mixer_input": False}},
    "position_embedding": {"position_embedding": True, "max_length": 8},
    "FastWeightsAttention": {"mixer": "favor", "mixer_options": {}},
}


@pytest.mark.parametrize("word", OTHER_FAST_WEIGHTS_MODELS)
def test_other_fast_weights_models_are_refused(word):
    with pytest.raises(ValueError, match=f"^model.* must (have|be a) {word}.*, received"):
        load_fast_weights_transformer(fast_weights_model(**OTHER_FAST_WEIGHTS_MODELS[word]), fast_weights_arrays())


OTHER_GMLP_MODELS = {
    "activation": {"mixer_options": {"activation": "relu", "gating_weights": "full"}},
    "gating_weights": {"mixer_options": {"gating_weights": "toeplitz"}},
    "num_heads": {"num_heads": 3, "mixer_options": {"gating_weights": "full"}},
    "attention_size": {"mixer": "amlp", "mixer_options": {"gating_weights": "full"}},
    "short_convolution": {"mixer_options": {"gating_weights": "full", "short_convolution": 4}},
    "position_embedding": {"position_embedding": True},
    "GMLPBlock": {"mixer": "favor", "mixer_options": {}},
}


@pytest.mark.parametrize("word", OTHER_GMLP_MODELS)
def test_other_gmlp_models_are_refused(word):
    with pytest.raises(ValueError, match=f"^model.* must (have|be a) {word}.*, received"):
        load_gmlp_model(gmlp_model(**OTHER_GMLP_MODELS[word]), gmlp_arrays())


@all_loaders
def test_models_of_another_class_are_refused(load, make_model, make_arrays):
    with pytest.raises(ValueError, match="^model must be a CausalLM, received"):
        load(keras.Sequential(), make_arrays())


# CausalLM(block_options=...), which the original needs.


def test_block_options_reach_every_block_and_are_saved(tmp_path):
    model = fast_weights_model()
    assert all(isinstance(block, DecoderBlock) and not block.normalize_mixer_input for block in model.blocks)
    assert all(block.activation is keras.activations.relu for block in model.blocks)
    load_fast_weights_transformer(model, fast_weights_arrays())
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.get_config()["block_options"] == ORIGINAL_BLOCK
    assert_close(again(IDS[None]), model(IDS[None]), 1e-6)


@keras.saving.register_keras_serializable(package="favor_keras_tests")
def cubed(x):
    return x**3


@pytest.mark.parametrize("activation", [keras.activations.tanh, cubed], ids=["built_in", "own"])
def test_the_activation_can_be_a_function(activation, tmp_path):
    model = fast_weights_model(block_options={"activation": activation})
    logits = model(IDS[None])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert all(block.activation is activation and block.normalize_mixer_input for block in again.blocks)
    assert_close(again(IDS[None]), logits, 1e-6)


@pytest.mark.parametrize("mixer", ["gmlp", "amlp"])
def test_whole_blocks_refuse_block_options(mixer):
    with pytest.raises(ValueError, match=f"^block_options must be None with mixer='{mixer}'.*received .*relu"):
        gmlp_model(mixer=mixer, block_options={"activation": "relu"})


@pytest.mark.parametrize("block_options", ["relu", ["activation"], {"dropout": 0.5}, {"activation": "relu", "norm": 1}])
def test_bad_block_options(block_options):
    with pytest.raises(ValueError, match="^block_options must be None or a dict with names among .*received"):
        fast_weights_model(block_options=block_options)
