"""Train a character language model on a text, then let it write.

    python examples/char_lm.py
    python examples/char_lm.py --data my_text.txt --steps 5000 --prompt "Once "
    python examples/char_lm.py --preset nanogpt_cpu --mixer fast_weights
    python examples/char_lm.py --resume runs/char_lm-python_docs-favor-1

Losses are in nats per character. The run folder gets the model with the lowest validation loss
(model.keras), the vocabulary, the settings, the history (CSV), its curves (PNG), the results, the sample
and a backup. generate.py and serve.py use such a folder.
"""

import argparse
import csv
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up notes would bury an error message.

import keras  # noqa: E402
import matplotlib.figure  # noqa: E402
import matplotlib.ticker  # noqa: E402
import numpy as np  # noqa: E402
import presets  # noqa: E402
from command_line import (  # noqa: E402
    OneLineParser,
    add_sampling,
    count,
    json_object,
    not_negative,
    positive,
    seed,
    share,
    write_json,
)
from strategies import (  # noqa: E402
    STRATEGIES,
    Backup,
    check_compile_options,
    cure,
    explain_lost_workers,
    is_chief,
    is_multi_worker,
    make_strategy,
    restore,
    shard,
    worker_folder,
    write_whole,
)
from texts import check_text, consecutive_windows, random_windows, read_text, split_text  # noqa: E402

from favor_keras import CausalLM, NoamSchedule, RedrawProjections  # noqa: E402
from favor_keras.models.mixers import BLOCKS, MIXERS  # noqa: E402
from favor_keras.text import Characters  # noqa: E402

WARM_UP_PART = 0.1  # of the steps, unless --warm-up-steps says how many
VALIDATE_EVERY = 250
VALIDATION_WINDOWS = 256  # scored during training; the final score takes the whole split
LONGER_BY = (4, 16)  # the windows of the final score, for models that take any length
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def make_parser():
    parser = OneLineParser(
        prog="char_lm.py",
        description="Train a character language model on a text, then let it write.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=sorted(presets.PRESETS), default="quick", help="settings, which other flags override")
    add("--list-presets", action="store_true", help="print the presets and end")
    add("--resume", type=Path, help="run folder to go on with, after a kill; takes the settings from there")

    add("--data", help="python_docs, tiny_shakespeare or a UTF-8 text file")
    add("--mixer", choices=sorted(MIXERS), default="favor", help="what mixes the sequence")
    add("--mixer-options", type=json_object, default={}, help="arguments of the mixer's layer, as JSON")
    add("--block-options", type=json_object, help="arguments of the blocks around it, as JSON")
    add("--layers", type=count, help="number of blocks")
    add("--heads", type=count, help="heads of every mixer")
    add("--hidden-size", type=count, help="size of the embedding and the blocks")
    add("--feed-forward-size", type=count, help="size inside the feed-forward networks; None is 4 * --hidden-size")
    add("--position-embedding", action="store_true", help="learn an embedding of the position; limits the length")
    add("--dropout", type=share, help="dropout rate")

    add("--steps", type=count, help="training steps; None is the number of the preset")
    add("--epochs", type=count, help="instead of --steps: passes over the text")
    add("--batch-size", type=count, help="windows in a training step")
    add("--block-size", type=count, help="characters in a window")
    add("--schedule", choices=("cosine", "noam"), default="cosine", help="of the learning rate")
    add("--learning-rate", type=positive, help="highest learning rate; with noam its factor")
    add("--warm-up-steps", type=count, help="steps until then; None is a tenth of all")
    add("--weight-decay", type=not_negative, default=0.1, help="of the matrices")
    add("--beta-2", type=share, default=0.99, help="of AdamW")
    add("--clip-norm", type=positive, default=1.0, help="greatest norm of the gradient")
    add("--precision", choices=POLICIES, default="float32", help="Keras' dtype policy")
    add("--jit", action="store_true", help="compile the training step with XLA")
    add("--strategy", choices=STRATEGIES, default="auto", help="devices to train on, see docs/distributed.md")

    add("--validate-every", type=count, help=f"steps between validations; None is {VALIDATE_EVERY}, or a pass")
    add("--patience", type=count, help="stop after so many validations without a better one")
    add("--tensorboard", action="store_true", help="also log for TensorBoard, which must be installed")
    add("--seed", type=seed, default=1, help="all random numbers depend on it")
    add("--run-dir", type=Path, help="new or empty folder for the results; None takes the next free runs/char_lm-...")
    add("--prompt", default="The ", help="the sample goes on from here")
    add("--sample-length", type=count, default=400, help="characters to write, as many as a limit on the length allows")
    add_sampling(parser)
    return parser


def parse(argv):
    """The parser and the options: a preset's settings under the flags that are given, or a resumed run's."""
    parser = make_parser()
    quiet = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])[0]
    if quiet.resume:
        return parser, resumed(parser, quiet, argv)
    parser.set_defaults(**presets.PRESETS[quiet.preset])
    parser.set_defaults(steps=None, epochs=None)
    args = parser.parse_args(argv)
    if args.steps and args.epochs:
        parser.error(f"--steps and --epochs cannot be combined, received {args.steps} and {args.epochs}")
    if not args.steps and not args.epochs:
        args.steps, args.epochs = (presets.PRESETS[args.preset].get(name) for name in ("steps", "epochs"))
    return parser, args


