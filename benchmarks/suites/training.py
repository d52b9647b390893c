"""Training steps of whole language models, of every mixer: steps and characters per second.

The settings are those of the preset nanogpt_cpu of `examples/char_lm.py`, with its optimizer; gmlp and amlp have six
layers, as they have no feed-forward networks besides. A step is one of Keras' own, as `fit` makes it, and all see
the same number of characters, as few long or many short windows. The errors are those of the loss of the first step,
between the modes of one mixer.
"""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

from benchmarks.bench import Candidate
from benchmarks.report import Plot
from favor_keras import CausalLM
from favor_keras.models.mixers import BLOCKS, MIXERS

YARDSTICK = "favor"
MODES = ("graph", "xla")
VOCABULARY_SIZE, HIDDEN_SIZE, NUM_HEADS = 65, 128, 4
NUM_LAYERS, NUM_LAYERS_OF_BLOCKS = 4, 6
TOKENS, QUICK_TOKENS = 4096, 1024
LENGTHS, QUICK_LENGTHS = (64, 256, 1024, 4096), (64, 256)

PLOTS = [Plot("speed", f"Training of language models, hidden {HIDDEN_SIZE}", "T", "characters_per_second")]


def run(bench):
    tokens = QUICK_TOKENS if bench.quick else TOKENS
    for length in QUICK_LENGTHS if bench.quick else LENGTHS:
        shape = {"B": tokens // length, "T": length}
        candidates = [Candidate(mixer, mode, partial(program, mixer, shape)) for mixer in MIXERS for mode in MODES]
        derived = {"steps_per_second": _steps_per_second, "characters_per_second": _characters_per_second}
        bench.compare("training step", shape, candidates, only_modes=True, first_calls=False, derived=derived)


def _steps_per_second(row):
    return 1e3 / row["milliseconds"] if row["milliseconds"] else None


def _characters_per_second(row):
    steps = _steps_per_second(row)
    return steps and steps * row["shape"]["B"] * row["shape"]["T"]


class TrainingStep:
    """A `Program` that Keras compiles: the loss of a step, on the same batch each time."""

    def __init__(self, model, token_ids, targets):
        self.model, self.token_ids, self.targets = model, token_ids, targets

    def compiled(self, mode):
        """A call without arguments that returns when the step is done."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(make_optimizer(), loss, jit_compile=mode == "xla")
        return lambda: [self.model.train_on_batch(self.token_ids, self.targets)]

    @staticmethod
    def comparable(results):
        return results


def make_optimizer():
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.1, beta_2=0.99, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def program(mixer, shape):
    """The step of a new model, on random characters."""
    keras.utils.set_random_seed(0)  # the modes must get the same weights
    options = {"num_layers": NUM_LAYERS}
    if mixer in BLOCKS:
        options = {"num_layers": NUM_LAYERS_OF_BLOCKS, "max_length": shape["T"]}
    model = CausalLM(VOCABULARY_SIZE, HIDDEN_SIZE, num_heads=NUM_HEADS, mixer=mixer, seed=0, **options)
    model.build((None, shape["T"]))
    text = np.random.default_rng(0).integers(VOCABULARY_SIZE, size=[shape["B"], shape["T"] + 1])
    return TrainingStep(model, tf.constant(text[:, :-1], tf.int32), tf.constant(text[:, 1:], tf.int32))
