"""FL-RL: the controller against a NumPy LSTM, and its learning by hand."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fl_agcns import fl_rl
from fedjax_graph.algorithms.fl_agcns.fl_rl import Controller, FLRLConfig, Learnt
from fedjax_graph.algorithms.fl_agcns.search import WORST
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models.architecture import Choices, check, is_gene, space_size
from tests import client_graphs
from tests.few_ops import FEW_OPS

CONTROLLER = Controller(num_layers=2, size=4)
SMALL = Controller(num_layers=1, size=3)
SPACE = np.array(list(itertools.product(range(1, 6), range(13), range(1, 6))), np.int32)

sample = jax.jit(CONTROLLER.sample, static_argnums=2)
log_prob = jax.jit(CONTROLLER.log_prob)


@pytest.fixture(scope="module")
def params(draw_params):
    """Of `CONTROLLER`; large enough for genes to be far from uniform."""
    return jax.tree.map(lambda x: 4 * x, draw_params(CONTROLLER.init))


# --- The controller ------------------------------------------------------------------


@hypothesis.settings(deadline=None, derandomize=True, max_examples=30)
@hypothesis.given(seed=st.integers(0, 10**6), scale=st.sampled_from([0, 1, 100]))
def test_sampled_codes_are_valid(params, seed, scale):
    scaled = jax.tree.map(lambda x: scale * x, params)
    codes, log_probs, entropies = sample(scaled, jax.random.key(seed), 20)
    assert codes.dtype == jnp.int32
    for code in codes:
        check(code, 2)
    npt.assert_allclose(log_prob(scaled, codes), log_probs, rtol=1e-5)
    assert (entropies >= 0).all()
    if scale == 0:  # all codes are equally likely
        size = np.log(space_size(2))
        npt.assert_allclose(log_probs, -size, rtol=1e-5)
        npt.assert_allclose(entropies, size, rtol=1e-5)


def write_by_hand(params, code):
    """log p and the genes' entropies of one code, with an LSTM in NumPy, float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    cell, size = params["cell"], params["decoder"].shape[1]
    hidden, memory, last = np.zeros(size), np.zeros(size), 0

    def gate(name, x):
        recurrent = cell[f"h{name}"]
        own = x @ cell[f"i{name}"]["kernel"]
        return own + hidden @ recurrent["kernel"] + recurrent["bias"]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    log_prob, entropy = 0.0, 0.0
    for index, gene in enumerate(code):
        x = params["embedding"][index, last]
        memory = sigmoid(gate("f", x)) * memory + sigmoid(gate("i", x)) * np.tanh(
            gate("g", x)
        )
        hidden = sigmoid(gate("o", x)) * np.tanh(memory)
        logits = 2.5 * np.tanh(hidden @ params["decoder"][index] / 5)
        is_stage = index in (0, len(code) - 1)
        values = range(1, 6) if is_stage else range(12 * index + 1)
        shares = np.exp(logits[list(values)])
        shares /= shares.sum()
        log_prob += np.log(shares[gene - values[0]])
        entropy -= shares @ np.log(shares)
        last = gene
    return log_prob, entropy


def test_against_an_lstm_by_hand(params):
    codes, log_probs, entropies = sample(params, jax.random.key(1), 12)
    expected = [write_by_hand(params, code) for code in codes.tolist()]
    npt.assert_allclose(jnp.stack([log_probs, entropies], 1), expected, rtol=1e-4)
    assert np.std(log_probs) > 0.3


