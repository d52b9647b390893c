"""Run the mathematics of one chunk over a whole sequence, keeping only the states between chunks.

A recurrence over T tokens is written once, as a differentiable function of one chunk of C tokens,

    step(state, chunk, constants) -> (output, new_state),

and `scan_chunks` runs it from the first chunk to the last. The forward pass keeps the inputs and
the state at the start of every chunk, nothing else. The backward pass walks the chunks from the
last to the first, runs `step` again on each under a `tf.GradientTape`, and carries the gradient of
the state. So the memory is that of the inputs plus N states, the graph does not grow with T, and a
recurrence needs no backward pass of its own.

A sequence of few chunks needs no loop: its steps stand in the graph one after the other, and their
derivative is TensorFlow's, which keeps what they compute instead of computing it again.
"""

import itertools

import tensorflow as tf

from favor_keras.ops.xla import is_xla

# How many chunks are few. A training step of 16 takes a third less time in a graph without a loop, but its first call 3 s
# more for each layer. XLA makes better loops and compiles longer without: there it pays for 4, by a tenth.
FEW_CHUNKS = {"graph": 16, "xla": 4}


def scan_chunks(step, state, inputs, constants=(), *, chunk_size, output_dtype, pad_values=None, nothing_before=False):
    """Apply `step` to consecutive chunks of `inputs`, carrying `state` from one to the next.

    Args:
        step: `step(state, chunk, constants) -> (output, new_state)`. `chunk` has the structure of
            `inputs`, cut to [B, C, ...]; `output` is a tensor [B, C, ...], or None for a step that
            only updates the state; `new_state` has the structure, shapes and dtypes of `state`.
            It must be differentiable and must not capture tensors that need a gradient: what is
            the same for all chunks goes into `constants`.
        state: structure (dict or tuple) of floating-point tensors, the state before the first token.
        inputs: structure of floating-point tensors [B, T, ...] (or [1, T, ...]), all of one T.
        constants: structure of floating-point tensors that every chunk sees whole.
        chunk_size: the largest C, at least 1. The sequence is cut into N = ceil(T / chunk_size)
            chunks of ceil(T / N) tokens.
        output_dtype: the dtype of `output`, None if there is none.
        pad_values: structure like `inputs` of the numbers that fill up the last chunk. They must
            make tokens that leave the state alone. Default: zeros.
        nothing_before: whether `state` is that of no token, which reads as nothing. Where there is
            no loop, `step` gets None for it, and can leave out what would read it.

    Returns:
        `(output, final_state)`: a tensor [B, T, ...] or None, and a structure like `state`.
        Gradients flow to `state`, `inputs` and `constants`; those of higher order in eager mode and
        in graphs, but not under XLA, which cannot compile the derivative of the backward loop.

    Raises:
        ValueError: if `chunk_size` is not a positive integer.

    Example:

    >>> import tensorflow as tf
    >>> from favor_keras.ops import scan_chunks
    >>> def running_sum(state, chunk, constants):
    ...     sums = state[:, None] + tf.cumsum(chunk, axis=1)
    ...     return sums, sums[:, -1]
    >>> x = tf.reshape(tf.range(6.0), [1, 6])
    >>> sums, total = scan_chunks(
    ...     running_sum, tf.zeros([1]), x, chunk_size=4, output_dtype="float32")
    >>> sums.numpy().tolist(), total.numpy().tolist()
    ([[0.0, 1.0, 3.0, 6.0, 10.0, 15.0]], [15.0])
    """
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive integer, received {chunk_size!r}")
    grid = _ChunkGrid(tf.nest.flatten(inputs)[0], chunk_size)
    if not tf.is_tensor(grid.num_chunks) and grid.num_chunks <= FEW_CHUNKS["xla" if is_xla() else "graph"]:
        return _scan_without_loop(step, None if nothing_before else state, inputs, constants, grid)
    arguments = (state, inputs, constants)
    if pad_values is None:
        pad_values = tf.nest.map_structure(lambda _: 0.0, inputs)
    pad_values = tf.nest.flatten(pad_values)
    num_outputs = 0 if output_dtype is None else 1
    num_states, num_inputs, num_constants = (len(tf.nest.flatten(a)) for a in arguments)

    def flat_step(state, chunk, constants):
        output, new_state = step(*tf.nest.pack_sequence_as(arguments, [*state, *chunk, *constants]))
        return () if output is None else (output,), _with_shapes(tf.nest.flatten(new_state), state)

    def split_arguments(tensors):
        state, inputs, constants = _cut(tensors, num_states, num_inputs, num_constants)
        return state, [grid.split(x, pad) for x, pad in zip(inputs, pad_values)], constants

    def forward(*tensors):
        """The outputs, the final state, and the state at the start of every chunk."""
        state, chunks, constants = split_arguments(tensors)

        def body(n, state, starts, outputs):
            starts = _write(starts, n, state)
            output, state = flat_step(state, _at(n, chunks), constants)
            return n + 1, state, starts, _write(outputs, n, output)

        _, state, starts, outputs = tf.while_loop(
            lambda n, *_: n < grid.num_chunks,
            body,
            (0, state, grid.arrays(s.dtype for s in state), grid.arrays([output_dtype] * num_outputs)),
            maximum_iterations=grid.num_chunks,  # XLA needs it to differentiate the loop itself
        )
        return grid.join_all(outputs), state, tuple(s.stack() for s in starts)

    def backward(tensors, starts, d_results):
        """The gradients of `tensors`, chunk by chunk from the last to the first."""
        _, chunks, constants = split_arguments(tensors)
        d_outputs, d_state = _cut(d_results, num_outputs, num_states)
        d_outputs = [grid.split(d, 0.0) for d in d_outputs]

        def chunk_results(*tensors):
            outputs, state = flat_step(*_cut(tensors, num_states, num_inputs, num_constants))
            return outputs + state

        def body(i, d_state, d_constants, d_inputs):
            n = grid.num_chunks - 1 - i
            start = tuple(tf.gather(s, n) for s in starts)
            gradients = _pull_back(chunk_results, start + _at(n, chunks) + constants, _at(n, d_outputs) + d_state)
            d_start, d_chunk, d_constant = _cut(gradients, num_states, num_inputs, num_constants)
            d_constants = tuple(total + d for total, d in zip(d_constants, d_constant))
            return i + 1, _with_shapes(d_start, d_state), d_constants, _write(d_inputs, n, d_chunk)

        _, d_state, d_constants, d_inputs = tf.while_loop(
            lambda i, *_: i < grid.num_chunks,
            body,
            (0, d_state, tuple(map(tf.zeros_like, constants)), grid.arrays(c.dtype for c in chunks)),
        )
        return d_state + grid.join_all(d_inputs) + d_constants

    @tf.custom_gradient
    def scan(*tensors):
        outputs, state, starts = forward(*_detached(tensors))

        @tf.custom_gradient
        def gradient(*tensors_and_cotangents):
            tensors, d_results = _cut(_detached(tensors_and_cotangents), len(flat), num_outputs + num_states)
            return backward(tensors, starts, d_results), second_gradient(tensors_and_cotangents)

        return outputs + state, lambda *d_results: gradient(*tensors, *d_results)

    def second_gradient(tensors_and_cotangents):
        """The derivative of the gradients, which is rarely wanted: TensorFlow's, with its memory."""

        def gradient(*tensors_and_cotangents):
            tensors, d_results = _cut(tensors_and_cotangents, len(flat), num_outputs + num_states)
            return _pull_back(lambda *tensors: sum(forward(*tensors)[:2], ()), tensors, d_results)

        return lambda *cotangents: _pull_back(gradient, tensors_and_cotangents, cotangents)

    flat = tf.nest.flatten(arguments)
    outputs, state = _cut(scan(*flat), num_outputs, num_states)
    return (outputs[0] if outputs else None), tf.nest.pack_sequence_as(arguments[0], state)


