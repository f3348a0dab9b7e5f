"""The SuperNet against convolutions put together by hand, and its own networks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.models.architecture import OPS
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
    PAPER_NET,
    SLOTS,
    at,
    make_graph,
    stage,
    total_loss,
)


def plain_path(code):
    """The layers of a code as {layer: (op, layer that is read or 0)}."""
    path = {}
    for layer, gene in enumerate(code[1:-1], 1):
        if gene:
            predecessor = (gene - 1) // 12
            source = predecessor if predecessor in path else 0
            path[layer] = (OPS[(gene - 1) % 12], source)
    return path


def compose(convolve, model, graph, code, mask, fusion="leaves"):
    """The network of a code, layer by layer, and the statistics that it changed."""
    path, outputs, changed = plain_path(code), {}, {}
    outputs[0] = stage(model, "input", code[0], np.asarray(graph.nodes))
    for layer, (op, source) in path.items():
        slot = SLOTS.index((layer - 1, source))
        own = {
            kind: at(slot, stacked[op])
            for kind, stacked in (
                ("params", model["params"]["layers"]),
                ("batch_stats", model["batch_stats"]),
            )
            if op in stacked
        }
        x, new = convolve(op)(own, graph._replace(nodes=outputs[source]), mask)
        if "batch_stats" in new:
            changed[op, slot] = new["batch_stats"]
        x = np.asarray(x)
        outputs[layer] = np.where(
            x > 0, x, np.expm1(np.minimum(x, 0)) if op == "GATConv" else 0
        )
    read = {source for _, source in path.values()}
    fused = [i for i in path if fusion == "all" or i not in read] or [0]
    mean = np.mean([outputs[i] for i in fused], axis=0)
    return stage(model, "output", code[-1], mean), changed


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_against_convolutions_by_hand(
    code, is_training, net_model, net_apply, net_convolve
):
    graph, mask = make_graph(0)
    mask = mask.at[2].set(0) if is_training else None
    outputs, stats = net_apply(net_model, graph, jnp.array(code), mask)
    expected, changed = compose(net_convolve, net_model, graph, code, mask)
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    ops = {op for op, _ in plain_path(code).values()}
    assert bool(changed) == bool(ops & {"GINConv", "GENConv"})
    for op, stacked in net_model["batch_stats"].items():
        for slot in range(len(SLOTS)):
            old, new = (at(slot, x) for x in (stacked, stats[op]))
            want = changed.get((op, slot), old)
            jax.tree.map(
                functools.partial(npt.assert_allclose, rtol=1e-6, atol=1e-6), new, want
            )
            if is_training and (op, slot) in changed:
                assert (new["norm"]["mean"] != old["norm"]["mean"]).any()


def test_the_cases_cover_all_ops_and_weights():
    paths = [plain_path(code) for code in CODES]
    assert {op for path in paths for op, _ in path.values()} == set(OPS)
    read = {(i - 1, source) for path in paths for i, (_, source) in path.items()}
    assert read == set(SLOTS)
    for index in (0, -1):
        assert {code[index] for code in CODES} == {1, 2, 3, 4, 5}


def test_a_net_of_some_ops(quick_jit, net_model, net_convolve):
    """Has the weights of those ops alone, which are drawn as among all."""
    few = dataclasses.replace(NET, ops=("GINConv", "SGConv", "APPNP"))
    key, (graph, mask) = jax.random.key(0), make_graph(3)
    own, all_ops = quick_jit(few.init)(key), quick_jit(NET.init)(key)
    kept = {"GINConv", "SGConv"}  # APPNP has no weights
    assert own["params"]["layers"].keys() == kept
    assert own["batch_stats"].keys() == {"GINConv"}
    for op in kept:
        jax.tree.map(
            npt.assert_array_equal,
            own["params"]["layers"][op],
            all_ops["params"]["layers"][op],
        )
    model = {
        "params": net_model["params"]
        | {"layers": {op: net_model["params"]["layers"][op] for op in kept}},
        "batch_stats": {"GINConv": net_model["batch_stats"]["GINConv"]},
    }
    run = quick_jit(few.apply)
    for code in ((1, 6, 14, 17, 5), (3, 2, 0, 5, 5)):
        outputs, _ = run(model, graph, jnp.array(code), mask)
        expected, _ = compose(net_convolve, net_model, graph, code, mask)
        npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    outputs, _ = run(model, graph, jnp.array((3, 2, 1, 0, 5)), mask)
    assert np.all(np.isnan(outputs))  # GAT, of which a traced code says nothing
    with pytest.raises(InputError, match="layer 2 is GATConv; expected one of GINConv"):
        few.apply(model, graph, jnp.array((3, 2, 1, 0, 5)), mask)
    with pytest.raises(InputError, match="layer 2 is GATConv"):
        few.num_parameters((3, 2, 1, 0, 5))


def test_fusion_of_all_layers(net_model, quick_jit, net_convolve):
    net, (graph, mask) = NET_FUSING_ALL, make_graph(1)
    run = quick_jit(net.apply)
    for code in (CODES[-1], CODES[5], CODES[0]):
        outputs, _ = run(net_model, graph, jnp.array(code), mask)
        expected, _ = compose(net_convolve, net_model, graph, code, mask, "all")
        npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    network, own = net.network(code), net.extract(net_model, code)
    alone = quick_jit(functools.partial(network.apply, mutable=["batch_stats"]))
    npt.assert_allclose(alone(own, graph, mask)[0], outputs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "code",
    [
        (1, 1, 18, 29, 5),
        *(
            pytest.param(code, marks=pytest.mark.slow)
            for code in ((2, 2, 0, 30, 4), (3, 0, 5, 1, 5))
        ),
    ],
)
def test_the_papers_space_by_hand(code, draw_params, quick_jit):
    """Layers end at the first 0, all are averaged, and nothing follows an op."""
    net, (graph, mask) = PAPER_NET, make_graph(2)
    model = draw_params(net.init)
    outputs, _ = quick_jit(net.apply)(model, graph, jnp.array(code), mask)
    layers, means = [stage(model, "input", code[0], np.asarray(graph.nodes))], []
    for layer, gene in enumerate(code[1:-1]):
        if not gene:
            break
        source, op = divmod(gene - 1, 12)
        slot, op = SLOTS.index((layer, source)), OPS[op]
        own = {
            kind: at(slot, stacked[op])
            for kind, stacked in (
                ("params", model["params"]["layers"]),
                ("batch_stats", model["batch_stats"]),
            )
            if op in stacked
        }
        run = functools.partial(net.module(op).apply, mutable=["batch_stats"])
        x, _ = quick_jit(run)(own, graph._replace(nodes=layers[source]), mask)
        layers.append(np.asarray(x))
        means.append(layers[-1])
    mean = np.mean(means or layers, axis=0)
    npt.assert_allclose(
        outputs, stage(model, "output", code[-1], mean), rtol=1e-4, atol=1e-5
    )
    network, own = net.network(code), net.extract(model, code)
    alone = functools.partial(network.apply, mutable=["batch_stats"])
    npt.assert_allclose(alone(own, graph, mask)[0], outputs, rtol=1e-4, atol=1e-5)


def test_an_unknown_fusion():
    with pytest.raises(InputError, match="fusion='sum': expected 'leaves' or 'all'"):
        SuperNet(NUM_FEATURES, NUM_CLASSES, 3, 4, fusion="sum")


@pytest.mark.parametrize("code", [(9, 1, 1, 1, 5), (1, 99, 1, 1, 5)])
def test_a_known_code_is_checked(net_model, code):
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, 3, 4)
    with pytest.raises(InputError, match="architecture code .* expected"):
        net.path(net_model, jnp.array(code))


LINEAR = [5, 0, 0, 0, 5]  # both stages and nothing else
NUM_KEYS = 4000


@pytest.mark.slow
def test_dropout_of_both_stages_inputs(net_model, quick_jit):
    """Means and variances of a node's outputs, by the law of total variance."""
    net, (graph, _) = NET_WITH_DROPOUT, make_graph(0)
    keys = jax.random.split(jax.random.key(1), NUM_KEYS)

    def outputs(key=None):
        return net.apply(net_model, graph, jnp.array(LINEAR), key=key)[0]

    found = np.asarray(quick_jit(jax.vmap(outputs))(keys), np.float64)
    first, last = (at(0, net_model["params"][name]) for name in ("input", "output"))
    odds, nodes = net.dropout / (1 - net.dropout), np.asarray(graph.nodes)
    hidden = nodes @ first["kernel"] + first["bias"]
    covariance = np.einsum(
        "nf,fi,fj->nij", odds * nodes**2, first["kernel"], first["kernel"]
    )
    spread = np.einsum("nii->ni", covariance)
    second = odds * (hidden**2 + spread) @ last["kernel"] ** 2
    variance = second + np.einsum(
        "nij,ic,jc->nc", covariance, last["kernel"], last["kernel"]
    )
    error = 5 * np.sqrt(variance / NUM_KEYS)
    assert np.all(abs(found.mean(axis=0) - outputs()) < error)
    npt.assert_allclose(found.var(axis=0), variance, rtol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES[:1])
