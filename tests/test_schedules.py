"""NoamSchedule: against the formula, compiled, saved and resumed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import assert_close

from favor_keras import NoamSchedule


def noam(update, hidden_size, warm_up_steps, factor):
    """The rate of update number 1, 2, ..."""
    return factor / np.sqrt(hidden_size) * min(1 / np.sqrt(update), update / np.sqrt(warm_up_steps) ** 3)


SETTINGS = {
    "paper": (512, 4000, 1.0),
    "small": (48, 10, 0.3),
    "no_warm_up": (7, 1, 2.0),
}
all_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@all_settings
def test_rate_equals_the_formula(settings):
    schedule, warm_up_steps = NoamSchedule(*settings), settings[1]
    for step in (0, 1, warm_up_steps // 2, warm_up_steps - 1, warm_up_steps, warm_up_steps + 1, 50 * warm_up_steps):
        for given in (step, tf.constant(step, "int64"), tf.constant(step, "int32")):
            rate = schedule(given)
            assert rate.dtype == "float32" and rate.shape == ()
            assert_close(rate, noam(step + 1, *settings), 1e-6)


def test_defaults_are_those_of_the_paper():
    assert_close(NoamSchedule(512)(99), noam(100, 512, 4000, 1.0), 1e-6)


def test_first_rate_is_above_0_and_the_greatest_comes_at_the_end_of_the_warm_up():
    rates = [float(NoamSchedule(16, 20)(step)) for step in range(60)]
    assert rates[0] > 0 and np.argmax(rates) == 19
    assert_close(rates[19], 1 / np.sqrt(16 * 20), 1e-6)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_one_compiled_function_serves_every_step(jit_compile):
    schedule = tf.function(NoamSchedule(48, 10, 0.3), [tf.TensorSpec([], tf.int32)], jit_compile=jit_compile)
    assert_close([schedule(step) for step in range(30)], [noam(n, 48, 10, 0.3) for n in range(1, 31)], 1e-6)


def model_that_sums_rates():
    """One weight, from 0, whose gradient is always -1: after training it is the sum of the rates."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(NoamSchedule(48, 4, 0.3)), "mae")
    return model


def train(model, updates):
    ones = np.ones([updates, 1], "float32")
    model.fit(ones, 1e3 * ones, batch_size=1, verbose=0)


def test_training_has_the_rates_and_goes_on_with_them_after_saving(tmp_path):
    model = model_that_sums_rates()
    rates = [noam(n, 48, 4, 0.3) for n in range(1, 10)]
    train(model, 3)
    assert_close(model.get_weights()[0], [[sum(rates[:3])]], 1e-6)
    model.save(tmp_path / "model.keras")

    again = keras.models.load_model(tmp_path / "model.keras")
    assert_close(again.optimizer.learning_rate, rates[3], 1e-6)
    train(again, 6)
    assert_close(again.get_weights()[0], [[sum(rates)]], 1e-6)


def test_config_is_complete():
    config = keras.saving.serialize_keras_object(NoamSchedule(48, 10, 0.3))
    assert config["config"] == {"hidden_size": 48, "warm_up_steps": 10, "factor": 0.3}
    assert_close(keras.saving.deserialize_keras_object(config)(3), noam(4, 48, 10, 0.3), 1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("hidden_size", "warm_up_steps") for value in (0, -1, 2.0, True, "8", None)],
        *[("factor", value) for value in (0, -1.0, True, "1", None, float("inf"), float("nan"))],
    ],
)
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*received"):
        NoamSchedule(**{"hidden_size": 8, name: value})
