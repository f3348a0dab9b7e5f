"""A small SuperNet, codes and graphs, and parts of networks by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from fedjax_graph.models import architecture
from fedjax_graph.models.architecture import ACTIVATIONS
from fedjax_graph.models.supernet import SuperNet, empty_graph

NUM_NODES, NUM_EDGES, PADDED_NODES, PADDED_EDGES = 7, 18, 10, 24
NUM_FEATURES, NUM_CLASSES = 5, 3
SLOTS = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]  # (layer, what it reads)
OF_2022 = {"space": "2022", "fusion": "leaves"}
NET = SuperNet(NUM_FEATURES, NUM_CLASSES, num_layers=3, width=4, **OF_2022)
PAPER_NET = dataclasses.replace(NET, space="paper", fusion="all")
NET_FUSING_ALL = dataclasses.replace(NET, fusion="all")
NET_WITH_DROPOUT = dataclasses.replace(NET, dropout=0.25)
CODES = [  # every op, activation and predecessor, present and absent
    (1, 1, 14, 27, 5),  # GAT <- input, GIN <- 1, SAGE <- 2
    (2, 4, 5, 18, 4),  # GCN <- input, SG <- input, APPNP <- 1
    (3, 0, 20, 31, 3),  # ARMA <- input in place of 1, AGNN <- 2
    (4, 9, 0, 34, 2),  # FeaSt <- input, GEN <- input in place of 2
    (5, 11, 12, 3, 1),  # GMM, GatedGraph and SAGE <- input
    (3, 10, 14, 14, 5),  # GEN <- input, GIN and GIN <- 1
    (4, 0, 0, 2, 5),  # GIN <- input alone
    (2, 0, 0, 0, 5),
]


def make_graph(seed, num_padded=0):
    """A graph with a node of its own, padded by garbage, and its mask."""
    rng = np.random.default_rng(seed)
    nodes = rng.normal(size=(NUM_NODES, NUM_FEATURES))
    ends = rng.integers(0, NUM_NODES - 1, (2, NUM_EDGES))
    weights = rng.choice([0.5, 1, 2], NUM_EDGES)
    if num_padded:
        garbage = 50 * rng.normal(size=(num_padded, NUM_FEATURES))
        nodes = np.concatenate([nodes, garbage])
        extra = PADDED_EDGES - NUM_EDGES
        garbage = rng.integers(NUM_NODES, len(nodes), (2, extra))
        ends = np.concatenate([garbage, ends], axis=1)
        weights = np.concatenate([np.ones(extra), weights])
    graph = jraph.GraphsTuple(
        nodes=jnp.asarray(nodes, jnp.float32),
        edges=jnp.asarray(weights, jnp.float32),
        senders=jnp.asarray(ends[0], jnp.int32),
        receivers=jnp.asarray(ends[1], jnp.int32),
        globals=None,
        n_node=jnp.array([len(nodes)]),
        n_edge=jnp.array([len(weights)]),
    )
    return graph, (jnp.arange(len(nodes)) < NUM_NODES).astype(jnp.float32)


def at(index, stacked):
    """A row of all leaves."""
    return jax.tree.map(lambda x: np.asarray(x[index]), stacked)


def stage(model, name, gene, x):
    """The input or the output stage by hand."""
    own = at(0, model["params"][name])
    activation = list(ACTIVATIONS.values())[gene - 1]
    return activation(x @ own["kernel"] + own["bias"])


def total_loss(outputs, mask):
    """A loss of the masked nodes in which no two outputs count alike."""
    coefficients = jnp.linspace(0.2, 1, outputs.size).reshape(outputs.shape)
    return jnp.sum(mask[:, None] * coefficients * (outputs + outputs**2))


def unpacked(net, model, code):
    """The variables of `net.network(code)`, cut out of a `PackedNet`'s rows by hand."""
    network = architecture.decode_static(code, net.space)
    variables = {"params": dict(model["params"]), "batch_stats": {}}
    del variables["params"]["layers"]
    for i in np.flatnonzero(network.is_present):
        op = architecture.OPS[network.op[i]]
        drawn = net.module(op).init(jax.random.key(0), empty_graph(net.width))
        rows = {
            "params": model["params"]["layers"],
            "batch_stats": model["batch_stats"],
        }
        for kind in drawn:
            leaves, structure = jax.tree.flatten(drawn[kind])
            ends = np.cumsum([x.size for x in leaves])
            parts = np.split(np.asarray(rows[kind][i])[: ends[-1]], ends[:-1])
            own = [x.reshape(y.shape) for x, y in zip(parts, leaves, strict=True)]
            variables[kind][f"layer_{i + 1}"] = jax.tree.unflatten(structure, own)
    return variables
