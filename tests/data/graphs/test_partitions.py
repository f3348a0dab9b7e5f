"""Partitions by communities and by labels, and the split within clients."""

import networkx
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import (
    client_subgraphs,
    node_dataset,
    partitions,
    subgraphs,
)
from fedjax_graph.data.graphs.partitions import PartitionConfig
from tests import client_graphs
from tests.algorithms import test_openfgl
from tests.data.graphs.test_subgraphs import graph

SIZE, CLIENTS = 120, 4


def cliques(num_cliques, size):
    """Complete graphs, one after another in a ring."""
    ring = networkx.ring_of_cliques(num_cliques, size)
    return networkx.to_scipy_sparse_array(ring, dtype=np.float32, format="csr")


def test_louvain_keeps_communities_whole():
    cut = subgraphs.parts(cliques(12, 10), CLIENTS, partition="louvain")
    assert {len(nodes) for nodes in cut.nodes} == {30}
    for start in range(0, SIZE, 10):
        assert len(set(cut.owners[start : start + 10])) == 1


def test_louvain_cuts_large_communities_and_balances_clients():
    adjacency = cliques(3, 40)
    for balance in (0, 10):
        config = PartitionConfig(balance=balance)
        cut = subgraphs.parts(adjacency, CLIENTS, partition="louvain", config=config)
        sizes = [len(nodes) for nodes in cut.nodes]
        assert max(sizes) - min(sizes) <= 30 - balance
        whole = [np.bincount(cut.owners[i : i + 40], minlength=4) for i in (0, 40, 80)]
        assert np.max(whole) <= 30 - balance + 10


def test_louvain_deals_the_largest_community_first():
    """The two small ones then fill the other client."""
    separate = networkx.disjoint_union_all(map(networkx.complete_graph, (4, 4, 8)))
    adjacency = networkx.to_scipy_sparse_array(separate, dtype=np.float32, format="csr")
    config = PartitionConfig(balance=0)
    cut = subgraphs.parts(adjacency, 2, partition="louvain", config=config)
    assert [len(nodes) for nodes in cut.nodes] == [8, 8]


def test_louvain_refuses_a_balance_that_takes_communities_apart():
    """12 nodes a client, and pieces of 12 - 12 nodes."""
    with pytest.raises(InputError, match="balance=12 leaves no node of the 12"):
        config = PartitionConfig(balance=12)
        subgraphs.parts(cliques(12, 10), 10, partition="louvain", config=config)


def test_a_higher_resolution_gives_smaller_communities():
    """Of two cliques of a ring one, instead of both."""
    adjacency, kept = cliques(60, 3), []
    for resolution in (0.2, 5.0):
        config = PartitionConfig(resolution=resolution, balance=0)
        cut = subgraphs.parts(adjacency, 3, partition="louvain", config=config)
        kept.append(subgraphs.statistics(adjacency, cut)["edges_kept"])
    assert kept[0] > kept[1]


@pytest.mark.parametrize("balance", [3, 10, 20])
def test_communities_are_dealt_in_turn_as_openfgl_does(balance, monkeypatch):
    """See `louvain_in_turn` in `tests/algorithms/openfgl_golden.py`."""
    golden = test_openfgl.load("louvain_in_turn")
    found = [set(np.flatnonzero(golden["communities"] == i)) for i in range(12)]
    monkeypatch.setattr(
        networkx.community, "louvain_communities", lambda *_, **__: found
    )
    config = PartitionConfig(balance=balance, deal="in_turn")
    empty = scipy.sparse.csr_array((240, 240), dtype=np.float32)
    cut = subgraphs.parts(empty, 5, partition="louvain", config=config)
    npt.assert_array_equal(cut.owners, golden[f"owners_{balance}"])


def test_a_piece_that_no_client_has_room_for_goes_to_the_smallest():
    """Of ten nodes a client, none may have 12: with 7, 6, 6 there is no room for 6.

    Of the two that have 6 it is the one whose turn it was.
    """
    sizes = [7, 6, 6, 6, 5]
    assert partitions.DEALS["in_turn"](sizes, 3, balance=2) == [0, 1, 2, 2, 1]
    assert partitions.DEALS["fewest"](sizes, 3, balance=2) == [0, 1, 2, 1, 2]


def test_clients_that_are_left_without_nodes_are_refused():
    """Of twelve pieces of ten four clients take three each, 30 of the 33 they may."""
    config = PartitionConfig(balance=10, deal="in_turn")
    with pytest.raises(InputError, match="num_clients = 5: .* leaves client 4 without"):
        subgraphs.parts(cliques(12, 10), 5, partition="louvain", config=config)


@pytest.mark.parametrize("partition", ["louvain_plus", "metis_plus"])
def test_communities_of_similar_labels_go_to_one_client(partition):
    """Twelve cliques of ten, of labels 0 to 2 in turn but for a node in each."""
    majority = np.repeat(np.arange(12) % 3, 10)
    labels = majority.copy()
    labels[::10] = (labels[::10] + 1) % 3
    config = PartitionConfig(num_communities=12)
    cut = subgraphs.parts(cliques(12, 10), 3, 0, partition, 1, labels, config)
    groups = {tuple(np.unique(majority[nodes])) for nodes in cut.nodes}
    assert groups == {(0,), (1,), (2,)}
    for start in range(0, SIZE, 10):
        assert len(set(cut.owners[start : start + 10])) == 1


