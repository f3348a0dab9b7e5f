"""Graphs against their adjacency matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import graphs, mesh


def random_adjacency(seed, num_nodes=7):
    rng = np.random.default_rng(seed)
    adjacency = rng.uniform(0.1, 1, (num_nodes, num_nodes)).astype(np.float32)
    adjacency[rng.random(adjacency.shape) < 0.7] = 0  # one-way for the most part
    adjacency[2], adjacency[:, 2] = 0, 0  # isolated
    return adjacency


def to_adjacency(graph):
    adjacency = np.zeros((graph.num_nodes, graph.num_nodes), np.float32)
    for sender, receiver, weight in zip(
        graph.senders, graph.receivers, graph.weights, strict=True
    ):
        assert adjacency[sender, receiver] == 0  # each edge once
        adjacency[sender, receiver] = weight
    return adjacency


@pytest.mark.parametrize("seed", range(3))
def test_edges_are_the_entries_sorted_by_receiver(seed):
    adjacency = random_adjacency(seed)
    graph = graphs.from_adjacency(adjacency)
    npt.assert_array_equal(to_adjacency(graph), adjacency)
    assert np.all(np.diff(graph.receivers) >= 0)
    npt.assert_array_equal(graph.node_mask, np.ones(7))
    assert graph.senders.dtype == graph.receivers.dtype == jnp.int32
    assert graph.weights.dtype == graph.node_mask.dtype == jnp.float32


def test_messages_flow_from_row_to_column():
    graph = graphs.from_adjacency(np.array([[0, 0.5], [0, 0]]))
    assert (graph.senders.tolist(), graph.receivers.tolist()) == ([0], [1])


def test_a_matrix_of_zeros_has_no_edge():
    graph = graphs.from_adjacency(np.zeros((3, 3), np.float32))
    assert graph.senders.shape == graph.receivers.shape == graph.weights.shape == (0,)
    assert graph.num_nodes == 3


@pytest.mark.parametrize("seed", range(3))
def test_permuting_nodes_permutes_rows_and_columns(seed):
    adjacency = random_adjacency(seed)
    order = np.random.default_rng(seed).permutation(7)
    graph = graphs.pad_nodes(graphs.from_adjacency(adjacency), 7)
    graph = graph._replace(node_mask=jnp.arange(7.0))
    permuted = graphs.permute(graph, order)
    npt.assert_array_equal(to_adjacency(permuted), adjacency[np.ix_(order, order)])
    npt.assert_array_equal(permuted.node_mask, np.arange(7.0)[order])
    assert np.all(np.diff(permuted.receivers) >= 0)
    assert permuted.senders.dtype == permuted.receivers.dtype == jnp.int32


def test_permuting_back_and_forth_changes_nothing():
    graph = graphs.from_adjacency(random_adjacency(0))
    order = np.array([6, 2, 0, 5, 1, 4, 3])
    there_and_back = graphs.permute(graphs.permute(graph, order), np.argsort(order))
    npt.assert_array_equal(to_adjacency(there_and_back), to_adjacency(graph))


def test_padding_adds_nodes_without_edges():
    adjacency = random_adjacency(1)
    graph = graphs.pad_nodes(graphs.from_adjacency(adjacency), 10)
    assert graph.num_nodes == 10
    npt.assert_array_equal(graph.node_mask, [1] * 7 + [0] * 3)
    npt.assert_array_equal(to_adjacency(graph)[:7, :7], adjacency)
    assert not np.any(to_adjacency(graph)[7:]) and not np.any(
        to_adjacency(graph)[:, 7:]
    )


def test_a_jraph_graph_holds_the_same_edges():
    graph = graphs.from_adjacency(random_adjacency(2))
    num_edges = len(graph.senders)
    nodes, edges, globals_ = (
        jnp.ones((7, 2)),
        jnp.ones((num_edges, 3)),
        jnp.ones((1, 4)),
    )
    tuple_ = graphs.to_jraph(graph, nodes, edges, globals_)
    assert tuple_.nodes is nodes and tuple_.edges is edges
    assert tuple_.globals is globals_
    npt.assert_array_equal(tuple_.senders, graph.senders)
    npt.assert_array_equal(tuple_.receivers, graph.receivers)
    assert (tuple_.n_node.tolist(), tuple_.n_edge.tolist()) == ([7], [num_edges])


def test_a_graph_is_a_pytree_of_arrays():
    graph = graphs.from_adjacency(random_adjacency(0))
    assert len(jax.tree.leaves(graph)) == 5
    assert jax.jit(lambda g: jnp.sum(g.weights))(graph) == pytest.approx(
        float(random_adjacency(0).sum()), rel=1e-6
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_dense_adjacency_has_receivers_for_rows_and_all_self_edges(seed):
    adjacency = random_adjacency(seed)
    adjacency[0, 0], adjacency[1, 1] = 0.4, 0
    dense = np.asarray(graphs.dense_adjacency(graphs.from_adjacency(adjacency)))
    for receiver in range(7):
        for sender in range(7):
            expected = adjacency[sender, receiver]
            if sender == receiver and expected == 0:
                expected = 1
            assert dense[receiver, sender] == expected
    assert dense[0, 0] == np.float32(0.4) and np.any(adjacency != adjacency.T)


def test_padded_nodes_have_but_a_self_edge():
    graph = graphs.from_adjacency(random_adjacency(0))
    dense = graphs.dense_adjacency(graph)
    padded = np.asarray(graphs.dense_adjacency(graphs.pad_nodes(graph, 9)))
    npt.assert_array_equal(padded[:7, :7], dense)
    npt.assert_array_equal(padded[7:], np.eye(9)[7:])
    npt.assert_array_equal(padded[:, 7:], np.eye(9)[:, 7:])


def test_normalised_rows_sum_to_one_and_empty_ones_are_self_edges():
    adjacency = np.array([[1, 3, 0], [0, 0, 0], [0, 2e-20, 0]], np.float32)
    normalised = graphs.row_normalise(jnp.asarray(adjacency))
    npt.assert_allclose(normalised, [[0.25, 0.75, 0], [0, 1, 0], [0, 1, 0]], rtol=1e-6)
    slope = jax.grad(lambda x: graphs.row_normalise(x).std())(adjacency[:2, :2])
    assert np.all(np.isfinite(slope))


@pytest.mark.parametrize("columns_per_chunk", [4096, 2])
def test_neighbours_are_those_along_outgoing_edges_without_oneself(
    monkeypatch, columns_per_chunk
):
    monkeypatch.setattr(graphs, "COLUMNS_PER_CHUNK", columns_per_chunk)
    adjacency = random_adjacency(3)
    adjacency[0, 0], adjacency[1, 1] = 0.4, 0
    order = np.array([6, 2, 0, 5, 1, 4, 3])
    permuted = graphs.permute(graphs.from_adjacency(adjacency), order)
    expected = adjacency[np.ix_(order, order)]
    np.fill_diagonal(expected, 0)
    features = np.random.default_rng(0).normal(size=(7, 3, 2)).astype(np.float32)
    assert len(permuted.neighbours) == np.count_nonzero(expected)
    npt.assert_allclose(
        graphs.neighbour_sum(permuted, features),
        np.einsum("ij,jab->iab", expected, features),
        rtol=1e-5,
        atol=1e-6,
    )
    npt.assert_allclose(graphs.neighbour_weights(permuted), expected, atol=1e-7)


@pytest.mark.parametrize(("backend", "is_told"), [("cpu", True), ("gpu", False)])
def test_a_gpu_is_not_told_that_segments_are_sorted(monkeypatch, backend, is_told):
    """It would sum them a thousand times as slowly; the sums are the same."""
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    segments = jnp.array([0, 0, 2, 3, 3])
    values = jnp.arange(10.0).reshape(5, 2)

    def total(values):
        return graphs.segment_sum(values, segments, 4, indices_are_sorted=True)

    lowered = jax.jit(total).lower(values)
    assert ("indices_are_sorted = true" in lowered.as_text()) == is_told
    expected = [values[:2].sum(0), np.zeros(2), values[2], values[3:].sum(0)]
    npt.assert_array_equal(lowered.compile()(values), np.stack(expected))
