"""What the programs of this folder share: arguments that explain themselves in one line, and folders of runs."""

import argparse
import json
import math
from pathlib import Path

import keras

from favor_keras.text import Characters


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def number(convert, accepts, expected):
    """An argparse type: `convert(text)`, if `accepts` it; `expected` says what should have come."""

    def parse(text):
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, received {text!r}")
        return value

    return parse


count = number(int, lambda n: n >= 1, "a whole number of at least 1")
positive = number(float, lambda x: 0 < x < math.inf, "a number above 0")
not_negative = number(float, lambda x: 0 <= x < math.inf, "a number of at least 0")
share = number(float, lambda x: 0 <= x < 1, "a number from 0 up to, not including, 1")
probability = number(float, lambda x: 0 < x <= 1, "a number above 0, up to 1")
seed = number(int, lambda n: 0 <= n <= 10**9, "a whole number from 0 to 1000000000")


def json_object(text):
    """An argparse type: a JSON object as a dict."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, received {text!r}")
    return value


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def load_run(run_dir):
    """The best model of a run folder of char_lm.py, and its characters; ValueError if they are not there."""
    model, vocabulary = Path(run_dir, "model.keras"), Path(run_dir, "vocabulary.json")
    for path in (model, vocabulary):
        if not path.exists():
            raise ValueError(f"{path} does not exist: {str(run_dir)!r} must be a run folder of char_lm.py")
    return keras.saving.load_model(model), Characters.load(vocabulary)


def add_sampling(parser):
    """The options of `CausalLM.generate`."""
    parser.add_argument("--temperature", type=not_negative, default=0.7, help="0 takes the likeliest character")
    parser.add_argument("--top-k", type=count, help="draw from so many likeliest characters only")
    parser.add_argument("--top-p", type=probability, help="draw from the likeliest that make up this probability")
