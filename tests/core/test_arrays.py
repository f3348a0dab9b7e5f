"""What JAX would clamp, broadcast or average to NaN is refused in one line."""

import re
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


WRONG = {  # what it is -> (words of the refusal, the call)
    "other clients": (
        "expected a row for each of 2 clients",
        lambda: aggregation.weighted_mean(MODELS, cohort([1, 1])),
    ),
    "a column of weights": (
        "cohort.weights has shape (3, 1)",
        lambda: aggregation.median(MODELS, Cohort(np.arange(3), np.ones((3, 1)))),
    ),
    "a negative weight": (
        "cohort.weights has -1.0",
        lambda: aggregation.weighted_mean(MODELS, cohort([1, -1, 1])),
    ),
    "one weight for all": (
        "expected a row for each of 1 clients",
        lambda: aggregation.client_mean(MODELS, np.ones(1)),
    ),
    "a server without axis": (
        "leaf of server has shape (2,), expected (1, 2)",
        lambda: aggregation.attention({"w": np.ones(2)})(MODELS, cohort()),
    ),
    "indices beyond": (
        "cohort.indices has 7",
        lambda: convolve(np.ones((3, 3)), cohort(indices=[0, 1, 7])),
    ),
    "a negative index": (
        "cohort.indices has -1",
        lambda: convolve(np.ones((3, 3)), cohort(indices=[0, 1, -1])),
    ),
    "negative edges": (
        "adjacency has -1.0",
        lambda: convolve(-np.ones((3, 3))),
    ),
    "edges of NaN": (
        "adjacency has nan",
        lambda: convolve(np.full((3, 3), np.nan)),
    ),
    "a negative power": (
        "num_steps = -1",
        lambda: convolve(np.ones((3, 3)), num_steps=-1),
    ),
    "a share above 1": (
        "alpha=7: expected a number from 0 to 1",
        lambda: convolve(np.ones((3, 3)), alpha=7),
    ),
    "a share of NaN": (
        "alpha=nan: expected a number from 0 to 1",
        lambda: convolve(np.ones((3, 3)), alpha=float("nan")),
    ),
    "a step of NaN": (
        "step_size has nan",
        lambda: aggregation.attention(MODELS, step_size=float("nan")),
    ),
    "negative noise": (
        "scale has -1.0",
        lambda: aggregation.with_noise(aggregation.none, KEY, -1.0),
    ),
    "an oblong adjacency": (
        "adjacency has shape (2, 3)",
        lambda: graphs.from_adjacency(np.ones((2, 3))),
    ),
    "a NaN edge": (
        "adjacency has nan",
        lambda: graphs.from_adjacency(np.full((2, 2), np.nan)),
    ),
    "a complex edge": (
        "type complex128, expected real",
        lambda: graphs.from_adjacency(np.ones((2, 2), complex)),
    ),
    "a sender beyond": (
        "senders has 9, expected 0 to 2",
        lambda: graphs.dense_adjacency(with_first("senders", 9)),
    ),
    "a negative receiver": (
        "receivers has -1, expected 0 to 2",
        lambda: graphs.dense_adjacency(with_first("receivers", -1)),
    ),
    "receivers that fall": (
        "expected them to ascend",
        lambda: graphs.dense_adjacency(with_first("receivers", 2)),
    ),
    "senders of floats": (
        "senders has type float32",
        lambda: graphs.dense_adjacency(GRAPH._replace(senders=GRAPH.senders * 1.0)),
    ),
    "one edge weight": (
        "expected weights of shape (9,)",
        lambda: graphs.dense_adjacency(GRAPH._replace(weights=GRAPH.weights[:1])),
    ),
    "features of twice the nodes": (
        "expected those of the 3 nodes",
        lambda: graphs.neighbour_sum(GRAPH, jnp.ones(6)),
    ),
    "an order with a node twice": (
        "each of 3 nodes once",
        lambda: graphs.permute(GRAPH, np.array([0, 0, 1])),
    ),
    "fewer nodes": (
        "num_nodes=2: the graph has 3",
        lambda: graphs.pad_nodes(GRAPH, 2),
    ),
    "a graph of others": (
        "3 nodes, expected one for each of 2 clients",
        lambda: graphs.client_adjacency(data([0, 1], [1, 1])),
    ),
    "a column to normalise": (
        "adjacency has shape (2, 1)",
        lambda: graphs.row_normalise(jnp.ones((2, 1))),
    ),
    "two shares": (
        "participation=2.0",
        lambda: clients.sample_cohort(KEY, np.arange(4), np.ones(4), 2.0),
    ),
    "fewer weights": (
        "client_weights has shape (3,), expected (4)",
        lambda: clients.sample_cohort(KEY, np.arange(4), np.ones(3), 1.0),
    ),
    "nobody": (
        "number of clients = 0",
        lambda: clients.sample_cohort(KEY, np.arange(0), np.ones(0), 1.0),
    ),
    "ids of floats": (
        "client_ids has type float64",
        lambda: clients.client_keys(KEY, np.array([0.2, 0.7])),
    ),
    "chunks of none": (
        "rows_per_chunk = 0",
        lambda: clients.map_axis(jnp.sum, 0)(jnp.ones((3, 2))),
    ),
    "1, 2 and 3 rows": (
        "leaf of shape (2,): expected 1 or 3 rows",
        lambda: clients.map_rows(lambda *x: x[0])(
            jnp.ones(1), jnp.ones(2), jnp.ones(3)
        ),
    ),
    "no examples": (
        "number of examples = 0",
        lambda: batching.batches(jnp.zeros(0, int), 4),
    ),
    "no batch": (
        "batch_size = 0",
        lambda: batching.batches(jnp.zeros(3, int), 0),
    ),
    "no epoch": (
        "num_epochs = 0",
        lambda: batching.shuffled_batches(KEY, 3, 4, 0),
    ),
    "a row beyond": (
        "indices has 7, expected 0 to 2",
        lambda: trees.take(MODELS, np.array([7])),
    ),
    "a mask that broadcasts": (
        "values (3,), mask (3, 1): expected the same",
        lambda: masks.masked_mean(jnp.ones(3), jnp.ones((3, 1))),
    ),
    "integers in 8 bits": (
        "cannot cross in 8 bits, expected rows of floats",
        lambda: communication.pack(np.ones((2, 2), int), 8),
    ),
    "sent by others": (
        "sent has a leaf of shape (5, 2)",
        lambda: encryption.mean("none")(MODELS, cohort(), {"w": np.ones((5, 2), bool)}),
    ),
    "an id twice": (
        "two clients with a weight have one id",
        lambda: clients.check_clients(data([0, 0], [1, 1]), "data"),
    ),
    "an id of 64 bits": (
        "client_ids has 4294967301, expected 0 to 2147483647",
        lambda: clients.check_clients(data([5, 5 + 2**32], [1, 1]), "data"),
    ),
    "another order": (
        "the split test: client_ids stand in another order than in `train`",
        lambda: clients.check_order(
            data([4, 2], [1, 1]), data([2, 4], [1, 1]), "the split test"
        ),
    ),
    "no data": (
        "all client_weights are 0",
        lambda: clients.check_clients(data([0, 1], [[1, 0], [0, 0]]), "data"),
    ),
}


@pytest.mark.parametrize(("words", "call"), WRONG.values(), ids=WRONG)
def test_what_would_be_wrong_in_silence_is_refused(words, call):
    with pytest.raises(InputError, match=re.escape(words)) as raised:
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


def test_other_clients_may_be_scored():
    train = data([4, 2], [1, 1])
    for ids in ([4, 2], [4, 3], [2], [9, 4, 2]):
        clients.check_order(train, data(ids, [1] * len(ids)), "the split test")
    clients.check_order(train, types.SimpleNamespace(), "the split test")


def test_padding_may_share_an_id():
    clients.check_clients(data([0, 1, -1, -1], [1, 1, 0, 0]), "data")
