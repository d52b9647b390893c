import math
import random

import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_positive, check_rate, check_seed, check_size_or_zero
from favor_keras.layers.masks import checked_key_mask, zero_where_masked
from favor_keras.layers.short_convolution import ShortConvolution
from favor_keras.ops.chunk_scan import scan_chunks
from favor_keras.ops.linear_attention import LONG_SEQUENCE

# Large enough that the caches between the pieces are small beside the inputs.
PIECE_SIZE = 256

HISTORY_NAMES = ("query_inputs", "key_inputs", "value_inputs")


class MultiHeadMixer(keras.layers.Layer):
    """What the layers with queries, keys and values of several heads have in common.

    Four projections, `query_dense`, `key_dense`, `value_dense` and `output_dense`; a short
    convolution on the first three; the seed; and the precision of sums and states.

    Args:
        hidden_size, num_heads, attention_dropout, short_convolution, use_bias, kernel_initializer,
            bias_initializer, kernel_regularizer, bias_regularizer, activity_regularizer,
            kernel_constraint, bias_constraint, nb_random_features, seed: see `FavorAttention`.
        use_output_bias: whether `output_dense` has a bias.
        **kwargs: name, dtype and trainable.
    """

    def __init__(
        self,
        hidden_size,
        num_heads,
        *,
        attention_dropout,
        short_convolution,
        use_bias,
        use_output_bias,
        kernel_initializer,
        bias_initializer,
        kernel_regularizer,
        bias_regularizer,
        activity_regularizer,
        kernel_constraint,
        bias_constraint,
        nb_random_features,
        seed,
        **kwargs,
    ):
        # Keras would cast a float32 cache to the compute dtype; these layers cast their inputs themselves.
        super().__init__(autocast=False, activity_regularizer=activity_regularizer, **kwargs)
        check_positive("hidden_size", hidden_size)
        check_positive("num_heads", num_heads)
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size must be divisible by num_heads, received hidden_size={hidden_size}, num_heads={num_heads}"
            )
        check_rate("attention_dropout", attention_dropout)
        check_seed(seed)
        check_size_or_zero("short_convolution", short_convolution)
        check_size_or_zero("nb_random_features", nb_random_features)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.attention_dropout = attention_dropout
        self.short_convolution = short_convolution
        self.nb_random_features = nb_random_features
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed = random.randint(1, 10**9) if seed is None else seed
        self.supports_masking = True

        heads = "abc,cde->abde", (None, num_heads, self.head_size), "de" if use_bias else None
        self.query_dense = self._dense("query_dense", *heads)
        self.key_dense = self._dense("key_dense", *heads)
        self.value_dense = self._dense("value_dense", *heads)
        output_bias_axes = "c" if use_output_bias else None
        self.output_dense = self._dense("output_dense", "abde,dec->abc", (None, hidden_size), output_bias_axes)
        if short_convolution:
            self.query_convolution = self._convolution("query_convolution")
            self.key_convolution = self._convolution("key_convolution")
            self.value_convolution = self._convolution("value_convolution")

    def _dense(self, name, equation, output_shape, bias_axes):
        def clone(initializer):
            # One initializer object would give weights of one shape the same numbers.
            return initializer.__class__.from_config(initializer.get_config())

        dense = keras.layers.EinsumDense(
            equation,
            output_shape,
            bias_axes=bias_axes,
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

    def _build_projections(self, query_shape, source_shape):
        for name, shape in (("query", query_shape), ("source", source_shape)):
            _check_inputs(name, shape, None)
        self.query_dense.build(query_shape)
        self.key_dense.build(source_shape)
        self.value_dense.build(source_shape)
        self.output_dense.build((*query_shape[:2], self.num_heads, self.head_size))
        if self.short_convolution:
            self.query_convolution.build((*query_shape[:2], self.hidden_size))
            self.key_convolution.build((*source_shape[:2], self.hidden_size))
            self.value_convolution.build((*source_shape[:2], self.hidden_size))

    @property
    def _num_projections(self):
        """The number of rows of the random projection, for a layer that has one."""
        return self.nb_random_features or max(1, math.ceil(self.head_size * math.log(self.head_size)))

    def _add_projection_matrix(self, draw):
        """A fixed weight of the rows [M, D] that `draw()` returns."""
        return self.add_weight(
            name="projection_matrix",
            shape=(self._num_projections, self.head_size),
            initializer=lambda shape, dtype: draw(),
            dtype="float32",
            trainable=False,
            autocast=False,
        )

    def _masked(self, name, inputs, mask):
        """The inputs in the compute dtype, 0 where their mask leaves them out; and the mask, checked.

        A weight of 0 keeps every finite input out of the sums, but 0 times NaN or infinity is not 0.
        """
        inputs = tf.cast(inputs, self.compute_dtype)
        mask = checked_key_mask(mask, inputs, name)
        return zero_where_masked(inputs, mask), mask

    def _project(self, name, inputs, mask, history):
        """The heads [B, T, H, D] of `inputs`, and what the short convolution must remember."""
        dense = getattr(self, f"{name}_dense")
        _check_inputs("query" if name == "query" else "source", inputs.shape, dense.kernel.shape[0])
        heads = dense(inputs)
        if not self.short_convolution:
            return heads, None
        flat = tf.reshape(heads, tf.concat([tf.shape(heads)[:2], [self.hidden_size]], axis=0))
        convolution = getattr(self, f"{name}_convolution")
        history = history.get(f"{name}_inputs")
        if history is not None and not history.shape[:1].is_compatible_with(flat.shape[:1]):
            raise ValueError(
                f"cache[{name + '_inputs'!r}] must have the batch size of the inputs, {flat.shape[0]}, "
                f"received the shape {history.shape}"
            )
        flat, last_inputs = convolution(flat, mask=mask, history=history)
        return tf.reshape(flat, tf.shape(heads)), last_inputs

    def _is_long(self, inputs, training):
        """Whether the queries, keys and values of `inputs` would fill the memory, and `_in_pieces` can help.

        It adds up the gradients of the weights in their own dtype, which must not be half precision or a variable
        (of float8) that its gradient replaces; and it calls a piece again in the backward pass, where dropout would
        draw anew.
        """
        length = inputs.shape[1] if len(inputs.shape) == 3 else None  # `call` refuses any other rank
        if length is None or length < LONG_SEQUENCE:
            return False
        is_half = not self.variable_dtype == self.compute_dtype == self._state_dtype
        is_replaced = any(getattr(weight, "overwrite_with_gradient", False) for weight in self.variables)
        is_random = training and self.attention_dropout
        return not (is_half or is_replaced or is_random)

    def _in_pieces(self, call, inputs, mask, training):
        """The output of `call`, the layer's class's own, piece by piece, each from the cache of those before it.

        All that is kept for the backward pass are the inputs and the caches between the pieces.
        """
        _check_inputs("inputs", inputs.shape, self.query_dense.kernel.shape[0])
        inputs = tf.cast(inputs, self.compute_dtype)
        pieces = {"inputs": inputs}
        if mask is not None:
            pieces["mask"] = tf.cast(checked_key_mask(mask, inputs, "mask"), inputs.dtype)

        def is_weight(variable):
            return tf.as_dtype(variable.dtype).is_floating

        weights = [variable for variable in self.variables if is_weight(variable)]
        # Also what needs no gradient: a scope hides the values of one around it.
        others = [(v, tf.convert_to_tensor(v.value)) for v in self.variables if not is_weight(v)]

        def step(cache, piece, values):
            with keras.StatelessScope([*zip(weights, values), *others]):
                return call(self, **piece, cache=cache, training=training)

        return scan_chunks(
            step,
            self.init_cache(tf.shape(inputs)[0]),
            pieces,
            [tf.convert_to_tensor(weight.value) for weight in weights],
            chunk_size=PIECE_SIZE,
            output_dtype=inputs.dtype,
        )[0]

    def _no_inputs(self, batch_size):
        """What the short convolution remembers before the first position."""
        return tf.zeros([batch_size, self.short_convolution - 1, self.hidden_size], self._state_dtype)

    def _remembered(self, history, query_inputs, key_inputs, value_inputs):
        """The entries of the next cache for the short convolutions that `history` has the inputs of."""
        inputs = dict(zip(HISTORY_NAMES, (query_inputs, key_inputs, value_inputs)))
        return {name: tf.cast(inputs[name], self._state_dtype) for name in history}

    @staticmethod
    def _check_cache_names(cache, expected, maker):
        if not isinstance(cache, dict) or set(cache) != set(expected):
            received = sorted(cache) if isinstance(cache, dict) else type(cache).__name__
            raise ValueError(f"cache must be a dict of {sorted(expected)}, as {maker} makes, received {received}")

    @property
    def _state_dtype(self):
        return "float64" if self.compute_dtype == "float64" else "float32"

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "attention_dropout": self.attention_dropout,
            "short_convolution": self.short_convolution,
            "nb_random_features": self.nb_random_features,
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


def _check_inputs(name, shape, size):
    """`size` is the number of features that the weights were made for, None if there are none yet."""
    if len(shape) != 3 or (size is not None and shape[-1] not in (None, size)):
        sizes = "" if size is None else f" with {size} features"
        raise ValueError(f"{name} must be [batch, length, features]{sizes}, received shape {tuple(shape)}")
