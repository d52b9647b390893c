"""Time, memory and difference of programs."""

import multiprocessing
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
import tensorflow as tf

tf.get_logger().setLevel("ERROR")  # it warns of the many functions that are traced on purpose


@dataclass(frozen=True)
class Program:
    """`function(*arguments)` gives tensors; `comparable` brings them to the layout that all candidates share."""

    function: Callable
    arguments: tuple
    comparable: Callable[[Any], Any] = lambda results: results

    def compiled(self, mode):
        """A call without arguments that returns when the results are there."""
        function = self.function
        if mode != "eager":
            function = tf.function(function, jit_compile=mode == "xla", autograph=False)

        def call():
            results = function(*self.arguments)
            tf.test.experimental.sync_devices()
            return results

        return call


def relative_error(results, expected):
    """The largest Frobenius norm of a difference, over the norm of what is expected; in float64."""
    pairs = zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True)
    errors = []
    for result, truth in pairs:
        result, truth = (np.asarray(x, np.float64) for x in (result, truth))
        if result.shape != truth.shape:
            raise ValueError(f"the results have the shapes {result.shape} and {truth.shape}")
        errors.append(np.linalg.norm(result - truth) / np.linalg.norm(truth))
    return float(np.max(errors))  # a NaN stays a NaN


def alternating_medians(calls, repeats):
    """The median seconds of each call, all calls taking turns so that a busy machine slows all alike."""
    seconds = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, seconds):
            times.append(seconds_of(call))
    return [statistics.median(times) for times in seconds]


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class NotFeasible(Exception):
    """A program needs more time or memory than there is."""


def first_call(build, mode, time_limit):
    """Seconds and peak memory of the first call of `build()` in a new process, tracing and compiling included.

    Args:
        build: a picklable function that returns a `Program`.
        mode: "eager", "graph" or "xla".
        time_limit: seconds, for building and calling.

    Returns:
        `(seconds, megabytes)`: the peak is counted above what the process held before the call, with the arguments
        in place. It is None where /proc does not tell it.

    Raises:
        NotFeasible: if the child is out of time or memory, or `build` raises it.
        RuntimeError: if the program raises anything else.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_first_call, args=(sender, build, mode), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(time_limit):
            raise NotFeasible(f"the first call takes more than {time_limit} s")
        measured = receiver.recv()
    except EOFError:  # killed, as the kernel does when memory runs out
        child.join()
        raise NotFeasible(f"the process ended with exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
    if isinstance(measured, Exception):
        raise measured
    return measured


def _first_call(sender, build, mode):
    try:
        call = build().compiled(mode)
        memory = _PeakMemory()
        seconds = seconds_of(call)
        sender.send((seconds, memory.megabytes()))
    except NotFeasible as reason:
        sender.send(reason)
    except (MemoryError, tf.errors.ResourceExhaustedError):
        sender.send(NotFeasible("out of memory"))
    except Exception as error:
        sender.send(RuntimeError(one_line(error)))


def one_line(error):
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


class _PeakMemory:
    """The peak of the resident memory above the present one, from Linux' own counter.

    `getrusage` would not do: its peak is inherited from the parent process and cannot be reset.
    """

    def __init__(self):
        self.before = None
        if Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present value
            self.before = self._kilobytes("VmRSS")

    def megabytes(self):
        return None if self.before is None else (self._kilobytes("VmHWM") - self.before) * 1024 / 1e6

    @staticmethod
    def _kilobytes(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))
