"""The part of jraph that the library relies on, pinned at 0.0.6.dev0."""

from importlib import metadata

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpy.testing as npt

SENDERS, RECEIVERS = np.array([0, 2, 1, 0]), np.array([0, 0, 1, 2])
NODES = np.array([[1.0, 2], [3, 4], [5, 6]], np.float32)
EDGES = np.array([[10.0], [20], [30], [40]], np.float32)
GLOBALS = np.array([[100.0]], np.float32)


def make_graph(nodes=NODES):
    return jraph.GraphsTuple(
        nodes=nodes,
        edges=jnp.asarray(EDGES),
        globals=jnp.asarray(GLOBALS),
        senders=jnp.asarray(SENDERS),
        receivers=jnp.asarray(RECEIVERS),
        n_node=jnp.array([3]),
        n_edge=jnp.array([4]),
    )


def test_the_pinned_release_is_installed():
    assert metadata.version("jraph") == "0.0.6.dev0"


def test_a_graph_is_a_named_tuple_and_a_pytree():
    assert jraph.GraphsTuple._fields == (
        *("nodes", "edges", "receivers", "senders"),
        *("globals", "n_node", "n_edge"),
    )
    assert len(jax.tree.leaves(make_graph())) == 7


def network(record):
    """A network of sums that records what its functions are given."""

    def update_edge(edges, sent, received, globals_):
        record["edge"] = (edges, sent, received, globals_)
        return edges + sent[:, :1] + 2 * received[:, :1] + globals_

    def update_node(nodes, sent, received, globals_):
        record["node"] = (nodes, sent, received, globals_)
        return nodes + received

    def update_global(node_sum, edge_sum, globals_):
        record["global"] = (node_sum, edge_sum, globals_)
        return globals_ + edge_sum

    def sum_all(values, index, num_graphs):
        assert (index.shape, num_graphs) == ((len(values),), 1)
        return jnp.sum(values, axis=0, keepdims=True)

    return jraph.GraphNetwork(
        update_edge,
        update_node,
        update_global,
        aggregate_edges_for_nodes_fn=jax.ops.segment_sum,
        aggregate_nodes_for_globals_fn=sum_all,
        aggregate_edges_for_globals_fn=sum_all,
    )


def test_the_updates_see_what_the_library_expects():
    record = {}
    updated = network(record)(make_graph())
    edges, sent, received, globals_ = record["edge"]
    npt.assert_array_equal(edges, EDGES)
    npt.assert_array_equal(sent, NODES[SENDERS])
    npt.assert_array_equal(received, NODES[RECEIVERS])
    npt.assert_array_equal(globals_, np.full((4, 1), 100))
    new_edges = np.array(
        [[e[0] + NODES[s, 0] + 2 * NODES[r, 0] + 100]
         for e, s, r in zip(EDGES, SENDERS, RECEIVERS, strict=True)]
    )  # fmt: skip
    npt.assert_array_equal(updated.edges, new_edges)
    nodes, sent_sum, received_sum, globals_ = record["node"]
    npt.assert_array_equal(nodes, NODES)
    for node in range(3):
        npt.assert_allclose(sent_sum[node], new_edges[node == SENDERS].sum(0))
        npt.assert_allclose(received_sum[node], new_edges[node == RECEIVERS].sum(0))
    npt.assert_array_equal(globals_, np.full((3, 1), 100))
    node_sum, edge_sum, globals_ = record["global"]
    npt.assert_allclose(node_sum, np.sum(updated.nodes, 0, keepdims=True))
    npt.assert_allclose(edge_sum, new_edges.sum(0, keepdims=True))
    npt.assert_array_equal(updated.globals, 100 + new_edges.sum(0, keepdims=True))


def test_nodes_may_be_a_pytree_gathered_leaf_by_leaf():
    seen = {}

    def update_edge(edges, sent, received, _):
        seen["sent"], seen["received"] = sent[0], received[1]
        return edges

    jraph.GraphNetwork(update_edge, None)(make_graph((NODES, 2 * NODES)))
    npt.assert_array_equal(seen["sent"], NODES[SENDERS])
    npt.assert_array_equal(seen["received"], 2 * NODES[RECEIVERS])


def test_graphs_of_one_shape_stack_under_vmap():
    scaled = [make_graph(scale * NODES) for scale in (1, 3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *scaled)
    mapped = jax.vmap(network({}))(stacked)
    for index, graph in enumerate(scaled):
        one = network({})(graph)
        npt.assert_allclose(mapped.nodes[index], one.nodes)
        npt.assert_allclose(mapped.globals[index], one.globals)
