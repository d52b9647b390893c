"""FavorAttention and SelfAttention: against a naive layer, and every way to mask, cut and compile them."""

import inspect
import itertools
import math
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import (
    POLICIES,
    TOLERANCES,
    assert_causal,
    assert_ignores_padding,
    assert_same_cache,
    assert_same_when_compiled,
    assert_streams,
    assert_streams_in_loop,
    assert_streams_padded_rows,
    loop_over_tokens,
    normal,
    pad,
    padding_masks,
    policies,
    stream,
    value_and_gradients,
    with_fixed_dropout,
)
from oracles import assert_close, directional_derivative
from test_short_convolution import naive_short_convolution

from favor_keras import FavorAttention, SelfAttention, create_projection_matrix, favor_attention
from favor_keras.ops import KernelTransformation

SIZE, SOURCE_SIZE, HIDDEN, HEADS, FEATURES = 6, 5, 12, 3, 16
LAYERS = (SelfAttention, FavorAttention)

kernels = pytest.mark.parametrize("kernel", ["softmax", "relu"])
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
both_layers = pytest.mark.parametrize("layer_class", LAYERS)


def make_layer(kernel="softmax", layer_class=SelfAttention, **options):
    """A layer whose biases are not zero and whose sizes all differ."""
    settings = {
        "kernel_transformation": kernel,
        "projection_matrix_type": "orthogonal",
        "nb_random_features": FEATURES,
        "use_bias": True,
        "bias_initializer": keras.initializers.RandomNormal(stddev=0.3),
        "seed": 1,
    }
    layer = layer_class(HIDDEN, HEADS, **{**settings, **options})
    keras.utils.set_random_seed(0)
    shapes = [[None, None, SIZE]] if layer_class is SelfAttention else [[None, None, SIZE], [None, None, SOURCE_SIZE]]
    layer.build(*shapes)
    return layer


def inputs_for(layer, batch_size=2, length=7, source_length=None):
    query = normal(batch_size, length, SIZE)
    if isinstance(layer, SelfAttention):
        return (query,)
    return query, normal(batch_size, source_length or length, SOURCE_SIZE, seed=1)


# The layer, written from its formulas in float64.


def weights_of(layer):
    """{path inside the layer: array} of all weights that the layer has."""
    names = ["query", "key", "value", "output"]
    weights = {f"{n}_{w}": getattr(getattr(layer, f"{n}_dense"), w) for n in names for w in ("kernel", "bias")}
    if layer.short_convolution:
        weights |= {f"{n}_convolution": getattr(layer, f"{n}_convolution").kernel for n in names[:3]}
    assert len(weights) == len(layer.trainable_weights)
    return weights


def naive_layer(layer, weights, query, source, query_mask=None, source_mask=None):
    """FAVOR+ attention over all pairs of positions, exp() and all, given every weight as an array."""

    def heads(name, inputs, mask):
        x = np.einsum("bte,ehd->bthd", inputs, weights[f"{name}_kernel"]) + weights[f"{name}_bias"]
        if not layer.short_convolution:
            return x
        flat, _ = naive_short_convolution(x.reshape(*x.shape[:2], -1), weights[f"{name}_convolution"], mask)
        return flat.reshape(x.shape)

    def features(x):
        """Features, and the logarithms of how often they count."""
        if layer.projection_matrix is None:
            return np.where(np.real(x) > 0, x, 0) + 1e-3, np.zeros(x.shape[:3])
        projection = layer.projection_matrix.numpy().astype("float64")
        if name_of(layer.kernel_transformation) == "ReluKernel":
            projected = np.einsum("bthd,md->bthm", x, projection)
            return np.where(np.real(projected) > 0, projected, 0) / math.sqrt(len(projection)) + 1e-3, np.zeros(
                x.shape[:3]
            )
        x = x / x.shape[-1] ** 0.25
        projected = np.einsum("bthd,md->bthm", x, projection)
        largest = np.take_along_axis(projected, np.real(projected).argmax(axis=-1)[..., None], axis=-1)
        return np.exp(projected - largest) + 1e-6, largest[..., 0] - np.sum(x**2, axis=-1) / 2

    query_features, _ = features(heads("query", query, query_mask))
    key_features, key_log_scale = features(heads("key", source, source_mask))
    value = heads("value", source, source_mask)
    visible = np.ones([len(query), HEADS, query.shape[1], source.shape[1]])
    if layer.causal:
        visible = visible * np.tri(query.shape[1])
    if source_mask is not None:
        visible = visible * source_mask[:, None, None, :]
    attention = np.einsum("bthm,bshm,bsh->bhts", query_features, key_features, np.exp(key_log_scale)) * visible
    total = attention.sum(axis=-1, keepdims=True)
    attention = np.divide(attention, total, out=np.zeros_like(attention), where=total != 0)
    output = np.einsum("bhts,bshd,hde->bte", attention, value, weights["output_kernel"]) + weights["output_bias"]
    return output if query_mask is None else output * query_mask[..., None]


def name_of(kernel):
    return type(kernel).__name__


def naive_output(layer, query, source=None, query_mask=None, source_mask=None):
    weights = {name: w.numpy().astype("float64") for name, w in weights_of(layer).items()}
    query = np.asarray(query, "float64")
    source = query if source is None else np.asarray(source, "float64")
    return naive_layer(layer, weights, query, source, query_mask, source_mask)


