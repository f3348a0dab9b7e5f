"""Clients whose optimizers go on from round to round, against loops in NumPy."""

import dataclasses

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.algorithms.ditto import DittoConfig, ditto
from fedjax_graph.algorithms.fed_att import FedAttConfig, fed_att
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fed_dc import FedDCConfig, fed_dc
from fedjax_graph.algorithms.fed_per import fed_per
from fedjax_graph.algorithms.fed_prox import FedProxConfig, fed_prox
from fedjax_graph.algorithms.local import local_training
from fedjax_graph.algorithms.scaffold import scaffold
from fedjax_graph.algorithms.sfl.sfl import SFLConfig, sfl
from fedjax_graph.core import client_state
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.optimizers import OptimizerConfig
from tests.algorithms import problems, quadratic
from tests.algorithms.quadratic import (
    IS_HEAD,
    KEYS,
    NUM_CLIENTS,
    PARAMS,
    QuadraticTask,
    Twin,
    assert_rows,
    run,
    to_rows,
)
from tests.algorithms.tiny_methods import TINY

ADAM = OptimizerConfig("adam", learning_rate=0.1, weight_decay=0.3, stateful=True)
TASK = QuadraticTask(optimizer=ADAM)
MU = 0.7


class AdamTwin(Twin):
    """Clients with L2 decay and Adam, whose moments and counts nobody clears."""

    def __init__(self, *args, share_of=lambda step: 1.0):
        super().__init__(*args)
        self.m, self.v = np.zeros((2, NUM_CLIENTS, 5))
        self.count = np.zeros(NUM_CLIENTS)
        self.share_of = share_of  # a step of the client -> share of the highest rate

    def steps(self, client, row, key, extra=lambda v: 0.0):
        decay = ADAM.weight_decay
        return super().steps(client, row, key, lambda v: extra(v) + decay * v)

    def update(self, client, gradient):
        self.count[client] += 1
        self.m[client] = 0.9 * self.m[client] + 0.1 * gradient
        self.v[client] = 0.999 * self.v[client] + 0.001 * gradient**2
        m = self.m[client] / (1 - 0.9 ** self.count[client])
        v = self.v[client] / (1 - 0.999 ** self.count[client])
        rate = self.config.learning_rate * self.share_of(self.count[client] - 1)
        return rate * m / (np.sqrt(v) + 1e-8)


def averaged(twin, rows, key, mu=0.0, is_kept=False):
    """A round, after which everybody has the mean but for what is personal."""
    starts = rows.copy()
    trained, _ = twin.train(rows, key, lambda i, v: mu * (v - starts[i, PARAMS]))
    own = np.stack([trained.get(i, row) for i, row in enumerate(rows)])
    return np.where(is_kept, own, twin.mean(trained))


def from_the_mean(twin, rows, key):
    """SFL's start from w, with nothing mixed: who trained keeps what it has."""
    trained, _ = twin.train(np.tile(rows.mean(axis=0), (NUM_CLIENTS, 1)), key)
    return np.stack([trained.get(i, row) for i, row in enumerate(rows)])


def from_its_own(twin, rows, key):
    """SFL's start from v_i: local training, where nothing is mixed."""
    return averaged(twin, rows, key, is_kept=True)


def attended(twin, rows, key):
    """FedAtt: softmax of distances, for each of the three leaves."""
    trained, _ = twin.train(rows, key)
    moved = rows[0].copy()
    for leaf in (quadratic.BASE, quadratic.HEAD, quadratic.MEAN):
        theirs = np.stack([row[leaf] for row in trained.values()])
        distance = np.abs(theirs - moved[leaf]).sum(axis=1)
        shares = np.exp(distance) / np.exp(distance).sum()
        moved[leaf] = moved[leaf] + shares @ (theirs - moved[leaf])
    return np.tile(moved, (NUM_CLIENTS, 1))


