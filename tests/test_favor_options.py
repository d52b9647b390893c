"""Caches of the original code, source caches, biases, redrawing, and weights of MultiHeadAttention."""

import keras
import numpy as np
import oracles
import pytest
import tensorflow as tf

from favor_keras import CausalLM, FavorAttention, RedrawProjections, SelfAttention
from favor_keras.callbacks import layers_within
from favor_keras.diagnostics import approximation_error, layer_approximation_error
from favor_keras.ops import make_fast_generalized_attention, make_fast_softmax_attention
from favor_keras.ops.kernels import KERNELS

BATCH, LENGTH, HIDDEN, HEADS = 2, 12, 16, 2


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def layer_of(cls=SelfAttention, **options):
    return cls(HIDDEN, HEADS, seed=1, **options)


def empty_keys(length):
    return {name: tf.zeros([BATCH, length, HEADS, HIDDEN // HEADS]) for name in ("k", "v")}


@pytest.fixture(params=["relu", "softmax"])
def kernel(request):
    return request.param


# The original cache


def test_growing_cache_of_keys_equals_the_whole(kernel):
    layer, x = layer_of(kernel_transformation=kernel, causal=True), normal(BATCH, LENGTH, HIDDEN)
    cache, outputs = empty_keys(0), []
    for start, end in ((0, 1), (1, 6), (6, 12)):
        output, cache = layer(x[:, start:end], cache=cache)
        outputs.append(output)
        assert cache["k"].shape[1] == cache["v"].shape[1] == end
    oracles.assert_close(tf.concat(outputs, 1), layer(x), 1e-5)


def test_cache_of_keys_of_fixed_length_equals_the_whole_in_a_compiled_loop(kernel):
    layer, x = layer_of(kernel_transformation=kernel, causal=True), normal(BATCH, LENGTH, HIDDEN)
    expected = layer(x)

    @tf.function(jit_compile=True)
    def decode(x):
        outputs = tf.TensorArray(tf.float32, LENGTH, element_shape=[BATCH, HIDDEN])
        cache = empty_keys(LENGTH + 4)
        for i in tf.range(LENGTH):
            output, cache = layer(x[:, i][:, None], cache=cache, decode_loop_step=i)
            outputs = outputs.write(i, output[:, 0])
        return tf.transpose(outputs.stack(), [1, 0, 2])

    oracles.assert_close(decode(x), expected, 1e-5)


def test_cache_of_keys_of_a_layer_that_is_not_causal_sees_all_keys(kernel):
    layer, x = layer_of(kernel_transformation=kernel), normal(BATCH, LENGTH, HIDDEN)
    whole = layer(x)
    _, cache = layer(x[:, :8], cache=empty_keys(0))
    last, _ = layer(x[:, 8:], cache=cache)
    oracles.assert_close(last, whole[:, 8:], 1e-5)


def test_full_cache_of_keys_and_other_misuse_are_refused():
    layer, x = layer_of(causal=True), normal(BATCH, 3, HIDDEN)
    with pytest.raises(ValueError, match="decode_loop_step: a cache of length 4 has no room for 3 positions after 2"):
        layer(x, cache=empty_keys(4), decode_loop_step=2)
    with pytest.raises(ValueError, match="decode_loop_step needs a cache"):
        layer(x, decode_loop_step=2)
    with pytest.raises(ValueError, match="cannot be kept"):
        layer(x, mask=np.ones([BATCH, 3]), cache=empty_keys(0))
    with pytest.raises(ValueError, match="short_convolution"):
        layer_of(causal=True, short_convolution=4)(x, cache=empty_keys(0))


# The source cache


@pytest.mark.parametrize("short_convolution", [0, 4])
def test_source_state_is_computed_once_and_queried_in_steps(kernel, short_convolution):
    layer = layer_of(FavorAttention, kernel_transformation=kernel, short_convolution=short_convolution)
    query, source = normal(BATCH, LENGTH, HIDDEN), normal(BATCH, 7, 24, seed=1)
    mask, bias = np.array([[1] * 7, [0, 1, 1, 0, 1, 1, 0]]), normal(BATCH, HEADS, 1, 7, seed=2)
    whole = layer(query, source, source_mask=mask, bias=bias)
    cache, outputs = layer.source_cache(source, mask, bias), []
    sizes = {name: tensor.shape for name, tensor in cache.items()}
    for start, end in ((0, 1), (1, 2), (2, 12)):
        output, cache = layer(query[:, start:end], cache=cache)
        outputs.append(output)
    oracles.assert_close(tf.concat(outputs, 1), whole, 1e-5)
    assert sizes == {name: tensor.shape for name, tensor in cache.items()}


def test_source_cache_refusals():
    query, source = normal(BATCH, 3, HIDDEN), normal(BATCH, 4, HIDDEN)
    layer = layer_of(FavorAttention)
    with pytest.raises(ValueError, match="built=False"):
        layer.source_cache(source)
    layer(query, source)
    with pytest.raises(ValueError, match="source must be given"):
        layer(query)
    with pytest.raises(ValueError, match="source must be None"):
        layer(query, source, cache=layer.source_cache(source))
    with pytest.raises(ValueError, match="init_cache needs a causal layer"):
        layer.init_cache(BATCH)


# Bias


def naive_attention(layer, x, bias):
    """ReLU attention of float64 NumPy with exp(bias) on the weights [B, H, T, S]."""
    x = x.astype("float64")
    query, key, value = (
        np.einsum("btc,chd->bthd", x, getattr(layer, f"{name}_dense").kernel.numpy().astype("float64"))
        for name in ("query", "key", "value")
    )
    features = [np.maximum(data, 0) + 1e-3 for data in (query, key)]
    weights = np.einsum("bthd,bshd->bhts", *features) * np.exp(bias)
    if layer.causal:
        weights = np.tril(weights)
    read = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)
    return np.einsum("bthd,hdc->btc", read, layer.output_dense.kernel.numpy())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(BATCH, HEADS, 1, LENGTH), (1, HEADS, 1, LENGTH), (BATCH, 1, 1, LENGTH)])