@causal_or_not
@pytest.mark.parametrize("convolution", [0, 4], ids=["plain", "convolution"])
@pytest.mark.parametrize(("kernel", "projection"), [("softmax", "iid"), ("relu", "givens"), ("relu", None)], ids=str)
def test_M7_masked_layer_and_all_its_gradients_equal_the_naive_layer(kernel, projection, convolution, causal):
    layer = make_layer(
        kernel,
        FavorAttention,
        projection_matrix_type=projection,
        nb_random_features=FEATURES if projection else 0,
        short_convolution=convolution,
        causal=causal,
        dtype="float64",
    )
    rng = np.random.default_rng(0)
    query, source = rng.normal(size=[2, 7, SIZE]), rng.normal(size=[2, 7 if causal else 9, SOURCE_SIZE])
    query_mask, source_mask = (rng.uniform(size=x.shape[:2]) < 0.7 for x in (query, source))
    d_output = rng.normal(size=[2, 7, HIDDEN])
    variables = weights_of(layer)

    with tf.GradientTape() as tape:
        arguments = tf.constant(query), tf.constant(source)
        tape.watch(arguments)
        output = layer(*arguments, query_mask=query_mask, source_mask=source_mask)
    gradients = tape.gradient(output, [*arguments, *variables.values()], tf.constant(d_output))

    def naive(query, source, *weights):
        return naive_layer(layer, dict(zip(variables, weights)), query, source, query_mask, source_mask)

    points = query, source, *(v.numpy() for v in variables.values())
    assert_close(output, naive(*points), 1e-12)
    for i, gradient in enumerate(gradients):
        directions = [rng.normal(size=p.shape) if i == j else np.zeros(p.shape) for j, p in enumerate(points)]
        expected = np.sum(d_output * directional_derivative(naive, points, directions))
        assert_close(np.sum(gradient * directions[i]), expected, 1e-8, smallest_scale=1e-3)


@policies
@causal_or_not
@kernels
def test_layer_equals_the_naive_layer_in_every_precision(kernel, causal, policy):
    layer = make_layer(kernel, short_convolution=4, causal=causal, dtype=policy)
    # 70 tokens are more than one chunk of the causal scan.
    inputs = tf.cast(normal(2, 70, SIZE), layer.compute_dtype)
    output = layer(inputs)
    assert output.dtype == layer.compute_dtype
    assert_close(output, naive_output(layer, inputs), TOLERANCES[policy])


# Causality and masks.

MASKS = {"no_mask": None, "ones": np.ones([2, 11]), "random": np.random.default_rng(3).uniform(size=[2, 11]) < 0.7}


@pytest.mark.parametrize(
    ("mask", "policy"),
    [("no_mask", "float32"), ("ones", "float32"), *(("random", policy) for policy in POLICIES)],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["inference", "dropout"])
@kernels
def test_C4_C9_no_output_depends_on_later_inputs(kernel, dropout, mask, policy):
    layer = make_layer(kernel, causal=True, short_convolution=4, attention_dropout=dropout, dtype=policy)
    mask = MASKS[mask]

    def apply(x):
        return layer(x, mask=None if mask is None else mask[:, : x.shape[1]], training=dropout > 0)

    apply = with_fixed_dropout(layer, apply) if dropout else apply
    assert_causal(apply, normal(2, 11, SIZE), TOLERANCES[policy], cut=not dropout)


@kernels
def test_C9_cross_attention_is_causal_too(kernel):
    layer = make_layer(kernel, FavorAttention, causal=True)
    query, source = inputs_for(layer, length=70)
    assert_causal(lambda x: layer(x, source[:, : x.shape[1]]), query)
    whole = layer(query, source)
    for t in (1, 35, 69):
        later = tf.concat([source[:, :t], 10 * source[:, t:]], axis=1)
        assert_close(layer(query, later)[:, :t], whole[:, :t], 1e-5)


def test_C4_compiled_training_is_causal():
    layer = make_layer(causal=True, attention_dropout=0.1)
    compiled = tf.function(lambda x: layer(x, training=True), autograph=False, jit_compile=True)
    assert_causal(with_fixed_dropout(layer, compiled), normal(2, 11, SIZE), cut=False)


