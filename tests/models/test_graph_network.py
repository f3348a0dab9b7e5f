"""The graph network against golden numbers and a loop over edges."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import graphs, mesh, sharding
from fedjax_graph.core.errors import InputError
from fedjax_graph.models import graph_network

SMALL = graph_network.GraphNetwork(4, 3, (7, 6, 5), 2)


def num_params(params):
    return sum(x.size for x in jax.tree.leaves(params))


def golden_params(reference):
    """The reference's weights, under the names of our modules."""
    params = {}
    for name, value in reference.items():
        if not name.startswith("GraphNetwork/param/"):
            continue
        path = name.split("/")[2:]  # layer_0/edge/1/kernel or out/0/kernel
        if path[0] == "out":
            path = ["out", path[-1]]
        else:
            path = [path[0].replace("_", "s_"), path[1], f"layers_{path[2]}", path[3]]
        branch = params
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = value
    return params


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_golden_numbers(reference, quick_jit, backend, monkeypatch):
    """Of both ways to multiply an edge's features; that of a GPU pads the edges."""
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    order = np.argsort(reference["receivers"], kind="stable")
    graph = graphs.Graph(
        senders=jnp.asarray(reference["senders"][order]),
        receivers=jnp.asarray(reference["receivers"][order]),
        weights=jnp.asarray(reference["GraphNetwork/edges"][order, 0]),
        node_mask=jnp.ones(len(reference["x"])),
    )
    model = graph_network.GraphNetwork(8, 8, (16, 16, 12), 2)
    outputs = quick_jit(model.apply)(
        {"params": golden_params(reference)},
        graph,
        reference["GraphNetwork/nodes"][:, None],
    )
    npt.assert_allclose(outputs[:, 0], reference["GraphNetwork/output"], atol=1e-5)


def test_number_of_parameters():
    model = graph_network.GraphNetwork()
    params = jax.eval_shape(
        lambda key: graph_network.init_params(model, key), jax.random.key(0)
    )
    assert num_params(params) == 1_237_312


def mlp(layers, x):
    depth = len(layers)
    for index in range(depth):
        layer = layers[f"layers_{index}"]
        x = x @ layer["kernel"] + layer["bias"]
        x = np.maximum(x, 0) if index < depth - 1 else x
    return x


