"""Clipping, noise and epsilon against NumPy and closed forms; an audit by canaries."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
import scipy.optimize
import scipy.stats

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig, cnfgnn
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.scaffold import scaffold
from fedjax_graph.core import aggregation, channel, privacy
from fedjax_graph.core.channel import ChannelConfig
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import Misbehaviour, attackers
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.privacy import Privacy
from fedjax_graph.driver import rounds
from tests.algorithms import quadratic
from tests.algorithms.problems import Nodes, Traffic
from tests.algorithms.quadratic import QuadraticTask

pytest.importorskip("jax_privacy", reason="JAX-Privacy, of the extra [dp], is missing")

KEY = jax.random.key(0)
NUM_CLIENTS = 5
WEIGHTS = np.array([20, 1, 0, 3, 7], np.float32)  # the third is padding
STILL = OptimizerConfig("sgd", learning_rate=0.0)
SILENT = 1e-9  # a noise multiplier that leaves the rest to be seen


def models(seed=0):
    rng = np.random.default_rng(seed)
    scales = np.array([0.1, 5, 1, 2, 0.3])  # below and above the clipping norm
    return {
        "kernel": (scales[:, None, None] * rng.normal(size=(5, 3, 2))).astype("f"),
        "bias": (scales[:, None] * rng.normal(size=(5, 2))).astype("f"),
    }


START = {"kernel": np.full((1, 3, 2), 0.5, "f"), "bias": np.ones((1, 2), "f")}


def through(stacked, key=KEY, aggregate=aggregation.weighted_mean, **settings):
    config = ChannelConfig(
        privacy=Privacy(**{"noise_multiplier": SILENT, "clip_norm": 1.5} | settings)
    )
    sent = channel.Sent(START, jnp.arange(5), jnp.asarray(WEIGHTS), key)
    cohort = Cohort(jnp.arange(5), jnp.asarray(WEIGHTS))
    return channel.through(config, aggregate, sent)(stacked, cohort)


def clipped(stacked, norm):
    """[C, P] doubles: clip(theta - w)."""
    rows = as_rows(stacked) - as_rows(START)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, norm / norms)


def as_rows(tree):
    leaves = jax.tree.leaves(tree)
    return np.hstack([np.asarray(x, float).reshape(len(x), -1) for x in leaves])


# --- The mechanism --------------------------------------------------------------------


def test_the_mean_is_that_of_clipped_updates_whose_clients_count_alike():
    merged = through(models())
    real = clipped(models(), 1.5)[WEIGHTS > 0]
    assert np.linalg.norm(real, axis=1).max() == pytest.approx(1.5)
    expected = as_rows(START) + real.mean(axis=0)
    npt.assert_allclose(as_rows(merged), expected, rtol=1e-5, atol=1e-6)


def test_an_attackers_update_is_clipped_as_any_other():
    """It sends the opposite of what it trained, ten times, and clipping comes last."""
    conduct = Misbehaviour(
        byzantine_fraction=0.5, attack="sign_flip", attack_scale=10.0
    )
    own, ids = models(), jnp.arange(5)
    config = ChannelConfig(
        privacy=Privacy(noise_multiplier=SILENT, clip_norm=1.5), misbehaviour=conduct
    )
    sent = channel.Sent(START, ids, jnp.asarray(WEIGHTS), KEY)
    aggregate = channel.through(config, aggregation.weighted_mean, sent)
    merged = aggregate(own, Cohort(ids, jnp.asarray(WEIGHTS)))
    lies = np.asarray(attackers(conduct, ids, jnp.asarray(WEIGHTS)))
    assert lies[WEIGHTS > 0].sum() == 2
    rows = np.where(lies, -10, 1)[:, None] * (as_rows(own) - as_rows(START))
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    kept = (rows * np.minimum(1, 1.5 / norms))[WEIGHTS > 0]
    found = as_rows(merged) - as_rows(START)
    npt.assert_allclose(found[0], kept.mean(axis=0), atol=1e-5)


def test_one_client_changes_the_sum_by_the_clipping_norm_at_most():
    whole = as_rows(through(models()))
    for client in np.flatnonzero(WEIGHTS):
        without = models()
        for name, x in without.items():
            x[client] = START[name][0]  # sends zeros
        change = 4 * np.linalg.norm(whole - as_rows(through(without)))
        assert change <= 1.5 + 1e-4


def test_an_update_that_is_not_finite_counts_as_zero():
    broken, silent = models(), models()
    broken["bias"][1, 0], broken["kernel"][1] = np.nan, 0
    for name, x in silent.items():
        x[1] = START[name][0]
    # What is finite of it stays, and is clipped.
    found = as_rows(through(broken))
    assert np.isfinite(found).all()
    assert 4 * np.linalg.norm(found - as_rows(through(silent))) <= 1.5 + 1e-4


def test_noise_on_a_model_belongs_to_its_client():
    """Whoever else takes part, and wherever its row stands."""
    stacked = models()

    def noise(indices, order=(0, 1, 2, 3, 4)):
        indices, ids = jnp.array(indices), jnp.array(order) + 10
        config = ChannelConfig(privacy=Privacy(noise_multiplier=2.0, clip_norm=1e3))
        sent = channel.Sent(START, ids, jnp.asarray(WEIGHTS), KEY)
        own = jax.tree.map(lambda x: x[indices], stacked)
        cohort = Cohort(indices, jnp.ones(len(indices)))
        noisy = channel.through(config, lambda x, cohort: x, sent)(own, cohort)
        return as_rows(noisy) - as_rows(own)

    whole = noise([0, 1, 2, 3, 4])
    assert len(np.unique(whole)) == whole.size
    npt.assert_allclose(noise([1, 4]), whole[[1, 4]], rtol=1e-2, atol=1e-2)
    order = [3, 0, 4, 1, 2]  # of the same clients in the data
    moved = noise([0, 1, 2, 3, 4], order)
    npt.assert_allclose(moved, whole[order], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 5])
def test_noise_has_the_deviation_that_is_accounted_for(rows):
    """On the mean 1 / n of it; on each model, for who reads each, the whole."""
    aggregate = aggregation.weighted_mean if rows == 1 else lambda x, cohort: x
    keys = jax.random.split(KEY, 400)

    def noisy(key):
        return through(models(), key, aggregate, noise_multiplier=2.0)

    found = jax.vmap(noisy)(keys)
    silent = through(models(), aggregate=aggregate)
    noise = jax.tree.map(lambda x, y: np.asarray(x - y), found, silent)
    noise = np.concatenate([x.reshape(400, rows, -1) for x in noise.values()], axis=2)
    expected = 2.0 * 1.5 / (4 if rows == 1 else 1)
    npt.assert_allclose(noise.std(axis=(0, 2)), expected, rtol=0.05)
    flat = noise.reshape(400, -1)
    correlation = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    assert np.abs(correlation).max() < 5 / np.sqrt(400)


def test_the_same_window_has_the_same_noise_and_others_their_own():
    rows = jnp.zeros((2, 3, 500))

    def noise(client_ids, windows, key=KEY):
        ids, starts = jnp.array(client_ids), jnp.array(windows)
        return np.asarray(privacy.private_windows(1.0, 3.0, rows, ids, starts, key))

    one, other = noise([4, 9], [0, 5, 7]), noise([9, 2], [7, 1, 0])
    npt.assert_array_equal(one[1, [0, 2]], other[0, [2, 0]])
    flat = np.concatenate([one.reshape(6, -1), other[:, 1]])
    assert np.abs(np.corrcoef(flat) - np.eye(8)).max() < 0.25
    assert flat.std() == pytest.approx(3, rel=0.05)
    assert not np.array_equal(one, noise([4, 9], [0, 5, 7], jax.random.key(1)))
    long = 7 * jnp.ones((2, 3, 500))
    ids, starts = jnp.arange(2), jnp.arange(3)
    short = privacy.private_windows(1.0, 0.0, long, ids, starts, KEY)
    npt.assert_allclose(np.linalg.norm(short, axis=-1), 1, rtol=1e-5)


# --- The account ----------------------------------------------------------------------


def exact_epsilon(mu, delta):
    """Of the Gaussian mechanism (Balle and Wang, ICML 2018, Theorem 8)."""
    cdf = scipy.stats.norm.cdf

    def excess(eps):
        return cdf(mu / 2 - eps / mu) - np.exp(eps) * cdf(-mu / 2 - eps / mu) - delta

    return scipy.optimize.brentq(excess, 0, 200)


@pytest.mark.parametrize(
    ("multiplier", "count"), [(1.0, 1), (2.0, 10), (0.5, 3), (8.0, 300), (1.0, 60)]
)
def test_epsilon_is_that_of_the_composed_gaussian_mechanism(multiplier, count):
    config = Privacy(noise_multiplier=multiplier)
    expected = exact_epsilon(np.sqrt(count) / multiplier, config.delta)
    found = privacy.epsilon(config, count)
    assert expected * (1 - 1e-6) <= found <= expected * 1.01
    assert privacy.epsilon(config, 0) == 0


@pytest.mark.parametrize(("multiplier", "count"), [(1e-9, 1), (0.01, 1000)])
def test_noise_too_small_for_an_epsilon_is_refused(multiplier, count):
    config = Privacy(noise_multiplier=multiplier)
    with pytest.raises(InputError, match=f"too little noise for {count} releases"):
        privacy.epsilon(config, count)


def test_releases_of_one_round_have_noise_of_their_own(quick_jit):
    """Where nobody learns, GraphFL's step of 1 and its mean add one noise each.

    The same noise twice would cancel, with opposite signs.
    """
    values = {
        "task": QuadraticTask(optimizer=STILL, batch_size=6, num_epochs=1),
        "first_order": True,
        "server_optimizer": OptimizerConfig("sgd", 1.0),
        "privacy": Privacy(noise_multiplier=1e6, clip_norm=1e-6),
    }
    method = get_method("graphfl").factory(make_config("graphfl", values))
    data = quadratic.make_data()
    state = method.init(KEY, data)

    def after_a_round(key):
        return method.round(state, data, key)[0].models["params"]

    keys = jax.random.split(KEY, 300)
    found = quick_jit(jax.vmap(after_a_round))(keys)
    noise = jax.tree.map(lambda x, start: x - start, found, state.models["params"])
    expected = np.sqrt(2) / NUM_CLIENTS
    assert as_rows(noise).std() == pytest.approx(expected, rel=0.06)


def released(name, problem, **values):
    config = make_config(
        name, {"task": problem.TASK, "privacy": Privacy(noise_multiplier=1.0)} | values
    )
    method = get_method(name).factory(config)
    state = jax.eval_shape(method.init, KEY, problem.train)
    args = method.round, state, problem.train, KEY
    return method.privacy and privacy.releases_per_round(*args)


@pytest.mark.parametrize(
    ("name", "count"),
    [("fed_avg", 1), ("ditto", 1), ("graphfl", 2), ("local", 0), ("fed_att", 1)],
)
def test_what_a_round_releases_is_counted_in_its_program(name, count):
    assert released(name, Nodes()) == count


def test_a_graph_of_clients_needs_noise_on_each_model(train):
    for name in ("sfl", "sfl_star"):
        assert released(name, Traffic(train)) == 1


HALVES = {"hidden_size": 4, "gn_layers": 1, "gn_mlp_sizes": (6, 6, 6)}


@pytest.mark.parametrize(("name", "count"), [("cnfgnn", 3), ("at_without_fedavg", 2)])
def test_cnfgnn_releases_models_hidden_states_and_gradients(train, name, count):
    config = CNFGNNConfig(**HALVES, privacy=Privacy(noise_multiplier=1.0))
    method = get_method(name).factory(config)
    state = jax.eval_shape(method.init, KEY, train)
    assert privacy.releases_per_round(method.round, state, train, KEY) == count


def test_a_run_that_was_cut_states_the_same_epsilon(tmp_path):
    data = quadratic.make_data()
    splits = dict.fromkeys(("train", "validation", "test"), data)
    conduct = Privacy(noise_multiplier=4.0)
    method = fed_avg(FedAvgConfig(QuadraticTask(), privacy=conduct))

    def run(folder, num_rounds, **settings):
        config = rounds.RunConfig(num_rounds=num_rounds)
        workdir = tmp_path / folder
        workdir.mkdir(exist_ok=True)
        return rounds.run("fed_avg", method, splits, config, workdir, **settings)

    def epsilons(folder):
        text = (tmp_path / folder / "metrics.jsonl").read_text()
        return [json.loads(line)["epsilon"] for line in text.splitlines()]

    whole = run("whole", 3).privacy
    run("cut", 1)
    assert run("cut", 3, resume=True).privacy == whole
    assert run("cut", 3, eval_only=True).privacy == whole
    assert epsilons("cut") == epsilons("whole")
    expected = [exact_epsilon(np.sqrt(n) / 4, 1e-5) for n in (1, 2, 3)]
    npt.assert_allclose(epsilons("whole"), expected, rtol=0.01)
    assert whole["epsilon"] == epsilons("whole")[-1]
    assert (whole["delta"], whole["releases_per_round"]) == (1e-5, 1)


# --- An audit -------------------------------------------------------------------------


def audited(multiplier, claimed, num_rounds=4, num_trials=20_000):
    """A lower bound of epsilon, at 95 %, from a client that may send zeros instead.

    It sends as much as it may in one direction; the attacker knows what all others
    sent, and sums up the rounds.
    """
    from jax_privacy import auditing

    rng = np.random.default_rng(0)
    others = rng.normal(size=(5, 6)).astype("f")
    config = ChannelConfig(privacy=Privacy(noise_multiplier=multiplier, clip_norm=1.5))
    start, weights = {"w": jnp.zeros((1, 6))}, jnp.asarray(WEIGHTS)

    def score(key, canary):
        stacked = {"w": jnp.asarray(others).at[0].set(canary)}

        def of_round(key):
            sent = channel.Sent(start, jnp.arange(5), weights, key)
            merge = channel.through(config, aggregation.weighted_mean, sent)
            return merge(stacked, Cohort(jnp.arange(5), weights))["w"][0, 0]

        return jnp.sum(jax.vmap(of_round)(jax.random.split(key, num_rounds)))

    scores = jax.jit(jax.vmap(score, (0, None)))
    canary = 100 * jnp.eye(6)[0]
    present = scores(jax.random.split(jax.random.key(1), num_trials), canary)
    absent = scores(jax.random.split(jax.random.key(2), num_trials), 0 * canary)
    auditor = auditing.CanaryScoreAuditor(present, absent)
    return auditor.epsilon_clopper_pearson(0.05, claimed.delta)


def test_what_an_attacker_finds_out_stays_under_epsilon():
    claimed = Privacy(noise_multiplier=2.0, delta=1e-2)
    bound = privacy.epsilon(claimed, 4)
    assert 0.5 * bound < audited(2.0, claimed) <= bound
    assert audited(1.0, claimed) > bound  # half the noise: the audit notices


# --- Refusals -------------------------------------------------------------------------


def test_what_cannot_be_private_is_refused(train):
    config = FedAvgConfig(QuadraticTask(), privacy=Privacy(noise_multiplier=1.0))
    with pytest.raises(InputError, match="privacy: scaffold's clients send control"):
        scaffold(config)
    with pytest.raises(InputError, match="on_nan=skip_client .* is not private"):
        rounds.run(
            "fed_avg",
            fed_avg(config),
            dict.fromkeys(("train", "validation", "test"), quadratic.make_data()),
            rounds.RunConfig(num_rounds=1, on_nan="skip_client"),
        )
    masked = CNFGNNConfig(
        **HALVES, masked_loss=True, privacy=Privacy(noise_multiplier=1.0)
    )
    with pytest.raises(InputError, match="privacy: masked_loss leaves missing"):
        cnfgnn(masked)


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("sfl", {"start": "own"}, "models that no other knows"),
        ("sfl_star", {"start": "own"}, "models that no other knows"),
        ("fed_avg", {"aggregation_noise": 0.1}, "would be on each model"),
        ("fed_sgd", {"encryption": "ckks"}, "no noise on the mean"),
    ],
)
def test_no_epsilon_is_stated_where_noise_would_not_give_it(name, settings, words):
    private = Privacy(noise_multiplier=1.0)
    method = get_method(name)
    with pytest.raises(InputError, match=f"privacy: .*{words}"):
        method.factory(method.config_type(QuadraticTask(), privacy=private, **settings))


def test_without_its_package_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy.clipping", None)
    with pytest.raises(InputError, match=r"pip install 'fedjax-graph\[dp\]'"):
        privacy.check()


def test_a_delta_that_leaves_no_epsilon_is_refused():
    assert 28 < privacy.epsilon(Privacy(noise_multiplier=1.0, delta=1e-14), 10) < 30
    with pytest.raises(InputError, match="delta=1e-20: too small for this accounting"):
        privacy.epsilon(Privacy(noise_multiplier=1.0, delta=1e-20), 10)