@policies
@both_layers
def test_C6_P4_masks_of_every_dtype_mean_keep(layer_class, policy):
    layer = make_layer(layer_class=layer_class, short_convolution=4, dtype=policy)
    inputs = inputs_for(layer)
    names = ["mask"] if layer_class is SelfAttention else ["query_mask", "source_mask"]
    mask = np.array([[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]])

    def apply(mask):
        return layer(*inputs, **dict.fromkeys(names, mask)).numpy()

    expected = apply(mask.astype(bool))
    dtypes = ["bool", "int8", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64"]
    for dtype in dtypes:
        assert np.array_equal(apply(tf.cast(mask, dtype)), expected), dtype
        if dtype != "bfloat16":
            assert np.array_equal(apply(mask.astype(dtype)), expected), dtype
    assert_close(apply(np.ones_like(mask)), layer(*inputs), TOLERANCES[policy])
    assert np.all(apply(np.zeros_like(mask)) == 0)
    assert np.all(expected[mask == 0] == 0) and np.all(np.any(expected[mask == 1] != 0, axis=-1))


@pytest.mark.parametrize(
    ("policy", "convolution"), [("float32", 0), ("float32", 4), ("mixed_float16", 4), ("mixed_bfloat16", 4)]
)
@causal_or_not
@kernels
def test_M1_M2_M9_padding_is_not_there(kernel, causal, policy, convolution):
    layer = make_layer(kernel, causal=causal, short_convolution=convolution, dtype=policy)
    assert_ignores_padding(
        lambda x, mask: layer(x, mask=mask), normal(2, 8, SIZE), TOLERANCES[policy], layer.trainable_variables
    )


@kernels
def test_M2_padding_has_no_gradient_when_dropout_is_on(kernel):
    layer = make_layer(kernel, causal=True, attention_dropout=0.5, short_convolution=4)
    for mask in padding_masks(2, 8, 4).values():
        _, (d_inputs, *_) = value_and_gradients(
            lambda x, mask=mask: layer(x, mask=mask, training=True), (pad(normal(2, 8, SIZE), mask),)
        )
        assert np.all(d_inputs.numpy()[~mask] == 0) and np.any(d_inputs.numpy()[mask] != 0)


@pytest.mark.parametrize("shape", [(2, 8), (2, 6), (1, 7), (7,), (2, 7, 7), (2, 1, 7), (2, 1, 7, 7)], ids=str)
@both_layers
def test_M5_M6_H5_masks_of_another_shape_are_refused(layer_class, shape):
    layer = make_layer(layer_class=layer_class)
    names = ["mask"] if layer_class is SelfAttention else ["query_mask", "source_mask"]
    for name in names:
        with pytest.raises(ValueError, match=f"(?s){'' if name == 'mask' else name}.*batch, length.*exact attention"):
            layer(*inputs_for(layer), **{name: np.ones(shape)})


@both_layers
def test_M5_masks_of_other_numbers_are_refused(layer_class):
    layer = make_layer(layer_class=layer_class)
    for name in ["mask"] if layer_class is SelfAttention else ["query_mask", "source_mask"]:
        for number in (0.5, 2, -1, math.nan):
            with pytest.raises(ValueError, match=r"mask must contain only 1 \(keep\) and 0 \(leave out\)"):
                layer(*inputs_for(layer), **{name: np.full([2, 7], number)})


@both_layers
def test_M6_an_attention_mask_is_not_silently_ignored(layer_class):
    layer = make_layer(layer_class=layer_class)
    with pytest.raises((TypeError, ValueError), match="attention_mask"):
        layer(*inputs_for(layer), attention_mask=np.tri(7)[None])


def test_M8_a_square_mask_is_batch_by_length():
    layer = make_layer(layer_class=FavorAttention)
    query, source = inputs_for(layer, batch_size=8, length=8)
    mask = np.random.default_rng(0).uniform(size=[8, 8]) < 0.5
    for given in (mask, mask.T):
        expected = naive_output(layer, query, source, source_mask=given)
        assert_close(layer(query, source, source_mask=given), expected, 1e-5)
    assert np.abs(layer(query, source, source_mask=mask) - layer(query, source, source_mask=mask.T)).max() > 0.01


@causal_or_not
@kernels
def test_M9_huge_values_behind_the_mask_change_nothing(kernel, causal):
    layer = make_layer(kernel, causal=causal)
    (inputs,), mask = inputs_for(layer), np.array([[1, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1]], bool)
    huge = tf.where(mask[..., None], inputs, 1e6)
    assert np.array_equal(layer(huge, mask=mask), layer(inputs, mask=mask))


@pytest.mark.parametrize("convolution", [0, 4], ids=["plain", "convolution"])
@causal_or_not
@kernels
@both_layers
def test_M9_nothing_behind_the_masks_reaches_outputs_or_gradients(layer_class, kernel, causal, convolution):
    layer = make_layer(kernel, layer_class, causal=causal, short_convolution=convolution)
    inputs, mask = inputs_for(layer), np.array([[1, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1]], bool)
    masks = [mask] if layer_class is SelfAttention else [mask, mask[::-1]]
    names = ["mask"] if layer_class is SelfAttention else ["query_mask", "source_mask"]

    def results(content):
        filled = tuple(tf.where(m[..., None], x, content[: x.shape[-1]]) for x, m in zip(inputs, masks))
        return value_and_gradients(lambda *x: layer(*x, **dict(zip(names, masks))), filled, layer.trainable_variables)

    content = tf.constant([np.nan, np.inf, 1e6, -np.inf, 1e30, -1e6])
    for result, expected in zip(tf.nest.flatten(results(content)), tf.nest.flatten(results(tf.zeros(SIZE)))):
        assert np.array_equal(result, expected)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_M9_nothing_behind_the_mask_reaches_the_cache_of_a_source(kernel):
    layer = make_layer(kernel, FavorAttention)
    _, source = inputs_for(layer)
    mask = np.array([[1, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1]], bool)
    caches = [layer.source_cache(tf.where(mask[..., None], source, x), source_mask=mask) for x in (np.nan, 0.0)]
    for name, tensor in caches[0].items():
        assert np.array_equal(tensor, caches[1][name]), name


@both_layers
@kernels
def test_M15_a_sample_that_is_all_masked_gives_zeros_and_finite_gradients(kernel, layer_class):
    layer = make_layer(kernel, layer_class, short_convolution=4)
    inputs = inputs_for(layer, batch_size=3)
    name = "mask" if layer_class is SelfAttention else "source_mask"
    mask = np.ones([3, 7], bool)
    mask[1] = False
    (output,), gradients = value_and_gradients(lambda *x: layer(*x, **{name: mask}), inputs, layer.trainable_variables)
    # A query that sees no source gets the projection of 0, which is the bias.
    assert_close(output[1], np.zeros([7, HIDDEN]) + (0 if name == "mask" else layer.output_dense.bias), 1e-6)
    assert all(np.all(np.isfinite(g)) for g in gradients)
    others = tuple(tf.gather(x, [0, 2]) for x in inputs)
    assert_close(tf.gather(output, [0, 2]), layer(*others), 1e-5)


@kernels
def test_M17_cross_attention_with_both_masks_equals_trimmed_tensors(kernel):
    layer = make_layer(kernel, FavorAttention, short_convolution=4)
    query, source = inputs_for(layer, length=5, source_length=7)
    masks = {"query_mask": padding_masks(2, 5, 2)["right"], "source_mask": padding_masks(2, 7, 3)["left"]}
    output = layer(pad(query, masks["query_mask"]), pad(source, masks["source_mask"]), **masks)
    assert_close(output[:, :5], layer(query, source), 1e-5)
    assert np.all(output[:, 5:] == 0)


@both_layers
def test_M11_masks_of_embedding_and_masking_layers_reach_the_layer(layer_class):
    layer = make_layer(layer_class=layer_class, short_convolution=4)
    ids = [np.array([[3, 1, 2, 0, 0], [0, 5, 0, 1, 1]]), np.array([[0, 0, 7, 7, 1, 4], [2, 0, 0, 0, 0, 0]])]
    sizes, names = [SIZE, SOURCE_SIZE], ["query_mask", "source_mask"]
    if layer_class is SelfAttention:
        ids, sizes, names = ids[:1], sizes[:1], ["mask"]

    tokens = [keras.Input([None], dtype="int32") for _ in sizes]
    embeddings = [keras.layers.Embedding(9, size, mask_zero=True) for size in sizes]
    model = keras.Model(tokens, layer(*(embed(t) for embed, t in zip(embeddings, tokens))))
    embedded = [tf.identity(embed(i)) for embed, i in zip(embeddings, ids)]
    assert not any(hasattr(x, "_keras_mask") for x in embedded)
    expected = layer(*embedded, **{name: i != 0 for name, i in zip(names, ids)})
    assert_close(model(ids), expected, 1e-6)
    assert_close(model.predict(ids, verbose=0), expected, 1e-6)
    assert_close(layer(*(embed(i) for embed, i in zip(embeddings, ids))), expected, 1e-6)

    zeros = [tf.where(i[..., None] != 0, x, 0.0) for i, x in zip(ids, embedded)]
    assert_close(layer(*(keras.layers.Masking()(x) for x in zeros)), expected, 1e-6)


@both_layers
def test_M11_masks_reach_a_layer_with_a_cache(layer_class):
    layer = make_layer(layer_class=layer_class, causal=True, short_convolution=4)
    masked = [keras.layers.Masking()(tf.pad(x, [[0, 0], [2, 1], [0, 0]])) for x in inputs_for(layer)]
    outputs, _ = layer(*masked, cache=layer.init_cache(2))
    assert_close(outputs[:, 2:-1], layer(*inputs_for(layer)), 1e-5)


@both_layers
def test_M11_the_mask_goes_on_to_the_next_layer_and_stays_on_the_inputs(layer_class):
    layer = make_layer(layer_class=layer_class)
    masked = [keras.layers.Masking()(tf.pad(x, [[0, 0], [2, 1], [0, 0]])) for x in inputs_for(layer)]
    first = layer(*masked)
    assert np.array_equal(first._keras_mask, masked[0]._keras_mask)
    assert np.array_equal(layer(*masked), first)


@both_layers
def test_M13_no_warnings_on_masked_inputs(layer_class):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = make_layer(layer_class=layer_class, short_convolution=4, attention_dropout=0.1, causal=True)
        inputs = [keras.layers.Masking()(x) for x in inputs_for(layer)]
        layer(*inputs, training=True)
        layer(*inputs, cache=layer.init_cache(2))
        symbolic = symbolic_inputs(layer)
        keras.Model(symbolic, layer(*(keras.layers.Masking()(x) for x in symbolic)))(list(inputs_for(layer)))


def symbolic_inputs(layer):
    return [keras.Input([None, x.shape[-1]]) for x in inputs_for(layer)]


# Precision.


@causal_or_not
@kernels
def test_P1_long_sums_of_equal_keys_stay_exact(kernel, causal):
    # Where all keys and values are equal, attention gives that value, however long the sums are.
    layer, exact = (make_layer(kernel, causal=causal, dtype=dtype) for dtype in ("mixed_float16", "float32"))
    token = normal(1, 1, SIZE)
    outputs = layer(tf.repeat(token, 4096, axis=1))
    assert_close(outputs, tf.repeat(exact(token), 4096, axis=1), 2e-3)


@both_layers
def test_P9_sublayers_and_weights_have_the_dtype_of_the_layer(layer_class):
    layer = make_layer(layer_class=layer_class, short_convolution=4, dtype="bfloat16")
    sublayers = [x for x in vars(layer).values() if isinstance(x, keras.layers.Layer)]
    assert len(sublayers) == 4 + 3 + 1 and {x.dtype_policy.name for x in sublayers} == {"bfloat16"}
    assert {w.dtype for w in layer.trainable_weights} == {"bfloat16"}
    assert layer.projection_matrix.dtype == "float32"
    assert layer(*inputs_for(layer)).dtype == "bfloat16"


@pytest.fixture
def global_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def test_P10_projections_are_drawn_in_float32_under_every_policy_and_compiler(global_bfloat16):
    layer = make_layer(projection_scaling=1, nb_random_features=4)
    projection = layer.projection_matrix.numpy()
    assert projection.dtype == "float32"
    assert_close(projection @ projection.T, 4 * np.eye(4), 1e-5)
    assert layer(normal(1, 3, SIZE)).dtype == "bfloat16"

    def draw():
        return create_projection_matrix(8, 4, seed=3)

    assert draw().dtype == "float32"
    assert_close(tf.function(draw, jit_compile=True)(), draw(), 1e-6)


# Decoding.


@policies
@kernels
def test_D1_D2_D5_pieces_equal_the_whole(kernel, policy):
    # The dropout must not act in inference.
    layer = make_layer(kernel, causal=True, short_convolution=4, attention_dropout=0.1, dtype=policy)
    # The state sums over exp() of rounded numbers: its error is a few times that of the outputs.
    assert_streams(layer, normal(2, 12, SIZE), TOLERANCES[policy], 4 * TOLERANCES[policy])


@kernels
def test_D1_D2_token_by_token_in_a_compiled_loop(kernel):
    layer = make_layer(kernel, causal=True, short_convolution=4)
    inputs = normal(2, 70, SIZE)
    assert_streams_in_loop(layer, inputs)
    whole, final = stream(layer, inputs, [70])
    for sizes in ([1, 69], [31, 39], [64, 1, 5]):
        outputs, cache = stream(layer, inputs, sizes)
        assert_close(outputs, whole, 1e-5)
        assert_same_cache(cache, final, 1e-5)


def test_D1_token_by_token_under_xla():
    layer, inputs = make_layer(causal=True, short_convolution=4), normal(2, 9, SIZE)
    outputs, cache = loop_over_tokens(layer, jit_compile=True)(inputs)
    expected, expected_cache = stream(layer, inputs, [9])
    assert_close(outputs, expected, 1e-5)
    assert_same_cache(cache, expected_cache, 1e-5)


@pytest.mark.parametrize(("kernel", "convolution"), [("softmax", 4), ("relu", 0)])
@pytest.mark.parametrize("sizes", [[9], [4, 1, 4], [1] * 9], ids=["whole", "pieces", "tokens"])
def test_D2_padded_rows_of_different_lengths_stream_as_they_do_alone(kernel, convolution, sizes):
    layer = make_layer(kernel, causal=True, short_convolution=convolution)
    assert_streams_padded_rows(layer, normal(3, 9, SIZE), sizes)


def test_D2_cross_attention_streams_with_both_masks():
    layer = make_layer(layer_class=FavorAttention, causal=True, short_convolution=4)
    query, source = inputs_for(layer, length=9)
    masks = {
        f"{n}_mask": np.random.default_rng(i).uniform(size=[2, 9]) < 0.7 for i, n in enumerate(("query", "source"))
    }

    def piece(start, end, cache):
        part = slice(start, end)
        return layer(query[:, part], source[:, part], cache=cache, **{name: m[:, part] for name, m in masks.items()})

    expected, expected_cache = piece(0, 9, layer.init_cache(2))
    assert_close(expected, layer(query, source, **masks), 1e-6)
    first, cache = piece(0, 4, layer.init_cache(2))
    rest, cache = piece(4, 9, cache)
    assert_close(tf.concat([first, rest], axis=1), expected, 1e-5)
    assert_same_cache(cache, expected_cache, 1e-5)


@kernels
@pytest.mark.parametrize("convolution", [0, 4], ids=["plain", "convolution"])
def test_D6_the_first_token_needs_no_past(kernel, convolution):
    layer = make_layer(kernel, causal=True, short_convolution=convolution)
    (inputs,) = inputs_for(layer)
    whole = layer(inputs)
    first, _ = layer(inputs[:, :1], cache=layer.init_cache(2))
    assert_close(first, whole[:, :1], 1e-5)
    assert_close(layer(inputs[:, :1], cache=None), whole[:, :1], 1e-5)


def test_D9_beams_can_be_reordered():
    layer, inputs, order = make_layer(causal=True, short_convolution=4), normal(3, 8, SIZE), [2, 0, 2, 1]
    _, cache = layer(inputs[:, :5], cache=layer.init_cache(3))
    cache = {name: tf.gather(tensor, order) for name, tensor in cache.items()}
    outputs, _ = layer(tf.gather(inputs, order)[:, 5:], cache=cache)
    assert_close(outputs, tf.gather(layer(inputs), order)[:, 5:], 1e-5)


def test_D10_a_step_does_not_get_slower_or_larger_with_the_position():
    layer = make_layer(causal=True, short_convolution=4)
    step = tf.function(lambda x, cache: layer(x, cache=cache), autograph=False)
    shapes = {name: tensor.shape for name, tensor in layer.init_cache(1).items()}
    caches = [stream(layer, normal(1, length, SIZE), [length])[1] for length in (100, 4000)]
    assert all({name: tensor.shape for name, tensor in cache.items()} == shapes for cache in caches)
    token, times = normal(1, 1, SIZE), ([], [])
    for _ in range(101):
        for cache, seconds in zip(caches, times):
            start = time.perf_counter()
            step(token, cache)
            seconds.append(time.perf_counter() - start)
    assert step.experimental_get_tracing_count() == 1
    assert np.median(times[1][1:]) < 1.5 * np.median(times[0][1:])


@both_layers
def test_caches_of_other_contents_are_refused(layer_class):
    layer = make_layer(layer_class=layer_class, causal=True, short_convolution=4)
    cache = layer.init_cache(2)
    incomplete = {name: tensor for name, tensor in cache.items() if name != "key_inputs"}
    for wrong in (incomplete, {**cache, "position": tf.zeros([2])}, list(cache.values()), tf.zeros([2])):
        with pytest.raises(ValueError, match="cache must be a dict of .*key_inputs.* received"):
            layer(*inputs_for(layer), cache=wrong)


@pytest.mark.parametrize(
    "name", ["numerator", "denominator", "log_scale", "query_inputs", "key_inputs", "value_inputs"]
)
def test_caches_of_another_batch_size_are_refused(name):
    layer = make_layer(causal=True, short_convolution=4)
    with pytest.raises(ValueError, match=name):
        layer(normal(2, 3, SIZE), cache={**layer.init_cache(2), name: layer.init_cache(3)[name]})


@keras.saving.register_keras_serializable(package="test")
def plain_function(data, is_query, projection_matrix=None, numerical_stabilizer=1e-3):
    return tf.nn.relu(tf.einsum("bthd,md->bthm", data, projection_matrix)) + numerical_stabilizer


def test_noncausal_layers_and_functions_have_no_cache():
    cache = make_layer(causal=True).init_cache(2)
    for layer, reason in (
        (make_layer(), "causal=False|source must be None"),
        (make_layer(plain_function, causal=True), "cache needs a KernelTransformation"),
    ):
        with pytest.raises(ValueError, match=reason):
            layer.init_cache(2)
        with pytest.raises(ValueError, match=reason):
            layer(normal(2, 3, SIZE), cache=cache)


@policies
def test_a_step_as_a_functional_model_keeps_a_float32_state(policy):
    layer = make_layer(causal=True, short_convolution=4, dtype=policy)
    cache = {n: keras.Input(c.shape[1:], dtype="float32", name=n) for n, c in layer.init_cache(1).items()}
    x = keras.Input([None, SIZE], name="x")
    model = keras.Model({"x": x, **cache}, layer(x, cache=cache))
    inputs = normal(2, 16, SIZE)
    outputs, state = [], layer.init_cache(2)
    for start in range(0, 16, 4):
        output, state = model({"x": inputs[:, start : start + 4], **state})
        outputs.append(output)
    expected, expected_state = stream(layer, inputs, [4] * 4)
    assert_close(tf.concat(outputs, axis=1), expected, 1e-6)
    assert_same_cache(state, expected_state, 1e-6)


# Shapes and compilers.


@kernels
def test_H4_cross_attention_of_different_lengths(kernel):
    layer = make_layer(kernel, FavorAttention)
    query, source = inputs_for(layer, length=5, source_length=9)
    assert_close(layer(query, source), naive_output(layer, query, source), 1e-5)
    with pytest.raises(ValueError, match="causal.* one length"):
        make_layer(kernel, FavorAttention, causal=True)(query, source)


def test_H4_causal_cross_attention_of_different_lengths_is_refused_symbolically():
    with pytest.raises(ValueError, match="causal.* one length"):
        FavorAttention(HIDDEN, HEADS, causal=True)(keras.Input([5, SIZE]), keras.Input([9, SOURCE_SIZE]))


@causal_or_not
def test_H12_nothing_remembers_the_length(causal):
    layer = make_layer(causal=causal, short_convolution=4)
    graph = tf.function(layer, autograph=False, reduce_retracing=True)
    for length in (50, 37, 50):
        inputs = normal(2, length, SIZE, seed=length)
        expected = naive_output(layer, inputs)
        assert_close(layer(inputs), expected, 1e-5)
        assert_close(graph(inputs), expected, 1e-5)


@both_layers
def test_H13_symbolic_shapes_and_dtypes(layer_class):
    layer = make_layer(layer_class=layer_class, dtype="mixed_float16", causal=True)
    symbolic = symbolic_inputs(layer)
    output = layer(*symbolic)
    assert (output.shape, output.dtype) == ((None, None, HIDDEN), "float16")
    assert layer.compute_output_shape(*(x.shape for x in symbolic)) == (None, None, HIDDEN)
    spec = layer.compute_output_spec(*symbolic)
    assert (spec.shape, spec.dtype) == ((None, None, HIDDEN), "float16")
    lines = []
    keras.Model(symbolic, output).summary(print_fn=lambda line, line_break=None: lines.append(line))
    assert f"(None, None, {HIDDEN})" in "".join(lines)

    cache = {n: keras.Input(c.shape[1:], dtype="float32") for n, c in layer.init_cache(1).items()}
    output, new_cache = layer(*symbolic, cache=cache)
    assert output.shape == (None, None, HIDDEN)
    assert {n: (c.shape, c.dtype) for n, c in new_cache.items()} == {n: (c.shape, "float32") for n, c in cache.items()}


def test_H13_time_distributed():
    layer = make_layer(short_convolution=4)
    distributed = keras.layers.TimeDistributed(layer)
    assert distributed(keras.Input([None, None, SIZE])).shape == (None, None, None, HIDDEN)
    inputs = normal(2, 3, 7, SIZE)
    assert_close(distributed(inputs), tf.stack([layer(inputs[:, i]) for i in range(3)], axis=1), 1e-6)


@pytest.mark.parametrize(
    ("kernel", "causal", "policy", "convolution"),
    [
        ("softmax", True, "float32", 4),
        ("softmax", False, "mixed_bfloat16", 0),
        ("relu", True, "mixed_float16", 0),
        ("relu", False, "float32", 0),
    ],
)
def test_H15_masked_layer_is_the_same_in_a_graph_and_under_xla(kernel, causal, policy, convolution):
    layer = make_layer(kernel, causal=causal, short_convolution=convolution, dtype=policy)
    mask = tf.constant(padding_masks(2, 6, 3)["interior"], "int32")
    assert_same_when_compiled(
        lambda x, mask: layer(x, mask=mask), (normal(2, 9, SIZE), mask), layer.trainable_variables, TOLERANCES[policy]
    )


def test_H15_scan_over_chunks_is_the_same_in_a_graph_and_under_xla():
    layer = make_layer(causal=True)
    assert_same_when_compiled(layer, (normal(2, 70, SIZE),), layer.trainable_variables, unknown_shapes=True)


# Building and refusing.


@pytest.mark.parametrize("shape", [(2, SIZE), (2, 3, 4, SIZE), (SIZE,)], ids=str)
@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
@both_layers
def test_A1_inputs_of_another_rank_are_refused(layer_class, built, shape):
    layer = make_layer(layer_class=layer_class) if built else layer_class(HIDDEN, HEADS)
    arguments = (normal(*shape), *inputs_for(layer)[1:])
    with pytest.raises(ValueError, match=r"\[batch, length, features\]"):
        layer(*arguments)


@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
def test_A1_sources_of_another_rank_are_refused(built):
    layer = make_layer(layer_class=FavorAttention) if built else FavorAttention(HIDDEN, HEADS)
    with pytest.raises(ValueError, match=r"source must be \[batch, length, features\]"):
        layer(normal(2, 7, SIZE), normal(2, SOURCE_SIZE))


@both_layers
def test_A1_inputs_of_another_size_than_built_for_are_refused(layer_class):
    layer = make_layer(layer_class=layer_class)
    with pytest.raises(ValueError, match="features"):
        layer(*(normal(2, 7, SIZE + 3) for _ in inputs_for(layer)))


def test_A1_heads_must_divide_the_hidden_size():
    assert SelfAttention(24, 4)(normal(1, 240, 24)).shape == (1, 240, 24)
    with pytest.raises(ValueError, match="hidden_size=24, num_heads=5"):
        SelfAttention(24, 5)


@both_layers
def test_A2_batch_comes_first(layer_class):
    assert "[batch, length" in inspect.getdoc(layer_class)
    layer = make_layer(layer_class=layer_class)
    time_first = [tf.transpose(x, [1, 0, 2]) for x in inputs_for(layer)]
    name = "mask" if layer_class is SelfAttention else "source_mask"
    with pytest.raises(ValueError, match="batch, length"):
        layer(*time_first, **{name: np.ones([2, 7])})


def test_batches_of_different_sizes_are_refused():
    layer = make_layer(layer_class=FavorAttention)
    with pytest.raises(ValueError, match="batch"):
        layer(normal(2, 7, SIZE), normal(3, 7, SOURCE_SIZE))


def test_A5_symbolic_tensors_in_the_function_work_or_lead_to_the_layer():
    x = keras.Input([7, HEADS, 4])
    try:
        output = favor_attention(x, x, x, "relu", False)
    except ValueError as error:
        assert "FavorAttention" in str(error)
    else:
        assert output.shape == (None, 7, HEADS, 4)


def test_A6_weights_are_the_same_wherever_the_layer_is_built():
    def new_layer(seed=5):
        return SelfAttention(HIDDEN, HEADS, kernel_transformation="softmax", seed=seed)

    eager, symbolic, traced, replicated, other = new_layer(), new_layer(), new_layer(), new_layer(), new_layer(6)
    eager(normal(1, 3, SIZE))
    symbolic(keras.Input([None, SIZE]))
    tf.function(lambda x: traced(x), autograph=False)(normal(1, 3, SIZE))
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        replicated.build([None, None, SIZE])
    for layer in (symbolic, traced, replicated):
        assert [w.shape for w in layer.weights] == [w.shape for w in eager.weights]
        assert_close(layer.projection_matrix, eager.projection_matrix, 1e-7)
    other.build([None, None, SIZE])
    assert np.abs(other.projection_matrix - eager.projection_matrix).max() > 0.1


def test_S9_S11_build_makes_all_weights():
    for layer_class in LAYERS:
        built = make_layer(layer_class=layer_class, short_convolution=4)
        called = layer_class.from_config(built.get_config())
        called(*inputs_for(called))
        kinds = [[(w.path.split("/", 1)[1], w.shape, w.dtype, w.trainable) for w in x.weights] for x in (built, called)]
        assert kinds[0] == kinds[1] and built.count_params() == called.count_params()
        called.set_weights(built.get_weights())
        assert np.array_equal(called(*inputs_for(called)), built(*inputs_for(built)))


def test_A1_the_number_of_weights_is_that_of_the_formula():
    layer = make_layer(layer_class=FavorAttention, short_convolution=4)
    projections = (SIZE + 2 * SOURCE_SIZE + HIDDEN) * HIDDEN + 4 * HIDDEN
    number_of_draws = 1
    assert layer.count_params() == projections + 3 * 4 * HIDDEN + FEATURES * HIDDEN // HEADS + number_of_draws
    assert make_layer(nb_random_features=0).projection_matrix.shape == (math.ceil(4 * math.log(4)), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer, received 0"),
        ({"hidden_size": 12.0}, "hidden_size must be a positive integer, received 12.0"),
        ({"hidden_size": True}, "hidden_size must be a positive integer, received True"),
        ({"num_heads": -3}, "num_heads must be a positive integer, received -3"),
        ({"num_heads": 5}, "hidden_size must be divisible by num_heads, received hidden_size=12, num_heads=5"),
        ({"attention_dropout": 1.0}, "attention_dropout must be in .0, 1., received 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout must be in .0, 1., received -0.1"),
        ({"kernel_transformation": "rbf"}, "kernel_transformation must be one of .*relu.*softmax.* received 'rbf'"),
        ({"kernel_transformation": 3}, "kernel_transformation must be one of .* received 3"),
        ({"numerical_stabilizer": -1e-3}, "numerical_stabilizer must be at least 0 or None, received -0.001"),
        (
            {"projection_matrix_type": "gaussian"},
            "projection_matrix_type must be None or one of .* received 'gaussian'",
        ),
        ({"nb_random_features": -1}, "nb_random_features must be 0 or a positive integer, received -1"),
        ({"nb_random_features": 8.0}, "nb_random_features must be 0 or a positive integer, received 8.0"),
        ({"nb_random_features": 8, "projection_matrix_type": None}, "nb_random_features needs a projection.*=8"),
        ({"projection_scaling": 2}, "projection_scaling must be 0 or 1, received 2"),
        ({"short_convolution": -4}, "short_convolution must be 0 or a positive integer, received -4"),
        ({"short_convolution": 2.5}, "short_convolution must be 0 or a positive integer, received 2.5"),
        ({"seed": "one"}, "seed must be .* received 'one'"),
        ({"seed": 1.5}, "seed must be .* received 1.5"),
        ({"redraw_interval": -1}, "redraw_interval must be 0 or a positive integer, received -1"),
        ({"redraw_interval": 5, "projection_matrix_type": None}, "redraw_interval needs a projection.*=5"),
        ({"window": 3}, "window"),
    ],
    ids=lambda x: ", ".join(f"{name}={value}" for name, value in x.items()) if isinstance(x, dict) else "",
)
def test_bad_arguments_are_refused(options, message):
    settings = {
        "hidden_size": HIDDEN,
        "num_heads": HEADS,
        "kernel_transformation": "relu",
        "projection_matrix_type": "iid",
    }
    with pytest.raises(ValueError, match=message):
        SelfAttention(**{**settings, **options})


