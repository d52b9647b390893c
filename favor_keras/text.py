"""Texts and token ids: one token per character."""

import json
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


class Characters:
    """The characters that a model knows, and their ids, by `keras.layers.StringLookup`.

    The id of a character is its place in `characters`.

    Args:
        characters: the different characters, as a string or a list.

    Raises:
        ValueError: if there is none, one comes twice, or one is not a single character.

    Example:

    >>> from favor_keras.text import Characters
    >>> characters = Characters.of("hello")
    >>> characters.all
    ['e', 'h', 'l', 'o']
    >>> characters.decode(characters.encode("hole"))
    'hole'
    """

    def __init__(self, characters):
        self.all = list(characters) if isinstance(characters, (str, list, tuple)) else []
        wrong = [c for c in self.all if not isinstance(c, str) or len(c) != 1 or c == "\0"]
        if not self.all or wrong or len(set(self.all)) != len(self.all):
            received = repr(characters)[:200]
            raise ValueError(f"characters must be different single characters other than NUL, received {received}")
        # Unknown characters get the id 0 here, and -1 outside, so that they can be seen.
        self.lookup = keras.layers.StringLookup(vocabulary=self.all, num_oov_indices=1)

    @classmethod
    def of(cls, text):
        """The characters of a text, in the order of their code points."""
        return cls(sorted(set(text)))

    def __len__(self):
        return len(self.all)

    def unknown(self, text):
        """The characters of a text that are not known, each once."""
        return sorted(set(text) - set(self.all))

    def encode(self, text):
        """Ids [N] of a text, int32.

        Raises:
            ValueError: if the text has unknown characters; it lists them.
        """
        if unknown := self.unknown(text):
            raise ValueError(f"text must only have known characters, received also {unknown}")
        return self.ids(text)

    def ids(self, text):
        """Ids [N] of a string tensor [], or ragged [B, None] of [B], -1 for unknown characters; also in a graph."""
        ids = self.lookup(tf.strings.unicode_split(text, "UTF-8"))
        return tf.cast(ids, tf.int32) - 1

    def strings(self, ids):
        """The strings, as a tensor, of the last axis of ids; also in a graph."""
        return tf.strings.reduce_join(tf.gather(tf.constant(self.all), ids), axis=-1)

    def decode(self, ids):
        """The text of ids [N].

        Raises:
            ValueError: for anything but ids of known characters.
        """
        ids = np.asarray(ids)
        ids = ids if ids.size else ids.astype("int32")
        known = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer) and np.all((ids >= 0) & (ids < len(self)))
        if not known:
            raise ValueError(f"ids must be a list of integers from 0 to {len(self) - 1}, received {ids!r}")
        return self.strings(ids).numpy().decode("utf-8")

    def save(self, path):
        """Write the characters as a JSON list."""
        Path(path).write_text(json.dumps(self.all, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path):
        """Read what `save` has written."""
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))
