"""CausalLM and its blocks: one model for whole texts, pieces of texts and generated ones."""

import inspect
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import (
    TOLERANCES,
    assert_causal,
    assert_ignores_padding,
    assert_same_cache,
    assert_streams,
    normal,
    padding_masks,
    policies,
)
from oracles import assert_close

from favor_keras import CausalLM, GMLPBlock, SelfAttention
from favor_keras.models import DecoderBlock

VOCABULARY, HIDDEN = 11, 8

POSITIONS = {"max_length": 20, "position_embedding": True}
GMLP = {"mixer": "gmlp", "max_length": 20}
AMLP = {"mixer": "amlp", "mixer_options": {"attention_size": 4}, **POSITIONS}
MODELS = {
    "softmax": {"mixer_options": {"kernel_transformation": "softmax"}},
    "softmax, positions": {"mixer_options": {"kernel_transformation": "softmax"}, **POSITIONS},
    "relu": {},
    "relu, positions": POSITIONS,
    "gmlp": GMLP,
    "amlp, positions": AMLP,
    "exact": {"mixer": "softmax"},
}
all_models = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def make_model(**options):
    """A model whose logits are far from equal, and whose gates do more than at the start of training."""
    settings = {"hidden_size": HIDDEN, "num_layers": 2, "num_heads": 2, "seed": 1}
    keras.utils.set_random_seed(0)
    model = CausalLM(VOCABULARY, **{**settings, **options})
    model.build((None, None))
    model.embedding.embeddings.assign(20 * model.embedding.embeddings)
    model.head.kernel.assign(5 * model.head.kernel)
    for block in model.blocks:
        if isinstance(block, GMLPBlock):
            block.sgu.weight.assign(30 * block.sgu.weight)
    return model


def random_ids(batch_size, length, seed=0):
    return np.random.default_rng(seed).integers(VOCABULARY, size=[batch_size, length]).astype("int32")


@policies
def test_logits_are_float32_of_every_token(policy):
    model = make_model(num_layers=1, dtype=policy, **POSITIONS)
    ids = random_ids(3, 9)
    logits = model(ids)
    assert logits.shape == (3, 9, VOCABULARY) and logits.dtype == "float32"
    assert_close(model(ids.astype("int64")), logits, 1e-6)
    symbolic = model(keras.Input([None], dtype="int32"))
    assert (symbolic.shape, symbolic.dtype) == ((None, None, VOCABULARY), "float32")


@all_models
def test_C4_C9_no_logit_depends_on_later_tokens(options):
    model = make_model(**options)
    ids = random_ids(2, 12)
    whole = model(ids)
    for t in (1, 2, 6, 11):
        assert_close(model(ids[:, :t]), whole[:, :t], 1e-5)
        changed = np.concatenate([ids[:, :t], (ids[:, t:] + 1) % VOCABULARY], axis=1)
        assert_close(model(changed)[:, :t], whole[:, :t], 1e-5)
        assert np.abs(model(changed)[:, t:] - whole[:, t:]).max() > 0.1


@all_models
def test_M1_padding_tokens_are_not_there(options):
    model, ids = make_model(**options), random_ids(2, 8)
    expected = model(ids)
    for mask in padding_masks(2, 8, 4).values():
        padded = random_ids(2, 12, seed=1)
        padded[mask] = ids.ravel()
        assert_close(model(padded, mask=mask)[mask], tf.reshape(expected, [-1, VOCABULARY]), 1e-5)