# Every argument does something, and is in the config.

OTHER_SETTINGS = {
    "hidden_size": 24,
    "num_heads": 2,
    "attention_dropout": 0.25,
    "kernel_transformation": "softmax",
    "numerical_stabilizer": 0.5,
    "causal": True,
    "projection_matrix_type": "iid",
    "nb_random_features": 10,
    "projection_scaling": 1,
    "redraw_interval": 5,
    "short_convolution": 3,
    "use_bias": True,
    "kernel_initializer": keras.initializers.RandomUniform(0.5, 0.6),
    "bias_initializer": keras.initializers.Constant(0.25),
    "kernel_regularizer": keras.regularizers.L2(0.5),
    "bias_regularizer": keras.regularizers.L1(0.25),
    "activity_regularizer": keras.regularizers.L2(0.125),
    "kernel_constraint": keras.constraints.NonNeg(),
    "bias_constraint": keras.constraints.MaxNorm(0.1),
    "seed": 7,
}


@both_layers
def test_S15_config_is_complete(layer_class):
    names = [n for n in inspect.signature(FavorAttention.__init__).parameters if n not in ("self", "kwargs")]
    assert sorted(names) == sorted(OTHER_SETTINGS), "a new argument needs a value other than its default here"
    layer = layer_class(**OTHER_SETTINGS, name="mine", trainable=False, dtype="mixed_float16")
    config = layer.get_config()
    assert {*names, "name", "trainable", "dtype"} <= set(config)
    again = layer_class.from_config(config)
    assert again.get_config() == config
    assert (again.name, again.trainable, again.dtype_policy.name) == ("mine", False, "mixed_float16")
    renamed = layer_class.from_config({**config, "name": "z", "trainable": True, "dtype": "float32"})
    assert (renamed.name, renamed.trainable, renamed.compute_dtype) == ("z", True, "float32")
    for made in (layer, renamed):
        made(*inputs_for(made))
    assert layer.trainable_weights == [] and len(renamed.trainable_weights) == 4 + 4 + 3
    assert_close(renamed.projection_matrix, layer.projection_matrix, 1e-7)


