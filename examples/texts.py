"""Texts, and the windows that a model is trained on."""

import re
import textwrap
from pathlib import Path

import numpy as np
import tensorflow as tf

TRAINING_PART = 0.9


def read_text(data):
    """The text that --data stands for; ValueError if there is none."""
    if data == "python_docs":
        return python_docs()
    if data == "tiny_shakespeare":
        return tiny_shakespeare()
    try:
        return Path(data).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--data: cannot read {data!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--data: {data!r} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def python_docs():
    """The language reference in Python's help(), without drawn tables: a model repeats their rules for ever."""
    from pydoc_data.topics import topics

    lines = "\n\n".join(topics.values()).splitlines(keepends=True)
    return "".join(line for line in lines if not re.fullmatch(r"\s*[|+].*[|+]\s*", line))


def tiny_shakespeare():
    try:
        import tensorflow_datasets as tfds

        splits = tfds.load("tiny_shakespeare")
        examples = [example for name in ("train", "validation", "test") for example in splits[name]]
    except Exception as error:  # whatever went wrong between here and a download, the way out is the same
        raise ValueError(
            "--data: TensorFlow Datasets cannot provide tiny_shakespeare "
            f"({type(error).__name__}: {textwrap.shorten(str(error), 200)}); "
            "give a local text file instead: --data FILE"
        ) from error
    return "".join(example["text"].numpy().decode("utf-8") for example in examples)


def split_text(text):
    """The first nine tenths, to train on, and the rest."""
    split = int(TRAINING_PART * len(text))
    return text[:split], text[split:]


def check_text(text, args):
    """Each split must have one window and its next character, and the text more than one character."""
    for name, part in zip(("training", "validation"), split_text(text)):
        if len(part) <= args.block_size:
            raise ValueError(
                f"--data: the {name} split of {args.data!r} must have more than --block-size={args.block_size} "
                f"characters, it has {len(part)}"
            )
    if "\0" in text:
        raise ValueError(f"--data: {args.data!r} has NUL characters, it is not text")
    if len(set(text)) == 1:
        raise ValueError(f"--data: {args.data!r} has one character only, over and over: there is nothing to learn")


def random_windows(ids, args, first_step=0):
    """Endless batches of windows [B, T] at random places, with the characters that come next [B, T].

    A batch depends on the seed and the number of its step alone, so that a resumed training goes on with
    the batches that an uninterrupted one would have had.
    """
    num_starts = len(ids) - args.block_size
    offsets = tf.range(args.block_size)

    def windows(step):
        starts = tf.random.stateless_uniform([args.batch_size], [args.seed, step], 0, num_starts, tf.int32)
        places = starts[:, None] + offsets
        return tf.gather(ids, places), tf.gather(ids, places + 1)

    steps = tf.data.Dataset.counter(first_step)
    return steps.map(windows, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def consecutive_windows(ids, args, limit=None, blocks=1):
    """One pass over windows of so many blocks, that do not overlap; with a limit, over so many, evenly spread.

    A batch has about as many characters as in training.
    """
    size = blocks * args.block_size
    num_windows = (len(ids) - 1) // size
    length = num_windows * size
    inputs, targets = (tf.reshape(part, [num_windows, size]) for part in (ids[:length], ids[1 : length + 1]))
    if limit is not None and limit < num_windows:
        chosen = np.linspace(0, num_windows - 1, limit).round().astype(int)
        inputs, targets = tf.gather(inputs, chosen), tf.gather(targets, chosen)
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(max(args.batch_size // blocks, 1))