def test_probabilities_of_all_codes_sum_to_one(draw_params):
    params = jax.tree.map(lambda x: 4 * x, draw_params(SMALL.init, 2))
    shares = np.exp(jax.jit(SMALL.log_prob)(params, SPACE))
    assert len(SPACE) == space_size(1) == 325
    npt.assert_allclose(shares.sum(), 1, rtol=1e-5)
    num = 20_000
    drawn, log_probs, entropies = jax.jit(SMALL.sample, static_argnums=2)(
        params, jax.random.key(3), num
    )
    indices = {tuple(code): index for index, code in enumerate(SPACE.tolist())}
    counts = np.bincount([indices[tuple(code)] for code in drawn.tolist()], None, 325)
    errors = (counts - num * shares) ** 2 / (num * shares)
    assert errors.sum() < 450  # chi squared of 324: beyond it once in 10^5 times
    entropy = -shares @ np.log(shares)
    npt.assert_allclose(np.mean(entropies), entropy, rtol=1e-2)
    npt.assert_allclose(-np.mean(log_probs), entropy, rtol=1e-2)


def test_a_code_that_does_not_exist_has_no_probability(params):
    assert (
        log_prob(params, jnp.array([[1, 13, 24, 5], [0, 1, 1, 1]])).tolist()
        == [-np.inf] * 2
    )


def test_given_stages_are_certain(params):
    """Their genes have no say in the probability of a code, nor an entropy."""
    choices = Choices((3, 5), FEW_OPS)
    given = dataclasses.replace(CONTROLLER, choices=choices)
    codes, log_probs, _ = given.sample(params, jax.random.key(0), 50)
    for genes, allowed in zip(codes.T, is_gene(2, choices), strict=True):
        assert allowed[genes].all()
    assert np.all(np.asarray(codes)[:, [0, -1]] == (3, 5))
    npt.assert_allclose(given.log_prob(params, codes), log_probs, rtol=1e-5)
    assert np.all(log_probs > CONTROLLER.log_prob(params, codes) + 1)
    assert np.all(given.log_prob(params, codes.at[:, 0].set(2)) == -np.inf)


def test_fresh_genes_are_nearly_uniform():
    params = jax.jit(CONTROLLER.init)(jax.random.key(0))
    _, log_probs, _ = sample(params, jax.random.key(1), 50)
    npt.assert_allclose(log_probs, -np.log(space_size(2)), rtol=0.01)
    assert np.std(log_probs) > 0


# --- Learning ------------------------------------------------------------------------


def test_baseline_by_hand():
    rewards, everybody = jnp.array([1.0, 2.0, 6.0]), jnp.ones(3, bool)
    move = fl_rl.move_baseline
    assert move(jnp.float32(7), rewards, everybody, 0) == 3
    npt.assert_allclose(move(jnp.float32(7), rewards, everybody, 0.95), 6.8, rtol=1e-6)
    first_two = jnp.array([True, True, False])
    npt.assert_allclose(move(jnp.float32(7), rewards, first_two, 0.9), 6.45, rtol=1e-6)
    assert move(jnp.float32(7), rewards, ~everybody, 0.9) == 7


def test_advantages_by_hand():
    rewards = jnp.array([1.0, 5.0, WORST, 4.0])
    is_score = jnp.array([True, True, False, True])
    gains = fl_rl.advantages(rewards, is_score, jnp.float32(3))
    assert gains.tolist() == [-2, 2, -2, 1]
    gains = fl_rl.advantages(rewards, is_score, jnp.float32(-3))
    assert gains.tolist() == [4, 8, 0, 7]  # no gain where there is no score


def first_learnt(config, params):
    opt_state = config.controller_optimizer.build().init(params)
    return Learnt(params, opt_state, jnp.float32(-1.5))


