import math
import random

import keras
import tensorflow as tf

from favor_keras.layers.masks import checked_mask, log_scale_of, zero_where_masked
from favor_keras.layers.short_convolution import ShortConvolution
from favor_keras.ops.attention import kernel_attention
from favor_keras.ops.kernels import KernelTransformation, get_kernel, serialize_kernel
from favor_keras.ops.linear_attention import STATE_NAMES, zero_state
from favor_keras.ops.projections import DIRECTIONS, draw_projection


@keras.saving.register_keras_serializable(package="favor_keras")
class FavorAttention(keras.layers.Layer):
    """Multi-head FAVOR+ attention (Performer), whose cost grows linearly with the length.

        o_i = sum_j (f(q_i) . f(k_j)) v_j / sum_j (f(q_i) . f(k_j))

    for every head, with queries q from `query`, keys k and values v from `source`, and the features
    f of a kernel: over all j, or over j <= i if causal. Inputs are [batch, length, features].
    The cost is proportional to length * nb_random_features * hidden_size. Sums and states are
    float32 under every dtype policy (float64 under float64).

    Args:
        hidden_size: size of the output, and of all heads together.
        num_heads: number of heads; must divide `hidden_size`.
        attention_dropout: fraction of the source positions that is left out of the numerator in
            training, drawn for each head (the rest is scaled up, so the mean does not change).
        kernel_transformation: "relu", "softmax", a `KernelTransformation`, or a function `(data,
            is_query, projection_matrix) -> features`.
        numerical_stabilizer: number added to the features; None is the kernel's own.
        causal: whether a position sees only itself and those before it.
        projection_matrix_type: how the rows of the random projection are drawn: "orthogonal",
            "givens" or "iid"; None for no projection ("orthogonal" if the kernel needs one).
        nb_random_features: number of features M; 0 is ceil(d ln d) for heads of size d. Only with
            a projection.
        projection_scaling: 0 for row lengths drawn from chi(d), 1 for sqrt(d).
        short_convolution: width of a causal depthwise convolution with SiLU on queries, keys and
            values (4 is usual); 0 for none.
        use_bias: whether the four projections have a bias.
        kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer,
            activity_regularizer, kernel_constraint, bias_constraint: as in
            `keras.layers.MultiHeadAttention`, for the four projections.
        seed: integer from which the random projection and the dropout are drawn; None draws one.
        **kwargs: name, dtype and trainable.

    Call arguments:
        query: [B, T, features].
        source: [B, S, features].
        query_mask: [B, T], 1 to keep; the outputs of masked queries are 0.
        source_mask: [B, S], 1 to keep; a masked source is left out of both sums. A query that sees
            no source gets the output of 0 attention. Both masks are also taken from Keras.
        cache: what came before, see `init_cache`. Only with causal=True.
        training: whether to apply dropout.

    Returns:
        [B, T, hidden_size] in the compute dtype; with `cache` also the new cache.

    Raises:
        ValueError: for arguments or inputs other than described.

    References:
        arXiv:2009.14794

    Example:

    >>> import keras
    >>> from favor_keras import FavorAttention
    >>> layer = FavorAttention(64, num_heads=4, kernel_transformation="softmax")
    >>> layer(keras.ops.ones([2, 5, 32]), keras.ops.ones([2, 9, 32])).shape
    TensorShape([2, 5, 64])
    """

    def __init__(
        self,
        hidden_size,
        num_heads,
        attention_dropout=0.0,
        kernel_transformation="relu",
        numerical_stabilizer=None,
        causal=False,
        projection_matrix_type=None,
        nb_random_features=0,
        projection_scaling=0,
        short_convolution=0,
        use_bias=False,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        activity_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        seed=None,
        **kwargs,
    ):
        # Keras would cast a float32 cache to the compute dtype; this layer casts its inputs itself.
        super().__init__(autocast=False, activity_regularizer=activity_regularizer, **kwargs)
        _check_positive("hidden_size", hidden_size)
        _check_positive("num_heads", num_heads)
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size must be divisible by num_heads, received hidden_size={hidden_size}, num_heads={num_heads}"
            )
        if not 0 <= attention_dropout < 1:
            raise ValueError(f"attention_dropout must be in [0, 1), received {attention_dropout!r}")
        if projection_matrix_type is not None and projection_matrix_type not in DIRECTIONS:
            raise ValueError(
                f"projection_matrix_type must be None or one of {sorted(DIRECTIONS)}, "
                f"received {projection_matrix_type!r}"
            )
        if projection_scaling not in (0, 1):
            raise ValueError(f"projection_scaling must be 0 or 1, received {projection_scaling!r}")
        if numerical_stabilizer is not None and numerical_stabilizer < 0:
            raise ValueError(f"numerical_stabilizer must be at least 0 or None, received {numerical_stabilizer!r}")
        _check_size_or_zero("nb_random_features", nb_random_features)
        _check_size_or_zero("short_convolution", short_convolution)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.attention_dropout = attention_dropout
        self.kernel_transformation = get_kernel(kernel_transformation)
        self.numerical_stabilizer = numerical_stabilizer
        self.causal = causal
        self.short_convolution = short_convolution
        if projection_matrix_type is None and getattr(self.kernel_transformation, "needs_projection", False):
            projection_matrix_type = "orthogonal"
        if projection_matrix_type is None and nb_random_features:
            raise ValueError(
                "nb_random_features needs a projection: set projection_matrix_type, received "
                f"nb_random_features={nb_random_features}"
            )
        self.projection_matrix_type = projection_matrix_type
        self.nb_random_features = nb_random_features
        self.projection_scaling = projection_scaling
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed = random.randint(1, 10**9) if seed is None else seed
        self.supports_masking = True

        heads = "abc,cde->abde", (None, num_heads, self.head_size), "de"
        self.query_dense = self._dense("query_dense", *heads)
        self.key_dense = self._dense("key_dense", *heads)
        self.value_dense = self._dense("value_dense", *heads)
        self.output_dense = self._dense("output_dense", "abde,dec->abc", (None, hidden_size), "c")
        if short_convolution:
            self.query_convolution = self._convolution("query_convolution")
            self.key_convolution = self._convolution("key_convolution")
            self.value_convolution = self._convolution("value_convolution")
        # A source without its value still counts in the denominator, like a dropped attention weight.
        self.dropout = keras.layers.Dropout(
            attention_dropout, noise_shape=(None, None, None, 1), seed=self.seed, dtype=self.dtype_policy
        )

    def _dense(self, name, equation, output_shape, bias_axes):
        def clone(initializer):
            # One initializer object would give weights of one shape the same numbers.
            return initializer.__class__.from_config(initializer.get_config())

        dense = keras.layers.EinsumDense(
            equation,
            output_shape,
            bias_axes=bias_axes if self.use_bias else None,
            kernel_initializer=clone(self.kernel_initializer),
            bias_initializer=clone(self.bias_initializer),
            kernel_regularizer=self.kernel_regularizer,
            bias_regularizer=self.bias_regularizer,
            kernel_constraint=self.kernel_constraint,
            bias_constraint=self.bias_constraint,
            name=name,
            dtype=self.dtype_policy,
        )
        dense.supports_masking = True
        return dense

    def _convolution(self, name):
        return ShortConvolution(self.short_convolution, name=name, dtype=self.dtype_policy)

    @property
    def _num_projections(self):
        if self.projection_matrix_type is None:
            return None
        return self.nb_random_features or max(1, math.ceil(self.head_size * math.log(self.head_size)))

    def build(self, query_shape, source_shape):
        for name, shape in (("query", query_shape), ("source", source_shape)):
            if len(shape) != 3:
                raise ValueError(f"{name} must be [batch, length, features], received shape {tuple(shape)}")
        self.query_dense.build(query_shape)
        self.key_dense.build(source_shape)
        self.value_dense.build(source_shape)
        self.output_dense.build((*query_shape[:2], self.num_heads, self.head_size))
        if self.short_convolution:
            self.query_convolution.build((*query_shape[:2], self.hidden_size))
            self.key_convolution.build((*source_shape[:2], self.hidden_size))
            self.value_convolution.build((*source_shape[:2], self.hidden_size))
        self.projection_matrix = None
        if self.projection_matrix_type is not None:
            self.projection_matrix = self.add_weight(
                name="projection_matrix",
                shape=(self._num_projections, self.head_size),
                initializer=lambda shape, dtype: self._draw_projection(),
                dtype="float32",
                trainable=False,
                autocast=False,
            )

    def _draw_projection(self):
        return draw_projection(
            self._num_projections,
            self.head_size,
            self.seed,
            kind=self.projection_matrix_type,
            scaling=self.projection_scaling,
        )

    def call(self, query, source, query_mask=None, source_mask=None, cache=None, training=None):
        if cache is not None:
            self._check_cache(cache)
        query = tf.cast(query, self.compute_dtype)
        source = tf.cast(source, self.compute_dtype)
        query_mask = checked_mask(query_mask, query, "query_mask")
        source_mask = checked_mask(source_mask, source, "source_mask")
        new_cache = {}

        def project(name, inputs, mask):
            heads = getattr(self, f"{name}_dense")(inputs)
            if not self.short_convolution:
                return heads
            history = None if cache is None else cache[f"{name}_inputs"]
            convolution = getattr(self, f"{name}_convolution")
            flat = tf.reshape(heads, tf.concat([tf.shape(heads)[:2], [self.hidden_size]], axis=0))
            flat, new_cache[f"{name}_inputs"] = convolution(flat, mask=mask, history=history)
            return tf.reshape(flat, tf.shape(heads))

        output, state = kernel_attention(
            project("query", query, query_mask),
            project("key", source, source_mask),
            self.dropout(project("value", source, source_mask), training=training),
            self.kernel_transformation,
            self.projection_matrix,
            numerical_stabilizer=self.numerical_stabilizer,
            key_log_scale=None if source_mask is None else log_scale_of(source_mask, self._state_dtype),
            causal=self.causal,
            initial_state=None if cache is None else {name: cache[name] for name in STATE_NAMES},
        )
        output = zero_where_masked(self.output_dense(output), query_mask)
        if cache is None:
            return output
        inputs = {name: tf.cast(history, self._state_dtype) for name, history in new_cache.items()}
        return output, {**state, **inputs}

    @property
    def _state_dtype(self):
        return "float64" if self.compute_dtype == "float64" else "float32"

    def init_cache(self, batch_size, max_length=None):
        """The cache before the first token: pass it to `call(..., cache=...)`, go on with the new one.

        A sequence in pieces gives what the whole sequence gives, whatever the pieces. The cache is
        a flat dict of float32 tensors whose first axis is the batch: the state of
        `favor_keras.ops.linear_attention`, and the last inputs of the short convolutions.

        Args:
            batch_size: an integer or a scalar tensor.
            max_length: for layers whose cache has room for a limited length. This one's does not
                depend on the length, and takes any.

        Raises:
            ValueError: if the layer is not causal, or its kernel is a function (which may look
                across positions and so cannot be computed in pieces).
        """
        self._check_streaming()
        num_features = self.kernel_transformation.num_features(self.head_size, self._num_projections)
        cache = zero_state(batch_size, self.num_heads, num_features, self.head_size, self._state_dtype)
        if self.short_convolution:
            for name in ("query_inputs", "key_inputs", "value_inputs"):
                cache[name] = tf.zeros([batch_size, self.short_convolution - 1, self.hidden_size], self._state_dtype)
        return cache

    def _check_streaming(self):
        if not self.causal:
            raise ValueError("cache needs a causal layer, received causal=False")
        if not isinstance(self.kernel_transformation, KernelTransformation):
            raise ValueError(
                "cache needs a KernelTransformation, whose features treat every position alone, received the "
                f"function {self.kernel_transformation!r}"
            )

    def _check_cache(self, cache):
        self._check_streaming()
        expected = set(STATE_NAMES)
        if self.short_convolution:
            expected |= {"query_inputs", "key_inputs", "value_inputs"}
        if not isinstance(cache, dict) or set(cache) != expected:
            received = sorted(cache) if isinstance(cache, dict) else type(cache).__name__
            raise ValueError(f"cache must be a dict of {sorted(expected)}, as init_cache makes, received {received}")

    def compute_output_spec(self, query, source, query_mask=None, source_mask=None, cache=None, training=None):
        output = keras.KerasTensor((*query.shape[:2], self.hidden_size), dtype=self.compute_dtype)
        if cache is None:
            return output
        self._check_cache(cache)
        return output, {name: keras.KerasTensor(c.shape, dtype=self._state_dtype) for name, c in cache.items()}

    def compute_output_shape(self, query_shape, source_shape=None):
        return (*query_shape[:2], self.hidden_size)

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "attention_dropout": self.attention_dropout,
            "kernel_transformation": serialize_kernel(self.kernel_transformation),
            "numerical_stabilizer": self.numerical_stabilizer,
            "causal": self.causal,
            "projection_matrix_type": self.projection_matrix_type,
            "nb_random_features": self.nb_random_features,
            "projection_scaling": self.projection_scaling,
            "short_convolution": self.short_convolution,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "seed": self.seed,
        }


