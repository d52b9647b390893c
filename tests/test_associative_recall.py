"""The associative recall example: its data, its memories, its outputs and its errors."""

import importlib.util
import json
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

SCRIPT = pathlib.Path(__file__).parent.parent / "examples" / "associative_recall.py"
TINY = "--steps 4 --validate-every 2 --batch-size 4 --key-size 4 --num-keys 3".split()


def load_script():
    spec = importlib.util.spec_from_file_location("associative_recall", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(SCRIPT.parent))  # where Python looks first when it runs the script
recall = load_script()


def draw(reused, seed, batch_size=200, num_keys=7):
    inputs, answer = recall.draw_sequences(batch_size, num_keys, reused, tf.constant([seed, 0], tf.int64))
    return {name: ids.numpy() for name, ids in inputs.items()}, answer.numpy()


@pytest.mark.parametrize("reused", [False, True], ids=["unique", "reused"])
def test_the_answer_is_the_value_last_written(reused):
    inputs, answers = draw(reused, seed=3)
    for keys, values, query, answer in zip(inputs["key"], inputs["value"], inputs["query"], answers, strict=True):
        memory = dict(zip(keys, values, strict=True))  # a later pair replaces an earlier one
        assert memory[query] == answer


def test_unique_keys_and_values_come_once():
    inputs, _ = draw(False, seed=4)
    for name in ("key", "value"):
        np.testing.assert_array_equal(np.sort(inputs[name]), np.broadcast_to(np.arange(7), (200, 7)))
        assert len(np.unique(inputs[name], axis=0)) > 190  # of 5040 orders
    assert (inputs["key"] != inputs["value"]).any()
    assert set(inputs["query"]) == set(range(7))


def test_reused_keys_are_twice_as_many_and_replaced():
    inputs, answer = draw(True, seed=5)
    assert inputs["key"].shape == inputs["value"].shape == (200, 14)
    for name in ("key", "value"):
        counts = np.bincount(inputs[name].ravel(), minlength=7)
        assert len(counts) == 7 and np.abs(counts - 400).max() < 100  # five standard deviations
    first = np.argmax(inputs["key"] == inputs["query"][:, None], axis=1)
    assert np.mean(inputs["value"][np.arange(200), first] != answer) > 0.4


def test_batches_depend_on_the_seed_and_their_place():
    first, second = recall.sequences(4, 7, True, seed=1).take(2)
    again = next(iter(recall.sequences(4, 7, True, seed=1)))
    other = next(iter(recall.sequences(4, 7, True, seed=2)))
    np.testing.assert_array_equal(first[0]["key"], again[0]["key"])
    np.testing.assert_array_equal(first[1], again[1])
    assert first[1].shape == (4, 7)
    for different in (second, other):
        assert (first[0]["key"].numpy() != different[0]["key"].numpy()).any()


def features_by_hand(data, feature_map):
    if feature_map == "elu":
        return np.where(data > 0, data + 1, np.exp(np.minimum(data, 0)))
    rectified = np.maximum(np.concatenate([data, -data]), 0)
    shifts = range(1, int(feature_map[-1]) + 1)
    return np.concatenate([[rectified[j] * rectified[j - i] for j in range(len(rectified))] for i in shifts])


def recall_by_hand(memory, keys, values, query):
    """What the memory reads, in float64 and one pair after the other."""

    def dense(layer, x):
        return x @ layer.kernel.numpy().astype(float) + layer.bias.numpy()

    embeddings = memory.embedding.embeddings.numpy().astype(float)
    query = features_by_hand(dense(memory.query_dense, embeddings[query]), memory.feature_map)
    weights, total = np.zeros([len(query), memory.num_keys]), np.zeros(len(query))
    for key, value in zip(keys, values, strict=True):
        value = np.eye(memory.num_keys)[value]
        pair = np.concatenate([value, embeddings[key]])
        key = features_by_hand(dense(memory.key_dense, pair), memory.feature_map)
        if memory.update_rule == "sum":
            weights, total = weights + np.outer(key, value), total + key
        else:
            key = key / key.sum()
            beta = 1 / (1 + np.exp(-dense(memory.beta_dense, pair)))
            weights = weights + np.outer(key, beta * (value - key @ weights))
    divisor = query @ total if memory.update_rule == "sum" else query.sum()
    return query @ weights / (divisor or 1.0)  # a query without a feature in common with any key reads 0