def test_bias_of_the_key_is_added_exactly(shape, causal):
    layer, x, bias = layer_of(causal=causal), normal(BATCH, LENGTH, HIDDEN), 3 * normal(*shape, seed=1)
    oracles.assert_close(layer(x, bias=bias), naive_attention(layer, x, bias), 1e-5)


def test_bias_and_mask_go_together():
    layer, x, bias = layer_of(), normal(BATCH, LENGTH, HIDDEN), normal(1, HEADS, 1, LENGTH, seed=1)
    layer(x)
    mask = np.arange(LENGTH)[None] < [[12], [5]]
    hidden = np.where(mask, 0, -np.inf)[:, None, None]
    expected = naive_attention(layer, x, bias + hidden) * mask[..., None]
    oracles.assert_close(layer(x, bias=bias, mask=mask), expected, 1e-5)


def test_original_bias_of_pairs_is_taken_where_it_can_be():
    x, row = normal(BATCH, LENGTH, HIDDEN), normal(1, 1, 1, LENGTH, seed=1)
    layer = layer_of()
    constant_over_queries = np.repeat(row, LENGTH, axis=2)
    oracles.assert_close(layer(x, bias=constant_over_queries), layer(x, bias=row), 1e-6)
    look_ahead = np.triu(np.full([LENGTH, LENGTH], -1e9, "float32"), 1)[None, None]
    causal = layer_of(causal=True)
    oracles.assert_close(causal(x, bias=look_ahead), causal(x), 1e-6)
    with pytest.raises(ValueError, match="bias must depend on the source position alone"):
        layer(x, bias=look_ahead)
    with pytest.raises(ValueError, match="bias must depend on the source position alone"):
        causal(x, bias=normal(1, 1, LENGTH, LENGTH))
    with pytest.raises(ValueError, match="not a constant"):
        tf.function(lambda b: layer(x, bias=b))(tf.constant(constant_over_queries))
    with pytest.raises(ValueError, match="received"):
        layer(x, bias=normal(LENGTH, LENGTH))