def test_dropout_of_a_given_product_is_the_same(code, net_model, quick_jit):
    net, (graph, mask) = NET_WITH_DROPOUT, make_graph(0)
    key, genes = jax.random.key(2), jnp.array(code)
    run = quick_jit(net.apply)
    expected, _ = run(net_model, graph, genes, mask, key=key)
    product = net.input_product(net_model["params"], graph.nodes, key)
    outputs, _ = run(net_model, graph, genes, mask, product, key)
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    plain, _ = run(net_model, graph, genes, mask)
    assert np.abs(plain - expected).max() > 0.01


@pytest.mark.parametrize("code", CODES[:5])
def test_the_product_is_that_of_every_input_stage(code, net_model, quick_jit):
    """Before its activation; with it the nodes no more count."""
    graph, _ = make_graph(0)
    product = NET.input_product(net_model["params"], graph.nodes)
    own = at(0, net_model["params"]["input"])
    expected = np.asarray(graph.nodes) @ own["kernel"] + own["bias"]
    npt.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)
    run, genes = quick_jit(NET.apply), jnp.array(code)
    blank = graph._replace(nodes=0 * graph.nodes)
    found, _ = run(net_model, blank, genes, product=product)
    npt.assert_allclose(found, run(net_model, graph, genes)[0], rtol=1e-5, atol=1e-5)


