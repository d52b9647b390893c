import random

import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_positive, check_rate, check_seed
from favor_keras.models.decoder_block import DecoderBlock
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
        ValueError: for an unknown mixer, arguments other than described, or more positions than
            `max_length`.

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
        dropout=0.0,
        max_length=None,
        position_embedding=False,
        seed=None,
        **kwargs,
    ):
        # Keras would cast a float32 cache to the compute dtype.
        super().__init__(autocast=False, **kwargs)
        sizes = {"vocabulary_size": vocabulary_size, "hidden_size": hidden_size, "num_layers": num_layers}
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
        self.mixer_options = dict(mixer_options or {})
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

    def build(self, token_ids_shape):
        hidden_shape = (*token_ids_shape, self.hidden_size)
        self.embedding.build(token_ids_shape)
        if self.position_embedding is not None:
            self.position_embedding.build(token_ids_shape)
        for layer in (*self.blocks, self.norm, self.head):
            layer.build(hidden_shape)

    def call(self, token_ids, mask=None, token_ids_mask=None, cache=None, training=None):
        mask = token_ids_mask if mask is None else mask
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

    def generate(self, token_ids, max_new_tokens, temperature=1.0, seed=None):
        """Continue token ids, one sampled token at a time; the time per token does not grow.

        Args:
            token_ids: integers [B, T], T at least 1.
            max_new_tokens: how many tokens to add.
            temperature: the logits are divided by it before sampling; 0 takes the most likely token.
            seed: integer that the samples depend on; None draws one.

        Returns:
            Integers [B, T + max_new_tokens].

        Raises:
            ValueError: for an empty prompt, a negative temperature or number of tokens, and for more
                than `max_length` positions in all.
        """
        token_ids = tf.convert_to_tensor(token_ids)
        if token_ids.shape.rank != 2 or token_ids.shape[1] == 0:
            raise ValueError(f"token_ids must be [batch, length] with length at least 1, received {token_ids.shape}")
        if not token_ids.dtype.is_integer:
            raise ValueError(f"token_ids must be integers, received {token_ids.dtype.name}")
        check_positive("max_new_tokens", max_new_tokens)
        check_seed(seed)
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, received {temperature!r}")
        if self.max_length is not None:
            self._check_total_length(token_ids.shape[1], max_new_tokens)
        if not self.built:
            self.build((None, None))
        if not hasattr(self, "_continue"):
            self._continue = tf.function(self._sample_tokens, reduce_retracing=True)
        seed = random.randint(1, 10**9) if seed is None else seed
        new_ids = self._continue(
            token_ids, tf.constant(max_new_tokens), tf.constant(float(temperature)), tf.constant(seed, tf.int64)
        )
        return tf.concat([token_ids, tf.cast(new_ids, token_ids.dtype)], axis=1)

    def _check_total_length(self, length, max_new_tokens):
        if length is None:
            raise ValueError(f"token_ids must have a known length in a model with max_length={self.max_length}")
        if length + max_new_tokens > self.max_length:
            raise ValueError(
                f"max_new_tokens: prompt and new tokens together must not exceed max_length={self.max_length}, "
                f"received {length + max_new_tokens}"
            )

    def _sample_tokens(self, token_ids, max_new_tokens, temperature, seed):
        def sample(logits, i):
            greedy = tf.argmax(logits, axis=-1)
            warm = logits / tf.maximum(temperature, 1e-6)
            drawn = tf.random.stateless_categorical(warm, 1, seed=tf.stack([seed, tf.cast(i, tf.int64)]))[:, 0]
            return tf.cast(tf.where(temperature > 0, drawn, greedy), tf.int32)

        def body(i, last, cache, new_ids):
            logits, cache = self(last[:, None], cache=cache)
            last = sample(logits[:, -1], i)
            return i + 1, last, cache, new_ids.write(i, last)

        logits, cache = self(token_ids, cache=self.init_cache(tf.shape(token_ids)[0]))
        first = sample(logits[:, -1], 0)
        new_ids = tf.TensorArray(tf.int32, size=max_new_tokens, element_shape=[token_ids.shape[0]]).write(0, first)
        *_, new_ids = tf.while_loop(
            lambda i, *_: i < max_new_tokens, body, (1, first, cache, new_ids), maximum_iterations=max_new_tokens - 1
        )
        return tf.transpose(new_ids.stack())

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


def _part_of(cache, prefix):
    return {name.removeprefix(f"{prefix}_"): tensor for name, tensor in cache.items() if name.startswith(f"{prefix}_")}
