"""FL-Gradient: its two gradients against those of clients one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fl_agcns import fl_gradient
from fedjax_graph.algorithms.fl_agcns.fl_gradient import FLGradientConfig, Learnt
from fedjax_graph.algorithms.fl_agcns.search import Weights, init_weights
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.trees import take
from fedjax_graph.models.architecture import OPS, Choices, check, is_gene
from fedjax_graph.models.relaxation import relaxed
from fedjax_graph.tasks import subgraphs
from tests import client_graphs
from tests.few_ops import FEW_OPS

SIZES = (client_graphs.NUM_FEATURES, client_graphs.NUM_CLASSES)
OF_2022 = {"space": "2022", "fusion": "leaves"}
CONFIG = FLGradientConfig(*SIZES, num_layers=2, width=4, **OF_2022)
KEY = jax.random.key(0)  # of dropout, which there is not
ALL_CLOSE = functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def data():
    """Two clients: 2 and 1 trained nodes, 5 and 2 scored ones."""
    both = take(client_graphs.make_splits()["train"], jnp.array([0, 3]))
    return both._replace(is_scored=both.is_scored.at[0, :5].set(1).at[0, 5:].set(0))


def first_learnt(config, alphas):
    return Learnt(alphas, config.architecture_optimizer.build().init(alphas))


# --- Architectures -------------------------------------------------------------------


def test_first_alphas_and_probabilities():
    alphas = fl_gradient.first_alphas(jax.random.key(0), 2)
    sizes = [range(1, 6), range(13), range(25), range(1, 6)]
    assert alphas.shape == (4, 25)
    mixed = fl_gradient.probabilities(100 * alphas)
    rows = [mixed["input"], *mixed["layers"], mixed["output"]]
    for index, (own, values) in enumerate(zip(alphas, sizes, strict=True)):
        values = np.array(values)
        assert not np.delete(own, values).any()
        assert 0 < np.std(own[values]) < 2e-3
        shares = np.exp(100 * own[values])
        row = rows[index] if index in (0, 3) else rows[index][values]
        npt.assert_allclose(row, shares / shares.sum(), rtol=1e-5)
        if index in (1, 2):
            assert not np.delete(rows[index], values).any()


@pytest.mark.parametrize("seed", range(5))
def test_the_derived_code_is_the_likeliest(seed):
    """Also where a value that a gene cannot have would be."""
    alphas = np.random.default_rng(seed).normal(-5, 1, (4, 25)).astype(np.float32)
    code = fl_gradient.derive(jnp.asarray(alphas))
    check(code, 2)
    alphas[[0, 3], 0] = alphas[[0, 3], 6:] = alphas[1, 13:] = -np.inf
    assert code.tolist() == alphas.argmax(axis=1).tolist()


def test_ops_that_are_left_out_are_impossible():
    choices = Choices(ops=FEW_OPS)
    alphas = fl_gradient.first_alphas(jax.random.key(0), 2, choices)
    shares = fl_gradient.probabilities(alphas, choices)["layers"]
    npt.assert_array_equal(shares > 0, is_gene(2, choices)[1:-1])
    alphas = jnp.where(is_gene(2, choices), alphas, 9)  # what nothing trains
    check(fl_gradient.derive(alphas, choices), 2)
    assert set(np.asarray(fl_gradient.derive(alphas, choices)[1:-1] - 1) % 12) <= {
        OPS.index(op) for op in FEW_OPS
    } | {11}  # 0, an absent layer


def test_given_stages_are_certain():
    alphas = fl_gradient.first_alphas(jax.random.key(0), 2, Choices((3, 0)))
    assert fl_gradient.derive(alphas, Choices((3, 0)))[0] == 3
    mixed = fl_gradient.probabilities(alphas, Choices((3, 0)))
    npt.assert_array_equal(mixed["input"], [0, 0, 1, 0, 0])
    npt.assert_allclose(mixed["output"], 0.2, atol=1e-3)


# --- Steps ---------------------------------------------------------------------------


def loss(params, alphas, stats, own, mask):
    """ONE client's mean over marked nodes, and statistics."""
    outputs, stats = relaxed(
        CONFIG.supernet,
        {"params": params, "batch_stats": stats},
        subgraphs.as_graph(own),
        fl_gradient.probabilities(alphas),
        own.is_real,
    )
    chances = jax.nn.log_softmax(outputs)[jnp.arange(len(own.labels)), own.labels]
    return -jnp.sum(chances * mask) / jnp.sum(mask), stats


