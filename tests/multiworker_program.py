"""What one process of test_strategies.py runs: train a small language model under a strategy.

    python tests/multiworker_program.py RUN_DIR MIXER [--kill-in-epoch 2]

Writes the losses and what else the tests compare to results.json in the worker's folder. With
--kill-in-epoch the process kills itself in the middle of that epoch, counted from 0; with
--pause-in-epoch it stops taking part in training there.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import strategies  # noqa: E402
import tensorflow as tf  # noqa: E402

from favor_keras import CausalLM, RedrawProjections  # noqa: E402
from favor_keras.models.mixers import BLOCKS  # noqa: E402

VOCABULARY, LENGTH, BATCH_SIZE = 13, 12, 12  # a batch for two and for three workers
EPOCHS, STEPS_PER_EPOCH = 4, 5
LOST_WORKER_CODE = 4


def batches(strategy, length=LENGTH, skip=0):
    """20 batches of ids that can be learned: each is the sum of the two before it."""
    count = EPOCHS * STEPS_PER_EPOCH * BATCH_SIZE
    ids = np.random.default_rng(0).integers(1, VOCABULARY, size=[count, length + 1]).astype("int32")
    for t in range(2, length + 1):
        ids[:, t] = 1 + (ids[:, t - 1] + ids[:, t - 2]) % (VOCABULARY - 1)
    dataset = tf.data.Dataset.from_tensor_slices((ids[:, :-1], ids[:, 1:])).batch(BATCH_SIZE, drop_remainder=True)
    return strategies.shard(dataset.skip(skip), strategy)


def validation(strategy, length=LENGTH):
    """Two batches, the last of them not full."""
    whole = batches(tf.distribute.get_strategy(), length)
    return strategies.shard(whole.unbatch().take(BATCH_SIZE + 7).batch(BATCH_SIZE), strategy)


def make_model(mixer, strategy, length=LENGTH, **options):
    """A built and compiled model; FAVOR draws its projections anew every third step."""
    keras.utils.set_random_seed(0)
    if mixer == "favor":
        options = {"mixer_options": {"redraw_interval": 3}, **options}
    if mixer in BLOCKS:
        options = {"max_length": length, **options}
    with strategy.scope():
        model = CausalLM(VOCABULARY, 16, num_layers=1, num_heads=2, mixer=mixer, seed=1, **options)
        model.build((None, length))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Adam divides by the size of the gradient: with a small epsilon it blows up the rounding of gradients near 0.
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)  # else `fit` traces the step twice
        return strategies.cure(model)


def train(model, mixer, strategy, length=LENGTH, initial_epoch=0, callbacks=()):
    """The losses and metrics by name, a list of one per epoch for each."""
    history = model.fit(
        batches(strategy, length, skip=initial_epoch * STEPS_PER_EPOCH),
        initial_epoch=initial_epoch,
        epochs=EPOCHS,
        steps_per_epoch=STEPS_PER_EPOCH,
        validation_data=validation(strategy, length),
        callbacks=[*callbacks, *([RedrawProjections()] if mixer == "favor" else [])],
        shuffle=False,
        verbose=0,
    )
    return history.history


def results_of(model, history, strategy, length=LENGTH):
    """What must be the same however the training was distributed."""
    return {
        "history": history,
        "evaluate": model.evaluate(validation(strategy, length), verbose=0),
        "predict": model.predict(validation(strategy, length), verbose=0).tolist(),
        "weights": [weight.numpy().tolist() for weight in model.weights],
    }


class DoInEpoch(keras.callbacks.Callback):
    """Call `function` after the third step of an epoch."""

    def __init__(self, epoch, function):
        super().__init__()
        self.in_epoch, self.function = epoch, function

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == self.in_epoch and batch == 2:
            self.function()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("mixer")
    parser.add_argument("--kill-in-epoch", type=int)
    parser.add_argument("--pause-in-epoch", type=int)
    parser.add_argument("--start-timeout", type=int, default=strategies.START_TIMEOUT)
    parser.add_argument("--reduction-timeout", type=int, default=strategies.REDUCTION_TIMEOUT)
    args = parser.parse_args()
    strategies.START_TIMEOUT, strategies.REDUCTION_TIMEOUT = args.start_timeout, args.reduction_timeout
    strategy = strategies.make_strategy("multiworker")
    folder = strategies.worker_folder(args.run_dir, strategy)
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(args.mixer, strategy)
    epoch = strategies.restore(model, folder / "backup", strategy)
    callbacks = [strategies.Backup(folder / "backup")]
    if args.kill_in_epoch is not None:
        callbacks.append(DoInEpoch(args.kill_in_epoch, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    if args.pause_in_epoch is not None:
        callbacks.append(DoInEpoch(args.pause_in_epoch, lambda: time.sleep(1000)))
    try:
        with strategies.explain_lost_workers(strategy):
            history = train(model, args.mixer, strategy, initial_epoch=epoch, callbacks=callbacks)
            results = results_of(model, history, strategy)
    except ConnectionError as error:
        print(f"error: {error}", file=sys.stderr)
        return LOST_WORKER_CODE
    results |= {"initial_epoch": epoch, "is_chief": strategies.is_chief(strategy)}
    (folder / "results.json").write_text(json.dumps(results))
    if strategies.is_chief(strategy):
        model.save(folder / "model.keras")
    return 0


if __name__ == "__main__":
    sys.exit(main())
