"""The delta rule, in chunks, against one step per token.

Keys and queries are DPFP features, as in `FastWeightsAttention`.
"""

from functools import partial

import numpy as np
import tensorflow as tf

from benchmarks.baselines import scan_delta_rule
from benchmarks.bench import LIBRARY, Candidate, least, ratio, sizes
from benchmarks.measure import Program
from benchmarks.report import Plot
from benchmarks.suites import causal_op
from favor_keras.ops import delta_rule, dpfp

FORWARD, BACKWARD = "forward", "forward + backward"
MODES = ("graph", "xla")
RULES = {LIBRARY: delta_rule, "tf.scan": scan_delta_rule}
LENGTHS = (1024, 4096, 16384, 65536)

PLOTS = [Plot("length", f"Delta rule, {BACKWARD}, B1 H2 K128 D64", "T", "milliseconds", where={"case": "length"})]


def run(bench):
    bench.time_limit = 60  # a call of the gradient of tf.scan under XLA takes minutes
    shape = {"B": 4, "H": 8, "T": 256 if bench.quick else 1024, "K": 128, "D": 64}
    for direction, factor in ((FORWARD, 12), (BACKWARD, 25)):
        rows = _compare(bench, "main", shape, direction, RULES)
        library, other = least(rows, candidate=LIBRARY), least(rows, candidate="tf.scan")
        text = f"{direction}, {sizes(shape)}: times faster than tf.scan"
        bench.claim(text, ratio(other, library), at_least=factor)
    equal_sizes = {**shape, "M": shape["K"]}
    build = partial(causal_op.program, LIBRARY, equal_sizes, True)
    favor = bench.compare(
        "causal linear attention",
        equal_sizes,
        [Candidate(LIBRARY, mode, build) for mode in MODES],
        case="main",
        direction=BACKWARD,
    )
    favor = least(favor, candidate=LIBRARY)
    text = f"{BACKWARD}: time over that of causal linear attention of equal sizes"
    bench.claim(text, ratio(library, favor), below=2.2)

    lengths = LENGTHS[:2] if bench.quick else LENGTHS
    per_token = []
    for length in lengths:
        shape = {"B": 1, "H": 2, "T": length, "K": 128, "D": 64}
        rules = RULES if length == LENGTHS[0] else (LIBRARY,)
        rows = _compare(bench, "length", shape, BACKWARD, rules)
        milliseconds = least(rows, candidate=LIBRARY)
        per_token.append(milliseconds / length if milliseconds else None)
    text = f"time per token at {lengths[-1]} over that at {lengths[0]}"
    bench.claim(text, ratio(per_token[-1], per_token[0]), below=1.3)
    first_calls = [row["first_call_ms"] - row["milliseconds"] for row in rows if row["milliseconds"]]
    bench.claim(f"first call at {lengths[-1]} above a later one, ms", max(first_calls, default=None), below=10_000)


def _compare(bench, case, shape, direction, rules):
    candidates = [
        Candidate(name, mode, partial(program, name, shape, direction == BACKWARD)) for name in rules for mode in MODES
    ]
    return bench.compare("delta rule", shape, candidates, case=case, direction=direction)


def program(candidate, shape, backward):
    """The candidate on features of normal numbers, always the same ones."""
    generator = np.random.default_rng(0)
    leading = [shape[letter] for letter in "BTH"]
    query, key = (dpfp(generator.normal(size=[*leading, shape["K"] // 2]).astype("float32")) for _ in range(2))
    value, d_output = (tf.constant(generator.normal(size=[*leading, shape["D"]]).astype("float32")) for _ in range(2))
    beta = tf.constant(generator.uniform(size=leading).astype("float32"))

    def forward(query, key, value, beta, d_output):
        return [RULES[candidate](query, key, value, beta)]

    def forward_and_backward(*arguments):
        *sources, d_output = arguments
        with tf.GradientTape() as tape:
            tape.watch(sources)
            output = RULES[candidate](*sources)
        return [output, *tape.gradient(output, sources, d_output)]

    return Program(forward_and_backward if backward else forward, (query, key, value, beta, d_output))
