"""Known experiments as settings of char_lm.py: flags by name. A flag on the command line overrides its preset."""

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
    # The settings for a CPU in the README of https://github.com/karpathy/nanoGPT, whose softmax transformer
    # reaches 1.88 nats per character with them.
    "nanogpt_cpu": {
        "data": "tiny_shakespeare",
        "layers": 4,
        "heads": 4,
        "hidden_size": 128,
        "block_size": 64,
        "batch_size": 12,
        "steps": 2000,
        "learning_rate": 1e-3,
        "warm_up_steps": 100,
        "dropout": 0.0,
    },
}