def stream_ids(model, ids, sizes, mask=None):
    cache, logits = model.init_cache(len(ids), ids.shape[1]), []
    for start, size in zip(np.cumsum([0, *sizes]), sizes):
        piece = slice(start, start + size)
        new, cache = model(ids[:, piece], mask=None if mask is None else mask[:, piece], cache=cache)
        logits.append(new)
    return tf.concat(logits, axis=1), cache


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, "float32"),
        (POSITIONS, "float32"),
        (POSITIONS, "mixed_float16"),
        (POSITIONS, "mixed_bfloat16"),
        (GMLP, "float32"),
        (AMLP, "float32"),
        (AMLP, "mixed_float16"),
    ],
    ids=lambda x: "-".join([x.get("mixer", "favor"), *x]) if isinstance(x, dict) else x,
)
def test_D1_D2_D5_pieces_equal_the_whole(options, policy):
    model, ids = make_model(**options, dtype=policy), random_ids(2, 6)
    # Two blocks round twice.
    tolerance = 3 * TOLERANCES[policy]
    whole, final = stream_ids(model, ids, [6])
    assert_close(whole, model(ids), tolerance)
    for sizes in ([1] * 6, [3, 1, 2]):
        logits, cache = stream_ids(model, ids, sizes)
        assert_close(logits, whole, tolerance)
        assert_same_cache(cache, final, 4 * tolerance)


@pytest.mark.parametrize("options", [POSITIONS, AMLP], ids=["favor", "amlp"])
def test_D2_padded_pieces_equal_the_whole(options):
    model, ids = make_model(**options), random_ids(2, 10)
    mask = np.random.default_rng(0).uniform(size=[2, 10]) < 0.6
    whole, final = stream_ids(model, ids, [10], mask)
    logits, cache = stream_ids(model, ids, [4, 1, 5], mask)
    assert_close(logits[mask], whole[mask], 1e-5)
    assert_same_cache(cache, final, 1e-5)
    assert np.array_equal(cache["position"], mask.sum(axis=1))


@policies
def test_D2_the_state_and_the_positions_stay_exact_in_every_precision(policy):
    # bfloat16 has no odd numbers above 256.
    options = {"num_layers": 1, "max_length": 320, "position_embedding": True}
    model, ids = make_model(**options, dtype=policy), random_ids(1, 305)
    logits, cache = stream_ids(model, ids, [300, 1, 1, 1, 1, 1])
    assert np.array_equal(cache["position"], [305])
    assert_close(logits[:, 300:], model(ids)[:, 300:], 3 * TOLERANCES[policy])


@pytest.mark.parametrize("options", [POSITIONS, AMLP], ids=["favor", "amlp"])
def test_D9_beams_can_be_reordered(options):
    model, ids, order = make_model(**options), random_ids(3, 8), [2, 0, 2, 1]
    _, cache = stream_ids(model, ids[:, :5], [5])
    logits, _ = model(ids[order, 5:], cache={name: tf.gather(tensor, order) for name, tensor in cache.items()})
    assert_close(logits, tf.gather(model(ids)[:, 5:], order), 1e-5)


# Generating.


@pytest.fixture(scope="module")
def model():
    """One model for all generation, since every new one has to be traced."""
    return make_model(num_layers=1, dropout=0.5, mixer_options={"attention_dropout": 0.5})


def greedy_without_cache(model, ids, count):
    for _ in range(count):
        ids = np.concatenate([ids, np.argmax(model(ids)[:, -1:], axis=-1)], axis=1)
    return ids


@pytest.mark.parametrize(
    "options",
    [
        {**MODELS["softmax, positions"], "max_length": 60},
        {},
        {"mixer": "fast_weights"},
        {**GMLP, "max_length": 60},
        {**AMLP, "max_length": 53},  # and not one more than it takes
    ],
    ids=["softmax, positions", "recommended", "fast weights", "gmlp", "amlp, positions"],
)
def test_D1_greedy_tokens_are_those_of_the_whole_text_at_every_step(options):
    model, prompt = make_model(**options), random_ids(2, 3)
    generated = model.generate(prompt, 50, temperature=0)
    assert generated.dtype == "int32" and np.array_equal(generated[:, :3], prompt)
    assert len(np.unique(generated[:, 3:])) > 2
    assert np.array_equal(generated[:, :9], greedy_without_cache(model, prompt, 6))
    # The logits of a text are those of all its beginnings.
    assert np.array_equal(generated[:, 3:], np.argmax(model(generated)[:, 2:-1], axis=-1))


