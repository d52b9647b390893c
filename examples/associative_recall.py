"""How many pairs a fast-weights memory can hold, and whether it can replace one.

    python examples/associative_recall.py
    python examples/associative_recall.py --setting reused
    python examples/associative_recall.py --full

The retrieval task of arXiv:2102.11174, section 6.1: pairs of a key and a value are written to a memory,
which is then asked for the value last written with one of the keys. The loss is half the squared
distance to that value, a one-hot vector; a number of keys counts as learnt at a loss of 0.001.

unique: every key comes once. For more and more keys, which feature map holds how many, with the sum rule?
reused: twice as many pairs as keys, which are drawn with replacement. Does the delta rule replace values,
        where the sum rule cannot? (We validate on sequences as long as in training; the paper's code takes
        half as long ones, whose keys are replaced less often.)

Without --full the keys are smaller and fewer. The output folder gets the settings and all losses
(results.json) and their plot (losses.png).
"""

import argparse
import itertools
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up notes would bury an error message.

import keras  # noqa: E402
import matplotlib.figure  # noqa: E402
import matplotlib.ticker  # noqa: E402
import tensorflow as tf  # noqa: E402
from command_line import OneLineParser, count, number, positive, seed, write_json  # noqa: E402

from favor_keras.ops import create_projection_matrix, delta_rule, dpfp, get_kernel, linear_attention  # noqa: E402
from favor_keras.ops.dpfp import sum_normalized  # noqa: E402

LEARNT = 1e-3
FEATURE_MAPS = {
    "elu": "elu + 1",
    "dpfp1": "DPFP nu=1",
    "dpfp2": "DPFP nu=2",
    "dpfp3": "DPFP nu=3",
    "favor": "FAVOR+ softmax",
}
UPDATE_RULES = ("delta", "sum")
REDUCED = {
    "key_size": 16,
    "unique_keys": [8, 16, 24, 32, 48, 64, 80, 96],
    "reused_keys": [5, 15, 25],
    "steps": 3000,
    "learning_rate": 3e-3,
}
FULL = {
    "key_size": 64,
    "unique_keys": list(range(20, 601, 20)),
    "reused_keys": [20, 60, 100],
    "steps": 100_000,
    "learning_rate": 1e-3,
}
UNIQUE_MAPS = ("elu", "dpfp1", "dpfp2", "dpfp3")
REUSED_MAPS = ("dpfp1",)
MAX_FAILURES = 2  # in a row, after which a feature map is not asked to hold still more keys
VALIDATION_SIZE = 512  # sequences
PATIENCE = 10  # validations without a better loss
PAPER_KEY_SIZE = 64
PAPER_CAPACITY = {"elu": 40, "dpfp1": 100, "dpfp2": 240, "dpfp3": 340}
PAPER_LOSSES = {  # of DPFP nu=1, by the number of keys
    "delta": {20: 0.0008, 60: 0.0049, 100: 0.0001},
    "sum": {20: 0.097, 60: 0.103, 100: 0.111},
}


