"""Train the same model on several devices or in several processes: what tf.distribute needs for that.

    strategy = make_strategy("auto")           # before anything else that uses TensorFlow
    check_compile_options(strategy, jit_compile="auto", steps_per_execution=1)
    folder = worker_folder(run_dir, strategy)  # each worker writes into its own
    with strategy.scope():
        model = cure(make_model())             # built and compiled
    epoch = restore(model, folder / "backup", strategy)
    with explain_lost_workers(strategy):
        model.fit(shard(data, strategy), initial_epoch=epoch, callbacks=[Backup(folder / "backup")], ...)
    if is_chief(strategy):
        ...                                    # what only one worker should do

The batches of a data set are shared out, so the losses are those of one device with the same data
set. docs/distributed.md explains the use.
"""

import contextlib
import faulthandler
import json
import os
import pathlib
import sys

import keras
import tensorflow as tf

STRATEGIES = ("auto", "none", "mirrored", "multiworker", "tpu")
DISTRIBUTED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.TPUStrategy)

# How long a worker waits for others, in seconds: for all to start; for one whose process or machine has stopped, which
# TensorFlow's heartbeats tell after some ten seconds; for one that lives but does not take part in a reduction.
START_TIMEOUT = 300
LOST_WORKER_TIMEOUT = 60
REDUCTION_TIMEOUT = 600

WORKER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
)


def make_strategy(name="auto"):
    """The tf.distribute.Strategy of a name. Call it before anything else that uses TensorFlow.

    Args:
        name: "none": the default strategy, one device. "mirrored": all GPUs of this machine, or all
            its logical CPUs if it has no GPU. "multiworker": the processes in the environment
            variable TF_CONFIG. "tpu": the TPU that TensorFlow finds, on a TPU VM with TPU_NAME=local.
            "auto": multiworker if TF_CONFIG has several workers, else tpu if there is one, else
            mirrored if there are several GPUs, else none.

    Raises:
        ValueError: for an unknown name, a missing or broken TF_CONFIG, or a TPU that is not there.
        SystemExit: of the whole process, with code 1, if not all workers start within `START_TIMEOUT`.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, received {name!r}")
    if name == "auto":
        return _first_possible_strategy()
    if name == "mirrored":
        return _mirrored()
    if name == "multiworker":
        return _multi_worker()
    if name == "tpu":
        return _tpu(_tpu_resolver())
    return tf.distribute.get_strategy()


def _first_possible_strategy():
    if os.environ.get("TF_CONFIG") and sum(map(len, _cluster_of_workers().values())) > 1:
        return _multi_worker()
    try:
        resolver = _tpu_resolver()
    except ValueError:
        return make_strategy("mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "none")
    return _tpu(resolver)


def _mirrored():
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    if len(devices) == 1:
        print(f"strategy mirrored: {devices[0].name} is the only device, this is the same as no strategy")
    return tf.distribute.MirroredStrategy([device.name for device in devices])


def _multi_worker():
    addresses = [address for job in _cluster_of_workers().values() for address in job]
    print(f"waiting for all workers, at most {START_TIMEOUT} seconds: {', '.join(addresses)}", flush=True)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=REDUCTION_TIMEOUT)
    # TensorFlow would wait for an hour, deaf to signals and to Python's threads.
    faulthandler.dump_traceback_later(START_TIMEOUT, exit=True, file=sys.__stderr__)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    faulthandler.cancel_dump_traceback_later()
    return strategy


def _cluster_of_workers():
    """The addresses of TF_CONFIG by job; ValueError unless it is whole and this process is in it."""
    text = os.environ.get("TF_CONFIG")
    expected = (
        "strategy multiworker: the environment variable TF_CONFIG must be JSON like "
        '{"cluster": {"worker": ["host0:port0", "host1:port1"]}, "task": {"type": "worker", "index": 0}}, '
        "with another index for every worker"
    )
    if not text:
        raise ValueError(f"{expected}; it is not set")
    try:
        config = json.loads(text)
        cluster, job, index = config["cluster"], config["task"]["type"], int(config["task"]["index"])
        num_tasks = {name: len(addresses) for name, addresses in cluster.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{expected}, received {text!r}") from error
    if job not in num_tasks or set(num_tasks) - {"chief", "worker"}:
        raise ValueError(f"{expected} (one job may be named chief, this process must be in a job), received {text!r}")
    if not 0 <= index < num_tasks[job]:
        raise ValueError(f"{expected}, from 0 to {num_tasks[job] - 1} for this cluster; received index {index}")
    return cluster


def _tpu_resolver():
    try:
        return tf.distribute.cluster_resolver.TPUClusterResolver(os.environ.get("TPU_NAME"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"strategy tpu: TensorFlow finds no TPU ({error}); on a TPU VM set the environment variable TPU_NAME=local"
        ) from error


def _tpu(resolver):
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except tf.errors.OpError as error:
        raise ValueError(f"strategy tpu: TensorFlow cannot start the TPU ({error.message})") from error
    return tf.distribute.TPUStrategy(resolver)


def is_multi_worker(strategy):
    """Whether other processes take part in the training."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def worker_number(strategy):
    """The number of this process among the workers, the chief's being 0."""
    if not is_multi_worker(strategy):
        return 0
    resolver = strategy.cluster_resolver
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_id + (has_chief and resolver.task_type == "worker")


