"""The twelve convolutions against golden numbers, loops and what must not matter."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.models import convolutions
from fedjax_graph.models.convolutions import CONVOLUTIONS

NUM_NODES, NUM_EDGES, SIZE = 6, 20, 5
PADDED_NODES, PADDED_EDGES = 9, 28  # the shape of the golden graph: one compilation
every_one = pytest.mark.parametrize("name", CONVOLUTIONS)


def make_graph(nodes, senders, receivers, weights):
    return jraph.GraphsTuple(
        nodes=jnp.asarray(nodes, jnp.float32),
        edges=jnp.asarray(weights, jnp.float32),
        senders=jnp.asarray(senders, jnp.int32),
        receivers=jnp.asarray(receivers, jnp.int32),
        globals=None,
        n_node=jnp.array([len(nodes)]),
        n_edge=jnp.array([len(senders)]),
    )


def random_graph(seed, input_size=SIZE):
    """A directed graph whose last node is isolated, its weights 0.5, 1 or 2."""
    rng = np.random.default_rng(seed)
    senders = rng.integers(0, NUM_NODES - 1, NUM_EDGES)
    receivers = (senders + rng.integers(1, NUM_NODES - 1, NUM_EDGES)) % (NUM_NODES - 1)
    nodes = rng.normal(size=(NUM_NODES, input_size))
    weights = rng.choice([0.5, 1, 2], NUM_EDGES)
    return make_graph(nodes, senders, receivers, weights)


@pytest.fixture(scope="module")
def variables(draw_params):
    """Weights and running statistics by name, for nodes of SIZE features."""

    def draw(name, input_size=SIZE, **settings):
        model = CONVOLUTIONS[name](**{"features": SIZE, **settings})
        drawn = draw_params(lambda key: model.init(key, random_graph(0, input_size)))
        for statistics in drawn.get("batch_stats", {}).values():
            statistics["var"] = np.abs(statistics["var"]) + 0.1
        return drawn

    return functools.cache(draw)


@pytest.fixture(scope="module")
def apply(quick_jit):
    """(variables, graph, mask) -> (outputs, running statistics), by name."""

    def build(name, **settings):
        model = CONVOLUTIONS[name](**{"features": SIZE, **settings})
        return quick_jit(functools.partial(model.apply, mutable=["batch_stats"]))

    return functools.cache(build)


GOLDEN_PARAMS = {
    "GATConv": lambda p: {
        "kernel": p["lin.weight"].T,
        "attention": np.stack([p["att_src"][0, 0], p["att_dst"][0, 0]], axis=1),
        "bias": p["bias"],
    },
    "GINConv": lambda p: {
        "epsilon": p["eps"][0],
        "kernel": p["nn.0.weight"].T,
        "bias": p["nn.0.bias"],
        "norm": {"scale": p["nn.1.weight"], "bias": p["nn.1.bias"]},
        "last": {"kernel": p["nn.3.weight"].T, "bias": p["nn.3.bias"]},
    },
    "SAGEConv": lambda p: {
        "kernel": p["lin_l.weight"].T,
        "bias": p["lin_l.bias"],
        "root_kernel": p["lin_r.weight"].T,
    },
    "GCNConv": lambda p: {"kernel": p["lin.weight"].T, "bias": p["bias"]},
    "SGConv": lambda p: {"kernel": p["lin.weight"].T, "bias": p["lin.bias"]},
    "APPNP": lambda p: {},
    "AGNNConv": lambda p: {"beta": p["beta"][0]},
    "ARMAConv": lambda p: {
        "kernel": p["init_weight"].transpose(1, 0, 2),
        "root_kernel": p["root_weight"][0].transpose(1, 0, 2),
        "bias": p["bias"][0, :, 0],
    },
    "FeaStConv": lambda p: {
        "kernel": p["lin.weight"].T.reshape(5, 2, 5),
        "steering_kernel": p["u.weight"].T,
        "offset": p["c"],
        "bias": p["bias"],
    },
    "GENConv": lambda p: {
        "kernel": p["mlp.0.weight"].T,
        "norm": {"scale": p["mlp.1.weight"], "bias": p["mlp.1.bias"]},
        "last_kernel": p["mlp.4.weight"].T,
    },
    "GMMConv": lambda p: {
        "kernel": p["g"].reshape(5, 4, 5),
        "means": p["mu"],
        "deviations": p["sigma"],
        "root_kernel": p["root.weight"].T,
        "bias": p["bias"],
    },
    "GatedGraphConv": lambda p: {
        "kernel": p["weight"][0],
        "gru": {
            "input_kernel": p["rnn.weight_ih"].T,
            "hidden_kernel": p["rnn.weight_hh"].T,
            "input_bias": p["rnn.bias_ih"],
            "hidden_bias": p["rnn.bias_hh"],
        },
    },
}


@every_one
def test_golden_numbers(name, reference, variables, apply):
    prefix = f"{name}/param/"
    stored = {k[len(prefix) :]: v for k, v in reference.items() if k.startswith(prefix)}
    drawn = {"params": GOLDEN_PARAMS[name](stored)}
    if "norm" in drawn["params"]:
        zeros = np.zeros_like(drawn["params"]["norm"]["bias"])
        drawn["batch_stats"] = {"norm": {"mean": zeros, "var": zeros + 1}}
    shapes = jax.tree.map(np.shape, drawn)
    assert {"params": {}, **jax.tree.map(np.shape, variables(name))} == shapes
    ends = (reference["senders"], reference["receivers"])
    graph = make_graph(reference["x"], *ends, np.ones(PADDED_EDGES))
    outputs, _ = apply(name)(drawn, graph)
    npt.assert_allclose(outputs, reference[f"{name}/output_eval"], atol=1e-5)
    outputs, _ = apply(name)(drawn, graph, jnp.ones(len(reference["x"])))
    npt.assert_allclose(outputs, reference[f"{name}/output_train"], atol=1e-5)


def test_the_order_of_the_op_numbers():
    assert [cls.__name__ for cls in CONVOLUTIONS.values()] == list(GOLDEN_PARAMS)


def dense_weights(graph):
    """[N, N]: [i, j] is what node i receives from node j."""
    matrix = np.zeros((NUM_NODES, NUM_NODES))
    np.add.at(matrix, (graph.receivers, graph.senders), graph.edges)
    return matrix


def normalised(matrix):
    degrees = matrix.sum(1)
    scale = np.divide(1, np.sqrt(degrees), out=np.zeros(NUM_NODES), where=degrees > 0)
    return scale[:, None] * matrix * scale


def dense_gcn(p, matrix, x):
    return normalised(matrix + np.eye(NUM_NODES)) @ x @ p["kernel"] + p["bias"]


def dense_sgc(p, matrix, x):
    spread = np.linalg.matrix_power(normalised(matrix + np.eye(NUM_NODES)), 3)
    return spread @ x @ p["kernel"] + p["bias"]


def dense_appnp(p, matrix, x):
    spread, z = normalised(matrix + np.eye(NUM_NODES)), x
    for _ in range(4):
        z = 0.8 * spread @ z + 0.2 * x
    return z


def dense_sage(p, matrix, x):
    counts = np.maximum(matrix.sum(1, keepdims=True), 1e-9)
    return (matrix / counts) @ x @ p["kernel"] + x @ p["root_kernel"] + p["bias"]


def dense_gat(p, matrix, x):
    z = x @ p["kernel"]
    logits = z @ p["attention"][:, 0] + (z @ p["attention"][:, 1])[:, None]
    weights = (matrix + np.eye(NUM_NODES)) * np.exp(np.maximum(logits, 0.2 * logits))
    return weights / weights.sum(1, keepdims=True) @ z + p["bias"]


def dense_arma(p, matrix, x):
    spread = normalised(matrix)
    stacks = [
        spread @ x @ p["kernel"][:, k] + x @ p["root_kernel"][:, k] + p["bias"][k]
        for k in range(3)
    ]
    return np.mean(np.maximum(stacks, 0), axis=0)


def dense_feast(p, matrix, x):
    own, scores = matrix + np.eye(NUM_NODES), x @ p["steering_kernel"]
    shares = np.exp(scores - scores[:, None] + p["offset"])  # [i, j, head]
    shares *= (own / own.sum(1, keepdims=True))[..., None]
    shares /= np.exp(scores - scores[:, None] + p["offset"]).sum(-1, keepdims=True)
    values = np.einsum("jf,fmo->jmo", x, p["kernel"])
    return np.einsum("ijm,jmo->io", shares, values) + p["bias"]


def dense_gmm(p, matrix, x):
    inverse = 1 / np.sqrt(matrix.sum(1) + 1)
    ends = np.broadcast_arrays(inverse, inverse[:, None])  # of sender and receiver
    distances = np.stack(ends, axis=-1)[:, :, None] - p["means"]  # [i, j, kernel, 2]
    shares = np.exp(-((distances / p["deviations"]) ** 2).sum(-1) / 2)
    shares *= (matrix / np.maximum(matrix.sum(1, keepdims=True), 1e-9))[..., None]
    values = np.einsum("jf,fko->jko", x, p["kernel"])
    mean = np.einsum("ijk,jko->io", shares, values)
    return mean + x @ p["root_kernel"] + p["bias"]


def dense_gated(p, matrix, x):
    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    state = np.concatenate([x, np.zeros((NUM_NODES, 4 - x.shape[1]))], axis=1)
    gru = p["gru"]
    kernels = [p[name] for name in sorted(p) if name.startswith("kernel")]
    for step in range(3):
        received = matrix @ state @ kernels[step % len(kernels)]
        inputs = np.split(received @ gru["input_kernel"] + gru["input_bias"], 3, 1)
        own = np.split(state @ gru["hidden_kernel"] + gru["hidden_bias"], 3, 1)
        reset, update = (sigmoid(inputs[i] + own[i]) for i in range(2))
        state = (1 - update) * np.tanh(inputs[2] + reset * own[2]) + update * state
    return state


ANY, NOT_MORE, SAME = (4, 3, 13), (4, 3), (4,)
DENSE = {
    "GCNConv": (dense_gcn, ANY, {}),
    "GATConv": (dense_gat, ANY, {}),
    "SAGEConv": (dense_sage, ANY, {}),
    "SGConv": (dense_sgc, ANY, {"num_hops": 3}),
    "ARMAConv": (dense_arma, ANY, {"num_stacks": 3}),
    "FeaStConv": (dense_feast, ANY, {"num_heads": 3}),
    "GMMConv": (dense_gmm, ANY, {"num_kernels": 3}),
    "APPNP": (dense_appnp, SAME, {"num_hops": 4, "teleport": 0.2}),
    "GatedGraphConv": (dense_gated, NOT_MORE, {"num_steps": 3}),
}


@pytest.mark.parametrize("num_kernels", [2, 3])
def test_a_gated_state_takes_its_kernels_in_turn(num_kernels, variables, apply):
    settings = {"features": 4, "num_steps": 3, "num_kernels": num_kernels}
    graph, name = random_graph(1, 4), "GatedGraphConv"
    drawn = variables(name, 4, **settings)
    outputs, _ = apply(name, **settings)(drawn, graph)
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), drawn["params"])
    assert sum(name.startswith("kernel") for name in params) == num_kernels
    expected = dense_gated(params, dense_weights(graph), np.asarray(graph.nodes, float))
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, input_size", [(name, size) for name in DENSE for size in DENSE[name][1]]
)
def test_dense_algebra(name, input_size, variables, apply):
    """Weighted and directed, of as many, fewer and more features than the output's."""
    dense, _, settings = DENSE[name]
    settings = {"features": 4, **settings}
    graph = random_graph(1, input_size)
    drawn = variables(name, input_size, **settings)
    outputs, _ = apply(name, **settings)(drawn, graph)
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), drawn.get("params"))
    expected = dense(params, dense_weights(graph), np.asarray(graph.nodes, np.float64))
    npt.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