class AssociativeMemory(keras.Model):
    """Writes pairs to a fast-weights memory and reads the value of one key.

    Keys and write strengths are projections of a pair, a learned embedding beside a one-hot value; the
    query is a projection of its embedding alone. Call it with a dict of ids: key [B, T], value [B, T] and
    query [B]. It returns what was read, [B, num_keys].
    """

    def __init__(self, num_keys, key_size, feature_map, update_rule, seed=0):
        super().__init__()
        self.num_keys = num_keys
        self.feature_map = feature_map
        self.update_rule = update_rule
        seeds = itertools.count(seed)
        limit = key_size**-0.5

        def projection(name):
            uniform = keras.initializers.RandomUniform(-limit, limit, seed=next(seeds))
            return keras.layers.Dense(key_size, kernel_initializer=uniform, name=name)

        embedding_size = int(1.1 * 2 * num_keys)
        normal = keras.initializers.RandomNormal(stddev=1.0, seed=next(seeds))
        self.embedding = keras.layers.Embedding(num_keys, embedding_size, embeddings_initializer=normal)
        self.query_dense = projection("query_dense")
        self.key_dense = projection("key_dense")
        if update_rule == "delta":
            glorot = keras.initializers.GlorotUniform(seed=next(seeds))
            self.beta_dense = keras.layers.Dense(1, "sigmoid", kernel_initializer=glorot, name="beta_dense")
        self.projection_matrix = None
        if feature_map == "favor":  # as many features as DPFP with nu = 1
            self.projection_matrix = create_projection_matrix(2 * key_size, key_size, seed)

    def call(self, inputs):
        value = tf.one_hot(inputs["value"], self.num_keys)
        pair = tf.concat([value, self.embedding(inputs["key"])], axis=-1)
        query, _ = self._features(self.query_dense(self.embedding(inputs["query"])[:, None]), True)
        key, log_scale = self._features(self.key_dense(pair), False)
        value = value[:, :, None]
        if self.update_rule == "sum":
            return linear_attention(query, key, value, key_log_scale=log_scale)[:, 0, 0]
        query, key = sum_normalized(query), sum_normalized(key)
        _, fast_weights = delta_rule(key, key, value, self.beta_dense(pair), return_state=True)
        return tf.einsum("bthk,bhkd->bthd", query, fast_weights)[:, 0, 0]

    def _features(self, data, is_query):
        """Features [B, T, 1, M] of [B, T, K], for the one head there is, and log scales [B, T, 1] or None."""
        data = data[:, :, None]
        if self.feature_map.startswith("dpfp"):
            return dpfp(data, int(self.feature_map[-1]), normalize=False), None
        kernel = get_kernel({"elu": "elu", "favor": "softmax"}[self.feature_map])
        return kernel.scaled_features(data, is_query, self.projection_matrix)


def half_squared_error(target, prediction):
    return tf.reduce_sum(tf.square(target - prediction), axis=-1) / 2


def draw_sequences(batch_size, num_keys, reused, seed):
    """Random pairs, a query for each sequence and the value that answers it.

    Args:
        batch_size: B, the number of sequences.
        num_keys: the number of different keys, and of values.
        reused: whether to draw 2 num_keys keys and values with replacement, or all of them once.
        seed: integers [2] that everything depends on.

    Returns:
        A dict of ids, key [B, T], value [B, T] and query [B], and ids [B] of the answers.
    """
    length = 2 * num_keys if reused else num_keys
    key_seed, value_seed, query_seed = tf.unstack(tf.random.split(seed, 3))
    key, value = (_draw_ids([batch_size, length], num_keys, reused, ids_seed) for ids_seed in (key_seed, value_seed))
    asked = tf.random.stateless_uniform([batch_size], query_seed, 0, length, tf.int32)
    query = tf.gather(key, asked, batch_dims=1)
    is_query = tf.equal(key, query[:, None])
    last = tf.reduce_max(tf.where(is_query, tf.range(length), -1), axis=1)
    return {"key": key, "value": value, "query": query}, tf.gather(value, last, batch_dims=1)


def _draw_ids(shape, num_ids, reused, seed):
    if reused:
        return tf.random.stateless_uniform(shape, seed, 0, num_ids, tf.int32)
    return tf.argsort(tf.random.stateless_uniform(shape, seed), axis=-1)


def sequences(batch_size, num_keys, reused, seed):
    """Endless batches of sequences and one-hot answers."""

    def draw(i):
        inputs, answer = draw_sequences(batch_size, num_keys, reused, tf.stack([tf.cast(seed, tf.int64), i]))
        return inputs, tf.one_hot(answer, num_keys)

    return tf.data.Dataset.counter().map(draw).prefetch(tf.data.AUTOTUNE)


class StopWhenLearnt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.model.stop_training or logs["val_loss"] <= LEARNT


