"""The same models on several devices: replicas, processes, what a TPU needs, and a sequence cut across devices."""

import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import keras
import multiworker_program as program
import numpy as np
import pytest
import strategies
import tensorflow as tf
from harness import normal, run_in_fresh_process, value_and_gradients
from oracles import assert_close
from test_training import HEADS, HIDDEN, VOCABULARY, attention_model, losses_of_fit

from favor_keras import CausalLM, FastWeightsAttention, FavorAttention, GMLPBlock, SelfAttention
from favor_keras.models.mixers import BLOCKS, MIXERS
from favor_keras.ops import chunk_scan, delta_rule, linear_attention

chunk_scan.FEW_CHUNKS = {"graph": 1, "xla": 1}  # also in the processes of this file

ROOT = pathlib.Path(__file__).parent.parent
LENGTH = 70  # more than one chunk of 64
SHORT_LENGTH = 12  # for mixers that do not go through a sequence in chunks
REPLICAS = 2

# A process has to start TensorFlow: several mixers share one.
groups_of_mixers = pytest.mark.parametrize("mixers", [list(MIXERS)[:2], list(MIXERS)[2:]], ids=" ".join)


def assert_same_results(results, expected, tolerance=1e-4):
    for name in ("evaluate", "predict", "weights"):
        for value, truth in zip(results[name], expected[name], strict=True):
            assert_close(value, truth, tolerance)
    assert results["history"].keys() == expected["history"].keys()
    for name, values in results["history"].items():
        assert_close(values, expected["history"][name][-len(values) :], tolerance)


# Replicas: two logical CPUs, which must be set before TensorFlow starts, so in a process of their own.


