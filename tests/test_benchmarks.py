"""The benchmarks: what `Bench` does with right, wrong and infeasible candidates, and a small run of each new suite."""

import json
import math
import pickle
from functools import partial

import pytest
import tensorflow as tf

from benchmarks import measure
from benchmarks.__main__ import main
from benchmarks.bench import LIBRARY, Bench, Candidate
from benchmarks.report import Plot, write_report
from benchmarks.suites import accuracy, causal_op, decode, layers, training


@pytest.fixture(autouse=True)
def without_processes(monkeypatch):
    """No new processes, which take seconds to start. What they would be sent is pickled and built all the same."""

    def first_call(build, mode, time_limit):
        pickle.loads(pickle.dumps(build))()
        return 0.0, None

    monkeypatch.setattr(measure, "first_call", first_call)


def constant_program(value):
    if value is None:
        raise measure.NotFeasible("too large")
    return measure.Program(lambda x: [x], (tf.constant([value]),))


def candidate(name, value, mode="eager", **options):
    return Candidate(name, mode, partial(constant_program, value), **options)


def test_a_candidate_that_differs_fails_and_is_not_timed():
    bench = Bench("suite", quick=True)
    right, wrong = bench.compare("op", {"T": 1}, [candidate(LIBRARY, 1.0), candidate("other", 2.0)])
    assert right["milliseconds"] > 0 and right["relative"] == 1
    assert wrong["milliseconds"] is None and wrong["failure"].startswith(f"differs from {LIBRARY} eager by 1.0e+00")
    assert not bench.succeeded


def test_a_candidate_that_raises_fails_alone_where_first_calls_are_not_measured():
    def build():
        raise ValueError("two\nlines")

    bench = Bench("suite", quick=True)
    right, wrong = bench.compare(
        "op", {"T": 1}, [candidate(LIBRARY, 1.0), Candidate("other", "eager", build)], first_calls=False
    )
    assert right["milliseconds"] is not None and right["failure"] is None
    assert wrong["milliseconds"] is None and wrong["failure"] == "ValueError: two lines"
    assert not bench.succeeded


def test_only_modes_are_compared_on_request():
    candidates = [candidate("a", 1.0), candidate("b", 2.0), candidate("b", 2.0, "graph"), candidate("b", 3.0, "graph")]
    rows = Bench("suite", quick=True).compare("op", {"T": 1}, candidates, only_modes=True)
    assert [row["failure"] is None for row in rows] == [True, True, True, False]


def test_candidates_of_other_shapes_are_related_to_the_yardstick_of_their_shape():
    candidates = [candidate(name, 1.0, shape={"M": m}) for name in ("a", "b") for m in (1, 2)]
    rows = Bench("suite", quick=True, yardstick="a").compare("op", {"T": 1}, candidates)
    times = {(row["candidate"], row["shape"]["M"]): row["milliseconds"] for row in rows}
    for row in rows:
        m = row["shape"]["M"]
        assert row["relative"] == pytest.approx(times[row["candidate"], m] / times["a", m])


@pytest.mark.parametrize("yardstick, succeeded", [("a", True), ("b", False)])
def test_only_the_yardstick_has_to_be_feasible(yardstick, succeeded):
    bench = Bench("suite", quick=True, yardstick=yardstick)
    rows = bench.compare("op", {"T": 1}, [candidate("a", 1.0), candidate("b", None)])
    assert rows[1]["failure" if yardstick == "b" else "note"] == "too large"
    assert bench.succeeded == succeeded


