"""The SuperNet against convolutions put together by hand, and its own networks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.architecture import ACTIVATIONS, OPS, decode
from fedjax_graph.errors import InputError
from fedjax_graph.models.convolutions import CONVOLUTIONS
from fedjax_graph.models.supernet import SuperNet, fusion_shares, layer_shares

pytestmark = pytest.mark.usefixtures("quick_compiles")

NUM_NODES, NUM_EDGES, PADDED_NODES, PADDED_EDGES = 7, 18, 10, 24
NUM_FEATURES, NUM_CLASSES = 5, 3
SLOTS = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]  # (layer, what it reads)
NET = SuperNet(NUM_FEATURES, NUM_CLASSES, num_layers=3, width=4)
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


@pytest.fixture(scope="module")
def model(draw_params):
    drawn = draw_params(NET.init)
    for stats in drawn["batch_stats"].values():
        stats["norm"]["var"] = np.abs(stats["norm"]["var"]) + 0.1
    return jax.tree.map(jnp.asarray, drawn)


@pytest.fixture(scope="module")
def apply(quick_jit):
    return quick_jit(NET.apply)


@pytest.fixture(scope="module")
def convolve(quick_jit):
    """(variables, graph, mask) -> (outputs, variables that changed), by op."""
    return functools.cache(
        lambda op: quick_jit(
            functools.partial(CONVOLUTIONS[op](4).apply, mutable=["batch_stats"])
        )
    )


def at(place, stacked):
    return jax.tree.map(lambda x: np.asarray(x[place]), stacked)


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

    def stage(name, choice, x):
        own = at(0, model["params"][name])
        activation = list(ACTIVATIONS.values())[choice - 1]
        return activation(x @ own["kernel"] + own["bias"])

    path, outputs, changed = plain_path(code), {}, {}
    outputs[0] = stage("input", code[0], np.asarray(graph.nodes))
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
    return stage("output", code[-1], mean), changed


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_against_convolutions_by_hand(code, is_training, model, apply, convolve):
    graph, mask = make_graph(0)
    mask = mask.at[2].set(0) if is_training else None
    outputs, stats = apply(model, graph, jnp.array(code), mask)
    expected, changed = compose(convolve, model, graph, code, mask)
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    ops = {op for op, _ in plain_path(code).values()}
    assert bool(changed) == bool(ops & {"GINConv", "GENConv"})
    for op, stacked in model["batch_stats"].items():
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
    for place in (0, -1):
        assert {code[place] for code in CODES} == {1, 2, 3, 4, 5}


def test_fusion_of_all_layers(model, quick_jit, convolve):
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, 3, 4, fusion="all")
    run, (graph, mask) = quick_jit(net.apply), make_graph(1)
    for code in (CODES[-1], CODES[5], CODES[0]):
        outputs, _ = run(model, graph, jnp.array(code), mask)
        expected, _ = compose(convolve, model, graph, code, mask, "all")
        npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    network, own = net.network(code), net.extract(model, code)
    alone = quick_jit(functools.partial(network.apply, mutable=["batch_stats"]))
    npt.assert_allclose(alone(own, graph, mask)[0], outputs, rtol=1e-6, atol=1e-6)


def test_an_unknown_fusion(model):
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, 3, 4, fusion="sum")
    with pytest.raises(InputError, match="'sum'; known: leaves, all"):
        jax.eval_shape(net.apply, model, make_graph(0)[0], jnp.array(CODES[0]))


LINEAR = [5, 0, 0, 0, 5]  # both stages and nothing else
RATE, NUM_KEYS = 0.25, 4000


def test_dropout_of_both_stages_inputs(model, quick_jit):
    """Means and variances of a node's outputs, by the law of total variance."""
    net, (graph, _) = dataclasses.replace(NET, dropout=RATE), make_graph(0)
    keys = jax.random.split(jax.random.key(1), NUM_KEYS)

    def outputs(key=None):
        return net.apply(model, graph, jnp.array(LINEAR), key=key)[0]

    found = np.asarray(quick_jit(jax.vmap(outputs))(keys), np.float64)
    first, last = (at(0, model["params"][name]) for name in ("input", "output"))
    odds, nodes = RATE / (1 - RATE), np.asarray(graph.nodes)
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


@pytest.mark.parametrize("code", CODES[:3])
def test_dropout_by_any_path_is_the_same(code, model, quick_jit):
    net, (graph, mask) = dataclasses.replace(NET, dropout=RATE), make_graph(0)
    key, genes = jax.random.key(2), jnp.array(code)
    run = quick_jit(net.apply)
    expected, _ = run(model, graph, genes, mask, key=key)
    product = net.input_product(model["params"], graph.nodes, key)
    outputs, _ = run(model, graph, genes, mask, product, key)
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    outputs, _ = quick_jit(net.relaxed)(model, graph, certain(code), mask, key)
    npt.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    plain, _ = run(model, graph, genes, mask)
    assert np.abs(plain - expected).max() > 0.01


