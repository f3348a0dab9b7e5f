"""Clients' parts of a graph against sets, loops and dense algebra."""

import math
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import subgraphs
from fedjax_graph.data.graphs.partitions import PartitionConfig
from fedjax_graph.data.graphs.subgraphs import disjoint_union, normalise, parts

by_property = hypothesis.settings(deadline=None, derandomize=True, max_examples=30)
SEEDS = st.integers(0, 2**32)
OVERLAPS = st.sampled_from([0, 0.07, 0.1, 0.25, 1 / 3, 0.5, 0.7, 1])


def graph(num_nodes, seed=0, share=0.3):
    """Random edges, and their dense matrix; node 0 has none."""
    drawn = np.random.default_rng(seed).random((num_nodes, num_nodes)) < share
    dense = np.triu(drawn, 1).astype(np.float32)
    dense[0] = 0
    dense += dense.T
    return scipy.sparse.csr_array(dense), dense


def path(num_nodes):
    ones = np.ones(num_nodes - 1, np.float32)
    return scipy.sparse.csr_array(
        scipy.sparse.diags_array([ones, ones], offsets=[1, -1])
    )


def fails(match, function, *args, **changes):
    with pytest.raises(InputError, match=match) as raised:
        function(*args, **changes)
    assert "\n" not in str(raised.value)


# --- Parts ----------------------------------------------------------------------------


def assert_parts(cut, num_nodes, num_clients, overlap):
    assert cut.owners.shape == (num_nodes,) and cut.owners.dtype == np.int32
    assert len(cut.nodes) == num_clients
    owned = [set(np.flatnonzero(cut.owners == k).tolist()) for k in range(num_clients)]
    assert all(owned)
    for client, nodes in enumerate(cut.nodes):
        assert np.all(np.diff(nodes) > 0)
        following = owned[(client + 1) % num_clients]
        shared = set(nodes.tolist()) - owned[client]
        assert owned[client] <= set(nodes.tolist()) and shared <= following
        if num_clients > 1:
            exact = overlap * len(following)
            assert exact - 1e-6 <= len(shared) < exact + 1 - 1e-6
    return [len(own) for own in owned]


@by_property
@hypothesis.given(st.integers(1, 9), st.integers(0, 60), OVERLAPS, SEEDS)
def test_random_parts_are_even_and_share_what_was_asked(clients, more, overlap, seed):
    adjacency = graph(clients + more)[0]
    cut = parts(adjacency, clients, overlap, seed=seed)
    sizes = assert_parts(cut, clients + more, clients, overlap)
    assert max(sizes) - min(sizes) <= 1


def test_a_share_that_is_no_binary_number_is_not_rounded_up():
    cut = parts(graph(300)[0], 3, 0.07)  # in floats, 0.07 x 100 is more than 7
    assert [len(nodes) for nodes in cut.nodes] == [107] * 3


def test_neighbours_on_a_ring_share_nodes_and_others_do_not():
    cut = parts(graph(100)[0], 5, 0.4)
    for i in range(5):
        for j in range(i):
            shared = np.intersect1d(cut.nodes[i], cut.nodes[j])
            assert len(shared) == (8 if (i - j) % 5 in (1, 4) else 0)


def test_one_client_holds_the_whole_graph():
    for overlap in (0, 0.5):
        cut = parts(graph(20)[0], 1, overlap)
        npt.assert_array_equal(cut.nodes[0], np.arange(20))
        assert subgraphs.statistics(graph(20)[0], cut)["overlap"] == 0


def test_a_larger_overlap_only_adds_nodes():
    cuts = [parts(graph(60)[0], 4, overlap, seed=5) for overlap in (0, 0.2, 0.6, 1)]
    for less, more in zip(cuts[:-1], cuts[1:], strict=True):
        npt.assert_array_equal(less.owners, more.owners)
        for few, many in zip(less.nodes, more.nodes, strict=True):
            assert set(few) < set(many)


