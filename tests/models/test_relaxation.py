"""The relaxation against codes one by one, and mixtures put together by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.models import relaxation
from fedjax_graph.models.architecture import OPS, decode
from fedjax_graph.models.supernet import SuperNet
from tests.models.supernet_cases import (
    CODES,
    NET,
    NET_FUSING_ALL,
    NET_WITH_DROPOUT,
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_NODES,
    OF_2022,
    PADDED_NODES,
    SLOTS,
    at,
    make_graph,
    stage,
    total_loss,
)


def certain(code, num_layers=3):
    """Probabilities of 0 and 1."""
    layers = np.eye(1 + 12 * num_layers, dtype=np.float32)[list(code[1:-1])]
    stages = np.eye(5, dtype=np.float32)
    return {
        "input": stages[code[0] - 1],
        "layers": layers,
        "output": stages[code[-1] - 1],
    }


def drawn_probabilities(seed):
    """Of three layers; everything that a layer may be is possible."""
    rng = np.random.default_rng(seed)
    sizes = (13, 25, 37)
    layers = [np.pad(rng.dirichlet(np.ones(n)), (0, 37 - n)) for n in sizes]
    stages = {name: rng.dirichlet(np.ones(5)) for name in ("input", "output")}
    return jax.tree.map(np.float32, stages | {"layers": np.array(layers)})


@pytest.fixture(scope="module")
def relaxed(quick_jit):
    return quick_jit(relaxation.relaxed, static_argnums=0)


@pytest.mark.parametrize(
    "is_training", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("code", CODES)
def test_certain_genes_are_a_code(code, is_training, net_model, net_apply, relaxed):
    graph, mask = make_graph(0)
    mask = mask.at[2].set(0) if is_training else None
    expected = net_apply(net_model, graph, jnp.array(code), mask)
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-5, atol=1e-6),
        relaxed(NET, net_model, graph, certain(code), mask),
        expected,
    )


def test_certain_genes_with_fusion_of_all_layers(net_model, relaxed, quick_jit):
    net, (graph, mask) = NET_FUSING_ALL, make_graph(1)
    run = quick_jit(net.apply)
    for code in CODES:
        expected, _ = run(net_model, graph, jnp.array(code), mask)
        outputs, _ = relaxed(net, net_model, graph, certain(code), mask)
        npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES[:1])
def test_dropout_of_certain_genes_is_that_of_a_code(
    code, net_model, relaxed, quick_jit
):
    net, (graph, mask) = NET_WITH_DROPOUT, make_graph(0)
    key, genes = jax.random.key(2), certain(code)
    run = quick_jit(net.apply)
    expected, _ = run(net_model, graph, jnp.array(code), mask, key=key)
    outputs, _ = relaxed(net, net_model, graph, genes, mask, key)
    npt.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    plain, _ = relaxed(NET, net_model, graph, genes, mask)
    assert np.abs(plain - outputs).max() > 0.01


@pytest.fixture(scope="module", params=["paper", "2022"])
def chances(request):
    """A space, probabilities of all 12,025 codes of three layers, and what they say."""
    layers = drawn_probabilities(0)["layers"]
    genes = np.indices((13, 25, 37)).reshape(3, -1)
    rates = np.prod([own[gene] for own, gene in zip(layers, genes, strict=True)], 0)
    stages = np.ones_like(genes[:1])
    codes = np.concatenate([stages, genes, stages]).T
    networks = jax.jit(jax.vmap(lambda code: decode(code, request.param)))(codes)
    return request.param, layers, rates, jax.device_get(networks)


def test_shares_of_ops_are_those_of_all_codes(chances):
    space, layers, rates, networks = chances
    shares = relaxation.layer_shares(layers, space)
    assert shares.shape == (6, 12)
    for (layer, source), own in zip(SLOTS, shares, strict=True):
        is_present = networks.is_present[:, layer]
        reads = is_present & (networks.source[:, layer] == source)
        expected = [
            rates[reads & (networks.op[:, layer] == op)].sum() / rates[is_present].sum()
            for op in range(12)
        ]
        npt.assert_allclose(own, expected, rtol=1e-4)


@pytest.mark.parametrize("fusion", ["leaves", "all"])
def test_shares_in_the_fusion_are_those_of_all_codes(chances, fusion):
    space, layers, rates, networks = chances
    is_fused = networks.is_leaf if fusion == "leaves" else networks.is_present
    is_empty = ~networks.is_present.any(axis=1)
    expected = rates @ np.concatenate([is_empty[:, None], is_fused], axis=1)
    shares = relaxation.fusion_shares(layers, fusion, space)
    npt.assert_allclose(shares, expected / expected.sum(), rtol=1e-4)


@pytest.mark.parametrize("ops", [OPS, ("GATConv", "SAGEConv")])
def test_a_mixture_of_two_ops_and_of_stages(relaxed, net_convolve, draw_params, ops):
    """A single layer: 0.3 SAGE, 0.7 GAT; the input stage in part Tanh, in part ReLU."""
    sizes = {"num_layers": 1, "width": 4, "ops": ops}
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, **sizes, **OF_2022)
    model, (graph, mask) = draw_params(net.init, 1), make_graph(2)
    probabilities = {
        "input": jnp.array([0, 0.6, 0.4, 0, 0]),
        "layers": jnp.zeros((1, 13))
        .at[0, jnp.array([1, 3])]
        .set(jnp.array([0.7, 0.3])),
        "output": jnp.array([0.25, 0, 0, 0, 0.75]),
    }
    tanh, relu = (stage(model, "input", gene, graph.nodes) for gene in (2, 3))
    x = 0.6 * tanh + 0.4 * relu
    gat, sage = (
        net_convolve(op)(
            {"params": at(0, model["params"]["layers"][op])},
            graph._replace(nodes=x),
            mask,
        )[0]
        for op in ("GATConv", "SAGEConv")
    )
    x = 0.7 * jax.nn.elu(gat) + 0.3 * jax.nn.relu(sage)
    sigmoid, identity = (stage(model, "output", gene, x) for gene in (1, 5))
    expected = 0.25 * sigmoid + 0.75 * identity
    outputs, _ = relaxed(net, model, graph, probabilities, mask)
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_ops_that_a_net_does_not_have(relaxed, draw_params):
    """What is said of them is not left out in silence."""
    sizes = {"num_layers": 1, "width": 4, "ops": ("APPNP",)}
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, **sizes, **OF_2022)
    model, (graph, _) = draw_params(net.init, 1), make_graph(2)
    for code, is_here in (((5, 6, 5), True), ((5, 1, 5), False)):
        outputs, _ = relaxed(net, model, graph, certain(code, 1))
        assert np.all(np.isfinite(outputs) == is_here)


def test_a_layer_that_may_be_absent(net_model, net_apply, relaxed):
    """Who reads it reads its output if present, or else the input stage."""
    graph, _ = make_graph(2)
    with_first, without = (5, 4, 14, 0, 5), (5, 0, 14, 0, 5)
    mixed = jax.tree.map(
        lambda *x: 0.8 * x[0] + 0.2 * x[1], certain(with_first), certain(without)
    )
    outputs, _ = relaxed(NET, net_model, graph, mixed)
    expected = [
        net_apply(net_model, graph, jnp.array(code))[0]
        for code in (with_first, without)
    ]
    # Layer 2 is always the only leaf, and both stages are linear.
    npt.assert_allclose(
        outputs, 0.8 * expected[0] + 0.2 * expected[1], rtol=1e-4, atol=1e-5
    )


def test_all_ops_see_no_padding(net_model, relaxed):
    probabilities = drawn_probabilities(1)
    graph, mask = make_graph(4)
    alone = relaxed(NET, net_model, graph, probabilities, mask)
    graph, mask = make_graph(4, PADDED_NODES - NUM_NODES)
    outputs, stats = relaxed(NET, net_model, graph, probabilities, mask)
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
        (outputs[:NUM_NODES], stats),
        alone,
    )
    changed = jax.tree.map(
        lambda new, old: (new != old).any(1), stats, net_model["batch_stats"]
    )
    assert all(x.all() for x in jax.tree.leaves(changed))


@pytest.mark.slow  # to compile, with all ops in three layers
def test_gradients_of_the_relaxation(net_model, net_gradient, quick_jit):
    graph, mask = make_graph(3)

    def loss(params, probabilities):
        model = net_model | {"params": params}
        outputs, _ = relaxation.relaxed(NET, model, graph, probabilities, mask)
        return total_loss(outputs, mask)

    value, take = quick_jit(loss), quick_jit(jax.grad(loss, (0, 1)))
    for code in CODES:
        grads, slopes = take(net_model["params"], certain(code))
        expected = net_gradient(net_model, graph, jnp.array(code), mask)
        jax.tree.map(
            functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
            grads,
            expected,
        )
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes)), code
    start, end = drawn_probabilities(2), drawn_probabilities(3)
    grads, slopes = take(net_model["params"], start)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    way = jax.tree.map(np.subtract, end, start)

    def near(step):
        moved = jax.tree.map(lambda x, d: x + step * d, start, way)
        return float(value(net_model["params"], moved))

    slope = sum(
        np.vdot(*x) for x in zip(*map(jax.tree.leaves, (slopes, way)), strict=True)
    )
    npt.assert_allclose(slope, (near(0.01) - near(-0.01)) / 0.02, rtol=0.02)


def test_probabilities_of_other_size(net_model):
    probabilities = certain((1, 1, 1, 1), 2)
    with pytest.raises(
        InputError, match=r"shape \(2, 25\): expected \(3, 37\), option"
    ):
        relaxation.relaxed(NET, net_model, make_graph(0)[0], probabilities)
