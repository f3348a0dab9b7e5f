"""Clients that drop out, fall behind or lie, against loops over clients."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms import make_config
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import aggregation, misbehaviour
from fedjax_graph.core.algorithm import NO_LOSS
from fedjax_graph.core.channel import ChannelConfig
from fedjax_graph.core.clients import Cohort, client_keys
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import federated_round
from fedjax_graph.core.local import local_steps, local_update, share_of_steps
from fedjax_graph.core.misbehaviour import SCALES, Misbehaviour
from fedjax_graph.core.task import flipped
from tests.algorithms import quadratic
from tests.algorithms.oracle import draw_cohort
from tests.algorithms.problems import Nodes
from tests.algorithms.quadratic import QuadraticTask

NUM_CLIENTS = 10
IDS = 3 + 7 * np.arange(NUM_CLIENTS)
WEIGHTS = np.array([2, 1, 5, 3, 4, 1, 1, 2, 3, 1], np.float32)
READINGS = np.random.default_rng(0).normal(size=(NUM_CLIENTS, 3)).astype(np.float32)
START = np.array([1.0, -2, 0.5], np.float32)
KEY = jax.random.key(4)


def move(model, reading, key):
    del key
    return {"w": model["w"] + reading}, jnp.sum(reading)


def run_round(
    aggregate=aggregation.weighted_mean, key=KEY, participation=1.0, **conduct
):
    config = ChannelConfig(misbehaviour=Misbehaviour(**conduct))
    settings = {"participation": participation, "channel_config": config}
    round_ = federated_round(move, aggregate, **settings)
    models, loss = round_({"w": START[None]}, READINGS, IDS, WEIGHTS, key)
    return np.asarray(models["w"]), float(loss)


def who_comes(key, **conduct):
    """[K] bool, by the keys that the round draws."""
    _, update_key = jax.random.split(key)
    keys = client_keys(update_key, jnp.asarray(IDS))
    cohort = Cohort(jnp.arange(NUM_CLIENTS), jnp.asarray(WEIGHTS))
    cohort, _ = misbehaviour.attendance(Misbehaviour(**conduct), cohort, keys)
    return np.asarray(cohort.weights) > 0


def drawn_to_come(key, dropout_rate=0.0, straggler_rate=0.0, straggler_work=0.5):
    """The same in a loop, from each client's own key of the round."""
    _, update_key = jax.random.split(key)
    comes = np.ones(NUM_CLIENTS, bool)
    for place, client_id in enumerate(IDS):
        own = jax.random.fold_in(update_key, client_id)
        is_out, is_slow = (
            bool(jax.random.bernoulli(jax.random.fold_in(own, number), rate))
            for number, rate in (
                (2**31 - 1, dropout_rate),
                (2**31 - 2, straggler_rate),
            )
        )
        comes[place] = not (is_out or (is_slow and not straggler_work))
    return comes


# --- Drop-outs and stragglers ---------------------------------------------------------


@pytest.mark.parametrize(
    "conduct",
    [
        {"dropout_rate": 0.4},
        {"straggler_rate": 0.4, "straggler_work": 0.0},
        {"dropout_rate": 0.3, "straggler_rate": 0.3, "straggler_work": 0.0},
    ],
)
def test_who_drops_out_or_comes_too_late_is_as_if_not_sampled(conduct):
    models, loss = run_round(**conduct)
    comes = drawn_to_come(KEY, **conduct)
    assert 0 < comes.sum() < NUM_CLIENTS
    expected = np.average(READINGS[comes], axis=0, weights=WEIGHTS[comes])
    npt.assert_allclose(models[0], START + expected, atol=1e-6)
    losses = READINGS[comes].sum(axis=1)
    npt.assert_allclose(loss, np.average(losses, weights=WEIGHTS[comes]), rtol=1e-5)


def test_a_round_that_all_drop_out_of_has_no_loss():
    models, loss = run_round(dropout_rate=1 - 1e-7)
    npt.assert_array_equal(models[0], START)
    assert loss == NO_LOSS


