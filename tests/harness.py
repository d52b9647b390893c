"""Checks that every layer that mixes a sequence has to pass, whatever its mathematics.

`apply` is a function of inputs [B, T, size], and of a mask [B, T] where it says so, to outputs
[B, T, ...]. `layer` is called as layer(inputs, mask=..., cache=...) and has `init_cache`.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import assert_close

TESTS = pathlib.Path(__file__).parent

# A few units in the last place of the dtype that the layer computes in.
TOLERANCES = {"float32": 1e-5, "mixed_float16": 4e-3, "mixed_bfloat16": 3e-2}
POLICIES = sorted(TOLERANCES)
policies = pytest.mark.parametrize("policy", POLICIES)


def normal(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), "float32")


def value_and_gradients(function, arguments, variables=()):
    """The outputs, and the gradients of their product with fixed random numbers."""
    differentiable = [x for x in arguments if x.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(differentiable)
        outputs = tf.nest.flatten(function(*arguments))
        total = tf.add_n([_product_with_noise(y, seed) for seed, y in enumerate(outputs)])
    gradients = tape.gradient(total, [*differentiable, *variables], unconnected_gradients="zero")
    return outputs, [tf.convert_to_tensor(gradient) for gradient in gradients]


def _product_with_noise(y, seed):
    y = tf.cast(tf.where(tf.math.is_finite(y), y, tf.zeros_like(y)), "float32")
    noise = tf.sin(tf.range(tf.size(y), dtype="float32") + float(seed))  # the same in every process and mode
    return tf.reduce_sum(y * tf.reshape(noise, tf.shape(y)))


def random_state_of(layer):
    """The variables that dropout draws its numbers from: assign them their values to draw the same again."""
    return [v for v in layer.variables if not any(v is weight for weight in layer.weights)]


def with_fixed_dropout(layer, apply):
    """`apply` such that every call draws the same dropout."""
    start = [(v, v.numpy()) for v in random_state_of(layer)]
    assert start

    def rewound(*arguments):
        for variable, value in start:
            variable.assign(value)
        return apply(*arguments)

    return rewound


# PREFIX: no output depends on what comes later.


def assert_causal(apply, inputs, tolerance=1e-5, *, cut=True):
    """f(x)[:t] equals f(x[:t]), and f(x)[:t] of an x that is ten times larger from t on.

    `cut` False leaves the first out, for dropout, which depends on the shape.
    """
    length = inputs.shape[1]
    whole = apply(inputs)
    for t in sorted({1, 2, length // 2, length - 1}):
        larger = apply(tf.concat([inputs[:, :t], 10 * inputs[:, t:]], axis=1))
        assert_close(larger[:, :t], whole[:, :t], tolerance)
        assert np.abs(larger[:, t:] - whole[:, t:]).max() > tolerance, "what is ten times larger must change"
        if cut:
            assert_close(apply(inputs[:, :t]), whole[:, :t], tolerance)


# PAD: padding is not there, wherever it is and whatever it contains.


def padding_masks(batch_size, length, padding):
    """Masks [B, length + padding] that keep `length` positions of every row, by where the others are."""
    rng = np.random.default_rng(0)
    kept, left_out = np.ones([batch_size, length], bool), np.zeros([batch_size, padding], bool)
    right = np.concatenate([kept, left_out], axis=1)
    return {"left": right[:, ::-1], "right": right, "interior": rng.permuted(right, axis=1)}


def pad(inputs, mask, deviation=100.0):
    """`inputs` at the places that `mask` keeps, large random numbers elsewhere."""
    content = np.random.default_rng(1).normal(scale=deviation, size=[*mask.shape, *inputs.shape[2:]])
    content[mask] = inputs.numpy().reshape(-1, *inputs.shape[2:])
    return tf.constant(content, inputs.dtype)


def kept_rows(x, mask):
    """[B, T, ...] -> [B, kept, ...] for masks that keep as many positions in every row."""
    return np.asarray(x)[mask].reshape(len(mask), -1, *x.shape[2:])


def assert_ignores_padding(apply, inputs, tolerance=1e-5, variables=()):
    """Outputs and gradients of the kept positions are those without padding; that of padding is 0."""
    (expected,), expected_gradients = value_and_gradients(lambda x: apply(x, None), (inputs,), variables)
    for place, mask in padding_masks(*inputs.shape[:2], padding=4).items():

        def kept_outputs(x, mask=mask):
            outputs = apply(x, mask)
            return tf.reshape(tf.boolean_mask(outputs, mask), expected.shape)

        (outputs,), (d_padded, *gradients) = value_and_gradients(kept_outputs, (pad(inputs, mask),), variables)
        assert_close(outputs, expected, tolerance)
        assert np.all(d_padded.numpy()[~mask] == 0), f"{place} padding has a gradient"
        for gradient, expected_gradient in zip([kept_rows(d_padded, mask), *gradients], expected_gradients):
            assert_close(gradient, expected_gradient, 10 * tolerance, smallest_scale=1e-3)


# STREAM: a sequence in pieces gives what the whole gives.


def stream(layer, inputs, sizes, mask=None, **options):
    """The outputs of consecutive pieces of the given sizes, and the final cache."""
    cache = layer.init_cache(inputs.shape[0], inputs.shape[1])
    outputs, start = [], 0
    for size in sizes:
        piece = slice(start, start + size)
        piece_mask = {} if mask is None else {"mask": mask[:, piece]}
        before = {name: tensor.numpy() for name, tensor in cache.items()}
        output, new_cache = layer(inputs[:, piece], cache=cache, **piece_mask, **options)
        for name, tensor in cache.items():
            assert np.array_equal(tensor, before[name]), f"the caller's {name} has changed"
        outputs.append(output)
        cache, start = new_cache, start + size
    assert start == inputs.shape[1]
    return tf.concat(outputs, axis=1), cache


def ways_to_split(length):
    """Token by token, two halves in three places, and pieces of all sizes with a single token among them."""
    splits = [[1] * length]
    splits += [[first, length - first] for first in (1, 5, length // 2)]
    return [*splits, [3, 1, length - 9, 2, 3]]


def assert_streams(layer, inputs, tolerance=1e-5, state_tolerance=None):
    """Outputs and cache do not depend on how the sequence is cut; the cache is float32 and batch first."""
    state_tolerance = tolerance if state_tolerance is None else state_tolerance
    expected = layer(inputs)
    _, expected_cache = stream(layer, inputs, [inputs.shape[1]])
    for sizes in ways_to_split(inputs.shape[1]):
        outputs, cache = stream(layer, inputs, sizes)
        assert_close(outputs, expected, tolerance)
        assert_same_cache(cache, expected_cache, state_tolerance)


def assert_same_cache(cache, expected, tolerance):
    assert set(cache) == set(expected)
    for name, tensor in cache.items():
        assert tensor.dtype == "float32" and tensor.shape[0] == expected[name].shape[0], name
        finite = np.isfinite(expected[name])
        assert np.array_equal(tensor.numpy()[~finite], expected[name].numpy()[~finite]), name
        assert_close(tensor.numpy()[finite], expected[name].numpy()[finite], tolerance)


def loop_over_tokens(layer, **function_options):
    """A compiled function of inputs [B, T, size]: a tf.while_loop that feeds them to `layer` one by one."""

    def function(inputs):
        length = tf.shape(inputs)[1]
        cache = layer.init_cache(tf.shape(inputs)[0], length)
        rows = tf.TensorArray(layer.compute_dtype, size=length, element_shape=[None, None])

        def body(t, cache, rows):
            output, cache = layer(inputs[:, t][:, None], cache=cache)
            return t + 1, cache, rows.write(t, output[:, 0])

        _, cache, rows = tf.while_loop(lambda t, *_: t < length, body, (0, cache, rows), maximum_iterations=length)
        return tf.transpose(rows.stack(), [1, 0, 2]), cache

    return tf.function(function, autograph=False, **function_options)


def assert_streams_in_loop(layer, inputs, tolerance=1e-5):
    """The compiled loop serves any batch and length, and equals the whole sequence."""
    loop = loop_over_tokens(layer, input_signature=[tf.TensorSpec([None, None, inputs.shape[2]], inputs.dtype)])
    for part in (inputs, inputs[:1, :3]):
        expected, expected_cache = stream(layer, part, [part.shape[1]])
        outputs, cache = loop(part)
        assert_close(outputs, expected, tolerance)
        assert_same_cache(cache, expected_cache, tolerance)


def assert_streams_padded_rows(layer, inputs, sizes, tolerance=1e-5):
    """In a batch of rows of different lengths, padded left or right, every row streams as it does alone."""
    batch_size, length, _ = inputs.shape
    lengths = [length - 3 * row % length for row in range(batch_size)]
    right = np.arange(length) < np.array(lengths)[:, None]
    for mask in (right, right[:, ::-1]):
        rows = [inputs[row : row + 1, : lengths[row]] for row in range(batch_size)]
        padded = tf.concat([pad(rows[row], mask[row : row + 1]) for row in range(batch_size)], axis=0)
        outputs, cache = stream(layer, padded, sizes, mask)
        for row in range(batch_size):
            expected, expected_cache = stream(layer, rows[row], [lengths[row]])
            assert_close(outputs[row][mask[row]], expected[0], tolerance)
            assert_same_cache({name: c[row : row + 1] for name, c in cache.items()}, expected_cache, tolerance)


# XLA: eager, graph and compiled agree.


def assert_same_when_compiled(function, arguments, variables=(), tolerance=1e-5, *, unknown_shapes=False):
    """Values and gradients in eager mode, in a graph (of unknown batch and length if asked), and under XLA."""

    def run(*arguments):
        return value_and_gradients(function, arguments, variables)

    specs = [tf.TensorSpec([None, None, *x.shape[2:]], x.dtype) for x in arguments] if unknown_shapes else None
    graph = tf.function(run, specs, autograph=False)
    compiled = tf.function(run, autograph=False, jit_compile=True)
    expected, expected_gradients = run(*arguments)
    for mode in (graph, compiled):
        outputs, gradients = mode(*arguments)
        for output, expected_output in zip(outputs, expected):
            assert_close(output, expected_output, tolerance)
        for gradient, expected_gradient in zip(gradients, expected_gradients):
            assert_close(gradient, expected_gradient, 10 * tolerance, smallest_scale=1e-3)


# ROUND: saved in four ways and loaded in a fresh process, a model computes the same.


class RoundTrip:
    """Saves models, loads all of them in one fresh process, and returns what they compute there.

    The process has another global seed. It loads SavedModels before it has imported favor_keras,
    and .keras files without custom objects.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.models = {}

    def add(self, name, model, examples, input_signature=None):
        """`examples`: a list of the model's inputs, each a tuple of arrays."""
        self.models[name] = model, examples
        folder = self.folder / name
        folder.mkdir()
        model.save(folder / "model.keras")
        model.save_weights(folder / "model.weights.h5")
        (folder / "config.json").write_text(json.dumps(keras.saving.serialize_keras_object(model)))
        model.export(str(folder / "export"), verbose=False, input_signature=input_signature)
        tf.saved_model.save(model, str(folder / "saved_model"))
        flat = {f"{i}_{j}": np.asarray(x) for i, example in enumerate(examples) for j, x in enumerate(example)}
        np.savez(folder / "examples.npz", **flat)

    def run(self):
        """{way: {name: [(outputs, gradients) per example]}}, for the way "original" too."""
        run_in_fresh_process("harness", "load_everything", str(self.folder))
        results = {"original": {n: [run_model(m, e, m) for e in examples] for n, (m, examples) in self.models.items()}}
        with np.load(self.folder / "results.npz") as arrays:
            for key in arrays:
                way, name, index, kind, _ = key.split("/")
                example = results.setdefault(way, {}).setdefault(name, {}).setdefault(int(index), ([], []))
                example[kind == "gradient"].append(arrays[key])
        return results