@functools.cache
def two_devices():
    """The strategy for two logical CPUs. One in a process: the collectives of a second would be confused."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = strategies.make_strategy("mirrored")
    assert strategy.num_replicas_in_sync == REPLICAS
    return strategy


def train_on_two_devices(folder, *mixers):
    two_devices()
    for mixer in mixers:
        compare_one_device_with_two(mixer, pathlib.Path(folder, mixer))


def length_for(mixer):
    return LENGTH if mixer in ("favor", "fast_weights") else SHORT_LENGTH


def compare_one_device_with_two(mixer, folder):
    """Train with one device and with two; save and export what two have trained."""
    results, length = {}, length_for(mixer)
    for name, strategy in (("none", strategies.make_strategy("none")), ("mirrored", two_devices())):
        model = program.make_model(mixer, strategy, length)
        history = program.train(model, mixer, strategy, length)
        results[name] = program.results_of(model, history, strategy, length)
    results["replicas"] = [
        [value.numpy().tolist() for value in strategy.experimental_local_results(weight.value)]
        for weight in model.weights
    ]
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    model.save(folder / "model.keras")
    signature = [tf.TensorSpec([None, length], "int32")]  # a model that was only built does not know its dtype
    model.export(folder / "exported", verbose=False, input_signature=signature)


@groups_of_mixers
def test_T4_two_replicas_train_like_one_device(mixers, tmp_path):
    run_in_fresh_process("test_strategies", "train_on_two_devices", str(tmp_path), *mixers)
    for mixer in mixers:
        results = json.loads((tmp_path / mixer / "results.json").read_text())
        losses = results["none"]["history"]["loss"]
        assert losses[-1] < losses[0] - 0.1, mixer
        assert_same_results(results["mirrored"], results["none"])
        for first, second in results["replicas"]:
            assert np.array_equal(first, second), mixer
        check_what_was_saved(tmp_path / mixer, length_for(mixer), np.array(results["mirrored"]["predict"]))


def check_what_was_saved(folder, length, predicted):
    """Without the strategy, the file and the artifact predict what the replicas did."""
    inputs, _ = next(iter(program.validation(tf.distribute.get_strategy(), length)))
    model = keras.saving.load_model(folder / "model.keras")
    assert type(model) is CausalLM
    assert_close(model(inputs), predicted[: len(inputs)], 1e-5)
    exported = tf.saved_model.load(folder / "exported")
    assert_close(exported.serve(inputs), predicted[: len(inputs)], 1e-5)


def fit_every_layer_with_dropout():
    """One fit of a model with all layers, for a length that is known and one that is not."""
    for length in (16, None):
        with two_devices().scope():
            ids = keras.Input([length], dtype="int32")
            x = keras.layers.Embedding(program.VOCABULARY, 8, mask_zero=True)(ids)
            x = SelfAttention(8, 2, causal=True, attention_dropout=0.1, short_convolution=4)(x)
            x = FavorAttention(8, 2, projection_matrix_type="iid", causal=True, attention_dropout=0.1)(x, x)
            x = FastWeightsAttention(8, 2, attention_dropout=0.1, use_decay=True)(x)
            x = GMLPBlock(seq_len=16, d_ffn=16, causal=True, dropout=0.1, survival_probability=0.9)(x)
            model = keras.Model(ids, keras.layers.Dense(program.VOCABULARY)(x))
            model.compile(keras.optimizers.Adam(0.03), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.optimizer.build(model.trainable_variables)
        data = np.random.default_rng(0).integers(0, program.VOCABULARY, [2, 12, 16])
        losses = model.fit(*data, batch_size=4, epochs=4, verbose=0).history["loss"]
        assert np.all(np.isfinite(losses)) and losses[-1] < losses[0], losses


def fit_a_language_model_with_dropout():
    with two_devices().scope():
        model = CausalLM(
            VOCABULARY,
            HIDDEN,
            num_layers=1,
            num_heads=HEADS,
            mixer="fast_weights",
            mixer_options={"attention_dropout": 0.1, "use_decay": True},
            dropout=0.1,
        )
        losses = losses_of_fit(model, jit_compile=False)
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]


def fit_random_features_on_one_device_and_on_two():
    """Self- and cross-attention with the softmax kernel: the same losses, and the same projections."""

    def fit(**options):
        keras.utils.set_random_seed(0)
        model = attention_model(**options)
        losses = losses_of_fit(model, jit_compile=False)
        assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
        return losses, [w.numpy() for w in model.non_trainable_weights if len(w.shape)]

    expected_losses, expected_projections = fit()
    with two_devices().scope():
        losses, projections = fit()
        fit(length=9, dropout=0.1)
    assert_close(losses, expected_losses, 1e-5)
    for projection, expected in zip(projections, expected_projections, strict=True):
        assert_close(projection, expected, 1e-6)


def fail_to_fit():
    """What `check_compile_options` refuses must fail in Keras: else it can be allowed."""
    for options in ({"jit_compile": True}, {"steps_per_execution": 2}):
        with two_devices().scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", **options)
        with pytest.raises(Exception, match="located in device|placeholder"):
            model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=4, verbose=0)


def shard_batches():
    strategy = two_devices()
    data = tf.data.Dataset.range(9)
    with pytest.raises(ValueError, match="must be a multiple of the number of replicas, 2, received 3"):
        strategies.shard(data.batch(3, drop_remainder=True), strategy)
    parts = list(strategy.experimental_distribute_dataset(strategies.shard(data.batch(4), strategy)))
    assert [x.numpy().tolist() for x in strategy.experimental_local_results(parts[0])] == [[0, 1], [2, 3]]


def check_on_two_devices():
    fit_every_layer_with_dropout()
    fit_a_language_model_with_dropout()
    fit_random_features_on_one_device_and_on_two()
    fail_to_fit()
    shard_batches()
    compare_spans_with_the_whole()
    run_examples_of_the_guide()


def test_T1_T4_T7_A6_layers_options_batches_and_spans_on_two_devices():
    run_in_fresh_process("test_strategies", "check_on_two_devices")


# Options and their errors.


@pytest.fixture(scope="module")
def one_device_mirrored():
    return strategies.make_strategy("mirrored")


def test_T7_jit_compile_is_refused_under_a_strategy(one_device_mirrored):
    with pytest.raises(ValueError, match="jit_compile must be .* under MirroredStrategy, received True"):
        strategies.check_compile_options(one_device_mirrored, True)
    strategies.check_compile_options(one_device_mirrored, "auto")
    strategies.check_compile_options(one_device_mirrored, False)
    strategies.check_compile_options(strategies.make_strategy("none"), True, 4)


def test_several_steps_per_execution_are_refused_under_a_strategy(one_device_mirrored):
    with pytest.raises(ValueError, match="steps_per_execution must be 1 under MirroredStrategy, received 4"):
        strategies.check_compile_options(one_device_mirrored, "auto", 4)


def test_one_device_is_said_to_be_one(capsys):
    assert strategies.make_strategy("mirrored").num_replicas_in_sync == 1
    assert "the only device" in capsys.readouterr().out


def cluster(num_workers, index=0, job="worker", **more):
    return json.dumps({"cluster": {"worker": ["h:1"] * num_workers, **more}, "task": {"type": job, "index": index}})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("multi", None, "must be one of auto, none, mirrored, multiworker, tpu, received 'multi'"),
        ("tpu", None, "finds no TPU"),
        ("multiworker", None, "it is not set"),
        ("multiworker", "{", "must be JSON like .*, received '{'"),
        ("multiworker", "[]", r"must be JSON like .*, received '\[\]'"),
        ("multiworker", '{"cluster": {"worker": ["h:1"]}}', "must be JSON like"),
        ("multiworker", cluster(2, index="first"), "must be JSON like"),
        ("multiworker", cluster(2, index=2), "from 0 to 1 for this cluster; received index 2"),
        ("multiworker", cluster(2, job="evaluator"), "this process must be in a job"),
        ("multiworker", cluster(2, ps=["h:2"]), "one job may be named chief"),
        ("auto", "{", "must be JSON like"),
    ],
)
def test_strategies_that_are_not_possible(name, config, message, monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match=message):
        strategies.make_strategy(name)


@pytest.mark.parametrize("config", [None, cluster(1)], ids=["no cluster", "one worker"])
def test_auto_is_no_strategy_where_there_is_one_device(config, monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setenv("TF_CONFIG", config or "")
    strategy = strategies.make_strategy("auto")
    assert strategy is tf.distribute.get_strategy()
    assert strategies.is_chief(strategy) and strategies.worker_folder("runs", strategy) == pathlib.Path("runs")


def model_with_an_optimizer():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def test_restore_takes_the_last_backup_and_two_are_kept(tmp_path):
    strategy = strategies.make_strategy("none")
    model = model_with_an_optimizer()
    assert strategies.restore(model, tmp_path / "backup", strategy) == 0
    model.fit(np.ones([4, 3]), np.ones([4, 1]), epochs=3, verbose=0, callbacks=[strategies.Backup(tmp_path / "backup")])
    assert sorted(path.name for path in (tmp_path / "backup").iterdir()) == [
        "epoch_2.weights.h5", "epoch_3.weights.h5",
    ]  # fmt: skip
    fresh = model_with_an_optimizer()
    assert strategies.restore(fresh, tmp_path / "backup", strategy) == 3
    for value, truth in zip(fresh.variables + fresh.optimizer.variables, model.variables + model.optimizer.variables):
        assert np.array_equal(value, truth)


# Processes on this machine.


class Workers:
    """Processes of multiworker_program.py that train together, as the entries of TF_CONFIG."""

    def __init__(self, run_dir, mixer, count, options={}, without=()):
        self.run_dir, self.processes = run_dir, {}
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        for index in set(range(count)) - set(without):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            command = [sys.executable, str(ROOT / "tests" / "multiworker_program.py"), str(run_dir), mixer]
            self.processes[index] = subprocess.Popen(
                [*command, *options.get(index, options.get("all", []))],
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
                stderr=subprocess.PIPE,
                text=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()  # nothing to one that has ended
            process.communicate()

    def end(self, index, timeout=300):
        """Exit code and error output of a worker, when it has ended."""
        _, errors = self.processes[index].communicate(timeout=timeout)
        return self.processes[index].returncode, errors

    def results(self):
        """The results of all workers, who must have succeeded."""
        ends = {index: self.end(index) for index in self.processes}
        assert all(code == 0 for code, _ in ends.values()), ends
        folders = [self.run_dir, *(self.run_dir / f"worker_{index}" for index in range(1, len(ends)))]
        return [json.loads((folder / "results.json").read_text()) for folder in folders]


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def results_of_one_process(mixer):
    strategy = strategies.make_strategy("none")
    model = program.make_model(mixer, strategy)
    return program.results_of(model, program.train(model, mixer, strategy), strategy)


def test_T3_processes_end_when_one_is_killed_and_then_go_on_as_if_nothing_had_been(tmp_path):
    with Workers(tmp_path, "favor", 3, {1: ["--kill-in-epoch", "2"]}) as workers:
        expected = results_of_one_process("favor")
        assert workers.end(1)[0] == -signal.SIGKILL
        for index in (0, 2):
            code, errors = workers.end(index, timeout=strategies.LOST_WORKER_TIMEOUT)
            assert code == program.LOST_WORKER_CODE, errors
            assert re.search(f"error: worker {index} has lost another worker .*: training goes on from", errors), errors
    with Workers(tmp_path, "favor", 2) as workers:  # the batch is the same
        all_results = workers.results()
    for results in all_results:
        assert results["initial_epoch"] == 2
        assert len(results["history"]["loss"]) == program.EPOCHS - 2
        assert_same_results(results, expected)
    assert [results["is_chief"] for results in all_results] == [True, False]
    assert not (tmp_path / "worker_1" / "model.keras").exists()
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert type(model) is CausalLM
    for weight, truth in zip(model.get_weights(), expected["weights"], strict=True):
        assert_close(weight, truth, 1e-4)


def test_a_worker_does_not_wait_for_ever_for_the_others_to_start(tmp_path):
    with Workers(tmp_path, "favor", 2, {"all": ["--start-timeout", "2"]}, without=[1]) as workers:
        code, errors = workers.end(0, timeout=60)
    assert code == 1 and "Timeout (0:00:02)" in errors


# What a TPU needs, on the CPU: XLA compiles the whole training step, and the graph has nothing that only a host can do.

NOT_ON_A_TPU = re.compile(
    r"(Eager)?PyFunc.*|NumpyFunction|Qr|Svd|SelfAdjointEig.*|Where|Unique.*|NonMaxSuppression.*|String.*|Print.*|Assert"
    r"|LoopCond|Enter|Exit|NextIteration|TensorArray.*|DenseBincount|BooleanMask|RandomUniform.*|RandomStandardNormal"
)


def training_step(mixer):
    """`train_step` of a model with dropout, compiled by XLA for inputs of fixed shapes."""
    options = {"max_length": 3 * 64} if mixer in BLOCKS else {}
    model = CausalLM(program.VOCABULARY, 8, num_layers=1, num_heads=2, mixer=mixer, dropout=0.1, seed=1, **options)
    if mixer == "favor":
        model.blocks[0].mixer.redraw_interval = 2
    model.build((2, 3 * 64))
    model.compile(keras.optimizers.Adam(0.03), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    ids = tf.TensorSpec([2, 3 * 64], "int32")
    return tf.function(lambda x, y: model.train_step((x, y)), [ids, ids], autograph=False, jit_compile=True)


def graph_nodes(graph):
    """(function's name, node) of a graph and of all functions that it calls."""
    definition = graph.as_graph_def()
    nodes = [("", node) for node in definition.node]
    return nodes + [(f.signature.name, node) for f in definition.library.function for node in f.node_def]


def dynamic_loops(graph):
    """The while loops of a graph whose number of rounds is not a constant of the graph."""
    functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
    scopes = {"": list(graph.as_graph_def().node), **{name: list(f.node_def) for name, f in functions.items()}}
    found = []
    for scope, nodes in scopes.items():
        constants = {node.name for node in nodes if node.op == "Const"}
        for node in nodes:
            if node.op in ("While", "StatelessWhile"):
                condition = functions[node.attr["cond"].func.name]
                if not _bounds_are_constant(condition, node.input, constants):
                    found.append(f"{scope}/{node.name}")
    return found


def _bounds_are_constant(condition, loop_inputs, constants):
    """Whether all that the loop counter is compared with is a constant, inside the condition or passed to it."""
    inside = {node.name for node in condition.node_def if node.op == "Const"}
    arguments = [argument.name for argument in condition.signature.input_arg]
    bounds = [node.input[1].split(":")[0] for node in condition.node_def if node.op in ("Less", "LessEqual")]
    assert bounds, "a loop without a bound"
    passed = {name for name, source in zip(arguments, loop_inputs) if source.split(":")[0] in constants}
    return all(bound in inside | passed for bound in bounds)


def check_training_steps(*mixers):
    for mixer in mixers:
        check_training_step(mixer)


def check_training_step(mixer):
    step = training_step(mixer)
    graph = step.get_concrete_function().graph
    nodes = graph_nodes(graph)
    operations = {node.op for _, node in nodes}
    assert {"MatMul", "AssignSubVariableOp"} <= operations, "the step must be in the graph"
    assert bool({"While", "StatelessWhile"} & operations) == (mixer in ("favor", "fast_weights"))
    assert not [(mixer, scope, node.name) for scope, node in nodes if NOT_ON_A_TPU.fullmatch(node.op)]
    assert not dynamic_loops(graph), mixer
    ids = np.random.default_rng(0).integers(0, program.VOCABULARY, [2, 2, 3 * 64]).astype("int32")
    losses = [float(step(*ids)["loss"]) for _ in range(8)]
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0], losses
    assert step.experimental_get_tracing_count() == 1