def train(setting, num_keys, feature_map, update_rule, args):
    """Train a memory until it has learnt its task or learns no more: a dict with its best loss."""
    start = time.monotonic()
    keras.utils.clear_session()  # forget the model of the last run
    reused = setting == "reused"
    model = AssociativeMemory(num_keys, args.key_size, feature_map, update_rule, args.seed)
    model.compile(
        keras.optimizers.Adam(args.learning_rate), half_squared_error, steps_per_execution=args.validate_every
    )
    validation = sequences(VALIDATION_SIZE, num_keys, reused, args.seed + 1).take(1).cache()
    history = model.fit(
        sequences(args.batch_size, num_keys, reused, args.seed),
        epochs=args.steps // args.validate_every,
        steps_per_epoch=args.validate_every,
        validation_data=validation,
        callbacks=[
            StopWhenLearnt(),
            keras.callbacks.EarlyStopping("val_loss", patience=PATIENCE),
            keras.callbacks.TerminateOnNaN(),
        ],
        shuffle=False,
        verbose=0,
    )
    result = {
        "setting": setting,
        "feature_map": feature_map,
        "update_rule": update_rule,
        "num_keys": num_keys,
        "loss": min(filter(math.isfinite, history.history["val_loss"]), default=None),
        "steps": int(model.optimizer.iterations),
        "seconds": round(time.monotonic() - start, 1),
    }
    if result["loss"] is None:
        raise FloatingPointError(f"the loss with {num_keys} keys is never finite; try a lower --learning-rate")
    print(
        f"{setting}: {FEATURE_MAPS[feature_map]:14} {update_rule:5} {num_keys:4} keys: loss {result['loss']:.5f} "
        f"after {result['steps']:6} steps, {result['seconds']:6.1f} s",
        flush=True,
    )
    return result


def sweep(args):
    """The results of all runs, one by one."""
    if args.setting in ("unique", "both"):
        for feature_map in args.feature_maps or UNIQUE_MAPS:
            failures = 0
            for num_keys in args.num_keys or args.unique_keys:
                result = train("unique", num_keys, feature_map, "sum", args)
                yield result
                failures = 0 if result["loss"] <= LEARNT else failures + 1
                if failures == MAX_FAILURES:
                    break
    if args.setting in ("reused", "both"):
        for feature_map, update_rule in itertools.product(args.feature_maps or REUSED_MAPS, UPDATE_RULES):
            for num_keys in args.num_keys or args.reused_keys:
                yield train("reused", num_keys, feature_map, update_rule, args)


def curves(results, setting):
    """The runs of a setting by (feature map, update rule), each a dict of losses by the number of keys."""
    losses = {}
    for result in results:
        if result["setting"] == setting:
            curve = losses.setdefault((result["feature_map"], result["update_rule"]), {})
            curve[result["num_keys"]] = result["loss"]
    return losses


def capacity(losses):
    """The largest number of keys that was learnt, 0 for none."""
    return max((num_keys for num_keys, loss in losses.items() if loss <= LEARNT), default=0)


def print_tables(results, key_size):
    unique, reused = curves(results, "unique"), curves(results, "reused")
    sizes = f"{f'key size {key_size}':>14} {f'paper, {PAPER_KEY_SIZE}':>14}"
    if unique:
        print(f"\nUnique keys, sum rule: the largest number learnt to a loss of {LEARNT}")
        print(f"{'feature map':16} {sizes}")
        for (feature_map, _), losses in unique.items():
            paper = PAPER_CAPACITY.get(feature_map, "-")
            print(f"{FEATURE_MAPS[feature_map]:16} {capacity(losses):14} {paper:>14}")
    if reused:
        print("\nReused keys: the best loss (paper: as many keys for their size)")
        print(f"{'feature map':16} {'rule':6} {'keys':>6} {sizes}")
        for (feature_map, update_rule), losses in reused.items():
            paper = PAPER_LOSSES[update_rule] if feature_map == "dpfp1" else {}
            for num_keys, loss in losses.items():
                paper_loss = paper.get(num_keys * PAPER_KEY_SIZE / key_size, "-")
                print(f"{FEATURE_MAPS[feature_map]:16} {update_rule:6} {num_keys:6} {loss:14.4f} {paper_loss:>14}")


