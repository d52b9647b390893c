"""Train a softmax character model, convert its attention to FAVOR+, fine-tune that, and compare.

    python examples/convert_attention.py
    python examples/convert_attention.py --data my_text.txt --features 64 256

Prints the validation loss (nats per character) and accuracy of the softmax model, and for every number of random
features those right after the conversion and after the fine-tuning.
"""

import argparse

import keras
from command_line import OneLineParser, count
from texts import consecutive_windows, random_windows, read_text, split_text

from favor_keras import SelfAttention
from favor_keras.text import Characters

HIDDEN_SIZE, HEADS, LAYERS = 64, 4, 2


def make_parser():
    parser = OneLineParser(
        prog="convert_attention.py",
        description="Convert a softmax model to FAVOR+ and fine-tune it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", default="python_docs", help="python_docs, tiny_shakespeare or a UTF-8 text file")
    add("--steps", type=count, default=1500, help="training steps of the softmax model")
    add("--fine-tune-steps", type=count, default=150, help="training steps after the conversion")
    add("--features", type=count, nargs="+", default=[64, 256, 1024], help="numbers of random features to try")
    add("--batch-size", type=count, default=16, help="windows in a training step")
    add("--block-size", type=count, default=64, help="characters in a window")
    add("--seed", type=int, default=1, help="all random numbers depend on it")
    return parser


class Layers:
    """What the softmax model and the converted one have in common: all but the attention."""

    def __init__(self, vocabulary_size, block_size):
        self.token_embedding = keras.layers.Embedding(vocabulary_size, HIDDEN_SIZE)
        self.position_embedding = keras.layers.Embedding(block_size, HIDDEN_SIZE)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2 * LAYERS + 1)]
        self.expand = [keras.layers.Dense(4 * HIDDEN_SIZE, activation="gelu") for _ in range(LAYERS)]
        self.contract = [keras.layers.Dense(HIDDEN_SIZE) for _ in range(LAYERS)]
        self.head = keras.layers.Dense(vocabulary_size)

    def model(self, attend, block_size):
        """A model of token ids, whose attention is `attend(number of the block, x)`."""
        token_ids = keras.Input([block_size], dtype="int32")
        x = self.token_embedding(token_ids) + self.position_embedding(keras.ops.arange(block_size))
        for i in range(LAYERS):
            x = x + attend(i, self.norms[2 * i](x))
            x = x + self.contract[i](self.expand[i](self.norms[2 * i + 1](x)))
        return keras.Model(token_ids, self.head(self.norms[-1](x)))


def train(model, windows, steps, learning_rate):
    schedule = keras.optimizers.schedules.CosineDecay(learning_rate, steps, alpha=0.1)
    model.compile(
        keras.optimizers.AdamW(schedule, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.optimizer.build(model.trainable_variables)  # else `fit` makes its variables, and traces the first step twice
    model.fit(windows, steps_per_epoch=steps, epochs=1, shuffle=False, verbose=0)


def report(name, model, validation):
    scores = model.evaluate(validation, verbose=0, return_dict=True)
    print(f"{name:<34}{scores['loss']:>8.3f}{scores['accuracy']:>10.3f}", flush=True)
    return scores


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    try:
        text = read_text(args.data)
    except ValueError as error:
        parser.error(str(error))
    training_text, validation_text = split_text(text)
    if min(len(training_text), len(validation_text)) <= args.block_size:
        parser.error(f"--data: {args.data!r} is too short for windows of --block-size={args.block_size}")
    characters = Characters.of(text)
    windows = random_windows(characters.encode(training_text), args)
    validation = consecutive_windows(characters.encode(validation_text), args)

    layers = Layers(len(characters), args.block_size)
    attention = [keras.layers.MultiHeadAttention(HEADS, HIDDEN_SIZE // HEADS) for _ in range(LAYERS)]
    softmax_model = layers.model(lambda i, x: attention[i](x, x, use_causal_mask=True), args.block_size)
    train(softmax_model, windows, args.steps, 3e-3)
    print(f"{'':<34}{'loss':>8}{'accuracy':>10}")
    scores = {"softmax": report("softmax attention", softmax_model, validation)}
    weights = softmax_model.get_weights()
    for features in args.features:
        softmax_model.set_weights(weights)  # fine-tuning changes the layers that the models share
        converted = [
            SelfAttention.from_multi_head_attention(layer, causal=True, nb_random_features=features, seed=args.seed + i)
            for i, layer in enumerate(attention)
        ]
        model = layers.model(lambda i, x, converted=converted: converted[i](x), args.block_size)
        model.compile(loss=softmax_model.loss, metrics=["accuracy"])
        scores[features, "converted"] = report(f"{features} features, converted", model, validation)
        train(model, windows, args.fine_tune_steps, 1e-3)
        scores[features, "fine-tuned"] = report(f"{features} features, fine-tuned", model, validation)
    return scores


if __name__ == "__main__":
    main()