def is_chief(strategy):
    """Whether this process writes what is written once. It is the only one without several workers."""
    return worker_number(strategy) == 0


def worker_folder(run_dir, strategy):
    """The folder where this worker writes: `run_dir` for the chief, run_dir/worker_N for the N-th of the others.

    All workers must have the same `run_dir`, on one file system or on each its own. Every worker can
    save its model, and all models are equal; the one in `run_dir` is the chief's.
    """
    number = worker_number(strategy)
    return pathlib.Path(run_dir, f"worker_{number}") if number else pathlib.Path(run_dir)


def check_compile_options(strategy, jit_compile="auto", steps_per_execution=1):
    """ValueError for arguments of `Model.compile` with which Keras cannot train under the strategy."""
    if not isinstance(strategy, DISTRIBUTED):
        return
    name = type(strategy).__name__
    if jit_compile not in ("auto", False):
        raise ValueError(
            f'jit_compile must be "auto" or False under {name}, received {jit_compile!r}: XLA cannot compile a step '
            "that spans devices (on a TPU the strategy compiles it anyway)"
        )
    if steps_per_execution != 1:
        raise ValueError(
            f"steps_per_execution must be 1 under {name}, received {steps_per_execution!r}: "
            "Keras cannot put several distributed steps into one graph"
        )


def shard(dataset, strategy):
    """A tf.data.Dataset of whole batches that `fit`, `evaluate` and `predict` share out among the replicas.

    Every worker must make the same data set, in the same order; each then keeps its part of every
    batch. So a step sees the batch that it sees on one device.

    Raises:
        ValueError: if a fixed batch size does not divide among the replicas (the loss would not be
            the mean over the batch), or on a TPU if any size is not fixed.
    """
    replicas = strategy.num_replicas_in_sync
    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(strategy, tf.distribute.TPUStrategy) and not spec.shape.is_fully_defined():
            raise ValueError(
                f"dataset must have fixed shapes on a TPU, received {spec.shape}: batch(..., drop_remainder=True)"
            )
        if spec.shape.rank and spec.shape[0] is not None and spec.shape[0] % replicas:
            raise ValueError(
                f"the batch size must be a multiple of the number of replicas, {replicas}, received {spec.shape[0]}"
            )
    options = tf.data.Options()
    # By elements: a policy by files would give the workers different data, and other batches than one device has.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options)


