"""Packed networks against those of codes alone, with the same weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core import sparse_rows
from fedjax_graph.models import supernet
from fedjax_graph.models.packed import PackedNet
from tests.models.supernet_cases import (
    NUM_CLASSES,
    NUM_FEATURES,
    make_graph,
    total_loss,
    unpacked,
)

CODES = [(3, 1, 5, 5), (2, 3, 0, 4)]  # of `few_convolutions`: GIN of GAT; APPNP


@pytest.fixture(scope="module")
def net(few_convolutions):
    return supernet.SuperNet(NUM_FEATURES, NUM_CLASSES, num_layers=2, width=4)


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
