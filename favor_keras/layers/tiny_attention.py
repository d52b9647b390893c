import math

import keras
import tensorflow as tf

from favor_keras.layers.masks import log_scale_of
from favor_keras.layers.spatial_gating_unit import state_dtype
from favor_keras.ops.attention import kernel_attention
from favor_keras.ops.cache_places import places_of, put_in_place, sees
from favor_keras.ops.kernels import KernelTransformation, get_kernel
from favor_keras.ops.linear_attention import STATE_NAMES as KERNEL_STATE_NAMES
from favor_keras.ops.linear_attention import zero_state
from favor_keras.ops.projections import draw_projection
from favor_keras.ops.spatial_gating import softmax_attention


class TinyAttention(keras.layers.Layer):
    """The attention of aMLP, a part of `GMLPBlock`: one head, projected to the size of the gate.

    Args:
        size: size of queries, keys and values.
        output_size: size of the gate.
        max_length: the greatest length of a sequence, which a softmax attention's cache has room for.
        causal: whether position i sees the positions j <= i only.
        kernel: None for softmax attention, or a kernel's name or object for linear attention.
        seed: integer for the random projection of a kernel that needs one.
        **kwargs: name, dtype and trainable.

    Call arguments:
        inputs: [B, T, d].
        mask, visibility_mask: boolean [B, T]; [T, T] or [B, T, T].
        cache: a dict with `position` [B] and the `cache_names`, or None.

    Returns:
        `(output, new_cache)`: [B, T, output_size] and a dict of the `cache_names`, empty without `cache`.
    """

    def __init__(self, size, output_size, max_length, causal, kernel, seed, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.size = size
        self.max_length = max_length
        self.causal = causal
        self.kernel = None if kernel is None else get_kernel(kernel)
        if self.kernel is not None and not isinstance(self.kernel, KernelTransformation):
            raise ValueError(
                f"attention_kernel must be None, a kernel's name or a KernelTransformation, received {kernel!r}"
            )
        self.seed = seed
        self.supports_masking = True
        self.qkv = keras.layers.Dense(3 * size, name="qkv", dtype=self.dtype_policy)
        self.output_dense = keras.layers.Dense(output_size, name="output_dense", dtype=self.dtype_policy)

    @property
    def _num_projections(self):
        needs_projection = self.kernel is not None and self.kernel.needs_projection
        return max(1, math.ceil(self.size * math.log(self.size))) if needs_projection else None

    @property
    def cache_names(self):
        names = ("keys", "values") if self.kernel is None else KERNEL_STATE_NAMES
        return tuple(f"attention_{name}" for name in names)

    def build(self, inputs_shape):
        self.qkv.build(inputs_shape)
        self.output_dense.build((*inputs_shape[:-1], self.size))
        self.projection_matrix = None
        if self._num_projections is not None:
            self.projection_matrix = self.add_weight(
                name="projection_matrix",
                shape=(self._num_projections, self.size),
                initializer=lambda shape, dtype: draw_projection(*shape, self.seed),
                dtype="float32",
                trainable=False,
                autocast=False,
            )

    def call(self, inputs, mask=None, visibility_mask=None, cache=None):
        if self.kernel is not None and visibility_mask is not None:
            raise ValueError(
                "visibility_mask must be None with attention_kernel: linear attention sees all keys or none"
            )
        query, key, value = tf.split(self.qkv(inputs), 3, axis=-1)
        if self.kernel is not None:
            output, state = self._attend_by_kernel(query, key, value, mask, cache)
        elif cache is None:
            output, state = self._attend_by_softmax(query, key, value, mask, visibility_mask), ()
        else:
            output, *state = self._continue_softmax(query, key, value, mask, cache)
        return self.output_dense(output), {} if cache is None else dict(zip(self.cache_names, state))

    def _attend_by_softmax(self, query, key, value, mask, visibility_mask):
        length = tf.shape(key)[1]
        visible = sees(tf.range(length), length) if self.causal else True
        if mask is not None:
            visible &= mask[:, None]
        if visibility_mask is not None:
            visible &= visibility_mask
        return softmax_attention(query, key, value, visible)

    def _continue_softmax(self, query, key, value, mask, cache):
        """The output for the new positions, and all keys and values so far, each at its place."""
        kept = tf.ones(tf.shape(key)[:2], tf.bool) if mask is None else mask
        start = tf.cast(cache["position"], tf.int32)
        keys, values = (
            put_in_place(cache[name], tf.cast(new, cache[name].dtype), start, kept)
            for name, new in zip(self.cache_names, (key, value))
        )
        visible = sees(places_of(kept, start), self.max_length)
        output = softmax_attention(query, tf.cast(keys, key.dtype), tf.cast(values, value.dtype), visible)
        return output, keys, values

    def _attend_by_kernel(self, query, key, value, mask, cache):
        state = None if cache is None else dict(zip(KERNEL_STATE_NAMES, (cache[name] for name in self.cache_names)))
        output, state = kernel_attention(
            *(x[:, :, None] for x in (query, key, value)),
            self.kernel,
            self.projection_matrix,
            key_log_scale=None if mask is None else log_scale_of(mask, state_dtype(self)),
            causal=self.causal,
            initial_state=state,
        )
        return output[:, :, 0], [state[name] for name in KERNEL_STATE_NAMES]

    def init_cache(self, batch_size):
        if self.kernel is None:
            tensors = [tf.zeros([batch_size, self.max_length, self.size], state_dtype(self)) for _ in self.cache_names]
        else:
            num_features = self.kernel.num_features(self.size, self._num_projections)
            tensors = zero_state(batch_size, 1, num_features, self.size, state_dtype(self)).values()
        return dict(zip(self.cache_names, tensors))
