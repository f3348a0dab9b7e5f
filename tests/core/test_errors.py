"""Bad input is a ValueError, and keeps its own message where others are reworded."""

import pytest

from fedjax_graph.core import batching
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files


def test_who_expects_a_value_error_gets_bad_input():
    with pytest.raises(ValueError, match="sum to 100"):
        batching.parse_fractions("70/10/10")


def test_a_message_about_bad_input_is_not_reworded(tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(InputError) as raised, files.reading(path, "graph"):
        raise InputError("no array 'labels'")
    assert str(raised.value) == f"{path}: no array 'labels'"
    unreadable = pytest.raises(InputError, match="not a readable graph")
    with unreadable, files.reading(path, "graph"):
        raise ValueError("no array 'labels'")
