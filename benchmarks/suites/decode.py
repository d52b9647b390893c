"""Text written token by token: milliseconds per token, and the bytes of the cache, after long contexts.

A `CausalLM` reads its tokens one at a time, in a loop inside the graph, as `CausalLM.generate` does; milliseconds are
for all steps, those per token for one step, that is one token of every sequence of the batch. The linear mixers
have really read the context. The cache of the exact attention has room for the context and the steps, and random
keys and values, as to compute them would take time that grows with the square of the context.

Before, on a short context, the logits are checked against those of the whole sequence; after that the errors are those
between the modes of one mixer. Last, `CausalLM.stream` writes 2,000 characters: one stream at its beginning and one
close to its end take turns.
"""

import os
import time
from functools import cache, partial
from statistics import median

import keras
import numpy as np
import tensorflow as tf

from benchmarks.bench import Candidate, least, ratio
from benchmarks.measure import NotFeasible, Program, relative_error
from benchmarks.report import Plot
from favor_keras import CausalLM

YARDSTICK = "favor"
LINEAR = ("favor", "fast_weights")
EXACT = "softmax"
WHOLE = "whole sequence"
MODES, QUICK_MODES = ("graph", "xla"), ("graph",)
VOCABULARY_SIZE, HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS = 65, 256, 4, 4
BATCH_SIZES = (1, 16)
CONTEXTS = (0, 1024, 8192, 65536)
QUICK_CONTEXTS = (0, 256, 1024)
CHECKED_CONTEXT = 96
PIECE = 1024
STEPS = 10
WRITTEN, QUICK_WRITTEN = 2000, 300
SKIPPED = 8  # the first tokens of a stream: with them its graphs are made
WINDOW, QUICK_WINDOW = 100, 50

PLOTS = [
    Plot(f"{y}_B{batch_size}", f"One token after a context, {title}, B{batch_size}", "context", y, where=where)
    for batch_size in BATCH_SIZES
    for where in ({"case": "context", "B": batch_size},)
    for y, title in (("ms_per_token", "time"), ("cache_mb", "cache"))
]


def run(bench):
    for mixer in (*LINEAR, EXACT):
        _check(bench, mixer)
    contexts, modes = (QUICK_CONTEXTS, QUICK_MODES) if bench.quick else (CONTEXTS, MODES)
    for batch_size in BATCH_SIZES:
        rows = _compare(bench, batch_size, contexts, modes)
        for mixer in LINEAR:
            first, last = (_milliseconds(rows, mixer, batch_size, context) for context in (contexts[0], contexts[-1]))
            text = f"{mixer}, B{batch_size}: time per token after {contexts[-1]} tokens over that after {contexts[0]}"
            bench.claim(text, ratio(last, first), below=1.1)
        if batch_size == 16 and 8192 in contexts:
            favor, exact = (_milliseconds(rows, mixer, batch_size, 8192) for mixer in (YARDSTICK, EXACT))
            text = "B16: softmax's time per token after 8192 tokens over favor's"
            bench.claim(text, ratio(exact, favor), at_least=3)
    for batch_size in BATCH_SIZES:
        _stream(bench, batch_size)


def _check(bench, mixer):
    shape = {"B": 2, "context": CHECKED_CONTEXT}
    caches = _prefilled(mixer, 2, [CHECKED_CONTEXT])
    candidates = [
        Candidate(WHOLE, "graph", partial(whole_program, mixer, shape)),
        Candidate(mixer, "graph", partial(program, mixer, shape, caches[CHECKED_CONTEXT])),
    ]
    bench.compare(f"check of {mixer}", shape, candidates, derived=DERIVED, case="check")


def _compare(bench, batch_size, contexts, modes):
    candidates = []
    for mixer in (*LINEAR, EXACT):
        caches = _prefilled(mixer, batch_size, contexts) if mixer in LINEAR else dict.fromkeys(contexts)
        for context in contexts:
            build = partial(program, mixer, {"B": batch_size, "context": context}, caches[context])
            candidates += [Candidate(mixer, mode, build, {"context": context}) for mode in modes]
    return bench.compare("decode", {"B": batch_size}, candidates, only_modes=True, derived=DERIVED, case="context")


def _milliseconds(rows, mixer, batch_size, context):
    return least(rows, candidate=mixer, shape={"B": batch_size, "context": context})


def _cache_mb(row):
    """None for what has no cache. Known also for a cache that does not fit."""
    mixer, shape = row["candidate"], row["shape"]
    return None if mixer == WHOLE else cache_bytes(mixer, shape["B"], shape["context"] + STEPS) / 1e6


def _ms_per_token(row):
    return None if row["candidate"] == WHOLE or row["milliseconds"] is None else row["milliseconds"] / STEPS


DERIVED = {"ms_per_token": _ms_per_token, "cache_mb": _cache_mb}


def make_model(mixer):
    """A model whose weights depend on nothing but the mixer."""
    keras.utils.set_random_seed(0)
    model = CausalLM(VOCABULARY_SIZE, HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, mixer=mixer, seed=0)
    model.build((None, None))
    return model


def make_text(batch_size, length):
    """Random tokens [B, T]: those of a shorter text begin a longer one."""
    tokens = np.random.default_rng(0).integers(VOCABULARY_SIZE, size=[length, batch_size])
    return tf.constant(tokens.T, tf.int32)