def loop_over_edges(params, adjacency, nodes, global_size):
    """Eq. 3 for one graph in float64, an edge at a time, all parts concatenated."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    nodes = list(nodes.astype(np.float64))
    edges = {(i, j): adjacency[i, j, None] for i, j in np.argwhere(adjacency)}
    global_ = np.zeros(global_size)
    for depth in range(len(params) - 1):
        layer = params[f"layers_{depth}"]
        new_edges = {
            (i, j): mlp(layer["edge"], np.concatenate([nodes[i], nodes[j], e, global_]))
            for (i, j), e in edges.items()
        }
        size = len(layer["edge"]["layers_2"]["bias"])
        new_nodes = []
        for node, value in enumerate(nodes):
            received = np.zeros(size)
            for (_, receiver), edge in new_edges.items():
                received += edge if receiver == node else 0
            new_nodes.append(
                mlp(layer["node"], np.concatenate([value, received, global_]))
            )
        all_edges = sum(new_edges.values(), np.zeros(size))
        new_global = mlp(
            layer["global"], np.concatenate([sum(new_nodes), all_edges, global_])
        )
        nodes = [np.concatenate(p) for p in zip(new_nodes, nodes, strict=True)]
        edges = {k: np.concatenate([new_edges[k], e]) for k, e in edges.items()}
        global_ = np.concatenate([new_global, global_])
    return np.stack(nodes) @ params["out"]["kernel"] + params["out"]["bias"]


def random_case(seed, batch=3, num_nodes=8, density=0.3):
    rng = np.random.default_rng(seed)
    adjacency = rng.uniform(0.1, 1, (num_nodes, num_nodes)).astype(np.float32)
    adjacency[rng.random(adjacency.shape) > density] = 0
    adjacency[:, 3] = 0  # receives nothing
    nodes = rng.normal(size=(num_nodes, batch, 4)).astype(np.float32)
    return adjacency, nodes


@pytest.fixture(scope="module")
def params(draw_params):
    return draw_params(functools.partial(graph_network.init_params, SMALL))


@pytest.fixture(scope="module")
def embed(params, quick_jit):
    """(graph, nodes) -> embeddings, of SMALL."""
    return quick_jit(functools.partial(SMALL.apply, {"params": params}))


@pytest.mark.parametrize(
    "num_layers, density, edges_per_chunk",
    [(1, 0.3, 0), (2, 0.3, 0), (3, 0.3, 0), (2, 0.0, 0), (2, 0.3, 6), (3, 0.3, 4)],
)
def test_a_loop_over_edges(
    num_layers, density, edges_per_chunk, draw_params, quick_jit
):
    """In chunks too, of which the last one has padding."""
    model = graph_network.GraphNetwork(4, 3, (7, 6, 5), num_layers, edges_per_chunk)
    params = draw_params(functools.partial(graph_network.init_params, model))
    adjacency, nodes = random_case(num_layers, density=density)
    graph = graphs.from_adjacency(adjacency)
    outputs = quick_jit(model.apply)({"params": params}, graph, nodes)
    for window in range(nodes.shape[1]):
        expected = loop_over_edges(params, adjacency, nodes[:, window], 4)
        npt.assert_allclose(outputs[:, window], expected, rtol=1e-5, atol=1e-5)
    assert not edges_per_chunk or len(graph.senders) % edges_per_chunk


def test_padded_nodes_change_nothing(embed):
    adjacency, nodes = random_case(0)
    graph = graphs.from_adjacency(adjacency)
    outputs = embed(graph, nodes)
    noise = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    padded = embed(graphs.pad_nodes(graph, 10), np.concatenate([nodes, noise]))
    npt.assert_allclose(padded[:8], outputs, atol=1e-6)
    unmasked = graphs.pad_nodes(graph, 10)._replace(node_mask=jnp.ones(10))
    seen = embed(unmasked, np.concatenate([nodes, noise]))
    assert np.abs(seen[:8] - outputs).max() > 1e-3  # so the mask is what hides them


def test_permuting_nodes_permutes_embeddings(embed):
    adjacency, nodes = random_case(2)
    order = np.random.default_rng(0).permutation(8)
    graph = graphs.from_adjacency(adjacency)
    outputs = embed(graph, nodes)
    permuted = embed(graphs.permute(graph, order), nodes[order])
    npt.assert_allclose(permuted, outputs[order], atol=1e-6)


def test_windows_of_a_batch_do_not_mix(embed):
    adjacency, nodes = random_case(3)
    graph = graphs.from_adjacency(adjacency)
    outputs = embed(graph, nodes)
    alone = embed(graph, nodes[:, 1:2])
    npt.assert_allclose(outputs[:, 1:2], alone, atol=1e-6)


def test_gradients_are_those_of_differences(params, quick_jit):
    adjacency, nodes = random_case(4, batch=1)
    graph = graphs.from_adjacency(adjacency)

    def loss(params):
        return jnp.sum(SMALL.apply({"params": params}, graph, nodes) ** 2)

    grads = quick_jit(jax.grad(loss))(params)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    slope = sum(
        np.sum(np.asarray(g, np.float64) * d)
        for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    )

    def exact(step):  # in float64, through the loop
        moved = jax.tree.map(lambda x, d: np.asarray(x) + step * d, params, direction)
        return np.sum(loop_over_edges(moved, adjacency, nodes[:, 0], 4) ** 2)

    npt.assert_allclose(slope, (exact(1e-6) - exact(-1e-6)) / 2e-6, rtol=1e-4)


# --- Edges in chunks ------------------------------------------------------------------


def in_chunks(edges_per_chunk):
    return SMALL.clone(edges_per_chunk=edges_per_chunk)


def loss_and_gradients(model):
    def loss(params, nodes, graph):
        return jnp.sum(model.apply({"params": params}, graph, nodes) ** 2)

    return lambda *args: jax.value_and_grad(loss, argnums=0)(*args)


@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_gradients_in_chunks_are_those_of_all_edges(shape, params, quick_jit):
    """On a mesh whose edge axis does not divide the chunk as well."""
    adjacency, nodes = random_case(5, batch=4)
    graph = graphs.from_adjacency(adjacency)
    expected = quick_jit(loss_and_gradients(SMALL))(params, nodes, graph)
    found = loss_and_gradients(in_chunks(5))
    if shape is None:
        found = quick_jit(found)(params, nodes, graph)
    else:
        with jax.set_mesh(mesh.make_mesh(2, jax.devices()[:4])):
            total = sharding.sum_parts(found, (None, 1, None), axes=(mesh.CLIENTS,))
            found = quick_jit(total)(params, nodes, graph)
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )


def test_a_chunk_of_all_edges_is_the_same_program(params):
    adjacency, nodes = random_case(6)
    graph = graphs.from_adjacency(adjacency)
    programs = {
        str(jax.make_jaxpr(in_chunks(size).apply)({"params": params}, graph, nodes))
        for size in (0, len(graph.senders), 10**6)
    }
    assert len(programs) == 1


def test_chunks_bound_the_memory_of_the_gradient(params, quick_jit):
    nodes, num_edges = np.ones((8, 16, 4), np.float32), 1024
    ends = np.arange(num_edges, dtype=np.int32) // (num_edges // 8)
    graph = graphs.Graph(ends, ends, np.ones(num_edges, np.float32), np.ones(8))

    def temporary_bytes(edges_per_chunk):
        fn = quick_jit(loss_and_gradients(in_chunks(edges_per_chunk)))
        compiled = fn.lower(params, nodes, graph).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(32) < 0.2 * temporary_bytes(0)


@pytest.mark.parametrize(
    "num_nodes, num_edges, batch_size, expected",
    [(207, 1722, 48, 0), (325, 2694, 128, 0), (716, 17320, 48, 716)],
)
def test_auto_leaves_whole_what_is_small(num_nodes, num_edges, batch_size, expected):
    """METR-LA, PEMS-BAY with the largest minibatch released, San Diego."""
    found = graph_network.auto_edges_per_chunk(num_nodes, num_edges, batch_size, 256)
    assert found == expected


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("node_size", (0, -1, 1.5, None)),
        ("output_size", (0, -1, 1.5)),
        ("num_layers", (0, -1, 1.5)),
        ("edges_per_chunk", (-1, 2.0, None)),
        ("mlp_sizes", ((), (5,), (7, 0), (7, -1), (7, 1.5), "ab", 7)),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(setting, values):
    for wrong in values:
        match = f"^GraphNetwork {setting}={re.escape(repr(wrong))}: expected"
        with pytest.raises(InputError, match=match) as raised:
            graph_network.GraphNetwork(**{setting: wrong})
        assert "\n" not in str(raised.value)


def test_sizes_may_be_a_list(params, quick_jit):
    adjacency, nodes = random_case(7)
    graph = graphs.from_adjacency(adjacency)
    listed = quick_jit(SMALL.clone(mlp_sizes=[7, 6, 5]).apply)
    outputs = listed({"params": params}, graph, nodes)
    expected = loop_over_edges(params, adjacency, nodes[:, 0], 4)
    npt.assert_allclose(outputs[:, 0], expected, rtol=1e-5, atol=1e-5)
