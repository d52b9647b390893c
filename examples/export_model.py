"""Write the model of a run folder as a SavedModel that needs only TensorFlow.

python examples/export_model.py runs/char_lm-python_docs-favor-1 exported
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from command_line import OneLineParser, load_run  # noqa: E402

from favor_keras import export_text_model  # noqa: E402


def main(argv=None):
    parser = OneLineParser(
        prog="export_model.py",
        description="Write the model of a run folder of char_lm.py as a TensorFlow SavedModel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run_dir", help="run folder of char_lm.py")
    parser.add_argument("folder", type=Path, help="new or empty folder for the SavedModel")
    args = parser.parse_args(argv)
    try:
        if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
            raise ValueError(f"folder must be a new or empty one, received {args.folder}")
        model, characters = load_run(args.run_dir)
        export_text_model(model, characters, args.folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"written to {args.folder}; serve it with: python examples/serve.py {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
