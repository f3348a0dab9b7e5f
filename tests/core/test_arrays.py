"""What JAX would clamp, broadcast or average to NaN is refused in one line."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.core import (
    aggregation,
    arrays,
    batching,
    clients,
    communication,
    encryption,
    graphs,
    masks,
    trees,
)
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError

KEY = jax.random.key(0)
MODELS = {"w": np.ones((3, 2), np.float32)}
GRAPH = graphs.from_adjacency(np.ones((3, 3), np.float32))


def cohort(weights=(1, 1, 1), indices=None):
    indices = np.arange(len(weights)) if indices is None else np.array(indices)
    return Cohort(indices, np.array(weights, np.float32))


def convolve(adjacency, own=None, **settings):
    own = own or cohort()
    return aggregation.graph_convolution(adjacency, **settings)(MODELS, own)


def with_first(field, value):
    edges = np.array(getattr(GRAPH, field))
    edges[0] = value
    return GRAPH._replace(**{field: edges})


def data(ids, weights):
    return types.SimpleNamespace(
        client_ids=np.array(ids), client_weights=np.array(weights), graph=GRAPH
    )


WRONG = {
    "other clients": lambda: aggregation.weighted_mean(MODELS, cohort([1, 1])),
    "a column of weights": lambda: aggregation.median(
        MODELS, Cohort(np.arange(3), np.ones((3, 1)))
    ),
    "a negative weight": lambda: aggregation.weighted_mean(MODELS, cohort([1, -1, 1])),
    "one weight for all": lambda: aggregation.client_mean(MODELS, np.ones(1)),
    "a server without axis": lambda: aggregation.attention({"w": np.ones(2)})(
        MODELS, cohort()
    ),
    "indices beyond": lambda: convolve(np.ones((3, 3)), cohort(indices=[0, 1, 7])),
    "a negative index": lambda: convolve(np.ones((3, 3)), cohort(indices=[0, 1, -1])),
    "negative edges": lambda: convolve(-np.ones((3, 3))),
    "edges of NaN": lambda: convolve(np.full((3, 3), np.nan)),
    "a negative power": lambda: convolve(np.ones((3, 3)), num_steps=-1),
    "negative noise": lambda: aggregation.with_noise(aggregation.none, KEY, -1.0),
    "an oblong adjacency": lambda: graphs.from_adjacency(np.ones((2, 3))),
    "a NaN edge": lambda: graphs.from_adjacency(np.full((2, 2), np.nan)),
    "a complex edge": lambda: graphs.from_adjacency(np.ones((2, 2), complex)),
    "a sender beyond": lambda: graphs.dense_adjacency(with_first("senders", 9)),
    "a negative receiver": lambda: graphs.dense_adjacency(with_first("receivers", -1)),
    "receivers that fall": lambda: graphs.dense_adjacency(with_first("receivers", 2)),
    "senders of floats": lambda: graphs.dense_adjacency(
        GRAPH._replace(senders=GRAPH.senders * 1.0)
    ),
    "one edge weight": lambda: graphs.dense_adjacency(
        GRAPH._replace(weights=GRAPH.weights[:1])
    ),
    "features of twice the nodes": lambda: graphs.neighbour_sum(GRAPH, jnp.ones(6)),
    "an order with a node twice": lambda: graphs.permute(GRAPH, np.array([0, 0, 1])),
    "fewer nodes": lambda: graphs.pad_nodes(GRAPH, 2),
    "a graph of others": lambda: graphs.client_adjacency(data([0, 1], [1, 1])),
    "a column to normalise": lambda: graphs.row_normalise(jnp.ones((2, 1))),
    "two shares": lambda: clients.sample_cohort(KEY, np.arange(4), np.ones(4), 2.0),
    "fewer weights": lambda: clients.sample_cohort(KEY, np.arange(4), np.ones(3), 1.0),
    "nobody": lambda: clients.sample_cohort(KEY, np.arange(0), np.ones(0), 1.0),
    "ids of floats": lambda: clients.client_keys(KEY, np.array([0.2, 0.7])),
    "chunks of none": lambda: clients.map_axis(jnp.sum, 0)(jnp.ones((3, 2))),
    "1, 2 and 3 rows": lambda: clients.map_rows(lambda *x: x[0])(
        jnp.ones(1), jnp.ones(2), jnp.ones(3)
    ),
    "no examples": lambda: batching.batches(jnp.zeros(0, int), 4),
    "no batch": lambda: batching.batches(jnp.zeros(3, int), 0),
    "no epoch": lambda: batching.shuffled_batches(KEY, 3, 4, 0),
    "a row beyond": lambda: trees.take(MODELS, np.array([7])),
    "a mask that broadcasts": lambda: masks.masked_mean(jnp.ones(3), jnp.ones((3, 1))),
    "integers in 8 bits": lambda: communication.pack(np.ones((2, 2), int), 8),
    "sent by others": lambda: encryption.mean("none")(
        MODELS, cohort(), {"w": np.ones((5, 2), bool)}
    ),
    "an id twice": lambda: clients.check_clients(data([0, 0], [1, 1]), "data"),
    "no data": lambda: clients.check_clients(data([0, 1], [[1, 0], [0, 0]]), "data"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_would_be_wrong_in_silence_is_refused(call):
    with pytest.raises(InputError) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_shapes_and_types_are_checked_while_tracing_and_values_are_not():
    def trace(indices):
        assert not arrays.is_known(indices)
        arrays.check_indices("indices", indices, 1)
        with pytest.raises(
            InputError, match=r"rows has shape \(2,\), expected \(any, 3"
        ):
            arrays.check_shape("rows", indices, (None, 3))
        with pytest.raises(InputError, match="type float32, expected whole"):
            arrays.check_indices("indices", indices * 1.0, 1)
        return indices

    assert jax.eval_shape(trace, jnp.array([5, 9])).shape == (2,)


def test_an_edge_of_weight_0_may_point_anywhere():
    graph = with_first("senders", 9)
    weights = np.array(graph.weights)
    weights[0] = 0
    graphs.check(graph._replace(weights=weights))


def test_padding_may_share_an_id():
    clients.check_clients(data([0, 1, -1, -1], [1, 1, 0, 0]), "data")
