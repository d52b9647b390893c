import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_positive, check_rate
from favor_keras.layers.masks import checked_key_mask, zero_where_masked
from favor_keras.layers.spatial_gating_unit import check_cache, spec_with_cache, state_dtype
from favor_keras.ops.cache_places import check_room, places_of, put_in_place, sees

CACHE_NAMES = ("keys", "values", "position")


@keras.saving.register_keras_serializable(package="favor_keras")
class SoftmaxAttention(keras.layers.Layer):
    """Causal self-attention by `keras.layers.MultiHeadAttention`, with a cache of its keys and values.

    The exact attention that the linear layers are measured by: its cost per token grows with the
    length, and so does its cache.

    Args:
        hidden_size: size of the queries, keys and values of all heads together, and of the output.
        num_heads: number of heads, which must divide hidden_size.
        attention_dropout: rate of the dropout on the attention weights.
        use_bias: whether the projections have a bias.
        seed: integer for the dropout, or None.
        **kwargs: name, dtype and trainable.

    Call arguments:
        inputs: [B, T, hidden_size].
        mask: [B, T], 1 to keep; also taken from Keras.
        cache: what came before, see `init_cache`.
        training: whether to apply dropout. Not with a cache.

    Returns:
        [B, T, hidden_size] in the compute dtype; with `cache` also the new cache.

    Raises:
        ValueError: for arguments or inputs other than described, such as more positions than a cache
            has room for. Inside a graph the outputs for those are NaN instead.

    Example:

    >>> import keras
    >>> from favor_keras.layers import SoftmaxAttention
    >>> inputs = keras.random.normal([2, 7, 32])
    >>> layer = SoftmaxAttention(32, num_heads=4)
    >>> whole = layer(inputs)
    >>> first, cache = layer(inputs[:, :5], cache=layer.init_cache(batch_size=2, max_length=7))
    >>> rest, cache = layer(inputs[:, 5:], cache=cache)
    >>> rest.shape
    TensorShape([2, 2, 32])
    """

    causal = True
    cache_grows = True  # with the length, which `init_cache` so has to know

    def __init__(self, hidden_size, num_heads, attention_dropout=0.0, use_bias=False, seed=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        check_positive("hidden_size", hidden_size)
        check_positive("num_heads", num_heads)
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size must be divisible by num_heads, received {hidden_size} and {num_heads}")
        check_rate("attention_dropout", attention_dropout)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.use_bias = use_bias
        self.seed = seed
        self.supports_masking = True
        self.attention = keras.layers.MultiHeadAttention(
            num_heads,
            hidden_size // num_heads,
            dropout=attention_dropout,
            use_bias=use_bias,
            seed=seed,
            name="attention",
            dtype=self.dtype_policy,
        )

    def build(self, inputs_shape):
        self.attention.build(inputs_shape, inputs_shape)

    def call(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        mask = inputs_mask if mask is None else mask
        inputs = tf.cast(inputs, self.compute_dtype)
        mask = checked_key_mask(mask, inputs, "mask")
        inputs = zero_where_masked(inputs, mask)
        if cache is None:
            visible = None if mask is None else mask[:, None]
            return self.attention(inputs, inputs, attention_mask=visible, use_causal_mask=True, training=training)
        check_cache(self, cache, CACHE_NAMES, inputs)
        if training and self.attention_dropout:
            raise ValueError("training must be False with a cache and attention_dropout above 0, received True")
        return self._continue(inputs, mask, cache)

    def _continue(self, inputs, mask, cache):
        """The outputs for new positions, which see all earlier ones by their cached keys and values."""
        kept = tf.ones(tf.shape(inputs)[:2], tf.bool) if mask is None else mask
        start = tf.cast(cache["position"], tf.int32)
        places, size = places_of(kept, start), tf.shape(cache["keys"])[1]
        check_room(places, size, "max_length")
        key, value = self.attention.key_dense(inputs), self.attention.value_dense(inputs)
        new = {
            "keys": put_in_place(cache["keys"], tf.cast(key, cache["keys"].dtype), start, kept),
            "values": put_in_place(cache["values"], tf.cast(value, cache["values"].dtype), start, kept),
            "position": cache["position"] + tf.reduce_sum(tf.cast(kept, cache["position"].dtype), axis=1),
        }
        attended = keras.ops.dot_product_attention(
            self.attention.query_dense(inputs),
            tf.cast(new["keys"], key.dtype),
            tf.cast(new["values"], value.dtype),
            mask=sees(places, size)[:, None],
        )
        output = self.attention.output_dense(attended)
        return tf.where((places < size)[..., None], output, tf.constant(float("nan"), output.dtype)), new

    def init_cache(self, batch_size, max_length=None):
        """The cache before the first token: a flat dict of float32 tensors, batch first.

        Args:
            batch_size: an integer or a scalar tensor.
            max_length: how many positions the cache has room for, an integer or a scalar tensor.

        Raises:
            ValueError: if max_length is None.
        """
        if max_length is None:
            raise ValueError("max_length must be the greatest number of positions, received None")
        dtype, shape = state_dtype(self), [batch_size, max_length, self.num_heads, self.hidden_size // self.num_heads]
        return {
            "keys": tf.zeros(shape, dtype),
            "values": tf.zeros(shape, dtype),
            "position": tf.zeros([batch_size], dtype),
        }

    def compute_output_spec(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        return spec_with_cache(self, inputs.shape, cache)

    def compute_output_shape(self, inputs_shape):
        return tuple(inputs_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "attention_dropout": self.attention_dropout,
            "use_bias": self.use_bias,
            "seed": self.seed,
        }
