"""Lost and generated neighbours against loops over nodes and edges."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.data.graphs import mending
from fedjax_graph.data.graphs.mending import Neighbours
from tests import client_graphs
from tests.client_graphs import NUM_FEATURES, alone

KEY, PLACES = jax.random.key(0), 2


@pytest.fixture(scope="module")
def train():
    return client_graphs.make_splits()["train"]


@pytest.fixture(scope="module")
def own(train):
    """Client 2, whose five nodes are padded."""
    return jax.tree.map(lambda x: x[2], train)


@pytest.fixture(scope="module")
def hidden(own):
    return jnp.zeros(len(own.labels)).at[jnp.array([1, 4])].set(1)


def test_a_share_of_the_candidates_is_hidden(own):
    candidates = jnp.array([1.0, 0, 1, 1, 0, 1, 1, 0])
    draws = [
        mending.draw_hidden(jax.random.key(seed), candidates, 0.5) for seed in range(5)
    ]
    for drawn in draws:
        assert jnp.sum(drawn) == 2  # of five
        assert not jnp.any(drawn * (1 - candidates))
    assert len({tuple(drawn.tolist()) for drawn in draws}) > 1


def test_what_hidden_nodes_take_along(train, own, hidden):
    mine, is_hidden = alone(train, 2), np.asarray(hidden) > 0
    edges = list(zip(mine.senders, mine.receivers, strict=True))
    kept = [not is_hidden[[s, r]].any() for s, r in edges]
    left = mending.without(own, hidden).edge_weights
    npt.assert_array_equal(left[: len(edges)], kept)
    lost = mending.hidden_neighbours(own, hidden, PLACES)
    for node in range(len(mine.labels)):
        gone = [s for s, r in edges if r == node and is_hidden[s] and not is_hidden[r]]
        assert lost.counts[node] == len(gone)
        for place, sender in enumerate(gone[:PLACES]):
            assert lost.nodes[node, place] == sender


def test_filled_graphs_have_edges_both_ways(train, own):
    counts = jnp.array([1.9, 0.4, 7, 0, 2, 9, 9, 9])  # three nodes are padding
    rng, size = np.random.default_rng(0), len(own.labels)
    features = rng.normal(size=(size, PLACES, NUM_FEATURES)).astype(np.float32)
    filled = mending.fill(own, Neighbours(counts, features))
    rows, is_there = filled.features.dense(), np.asarray(filled.edge_weights) > 0
    ends = zip(
        np.asarray(filled.senders)[is_there],
        np.asarray(filled.receivers)[is_there],
        strict=True,
    )
    assert (np.diff(filled.receivers) >= 0).all()
    before = np.asarray(own.edge_weights) > 0
    expected = {
        (int(s), int(r))
        for s, r in zip(own.senders[before], own.receivers[before], strict=True)
    }
    for node, number in enumerate((1, 0, 2, 0, 2)):
        for place in range(number):
            added = size + node * PLACES + place
            expected |= {(node, added), (added, node)}
            npt.assert_array_equal(rows[added], features[node, place])
            assert filled.is_real[added]
    assert set(ends) == expected
    assert jnp.sum(filled.is_real) == 5 + 5
    assert not jnp.any(filled.is_trained[size:]) and not jnp.any(
        filled.is_scored[size:]
    )
    nothing = mending.fill(
        own, jax.tree.map(lambda x: 0 * x, Neighbours(counts, features))
    )
    npt.assert_allclose(jnp.sum(nothing.edge_weights), jnp.sum(own.edge_weights))


def test_where_no_client_has_an_edge_the_first_node_is_drawn(own):
    bare = own._replace(
        **{x: getattr(own, x)[:0] for x in ("senders", "receivers", "edge_weights")}
    )
    drawn = mending.draw_neighbours(KEY, bare, own, PLACES)
    npt.assert_array_equal(drawn, np.zeros((8, PLACES)))


def test_each_generated_neighbour_is_near_one_that_was_lost():
    rng = np.random.default_rng(0)
    made, wanted = rng.normal(size=(2, 4, PLACES, 3))
    made_counts, counts = np.array([2.7, 1.2, 2, 0.9]), np.array([1, 5, 0, 2])
    expected = np.zeros((4, PLACES))
    for i in range(4):
        for p in range(min(PLACES, int(made_counts[i]))):
            gaps = [
                np.mean((made[i, p] - wanted[i, k]) ** 2)
                for k in range(min(PLACES, counts[i]))
            ]
            expected[i, p] = min(gaps, default=0)
    found = mending.greedy_distance(
        Neighbours(made_counts, jnp.asarray(made)), Neighbours(counts, wanted)
    )
    npt.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_neighbours_of_others_are_drawn_where_there_are_some(train, own):
    """Node 0 of the dataset has no edge: nobody draws its neighbours."""
    other, known = jax.tree.map(lambda x: x[0], train), alone(train, 0)
    keys = jax.random.split(KEY, 4)
    draws = [np.asarray(mending.draw_neighbours(key, other, own, 40)) for key in keys]
    assert draws[0].shape == (8, 40)
    drawn = np.concatenate(draws)
    assert set(drawn.flat) == set(known.senders)
    ends = known.senders, known.receivers
    near = [set(ends[0][ends[1] == node]) for node in set(ends[1])]
    for row in drawn:  # all neighbours of one node
        assert any(set(row) <= options for options in near)


def test_what_was_not_found_has_the_type_of_what_may_be(train):
    """A branch finds some and another none: of float64, as of all others."""
    short = train._replace(features=train.features.astype(jnp.float16))
    made = mending.nothing_found(short, PLACES)
    assert made.counts.dtype == made.features.dtype == jnp.float16


def test_neighbours_at_each_other_client_are_drawn_apart(train, own):
    """By a key of the other client's number, which has no other use."""
    made = mending.nothing_found(train, PLACES)
    made = Neighbours(made.counts[0] + 9, made.features[0])
    pair = jax.tree.map(lambda x: x[jnp.array([2, 0])], train)

    def gap(client_id):
        data = pair._replace(client_ids=jnp.array([2, client_id]))
        return mending.distance_to_others(KEY, made, made.counts, own, data)[0]

    assert gap(0) == gap(0) != gap(7)