METHODS = {
    "fed_avg": (fed_avg, FedAvgConfig, averaged),
    "fed_prox": (fed_prox, FedProxConfig, lambda *args: averaged(*args, mu=MU)),
    "fed_per": (fed_per, FedAvgConfig, lambda *args: averaged(*args, is_kept=IS_HEAD)),
    "sfl": (sfl, SFLConfig, from_the_mean),
    "sfl_own": (sfl, SFLConfig, from_its_own),
    "fed_att": (fed_att, FedAttConfig, attended),
    "local": (local_training, FederatedConfig, lambda *a: averaged(*a, is_kept=True)),
}


@pytest.mark.parametrize("name", METHODS)
def test_moments_go_on_where_a_client_left_them(quick_jit, name):
    factory, config_type, round_of = METHODS[name]
    changes = {
        "fed_prox": {"proximal_weight": MU},
        "sfl": {"alpha": 0.0},
        "sfl_own": {"start": "own"},
    }.get(name, {})
    data, config = quadratic.make_data(), config_type(TASK, 0.6, **changes)
    (state, _), *later = run(factory(config), data, quick_jit)
    twin = AdamTwin(data, TASK, 0.6)
    rows = to_rows(state.models)
    for key, (state, _) in zip(KEYS, later, strict=True):
        rows = round_of(twin, rows, key)
        own = state.models.get(client_state.LOCAL, state.models)
        assert_rows(own, rows)
    _, moments = state.models[client_state.OPT_STATE]
    npt.assert_array_equal(moments[0].count, twin.count)
    assert len(set(twin.count)) > 1  # some took part more often than others


def test_dittos_two_models_have_moments_of_their_own(quick_jit):
    data, config = quadratic.make_data(), DittoConfig(TASK, 0.6, personal_weight=MU)
    (state, _), *later = run(ditto(config), data, quick_jit)
    common, own = (AdamTwin(data, TASK, 0.6) for _ in range(2))
    w, v = to_rows(state.server.models), to_rows(state.models)
    for key, (state, _) in zip(KEYS, later, strict=True):
        sent = w[0, PARAMS]
        trained, _ = own.train(v, key, lambda i, x: MU * (x - sent))  # noqa: B023
        v = np.stack([trained.get(i, row) for i, row in enumerate(v)])
        w = averaged(common, w, key)
        assert_rows(state.server.models, w)
        assert_rows(state.models, v)
    assert len(set(own.count)) > 1


def test_a_schedule_spans_the_steps_that_a_client_took(quick_jit):
    steps = dataclasses.replace(ADAM, schedule="linear", num_steps=10)
    task, data = QuadraticTask(optimizer=steps), quadratic.make_data()
    (state, _), *later = run(fed_avg(FedAvgConfig(task, 0.6)), data, quick_jit)
    twin = AdamTwin(data, TASK, 0.6, share_of=lambda step: max(1 - step / 10, 0))
    rows = to_rows(state.models)
    for key, (state, _) in zip(KEYS, later, strict=True):
        rows = averaged(twin, rows, key)
        assert_rows(state.models, rows)
    assert len(set(twin.count)) > 1


def test_control_variates_come_before_the_optimizer(quick_jit):
    data, config = quadratic.make_data(), FedAvgConfig(TASK, 0.6)
    (state, _), *later = run(scaffold(config), data, quick_jit)
    twin, x = AdamTwin(data, TASK, 0.6), to_rows(state.models)[0]
    controls = np.zeros((NUM_CLIENTS, 5))
    for key, (state, _) in zip(KEYS, later, strict=True):
        c, before = controls.mean(axis=0), controls.copy()
        seen = {i: [] for i in range(NUM_CLIENTS)}

        def corrected(i, v):
            seen[i].append(v)  # noqa: B023
            return c - before[i]  # noqa: B023

        trained, _ = twin.train(np.tile(x, (NUM_CLIENTS, 1)), key, corrected)
        for i, client_key in twin.cohort(key).items():
            batches = np.asarray(quadratic.batches_of(client_key, TASK))
            gradients = [
                twin.features[i, b].T
                @ (twin.features[i, b] @ v - twin.targets[i, b])
                / len(b)
                for b, v in zip(batches, seen[i], strict=True)
            ]
            controls[i] = np.mean(gradients, axis=0)
        x = twin.mean(trained)
        assert_rows(state.models, x)
        npt.assert_allclose(
            to_rows({"params": state.memories}), controls, rtol=1e-4, atol=1e-5
        )