def test_drop_outs_are_as_many_as_said_and_change_from_round_to_round():
    rounds = [who_comes(jax.random.key(i), dropout_rate=0.3) for i in range(60)]
    assert np.mean(rounds) == pytest.approx(0.7, abs=0.06)  # three standard errors
    assert len({x.tobytes() for x in rounds}) > 50


def test_who_drops_out_and_who_falls_behind_are_drawn_apart():
    """Of 300 clients a sixth does both, and falling behind goes with nothing else."""
    conduct = Misbehaviour(dropout_rate=0.4, straggler_rate=0.4)
    cohort = Cohort(jnp.arange(300), jnp.ones(300))
    keys = jax.random.split(KEY, 300)
    attends, work = misbehaviour.attendance(conduct, cohort, keys)
    is_out, is_slow = np.asarray(attends.weights) == 0, np.asarray(work) == 0.5
    assert is_out.mean() == pytest.approx(0.4, abs=0.09)  # three standard errors
    assert is_slow.mean() == pytest.approx(0.4, abs=0.09)
    assert (is_out & is_slow).mean() == pytest.approx(0.16, abs=0.065)


@pytest.mark.parametrize("share, num_done", [(0.5, 3), (0.34, 3), (0.1, 1), (1.0, 6)])
def test_a_straggler_does_the_first_of_its_steps(share, num_done):
    def loss(params, stats, batch):
        return jnp.sum((params - batch) ** 2), jax.tree.map(lambda x: x + 1, stats)

    steps = local_steps(loss, optax.adam(0.1))
    start = {"params": jnp.ones(2), "batch_stats": {"count": jnp.zeros(())}}
    batches = jnp.asarray(np.random.default_rng(1).normal(size=(6, 2)), jnp.float32)
    with share_of_steps(jnp.float32(share)):
        short = steps(start, batches)
    jax.tree.map(npt.assert_array_equal, short, steps(start, batches[:num_done]))


def test_stragglers_do_a_part_of_their_steps(quick_jit):
    """With steps cut in half for all, it is the method on the first half of them."""
    data, task = quadratic.make_data(), QuadraticTask()
    conduct = Misbehaviour(straggler_rate=1.0, straggler_work=0.5)
    slow = fed_avg(FedAvgConfig(task, misbehaviour=conduct))
    (start, _), (state, _) = quadratic.run(slow, data, quick_jit, (KEY,))
    twin = quadratic.Twin(data, task)
    w = quadratic.to_rows(start.models)
    half, rows = task.num_steps // 2, []
    for client, key in twin.cohort(KEY).items():
        v, mean = w[client, quadratic.PARAMS], w[client, quadratic.MEAN]
        for indices in np.asarray(quadratic.batches_of(key, task))[:half]:
            x, y = twin.features[client, indices], twin.targets[client, indices]
            v = v - task.learning_rate * x.T @ (x @ v - y) / len(y)
            new = x[:, :4].mean(axis=0)
            mean = quadratic.MEAN_DECAY * mean + (1 - quadratic.MEAN_DECAY) * new
        rows.append(np.concatenate([v, mean]))
    expected = np.average(rows, axis=0, weights=twin.weights)
    quadratic.assert_rows(state.models, expected)


# --- Attackers ------------------------------------------------------------------------


@pytest.mark.parametrize("fraction, count", [(0.0, 0), (0.2, 2), (0.3, 3), (0.35, 3)])
def test_attackers_are_a_share_of_the_real_clients_and_stay_the_same(fraction, count):
    config = Misbehaviour(byzantine_fraction=fraction)
    marked = np.asarray(misbehaviour.attackers(config, IDS, WEIGHTS))
    assert marked.sum() == count
    order = np.random.default_rng(0).permutation(NUM_CLIENTS)
    again = misbehaviour.attackers(config, IDS[order], WEIGHTS[order])
    npt.assert_array_equal(again, marked[order])
    padded = misbehaviour.attackers(
        config, np.append(IDS, [900, 901]), np.append(WEIGHTS, [0, 0])
    )
    npt.assert_array_equal(padded, [*marked, False, False])


def attack_of(attack, theta, scale):
    moved = theta - START
    return START + {"sign_flip": -scale, "scaling": scale}[attack] * moved


