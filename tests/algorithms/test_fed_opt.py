"""Averaging with an optimizer at the server, against Algorithms 1 and 2 as loops."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.algorithms.ditto import DittoConfig, ditto
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fed_opt import FedAdamConfig, FedAvgMConfig, FedYogiConfig
from fedjax_graph.algorithms.fed_per import fed_per
from fedjax_graph.algorithms.fed_prox import FedProxConfig, fed_prox
from fedjax_graph.algorithms.lg_fed_avg import lg_fed_avg
from fedjax_graph.algorithms.scaffold import scaffold
from fedjax_graph.core import aggregation, aggregators, trees
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.trees import expand_like
from tests import tables
from tests.algorithms import quadratic
from tests.algorithms.quadratic import (
    IS_HEAD,
    KEYS,
    MEAN,
    NUM_CLIENTS,
    PARAMS,
    QuadraticTask,
    Twin,
    assert_rows,
    run,
    to_rows,
)

TASK = QuadraticTask()
IS_PARAM = np.arange(9) < PARAMS.stop
HALF = OptimizerConfig("sgd", 0.5)


@pytest.fixture(scope="module")
def data():
    return quadratic.make_data()


# --- Servers in NumPy: factories of (Delta, round from 1) -> what is added to w ------
# Delta is minus the pseudo-gradient; moments are those of Algorithm 2, bias-corrected.


def fed_avg_m(rate=1.0, momentum=0.9):
    trace = 0.0

    def step(delta, t):
        nonlocal trace
        trace = momentum * trace + delta
        return rate * trace

    return step


def fed_adam(rate=0.01, beta_1=0.9, beta_2=0.99, tau=1e-3, yogi=False):
    m = -1e-6 if yogi else 0.0  # optax's start, for a gradient of the other sign
    v = 1e-6 if yogi else 0.0

    def step(delta, t):
        nonlocal m, v
        m = beta_1 * m + (1 - beta_1) * delta
        if yogi:
            v = v - (1 - beta_2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta_2 * v + (1 - beta_2) * delta**2
        root = np.sqrt(v / (1 - beta_2**t))
        return rate * m / (1 - beta_1**t) / (root + tau)

    return step


def fed_yogi():
    return fed_adam(yogi=True)


def fed_adagrad(rate=0.1):
    total = 0.1

    def step(delta, t):
        nonlocal total
        total = total + delta**2
        return rate * delta / np.sqrt(total + 1e-7)

    return step


SERVERS = {
    "fed_avg_m": (FedAvgMConfig(TASK), fed_avg_m),
    "fed_adam": (FedAdamConfig(TASK), fed_adam),
    "fed_yogi": (FedYogiConfig(TASK), fed_yogi),
    "fed_adagrad": (
        FedAvgConfig(TASK, server_optimizer=OptimizerConfig("adagrad", 0.1)),
        fed_adagrad,
    ),
}


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("name", SERVERS)
def test_rounds_are_steps_along_the_mean_change(data, quick_jit, name, participation):
    """Parameters are stepped by a state that lasts, statistics are averaged."""
    config, make_server = SERVERS[name]
    config = dataclasses.replace(config, participation=participation)
    twin, server = Twin(data, TASK, participation), make_server()
    (state, _), *later = run(fed_avg(config), data, quick_jit)
    w = to_rows(state.models)[0]
    for t, (key, (state, metrics)) in enumerate(zip(KEYS, later, strict=True), 1):
        trained, loss = twin.train(np.tile(w, (NUM_CLIENTS, 1)), key)
        mean = twin.mean(trained)
        new = mean.copy()
        new[PARAMS] = w[PARAMS] + server((mean - w)[PARAMS], t)
        assert np.abs(new - w)[PARAMS].max() > 5e-3
        assert np.abs(new - mean)[PARAMS].max() > 5e-3 or (name, t) == ("fed_avg_m", 1)
        w = new
        assert_rows(state.models, w)
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
    assert {x.shape[0] for x in jax.tree.leaves(state.models)} == {1}


@pytest.mark.parametrize(
    "factory, config",
    [
        (fed_avg, FedAvgConfig(TASK, 0.6)),
        (fed_prox, FedProxConfig(TASK, proximal_weight=0.5)),
        (fed_per, FedAvgConfig(TASK, 0.6)),
        (lg_fed_avg, FedAvgConfig(TASK)),
        (scaffold, FedAvgConfig(TASK, 0.6)),
        (ditto, DittoConfig(TASK)),
    ],
)
def test_plain_sgd_of_rate_1_takes_the_mean_over(data, quick_jit, factory, config):
    sgd = dataclasses.replace(config, server_optimizer=OptimizerConfig("sgd", 1.0))
    average = run(factory(config), data, quick_jit)
    stepped = run(factory(sgd), data, quick_jit)
    for (state, _), (expected, _) in zip(stepped, average, strict=True):
        assert_rows(state.models, to_rows(expected.models), 1e-5)


@pytest.mark.parametrize(
    "factory, config, is_shared",
    [
        (fed_avg, FedAvgConfig(TASK, 0.6), IS_PARAM),
        (fed_prox, FedProxConfig(TASK, proximal_weight=0.5), IS_PARAM),
        (fed_per, FedAvgConfig(TASK, 0.6), IS_PARAM & ~IS_HEAD),
        (lg_fed_avg, FedAvgConfig(TASK), IS_PARAM & IS_HEAD),
        (scaffold, FedAvgConfig(TASK, 0.6), IS_PARAM),
    ],
)
def test_half_a_step_goes_half_the_way_of_what_is_shared(
    data, quick_jit, factory, config, is_shared
):
    """Of one round; personal leaves and statistics are those of the average."""
    half = dataclasses.replace(config, server_optimizer=HALF)
    (start, _), (whole, _) = run(factory(config), data, quick_jit, KEYS[:1])
    _, (stepped, _) = run(factory(half), data, quick_jit, KEYS[:1])
    before, after = to_rows(start.models), to_rows(whole.models)
    expected = np.where(is_shared, (before + after) / 2, after)
    assert_rows(stepped.models, expected)
    assert np.abs(expected - after).max() > 0.02
    assert np.abs(after - before)[:, MEAN].max() > 1e-3


STEPPING = {
    "momentum": OptimizerConfig("sgd", 0.5, momentum=0.9),
    "decay": OptimizerConfig("sgd", 0.5, weight_decay=0.1),
    "counts": OptimizerConfig("adamw", 0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("server", STEPPING)
@pytest.mark.parametrize("factory", [fed_avg, fed_per, scaffold])
def test_the_server_rests_while_nobody_takes_part(data, quick_jit, factory, server):
    """Between rounds that are as if there had been no such round."""
    nobody = data._replace(client_weights=0 * data.client_weights)
    config = FedAvgConfig(TASK, server_optimizer=STEPPING[server])
    algorithm = factory(config)
    _, (before, _) = run(algorithm, data, quick_jit, KEYS[:1])
    _, (rested, _) = run(algorithm, nobody, quick_jit, KEYS[1:2], before)
    for name in ("models", "server_opt_state"):
        found, expected = getattr(rested, name), getattr(before, name)
        jax.tree.map(npt.assert_array_equal, found, expected)
    _, (after, _) = run(algorithm, data, quick_jit, KEYS[2:], rested)
    _, (expected, _) = run(algorithm, data, quick_jit, KEYS[2:], before)
    jax.tree.map(npt.assert_array_equal, after.models, expected.models)
    moved = to_rows(after.models) - to_rows(rested.models)
    assert np.abs(moved).max() > 1e-3


def test_personal_leaves_have_no_moments(data):
    config = FedAdamConfig(TASK)
    state = jax.eval_shape(fed_per(config).init, KEYS[0], data)
    moments = [x.shape for x in jax.tree.leaves(state.server_opt_state) if x.shape]
    assert moments == [(1, 3), (1, 3)]  # of `base`, the first and the second


def test_without_an_optimizer_the_server_keeps_nothing(data):
    state = jax.eval_shape(fed_avg(FedAvgConfig(TASK)).init, KEYS[0], data)
    assert state.server_opt_state == ()


def test_padded_clients_change_nothing(data, quick_jit):
    """One index of the cohort's four is left over."""
    algorithm = fed_per(FedAdamConfig(TASK, participation=0.6))
    (start, _), *_, (state, _) = run(algorithm, data, quick_jit, KEYS[:2])
    padded = quadratic.pad_data(data), quick_jit, KEYS[:2], quadratic.pad_state(start)
    *_, (found, _) = run(algorithm, *padded)
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x[: len(y)], y, atol=1e-6),
        (found.models, found.server_opt_state[0].mu),
        (state.models, state.server_opt_state[0].mu),
    )