def test_a_client_counts_the_others_of_some_weight(train, own):
    made = mending.nothing_found(train, PLACES)
    made = Neighbours(made.counts[0] + 9, made.features[0])
    counts = made.counts
    gaps, number = mending.distance_to_others(KEY, made, counts, own, train)
    assert number == 5 and gaps > 0
    nobody = train._replace(client_weights=jnp.zeros(5).at[2].set(1))
    gaps, number = mending.distance_to_others(KEY, made, counts, own, nobody)
    assert number == 1 and gaps == 0


def test_distances_are_summed_over_graphs_and_averaged_over_training_nodes(train, own):
    """Of three graphs one does not count, nor do nodes that are not trained."""
    rng, (size, width) = np.random.default_rng(1), own.features.shape
    features = jnp.asarray(rng.normal(size=(size, PLACES, width)), jnp.float32)
    made = Neighbours(jnp.array([1.5, 2, 0.5, 2, 2, 1, 1, 1]), features)
    counts = jnp.array([2.0, 1, 2, 0, 2, 1, 1, 1])
    nodes = rng.integers(0, size, (3, size, PLACES))
    others, is_there = train.features[:3], jnp.array([True, False, True])
    own = own._replace(is_trained=jnp.array([1.0, 0, 1, 1, 1, 0, 0, 0]))

    def expected(features):
        made_too = made._replace(features=features)
        gaps = [
            mending.greedy_distance(made_too, Neighbours(counts, others[j][nodes[j]]))
            for j in (0, 2)
        ]
        return jnp.sum(own.is_trained[:, None] * sum(gaps)) / PLACES / 4

    def found(features):
        made_too = made._replace(features=features)
        args = counts, jnp.asarray(nodes), others, is_there, own
        return mending.distance(made_too, *args)

    pairs = zip(
        *(jax.value_and_grad(x)(features) for x in (found, expected)), strict=True
    )
    for pair in pairs:
        npt.assert_allclose(*pair, rtol=1e-4, atol=1e-6)
    assert found(features) > 0


def test_nodes_of_others_are_drawn_alike_however_many_edges_they_have(own):
    """Of a star and a node alone three in four are leaves, and all of these see 0."""
    ends = jnp.array([0, 0, 0, 1, 2, 3]), jnp.array([1, 2, 3, 0, 0, 0])
    order = jnp.argsort(ends[1])
    star = own._replace(
        senders=ends[0][order],
        receivers=ends[1][order],
        edge_weights=jnp.ones(6),
        labels=jnp.zeros(5),
    )
    many = own._replace(labels=jnp.zeros(4000))
    drawn = np.asarray(mending.draw_neighbours(KEY, star, many, 3))
    assert abs(np.mean(drawn == 0) - 0.75) < 0.02
    npt.assert_allclose([np.mean(drawn == n) for n in (1, 2, 3)], 1 / 12, atol=0.01)
    assert drawn.max() == 3
