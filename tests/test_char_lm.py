"""The character language model example: its outputs, its errors, its sources of text."""

import csv
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "char_lm.py"
TEXT = "".join(f"{i} green bottles hanging on the wall, è {i * i} fell.\n" for i in range(100))
BLOCK_SIZE = 16
TINY = f"--steps 6 --validate-every 2 --batch-size 4 --block-size {BLOCK_SIZE} --hidden-size 16 --layers 1 --heads 2"
TINY = [*TINY.split(), *"--learning-rate 0.01 --seed 3 --sample-length 20 --temperature 0.8 --prompt green".split()]


def load_script():
    spec = importlib.util.spec_from_file_location("char_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(SCRIPT.parent))  # where Python looks first when it runs the script
char_lm = load_script()


def run_python(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, **options)


def history_of(run_dir):
    with open(run_dir / "history.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "bottles.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run_dir(text_file, tmp_path_factory):
    """The folder of a finished tiny run."""
    run_dir = tmp_path_factory.mktemp("runs") / "first"
    assert char_lm.main(["--data", str(text_file), "--run-dir", str(run_dir), *TINY]) == 0
    return run_dir


def test_a_run_writes_everything(run_dir, text_file):
    assert {path.name for path in run_dir.iterdir()} == {
        "model.keras", "vocabulary.json", "settings.json", "history.csv", "loss.png", "results.json", "sample.txt",
    }  # fmt: skip
    assert json.loads((run_dir / "vocabulary.json").read_text(encoding="utf-8")) == sorted(set(TEXT))
    settings = json.loads((run_dir / "settings.json").read_text())
    assert settings["data"] == str(text_file)
    assert (settings["steps"], settings["hidden_size"], settings["mixer"]) == (6, 16, "favor")
    sample = (run_dir / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("green") and len(sample) == len("green") + 20
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_history_has_steps_and_perplexity(run_dir):
    history = history_of(run_dir)
    assert [int(row["step"]) for row in history] == [2, 4, 6]
    for row in history:
        assert float(row["val_perplexity"]) == pytest.approx(np.exp(float(row["val_loss"])), rel=1e-6)
    assert float(history[-1]["val_loss"]) < float(history[0]["val_loss"])


def test_results_are_those_of_the_best_step(run_dir):
    results = json.loads((run_dir / "results.json").read_text())
    best = min(history_of(run_dir), key=lambda row: float(row["val_loss"]))
    assert results["step"] == int(best["step"])
    # The validation split is small enough to be scored as a whole every time.
    assert results["validation_loss"] == pytest.approx(float(best["val_loss"]), rel=1e-5)
    assert results["validation_perplexity"] == pytest.approx(np.exp(results["validation_loss"]))


RELOAD = """
import sys, json
import numpy as np
import keras, favor_keras
run_dir, block_size = sys.argv[1], int(sys.argv[2])
model = keras.saving.load_model(run_dir + "/model.keras")
vocabulary = json.load(open(run_dir + "/vocabulary.json", encoding="utf-8"))
text = sys.stdin.buffer.read().decode("utf-8")
ids = np.array([vocabulary.index(character) for character in text])[int(0.9 * len(text)):]
windows = [ids[i : i + block_size + 1] for i in range(0, len(ids) - block_size, block_size)]
windows = np.stack(windows)
logits = model.predict(windows[:, :-1], verbose=0).astype("float64")
log_sums = np.log(np.exp(logits).sum(-1))
scores = np.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
prompt = np.array([[vocabulary.index(character) for character in "green"]])
new = model.generate(prompt, 20, temperature=0.8, seed=3)[0]
print(json.dumps([float(np.mean(log_sums - scores)), "".join(vocabulary[i] for i in new)]))
"""


def test_model_reloads_in_a_new_process(run_dir):
    process = run_python("-c", RELOAD, str(run_dir), str(BLOCK_SIZE), input=TEXT)
    assert process.returncode == 0, process.stderr
    loss, sample = json.loads(process.stdout.splitlines()[-1])
    assert loss == pytest.approx(json.loads((run_dir / "results.json").read_text())["validation_loss"], rel=1e-5)
    assert sample == (run_dir / "sample.txt").read_text(encoding="utf-8")


def test_the_same_seed_gives_the_same_history(run_dir, text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert char_lm.main(["--data", str(text_file), *TINY]) == 0
    again = tmp_path / "runs" / "char_lm-bottles-favor-1"
    assert (again / "history.csv").read_text() == (run_dir / "history.csv").read_text()
    assert (again / "sample.txt").read_text(encoding="utf-8") == (run_dir / "sample.txt").read_text(encoding="utf-8")
    loss = json.loads((again / "results.json").read_text())["validation_loss"]
    output = capsys.readouterr().out
    assert f"best validation loss: {loss:.4f} nats per character" in output
    assert f"run folder: {again.relative_to(tmp_path)}" in output


def test_an_interrupt_leaves_what_was_saved(text_file, tmp_path, monkeypatch, capsys):
    class InterruptedLogger(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            raise KeyboardInterrupt

    monkeypatch.setattr(keras.callbacks, "CSVLogger", InterruptedLogger)
    run_dir = tmp_path / "run"
    assert char_lm.main(["--data", str(text_file), "--run-dir", str(run_dir), *TINY]) == 130
    assert str(run_dir) in capsys.readouterr().err.splitlines()[-1]
    assert len(history_of(run_dir)) == 1
    assert keras.saving.load_model(run_dir / "model.keras").vocabulary_size == len(set(TEXT))


def test_a_loss_that_is_never_finite_is_an_error(text_file, tmp_path, monkeypatch, capsys):
    diverged = {"step": [2, 4], "loss": [5.0, np.nan], "val_loss": [np.nan, np.nan]}
    monkeypatch.setattr(char_lm, "train", lambda *_: diverged)
    assert char_lm.main(["--data", str(text_file), "--run-dir", str(tmp_path), *TINY]) == 1
    assert "--learning-rate" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "sample.txt").exists()


def error_of(capsys, monkeypatch, options):
    """The one line on stderr with which `options` end a run before it trains."""
    monkeypatch.setattr(char_lm, "train", lambda *_: pytest.fail("it trained"))
    with pytest.raises(SystemExit) as exit:
        char_lm.main(options)
    assert exit.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("char_lm.py: error: ") and output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--steps", "0", "at least 1, received '0'"),
        ("--steps", "many", "at least 1, received 'many'"),
        ("--steps", "7", "multiple of --validate-every, received 7 and 2"),
        ("--batch-size", "-1", "at least 1"),
        ("--block-size", "1.5", "at least 1"),
        ("--block-size", "600", "validation split"),
        ("--block-size", "100000", "training split"),
        ("--hidden-size", "0", "at least 1"),
        ("--hidden-size", "15", "hidden_size"),
        ("--layers", "0", "at least 1"),
        ("--heads", "x", "at least 1"),
        ("--learning-rate", "0", "above 0"),
        ("--learning-rate", "nan", "above 0"),
        ("--learning-rate", "inf", "above 0"),
        ("--dropout", "1", "up to"),
        ("--dropout", "-0.1", "up to"),
        ("--mixer", "magic", "favor"),
        ("--seed", "-1", "from 0"),
        ("--seed", "5000000000", "from 0"),
        ("--prompt", "", "at least one character"),
        ("--prompt", "green Ω\n☃", "['Ω', '☃']"),
        ("--sample-length", "0", "at least 1"),
        ("--temperature", "-1", "at least 0"),
        ("--temperature", "nan", "at least 0"),
        ("--validate-every", "0", "at least 1"),
    ],
)
def test_a_bad_option_is_one_line(option, value, expected, text_file, tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "run"
    options = ["--data", str(text_file), "--run-dir", str(run_dir), *TINY, f"{option}={value}"]
    message = error_of(capsys, monkeypatch, options)
    assert option in message or option.strip("-").replace("-", "_") in message
    assert expected in message
    assert not run_dir.exists()


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "No such file"),
        ("folder", "Is a directory"),
        (b"caf\xe9 " * 1000, "not UTF-8"),
        (b"", "it has 0"),
        (b"green " * 20, "validation split"),
        (b"green\0" * 1000, "NUL"),
        (b"g" * 3000, "one character only"),
    ],
    ids=["missing", "folder", "undecodable", "empty", "short", "binary", "constant"],
)
def test_bad_data_is_one_line(content, expected, tmp_path, capsys, monkeypatch):
    path = tmp_path / "data"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    run_dir = tmp_path / "run"
    message = error_of(capsys, monkeypatch, ["--data", str(path), "--run-dir", str(run_dir), *TINY])
    assert "--data" in message and expected in message
    assert not run_dir.exists()