def test_one_round_is_that_of_an_optimizer_that_begins_anew(quick_jit):
    data = quadratic.make_data()
    for factory, config in (
        (fed_avg, FedAvgConfig(TASK)),
        (scaffold, FedAvgConfig(TASK)),
        (fed_dc, FedDCConfig(TASK)),
    ):
        anew = dataclasses.replace(
            config,
            task=QuadraticTask(optimizer=dataclasses.replace(ADAM, stateful=False)),
        )
        one, other = (
            run(factory(c), data, quick_jit, KEYS[:2]) for c in (config, anew)
        )
        assert_rows(one[1][0].models, to_rows(other[1][0].models), 1e-6)
        change = to_rows(one[2][0].models) - to_rows(other[2][0].models)
        assert np.abs(change).max() > 0.01


def test_best_states_hold_models_without_moments():
    data, algorithm = quadratic.make_data(), fed_avg(FedAvgConfig(TASK))
    state = jax.eval_shape(algorithm.init, KEYS[0], data)
    kept = algorithm.kept(state)
    assert jax.tree.leaves(state.models[client_state.OPT_STATE])
    assert not jax.tree.leaves(kept.models[client_state.OPT_STATE])
    assert kept.models["params"] == state.models["params"]
    assert jax.eval_shape(algorithm.evaluate, kept, data) == (
        jax.eval_shape(algorithm.evaluate, state, data)
    )


@pytest.mark.parametrize("score", ["local", "aggregated"])
def test_best_states_hold_the_one_model_that_is_scored(score):
    """Where clients have two: u_i as the server mixed it, v_i as they trained it."""
    data = quadratic.make_data()
    algorithm = sfl(SFLConfig(TASK, start="own", score=score, pull_weight=MU))
    state = jax.eval_shape(algorithm.init, KEYS[0], data)
    kept, models = algorithm.kept(state), client_state.plain(state.models)
    v = models.pop(client_state.LOCAL)
    scored = v if score == "local" else models
    assert jax.tree.leaves(kept.models) == jax.tree.leaves(scored)
    for read in (algorithm.evaluate, algorithm.predict):
        assert jax.eval_shape(read, kept, data) == jax.eval_shape(read, state, data)


def test_an_optimizers_state_never_leaves_its_client():
    data = quadratic.make_data()
    sizes = []
    for stateful in (True, False):
        optimizer = dataclasses.replace(ADAM, stateful=stateful)
        config = FedAvgConfig(QuadraticTask(optimizer=optimizer))
        algorithm = fed_avg(config)
        state = jax.eval_shape(algorithm.init, KEYS[0], data)
        sizes.append(bytes_per_round(algorithm.round, state, data, KEYS[0]))
    assert sizes[0] == sizes[1]


def test_a_server_steps_with_an_optimizer_of_its_own(quick_jit):
    """FedAvgM with momentum 0 and rate 1 is FedAvg; clients' moments are no part."""
    data = quadratic.make_data()
    server = OptimizerConfig("sgd", learning_rate=1.0)
    config = FedAvgConfig(TASK)
    one, other = (
        run(fed_avg(c), data, quick_jit)
        for c in (config, dataclasses.replace(config, server_optimizer=server))
    )
    assert_rows(one[-1][0].models, to_rows(other[-1][0].models))


