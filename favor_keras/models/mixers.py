"""What can mix a `CausalLM`'s sequence, by name, with the settings that we recommend."""

from favor_keras.layers import FastWeightsAttention, GMLPBlock, SelfAttention, SoftmaxAttention


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


def gmlp(hidden_size, num_heads, *, seq_len, depth, survival_probability=1.0, **options):
    """Causal gMLP: a Toeplitz gate per head (the more the better, 16 for a width of 128), d_ffn = 5 hidden_size.

    `depth` is the block's share of the way through the model. Its survival probability falls
    linearly with it, from 1 to `survival_probability` for the last block (arXiv:1603.09382).
    """
    settings = {
        "d_ffn": 5 * hidden_size,
        "gating_weights": "toeplitz",
        "survival_probability": 1 - depth * (1 - survival_probability),
    }
    return GMLPBlock(seq_len=seq_len, num_heads=num_heads, causal=True, **{**settings, **options})


def amlp(hidden_size, num_heads, **options):
    """`gmlp` with a softmax attention of size 64."""
    return gmlp(hidden_size, num_heads, **{"attention_size": 64, **options})


# Whole blocks, with their own residual and instead of a feed-forward network.
BLOCKS = {"gmlp": gmlp, "amlp": amlp}

MIXERS = {"favor": favor, "fast_weights": fast_weights, "softmax": SoftmaxAttention, **BLOCKS}


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