def test_a_step_is_reinforce(params):
    """Adam's first moment against differences of log p by hand; its step from it."""
    config = FLRLConfig(6, 3, 2, controller_size=4, entropy_weight=0.1)
    codes, _, entropies = sample(params, jax.random.key(4), 3)
    scores = jnp.array([-1.0, -3.0, -0.5])
    before = first_learnt(config, params)
    after = jax.jit(fl_rl.learn, static_argnums=0)(
        config, before, codes, scores, entropies, False
    )
    rewards = np.asarray(scores) + 0.1 * np.asarray(entropies)
    baseline = 0.95 * -1.5 + 0.05 * rewards.mean()
    npt.assert_allclose(after.baseline, baseline, rtol=1e-5)

    def loss(params):
        log_probs = [write_by_hand(params, code)[0] for code in codes.tolist()]
        return -np.mean((rewards - baseline) * log_probs)

    moments = after.opt_state[0].mu
    for name, index in [
        ("decoder", (0, 1, 2)),
        ("decoder", (2, 3, 20)),
        ("embedding", (0, 0, 1)),
        ("embedding", (1, int(codes[0, 0]), 3)),
    ]:
        step = np.zeros(params[name].shape)
        step[index] = 1e-4
        ends = [
            loss(params | {name: np.float64(params[name]) + sign * step})
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / 2e-4
        assert abs(slope) > 1e-5, (name, index)
        npt.assert_allclose(moments[name][index], 0.1 * slope, rtol=1e-2)
        moved = after.params[name][index] - params[name][index]
        npt.assert_allclose(moved, -3.5e-4 * np.sign(slope), rtol=2e-2)


def test_a_rewarded_gene_becomes_likely():
    """Reward 1 where layer 1 is 4, GCN of the input stage: in 13 before, a half after.

    A logit is 2.5 at most, so no gene of layer 1 can have more than 0.92.
    """
    optimizer = OptimizerConfig("adam", 0.02)
    config = FLRLConfig(6, 3, 1, controller_size=8, controller_optimizer=optimizer)
    controller, chosen = config.controller, SPACE[:, 1] == 4
    log_prob = jax.jit(controller.log_prob)

    def share(params):
        return np.exp(log_prob(params, SPACE))[chosen].sum()

    def step(learnt, key):
        codes, _, entropies = controller.sample(learnt.params, key, 10)
        rewards = (codes[:, 1] == 4).astype(jnp.float32)
        return fl_rl.learn(config, learnt, codes, rewards, entropies, False), None

    learnt = first_learnt(config, controller.init(jax.random.key(0)))
    assert share(learnt.params) < 0.1
    keys = jax.random.split(jax.random.key(1), 200)
    learnt, _ = jax.jit(lambda learnt: jax.lax.scan(step, learnt, keys))(learnt)
    assert 0.5 < share(learnt.params) < 0.92
    assert 0 < learnt.baseline < 1


# --- The search ----------------------------------------------------------------------


@pytest.mark.slow
def test_rounds_of_the_search(quick_jit):
    config = FLRLConfig(
        client_graphs.NUM_FEATURES,
        client_graphs.NUM_CLASSES,
        num_layers=1,
        width=4,
        num_epochs=2,
        codes_per_round=3,
        entropy_weight=0.5,
    )
    algorithm, data = fl_rl.fl_rl(config), client_graphs.make_splits()["train"]
    states = [quick_jit(algorithm.init)(jax.random.key(0), data)]
    run, metrics = quick_jit(algorithm.round), []
    for seed in (1, 2):
        state, measured = run(states[-1], data, jax.random.key(seed))
        states.append(state)
        metrics.append(measured)
    rewards = [float(m["mean_score"] + 0.5 * m["entropy"]) for m in metrics]
    best = [float(state.best_score) for state in states]
    baselines = [float(state.learnt.baseline) for state in states]
    expected = [0, rewards[0], 0.95 * rewards[0] + 0.05 * rewards[1]]
    npt.assert_allclose(baselines, expected, rtol=1e-5)
    assert best[0] < best[1] <= best[2] == float(metrics[1]["best_score"])
    for before, after in itertools.pairwise(states):
        params = before.learnt.params, after.learnt.params
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), *params)
        assert all(0 < x < 1e-3 for x in jax.tree.leaves(moved))
    check(states[-1].code, 1)
    score = quick_jit(algorithm.evaluate)(states[-1], data)["loss"]
    npt.assert_allclose(-score, best[-1], rtol=1e-5)