def test_report_has_the_rows_the_claims_and_the_plots(tmp_path):
    class suite:
        """Title."""

        PLOTS = [
            Plot("time", "Time", "T", "milliseconds", upright="b"),
            Plot("nothing", "Nothing", "T", "milliseconds", where={"op": "another"}),
        ]

    bench = Bench("suite", quick=True)
    bench.claim("promised", 1.0, below=2.0)
    for size in (0, 8):
        for name in ("a", "b"):
            bench.record("op", {"T": size}, name, "graph", {"milliseconds": 1.5})
    write_report(bench, suite, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suite.json", "suite.md", "suite_time.png"]
    assert len(json.loads((tmp_path / "suite.json").read_text())["rows"]) == 4
    table = (tmp_path / "suite.md").read_text()
    assert "- promised: 1 (below 2.0: kept)" in table and table.count("| op | ") == 5
    assert bench.environment["machine"] in table
    assert "(load at the start " in table or bench.environment["load"] is None


def test_a_run_that_is_stopped_writes_what_it_has_and_says_so(tmp_path, monkeypatch):
    def run(bench):
        derived = {"ms_per_token": lambda row: row["milliseconds"]}
        bench.compare("op", {"T": 1}, [candidate(LIBRARY, 1.0)], derived=derived)
        bench.compare("op", {"T": 2}, [candidate(LIBRARY, 1.0), Candidate("b", "graph", stop)], derived=derived)

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(layers, "run", run)
    monkeypatch.setattr(measure, "first_call", lambda build, *_: build() and (1.0, 2.0))
    with pytest.raises(KeyboardInterrupt):
        main(["layers", "--output", str(tmp_path)])
    report = json.loads((tmp_path / "layers.json").read_text())
    assert not report["finished"] and not report["quick"]
    assert [row["first_call_ms"] for row in report["rows"]] == [1e3, 1e3, None]
    assert [row["ms_per_token"] is None for row in report["rows"]] == [False, True, True]
    text = (tmp_path / "layers.md").read_text()
    assert "INCOMPLETE" in text and "A quick run" not in text


def test_the_table_leaves_out_what_was_not_measured(tmp_path):
    bench = Bench("suite", quick=True)
    bench.record("op", {"T": 1}, "a", "graph", {"milliseconds": 1.5})
    bench.finished = True
    write_report(bench, layers, tmp_path)
    text = (tmp_path / "suite.md").read_text()
    assert "A quick run" in text and "INCOMPLETE" not in text
    assert "medians of 3 calls" in text and "First call" not in text and "peak memory" not in text


@pytest.fixture
def small_decode(monkeypatch):
    sizes = {"HIDDEN_SIZE": 8, "NUM_HEADS": 2, "NUM_LAYERS": 1, "CHECKED_CONTEXT": 9, "PIECE": 4, "STEPS": 3}
    settings = {**sizes, "LINEAR": ("favor",), "BATCH_SIZES": (1,), "QUICK_CONTEXTS": (0, 6), "QUICK_MODES": ("graph",)}
    settings |= {"QUICK_WRITTEN": 16, "QUICK_WINDOW": 2, "SKIPPED": 2}
    for name, value in settings.items():
        monkeypatch.setattr(decode, name, value)
    decode.cache_bytes.cache_clear()
    yield
    decode.cache_bytes.cache_clear()


def test_decode(small_decode, monkeypatch):
    bench = Bench("decode", quick=True, yardstick=decode.YARDSTICK)
    decode.run(bench)
    assert [row["failure"] for row in bench.rows] == [None] * len(bench.rows)
    assert len(bench.claims) == 2 and all(claim["measured"] > 0 for claim in bench.claims)
    steps = [row for row in bench.rows if row["case"] == "context"]
    assert all(row["ms_per_token"] == pytest.approx(row["milliseconds"] / 3) for row in steps)
    megabytes = {(row["candidate"], row["shape"]["context"]): row["cache_mb"] for row in steps}
    # keys and values of 8 numbers of 4 bytes for the context and 3 steps, and a position
    assert megabytes["softmax", 6] == pytest.approx(1e-6 * 4 * (2 * 8 * (6 + 3) + 1))
    assert megabytes["favor", 6] == megabytes["favor", 0]
    monkeypatch.setattr(decode, "_memory_bytes", lambda: 1000)
    with pytest.raises(measure.NotFeasible, match="do not fit"):
        decode.program("softmax", {"B": 1, "context": 6}, None)


def test_accuracy(monkeypatch):
    settings = {"QUICK_LENGTH": 16, "QUICK_SIZES": (4,), "QUICK_NUM_FEATURES": (4, 512), "MODES": ("graph",)}
    settings |= {"PROJECTIONS": ("iid",), "KERNELS": ("softmax",)}
    for name, value in settings.items():
        monkeypatch.setattr(accuracy, name, value)
    bench = Bench("accuracy", quick=True, yardstick=accuracy.YARDSTICK)
    accuracy.run(bench)
    exact, few, many = bench.rows
    assert exact["output_error"] == 0 and exact["relative"] == 1
    for name in ("error", "output_error", "weight_error"):
        assert 0 < many[name] < few[name] < math.inf


def test_training(monkeypatch):
    settings = {"HIDDEN_SIZE": 8, "NUM_HEADS": 2, "NUM_LAYERS": 1, "NUM_LAYERS_OF_BLOCKS": 1}
    settings |= {"QUICK_TOKENS": 16, "QUICK_LENGTHS": (8,), "MIXERS": ("softmax",), "MODES": ("graph",)}
    for name, value in settings.items():
        monkeypatch.setattr(training, name, value)
    bench = Bench("training", quick=True, yardstick=training.YARDSTICK)
    training.run(bench)
    (row,) = bench.rows
    assert row["failure"] is None
    assert row["characters_per_second"] == pytest.approx(16 * 1e3 / row["milliseconds"])
    step = training.program("softmax", {"B": 2, "T": 8}).compiled("graph")
    (first,), (second,) = step(), step()
    assert second < first


def test_layers(monkeypatch):
    settings = {"POSITIONS": 64, "HIDDEN_SIZE": 8, "NUM_HEADS": 2, "QUICK_LENGTHS": (8,), "MODES": ("graph",)}
    settings["LAYERS"] = {name: layers.LAYERS[name] for name in (layers.YARDSTICK, "GMLPBlock", layers.EXACT)}
    for name, value in settings.items():
        monkeypatch.setattr(layers, name, value)
    bench = Bench("layers", quick=True)
    layers.run(bench)
    assert [row["failure"] for row in bench.rows] == [None] * len(bench.rows)
    measured = [row for row in bench.rows if row["op"] == "causal layer"]
    assert len(measured) == len(layers.LAYERS)
    assert all(row["ms_per_1024_positions"] == pytest.approx(16 * row["milliseconds"]) for row in measured)
    assert len(bench.rows) - len(measured) == len(layers.LAYERS) - 1


def test_break_even_is_where_the_ratio_of_the_times_crosses_one():
    def row(name, length, milliseconds):
        return {"candidate": name, "mode": "graph", "shape": layers._shape(length), "milliseconds": milliseconds}

    exact = [row(layers.EXACT, length, length) for length in (64, 256, 1024)]
    linear = [row("linear", length, 128) for length in (64, 256, 1024)]
    assert layers._break_even(exact + linear, "linear", "graph") == pytest.approx(128)
    assert layers._break_even(exact + linear[:1], "linear", "graph") is None


def test_half_precision_is_compared_with_sums_in_float32():
    shape = {"B": 1, "H": 2, "T": 40, "M": 6, "D": 3}
    outputs = {}
    for candidate in (LIBRARY, "quadratic"):
        program = causal_op.program(candidate, shape, True, "bfloat16")
        assert {x.dtype for x in program.arguments} == {tf.bfloat16}
        outputs[candidate] = program.comparable(program.compiled("graph")())
    assert measure.relative_error(outputs[LIBRARY], outputs["quadratic"]) < causal_op.TOLERANCES["bfloat16"]


def test_products_of_the_causal_op_are_counted():
    # Two chunks of 64: Q K^T 64 x 64 x 5, W V 64 x 64 x 3, Q S and K^T V 64 x 5 x 3 each.
    expected = 2 * 2 * (64 * 64 * 5 + 64 * 64 * 3 + 2 * 64 * 5 * 3)
    assert causal_op._products(1, 128, 1, 5, 3) == expected


def test_the_speed_of_the_products_is_claimed_over_that_of_a_large_one(monkeypatch):
    monkeypatch.setattr(causal_op, "LARGE_PRODUCT", 16)
    monkeypatch.setattr(causal_op, "MODES", ("graph",))
    bench = Bench("causal_op", quick=True)
    causal_op._claim_efficiency(bench, {"B": 2, "H": 3, "T": 5, "M": 4, "D": 7})
    op, large = bench.rows
    assert op["failure"] is large["failure"] is None
    # One chunk of 5: 5 x 5 x (4 + 7) and twice 5 x 4 x 7, for 6 heads in all; 16 x 16 x 16.
    speed, speed_of_large = 2 * 6 * (275 + 280) / op["milliseconds"], 2 * 4096 / large["milliseconds"]
    assert bench.claims[0]["measured"] == pytest.approx(speed / speed_of_large)