TESTED_ELSEWHERE = ("initializer", "regularizer", "constraint", "redraw_interval")


@pytest.mark.parametrize("name", [name for name in OTHER_SETTINGS if not name.endswith(TESTED_ELSEWHERE)])
def test_every_setting_changes_the_output(name):
    settings = {
        "kernel_transformation": "relu",
        "projection_matrix_type": "orthogonal",
        "nb_random_features": FEATURES,
        "bias_initializer": "ones",
        "attention_dropout": 0.5,
        "seed": 1,
    }
    outputs = []
    for changed in ({}, {name: OTHER_SETTINGS[name]}):
        keras.utils.set_random_seed(0)
        layer = SelfAttention(**{"hidden_size": HIDDEN, "num_heads": HEADS, **settings, **changed})
        outputs.append(layer(normal(2, 7, SIZE), training=True))
    different_shape = outputs[0].shape != outputs[1].shape
    assert different_shape == (name == "hidden_size")
    assert different_shape or np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_initializers_biases_regularizers_and_constraints_take_effect():
    layer = SelfAttention(**OTHER_SETTINGS)
    inputs = normal(2, 7, SIZE)
    output = layer(inputs)
    denses = [layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense]
    for dense in denses:
        assert np.all((dense.kernel >= 0.5) & (dense.kernel <= 0.6)) and np.all(dense.bias == 0.25)
        assert isinstance(dense.kernel.constraint, keras.constraints.NonNeg)
        assert isinstance(dense.bias.constraint, keras.constraints.MaxNorm)
    assert np.abs(layer.query_dense.kernel - layer.key_dense.kernel).max() > 0
    expected = [0.5 * np.sum(d.kernel.numpy() ** 2) for d in denses] + [0.25 * np.sum(np.abs(d.bias)) for d in denses]
    assert_close(sum(layer.losses), sum(expected) + 0.125 * np.sum(output**2) / len(inputs), 1e-5)
    layer(inputs, cache=layer.init_cache(2))
    assert np.isfinite(sum(layer.losses)), "the cache is no output to regularise"


