"""Train a character language model on a text, then let it write.

    python examples/char_lm.py
    python examples/char_lm.py --data my_text.txt --steps 5000 --prompt "Once "
    python examples/char_lm.py --preset nanogpt_cpu --mixer fast_weights

Losses are in nats per character. The run folder gets the model with the lowest validation loss
(model.keras), the vocabulary, the settings, the history (CSV), its curves (PNG), the results and
the sample.
"""

import argparse
import itertools
import json
import math
import os
import re
import sys
import textwrap
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up notes would bury an error message.

import keras  # noqa: E402
import matplotlib.figure  # noqa: E402
import matplotlib.ticker  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from favor_keras import CausalLM, RedrawProjections  # noqa: E402
from favor_keras.models.mixers import BLOCKS, MIXERS  # noqa: E402
from presets import PRESETS  # noqa: E402

TRAINING_PART = 0.9
WARM_UP_PART = 0.1  # of the steps, unless --warm-up-steps says how many
VALIDATION_WINDOWS = 256  # scored during training; the final score takes the whole split


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


def json_object(text):
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, received {text!r}")
    return value


def make_parser():
    count = number(int, lambda n: n >= 1, "a whole number of at least 1")
    parser = OneLineParser(
        prog="char_lm.py",
        description="Train a character language model on a text, then let it write.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="quick", help="settings, which other flags override")
    add("--data", help="python_docs, tiny_shakespeare or a UTF-8 text file")
    add("--steps", type=count, help="training steps")
    add("--batch-size", type=count, help="windows in a training step")
    add("--block-size", type=count, help="characters in a window")
    add("--hidden-size", type=count, help="size of the embedding and the blocks")
    add("--layers", type=count, help="number of blocks")
    add("--heads", type=count, help="heads of every mixer")
    add(
        "--learning-rate",
        type=number(float, lambda x: 0 < x < math.inf, "a number above 0"),
        help="highest learning rate, after the warm-up",
    )
    add("--warm-up-steps", type=count, help="steps until then; None is a tenth of --steps")
    add(
        "--dropout",
        type=number(float, lambda x: 0 <= x < 1, "a number from 0 up to, not including, 1"),
        help="dropout rate",
    )
    add("--mixer", choices=sorted(MIXERS), default="favor", help="what mixes the sequence")
    add("--mixer-options", type=json_object, default={}, help="arguments of the mixer's layer, as JSON")
    add(
        "--seed",
        type=number(int, lambda n: 0 <= n <= 10**9, "a whole number from 0 to 1000000000"),
        default=1,
        help="all random numbers depend on it",
    )
    add("--prompt", default="The ", help="the sample goes on from here")
    add("--sample-length", type=count, default=400, help="characters to write; gmlp and amlp end with their window")
    add(
        "--temperature",
        type=number(float, lambda x: 0 <= x < math.inf, "a number of at least 0"),
        default=0.7,
        help="of the sampling; 0 takes the likeliest character",
    )
    add("--run-dir", type=Path, help="new or empty folder for the results; None takes the next free runs/char_lm-...")
    add("--validate-every", type=count, default=250, help="steps between validations; must divide --steps")
    return parser


def parse(argv):
    """The parser and the options: a preset's settings under the flags that are given."""
    parser = make_parser()
    preset = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])[0].preset
    parser.set_defaults(**PRESETS[preset])
    return parser, parser.parse_args(argv)


def check_options(args):
    if args.steps % args.validate_every:
        raise ValueError(
            f"--steps must be a multiple of --validate-every, received {args.steps} and {args.validate_every}"
        )
    if not args.prompt:
        raise ValueError("--prompt must have at least one character")
    if args.mixer in BLOCKS and len(args.prompt) >= args.block_size:
        raise ValueError(f"--prompt must be shorter than --block-size with --mixer {args.mixer}")
    if args.run_dir and args.run_dir.is_dir() and any(args.run_dir.iterdir()):
        raise ValueError(f"--run-dir must be a new or empty folder, {args.run_dir} has files in it")


