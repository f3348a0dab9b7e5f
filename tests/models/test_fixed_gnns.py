"""The eight fixed graph networks against the paper's counts and dense algebra."""

import functools

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core import sparse_rows
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masked_rows import MaskedRows
from fedjax_graph.core.spread_rows import SpreadRows
from fedjax_graph.models.fixed_gnns import FIXED_GNNS, PAPER_GNNS, FixedGNN
from fedjax_graph.models.supernet import empty_graph

NUM_NODES, NUM_FEATURES, NUM_CLASSES, HIDDEN_SIZE = 8, 7, 3, 8
NUM_PADDED_NODES, NUM_PADDED_EDGES = 3, 6
every_one = pytest.mark.parametrize("op", FIXED_GNNS)
every_paper_one = pytest.mark.parametrize("op", PAPER_GNNS)


def build(op, **settings):
    """A network with few hidden units."""
    if op != "sgc":
        settings = {"hidden_size": HIDDEN_SIZE, **settings}
    return FixedGNN(op, NUM_CLASSES, **settings)


@pytest.fixture(scope="module")
def variables(draw_params):
    graph = empty_graph(NUM_FEATURES)
    return functools.cache(
        lambda op: draw_params(lambda key: build(op).init(key, graph))
    )


@pytest.fixture(scope="module")
def apply(quick_jit):
    """(variables, graph, mask) -> logits, by name."""
    return functools.cache(lambda op: quick_jit(build(op).apply))


@pytest.fixture(scope="module")
def dense():
    """A weighted adjacency matrix, [i, j] what node i receives from j, and features.

    A ring, in which ten steps still differ from nine, of unequal weights both ways,
    an edge across it, and an isolated node.
    """
    rng = np.random.default_rng(5)
    ring = np.arange(NUM_NODES - 1)
    matrix = np.zeros((NUM_NODES, NUM_NODES))
    for next_one in (np.roll(ring, 1), np.roll(ring, -1)):
        matrix[ring, next_one] = rng.choice([0.5, 1, 2], len(ring))
    matrix[0, 3] = 1
    return matrix, rng.normal(size=(NUM_NODES, NUM_FEATURES))


def to_graph(matrix, nodes):
    receivers, senders = np.nonzero(matrix)
    return jraph.GraphsTuple(
        nodes=jnp.asarray(nodes, jnp.float32),
        edges=jnp.asarray(matrix[receivers, senders], jnp.float32),
        senders=jnp.asarray(senders, jnp.int32),
        receivers=jnp.asarray(receivers, jnp.int32),
        globals=None,
        n_node=jnp.array([len(nodes)]),
        n_edge=jnp.array([len(senders)]),
    )


# --- Parameters ----------------------------------------------------------------------

DATASETS = {  # numbers of features and classes
    "cora": (1433, 7),
    "citeseer": (3703, 6),
    "pubmed": (500, 3),
    "cora_full": (8710, 70),
    "physics": (8415, 5),
}
PAPER = {  # millions, Tables 3 and 4
    "gat": (0.092, 0.238, 0.032, 0.562, 0.539),
    "sage": (0.184, 0.475, 0.064, 1.124, 1.078),
    "gcn": (0.102, 0.260, 0.034, 1.172, 0.581),
    "sgc": (0.010, 0.022, 0.002, 0.610, 0.042),
    "appnp": (0.092, 0.237, 0.032, 0.562, 0.539),
    "agnn": (0.023, 0.059, 0.008, 0.141, 0.135),
    "arma": (0.092, 0.237, 0.032, 0.562, 0.539),
    "gated_graph": (0.130, 0.275, 0.070, 0.599, 0.576),
}
VARIANT_OF = {
    "gat_one_head": "gat",
    "sage_relu": "sage",
    "agnn_two_layers": "agnn",
    "arma_one_stack": "arma",
}


def num_parameters(op, num_features, num_classes):
    init = FixedGNN(op, num_classes).init
    drawn = jax.eval_shape(init, jax.random.key(0), empty_graph(num_features))
    assert list(drawn) == ["params"]
    return sum(x.size for x in jax.tree.leaves(drawn))


@every_one
def test_number_of_parameters_is_the_papers(op):
    printed_ones = PAPER[VARIANT_OF.get(op, op)]
    for (dataset, sizes), printed in zip(DATASETS.items(), printed_ones, strict=True):
        number = num_parameters(op, *sizes)
        if op == "gcn":
            number += (sizes[0] + 1) * sizes[1]  # a linear map beside the two layers
        if (op, dataset) == ("gated_graph", "cora"):
            assert number == 129_479
        else:
            assert abs(number / 1e6 - printed) <= 0.0005, (dataset, number)


