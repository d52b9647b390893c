"""What a suite measures with."""

import gc
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import tensorflow as tf

from benchmarks import measure

LIBRARY = "favor_keras"
FIGURES = ("milliseconds", "relative", "first_call_ms", "peak_mb", "error")


@dataclass(frozen=True)
class Candidate:
    """One way to compute something: `build()`, picklable, returns a `measure.Program`.

    `shape` has sizes of its own, besides those that all candidates share.
    """

    name: str
    mode: str
    build: Callable
    shape: dict = field(default_factory=dict)


class Bench:
    """Collects the rows of one suite.

    Attributes:
        quick: whether the suite should measure few and small cases.
        yardstick: the candidate that must be feasible, and whose fastest mode the others are related to.
        finished: whether the suite has come to its end.
        rows: list of dicts, in the order of measurement.
        claims: list of dicts: figures that were promised.
    """

    def __init__(self, suite, quick=False, yardstick=LIBRARY):
        self.suite = suite
        self.quick = quick
        self.yardstick = yardstick
        self.repeats = 3 if quick else 7
        self.time_limit = 100 if quick else 300
        self.start = time.monotonic()
        self.finished = False
        self.rows = []
        self.claims = []
        self.environment = environment()

    @property
    def succeeded(self):
        return all(row["failure"] is None for row in self.rows) and all(claim["kept"] for claim in self.claims)

    def compare(
        self,
        op,
        shape,
        candidates,
        *,
        dtype="float32",
        tolerance=1e-4,
        only_modes=False,
        first_calls=True,
        derived=None,
        **labels,
    ):
        """Check that the candidates compute the same, then measure their memory and time them in turns.

        The others are checked against the first candidate. One whose first call, in a process of its own, takes too
        much time or memory is not feasible: its row says so, and the benchmark fails if it is the yardstick. One that
        computes something else than the first, or that raises, is wrong: its row says so, it is not timed, and the
        benchmark fails.

        Args:
            op: what is computed.
            shape: dict of letters and sizes.
            candidates: list of `Candidate`.
            dtype: of the data, for the row.
            tolerance: largest relative error against the first candidate.
            only_modes: for candidates that compute different things: each is checked against the first one of its
                name and shape.
            first_calls: whether to measure first calls and their memory.
            derived: dict of further figures: functions of the row, None where they have nothing to tell.
            labels: further columns of the rows.

        Returns:
            The rows, one per candidate. `relative` is the time over that of the yardstick's fastest mode in the same
            shape, or in its own where it has another.
        """
        derived = derived or {}
        rows = [self._row(op, {**shape, **c.shape}, dtype, c.name, c.mode, labels) for c in candidates]
        for row in rows:
            row |= dict.fromkeys(derived)
        self.rows += rows  # at once: a report that is written after an error has what was measured before it
        calls, expected = {}, {}
        for index, (candidate, row) in enumerate(zip(candidates, rows)):
            seconds = time.monotonic() - self.start
            print(f"{seconds:.0f} s: {op} {sizes(row['shape'])} {candidate.name} {candidate.mode} ...", flush=True)
            if first_calls and not self._measure_first_call(candidate, row):
                continue
            try:
                program = candidate.build()
                call = program.compiled(candidate.mode)
                results = program.comparable(call())
            except Exception as error:
                row["failure"] = measure.one_line(error)
                continue
            same = (candidate.name, sizes(row["shape"])) if only_modes else None
            first, truth = expected.setdefault(same, (candidate, results))
            row["error"] = measure.relative_error(results, truth)
            if row["error"] <= tolerance:
                calls[index] = call
            else:
                row["failure"] = f"differs from {first.name} {first.mode} by {row['error']:.1e}, more than {tolerance}"
        for index, seconds in zip(calls, measure.alternating_medians(calls.values(), self.repeats)):
            rows[index]["milliseconds"] = 1e3 * seconds
        own = least(rows, candidate=self.yardstick)
        for row in rows:
            best = least(rows, candidate=self.yardstick, shape=row["shape"]) or own
            if best and row["milliseconds"]:
                row["relative"] = row["milliseconds"] / best
            row |= {name: function(row) for name, function in derived.items()}
            print(_summary(row, derived), flush=True)
        gc.collect()
        return rows

    def record(self, op, shape, candidate, mode, figures, *, dtype="float32", **labels):
        """Add a row of what a suite measured itself: a dict of figures. Returns the row."""
        row = {**self._row(op, shape, dtype, candidate, mode, labels), **figures}
        print(f"{op} {sizes(shape)}\n{_summary(row, figures)}", flush=True)
        self.rows.append(row)
        return row

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
            expected = isinstance(reason, measure.NotFeasible) and candidate.name != self.yardstick
            row["note" if expected else "failure"] = str(reason)
        return row["first_call_ms"] is not None

    def _row(self, op, shape, dtype, candidate, mode, labels):
        row = {"suite": self.suite, "op": op, **labels, "candidate": candidate, "mode": mode}
        empty = dict.fromkeys((*FIGURES, "note", "failure"))
        return {**row, "shape": shape, "dtype": dtype, **empty, "repeats": self.repeats, **self.environment}


def least(rows, *, column="milliseconds", **labels):
    """The least of a column's figures in the rows with these labels, or None where none has one."""
    matching = (row for row in rows if all(row[name] == value for name, value in labels.items()))
    return min((row[column] for row in matching if row[column] is not None), default=None)


def ratio(numerator, denominator):
    """The quotient of two figures, or None where one is missing."""
    return numerator / denominator if numerator and denominator else None


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
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _processor():
    """The name of the processor, which Linux tells in a file alone."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _commit():
    """The commit of this checkout, with -dirty where files differ from it; None outside a checkout."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return git.stdout.strip() or None


def _summary(row, further):
    remark = row["failure"] or row["note"]
    names = dict.fromkeys((*FIGURES, *further))
    measured = remark or ", ".join(f"{name} {figure(row[name])}" for name in names if row[name] is not None)
    return f"  {row['candidate']} {row['mode']} {sizes(row['shape'])}: {measured}"