def _scan_without_loop(step, state, inputs, constants, grid):
    if grid.num_chunks == 1:
        return step(state, inputs, constants)
    sizes = [grid.chunk_size] * (grid.num_chunks - 1) + [grid.chunk_size - grid.missing]
    pieces = [tf.split(x, sizes, axis=1) for x in tf.nest.flatten(inputs)]
    outputs = []
    for chunk in zip(*pieces):
        output, state = step(state, tf.nest.pack_sequence_as(inputs, chunk), constants)
        outputs.append(output)
    return None if outputs[0] is None else tf.concat(outputs, axis=1), state


class _ChunkGrid:
    """How T tokens are cut into N chunks of C: [B, T, ...] to [B, N, C, ...], [N, B, C, ...] back.

    The sizes are Python integers where T is known and scalar tensors where it is not.
    """

    def __init__(self, example, chunk_size):
        self.length = example.shape[1]
        if self.length is None:
            self.length = tf.shape(example)[1]
        self.num_chunks = -(-self.length // chunk_size)
        # An empty sequence is one empty chunk.
        self.num_chunks = tf.maximum(self.num_chunks, 1) if tf.is_tensor(self.num_chunks) else max(self.num_chunks, 1)
        self.chunk_size = -(-self.length // self.num_chunks)
        self.missing = self.num_chunks * self.chunk_size - self.length

    def split(self, x, pad_value):
        if tf.is_tensor(self.missing) or self.missing > 0:
            paddings = [[0, 0], [0, self.missing]] + [[0, 0]] * (x.shape.rank - 2)
            x = tf.pad(x, paddings, constant_values=tf.cast(pad_value, x.dtype))
        shape = tf.shape(x)
        chunks = tf.reshape(x, tf.concat([shape[:1], [self.num_chunks, self.chunk_size], shape[2:]], 0))
        known = [None if tf.is_tensor(size) else size for size in (self.num_chunks, self.chunk_size)]
        chunks.set_shape([x.shape[0], *known, *x.shape[2:]])
        return chunks

    def join(self, stacked):
        x = tf.transpose(stacked, [1, 0, *range(2, stacked.shape.rank)])
        shape = tf.shape(x)
        x = tf.reshape(x, tf.concat([shape[:1], [self.num_chunks * self.chunk_size], shape[3:]], 0))
        return x[:, : self.length]

    def join_all(self, arrays):
        """Tensors of arrays, made one after the other so that only one at a time is held twice."""
        tensors = []
        for array in arrays:
            with tf.control_dependencies(tensors[-1:]):
                tensors.append(self.join(array.stack()))
        return tuple(tensors)

    def arrays(self, dtypes):
        return tuple(tf.TensorArray(dtype, size=self.num_chunks) for dtype in dtypes)


def _at(n, chunks):
    return tuple(tf.gather(c, n, axis=1) for c in chunks)


def _write(arrays, n, tensors):
    return tuple(a.write(n, t) for a, t in zip(arrays, tensors))


def _cut(tensors, *counts):
    """Cut a sequence into consecutive tuples of the given lengths."""
    tensors = iter(tensors)
    return [tuple(itertools.islice(tensors, count)) for count in counts]


def _pull_back(function, tensors, cotangents):
    """The gradients of sum(cotangent * result) over the results of function(*tensors)."""
    tensors = tuple(map(tf.identity, tensors))  # one tensor may come twice, as query and as key
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        results = function(*tensors)
    zero = tf.UnconnectedGradients.ZERO
    return tuple(tape.gradient(results, tensors, cotangents, unconnected_gradients=zero))


def _detached(tensors):
    # Otherwise an eager tape would record, and so keep alive, every operation of the loop.
    return tuple(map(tf.stop_gradient, tensors))


def _with_shapes(tensors, references):
    """A loop's variables must keep the static shapes that they start with."""
    for tensor, reference in zip(tensors, references):
        tensor.set_shape(reference.shape)
    return tuple(tensors)