@pytest.mark.parametrize(
    "name",
    ["moon", "fed_proto"]
    + [
        pytest.param(x, marks=pytest.mark.slow)
        for x in ("fed_star", "fgssl", "fed_gta", "fed_pub", "gcfl_plus")
    ],
)
def test_what_reads_models_reads_no_optimizers(quick_jit, name):
    """Embeddings, prototypes and scores; a count of two local steps a round.

    At a rate of 0 nothing that clients train depends on the moments.
    """
    values = TINY[problems.Subgraphs].get(name, {"task": problems.Subgraphs.TASK})
    optimizer = {"name": "adam", "learning_rate": 0.0, "stateful": True}
    task = values["task"] | {"optimizer": optimizer, "local_steps": 2}
    changes = {"task": task, "participation": 1.0}
    config = make_config(name, values | changes)
    algorithm = get_method(name).factory(config)
    train, round_ = problems.Subgraphs().train, quick_jit(algorithm.round)
    evaluate = quick_jit(algorithm.evaluate)
    (_, _), (state, _) = run(algorithm, train, lambda _: round_, KEYS[:1])
    is_kept = getattr(config, "score", None) == "local"  # what clients trained last
    own = {client_state.LOCAL} if is_kept else set()
    assert set(state.models) == {"params", "batch_stats", client_state.OPT_STATE} | own
    moments = state.models[client_state.OPT_STATE]
    ends = []
    for change in (lambda x: x, lambda x: x + 3):
        changed = {client_state.OPT_STATE: jax.tree.map(change, moments)}
        start = state._replace(models=state.models | changed)
        after, metrics = round_(start, train, KEYS[1])
        models = dict(after.models)
        count = models.pop(client_state.OPT_STATE)[0].count
        npt.assert_array_equal(count, [change(2) + 2] * NUM_CLIENTS)
        ends.append((after._replace(models=models), metrics, evaluate(after, train)))
    jax.tree.map(npt.assert_array_equal, *ends)
    assert np.isfinite(ends[0][-1]["loss"])


@pytest.mark.parametrize("name", ["fed_sgd", "graphfl"])
def test_a_method_that_would_lose_the_state_refuses(name):
    train = problems.Subgraphs().train
    optimizer = {"name": "adam", "stateful": True}
    task = problems.Subgraphs.TASK | {"optimizer": optimizer}
    with pytest.raises(InputError, match=f"{name}: optimizer stateful=True: only"):
        config = make_config(name, {"task": task})
        algorithm = get_method(name).factory(config)
        state = jax.eval_shape(algorithm.init, KEYS[0], train)
        jax.eval_shape(algorithm.round, state, train, KEYS[0])


@pytest.mark.parametrize(
    "name", ["fed_avg", "scaffold", "graph_fed_avg", "sfl", "sfl_star", "sfl_per"]
)
@pytest.mark.parametrize("kind", ["traffic_rnn", "traffic_seq2seq"])
def test_methods_that_keep_it_do_so_on_traffic(name, kind):
    optimizer = {"name": "adam", "stateful": True}
    config = make_config(name, {"task": {"kind": kind, "optimizer": optimizer}})
    assert get_method(name).factory(config).init


@pytest.mark.parametrize("build", ["build_task", "build_stateless"])
def test_a_schedule_over_all_rounds_is_refused_before_a_round(build):
    """Of steps that begin anew; a task of one's own may have another optimizer."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        optimizer: object

        def build(self):
            return "built"

    names = () if build == "build_task" else ("mine",)
    lasting = OptimizerConfig("adam", schedule="cosine", num_steps=9)
    with pytest.raises(InputError, match="num_steps=9: .* begins anew in each"):
        getattr(client_state, build)(Config(lasting), *names)
    for other in (OptimizerConfig("adam"), object(), None):
        assert getattr(client_state, build)(Config(other), *names) == "built"


def test_steps_that_score_begin_anew(quick_jit):
    """Of a task that adapts its models before it scores them."""
    train = problems.Nodes().train
    values = problems.Nodes.TASK | {"adapt_steps": 3, "dropout": 0.0}
    losses = []
    for stateful in (False, True):
        optimizer = {"name": "adam", "learning_rate": 0.01, "stateful": stateful}
        task = values | {"optimizer": optimizer}
        algorithm = fed_avg(make_config("fed_avg", {"task": task}))
        state = algorithm.init(KEYS[0], train)
        losses.append(quick_jit(algorithm.evaluate)(state, train)["cross_entropy"])
    assert losses[0] == losses[1]