@pytest.mark.parametrize("update_rule", ["delta", "sum"])
@pytest.mark.parametrize("feature_map", ["elu", "dpfp1", "dpfp3"])
def test_a_memory_reads_what_its_rule_says(feature_map, update_rule):
    inputs, _ = draw(True, seed=6, batch_size=3, num_keys=5)
    memory = recall.AssociativeMemory(5, 8, feature_map, update_rule, seed=1)
    read = memory(inputs).numpy()
    expected = [
        recall_by_hand(memory, *sequence)
        for sequence in zip(inputs["key"], inputs["value"], inputs["query"], strict=True)
    ]
    np.testing.assert_allclose(read, expected, atol=2e-5)


@pytest.mark.parametrize("update_rule", ["delta", "sum"])
def test_random_features_read_a_mean_of_the_values(update_rule):
    inputs, _ = draw(False, seed=7, batch_size=3, num_keys=5)
    read = recall.AssociativeMemory(5, 4, "favor", update_rule, seed=1)(inputs).numpy()
    assert read.shape == (3, 5) and np.isfinite(read).all() and (read >= -1e-6).all()
    if update_rule == "sum":
        np.testing.assert_allclose(read.sum(axis=1), 1.0, rtol=1e-5)


def test_the_loss_is_half_the_squared_distance():
    target, prediction = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.5, 0.0], [1.0, 0.0]])
    np.testing.assert_allclose(recall.half_squared_error(target, prediction), [0.625, 0.0])


def test_the_delta_rule_replaces_values_that_the_sum_rule_keeps():
    args = recall.make_parser().parse_args("--seed 1 --batch-size 32 --validate-every 100".split())
    args.steps, args.key_size, args.learning_rate = 400, 8, 1e-2
    losses = {rule: recall.train("reused", 4, "dpfp1", rule, args)["loss"] for rule in recall.UPDATE_RULES}
    assert losses["delta"] < 0.05 and losses["sum"] > 0.12  # over other seeds the sum rule ends at 0.20 to 0.32


def test_training_stops_when_the_keys_are_learnt():
    model = keras.Sequential([keras.Input([1])])
    callback = recall.StopWhenLearnt()
    callback.set_model(model)
    model.stop_training = False
    callback.on_epoch_end(0, {"val_loss": 1.1e-3})
    assert not model.stop_training
    callback.on_epoch_end(1, {"val_loss": 0.9e-3})
    assert model.stop_training


def made_up_losses(monkeypatch, losses):
    """Let `train` return these losses by (feature map, number of keys), and 1.0 for others."""

    def train(setting, num_keys, feature_map, update_rule, args):
        run = {"setting": setting, "num_keys": num_keys, "feature_map": feature_map, "update_rule": update_rule}
        return {**run, "loss": losses.get((feature_map, num_keys), 1.0), "steps": 1, "seconds": 0.0}

    monkeypatch.setattr(recall, "train", train)