def resumed(parser, quiet, argv):
    """The options of a run that is to go on; of the command line only --strategy counts, and no other may be there."""
    given = {word.split("=")[0] for word in argv if word.startswith("--")}
    if given - {"--resume", "--strategy"}:
        others = ", ".join(sorted(given - {"--resume", "--strategy"}))
        parser.error(f"--resume takes the settings of the run, it cannot be combined with {others}")
    path = quiet.resume / "settings.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--resume: cannot read {str(path)!r}: {error}")
    return argparse.Namespace(**{**settings, "resume": quiet.resume, "run_dir": None, "strategy": quiet.strategy})


def check_options(args, strategy):
    if not args.prompt:
        raise ValueError("--prompt must have at least one character")
    if has_limit(args) and len(args.prompt) >= args.block_size:
        raise ValueError(
            f"--prompt must be shorter than --block-size with --mixer {args.mixer} or --position-embedding"
        )
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs TensorBoard: pip install tensorboard")
    check_compile_options(strategy, args.jit or "auto")
    if is_multi_worker(strategy) and not (args.run_dir or args.resume):
        raise ValueError("--run-dir must be given with several workers, and be the same for all")
    if args.run_dir and args.run_dir.is_dir() and any(files_of_this_worker(args.run_dir, strategy)):
        raise ValueError(f"--run-dir must be a new or empty folder, {args.run_dir} has files in it")


def files_of_this_worker(run_dir, strategy):
    folder = worker_folder(run_dir, strategy)
    entries = folder.iterdir() if folder.is_dir() else ()
    return [entry for entry in entries if not (is_multi_worker(strategy) and entry.name.startswith("worker_"))]


def set_numbers_of_steps(args, num_characters):
    """Steps of --epochs passes over so many characters; steps between validations that --steps is a multiple of."""
    steps_of_a_pass = max(num_characters // (args.batch_size * args.block_size), 1)
    if args.epochs:
        args.steps = args.epochs * steps_of_a_pass
    if not args.validate_every:
        args.validate_every = steps_of_a_pass if args.epochs else min(args.steps, VALIDATE_EVERY)
    if args.steps % args.validate_every:
        raise ValueError(
            f"--steps must be a multiple of --validate-every, received {args.steps} and {args.validate_every}"
        )


def has_limit(args):
    return args.mixer in BLOCKS or args.position_embedding


def make_model(vocabulary_size, args):
    model = CausalLM(
        vocabulary_size,
        hidden_size=args.hidden_size,
        num_layers=args.layers,
        num_heads=args.heads,
        feed_forward_size=args.feed_forward_size,
        mixer=args.mixer,
        mixer_options=args.mixer_options,
        block_options=args.block_options,
        dropout=args.dropout,
        max_length=args.block_size if has_limit(args) else None,
        position_embedding=args.position_embedding,
        seed=args.seed,
        dtype=args.precision,
    )
    model.build((None, args.block_size))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(args), loss, jit_compile=args.jit or "auto")
    model.optimizer.build(model.trainable_variables)  # else `fit` makes its variables, and traces the first step twice
    return model


def make_optimizer(args):
    optimizer = keras.optimizers.AdamW(
        make_schedule(args), weight_decay=args.weight_decay, beta_2=args.beta_2, global_clipnorm=args.clip_norm
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def make_schedule(args):
    warm_up_steps = args.warm_up_steps or math.ceil(WARM_UP_PART * args.steps)
    if args.schedule == "noam":
        return NoamSchedule(args.hidden_size, warm_up_steps, factor=args.learning_rate)
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=args.learning_rate,
        warmup_steps=warm_up_steps,
        decay_steps=max(args.steps - warm_up_steps, 1),
        alpha=0.1,
    )


def make_run_dir(args):
    """The folder that --resume or --run-dir names, or the first free one of runs/char_lm-DATA-MIXER-1, -2, ..."""
    named = args.resume or args.run_dir
    if named:
        named.mkdir(parents=True, exist_ok=True)
        return named
    for i in itertools.count(1):
        run_dir = Path("runs", f"char_lm-{Path(args.data).stem}-{args.mixer}-{i}")
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            continue