@pytest.mark.parametrize("attack", ["sign_flip", "scaling"])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_an_attacker_sends_another_model(attack, scale):
    conduct = {"byzantine_fraction": 0.3, "attack": attack, "attack_scale": scale}
    models, _ = run_round(**conduct)
    lies = np.asarray(misbehaviour.attackers(Misbehaviour(**conduct), IDS, WEIGHTS))
    sent = START + READINGS
    sent[lies] = attack_of(attack, sent[lies], scale or SCALES[attack])
    expected = np.average(sent, axis=0, weights=WEIGHTS)
    npt.assert_allclose(models[0], expected, rtol=1e-5, atol=1e-5)


def sampled(key, participation):
    """Who is sampled for a round, by place."""
    size = round(participation * NUM_CLIENTS)
    return np.array(draw_cohort(jax.random.split(key)[0], IDS, size))


def test_of_those_sampled_they_lie_who_lie_in_all_rounds():
    conduct = {"byzantine_fraction": 0.5, "attack": "sign_flip"}
    lies = np.asarray(misbehaviour.attackers(Misbehaviour(**conduct), IDS, WEIGHTS))
    cohort = sampled(KEY, 0.4)
    assert 0 < lies[cohort].sum() < 4 and np.any(lies[cohort] != lies[:4])
    sent = START + READINGS
    sent[lies] = attack_of("sign_flip", sent[lies], SCALES["sign_flip"])
    expected = np.average(sent[cohort], axis=0, weights=WEIGHTS[cohort])
    models, _ = run_round(participation=0.4, **conduct)
    npt.assert_allclose(models[0], expected, rtol=1e-5, atol=1e-5)


def test_noise_is_normal_and_of_the_attackers_alone():
    conduct = {"byzantine_fraction": 0.5, "attack": "noise", "attack_scale": 3.0}

    def sent(seed):
        return run_round(lambda x, cohort: x, jax.random.key(seed), **conduct)[0]

    lies = np.asarray(misbehaviour.attackers(Misbehaviour(**conduct), IDS, WEIGHTS))
    noise = np.stack([sent(seed) - START - READINGS for seed in range(30)]) / 3
    npt.assert_allclose(noise[:, ~lies], 0, atol=1e-6)
    assert np.std(noise[:, lies]) == pytest.approx(1, abs=0.12)
    assert len(np.unique(noise[:, lies])) == noise[:, lies].size


def test_each_part_of_an_attackers_model_has_noise_of_its_own():
    conduct = Misbehaviour(byzantine_fraction=1.0, attack="noise")
    zeros = {name: jnp.zeros((4, 20, 10)) for name in ("first", "second")}
    keys = jax.random.split(KEY, 4)
    sent = misbehaviour.attacked(conduct, zeros, zeros, jnp.ones(4, bool), keys)
    rows = np.concatenate([x.reshape(4, -1) for x in sent.values()])
    assert np.abs(np.corrcoef(rows) - np.eye(8)).max() < 5 / np.sqrt(200)


@pytest.mark.parametrize("attack", ["noise", "sign_flip", "scaling"])
def test_an_attackers_model_has_the_types_of_the_others(attack):
    conduct = Misbehaviour(byzantine_fraction=1.0, attack=attack)
    models = {"w": jnp.ones((4, 3), jnp.bfloat16), "n": jnp.ones(4, jnp.int32)}
    keys = jax.random.split(KEY, 4)
    sent = misbehaviour.attacked(conduct, models, models, jnp.ones(4, bool), keys)
    found, expected = (jax.tree.map(lambda x: x.dtype, tree) for tree in (sent, models))
    assert found == expected


def test_a_robust_aggregator_withstands_what_the_mean_does_not(quick_jit):
    """On least squares with one answer for all clients."""
    data = quadratic.make_data()
    answer = jnp.arange(5.0) / 5
    data = data._replace(targets=data.features @ answer, client_weights=jnp.ones(5))
    attack = Misbehaviour(byzantine_fraction=0.2)

    def distance(aggregator, conduct):
        config = FedAvgConfig(
            QuadraticTask(), aggregator=aggregator, misbehaviour=conduct
        )
        keys = [jax.random.key(seed) for seed in range(12)]
        *_, (state, _) = quadratic.run(fed_avg(config), data, quick_jit, keys)
        parts = state.models["params"]
        found = np.hstack([parts["base"], parts["head"]])[0]
        return np.abs(found - answer).max()

    assert distance("weighted_mean", misbehaviour.HONEST) < 0.1
    assert distance("multi_krum", attack) < 0.1
    assert distance("weighted_mean", attack) > 1