@pytest.mark.parametrize("code", CODES[:5])
def test_the_product_is_that_of_every_input_stage(code, model, quick_jit):
    """Before its activation; with it the nodes no more count."""
    graph, _ = make_graph(0)
    product = NET.input_product(model["params"], graph.nodes)
    stage = at(0, model["params"]["input"])
    expected = np.asarray(graph.nodes) @ stage["kernel"] + stage["bias"]
    npt.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)
    run, genes = quick_jit(NET.apply), jnp.array(code)
    blank = graph._replace(nodes=0 * graph.nodes)
    found, _ = run(model, blank, genes, product=product)
    npt.assert_allclose(found, run(model, graph, genes)[0], rtol=1e-5, atol=1e-5)


def test_no_other_code_compiles_again(model, apply):
    graph, mask = make_graph(0)
    apply(model, graph, jnp.array(CODES[0]), mask)
    num_programs = apply._cache_size()
    for code in CODES:
        apply(model, graph, jnp.array(code), mask)
    assert apply._cache_size() == num_programs


def test_a_code_of_other_length(model):
    graph, _ = make_graph(0)
    with pytest.raises(InputError, match=r"shape \(4,\): expected 5 genes, of 3 layer"):
        NET.apply(model, graph, jnp.array([1, 1, 1, 1]))
    for function in (NET.network, NET.num_parameters, lambda c: NET.extract(model, c)):
        with pytest.raises(InputError, match="expected 5 genes"):
            function([1, 1, 1, 1])


# --- Networks of one code ------------------------------------------------------------


@pytest.mark.parametrize("code", CODES[:5] + CODES[-1:])
def test_the_network_of_a_code(code, model, apply, quick_jit):
    network, own = NET.network(code), NET.extract(model, code)
    fresh = jax.eval_shape(network.init, jax.random.key(0), make_graph(0)[0])
    shapes = {"batch_stats": {}, **jax.tree.map(np.shape, fresh)}
    assert jax.tree.map(np.shape, own) == shapes
    run = quick_jit(functools.partial(network.apply, mutable=["batch_stats"]))
    graph, mask = make_graph(2)
    outputs, stats = apply(model, graph, jnp.array(code), mask)
    alone, own_stats = run(own, graph, mask)
    npt.assert_allclose(alone, outputs, rtol=1e-6, atol=1e-6)
    expected = NET.extract(model | {"batch_stats": stats}, code)["batch_stats"]
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
    assert SuperNet(1433, 7).num_parameters(code) == 1434 * 64 + 65 * 7 + 1


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


@pytest.fixture(scope="module")
def gradient(quick_jit):
    """(model, graph, code, mask) -> gradient of a loss of the masked nodes."""

    def loss(params, stats, graph, code, mask):
        model = {"params": params, "batch_stats": stats}
        outputs, _ = NET.apply(model, graph, code, mask)
        coefficients = jnp.linspace(0.2, 1, outputs.size).reshape(outputs.shape)
        return jnp.sum(mask[:, None] * coefficients * (outputs + outputs**2))

    take = quick_jit(jax.grad(loss))
    return lambda model, *args: take(model["params"], model["batch_stats"], *args)


@pytest.mark.parametrize("code", CODES)
def test_training_a_code_moves_only_its_weights(code, model, gradient):
    graph, mask = make_graph(3)
    grads = gradient(model, graph, jnp.array(code), mask)
    touched = NET.touched(model, jnp.array([code]))

    def assert_inside(path, gradient, is_touched):
        assert is_touched.shape == (len(gradient), *[1] * (gradient.ndim - 1)), path
        assert not np.where(is_touched, 0, gradient).any(), path
        assert np.isfinite(gradient).all(), path

    jax.tree_util.tree_map_with_path(assert_inside, grads, touched["params"])
    expected = {("input", 0), ("output", 0)}
    for layer, (op, source) in plain_path(code).items():
        if op in model["params"]["layers"]:
            expected.add((op, SLOTS.index((layer - 1, source))))
    assert marked(touched["params"]) == expected
    for op, leaves in touched["batch_stats"].items():
        assert set(touched_places(op, leaves)) == {x for x in expected if x[0] == op}


def touched_places(name, leaves):
    """The places that are marked, the same in all leaves of an op."""
    first, *others = (np.ravel(x) for x in jax.tree.leaves(leaves))
    assert all((first == other).all() for other in others)
    return [(name, int(i)) for i in np.flatnonzero(first)]


