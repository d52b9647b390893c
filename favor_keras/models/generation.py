"""Text after a prompt, token by token: the sampling, and the loop that carries a model's cache."""

import numbers
import random
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from favor_keras.layers.arguments import check_positive, check_seed


class Sampling(NamedTuple):
    """How a token is drawn from logits. All are scalar tensors; `top_k` and `top_p` may be None."""

    temperature: tf.Tensor
    top_k: tf.Tensor
    top_p: tf.Tensor
    seed: tf.Tensor

    @classmethod
    def checked(cls, temperature=1.0, top_k=None, top_p=None, seed=None):
        """From numbers, after a check; a seed of None is drawn.

        Raises:
            ValueError: for a number outside of its range.
        """
        if not isinstance(temperature, numbers.Real) or not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, received {temperature!r}")
        top_k, seed = python_integer(top_k), python_integer(seed)
        if top_k is not None:
            check_positive("top_k", top_k)
        if top_p is not None and (not isinstance(top_p, numbers.Real) or not 0 < top_p <= 1):
            raise ValueError(f"top_p must be a number above 0 and at most 1, or None, received {top_p!r}")
        check_seed(seed)
        return cls(
            tf.constant(temperature, tf.float32),
            None if top_k is None else tf.constant(top_k),
            None if top_p is None else tf.constant(top_p, tf.float32),
            tf.constant(random.randint(1, 10**9) if seed is None else seed, tf.int64),
        )

    def draw(self, logits, step):
        """Token ids [B] from logits [B, V], by a random number that depends on the seed and the step."""
        greedy = tf.argmax(logits, axis=-1, output_type=tf.int32)
        warm = keep_likely(logits / tf.maximum(self.temperature, 1e-6), self.top_k, self.top_p)
        seed = tf.stack([self.seed, tf.cast(step, tf.int64)])
        drawn = tf.random.stateless_categorical(warm, 1, seed, dtype=tf.int32)[:, 0]
        return tf.where(self.temperature > 0, drawn, greedy)


def keep_likely(logits, top_k=None, top_p=None):
    """Logits [B, V] with -inf for the tokens that are not to be drawn.

    Args:
        logits: [B, V].
        top_k: the number of likeliest tokens to keep, or None for all.
        top_p: keeps, of these, the fewest likeliest tokens whose probabilities sum to at least this, or None for all
            (arXiv:1904.09751). Tokens as likely as the last one that is kept stay too.
    """
    if top_k is None and top_p is None:
        return logits
    ordered = tf.sort(logits, axis=-1, direction="DESCENDING")
    if top_k is not None:
        last = ordered[:, tf.minimum(top_k, tf.shape(logits)[1]) - 1, None]
        ordered = tf.where(ordered >= last, ordered, -float("inf"))
    if top_p is not None:
        sum_of_likelier = tf.cumsum(tf.nn.softmax(ordered), axis=-1, exclusive=True)
        ordered = tf.where(sum_of_likelier < top_p, ordered, -float("inf"))
    least = tf.reduce_min(tf.where(tf.math.is_inf(ordered), float("inf"), ordered), axis=-1, keepdims=True)
    return tf.where(logits >= least, logits, -float("inf"))


def python_integer(value):
    """An integer of NumPy as one of Python; anything else as it is."""
    return value.item() if isinstance(value, np.integer) else value


def checked_prompt(prompt, vocabulary_size):
    """Token ids [B, T] and their mask, None if all prompts have one length.

    Raises:
        ValueError: for anything but integers, for an empty prompt, and in eager mode for ids that are not in the
            vocabulary.
    """
    prompt = _as_tensor(prompt)
    mask = None
    if isinstance(prompt, tf.RaggedTensor):
        lengths = prompt.row_lengths()
        if tf.executing_eagerly() and not tf.reduce_all(lengths > 0):
            raise ValueError("prompt must have at least one token in every row, received an empty one")
        mask = tf.sequence_mask(lengths)
        prompt = prompt.to_tensor()
    token_ids = prompt
    if token_ids.shape.rank != 2 or token_ids.shape[1] == 0:
        raise ValueError(f"prompt must be [batch, length] with length at least 1, received {token_ids.shape}")
    if not token_ids.dtype.is_integer:
        raise ValueError(f"prompt must be integers, received {token_ids.dtype.name}")
    if tf.executing_eagerly():
        least, greatest = int(tf.reduce_min(token_ids)), int(tf.reduce_max(token_ids))
        if least < 0 or greatest >= vocabulary_size:
            wrong = least if least < 0 else greatest
            raise ValueError(f"prompt must have token ids from 0 to {vocabulary_size - 1}, received {wrong}")
    return token_ids, mask


def _as_tensor(prompt):
    """A prompt as a tensor, or as a ragged one if its rows have different lengths."""
    if isinstance(prompt, tf.RaggedTensor):
        return prompt
    try:
        if isinstance(prompt, (list, tuple)) and len({len(row) for row in prompt}) > 1:
            return tf.ragged.constant([np.asarray(row).tolist() for row in prompt])
        return tf.convert_to_tensor(prompt)
    except (TypeError, ValueError):
        raise ValueError(f"prompt must be integers [batch, length] or rows of integers, received {prompt!r}") from None


def check_length(model, token_ids, max_new_tokens):
    """Raise a ValueError if a prompt and the tokens after it do not fit into the model."""
    check_positive("max_new_tokens", max_new_tokens)
    length, limit = token_ids.shape[1], model.max_length
    if limit is not None and length is None:
        raise ValueError(f"prompt must have a known length in a model with max_length={limit}")
    if limit is not None and length + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens: prompt and new tokens together must not exceed max_length={limit}, "
            f"received {length + max_new_tokens}"
        )


def first_token(model, token_ids, mask, room, sampling):
    """The token [B] after prompts [B, T], and the cache, which has room for as many positions as `room` says."""
    cache = model.init_cache(tf.shape(token_ids)[0], room)
    logits, cache = model(token_ids, mask=mask, cache=cache)
    if mask is None:
        return sampling.draw(logits[:, -1], 0), cache
    last = tf.reduce_sum(tf.cast(mask, tf.int32), axis=1) - 1
    return sampling.draw(tf.gather(logits, last, batch_dims=1), 0), cache


def next_token(model, token, cache, step, sampling):
    """The token [B] after `token` [B], and the next cache."""
    logits, cache = model(token[:, None], cache=cache)
    return sampling.draw(logits[:, 0], step), cache


def all_tokens(model, token_ids, mask, num_tokens, sampling):
    """`num_tokens` tokens after each prompt: [B, num_tokens], in one loop."""

    def body(step, token, cache, tokens):
        token, cache = next_token(model, token, cache, step, sampling)
        return step + 1, token, cache, tokens.write(step, token)

    token, cache = first_token(model, token_ids, mask, tf.shape(token_ids)[1] + num_tokens, sampling)
    tokens = tf.TensorArray(tf.int32, size=num_tokens, element_shape=[token_ids.shape[0]]).write(0, token)
    *_, tokens = tf.while_loop(
        lambda step, *_: step < num_tokens, body, (1, token, cache, tokens), maximum_iterations=num_tokens - 1
    )
    return tf.transpose(tokens.stack())