@groups_of_mixers
def test_T5_T9_T11_F11_a_training_step_is_fit_for_a_tpu(mixers):
    run_in_fresh_process("test_strategies", "check_training_steps", *mixers)


def test_T11_the_check_of_loops_sees_a_dynamic_one():
    def count_to(n):
        return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])

    static = tf.function(lambda: count_to(tf.constant(5))).get_concrete_function()
    dynamic = tf.function(count_to).get_concrete_function(tf.TensorSpec([], "int32"))
    assert not dynamic_loops(static.graph)
    assert dynamic_loops(dynamic.graph)


# A sequence cut across devices: each has a span, and what passes from one to the next is a state of fixed size.


def attend_in_spans(query, key, value, log_scale):
    state, outputs = None, []
    for i, span in enumerate(np.split(np.arange(LENGTH), REPLICAS)):
        with tf.device(f"CPU:{i}"):
            parts = (tf.identity(x[:, span[0] : span[-1] + 1]) for x in (query, key, value, log_scale))
            *features_and_value, scale = parts
            output, state = linear_attention(
                *features_and_value, key_log_scale=scale, causal=True, initial_state=state, return_state=True
            )
            assert output.device.endswith(f"CPU:{i}")
            outputs.append(output)
    return tf.concat(outputs, axis=1), state["numerator"]


