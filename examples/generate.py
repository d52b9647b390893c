"""Let a trained model write: its text appears character by character.

python examples/generate.py runs/char_lm-python_docs-favor-1 --prompt "The class "
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from command_line import OneLineParser, add_sampling, count, load_run, seed  # noqa: E402

LENGTH = 400


def make_parser():
    parser = OneLineParser(
        prog="generate.py",
        description="Let a model of char_lm.py write.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run_dir", help="run folder of char_lm.py")
    parser.add_argument("--prompt", default="The ", help="the text goes on from here")
    parser.add_argument(
        "--length", type=count, help=f"characters to write; None is {LENGTH}, or as many as there can be"
    )
    parser.add_argument("--seed", type=seed, help="the same seed gives the same text; None takes any")
    add_sampling(parser)
    return parser


def length_of(args, model):
    """How many characters to write after the prompt."""
    room = None if model.max_length is None else model.max_length - len(args.prompt)
    if room is not None and room < 1:
        raise ValueError(f"--prompt must be shorter than the {model.max_length} characters of this model")
    if args.length is None:
        return LENGTH if room is None else min(LENGTH, room)
    if room is not None and args.length > room:
        raise ValueError(f"--length must be at most {room} after this prompt, received {args.length}")
    return args.length


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    if not args.prompt:
        parser.error("--prompt must have at least one character")
    try:
        model, characters = load_run(args.run_dir)
        prompt = characters.encode(args.prompt)[None]
        tokens = model.stream(prompt, length_of(args, model), args.temperature, args.top_k, args.top_p, args.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(args.prompt, end="", flush=True)
    try:
        for token in tokens:
            print(characters.decode(token), end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
