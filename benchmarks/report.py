"""The rows of a suite as JSON, as a Markdown table and as plots."""

import json
from dataclasses import dataclass, field
from statistics import median

from benchmarks.bench import figure, sizes

_COLUMNS = {
    "milliseconds": "ms",
    "relative": "relative ms",
    "first_call_ms": "first call, ms",
    "peak_mb": "peak memory, MB",
    "error": "relative error",
    "ms_per_token": "ms per token",
    "cache_mb": "cache, MB",
    "ms_per_1024_positions": "ms per 1,024 positions",
    "break_even": "break-even length",
    "steps_per_second": "steps / s",
    "characters_per_second": "characters / s",
    "output_error": "relative error of the output",
    "weight_error": "relative error of the weights",
}
_STYLES = ("-", "--", ":", "-.")
_NOTES = {
    "milliseconds": "Milliseconds are medians of {repeats} calls, the candidates of one shape taking turns.",
    "relative": "In the column relative ms the fastest mode of {yardstick} is 1: below 1, the other is faster.",
    "first_call_ms": "First call: in a new process, with tracing and compiling.",
    "peak_mb": "Peak memory: of that first call, above what the process held before it.",
    "error": "Relative error: the largest one of all results, against the first candidate that computes the same.",
}


@dataclass(frozen=True)
class Plot:
    """Lines of `y` against the size or column named `x`, both logarithmic: one line per pair of values of
    the columns `lines`, the first of which makes its colour, the second its style.

    Attributes:
        name: the file's, after the suite's.
        where: labels that a row must have, and sizes.
        upright: a candidate that has no line, but an upright one at the median of its `x`.
    """

    name: str
    title: str
    x: str
    y: str
    lines: tuple = ("candidate", "mode")
    where: dict = field(default_factory=dict)
    upright: str | None = None


def write_report(bench, suite, folder):
    """Write FOLDER/SUITE.json, FOLDER/SUITE.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / bench.suite
    report = {"quick": bench.quick, "finished": bench.finished, "rows": bench.rows, "claims": bench.claims}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    drawn = [plot for plot in getattr(suite, "PLOTS", ()) if _draw(plot, bench.rows, folder / _file(bench, plot))]
    images = [f"![{plot.title}]({_file(bench, plot)})" for plot in drawn]
    title, _, explanation = suite.__doc__.strip().partition("\n")
    extent = [] if bench.finished else ["INCOMPLETE: the run was stopped before its end."]
    extent += ["A quick run, with fewer cases."] if bench.quick else []
    explanation = " ".join([*extent, explanation.strip()])
    parts = [f"# {bench.suite}: {title}", explanation, *_claims(bench.claims), _environment(bench)]
    parts = [part for part in (*parts, _table(bench.rows), *images) if part]
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
    measured = _columns(bench.rows)
    notes = " ".join(note for column, note in _NOTES.items() if column in measured)
    notes = notes.format(repeats=bench.repeats, yardstick=bench.yardstick)
    load = bench.environment["load"]
    machine = bench.environment["machine"] + ("" if load is None else f" (load at the start {load:.1f})")
    return f"{machine}; {versions}; commit {commit}.\n\n{notes}"


def _table(rows):
    """One line per row; the columns between op and shape are the suite's own labels."""
    if not rows:
        return "No rows."
    columns = _columns(rows)
    lines = ["| " + " | ".join([*(_COLUMNS.get(name, name) for name in columns), "remark"]) + " |"]
    lines.append("|" + "---|" * (len(columns) + 1))
    for row in rows:
        cells = [_cell(name, row[name]) for name in columns]
        lines.append("| " + " | ".join([*cells, row["failure"] or row["note"] or ""]) + " |")
    return "\n".join(lines)


def _columns(rows):
    """Those that say something about some row, but for what is the same in all."""
    hidden = {"suite", "versions", "commit", "machine", "load", "repeats", "note", "failure"}
    names = [name for name in rows[0] if name not in hidden] if rows else []
    return [name for name in names if any(row[name] is not None for row in rows)]


def _cell(name, value):
    if value is None or isinstance(value, float):
        return figure(value)
    return sizes(value) if name == "shape" else str(value)


def _draw(plot, rows, path):
    """Whether there was something to draw."""
    lines, upright = {}, []
    for row in ({**row["shape"], **row} for row in rows):
        wanted = all(row.get(name) == value for name, value in plot.where.items())
        if wanted and row.get(plot.x) is not None and row.get(plot.y) is not None:
            label = tuple(str(row[name]) for name in plot.lines)
            if row["candidate"] == plot.upright:
                upright.append(row[plot.x])
            else:
                lines.setdefault(label, []).append((row[plot.x], row[plot.y]))
    if not lines:
        return False
    import matplotlib  # here, so that child processes do not load it

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    canvas, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    colours, styles = ({name: i for i, name in enumerate(dict.fromkeys(names))} for names in zip(*lines))
    for label, points in lines.items():
        look = {"color": f"C{colours[label[0]]}", "linestyle": _STYLES[styles[label[1]]]}
        # What is measured, as time, need not grow with the size that the rows go through.
        points = points if plot.x in _COLUMNS else sorted(points)
        axes.plot(*zip(*points), marker="o", label=", ".join(label), **look)
    if upright:
        axes.axvline(median(upright), color="black", label=plot.upright)
    canvas.suptitle(plot.title)
    axes.set(xlabel=_COLUMNS.get(plot.x, plot.x), ylabel=_COLUMNS[plot.y], xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):  # a decade has three labels, as a plot may have less than one
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(ticker.NullFormatter())
    if plot.x not in _COLUMNS:
        _mark_sizes(axes, sorted({x for points in lines.values() for x, _ in points}))
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside right center")
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)
    return True


def _mark_sizes(axes, marked):
    """Ticks at the sizes; also at zero, which an axis of logarithms has no place for."""
    if marked[0] == 0 and len(marked) > 1:
        axes.set_xscale("symlog", linthresh=marked[1], linscale=0.5)
    axes.set_xticks(marked, marked)
    axes.xaxis.minorticks_off()
