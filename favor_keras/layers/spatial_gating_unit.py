import keras
import tensorflow as tf

from favor_keras.layers.arguments import check_positive
from favor_keras.ops.spatial_gating import STATE_NAMES, check_length, spatial_gating, zero_state

GATING_WEIGHTS = ("full", "toeplitz")


@keras.saving.register_keras_serializable(package="favor_keras")
class SpatialGatingUnit(keras.layers.Layer):
    """The gate of gMLP: one half of the channels gates the other by its own past and future.

        u, v = split(inputs),    output_i = u_i * (sum_j W_ij norm(v)_j + b_i)

    with W [seq_len, seq_len] that starts near 0 and b that starts at 1, so the unit starts as the
    identity on u. Inputs are [batch, length, features] of any length up to seq_len = n: a shorter
    sequence uses the leading block of W. With F features it has F + H (n^2 + n) weights, or F + H
    (3 n - 1) with Toeplitz matrices.

    Args:
        seq_len: the greatest length n.
        causal: whether position i sees the positions j <= i only. The upper triangle of W is then
            neither read nor trained.
        gating_weights: "full", or "toeplitz" for a W that depends on i - j only.
        num_heads: number H of gates, each with its own W and b for its share of the F / 2 channels.
        **kwargs: name, dtype and trainable.

    Call arguments:
        inputs: [B, T, F], F even.
        mask: [B, T], 1 to keep; also taken from Keras. Masked positions are passed over: the others
            are numbered as if these had been cut out, and the outputs here are 0.
        visibility_mask: [T, T] or [B, T, T], 1 where position i (the last axis but one) sees j.
        added_gate: [B, T, F / 2], added to the sum over j, or None.
        cache: what came before, see `init_cache`. Only if causal, and without `visibility_mask`.

    Returns:
        [B, T, F / 2] in the compute dtype; with `cache` also the new cache.

    Raises:
        ValueError: for arguments or inputs other than described, such as more than seq_len positions.
            Inside a graph the outputs for positions that the cache has no room for are NaN instead.

    References:
        arXiv:2105.08050

    Example:

    >>> import keras
    >>> from favor_keras import SpatialGatingUnit
    >>> SpatialGatingUnit(seq_len=16)(keras.ops.ones([2, 10, 8])).shape
    TensorShape([2, 10, 4])
    """

    def __init__(self, seq_len, causal=False, gating_weights="full", num_heads=1, **kwargs):
        super().__init__(autocast=False, **kwargs)
        check_positive("seq_len", seq_len)
        check_positive("num_heads", num_heads)
        if gating_weights not in GATING_WEIGHTS:
            raise ValueError(f"gating_weights must be one of {GATING_WEIGHTS}, received {gating_weights!r}")
        self.seq_len = seq_len
        self.causal = causal
        self.gating_weights = gating_weights
        self.num_heads = num_heads
        self.supports_masking = True
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5, name="norm", dtype=self.dtype_policy)

    def build(self, inputs_shape):
        if len(inputs_shape) != 3 or inputs_shape[-1] % (2 * self.num_heads):
            raise ValueError(
                "inputs must be [batch, length, features] with an even number of features, half of which num_heads="
                f"{self.num_heads} divides, received shape {tuple(inputs_shape)}"
            )
        self.norm.build((*inputs_shape[:2], inputs_shape[-1] // 2))
        heads = () if self.num_heads == 1 else (self.num_heads,)
        sizes = (self.seq_len, self.seq_len) if self.gating_weights == "full" else (2 * self.seq_len - 1,)
        near_zero = keras.initializers.RandomUniform(-0.01, 0.01)
        self.weight = self.add_weight(name="weight", shape=(*heads, *sizes), initializer=near_zero)
        self.bias = self.add_weight(name="bias", shape=(*heads, self.seq_len), initializer="ones")

    def call(self, inputs, mask=None, inputs_mask=None, visibility_mask=None, added_gate=None, cache=None):
        # Keras hands an implicit mask over as `mask`, or as `inputs_mask` if there are other tensors.
        mask = inputs_mask if mask is None else mask
        self._check(inputs, cache)
        u, v = tf.split(tf.cast(inputs, self.compute_dtype), 2, axis=-1)
        return spatial_gating(
            u,
            self.norm(v),
            self.weight,
            self.bias,
            causal=self.causal,
            toeplitz=self.gating_weights == "toeplitz",
            key_mask=mask,
            visibility_mask=visibility_mask,
            added_gate=None if added_gate is None else tf.cast(added_gate, u.dtype),
            initial_state=cache,
        )

    def init_cache(self, batch_size, max_length=None):
        """The cache before the first token: pass it to `call(..., cache=...)`, go on with the new one.

        A sequence in pieces gives what the whole sequence gives, whatever the pieces. The cache is
        a flat dict of float32 tensors whose first axis is the batch: `gate_inputs` [B, seq_len,
        F / 2], norm(v) so far, and `position` [B], how many they are. A token costs O(seq_len * F).

        Args:
            batch_size: an integer or a scalar tensor.
            max_length: how many tokens will come at most, or None.

        Raises:
            ValueError: if the layer is not causal or not built yet, or max_length exceeds seq_len.
        """
        check_can_stream(self, max_length)
        return zero_state(batch_size, self.seq_len, self.norm.gamma.shape[0], state_dtype(self))

    def _check(self, inputs, cache):
        check_length("inputs", inputs.shape[1], self.seq_len)
        if cache is not None:
            check_cache(self, cache, STATE_NAMES, inputs)

    def compute_output_spec(
        self, inputs, mask=None, inputs_mask=None, visibility_mask=None, added_gate=None, cache=None
    ):
        self._check(inputs, cache)
        return spec_with_cache(self, self.compute_output_shape(inputs.shape), cache)

    def compute_output_shape(self, inputs_shape):
        return (*inputs_shape[:-1], inputs_shape[-1] // 2)

    def get_config(self):
        return {
            **super().get_config(),
            "seq_len": self.seq_len,
            "causal": self.causal,
            "gating_weights": self.gating_weights,
            "num_heads": self.num_heads,
        }


def state_dtype(layer):
    """The dtype of a layer's caches under its policy."""
    return "float64" if layer.compute_dtype == "float64" else "float32"


def check_can_stream(layer, max_length=None):
    """Raise a ValueError if a layer with `causal` and `seq_len` cannot make a cache for `max_length`."""
    if not layer.causal:
        raise ValueError("cache needs a causal layer, received causal=False")
    if not layer.built:
        raise ValueError("init_cache needs a built layer: call the layer or build(inputs_shape) first")
    if isinstance(max_length, int):
        check_length("max_length", max_length, layer.seq_len)


def check_cache(layer, cache, names, inputs):
    """Raise a ValueError if `cache` is not one of `layer` for `inputs`, a dict of `names`."""
    if not layer.causal:
        raise ValueError("cache needs a causal layer, received causal=False")
    if not isinstance(cache, dict) or set(cache) != set(names):
        received = sorted(cache) if isinstance(cache, dict) else type(cache).__name__
        raise ValueError(f"cache must be a dict of {sorted(names)}, as init_cache makes, received {received}")
    batch_sizes = inputs.shape[0], cache["position"].shape[0]
    if None not in batch_sizes and batch_sizes[0] != batch_sizes[1]:
        raise ValueError(f"cache must be of the batch size {batch_sizes[0]} of inputs, received {batch_sizes[1]}")


def spec_with_cache(layer, shape, cache):
    """The symbolic output of a layer, and its cache if there is one."""
    output = keras.KerasTensor(shape, dtype=layer.compute_dtype)
    if cache is None:
        return output
    return output, {name: keras.KerasTensor(c.shape, dtype=state_dtype(layer)) for name, c in cache.items()}
