"""How well random features approximate softmax attention, and in what time.

Queries, keys and values are normal; those of queries and keys have the given standard deviation. The relative error in
the column before the last two is that of the projection that is timed; those of the output and of the weights are
means over several projections, by `favor_keras.diagnostics`. M is the number of rows of the projection: the
hyperbolic and the trigonometric kernel make two features of each. First calls are not measured: neither the
standard deviation nor the kind of the projection changes them.
"""

import itertools
import math
from functools import partial

import numpy as np
import tensorflow as tf

from benchmarks.baselines import softmax_attention
from benchmarks.bench import LIBRARY, Candidate
from benchmarks.measure import Program
from benchmarks.report import Plot
from favor_keras import favor_attention
from favor_keras.diagnostics import approximation_error
from favor_keras.ops.projections import draw_projection

YARDSTICK = EXACT = "exact softmax"
KERNELS = ("softmax", "softmax_hyperbolic", "softmax_trig")
PROJECTIONS = ("iid", "orthogonal", "givens")
SIZES, QUICK_SIZES = (16, 64), (16,)
DEVIATIONS, QUICK_DEVIATIONS = (0.5, 1.0), (0.5,)
NUM_FEATURES, QUICK_NUM_FEATURES = (16, 64, 256, 1024), (16, 64, 256)
LENGTH, QUICK_LENGTH = 1024, 256
NUM_DRAWS, QUICK_NUM_DRAWS = 5, 2
MODES = ("graph", "xla")
PLOTTED_MODE = "graph"

PLOTS = [
    Plot(
        f"{x}_D{size}_std{deviation}",
        f"Error of attention against {title}, D{size}, standard deviation {deviation}",
        x,
        "output_error",
        lines=("kernel", "projection"),
        where={"D": size, "std": deviation, "mode": PLOTTED_MODE},
        upright=EXACT,
    )
    for size, deviation in itertools.product(SIZES, DEVIATIONS)
    for x, title in (("M", "number of projections"), ("milliseconds", "time"))
]


def run(bench):
    sizes = QUICK_SIZES if bench.quick else SIZES
    deviations = QUICK_DEVIATIONS if bench.quick else DEVIATIONS
    for size, deviation in itertools.product(sizes, deviations):
        for kernel, projection in itertools.product(KERNELS, PROJECTIONS):
            _compare(bench, size, deviation, kernel, projection)


def _compare(bench, size, deviation, kernel, projection):
    num_features, num_draws, length = (
        (QUICK_NUM_FEATURES, QUICK_NUM_DRAWS, QUICK_LENGTH) if bench.quick else (NUM_FEATURES, NUM_DRAWS, LENGTH)
    )
    shape = {"B": 1, "T": length, "H": 2, "D": size}
    errors = approximation_error(
        *make_data(shape, deviation),
        num_features=num_features,
        kernel=kernel,
        projection_matrix_type=projection,
        num_draws=num_draws,
    )
    errors = {row["num_features"]: row for row in errors}
    derived = {
        "output_error": lambda row: errors[row["shape"]["M"]]["output_error"] if "M" in row["shape"] else 0.0,
        "weight_error": lambda row: errors[row["shape"]["M"]]["matrix_error"] if "M" in row["shape"] else 0.0,
    }
    candidates = [Candidate(EXACT, mode, partial(exact_program, shape, deviation)) for mode in MODES]
    for rows in num_features:
        build = partial(program, shape, deviation, kernel, projection, rows)
        candidates += [Candidate(LIBRARY, mode, build, {"M": rows}) for mode in MODES]
    bench.compare(
        "softmax attention",
        shape,
        candidates,
        tolerance=math.inf,
        first_calls=False,
        derived=derived,
        kernel=kernel,
        projection=projection,
        std=deviation,
    )


def make_data(shape, deviation):
    """Queries, keys and values, always the same ones."""
    generator = np.random.default_rng(0)
    query, key, value = (tf.constant(generator.normal(size=list(shape.values())), tf.float32) for _ in range(3))
    return deviation * query, deviation * key, value


def program(shape, deviation, kernel, projection, num_features):
    """Attention with the first of the projections that the errors are averaged over."""
    matrix = draw_projection(num_features, shape["D"], [0, 0], kind=projection)
    attention = partial(favor_attention, kernel_transformation=kernel, causal=False, projection_matrix=matrix)
    return Program(attention, make_data(shape, deviation))


def exact_program(shape, deviation):
    return Program(softmax_attention, make_data(shape, deviation))
