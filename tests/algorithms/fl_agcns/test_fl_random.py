"""Trials against a code's network trained alone, and which of them is kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.fl_agcns import fl_random as module
from fedjax_graph.algorithms.fl_agcns.fl_random import (
    Trial,
    TrialConfig,
    fl_random,
    make_trial,
)
from fedjax_graph.algorithms.fl_agcns.search import WORST, Weights
from fedjax_graph.core import faults
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.driver.divergence import Divergence
from fedjax_graph.models.architecture import check, random_codes
from fedjax_graph.models.packed import PackedNet
from fedjax_graph.tasks.subgraphs import as_graph
from tests.client_graphs import (
    NUM_CLASSES,
    NUM_CLIENTS,
    NUM_FEATURES,
    NUM_TRAINED,
    NUM_VALIDATED,
)
from tests.few_ops import FEW_OPS
from tests.models.supernet_cases import unpacked

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = TrialConfig(
    NUM_FEATURES,
    NUM_CLASSES,
    num_layers=2,
    width=4,
    ops=FEW_OPS,
    space="2022",
    fusion="leaves",
    server_optimizer=OptimizerConfig("adam", 0.02, weight_decay=0.01),
    num_epochs=4,
    codes_per_round=3,
)
CODES = [(3, 2, 13, 5), (2, 0, 6, 4)]  # GIN and GAT of it; APPNP


# --- Trials --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_trial(quick_jit):
    return quick_jit(make_trial(CONFIG))


def mean(tree, counts):
    def of(x):
        return jnp.asarray(np.average(x, axis=0, weights=counts), x.dtype)

    return jax.tree.map(of, tree)


def masked_losses(outputs, labels, mask):
    """Mean over the clients' marked nodes, of outputs [K, N, classes]."""
    nodes = -jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[..., None], -1)
    return jnp.sum(nodes[..., 0] * mask, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)


@pytest.mark.parametrize(
    ("code", "best_epoch"),
    [pytest.param(CODES[0], 0, marks=pytest.mark.slow), (CODES[1], 0)],
)
def test_a_trial_is_the_network_trained_alone(
    code, best_epoch, train, run_trial, quick_jit
):
    """By Adam on the mean gradient, judged by its best epoch."""
    key, net = jax.random.key(4), CONFIG.supernet
    trial = run_trial(train, jnp.array(code), key)
    init_key, _ = jax.random.split(key)
    first = quick_jit(PackedNet(net).init)(init_key, jnp.array(code))
    network, own = net.network(code), unpacked(net, first, code)
    apply = jax.vmap(
        functools.partial(network.apply, mutable=["batch_stats"]), (None, 0, 0)
    )
    graphs = jax.vmap(as_graph)(train)

    @quick_jit
    @jax.jacrev
    def gradients(params, stats):
        outputs, _ = apply(own | {"params": params, **stats}, graphs, train.is_real)
        return masked_losses(outputs, train.labels, train.is_trained)

    forward = quick_jit(apply)
    optimizer = optax.chain(optax.add_decayed_weights(0.01), optax.adam(0.02))
    params, stats = own["params"], {"batch_stats": own["batch_stats"]}
    opt_state, losses, trained, scores = optimizer.init(params), [], [], []
    for _ in range(CONFIG.num_epochs):
        gradient = mean(gradients(params, stats), NUM_TRAINED)
        outputs, new = forward({"params": params, **stats}, graphs, train.is_real)
        by_client = masked_losses(outputs, train.labels, train.is_trained)
        losses.append(np.average(by_client, weights=NUM_TRAINED))
        update, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, update)
        stats = {"batch_stats": mean(dict(new).get("batch_stats", {}), NUM_TRAINED)}
        trained.append({"params": params, **stats})
        outputs = jax.vmap(network.apply, (None, 0))(trained[-1], graphs)
        scores.append(-masked_losses(outputs, train.labels, train.is_scored))
    federated = np.average(scores, axis=1, weights=NUM_VALIDATED)
    best = np.argmax(federated)
    assert best == best_epoch
    close = functools.partial(npt.assert_allclose, rtol=1e-3, atol=2e-5)
    found = unpacked(net, trial.weights.model, code)
    jax.tree.map(close, found, trained[best])
    close(trial.client_scores, np.max(scores, axis=0))
    close(trial.score, federated[best])
    npt.assert_allclose(trial.loss, np.mean(losses), rtol=1e-4)
    npt.assert_array_equal(trial.code, code)


def test_a_trial_starts_from_its_own_key_and_compiles_once(train, run_trial):
    code = jnp.array(CODES[0])
    keys = [jax.random.key(seed) for seed in (1, 1, 2)]
    scores = [float(run_trial(train, code, key).score) for key in keys]
    assert scores[0] == scores[1] != scores[2]
    assert run_trial._cache_size() == 1


def test_a_schedule_spans_the_epochs_of_a_trial_or_steps_of_its_own(train, quick_jit):
    def loss(**schedule):
        steps = OptimizerConfig("adam", 0.02, schedule="linear", **schedule)
        run = make_trial(dataclasses.replace(CONFIG, server_optimizer=steps))
        return quick_jit(run)(train, jnp.array(CODES[0]), jax.random.key(0)).loss

    assert loss() == loss(num_steps=CONFIG.num_epochs) != loss(num_steps=1)