# --- Labels ---------------------------------------------------------------------------


def test_labels_are_flipped_where_there_are_any():
    labels = jnp.array([0, 1, 4, -1])
    npt.assert_array_equal(flipped(labels, 5, jnp.bool_(True)), [4, 3, 0, -1])
    npt.assert_array_equal(flipped(labels, 5, jnp.bool_(False)), labels)


def test_labels_of_a_cohort_are_flipped_where_its_clients_lie():
    conduct = Misbehaviour(byzantine_fraction=0.5, attack="label_flip")
    lies = np.asarray(misbehaviour.attackers(conduct, IDS, WEIGHTS))
    cohort, labels = sampled(KEY, 0.4), np.arange(NUM_CLIENTS) % 5
    assert 0 < lies[cohort].sum() < 4 and np.any(lies[cohort] != lies[:4])
    task = (
        QuadraticTask()
        .build()
        ._replace(flip_labels=lambda own, data, is_one: (flipped(own, 5, is_one), data))
    )
    data = types.SimpleNamespace(client_ids=IDS, client_weights=WEIGHTS)
    args = jnp.asarray(labels[cohort]), jnp.asarray(cohort), data
    found = misbehaviour.flipped_data(conduct, task, *args)
    npt.assert_array_equal(found, np.where(lies, 4 - labels, labels)[cohort])


def test_attackers_of_labels_learn_from_false_ones(quick_jit):
    """As if the data of these clients had been flipped, and of no others."""
    conduct = Misbehaviour(byzantine_fraction=0.4, attack="label_flip")
    data = Nodes().train
    lies = misbehaviour.attackers(conduct, data.client_ids, data.client_weights)
    false = Nodes.TASK["num_classes"] - 1 - data.support.labels
    support = data.support._replace(
        labels=jnp.where(lies[:, None], false, data.support.labels)
    )

    def after_a_round(data, **changes):
        method = fed_avg(make_config("fed_avg", {"task": Nodes.TASK} | changes))
        state = method.init(jax.random.key(0), data)
        return quick_jit(method.round)(state, data, KEY)[0].models["params"]

    found = after_a_round(data, misbehaviour=conduct)
    expected = after_a_round(data._replace(support=support))
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, atol=1e-6), found, expected)


def test_a_task_without_labels_has_none_to_flip():
    conduct = Misbehaviour(byzantine_fraction=0.4, attack="label_flip")
    config = FedAvgConfig(QuadraticTask(), misbehaviour=conduct)
    data = quadratic.make_data()
    method = fed_avg(config)
    state = method.init(KEY, data)
    with pytest.raises(InputError, match="label_flip.*the task has no labels"):
        jax.eval_shape(method.round, state, data, KEY)


@pytest.mark.parametrize("share", [1e-6, 0.2, 0.21])
def test_a_straggler_does_a_step_at_least(share):
    batches = jnp.arange(1.0, 6)
    update = local_update(lambda w, x: w * x, optax.sgd(1.0))
    with share_of_steps(jnp.float32(share)):
        found, _ = update(jnp.float32(0), batches)
    assert found == -sum(range(1, 1 + max(1, math.ceil(share * 5))))


def test_counts_are_no_part_of_a_model_that_lies():
    config = Misbehaviour(byzantine_fraction=0.5, attack="scaling")
    sent = {"w": jnp.ones((2, 1)), "counts": jnp.array([[3], [4]])}
    start = {"w": jnp.zeros((1, 1)), "counts": jnp.array([[7]])}
    keys = jax.random.split(jax.random.key(0), 2)
    found = misbehaviour.attacked(config, sent, start, jnp.array([True, False]), keys)
    npt.assert_array_equal(found["counts"], sent["counts"])
    npt.assert_array_equal(found["w"], [[10], [1]])