def test_number_of_parameters_by_layer():
    features, hidden, classes = 1433, 64, 7
    linear = (features + 1) * hidden + (hidden + 1) * classes
    expected = {
        "gat": linear + 2 * (hidden + classes),
        "sage": 2 * (features * hidden + hidden * classes) + hidden + classes,
        "gcn": linear,
        "sgc": (features + 1) * classes,
        "appnp": linear,
        "agnn": (features + 1) * 16 + 17 * classes + 3,
        "arma": 2 * 2 * (features * 16 + 16 * classes) + 2 * (16 + classes),
        "gated_graph": linear + 3 * hidden**2 + 6 * hidden * (hidden + 1),
        "gat_one_head": linear + 2 * (hidden + classes),
        "sage_relu": 2 * (features * hidden + hidden * classes) + hidden + classes,
        "agnn_two_layers": (features + 1) * 16 + 17 * classes + 2,
        "arma_one_stack": 2 * (features * 32 + 32 * classes) + 32 + classes,
    }
    counts = {op: num_parameters(op, features, classes) for op in FIXED_GNNS}
    assert counts == expected


@every_one
def test_sparse_features_are_read_as_dense_ones(op, dense, variables, apply):
    matrix, features = dense
    features = features * (np.arange(NUM_FEATURES) % 3 == 0)
    graph = to_graph(matrix, features)
    rows = sparse_rows.stack([scipy.sparse.csr_array(features)], NUM_NODES)
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
    found = apply(op)(variables(op), graph._replace(nodes=one))
    npt.assert_allclose(found, apply(op)(variables(op), graph), rtol=1e-5, atol=1e-6)


@every_one
def test_masked_features_are_read_as_dense_ones(op, dense, variables, quick_jit):
    """With their gradients, where some are dropped too; padding is as if 0."""
    graph = to_graph(*dense)
    assert not np.any(dense[0][-1]) and not np.any(dense[0][:, -1])
    mask = (jnp.arange(NUM_NODES) < NUM_NODES - 1).astype(jnp.float32)
    padded, rubbish = graph.nodes * mask[:, None], graph.nodes.at[-1].set(1e3)
    masked = MaskedRows((rubbish[:3], rubbish[3:]), mask)
    for settings in ({}, {"dropout": 0.4}):
        net, rngs = build(op, **settings), {"dropout": jax.random.key(1)}

        def loss(variables, nodes, net=net, rngs=rngs):
            own = graph._replace(nodes=nodes)
            outputs = net.apply(variables, own, is_training=True, rngs=rngs)
            return jnp.sum(outputs**2), outputs

        run = quick_jit(jax.grad(loss, has_aux=True))
        found, expected = (run(variables(op), x) for x in (masked, padded))
        close = functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, found, expected)


@every_one
def test_spread_features_are_read_by_a_gcn_alone(op, dense, variables, apply):
    matrix, features = dense
    with_self = np.asarray(matrix) + np.eye(len(features))
    scale = with_self.sum(axis=1) ** -0.5
    rows = (scale[:, None] * with_self * scale) @ np.asarray(features)
    graph = to_graph(matrix, features)
    spread = graph._replace(nodes=SpreadRows(jnp.asarray(rows)))
    if op != "gcn":
        with pytest.raises(InputError, match="only a GCN that drops none of them"):
            apply(op)(variables(op), spread)
        return
    found, expected = (apply(op)(variables(op), x) for x in (spread, graph))
    npt.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    dropping = FixedGNN(op, NUM_CLASSES, dropout=0.5)
    with pytest.raises(InputError, match="only a GCN that drops none of them"):
        dropping.apply(variables(op), spread)


# --- Outputs -------------------------------------------------------------------------