WAYS = ("keras", "weights", "export", "saved_model")


def assert_same_after_reloading(results, way, name, tolerance=1e-6):
    """`results` of `RoundTrip.run`: model `name` loaded in this way equals the original, gradients too."""
    originals, reloaded = results["original"][name], results[way][name]
    assert len(originals) == len(reloaded) > 0
    for index, (expected, expected_gradients) in enumerate(originals):
        outputs, gradients = reloaded[index]
        if way == "saved_model" and not gradients:
            expected_gradients = []  # without float inputs: a SavedModel does not list its weights
        assert len(outputs) == len(expected) and len(gradients) == len(expected_gradients)
        for output, expected_output in zip(outputs, expected):
            assert_close(output, expected_output, tolerance)
        # All gradients come from one backward pass, and have the rounding errors of its large ones.
        largest = max((np.abs(gradient).max() for gradient in expected_gradients), default=0)
        for gradient, expected_gradient in zip(gradients, expected_gradients):
            assert np.any(expected_gradient != 0)
            assert_close(gradient, expected_gradient, 10 * tolerance, smallest_scale=largest / 10)


def run_model(function, example, model):
    """Outputs, and gradients of the inputs if they have any, else of the trainable weights."""
    example = tuple(map(tf.convert_to_tensor, example))
    differentiable = all(x.dtype.is_floating for x in example)
    variables = () if differentiable else getattr(model, "trainable_variables", ())
    return value_and_gradients(lambda *x: function(list(x) if len(x) > 1 else x[0]), example, variables)