def marked(touched):
    """The places of all weights that are marked."""
    sets = {name: touched[name] for name in ("input", "output")} | touched["layers"]
    return {place for name in sets for place in touched_places(name, sets[name])}


def test_weights_of_several_codes(model):
    codes = [CODES[0], CODES[3], CODES[0]]
    together = marked(NET.touched(model, jnp.array(codes))["params"])
    apart = [marked(NET.touched(model, jnp.array([c]))["params"]) for c in codes]
    assert together == set.union(*apart) > apart[0]


@pytest.mark.parametrize("code", [CODES[0], CODES[5]])
def test_gradients_are_those_of_the_network_alone(code, model, gradient, quick_jit):
    graph, mask = make_graph(3)
    own, network = NET.extract(model, code), NET.network(code)

    def loss(params):
        outputs, _ = network.apply(
            own | {"params": params}, graph, mask, mutable=["batch_stats"]
        )
        coefficients = jnp.linspace(0.2, 1, outputs.size).reshape(outputs.shape)
        return jnp.sum(mask[:, None] * coefficients * (outputs + outputs**2))

    expected = quick_jit(jax.grad(loss))(own["params"])
    grads = {"params": gradient(model, graph, jnp.array(code), mask), "batch_stats": {}}
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
        NET.extract(grads, code)["params"],
        expected,
    )


# --- The relaxation ------------------------------------------------------------------


def certain(code, num_layers=3):
    """Probabilities of 0 and 1."""
    layers = np.eye(1 + 12 * num_layers, dtype=np.float32)[list(code[1:-1])]
    stage = np.eye(5, dtype=np.float32)
    return {
        "input": stage[code[0] - 1],
        "layers": layers,
        "output": stage[code[-1] - 1],
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
    return quick_jit(NET.relaxed)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_certain_genes_are_a_code(code, is_training, model, apply, relaxed):
    graph, mask = make_graph(0)
    mask = mask.at[2].set(0) if is_training else None
    expected = apply(model, graph, jnp.array(code), mask)
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-5, atol=1e-6),
        relaxed(model, graph, certain(code), mask),
        expected,
    )


def test_certain_genes_with_fusion_of_all_layers(model, quick_jit):
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, 3, 4, fusion="all")
    run, mixed = quick_jit(net.apply), quick_jit(net.relaxed)
    graph, mask = make_graph(1)
    for code in CODES:
        expected, _ = run(model, graph, jnp.array(code), mask)
        outputs, _ = mixed(model, graph, certain(code), mask)
        npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def chances():
    """Probabilities of all 12,025 codes of three layers, and what they say."""
    layers = drawn_probabilities(0)["layers"]
    genes = np.indices((13, 25, 37)).reshape(3, -1)
    rates = np.prod([own[gene] for own, gene in zip(layers, genes, strict=True)], 0)
    stages = np.ones_like(genes[:1])
    codes = np.concatenate([stages, genes, stages]).T
    return layers, rates, jax.device_get(jax.jit(jax.vmap(decode))(codes))


def test_shares_of_ops_are_those_of_all_codes(chances):
    layers, rates, networks = chances
    shares = layer_shares(layers)
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
    layers, rates, networks = chances
    is_fused = networks.is_leaf if fusion == "leaves" else networks.is_present
    is_empty = ~networks.is_present.any(axis=1)
    expected = rates @ np.concatenate([is_empty[:, None], is_fused], axis=1)
    shares = fusion_shares(layers, fusion)
    npt.assert_allclose(shares, expected / expected.sum(), rtol=1e-4)


def test_a_mixture_of_two_ops_and_of_stages(quick_jit, convolve, draw_params):
    """A single layer: 0.3 SAGE, 0.7 GAT; the input stage in part Tanh, in part ReLU."""
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, num_layers=1, width=4)
    model, (graph, mask) = draw_params(net.init, 1), make_graph(2)

    def stage(name, choice, x):
        own = at(0, model["params"][name])
        return list(ACTIVATIONS.values())[choice](x @ own["kernel"] + own["bias"])

    probabilities = {
        "input": jnp.array([0, 0.6, 0.4, 0, 0]),
        "layers": jnp.zeros((1, 13))
        .at[0, jnp.array([1, 3])]
        .set(jnp.array([0.7, 0.3])),
        "output": jnp.array([0.25, 0, 0, 0, 0.75]),
    }
    x = 0.6 * stage("input", 1, graph.nodes) + 0.4 * stage("input", 2, graph.nodes)
    gat, sage = (
        convolve(op)(
            {"params": at(0, model["params"]["layers"][op])},
            graph._replace(nodes=x),
            mask,
        )[0]
        for op in ("GATConv", "SAGEConv")
    )
    x = 0.7 * jax.nn.elu(gat) + 0.3 * jax.nn.relu(sage)
    expected = 0.25 * stage("output", 0, x) + 0.75 * stage("output", 4, x)
    outputs, _ = quick_jit(net.relaxed)(model, graph, probabilities, mask)
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_a_layer_that_may_be_absent(model, apply, relaxed):
    """Who reads it reads its output if present, or else the input stage."""
    graph, _ = make_graph(2)
    with_first, without = (5, 4, 14, 0, 5), (5, 0, 14, 0, 5)
    mixed = jax.tree.map(
        lambda *x: 0.8 * x[0] + 0.2 * x[1], certain(with_first), certain(without)
    )
    outputs, _ = relaxed(model, graph, mixed)
    expected = [
        apply(model, graph, jnp.array(code))[0] for code in (with_first, without)
    ]
    # Layer 2 is always the only leaf, and both stages are linear.
    npt.assert_allclose(
        outputs, 0.8 * expected[0] + 0.2 * expected[1], rtol=1e-4, atol=1e-5
    )


