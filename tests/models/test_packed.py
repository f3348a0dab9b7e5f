"""Packed networks against those of codes alone, with the same weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core import sparse_rows
from fedjax_graph.core.errors import InputError
from fedjax_graph.models import supernet
from fedjax_graph.models.packed import PackedNet
from tests.few_ops import FEW_OPS
from tests.models.supernet_cases import (
    NUM_CLASSES,
    NUM_FEATURES,
    make_graph,
    total_loss,
    unpacked,
)

CODES = [(3, 1, 14, 5), (2, 6, 0, 4)]  # GIN of GAT; APPNP


@pytest.fixture(scope="module")
def net():
    return supernet.SuperNet(
        NUM_FEATURES, NUM_CLASSES, num_layers=2, width=4, ops=FEW_OPS
    )


@pytest.fixture(scope="module")
def programs(net, quick_jit):
    own = PackedNet(net)

    def outputs(model, graph, code, mask):
        return own.apply(model, graph, code, mask)

    def loss(params, stats, graph, code, mask):
        model = {"params": params, "batch_stats": stats}
        return total_loss(own.apply(model, graph, code, mask)[0], mask)

    return quick_jit(own.init), quick_jit(outputs), quick_jit(jax.grad(loss))


@pytest.mark.parametrize(
    "code", [pytest.param(CODES[0], marks=pytest.mark.slow), CODES[1]]
)
def test_a_packed_network_is_that_of_the_code(code, net, programs, quick_jit):
    init, apply, grad = programs
    graph, mask = make_graph(0)
    model = init(jax.random.key(1), jnp.array(code))
    outputs, stats = apply(model, graph, jnp.array(code), mask)
    network = net.network(code)
    run = quick_jit(functools.partial(network.apply, mutable=["batch_stats"]))
    variables = unpacked(net, model, code)
    expected, changed = run(variables, graph, mask)
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    after = unpacked(net, model | {"batch_stats": stats}, code)["batch_stats"]
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-5, atol=1e-6),
        after,
        changed.get("batch_stats", {}),
    )

    def loss(params):
        own = variables | {"params": params}
        outputs, _ = network.apply(own, graph, mask, mutable=["batch_stats"])
        return total_loss(outputs, mask)

    grads = grad(model["params"], model["batch_stats"], graph, jnp.array(code), mask)
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-3, atol=1e-4),
        unpacked(net, model | {"params": grads}, code)["params"],
        quick_jit(jax.grad(loss))(variables["params"]),
    )


def test_sparse_features_are_read_as_dense_ones(net, programs):
    init, apply, _ = programs
    graph, mask = make_graph(0)
    code = jnp.array(CODES[0])
    model = init(jax.random.key(1), code)
    features = graph.nodes * (np.arange(NUM_FEATURES) % 2)
    rows = sparse_rows.stack([scipy.sparse.csr_array(features)], len(features))
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
    found, expected = (
        apply(model, graph._replace(nodes=nodes), code, mask)[0]
        for nodes in (one, features)
    )
    npt.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ((1, 1, 5), r"shape \(3,\): expected 4 genes, of 2 layers"),
        ((1, 1, 5, 5, 1), r"shape \(5,\): expected 4 genes, of 2 layers"),
        ([CODES[0], CODES[1]], r"shape \(2, 4\): expected 4 genes, of 2 layers"),
        ((0, 1, 5, 5), "input stage 0; expected one of"),
        ((3, 1, 5, 6), "output stage 6; expected one of"),
        ((3, 13, 5, 5), r"layer 1 is 13, .* expected 0 \(absent\) to 12"),
        ((3, 1, -1, 5), r"layer 2 is -1; expected 0 \(absent\) to 24"),
        ((3, 1, 15, 5), "layer 2 is SAGEConv; expected one of GATConv, GINConv, APPNP"),
        ((3.0, 1.0, 5.0, 5.0), "type float32: expected a row of integers"),
    ],
)
def test_codes_are_checked_as_a_supernets_are(code, match, net):
    """Their gathers would clip what is out of range."""
    graph, own, wrong = make_graph(0)[0], PackedNet(net), jnp.array(code)
    model = {"params": {"layers": jnp.zeros((2, 1))}, "batch_stats": jnp.zeros((2, 1))}
    for run in (
        lambda: own.init(jax.random.key(0), wrong),
        lambda: own.apply(model, graph, wrong),
        lambda: net.path({}, wrong),
    ):
        with pytest.raises(InputError, match=match) as raised:
            run()
        assert "\n" not in str(raised.value)


def test_traced_codes_are_whole_numbers_of_the_right_length(net):
    graph, own, key = make_graph(0)[0], PackedNet(net), jax.random.key(0)
    for code, match in (
        (jnp.ones(3, int), r"shape \(3,\): expected 4 genes"),
        (jnp.ones(4), "type float32: expected whole numbers"),
    ):
        with pytest.raises(InputError, match=match):
            jax.eval_shape(own.init, key, code)
        with pytest.raises(InputError, match=match):
            jax.eval_shape(lambda code: own.apply({}, graph, code), code)