def cure(model):
    """Make `fit` and `evaluate` of a compiled model work on several workers; returns the model.

    Keras 3.15 fails there twice before the first step: it averages the first batch, which it needs
    for shapes only, with a function that is for tensors; and it averages the logs along an axis
    that these scalars do not have. So the model gets, as attributes of this one object, a first
    batch that is this worker's own part, and logs of shape [1]. Its class stays what it was, and what it
    saves is loaded as ever.

    Nothing is changed without several workers, or if Keras turns out to train a small model as it is.
    Call it in the strategy's scope, on all workers.
    """
    strategy = model.distribute_strategy
    if not is_multi_worker(strategy) or _keras_can_fit(strategy):
        return model
    stock_build = model._maybe_symbolic_build  # no public method stands between `fit` and this fault

    def build_from_own_part(iterator=None, data_batch=None):
        if iterator is not None:
            _, _, batches = next(iter(iterator))
            first = next(batches)
            data_batch = keras.tree.map_structure(lambda x: strategy.experimental_local_results(x)[0], first)
        stock_build(data_batch=data_batch)

    def with_vectors(step):
        return lambda data: {name: tf.reshape(value, [1]) for name, value in step(data).items()}

    model._maybe_symbolic_build = build_from_own_part
    model.train_step = with_vectors(model.train_step)
    model.test_step = with_vectors(model.test_step)
    return model


def _keras_can_fit(strategy):
    """Whether `fit` works as it is: one step of a model with one weight."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
    ones = tf.ones([strategy.num_replicas_in_sync, 1])
    try:
        model.fit(shard(tf.data.Dataset.from_tensors((ones, ones)), strategy), shuffle=False, verbose=0)
    except (ValueError, TypeError):  # in the same place on every worker, before anything is sent
        return False
    return True


def write_whole(path, save):
    """`save(path, overwrite=True)`, so that a kill leaves the file that was there or the new one, no half of it."""
    partial = path.with_name(f"partial_{path.name}")
    save(partial, overwrite=True)
    os.replace(partial, path)


class Backup(keras.callbacks.Callback):
    """After every epoch, save the weights and the optimizer's state; the last two backups are kept.

    Two, because a worker can be lost after some workers have saved an epoch and before the others have.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder = pathlib.Path(folder)

    def on_epoch_end(self, epoch, logs=None):
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / f"epoch_{epoch + 1}.weights.h5", self.model.save_weights)
        backups = _backups(self.folder)
        for old in sorted(backups)[:-2]:
            backups[old].unlink()


def _backups(folder):
    """The files of a folder by the number of epochs that they hold."""
    return {int(path.name.split(".")[0].removeprefix("epoch_")): path for path in folder.glob("epoch_*.weights.h5")}


def restore(model, folder, strategy):
    """Load the last backup that all workers have; the number of epochs in it, for the `initial_epoch` of `fit`.

    It is 0, and nothing is loaded, if there is no backup. Call it on all workers.

    Raises:
        ValueError: if the workers' last backups are more than an epoch apart, so not from one training.
    """
    backups = _backups(pathlib.Path(folder))
    newest = [max(backups, default=0)]
    if is_multi_worker(strategy):
        newest = strategy.gather(tf.constant(newest), axis=0).numpy().tolist()
    epoch = min(newest)
    if max(newest) - epoch > 1:
        raise ValueError(
            f"the last backups of workers 0, 1, ... are after {newest} epochs, they must be at most one apart: "
            "copy the backups of the furthest worker to the others, which have the same weights"
        )
    if epoch:
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
            model.load_weights(backups[epoch])
    return epoch


@contextlib.contextmanager
def explain_lost_workers(strategy):
    """Turn TensorFlow's errors about other workers into a ConnectionError that says what to do.

    Raises:
        ConnectionError: within `LOST_WORKER_TIMEOUT` seconds of the end of another worker's process
            or machine; within `REDUCTION_TIMEOUT` seconds if it runs but does not take part.
    """
    try:
        yield
    except WORKER_ERRORS as error:
        if not is_multi_worker(strategy):
            raise
        raise ConnectionError(
            f"worker {worker_number(strategy)} has lost another worker ({_first_line(error.message)}); "
            "start all workers again with the same TF_CONFIG and run folder: training goes on from the last backup"
        ) from error


def _first_line(message):
    """The first line of an error message that says something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(("Graph execution error", "Detected at", "File"))), "")
