"""The rows of a suite as JSON, as a Markdown table and as plots."""

import json
from dataclasses import dataclass, field

from benchmarks.bench import FIGURES, figure, sizes

_COLUMNS = {
    "milliseconds": "ms",
    "relative": "ms / library's",
    "first_call_ms": "first call, ms",
    "peak_mb": "peak memory, MB",
    "error": "relative error",
}
_NOTES = """
Milliseconds are medians of {repeats} calls, the candidates of one shape taking turns. The library's fastest mode
is 1 in the next column: below 1, the other is faster. First call: in a new process, with tracing and compiling. Peak
memory: of that first call, above what the process held before it. Relative error: the largest one of outputs and
gradients, against the first candidate of the shape.
"""


@dataclass(frozen=True)
class Plot:
    """Lines of `y` against the size named `x`, both logarithmic: one line per value of `lines`.

    Attributes:
        name: the file's, after the suite's.
        where: labels that a row must have.
    """

    name: str
    title: str
    x: str
    y: str
    lines: tuple = ("candidate", "mode")
    where: dict = field(default_factory=dict)


def write_report(bench, suite, folder):
    """Write FOLDER/SUITE.json, FOLDER/SUITE.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / bench.suite
    path.with_suffix(".json").write_text(json.dumps({"rows": bench.rows, "claims": bench.claims}, indent=1) + "\n")
    drawn = [plot for plot in getattr(suite, "PLOTS", ()) if _draw(plot, bench.rows, folder / _file(bench, plot))]
    images = [f"![{plot.title}]({_file(bench, plot)})" for plot in drawn]
    title = suite.__doc__.strip().splitlines()[0]
    parts = [f"# {bench.suite}: {title}", *_claims(bench.claims), _environment(bench), _table(bench.rows), *images]
    path.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    print(f"written: {path}.json, {path}.md, {len(drawn)} plots", flush=True)


def _file(bench, plot):
    return f"{bench.suite}_{plot.name}.png"


def _claims(claims):
    verdicts = {True: "kept", False: "MISSED"}
    lines = [f"- {c['claim']}: {figure(c['measured'])} ({c['bound']}: {verdicts[c['kept']]})" for c in claims]
    return ["\n".join(lines)] if lines else []


def _environment(bench):
    versions = ", ".join(f"{name} {version}" for name, version in bench.environment["versions"].items())
    commit = bench.environment["commit"] or "unknown"
    notes = _NOTES.format(repeats=bench.repeats).rstrip()
    return f"{bench.environment['machine']}; {versions}; commit {commit}.\n{notes}"


def _table(rows):
    """One line per row; the columns between op and shape are the suite's own labels."""
    if not rows:
        return "No rows."
    hidden = {"suite", "versions", "commit", "machine", "repeats", "note", "failure"}
    columns = [name for name in rows[0] if name not in hidden]
    lines = ["| " + " | ".join([*(_COLUMNS.get(name, name) for name in columns), "remark"]) + " |"]
    lines.append("|" + "---|" * (len(columns) + 1))
    for row in rows:
        cells = [_cell(name, row[name]) for name in columns]
        lines.append("| " + " | ".join([*cells, row["failure"] or row["note"] or ""]) + " |")
    return "\n".join(lines)


def _cell(name, value):
    if name in FIGURES:
        return figure(value)
    return sizes(value) if name == "shape" else str(value)


def _draw(plot, rows, path):
    """Whether there was something to draw."""
    lines = {}
    for row in rows:
        if row[plot.y] is not None and all(row[name] == value for name, value in plot.where.items()):
            label = ", ".join(str(row[name]) for name in plot.lines)
            lines.setdefault(label, []).append((row["shape"][plot.x], row[plot.y]))
    if not lines:
        return False
    import matplotlib  # here, so that child processes do not load it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points)), marker="o", label=label)
    axes.set(title=plot.title, xlabel=plot.x, ylabel=_COLUMNS[plot.y], xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)
    return True