@pytest.fixture(scope="module")
def problem(data, draw_params, quick_jit):
    """A model, alphas, and what each client computes of them."""
    weights = jax.eval_shape(functools.partial(init_weights, CONFIG), jax.random.key(0))
    model = jax.tree.map(jnp.asarray, draw_params(lambda key: weights.model))
    for stats in model["batch_stats"].values():
        stats["norm"]["var"] = abs(stats["norm"]["var"]) + 0.1
    alphas = 300 * fl_gradient.first_alphas(jax.random.key(1), 2)

    def of_one(own):
        args = (model["params"], alphas, model["batch_stats"], own)
        of_trained = jax.value_and_grad(loss, 0, has_aux=True)
        of_scored = jax.grad(loss, 1, has_aux=True)
        return of_trained(*args, own.is_trained), of_scored(*args, own.is_scored)[0]

    run = quick_jit(of_one)
    return model, alphas, [run(take(data, index)) for index in (0, 1)]


@pytest.fixture(scope="module")
def train(quick_jit):
    return quick_jit(fl_gradient.weights_step(CONFIG))


@pytest.fixture(scope="module")
def learn(quick_jit):
    return quick_jit(fl_gradient.alphas_step(CONFIG))


def first_adam_step(grad, rate):
    return -rate * grad / (np.abs(grad) + 1e-8)


@pytest.mark.slow
def test_the_weights_step_by_hand(data, problem, train, quick_jit):
    model, alphas, clients = problem
    trees = [((grads, stats), value) for ((value, stats), grads), _ in clients]
    (grads, stats), value = jax.tree.map(lambda x, y: (2 * x + y) / 3, *trees)
    fresh = quick_jit(functools.partial(init_weights, CONFIG))(jax.random.key(0))
    after, measured, costs = train(fresh._replace(model=model), data, KEY, alphas)
    after, params = jax.device_get((after, model["params"]))
    npt.assert_allclose(measured, value, rtol=1e-5)
    assert costs == {}
    jax.tree.map(ALL_CLOSE, after.model["batch_stats"], stats)

    def check_leaf(x, grad, moved, state):
        moments = state[1][0]
        assert (moments.count == np.ones(len(x))).all()
        ALL_CLOSE(10 * moments.mu, grad + 5e-6 * x)
        # A gradient that is but rounding still moves: so by that which was measured.
        ALL_CLOSE(moved - x, first_adam_step(10 * moments.mu, 0.02), rtol=0.01)

    leaves, structure = jax.tree.flatten(params)
    others = map(jax.tree.leaves, (grads, after.model["params"]))
    states = structure.flatten_up_to(after.opt_state)
    for one in zip(leaves, *others, states, strict=True):
        check_leaf(*one)


