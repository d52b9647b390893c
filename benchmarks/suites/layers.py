"""Causal layers of the same size, forward and backward, against exact attention.

All see 8,192 positions, as few long or many short sequences. `MultiHeadAttention` computes something else, so the
errors in the table are not bounded: they say how far the layers are apart before any training.
"""

import math
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from benchmarks.bench import LIBRARY, Candidate, fastest
from benchmarks.measure import Program
from benchmarks.report import Plot
from favor_keras import FastWeightsAttention, SelfAttention

TOKENS, HIDDEN_SIZE, NUM_HEADS, NUM_FEATURES = 8192, 256, 4, 128
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
MODES = ("graph", "xla")
EXACT = "MultiHeadAttention"
LEAST_RATIOS = {256: 1.0, 2048: 3.5, 4096: 7.0, 8192: 14.0}

PLOTS = [Plot("time", f"Causal layers, forward + backward, hidden {HIDDEN_SIZE}, B T = {TOKENS}", "T", "milliseconds")]


def run(bench):
    for length in LENGTHS[:3] if bench.quick else LENGTHS:
        shape = {"B": TOKENS // length, "T": length, "hidden": HIDDEN_SIZE, "H": NUM_HEADS}
        candidates = [Candidate(name, mode, partial(program, name, length)) for name in LAYERS for mode in MODES]
        rows = bench.compare("causal layer", shape, candidates, tolerance=math.inf)
        library, exact = fastest(rows, candidate=LIBRARY), fastest(rows, candidate=EXACT)
        if length in LEAST_RATIOS:
            ratio = exact / library if library and exact else None
            bench.claim(f"T {length}: times faster than {EXACT}", ratio, at_least=LEAST_RATIOS[length])


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
    LIBRARY: partial(favor, "relu"),
    "softmax kernel": partial(favor, "softmax"),
    "FastWeightsAttention": partial(FastWeightsAttention, HIDDEN_SIZE, NUM_HEADS, seed=0),
    EXACT: partial(keras.layers.MultiHeadAttention, NUM_HEADS, HIDDEN_SIZE // NUM_HEADS, use_bias=False, seed=0),
}


def program(name, length):
    """A new layer on normal inputs, with the gradients of the inputs and of the weights."""
    generator = np.random.default_rng(0)
    shape = [TOKENS // length, length, HIDDEN_SIZE]
    inputs, d_outputs = (tf.constant(generator.normal(size=shape).astype("float32")) for _ in range(2))
    keras.utils.set_random_seed(0)
    layer = LAYERS[name]()
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