def test_generation_depends_on_the_seed_alone(model):
    prompt = random_ids(2, 3)
    first = model.generate(prompt, 20, seed=5)
    assert np.array_equal(first[:, :3], prompt) and first.shape == (2, 23)
    assert np.array_equal(model.generate(prompt, 20, seed=5), first)
    assert not np.array_equal(model.generate(prompt, 20, seed=6), first)
    assert not np.array_equal(model.generate(prompt, 20), model.generate(prompt, 20))
    assert np.array_equal(model.generate(prompt, 5, seed=5), first[:, :8])
    assert not np.array_equal(first[0, 3:], first[1, 3:])


def test_generation_takes_one_token_and_gives_one_token(model):
    ids = model.generate(np.array([[3]], "int32"), 1, temperature=0)
    assert np.array_equal(ids, greedy_without_cache(model, np.array([[3]]), 1))


def test_generation_keeps_the_dtype_of_the_ids(model):
    assert model.generate(random_ids(2, 3).astype("int64"), 2, seed=0).dtype == "int64"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_with_their_probabilities(model, temperature):
    prompt, count = random_ids(1, 3), 20_000
    expected = tf.nn.softmax(model(prompt)[0, -1] / temperature).numpy()
    sampled = model.generate(np.repeat(prompt, count, axis=0), 1, temperature=temperature, seed=0)[:, -1]
    assert_frequencies(sampled, expected)
    assert expected.max() - expected.min() > 0.1


def test_later_tokens_are_sampled_with_their_probabilities_too(model):
    prompt = random_ids(1, 3)
    sampled = np.asarray(model.generate(np.repeat(prompt, 20_000, axis=0), 2, seed=0))
    first = np.bincount(sampled[:, 3]).argmax()
    expected = tf.nn.softmax(model(np.append(prompt, [[first]], axis=1))[0, -1]).numpy()
    assert_frequencies(sampled[sampled[:, 3] == first, 4], expected)


def assert_frequencies(sampled, expected):
    frequencies = np.bincount(sampled, minlength=VOCABULARY) / len(sampled)
    assert np.all(np.abs(frequencies - expected) < 4.5 * np.sqrt(expected * (1 - expected) / len(sampled)) + 1e-3)


def test_generation_follows_new_weights(model):
    prompt, old = random_ids(2, 3), model.head.kernel.numpy()
    before = model.generate(prompt, 6, temperature=0)
    model.head.kernel.assign(-old)
    after = model.generate(prompt, 6, temperature=0)
    assert not np.array_equal(before, after)
    assert np.array_equal(after, greedy_without_cache(model, prompt, 6))
    model.head.kernel.assign(old)


@pytest.mark.parametrize("options", [{}, POSITIONS, GMLP, AMLP], ids=["limit", "positions", "gmlp", "amlp"])
def test_D12_no_more_positions_than_there_are(options):
    model = make_model(**{**options, "num_layers": 1, "max_length": 10})
    assert model(random_ids(1, 10)).shape == (1, 10, VOCABULARY)
    assert model.generate(random_ids(1, 4), 6, seed=0).shape == (1, 10)
    with pytest.raises(ValueError, match="token_ids must have at most max_length=10 positions, received 11"):
        model(random_ids(1, 11))
    with pytest.raises(ValueError, match="max_length=10.*received 11"):
        model.generate(random_ids(1, 4), 7)
    with pytest.raises(ValueError, match="max_length=10.*received 11"):
        model.generate(random_ids(1, 10), 1)


@pytest.mark.parametrize("options", [{}, POSITIONS, GMLP], ids=["limit", "positions", "gmlp"])
def test_D12_a_cache_does_not_go_past_the_last_position(options):
    model = make_model(**{**options, "max_length": 10})
    _, cache = stream_ids(model, random_ids(1, 8), [8])
    assert model(random_ids(1, 2), cache=cache)[0].shape == (1, 2, VOCABULARY)
    with pytest.raises(ValueError, match="max_length=10"):
        model(random_ids(1, 3), cache=cache)