def test_a_sweep_ends_after_failures_in_a_row(monkeypatch, tmp_path, capsys):
    made_up_losses(monkeypatch, {("elu", 10): 1e-4, ("elu", 30): 5e-4, ("dpfp2", 10): 2e-3})
    options = "--setting unique --feature-maps elu dpfp2 --num-keys 10 20 30 40 50 60 --output".split()
    assert recall.main([*options, str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    tried = [(result["feature_map"], result["num_keys"]) for result in results]
    assert tried == [("elu", n) for n in (10, 20, 30, 40, 50)] + [("dpfp2", 10), ("dpfp2", 20)]
    lines = capsys.readouterr().out.splitlines()
    assert "elu + 1 30 40" in [" ".join(line.split()) for line in lines]
    assert "DPFP nu=2 0 240" in [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize("key_size, num_keys", [(64, 60), (16, 15)])
def test_losses_stand_beside_the_papers(key_size, num_keys, monkeypatch, tmp_path, capsys):
    made_up_losses(monkeypatch, {("dpfp1", num_keys): 0.0123})
    options = ["--setting", "reused", "--key-size", str(key_size), "--num-keys", "7", str(num_keys)]
    assert recall.main([*options, "--output", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"DPFP nu=1 delta {num_keys} 0.0123 0.0049" in lines
    assert f"DPFP nu=1 sum {num_keys} 0.0123 0.103" in lines
    assert "DPFP nu=1 sum 7 1.0000 -" in lines


def test_a_run_writes_everything(tmp_path, capsys):
    output = tmp_path / "new" / "folder"
    assert recall.main([*TINY, "--setting", "reused", "--seed", "2", "--output", str(output)]) == 0
    assert {path.name for path in output.iterdir()} == {"results.json", "losses.png"}
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((output / "results.json").read_text())
    assert (content["settings"]["steps"], content["settings"]["key_size"]) == (4, 4)
    runs = [(result["setting"], result["update_rule"]) for result in content["results"]]
    assert runs == [("reused", "delta"), ("reused", "sum")]
    assert all(0 < result["loss"] < 10 and result["steps"] == 4 for result in content["results"])
    assert f"output folder: {output}" in capsys.readouterr().out


def test_an_interrupt_leaves_the_results_so_far(monkeypatch, tmp_path, capsys):
    made_up_losses(monkeypatch, {})
    finished = recall.train

    def train(setting, num_keys, *rest):
        if num_keys == 5:
            raise KeyboardInterrupt
        return finished(setting, num_keys, *rest)

    monkeypatch.setattr(recall, "train", train)
    assert recall.main(["--setting", "reused", "--num-keys", "4", "5", "--output", str(tmp_path)]) == 130
    assert str(tmp_path) in capsys.readouterr().err.splitlines()[-1]
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 1


def test_a_loss_that_is_never_finite_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(recall, "half_squared_error", lambda target, prediction: tf.reduce_sum(prediction, 1) * np.nan)
    assert recall.main([*TINY, "--setting", "unique", "--output", str(tmp_path)]) == 1
    assert "--learning-rate" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_full_is_the_papers_size_under_the_flags():
    _, args = recall.parse(["--full", "--steps", "500"])
    assert (args.key_size, args.unique_keys[-1], args.reused_keys, args.steps) == (64, 600, [20, 60, 100], 500)
    _, args = recall.parse([])
    assert args.key_size < 64 and args.unique_keys[-1] < 600


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--setting some", "'unique'"),
        ("--feature-maps elu relu", "'dpfp1'"),
        ("--num-keys 0", "at least 1, received '0'"),
        ("--num-keys 5 4", "--num-keys must be ascending, received 5 4"),
        ("--key-size 1", "at least 2"),
        ("--steps many", "at least 1, received 'many'"),
        ("--steps 5", "multiple of --validate-every, received 5 and 2"),
        ("--batch-size -1", "at least 1"),
        ("--learning-rate nan", "above 0"),
        ("--seed -1", "from 0"),
        ("--colour red", "unrecognized arguments"),
    ],
)
def test_a_bad_option_is_one_line(options, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "train", lambda *_: pytest.fail("it trained"))
    with pytest.raises(SystemExit) as exit:
        recall.main([*TINY, "--output", str(tmp_path / "run"), *options.split()])
    assert exit.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("associative_recall.py: error: ") and expected in output.err
    assert not (tmp_path / "run").exists()


def test_an_output_that_is_a_file_is_one_line(tmp_path, capsys):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SystemExit) as exit:
        recall.main([*TINY, "--output", str(path)])
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
