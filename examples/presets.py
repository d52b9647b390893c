"""Known experiments as settings of char_lm.py: flags by name. A flag on the command line overrides its preset."""

import json
import shlex

# The fast-weights and gMLP tutorials of https://nn.labml.ai (transformers/fast_weights, transformers/gmlp), which train
# on Tiny Shakespeare with Adam and the learning rate of arXiv:1706.03762.
TUTORIAL = {
    "data": "tiny_shakespeare",
    "layers": 6,
    "heads": 8,
    "hidden_size": 512,
    "epochs": 128,
    "schedule": "noam",
    "warm_up_steps": 4000,
    "learning_rate": 1.0,
    "beta_2": 0.98,
    "weight_decay": 0.0,
    "dropout": 0.0,
    "prompt": "It is",
}

# https://github.com/karpathy/nanoGPT, README and config/train_shakespeare_char.py
NANOGPT = {"data": "tiny_shakespeare", "learning_rate": 1e-3, "warm_up_steps": 100}

PRESETS = {
    # A few minutes on two cores.
    "quick": {
        "data": "python_docs",
        "layers": 2,
        "heads": 4,
        "hidden_size": 128,
        "block_size": 64,
        "batch_size": 8,
        "steps": 2000,
        "learning_rate": 3e-3,
        "dropout": 0.0,
    },
    # Its softmax transformer reaches 1.88 nats per character with these settings for a CPU.
    "nanogpt_cpu": {
        **NANOGPT,
        "layers": 4,
        "heads": 4,
        "hidden_size": 128,
        "block_size": 64,
        "batch_size": 12,
        "steps": 2000,
        "dropout": 0.0,
    },
    "nanogpt_gpu": {
        **NANOGPT,
        "layers": 6,
        "heads": 6,
        "hidden_size": 384,
        "block_size": 256,
        "batch_size": 64,
        "steps": 5000,
        "dropout": 0.2,
    },
    # Its layer is the paper's, without a norm before the attention.
    "fast_weights_tutorial": {
        **TUTORIAL,
        "mixer": "fast_weights",
        "mixer_options": {"feature_map": "dpfp", "nu": 1, "short_convolution": 0, "output_norm": False},
        "block_options": {"normalize_mixer_input": False, "activation": "relu"},
        "feed_forward_size": 2048,
        "block_size": 128,
        "batch_size": 16,
    },
    "gmlp_tutorial": {
        **TUTORIAL,
        "mixer": "gmlp",
        "heads": 1,
        "mixer_options": {"d_ffn": 2048, "gating_weights": "full"},
        "block_size": 256,
        "batch_size": 32,
    },
}


def description():
    """The presets as a text, with the flags as they can be given in a shell."""
    return "\n\n".join(
        f"{name}\n" + "\n".join(f"    --{flag.replace('_', '-')} {in_shell(value)}" for flag, value in settings.items())
        for name, settings in PRESETS.items()
    )


def in_shell(value):
    return shlex.quote(json.dumps(value) if isinstance(value, dict) else str(value))