# Every causal kernel


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_streams_with_masks_and_bias(name, policy):
    projection = {"projection_matrix_type": "orthogonal", "nb_random_features": 12}
    layer = layer_of(kernel_transformation=name, causal=True, short_convolution=3, dtype=policy, **projection)
    bias = 0.5 * normal(2, HEADS, 1, LENGTH, seed=1)
    x = normal(2, LENGTH, HIDDEN)
    mask = np.array([[0, 0, 0] + [1] * 9, [1] * 4 + [0] * 2 + [1] * 4 + [0] * 2])
    whole = tf.cast(layer(x, mask=mask, bias=bias), "float32")
    _, expected = layer(x, mask=mask, bias=bias, cache=layer.init_cache(2))

    @tf.function
    def token_by_token(x, mask, bias):
        outputs = tf.TensorArray(tf.float32, LENGTH, element_shape=[2, HIDDEN])
        cache = layer.init_cache(2)
        for i in tf.range(LENGTH):
            # Keras multiplies inputs of an unknown length with other roundings, so the one position must be visible.
            output, cache = layer(x[:, i, None], mask=mask[:, i, None], bias=bias[..., i, None], cache=cache)
            outputs = outputs.write(i, tf.cast(output[:, 0], "float32"))
        return tf.transpose(outputs.stack(), [1, 0, 2]), cache

    outputs, cache = token_by_token(tf.constant(x), tf.constant(mask), tf.constant(bias))
    has_both_signs = KERNELS[name].denominator_stabilizer > 0
    one_rounding = 2.0**-8
    float32_bound = 3e-4 if has_both_signs else 1e-5
    oracles.assert_close(outputs, whole, float32_bound if policy == "float32" else one_rounding)
    assert all(tensor.dtype == tf.float32 for tensor in cache.values())
    for key in ("numerator", "denominator"):
        oracles.assert_close(cache[key], expected[key], 1e-5 if policy == "float32" else one_rounding)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_is_finite_for_large_inputs_zeros_and_rows_without_keys(name, causal):
    layer = layer_of(kernel_transformation=name, causal=causal)
    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    for factor in (1e4, 0.0):
        x = tf.constant(factor * normal(3, 4, HIDDEN))
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, mask=mask)
            loss = tf.reduce_sum(output)
        gradients = tape.gradient(loss, [x, *layer.trainable_variables])
        assert all(np.isfinite(np.asarray(tensor)).all() for tensor in (output, *gradients))
        assert not np.any(output[2]) and not np.any(gradients[0][2])


# Redrawing


def redrawn_layer(**options):
    options = {"projection_matrix_type": "orthogonal", "redraw_interval": 3, **options}
    layer = layer_of(**options)
    layer.build((None, None, HIDDEN))
    return layer


def test_redraw_depends_on_the_seed_and_the_number_of_draws_alone():
    first, second, third = redrawn_layer(), redrawn_layer(), redrawn_layer()
    original = first.projection_matrix.numpy()
    for redraw in (first.redraw, tf.function(second.redraw), tf.function(third.redraw, jit_compile=True)):
        redraw()
        redraw()
    assert int(first.draws) == 2
    oracles.assert_close(second.projection_matrix, first.projection_matrix, 1e-6)
    oracles.assert_close(third.projection_matrix, first.projection_matrix, 1e-5)
    assert np.abs(original - first.projection_matrix.numpy()).max() > 0.1


def fit(model, steps, callbacks=(), steps_per_execution=1, **options):
    x = normal(steps, 4, HIDDEN)
    model.compile(keras.optimizers.SGD(1e-3), "mse", steps_per_execution=steps_per_execution, **options)
    if model.built:
        model.optimizer.build(model.trainable_variables)
    return model.fit(x, x, batch_size=1, verbose=0, shuffle=False, callbacks=list(callbacks))


def test_callback_redraws_exactly_every_interval_F5_A10():
    layer = redrawn_layer()
    model = keras.Sequential([layer])
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(int(layer.draws))

    fit(model, 7, [RedrawProjections(), Watch()])
    assert seen == [0, 0, 1, 1, 1, 2, 2]
    before = layer.projection_matrix.numpy()
    model.predict(normal(4, 4, HIDDEN), verbose=0)
    model.evaluate(normal(4, 4, HIDDEN), normal(4, 4, HIDDEN), verbose=0)
    np.testing.assert_array_equal(layer.projection_matrix.numpy(), before)