def test_layers_without_biases_have_none():
    layer = make_layer(use_bias=False)
    assert len(layer.trainable_weights) == 4
    assert all(dense.bias is None for dense in (layer.query_dense, layer.output_dense))


@keras.saving.register_keras_serializable(package="test")
class ExpKernel(KernelTransformation):
    """exp(power x), an own kernel with a config."""

    def __init__(self, power=1.0):
        self.power = power

    def scaled_features(self, data, is_query, projection_matrix=None, numerical_stabilizer=None):
        log_scale = tf.reduce_max(self.power * data, axis=-1)
        return tf.exp(self.power * data - log_scale[..., None]), log_scale

    def get_config(self):
        return {"power": self.power}


@pytest.mark.parametrize(
    ("kernel", "projection"), [(ExpKernel(0.5), None), (plain_function, "iid")], ids=["object", "function"]
)
def test_own_kernels_work_and_are_in_the_config(kernel, projection):
    sizes = {"projection_matrix_type": projection, "nb_random_features": FEATURES if projection else 0}
    layer = make_layer(kernel, causal=True, **sizes)
    inputs = normal(2, 70, SIZE)
    assert_causal(layer, inputs)
    again = SelfAttention.from_config(layer.get_config())
    again.build([None, None, SIZE])
    again.set_weights(layer.get_weights())
    assert np.array_equal(again(inputs), layer(inputs))


