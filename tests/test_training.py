"""Training: fit in every mode, with weight decay, for long, and with large weights."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import normal, run_in_fresh_process
from oracles import assert_close

from favor_keras import CausalLM, FavorAttention, RedrawProjections, SelfAttention
from favor_keras.models import DecoderBlock

VOCABULARY, HIDDEN, HEADS = 13, 12, 3


def text_batch(count, length, seed=0):
    """Ids that can be learned: each is the sum of the two before it."""
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, size=[count, length + 1])
    for t in range(2, length + 1):
        ids[:, t] = 1 + (ids[:, t - 1] + ids[:, t - 2]) % (VOCABULARY - 1)
    return ids[:, :-1].astype("int32"), ids[:, 1:].astype("int32")


def attention_model(length=None, dropout=0.0):
    """Embedding with a mask, causal softmax attention, cross-attention to the embedding, logits."""
    ids = keras.Input([length], dtype="int32")
    embedded = keras.layers.Embedding(VOCABULARY, HIDDEN, mask_zero=True)(ids)
    options = {"attention_dropout": dropout, "seed": 1}
    attention = SelfAttention(
        HIDDEN, HEADS, kernel_transformation="softmax", causal=True, short_convolution=4, **options
    )
    x = attention(embedded)
    x = FavorAttention(HIDDEN, HEADS, projection_matrix_type="iid", nb_random_features=8, causal=True, **options)(
        x, embedded
    )
    return keras.Model(ids, keras.layers.Dense(VOCABULARY)(x))


def compile_model(model, optimizer=None, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **options)
    if not model.built:
        model.build((None, None))
    model.optimizer.build(model.trainable_variables)  # else `fit` makes its variables, and traces the first step twice
    return model


def losses_of_fit(model, length=9, batch_size=4, steps=3, **options):
    """The loss after every epoch of one step."""
    data = text_batch(batch_size, length)
    return compile_model(model, **options).fit(*data, batch_size=batch_size, epochs=steps, verbose=0).history["loss"]


def test_fit_gives_the_same_losses_in_eager_graph_and_jit():
    def losses(**options):
        keras.utils.set_random_seed(0)
        model = CausalLM(VOCABULARY, HIDDEN, num_layers=1, num_heads=HEADS, seed=1)
        return losses_of_fit(model, **{"jit_compile": False, **options})

    eager = losses(run_eagerly=True)
    assert eager[-1] < eager[0] - 0.01
    assert_close(losses(), eager, 1e-5)
    assert_close(losses(jit_compile=True), eager, 1e-5)


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def mixed_policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def test_P3_fit_under_a_mixed_policy(mixed_policy):
    # More than one chunk, so that the custom gradient is in the step.
    results = []
    for run_eagerly in (True, False):
        keras.utils.set_random_seed(0)
        ids = keras.Input([None], dtype="int32")
        layer = SelfAttention(HIDDEN, HEADS, kernel_transformation="softmax", causal=True, seed=1)
        x = layer(keras.layers.Embedding(VOCABULARY, HIDDEN, mask_zero=True)(ids))
        model = keras.Model(ids, keras.layers.Dense(VOCABULARY, dtype="float32")(x))
        assert layer.compute_dtype == mixed_policy.removeprefix("mixed_")
        before = layer.query_dense.kernel.numpy()
        results.append(losses_of_fit(model, length=70, steps=2, run_eagerly=run_eagerly, jit_compile=False))
        assert np.all(np.isfinite(results[-1])) and np.abs(layer.query_dense.kernel - before).max() > 1e-4
    assert_close(results[0], results[1], 1e-3)


@pytest.mark.parametrize("optimizer_class", [keras.optimizers.AdamW, keras.optimizers.SGD])
def test_S17_the_projection_is_not_trained_and_does_not_decay(optimizer_class):
    x = keras.Input([None, HIDDEN])
    layer = SelfAttention(HIDDEN, HEADS, kernel_transformation="softmax", use_bias=True, short_convolution=4)
    model = keras.Model(x, layer(x))
    before = [w.numpy() for w in layer.weights]
    optimizer = optimizer_class(0.1, weight_decay=0.5)
    model.compile(optimizer, "mse", run_eagerly=True)
    inputs = normal(4, 7, HIDDEN)
    model.fit(inputs, inputs, epochs=2, verbose=0)
    assert len(layer.trainable_weights) == 8 + 3
    assert not any(w is layer.projection_matrix or w is layer.draws for w in layer.trainable_weights)
    for weight, old in zip(layer.weights, before):
        assert np.array_equal(weight, old) == (weight is layer.projection_matrix or weight is layer.draws), weight.path
    matrix_shape = tuple(layer.projection_matrix.shape)
    assert matrix_shape not in {tuple(v.shape) for v in optimizer.variables}
    assert matrix_shape not in {tuple(v.shape) for v in layer.trainable_weights}


def test_S17_a_frozen_layer_is_not_trained():
    x = keras.Input([None, HIDDEN])
    layer = SelfAttention(HIDDEN, HEADS, short_convolution=4)
    model = keras.Model(x, keras.layers.Dense(2)(layer(x)))
    layer.trainable = False
    before = [w.numpy() for w in layer.weights]
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(normal(2, 7, HIDDEN), normal(2, 7, 2), verbose=0)
    assert all(np.array_equal(w, old) for w, old in zip(layer.weights, before))


class CountTraces(keras.layers.Layer):
    """Counts how often Python runs through it."""

    traces = 0

    def call(self, inputs):
        self.traces += 1
        return inputs


def traces_of_ten_lengths(layer):
    """How often `predict` and `fit` trace a model with this layer when every batch has another length."""
    ids, counter = keras.Input([None], dtype="int32"), CountTraces()
    x = layer(counter(keras.layers.Embedding(VOCABULARY, HIDDEN)(ids)))
    model = compile_model(keras.Model(ids, keras.layers.Dense(VOCABULARY)(x)), jit_compile=False)
    counts = []
    for run in (
        lambda length: model.predict(text_batch(2, length)[0], verbose=0),
        lambda length: model.fit(*text_batch(2, length), verbose=0),
    ):
        counter.traces = 0
        for length in range(60, 80, 2):
            run(length)
        counts.append(counter.traces)
    return counts


def test_F9_ten_lengths_need_no_more_traces_than_a_stock_layer():
    ours = traces_of_ten_lengths(SelfAttention(HIDDEN, HEADS, causal=True))
    assert ours == traces_of_ten_lengths(keras.layers.Dense(HIDDEN))
    assert max(ours) <= 2


# Long training, and large weights.


def test_N4_D13_long_training_stays_finite_and_decodes_like_the_whole_text():
    """Both kernels in one model; the queries' and keys' weights grow thirty times halfway."""
    keras.utils.set_random_seed(0)
    ids = keras.Input([None], dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, HIDDEN)(ids)
    mixers = [
        SelfAttention(HIDDEN, HEADS, kernel_transformation="softmax", causal=True, seed=1),
        SelfAttention(HIDDEN, HEADS, projection_matrix_type="orthogonal", causal=True, short_convolution=4, seed=2),
    ]
    blocks = [DecoderBlock(mixer, 24) for mixer in mixers]
    for block in blocks:
        x = block(x)
    model = compile_model(
        keras.Model(ids, keras.layers.Dense(VOCABULARY)(x)), keras.optimizers.Adam(3e-3), jit_compile=False
    )

    def train(steps):
        data = tf.data.Dataset.from_tensors(text_batch(16, 24)).repeat(steps)
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        assert np.all(np.isfinite(losses))
        return losses

    losses = train(150)
    assert losses[-1] < 0.9 * np.log(VOCABULARY - 1)

    # The trained blocks, fed token by token, give the logits of the whole text.
    text = text_batch(1, 200, seed=9)[0]
    embedding, head = model.layers[1], model.layers[-1]
    step = tf.function(lambda x, caches: _step(blocks, x, caches), autograph=False)
    caches, logits = [block.init_cache(1) for block in blocks], []
    for t in range(200):
        y, caches = step(embedding(text[:, t : t + 1]), caches)
        logits.append(head(y))
    logits, expected = tf.concat(logits, axis=1), model(text)
    assert np.abs(logits - expected).max() < 1e-3
    assert np.array_equal(np.argmax(logits, axis=-1), np.argmax(expected, axis=-1))

    for mixer in mixers:
        for dense in (mixer.query_dense, mixer.key_dense):
            dense.kernel.assign(30 * dense.kernel)
    assert np.all(np.isfinite(model(text)))
    train(50)
    assert all(np.all(np.isfinite(w)) for w in model.weights)


def _step(blocks, x, caches):
    new_caches = []
    for block, cache in zip(blocks, caches):
        x, cache = block(x, cache=cache)
        new_caches.append(cache)
    return x, new_caches


# A kill in the middle, and a new start.


def fit_with_backup(folder, killed_in_epoch=None):
    """Fit a model that is redrawn every second of three steps an epoch; its weights in the end."""
    keras.utils.set_random_seed(0)
    ids = keras.Input([9], dtype="int32")
    embedded = keras.layers.Embedding(VOCABULARY, HIDDEN)(ids)
    attention = SelfAttention(HIDDEN, HEADS, kernel_transformation="softmax", causal=True, redraw_interval=2, seed=1)
    model = compile_model(keras.Model(ids, keras.layers.Dense(VOCABULARY)(attention(embedded))))

    def kill(batch, logs):
        if batch == 1 and int(model.optimizer.iterations) > 3 * int(killed_in_epoch):
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [RedrawProjections(), keras.callbacks.BackupAndRestore(folder)]
    if killed_in_epoch is not None:
        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=kill))
    model.fit(*text_batch(12, 9), batch_size=4, epochs=5, shuffle=False, verbose=0, callbacks=callbacks)
    assert int(attention.draws) == 7
    return model.get_weights()


def test_redrawing_goes_on_after_a_kill(tmp_path):
    expected = fit_with_backup(tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    with pytest.raises(AssertionError):
        run_in_fresh_process("test_training", "fit_with_backup", str(folder), "2")
    assert any(folder.iterdir()), "killed before the first backup"
    for weight, truth in zip(fit_with_backup(folder), expected, strict=True):
        assert_close(weight, truth, 1e-6)
