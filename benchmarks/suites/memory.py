"""Memory of one causal SelfAttention layer, forward and backward, as the sequence grows.

The peak of the first call must stay below 1.1 GB at 131,072 tokens and grow in proportion to the length. At 1,024
tokens the layer is checked against the same layer with the weights of all pairs, whose memory is in the table too.
"""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

from benchmarks.baselines import quadratic_attention
from benchmarks.bench import LIBRARY, Candidate, least, ratio
from benchmarks.measure import Program
from benchmarks.report import Plot
from favor_keras import SelfAttention
from favor_keras.ops import relu_kernel_transformation

HIDDEN_SIZE, NUM_HEADS, NUM_FEATURES = 256, 4, 128
CHECKED_LENGTH = 1024
LENGTHS = (8192, 32768, 131072)
QUICK_LENGTHS = (4096, 8192)
MODES = ("graph", "xla")  # eager mode takes minutes for a step of a long sequence

PLOTS = [Plot("peak", "SelfAttention, forward + backward, B1, hidden 256, 4 heads, 128 features", "T", "peak_mb")]


def run(bench):
    _compare(bench, CHECKED_LENGTH, (LIBRARY, "quadratic"), ("eager", *MODES))
    lengths = QUICK_LENGTHS if bench.quick else LENGTHS
    rows = [row for length in lengths for row in _compare(bench, length, (LIBRARY,), MODES)]
    for mode in MODES:
        peaks = [row["peak_mb"] for row in rows if row["mode"] == mode]
        if None in peaks:
            bench.claim(f"{mode}: growth of the peak", None, below=1.1)
            continue
        slope, offset = np.polyfit(lengths, peaks, 1)
        print(f"{mode}: peak = {offset:.0f} MB + {1e3 * slope:.2f} kB per token", flush=True)
        growth = (peaks[-1] / peaks[0]) / (lengths[-1] / lengths[0])
        bench.claim(f"{mode}: growth of the peak over growth of the length", float(growth), below=1.1)
        if not bench.quick:
            bench.claim(f"{mode}: peak at {lengths[-1]} tokens, MB", peaks[-1], below=1100)
    first, last = (
        ratio(least(rows, candidate=LIBRARY, shape=_shape(length)), length) for length in (lengths[0], lengths[-1])
    )
    bench.claim(f"time per token at {lengths[-1]} over that at {lengths[0]}", ratio(last, first), below=1.25)


def _shape(length):
    return {"B": 1, "H": NUM_HEADS, "T": length, "M": NUM_FEATURES, "D": HIDDEN_SIZE // NUM_HEADS}


def _compare(bench, length, names, modes):
    candidates = [Candidate(name, mode, partial(program, name, length)) for name in names for mode in modes]
    return bench.compare("SelfAttention", _shape(length), candidates)


def program(name, length):
    """The layer on normal inputs, with the gradients of the inputs and of the weights."""
    generator = np.random.default_rng(0)
    inputs, d_outputs = (
        tf.constant(generator.normal(size=[1, length, HIDDEN_SIZE]).astype(np.float32)) for _ in range(2)
    )
    keras.utils.set_random_seed(0)  # the candidates must get the same weights
    layer = SelfAttention(
        HIDDEN_SIZE,
        NUM_HEADS,
        kernel_transformation="relu",
        projection_matrix_type="orthogonal",
        nb_random_features=NUM_FEATURES,
        causal=True,
        seed=0,
    )
    layer.build(inputs.shape)
    function = layer if name == LIBRARY else partial(_quadratic_layer, layer)
    weights = [weight.value for weight in layer.trainable_weights]

    def forward_and_backward(inputs, d_outputs):
        sources = [inputs, *weights]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = function(inputs)
        return [outputs, *tape.gradient(outputs, sources, d_outputs)]

    return Program(forward_and_backward, (inputs, d_outputs))


def _quadratic_layer(layer, inputs):
    """What `layer` computes, from the weights of all pairs of positions."""
    queries, keys = (
        relu_kernel_transformation(dense(inputs), is_query, layer.projection_matrix.value)
        for dense, is_query in ((layer.query_dense, True), (layer.key_dense, False))
    )
    return layer.output_dense(quadratic_attention(queries, keys, layer.value_dense(inputs)))