@cache
def cache_bytes(mixer, batch_size, room):
    """The size of a cache that is not made."""
    shapes = tf.function(partial(make_model(mixer).init_cache, batch_size, room)).get_concrete_function()
    return sum(x.shape.num_elements() * x.dtype.size for x in tf.nest.flatten(shapes.structured_outputs))


def _prefilled(mixer, batch_size, contexts):
    """A dict of the caches after the first tokens of the text, as NumPy arrays: any process can have them."""
    model, text = make_model(mixer), make_text(batch_size, max(contexts))
    state = model.init_cache(batch_size, max(contexts) + STEPS)
    read = tf.function(lambda tokens, state: model(tokens, cache=state)[1], autograph=False)
    caches, position = {}, 0
    for context in sorted(contexts):
        while position < context:
            piece = text[:, position : min(position + PIECE, context)]
            state = read(piece, state)
            position += piece.shape[1]
        caches[context] = {name: tensor.numpy() for name, tensor in state.items()}
    return caches


def _random_cache(mixer, model, shape):
    """Keys and values for all of the context; the room for the steps has some too, which they overwrite."""
    size, memory = cache_bytes(mixer, shape["B"], shape["context"] + STEPS), _memory_bytes()
    if 4 * size > memory:  # two modes, each with what it is given and what it makes of it
        raise NotFeasible(f"four caches of {size / 1e9:.1f} GB do not fit into {memory / 1e9:.0f} GB of memory")
    filled = {}
    for index, (name, zeros) in enumerate(model.init_cache(shape["B"], shape["context"] + STEPS).items()):
        if name.endswith("position"):
            filled[name] = tf.fill(zeros.shape, float(shape["context"]))
        else:
            filled[name] = tf.random.stateless_normal(zeros.shape, seed=[0, index])
    return filled


def _memory_bytes():
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def program(mixer, shape, state):
    """Steps from a cache, or from a random one if it is None: the logits [B, STEPS, V]."""
    model = make_model(mixer)
    state = _random_cache(mixer, model, shape) if state is None else tf.nest.map_structure(tf.constant, state)
    tokens = make_text(shape["B"], shape["context"] + STEPS)[:, shape["context"] :]

    def steps(tokens, state):
        def step(index, state, logits):
            new, state = model(tokens[:, index, None], cache=state)
            return index + 1, state, logits.write(index, new[:, 0])

        logits = tf.TensorArray(tf.float32, STEPS, element_shape=[shape["B"], VOCABULARY_SIZE])
        *_, logits = tf.while_loop(lambda index, *_: index < STEPS, step, (0, state, logits), maximum_iterations=STEPS)
        return tf.transpose(logits.stack(), [1, 0, 2])

    return Program(steps, (tokens, state))


def whole_program(mixer, shape):
    """The same logits, from the whole sequence without a cache."""
    tokens = make_text(shape["B"], shape["context"] + STEPS)
    return Program(make_model(mixer), (tokens,), lambda logits: logits[:, shape["context"] :])


def _stream(bench, batch_size):
    """The time per token of the last tokens of a stream over that of its first ones, for each mixer."""
    length, window = (QUICK_WRITTEN, QUICK_WINDOW) if bench.quick else (WRITTEN, WINDOW)
    prompt = make_text(batch_size, 1)
    streams, errors = {}, {}
    # To get to the end of its stream, exact attention needs ten minutes for 16 texts.
    for mixer in (*LINEAR, EXACT) if batch_size == 1 else LINEAR:
        model = make_model(mixer)
        errors[mixer] = _difference_of_stream(model, prompt)
        for case, start in (("first tokens", SKIPPED), ("last tokens", length - window)):
            stream = model.stream(prompt, length, seed=0)
            for _ in range(start):
                next(stream)
            streams[mixer, case, start] = stream
    seconds = {key: [] for key in streams}
    for _ in range(window):
        for key, stream in streams.items():
            start = time.perf_counter()
            next(stream)
            seconds[key].append(time.perf_counter() - start)
    medians = {}
    for (mixer, case, start), times in seconds.items():
        medians[mixer, case] = 1e3 * median(times)
        megabytes = cache_bytes(mixer, batch_size, 1 + length) / 1e6
        figures = {"ms_per_token": medians[mixer, case], "cache_mb": megabytes, "error": errors[mixer]}
        figures["repeats"] = window
        if errors[mixer]:
            figures["failure"] = f"tokens differ from those of generate by {errors[mixer]:.1e}"
        bench.record("stream", {"B": batch_size, "context": 1 + start}, mixer, "graph", figures, case=case)
    for mixer in LINEAR:
        text = f"stream of {mixer}, B{batch_size}: last {window} of {length} tokens over the first {window}"
        kept = not errors[mixer]
        bench.claim(text, medians[mixer, "last tokens"] / medians[mixer, "first tokens"] if kept else None, below=1.15)


def _difference_of_stream(model, prompt):
    """Of its tokens from those of `generate`: 0 if all are the same."""
    streamed = np.stack(list(model.stream(prompt, STEPS, seed=0)), axis=1)
    return relative_error(streamed, model.generate(prompt, STEPS, seed=0)[:, 1:])
