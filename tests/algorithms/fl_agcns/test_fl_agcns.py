"""Generations of the search against a slow oracle, with scores that are exact.

Most tests put integers in place of weights and scores: what remains is evolution,
compiled in a second, with an answer that is right or wrong. One generation is of the
SuperNet itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fl_agcns import fl_agcns as module
from fedjax_graph.algorithms.fl_agcns.fl_agcns import FLAGCNSConfig
from fedjax_graph.algorithms.fl_agcns.search import (
    Scorer,
    Weights,
    make_scorer,
    train_step,
)
from fedjax_graph.core import communication
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models.architecture import check
from tests import client_graphs
from tests.algorithms.fl_agcns.slow_generation import (
    canonical_2022,
    random_codes,
    rows,
    slow_generation,
    slow_quotas,
)
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES
from tests.few_ops import FEW_OPS

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = FLAGCNSConfig(
    NUM_FEATURES,
    NUM_CLASSES,
    num_layers=3,
    width=4,
    ops=FEW_OPS,
    population_size=10,
    codes_per_step=4,
    num_steps=3,
    num_warm_up=2,
    client_share_decay=0.8,
    space="2022",
    fusion="leaves",
    fitness_from="shared",
)
# Clients send codes by their training nodes, those with none to score by send none.
NUM_SENDING = np.where(client_graphs.NUM_VALIDATED, client_graphs.NUM_TRAINED, 0)
METHODS = {
    name: getattr(module, name) for name in ("fl_agcns", "controller_eo", "client_eo")
}
methods = pytest.mark.parametrize("name", METHODS)


def indices(count):
    return jnp.arange(1, count + 1)


# --- Integers for weights and scores -------------------------------------------------


def count_codes(config):
    """A step whose weights are a number that depends on all codes and their order."""
    del config

    def step(weights, data, key, codes):
        del data, key
        each = codes @ indices(codes.shape[1])
        model = (7 * weights.model + each @ indices(len(each))) % 1009
        return Weights(model, None), jnp.float32(model), {}

    return step


def no_step(config):
    del config
    return lambda weights, data, key, codes: (weights, jnp.float32(1), {})


def whole_scores(config, model, data):
    """Scores 0 to 100 of a code's network by each client, which the weights shift."""
    del config

    def score(client_id, codes):
        networks = jax.vmap(canonical_2022)(codes)
        each = networks @ indices(codes.shape[1]) ** 2
        return (each * (3 + client_id) + 5 * model).astype(jnp.float32) % 101

    def federated(codes):
        values = jax.vmap(score, (0, None))(data.client_ids, codes)
        counts = jnp.sum(data.is_scored, axis=1)
        return counts @ values / jnp.sum(counts), values, {}

    return Scorer(federated, lambda codes: jax.vmap(score)(data.client_ids, codes))


@pytest.fixture
def whole_numbers(monkeypatch):
    monkeypatch.setattr(module, "train_step", count_codes)
    monkeypatch.setattr(module, "make_scorer", whole_scores)
    first = Weights(jnp.int32(1), None)
    monkeypatch.setattr(module, "init_weights", lambda config, key: first)


@pytest.fixture
def frozen(whole_numbers, monkeypatch):
    monkeypatch.setattr(module, "train_step", no_step)


def assert_generation(found, expected, rtol):
    (state, metrics), (_, populations, code, expected_metrics) = found, expected
    npt.assert_array_equal(state.populations.controller, populations.controller)
    npt.assert_array_equal(state.populations.clients, populations.clients)
    npt.assert_array_equal(state.code, code)
    assert metrics.keys() == expected_metrics.keys()
    for key, value in expected_metrics.items():
        npt.assert_allclose(metrics[key], value, rtol=rtol, atol=1e-6, err_msg=key)


