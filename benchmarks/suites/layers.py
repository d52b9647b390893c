"""Causal layers of the same size, forward and backward, against exact attention.

All see 8,192 positions, as few long or many short sequences; longer ones see one sequence. `MultiHeadAttention`
computes something else, so the errors in the table are not bounded: they say how far the layers are apart before any
training. It and `GMLPBlock` are left out where their matrices of all pairs of positions would fill the memory.
Break-even is the length from which a layer is faster than `MultiHeadAttention` in the same mode, between the measured
ones.
"""

import itertools
import math
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from benchmarks.bench import Candidate, least, ratio
from benchmarks.measure import Program
from benchmarks.report import Plot
from favor_keras import FastWeightsAttention, GMLPBlock, SelfAttention

POSITIONS, HIDDEN_SIZE, NUM_HEADS, NUM_FEATURES = 8192, 256, 4, 128
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
QUICK_LENGTHS = (64, 256, 1024)
MODES = ("graph", "xla")
YARDSTICK, SOFTMAX_KERNEL, EXACT = "SelfAttention, ReLU", "SelfAttention, softmax", "MultiHeadAttention"
LONGEST = {EXACT: 8192, "GMLPBlock": 8192, SOFTMAX_KERNEL: 16384, "FastWeightsAttention": 16384}
LEAST_RATIOS = {256: 1.0, 2048: 3.5, 4096: 7.0, 8192: 14.0}

PLOTS = [Plot("time", f"Causal layers, forward + backward, hidden {HIDDEN_SIZE}", "T", "ms_per_1024_positions")]


def run(bench):
    rows = []
    for length in QUICK_LENGTHS if bench.quick else LENGTHS:
        rows += _compare(bench, length)
        if length in LEAST_RATIOS:
            library, exact = (_milliseconds(rows, name, length) for name in (YARDSTICK, EXACT))
            text = f"T {length}: times faster than {EXACT}"
            bench.claim(text, ratio(exact, library), at_least=LEAST_RATIOS[length])
    if not bench.quick:
        shorter, longer = (
            least(rows, column="ms_per_1024_positions", candidate=YARDSTICK, shape=_shape(length))
            for length in (1024, 65536)
        )
        bench.claim("time per position at T 65536 over that at 1024", ratio(longer, shorter), below=1.25)
    for name in LAYERS:
        for mode in MODES:
            if name != EXACT:
                figures = {"break_even": _break_even(rows, name, mode)}
                bench.record("break-even", {}, name, mode, {"ms_per_1024_positions": None, **figures})


def _compare(bench, length):
    shape = _shape(length)
    names = [name for name in LAYERS if length <= LONGEST.get(name, length)]
    candidates = [Candidate(name, mode, partial(program, name, length)) for name in names for mode in MODES]
    derived = {"ms_per_1024_positions": _per_position, "break_even": lambda row: None}
    return bench.compare("causal layer", shape, candidates, tolerance=math.inf, first_calls=False, derived=derived)


def _shape(length):
    return {"B": max(POSITIONS // length, 1), "T": length, "hidden": HIDDEN_SIZE, "H": NUM_HEADS}


def _milliseconds(rows, name, length, **labels):
    return least(rows, candidate=name, shape=_shape(length), **labels)


def _per_position(row):
    return row["milliseconds"] and 1024 * row["milliseconds"] / (row["shape"]["B"] * row["shape"]["T"])


def _break_even(rows, name, mode):
    """The length at which the ratio of the times crosses 1, on a line through the logarithms; None if it never does."""
    ratios = []
    for length in dict.fromkeys(row["shape"]["T"] for row in rows):
        own, exact = (_milliseconds(rows, layer, length, mode=mode) for layer in (name, EXACT))
        if own and exact:
            ratios.append((math.log(length), math.log(own / exact)))
    for (shorter, before), (longer, after) in itertools.pairwise(ratios):
        if before > 0 >= after:
            return math.exp(shorter + (longer - shorter) * before / (before - after))
    return None


def favor(kernel):
    return SelfAttention(
        HIDDEN_SIZE,
        NUM_HEADS,
        kernel_transformation=kernel,
        projection_matrix_type="orthogonal",
        nb_random_features=NUM_FEATURES,
        causal=True,
        seed=0,
    )


LAYERS = {
    YARDSTICK: lambda length: favor("relu"),
    SOFTMAX_KERNEL: lambda length: favor("softmax"),
    "FastWeightsAttention": lambda length: FastWeightsAttention(HIDDEN_SIZE, NUM_HEADS, seed=0),
    "GMLPBlock": lambda length: GMLPBlock(4 * HIDDEN_SIZE, length, causal=True, seed=0),
    EXACT: lambda length: keras.layers.MultiHeadAttention(NUM_HEADS, HIDDEN_SIZE // NUM_HEADS, use_bias=False, seed=0),
}


def program(name, length):
    """A new layer on normal inputs, with the gradients of the inputs and of the weights."""
    generator = np.random.default_rng(0)
    shape = [_shape(length)[letter] for letter in ("B", "T", "hidden")]
    inputs, d_outputs = (tf.constant(generator.normal(size=shape).astype("float32")) for _ in range(2))
    keras.utils.set_random_seed(0)
    layer = LAYERS[name](length)
    call = partial(layer, use_causal_mask=True) if name == EXACT else layer
    arguments = [inputs, inputs] if name == EXACT else [inputs]
    layer.build(*(x.shape for x in arguments))
    weights = [weight.value for weight in layer.trainable_weights]

    def forward_and_backward(inputs, d_outputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = call(*[inputs] * len(arguments))
        d_inputs, *d_weights = tape.gradient(outputs, [inputs, *weights], d_outputs)
        return [outputs, d_inputs, d_weights]

    # The layers have different weights, so outputs and gradients of inputs are what can be compared.
    return Program(forward_and_backward, (inputs, d_outputs), lambda results: results[:2])