def test_unregistered_kernels_are_refused_in_the_config():
    for kernel in (lambda data, is_query, projection_matrix, stabilizer: data, type("Mine", (ExpKernel,), {})()):
        with pytest.raises(ValueError, match="kernel_transformation.*register_keras_serializable"):
            SelfAttention(HIDDEN, HEADS, kernel_transformation=kernel).get_config()


def test_lora_on_the_projections(tmp_path):
    layer = make_layer()
    x = keras.Input([None, SIZE])
    model, inputs = keras.Model(x, layer(x)), normal(2, 7, SIZE)
    before = model(inputs)
    denses = [layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense]
    for dense in denses:
        dense.enable_lora(2)
    assert_close(model(inputs), before, 1e-6)
    assert all(any(w is dense.lora_kernel_b for w in layer.trainable_weights) for dense in denses)
    assert not any(w is dense.kernel for dense in denses for w in layer.trainable_weights)
    for dense in denses:
        dense.lora_kernel_b.assign(tf.fill(dense.lora_kernel_b.shape, 0.3))
    adapted = model(inputs)
    assert np.abs(adapted - before).max() > 0.01
    model.save(tmp_path / "model.keras")
    assert_close(keras.models.load_model(tmp_path / "model.keras")(inputs), adapted, 1e-5)