def read_text(data):
    """The text that --data stands for; ValueError if there is none."""
    if data == "python_docs":
        return python_docs()
    if data == "tiny_shakespeare":
        return tiny_shakespeare()
    try:
        return Path(data).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--data: cannot read {data!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--data: {data!r} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def python_docs():
    """The language reference that Python's help() shows, without drawn tables: a model repeats their rules for ever."""
    from pydoc_data.topics import topics

    lines = "\n\n".join(topics.values()).splitlines(keepends=True)
    return "".join(line for line in lines if not re.fullmatch(r"\s*[|+].*[|+]\s*", line))


def tiny_shakespeare():
    try:
        import tensorflow_datasets as tfds

        splits = tfds.load("tiny_shakespeare")
        examples = [example for name in ("train", "validation", "test") for example in splits[name]]
    except Exception as error:  # whatever went wrong between here and a download, the way out is the same
        raise ValueError(
            "--data: TensorFlow Datasets cannot provide tiny_shakespeare "
            f"({type(error).__name__}: {textwrap.shorten(str(error), 200)}); "
            "give a local text file instead: --data FILE"
        ) from error
    return "".join(example["text"].numpy().decode("utf-8") for example in examples)


def encode(text, vocabulary):
    """Ids [N] of a text's characters."""
    lookup = keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=0)
    return tf.cast(lookup(tf.strings.unicode_split(text, "UTF-8")), tf.int32)


def decode(ids, vocabulary):
    """The text of ids [N]."""
    lookup = keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=0, invert=True)
    return tf.strings.reduce_join(lookup(ids)).numpy().decode("utf-8")


def check_text(text, args):
    """Each split must have one window and its next character; the prompt must use the text's characters."""
    split = int(TRAINING_PART * len(text))
    for name, length in (("training", split), ("validation", len(text) - split)):
        if length <= args.block_size:
            raise ValueError(
                f"--data: the {name} split of {args.data!r} must have more than --block-size={args.block_size} "
                f"characters, it has {length}"
            )
    if "\0" in text:
        raise ValueError(f"--data: {args.data!r} has NUL characters, it is not text")
    if len(set(text)) == 1:
        raise ValueError(f"--data: {args.data!r} has one character only, over and over: there is nothing to learn")
    unknown = sorted(set(args.prompt) - set(text))
    if unknown:
        raise ValueError(f"--prompt must only use characters of the text, which does not have {unknown}")


def random_windows(ids, args):
    """Endless batches of windows [B, T] at random places, with the characters that come next [B, T]."""
    num_starts = len(ids) - args.block_size
    offsets = tf.range(args.block_size)

    def windows(numbers):
        places = tf.cast(numbers % num_starts, tf.int32)[:, None] + offsets
        return tf.gather(ids, places), tf.gather(ids, places + 1)

    numbers = tf.data.Dataset.random(seed=args.seed).batch(args.batch_size, drop_remainder=True)
    return numbers.map(windows).prefetch(tf.data.AUTOTUNE)


def consecutive_windows(ids, args, limit=None):
    """One pass over windows that do not overlap; with a limit, over so many of them, evenly spread."""
    num_windows = (len(ids) - 1) // args.block_size
    length = num_windows * args.block_size
    inputs, targets = (tf.reshape(part, [num_windows, args.block_size]) for part in (ids[:length], ids[1 : length + 1]))
    if limit is not None and limit < num_windows:
        chosen = np.linspace(0, num_windows - 1, limit).round().astype(int)
        inputs, targets = tf.gather(inputs, chosen), tf.gather(targets, chosen)
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(args.batch_size)


def make_model(vocabulary_size, args):
    model = CausalLM(
        vocabulary_size,
        hidden_size=args.hidden_size,
        num_layers=args.layers,
        num_heads=args.heads,
        mixer=args.mixer,
        mixer_options=args.mixer_options,
        dropout=args.dropout,
        max_length=args.block_size if args.mixer in BLOCKS else None,
        seed=args.seed,
    )
    model.build((None, args.block_size))
    model.compile(make_optimizer(args), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def make_optimizer(args):
    warm_up_steps = args.warm_up_steps or math.ceil(WARM_UP_PART * args.steps)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=args.learning_rate,
        warmup_steps=warm_up_steps,
        decay_steps=max(args.steps - warm_up_steps, 1),
        alpha=0.1,
    )
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.1, beta_2=0.99, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def make_run_dir(args):
    """The folder that --run-dir names, or the first free one of runs/char_lm-DATA-MIXER-1, -2, ..."""
    if args.run_dir:
        args.run_dir.mkdir(parents=True, exist_ok=True)
        return args.run_dir
    for i in itertools.count(1):
        run_dir = Path("runs", f"char_lm-{Path(args.data).stem}-{args.mixer}-{i}")
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            continue


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def train(model, training, validation, run_dir, args):
    """Keep the weights with the lowest validation loss in model.keras; the history as a dict of lists."""

    def add_step_and_perplexity(epoch, logs):
        logs["step"] = int(model.optimizer.iterations)
        logs["val_perplexity"] = float(np.exp(logs["val_loss"]))

    history = model.fit(
        training,
        epochs=args.steps // args.validate_every,
        steps_per_epoch=args.validate_every,
        validation_data=validation,
        callbacks=[
            keras.callbacks.LambdaCallback(on_epoch_end=add_step_and_perplexity),  # first: the others log it
            keras.callbacks.ModelCheckpoint(run_dir / "model.keras", monitor="val_loss", save_best_only=True),
            keras.callbacks.CSVLogger(run_dir / "history.csv"),
            keras.callbacks.TerminateOnNaN(),
            *([RedrawProjections()] if args.mixer_options.get("redraw_interval") else []),
        ],
        shuffle=False,  # the windows are at random places already
        verbose=1 if sys.stdout.isatty() else 2,
    )
    return history.history