def test_no_other_code_compiles_again(net_model, net_apply):
    graph, mask = make_graph(0)
    net_apply(net_model, graph, jnp.array(CODES[0]), mask)
    num_programs = net_apply._cache_size()
    for code in CODES:
        net_apply(net_model, graph, jnp.array(code), mask)
    assert net_apply._cache_size() == num_programs


def test_a_code_of_other_length(net_model):
    graph, _ = make_graph(0)
    with pytest.raises(InputError, match=r"shape \(4,\): expected 5 genes, of 3 layer"):
        NET.apply(net_model, graph, jnp.array([1, 1, 1, 1]))
    extract = functools.partial(NET.extract, net_model)
    for function in (NET.network, NET.num_parameters, extract):
        with pytest.raises(InputError, match="expected 5 genes"):
            function([1, 1, 1, 1])


# --- Networks of one code ------------------------------------------------------------


@pytest.mark.parametrize("code", CODES[:5] + CODES[-1:])
def test_the_network_of_a_code(code, net_model, net_apply, quick_jit):
    network, own = NET.network(code), NET.extract(net_model, code)
    fresh = jax.eval_shape(network.init, jax.random.key(0), make_graph(0)[0])
    shapes = {"batch_stats": {}, **jax.tree.map(np.shape, fresh)}
    assert jax.tree.map(np.shape, own) == shapes
    run = quick_jit(functools.partial(network.apply, mutable=["batch_stats"]))
    graph, mask = make_graph(2)
    outputs, stats = net_apply(net_model, graph, jnp.array(code), mask)
    alone, own_stats = run(own, graph, mask)
    npt.assert_allclose(alone, outputs, rtol=1e-6, atol=1e-6)
    expected = NET.extract(net_model | {"batch_stats": stats}, code)["batch_stats"]
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-6, atol=1e-6),
        {**own_stats}.get("batch_stats", {}),
        expected,
    )


def test_number_of_parameters():
    stages = (NUM_FEATURES + 1) * 4 + (4 + 1) * NUM_CLASSES
    sizes = {  # at width 4
        "GATConv": 4 * 4 + 2 * 4 + 4,
        "GINConv": 1 + 20 + 8 + 20,
        "SAGEConv": 2 * 16 + 4,
        "GCNConv": 20,
        "SGConv": 20,
        "APPNP": 0,
        "AGNNConv": 1,
        "ARMAConv": 2 * (16 + 16 + 4),
        "FeaStConv": 2 * 16 + 8 + 2 + 4,
        "GENConv": 32 + 2 * 8 + 32,
        "GMMConv": 4 * 16 + 16 + 2 * 8 + 4,
        "GatedGraphConv": 16 + 2 * 4 * 12 + 2 * 12,
    }
    for code in CODES:
        layers = sum(sizes[op] for op, _ in plain_path(code).values())
        assert NET.num_parameters(code) == stages + layers, code


def test_number_of_parameters_of_a_published_code():
    """Two linear maps and one AGNNConv; the APPNP have none."""
    code = [1, 6, 0, 0, 6, 54, 55, 5]
    assert SuperNet(1433, 7, **OF_2022).num_parameters(code) == 1434 * 64 + 65 * 7 + 1


