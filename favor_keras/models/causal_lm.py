import random
from functools import partial

import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_positive, check_rate, check_seed
from favor_keras.models.decoder_block import DecoderBlock
from favor_keras.models.generation import (
    Sampling,
    all_tokens,
    check_length,
    checked_prompt,
    first_token,
    next_token,
    python_integer,
)
from favor_keras.models.mixers import BLOCKS, get_mixer
from favor_keras.ops.kernels import serialize_registered


@keras.saving.register_keras_serializable(package="favor_keras")
class CausalLM(keras.Model):
    """A language model: token ids to the logits of the next token, at every position.

    An embedding, `num_layers` blocks of a causal mixer and a feed-forward network (`DecoderBlock`),
    a layer norm, and a projection to the vocabulary. The mixers "gmlp" and "amlp" are whole blocks
    (`GMLPBlock`), without another feed-forward network, for sequences of up to `max_length`.

    Args:
        vocabulary_size: number of different tokens V.
        hidden_size: size of the embedding and of every block.
        num_layers: number of blocks.
        num_heads: number of heads of every mixer.
        feed_forward_size: size inside the feed-forward networks; None is 4 * hidden_size. Not for
            "gmlp" and "amlp", whose d_ffn is in `mixer_options` and by default 5 * hidden_size.
        mixer: a name in `favor_keras.models.mixers.MIXERS` ("favor"), or a function `(hidden_size,
            num_heads, **options) -> layer` (registered with Keras, if the model is to be saved).
        mixer_options: dict of further arguments for the mixer, over the recommended ones. The
            `survival_probability` of "gmlp" and "amlp" is that of the last block; from 1 it falls to
            this by the same amount per block.
        block_options: dict of `normalize_mixer_input` and `activation`, or one of them, for the
            `DecoderBlock`s. Not for "gmlp" and "amlp", which have none.
        dropout: rate of the dropout on the embedding and on every branch of the blocks.
        max_length: the greatest number of positions, or None if there is no limit. Needed for
            `position_embedding`, "gmlp" and "amlp".
        position_embedding: whether to add a learned embedding of the position to that of the token.
        seed: integer that all random numbers of the model come from, initial weights excepted
            (`keras.utils.set_random_seed` sets those); None draws one.
        **kwargs: name, dtype and trainable.

    Call arguments:
        token_ids: integers [B, T].
        mask: [B, T], 1 to keep, 0 for padding, or None.
        cache: what came before, see `init_cache`.
        training: whether to apply dropout and stochastic depth.

    Returns:
        Logits [B, T, V] in float32; with `cache` also the new cache.

    Raises:
        ValueError: for an unknown mixer, arguments other than described, and more positions than
            `max_length` where their number is known: not for the length that a graph leaves open.

    Example:

    >>> import numpy as np
    >>> from favor_keras import CausalLM
    >>> model = CausalLM(vocabulary_size=50, hidden_size=32, num_layers=2, num_heads=2)
    >>> model(np.ones([2, 10], "int32")).shape
    TensorShape([2, 10, 50])
    >>> model.generate(np.ones([2, 3], "int32"), max_new_tokens=5, seed=0).shape
    TensorShape([2, 8])
    """

    def __init__(
        self,
        vocabulary_size,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        feed_forward_size=None,
        mixer="favor",
        mixer_options=None,
        block_options=None,
        dropout=0.0,
        max_length=None,
        position_embedding=False,
        seed=None,
        **kwargs,
    ):
        # Keras would cast a float32 cache to the compute dtype.
        super().__init__(autocast=False, **kwargs)
        sizes = {"vocabulary_size": vocabulary_size, "hidden_size": hidden_size}
        sizes |= {"num_layers": num_layers, "num_heads": num_heads}
        optional = {"feed_forward_size": feed_forward_size, "max_length": max_length}
        for name, value in {**sizes, **{n: v for n, v in optional.items() if v is not None}}.items():
            check_positive(name, value)
        check_rate("dropout", dropout)
        check_seed(seed)
        if position_embedding and max_length is None:
            raise ValueError("max_length must be a positive integer with position_embedding, received None")
        self.supports_masking = True
        self.vocabulary_size = vocabulary_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.feed_forward_size = feed_forward_size
        self.mixer = mixer
        self.mixer_options = _checked_mixer_options(mixer, mixer_options)
        self.block_options = _checked_block_options(block_options)
        self.dropout_rate = dropout
        self.max_length = max_length
        self.seed = random.randint(1, 10**9) if seed is None else seed

        options = {"dtype": self.dtype_policy}
        normal = keras.initializers.RandomNormal
        self.embedding = keras.layers.Embedding(vocabulary_size, hidden_size, normal(stddev=0.02), **options)
        self.position_embedding = None
        if position_embedding:
            self.position_embedding = keras.layers.Embedding(max_length, hidden_size, normal(stddev=0.02), **options)
        self.dropout = keras.layers.Dropout(dropout, seed=self.seed, **options)
        self.blocks = [self._make_block(i) for i in range(num_layers)]
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5, **options)
        self.head = keras.layers.Dense(vocabulary_size, dtype=self.dtype_policy)

    def _make_block(self, i):
        make_mixer = get_mixer(self.mixer)
        # Layers of one seed would share one random projection, and drop the same numbers.
        options = {"seed": self.seed + i, "dtype": self.dtype_policy}
        block_options = {"dropout": self.dropout_rate, "name": f"block_{i}"}
        if make_mixer in BLOCKS.values():
            self._check_whole_block()
            block_options |= {"seq_len": self.max_length, "depth": (i + 1) / self.num_layers}
            return make_mixer(self.hidden_size, self.num_heads, **options, **block_options, **self.mixer_options)
        mixer = make_mixer(self.hidden_size, self.num_heads, **options, **self.mixer_options)
        if not getattr(mixer, "causal", True):
            raise ValueError(f"mixer must make causal layers, received one that makes {mixer.name} with causal=False")
        block_options |= self.block_options
        return DecoderBlock(mixer, self.feed_forward_size or 4 * self.hidden_size, **options, **block_options)

    def _check_whole_block(self):
        if self.max_length is None:
            raise ValueError(
                f"max_length must be a positive integer with mixer={self.mixer!r}, whose gates are made for it, "
                "received None"
            )
        if self.feed_forward_size is not None:
            raise ValueError(
                f"feed_forward_size must be None with mixer={self.mixer!r}, which has d_ffn in mixer_options instead, "
                f"received {self.feed_forward_size}"
            )
        if self.block_options:
            raise ValueError(
                f"block_options must be None with mixer={self.mixer!r}, which has no DecoderBlock, "
                f"received {dict(self.block_options)!r}"
            )

    def build(self, token_ids_shape):
        hidden_shape = (*token_ids_shape, self.hidden_size)
        self.embedding.build(token_ids_shape)
        if self.position_embedding is not None:
            self.position_embedding.build(token_ids_shape)
        for layer in (*self.blocks, self.norm, self.head):
            layer.build(hidden_shape)

    def call(self, token_ids, mask=None, token_ids_mask=None, cache=None, training=None):
        mask = token_ids_mask if mask is None else mask
        self._check_inputs(token_ids, mask, cache)
        x = self.embedding(token_ids)
        new_cache = {}
        if self.max_length is not None:
            positions = self._positions(token_ids, mask, cache, new_cache)
        if self.position_embedding is not None:
            x += self.position_embedding(positions)
        x = self.dropout(x, training=training)
        for block in self.blocks:
            if cache is None:
                x = block(x, mask=mask, training=training)
            else:
                x, block_cache = block(x, mask=mask, cache=_part_of(cache, block.name), training=training)
                new_cache.update({f"{block.name}_{name}": tensor for name, tensor in block_cache.items()})
        logits = tf.cast(self.head(self.norm(x)), "float32")
        return logits if cache is None else (logits, new_cache)

    def _check_inputs(self, token_ids, mask, cache):
        if len(token_ids.shape) != 2:
            raise ValueError(f"token_ids must be [batch, length], received the shape {token_ids.shape}")
        if mask is not None and not token_ids.shape.is_compatible_with(mask.shape):
            raise ValueError(f"mask must have the shape {token_ids.shape} of token_ids, received {mask.shape}")
        if cache is not None and self.max_length is not None:
            batch_size = token_ids.shape[:1]
            if "position" not in cache or not batch_size.is_compatible_with(cache["position"].shape):
                received = cache["position"].shape if "position" in cache else sorted(cache)
                raise ValueError(f"cache must have a position {batch_size} as from init_cache, received {received}")

    def _positions(self, token_ids, mask, cache, new_cache):
        """The number of each token among the tokens that are kept."""
        if token_ids.shape[1] is not None and token_ids.shape[1] > self.max_length:
            raise ValueError(
                f"token_ids must have at most max_length={self.max_length} positions, received {token_ids.shape[1]}"
            )
        kept = tf.ones_like(token_ids, tf.int32) if mask is None else tf.cast(mask, tf.int32)
        positions = tf.cumsum(kept, axis=1)
        if cache is not None:
            positions += tf.cast(cache["position"], tf.int32)[:, None]
            new_cache["position"] = cache["position"] + tf.cast(tf.reduce_sum(kept, axis=1), "float32")
        if tf.executing_eagerly() and int(tf.reduce_max(positions)) > self.max_length:
            raise ValueError(
                f"cache and token_ids together must have at most max_length={self.max_length} positions, "
                f"received {int(tf.reduce_max(positions))}"
            )
        return tf.maximum(positions - 1, 0)

    @property
    def cache_grows(self):
        """Whether the size of the cache depends on the length, which `init_cache` then has to know."""
        return any(getattr(getattr(block, "mixer", None), "cache_grows", False) for block in self.blocks)

    def init_cache(self, batch_size, max_length=None):
        """The cache before the first token: a flat dict of tensors, batch first.

        `model(token_ids, cache=cache)` takes any number of new tokens and returns their logits and
        the next cache. A sequence in pieces gives what the whole sequence gives.

        Args:
            batch_size: an integer or a scalar tensor.
            max_length: the most tokens that will come, for mixers whose cache grows with it.
        """
        if not self.built:
            self.build((None, None))
        caches = {block.name: block.init_cache(batch_size, max_length) for block in self.blocks}
        flat = {f"{block}_{name}": tensor for block, cache in caches.items() for name, tensor in cache.items()}
        return flat if self.max_length is None else {**flat, "position": tf.zeros([batch_size])}

    def generate(self, prompt, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None):
        """Continue prompts, one sampled token at a time, in one compiled loop.

        Args:
            prompt: integers [B, T]; or prompts of different lengths, as a list of lists or arrays or a
                `tf.RaggedTensor`. At least one token each.
            max_new_tokens: how many tokens to add to each.
            temperature: the logits are divided by it before sampling; 0 takes the most likely token.
            top_k: draw from the k most likely tokens only, or None.
            top_p: draw from the fewest most likely tokens whose probabilities sum to at least this, or None.
            seed: integer that the samples depend on; None draws one.

        Returns:
            Integers [B, T + max_new_tokens]; a `tf.RaggedTensor` for prompts of different lengths.

        Raises:
            ValueError: for an empty prompt, an argument out of its range, and for more than
                `max_length` positions in all.
        """
        max_new_tokens = python_integer(max_new_tokens)
        token_ids, mask = self._checked_prompt(prompt, max_new_tokens)
        sampling = Sampling.checked(temperature, top_k, top_p, seed)
        new_ids = self._compiled(all_tokens)(token_ids, mask, tf.constant(max_new_tokens), sampling)
        new_ids = tf.cast(new_ids, token_ids.dtype)
        if mask is None:
            return tf.concat([token_ids, new_ids], axis=1)
        return tf.concat([tf.ragged.boolean_mask(token_ids, mask), tf.RaggedTensor.from_tensor(new_ids)], axis=1)

    def stream(self, prompt, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None):
        """An iterator over the new tokens [B] of `generate`, each as soon as it is there.

        Arguments and errors are those of `generate`, and so are the tokens.

        Example:

        >>> import numpy as np
        >>> from favor_keras import CausalLM
        >>> model = CausalLM(vocabulary_size=50, hidden_size=32, num_layers=1, num_heads=2)
        >>> len(list(model.stream(np.ones([1, 3], "int32"), max_new_tokens=5)))
        5
        """
        max_new_tokens = python_integer(max_new_tokens)
        token_ids, mask = self._checked_prompt(prompt, max_new_tokens)
        return self._streamed(token_ids, mask, max_new_tokens, Sampling.checked(temperature, top_k, top_p, seed))

    def _streamed(self, token_ids, mask, max_new_tokens, sampling):
        room = tf.constant(token_ids.shape[1] + max_new_tokens)
        token, cache = self._compiled(first_token)(token_ids, mask, room, sampling)
        yield token.numpy()
        for step in range(1, max_new_tokens):
            token, cache = self._compiled(next_token)(token, cache, tf.constant(step), sampling)
            yield token.numpy()

    def _checked_prompt(self, prompt, max_new_tokens):
        token_ids, mask = checked_prompt(prompt, self.vocabulary_size)
        check_length(self, token_ids, max_new_tokens)
        if not self.built:
            self.build((None, None))
        return token_ids, mask

    def _compiled(self, function):
        """A function of this model and tensors as a graph, made once."""
        name = f"_compiled_{function.__name__}"
        if not hasattr(self, name):
            setattr(self, name, tf.function(partial(function, self), reduce_retracing=True))
        return getattr(self, name)

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "feed_forward_size": self.feed_forward_size,
            "mixer": self.mixer if isinstance(self.mixer, str) else serialize_registered("mixer", self.mixer),
            "mixer_options": self.mixer_options,
            "block_options": {
                name: keras.activations.serialize(option) if callable(option) else option
                for name, option in self.block_options.items()
            },
            "dropout": self.dropout_rate,
            "max_length": self.max_length,
            "position_embedding": self.position_embedding is not None,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config):
        if isinstance(config["mixer"], dict):
            config = {**config, "mixer": keras.saving.deserialize_keras_object(config["mixer"])}
        return cls(**config)


def _checked_block_options(block_options):
    names = ("normalize_mixer_input", "activation")
    if not isinstance(block_options, (dict, type(None))) or not set(block_options or {}) <= set(names):
        raise ValueError(f"block_options must be None or a dict with names among {names}, received {block_options!r}")
    return dict(block_options or {})


def _checked_mixer_options(mixer, options):
    if not isinstance(options, (dict, type(None))):
        raise ValueError(f"mixer_options must be a dict or None, received {options!r}")
    given = {"seed", "dtype"} | ({"causal"} if isinstance(mixer, str) else set())
    given |= {"dropout", "name", "seq_len", "depth"} if mixer in BLOCKS else set()
    if given & set(options or {}):
        names = sorted(given & set(options))
        raise ValueError(
            f"mixer_options must not have what the model itself gives to mixer={mixer!r}, received {names}"
        )
    return dict(options or {})


def _part_of(cache, prefix):
    return {name.removeprefix(f"{prefix}_"): tensor for name, tensor in cache.items() if name.startswith(f"{prefix}_")}
