"""The layers that can mix a `CausalLM`'s sequence, by name, with the settings that we recommend."""

from favor_keras.layers import FastWeightsAttention, SelfAttention


def favor(hidden_size, num_heads, **options):
    """Causal FAVOR+ attention: ReLU kernel, two orthogonal features per channel of a head, width-4 convolution."""
    settings = {
        "projection_matrix_type": "orthogonal",
        "nb_random_features": 2 * (hidden_size // num_heads),
        "short_convolution": 4,
    }
    return SelfAttention(hidden_size, num_heads, causal=True, **{**settings, **options})


def fast_weights(hidden_size, num_heads, **options):
    """Fast weights: the delta rule on L2-normalised keys, RMS norm per head, width-4 convolution."""
    settings = {"feature_map": "l2", "short_convolution": 4, "output_norm": True}
    return FastWeightsAttention(hidden_size, num_heads, **{**settings, **options})


MIXERS = {"favor": favor, "fast_weights": fast_weights}


def get_mixer(mixer):
    """The function of a name in `MIXERS`; a function is returned as it is.

    Raises:
        ValueError: for an unknown name or anything else.
    """
    if isinstance(mixer, str) and mixer in MIXERS:
        return MIXERS[mixer]
    if callable(mixer):
        return mixer
    raise ValueError(
        f"mixer must be one of {sorted(MIXERS)} or a function (hidden_size, num_heads, **options) -> layer, "
        f"received {mixer!r}"
    )
