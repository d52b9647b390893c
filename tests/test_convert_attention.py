"""The example that converts a trained softmax model to FAVOR+ and fine-tunes it."""

import pathlib
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # where Python looks first when it runs a script there
import convert_attention  # noqa: E402

TEXT = "".join(f"{i} green bottles hanging on the wall, {i * i} fell.\n" for i in range(300))


def test_a_converted_model_keeps_most_of_its_accuracy_and_a_short_training_brings_the_rest(tmp_path):
    (tmp_path / "bottles.txt").write_text(TEXT)
    options = "--steps 250 --fine-tune-steps 60 --features 256 --block-size 32 --seed 1"
    scores = convert_attention.main(["--data", str(tmp_path / "bottles.txt"), *options.split()])
    softmax, converted, tuned = (
        scores[key]["accuracy"] for key in ("softmax", (256, "converted"), (256, "fine-tuned"))
    )
    print(f"accuracy: softmax {softmax:.3f}, converted {converted:.3f}, fine-tuned {tuned:.3f}")
    assert softmax > 0.8
    assert converted > 0.6 * softmax
    assert tuned > 0.97 * softmax


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "missing.txt"], "cannot read 'missing.txt'"),
        (["--data", "short.txt"], "too short"),
        (["--features", "0"], "at least 1"),
    ],
)
def test_bad_options_are_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("short.txt").write_text("green")
    with pytest.raises(SystemExit) as stop:
        convert_attention.main(options)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
