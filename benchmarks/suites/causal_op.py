"""Causal linear attention on given features, against other ways to compute the same.

The library's op gets [B, T, H, .]; the baselines that are faster with the time first get [T, B, H, .], so no one
pays for a transposition that it did not need. The sums step by step are measured in a graph only, as XLA needs more
than ten minutes to compile those of 1,024 positions; a baseline is left out where it needs more than 300 steps, or
more than a gigabyte for one of its tensors.
"""

from functools import partial

import numpy as np
import tensorflow as tf

from benchmarks.baselines import cumulative_sum_attention, per_step_attention, quadratic_attention
from benchmarks.bench import LIBRARY, Candidate, least, ratio, sizes
from benchmarks.measure import Program
from benchmarks.report import Plot
from favor_keras.ops import linear_attention
from favor_keras.ops.linear_attention import CAUSAL_CHUNK_SIZE

FORWARD, BACKWARD = "forward", "forward + backward"
MODES = ("graph", "xla")
NEVER_COMPILES = ("per-step sums", "xla")  # not within ten minutes at T = 1,024: every token has its own nodes
LENGTHS = (64, 256, 1024, 4096, 16384, 65536)
NUM_FEATURES = (64, 128, 256, 512)
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
BASELINES = {
    "per-step sums": per_step_attention,
    "cumulative sums": cumulative_sum_attention,
    "quadratic": quadratic_attention,
}
TIME_FIRST = ("per-step sums", "cumulative sums")
LARGE_PRODUCT = 2048

PLOTS = [
    Plot(f"{case}_{y}", f"Causal linear attention, {BACKWARD}, {title}", "T", y, where={"case": case})
    for case, title in (("B1", "B1 H8 M128 D64"), ("BT65536", "B T = 65,536, H2 M128 D64"))
    for y in ("milliseconds", "peak_mb")
]


def run(bench):
    main_shape = {"B": 4, "H": 8, "T": 256 if bench.quick else 1024, "M": 128, "D": 64}
    _compare(bench, "main", main_shape, FORWARD, BASELINES)
    rows = _compare(bench, "main", main_shape, BACKWARD, BASELINES)
    if not bench.quick:  # what is promised is of 1,024 positions
        _claim_efficiency(bench, main_shape)
        for name, factor in (("per-step sums", 12), ("cumulative sums", 40)):
            _claim(bench, rows, "milliseconds", name, factor)
        _claim(bench, rows, "peak_mb", "cumulative sums", 10)
    for dtype in TOLERANCES:
        for num_features in NUM_FEATURES[:2] if bench.quick else NUM_FEATURES:
            _compare(bench, "features", {**main_shape, "M": num_features}, BACKWARD, ["quadratic"], dtype)
    for length in LENGTHS[:3] if bench.quick else LENGTHS:
        for case, batch_size, num_heads in (("B1", 1, 8), ("BT65536", 65536 // length, 2)):
            shape = {"B": batch_size, "H": num_heads, "T": length, "M": 128, "D": 64}
            _compare(bench, case, shape, BACKWARD, filter(partial(_is_worth_a_try, shape), BASELINES))


def _compare(bench, case, shape, direction, baselines, dtype="float32"):
    candidates = [
        Candidate(name, mode, partial(program, name, shape, direction == BACKWARD, dtype))
        for name in (LIBRARY, *baselines)
        for mode in MODES
        if (name, mode) != NEVER_COMPILES
    ]
    labels = {"case": case, "direction": direction}
    return bench.compare(
        "causal linear attention", shape, candidates, dtype=dtype, tolerance=TOLERANCES[dtype], **labels
    )


def _is_worth_a_try(shape, baseline):
    """Leaves out what needs more than 300 steps or more than a gigabyte for one of its tensors."""
    pairs_of_sequences = shape["B"] * shape["H"]
    return {
        "per-step sums": shape["T"] <= 300,
        "cumulative sums": 4 * pairs_of_sequences * shape["T"] * shape["M"] * shape["D"] < 1.1e9,
        "quadratic": 4 * pairs_of_sequences * shape["T"] ** 2 < 1.1e9,
    }[baseline]


def _claim(bench, rows, column, baseline, factor):
    """That the library's best mode beats the baseline's best by this factor."""
    library, other = (least(rows, column=column, candidate=name) for name in (LIBRARY, baseline))
    comparison = {"milliseconds": "times faster than", "peak_mb": "times less memory than"}[column]
    text = f"{rows[0]['direction']}, {sizes(rows[0]['shape'])}: {comparison} {baseline}"
    bench.claim(text, ratio(other, library), at_least=factor)


def _claim_efficiency(bench, shape):
    """That the op does the arithmetic of its matrix products at a good part of the speed of one large product."""
    op, large_product = partial(program, LIBRARY, shape, False), {"N": LARGE_PRODUCT}
    candidates = [Candidate(LIBRARY, mode, op, shape) for mode in MODES]
    candidates += [Candidate("tf.matmul", mode, _large_product, large_product) for mode in MODES]
    rows = bench.compare(
        "speed of products", {}, candidates, only_modes=True, first_calls=False, case="speed", direction=FORWARD
    )
    times = ratio(*(least(rows, candidate=name) for name in ("tf.matmul", LIBRARY)))
    share = times and times * _products(*(shape[letter] for letter in "BTHMD")) / (2 * LARGE_PRODUCT**3)
    bench.claim(f"{FORWARD}: speed of the op's products over that of one large product", share, at_least=0.4)


def _products(batch_size, length, num_heads, num_features, size):
    """Multiplications and additions of Q K^T, W V, Q S and K^T V in chunks."""
    pairs = min(CAUSAL_CHUNK_SIZE, length) * (num_features + size)
    return 2 * batch_size * length * num_heads * (pairs + 2 * num_features * size)


def _large_product():
    generator = np.random.default_rng(0)
    factors = (tf.constant(generator.normal(size=[LARGE_PRODUCT] * 2).astype(np.float32)) for _ in range(2))
    return Program(tf.matmul, tuple(factors))


def program(candidate, shape, backward, dtype="float32"):
    """The candidate on random positive features and normal values of the shape, always the same ones."""
    generator = np.random.default_rng(0)
    leading = [shape[letter] for letter in "BTH"]
    queries, keys = (generator.gamma(1.0, size=[*leading, shape["M"]]) for _ in range(2))
    values, d_outputs = (generator.normal(size=[*leading, shape["D"]]) for _ in range(2))
    arguments = [x.astype(np.float32) for x in (queries, keys, values, d_outputs)]
    time_first = candidate in TIME_FIRST
    if time_first:
        arguments = [np.transpose(x, [1, 0, 2, 3]) for x in arguments]
    attention = BASELINES.get(candidate, partial(linear_attention, causal=True))
    if dtype != "float32" and candidate in BASELINES:
        attention = _in_float32(attention)  # as the library does, whose sums would not be exact otherwise

    def forward(queries, keys, values, d_outputs):
        return [attention(queries, keys, values)]

    def forward_and_backward(queries, keys, values, d_outputs):
        sources = [queries, keys, values]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = attention(*sources)
        return [outputs, *tape.gradient(outputs, sources, d_outputs)]

    return Program(
        forward_and_backward if backward else forward,
        tuple(tf.cast(x, dtype) for x in arguments),
        (lambda results: [tf.transpose(x, [1, 0, 2, 3]) for x in results]) if time_first else (lambda results: results),
    )


def _in_float32(attention):
    return lambda *data: tf.cast(attention(*(tf.cast(x, tf.float32) for x in data)), data[-1].dtype)
