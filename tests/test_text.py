"""Characters and their ids."""

import numpy as np
import pytest
import tensorflow as tf

from favor_keras.text import Characters

TEXT = "Grüne Flaschen,\n\t7 und 💚!"


def test_ids_are_places_and_come_back_as_text(tmp_path):
    characters = Characters.of(TEXT)
    assert characters.all == sorted(set(TEXT)) and len(characters) == len(set(TEXT))
    ids = characters.encode(TEXT)
    assert ids.dtype == tf.int32
    np.testing.assert_array_equal(ids, [characters.all.index(c) for c in TEXT])
    assert characters.decode(ids) == TEXT
    characters.save(tmp_path / "vocabulary.json")
    assert Characters.load(tmp_path / "vocabulary.json").all == characters.all


def test_unknown_characters_are_named():
    characters = Characters("abc")
    assert characters.unknown("cab, Ω") == [" ", ",", "Ω"]
    with pytest.raises(ValueError, match=r"received also \[' ', 'Ω'\]"):
        characters.encode("ab Ω")


@pytest.mark.parametrize("ids", [[3], [-1], [0.5], [[0, 1]], None], ids=repr)
def test_what_is_no_id_is_not_decoded(ids):
    with pytest.raises(ValueError, match="ids must be a list of integers from 0 to 2, received"):
        Characters("abc").decode(ids)
    assert Characters("abc").decode([]) == ""


def test_strings_become_ids_in_a_graph():
    characters = Characters("abc")
    ids = tf.function(characters.ids)(tf.constant(["ab", "", "c?a"]))
    assert ids.to_list() == [[0, 1], [], [2, -1, 0]]
    assert tf.function(characters.strings)(tf.constant([[0, 1], [2, 2]])).numpy().tolist() == [b"ab", b"cc"]


@pytest.mark.parametrize("characters", ["", "aba", ["ab", "c"], ["a", 1], "a\0", None, 5], ids=repr)
def test_other_vocabularies_are_refused(characters):
    with pytest.raises(ValueError, match="characters must be different single characters"):
        Characters(characters)
