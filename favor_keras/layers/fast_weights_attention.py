import math

import keras
import tensorflow as tf

from favor_keras.layers.masks import log_scale_of, zero_where_masked
from favor_keras.layers.multi_head_mixer import HISTORY_NAMES, MultiHeadMixer
from favor_keras.ops.delta_rule import delta_rule
from favor_keras.ops.dpfp import dpfp
from favor_keras.ops.kernels import KERNELS, KernelTransformation, get_kernel, serialize_kernel
from favor_keras.ops.linear_attention import STATE_NAMES, linear_attention, zero_state
from favor_keras.ops.precision import full_precision
from favor_keras.ops.projections import draw_projection

UPDATE_RULES = ("delta", "sum", "normalized_sum")


@keras.saving.register_keras_serializable(package="favor_keras")
class FastWeightsAttention(MultiHeadMixer):
    """Causal attention by a fast-weights memory that is written and read at every position.

    For every head, with features f of the keys and queries and a write strength beta_t =
    sigmoid(x_t W_beta) (the delta rule):

        S_t = S_{t-1} + f(k_t) (beta_t (v_t - S_{t-1}^T f(k_t)))^T,    y_t = S_t^T f(q_t)

    A position with a key seen before replaces the value that the key stands for, where attention by
    sums can only add to it. Inputs are [batch, length, features]. The memory has a fixed size and
    is float32 under every dtype policy (float64 under float64). From 32,768 positions on a layer in
    full precision computes in pieces, from the projections to the output, and keeps only the
    memories between them.

    Args:
        hidden_size: size of the output, and of all heads together.
        num_heads: number of heads; must divide `hidden_size`.
        attention_dropout: rate of the dropout on what the heads read.
        feature_map: "dpfp", "relu" or "elu" (elu + 1), divided by their sum; "l2", which is SiLU
            divided by the Euclidean norm; or another kernel of `favor_keras.ops.kernels`, by name
            or as an object, divided by the sum of its absolute values, over a fixed
            orthogonal projection if it needs one.
        nu: number of shifts of "dpfp".
        nb_random_features: number of rows of the projection; 0 is ceil(d ln d) for heads of size d.
            Only for a kernel that needs one.
        update_rule: "delta"; "sum", S_t = S_{t-1} + f(k_t) v_t^T; or "normalized_sum", which also
            divides what is read by the sum of f(k_j) . f(q_t) over the keys.
        short_convolution: width of a causal depthwise convolution with SiLU on queries, keys and
            values (4 is usual); 0 for none.
        output_norm: divide what each head reads by its root mean square, with a learned scale.
        output_gate: multiply it by silu(x_t W_gate).
        use_decay: let the memory fade by exp(g_t) < 1 before each write, g_t = -exp(a) softplus(x_t
            W_g + b) for each head (the gated delta rule). Only for "delta".
        use_bias: whether queries, keys and values have a bias (the output always has one).
        kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer,
            activity_regularizer, kernel_constraint, bias_constraint: as in
            `keras.layers.MultiHeadAttention`, for the four projections.
        seed: integer for dropout and random features; None draws one.
        **kwargs: name, dtype and trainable.

    Call arguments:
        inputs: [batch, length, features].
        mask: [batch, length], 1 to keep; also taken from Keras. A masked position is not written
            and its output is 0.
        cache: what came before, see `init_cache`.
        training: whether to apply dropout.

    Returns:
        [batch, length, hidden_size] in the compute dtype; with `cache` also the new cache.

    Raises:
        ValueError: for arguments or inputs other than described.

    References:
        arXiv:2102.11174; arXiv:2412.06464 (decay)

    Example:

    >>> import keras
    >>> from favor_keras import FastWeightsAttention
    >>> layer = FastWeightsAttention(64, num_heads=4)
    >>> layer(keras.ops.ones([2, 10, 32])).shape
    TensorShape([2, 10, 64])
    """

    def __init__(
        self,
        hidden_size,
        num_heads,
        attention_dropout=0.0,
        feature_map="dpfp",
        nu=1,
        update_rule="delta",
        short_convolution=0,
        output_norm=False,
        output_gate=False,
        use_decay=False,
        nb_random_features=0,
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
        super().__init__(
            hidden_size,
            num_heads,
            attention_dropout=attention_dropout,
            short_convolution=short_convolution,
            use_bias=use_bias,
            use_output_bias=True,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            nb_random_features=nb_random_features,
            seed=seed,
            **kwargs,
        )
        if update_rule not in UPDATE_RULES:
            raise ValueError(f"update_rule must be one of {UPDATE_RULES}, received {update_rule!r}")
        if use_decay and update_rule != "delta":
            raise ValueError(f"use_decay needs update_rule='delta', received {update_rule!r}")
        self.feature_map = self._checked_feature_map(feature_map, nu)
        if nb_random_features and not self._needs_projection:
            raise ValueError(
                f"nb_random_features needs a feature_map with a random projection, received {nb_random_features} and "
                f"feature_map={feature_map!r}"
            )
        self.nu = nu
        self.update_rule = update_rule
        self.output_norm = output_norm
        self.output_gate = output_gate
        self.use_decay = use_decay

        per_head = "abc,cd->abd", (None, num_heads), None
        if update_rule == "delta":
            self.beta_dense = self._dense("beta_dense", *per_head)
        if use_decay:
            self.decay_dense = self._dense("decay_dense", *per_head)
        if output_gate:
            self.gate_dense = self._dense("gate_dense", "abc,cde->abde", (None, num_heads, self.head_size), None)
        if output_norm:
            self.norm = keras.layers.RMSNormalization(epsilon=1e-5, name="norm", dtype=self.dtype_policy)
        self.dropout = keras.layers.Dropout(attention_dropout, seed=self.seed, dtype=self.dtype_policy)

    def _checked_feature_map(self, feature_map, nu):
        """The feature map: "dpfp", "l2" or a kernel."""
        if feature_map == "dpfp":
            largest = 2 * self.head_size - 1
            if isinstance(nu, bool) or not isinstance(nu, int) or not 1 <= nu <= largest:
                raise ValueError(
                    f"nu must be an integer from 1 to {largest} for heads of size {self.head_size}, received {nu!r}"
                )
            return feature_map
        if nu != 1:
            raise ValueError(f"nu needs feature_map='dpfp', received nu={nu!r} and feature_map={feature_map!r}")
        if feature_map == "l2":
            return feature_map
        is_name = isinstance(feature_map, str) and feature_map in KERNELS
        kernel = get_kernel(feature_map) if is_name or isinstance(feature_map, dict) else feature_map
        if not isinstance(kernel, KernelTransformation):
            raise ValueError(
                f"feature_map must be 'l2', one of {sorted(KERNELS)} or a KernelTransformation, "
                f"received {feature_map!r}"
            )
        return kernel

    @property
    def _needs_projection(self):
        return isinstance(self.feature_map, KernelTransformation) and self.feature_map.needs_projection

    @property
    def _num_features(self):
        if self.feature_map == "l2":
            return self.head_size
        if self.feature_map == "dpfp":
            return 2 * self.nu * self.head_size
        num_projections = self._num_projections if self._needs_projection else None
        return self.feature_map.num_features(self.head_size, num_projections)

    def build(self, inputs_shape):
        self._build_projections(inputs_shape, inputs_shape)
        if self.update_rule == "delta":
            self.beta_dense.build(inputs_shape)
        if self.use_decay:
            self.decay_dense.build(inputs_shape)
            # Rates and steps as in state-space models: a memory of a few up to a thousand positions.
            self.log_rate = self._per_head_weight("log_rate", lambda uniform: tf.math.log(1.0 + 15.0 * uniform))
            self.step_bias = self._per_head_weight("step_bias", _inverse_softplus_of_steps)
        if self.output_gate:
            self.gate_dense.build(inputs_shape)
        if self.output_norm:
            self.norm.build((*inputs_shape[:2], self.num_heads, self.head_size))
        self.projection_matrix = None
        if self._needs_projection:
            self.projection_matrix = self._add_projection_matrix(
                lambda: draw_projection(self._num_projections, self.head_size, self.seed)
            )

    def _per_head_weight(self, name, transform):
        uniform = keras.initializers.RandomUniform(0.0, 1.0)
        return self.add_weight(
            name=name, shape=(self.num_heads,), initializer=lambda shape, dtype: transform(uniform(shape, dtype))
        )

    def call(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        # Keras hands an implicit mask over as `mask`, or as `inputs_mask` once there is a cache.
        mask = inputs_mask if mask is None else mask
        if cache is None and self._is_long(inputs, training):
            return self._in_pieces(FastWeightsAttention.call, inputs, mask, training)
        self._check_cache(cache)
        inputs, mask = self._masked("mask", inputs, mask)
        history = {name: cache[name] for name in cache or {} if name in HISTORY_NAMES}
        query, query_inputs = self._project("query", inputs, mask, history)
        key, key_inputs = self._project("key", inputs, mask, history)
        value, value_inputs = self._project("value", inputs, mask, history)

        read, state = self._update(inputs, self._features(query, True), self._features(key, False), value, mask, cache)
        if self.output_norm:
            read = self.norm(read)
        if self.output_gate:
            read *= tf.nn.silu(self.gate_dense(inputs))
        output = self.output_dense(self.dropout(read, training=training))
        output = zero_where_masked(output, mask)
        if cache is None:
            return output
        return output, {**state, **self._remembered(history, query_inputs, key_inputs, value_inputs)}

    def _features(self, data, is_query):
        """The features of queries or keys, of which the delta rule needs that they are not long."""
        full = tf.cast(data, full_precision(data))
        if self.feature_map == "l2":
            features = tf.math.l2_normalize(tf.nn.silu(full), axis=-1, epsilon=1e-6)
        elif self.feature_map == "dpfp":
            features = dpfp(full, self.nu)
        else:
            matrix = None if self.projection_matrix is None else tf.cast(self.projection_matrix, full.dtype)
            # The log scale of a position cancels in the quotient. Features of both signs may add up to 0.
            features, _ = self.feature_map.scaled_features(full, is_query, matrix)
            features /= tf.reduce_sum(tf.abs(features), axis=-1, keepdims=True) + 1e-6
        return tf.cast(features, data.dtype)

    def _update(self, inputs, query, key, value, mask, cache):
        """What every head reads [B, T, H, D], and the state after it."""
        if self.update_rule != "delta":
            return linear_attention(
                query,
                key,
                value,
                key_log_scale=None if mask is None else log_scale_of(mask, self._state_dtype),
                causal=True,
                normalize=self.update_rule == "normalized_sum",
                initial_state=None if cache is None else {name: cache[name] for name in STATE_NAMES},
                return_state=True,
            )
        beta = tf.sigmoid(tf.cast(self.beta_dense(inputs), self._state_dtype))
        beta = zero_where_masked(beta, mask)
        log_decay = zero_where_masked(self._log_decay(inputs), mask) if self.use_decay else None
        read, fast_weights = delta_rule(
            query,
            key,
            value,
            beta,
            log_decay=log_decay,
            initial_state=None if cache is None else cache["fast_weights"],
            return_state=True,
        )
        return read, {"fast_weights": fast_weights}

    def _log_decay(self, inputs):
        step = tf.cast(self.decay_dense(inputs), self._state_dtype) + tf.cast(self.step_bias, self._state_dtype)
        return -tf.exp(tf.cast(self.log_rate, self._state_dtype)) * tf.nn.softplus(step)

    def init_cache(self, batch_size, max_length=None):
        """The cache before the first token: pass it to `call(..., cache=...)`, go on with the new one.

        A sequence in pieces gives what the whole sequence gives, whatever the pieces. The cache is
        a flat dict of float32 tensors whose first axis is the batch.

        Args:
            batch_size: an integer or a scalar tensor.
            max_length: for layers whose cache has room for a limited length. This one's does not
                depend on the length, and takes any.
        """
        sizes = self.num_heads, self._num_features, self.head_size
        if self.update_rule == "delta":
            cache = {"fast_weights": tf.zeros([batch_size, *sizes], self._state_dtype)}
        else:
            cache = zero_state(batch_size, *sizes, self._state_dtype)
        if self.short_convolution:
            cache.update({name: self._no_inputs(batch_size) for name in HISTORY_NAMES})
        return cache

    def _check_cache(self, cache):
        if cache is not None:
            state_names = ("fast_weights",) if self.update_rule == "delta" else STATE_NAMES
            history_names = HISTORY_NAMES if self.short_convolution else ()
            self._check_cache_names(cache, (*state_names, *history_names), "init_cache")

    def compute_output_spec(self, inputs, mask=None, inputs_mask=None, cache=None, training=None):
        self._check_cache(cache)
        output = keras.KerasTensor((*inputs.shape[:2], self.hidden_size), dtype=self.compute_dtype)
        if cache is None:
            return output
        return output, {name: keras.KerasTensor(c.shape, dtype=self._state_dtype) for name, c in cache.items()}

    def compute_output_shape(self, inputs_shape):
        return (*inputs_shape[:2], self.hidden_size)

    def get_config(self):
        feature_map = self.feature_map if isinstance(self.feature_map, str) else serialize_kernel(self.feature_map)
        return {
            **super().get_config(),
            "feature_map": feature_map,
            "nu": self.nu,
            "update_rule": self.update_rule,
            "output_norm": self.output_norm,
            "output_gate": self.output_gate,
            "use_decay": self.use_decay,
        }


def _inverse_softplus_of_steps(uniform):
    """b with softplus(b) between 0.001 and 0.1, uniform in the logarithm."""
    step = tf.exp(uniform * math.log(100.0) + math.log(0.001))
    return step + tf.math.log(-tf.math.expm1(-step))