def test_inputs_that_do_not_fit_together_are_refused():
    model = make_model(num_layers=1, **POSITIONS)
    with pytest.raises(ValueError, match=r"token_ids must be \[batch, length\], received the shape \(3,\)"):
        model(random_ids(1, 3)[0])
    with pytest.raises(ValueError, match=r"mask must have the shape \(1, 3\) of token_ids, received \(1, 4\)"):
        model(random_ids(1, 3), mask=tf.ones([1, 4]))
    for cache, received in (({}, r"\[\]"), (model.init_cache(2), r"\(2,\)")):
        with pytest.raises(
            ValueError, match=rf"cache must have a position \(1,\) as from init_cache, received {received}"
        ):
            model(random_ids(1, 3), cache=cache)


def test_D12_a_model_without_max_length_has_no_limit(model):
    assert model.generate(random_ids(2, 3), 300, seed=0).shape == (2, 303)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones([2, 0], "int32"), 5), "prompt must be .batch, length. with length at least 1"),
        ((np.ones([3], "int32"), 5), "prompt must be .batch, length."),
        ((np.ones([2, 3], "int32"), 0), "max_new_tokens must be a positive integer, received 0"),
        ((np.ones([2, 3], "int32"), 2.5), "max_new_tokens must be .* received 2.5"),
        ((np.ones([2, 3], "int32"), 5, -1.0), "temperature must be at least 0, received -1.0"),
        ((np.ones([2, 3], "int32"), 5, math.nan), "temperature must be at least 0, received nan"),
        ((np.ones([2, 3], "int32"), 5, "hot"), "temperature must be at least 0, received 'hot'"),
        ((np.ones([2, 3], "float32"), 5), "prompt must be integers"),
        ((None, 5), "prompt must be integers .batch, length. or rows of integers, received None"),
        (([[1, 2], 3], 5), "prompt must be integers .batch, length. or rows of integers, received"),
        (([[1, -1]], 5), f"prompt must have token ids from 0 to {VOCABULARY - 1}, received -1"),
        (([[1, VOCABULARY]], 5), f"prompt must have token ids from 0 to {VOCABULARY - 1}, received {VOCABULARY}"),
    ],
    ids=[
        *("empty", "rank", "no_tokens", "fraction", "temperature", "nan", "words", "dtype"),
        *("none", "mixed_ranks", "negative", "too_large"),
    ],
)
def test_what_cannot_be_generated_is_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.generate(*arguments)


# Configuring.


@keras.saving.register_keras_serializable(package="test")
def last_tokens(hidden_size, num_heads, **options):
    """A mixer of our own: attention without a projection."""
    return SelfAttention(hidden_size, num_heads, causal=True, use_bias=True, **options)


OTHER_SETTINGS = {
    "vocabulary_size": VOCABULARY,
    "hidden_size": 12,
    "num_layers": 3,
    "num_heads": 3,
    "feed_forward_size": 20,
    "mixer": last_tokens,
    "mixer_options": {"short_convolution": 2},
    "block_options": {"activation": "relu"},
    "dropout": 0.25,
    "max_length": 33,
    "position_embedding": True,
    "seed": 7,
}


def test_S15_config_is_complete():
    names = [n for n in inspect.signature(CausalLM.__init__).parameters if n not in ("self", "kwargs")]
    assert sorted(names) == sorted(OTHER_SETTINGS), "a new argument needs a value other than its default here"
    model = CausalLM(**OTHER_SETTINGS, name="mine", dtype="mixed_float16")
    config = model.get_config()
    assert {*names, "name", "trainable", "dtype"} <= set(config)
    again = CausalLM.from_config(config)
    assert again.get_config() == config and again.mixer is last_tokens
    renamed = CausalLM.from_config({**config, "name": "z", "trainable": False, "dtype": "float32"})
    assert (renamed.name, renamed.trainable, renamed.dtype_policy.name) == ("z", False, "float32")
    renamed.build((None, None))
    assert renamed.trainable_weights == []


