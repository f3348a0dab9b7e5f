"""Federated methods against their papers' algorithms as loops over clients."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import REGISTRY, get_method, make_config
from fedjax_graph.algorithms.ditto import DittoConfig, ditto
from fedjax_graph.algorithms.fed_att import FedAttConfig, fed_att
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fed_per import fed_per
from fedjax_graph.algorithms.fed_prox import FedProxConfig, fed_prox
from fedjax_graph.algorithms.graph_fed_avg import (
    MPFedAvgConfig,
    graph_fed_avg,
    mp_fed_avg,
)
from fedjax_graph.algorithms.lg_fed_avg import lg_fed_avg
from fedjax_graph.algorithms.local import local_training
from fedjax_graph.core.client_state import LOCAL, aggregated
from fedjax_graph.core.communication import Bytes, bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig, federated
from fedjax_graph.core.local import LocalResult
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests.algorithms import quadratic, test_ledger
from tests.algorithms.quadratic import (
    BASE,
    HEAD,
    IS_HEAD,
    KEYS,
    MEAN,
    NUM_CLIENTS,
    PARAMS,
    QuadraticTask,
    Twin,
    assert_rows,
    normalised_adjacency,
    run,
    to_rows,
)

TASK, NODES = QuadraticTask(), SubgraphTask(num_features=3, num_classes=2)
# Of three models the mean without one on each side, where by default none is left out.
MIDDLE_OF_THREE = {"aggregator": "trimmed_mean", "tolerance": 0.4}
both_cohorts = pytest.mark.parametrize("participation", [1.0, 0.6])


@pytest.fixture(scope="module")
def data():
    return quadratic.make_data()


@pytest.fixture
def follow(data, quick_jit):
    """Runs a method and its paper's round side by side, and compares after each."""

    def follow(algorithm, twin_round, participation, models=lambda state: state.models):
        twin = Twin(data, TASK, participation)
        (state, _), *later = run(algorithm, data, quick_jit)
        rows = to_rows(models(state))
        for key, (state, metrics) in zip(KEYS, later, strict=True):
            new, loss = twin_round(twin, rows, key)
            assert np.abs(new - rows).max() > 0.05  # something was learnt
            rows = new
            assert_rows(models(state), rows)
            npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
        return state

    return follow


def keep_others(rows, trained):
    """Who was not sampled keeps its row."""
    return np.stack([trained.get(i, row) for i, row in enumerate(rows)])


# --- One model for all ----------------------------------------------------------------


def fed_avg_round(twin, w, key, mu=0.0):
    trained, loss = twin.train(w, key, lambda i, v: mu * (v - w[i, PARAMS]))
    return np.tile(twin.mean(trained), (NUM_CLIENTS, 1)), loss


@both_cohorts
def test_fed_avg_is_a_mean_by_examples(follow, participation):
    config = FedAvgConfig(TASK, participation)
    state = follow(fed_avg(config), fed_avg_round, participation)
    assert {x.shape[0] for x in jax.tree.leaves(state.models)} == {1}
    assert state.num_rounds == len(KEYS)


@pytest.mark.parametrize(
    "participation, settings",
    [(1.0, {"aggregator": "median"}), (0.6, MIDDLE_OF_THREE)],
)
def test_the_aggregator_of_fed_avg_has_a_name(follow, participation, settings):
    def median_round(twin, w, key):
        trained, loss = twin.train(w, key)
        median = np.median(np.stack(list(trained.values())), axis=0)
        return np.tile(median, (NUM_CLIENTS, 1)), loss

    config = FedAvgConfig(TASK, participation, **settings)
    follow(fed_avg(config), median_round, participation)


def own(config):
    """A user's method that extends FedAvg's config alone."""
    return federated(config, config.make_aggregator)


@both_cohorts
@pytest.mark.parametrize("method, stays", [(fed_avg, []), (fed_per, [HEAD]), (own, [])])
def test_what_is_scored_may_be_what_clients_steps_made(
    data, quick_jit, participation, method, stays
):
    """Who was not sampled yet is scored by the first model."""
    algorithm = method(FedAvgConfig(TASK, participation, score="local"))
    twin = Twin(data, TASK, participation)
    (state, _), *later = run(algorithm, data, quick_jit)
    rows = scored = to_rows(aggregated(state.models))
    for key, (state, _) in zip(KEYS, later, strict=True):
        trained, _ = twin.train(rows, key)
        scored = keep_others(scored, trained)
        kept = keep_others(rows, trained)
        rows = np.tile(twin.mean(trained), (NUM_CLIENTS, 1))
        for part in stays:
            rows[:, part] = kept[:, part]
        assert_rows(aggregated(state.models), rows)
        assert_rows(state.models[LOCAL], scored)
    scores = algorithm.evaluate(algorithm.kept(state), data)
    outputs = np.einsum("knp,kp->kn", twin.features, scored[:, PARAMS])
    npt.assert_allclose(scores["loss"], np.mean((outputs - twin.targets) ** 2), 1e-5)


