"""Rows laid side by side are the rows again."""

import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import folding, mesh


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_taken_rows_are_those_of_the_array(factor):
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    folded = folding.fold(jnp.asarray(rows), factor)
    assert folded.shape == (8 // factor, 3 * factor)
    indices = np.array([7, 0, 3, 3, 6])
    npt.assert_array_equal(folding.take(folded, jnp.asarray(indices), 3), rows[indices])


def test_rows_without_numbers_are_taken_too():
    taken = folding.take(jnp.zeros((8, 0)), jnp.array([7, 0]), 0)
    assert taken.shape == (2, 0)


@pytest.mark.parametrize(
    ("size", "num_rows", "expected"),
    [
        (64, 12, 2),
        (64, 9, 1),
        (32, 8, 4),
        (32, 6, 2),
        (128, 8, 1),
        (200, 8, 1),
        (0, 8, 1),
    ],
)
def test_a_tpus_rows_are_filled_up(monkeypatch, size, num_rows, expected):
    assert folding.factor(size, num_rows) == 1  # of a CPU
    monkeypatch.setattr(mesh, "backend", lambda: "tpu")
    assert folding.factor(size, num_rows) == expected