def test_callback_counts_optimizer_steps_not_batches_of_the_callback():
    layer = redrawn_layer()
    fit(keras.Sequential([layer]), 12, [RedrawProjections()], steps_per_execution=6)
    assert int(layer.draws) == 4


def test_redrawing_goes_on_after_a_reload(tmp_path):
    layer = redrawn_layer()
    layer.redraw()
    model = keras.Sequential([keras.Input([None, HIDDEN]), layer])
    model.save(tmp_path / "model.keras")
    reloaded = keras.saving.load_model(tmp_path / "model.keras").layers[0]
    for each in (layer, reloaded):
        each.redraw()
    assert int(reloaded.draws) == 2
    np.testing.assert_array_equal(reloaded.projection_matrix.numpy(), layer.projection_matrix.numpy())


def test_redraw_interval_without_the_callback_warns_and_misuse_is_refused():
    model = keras.Sequential([redrawn_layer()])
    with pytest.warns(UserWarning, match="RedrawProjections"):
        fit(model, 2)
    with pytest.raises(ValueError, match="found none"):
        fit(keras.Sequential([layer_of()]), 2, [RedrawProjections()])
    with pytest.raises(ValueError, match="redraw needs a built layer with a projection"):
        layer_of().redraw()
    with pytest.raises(ValueError, match="redraw_interval needs a projection"):
        layer_of(redraw_interval=2)


def test_training_graph_with_redrawing_has_no_decomposition_T9():
    model = keras.Sequential([redrawn_layer()])
    model.compile("sgd", "mse")
    x = normal(2, 4, HIDDEN)
    graph = tf.function(lambda x: model(x, training=True))
    with pytest.warns(UserWarning, match="RedrawProjections"):
        operations = {op.type for op in graph.get_concrete_function(tf.constant(x)).graph.get_operations()}
    assert not operations & {"Qr", "Svd"}


def test_layers_of_a_language_model_are_found_and_draw_different_matrices():
    model = CausalLM(10, 16, 2, 2, mixer_options={"redraw_interval": 2}, seed=5)
    model.build((None, None))
    mixers = [layer for layer in layers_within(model) if isinstance(layer, SelfAttention)]
    assert len(mixers) == 2
    first, second = (layer.projection_matrix.numpy() for layer in mixers)
    assert np.abs(first - second).max() > 0.1


# Factories


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("nonnegative", [True, False])
def test_fast_softmax_attention_estimates_softmax_attention(nonnegative, renormalize):
    query, key, value = 0.5 * normal(3, 2, 10, 2, 16)
    weights = np.exp(np.einsum("bthd,bshd->bhts", query, key) / 4)
    if renormalize:
        weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhts,bshd->bthd", weights, value)
    attention_fn = make_fast_softmax_attention(
        16, renormalize, nb_features=4096, nonnegative_features=nonnegative, ortho_scaling=1
    )
    assert oracles.relative_error(attention_fn(query, key, value), expected) < 0.1


@pytest.mark.parametrize("unidirectional", [False, True])
@pytest.mark.parametrize("renormalize", [True, False])
def test_fast_generalized_attention_is_the_quotient_of_its_features(renormalize, unidirectional):
    query, key, value = normal(3, 2, 9, 2, 4).astype("float64")
    attention_fn = make_fast_generalized_attention(
        4, renormalize, kernel_fn=tf.abs, kernel_epsilon=0.01, unidirectional=unidirectional
    )
    weights = np.einsum("bthd,bshd->bhts", np.abs(query) + 0.01, np.abs(key) + 0.01)
    if unidirectional:
        weights = np.tril(weights)
    if renormalize:
        weights /= weights.sum(-1, keepdims=True)
    oracles.assert_close(attention_fn(query, key, value), np.einsum("bhts,bshd->bthd", weights, value), 1e-9)