@keras.saving.register_keras_serializable(package="favor_keras")
class SelfAttention(FavorAttention):
    """`FavorAttention` of a sequence to itself: queries, keys and values come from `inputs`.

    Args:
        The arguments of `FavorAttention`.

    Call arguments:
        inputs: [batch, length, features].
        mask: [batch, length], 1 to keep; also taken from Keras. Masked positions are seen by none
            and their outputs are 0.
        cache: what came before, see `init_cache`. Only with causal=True.
        training: whether to apply dropout.

    Returns:
        [batch, length, hidden_size] in the compute dtype; with `cache` also the new cache.

    References:
        arXiv:2009.14794

    Example:

    >>> import keras
    >>> from favor_keras import SelfAttention
    >>> inputs = keras.random.normal([1, 6, 32])
    >>> layer = SelfAttention(32, num_heads=4, causal=True)
    >>> whole = layer(inputs)
    >>> first, cache = layer(inputs[:, :4], cache=layer.init_cache(batch_size=1))
    >>> rest, cache = layer(inputs[:, 4:], cache=cache)
    >>> bool(keras.ops.max(abs(whole - keras.ops.concatenate([first, rest], axis=1))) < 1e-5)
    True
    """

    def build(self, inputs_shape):
        super().build(inputs_shape, inputs_shape)

    def call(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        # Keras hands an implicit mask over as `mask`, or as `inputs_mask` once there is a cache.
        mask = inputs_mask if mask is None else mask
        return super().call(inputs, inputs, query_mask=mask, source_mask=mask, cache=cache, training=training)

    def compute_output_spec(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        return super().compute_output_spec(inputs, inputs, cache=cache)

    def compute_output_shape(self, inputs_shape):
        return super().compute_output_shape(inputs_shape)


def _check_positive(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, received {value!r}")


def _check_size_or_zero(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be 0 or a positive integer, received {value!r}")