def load_everything(folder):
    """Run in a fresh process by `RoundTrip`."""
    folder = pathlib.Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    results = {}

    def record(way, name, function, model):
        with np.load(folder / name / "examples.npz") as arrays:
            keys = sorted(arrays)
            for index in sorted({key.split("_")[0] for key in keys}):
                example = [arrays[key] for key in keys if key.startswith(f"{index}_")]
                outputs, gradients = run_model(function, example, model)
                for kind, tensors in (("output", outputs), ("gradient", gradients)):
                    for i, tensor in enumerate(tensors):
                        results[f"{way}/{name}/{index}/{kind}/{i:03}"] = tf.cast(tensor, "float32").numpy()

    for name in names:
        exported = tf.saved_model.load(str(folder / name / "export"))
        record("export", name, exported.serve, exported)
        saved = tf.saved_model.load(str(folder / name / "saved_model"))
        record("saved_model", name, _unnamed(saved.signatures["serving_default"]), saved)
    assert not any(module.startswith("favor_keras") for module in sys.modules)

    import favor_keras  # noqa: F401

    keras.utils.set_random_seed(12345)
    for name in names:
        model = keras.models.load_model(folder / name / "model.keras")
        record("keras", name, model, model)
        rebuilt = keras.saving.deserialize_keras_object(json.loads((folder / name / "config.json").read_text()))
        rebuilt.load_weights(folder / name / "model.weights.h5")
        record("weights", name, rebuilt, rebuilt)
    np.savez(folder / "results.npz", **results)


def _unnamed(signature):
    """A serving signature, whose inputs and outputs have names, as a function of a tensor or a list."""
    specs = signature.structured_input_signature[1]

    def function(inputs):
        named = {name: tf.cast(x, specs[name].dtype) for name, x in zip(sorted(specs), tf.nest.flatten(inputs))}
        outputs = signature(**named)
        return [outputs[name] for name in sorted(outputs)]

    return function


def run_in_fresh_process(module, function, *arguments, **environment):
    """Call a function of a test module in a Python process of its own."""
    code = f"import sys, {module}; {module}.{function}(*sys.argv[1:])"
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-5000:]