def relu(x):
    return np.maximum(x, 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def affine(p, x):
    return x @ p["kernel"] + p["bias"]


def with_self(matrix):
    return matrix + np.eye(NUM_NODES)


def rows(weights):
    """Rows that sum to 1, or to 0 where they are empty."""
    return weights / np.maximum(weights.sum(1, keepdims=True), 1e-12)


def symmetric(matrix):
    """Every entry over the root of both nodes' degrees."""
    degrees = matrix.sum(1)
    return matrix / np.sqrt(np.maximum(np.outer(degrees, degrees), 1e-12))


def dense_gcn(p, matrix, x):
    spread = symmetric(with_self(matrix))
    hidden = relu(spread @ affine(p["hidden"] | {"bias": 0}, x) + p["hidden"]["bias"])
    return spread @ hidden @ p["head"]["kernel"] + p["head"]["bias"]


def dense_sgc(p, matrix, x):
    spread = symmetric(with_self(matrix))
    return affine(p["head"], spread @ (spread @ x))


def dense_appnp(p, matrix, x):
    """The ten steps as the series that they sum up."""
    logits = affine(p["head"], relu(affine(p["hidden"], x)))
    spread = 0.9 * symmetric(with_self(matrix))
    powers = [np.linalg.matrix_power(spread, k) for k in range(11)]
    return (0.1 * sum(powers[:10]) + powers[10]) @ logits


def dense_sage(p, matrix, x, activation=sigmoid):
    def layer(own, x):
        return rows(matrix) @ affine(own | {"bias": 0}, x) + affine(
            {"kernel": own["root_kernel"], "bias": own["bias"]}, x
        )

    return layer(p["head"], activation(layer(p["hidden"], x)))


def elu(x):
    return np.where(x > 0, x, np.exp(x) - 1)


def dense_gat(p, matrix, x):
    """Heads side by side in the first layer, where there are several."""

    def layer(own, x):
        z = x @ own["kernel"]
        sent, received = (z @ own["attention"]).T
        logits = sent + received[:, None]
        shares = with_self(matrix) * np.exp(np.where(logits > 0, logits, 0.2 * logits))
        return rows(shares) @ z

    own, heads = p["hidden"], [p["hidden"]]
    if own["kernel"].ndim == 3:
        pairs = zip(own["kernel"], own["attention"], strict=True)
        heads = [{"kernel": kernel, "attention": a} for kernel, a in pairs]
    hidden = np.hstack([layer(head, x) for head in heads]) + own["bias"]
    return layer(p["head"], elu(hidden)) + p["head"]["bias"]


def dense_agnn(p, matrix, x):
    x = relu(affine(p["hidden"], x))
    for name in sorted(name for name in p if name.startswith("inner")):
        unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        x = rows(with_self(matrix) * np.exp(p[name]["beta"] * (unit @ unit.T))) @ x
    return affine(p["head"], x)


def dense_arma(p, matrix, x):
    def layer(own, x):
        stacks = (
            symmetric(matrix) @ x @ own["kernel"][:, k]
            + x @ own["root_kernel"][:, k]
            + own["bias"][k]
            for k in range(len(own["bias"]))
        )
        several = len(own["bias"]) > 1  # of one stack the ReLU stands between layers
        return np.mean([relu(x) if several else x for x in stacks], axis=0)

    hidden = layer(p["hidden"], x)
    one_stack = len(p["hidden"]["bias"]) == 1
    return layer(p["head"], relu(hidden) if one_stack else hidden)


def dense_gated_graph(p, matrix, x):
    state, own, gru = relu(affine(p["hidden"], x)), p["inner_1"], p["inner_1"]["gru"]
    for name in ("kernel", "kernel_2", "kernel_3"):
        received = matrix @ state @ own[name] @ gru["input_kernel"] + gru["input_bias"]
        kept = state @ gru["hidden_kernel"] + gru["hidden_bias"]
        received, kept = (np.split(each, 3, axis=1) for each in (received, kept))
        reset, update = (sigmoid(received[i] + kept[i]) for i in (0, 1))
        candidate = np.tanh(received[2] + reset * kept[2])
        state = (1 - update) * candidate + update * state
    return affine(p["head"], state)


DENSE = {
    "gat": dense_gat,
    "sage": dense_sage,
    "gcn": dense_gcn,
    "sgc": dense_sgc,
    "appnp": dense_appnp,
    "agnn": dense_agnn,
    "arma": dense_arma,
    "gated_graph": dense_gated_graph,
    "gat_one_head": dense_gat,
    "sage_relu": functools.partial(dense_sage, activation=relu),
    "agnn_two_layers": dense_agnn,
    "arma_one_stack": dense_arma,
}


@every_one
def test_against_dense_algebra(op, dense, variables, apply):
    matrix, nodes = dense
    logits = apply(op)(variables(op), to_graph(matrix, nodes))
    assert logits.shape == (NUM_NODES, NUM_CLASSES)
    params = jax.tree.map(lambda x: x.astype(np.float64), variables(op)["params"])
    expected = DENSE[op](params, matrix, nodes)
    assert expected.max() > 0 > expected.min() or op == "arma"  # ends with a ReLU
    npt.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@every_paper_one
def test_padding_changes_nothing(op, dense, variables, apply):
    matrix, nodes = dense
    graph, rng = to_graph(matrix, nodes), np.random.default_rng(1)
    garbage = 50 * rng.normal(size=(NUM_PADDED_NODES, NUM_FEATURES))
    indices = NUM_NODES + rng.integers(0, NUM_PADDED_NODES, (2, NUM_PADDED_EDGES))
    ends = np.concatenate([indices, np.stack([graph.senders, graph.receivers])], axis=1)
    padded = graph._replace(
        nodes=jnp.concatenate([graph.nodes, jnp.asarray(garbage, jnp.float32)]),
        edges=jnp.concatenate([jnp.ones(NUM_PADDED_EDGES), graph.edges]),
        senders=jnp.asarray(ends[0], jnp.int32),
        receivers=jnp.asarray(ends[1], jnp.int32),
    )
    mask = (jnp.arange(len(padded.nodes)) < NUM_NODES).astype(jnp.float32)
    logits = apply(op)(variables(op), graph)
    of_padded = apply(op)(variables(op), padded, mask)
    npt.assert_allclose(of_padded[:NUM_NODES], logits, rtol=1e-6, atol=1e-6)
    assert np.isfinite(of_padded).all()


@every_paper_one
def test_gradients_are_finite_and_reach_every_weight(op, dense, variables, quick_jit):
    graph = to_graph(*dense)
    coefficients = jnp.linspace(0.2, 1, NUM_NODES * NUM_CLASSES).reshape(NUM_NODES, -1)

    @quick_jit
    @jax.grad
    def gradients(drawn):
        return jnp.sum(coefficients * build(op).apply(drawn, graph) ** 2)

    for leaf in jax.tree.leaves(gradients(variables(op))):
        assert np.isfinite(leaf).all() and np.any(leaf)


# --- Dropout -------------------------------------------------------------------------


@every_paper_one
def test_dropout_is_in_training_alone(op, dense, variables, apply, quick_jit):
    graph, model = to_graph(*dense), build(op, dropout=0.5)

    @quick_jit
    def trained(key):
        rngs = {"dropout": key}
        return model.apply(variables(op), graph, is_training=True, rngs=rngs)

    still = apply(op)(variables(op), graph)
    npt.assert_array_equal(quick_jit(model.apply)(variables(op), graph), still)
    first, second = (trained(jax.random.key(seed)) for seed in (0, 1))
    npt.assert_array_equal(trained(jax.random.key(0)), first)
    assert not np.allclose(first, second) and not np.allclose(first, still)
    without = quick_jit(functools.partial(build(op).apply, is_training=True))
    npt.assert_array_equal(without(variables(op), graph), still)


def test_what_is_dropped():
    """On a node alone, with kernels of ones, logits count what was kept.

    Two features, each kept with probability 1/2 and then doubled, make any hidden unit
    0, 2 or 4; two hidden units, dropped likewise, make a logit.
    """
    graph = empty_graph(2)._replace(nodes=jnp.ones((1, 2)))
    model = FixedGNN("gcn", 1, hidden_size=2, dropout=0.5)
    ones = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    head = {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)}
    params = {"params": {"hidden": ones, "head": head}}

    def logit(key):
        rngs = {"dropout": key}
        return model.apply(params, graph, is_training=True, rngs=rngs)[0, 0]

    drawn = jax.jit(jax.vmap(logit))(jax.random.split(jax.random.key(0), 4000))
    values, counts = np.unique(drawn, return_counts=True)
    npt.assert_array_equal(values, [0, 4, 8, 16])
    expected = np.array([7, 4, 4, 1]) / 16
    npt.assert_allclose(counts / 4000, expected, atol=0.03)


# --- Bad input -----------------------------------------------------------------------


def test_an_unknown_name():
    with pytest.raises(InputError, match="unknown GNN 'gin'; known: gat, sage, gcn, "):
        FixedGNN("gin", 3).init(jax.random.key(0), empty_graph(4))


def test_heads_that_do_not_share_the_features():
    model = FixedGNN("gat", 3, hidden_size=12)
    with pytest.raises(InputError, match="12 features of 8 heads.*a multiple"):
        model.init(jax.random.key(0), empty_graph(4))


def test_hidden_units_of_a_linear_model():
    with pytest.raises(InputError, match="sgc has no hidden units: .*, got 16"):
        FixedGNN("sgc", 3, hidden_size=16).init(jax.random.key(0), empty_graph(4))