def test_factories_redraw_only_when_asked():
    query, key, value = normal(3, 1, 5, 1, 8)
    fixed = make_fast_softmax_attention(8, nb_features=16, ortho_features=False)
    redrawn = make_fast_softmax_attention(8, nb_features=16, ortho_features=False, redraw_features=True)
    np.testing.assert_array_equal(fixed(query, key, value), redrawn(query, key, value))
    another = redrawn(query, key, value, draw=1)
    assert np.abs(another - fixed(query, key, value)).max() > 1e-3
    in_graph = tf.function(redrawn)(query, key, value, draw=tf.constant(1))
    oracles.assert_close(in_graph, another, 1e-5)
    with pytest.raises(ValueError, match="draw needs redraw_features=True"):
        fixed(query, key, value, draw=1)
    with pytest.raises(ValueError, match="features_type must be one of"):
        make_fast_generalized_attention(8, features_type="other")
    with pytest.raises(ValueError, match="redraw_features needs random features"):
        make_fast_generalized_attention(8, redraw_features=True)


def test_denominator_stabilizer_of_the_factories_acts_on_small_denominators():
    query, key = np.ones([1, 1, 1, 1]), np.ones([1, 1, 1, 1])
    value = np.full([1, 1, 1, 1], 3.0)
    options = {"kernel_fn": lambda x: 1e-4 * x, "kernel_epsilon": 0.0}
    exact = make_fast_generalized_attention(1, **options)(query, key, value)
    stabilized = make_fast_generalized_attention(1, numerical_stabilizer=1e-3, **options)(query, key, value)
    np.testing.assert_allclose(np.squeeze(exact), 3.0)
    np.testing.assert_allclose(np.squeeze(stabilized), 3.0 * 1e-8 / (1e-8 + 2e-3))


# From MultiHeadAttention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_converted_attention_is_close_to_the_exact_one(use_bias, causal):
    keras.utils.set_random_seed(0)
    exact = keras.layers.MultiHeadAttention(HEADS, HIDDEN // HEADS, use_bias=use_bias, bias_initializer="normal")
    x = 0.5 * normal(BATCH, LENGTH, HIDDEN)
    expected = exact(x, x, use_causal_mask=causal)

    def error(features):
        options = {"causal": causal, "nb_random_features": features}
        converted = [SelfAttention.from_multi_head_attention(exact, seed=seed, **options) for seed in range(4)]
        return np.mean([oracles.relative_error(layer(x), expected) for layer in converted])

    few, many = error(64), error(4096)
    # The error falls with the square root of the number of features, here by a factor of 8.
    assert many < 0.1 and 5 < few / many < 12


def test_conversion_for_cross_attention_and_refusals():
    exact = keras.layers.MultiHeadAttention(2, 8)
    with pytest.raises(ValueError, match="layer must be built"):
        FavorAttention.from_multi_head_attention(exact)
    query, source = 0.5 * normal(BATCH, 5, 16), 0.5 * normal(BATCH, 7, 24)
    expected = exact(query, source)
    converted = FavorAttention.from_multi_head_attention(exact, nb_random_features=4096, seed=0)
    assert oracles.relative_error(converted(query, source), expected) < 0.05
    with pytest.raises(ValueError, match="from a sequence to itself"):
        SelfAttention.from_multi_head_attention(exact)
    other = keras.layers.MultiHeadAttention(2, 8, value_dim=4)
    other(query, query)
    with pytest.raises(ValueError, match="value_dim=4"):
        FavorAttention.from_multi_head_attention(other)


# Diagnostics


def test_diagnostics_agree_with_the_known_errors_and_fall_with_features():
    query, key, value = 0.5 * normal(3, 4, 32, 2, 16)
    rows = approximation_error(query, key, value, num_features=(64, 256, 1024))
    errors = [row["matrix_error"] for row in rows]
    # A NumPy run gave .26 / .14 / .08.
    for error, known in zip(errors, (0.26, 0.14, 0.08)):
        assert abs(error / known - 1) < 0.3
    assert sorted(errors, reverse=True) == errors


def test_diagnostics_of_a_layer_and_refusal():
    layer, x = layer_of(kernel_transformation="softmax"), 0.5 * normal(1, 8, HIDDEN)
    layer(x)
    heads = [getattr(layer, f"{name}_dense")(x) for name in ("query", "key", "value")]
    options = {"num_features": (32,), "num_draws": 2, "causal": True}
    assert layer_approximation_error(layer, x, **options) == approximation_error(*heads, **options)
    with pytest.raises(ValueError, match="kernel must be one that estimates softmax"):
        approximation_error(*heads, kernel="relu")