# --- Generations ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "warm_up_codes", ["population", pytest.param("fair", marks=pytest.mark.slow)]
)
@methods
def test_generations_are_those_of_the_oracle(
    name, warm_up_codes, whole_numbers, train, quick_jit
):
    config = dataclasses.replace(CONFIG, warm_up_codes=warm_up_codes)
    if warm_up_codes == "fair" and name != "fl_agcns":
        pytest.skip("the warm-up is the same")

    @quick_jit
    def step(weights, key, codes):
        return count_codes(CONFIG)(weights, train, key, codes)[:2]

    @quick_jit
    def score(weights, everybody, own):
        scorer = whole_scores(CONFIG, weights.model, train)
        return *scorer.federated(everybody)[:2], scorer.own(own)

    algorithm = METHODS[name](config)
    state = quick_jit(algorithm.init)(jax.random.key(0), train)
    round_ = quick_jit(algorithm.round)
    for number in range(6):
        key = jax.random.key(10 + number)
        before, (state, metrics) = state, round_(state, train, key)
        expected = slow_generation(name, config, step, score, before, train, key)
        assert_generation((state, metrics), expected, 1e-6)
        assert state.weights.model == expected[0].model
        assert state.num_rounds == number + 1
    assert round_._cache_size() == 1


@pytest.mark.slow
def test_a_generation_of_the_supernet(train, quick_jit):
    """After the warm-up, with the fitness of the network's losses."""
    config = dataclasses.replace(
        CONFIG, num_layers=2, population_size=6, codes_per_step=2, num_steps=2,
        server_optimizer=OptimizerConfig("adam", 0.02, weight_decay=0.01),
    )  # fmt: skip
    algorithm = module.fl_agcns(config)
    state = quick_jit(algorithm.init)(jax.random.key(1), train)
    key = jax.random.key(2)
    draw = jax.vmap(lambda key: random_codes(key, 6, 2, choices=CONFIG.choices))
    own = draw(jax.random.split(key, NUM_CLIENTS))
    populations = state.populations._replace(clients=own)
    state = state._replace(
        num_rounds=jnp.int32(config.num_warm_up), populations=populations
    )
    train_codes = quick_jit(train_step(config))

    @quick_jit
    def score(weights, everybody, own):
        scorer = make_scorer(config, weights.model, train)
        return *scorer.federated(everybody)[:2], scorer.own(own)

    def step(weights, key, codes):
        return train_codes(weights, train, key, codes)[:2]

    found = quick_jit(algorithm.round)(state, train, key)
    expected = slow_generation("fl_agcns", config, step, score, state, train, key)
    assert_generation(found, expected, 1e-4)
    jax.tree.map(
        functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-5),
        found[0].weights,
        expected[0],
    )


def test_the_population_stays_in_the_warm_up(whole_numbers, train, quick_jit):
    algorithm = module.fl_agcns(CONFIG)
    first = state = algorithm.init(jax.random.key(0), train)
    round_ = quick_jit(algorithm.round)
    best = []
    for number in range(CONFIG.num_warm_up):
        state, metrics = round_(state, train, jax.random.key(number))
        jax.tree.map(npt.assert_array_equal, state.populations, first.populations)
        scores, _, _ = whole_scores(CONFIG, state.weights.model, train).federated(
            first.populations.controller
        )
        npt.assert_array_equal(
            state.code, first.populations.controller[jnp.argmax(scores)]
        )
        assert metrics["best_score"] == scores.max()
        best.append(float(scores.max()))
    assert len(set(best)) > 1  # the weights have moved
    state, _ = round_(state, train, jax.random.key(9))
    assert rows(state.populations.controller) != rows(first.populations.controller)


def test_first_populations_are_one(whole_numbers, train):
    state = module.fl_agcns(CONFIG).init(jax.random.key(0), train)
    for own in state.populations.clients:
        npt.assert_array_equal(own, state.populations.controller)
    assert len(set(rows(state.populations.controller))) > CONFIG.population_size / 2
    for code in rows(state.populations.controller):
        check(code, CONFIG.num_layers)