def plot(results, path):
    titles = {"unique": "Unique keys, sum rule", "reused": "Reused keys, two writes per key on average"}
    settings = [setting for setting in titles if curves(results, setting)]
    figure = matplotlib.figure.Figure(figsize=(6 * len(settings), 4.5), layout="constrained")
    for setting, axes in zip(settings, figure.subplots(1, len(settings), squeeze=False)[0], strict=True):
        for (feature_map, update_rule), losses in curves(results, setting).items():
            label = FEATURE_MAPS[feature_map] if setting == "unique" else f"{FEATURE_MAPS[feature_map]}, {update_rule}"
            axes.semilogy(losses.keys(), losses.values(), "o-", label=label)
        axes.axhline(LEARNT, color="grey", linestyle=":", label="learnt")
        axes.set(xlabel="keys", ylabel="best loss", title=titles[setting])
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)  # below: the curves are everywhere
    figure.savefig(path, dpi=150)


def make_parser():
    parser = OneLineParser(
        prog="associative_recall.py",
        description="How many pairs a fast-weights memory can hold, and whether it can replace one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--setting", choices=["unique", "reused", "both"], default="both", help="whether keys come more than once")
    add("--full", action="store_true", help="keys of the paper's size and number; takes many hours")
    add(
        "--feature-maps",
        nargs="+",
        choices=list(FEATURE_MAPS),
        help=f"None is {' '.join(UNIQUE_MAPS)} for unique keys, {' '.join(REUSED_MAPS)} for reused ones",
    )
    add("--num-keys", nargs="+", type=count, help="numbers of keys to try, ascending; None is the paper's, reduced")
    add(
        "--key-size",
        type=number(int, lambda n: n >= 2, "a whole number of at least 2"),
        help="size of the keys before the feature map",
    )
    add("--steps", type=count, help="most training steps for a number of keys")
    add("--validate-every", type=count, default=100, help="steps between validations; must divide --steps")
    add("--batch-size", type=count, default=32, help="sequences in a training step")
    add(
        "--learning-rate",
        type=positive,
        help="of Adam",
    )
    add(
        "--seed",
        type=seed,
        default=1,
        help="all random numbers depend on it",
    )
    add("--output", type=Path, default=Path("runs", "associative_recall"), help="folder for the results")
    return parser


def parse(argv):
    """The parser and the options: the reduced or the full sizes under the flags that are given."""
    parser = make_parser()
    parser.set_defaults(**REDUCED)
    args = parser.parse_args(argv)
    if args.full:
        parser.set_defaults(**FULL)
        args = parser.parse_args(argv)
    return parser, args


def check_options(args):
    if args.steps % args.validate_every:
        raise ValueError(
            f"--steps must be a multiple of --validate-every, received {args.steps} and {args.validate_every}"
        )
    if args.num_keys and args.num_keys != sorted(set(args.num_keys)):
        raise ValueError(f"--num-keys must be ascending, received {' '.join(map(str, args.num_keys))}")


def main(argv=None):
    start = time.monotonic()
    parser, args = parse(sys.argv[1:] if argv is None else argv)
    tf.get_logger().setLevel("ERROR")  # or it warns that every new model is traced
    try:
        check_options(args)
        args.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    results = []
    try:
        for result in sweep(args):
            results.append(result)
            write_json(args.output / "results.json", {"settings": vars(args), "results": results})
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; the results so far are in {args.output}", file=sys.stderr)
        return 130
    plot(results, args.output / "losses.png")
    print_tables(results, args.key_size)
    print(f"\nseconds: {time.monotonic() - start:.1f}\noutput folder: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