def pad(graph, rng):
    """Scatters padding with garbage among a graph's nodes and edges.

    Half of the new edges join padding; the others, of weight 0, lead into the graph.

    Returns:
      The padded graph, its node mask [N], and where the graph's own nodes are.
    """
    indices = rng.permutation(PADDED_NODES)
    own, padding = indices[:NUM_NODES], indices[NUM_NODES:]
    nodes = 100 * rng.normal(size=(PADDED_NODES, SIZE))
    nodes[own] = graph.nodes
    half = (PADDED_EDGES - NUM_EDGES) // 2
    senders, receivers = (
        np.concatenate([own[end], rng.choice(padding, half), rng.choice(new, half)])
        for end, new in ((graph.senders, padding), (graph.receivers, own))
    )
    weights = np.concatenate([graph.edges, np.ones(half), np.zeros(half)])
    order = rng.permutation(PADDED_EDGES)
    padded = make_graph(nodes, senders[order], receivers[order], weights[order])
    return padded, jnp.zeros(PADDED_NODES).at[own].set(1), own


@every_one
def test_padding_changes_nothing(name, variables, apply):
    graph, drawn = random_graph(2), variables(name)
    padded, mask, own = pad(graph, np.random.default_rng(0))
    outputs, _ = apply(name)(drawn, graph)
    of_padded, _ = apply(name)(drawn, padded)
    npt.assert_allclose(of_padded[own], outputs, atol=1e-6)
    assert np.isfinite(of_padded).all()
    outputs, statistics = apply(name)(drawn, graph, jnp.ones(NUM_NODES))
    of_padded, of_padded_statistics = apply(name)(drawn, padded, mask)
    npt.assert_allclose(of_padded[own], outputs, atol=2e-6)
    for a, b in zip(
        *map(jax.tree.leaves, (of_padded_statistics, statistics)), strict=True
    ):
        npt.assert_allclose(a, b, atol=1e-6)


