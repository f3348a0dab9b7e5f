"""SFL against Algorithm 1 of its paper, written out client by client."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.local import local_training
from fedjax_graph.algorithms.sfl import structure_learning
from fedjax_graph.algorithms.sfl.sfl import (
    SFLConfig,
    SFLStarConfig,
    sfl,
    sfl_lg,
    sfl_per,
    sfl_star,
)
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.misbehaviour import Misbehaviour
from tests.algorithms import quadratic
from tests.algorithms.quadratic import (
    EDGES,
    IS_HEAD,
    KEYS,
    NUM_CLIENTS,
    PARAMS,
    QuadraticTask,
    Twin,
    assert_rows,
    normalised_adjacency,
    run,
    to_rows,
)

TASK = QuadraticTask()
pulled_config = functools.partial(SFLConfig, TASK, pull_weight=0.3)
METHODS = {  # name: (factory, which of the nine numbers are personal)
    "sfl": (sfl, np.zeros(9, bool)),
    "sfl_per": (sfl_per, IS_HEAD),
    "sfl_lg": (sfl_lg, ~IS_HEAD),
}


@pytest.fixture(scope="module")
def data():
    return quadratic.make_data()


def slope(v, centre, is_pulled, distance):
    """The gradient of R(v, centre) over what is shared; 0 where they are the same."""
    gap = np.where(is_pulled, v - centre, 0)
    length = np.linalg.norm(gap)
    if distance == "squared_l2" or length == 0:
        return gap
    return gap / length


def sfl_round(
    twin, u, v, key, config, weight, is_personal=METHODS["sfl"][1], edges=EDGES
):
    """Lines 3 to 13 -> (u and v of all clients, loss); `weight` is lambda."""
    w = np.tile(u.mean(axis=0), (NUM_CLIENTS, 1))
    starts = {"global": np.where(is_personal, u, w), "personal": u, "own": v}
    is_pulled = ~is_personal[PARAMS]

    def pulls(i, v):
        return weight * sum(
            slope(v, centre[i, PARAMS], is_pulled, config.pull_distance)
            for centre in (w, u)
        )

    trained, loss = twin.train(starts[config.start], key, pulls)
    indices, V = list(trained), np.stack(list(trained.values()))
    A = normalised_adjacency(edges, indices)
    mixed = np.linalg.matrix_power(A, config.propagation_steps) @ V
    mixed = config.alpha * mixed + (1 - config.alpha) * V
    new_u, new_v = u.copy(), v.copy()
    new_u[indices], new_v[indices] = np.where(is_personal, V, mixed), V
    return new_u, new_v, loss


def check(data, jit, config, name="sfl"):
    """Three rounds; lambda = 0 in the first."""
    factory, is_personal = METHODS[name]
    twin = Twin(data, TASK, config.participation)
    (state, _), *later = run(factory(config), data, jit)
    u = v = to_rows(state.models)
    for t, (key, (state, metrics)) in enumerate(zip(KEYS, later, strict=True)):
        weight = config.pull_weight if t else 0.0
        u, v, loss = sfl_round(twin, u, v, key, config, weight, is_personal)
        assert_rows(state.models, u)
        if config.start == "own":
            assert_rows(state.models["local"], v)
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
    return u


@pytest.mark.parametrize("num_steps, alpha", [(0, 1.0), (1, 0.4), (3, 1.0), (3, 0.4)])
def test_the_server_multiplies_by_powers_of_the_graph(
    data, quick_jit, num_steps, alpha
):
    config = SFLConfig(TASK, propagation_steps=num_steps, alpha=alpha, pull_weight=0.0)
    check(data, quick_jit, config)


@pytest.mark.parametrize(
    "distance, start",
    [("l2", "global"), ("squared_l2", "global"), ("l2", "personal"), ("l2", "own")],
)
def test_each_step_is_pulled_to_both_the_global_and_the_personal_model(
    data, quick_jit, distance, start
):
    config = pulled_config(pull_distance=distance, start=start)
    pulled = check(data, quick_jit, config)
    twin, u = Twin(data, TASK), to_rows(sfl(config).init(KEYS[0], data).models)
    v = u
    for key in KEYS:
        u, v, _ = sfl_round(twin, u, v, key, config, weight=0.0)
    assert np.abs(pulled - u).max() > 0.01


@pytest.mark.parametrize(
    "name, start",
    [("sfl_per", "global"), ("sfl_per", "own"), ("sfl_lg", "personal")],
)
def test_personal_leaves_stay_and_are_not_pulled(data, quick_jit, name, start):
    check(data, quick_jit, pulled_config(start=start, alpha=0.7), name)


@pytest.mark.parametrize(
    "name, start",
    [("sfl", "global"), ("sfl", "own"), ("sfl_per", "global"), ("sfl_lg", "global")],
)
def test_a_cohort_mixes_its_own_part_of_the_graph(data, quick_jit, name, start):
    check(data, quick_jit, pulled_config(participation=0.6, start=start), name)


@pytest.mark.parametrize("score", ["aggregated", "local"])
def test_what_is_scored_is_mixed_or_as_it_was_trained(data, quick_jit, score):
    config = SFLConfig(TASK, pull_weight=0.0, score=score, participation=0.6)
    algorithm = sfl(config)
    (start, _), (state, _) = run(algorithm, data, quick_jit, KEYS[:1])
    first = to_rows(start.models)
    u, v, _ = sfl_round(Twin(data, TASK, 0.6), first, first, KEYS[0], config, 0.0)
    rows = {"aggregated": u, "local": v}[score][:, PARAMS]
    outputs = np.einsum("knp,kp->kn", data.features, rows)
    npt.assert_allclose(algorithm.predict(state, data), outputs, rtol=1e-4, atol=1e-5)
    scored = algorithm.evaluate(state, data)["loss"]
    npt.assert_allclose(scored, np.mean((outputs - data.targets) ** 2), rtol=1e-4)
    assert np.abs(u - v).max() > 0.01


def test_who_is_not_sampled_keeps_its_model(data, quick_jit):
    config = SFLConfig(TASK, participation=0.6)
    _, (before, _), (after, _) = run(sfl(config), data, quick_jit, KEYS[:2])
    is_kept = np.all(to_rows(before.models) == to_rows(after.models), axis=1)
    sampled = Twin(data, TASK, 0.6).cohort(KEYS[1])
    assert set(np.flatnonzero(~is_kept)) == set(sampled)


@pytest.mark.parametrize("factory", [sfl, sfl_per, sfl_lg, sfl_star])
def test_what_is_local_training_is_not_called_sfl(factory):
    config = {sfl_star: SFLStarConfig}.get(factory, SFLConfig)(TASK, start="own")
    factory(config)  # whose u_i are mixed
    with pytest.raises(InputError, match="as in `local`; give pull_weight a value"):
        factory(dataclasses.replace(config, score="local"))


@pytest.mark.parametrize("start", ["global", "personal", "own"])
def test_attackers_change_the_way_from_where_they_started(data, quick_jit, start):
    """Who sends nothing of that way sends w, u_i or v_i."""
    honest = SFLConfig(TASK, start=start)
    (state, _) = run(sfl(honest), data, quick_jit, KEYS[:1])[-1]
    attack = Misbehaviour(byzantine_fraction=1.0, attack="scaling", attack_scale=1e-9)
    config = dataclasses.replace(honest, misbehaviour=attack, propagation_steps=0)
    (after, _) = run(sfl(config), data, quick_jit, KEYS[1:2], state)[-1]
    u = to_rows(state.models)
    w = np.tile(u.mean(axis=0), (NUM_CLIENTS, 1))
    own = to_rows(state.models["local"]) if start == "own" else None
    assert_rows(after.models, {"global": w, "personal": u, "own": own}[start])


def test_a_client_takes_from_its_senders(quick_jit):
    data = quadratic.make_data(edges=[(0, 1, 1.0)])
    config = SFLConfig(TASK, propagation_steps=1, pull_weight=0.0)
    state = run(sfl(config), data, quick_jit, KEYS[:1])[-1][0]
    alone = run(local_training(FederatedConfig(TASK)), data, quick_jit, KEYS[:1])
    u, v = to_rows(state.models), to_rows(alone[-1][0].models)
    npt.assert_allclose(u[1], (v[0] + v[1]) / 2, atol=1e-6)
    npt.assert_allclose(u[[0, 2, 3, 4]], v[[0, 2, 3, 4]], atol=1e-6)


EVERYBODY = [(s, r, 1.0) for s in range(NUM_CLIENTS) for r in range(NUM_CLIENTS)]


def test_a_uniform_graph_without_pulls_is_fed_avg(quick_jit):
    data = quadratic.make_data(weights=[3] * NUM_CLIENTS, edges=EVERYBODY)
    ours = run(sfl(SFLConfig(TASK, pull_weight=0.0)), data, quick_jit)
    average = run(fed_avg(FedAvgConfig(TASK)), data, quick_jit)
    for (state, _), (expected, _) in zip(ours, average, strict=True):
        assert_rows(state.models, to_rows(expected.models), 1e-6)


def test_no_edges_and_no_pulls_is_local_training(quick_jit):
    data = quadratic.make_data(edges=[])
    config = SFLConfig(TASK, pull_weight=0.0, start="personal")
    ours = run(sfl(config), data, quick_jit)
    alone = run(local_training(FederatedConfig(TASK)), data, quick_jit)
    for (state, _), (expected, _) in zip(ours, alone, strict=True):
        assert_rows(state.models, to_rows(expected.models), 1e-6)


@pytest.mark.parametrize("start", ["global", "personal"])
def test_the_pulls_are_finite_where_nothing_is_apart(quick_jit, start):
    """v = w = u_i = 0, whose mean is exact, as a round with lambda > 0 starts."""
    data = quadratic.make_data(edges=EVERYBODY)
    config = pulled_config(start=start)
    first = sfl(config).init(KEYS[0], data)
    zeros = jax.tree.map(jnp.zeros_like, first.models)
    later = first._replace(models=zeros, num_rounds=first.num_rounds + 1)
    pulled = run(sfl(config), data, quick_jit, KEYS[:1], later)[-1][0]
    u = np.zeros((NUM_CLIENTS, 9))
    u, _, _ = sfl_round(Twin(data, TASK), u, u, KEYS[0], config, 0.3, edges=EVERYBODY)
    assert_rows(pulled.models, u)


# --- SFL* -----------------------------------------------------------------------------

STRUCTURE = StructureConfig("similarity", embedding_size=3, num_neighbours=2)


def star_config(**settings):
    settings = {"learnt_share": 0.4, "structure": STRUCTURE} | settings
    return SFLStarConfig(
        TASK, propagation_steps=2, alpha=0.7, pull_weight=0.0, **settings
    )


@pytest.mark.parametrize(
    "client_graph, participation", [("given", 1.0), ("given", 0.6), ("none", 1.0)]
)
def test_the_graph_is_a_blend_of_what_is_given_and_learnt(
    data, quick_jit, client_graph, participation
):
    config = star_config(client_graph=client_graph, participation=participation)
    twin = Twin(data, TASK, participation)
    (state, _), *later = run(sfl_star(config), data, quick_jit)
    u = to_rows(state.models)
    for key, (state, _) in zip(KEYS, later, strict=True):
        trained, _ = twin.train(np.tile(u.mean(axis=0), (NUM_CLIENTS, 1)), key)
        indices, V = list(trained), np.stack(list(trained.values()))
        learnt = np.asarray(state.learnt_adjacency, float)[np.ix_(indices, indices)]
        npt.assert_allclose(learnt.sum(axis=1), 1, rtol=1e-5)
        assert np.all(learnt >= 0) and np.all((learnt > 0).sum(axis=1) <= 2)
        A = learnt
        if client_graph == "given":
            A = 0.6 * normalised_adjacency(indices=indices) + 0.4 * learnt
        u[indices] = 0.7 * A @ A @ V + 0.3 * V
        assert_rows(state.models, u)
    assert np.any(learnt != np.eye(len(learnt)))


@pytest.mark.parametrize("compares", ["params", "state"])
def test_the_learnt_graph_is_that_of_the_trained_models(data, quick_jit, compares):
    """By the clients' identities and the server's key."""
    part = {"params": PARAMS, "state": slice(None)}[compares]
    structure = dataclasses.replace(STRUCTURE, compares=compares)
    algorithm = sfl_star(star_config(participation=0.6, structure=structure))
    (start, _), (state, _) = run(algorithm, data, quick_jit, KEYS[:1])
    twin = Twin(data, TASK, 0.6)
    trained, _ = twin.train(to_rows(start.models), KEYS[0])
    indices = np.array(list(trained))
    learn = quick_jit(functools.partial(structure_learning.learn, STRUCTURE))
    learnt = learn(
        jnp.asarray(np.stack(list(trained.values()))[:, part], jnp.float32),
        data.client_ids[indices],
        jnp.ones(len(indices), bool),
        jax.random.split(KEYS[0])[1],
    )
    npt.assert_allclose(
        state.learnt_adjacency[np.ix_(indices, indices)], learnt, atol=1e-4
    )


MANY_KEYS = tuple(jax.random.key(seed) for seed in range(20, 26))


def test_a_row_of_the_learnt_graph_is_that_of_one_round(data, quick_jit):
    """Rows of the cohort sum to 1 and take from the cohort alone; the others stay."""
    algorithm = sfl_star(star_config(participation=0.6))
    states = [state for state, _ in run(algorithm, data, quick_jit, MANY_KEYS)]
    twin = Twin(data, TASK, 0.6)
    for key, before, after in zip(MANY_KEYS, states, states[1:], strict=False):
        cohort = np.isin(np.arange(NUM_CLIENTS), list(twin.cohort(key)))
        npt.assert_array_equal(
            after.learnt_adjacency[~cohort], before.learnt_adjacency[~cohort]
        )
        npt.assert_array_equal(after.learnt_adjacency[cohort][:, ~cohort], 0)
        npt.assert_allclose(np.sum(after.learnt_adjacency, axis=1), 1, rtol=1e-5)


def test_padding_does_not_change_the_learnt_graph(data, quick_jit):
    """Not where a row of the cohort is left to a client that was not sampled."""
    algorithm = sfl_star(star_config(participation=0.6))
    history = run(algorithm, data, quick_jit, MANY_KEYS)
    padded = run(
        algorithm,
        quadratic.pad_data(data),
        quick_jit,
        MANY_KEYS,
        quadratic.pad_state(history[0][0]),
    )
    for (state, _), (with_padding, _) in zip(history, padded, strict=True):
        real = with_padding.learnt_adjacency[:NUM_CLIENTS, :NUM_CLIENTS]
        npt.assert_allclose(real, state.learnt_adjacency, atol=1e-4)