def test_a_servers_schedule_spans_rounds(data, quick_jit):
    """Plain SGD of rates 1, 1/2 and 0: the mean, half the way to it, and rest."""
    server = OptimizerConfig("sgd", 1.0, schedule="linear", num_steps=2)
    algorithm = fed_avg(FedAvgConfig(TASK, 0.6, server_optimizer=server))
    plain = fed_avg(FedAvgConfig(TASK, 0.6))
    states = [state for state, _ in run(algorithm, data, quick_jit)]
    for rate, key, (before, after) in zip(
        (1, 0.5, 0), KEYS, itertools.pairwise(states), strict=True
    ):
        unstepped = plain.init(KEYS[0], data)._replace(models=before.models)
        _, (mean, _) = run(plain, data, quick_jit, [key], unstepped)
        w, mean = to_rows(before.models), to_rows(mean.models)
        expected = np.where(IS_PARAM, w + rate * (mean - w), mean)
        assert_rows(after.models, expected)
        assert np.abs(mean - w).max() > 1e-3


def test_a_schedule_of_unknown_length_at_the_server_is_refused():
    config = FedAvgConfig(TASK, server_optimizer=OptimizerConfig(schedule="linear"))
    with pytest.raises(InputError, match="'linear' needs a number of steps"):
        fed_avg(config)


