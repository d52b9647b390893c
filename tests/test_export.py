"""The exported language model: what it answers where only TensorFlow is installed."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from test_causal_lm import make_model

from favor_keras import CausalLM, export_text_model
from favor_keras.text import Characters

CHARACTERS = Characters("abcdefg hij")
PROMPTS = ["bad egg", "a", "fie"]
LIMIT = 20
MODELS = {
    "favor": {},
    "fast_weights": {"mixer": "fast_weights"},
    "softmax": {"mixer": "softmax"},
    "gmlp": {"mixer": "gmlp", "max_length": LIMIT},
    "amlp": {"mixer": "amlp", "mixer_options": {"attention_size": 4}, "max_length": LIMIT, "position_embedding": True},
}
IDS = np.random.default_rng(0).integers(len(CHARACTERS), size=[2, 12]).astype("int32")

# Runs without favor_keras and Keras: everything that it prints comes from the files alone.
PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf

assert not {name for name in sys.modules if name.split(".")[0] == "favor_keras"}
folder, ids, prompts = sys.argv[1], np.array(json.loads(sys.argv[2]), "int32"), json.loads(sys.argv[3])
results = {}
for name in sys.argv[4:]:
    loaded = tf.saved_model.load(f"{folder}/{name}")
    sign = loaded.signatures
    takes_length = "max_length" in sign["prefill"].structured_input_signature[1]
    room = {"max_length": tf.constant(ids.shape[1])} if takes_length else {}
    answer = sign["prefill"](token_ids=tf.constant(ids[:, :5]), **room)
    steps = [answer.pop("logits")]
    for i in range(5, ids.shape[1]):
        answer = sign["decode_step"](token_ids=tf.constant(ids[:, i : i + 1]), **answer)
        steps.append(answer.pop("logits"))
    cache_batches = {int(tensor.shape[0]) for tensor in answer.values()}

    def generate(prompts, number, temperature=0.0, seed=0):
        number, temperature, seed = tf.constant(number), tf.constant(temperature), tf.constant(seed, tf.int64)
        text = sign["generate"](prompt=tf.constant(prompts), num_characters=number, temperature=temperature, seed=seed)
        return [t.decode() for t in text["text"].numpy()]

    def refusal(*arguments):
        try:
            return "accepted: " + str(generate(*arguments))
        except tf.errors.InvalidArgumentError as error:
            return error.message

    results[name] = {
        "logits": sign["serving_default"](token_ids=tf.constant(ids))["logits"].numpy().tolist(),
        "one": sign["serving_default"](token_ids=tf.constant(ids[:1, :1]))["logits"].numpy().tolist(),
        "steps": np.stack(steps, 1).tolist(),
        "cache_batches": sorted(cache_batches),
        "greedy": generate(prompts, 9),
        "sampled": generate(prompts, 9, 0.9, 7),
        "refusals": [refusal(["abz?"], 3), refusal(["", "a"], 3), refusal(["a"], 0), refusal(["a"], 3, -1.0)],
        "long": refusal(["a" * 15], 6),
        "encoded": [sign["encode"](text=tf.constant(text))["token_ids"].numpy().tolist() for text in prompts],
        "limit": int(sign["encode"](text=tf.constant("a"))["max_length"]),
        "decoded": [t.decode() for t in sign["decode"](token_ids=tf.constant(ids))["text"].numpy()],
    }
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def models():
    return {name: make_model(**options, num_layers=1) for name, options in MODELS.items()}


@pytest.fixture(scope="module")
def answers(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for name, model in models.items():
        export_text_model(model, CHARACTERS, folder / name)
    arguments = [str(folder), json.dumps(IDS.tolist()), json.dumps(PROMPTS), *models]
    # Isolated from PYTHONPATH, and with a working directory without our packages.
    command = [sys.executable, "-I", "-c", PROGRAM, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


all_models = pytest.mark.parametrize("name", MODELS)


def assert_same_logits(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * float(tf.reduce_max(abs(expected))))


@all_models
def test_logits_of_any_batch_and_length(name, models, answers):
    assert_same_logits(answers[name]["logits"], models[name](IDS))
    assert_same_logits(answers[name]["one"], models[name](IDS[:1, :1]))


@all_models
def test_D_prefill_and_steps_give_the_logits_of_the_whole(name, models, answers):
    assert_same_logits(answers[name]["steps"], models[name](IDS)[:, 4:])
    assert answers[name]["cache_batches"] == [len(IDS)]


@all_models
def test_texts_are_those_of_the_model(name, models, answers):
    prompts = [CHARACTERS.encode(prompt).numpy().tolist() for prompt in PROMPTS]
    for key, settings in (("greedy", {"temperature": 0}), ("sampled", {"temperature": 0.9, "seed": 7})):
        expected = [CHARACTERS.decode(row) for row in models[name].generate(prompts, 9, **settings)]
        assert answers[name][key] == expected
        assert all(text.startswith(prompt) for text, prompt in zip(expected, PROMPTS))


@all_models
def test_what_it_cannot_do_it_says(name, models, answers):
    unknown, empty, none, cold = answers[name]["refusals"]
    assert "prompt has unknown characters" in unknown and "[z ?]" in unknown.replace('"', "")
    assert "prompt must not be empty" in empty
    assert "num_characters must be at least 1" in none
    assert "temperature must be at least 0" in cold
    if models[name].max_length is not None:
        assert f"must not exceed {LIMIT} together, received" in answers[name]["long"]
        assert "21" in answers[name]["long"]
    else:
        assert answers[name]["long"].startswith("accepted")


@all_models
def test_texts_become_ids_and_ids_texts(name, models, answers):
    assert answers[name]["encoded"] == [[CHARACTERS.encode(prompt).numpy().tolist()] for prompt in PROMPTS]
    assert answers[name]["decoded"] == [CHARACTERS.decode(row) for row in IDS]
    assert answers[name]["limit"] == (models[name].max_length or 0)


def test_only_a_built_model_with_its_own_characters_is_exported(tmp_path, models):
    with pytest.raises(ValueError, match="model must be built"):
        export_text_model(CausalLM(len(CHARACTERS), 8, 1, 2), CHARACTERS, tmp_path / "x")
    with pytest.raises(ValueError, match="characters must be 11, as the model has, received 3"):
        export_text_model(models["favor"], Characters("abc"), tmp_path / "x")
    assert not (tmp_path / "x").exists()