def test_an_unreadable_file_is_one_line(text_file, tmp_path, capsys, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    message = error_of(capsys, monkeypatch, ["--data", str(text_file), "--run-dir", str(tmp_path / "run"), *TINY])
    assert "Permission denied" in message


def test_a_run_dir_that_cannot_be_made_is_one_line(text_file, capsys, monkeypatch):
    options = ["--data", str(text_file), "--run-dir", str(text_file / "run"), *TINY]
    assert "Not a directory" in error_of(capsys, monkeypatch, options)


def test_a_run_is_never_overwritten(text_file, tmp_path, capsys, monkeypatch):
    (tmp_path / "model.keras").write_bytes(b"precious")
    message = error_of(capsys, monkeypatch, ["--data", str(text_file), "--run-dir", str(tmp_path), *TINY])
    assert "--run-dir" in message
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
    assert (tmp_path / "model.keras").read_bytes() == b"precious"


def test_default_run_dirs_are_new_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, args = char_lm.parse([])
    run_dirs = [char_lm.make_run_dir(args) for _ in range(3)]
    assert len(set(run_dirs)) == 3 and all(run_dir.is_dir() for run_dir in run_dirs)


def test_from_a_shell_an_error_ends_without_traceback(tmp_path):
    process = run_python(str(SCRIPT), "--data", str(tmp_path / "missing.txt"), cwd=tmp_path)
    assert process.returncode == 2
    assert process.stdout == "" and "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].startswith("char_lm.py: error: --data: cannot read ")
    assert list(tmp_path.iterdir()) == []


def test_python_docs_are_long():
    text = char_lm.read_text("python_docs")
    assert len(text) > 400_000
    assert "def" in text and "class" in text


def test_tiny_shakespeare_is_all_splits_in_order(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    texts = {"test": "Exeunt.\n", "train": "Enter the è king.\n", "validation": "Alarum.\n"}

    def load(name):
        assert name == "tiny_shakespeare"
        return {split: tf.data.Dataset.from_tensors({"text": text}) for split, text in texts.items()}

    monkeypatch.setattr(tfds, "load", load)
    assert char_lm.read_text("tiny_shakespeare") == "Enter the è king.\nAlarum.\nExeunt.\n"


def test_tiny_shakespeare_without_network_is_one_line(tmp_path, capsys, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")

    def load(name):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(tfds, "load", load)
    options = ["--data", "tiny_shakespeare", "--run-dir", str(tmp_path / "run"), *TINY]
    message = error_of(capsys, monkeypatch, options)
    assert "no route to host" in message and "--data FILE" in message


def test_tiny_shakespeare_without_tensorflow_datasets_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    options = ["--data", "tiny_shakespeare", "--run-dir", str(tmp_path / "run"), *TINY]
    assert "--data FILE" in error_of(capsys, monkeypatch, options)


def test_random_windows_are_pieces_of_the_text_and_seeded():
    args = char_lm.make_parser().parse_args("--batch-size 50 --block-size 5 --seed 7".split())
    ids = tf.range(20)
    (inputs, targets), (more, _) = char_lm.random_windows(ids, args).take(2)
    assert inputs.shape == targets.shape == (50, 5)
    np.testing.assert_array_equal(targets, inputs.numpy() + 1)
    np.testing.assert_array_equal(inputs, inputs.numpy()[:, :1] + np.arange(5))
    assert set(np.concatenate([inputs, more])[:, 0]) == set(range(15))  # every place where a window fits
    again, _ = next(iter(char_lm.random_windows(ids, args)))
    np.testing.assert_array_equal(inputs, again)


@pytest.mark.parametrize("limit, starts", [(None, [0, 5, 10, 15]), (3, [0, 10, 15]), (4, [0, 5, 10, 15])])
def test_consecutive_windows_do_not_overlap(limit, starts):
    args = char_lm.make_parser().parse_args("--batch-size 3 --block-size 5".split())
    batches = list(char_lm.consecutive_windows(tf.range(21), args, limit))
    inputs, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    np.testing.assert_array_equal(inputs, np.array(starts)[:, None] + np.arange(5))
    np.testing.assert_array_equal(targets, inputs + 1)


def test_characters_survive_ids():
    vocabulary = sorted(set(TEXT))
    ids = char_lm.encode(TEXT, vocabulary)
    np.testing.assert_array_equal(ids, [vocabulary.index(character) for character in TEXT])
    assert char_lm.decode(ids, vocabulary) == TEXT
