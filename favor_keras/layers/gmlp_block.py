import math
import random

import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_positive, check_probability, check_rate, check_seed, check_size_or_zero
from favor_keras.layers.masks import zero_where_masked
from favor_keras.layers.short_convolution import ShortConvolution
from favor_keras.layers.spatial_gating_unit import (
    SpatialGatingUnit,
    check_cache,
    check_can_stream,
    spec_with_cache,
    state_dtype,
)
from favor_keras.layers.tiny_attention import TinyAttention
from favor_keras.ops.kernels import serialize_kernel
from favor_keras.ops.masks import checked_mask
from favor_keras.ops.spatial_gating import STATE_NAMES, check_length, checked_visibility_mask

HISTORY_NAME = "convolution_inputs"


@keras.saving.register_keras_serializable(package="favor_keras")
class GMLPBlock(keras.layers.Layer):
    """A block of gMLP: a feed-forward network with a gate along the sequence in its middle.

        output = x + proj2(sgu(activation(proj1(norm(x)))))

    where `sgu` is a `SpatialGatingUnit`. It takes the place of attention and feed-forward network
    together. With `attention_size` it is a block of aMLP. Inputs are [batch, length, features].

    Of size d, d_ffn = f and seq_len = n it has 2 d + (d f + f) + f + (n^2 + n) + (f d / 2 + d)
    weights: two layer norms, two projections and the gate. A Toeplitz gate has 3 n - 1 instead of
    n^2 + n, H heads H times as many; an attention of size a has 3 (d a + a) + (a f + f) / 2 more
    (besides the random projection of its kernel, which is not trained) and a convolution of width w,
    w d. A sequence costs O(length * d * f + length^2 * f), a token of a stream O(d * f + n * f).

    Args:
        d_ffn: the size f between the projections, even.
        seq_len: the greatest length n. Shorter sequences use the leading block of the gate.
        causal: whether position i sees the positions j <= i only.
        activation: between the first projection and the gate.
        gating_weights: "full" or "toeplitz", see `SpatialGatingUnit`.
        num_heads: number of gates, for equal shares of the f / 2 channels.
        attention_size: size of the queries, keys and values of an attention with one head, from
            norm(x), whose output is added to the gate; 0 for none (64 is the paper's).
        attention_kernel: None for softmax attention. Or a kernel of `favor_keras.ops.kernels`, by name or
            as an object, for linear attention, over a fixed orthogonal projection if it needs one.
        short_convolution: width of a causal depthwise convolution with SiLU on norm(x); 0 for none.
        survival_probability: the probability with which, in training, a sequence goes through the
            block and not only past it (stochastic depth); what goes through is divided by it.
        dropout: rate of the dropout on the output of the second projection.
        seed: integer for dropout, stochastic depth and random features; None draws one.
        **kwargs: name, dtype and trainable.

    Call arguments:
        inputs: [B, T, d], T at most seq_len.
        mask: [B, T], 1 to keep; also taken from Keras. Masked positions are passed over: the others
            are numbered as if these had been cut out, and these keep their inputs.
        visibility_mask: [T, T] or [B, T, T], 1 where position i (the last axis but one) sees j. Not
            with `short_convolution` or `attention_kernel`, which cannot follow it.
        cache: what came before, see `init_cache`. Only if causal, and without `visibility_mask`.
        training: whether to apply dropout and stochastic depth.

    Returns:
        [B, T, d] in the compute dtype; with `cache` also the new cache.

    Raises:
        ValueError: for arguments or inputs other than described, such as more than seq_len positions.
            Inside a graph the outputs for positions that the cache has no room for are NaN instead.

    References:
        arXiv:2105.08050; arXiv:1603.09382 (stochastic depth)

    Example:

    >>> import keras
    >>> from favor_keras import GMLPBlock
    >>> inputs = keras.random.normal([1, 6, 32])
    >>> block = GMLPBlock(d_ffn=64, seq_len=16, causal=True)
    >>> whole = block(inputs)
    >>> first, cache = block(inputs[:, :4], cache=block.init_cache(batch_size=1))
    >>> rest, cache = block(inputs[:, 4:], cache=cache)
    >>> bool(keras.ops.max(abs(whole - keras.ops.concatenate([first, rest], axis=1))) < 1e-5)
    True
    """

    def __init__(
        self,
        d_ffn,
        seq_len,
        causal=False,
        activation="gelu",
        gating_weights="full",
        num_heads=1,
        attention_size=0,
        attention_kernel=None,
        short_convolution=0,
        survival_probability=1.0,
        dropout=0.0,
        seed=None,
        **kwargs,
    ):
        super().__init__(autocast=False, **kwargs)
        check_positive("d_ffn", d_ffn)
        check_positive("num_heads", num_heads)
        check_size_or_zero("attention_size", attention_size)
        check_size_or_zero("short_convolution", short_convolution)
        if d_ffn % (2 * num_heads):
            raise ValueError(
                f"d_ffn must be even and d_ffn / 2 divisible by num_heads, received {d_ffn} and num_heads={num_heads}"
            )
        if attention_kernel is not None and not attention_size:
            raise ValueError(f"attention_kernel needs attention_size > 0, received 0 and {attention_kernel!r}")
        check_probability("survival_probability", survival_probability)
        check_rate("dropout", dropout)
        check_seed(seed)
        self.d_ffn = d_ffn
        self.seq_len = seq_len
        self.causal = causal
        self.activation = keras.activations.get(activation)
        self.gating_weights = gating_weights
        self.num_heads = num_heads
        self.attention_size = attention_size
        self.short_convolution = short_convolution
        self.survival_probability = survival_probability
        self.dropout_rate = dropout
        self.seed = random.randint(1, 10**9) if seed is None else seed
        self.supports_masking = True

        options = {"dtype": self.dtype_policy}
        seeds = random.Random(self.seed)
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5, name="norm", **options)
        exact = gelu if self.activation is keras.activations.gelu else self.activation
        self.proj1 = keras.layers.Dense(d_ffn, activation=exact, name="proj1", **options)
        self.sgu = SpatialGatingUnit(seq_len, causal, gating_weights, num_heads, name="sgu", **options)
        self.attention = self.convolution = None
        if attention_size:
            self.attention = TinyAttention(
                attention_size, d_ffn // 2, seq_len, causal, attention_kernel, self.seed, name="attention", **options
            )
        self.attention_kernel = self.attention.kernel if attention_size else None
        if short_convolution:
            self.convolution = ShortConvolution(short_convolution, name="convolution", **options)
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.randrange(2**31), **options)
        self.stochastic_depth = keras.layers.Dropout(
            1 - survival_probability, noise_shape=(None, 1, 1), seed=seeds.randrange(2**31), **options
        )

    def build(self, inputs_shape):
        if len(inputs_shape) != 3:
            raise ValueError(f"inputs must be [batch, length, features], received shape {tuple(inputs_shape)}")
        for layer in filter(None, (self.norm, self.convolution, self.attention, self.proj1)):
            layer.build(inputs_shape)
        self.sgu.build((*inputs_shape[:2], self.d_ffn))
        self.proj2 = keras.layers.Dense(inputs_shape[-1], name="proj2", dtype=self.dtype_policy)
        self.proj2.build((*inputs_shape[:2], self.d_ffn // 2))

    def call(self, inputs, mask=None, inputs_mask=None, visibility_mask=None, cache=None, training=None):
        # Keras hands an implicit mask over as `mask`, or as `inputs_mask` if there are other tensors.
        mask = inputs_mask if mask is None else mask
        self._check(inputs, visibility_mask, cache)
        inputs = tf.cast(inputs, self.compute_dtype)
        mask = checked_mask(mask, "mask", inputs.shape[:2])
        visibility_mask = checked_visibility_mask(visibility_mask, inputs)
        x = zero_where_masked(self.norm(inputs), mask)
        x, convolution_state = self._convolve(x, mask, cache)
        added_gate, attention_state = self._attend(x, mask, visibility_mask, cache)
        x = self.sgu(
            self.proj1(x),
            mask=mask,
            visibility_mask=visibility_mask,
            added_gate=added_gate,
            cache=None if cache is None else {name: cache[name] for name in STATE_NAMES},
        )
        x, gate_state = (x, {}) if cache is None else x
        x = self.dropout(zero_where_masked(self.proj2(x), mask), training=training)
        x = inputs + self.stochastic_depth(x, training=training)
        return x if cache is None else (x, {**convolution_state, **attention_state, **gate_state})

    def _convolve(self, x, mask, cache):
        """The convolution of x, or x, and what the next cache has of it."""
        if self.convolution is None:
            return x, {}
        x, history = self.convolution(x, mask=mask, history=None if cache is None else cache[HISTORY_NAME])
        history = tf.cast(history, state_dtype(self))
        history.set_shape([None, self.short_convolution - 1, None])  # as a loop requires that carries it
        return x, {HISTORY_NAME: history}

    def _attend(self, x, mask, visibility_mask, cache):
        """What the attention adds to the gate, or None, and what the next cache has of it."""
        if self.attention is None:
            return None, {}
        return self.attention(x, mask=mask, visibility_mask=visibility_mask, cache=cache)

    def init_cache(self, batch_size, max_length=None):
        """The cache before the first token: pass it to `call(..., cache=...)`, go on with the new one.

        A sequence in pieces gives what the whole sequence gives, whatever the pieces. The cache is
        a flat dict of float32 tensors whose first axis is the batch: that of the `SpatialGatingUnit`,
        the attention's keys and values or the state of its kernel, and the last inputs of the
        convolution. Its size does not depend on the length.

        Args:
            batch_size: an integer or a scalar tensor.
            max_length: how many tokens will come at most, or None.

        Raises:
            ValueError: if the block is not causal or not built yet, or max_length exceeds seq_len.
        """
        check_can_stream(self, max_length)
        cache = self.sgu.init_cache(batch_size)
        if self.attention is not None:
            cache.update(self.attention.init_cache(batch_size))
        if self.convolution is not None:
            shape = [batch_size, self.short_convolution - 1, self.norm.gamma.shape[0]]
            cache[HISTORY_NAME] = tf.zeros(shape, state_dtype(self))
        return cache

    def _check(self, inputs, visibility_mask, cache):
        if len(inputs.shape) != 3:
            raise ValueError(f"inputs must be [batch, length, features], received the shape {inputs.shape}")
        check_length("inputs", inputs.shape[1], self.seq_len)
        if visibility_mask is not None and self.convolution is not None:
            raise ValueError("visibility_mask must be None with short_convolution, which sees the positions before")
        if cache is not None:
            names = {*STATE_NAMES}
            names |= {HISTORY_NAME} if self.convolution is not None else set()
            names |= {*self.attention.cache_names} if self.attention is not None else set()
            check_cache(self, cache, names, inputs)

    def compute_output_spec(self, inputs, mask=None, inputs_mask=None, visibility_mask=None, cache=None, training=None):
        self._check(inputs, visibility_mask, cache)
        return spec_with_cache(self, inputs.shape, cache)

    def compute_output_shape(self, inputs_shape):
        return tuple(inputs_shape)

    def get_config(self):
        kernel = self.attention_kernel
        return {
            **super().get_config(),
            "d_ffn": self.d_ffn,
            "seq_len": self.seq_len,
            "causal": self.causal,
            "activation": keras.activations.serialize(self.activation),
            "gating_weights": self.gating_weights,
            "num_heads": self.num_heads,
            "attention_size": self.attention_size,
            "attention_kernel": None if kernel is None else serialize_kernel(kernel),
            "short_convolution": self.short_convolution,
            "survival_probability": self.survival_probability,
            "dropout": self.dropout_rate,
            "seed": self.seed,
        }


def gelu(x):
    """x times the normal distribution function of x, exact in float64 too, where TensorFlow's is not."""
    return 0.5 * x * (1.0 + tf.math.erf(x * math.sqrt(0.5)))
