"""Learning rates that change during training."""

import math
import numbers

import keras

from favor_keras.layers.arguments import check_positive


@keras.saving.register_keras_serializable(package="favor_keras")
class NoamSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of the original transformer: a linear rise, then a fall with the square root.

        rate(step) = factor * hidden_size^-0.5 * min(n^-0.5, n * warm_up_steps^-1.5),    n = step + 1

    `step` is the number of updates made before this one, `optimizer.iterations` in Keras, which
    starts at 0; n counts as the paper does, from 1. The first update has the rate
    factor * hidden_size^-0.5 * warm_up_steps^-1.5, above 0; update number n = warm_up_steps has the
    greatest, factor * (hidden_size * warm_up_steps)^-0.5. A training that goes on from a saved
    optimizer goes on with the rate.

    Args:
        hidden_size: the size of the model, a positive integer.
        warm_up_steps: the number of updates over which the rate rises.
        factor: what the rate is multiplied by, above 0.

    Call arguments:
        step: an integer or a scalar tensor, at least 0.

    Returns:
        The rate, a float32 scalar.

    Raises:
        ValueError: for arguments other than described.

    References:
        arXiv:1706.03762, section 5.3

    Example:

    >>> import keras
    >>> from favor_keras import NoamSchedule
    >>> schedule = NoamSchedule(hidden_size=64, warm_up_steps=100)
    >>> [round(float(schedule(step)), 6) for step in (0, 49, 99, 399)]
    [0.000125, 0.00625, 0.0125, 0.00625]
    >>> optimizer = keras.optimizers.Adam(schedule, beta_2=0.98, epsilon=1e-9)
    """

    def __init__(self, hidden_size, warm_up_steps=4000, factor=1.0):
        check_positive("hidden_size", hidden_size)
        check_positive("warm_up_steps", warm_up_steps)
        if isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not 0 < factor < math.inf:
            raise ValueError(f"factor must be a finite number above 0, received {factor!r}")
        self.hidden_size = hidden_size
        self.warm_up_steps = warm_up_steps
        self.factor = float(factor)

    def __call__(self, step):
        n = keras.ops.cast(step, "float32") + 1.0
        rise = n * self.warm_up_steps**-1.5
        return self.factor * self.hidden_size**-0.5 * keras.ops.minimum(keras.ops.rsqrt(n), rise)

    def get_config(self):
        return {"hidden_size": self.hidden_size, "warm_up_steps": self.warm_up_steps, "factor": self.factor}