def test_a_trial_that_diverges_is_the_worst_and_ends_nothing(train, quick_jit):
    config = dataclasses.replace(CONFIG, server_optimizer=OptimizerConfig("adam", 1e30))
    trial = quick_jit(make_trial(config))(train, jnp.array(CODES[0]), jax.random.key(0))
    assert trial.score == WORST
    assert jnp.isfinite(trial.loss)


def test_a_trial_that_loses_all_its_clients_does_not_end_a_run(train, quick_jit):
    config = dataclasses.replace(CONFIG, server_optimizer=OptimizerConfig("adam", 1e30))
    divergence = Divergence("fl_random", "skip_client")
    with faults.watching(divergence.watch, jnp.int32(1)):
        run = quick_jit(make_trial(config))
        trial = run(train, jnp.array(CODES[0]), jax.random.key(0))
    jax.effects_barrier()
    divergence.check_losses(1, np.atleast_1d(trial.loss), again=None)
    everybody = train.client_ids[train.client_weights > 0]
    assert divergence.skipped(1) == sorted(np.asarray(everybody).tolist())


def test_models_and_codes_cross(train):
    """Down, in each epoch of a trial, the model, and once the code."""
    algorithm = fl_random(CONFIG)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), train)
    found = bytes_per_round(algorithm.round, state, train, jax.random.key(1))
    model = sum(4 * x.size for x in jax.tree.leaves(state.weights.model))
    codes = 4 * 3 * (CONFIG.num_layers + 2)
    assert found.down == NUM_CLIENTS * (3 * CONFIG.num_epochs * model + codes)


# --- Rounds --------------------------------------------------------------------------


def scores_of(code):
    """Whole numbers by client, [K]."""
    each = jnp.sum(code * jnp.array([17, 5, 11, 3]))
    return (each * (3 + jnp.arange(NUM_CLIENTS))).astype(jnp.float32) % 31


def numbered_trial(config):
    """Scores by the code, and weights by the key."""
    del config

    def run(data, code, key):
        counts = jnp.sum(data.is_scored, axis=1)
        by_client = scores_of(code)
        score = counts @ by_client / jnp.sum(counts)
        weights = Weights(jax.random.uniform(key), None)
        return Trial(code, score, by_client, weights, jnp.float32(code[0]), {})

    return run


@pytest.fixture
def numbers(monkeypatch):
    monkeypatch.setattr(module, "make_trial", numbered_trial)

    class Numbered:
        def __init__(self, net):
            self.apply = None

        def init(self, key, code):
            return jnp.float32(-1)

    monkeypatch.setattr(module, "PackedNet", Numbered)


def test_the_best_of_all_trials_is_kept(numbers, train, quick_jit):
    algorithm, kept = fl_random(CONFIG), []
    state = algorithm.init(jax.random.key(0), train)
    round_, best = quick_jit(algorithm.round), (-np.inf, None, None)
    for number in range(8):
        key = jax.random.key(number)
        state, metrics = round_(state, train, key)
        code_key, trial_key = jax.random.split(key)
        codes = np.asarray(
            random_codes(
                code_key, 3, CONFIG.num_layers, space="2022", choices=CONFIG.choices
            )
        )
        scores, by_client = [], []
        for code, own_key in zip(codes, jax.random.split(trial_key, 3), strict=True):
            by_client.append(np.asarray(scores_of(code)))
            scores.append(np.average(by_client[-1], weights=NUM_VALIDATED))
            if scores[-1] > best[0]:
                best = (scores[-1], tuple(code), jax.random.uniform(own_key))
        assert tuple(np.asarray(state.code)) == best[1]
        assert state.weights.model == best[2]
        assert state.num_rounds == number + 1
        has_scored = np.array(NUM_VALIDATED) > 0
        spread = by_client[np.argmax(scores)][has_scored].std()
        expected = {
            "train_loss": codes[:, 0].mean(),
            "best_score": best[0],
            "mean_score": np.mean(scores),
            "score_spread": spread,
        }
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            npt.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
        npt.assert_array_equal(state.best_score, metrics["best_score"])
        kept.append(best[1])
    assert 1 < len(set(kept)) < 8
    for code in kept:
        check(code, CONFIG.num_layers)


def test_the_first_of_equal_trials_is_kept(numbers, train, quick_jit):
    state = fl_random(CONFIG).init(jax.random.key(0), train)
    codes = jnp.array([[1, 1, 1, 1]] * 3)
    run = quick_jit(functools.partial(module.try_codes, CONFIG))
    state, scores, _ = run(state, train, codes, jax.random.key(1))
    assert len(set(scores.tolist())) == 1
    first_key = jax.random.split(jax.random.key(1), 3)[0]
    assert state.weights.model == jax.random.uniform(first_key)
    again, _, _ = run(state, train, codes, jax.random.key(2))
    assert again.weights.model == state.weights.model
