"""Cuts and distances against NetworkX and loops."""

import jax
import networkx
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import clustering
from fedjax_graph.core.errors import InputError

jit_cut = jax.jit(clustering.min_cut)


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_loses_as_little_as_networkx_finds(seed):
    rng = np.random.default_rng(seed)
    weights = np.triu(rng.uniform(size=(7, 7)) * (rng.random((7, 7)) < 0.8), 1)
    weights = (weights + weights.T).astype(np.float32)
    is_member = np.ones(7, bool)
    is_member[rng.permutation(7)[: seed % 3]] = False
    members = np.flatnonzero(is_member)
    graph = networkx.Graph()
    for i in members:
        for j in members[members > i]:
            graph.add_edge(i, j, weight=weights[i, j])
    least, sides = networkx.stoer_wagner(graph)
    side = np.asarray(jit_cut(weights + 9 * np.eye(7, dtype=np.float32), is_member))
    assert set(np.flatnonzero(side)) in [set(one) for one in sides]
    npt.assert_allclose(weights[side][:, is_member & ~side].sum(), least, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 100])
def test_warped_distances_are_those_of_a_loop(length):
    rows = np.random.default_rng(0).normal(size=(4, length)).astype(np.float32)

    def distance(one, other):
        sums = np.full((length + 1, length + 1), np.inf)
        sums[0, 0] = 0
        for i in range(length):
            for j in range(length):
                least = min(sums[i, j], sums[i, j + 1], sums[i + 1, j])
                sums[i + 1, j + 1] = (one[i] - other[j]) ** 2 + least
        return sums[-1, -1] ** 0.5

    expected = [[distance(one, other) for other in rows] for one in rows]
    npt.assert_allclose(clustering.warped_distances(rows), expected, rtol=1e-5)


def test_weights_of_other_nodes_are_refused():
    with pytest.raises(InputError, match="weights"):
        clustering.min_cut(np.ones((3, 4)), np.ones(3, bool))
