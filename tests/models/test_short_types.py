"""Degrees and sums of bytes and short floats, which hold no 257, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import graphs
from fedjax_graph.models import adaptive_propagation, gcn, graph_network, relaxation
from fedjax_graph.models.convolutions import CONVOLUTIONS
from fedjax_graph.models.message_passing import make_structure, repeat
from fedjax_graph.models.normalization import BatchNorm, masked_moments, unit_rows

NUM_SENDERS = 300  # of node 0: more than uint8 holds, or bfloat16 counts one by one
SIZE = 3
SHORT = ("uint8", "int8", "bfloat16", "float16")
WHOLE, FLOATS = SHORT[:2], SHORT[2:]
every_type = pytest.mark.parametrize("dtype", SHORT)
every_float = pytest.mark.parametrize("dtype", FLOATS)


def star(dtype, weights=None):
    """Node 0 receives from 300 others, and each of them from node 0."""
    others, zeros = np.arange(1, NUM_SENDERS + 1), np.zeros(NUM_SENDERS, int)
    nodes = np.random.default_rng(0).integers(1, 4, (NUM_SENDERS + 1, SIZE))
    return jraph.GraphsTuple(
        nodes=jnp.asarray(nodes, dtype),
        edges=None if weights is None else jnp.ones(2 * NUM_SENDERS, weights),
        senders=jnp.asarray(np.concatenate([others, zeros]), jnp.int32),
        receivers=jnp.asarray(np.concatenate([zeros, others]), jnp.int32),
        globals=None,
        n_node=jnp.array([len(nodes)]),
        n_edge=jnp.array([2 * NUM_SENDERS]),
    )


def close(found, expected, dtype):
    """Of the type that the inputs give, and as near as it is precise."""
    assert found.dtype == (jnp.float32 if dtype in WHOLE else dtype)
    rtol = 1e-5 if dtype in WHOLE else 0.01
    npt.assert_allclose(np.asarray(found, float), expected, rtol=rtol, atol=rtol)


def in_type(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@every_type
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_over_many_neighbours(dtype, is_weighted):
    graph = star(dtype, dtype if is_weighted else None)
    structure = make_structure(graph, None)
    x = np.asarray(graph.nodes, float)
    adjacency = np.zeros((len(x), len(x)))
    adjacency[0, 1:] = adjacency[1:, 0] = 1
    degrees = adjacency.sum(1)
    assert structure.degrees.dtype == jnp.float32
    npt.assert_array_equal(structure.degrees, degrees)
    sent = graph.nodes[graph.senders]
    close(structure.sum(sent), adjacency @ x, dtype)
    close(structure.mean(sent), adjacency @ x / degrees[:, None], dtype)
    for own in (0, 1):
        matrix = adjacency + own * np.eye(len(x))
        scale = matrix.sum(1) ** -0.5
        expected = scale[:, None] * (matrix @ (scale[:, None] * x))
        close(structure.normalised_sum(graph.nodes, own), expected, dtype)
    matrix = adjacency + np.eye(len(x))
    logits = jnp.zeros_like(structure.weights)[:, None]
    attended = structure.attend(logits, 0.0, graph.nodes)
    close(attended, matrix @ x / matrix.sum(1, keepdims=True), dtype)
    if is_weighted:
        close(gcn.propagate(graph), adjacency @ x, dtype)


@functools.cache
def drawn(name):
    settings = {"num_heads": 2} if name == "GATConv" else {}
    settings = {"num_hops": 2} if name in ("SGConv", "APPNP") else settings
    model = CONVOLUTIONS[name](SIZE, **settings)
    return model, model.init(jax.random.key(0), star("float32"))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_convolutions_of_short_types_are_those_of_float32(name, dtype):
    """Where all is bfloat16, so are outputs and running statistics."""
    model, variables = drawn(name)
    mask = jnp.ones(NUM_SENDERS + 1)
    own, own_mask = (variables, mask)
    if dtype not in WHOLE:
        own, own_mask = in_type((variables, mask), dtype)

    def apply(variables, graph, mask):
        return model.apply(variables, graph, mask, mutable=["batch_stats"])

    exact = in_type(own, "float32")  # with the same rounded weights
    expected, stats = apply(exact, star("float32"), mask)
    found, own_stats = apply(own, star(dtype), own_mask)
    assert found.dtype == (jnp.float32 if dtype in WHOLE else dtype)
    scale = np.abs(expected).max()
    found = np.asarray(found, np.float32)
    npt.assert_allclose(
        found, expected, atol=(1e-5 if dtype in WHOLE else 0.03) * scale
    )
    for one, other in zip(*map(jax.tree.leaves, (own_stats, stats)), strict=True):
        assert one.dtype == jax.tree.leaves(own)[0].dtype
        npt.assert_allclose(np.asarray(one, float), other, rtol=0.02, atol=0.02)


def test_a_repeated_step_may_widen_the_type():
    found = repeat(lambda x: x * jnp.float32(0.5), jnp.array([6, 2], jnp.uint8), 2)
    npt.assert_array_equal(found, [1.5, 0.5])


def test_arrays_of_numpy_in_float64_give_what_jax_computes_in():
    rows = np.random.default_rng(2).uniform(1, 2, (4, 4))
    found = unit_rows(rows), graphs.row_normalise(rows)
    norms = np.linalg.norm(rows, axis=1), rows.sum(1)
    graph = star("float32")._replace(edges=np.ones(2 * NUM_SENDERS))
    summed = make_structure(graph, None).sum(jnp.ones((2 * NUM_SENDERS, 1)))
    assert {x.dtype for x in (*found, summed)} == {jnp.dtype(jnp.float32)}
    for ours, norm in zip(found, norms, strict=True):
        npt.assert_allclose(ours, rows / norm[:, None], rtol=1e-6)
    assert summed[0] == NUM_SENDERS


# --- Graphs of clients ----------------------------------------------------------------


@every_type
def test_neighbour_sums_of_client_graphs(dtype):
    own = star(dtype)
    order = np.arange(2 * NUM_SENDERS)
    graph = graphs.Graph(
        own.senders, own.receivers, jnp.ones(order.size, dtype), jnp.ones(301), order
    )
    x = np.asarray(own.nodes, float)
    expected = np.concatenate([x[1:].sum(0)[None], np.tile(x[0], (NUM_SENDERS, 1))])
    close(graphs.neighbour_sum(graph, own.nodes), expected, dtype)


@every_type
def test_rows_of_many_ones_are_normalised(dtype):
    rows = graphs.row_normalise(jnp.ones((NUM_SENDERS, NUM_SENDERS), dtype))
    close(rows, np.full((NUM_SENDERS, NUM_SENDERS), 1 / NUM_SENDERS), dtype)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
@pytest.mark.parametrize("edges_per_chunk", [0, 128])
def test_the_graph_network_counts_many_edges(dtype, edges_per_chunk):
    """By its last bias alone, of which node 0 receives 300."""
    model = graph_network.GraphNetwork(1, 1, (2, 1), 1, edges_per_chunk)
    params = graph_network.init_params(model, jax.random.key(0))
    params = jax.tree.map(jnp.zeros_like, params)
    layer = params["layers_0"]
    layer["edge"]["layers_1"]["bias"] = jnp.ones(1)
    layer["node"]["layers_0"]["kernel"] = jnp.zeros((3, 2)).at[1, 0].set(1)
    layer["node"]["layers_1"]["kernel"] = jnp.array([[1.0], [0]])
    params["out"]["kernel"] = jnp.array([[1.0], [0]])
    own = star(dtype)
    graph = graphs.Graph(own.senders, own.receivers, jnp.ones(600), jnp.ones(301))
    params = params if dtype in WHOLE else in_type(params, dtype)
    found = model.apply({"params": params}, graph, jnp.zeros((301, 1, 1), dtype))
    close(found[:, 0, 0], [NUM_SENDERS] + [1] * NUM_SENDERS, dtype)


# --- Normalisation, and sums over pairs -----------------------------------------------


@every_type
def test_moments_of_a_long_batch(dtype):
    rng = np.random.default_rng(1)
    x, mask = rng.integers(0, 9, (NUM_SENDERS, 1, 1, 2)), np.ones(NUM_SENDERS)
    mask[257:] = 0
    found = masked_moments(jnp.asarray(x, dtype), jnp.asarray(mask, dtype))
    for ours, expected in zip(found, (x[:257].mean(0), x[:257].var(0)), strict=True):
        assert ours.dtype == jnp.float32
        npt.assert_allclose(ours, expected[0, 0], rtol=1e-5)


@every_float
def test_a_normalised_batch_keeps_its_type(dtype):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 1, 1, 2)), dtype)
    variables = in_type(BatchNorm().init(jax.random.key(0), x), dtype)
    found, stats = BatchNorm().apply(
        variables, x, jnp.ones(64, dtype), mutable=["batch_stats"]
    )
    exact = np.asarray(x, float)
    expected = (exact - exact.mean(0)) / exact.std(0)
    assert {leaf.dtype for leaf in jax.tree.leaves((found, stats))} == {x.dtype}
    npt.assert_allclose(np.asarray(found, float), expected, atol=0.03)


@every_type
def test_long_rows_have_a_direction(dtype):
    rows = jnp.full((2, NUM_SENDERS), 16, dtype)  # whose square is 0 of uint8
    close(unit_rows(rows), np.full(rows.shape, NUM_SENDERS**-0.5), dtype)


@every_float
def test_nodes_that_are_alike_are_found(dtype):
    """0.999 is 1 in bfloat16, above which no cosine is."""
    size = NUM_SENDERS + 1
    structure = make_structure(star(dtype), None)
    logits, is_real = jnp.ones((size, 2), dtype), jnp.ones(size, dtype)
    spread = adaptive_propagation.propagation(structure, logits, is_real, 0.0)
    found = spread(jnp.zeros((size, 1), dtype).at[0].set(size))
    close(found, np.ones((size, 1)), dtype)
    signs = adaptive_propagation.signed(logits, jnp.ones((), dtype), is_real)
    assert signs.dtype == dtype


@every_float
def test_half_of_the_trained_nodes_are_counted(dtype, monkeypatch):
    structure, counts = make_structure(star(dtype), None), []
    lowest = adaptive_propagation.lowest

    def counted(values, is_real, number):
        counts.append(float(number))
        return lowest(values, is_real, number)

    monkeypatch.setattr(adaptive_propagation, "lowest", counted)
    is_trained = jnp.ones(301, dtype).at[:2].set(0)
    labels = jnp.zeros(301, jnp.int32)
    adaptive_propagation.homophily(structure, labels, is_trained, 2, jax.random.key(0))
    assert counts == [149]


@every_float
def test_shares_of_rare_layers_are_finite(dtype):
    """The floor of a divisor is 0 in float16."""
    certain = np.zeros((2, 25), np.float32)
    certain[:, 0] = 1
    certain[0, [0, 1]] = 0.5
    shares = relaxation.layer_shares(jnp.asarray(certain, dtype), "paper")
    expected = np.zeros((3, 12))
    expected[0, 0] = 1
    close(shares, expected, dtype)
    close(
        relaxation.fusion_shares(jnp.asarray(certain, dtype), "all", "paper"),
        [0.5, 0.5, 0],
        dtype,
    )
