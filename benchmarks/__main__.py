"""The command line of the benchmarks."""

import argparse
import importlib
import pkgutil
import signal
import sys
from pathlib import Path

from benchmarks import suites
from benchmarks.bench import LIBRARY, Bench
from benchmarks.report import write_report


def main(arguments=None):
    names = [module.name for module in pkgutil.iter_modules(suites.__path__)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the library.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(names)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer cases, medians of 3 instead of 7")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent / "results",
        metavar="FOLDER",
        help="for the rows (JSON), the tables (Markdown) and the plots (PNG); default: benchmarks/results",
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.suites) - set(names))
    if unknown:
        parser.error(f"SUITE must be one of {', '.join(names)}, received {', '.join(unknown)}")

    succeeded = True
    for name in options.suites or names:
        suite = importlib.import_module(f"benchmarks.suites.{name}")
        bench = Bench(name, options.quick, getattr(suite, "YARDSTICK", LIBRARY))
        try:
            suite.run(bench)
            bench.finished = True
        finally:
            write_report(bench, suite, options.output)
        succeeded &= bench.succeeded
    return 0 if succeeded else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended still writes its report
    sys.exit(main())
