"""What CausalLM.generate draws from, prompts of several lengths, and token after token."""

import numpy as np
import pytest
import tensorflow as tf
from test_causal_lm import AMLP, GMLP, VOCABULARY, make_model, random_ids

from favor_keras.models.generation import keep_likely

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
MIXERS = {
    "favor": {},
    "fast weights": {"mixer": "fast_weights"},
    "softmax": {"mixer": "softmax"},
    "gmlp": {**GMLP, "max_length": 30},
    "amlp, positions": {**AMLP, "max_length": 30},
}
all_mixers = pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS)


def kept(probabilities, **limits):
    logits = np.log(np.asarray([probabilities], "float32")) + 3
    result = keep_likely(tf.constant(logits), **limits).numpy()
    is_kept = np.isfinite(result)
    assert np.array_equal(result[is_kept], logits[is_kept]) and np.all(result[~is_kept] == -np.inf)
    return np.flatnonzero(is_kept[0]).tolist()


def test_top_k_keeps_the_likeliest():
    probabilities = [0.1, 0.4, 0.2, 0.3]
    assert kept(probabilities, top_k=1) == [1]
    assert kept(probabilities, top_k=3) == [1, 2, 3]
    assert kept(probabilities, top_k=9) == [0, 1, 2, 3]


def test_top_p_keeps_the_fewest_likeliest_that_reach_it():
    probabilities = [0.1, 0.4, 0.2, 0.3]
    assert kept(probabilities, top_p=1e-6) == [1]
    assert kept(probabilities, top_p=0.69) == [1, 3]
    assert kept(probabilities, top_p=0.71) == [1, 2, 3]
    assert kept(probabilities, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_counts_the_probabilities_that_top_k_leaves():
    # Of the two that are left, with 4/7 and 3/7, the first reaches one half alone.
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.5) == [1]
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.6) == [1, 3]


def test_what_is_drawn_stays_within_the_limits():
    model, prompt, count = make_model(), random_ids(1, 3), 2000
    logits = model(prompt)[:, -1]
    likeliest = np.argsort(logits[0])[::-1]
    drawn = model.generate(np.repeat(prompt, count, axis=0), 1, temperature=3.0, top_k=3, seed=0)[:, -1]
    assert set(drawn.numpy()) == set(likeliest[:3])
    within = np.flatnonzero(np.isfinite(keep_likely(logits / 3.0, top_p=0.5)[0]))
    drawn = model.generate(np.repeat(prompt, count, axis=0), 1, temperature=3.0, top_p=0.5, seed=0)[:, -1]
    assert set(drawn.numpy()) == set(within) and len(within) < VOCABULARY


@all_mixers
def test_D3_prompts_of_different_lengths_continue_as_each_alone(options):
    model = make_model(**options)
    together = model.generate(PROMPTS, 12, temperature=0)
    assert together.row_lengths().numpy().tolist() == [len(prompt) + 12 for prompt in PROMPTS]
    for prompt, generated in zip(PROMPTS, together):
        assert generated.numpy().tolist() == model.generate([prompt], 12, temperature=0)[0].numpy().tolist()
    assert np.array_equal(model.generate(tf.ragged.constant(PROMPTS), 12, temperature=0).values, together.values)


@all_mixers
def test_a_stream_has_the_tokens_of_generate(options):
    model = make_model(**options)
    settings = {"temperature": 0.8, "top_k": 5, "seed": 3}
    for prompt in (random_ids(2, 4), PROMPTS):
        streamed = np.stack(list(model.stream(prompt, 9, **settings)), axis=1)
        whole = model.generate(prompt, 9, **settings)
        assert np.array_equal(streamed, np.stack([row.numpy()[-9:] for row in whole]))


def test_numbers_and_rows_of_numpy_are_taken():
    model, settings = make_model(), {"temperature": 0.9, "top_k": 3, "seed": 5}
    arrays = {name: np.array(value)[()] for name, value in settings.items()}
    expected = model.generate(PROMPTS, 4, **settings)
    rows = [np.array(row) for row in PROMPTS]
    assert model.generate(rows, np.int64(4), **arrays).to_list() == expected.to_list()
    assert model.generate([tf.constant(row) for row in PROMPTS], 4, **settings).to_list() == expected.to_list()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_p": "all"}, "top_p must be .* received 'all'"),
        ({"top_k": 0}, "top_k must be a positive integer, received 0"),
        ({"top_k": 1.5}, "top_k must be a positive integer, received 1.5"),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, or None, received 0.0"),
        ({"top_p": 1.1}, "top_p must be .* received 1.1"),
        ({"prompt": [[1, 2], []]}, "prompt must have at least one token in every row"),
        ({"prompt": [[0.5, 1.0], [0.25]]}, "prompt must be integers"),
    ],
    ids=["words", "top_k", "fraction", "top_p", "above 1", "empty row", "not integers"],
)
def test_what_is_out_of_range_is_refused_at_once(arguments, message):
    model = make_model()
    for function in (model.generate, model.stream):
        with pytest.raises(ValueError, match=message):
            function(**{"prompt": PROMPTS, "max_new_tokens": 3, **arguments})
