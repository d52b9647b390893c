import keras

from favor_keras.layers.arguments import check_positive, check_rate, check_seed


@keras.saving.register_keras_serializable(package="favor_keras")
class DecoderBlock(keras.layers.Layer):
    """A mixer and a feed-forward network, each after a layer norm and inside a residual:

        y = x + mixer(norm(x)),    output = y + W_2 activation(W_1 norm(y))

    Args:
        mixer: a causal layer `mixer(x, mask=..., cache=..., training=...)` that keeps the shape of
            x [B, T, hidden_size] and has `init_cache`.
        feed_forward_size: size between W_1 and W_2.
        dropout: rate of the dropout on both branches.
        seed: integer for the dropout, or None.
        normalize_mixer_input: whether the mixer gets norm(x); False gives it x itself, as in the
            fast-weights transformer of arXiv:2102.11174.
        activation: a name or function of Keras, between W_1 and W_2.
        **kwargs: name, dtype and trainable.

    Call arguments:
        inputs: [B, T, hidden_size].
        mask: [B, T], 1 to keep; also taken from Keras.
        cache: a cache of the mixer.
        training: whether to apply dropout.

    Returns:
        [B, T, hidden_size]; with `cache` also the mixer's new cache.

    Raises:
        ValueError: if `mixer` is not a layer with `init_cache`, or another argument is not as
            described.

    Example:

    >>> import keras
    >>> from favor_keras import SelfAttention
    >>> from favor_keras.models import DecoderBlock
    >>> block = DecoderBlock(SelfAttention(32, num_heads=4, causal=True), feed_forward_size=128)
    >>> block(keras.ops.ones([2, 7, 32])).shape
    TensorShape([2, 7, 32])
    """

    def __init__(
        self,
        mixer,
        feed_forward_size,
        dropout=0.0,
        seed=None,
        normalize_mixer_input=True,
        activation="gelu",
        **kwargs,
    ):
        super().__init__(autocast=False, **kwargs)
        if not isinstance(mixer, keras.layers.Layer) or not hasattr(mixer, "init_cache"):
            raise ValueError(f"mixer must be a layer with init_cache, received {mixer!r}")
        check_positive("feed_forward_size", feed_forward_size)
        check_rate("dropout", dropout)
        check_seed(seed)
        self.mixer = mixer
        self.feed_forward_size = feed_forward_size
        self.dropout_rate = dropout
        self.seed = seed
        self.normalize_mixer_input = normalize_mixer_input
        self.activation = keras.activations.get(activation)
        self.supports_masking = True

        options = {"dtype": self.dtype_policy}
        if normalize_mixer_input:
            self.mixer_norm = keras.layers.LayerNormalization(epsilon=1e-5, name="mixer_norm", **options)
        self.feed_forward_norm = keras.layers.LayerNormalization(epsilon=1e-5, name="feed_forward_norm", **options)
        self.expand = keras.layers.Dense(feed_forward_size, activation=self.activation, name="expand", **options)
        self.dropout = keras.layers.Dropout(dropout, seed=seed, **options)

    def build(self, inputs_shape):
        # The one child whose size is not known before.
        self.contract = keras.layers.Dense(inputs_shape[-1], name="contract", dtype=self.dtype_policy)
        if self.normalize_mixer_input:
            self.mixer_norm.build(inputs_shape)
        for layer in (self.mixer, self.feed_forward_norm, self.expand):
            if not layer.built:
                layer.build(inputs_shape)
        self.contract.build((*inputs_shape[:-1], self.feed_forward_size))

    def call(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        mask = inputs_mask if mask is None else mask
        x = keras.ops.cast(inputs, self.compute_dtype)
        mixer_input = self.mixer_norm(x) if self.normalize_mixer_input else x
        mixed = self.mixer(mixer_input, mask=mask, cache=cache, training=training)
        if cache is not None:
            mixed, cache = mixed
        x = x + self.dropout(mixed, training=training)
        x = x + self.dropout(self.contract(self.expand(self.feed_forward_norm(x))), training=training)
        return x if cache is None else (x, cache)

    def init_cache(self, batch_size, max_length=None):
        """The mixer's cache before the first token."""
        return self.mixer.init_cache(batch_size, max_length)

    def compute_output_spec(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if cache is None:
            return output
        return output, {name: keras.KerasTensor(c.shape, dtype=c.dtype) for name, c in cache.items()}

    def compute_output_shape(self, inputs_shape):
        return tuple(inputs_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "mixer": keras.saving.serialize_keras_object(self.mixer),
            "feed_forward_size": self.feed_forward_size,
            "dropout": self.dropout_rate,
            "seed": self.seed,
            "normalize_mixer_input": self.normalize_mixer_input,
            "activation": keras.activations.serialize(self.activation),
        }

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "mixer": keras.saving.deserialize_keras_object(config["mixer"])})