def evolving(algorithm, train, seed=0):
    """A first state after the warm-up, whose clients have other codes."""
    state = jax.jit(algorithm.init)(jax.random.key(seed), train)
    drawn = random_codes(
        jax.random.key(100 + seed),
        NUM_CLIENTS * CONFIG.population_size,
        CONFIG.num_layers,
        choices=CONFIG.choices,
    )
    populations = state.populations._replace(
        clients=drawn.reshape(state.populations.clients.shape)
    )
    return state._replace(
        num_rounds=jnp.int32(CONFIG.num_warm_up), populations=populations
    )


def test_the_controller_alone_does_without_clients_codes(
    whole_numbers, train, quick_jit
):
    algorithm = module.controller_eo(CONFIG)
    round_, key = quick_jit(algorithm.round), jax.random.key(3)
    states = [evolving(algorithm, train)]
    populations = states[0].populations
    states.append(
        states[0]._replace(
            populations=populations._replace(clients=0 * populations.clients)
        )
    )
    (one, metrics), (other, same) = (round_(state, train, key) for state in states)
    npt.assert_array_equal(one.populations.controller, other.populations.controller)
    assert metrics == same
    npt.assert_array_equal(one.populations.clients, populations.clients)
    scorer = whole_scores(CONFIG, one.weights.model, train)
    scores, _, _ = scorer.federated(one.populations.controller)
    assert (np.diff(scores) <= 0).all()
    assert scores[0] == metrics["best_score"]


def test_the_clients_alone_fill_the_population_with_their_best(
    whole_numbers, train, quick_jit
):
    algorithm = module.client_eo(CONFIG)
    state, key = evolving(algorithm, train), jax.random.key(4)
    before, (state, _) = state, quick_jit(algorithm.round)(state, train, key)
    counts = slow_quotas(CONFIG.population_size, NUM_SENDING)
    tops = [
        rows(own[:n]) for own, n in zip(state.populations.clients, counts, strict=True)
    ]
    assert rows(state.populations.controller) == sum(tops, [])
    scorer = whole_scores(CONFIG, state.weights.model, train)
    own_scores = np.asarray(scorer.own(state.populations.clients))
    assert (np.diff(own_scores, axis=1)[:, :3] <= 0).all()
    old_scores = np.asarray(scorer.own(before.populations.clients))
    assert (own_scores[:, 0] >= old_scores.max(axis=1)).all()


def test_the_clients_share_decays(whole_numbers, train, quick_jit):
    """The controller's best keep the other indices."""
    algorithm, key = module.fl_agcns(CONFIG), jax.random.key(5)
    round_, start = quick_jit(algorithm.round), evolving(algorithm, train)
    alone, _ = quick_jit(module.controller_eo(CONFIG).round)(start, train, key)
    theirs = rows(alone.populations.controller)
    for generation, num_sent in ((2, 3), (5, 2), (9, 1), (20, 0)):  # of 5 x 0.8^g
        state = start._replace(num_rounds=jnp.int32(generation))
        populations = round_(state, train, key)[0].populations
        counts = slow_quotas(num_sent, NUM_SENDING)
        tops = [
            rows(own[:n]) for own, n in zip(populations.clients, counts, strict=True)
        ]
        assert rows(populations.controller) == theirs[: 10 - num_sent] + sum(tops, [])