@every_one
def test_an_edge_of_weight_two_is_two_edges(name, variables, apply):
    graph = random_graph(3)
    once = graph._replace(edges=jnp.ones(NUM_EDGES).at[:4].set(2).at[-4:].set(0))
    twice = graph._replace(
        edges=jnp.ones(NUM_EDGES),
        senders=graph.senders.at[-4:].set(graph.senders[:4]),
        receivers=graph.receivers.at[-4:].set(graph.receivers[:4]),
    )
    outputs, _ = apply(name)(variables(name), once)
    npt.assert_allclose(apply(name)(variables(name), twice)[0], outputs, atol=2e-6)


def test_weights_left_out_are_ones(variables, apply):
    graph = random_graph(0)
    outputs, _ = apply("GCNConv")(variables("GCNConv"), graph._replace(edges=None))
    ones = graph._replace(edges=jnp.ones(NUM_EDGES))
    expected, _ = apply("GCNConv")(variables("GCNConv"), ones)
    npt.assert_array_equal(outputs, expected)


@st.composite
def graphs_and_orders(draw):
    """Any multigraph, weights of 0 among them, and a new order of its nodes."""
    node = st.integers(0, NUM_NODES - 1)
    ends = st.lists(node, min_size=NUM_EDGES, max_size=NUM_EDGES)
    weight = st.sampled_from([0, 0.5, 1, 3])
    weights = draw(st.lists(weight, min_size=NUM_EDGES, max_size=NUM_EDGES))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    nodes = draw(st.sampled_from([0, 1, 10])) * rng.normal(size=(NUM_NODES, SIZE))
    graph = make_graph(nodes, draw(ends), draw(ends), weights)
    return graph, np.array(draw(st.permutations(range(NUM_NODES))))


