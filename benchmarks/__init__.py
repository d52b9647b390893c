"""Measurements of the library: `python -m benchmarks [SUITE ...] [--quick] [--output FOLDER]`.

Every module in `benchmarks.suites` is a suite:

- its docstring's first line says what it measures;
- `run(bench)` measures, through a `benchmarks.bench.Bench`;
- `PLOTS`, a list of `benchmarks.report.Plot`, may draw the rows;
- `YARDSTICK` may name the candidate that the others are related to.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("AUTOGRAPH_VERBOSITY", "0")