def attend_whole(query, key, value, log_scale):
    output, state = linear_attention(query, key, value, key_log_scale=log_scale, causal=True, return_state=True)
    return output, state["numerator"]


def delta_rule_in_spans(query, key, value, beta):
    state, outputs = None, []
    for i, span in enumerate(np.split(np.arange(LENGTH), REPLICAS)):
        with tf.device(f"CPU:{i}"):
            parts = [tf.identity(x[:, span[0] : span[-1] + 1]) for x in (query, key, value, beta)]
            output, state = delta_rule(*parts, initial_state=state, return_state=True)
            assert output.device.endswith(f"CPU:{i}")
            outputs.append(output)
    return tf.concat(outputs, axis=1), state


def delta_rule_whole(query, key, value, beta):
    return delta_rule(query, key, value, beta, return_state=True)


def compare_spans_with_the_whole():
    query, key, value = (normal(2, LENGTH, 2, 8, seed=seed) for seed in range(3))
    strengths = normal(2, LENGTH, 2, seed=3)
    features = (tf.abs(query) + 0.1, tf.abs(key) + 0.1, value, 3 * strengths)
    unit_keys = (query, tf.math.l2_normalize(key, axis=-1), value, tf.sigmoid(strengths))
    for in_spans, whole, arguments in (
        (attend_in_spans, attend_whole, features),
        (delta_rule_in_spans, delta_rule_whole, unit_keys),
    ):
        outputs, gradients = value_and_gradients(in_spans, arguments)
        expected, expected_gradients = value_and_gradients(whole, arguments)
        for x, truth in zip([*outputs, *gradients], [*expected, *expected_gradients], strict=True):
            assert np.abs(truth).max() > 1e-3
            assert_close(x, truth, 1e-5)


def run_examples_of_the_guide():
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/distributed.md", "exec"), {})
