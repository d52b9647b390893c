"""FastWeightsAttention: its weights, arguments, config, dropout, training and generation."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import normal
from oracles import assert_close
from test_causal_lm import greedy_without_cache
from test_fast_weights_layer import HEADS, HIDDEN, SIZE, make_layer, variants, weights_of
from test_training import VOCABULARY, compile_model, losses_of_fit, text_batch

from favor_keras import CausalLM, FastWeightsAttention, SelfAttention
from favor_keras.models import DecoderBlock
from favor_keras.ops import KernelTransformation

# Weights.


def test_by_default_the_layer_is_that_of_the_paper():
    layer = FastWeightsAttention(HIDDEN, HEADS)
    layer.build([None, None, SIZE])
    shapes = {w.path.split("/", 1)[1]: tuple(w.shape) for w in layer.weights}
    assert shapes == {
        **{f"{name}_dense/kernel": (SIZE, HEADS, HIDDEN // HEADS) for name in ("query", "key", "value")},
        "beta_dense/kernel": (SIZE, HEADS),
        "output_dense/kernel": (HEADS, HIDDEN // HEADS, HIDDEN),
        "output_dense/bias": (HIDDEN,),
    }
    assert len(layer.trainable_weights) == len(layer.weights)
    assert (layer.feature_map, layer.nu, layer.update_rule) == ("dpfp", 1, "delta")


@variants
def test_S9_S11_build_makes_all_weights(variant):
    built, called = make_layer(variant), FastWeightsAttention.from_config(make_layer(variant).get_config())
    called(normal(2, 7, SIZE))
    kinds = [[(w.path.split("/", 1)[1], w.shape, w.dtype, w.trainable) for w in x.weights] for x in (built, called)]
    assert kinds[0] == kinds[1] and built.count_params() == called.count_params()
    called.set_weights(built.get_weights())
    assert np.array_equal(called(normal(2, 7, SIZE)), built(normal(2, 7, SIZE)))


def test_A11_the_number_of_weights_is_that_of_the_formula():
    layer = make_layer("gated", output_norm=True, use_bias=True)
    projections = 4 * SIZE * HIDDEN + HIDDEN * HIDDEN + 4 * HIDDEN  # q, k, v, gate; output; biases but the gate's
    per_head = 2 * SIZE * HEADS + 2 * HEADS  # beta and decay; rate and step
    assert layer.count_params() == projections + per_head + 3 * 4 * HIDDEN + HIDDEN // HEADS


def test_P9_sublayers_and_weights_have_the_dtype_of_the_layer():
    layer = make_layer("softmax", short_convolution=4, output_norm=True, output_gate=True, dtype="bfloat16")
    sublayers = [x for x in vars(layer).values() if isinstance(x, keras.layers.Layer)]
    assert len(sublayers) == 4 + 3 + 5 and {x.dtype_policy.name for x in sublayers} == {"bfloat16"}
    assert {w.dtype for w in weights_of(layer).values()} == {"bfloat16"}
    assert layer.projection_matrix.dtype == "float32"
    assert layer(normal(2, 7, SIZE)).dtype == "bfloat16"


def test_A6_S17_the_projection_comes_from_the_seed_and_is_not_trained():
    def new_layer(seed=5):
        return FastWeightsAttention(HIDDEN, HEADS, feature_map="softmax", seed=seed)

    eager, symbolic, other = new_layer(), new_layer(), new_layer(6)
    eager(normal(1, 3, SIZE))
    symbolic(keras.Input([None, SIZE]))
    other.build([None, None, SIZE])
    before = eager.projection_matrix.numpy()
    assert_close(symbolic.projection_matrix, before, 1e-7)
    assert np.abs(other.projection_matrix - before).max() > 0.1

    model = keras.Sequential([eager])
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse", run_eagerly=True)
    model.fit(normal(4, 7, SIZE), normal(4, 7, HIDDEN), verbose=0)
    assert np.array_equal(eager.projection_matrix, before)
    assert not any(w is eager.projection_matrix for w in eager.trainable_weights)
    assert before.shape not in {tuple(v.shape) for v in model.optimizer.variables}


# Arguments and config.

OTHER_SETTINGS = {
    "hidden_size": 24,
    "num_heads": 2,
    "attention_dropout": 0.25,
    "feature_map": "softmax",
    "nu": 2,
    "update_rule": "sum",
    "short_convolution": 3,
    "output_norm": True,
    "output_gate": True,
    "use_decay": True,
    "nb_random_features": 10,
    "use_bias": True,
    "kernel_initializer": keras.initializers.RandomUniform(0.5, 0.6),
    "bias_initializer": keras.initializers.Constant(0.25),
    "kernel_regularizer": {"class_name": "L2", "config": {"l2": 0.5}},
    "bias_regularizer": {"class_name": "L1", "config": {"l1": 0.25}},
    "activity_regularizer": {"class_name": "L2", "config": {"l2": 0.125}},
    "kernel_constraint": keras.constraints.NonNeg(),
    "bias_constraint": keras.constraints.MaxNorm(0.1),
    "seed": 7,
}
# No layer can have all of them: two that have them between them.
SETS = {
    "decay": {k: v for k, v in OTHER_SETTINGS.items() if k not in ("nu", "update_rule")},
    "sum": {k: v for k, v in OTHER_SETTINGS.items() if k not in ("feature_map", "nb_random_features", "use_decay")},
}


@pytest.mark.parametrize("name", SETS)
def test_S15_config_is_complete(name):
    names = [n for n in inspect.signature(FastWeightsAttention.__init__).parameters if n not in ("self", "kwargs")]
    assert sorted(names) == sorted(OTHER_SETTINGS), "a new argument needs a value other than its default here"
    layer = FastWeightsAttention(**SETS[name], name="mine", trainable=False, dtype="mixed_float16")
    config = layer.get_config()
    assert {*names, "name", "trainable", "dtype"} <= set(config)
    assert all(config[key] == value for key, value in SETS[name].items() if isinstance(value, (str, int, float)))
    again = FastWeightsAttention.from_config(config)
    assert again.get_config() == config
    assert (again.name, again.trainable, again.dtype_policy.name) == ("mine", False, "mixed_float16")
    renamed = FastWeightsAttention.from_config({**config, "name": "z", "trainable": True, "dtype": "float32"})
    assert (renamed.name, renamed.trainable, renamed.compute_dtype) == ("z", True, "float32")
    for made in (layer, renamed):
        made(normal(2, 7, SIZE))
    assert layer.trainable_weights == [] and len(renamed.trainable_weights) == len(weights_of(renamed))


@pytest.mark.parametrize(
    "name", [n for n in OTHER_SETTINGS if not n.endswith(("initializer", "regularizer", "constraint"))]
)
def test_every_setting_changes_the_output(name):
    settings = {"hidden_size": HIDDEN, "num_heads": HEADS, "attention_dropout": 0.5, "seed": 1}
    settings |= {"bias_initializer": "ones"}
    settings |= {"feature_map": "softmax"} if name == "nb_random_features" else {}
    outputs = []
    for changed in ({}, {name: OTHER_SETTINGS[name]}):
        keras.utils.set_random_seed(0)
        outputs.append(FastWeightsAttention(**{**settings, **changed})(normal(2, 7, SIZE), training=True))
    different_shape = outputs[0].shape != outputs[1].shape
    assert different_shape == (name == "hidden_size")
    assert different_shape or np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_initializers_biases_regularizers_and_constraints_take_effect():
    layer = FastWeightsAttention(**SETS["sum"])
    inputs = normal(2, 7, SIZE)
    output = layer(inputs)
    denses = [layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense]
    for dense in denses:
        assert np.all((dense.kernel >= 0.5) & (dense.kernel <= 0.6)) and np.all(dense.bias == 0.25)
        assert isinstance(dense.kernel.constraint, keras.constraints.NonNeg)
        assert isinstance(dense.bias.constraint, keras.constraints.MaxNorm)
    assert np.abs(layer.query_dense.kernel - layer.key_dense.kernel).max() > 0
    kernels = [*(dense.kernel for dense in denses), layer.gate_dense.kernel]
    expected = [0.5 * np.sum(k.numpy() ** 2) for k in kernels] + [0.25 * np.sum(np.abs(d.bias)) for d in denses]
    assert_close(sum(layer.losses), sum(expected) + 0.125 * np.sum(output**2) / len(inputs), 1e-5)
    layer(inputs, cache=layer.init_cache(2))
    assert np.isfinite(sum(layer.losses)), "the cache is no output to regularise"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer, received 0"),
        ({"hidden_size": 12.0}, "hidden_size must be a positive integer, received 12.0"),
        ({"num_heads": -3}, "num_heads must be a positive integer, received -3"),
        ({"num_heads": 5}, "hidden_size must be divisible by num_heads, received hidden_size=12, num_heads=5"),
        ({"attention_dropout": 1.0}, "attention_dropout must be in .0, 1., received 1.0"),
        ({"feature_map": "rbf"}, "feature_map must be 'l2', one of .*dpfp.*elu.* received 'rbf'"),
        ({"feature_map": 3}, "feature_map must be .* received 3"),
        ({"feature_map": tf.nn.relu}, "feature_map must be .* KernelTransformation, received"),
        ({"nu": 0}, "nu must be an integer from 1 to 7 for heads of size 4, received 0"),
        ({"nu": 8}, "nu must be an integer from 1 to 7 for heads of size 4, received 8"),
        ({"nu": 1.0}, "nu must be an integer from 1 to 7 for heads of size 4, received 1.0"),
        ({"nu": True}, "nu must be an integer from 1 to 7 for heads of size 4, received True"),
        ({"nu": 2, "feature_map": "l2"}, "nu needs feature_map='dpfp', received nu=2 and feature_map='l2'"),
        ({"update_rule": "hebb"}, "update_rule must be one of .*normalized_sum.* received 'hebb'"),
        ({"use_decay": True, "update_rule": "sum"}, "use_decay needs update_rule='delta', received 'sum'"),
        ({"nb_random_features": 8}, "nb_random_features needs .*, received 8 and feature_map='dpfp'"),
        ({"nb_random_features": -1}, "nb_random_features must be 0 or a positive integer, received -1"),
        ({"short_convolution": -4}, "short_convolution must be 0 or a positive integer, received -4"),
        ({"seed": 1.5}, "seed must be .* received 1.5"),
        ({"causal": False}, "causal"),
    ],
    # Of functions only the type: their addresses are others in every process.
    ids=lambda x: x if isinstance(x, str) else ", ".join(f"{n}={type(v) if callable(v) else v}" for n, v in x.items()),
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FastWeightsAttention(**{"hidden_size": HIDDEN, "num_heads": HEADS, **options})


@keras.saving.register_keras_serializable(package="test")
class PowerKernel(KernelTransformation):
    """|x|^power, an own feature map with a config."""

    def __init__(self, power=1.0):
        self.power = power

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        return (tf.abs(data) + 1e-3) ** self.power, None

    def get_config(self):
        return {"power": self.power}


def test_own_feature_maps_work_and_are_in_the_config():
    layer, inputs = make_layer(feature_map=PowerKernel(2.0)), normal(2, 7, SIZE)
    again = FastWeightsAttention.from_config(layer.get_config())
    again.build([None, None, SIZE])
    again.set_weights(layer.get_weights())
    assert np.array_equal(again(inputs), layer(inputs))
    assert np.abs(make_layer(feature_map=PowerKernel(1.0))(inputs) - layer(inputs)).max() > 1e-3
    with pytest.raises(ValueError, match="register_keras_serializable"):
        make_layer(feature_map=type("Mine", (PowerKernel,), {})()).get_config()


def test_lora_on_the_projections(tmp_path):
    layer, x = make_layer("gated"), keras.Input([None, SIZE])
    model, inputs = keras.Model(x, layer(x)), normal(2, 7, SIZE)
    before = model(inputs)
    denses = [layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense]
    for dense in denses:
        dense.enable_lora(2)
    assert_close(model(inputs), before, 1e-6)
    for dense in denses:
        assert any(w is dense.lora_kernel_b for w in layer.trainable_weights)
        dense.lora_kernel_b.assign(tf.fill(dense.lora_kernel_b.shape, 0.3))
    adapted = model(inputs)
    assert np.abs(adapted - before).max() > 0.01
    model.save(tmp_path / "model.keras")
    assert_close(keras.models.load_model(tmp_path / "model.keras")(inputs), adapted, 1e-5)


# Dropout.


def test_Q1_dropout_leaves_out_what_the_heads_read_with_its_rate():
    layer = make_layer(feature_map="elu", attention_dropout=0.25)
    layer.output_dense.kernel.assign(np.eye(HIDDEN).reshape(HEADS, HIDDEN // HEADS, HIDDEN))
    layer.output_dense.bias.assign(np.zeros(HIDDEN))
    inputs = tf.repeat(normal(1, 3, SIZE), 4000, axis=0)
    read = layer(inputs).numpy()
    assert np.array_equal(layer(inputs, training=False), read)
    outputs = layer(inputs, training=True).numpy()
    left_out = outputs == 0
    assert_close(outputs, np.where(left_out, 0, read / 0.75), 1e-6)
    # The dropout is on the read only: were the memory to miss a write, this would not hold at later positions.
    assert np.all(np.abs(left_out.mean(axis=0) - 0.25) < 4.5 * np.sqrt(0.25 * 0.75 / 4000))
    assert np.any(layer(inputs, training=True) != outputs), "every call draws anew"


def test_Q1_dropout_depends_on_the_seed_and_rate_zero_is_none():
    inputs = normal(2, 7, SIZE)

    def outputs(seed, dropout):
        return make_layer(attention_dropout=dropout, seed=seed)(inputs, training=True)

    assert np.array_equal(outputs(1, 0.5), outputs(1, 0.5))
    assert np.abs(outputs(1, 0.5) - outputs(2, 0.5)).max() > 0.01
    assert np.array_equal(outputs(1, 0.0), outputs(2, 0.0))


# The options of DecoderBlock that the original transformer needs.


def test_block_without_a_norm_before_its_mixer_and_with_another_activation():
    mixer = FastWeightsAttention(HIDDEN, HEADS, seed=1)
    block = DecoderBlock(mixer, 10, normalize_mixer_input=False, activation="relu")
    x = 3 * normal(2, 5, HIDDEN)
    block(x)
    assert not hasattr(block, "mixer_norm") and len(block.weights) == len(mixer.weights) + 2 + 4
    y = x + mixer(x)
    hidden = np.maximum(block.feed_forward_norm(y) @ block.expand.kernel + block.expand.bias, 0)
    assert_close(block(x), y + hidden @ block.contract.kernel.numpy() + block.contract.bias, 1e-6)
    first, cache = block(x[:, :2], cache=block.init_cache(2))
    rest, _ = block(x[:, 2:], cache=cache)
    assert_close(tf.concat([first, rest], axis=1), block(x), 1e-5)


def test_S15_block_options_are_in_the_config():
    block = DecoderBlock(FastWeightsAttention(HIDDEN, HEADS), 10, normalize_mixer_input=False, activation="relu")
    config = block.get_config()
    assert config["normalize_mixer_input"] is False and config["activation"] == "relu"
    again = DecoderBlock.from_config(config)
    assert again.get_config() == config
    x = normal(2, 5, HIDDEN)
    block(x)
    again.build(x.shape)
    again.set_weights(block.get_weights())
    assert np.array_equal(again(x), block(x))
    default = DecoderBlock(FastWeightsAttention(HIDDEN, HEADS), 10).get_config()
    assert default["normalize_mixer_input"] is True and default["activation"] == "gelu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "fast_weights"}, "mixer must be a layer with init_cache, received 'fast_weights'"),
        ({"mixer": keras.layers.Identity()}, "mixer must be a layer with init_cache, received"),
        ({"feed_forward_size": 0}, "feed_forward_size must be a positive integer, received 0"),
        ({"dropout": 1.0}, "dropout must be in .0, 1., received 1.0"),
        ({"seed": "one"}, "seed must be an integer or None, received 'one'"),
        ({"activation": "wobble"}, "activation.*wobble"),
    ],
    ids=["mixer_name", "mixer_layer", "feed_forward_size", "dropout", "seed", "activation"],
)
def test_bad_arguments_of_the_block_are_refused(options, message):
    settings = {"mixer": SelfAttention(HIDDEN, HEADS, causal=True), "feed_forward_size": 10}
    with pytest.raises(ValueError, match=message):
        DecoderBlock(**{**settings, **options})


# Training.


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def mixed_policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def test_P3_fit_under_a_mixed_policy(mixed_policy):
    keras.utils.set_random_seed(0)
    ids = keras.Input([None], dtype="int32")
    layer = FastWeightsAttention(HIDDEN, HEADS, short_convolution=4, use_decay=True, seed=1)
    x = layer(keras.layers.Embedding(VOCABULARY, HIDDEN, mask_zero=True)(ids))
    model = keras.Model(ids, keras.layers.Dense(VOCABULARY, dtype="float32")(x))
    assert layer.compute_dtype == mixed_policy.removeprefix("mixed_")
    before = [w.numpy() for w in layer.trainable_weights]
    # More than one chunk, so that the custom gradient is in the step.
    losses = losses_of_fit(model, length=70, steps=2, jit_compile=False)
    assert np.all(np.isfinite(losses))
    assert all(np.any(w != old) for w, old in zip(layer.trainable_weights, before))


def test_N4_D13_a_trained_model_decodes_like_the_whole_text_and_survives_large_weights():
    keras.utils.set_random_seed(0)
    model = CausalLM(VOCABULARY, HIDDEN, num_layers=2, num_heads=HEADS, mixer="fast_weights", seed=1)
    compile_model(model, keras.optimizers.Adam(3e-3), jit_compile=False)

    def train(steps):
        data = tf.data.Dataset.from_tensors(text_batch(16, 24)).repeat(steps)
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        assert np.all(np.isfinite(losses))
        return losses

    assert train(100)[-1] < 0.9 * np.log(VOCABULARY - 1)
    text = text_batch(1, 100, seed=9)[0]
    step = tf.function(lambda ids, cache: model(ids, cache=cache), autograph=False)
    cache, logits = model.init_cache(1), []
    for t in range(100):
        new, cache = step(text[:, t : t + 1], cache)
        logits.append(new)
    logits, expected = tf.concat(logits, axis=1), model(text)
    assert np.abs(logits - expected).max() < 1e-3
    assert np.array_equal(np.argmax(logits, axis=-1), np.argmax(expected, axis=-1))

    for block in model.blocks:
        for dense in (block.mixer.query_dense, block.mixer.key_dense):
            dense.kernel.assign(30 * dense.kernel)
    train(10)
    assert np.all(np.isfinite(model(text))) and all(np.all(np.isfinite(w)) for w in model.weights)


# Generating.


@pytest.fixture
def eager_functions():
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def test_D1_D10_generation_carries_the_memory_and_never_runs_the_prefix_again(eager_functions, monkeypatch):
    keras.utils.set_random_seed(0)
    model = CausalLM(VOCABULARY, HIDDEN, num_layers=2, num_heads=HEADS, mixer="fast_weights", seed=1)
    model.build((None, None))
    model.embedding.embeddings.assign(20 * model.embedding.embeddings)
    model.head.kernel.assign(5 * model.head.kernel)
    prompt = text_batch(2, 7)[0]
    expected = greedy_without_cache(model, prompt, 8)
    calls, run = [], FastWeightsAttention.call

    def recorded(self, inputs, *args, cache=None, **kwargs):
        output, new_cache = run(self, inputs, *args, cache=cache, **kwargs)
        calls.append((self, inputs.shape[1], cache["fast_weights"], new_cache["fast_weights"]))
        return output, new_cache

    monkeypatch.setattr(FastWeightsAttention, "call", recorded)
    assert np.array_equal(model.generate(prompt, 8, temperature=0), expected)
    for block in model.blocks:
        lengths, before, after = zip(*(call[1:] for call in calls if call[0] is block.mixer))
        assert lengths == (7, *[1] * 7)
        assert not np.any(before[0]) and all(np.any(new != old) for old, new in zip(before, after))
        assert all(np.array_equal(given, kept) for given, kept in zip(before[1:], after))