@every_one
@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(case=graphs_and_orders())
def test_permuting_nodes_permutes_outputs(name, case, variables, apply):
    graph, order = case
    index = np.argsort(order)
    permuted = graph._replace(
        nodes=graph.nodes[order],
        senders=jnp.asarray(index[graph.senders], jnp.int32),
        receivers=jnp.asarray(index[graph.receivers], jnp.int32),
    )
    mask = jnp.ones(NUM_NODES).at[0].set(0)
    for masks in ((None, None), (mask, mask[order])):
        outputs, _ = apply(name)(variables(name), graph, masks[0])
        of_permuted, _ = apply(name)(variables(name), permuted, masks[1])
        npt.assert_allclose(of_permuted, outputs[order], rtol=1e-4, atol=1e-4)
        assert np.isfinite(outputs).all()


@every_one
def test_gradients_are_finite(name, variables, quick_jit):
    model, drawn = CONVOLUTIONS[name](SIZE), variables(name)
    state = {k: v for k, v in drawn.items() if k != "params"}

    @quick_jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradients(params, nodes, weights, graph, mask):
        graph = graph._replace(nodes=nodes, edges=weights)
        outputs, _ = model.apply(
            {"params": params, **state}, graph, mask, mutable=["batch_stats"]
        )
        return jnp.sum(mask[:, None] * outputs**3) + jnp.sum(outputs)

    graph = random_graph(4)
    some = jnp.ones(NUM_NODES).at[:2].set(0)
    for nodes in (graph.nodes, 0 * graph.nodes, 1e-15 * graph.nodes):
        for weights in (graph.edges, graph.edges.at[:9].set(0), 0 * graph.edges):
            for mask in (some, jnp.ones(NUM_NODES), jnp.zeros(NUM_NODES)):
                grads = gradients(drawn.get("params", {}), nodes, weights, graph, mask)
                for leaf in jax.tree.leaves(grads):
                    assert np.isfinite(leaf).all()