def plot_losses(history, path):
    figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(history["step"], history["loss"], "o-", label="training (mean since the last validation)")
    axes.plot(history["step"], history["val_loss"], "s-", label="validation")
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats per character)")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def sample(model, vocabulary, args):
    prompt = encode(args.prompt, vocabulary)[None]
    length = args.sample_length
    if model.max_length is not None:
        length = min(length, model.max_length - len(args.prompt))
    return decode(model.generate(prompt, length, args.temperature, seed=args.seed)[0], vocabulary)


def report(model, validation, vocabulary, best_step, start, run_dir, args):
    """Score the model on the whole validation split, sample from it, write and print both."""
    loss = model.evaluate(validation, verbose=0)
    text = sample(model, vocabulary, args)
    (run_dir / "sample.txt").write_text(text, encoding="utf-8")
    results = {
        "validation_loss": loss,
        "validation_perplexity": float(np.exp(loss)),
        "step": best_step,
        "seconds": round(time.monotonic() - start, 1),
    }
    write_json(run_dir / "results.json", results)
    print(f"\n--- sample ---\n{text}\n--------------\n")
    print(f"best validation loss: {loss:.4f} nats per character, over the whole split")
    print(f"perplexity: {results['validation_perplexity']:.3f} per character")
    print(f"step: {best_step} of {args.steps}")
    print(f"seconds: {results['seconds']}")
    print(f"run folder: {run_dir}")


def run(model, text, vocabulary, start, run_dir, args):
    """Train, plot and report; returns the exit code."""
    split = int(TRAINING_PART * len(text))
    training_ids, validation_ids = encode(text[:split], vocabulary), encode(text[split:], vocabulary)
    print(
        f"{args.data}: {len(training_ids):,} characters to train on, {len(validation_ids):,} to validate, "
        f"{len(vocabulary)} different; {model.count_params():,} parameters; run folder {run_dir}",
        flush=True,
    )
    sampled_validation = consecutive_windows(validation_ids, args, limit=VALIDATION_WINDOWS)
    history = train(model, random_windows(training_ids, args), sampled_validation, run_dir, args)
    plot_losses(history, run_dir / "loss.png")
    if not np.isfinite(history["val_loss"]).any():
        print("error: the validation loss is never finite; try a lower --learning-rate", file=sys.stderr)
        return 1
    model.load_weights(run_dir / "model.keras")
    best_step = history["step"][int(np.nanargmin(history["val_loss"]))]
    report(model, consecutive_windows(validation_ids, args), vocabulary, best_step, start, run_dir, args)
    return 0


def main(argv=None):
    start = time.monotonic()
    parser, args = parse(sys.argv[1:] if argv is None else argv)
    keras.utils.set_random_seed(args.seed)
    try:
        check_options(args)
        text = read_text(args.data)
        check_text(text, args)
        vocabulary = sorted(set(text))
        model = make_model(len(vocabulary), args)
        run_dir = make_run_dir(args)
    except (ValueError, TypeError, OSError) as error:  # TypeError: of --mixer-options
        parser.error(str(error))
    write_json(run_dir / "settings.json", vars(args))
    write_json(run_dir / "vocabulary.json", vocabulary)
    try:
        return run(model, text, vocabulary, start, run_dir, args)
    except KeyboardInterrupt:
        print(f"\nstopped; what was saved is in {run_dir}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
