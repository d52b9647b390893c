"""What a suite measures with."""

import gc
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import tensorflow as tf

from benchmarks import measure

LIBRARY = "favor_keras"
FIGURES = ("milliseconds", "relative", "first_call_ms", "peak_mb", "error")


@dataclass(frozen=True)
class Candidate:
    """One way to compute something: `build()`, picklable, returns a `measure.Program`."""

    name: str
    mode: str
    build: Callable


class Bench:
    """Collects the rows of one suite.

    Attributes:
        quick: whether the suite should measure few and small cases.
        rows: list of dicts, in the order of measurement.
        claims: list of dicts: figures that were promised.
    """

    def __init__(self, suite, quick=False):
        self.suite = suite
        self.quick = quick
        self.repeats = 3 if quick else 7
        self.time_limit = 100 if quick else 300
        self.rows = []
        self.claims = []
        self.environment = environment()

    @property
    def succeeded(self):
        return all(row["failure"] is None for row in self.rows) and all(claim["kept"] for claim in self.claims)

    def compare(self, op, shape, candidates, *, dtype="float32", tolerance=1e-4, **labels):
        """Check that the candidates compute the same, then measure their memory and time them in turns.

        The first candidate must be the library's. Another whose first call, in a process of its own, takes too much
        time or memory is not feasible: its row says so. One that computes something else than the first, or that
        raises, is wrong: its row says so, it is not timed, and the benchmark fails.

        Args:
            op: what is computed.
            shape: dict of letters and sizes.
            candidates: list of `Candidate`.
            dtype: of the data, for the row.
            tolerance: largest relative error against the first candidate.
            labels: further columns of the rows.

        Returns:
            The rows, one per candidate. `relative` is the time over that of the library's fastest mode.
        """
        rows = [self._row(op, shape, dtype, candidate, labels) for candidate in candidates]
        calls, expected = {}, None
        for index, (candidate, row) in enumerate(zip(candidates, rows)):
            print(f"{op} {sizes(shape)} {candidate.name} {candidate.mode} ...", flush=True)
            if not self._measure_first_call(candidate, row):
                continue
            program = candidate.build()
            call = program.compiled(candidate.mode)
            results = program.comparable(call())
            expected = results if expected is None else expected
            row["error"] = measure.relative_error(results, expected)
            if row["error"] <= tolerance:
                calls[index] = call
            else:
                row["failure"] = f"differs from {rows[0]['candidate']} by {row['error']:.1e}, more than {tolerance}"
        for index, seconds in zip(calls, measure.alternating_medians(calls.values(), self.repeats)):
            rows[index]["milliseconds"] = 1e3 * seconds
        best = fastest(rows, candidate=LIBRARY)
        for row in rows:
            if best and row["milliseconds"]:
                row["relative"] = row["milliseconds"] / best
            print(_summary(row), flush=True)
        self.rows += rows
        gc.collect()
        return rows

    def claim(self, text, measured, *, at_least=None, below=None):
        """Record a promised figure, and whether it was kept; a figure of None was not."""
        if below is None:
            bound, kept = f"at least {at_least}", measured is not None and measured >= at_least
        else:
            bound, kept = f"below {below}", measured is not None and measured < below
        self.claims.append({"claim": text, "measured": measured, "bound": bound, "kept": kept})
        print(f"{text}: {figure(measured)}, {bound}: {'kept' if kept else 'MISSED'}", flush=True)

    def _measure_first_call(self, candidate, row):
        try:
            seconds, row["peak_mb"] = measure.first_call(candidate.build, candidate.mode, self.time_limit)
            row["first_call_ms"] = 1e3 * seconds
        except (measure.NotFeasible, RuntimeError) as reason:
            expected = isinstance(reason, measure.NotFeasible) and candidate.name != LIBRARY
            row["note" if expected else "failure"] = str(reason)
        return row["first_call_ms"] is not None

    def _row(self, op, shape, dtype, candidate, labels):
        row = {"suite": self.suite, "op": op, **labels, "candidate": candidate.name, "mode": candidate.mode}
        empty = dict.fromkeys((*FIGURES, "note", "failure"))
        return {**row, "shape": shape, "dtype": dtype, **empty, "repeats": self.repeats, **self.environment}


def fastest(rows, **labels):
    """The least milliseconds of the rows with these labels that have a time, or None."""
    matching = (row for row in rows if all(row[name] == value for name, value in labels.items()))
    return min((row["milliseconds"] for row in matching if row["milliseconds"] is not None), default=None)


def figure(value):
    if value is None:
        return "-"
    return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def sizes(shape):
    return " ".join(f"{letter}{size}" for letter, size in shape.items())


def environment():
    """What a figure depends on besides the code that it measures."""
    packages = {name: importlib.metadata.version(name) for name in ("keras", "numpy")}
    return {
        "versions": {"python": platform.python_version(), "tensorflow": tf.__version__, **packages},
        "commit": _commit(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _commit():
    """The commit of this checkout, with -dirty where files differ from it; None outside a checkout."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return git.stdout.strip() or None


def _summary(row):
    remark = row["failure"] or row["note"]
    measured = remark or ", ".join(f"{name} {figure(row[name])}" for name in FIGURES)
    return f"  {row['candidate']} {row['mode']}: {measured}"