# --- An aggregator that returns a model for each client -------------------------------

CLUSTERS = (np.array([0, 1, 2]), np.array([3, 4]))


@pytest.fixture
def by_cluster():
    """The name of one: means of two clusters."""

    def mean(stacked, cohort):
        of_each = []
        for cluster in CLUSTERS:
            is_in = jnp.isin(cohort.indices, cluster)
            weights = jnp.where(is_in, cohort.weights, 0)
            of_each.append(
                aggregation.weighted_mean(stacked, cohort._replace(weights=weights))
            )
        is_first = jnp.isin(cohort.indices, CLUSTERS[0])
        return jax.tree.map(
            lambda a, b: jnp.where(expand_like(is_first, a), a, b), *of_each
        )

    with tables.kept():
        aggregators.register_aggregator("by_cluster")(mean)
        yield "by_cluster"


@pytest.mark.parametrize("optimizer", [None, HALF, OptimizerConfig("adam", 0.1)])
def test_clusters_are_averaged_as_if_each_was_alone(
    by_cluster, optimizer, data, quick_jit
):
    """Moments of the server's optimizer are of each model's own."""
    config = FedAvgConfig(task=TASK, server_optimizer=optimizer)
    clustered = dataclasses.replace(config, aggregator=by_cluster)
    *_, (state, _) = run(fed_avg(clustered), data, quick_jit)
    found = to_rows(state.models)
    for cluster in CLUSTERS:
        part = trees.take(data._replace(graph=None), cluster)
        *_, (alone, _) = run(fed_avg(config), part, quick_jit)
        expected = to_rows(alone.models, len(cluster))
        npt.assert_allclose(found[cluster], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ditto", "scaffold", "fed_dc"])
def test_methods_of_one_model_for_all_refuse_models_of_each(by_cluster, name, data):
    values = {"task": TASK, "aggregator": by_cluster}
    algorithm = get_method(name).factory(make_config(name, values))
    state = algorithm.init(KEYS[0], data)
    with pytest.raises(InputError, match="the aggregator returns a model for each"):
        jax.eval_shape(algorithm.round, state, data, KEYS[0])