@pytest.mark.parametrize(
    "match, partition, labels, number",
    [
        ("1 communities do not fall", "louvain_plus", np.arange(9), 3),
        ("raise num_communities", "metis_plus", np.arange(9), 2),
        ("num_communities = 10: expected 9 or less", "metis_plus", np.arange(9), 10),
        ("need the labels", "louvain_plus", None, 3),
        ("3 communities do not fall", "metis_plus", np.zeros(9, int), 3),
    ],
)
def test_communities_that_do_not_fall_into_groups(match, partition, labels, number):
    whole = networkx.complete_graph(9)
    adjacency = networkx.to_scipy_sparse_array(whole, dtype=np.float32, format="csr")
    config = PartitionConfig(num_communities=number)
    with pytest.raises(InputError, match=match):
        subgraphs.parts(adjacency, 3, 0, partition, 0, labels, config)


@pytest.mark.parametrize("concentration", [0.3, 1e4])
def test_labels_are_dealt_by_a_dirichlet_draw(concentration):
    labels = np.arange(3000) % 3
    config = PartitionConfig(concentration=concentration)
    cut = subgraphs.parts(
        graph(3000, share=0.001)[0], CLIENTS, 0, "label_dirichlet", 1, labels, config
    )
    counts = np.array([np.bincount(labels[own], minlength=3) for own in cut.nodes])
    assert counts.sum() == 3000
    spread = (counts / counts.sum(axis=0)).std()
    assert spread > 0.1 if concentration < 1 else spread < 0.02


@pytest.mark.filterwarnings("error")
def test_a_class_of_which_nobody_draws_a_share_goes_to_who_has_few_nodes():
    """A draw may give all of it to clients that have enough."""
    labels, num_clients = np.repeat(np.arange(12), 20), 4
    config = PartitionConfig(concentration=1e-3, least_nodes=1)
    for seed in range(30):
        args = num_clients, 0, "label_dirichlet", seed, labels, config
        cut = subgraphs.parts(graph(240)[0], *args)
        sizes = [len(own) for own in cut.nodes]
        assert sum(sizes) == 240
        assert max(sizes) < 60 + 20  # N / K, and a class


def test_as_few_nodes_as_asked_for_are_enough():
    config, labels = PartitionConfig(least_nodes=9), np.zeros(9, np.int64)
    cut = subgraphs.parts(graph(9)[0], 1, 0, "label_dirichlet", 0, labels, config)
    assert len(cut.nodes[0]) == 9


def test_draws_that_leave_too_few_nodes_are_refused():
    config = PartitionConfig(concentration=0.01, least_nodes=25)
    with pytest.raises(InputError, match="least_nodes = 25"):
        labels = np.zeros(101, np.int64)
        subgraphs.parts(graph(101)[0], CLIENTS, 0, "label_dirichlet", 0, labels, config)


def test_more_nodes_than_there_are_for_all_are_refused_before_a_draw():
    """Whatever the concentration: so its message says nothing of that."""
    config, labels = PartitionConfig(least_nodes=5), np.zeros(29, np.int64)
    words = "6 clients cannot have so many of 29 nodes"
    with pytest.raises(InputError, match=f"least_nodes = 5: {words}"):
        subgraphs.parts(graph(29)[0], 6, 0, "label_dirichlet", 0, labels, config)


# --- Splits within clients ------------------------------------------------------------


def test_a_split_takes_shares_of_each_class_of_each_client():
    rng = np.random.default_rng(0)
    labels, owners = rng.integers(-1, 3, 500), rng.integers(0, 4, 500)
    split = client_subgraphs.client_split(labels, owners, seed=3)
    for client in range(4):
        for kind in range(3):
            own = (owners == client) & (labels == kind)
            counts = [int(own[nodes].sum()) for nodes in split]
            ends = [int(share * own.sum() + 1e-9) for share in (0.2, 0.6, 1.0)]
            assert np.cumsum(counts).tolist() == ends
    assert (labels[np.concatenate(split)] >= 0).all()
    again = client_subgraphs.client_split(labels, owners, seed=3)
    npt.assert_array_equal(np.concatenate(split), np.concatenate(again))


def test_shares_whose_sum_is_rounded_down_leave_no_node_out():
    """In floats, 0.7 + 0.1 is below 0.8."""
    zeros = np.zeros(10, int)
    split = client_subgraphs.client_split(zeros, zeros, (0.7, 0.1, 0.2))
    assert [len(nodes) for nodes in split] == [7, 1, 2]


@pytest.mark.parametrize("fractions", [(0.5, 0.4, 0.2), (-0.1, 0.5, 0.6)])
def test_fractions_that_are_no_shares_are_refused(fractions):
    with pytest.raises(InputError, match="fractions"):
        client_subgraphs.client_split(np.zeros(9, int), np.zeros(9, int), fractions)


def test_linked_data_know_of_edges_between_clients_and_of_nodes():
    settings = {"outside_neighbours": True, "is_linked": True}
    train = client_graphs.make_splits(**settings)["train"]
    dense = node_dataset.adjacency(client_graphs.make_dataset()).toarray()
    own = [
        np.asarray(ids)[np.asarray(mask) > 0]
        for ids, mask in zip(train.node_ids, train.is_own, strict=True)
    ]
    assert sorted(np.concatenate(own)) == list(range(len(dense)))
    counts = np.array([[dense[np.ix_(a, b)].sum() for b in own] for a in own])
    assert (np.diagonal(counts) > 0).all()
    found = np.zeros_like(counts)
    found[train.graph.receivers, train.graph.senders] = train.graph.weights
    npt.assert_array_equal(found, counts)