def test_a_weights_step_hands_its_key_to_dropout(data, quick_jit, monkeypatch):
    """By outputs that are drawn with it, as the relaxation takes long to compile."""

    def drawn(net, model, graph, chances, is_real, key=None):
        del net, graph, chances
        key = jax.random.key(9) if key is None else key
        return jax.random.normal(key, (len(is_real), SIZES[1])), model["batch_stats"]

    monkeypatch.setattr(fl_gradient, "relaxed", drawn)
    params, alphas = {"w": jnp.ones((1, 1))}, fl_gradient.first_alphas(KEY, 2)
    opt_state = jax.tree.map(jax.vmap(CONFIG.server_optimizer.build().init), params)
    weights = Weights({"params": params, "batch_stats": {}}, opt_state)
    step = quick_jit(fl_gradient.weights_step(CONFIG))
    losses = [
        step(weights, data, jax.random.key(seed), alphas)[1] for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_the_alphas_step_by_hand(data, problem, learn):
    model, alphas, clients = problem
    after, costs = learn(first_learnt(CONFIG, alphas), data, model)
    assert costs == {}
    after, alphas = jax.device_get((after, alphas))
    slopes = [np.asarray(slope) for _, slope in clients]
    grad = (5 * slopes[0] + 2 * slopes[1]) / 7 + 1e-3 * alphas
    assert np.abs(grad).max() > 1e-3
    moments = after.opt_state[1][0].mu
    ALL_CLOSE(2 * moments, grad)
    ALL_CLOSE(after.alphas - alphas, first_adam_step(2 * moments, 3e-4), rtol=0.01)
    assert (after.alphas[alphas == 0] == 0).all()


@pytest.mark.slow
def test_alphas_find_the_op_that_labels_come_from(data, quick_jit):
    """Other ops give zeros, or with no layer the sign is wrong."""
    config = FLGradientConfig(
        *SIZES,
        num_layers=1,
        width=4,
        **OF_2022,
        architecture_optimizer=OptimizerConfig(
            "adam", 0.1, momentum=0.5, second_momentum=0.999, weight_decay=1e-3
        ),
    )
    net, chosen = config.supernet, OPS.index("SGConv") + 1

    @quick_jit
    def make_model(key):
        model = net.init(key)
        params = model["params"]
        layers = jax.tree.map(jnp.zeros_like, params["layers"])
        layers["SGConv"]["kernel"] = -2 * jnp.eye(4)[None]
        output = jax.tree.map(lambda x: 20 * x, params["output"])
        params |= {"layers": layers, "output": output}
        return model

    model = make_model(jax.random.key(0))

    @quick_jit
    def make_labels(data):
        def one(own):
            code = jnp.array([5, chosen, 5])
            return net.apply(model, subgraphs.as_graph(own), code, own.is_real)[0]

        return jnp.argmax(jax.vmap(one)(data), axis=-1)

    data = data._replace(labels=make_labels(data), is_scored=data.is_real)
    step = fl_gradient.alphas_step(config)

    @quick_jit
    def run(alphas):
        start = first_learnt(config, alphas)
        learnt, _ = jax.lax.scan(
            lambda learnt, _: step(learnt, data, model), start, length=100
        )
        return learnt.alphas, fl_gradient.probabilities(learnt.alphas)

    alphas = fl_gradient.first_alphas(jax.random.key(2), 1)
    alphas, mixed = run(alphas.at[jnp.array([0, 2]), 5].set(9))
    assert fl_gradient.derive(alphas).tolist() == [5, chosen, 5]
    assert mixed["layers"][0, chosen] > 0.5


# --- The search ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_round_takes_turns(data, train, learn, quick_jit):
    """Two steps, and the score of the derived code."""
    config = dataclasses.replace(CONFIG, num_steps=2)
    algorithm = fl_gradient.fl_gradient(config)
    first = quick_jit(algorithm.init)(jax.random.key(0), data)
    state, metrics = quick_jit(algorithm.round)(first, data, jax.random.key(1))
    weights, learnt, losses = first.weights, first.learnt, []
    for _ in range(2):
        weights, value, _ = train(weights, data, KEY, learnt.alphas)
        learnt, _ = learn(learnt, data, weights.model)
        losses.append(value)
    npt.assert_allclose(metrics["train_loss"], np.mean(losses), rtol=1e-4)
    npt.assert_allclose(state.learnt.alphas, learnt.alphas, atol=1e-5)
    assert np.abs(state.learnt.alphas - first.learnt.alphas).max() > 5e-4
    assert state.num_rounds == 1
    assert state.code.tolist() == fl_gradient.derive(state.learnt.alphas).tolist()
    check(state.code, 2)
    scores = quick_jit(algorithm.evaluate)(state, data)
    npt.assert_allclose(metrics["best_score"], -scores["loss"], rtol=1e-5)
    assert metrics["mean_score"] == metrics["best_score"]
    assert set(metrics) == {"train_loss", "best_score", "mean_score", "score_spread"}
