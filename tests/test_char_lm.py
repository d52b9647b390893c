"""The character language model example: its outputs, its errors, its sources of text."""

import csv
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
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


sys.path.insert(0, str(SCRIPT.parent))  # where Python looks first when it runs the script

import char_lm  # noqa: E402
import command_line  # noqa: E402
import generate  # noqa: E402
import texts  # noqa: E402

from favor_keras import CausalLM, NoamSchedule  # noqa: E402
from favor_keras.text import Characters  # noqa: E402


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
        "backup",
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
    assert loss == json.loads((run_dir / "results.json").read_text())["validation_loss"]
    output = capsys.readouterr().out
    assert f"best validation loss: {loss:.4f} nats per character" in output
    assert f"run folder: {again.relative_to(tmp_path)}" in output


def interrupt_at(monkeypatch, epoch):
    """Press Ctrl-C at the end of an epoch, before anything is written of it."""
    stock = keras.callbacks.CSVLogger.on_epoch_end

    def on_epoch_end(self, number, logs=None):
        if number == epoch:
            raise KeyboardInterrupt
        stock(self, number, logs)

    monkeypatch.setattr(keras.callbacks.CSVLogger, "on_epoch_end", on_epoch_end)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_interrupt_leaves_a_model_and_what_was_saved(epoch, text_file, tmp_path, monkeypatch, capsys):
    interrupt_at(monkeypatch, epoch)
    run_dir = tmp_path / "run"
    assert char_lm.main(["--data", str(text_file), "--run-dir", str(run_dir), *TINY]) == 130
    assert f"--resume {run_dir}" in capsys.readouterr().err.splitlines()[-1]
    assert len(history_of(run_dir)) == epoch
    model, characters = command_line.load_run(run_dir)
    assert model.vocabulary_size == len(characters) == len(set(TEXT))


def test_without_a_validation_there_is_a_model_all_the_same(text_file, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(keras.Model, "fit", interrupted)
    run_dir = tmp_path / "run"
    assert char_lm.main(["--data", str(text_file), "--run-dir", str(run_dir), *TINY]) == 130
    assert command_line.load_run(run_dir)[0].vocabulary_size == len(set(TEXT))


def test_a_loss_that_is_never_finite_is_an_error(text_file, tmp_path, capsys):
    options = [
        "--data",
        str(text_file),
        "--run-dir",
        str(tmp_path),
        *TINY,
        "--learning-rate",
        "1e30",
        "--clip-norm=1e30",
    ]
    assert char_lm.main(options) == 1
    assert "--learning-rate" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "sample.txt").exists()


# Going on after a kill.

DROPPING = ["--dropout", "0.2", "--mixer-options", '{"redraw_interval": 2, "kernel_transformation": "softmax"}']
KILLED = """
import os, signal, sys
import keras
sys.path.insert(0, sys.argv[1])
import char_lm

def kill(callback, batch, logs=None):
    if int(callback.model.optimizer.iterations) == 5:
        os.kill(os.getpid(), signal.SIGKILL)

keras.callbacks.CSVLogger.on_train_batch_end = kill
char_lm.main(sys.argv[2:])
"""