# --- What holds of any generation ----------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "fl_agcns",
        *(pytest.param(x, marks=pytest.mark.slow) for x in METHODS if x != "fl_agcns"),
    ],
)
def test_codes_are_valid_and_the_best_survive(name, frozen, train, quick_jit):
    """Weights that stay as they are; 3 runs of 15 generations side by side."""
    algorithm = METHODS[name](CONFIG)

    @quick_jit
    @jax.vmap
    def run(seed):
        def body(state, key):
            state, metrics = algorithm.round(state, train, key)
            scorer = whole_scores(CONFIG, state.weights.model, train)
            best = jnp.max(scorer.own(state.populations.clients), axis=1)
            return state, (state.populations, state.code, metrics["best_score"], best)

        key = jax.random.key(seed)
        state = algorithm.init(key, train)
        return jax.lax.scan(body, state, jax.random.split(key, 15))

    _, (populations, codes, best_scores, clients_best) = run(jnp.arange(3))
    everything = [codes, populations.controller, populations.clients]
    for code in set().union(*(rows(x.reshape(-1, 5)) for x in everything)):
        check(code, CONFIG.num_layers)
    scorer = whole_scores(CONFIG, jnp.int32(1), train)
    scores, _, _ = scorer.federated(codes.reshape(-1, 5))
    npt.assert_allclose(scores.reshape(best_scores.shape), best_scores, rtol=1e-6)
    if name != "client_eo":  # whose clients do not know the federated score
        assert (np.diff(best_scores, axis=1) >= 0).all()
        assert (best_scores[:, -1] > best_scores[:, 0]).any()
    rises = np.diff(clients_best, axis=1)
    assert (rises >= 0).all()
    assert rises.any() == (name != "controller_eo")


def test_what_encryption_costs_is_added_up(
    whole_numbers, train, quick_jit, monkeypatch
):
    """3 steps of 4 codes and one scoring, of 10 codes or with 5 children."""
    names = ("encryption_bytes", "encryption_seconds", "encryption_error")

    def cost(codes):
        return dict.fromkeys(names, jnp.float32(len(codes)))

    def step(config):
        plain = count_codes(config)
        return lambda *args: (*plain(*args)[:2], cost(args[-1]))

    def scorer(*args):
        plain = whole_scores(*args)
        return plain._replace(
            federated=lambda codes: (*plain.federated(codes)[:2], cost(codes))
        )

    monkeypatch.setattr(module, "train_step", step)
    monkeypatch.setattr(module, "make_scorer", scorer)
    algorithm = module.fl_agcns(CONFIG)
    state, round_ = algorithm.init(jax.random.key(0), train), quick_jit(algorithm.round)
    for generation, num_scored in ((0, 10), (CONFIG.num_warm_up, 15)):
        state = state._replace(num_rounds=jnp.int32(generation))
        state, metrics = round_(state, train, jax.random.key(1))
        found = [float(metrics[name]) for name in names]
        assert found == [12 + num_scored, 12 + num_scored, num_scored]


@pytest.mark.parametrize(
    ("name", "num_codes"), [("fl_agcns", 10), ("controller_eo", 0)]
)
def test_clients_send_as_many_codes_as_a_population_has(
    name, num_codes, whole_numbers, train
):
    algorithm = METHODS[name](CONFIG)
    state = algorithm.init(jax.random.key(0), train)
    found = communication.bytes_per_round(
        algorithm.round, state, train, jax.random.key(0)
    )
    assert found == communication.Bytes(up=num_codes * 5 * 4)


# --- Runs ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_search_ends_as_if_never_stopped(cut_and_whole, monkeypatch):
    """Cut between the warm-up and the first evolution, and once more.

    With the SuperNet's weights and optimizers, which are moved by numbers.
    """

    def step(config):
        del config

        def move(weights, *args):
            number = count_codes(None)(Weights(1, None), *args)[1]
            moved = jax.tree.map(lambda x: x + (0.1 * number).astype(x.dtype), weights)
            return moved, number, {}

        return move

    def scorer(config, model, data):
        return whole_scores(config, jnp.sum(model["params"]["output"]["bias"]), data)

    monkeypatch.setattr(module, "train_step", step)
    monkeypatch.setattr(module, "make_scorer", scorer)
    config = dataclasses.replace(CONFIG, num_layers=2, population_size=4)
    algorithm = module.fl_agcns(config)
    cut, whole = cut_and_whole(algorithm, 2, 4, 5)
    jax.tree.map(npt.assert_array_equal, cut.best_state, whole.best_state)
    assert isinstance(whole.best_state, module.EvolutionState)
    assert list(whole.best_state.num_rounds) == [5]
    assert cut.test == whole.test
