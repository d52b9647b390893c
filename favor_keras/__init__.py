"""Keras layers whose cost grows linearly with the length of the sequence."""

import os

_BACKEND_HELP = (
    "favor_keras needs Keras to run on TensorFlow. Set the environment variable KERAS_BACKEND=tensorflow "
    "before Keras is first imported (without it the choice comes from ~/.keras/keras.json)."
)

try:
    import keras
except ImportError as error:
    chosen = os.environ.get("KERAS_BACKEND")
    if chosen == "tensorflow" or error.name in ("keras", "tensorflow"):
        raise
    raise ImportError(f"{_BACKEND_HELP} KERAS_BACKEND is {chosen!r}; Keras failed with: {error}") from error

if keras.backend.backend() != "tensorflow":
    raise ImportError(f"{_BACKEND_HELP} The backend is {keras.backend.backend()!r}.")

from favor_keras import layers, models, ops, original_weights  # noqa: E402
from favor_keras.callbacks import RedrawProjections  # noqa: E402
from favor_keras.export import export_text_model  # noqa: E402
from favor_keras.layers import (  # noqa: E402
    FastWeightsAttention,
    FavorAttention,
    GMLPBlock,
    SelfAttention,
    SpatialGatingUnit,
)
from favor_keras.models import CausalLM  # noqa: E402
from favor_keras.ops import (  # noqa: E402
    causal_denominator,
    causal_numerator,
    create_projection_matrix,
    delta_rule,
    dpfp,
    favor_attention,
    linear_attention,
    noncausal_denominator,
    noncausal_numerator,
    relu_kernel_transformation,
    softmax_kernel_transformation,
    spatial_gating,
)
from favor_keras.schedules import NoamSchedule  # noqa: E402
