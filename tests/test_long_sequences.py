"""A layer computes a long sequence in pieces; it must give what it gives in one."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from favor_keras import FastWeightsAttention, SelfAttention
from favor_keras.layers import multi_head_mixer

LENGTH, SIZE = 29, 16  # pieces of 8 do not divide it

LAYERS = {
    "relu": (SelfAttention, dict(causal=True)),
    "softmax kernel": (SelfAttention, dict(causal=True, kernel_transformation="softmax", use_bias=True)),
    "short convolution": (SelfAttention, dict(causal=True, short_convolution=4)),
    "dpfp": (FastWeightsAttention, dict(feature_map="dpfp")),
    "gated delta rule": (
        FastWeightsAttention,
        dict(feature_map="l2", short_convolution=4, output_norm=True, output_gate=True, use_decay=True),
    ),
    "normalized sum": (FastWeightsAttention, dict(update_rule="normalized_sum")),
}


@pytest.fixture
def pieces(monkeypatch):
    """Sets from which length on there are pieces, and lists the lengths of the calls with a cache."""
    lengths = []
    monkeypatch.setattr(multi_head_mixer, "PIECE_SIZE", 8)

    def start_at(length):
        monkeypatch.setattr(multi_head_mixer, "LONG_SEQUENCE", length)
        return lengths

    for cls in (SelfAttention, FastWeightsAttention):
        call = cls.call

        @functools.wraps(call)  # Keras looks at the arguments
        def spy(self, inputs, *args, _call=call, **kwargs):
            if kwargs.get("cache") is not None:
                lengths.append(inputs.shape[1])
            return _call(self, inputs, *args, **kwargs)

        monkeypatch.setattr(cls, "call", spy)
    return start_at


def make(name, dtype="float64", **options):
    cls, own = LAYERS[name]
    keras.utils.set_random_seed(0)
    layer = cls(SIZE, num_heads=2, seed=3, dtype=dtype, **{**own, **options})
    layer.build((None, None, SIZE))
    return layer


def results(layer, mask=None, jit_compile=None):
    """The output and the gradients of the inputs and of all weights."""
    generator = np.random.default_rng(0)
    inputs, d_output = (generator.normal(size=[2, LENGTH, SIZE]) for _ in range(2))

    def function(inputs, d_output):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = layer(inputs, mask=mask)
        sources = [inputs, *(weight.value for weight in layer.trainable_weights)]
        return [output, *tape.gradient(output, sources, d_output)]

    if jit_compile is not None:
        function = tf.function(function, jit_compile=jit_compile, autograph=False)
    arguments = (tf.constant(x, layer.compute_dtype) for x in (inputs, d_output))
    return [tensor.numpy() for tensor in function(*arguments)]


@pytest.mark.parametrize("jit_compile", [None, False, True], ids=["eager", "graph", "xla"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_output_and_all_gradients_are_those_of_the_whole_sequence(name, jit_compile, pieces):
    layer = make(name)
    lengths = pieces(LENGTH + 1)
    whole = results(layer)
    assert not lengths
    pieces(LENGTH)
    in_pieces = results(layer, jit_compile=jit_compile)
    assert set(lengths) == {8}
    for result, expected in zip(in_pieces, whole, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-11)
    assert all(np.any(gradient) for gradient in in_pieces[1:])


@pytest.mark.parametrize("name", ["short convolution", "gated delta rule"])
def test_masks_are_cut_too_and_nan_behind_them_stays_there(name, pieces):
    layer = make(name)
    mask = np.ones([2, LENGTH], bool)
    mask[0, 20:] = mask[1, 3:11] = False
    pieces(LENGTH + 1)
    whole = results(layer, tf.constant(mask))
    pieces(LENGTH)
    for result, expected in zip(results(layer, tf.constant(mask)), whole, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-11)
    inputs = np.where(mask[..., None], 1.0, np.nan).repeat(SIZE, axis=-1)
    assert np.all(np.isfinite(layer(inputs, mask=mask)))


def test_a_model_of_unknown_batch_size_is_fitted_the_same(pieces):
    weights = {}
    for start in (LENGTH + 1, LENGTH):
        lengths = pieces(start)
        layer = make("short convolution", "float32")
        model = keras.Sequential([keras.Input((LENGTH, SIZE)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        x = np.random.default_rng(0).normal(size=[4, LENGTH, SIZE])
        model.fit(x, x[:, ::-1], batch_size=2, shuffle=False, verbose=0)
        weights[start] = model.get_weights()
    assert lengths
    for result, expected in zip(weights[LENGTH], weights[LENGTH + 1], strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_a_frozen_layer_gives_gradients_to_its_inputs(pieces):
    layer = make("relu")
    layer.trainable = False
    pieces(LENGTH + 1)
    whole = results(layer)
    pieces(LENGTH)
    np.testing.assert_allclose(results(layer)[1], whole[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [dict(dtype="mixed_bfloat16"), dict(dtype="bfloat16"), dict(attention_dropout=0.5), dict(causal=False)],
    ids=lambda options: "".join(map(str, options.values())),
)
def test_no_pieces_where_they_would_compute_something_else(options, pieces):
    lengths = pieces(LENGTH)
    layer = make("relu", **options)
    layer(tf.ones([2, LENGTH, SIZE]), training=True)
    assert not lengths


def test_dropout_alone_is_no_obstacle_outside_training(pieces):
    lengths = pieces(LENGTH)
    make("relu", attention_dropout=0.5)(tf.ones([2, LENGTH, SIZE]))
    assert lengths


def test_a_bias_or_a_kernel_that_looks_across_positions_has_no_pieces(pieces):
    lengths = pieces(LENGTH)
    inputs = tf.ones([2, LENGTH, SIZE])
    make("relu")(inputs, bias=tf.zeros([1, 1, 1, LENGTH]))
    make("relu", kernel_transformation=lambda data, is_query, projection_matrix: tf.nn.relu(data))(inputs)
    assert not lengths


@pytest.mark.parametrize("base", [SelfAttention, FastWeightsAttention])
def test_what_a_subclass_does_around_the_call_is_done_once(base, pieces):
    class Doubled(base):
        def call(self, inputs, mask=None, training=None):
            return 1 + super().call(2 * inputs, mask=mask, training=training)

    options = {"causal": True} if base is SelfAttention else {}
    layer = Doubled(SIZE, num_heads=2, seed=3, dtype="float64", **options)
    inputs = np.random.default_rng(0).normal(size=[2, LENGTH, SIZE])
    pieces(LENGTH + 1)
    whole = layer(inputs)
    lengths = pieces(LENGTH)
    np.testing.assert_allclose(layer(inputs), whole, rtol=1e-9, atol=1e-11)
    assert lengths


def test_values_of_a_scope_around_the_call_are_used_of_all_variables(pieces):
    layer = make("relu", "float32")
    layer.query_dense.quantize("int8")
    pieces(LENGTH)
    inputs = tf.constant(np.random.default_rng(0).normal(size=[2, LENGTH, SIZE]), "float32")
    values = [[v.value for v in group] for group in (layer.trainable_variables, layer.non_trainable_variables)]
    expected = layer.stateless_call(*values, inputs)[0]
    np.testing.assert_allclose(expected, layer(inputs), rtol=1e-5, atol=1e-6)
    values[1] = [tf.zeros_like(value) if value.dtype == tf.int8 else value for value in values[1]]
    changed = layer.stateless_call(*values, inputs)[0]
    pieces(LENGTH + 1)
    np.testing.assert_allclose(changed, layer.stateless_call(*values, inputs)[0], rtol=1e-5, atol=1e-6)
    assert np.abs(changed - expected).max() > 1e-3


def test_float8_weights_have_no_pieces_as_their_gradients_are_not_sums(pieces):
    layer = make("relu", "float32")
    layer.query_dense.quantize("float8")
    lengths = pieces(LENGTH)
    layer(tf.ones([2, LENGTH, SIZE]))
    assert not lengths


def test_a_projection_that_nobody_redraws_is_warned_of(pieces):
    pieces(LENGTH)
    layer = make("softmax kernel", redraw_interval=5)
    with pytest.warns(UserWarning, match="needs the callback RedrawProjections"):
        layer(tf.ones([2, LENGTH, SIZE]), training=True)


def test_what_is_refused_for_a_short_sequence_is_refused_for_a_long_one(pieces):
    layer = make("relu")
    inputs = tf.ones([2, LENGTH, SIZE])
    for start in (LENGTH + 1, LENGTH):
        pieces(start)
        with pytest.raises(ValueError, match="decode_loop_step needs a cache"):
            layer(inputs, decode_loop_step=1)
        with pytest.raises(ValueError, match="mask must have the shape"):
            layer(inputs, mask=tf.ones([2, LENGTH - 1]))
        for wrong in (inputs[..., 1:], inputs[..., 0], inputs[0, 0], inputs[None]):
            with pytest.raises(ValueError, match="received shape"):
                layer(wrong)


@pytest.mark.parametrize("name", ["relu", "gated delta rule"])
def test_the_graph_does_not_grow_with_the_length(name):
    def size_of_graph(length):
        layer = make(name, "float32")
        spec = tf.TensorSpec([1, length, SIZE])
        graph = tf.function(layer, autograph=False).get_concrete_function(spec).graph
        return len(graph.as_graph_def().node) + sum(len(f.node_def) for f in graph.as_graph_def().library.function)

    assert multi_head_mixer.LONG_SEQUENCE == 32_768
    assert size_of_graph(65_536) == size_of_graph(32_768)