def test_all_ops_see_no_padding(model, relaxed):
    probabilities = drawn_probabilities(1)
    alone = relaxed(model, make_graph(4)[0], probabilities, jnp.ones(NUM_NODES))
    graph, mask = make_graph(4, PADDED_NODES - NUM_NODES)
    outputs, stats = relaxed(model, graph, probabilities, mask)
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
        (outputs[:NUM_NODES], stats),
        alone,
    )
    changed = jax.tree.map(
        lambda new, old: (new != old).any(1), stats, model["batch_stats"]
    )
    assert all(x.all() for x in jax.tree.leaves(changed))


def test_gradients_of_the_relaxation(model, gradient, quick_jit):
    graph, mask = make_graph(3)

    def loss(params, probabilities):
        model_ = model | {"params": params}
        outputs, _ = NET.relaxed(model_, graph, probabilities, mask)
        coefficients = jnp.linspace(0.2, 1, outputs.size).reshape(outputs.shape)
        return jnp.sum(mask[:, None] * coefficients * (outputs + outputs**2))

    value, take = quick_jit(loss), quick_jit(jax.grad(loss, (0, 1)))
    for code in CODES:
        grads, slopes = take(model["params"], certain(code))
        expected = gradient(model, graph, jnp.array(code), mask)
        jax.tree.map(
            functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
            grads,
            expected,
        )
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes)), code
    start, end = drawn_probabilities(2), drawn_probabilities(3)
    grads, slopes = take(model["params"], start)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    way = jax.tree.map(np.subtract, end, start)

    def near(step):
        moved = jax.tree.map(lambda x, d: x + step * d, start, way)
        return float(value(model["params"], moved))

    slope = sum(
        np.vdot(*x) for x in zip(*map(jax.tree.leaves, (slopes, way)), strict=True)
    )
    npt.assert_allclose(slope, (near(0.01) - near(-0.01)) / 0.02, rtol=0.02)


def test_probabilities_of_other_size(model):
    probabilities = certain((1, 1, 1, 1), 2)
    with pytest.raises(
        InputError, match=r"shape \(2, 25\): expected \(3, 37\), option"
    ):
        NET.relaxed(model, make_graph(0)[0], probabilities)


# --- Clients -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padded_clients():
    padding = PADDED_NODES - NUM_NODES
    graphs, masks = zip(*(make_graph(seed, padding) for seed in (4, 5)), strict=True)
    return jax.tree.map(lambda *x: jnp.stack(x), *graphs), jnp.stack(masks)


def test_codes_in_turn_of_padded_clients_side_by_side(
    model, apply, padded_clients, quick_jit
):
    clients = jax.vmap(NET.apply, in_axes=(None, 0, None, 0))

    @quick_jit
    def run(codes, graphs, masks):
        return jax.lax.map(lambda code: clients(model, graphs, code, masks), codes)

    outputs, stats = run(jnp.array(CODES), *padded_clients)
    assert np.isfinite(outputs).all()
    for place, code in enumerate(CODES):
        for client, seed in enumerate((4, 5)):
            expected = apply(model, make_graph(seed)[0], jnp.array(code), jnp.ones(7))
            jax.tree.map(
                functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
                (outputs[place, client, :NUM_NODES], at((place, client), stats)),
                expected,
            )


def test_a_shared_code_runs_one_branch_for_all_clients(model, padded_clients):
    graphs, masks = padded_clients

    def num_switches(code_axis, codes):
        mapped = jax.vmap(NET.apply, in_axes=(None, 0, code_axis, 0))
        return str(jax.make_jaxpr(mapped)(model, graphs, codes, masks)).count(" cond[")

    assert num_switches(None, jnp.array(CODES[0])) == 3  # the stages' and the layers'
    assert num_switches(0, jnp.array(CODES[:2])) == 0  # selects among all branches