@pytest.mark.parametrize("name", ["ditto", "scaffold", "fed_dc", "moon", "ada_fgl"])
def test_methods_without_such_a_score_refuse_it(name):
    config = make_config(name, {"task": NODES, "score": "local"})
    words = "Config score='local': .*; leave score='aggregated'"
    with pytest.raises(InputError, match=words):
        get_method(name).factory(config)


def test_an_unknown_aggregator_is_refused():
    with pytest.raises(InputError, match="aggregator 'mean': unknown; known: median, "):
        FedAvgConfig(TASK, aggregator="mean")


def test_fed_prox_pulls_each_step_to_the_servers_model(follow):
    config = FedProxConfig(TASK, participation=0.6, proximal_weight=0.7)

    def fed_prox_round(twin, w, key):
        return fed_avg_round(twin, w, key, mu=0.7)

    follow(fed_prox(config), fed_prox_round, config.participation)


def test_fed_prox_without_a_pull_is_fed_avg(data, quick_jit):
    prox = run(fed_prox(FedProxConfig(TASK, proximal_weight=0.0)), data, quick_jit)
    avg = run(fed_avg(FedAvgConfig(TASK)), data, quick_jit)
    assert_rows(prox[-1][0].models, to_rows(avg[-1][0].models), 1e-6)


@pytest.mark.parametrize("participation, step_size", [(1.0, 0.6), (0.6, 1.0)])
def test_fed_att_weighs_clients_by_distance_layer_by_layer(
    follow, participation, step_size
):
    def fed_att_round(twin, w, key):
        trained, loss = twin.train(w, key)
        thetas, new = np.stack(list(trained.values())), w.copy()
        for layer in (BASE, HEAD, MEAN):
            distance = np.abs(w[0, layer] - thetas[:, layer]).sum(axis=1)
            attention = np.exp(distance) / np.exp(distance).sum()
            for a, theta in zip(attention, thetas, strict=True):
                new[:, layer] -= step_size * a * (w[0, layer] - theta[layer])
        return new, loss

    config = FedAttConfig(TASK, participation, attention_step_size=step_size)
    follow(fed_att(config), fed_att_round, participation)


@pytest.mark.parametrize(
    "factory, config_type", [(fed_avg, FedAvgConfig), (fed_att, FedAttConfig)]
)
def test_aggregation_noise_is_added_to_the_average(
    data, quick_jit, factory, config_type
):
    keys = jax.random.split(KEYS[0], 300)

    def after_a_round(scale):
        """Of each key, [300, 9]."""
        algorithm = factory(config_type(TASK, aggregation_noise=scale))
        start = algorithm.init(KEYS[0], data)
        rounds = jax.vmap(lambda key: algorithm.round(start, data, key)[0].models)
        leaves = jax.tree.leaves(quick_jit(rounds)(keys))
        return np.hstack([np.asarray(x, float).reshape(300, -1) for x in leaves])

    noise = after_a_round(0.01) - after_a_round(0.0)
    assert noise.shape == (300, 9)
    assert noise.std() == pytest.approx(0.01, rel=0.05)
    assert abs(noise.mean()) < 4 * 0.01 / np.sqrt(noise.size)
    correlation = np.corrcoef(noise.T) - np.eye(9)  # of one number with another
    assert np.abs(correlation).max() < 5 / np.sqrt(300)
    assert len(np.unique(noise[:, 0])) == 300  # anew in each round


# --- Part of a model stays on its client ----------------------------------------------


@both_cohorts
@pytest.mark.parametrize(
    "factory, is_personal", [(fed_per, IS_HEAD), (lg_fed_avg, ~IS_HEAD)]
)
def test_the_personal_part_stays_and_the_rest_is_averaged(
    follow, participation, factory, is_personal
):
    def round_(twin, rows, key):
        trained, loss = twin.train(rows, key)
        average = twin.mean(trained)
        return np.where(is_personal, keep_others(rows, trained), average), loss

    config = FedAvgConfig(TASK, participation)
    state = follow(factory(config), round_, participation)
    params = state.models["params"]
    num_heads = NUM_CLIENTS if factory is fed_per else 1
    assert params["head"].shape[0] == num_heads
    assert params["base"].shape[0] == NUM_CLIENTS + 1 - num_heads


