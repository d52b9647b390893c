import warnings

import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_size_or_zero
from favor_keras.layers.key_value_cache import append_keys, written_mask
from favor_keras.layers.masks import key_bias, log_scale_of, zero_where_masked
from favor_keras.layers.multi_head_mixer import HISTORY_NAMES, MultiHeadMixer
from favor_keras.ops.attention import kernel_attention
from favor_keras.ops.kernels import KernelTransformation, get_kernel, serialize_kernel
from favor_keras.ops.linear_attention import STATE_NAMES, zero_state
from favor_keras.ops.projections import DIRECTIONS, draw_projection


@keras.saving.register_keras_serializable(package="favor_keras")
class FavorAttention(MultiHeadMixer):
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
        redraw_interval: number of training steps after which the projection is drawn anew by the
            callback `favor_keras.RedrawProjections`, which `fit` must be given; 0 for never. In a
            training loop of your own, call `redraw()`.
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
        source: [B, S, features]; None to query what is in `cache` alone (see `source_cache`).
        query_mask: [B, T], 1 to keep; the outputs of masked queries are 0.
        source_mask: [B, S], 1 to keep; a masked source is left out of both sums. A query that sees
            no source gets the output of 0 attention. Both masks are also taken from Keras.
        bias: added to the logarithms of the weights, a function of the source position alone: [B,
            H, 1, S], where B and H may be 1. Also a constant [B, 1, T, S] that does not depend on
            T, or that does not but for hiding (with less than -1e8) what causal=True hides anyway.
        cache: what came before: of `init_cache` or a call, or a dict of the keys and values "k" and
            "v" [B, S, H, hidden_size / H], of no position to begin with, which grows.
        decode_loop_step: with a cache of "k" and "v", the number of positions in it that are
            written. The new ones are written there, and the cache keeps its length (zeros to begin
            with): no shape then depends on the step.
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
        redraw_interval=0,
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
        super().__init__(
            hidden_size,
            num_heads,
            attention_dropout=attention_dropout,
            short_convolution=short_convolution,
            use_bias=use_bias,
            use_output_bias=use_bias,
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
        if projection_matrix_type is not None and projection_matrix_type not in DIRECTIONS:
            raise ValueError(
                f"projection_matrix_type must be None or one of {sorted(DIRECTIONS)}, "
                f"received {projection_matrix_type!r}"
            )
        if projection_scaling not in (0, 1):
            raise ValueError(f"projection_scaling must be 0 or 1, received {projection_scaling!r}")
        if numerical_stabilizer is not None and numerical_stabilizer < 0:
            raise ValueError(f"numerical_stabilizer must be at least 0 or None, received {numerical_stabilizer!r}")
        check_size_or_zero("redraw_interval", redraw_interval)
        self.kernel_transformation = get_kernel(kernel_transformation)
        self.numerical_stabilizer = numerical_stabilizer
        self.causal = causal
        if projection_matrix_type is None and getattr(self.kernel_transformation, "needs_projection", False):
            projection_matrix_type = "orthogonal"
        if projection_matrix_type is None and nb_random_features:
            raise ValueError(
                "nb_random_features needs a projection: set projection_matrix_type, received "
                f"nb_random_features={nb_random_features}"
            )
        self.projection_matrix_type = projection_matrix_type
        if projection_matrix_type is None and redraw_interval:
            raise ValueError(
                "redraw_interval needs a projection: set projection_matrix_type, received "
                f"redraw_interval={redraw_interval}"
            )
        self.projection_scaling = projection_scaling
        self.redraw_interval = redraw_interval
        self.is_redrawn_by_callback = False
        # A source without its value still counts in the denominator, like a dropped attention weight.
        self.dropout = keras.layers.Dropout(
            attention_dropout, noise_shape=(None, None, None, 1), seed=self.seed, dtype=self.dtype_policy
        )

    def build(self, query_shape, source_shape=None):
        if source_shape is None:
            raise ValueError("source must be given in the first call, which makes the weights, received None")
        self._build_projections(query_shape, source_shape)
        self.projection_matrix = self.draws = None
        if self.projection_matrix_type is not None:
            self.draws = self.add_weight(name="draws", shape=(), initializer="zeros", dtype="int64", trainable=False)
            self.projection_matrix = self._add_projection_matrix(lambda: self._draw_projection(0))

    def _draw_projection(self, draws):
        return draw_projection(
            self._num_projections,
            self.head_size,
            tf.stack([tf.constant(self.seed, tf.int64), tf.cast(draws, tf.int64)]),
            kind=self.projection_matrix_type,
            scaling=self.projection_scaling,
        )

    def redraw(self):
        """Draw the random projection anew: a function of `seed` and the number of draws alone.

        The number of draws is a saved weight, so a reloaded layer goes on with the same matrices.

        Raises:
            ValueError: if the layer has no projection, or is not built yet.
        """
        if self.projection_matrix_type is None or not self.built:
            raise ValueError(
                "redraw needs a built layer with a projection, received "
                f"projection_matrix_type={self.projection_matrix_type!r}, built={self.built}"
            )
        self.draws.assign_add(1)
        self.projection_matrix.assign(self._draw_projection(self.draws.value))

    def call(
        self,
        query,
        source=None,
        query_mask=None,
        source_mask=None,
        bias=None,
        cache=None,
        decode_loop_step=None,
        training=None,
    ):
        self._check_cache(cache, source, decode_loop_step)
        if training and self.redraw_interval and not self.is_redrawn_by_callback:
            warnings.warn(
                f"{self.name}: redraw_interval={self.redraw_interval} needs the callback RedrawProjections in fit, "
                "or redraw() in your own training loop"
            )
        query, query_mask = self._masked("query_mask", query, query_mask)
        if source is None:
            source = tf.zeros([tf.shape(query)[0], 0, self.key_dense.kernel.shape[0]], self.compute_dtype)
        source, source_mask = self._masked("source_mask", source, source_mask)
        key_log_scale = None if source_mask is None else log_scale_of(source_mask, self._state_dtype)
        if bias is not None:
            bias = key_bias(bias, source, self.causal, self._state_dtype)
            key_log_scale = bias if key_log_scale is None else bias + key_log_scale

        history = {name: cache[name] for name in cache or {} if name in HISTORY_NAMES}
        query, query_inputs = self._project("query", query, query_mask, history)
        key, key_inputs = self._project("key", source, source_mask, history)
        value, value_inputs = self._project("value", source, source_mask, history)
        value = self.dropout(value, training=training)

        new_cache = {}
        if cache is None:
            state = None
        elif "k" in cache:
            if source_mask is not None or bias is not None:
                raise ValueError('source_mask and bias cannot be kept in a cache of "k" and "v"; use init_cache')
            state = self._state_of_keys(cache["k"], cache["v"], written_mask(cache["k"], decode_loop_step))
            new_cache = append_keys(cache, key, value, decode_loop_step)
        else:
            state = {name: cache[name] for name in STATE_NAMES}
        output, state = self._attend(query, key, value, key_log_scale, state, self.causal)
        output = zero_where_masked(self.output_dense(output), query_mask)
        if cache is None:
            return output
        if not new_cache:
            new_cache = {**state, **self._remembered(history, query_inputs, key_inputs, value_inputs)}
        return output, new_cache

    def _attend(self, query, key, value, key_log_scale, state, causal):
        return kernel_attention(
            query,
            key,
            value,
            self.kernel_transformation,
            self.projection_matrix,
            numerical_stabilizer=self.numerical_stabilizer,
            key_log_scale=key_log_scale,
            causal=causal,
            initial_state=state,
        )

    def _state_of_keys(self, key, value, mask=None, bias=0.0):
        """The state after keys that all later queries see."""
        log_scale = bias if mask is None else bias + log_scale_of(mask, self._state_dtype)
        log_scale = None if isinstance(log_scale, float) else log_scale
        return self._attend(key[:, :0], key, value, log_scale, None, causal=False)[1]

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
        if not self.causal:
            raise ValueError("init_cache needs a causal layer, received causal=False; see source_cache")
        self._check_kernel_object()
        num_projections = None if self.projection_matrix_type is None else self._num_projections
        num_features = self.kernel_transformation.num_features(self.head_size, num_projections)
        cache = zero_state(batch_size, self.num_heads, num_features, self.head_size, self._state_dtype)
        return {**cache, **{name: self._no_inputs(batch_size) for name in self._history_names}}

    def source_cache(self, source, source_mask=None, bias=None):
        """The state of a source, to query it step by step: `call(query, cache=...)` without `source`.

        Args:
            source: [B, S, features].
            source_mask, bias: as in `call`.

        Returns:
            A flat dict of float32 tensors, batch first, whose size does not depend on S.

        Raises:
            ValueError: if the layer is causal or not built yet, or its kernel is a function.
        """
        if self.causal or not self.built:
            raise ValueError(
                f"source_cache needs a built layer that is not causal, received causal={self.causal}, "
                f"built={self.built}"
            )
        self._check_kernel_object()
        source, mask = self._masked("source_mask", source, source_mask)
        bias = 0.0 if bias is None else key_bias(bias, source, self.causal, self._state_dtype)
        key, value = (self._project(name, source, mask, {})[0] for name in ("key", "value"))
        batch_size = tf.shape(source)[0]
        state = self._state_of_keys(key, value, mask, bias)
        return {**state, **{name: self._no_inputs(batch_size) for name in self._history_names}}

    @property
    def _history_names(self):
        if not self.short_convolution:
            return ()
        return HISTORY_NAMES if self.causal else HISTORY_NAMES[:1]

    def _check_kernel_object(self):
        if not isinstance(self.kernel_transformation, KernelTransformation):
            raise ValueError(
                "cache needs a KernelTransformation, whose features treat every position alone, received the "
                f"function {self.kernel_transformation!r}"
            )

    def _check_cache(self, cache, source, decode_loop_step):
        keeps_keys = isinstance(cache, dict) and set(cache) == {"k", "v"}
        if decode_loop_step is not None and not keeps_keys:
            raise ValueError(f'decode_loop_step needs a cache of "k" and "v", received {cache!r}')
        if cache is None:
            if source is None:
                raise ValueError("source must be given, or else a cache of source_cache, received neither")
            return
        self._check_kernel_object()
        if keeps_keys:
            if self.short_convolution:
                raise ValueError('a cache of "k" and "v" does not hold the inputs of short_convolution; use init_cache')
            if source is None:
                raise ValueError('source must be given with a cache of "k" and "v", received None')
            return
        maker = "init_cache" if self.causal else "source_cache"
        self._check_cache_names(cache, (*STATE_NAMES, *self._history_names), maker)
        if self.causal == (source is None):
            needed = "the new positions" if self.causal else "None, since the cache holds the source"
            raise ValueError(f"source must be {needed}, with this cache, received {source!r}")

    def compute_output_spec(
        self,
        query,
        source=None,
        query_mask=None,
        source_mask=None,
        bias=None,
        cache=None,
        decode_loop_step=None,
        training=None,
    ):
        self._check_cache(cache, source, decode_loop_step)
        if self.causal and not tf.TensorShape(query.shape[1]).is_compatible_with(tf.TensorShape(source.shape[1])):
            raise ValueError(
                f"causal attention needs one length for query and source, received {query.shape} and {source.shape}"
            )
        output = keras.KerasTensor((*query.shape[:2], self.hidden_size), dtype=self.compute_dtype)
        if cache is None:
            return output

        def spec(name, tensor):
            shape = list(tensor.shape)
            if name in ("k", "v") and decode_loop_step is None:
                shape[1] = None if None in (shape[1], source.shape[1]) else shape[1] + source.shape[1]
            return keras.KerasTensor(shape, dtype=tensor.dtype)

        return output, {name: spec(name, tensor) for name, tensor in cache.items()}

    def compute_output_shape(self, query_shape, source_shape=None):
        return (*query_shape[:2], self.hidden_size)

    @classmethod
    def from_multi_head_attention(cls, layer, **options):
        """A layer with the weights of a built `keras.layers.MultiHeadAttention`.

        With the softmax kernel (the default here) it approximates what `layer` computes: well if
        the queries and keys are small or the features many, see `favor_keras.diagnostics`.

        Args:
            layer: a built `keras.layers.MultiHeadAttention` whose value_dim is its key_dim and whose
                outputs have num_heads * key_dim features.
            **options: arguments of this layer other than the sizes, `use_bias` and the dropout.

        Raises:
            ValueError: if `layer` is not built or has other sizes.
        """
        if not layer.built:
            raise ValueError("layer must be built, that is called once, received one that is not")
        query_kernel, key_kernel, output_kernel = (
            dense.kernel for dense in (layer.query_dense, layer.key_dense, layer.output_dense)
        )
        hidden_size = layer.num_heads * layer.key_dim
        if layer.value_dim != layer.key_dim or output_kernel.shape[-1] != hidden_size or len(output_kernel.shape) != 3:
            raise ValueError(
                "layer must have value_dim = key_dim and outputs of num_heads * key_dim features, received "
                f"num_heads={layer.num_heads}, key_dim={layer.key_dim}, value_dim={layer.value_dim}, "
                f"output kernel {output_kernel.shape}"
            )
        options = {"kernel_transformation": "softmax", "dtype": layer.dtype_policy, **options}
        converted = cls(
            hidden_size, layer.num_heads, attention_dropout=layer.dropout, use_bias=layer.use_bias, **options
        )
        converted._build_for(query_kernel.shape[0], key_kernel.shape[0])
        for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
            getattr(converted, name).set_weights(getattr(layer, name).get_weights())
        return converted

    def _build_for(self, query_size, source_size):
        self.build((None, None, query_size), (None, None, source_size))

    def get_config(self):
        return {
            **super().get_config(),
            "kernel_transformation": serialize_kernel(self.kernel_transformation),
            "numerical_stabilizer": self.numerical_stabilizer,
            "causal": self.causal,
            "projection_matrix_type": self.projection_matrix_type,
            "projection_scaling": self.projection_scaling,
            "redraw_interval": self.redraw_interval,
        }


@keras.saving.register_keras_serializable(package="favor_keras")
class SelfAttention(FavorAttention):
    """`FavorAttention` of a sequence to itself: queries, keys and values come from `inputs`.

    From 32,768 positions on a causal layer in full precision computes in pieces, from the projections
    to the output, and keeps only the states between them: less than half of the memory, in about the
    same time.

    Args:
        The arguments of `FavorAttention`.

    Call arguments:
        inputs: [batch, length, features].
        mask: [batch, length], 1 to keep; also taken from Keras. Masked positions are seen by none
            and their outputs are 0.
        bias, cache, decode_loop_step: as in `FavorAttention`.
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

    def _build_for(self, query_size, source_size):
        if query_size != source_size:
            raise ValueError(
                f"layer must attend from a sequence to itself, received query size {query_size}, key size {source_size}"
            )
        self.build((None, None, query_size))

    def call(
        self,
        inputs,
        mask=None,
        inputs_mask=None,
        bias=None,
        cache=None,
        decode_loop_step=None,
        training=None,
    ):
        # Keras hands an implicit mask over as `mask`, or as `inputs_mask` once there is a cache.
        mask = inputs_mask if mask is None else mask
        can_be_cut = self.causal and isinstance(self.kernel_transformation, KernelTransformation)
        is_plain = cache is None and decode_loop_step is None and bias is None
        if can_be_cut and is_plain and self._is_long(inputs, training):
            return self._in_pieces(SelfAttention.call, inputs, mask, training)
        return super().call(
            inputs,
            inputs,
            query_mask=mask,
            source_mask=mask,
            bias=bias,
            cache=cache,
            decode_loop_step=decode_loop_step,
            training=training,
        )

    def compute_output_spec(
        self,
        inputs,
        mask=None,
        inputs_mask=None,
        bias=None,
        cache=None,
        decode_loop_step=None,
        training=None,
    ):
        return super().compute_output_spec(inputs, inputs, cache=cache, decode_loop_step=decode_loop_step)

    def compute_output_shape(self, inputs_shape):
        return super().compute_output_shape(inputs_shape)
