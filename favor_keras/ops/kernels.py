"""Kernel transformations: feature maps f with f(q) . f(k) = K(q, k), exactly or on average.

The rows w of the random projection W [M, D] are drawn from N(0, 1) (see `projections`). Then

    E[exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2)] = exp(q . k),

which makes positive random features of the softmax kernel. exp() of an unbounded number needs a
reference to divide by. The original code divides the keys by the maximum over the whole sequence,
through which a causal output sees the future. `scaled_features` gives every key its own reference
instead, and returns it as a log scale that `linear_attention` carries along.
"""

import math

import keras
import tensorflow as tf

from favor_keras.ops.dpfp import dpfp
from favor_keras.ops.precision import full_precision


class KernelTransformation:
    """A kernel that attention can be built on, given by its features.

    Attention computes the features chunk by chunk, so `scaled_features` must treat every position
    alone. To make a kernel, subclass this and define `scaled_features`; to save layers that use it,
    decorate the subclass with `keras.saving.register_keras_serializable` (and, if its constructor
    has arguments, define `get_config`).

    Calling the kernel gives the features alone, with the signature of the original Performer code:
    `kernel(data, is_query, projection_matrix=None, numerical_stabilizer=None)`, [B, T, H, D] ->
    [B, T, H, M] in the dtype of `data`.

    Example:

    >>> import keras, tensorflow as tf
    >>> from favor_keras import SelfAttention
    >>> from favor_keras.ops import KernelTransformation
    >>> @keras.saving.register_keras_serializable(package="example")
    ... class ExpKernel(KernelTransformation):
    ...     def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
    ...         log_scale = tf.reduce_max(data, axis=-1)
    ...         return tf.exp(data - log_scale[..., None]), log_scale
    >>> SelfAttention(8, 2, kernel_transformation=ExpKernel())(tf.ones([1, 5, 8])).shape
    TensorShape([1, 5, 8])
    """

    default_stabilizer = 1e-3
    needs_projection = False
    # Sums of features of both signs can come near 0; attention then adds twice this to them.
    denominator_stabilizer = 0.0

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        """Features in a safe range and the logarithm of the factor that was taken out of them.

        Args:
            data: [..., D], float32 or float64.
            is_query: whether `data` are queries or keys.
            projection_matrix: W [M, D], or None.
            numerical_stabilizer: a small number added to the features; None is the kernel's own.

        Returns:
            `(features, log_scale)`, [..., M] and [...] or None (which is 0), such that the true
            features are exp(log_scale) * features.
        """
        raise NotImplementedError

    def num_features(self, size, num_projections=None):
        """The number of features of data of D = `size` with that many rows in W, None for no W."""
        return size if num_projections is None else num_projections

    def __call__(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        return self._in_full_precision(self._features, data, is_query, projection_matrix, numerical_stabilizer)

    def _features(self, data, is_query, projection_matrix, numerical_stabilizer):
        features, log_scale = self.scaled_features(data, is_query, projection_matrix, numerical_stabilizer)
        return features if log_scale is None else features * tf.exp(log_scale)[..., None]

    @staticmethod
    def _in_full_precision(features, data, is_query, projection_matrix, numerical_stabilizer):
        data = tf.convert_to_tensor(data)
        if projection_matrix is not None:
            projection_matrix = tf.cast(projection_matrix, full_precision(data))
        result = features(tf.cast(data, full_precision(data)), is_query, projection_matrix, numerical_stabilizer)
        return tf.cast(result, data.dtype)

    def _stabilizer(self, numerical_stabilizer):
        return self.default_stabilizer if numerical_stabilizer is None else numerical_stabilizer

    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@keras.saving.register_keras_serializable(package="favor_keras")
class SoftmaxKernel(KernelTransformation):
    """Positive random features of the softmax kernel exp(q . k / sqrt(D)).

        f(x) = exp(W x' - |x'|^2 / 2) / sqrt(M),    x' = x / D^(1/4)

    Called directly, with the features of the original code, it subtracts a maximum in the exponent:
    for queries the maximum over the M features of each position, which cancels because numerator
    and denominator of a query share it; for keys the maximum over all positions and features of a
    head, which cancels because all keys share it (and for which one has to know all positions).
    Then `numerical_stabilizer` (default 1e-6) is added to the exponentials. In attention
    `scaled_features` is used instead, where every key has a maximum of its own:

        exp(W x' - max_m(W x')) + numerical_stabilizer,
        log scale = max_m(W x') - |x'|^2 / 2 - ln(M) / 2

    Raises:
        ValueError: if `projection_matrix` is None.

    References:
        arXiv:2009.14794, lemma 1

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import create_projection_matrix, softmax_kernel_transformation
    >>> data = 0.5 * tf.random.stateless_normal([1, 6, 2, 16], seed=[0, 1])
    >>> features = softmax_kernel_transformation(data, True, create_projection_matrix(64, 16))
    >>> features.shape, bool(tf.reduce_min(features) > 0)
    (TensorShape([1, 6, 2, 64]), True)
    """

    default_stabilizer = 1e-6
    needs_projection = True

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        projected, half_norm = self._project(data, projection_matrix)
        maximum = tf.reduce_max(projected, axis=-1)
        features = tf.exp(projected - maximum[..., None]) + self._stabilizer(numerical_stabilizer)
        num_features = tf.cast(tf.shape(projected)[-1], data.dtype)
        return features, maximum - half_norm - tf.math.log(num_features) / 2

    def _features(self, data, is_query, projection_matrix, numerical_stabilizer):
        projected, half_norm = self._project(data, projection_matrix)
        maximum = tf.reduce_max(projected, axis=-1 if is_query else (1, 3), keepdims=True)
        features = tf.exp(projected - half_norm[..., None] - maximum) + self._stabilizer(numerical_stabilizer)
        return features / tf.sqrt(tf.cast(tf.shape(projected)[-1], data.dtype))

    def _project(self, data, projection_matrix):
        if projection_matrix is None:
            raise ValueError("projection_matrix: the softmax kernel needs a matrix [M, D], received None")
        data *= float(data.shape[-1]) ** -0.25
        return project(data, projection_matrix), tf.reduce_sum(tf.square(data), axis=-1) / 2


@keras.saving.register_keras_serializable(package="favor_keras")
class HyperbolicSoftmaxKernel(SoftmaxKernel):
    """Positive features of the softmax kernel exp(q . k / sqrt(D)) from every row and its opposite.

        f(x) = [exp(W x'), exp(-W x')] exp(-|x'|^2 / 2) / sqrt(2 M),    x' = x / D^(1/4)

    Less variance than `SoftmaxKernel` with as many rows in W, for twice the features.

    References:
        arXiv:2009.14794, lemma 1 and section 2.3

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import create_projection_matrix, get_kernel
    >>> kernel = get_kernel("softmax_hyperbolic")
    >>> kernel(tf.ones([1, 6, 2, 16]), True, create_projection_matrix(32, 16)).shape
    TensorShape([1, 6, 2, 64])
    """

    def num_features(self, size, num_projections=None):
        return 2 * num_projections

    def _project(self, data, projection_matrix):
        projected, half_norm = super()._project(data, projection_matrix)
        return tf.concat([projected, -projected], axis=-1), half_norm


@keras.saving.register_keras_serializable(package="favor_keras")
class TrigonometricSoftmaxKernel(SoftmaxKernel):
    """Trigonometric (random Fourier) features of the softmax kernel exp(q . k / sqrt(D)).

        f(x) = [cos(W x'), sin(W x')] exp(|x'|^2 / 2) / sqrt(M),    x' = x / D^(1/4)

    Unbiased like the positive features, but of both signs: where the kernel is small their error is
    large against it. Without a stabilizer by default. Called directly, the largest |x'|^2 / 2 of a
    head is subtracted in the exponent, as in the original code; in attention it is the log scale.

    References:
        arXiv:2009.14794, section 2.3; Rahimi and Recht, Random Features for Large-Scale Kernel Machines

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import create_projection_matrix, get_kernel
    >>> kernel = get_kernel("softmax_trig")
    >>> kernel(tf.ones([1, 6, 2, 16]), True, create_projection_matrix(32, 16)).shape
    TensorShape([1, 6, 2, 64])
    """

    default_stabilizer = 0.0
    denominator_stabilizer = 1e-6

    def num_features(self, size, num_projections=None):
        return 2 * num_projections

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        projected, half_norm = self._project(data, projection_matrix)
        waves = tf.concat([tf.cos(projected), tf.sin(projected)], axis=-1) + self._stabilizer(numerical_stabilizer)
        return waves, half_norm - tf.math.log(tf.cast(tf.shape(projected)[-1], data.dtype)) / 2

    def _features(self, data, is_query, projection_matrix, numerical_stabilizer):
        waves, log_scale = self.scaled_features(data, is_query, projection_matrix, numerical_stabilizer)
        _, half_norm = self._project(data, projection_matrix)
        return waves * tf.exp(log_scale - tf.reduce_max(half_norm, axis=1, keepdims=True))[..., None]


@keras.saving.register_keras_serializable(package="favor_keras")
class ReluKernel(KernelTransformation):
    """ReLU features, of the data themselves or of random projections of them.

        f(x) = relu(x) + numerical_stabilizer,
        f(x) = relu(W x) / sqrt(M) + numerical_stabilizer    with a projection matrix,

    `numerical_stabilizer` is 1e-3 by default. With a projection f(q) . f(k) estimates the arc-cosine
    kernel of order 1, |q| |k| (sin t + (pi - t) cos t) / (2 pi), t the angle between q and k.

    References:
        arXiv:2009.14794, section 4; arXiv:1305.5078

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import relu_kernel_transformation
    >>> relu_kernel_transformation(tf.constant([[[[-1.0, 2.0]]]]), True, None, 0.5).numpy().tolist()
    [[[[0.5, 2.5]]]]
    """

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        if projection_matrix is not None:
            data = project(data, projection_matrix)
            data /= tf.sqrt(tf.cast(tf.shape(data)[-1], data.dtype))
        return tf.nn.relu(data) + self._stabilizer(numerical_stabilizer), None


@keras.saving.register_keras_serializable(package="favor_keras")
class GeneralizedKernel(KernelTransformation):
    """Features of any elementwise function g, of the data or of random projections of them.

        f(x) = g(x) + numerical_stabilizer,    f(x) = g(W x) + numerical_stabilizer

    `numerical_stabilizer` is 1e-3 by default. With a projection whose rows are normal, f(q) . f(k) / M
    estimates E[g(w . q) g(w . k)] for normal w; with a = |q|, b = |k|, r = q . k, t the angle between:

        identity     r
        cos          (exp(-|q - k|^2 / 2) + exp(-|q + k|^2 / 2)) / 2
        sin          (exp(-|q - k|^2 / 2) - exp(-|q + k|^2 / 2)) / 2
        exp          exp(|q + k|^2 / 2)
        abs          2 a b (sin t + (pi / 2 - t) cos t) / pi
        requ         a^2 b^2 (3 sin t cos t + (pi - t) (1 + 2 cos^2 t)) / (2 pi), g(x) = relu(x)^2
        tanh, sigmoid, gelu, shifted_elu: the same expectation, with g(x) = elu(x) + 1 for the last

    Args:
        function: a name of the above, or a function of a tensor (registered with Keras, if layers
            that use it are to be saved).

    Raises:
        ValueError: for an unknown name.

    References:
        arXiv:2009.14794, section 2.2

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import GeneralizedKernel
    >>> GeneralizedKernel("abs")(tf.constant([[[[-2.0, 3.0]]]]), True, None, 0.5).numpy().tolist()
    [[[[2.5, 3.5]]]]
    """

    denominator_stabilizer = 1e-6

    def __init__(self, function):
        if isinstance(function, dict):
            function = keras.saving.deserialize_keras_object(function)
        if not callable(function) and function not in GENERALIZED_FUNCTIONS:
            raise ValueError(
                f"function must be one of {sorted(GENERALIZED_FUNCTIONS)} or a function of a tensor, "
                f"received {function!r}"
            )
        self.function = function

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        if projection_matrix is not None:
            data = project(data, projection_matrix)
        if self.function == "exp":
            return self._scaled_exp(data, self._stabilizer(numerical_stabilizer))
        function = self.function if callable(self.function) else GENERALIZED_FUNCTIONS[self.function]
        return function(data) + self._stabilizer(numerical_stabilizer), None

    @staticmethod
    def _scaled_exp(data, stabilizer):
        log_scale = tf.maximum(tf.reduce_max(data, axis=-1), 0.0)
        features = tf.exp(data - log_scale[..., None]) + stabilizer * tf.exp(-log_scale)[..., None]
        return features, log_scale

    def get_config(self):
        if callable(self.function):
            return {"function": serialize_registered("function", self.function)}
        return {"function": self.function}


@keras.saving.register_keras_serializable(package="favor_keras")
class EluKernel(KernelTransformation):
    """f(x) = elu(x) + 1, that is x + 1 for x > 0 and exp(x) otherwise; of W x with a projection.

    Positive everywhere, so without a stabilizer by default; exp(x) is computed as such, where
    elu(x) + 1 would round to 0 in low precision, and a position whose features are all small keeps
    them by its log scale.

    References:
        arXiv:2006.16236

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import get_kernel
    >>> bool(get_kernel("elu")(tf.constant([[[[-30.0, 2.0]]]], tf.bfloat16), True)[0, 0, 0, 0] > 0)
    True
    """

    default_stabilizer = 0.0

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        if projection_matrix is not None:
            data = project(data, projection_matrix)
        log_scale = tf.minimum(tf.reduce_max(data, axis=-1), 0.0)
        features = tf.where(data > 0, data + 1.0, tf.exp(tf.minimum(data, 0.0) - log_scale[..., None]))
        return features + self._stabilizer(numerical_stabilizer), log_scale


@keras.saving.register_keras_serializable(package="favor_keras")
class DPFPKernel(KernelTransformation):
    """The features of `dpfp`, not normalised, of the data or of projections W x of them.

    `numerical_stabilizer` is 1e-3 by default: a query that shares no feature with any key then sees
    all alike, and does not jump from nothing to the whole value of the first key it touches.

    Args:
        nu: number of shifts; there are 2 nu K features for data of size K.

    References:
        arXiv:2102.11174, section 5.3

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import DPFPKernel
    >>> DPFPKernel(nu=2)(tf.ones([1, 6, 2, 16]), True).shape
    TensorShape([1, 6, 2, 64])
    """

    def __init__(self, nu=1):
        self.nu = nu

    def num_features(self, size, num_projections=None):
        return 2 * self.nu * super().num_features(size, num_projections)

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        if projection_matrix is not None:
            data = project(data, projection_matrix)
        return dpfp(data, self.nu, normalize=False) + self._stabilizer(numerical_stabilizer), None

    def get_config(self):
        return {"nu": self.nu}


softmax_kernel_transformation = SoftmaxKernel()
relu_kernel_transformation = ReluKernel()

GENERALIZED_FUNCTIONS = {
    "cos": tf.cos,
    "sin": tf.sin,
    "tanh": tf.tanh,
    "sigmoid": tf.sigmoid,
    # x times the normal distribution function; TensorFlow's erf is not exact to float64.
    "gelu": lambda x: 0.5 * x * tf.math.erfc(-x * math.sqrt(0.5)),
    "requ": lambda x: tf.square(tf.nn.relu(x)),
    "exp": tf.exp,
    "identity": tf.identity,
    "shifted_elu": lambda x: tf.nn.elu(x) + 1.0,
    "abs": tf.abs,
}

KERNELS = {
    "softmax": softmax_kernel_transformation,
    "softmax_hyperbolic": HyperbolicSoftmaxKernel(),
    "softmax_trig": TrigonometricSoftmaxKernel(),
    "relu": relu_kernel_transformation,
    "elu": EluKernel(),
    "dpfp": DPFPKernel(),
    **{name: GeneralizedKernel(name) for name in GENERALIZED_FUNCTIONS},
}


def get_kernel(kernel_transformation):
    """The kernel of a name in `KERNELS` or of a config; a kernel or a function is returned as it is.

    Raises:
        ValueError: for an unknown name or anything else.
    """
    if isinstance(kernel_transformation, str) and kernel_transformation in KERNELS:
        return KERNELS[kernel_transformation]
    if isinstance(kernel_transformation, dict):
        kernel_transformation = keras.saving.deserialize_keras_object(kernel_transformation)
    if callable(kernel_transformation):
        return kernel_transformation
    raise ValueError(
        f"kernel_transformation must be one of {sorted(KERNELS)}, a KernelTransformation or a function "
        f"(data, is_query, projection_matrix, numerical_stabilizer) -> features, received {kernel_transformation!r}"
    )


def serialize_kernel(kernel):
    """What `get_kernel` makes the kernel from again: its name, or the config of a registered one.

    Raises:
        ValueError: if the class or function is not registered with Keras. (It would be saved by its
            bare name, by which something else may be found on loading.)
    """
    for name, known in KERNELS.items():
        if kernel is known:
            return name
    return serialize_registered("kernel_transformation", kernel)


def serialize_registered(name, kernel):
    """The config of an object or a function; a ValueError if it, or its class, is not registered."""
    registered = kernel if hasattr(kernel, "__name__") else type(kernel)
    if keras.saving.get_registered_object(keras.saving.get_registered_name(registered)) is None:
        raise ValueError(
            f"{name}: {registered.__name__} can be saved only if it is decorated with "
            "@keras.saving.register_keras_serializable(package=...)"
        )
    return keras.saving.serialize_keras_object(kernel)


def project(data, projection_matrix):
    """W x for data [..., D] and W [M, D]: [..., M]."""
    if projection_matrix.shape.rank != 2 or not data.shape[-1:].is_compatible_with(projection_matrix.shape[1:]):
        raise ValueError(
            f"projection_matrix must be [features, {data.shape[-1]}] for data {data.shape}, "
            f"received {projection_matrix.shape}"
        )
    rows = tf.matmul(tf.reshape(data, [-1, tf.shape(data)[-1]]), projection_matrix, transpose_b=True)
    projected = tf.reshape(rows, tf.concat([tf.shape(data)[:-1], tf.shape(projection_matrix)[:1]], axis=0))
    projected.set_shape([*data.shape[:-1], projection_matrix.shape[0]])
    return projected