class KeepBest(keras.callbacks.Callback):
    """Keeps the model, or its weights, with the lowest validation loss in a file that is always whole."""

    def __init__(self, path, lowest):
        super().__init__()
        self.path, self.lowest = path, lowest

    def on_epoch_end(self, epoch, logs=None):
        if logs["val_loss"] < self.lowest:
            self.lowest = logs["val_loss"]
            only_weights = self.path.name.endswith(".weights.h5")
            write_whole(self.path, self.model.save_weights if only_weights else self.model.save)


class SeedFromEpoch(keras.callbacks.Callback):
    """Sets the counters of dropout, which no file keeps, by the epoch: a resumed run drops what another would have."""

    def on_epoch_begin(self, epoch, logs=None):
        for variable in self.model.variables:
            if variable.name == "seed_generator_state":
                seed_and_count = keras.ops.convert_to_numpy(variable)
                variable.assign([seed_and_count[0], epoch * 2**20])


class TrainingTime(keras.callbacks.Callback):
    """Adds the seconds of training steps, without validation, of all epochs but the first, in which Keras compiles."""

    def __init__(self):
        super().__init__()
        self.seconds, self.epochs, self.start = 0.0, 0, None

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.monotonic()

    def on_test_begin(self, logs=None):
        if self.start is not None:
            self.epochs += 1
            self.seconds = 0.0 if self.epochs == 1 else self.seconds + time.monotonic() - self.start

    def characters_per_second(self, args):
        steps = (self.epochs - 1) * args.validate_every
        return steps * args.batch_size * args.block_size / self.seconds if self.seconds else None


class StopEarly(keras.callbacks.EarlyStopping):
    """`EarlyStopping` that knows the validation losses from before a resumption."""

    def __init__(self, patience, losses):
        super().__init__(patience=patience)
        self.losses = losses

    def on_train_begin(self, logs=None):
        super().on_train_begin()
        for epoch, loss in enumerate(self.losses):
            self.on_epoch_end(epoch, {"val_loss": loss})


def read_history(run_dir):
    """The columns of history.csv."""
    path = run_dir / "history.csv"
    if not path.exists():
        return {"step": [], "loss": [], "val_loss": []}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in ("step", "loss", "val_loss")}


def cut_history(run_dir, num_epochs):
    """Drop the rows of epochs whose weights a kill has lost."""
    path = run_dir / "history.csv"
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[: num_epochs + 1]))


def train(model, training_ids, validation, run_dir, args, strategy):
    """Train from the last backup, or the beginning, to the end; returns the characters per second."""
    first_epoch = restore(model, run_dir / "backup", strategy)
    cut_history(run_dir, first_epoch)
    before = read_history(run_dir)
    clock = TrainingTime()

    def add_step_and_perplexity(epoch, logs):
        logs["step"] = (epoch + 1) * args.validate_every
        logs["val_perplexity"] = float(np.exp(logs["val_loss"]))

    callbacks = [
        SeedFromEpoch(),
        clock,
        keras.callbacks.LambdaCallback(on_epoch_end=add_step_and_perplexity),  # before those that write it
        KeepBest(best_file(run_dir, strategy), min(before["val_loss"], default=math.inf)),
        keras.callbacks.CSVLogger(run_dir / "history.csv", append=first_epoch > 0),
        keras.callbacks.TerminateOnNaN(),
    ]
    if args.mixer_options.get("redraw_interval"):
        callbacks.append(RedrawProjections())
    callbacks.append(Backup(run_dir / "backup"))  # last: what it has, the files above have too
    if args.patience:
        callbacks.append(StopEarly(args.patience, before["val_loss"]))
    if args.tensorboard:
        callbacks.append(keras.callbacks.TensorBoard(run_dir / "tensorboard"))
    windows = random_windows(training_ids, args, first_epoch * args.validate_every)
    model.fit(
        shard(windows, strategy),
        initial_epoch=first_epoch,
        epochs=args.steps // args.validate_every,
        steps_per_epoch=args.validate_every,
        validation_data=shard(validation, strategy),
        callbacks=callbacks,
        shuffle=False,  # the windows are at random places already
        verbose=1 if sys.stdout.isatty() else 2,
    )
    return clock.characters_per_second(args)


def best_file(run_dir, strategy):
    """What keeps the best weights: the model itself, which only the chief writes."""
    return run_dir / ("model.keras" if is_chief(strategy) else "best.weights.h5")


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


def write_sample(model, characters, args):
    """The text after --prompt, and the characters per second of writing it."""
    length = args.sample_length
    if model.max_length is not None:
        length = min(length, model.max_length - len(args.prompt))
    prompt = characters.encode(args.prompt)[None]

    def write():
        return model.generate(prompt, length, args.temperature, args.top_k, args.top_p, args.seed)[0]

    text = characters.decode(write())
    start = time.monotonic()
    write()  # once more, as the first time includes the making of the graph
    return text, length / (time.monotonic() - start)