@pytest.mark.parametrize("partition", subgraphs.PARTITIONS)
def test_parts_depend_on_the_seed_only(partition):
    if partition.startswith("metis"):
        pytest.importorskip("pymetis")
    adjacency, labels = graph(120)[0], np.arange(120) % 3
    config = PartitionConfig(num_communities=20)
    overlap = 0.5 if partition == "metis" else 0.0  # who owns what there has no draw

    def held(seed):
        cut = parts(adjacency, 4, overlap, partition, seed, labels, config)
        return np.concatenate(cut.nodes).tolist()

    assert held(1) == held(1) != held(2)


@pytest.mark.parametrize("overlap", [0, 0.25])
def test_metis_cuts_few_edges(overlap):
    pytest.importorskip("pymetis")
    adjacency = path(400)
    cut = parts(adjacency, 8, overlap, "metis")
    sizes = assert_parts(cut, 400, 8, overlap)
    assert max(sizes) <= 1.1 * 50
    ends = adjacency.tocoo().coords
    assert np.count_nonzero(cut.owners[ends[0]] != cut.owners[ends[1]]) <= 2 * 2 * 7
    assert subgraphs.statistics(adjacency, cut)["edges_kept"] > 0.95


def test_metis_that_is_missing_or_leaves_a_client_empty(monkeypatch):
    adjacency = graph(60)[0]
    monkeypatch.setitem(sys.modules, "pymetis", None)
    fails(
        "needs the package pymetis; run `pip install", parts, adjacency, 2, 0, "metis"
    )
    monkeypatch.undo()
    pymetis = pytest.importorskip("pymetis")

    def lopsided(num_parts, graph):
        return pymetis.GraphPartition(0, [0, 2] * 30)

    monkeypatch.setattr(pymetis, "part_graph", lopsided)
    fails("'metis' leaves client 1 without nodes", parts, adjacency, 3, 0, "metis")


@pytest.mark.parametrize(
    "match, changes",
    [
        (r"num_clients = 0: expected 1 to 9, a node for each", {"num_clients": 0}),
        (r"num_clients = 10: expected 1 to 9", {"num_clients": 10}),
        (r"overlap = -0.1: expected 0 to 1", {"overlap": -0.1}),
        (r"overlap = 1.5: expected 0 to 1", {"overlap": 1.5}),
        (r"overlap = nan: expected 0 to 1", {"overlap": math.nan}),
        (
            r"unknown partition 'cliques'; known: random, metis, metis_plus, louv",
            {"partition": "cliques"},
        ),
        (r"needs the labels of the nodes", {"partition": "label_dirichlet"}),
        (r"seed = -1: expected 0 or more", {"seed": -1}),
    ],
)
def test_parts_name_what_is_wrong(match, changes):
    fails(match, parts, graph(9)[0], **{"num_clients": 2, **changes})


def test_parts_are_of_symmetric_graphs_without_self_edges():
    match, adjacency = "adjacency: expected a symmetric one", graph(9)[0]
    one_way = scipy.sparse.csr_array(np.triu(adjacency.toarray()))
    with_self = scipy.sparse.csr_array(adjacency + scipy.sparse.eye_array(9))
    for wrong in (one_way, with_self):
        fails(match, parts, wrong, num_clients=2)


# --- The union of the clients' subgraphs ----------------------------------------------


@by_property
@hypothesis.given(st.integers(1, 6), st.integers(0, 20), OVERLAPS, SEEDS)
def test_the_union_is_the_dense_one(clients, more, overlap, seed):
    adjacency, dense = graph(clients + more, seed)
    cut = parts(adjacency, clients, overlap, seed=seed)
    union = disjoint_union(adjacency, cut)

    copies = [(k, int(node)) for k, nodes in enumerate(cut.nodes) for node in nodes]
    expected = np.zeros((len(copies), len(copies)))
    for row, (holder, node) in enumerate(copies):
        for column, (other, neighbour) in enumerate(copies):
            expected[row, column] = dense[node, neighbour] * (holder == other)
    assert isinstance(union.adjacency, scipy.sparse.csr_array)
    assert union.adjacency.dtype == np.float32
    npt.assert_array_equal(union.adjacency.toarray(), expected)
    assert union.copies.dtype == union.holders.dtype == np.int32
    pairs = zip(union.holders.tolist(), union.copies.tolist(), strict=True)
    assert list(pairs) == copies