# Dropout.


def test_Q1_dropout_leaves_sources_out_of_each_head_with_its_rate():
    layer = make_layer("relu", FavorAttention, attention_dropout=0.25, use_bias=False)
    layer.output_dense.kernel.assign(np.eye(HIDDEN).reshape(HEADS, HIDDEN // HEADS, HIDDEN))
    source = tf.repeat(normal(1, 1, SOURCE_SIZE), 4000, axis=0)
    # With one source every head's output is the value, or zeros where it is left out.
    outputs = layer(tf.ones([4000, 1, SIZE]), source, training=True).numpy().reshape(4000, HEADS, -1)
    value = layer.value_dense(source[:1]).numpy().reshape(1, HEADS, -1)
    left_out = np.all(outputs == 0, axis=-1)
    assert_close(outputs, np.where(left_out[..., None], 0, value / 0.75), 1e-6)
    assert np.all(np.abs(left_out.mean(axis=0) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000))
    for one, other in itertools.combinations(left_out.T, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(4000)


@causal_or_not
@kernels
def test_Q1_dropout_keeps_the_mean_and_is_off_in_inference(kernel, causal):
    layer = make_layer(kernel, causal=causal, attention_dropout=0.5)
    inputs = normal(1, 5, SIZE)
    many = tf.repeat(inputs, 4000, axis=0)
    evaluated = layer(inputs).numpy()
    assert np.array_equal(layer(inputs, training=False), evaluated) and np.array_equal(layer(inputs), evaluated)
    outputs = layer(many, training=True).numpy()
    standard_error = outputs.std(axis=0) / math.sqrt(len(many))
    assert standard_error.min() > 0
    assert np.all(np.abs(outputs.mean(axis=0) - evaluated[0]) < 5 * standard_error)
    assert np.abs(layer(many, training=True) - outputs).max() > 0.01, "every call draws anew"


def test_Q1_dropout_depends_on_the_seed_and_rate_zero_is_none():
    inputs = normal(2, 7, SIZE)

    def outputs(seed, dropout):
        # Without a projection the seed is that of the dropout alone.
        options = {"projection_matrix_type": None, "nb_random_features": 0}
        return make_layer("relu", attention_dropout=dropout, seed=seed, **options)(inputs, training=True)

    assert np.array_equal(outputs(1, 0.5), outputs(1, 0.5))
    assert np.abs(outputs(1, 0.5) - outputs(2, 0.5)).max() > 0.01
    assert np.array_equal(outputs(1, 0.0), outputs(2, 0.0))
