"""The ledger of a round against what the methods' papers say is exchanged."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core.communication import Bytes, bytes_per_round
from fedjax_graph.driver import rounds
from tests import client_graphs
from tests.client_graphs import NUM_CLASSES as C
from tests.client_graphs import NUM_CLIENTS as K
from tests.client_graphs import NUM_FEATURES as F

HIDDEN, FLOAT = 4, 4  # units, bytes
HEAD = FLOAT * (HIDDEN * C + C)
MODEL = FLOAT * (F * HIDDEN + HIDDEN) + HEAD
TASK = {
    "kind": "subgraphs",
    "num_features": F,
    "num_classes": C,
    "hidden_size": HIDDEN,
    "local_steps": 1,
}


def linked():
    settings = {"outside_neighbours": True, "is_linked": True}
    return client_graphs.make_splits(**settings)["train"]


@dataclasses.dataclass(frozen=True)
class Case:
    """What all clients together send and get in a round."""

    up: int
    down: int
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: Callable[[], Any] = lambda: client_graphs.make_splits()["train"]


CASES = {
    "local": Case(0, 0),
    "fed_avg": Case(K * MODEL, K * MODEL),
    "fed_per": Case(K * (MODEL - HEAD), K * (MODEL - HEAD)),
    "lg_fed_avg": Case(K * HEAD, K * HEAD),
    "scaffold": Case(2 * K * MODEL, 2 * K * MODEL),  # beside each model its control
    # theta_i, H_i and 2 m moments of each class; u_i
    "fed_gta": Case(K * (MODEL + FLOAT * (1 + 6 * C)), K * MODEL, {"num_moments": 3}),
    # theta_i and h_i; u_i
    "fed_pub": Case(K * (MODEL + FLOAT * C), K * MODEL, {"block_size": 3}),
    "ada_fgl": Case(  # of its first phase
        K * MODEL, K * MODEL, {"hidden_size": 4, "num_hops": 1}
    ),
    "fed_gcn": Case(K * MODEL, K * MODEL, data=linked),
    "gcfl_plus": Case(K * (MODEL + FLOAT), K * MODEL),  # the norm of a gradient
}


def exchanged(name, **settings):
    case = CASES[name]
    config = make_config(name, {"task": TASK} | case.values | settings)
    algorithm = get_method(name).factory(config)
    data = jax.eval_shape(algorithm.prepared, case.data())
    state = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    return bytes_per_round(algorithm.round, state, data, jax.random.key(1))


@pytest.mark.parametrize("name", CASES)
def test_a_round_exchanges_what_the_paper_says(name):
    assert exchanged(name) == (CASES[name].up, CASES[name].down)


@pytest.mark.parametrize(
    "name", ["ada_fgl", "fed_gcn", "fed_gta", "fed_pub", "gcfl_plus"]
)
def test_two_of_five_clients_exchange_two_fifths(name):
    counted = exchanged(name, participation=0.4)
    assert counted.times(5) == Bytes(CASES[name].up, CASES[name].down).times(2)


def exchange_of_a_run(name, values, data, num_rounds):
    method = get_method(name).factory(make_config(name, {"task": TASK} | values))
    splits = dict.fromkeys(("train", "validation", "test"), data)
    config = rounds.RunConfig(num_rounds, eval_every=num_rounds)
    return rounds.run(name, method, splits, config).communication


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_ada_fgls_clients_get_the_last_model_before_they_train_alone(participation):
    """All of them, as any may train in a later round, in which nothing crosses."""
    values = {"federated_rounds": 2, "num_hops": 1, "hidden_size": 4}
    data = client_graphs.make_splits()["train"]
    values |= {"participation": participation}
    found = exchange_of_a_run("ada_fgl", values, data, 5)
    sent = round(participation * K) * MODEL
    assert [found.until(number) for number in range(6)] == [
        *((0, 0), (sent, sent), (2 * sent, 2 * sent)),
        *[(2 * sent, 2 * sent + K * MODEL)] * 3,
    ]
    assert found.per_round(5) == (2 * sent // 5, (2 * sent + K * MODEL) // 5)


def of_fed_gcn(data, num_hops):
    """By loops: sums of own and outside nodes, scales of own ones, and both back."""
    own = known = 0
    for client in range(K):
        nodes = np.flatnonzero(data.is_real[client])
        known += len(nodes)
        own += sum(1 for node in nodes if data.is_own[client, node])
    assert 0 < own < known < data.is_own.size
    back = known if num_hops == 2 else own
    return FLOAT * (known * F + own), FLOAT * back * (F + 1)


def test_fed_gcns_exchange_before_the_rounds_counts_once():
    data = linked()
    before = of_fed_gcn(data, num_hops=2)
    found = exchange_of_a_run("fed_gcn", {}, data, 3)
    for number in range(4):
        later = number * K * MODEL
        assert found.until(number) == tuple(size + later for size in before)


@pytest.mark.parametrize("num_hops", [1, 2])
def test_fed_gcn_exchanges_sums_and_scales_of_rows_that_are_no_padding(num_hops):
    data = linked()
    config = make_config("fed_gcn", {"task": TASK, "num_hops": num_hops})
    method = get_method("fed_gcn").factory(config)
    found = bytes_per_round(lambda: method.exchange(data))
    assert found == of_fed_gcn(data, num_hops)