@pytest.mark.parametrize("factory, personal", [(fed_per, HEAD), (lg_fed_avg, BASE)])
def test_a_client_that_is_not_sampled_keeps_its_personal_part(
    data, quick_jit, factory, personal
):
    _, (before, _), (after, _) = run(
        factory(FedAvgConfig(TASK, 0.6)), data, quick_jit, KEYS[:2]
    )
    before, after = to_rows(before.models), to_rows(after.models)
    absent = set(range(NUM_CLIENTS)) - set(Twin(data, TASK, 0.6).cohort(KEYS[1]))
    assert len(absent) == 2
    for client in range(NUM_CLIENTS):
        is_kept = np.array_equal(before[client, personal], after[client, personal])
        assert is_kept == (client in absent)
        shared = HEAD if personal == BASE else BASE
        assert np.all(before[client, shared] != after[client, shared])


@both_cohorts
def test_the_personal_models_of_ditto_are_pulled_to_the_sent_model(
    data, quick_jit, participation
):
    twin, settings = Twin(data, TASK, participation), (TASK, participation)
    ours = run(ditto(DittoConfig(*settings, personal_weight=0.5)), data, quick_jit)
    average = run(fed_avg(FedAvgConfig(*settings)), data, quick_jit)
    v = to_rows(ours[0][0].models)
    for t, key in enumerate(KEYS):
        w = to_rows(average[t][0].models)
        trained, loss = twin.train(
            v, key, lambda i, params, w=w: 0.5 * (params - w[i, PARAMS])
        )
        v = keep_others(v, trained)
        state, metrics = ours[t + 1]
        assert_rows(state.models, v)
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
        assert_rows(state.server.models, to_rows(average[t + 1][0].models), 1e-6)


def test_ditto_pulls_by_a_tenth_where_nothing_else_is_said():
    assert DittoConfig(TASK).personal_weight == 0.1


def test_ditto_scores_the_personal_models(data, quick_jit):
    algorithm = ditto(DittoConfig(TASK))
    state = run(algorithm, data, quick_jit, KEYS[:1])[-1][0]
    v = to_rows(state.models)[:, PARAMS]
    outputs = np.einsum("knp,kp->kn", data.features, v)
    npt.assert_allclose(algorithm.predict(state, data), outputs, rtol=1e-4, atol=1e-5)
    npt.assert_allclose(
        algorithm.evaluate(state, data)["loss"],
        np.mean((outputs - data.targets) ** 2),
        rtol=1e-4,
    )


# --- A model each ---------------------------------------------------------------------


def local_round(twin, rows, key):
    trained, loss = twin.train(rows, key)
    return keep_others(rows, trained), loss


@both_cohorts
def test_local_training_goes_on_where_it_ended(follow, participation):
    config = FederatedConfig(TASK, participation)
    follow(local_training(config), local_round, participation)


@both_cohorts
def test_graph_fed_avg_is_two_products_with_the_graph(follow, participation):
    def round_(twin, rows, key):
        trained, loss = twin.train(rows, key)
        indices = list(trained)
        A, mixed = normalised_adjacency(indices=indices), rows.copy()
        mixed[indices] = A @ (A @ np.stack(list(trained.values())))
        return mixed, loss

    config = FederatedConfig(TASK, participation)
    follow(graph_fed_avg(config), round_, participation)


@both_cohorts
def test_mp_fed_avg_takes_a_fifth_from_the_neighbours(follow, participation):
    def round_(twin, rows, key):
        trained, loss = twin.train(rows, key)
        mixed = keep_others(rows, trained)
        for i, own in trained.items():
            senders = {
                s: w
                for s, r, w in quadratic.EDGES
                if r == i and s != i and s in trained
            }
            if senders:
                neighbours = np.average(
                    [trained[s] for s in senders],
                    axis=0,
                    weights=list(senders.values()),
                )
                mixed[i] = 0.8 * own + 0.2 * neighbours
        return mixed, loss

    config = MPFedAvgConfig(TASK, participation)
    follow(mp_fed_avg(config), round_, participation)


@pytest.mark.parametrize(
    "factory, config_type",
    [(graph_fed_avg, FederatedConfig), (mp_fed_avg, MPFedAvgConfig)],
)
def test_a_client_without_neighbours_trains_alone(
    data, quick_jit, factory, config_type
):
    mixed = run(factory(config_type(TASK)), data, quick_jit)[-1][0]
    alone = run(local_training(FederatedConfig(TASK)), data, quick_jit)[-1][0]
    mixed, alone = to_rows(mixed.models), to_rows(alone.models)
    is_alone = np.all(np.abs(mixed - alone) < 1e-6, axis=1)
    # Nobody sends to 3 either.
    npt.assert_array_equal(is_alone, [False, False, False, True, True])


# --- What holds for all ---------------------------------------------------------------