def input_share(windows, args, characters_per_second):
    """The seconds that the input pipeline needs for a batch, over those of a training step."""
    num_batches = 200
    batches = iter(windows.take(num_batches + 1))
    next(batches)
    start = time.monotonic()
    for _ in batches:
        pass
    seconds = (time.monotonic() - start) / num_batches
    return seconds * characters_per_second / (args.batch_size * args.block_size)


def score(model, validation_ids, args, strategy):
    """The mean loss over the whole validation split, in windows of the block and longer ones: a dict by their size."""
    blocks = (1, *LONGER_BY) if model.max_length is None and not is_multi_worker(strategy) else (1,)
    fitting = [n for n in blocks if n * args.block_size < len(validation_ids)]
    windows = {n: consecutive_windows(validation_ids, args, blocks=n) for n in fitting}
    return {n: model.evaluate(shard(windows[n], strategy), verbose=0) for n in fitting}


def report(model, characters, losses, history, rates, run_dir, args, start):
    """Sample from the model; write and print the results."""
    text, writing = write_sample(model, characters, args)
    (run_dir / "sample.txt").write_text(text, encoding="utf-8")
    results = {
        "validation_loss": losses[1],
        "validation_perplexity": float(np.exp(losses[1])),
        **{f"validation_loss_{n}_blocks": losses[n] for n in losses if n > 1},
        "step": int(history["step"][int(np.nanargmin(history["val_loss"]))]),
        "parameters": model.count_params(),
        **rates,
        "writing_characters_per_second": writing,
        "seconds": round(time.monotonic() - start, 1),
    }
    write_json(run_dir / "results.json", results)
    print(f"\n--- sample ---\n{text}\n--------------\n")
    print(f"best validation loss: {losses[1]:.4f} nats per character, over the whole split")
    for name, value in results.items():
        if value is not None:
            print(f"  {name.replace('_', ' '):<36}{value:>14,.{0 if isinstance(value, int) else 4}f}")
    print(f"run folder: {run_dir}")


def run(model, text, characters, start, run_dir, args, strategy):
    """Train, plot and report; returns the exit code."""
    training_ids, validation_ids = map(characters.encode, split_text(text))
    print(
        f"{args.data}: {len(training_ids):,} characters to train on, {len(validation_ids):,} to validate, "
        f"{len(characters)} different; {model.count_params():,} parameters; run folder {run_dir}",
        flush=True,
    )
    validation = consecutive_windows(validation_ids, args, limit=VALIDATION_WINDOWS)
    training = train(model, training_ids, validation, run_dir, args, strategy)
    history = read_history(run_dir)
    if not np.isfinite(history["val_loss"]).any():
        print("error: the validation loss is never finite; try a lower --learning-rate", file=sys.stderr)
        return 1
    with strategy.scope():
        model.load_weights(best_file(run_dir, strategy))
    losses = score(model, validation_ids, args, strategy)
    if is_chief(strategy):
        plot_losses(history, run_dir / "loss.png")
        rates = {"training_characters_per_second": training}
        if training:
            rates["input_share_of_a_step"] = input_share(random_windows(training_ids, args), args, training)
        report(model, characters, losses, history, rates, run_dir, args, start)
    return 0


def main(argv=None):
    start = time.monotonic()
    parser, args = parse(sys.argv[1:] if argv is None else argv)
    if args.list_presets:
        print(presets.description())
        return 0
    try:
        strategy = make_strategy(args.strategy)
        keras.utils.set_random_seed(args.seed)
        check_options(args, strategy)
        text = read_text(args.data)
        check_text(text, args)
        characters = Characters.of(text)
        if unknown := characters.unknown(args.prompt):
            raise ValueError(f"--prompt must only use characters of the text, which does not have {unknown}")
        set_numbers_of_steps(args, len(split_text(text)[0]))
        with strategy.scope():
            model = cure(make_model(len(characters), args))
        run_dir = worker_folder(make_run_dir(args), strategy)
        run_dir.mkdir(exist_ok=True)
    except (ValueError, TypeError, OSError) as error:  # TypeError: of --mixer-options
        parser.error(str(error))
    if not args.resume:
        write_json(run_dir / "settings.json", vars(args))
        characters.save(run_dir / "vocabulary.json")
    try:
        with explain_lost_workers(strategy):
            return run(model, text, characters, start, run_dir, args, strategy)
    except KeyboardInterrupt:
        if is_chief(strategy) and not (run_dir / "model.keras").exists():
            model.save(run_dir / "model.keras")
        print(f"\nstopped; go on with --resume {run_dir}, where the model is too", file=sys.stderr)
        return 130
    except ConnectionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