def test_large_logits_do_not_overflow(variables, apply):
    graph = random_graph(5)
    large = graph._replace(nodes=1e3 * graph.nodes)
    for name in ("GATConv", "AGNNConv", "FeaStConv", "GENConv"):
        assert np.isfinite(apply(name)(variables(name), large)[0]).all()


@pytest.mark.parametrize("with_self", [True, False])
def test_attention_and_its_gradients(with_self, quick_jit):
    """Against a dense softmax, without the shift that keeps ours from overflowing."""
    graph = random_graph(6)
    structure = convolutions.make_structure(graph, None)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(NUM_EDGES, SIZE)).astype(np.float32)
    own = rng.normal(size=(NUM_NODES, SIZE)).astype(np.float32)
    coefficients = rng.normal(size=(NUM_NODES, SIZE)).astype(np.float32)

    def attend(logits, own, values):
        return structure.attend(logits, own if with_self else -jnp.inf, values)

    def dense(logits, own, values):
        shares = jnp.zeros((NUM_NODES, NUM_NODES, SIZE))
        shares = shares.at[graph.receivers, graph.senders].add(
            graph.edges[:, None] * jnp.exp(logits)
        )
        if with_self:
            shares += jnp.eye(NUM_NODES)[..., None] * jnp.exp(own)
        totals = jnp.sum(shares, axis=1)
        summed = jnp.sum(shares * values, axis=1)
        return summed / jnp.where(totals > 0, totals, 1)

    def results(function):
        def loss(*operands):
            outputs = function(*operands)
            return jnp.sum(coefficients * outputs), outputs

        take = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        return jax.tree.leaves(quick_jit(take)(logits, own, graph.nodes))

    for ours, expected in zip(results(attend), results(dense), strict=True):
        npt.assert_allclose(ours, expected, atol=1e-5)