@by_property
@hypothesis.given(st.integers(1, 6), st.integers(2, 20), OVERLAPS, SEEDS)
def test_statistics_count_each_edge_once(clients, more, overlap, seed):
    adjacency, dense = graph(clients + more, seed, share=0.6)
    cut = parts(adjacency, clients, overlap, seed=seed)
    held = [set(nodes.tolist()) for nodes in cut.nodes]
    edges = [{int(i), int(j)} for i, j in np.argwhere(np.triu(dense))]
    kept = sum(any(edge <= nodes for nodes in held) for edge in edges)
    sizes = [len(nodes) for nodes in held]
    statistics = subgraphs.statistics(adjacency, cut)
    assert statistics["num_clients"] == clients
    assert statistics["edges_kept"] == pytest.approx(kept / len(edges) if edges else 1)
    assert statistics["smallest_part"] == min(sizes)
    assert statistics["largest_part"] == max(sizes)
    if clients >= 3:
        ring = zip(held, held[1:] + held[:1], strict=True)
        shared = sum(len(nodes & following) for nodes, following in ring)
        base = (clients + more) / clients
        assert statistics["overlap"] == pytest.approx(shared / clients / base)


# --- Normalisation --------------------------------------------------------------------


@by_property
@hypothesis.given(st.integers(1, 40), SEEDS)
def test_normalised_adjacencies_are_the_dense_ones(num_nodes, seed):
    adjacency, dense = graph(num_nodes, seed)
    before = adjacency.copy()
    with_self = dense.astype(float) + np.eye(num_nodes)
    inverse = np.diag(1 / with_self.sum(axis=1))
    expected = {
        "symmetric": np.sqrt(inverse) @ with_self @ np.sqrt(inverse),
        "row": inverse @ with_self,
    }
    for kind in subgraphs.NORMALISATIONS:
        propagation = normalise(adjacency, kind)
        assert isinstance(propagation, scipy.sparse.csr_array)
        assert propagation.dtype == np.float32
        npt.assert_allclose(propagation.toarray(), expected[kind], rtol=1e-6)
    npt.assert_array_equal(adjacency.toarray(), before.toarray())


def test_the_symmetric_normalisation_is_the_default_and_others_are_not_known():
    adjacency = graph(9)[0]
    npt.assert_array_equal(
        normalise(adjacency).toarray(), normalise(adjacency, "symmetric").toarray()
    )
    fails(
        "unknown normalisation 'column'; known: symmetric, row",
        normalise,
        adjacency,
        "column",
    )


def test_many_entries_are_scaled_piece_by_piece():
    num_nodes, degree = 60_000, 80  # more entries than one piece has
    steps = np.concatenate(
        [np.arange(1, degree // 2 + 1), -np.arange(1, degree // 2 + 1)]
    )
    columns = np.sort((np.arange(num_nodes)[:, None] + steps) % num_nodes, axis=1)
    adjacency = scipy.sparse.csr_array(
        (
            np.ones(columns.size, np.float32),
            columns.ravel().astype(np.int32),
            np.arange(0, columns.size + 1, degree, dtype=np.int32),
        ),
        shape=(num_nodes, num_nodes),
    )
    for kind in subgraphs.NORMALISATIONS:
        propagation = normalise(adjacency, kind)
        assert propagation.nnz == num_nodes * (degree + 1) > 2**22
        npt.assert_allclose(propagation.data, 1 / (degree + 1), rtol=1e-6)