def test_fresh_weights(quick_jit):
    """Uniform within the bounds of Glorot and of torch's linear layers."""
    drawn = quick_jit(NET.init)(jax.random.key(0))["params"]
    for weights, bound in (
        (drawn["layers"]["GCNConv"]["kernel"], (6 / (4 + 4)) ** 0.5),
        (drawn["layers"]["SGConv"]["kernel"], 4**-0.5),
        (drawn["input"]["kernel"], NUM_FEATURES**-0.5),
        (drawn["output"]["kernel"], 4**-0.5),
    ):
        assert len(np.unique(weights)) == weights.size
        assert 0.9 * bound < np.abs(weights).max() <= bound
        npt.assert_allclose(np.std(weights), bound / 3**0.5, rtol=0.25)


# --- Training ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
def test_training_a_code_moves_only_its_weights(code, net_model, net_gradient):
    graph, mask = make_graph(3)
    grads = net_gradient(net_model, graph, jnp.array(code), mask)
    touched = NET.touched(net_model, jnp.array([code]))

    def assert_inside(path, gradient, is_touched):
        assert is_touched.shape == (len(gradient), *[1] * (gradient.ndim - 1)), path
        assert not np.where(is_touched, 0, gradient).any(), path
        assert np.isfinite(gradient).all(), path

    jax.tree_util.tree_map_with_path(assert_inside, grads, touched["params"])
    expected = {("input", 0), ("output", 0)}
    for layer, (op, source) in plain_path(code).items():
        if op in net_model["params"]["layers"]:
            expected.add((op, SLOTS.index((layer - 1, source))))
    assert marked(touched["params"]) == expected
    for op, leaves in touched["batch_stats"].items():
        assert set(touched_indices(op, leaves)) == {x for x in expected if x[0] == op}


def touched_indices(name, leaves):
    """The indices that are marked, the same in all leaves of an op."""
    first, *others = (np.ravel(x) for x in jax.tree.leaves(leaves))
    assert all((first == other).all() for other in others)
    return [(name, int(i)) for i in np.flatnonzero(first)]


def marked(touched):
    """The indices of all weights that are marked."""
    sets = {name: touched[name] for name in ("input", "output")} | touched["layers"]
    return {index for name in sets for index in touched_indices(name, sets[name])}


def test_weights_of_several_codes(net_model):
    codes = [CODES[0], CODES[3], CODES[0]]
    together = marked(NET.touched(net_model, jnp.array(codes))["params"])
    apart = [marked(NET.touched(net_model, jnp.array([c]))["params"]) for c in codes]
    assert together == set.union(*apart) > apart[0]


@pytest.mark.parametrize(
    "code", [pytest.param(CODES[0], marks=pytest.mark.slow), CODES[5]]
)
def test_gradients_are_those_of_the_network_alone(
    code, net_model, net_gradient, quick_jit
):
    graph, mask = make_graph(3)
    own, network = NET.extract(net_model, code), NET.network(code)

    def loss(params):
        outputs, _ = network.apply(
            own | {"params": params}, graph, mask, mutable=["batch_stats"]
        )
        return total_loss(outputs, mask)

    expected = quick_jit(jax.grad(loss))(own["params"])
    params = net_gradient(net_model, graph, jnp.array(code), mask)
    grads = {"params": params, "batch_stats": {}}
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
        NET.extract(grads, code)["params"],
        expected,
    )


# --- Clients -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padded_clients():
    padding = PADDED_NODES - NUM_NODES
    graphs, masks = zip(*(make_graph(seed, padding) for seed in (4, 5)), strict=True)
    return jax.tree.map(lambda *x: jnp.stack(x), *graphs), jnp.stack(masks)


def test_codes_in_turn_of_padded_clients_side_by_side(
    net_model, net_apply, padded_clients, quick_jit
):
    clients = jax.vmap(NET.apply, in_axes=(None, 0, None, 0))

    @quick_jit
    def run(codes, graphs, masks):
        return jax.lax.map(lambda code: clients(net_model, graphs, code, masks), codes)

    outputs, stats = run(jnp.array(CODES), *padded_clients)
    assert np.isfinite(outputs).all()
    for index, code in enumerate(CODES):
        for client, seed in enumerate((4, 5)):
            expected = net_apply(
                net_model, make_graph(seed)[0], jnp.array(code), jnp.ones(7)
            )
            jax.tree.map(
                functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
                (outputs[index, client, :NUM_NODES], at((index, client), stats)),
                expected,
            )


def test_a_shared_code_runs_one_branch_for_all_clients(net_model, padded_clients):
    graphs, masks = padded_clients

    def num_switches(code_axis, codes):
        mapped = jax.vmap(NET.apply, in_axes=(None, 0, code_axis, 0))
        program = jax.make_jaxpr(mapped)(net_model, graphs, codes, masks)
        return str(program).count(" cond[")

    assert num_switches(None, jnp.array(CODES[0])) == 3  # the stages' and the layers'
    assert num_switches(0, jnp.array(CODES[:2])) == 0  # selects among all branches