def test_a_switch_under_vmap(variables, apply, quick_jit):
    """One program for any op, over clients of one padded shape."""
    rng = np.random.default_rng(1)
    drawn = {name: variables(name) for name in CONVOLUTIONS}
    alone = [random_graph(seed) for seed in (7, 8)]
    padded, masks, indices = zip(*(pad(graph, rng) for graph in alone), strict=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)

    def branch(name):
        model = CONVOLUTIONS[name](SIZE)
        return lambda graph, mask: model.apply(
            drawn[name], graph, mask, mutable=["batch_stats"]
        )[0]

    @quick_jit
    def run(op, clients, masks):
        branches = [branch(name) for name in CONVOLUTIONS]
        return jax.vmap(lambda *client: jax.lax.switch(op, branches, *client))(
            clients, masks
        )

    for op, name in enumerate(CONVOLUTIONS):
        outputs = run(op, stacked, jnp.stack(masks))
        for client, graph in enumerate(alone):
            expected, _ = apply(name)(drawn[name], graph, jnp.ones(NUM_NODES))
            npt.assert_allclose(
                outputs[client][indices[client]], expected, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize("name", ["APPNP", "AGNNConv"])
def test_what_does_not_project_keeps_the_size(name):
    with pytest.raises(InputError, match=f"{name} keeps .* expected 7, got 5"):
        CONVOLUTIONS[name](7).init(jax.random.key(0), random_graph(0))


def test_a_gated_state_holds_all_features():
    with pytest.raises(InputError, match="at most 3 features, got 5"):
        CONVOLUTIONS["GatedGraphConv"](3).init(jax.random.key(0), random_graph(0))


def test_edges_are_weights():
    graph = random_graph(0)._replace(edges=jnp.ones((NUM_EDGES, 2)))
    with pytest.raises(InputError, match=r"shape \(20, 2\): expected .* \(20,\)"):
        convolutions.GCNConv(3).init(jax.random.key(0), graph)


@pytest.mark.parametrize("wrong", [-1, 3, 7])
def test_an_end_that_is_no_node_is_refused_where_it_counts(wrong):
    ends = np.array([0, 1, wrong], np.int32), np.array([1, 2, 0], np.int32)
    graph = make_graph(np.ones((3, 2), np.float32), *ends, np.ones(3, np.float32))
    turned = graph._replace(senders=graph.receivers, receivers=graph.senders)
    bare = graph._replace(edges=None)
    for given, name in ((graph, "senders"), (turned, "receivers"), (bare, "senders")):
        with pytest.raises(InputError, match=f"{name} has {wrong}, expected 0 to 2"):
            convolutions.make_structure(given, None)
    padded = graph._replace(edges=np.array([1, 1, 0], np.float32))
    npt.assert_array_equal(convolutions.make_structure(padded, None).degrees, [0, 1, 1])


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("wrong", [0, -2, 1.5, "3", None, True])
def test_features_are_counted(name, wrong):
    with pytest.raises(
        InputError, match=f"^{name} features=.*: expected a whole numbe"
    ):
        CONVOLUTIONS[name](wrong)


WRONG_SETTINGS = {
    "GATConv": {"num_heads": (0, -1, 2.0), "concatenates": (1, "yes")},
    "SGConv": {"num_hops": (-1, 0.5)},  # of none it is a linear map
    "APPNP": {"num_hops": (-1, 1.0), "teleport": (-0.1, 1.1, float("nan"), "a")},
    "ARMAConv": {"num_stacks": (0, -1, 1.5), "activation": (None, "relu")},
    "FeaStConv": {"num_heads": (0, -1, 1.5)},
    "GMMConv": {"num_kernels": (0, -1, 1.5)},
    "GatedGraphConv": {"num_steps": (0, -1, 1.5), "num_kernels": (0, -1, 1.5)},
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, setting) for name, own in WRONG_SETTINGS.items() for setting in own],
)
def test_settings_out_of_range_are_refused_in_one_line(name, setting):
    for wrong in WRONG_SETTINGS[name][setting]:
        match = f"^{name} {setting}={wrong!r}: expected"
        with pytest.raises(InputError, match=match) as raised:
            CONVOLUTIONS[name](SIZE, **{setting: wrong})
        assert "\n" not in str(raised.value)