def test_S9_S11_build_makes_all_weights_and_every_setting_counts():
    models = CausalLM(**OTHER_SETTINGS), CausalLM(**OTHER_SETTINGS)
    models[0].build((None, None))
    models[1](random_ids(1, 3))
    assert [w.shape for w in models[0].weights] == [w.shape for w in models[1].weights]
    mixer = 4 * 12 * 12 + 4 * 12 + 3 * 2 * 12
    block = mixer + 2 * 2 * 12 + (12 * 20 + 20) + (20 * 12 + 12)
    expected = VOCABULARY * 12 + 33 * 12 + 3 * block + 2 * 12 + 12 * VOCABULARY + VOCABULARY
    assert models[0].count_params() == models[1].count_params() == expected


def test_the_recommended_mixer_and_its_options():
    model = make_model(mixer_options={"attention_dropout": 0.1, "nb_random_features": 5})
    mixers = [block.mixer for block in model.blocks]
    assert all(m.causal and m.short_convolution == 4 and m.attention_dropout == 0.1 for m in mixers)
    assert [m.projection_matrix.shape for m in mixers] == [(5, HIDDEN // 2)] * 2
    assert np.abs(mixers[0].projection_matrix - mixers[1].projection_matrix).max() > 0.1
    assert make_model().blocks[0].mixer.projection_matrix.shape == (HIDDEN, HIDDEN // 2)


def test_positions_are_embedded_only_if_asked():
    """Without them attention cannot tell the places of equal tokens."""
    options = {"mixer_options": {"short_convolution": 0}}
    embedded, plain = make_model(**POSITIONS, **options), make_model(max_length=20, **options)
    assert embedded.count_params() == plain.count_params() + 20 * HIDDEN
    ids = np.zeros([1, 12], "int32")
    assert np.ptp(embedded(ids)[0], axis=0).max() > 0.1
    assert np.ptp(plain(ids)[0], axis=0).max() < 1e-4


@pytest.mark.parametrize("mixer", ["gmlp", "amlp"])
def test_a_gmlp_block_is_a_whole_layer(mixer):
    """Recommended settings, no second feed-forward network, no positions unless asked."""
    model = make_model(mixer=mixer, max_length=20, dropout=0.25, num_layers=3)
    d, f, n, heads, a = HIDDEN, 5 * HIDDEN, 20, 2, 64 if mixer == "amlp" else 0
    attention = 3 * (d * a + a) + (a * f + f) // 2 if a else 0
    block = 2 * d + (d * f + f) + f + heads * (2 * n - 1 + n) + (f * d // 2 + d) + attention
    assert model.count_params() == VOCABULARY * d + 3 * block + 2 * d + d * VOCABULARY + VOCABULARY
    for block in model.blocks:
        assert isinstance(block, GMLPBlock)
        assert (block.causal, block.seq_len, block.dropout_rate) == (True, n, 0.25)
    assert len({block.seed for block in model.blocks}) == 3
    options = {"d_ffn": 12, "gating_weights": "full"}
    overridden = make_model(mixer=mixer, max_length=20, num_heads=3, mixer_options=options)
    assert [(b.d_ffn, b.num_heads, b.gating_weights) for b in overridden.blocks] == [(12, 3, "full")] * 2


def test_stochastic_depth_grows_with_the_depth():
    options = {**GMLP, "mixer_options": {"survival_probability": 0.7}}
    model = make_model(num_layers=3, **options)
    assert_close([block.survival_probability for block in model.blocks], [0.9, 0.8, 0.7], 1e-12)
    assert [block.survival_probability for block in make_model(**GMLP).blocks] == [1, 1]


def test_a_gmlp_model_trains_saves_and_writes(tmp_path):
    model = make_model(num_layers=1, **{**AMLP, "mixer_options": {"attention_size": 4, "survival_probability": 0.9}})
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.tile(np.arange(VOCABULARY), 2)[None, :20].repeat(4, axis=0)  # each token follows the one before it
    losses = model.fit(ids[:, :-1], ids[:, 1:], batch_size=1, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.5 < 2 < losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_config() == model.get_config()
    assert np.array_equal(loaded(ids), model(ids))
    assert np.array_equal(loaded.generate(ids[:, :5], 15, temperature=0), ids)


def test_dropout_of_the_model_is_on_in_training_only():
    model, ids = make_model(dropout=0.5), random_ids(2, 9)
    assert np.array_equal(model(ids), model(ids, training=False))
    assert np.abs(model(ids, training=True) - model(ids, training=True)).max() > 0.1
    assert np.array_equal(make_model()(ids, training=True), make_model()(ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "transformer"}, "mixer must be one of .*favor.* received 'transformer'"),
        ({"mixer": 3}, "mixer must be one of .* received 3"),
        ({"vocabulary_size": 0}, "vocabulary_size must be a positive integer, received 0"),
        ({"vocabulary_size": 9.0}, "vocabulary_size must be a positive integer, received 9.0"),
        ({"num_layers": -1}, "num_layers must be a positive integer, received -1"),
        ({"num_heads": 0}, "num_heads must be a positive integer, received 0"),
        ({"num_heads": 3}, "hidden_size must be divisible by num_heads, received hidden_size=8, num_heads=3"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, received 0"),
        ({"feed_forward_size": 0}, "feed_forward_size must be .* received 0"),
        ({"max_length": 0}, "max_length must be .* received 0"),
        ({"position_embedding": True}, "max_length must be .* with position_embedding, received None"),
        ({"mixer": "gmlp"}, "max_length must be .* with mixer='gmlp'.* received None"),
        ({**AMLP, "feed_forward_size": 9}, "feed_forward_size must be None with mixer='amlp'.* received 9"),
        ({"dropout": 1.5}, "dropout must be .* received 1.5"),
        ({"dropout": "much"}, "dropout must be .* received 'much'"),
        ({"mixer_options": {"window": 3}}, "window"),
        ({"mixer_options": [1]}, "mixer_options must be a dict or None, received .1."),
        ({"mixer_options": {"causal": False}}, "mixer_options must not have .* mixer='favor', received .'causal'."),
        (
            {**GMLP, "mixer_options": {"seq_len": 3}},
            "mixer_options must not have .* mixer='gmlp', received .'seq_len'.",
        ),
    ],
    ids=lambda x: ", ".join(f"{name}={value}" for name, value in x.items()) if isinstance(x, dict) else "",
)
def test_bad_arguments_are_refused(options, message):
    settings = {"vocabulary_size": VOCABULARY, "hidden_size": HIDDEN, "num_heads": 2}
    with pytest.raises(ValueError, match=message):
        CausalLM(**{**settings, **options})


def test_unregistered_mixers_are_refused_in_the_config():
    def unregistered(hidden_size, num_heads, **options):
        return SelfAttention(hidden_size, num_heads, causal=True, **options)

    model = CausalLM(VOCABULARY, HIDDEN, 1, 2, mixer=unregistered)
    assert model(random_ids(1, 3)).shape == (1, 3, VOCABULARY)
    with pytest.raises(ValueError, match="mixer.*register_keras_serializable"):
        model.get_config()


# DecoderBlock.


def make_block(policy="float32", **options):
    mixer = SelfAttention(HIDDEN, 2, causal=True, short_convolution=4, seed=1, dtype=policy)
    block = DecoderBlock(mixer, feed_forward_size=10, dtype=policy, **options)
    keras.utils.set_random_seed(0)
    block.build([None, None, HIDDEN])
    return block


def test_block_is_two_residuals_around_normalised_branches():
    block, x = make_block(), normal(2, 5, HIDDEN)
    mean = np.mean(x, axis=-1, keepdims=True)
    normalised = (x - mean) / np.sqrt(np.var(x, axis=-1, keepdims=True) + 1e-5)
    assert_close(block.mixer_norm(x), normalised, 1e-5)
    y = x + block.mixer(normalised)
    expand, contract = ([w.numpy() for w in dense.weights] for dense in (block.expand, block.contract))
    inner = block.feed_forward_norm(y) @ expand[0] + expand[1]
    gelu = inner * 0.5 * (1 + tf.math.erf(inner / math.sqrt(2)))
    assert_close(block(x), y + gelu @ contract[0] + contract[1], 1e-5)


@policies
def test_C4_M2_D2_block_is_causal_ignores_padding_and_streams(policy):
    block, inputs = make_block(policy), normal(2, 12, HIDDEN)
    tolerance = 2 * TOLERANCES[policy]
    assert_causal(block, inputs, tolerance)
    assert_ignores_padding(lambda x, mask: block(x, mask=mask), inputs, tolerance)
    assert_streams(block, inputs, tolerance, 4 * tolerance)


def test_S15_block_config_is_complete():
    block = make_block(dropout=0.25, seed=3, name="mine")
    config = block.get_config()
    names = [n for n in inspect.signature(DecoderBlock.__init__).parameters if n not in ("self", "kwargs")]
    assert {*names, "name", "trainable", "dtype"} <= set(config)
    again = DecoderBlock.from_config({**config, "name": "z", "trainable": False, "dtype": "mixed_float16"})
    assert (again.name, again.trainable, again.compute_dtype) == ("z", False, "float16")
    assert (again.feed_forward_size, again.dropout_rate, again.seed) == (10, 0.25, 3)
    again.build([None, None, HIDDEN])
    assert again.count_params() == block.count_params() and again.trainable_weights == []


def test_H13_block_is_symbolic():
    block = make_block("mixed_float16")
    x = keras.Input([None, HIDDEN])
    cache = {name: keras.Input(c.shape[1:], dtype="float32") for name, c in block.init_cache(1).items()}
    output, new_cache = block(x, cache=cache)
    assert (output.shape, output.dtype) == ((None, None, HIDDEN), "float16")
    assert {n: (c.shape, c.dtype) for n, c in new_cache.items()} == {n: (c.shape, "float32") for n, c in cache.items()}
    assert block(x).shape == block.compute_output_shape(x.shape) == (None, None, HIDDEN)


# Faults that a user met


def test_mixers_that_see_the_future_are_refused():
    with pytest.raises(ValueError, match="mixer must make causal layers"):
        CausalLM(9, hidden_size=8, num_layers=1, num_heads=2, mixer=SelfAttention)


@pytest.mark.parametrize("mixer", ["favor", "gmlp"])
def test_a_new_model_generates_and_makes_caches_without_a_call_before(mixer):
    options = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "mixer": mixer, "max_length": 9}
    assert CausalLM(9, **options).init_cache(3)["position"].shape == [3]
    assert CausalLM(9, **options).generate(np.ones([1, 3], "int32"), 2).shape == [1, 5]


def test_seeds_of_more_than_32_bits_differ_and_longer_ones_are_refused():
    model, prompt = CausalLM(9, hidden_size=8, num_layers=1, num_heads=2, seed=0), np.ones([1, 3], "int32")
    first, again, other = (model.generate(prompt, 20, seed=seed).numpy() for seed in (2**40, 2**40, 2**41))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    with pytest.raises(ValueError, match="seed must have at most 63 bits"):
        model.generate(prompt, 2, seed=2**70)


def test_generates_in_a_graph_of_unknown_length_unless_there_is_a_limit():
    prompt, options = np.ones([1, 3], "int32"), {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "seed": 0}

    def in_graph(model):
        generate = lambda ids: model.generate(ids, 4, temperature=0)  # noqa: E731
        return tf.function(generate, input_signature=[tf.TensorSpec([None, None], tf.int32)])(prompt)

    model = CausalLM(9, **options)
    assert np.array_equal(in_graph(model), model.generate(prompt, 4, temperature=0))
    with pytest.raises(ValueError, match="prompt must have a known length"):
        in_graph(CausalLM(9, max_length=9, **options))


def test_no_new_tokens_leave_the_cache_alone():
    model = CausalLM(9, hidden_size=8, num_layers=1, num_heads=2, max_length=4, position_embedding=True)
    _, cache = model(np.ones([1, 2], "int32"), cache=model.init_cache(1))
    logits, same = model(np.ones([1, 0], "int32"), cache=cache)
    assert logits.shape == [1, 0, 9] and same["position"] == 2