def test_T_resumed_after_a_kill_it_ends_as_if_there_had_been_none(text_file, tmp_path):
    options = ["--data", str(text_file), *TINY, *DROPPING, "--patience", "5"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert char_lm.main([*options, "--run-dir", str(whole)]) == 0
    process = run_python("-c", KILLED, str(SCRIPT.parent), *options, "--run-dir", str(killed))
    assert process.returncode == -9, process.stderr
    assert [int(row["step"]) for row in history_of(killed)] == [2, 4]
    assert not (killed / "results.json").exists()
    assert char_lm.main(["--resume", str(killed)]) == 0
    losses = [[float(row["val_loss"]) for row in history_of(folder)] for folder in (whole, killed)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-6)
    results = [json.loads((folder / "results.json").read_text()) for folder in (whole, killed)]
    assert results[1]["validation_loss"] == pytest.approx(results[0]["validation_loss"], rel=0, abs=1e-6)
    assert (killed / "sample.txt").read_text() == (whole / "sample.txt").read_text()


def test_a_finished_run_has_nothing_to_go_on_with(run_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    assert char_lm.main(["--resume", str(copy)]) == 0
    assert (copy / "history.csv").read_text() == (run_dir / "history.csv").read_text()
    assert (copy / "sample.txt").read_text(encoding="utf-8") == (run_dir / "sample.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--resume", "missing"], "cannot read 'missing/settings.json'"),
        (["--resume=missing", "--steps", "9"], "cannot be combined with --steps"),
        (["--steps", "5", "--epochs", "2"], "--steps and --epochs cannot be combined, received 5 and 2"),
        (["--strategy", "tpu"], "strategy tpu"),
        (["--strategy", "multiworker"], "TF_CONFIG"),
        (["--position-embedding", "--block-size", "4"], "--prompt must be shorter than --block-size"),
        (["--mixer-options", "[1]"], "must be a JSON object, received '[1]'"),
        (["--mixer-options", '{"magic": 1}'], "magic"),
        (["--block-options", '{"magic": 1}'], "magic"),
        (["--beta-2", "1"], "up to, not including, 1"),
        (["--top-p", "0"], "above 0"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, expected, text_file, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    first = [] if options[0].startswith("--resume") or "--epochs" in options else ["--data", str(text_file), *TINY]
    assert expected in error_of(capsys, monkeypatch, [*first, *options])


def test_tensorboard_must_be_installed(text_file, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = error_of(capsys, monkeypatch, ["--data", str(text_file), *TINY, "--tensorboard"])
    assert "pip install tensorboard" in message


# Settings.


def test_presets_are_listed_as_they_can_be_given(capsys):
    assert char_lm.main(["--list-presets"]) == 0
    listed = dict(part.split("\n", 1) for part in capsys.readouterr().out.rstrip().split("\n\n"))
    assert listed.keys() == char_lm.presets.PRESETS.keys()
    for name, settings in char_lm.presets.PRESETS.items():
        flags = shlex.split(listed[name])
        given = vars(char_lm.make_parser().parse_args(flags))
        assert {flag: given[flag] for flag in settings} == settings and len(flags) == 2 * len(settings)


@pytest.mark.parametrize("name", char_lm.presets.PRESETS)
def test_every_preset_starts(name, text_file, tmp_path, monkeypatch):
    """A few steps with the preset's settings, but for the sizes that would take minutes and more text."""
    used = {}
    make_model = char_lm.make_model
    monkeypatch.setattr(char_lm, "make_model", lambda size, args: used.update(vars(args)) or make_model(size, args))
    smaller = "--layers 1 --hidden-size 16 --batch-size 2 --block-size 16 --steps 2 --sample-length 4 --prompt green"
    if "feed_forward_size" in char_lm.presets.PRESETS[name]:
        smaller += " --feed-forward-size 32"
    if "d_ffn" in char_lm.presets.PRESETS[name].get("mixer_options", {}):
        smaller += ' --mixer-options {"d_ffn":32,"gating_weights":"full"}'
    if name == "nanogpt_gpu":
        smaller += " --heads 2"
    options = ["--preset", name, "--data", str(text_file), "--run-dir", str(tmp_path / "run"), *smaller.split()]
    assert char_lm.main(options) == 0
    given = {word[2:].replace("-", "_") for word in options if word.startswith("--")}
    for flag, value in char_lm.presets.PRESETS[name].items():
        if flag not in given | {"epochs"}:
            assert used[flag] == value, flag


def test_full_presets_make_models_of_their_size():
    sizes = {}
    for name in ("fast_weights_tutorial", "gmlp_tutorial", "nanogpt_gpu", "nanogpt_cpu"):
        _, args = char_lm.parse(["--preset", name])
        char_lm.set_numbers_of_steps(args, 1_003_854)
        sizes[name] = char_lm.make_model(65, args).count_params(), args.steps
    attention, feed_forward, norm = 4 * 512**2 + 512 + 512 * 8, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    block = attention + feed_forward + norm
    assert sizes["fast_weights_tutorial"] == (6 * block + norm + 2 * 512 * 65 + 65, 128 * (1_003_854 // 2048))
    block = 512 * 2048 + 2048 + 2 * 1024 + 256 * 256 + 256 + 1024 * 512 + 512 + norm
    assert sizes["gmlp_tutorial"] == (6 * block + norm + 2 * 512 * 65 + 65, 128 * (1_003_854 // 8192))
    assert sizes["nanogpt_gpu"][1] == 5000 and sizes["nanogpt_cpu"][1] == 2000


def test_epochs_are_passes_over_the_text(text_file, tmp_path):
    options = "--batch-size 8 --block-size 64 --hidden-size 8 --layers 1 --heads 1 --epochs 2 --sample-length 4"
    run_dir = tmp_path / "run"
    given = ["--data", str(text_file), "--run-dir", str(run_dir), *options.split(), "--prompt", "green"]
    assert char_lm.main(given) == 0
    steps = int(0.9 * len(TEXT)) // (8 * 64)
    assert [int(row["step"]) for row in history_of(run_dir)] == [steps, 2 * steps]


@pytest.mark.parametrize(
    "flags",
    [
        ["--precision", "mixed_bfloat16", "--jit"],
        ["--schedule", "noam", "--warm-up-steps", "4", "--mixer", "softmax", "--position-embedding"],
        ["--mixer", "gmlp", "--top-k", "5", "--top-p", "0.9"],
    ],
    ids=["bfloat16, jit", "noam, softmax", "gmlp"],
)
def test_flags_reach_the_model(flags, text_file, tmp_path, monkeypatch):
    models = []
    make_model = char_lm.make_model
    monkeypatch.setattr(char_lm, "make_model", lambda *given: models.append(make_model(*given)) or models[-1])
    assert char_lm.main(["--data", str(text_file), "--run-dir", str(tmp_path / "run"), *TINY, *flags]) == 0
    (model,) = models
    assert model.jit_compile == ("--jit" in flags)
    assert (model.dtype_policy.name == "mixed_bfloat16") == ("mixed_bfloat16" in flags)
    assert (model.max_length == BLOCK_SIZE) == ("--position-embedding" in flags or "gmlp" in flags)
    schedule = model.optimizer._learning_rate
    assert isinstance(schedule, NoamSchedule) == ("noam" in flags)
    assert model.get_config()["mixer"] == (flags[flags.index("--mixer") + 1] if "--mixer" in flags else "favor")


def test_training_stops_when_validation_gets_no_better(text_file, tmp_path):
    run_dir = tmp_path / "run"
    options = ["--data", str(text_file), "--run-dir", str(run_dir), *TINY, "--learning-rate", "5", "--patience", "1"]
    char_lm.main([*options, "--steps", "40"])
    losses = [float(row["val_loss"]) for row in history_of(run_dir)]
    assert len(losses) < 20 and losses[-1] >= min(losses[:-1]) and all(np.diff(losses[:-1]) < 0)


def test_longer_windows_are_scored_where_there_is_no_limit(run_dir):
    results = json.loads((run_dir / "results.json").read_text())
    model, characters = command_line.load_run(run_dir)
    ids = np.asarray(characters.encode(TEXT[int(0.9 * len(TEXT)) :]))
    length = 4 * BLOCK_SIZE
    windows = [ids[i : i + length + 1] for i in range(0, len(ids) - length, length)]
    logits = tf.nn.log_softmax(model(np.stack(windows)[:, :-1])).numpy()
    expected = -np.mean(np.take_along_axis(logits, np.stack(windows)[:, 1:, None], -1))
    assert results["validation_loss_4_blocks"] == pytest.approx(expected, rel=1e-4)
    assert results["writing_characters_per_second"] > 0
    assert 0 < results["input_share_of_a_step"] < 1


# Writing.


def test_generate_writes_the_prompt_and_its_continuation(run_dir, capsys):
    options = ["--prompt", "green", "--length", "20", "--temperature", "0.8", "--seed", "3"]
    assert generate.main([str(run_dir), *options]) == 0
    assert capsys.readouterr().out == (run_dir / "sample.txt").read_text(encoding="utf-8") + "\n"


@pytest.mark.parametrize(
    "options, expected",
    [
        (["missing"], "missing/model.keras does not exist"),
        (["RUN", "--prompt", "Ω"], "received also ['Ω']"),
        (["RUN", "--prompt", ""], "--prompt must have at least one character"),
        (["RUN", "--length", "0"], "at least 1"),
        (["RUN", "--top-k", "0"], "at least 1"),
    ],
)
def test_generate_says_what_is_wrong_in_one_line(options, expected, run_dir, capsys):
    with pytest.raises(SystemExit) as exit:
        generate.main([str(run_dir) if option == "RUN" else option for option in options])
    assert exit.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and expected in output.err


def test_generate_writes_as_many_characters_as_there_can_be(monkeypatch, capsys):
    characters = Characters("abc")
    model = CausalLM(3, 8, num_layers=1, num_heads=2, mixer="gmlp", max_length=20)
    monkeypatch.setattr(generate, "load_run", lambda run_dir: (model, characters))
    assert generate.main(["RUN", "--prompt", "abc"]) == 0
    assert len(capsys.readouterr().out) == 20 + 1
    for options, expected in (
        (["--prompt", "abc", "--length", "18"], "--length must be at most 17 after this prompt, received 18"),
        (["--prompt", 20 * "a"], "--prompt must be shorter than the 20 characters of this model"),
    ):
        with pytest.raises(SystemExit):
            generate.main(["RUN", *options])
        assert expected in capsys.readouterr().err


# Options and data that are wrong.


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
    text = texts.read_text("python_docs")
    assert len(text) > 400_000
    assert "def" in text and "class" in text


def test_tiny_shakespeare_is_all_splits_in_order(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    splits = {"test": "Exeunt.\n", "train": "Enter the è king.\n", "validation": "Alarum.\n"}

    def load(name):
        assert name == "tiny_shakespeare"
        return {split: tf.data.Dataset.from_tensors({"text": text}) for split, text in splits.items()}

    monkeypatch.setattr(tfds, "load", load)
    assert texts.read_text("tiny_shakespeare") == "Enter the è king.\nAlarum.\nExeunt.\n"


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
    (inputs, targets), (more, _) = texts.random_windows(ids, args).take(2)
    assert inputs.shape == targets.shape == (50, 5)
    np.testing.assert_array_equal(targets, inputs.numpy() + 1)
    np.testing.assert_array_equal(inputs, inputs.numpy()[:, :1] + np.arange(5))
    assert set(np.concatenate([inputs, more])[:, 0]) == set(range(15))  # every place where a window fits
    again, _ = next(iter(texts.random_windows(ids, args)))
    np.testing.assert_array_equal(inputs, again)
    from_second, _ = next(iter(texts.random_windows(ids, args, first_step=1)))
    np.testing.assert_array_equal(more, from_second)


@pytest.mark.parametrize("limit, starts", [(None, [0, 5, 10, 15]), (3, [0, 10, 15]), (4, [0, 5, 10, 15])])
def test_consecutive_windows_do_not_overlap(limit, starts):
    args = char_lm.make_parser().parse_args("--batch-size 3 --block-size 5".split())
    batches = list(texts.consecutive_windows(tf.range(21), args, limit))
    inputs, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    np.testing.assert_array_equal(inputs, np.array(starts)[:, None] + np.arange(5))
    np.testing.assert_array_equal(targets, inputs + 1)