CROSSING = {  # numbers that each client of the cohort sends, and that it receives
    "ditto": (9, 9),
    "fed_adam": (9, 9),
    "fed_att": (9, 9),
    "fed_avg": (9, 9),
    "fed_avg_m": (9, 9),
    "fed_per": (7, 7),  # base and statistics
    "fed_prox": (9, 9),
    "fed_yogi": (9, 9),
    "graph_fed_avg": (9, 9),
    "graphfl": (9 + 9, 9 + 9),  # a gradient with statistics, then a model
    "lg_fed_avg": (2, 2),  # head
    "local": (0, 0),
    "mp_fed_avg": (9, 9),
    "scaffold": (9 + 5, 9 + 5),  # controls are of parameters alone
    "sfl": (9, 9 + 9),  # u_i and w
    "sfl_lg": (2, 2 + 2),
    "sfl_per": (7, 7 + 7),
    "sfl_star": (9, 9 + 9),
}
# Of tasks with full batches or embeddings, which the one here is not; see their files.
OF_OTHER_TASKS = {"fed_sgd", "moon", "fed_dc", "fed_proto", "fgssl", "fed_star"}
OF_OTHER_TASKS |= {"fed_sage_plus", *test_ledger.CASES}


def build(name, **settings):
    return get_method(name).factory(make_config(name, {"task": TASK} | settings))


def ledger(algorithm, data):
    state = jax.eval_shape(algorithm.init, KEYS[0], data)
    return bytes_per_round(algorithm.round, state, data, KEYS[0])


def test_no_method_of_a_task_is_forgotten():
    with_task = {name for name, method in REGISTRY.items() if method.takes_task}
    assert set(CROSSING) | OF_OTHER_TASKS == with_task


@pytest.mark.parametrize("name", CROSSING)
def test_the_ledger_counts_what_crosses(data, name):
    up, down = CROSSING[name]
    for participation, cohort in [(1.0, 5), (0.6, 3)]:
        for clients_per_chunk in (None, 1, 2):
            algorithm = build(
                name, participation=participation, clients_per_chunk=clients_per_chunk
            )
            expected = Bytes(up=4 * up * cohort, down=4 * down * cohort)
            assert ledger(algorithm, data) == expected


class CountingTask(QuadraticTask):
    """Local steps add the number of rounds before theirs, from a start at 0."""

    def build(self):
        task = super().build()
        return task._replace(
            init=lambda key: jax.tree.map(jnp.zeros_like, task.init(key)),
            update=self.count,
            query_loss=lambda *_: jnp.float32(0),
        )

    def count(self, start, own, key, data, adjust, num_rounds):
        del own, key, data
        opt_state = () if adjust is None else (adjust.init(start["params"]),)
        model = jax.tree.map(lambda x: x + num_rounds, start)
        return LocalResult(model, opt_state, jnp.float32(0))


SERVER_STEPS = {"fed_adam", "fed_avg_m", "fed_yogi"}  # FedAvg but for the last step


@pytest.mark.parametrize("name", sorted(CROSSING.keys() - SERVER_STEPS))
def test_local_steps_know_the_number_of_rounds(data, name):
    algorithm = build(name, task=CountingTask())
    state = algorithm.init(KEYS[0], data)
    for _ in range(4):
        state, _ = algorithm.round(state, data, KEYS[0])
    npt.assert_allclose(to_rows(state.models), 0 + 1 + 2 + 3, rtol=1e-5)


@pytest.mark.parametrize("start", ["personal", "own"])
def test_what_no_client_uses_is_not_sent(data, start):
    algorithm = build("sfl", start=start, pull_weight=0.0)  # nor w, nor v_i down
    assert ledger(algorithm, data) == Bytes(up=4 * 9 * 5, down=4 * 9 * 5)


@pytest.mark.parametrize("name", ["ditto", "fed_att", "fed_per", "scaffold", "sfl_per"])
def test_padded_clients_change_nothing_in_a_cohort(data, quick_jit, name):
    """One place of the four is left over; that all take part is tested elsewhere."""
    algorithm = build(name, participation=0.6)
    (start, _), *_, (state, metrics) = run(algorithm, data, quick_jit, KEYS[:2])
    *_, (padded, padded_metrics) = run(
        algorithm,
        quadratic.pad_data(data),
        quick_jit,
        KEYS[:2],
        quadratic.pad_state(start),
    )
    of_real = jax.tree.map(
        lambda x, like: x[tuple(map(slice, like.shape))], padded, state
    )
    for left, right in zip(
        jax.tree.leaves((of_real, padded_metrics)),
        jax.tree.leaves((state, metrics)),
        strict=True,
    ):
        npt.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
