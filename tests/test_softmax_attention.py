"""The exact attention: MultiHeadAttention, as a whole and continued from its cache."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import TOLERANCES, assert_causal, assert_ignores_padding, normal, policies, stream
from oracles import assert_close

from favor_keras.layers import SoftmaxAttention

SIZE, HEADS = 8, 2


def make_layer(**options):
    keras.utils.set_random_seed(0)
    layer = SoftmaxAttention(SIZE, HEADS, **{"use_bias": True, **options})
    layer.build((None, None, SIZE))
    return layer


def naive_attention(layer, x):
    """softmax(Q K^T / sqrt(D)) V over the positions up to each, in float64."""
    query, key, value = (
        np.einsum("btd,dhk->bthk", x, np.float64(dense.kernel)) + np.float64(dense.bias)
        for dense in (layer.attention.query_dense, layer.attention.key_dense, layer.attention.value_dense)
    )
    scores = np.einsum("bthk,bshk->bhts", query, key) / np.sqrt(SIZE / HEADS)
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dense = layer.attention.output_dense
    attended = np.einsum("bhts,bshk->bthk", weights, value)
    return np.einsum("bthk,hkd->btd", attended, np.float64(dense.kernel)) + np.float64(dense.bias)


@policies
def test_whole_is_the_formula(policy):
    layer, x = make_layer(dtype=policy), normal(2, 7, SIZE)
    assert_close(layer(x), naive_attention(layer, np.float64(x)), TOLERANCES[policy])


@policies
def test_pieces_are_the_whole(policy):
    layer, x = make_layer(dtype=policy), normal(2, 9, SIZE)
    for sizes in ([9], [1] * 9, [4, 1, 4]):
        outputs, cache = stream(layer, x, sizes)
        assert_close(outputs, naive_attention(layer, np.float64(x)), TOLERANCES[policy])
        assert {tensor.dtype.name for tensor in cache.values()} == {"float32"}
        assert cache["position"].numpy().tolist() == [9, 9]


def test_padded_rows_in_pieces_are_each_row_alone():
    layer, x = make_layer(), normal(2, 8, SIZE)
    mask = np.array([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 1, 1, 1]], bool)
    for sizes in ([8], [1] * 8, [3, 5]):
        outputs, cache = stream(layer, x, sizes, mask)
        for row in range(2):
            alone = naive_attention(layer, np.float64(x)[row : row + 1, mask[row]])
            assert_close(outputs[row][mask[row]], alone[0], 1e-5)
        assert cache["position"].numpy().tolist() == [5, 5]


def test_it_sees_neither_later_positions_nor_padding():
    layer, x = make_layer(use_bias=False), normal(2, 8, SIZE)  # the gradient of a key's bias is rounding only
    assert_causal(layer, x)
    assert_ignores_padding(lambda x, mask: layer(x, mask=mask), x, variables=layer.trainable_variables)


def test_dropout_drops_in_training_and_not_with_a_cache():
    layer, x = make_layer(attention_dropout=0.5, seed=1), normal(2, 8, SIZE)
    assert not np.allclose(layer(x, training=True), layer(x))
    assert_close(layer(x, training=False), naive_attention(layer, np.float64(x)), 1e-5)
    with pytest.raises(ValueError, match="training must be False with a cache and attention_dropout above 0"):
        layer(x, cache=layer.init_cache(2, 8), training=True)


def test_a_cache_has_its_room_and_no_more():
    layer, x = make_layer(), normal(1, 4, SIZE)
    _, cache = layer(x, cache=layer.init_cache(1, max_length=5))
    with pytest.raises(ValueError, match="room for max_length=5 positions, received 6"):
        layer(x[:, :2], cache=cache)
    in_graph, _ = tf.function(lambda x, cache: layer(x, cache=cache))(x[:, :2], cache)
    assert np.isfinite(in_graph[:, 0]).all() and np.isnan(in_graph[:, 1]).all()
    with pytest.raises(ValueError, match="max_length must be the greatest number of positions, received None"):
        layer.init_cache(1)


def test_config_and_symbolic_calls():
    layer = make_layer(attention_dropout=0.25, seed=7, name="exact", dtype="mixed_bfloat16")
    config = layer.get_config()
    assert SoftmaxAttention.from_config(config).get_config() == config
    assert (config["hidden_size"], config["num_heads"], config["attention_dropout"]) == (SIZE, HEADS, 0.25)
    assert (config["use_bias"], config["seed"], config["name"]) == (True, 7, "exact")
    symbolic = layer(keras.Input([None, SIZE]))
    assert symbolic.shape == (None, None, SIZE) and symbolic.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3), "hidden_size must be divisible by num_heads, received 8 and 3"),
        ((0, 1), "hidden_size must be a positive integer, received 0"),
        ((8, 2, 1.0), "attention_dropout must be in .0, 1., received 1.0"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(*arguments)
