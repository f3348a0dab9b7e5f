"""Searches from scratch: their rounds with scores by hand, and trainings alone.

In most tests a training's scores are numbers that its code and key say; what remains is
evolution and halving.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.fl_agcns import code_training, from_scratch, trainings
from fedjax_graph.algorithms.fl_agcns import fl_agcns as module
from fedjax_graph.algorithms.fl_agcns.fl_agcns import FLAGCNSConfig
from fedjax_graph.core import communication
from fedjax_graph.core.algorithm import NO_LOSS
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.sparse_rows import SparseRows
from fedjax_graph.models.architecture import canonical, check, decode_static, is_gene
from fedjax_graph.models.packed import PackedNet
from fedjax_graph.tasks import subgraphs
from tests import client_graphs
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES
from tests.few_ops import FEW_OPS

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = FLAGCNSConfig(
    NUM_FEATURES,
    NUM_CLASSES,
    num_layers=3,
    width=4,
    ops=FEW_OPS,
    population_size=12,
    num_generations=3,
    first_epochs=3,
    num_epochs=5,
    rungs=(5, 3, 2),
    server_optimizer=OptimizerConfig("adam", 0.02, weight_decay=0.01),
)
PLAN = trainings.make_schedule(CONFIG)
ABLATIONS = ("controller_eo", "client_eo")
METHODS = {name: getattr(module, name) for name in ("fl_agcns", *ABLATIONS)}


def value_of(code, client_id):
    """What a client thinks of a code, 0 to 100."""
    return (code @ jnp.arange(1, len(code) + 1) ** 2 * (3 + client_id)) % 101


def scores_by_hand(config):
    """An epoch that adds to no weights, and scores by code, client and key."""
    del config

    def epoch(training, data, code, key):
        own = jax.vmap(value_of, (None, 0))(code, data.client_ids).astype(jnp.float32)
        own += jax.random.uniform(key)
        counts = jnp.sum(data.is_scored, axis=1)
        federated = counts @ own / jnp.sum(counts)
        training = training._replace(
            score=jnp.maximum(training.score, federated),
            client_scores=jnp.maximum(training.client_scores, own),
        )
        return training, (jnp.float32(1), {})

    return epoch


def run_by_hand(name, data, monkeypatch):
    """States and metrics of all rounds of a search."""
    monkeypatch.setattr(trainings, "make_epoch", scores_by_hand)
    algorithm = METHODS[name](CONFIG)
    state, metrics, states = algorithm.init(jax.random.key(0), data), [], []
    step = jax.jit(algorithm.round)
    for index in range(PLAN.num_rounds + 1):
        state, measured = step(state, data, jax.random.key(index))
        states.append(state)
        metrics.append(jax.device_get(measured))
    return jax.device_get(states), metrics


@pytest.mark.parametrize(
    "name",
    ["fl_agcns", *(pytest.param(x, marks=pytest.mark.slow) for x in ABLATIONS)],
)
def test_all_rounds_of_a_search(name, train, monkeypatch):
    states, metrics = run_by_hand(name, train, monkeypatch)
    for state in states[: PLAN.num_evolving]:  # the best code is never lost
        assert state.best.score == state.cache.scores[:, 0].max()
    cache, scores = states[-1].cache, states[-1].cache.scores
    is_code = cache.codes[:, 0] > 0
    codes = cache.codes[is_code]
    assert len(np.unique(codes, axis=0)) == len(codes)  # no network twice
    for code in codes:
        check(code)
        npt.assert_array_equal(canonical(code), code)
    counts = np.asarray(train.is_scored).sum(axis=1)
    own = jax.vmap(jax.vmap(value_of, (None, 0)), (0, None))(codes, train.client_ids)
    for found, wanted in (
        (cache.client_scores[is_code], own),
        (scores[is_code, 0], own @ counts / counts.sum()),
    ):
        assert np.all((found >= wanted - 1e-4) & (found <= wanted + 1.001))
    npt.assert_array_equal(scores[~is_code], -np.inf)

    # Rungs: the best by the rung before, and nobody else, are trained again.
    expected = np.zeros(scores.shape, bool)
    expected[:, 0] = is_code
    for judged, size, columns in (
        (scores[:, 0], 5, [1]),
        (scores[:, 1], 3, [2, 3]),
        (scores[:, 1:4].mean(axis=1), 2, [4, 5]),
    ):
        for column in columns:
            expected[np.argsort(-judged)[:size], column] = True
    npt.assert_array_equal(scores > -np.inf, expected)
    final = scores[:, 1:].mean(axis=1)
    npt.assert_array_equal(states[-1].code, cache.codes[np.argmax(final)])
    npt.assert_allclose(metrics[-1]["best_score"], final.max(), rtol=1e-5)
    epochs = expected[:, 0].sum() * 3 + expected[:, 1:].sum() * 5
    assert sum(m["code_epochs"] for m in metrics) == epochs
    assert epochs <= trainings.most_code_epochs(CONFIG)
    assert metrics[-1]["code_epochs"] == 0  # beyond the last round


def test_the_default_search_costs_a_fifth_of_the_papers():
    """First trainings of 60 and 6 x 20 codes, then 18, 6 twice and 4 twice more."""
    default = FLAGCNSConfig(NUM_FEATURES, NUM_CLASSES)
    num = trainings.most_code_epochs(default)
    assert num == (60 + 6 * 20) * 15 + (18 + 6 * 2 + 4 * 2) * 50 == 4600
    assert num < trainings.MOST_CODE_EPOCHS / 5


@pytest.fixture(scope="module")
def hand_made():
    """A cache where the first and last gene of a code say whose favourite it is.

    [1, ., 1] are the best by the federated score, [i + 1, ., 5] by client i's. Then
    there are some that nobody likes.
    """
    random, size = np.random.default_rng(0), CONFIG.population_size
    stages = [(1, 1), *((i + 1, 5) for i in range(NUM_CLIENTS)), (3, 3)]
    allowed = is_gene(CONFIG.num_layers, CONFIG.choices)[1:-1]
    genes = [np.flatnonzero(row)[1:] for row in allowed]  # none is 0
    middles = np.array(list(itertools.product(*genes)))
    codes = [
        np.insert(middles[index], (0, 3), ends)
        for ends in stages
        for index in random.permutation(len(middles))[:size]
    ]
    likes = np.kron(np.eye(len(stages))[:, :-1], np.ones((size, 1)))
    scores = likes + random.uniform(0, 0.5, likes.shape)
    order = random.permutation(len(codes))
    federated = np.full((len(codes), 6), -np.inf, np.float32)
    federated[:, 0] = scores[:, 0]
    cache = trainings.Cache(np.array(codes), federated, np.float32(scores[:, 1:]))
    return jax.tree.map(lambda x: jnp.asarray(x[order]), cache)


@pytest.mark.parametrize(
    ("name", "first", "decay"),
    [("fl_agcns", 0.5, 0.99), ("controller_eo", 0, 1), ("client_eo", 1, 1)],
)
def test_the_clients_share_of_a_generation(
    name, first, decay, train, hand_made, monkeypatch
):
    """Every generation is bred, with fewer and fewer codes of the clients."""
    shares = []

    def breed(config, cache, data, key, share):
        shares.append(float(share))
        return cache.codes[: config.num_children]

    def without_training(config):
        return lambda state, jobs, data, key: (state, {})

    monkeypatch.setattr(from_scratch, "breed", breed)
    monkeypatch.setattr(from_scratch, "make_training", without_training)
    algorithm = METHODS[name](CONFIG)
    begun = jnp.int32(PLAN.num_first)
    state = trainings.ScratchState(None, None, begun, None, hand_made)
    with jax.disable_jit():
        for _ in range(CONFIG.num_generations + 1):  # and the first rung
            state, _ = algorithm.round(state, train, jax.random.key(1))
    npt.assert_allclose(shares, first * decay ** np.arange(3), rtol=1e-6)


@pytest.fixture(scope="module")
def breed(quick_jit):
    config = dataclasses.replace(CONFIG, mutation_rate=0.0)
    return quick_jit(functools.partial(from_scratch.breed, config))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_generation_is_bred_from_the_best(share, hand_made, train, breed):
    """Without mutation a code has genes of its parents alone."""
    made = np.asarray(breed(hand_made, train, jax.random.key(0), share))
    size = CONFIG.num_children
    num_sent = round(share * size)
    sent, own = made[size - num_sent :], made[: size - num_sent]
    # Two codes come from clients 0 and 1, and none from 2, which scores no node.
    senders = {0: [], 2: [1, 2], 4: [1, 2, 4, 5]}[num_sent]
    npt.assert_array_equal(sent[:, 0], senders)
    npt.assert_array_equal(sent[:, -1], 5)
    # The controller's population has the same share of theirs.
    assert np.all(np.isin(own[:, -1], [1] if share == 0 else [1, 5]))
    assert share or np.all(own[:, 0] == 1)
    known = {tuple(code) for code in np.asarray(hand_made.codes)}
    assert any(tuple(code) not in known for code in made)


def test_a_client_without_a_node_to_score_by_sends_no_code(hand_made, train, breed):
    """Neither into a generation from scratch nor into a population."""
    silent = 1
    data = train._replace(is_scored=train.is_scored.at[silent].set(0))
    sent = [
        set(np.asarray(breed(hand_made, x, jax.random.key(0), 1.0))[:, 0])
        for x in (train, data)
    ]
    assert len(sent[0] - sent[1]) == 1
    codes = jnp.arange(NUM_CLIENTS)[:, None, None] * jnp.ones((6, 5), int)
    for x, is_there in ((train, True), (data, False)):
        merged = np.asarray(module.merge(codes[0] - 1, codes, x, 1.0))
        assert np.any(merged == x.client_ids[silent]) == is_there


def test_children_of_clients_cross_at_a_rate_of_their_own(hand_made, train, quick_jit):
    """That of the controller's children is zero, and no gene mutates."""
    rates = {"crossover_rate": 0.0, "client_crossover_rate": 1.0, "mutation_rate": 0.0}
    config = dataclasses.replace(CONFIG, **rates)
    breed = quick_jit(functools.partial(from_scratch.breed, config))
    known = {tuple(code) for code in np.asarray(hand_made.codes)}
    own, sent = (
        np.asarray(breed(hand_made, train, jax.random.key(0), x)) for x in (0.0, 1.0)
    )
    assert all(tuple(code) in known for code in own)
    assert any(tuple(code) not in known for code in sent)


@pytest.mark.slow
def test_a_resumed_search_ends_as_if_never_stopped(cut_and_whole, monkeypatch):
    monkeypatch.setattr(trainings, "make_epoch", scores_by_hand)
    config = dataclasses.replace(CONFIG, num_layers=2, population_size=6)
    algorithm = module.fl_agcns(config)
    cut, whole = cut_and_whole(algorithm, 4, 7)
    jax.tree.map(npt.assert_array_equal, cut.best_state, whole.best_state)


def test_a_search_reads_sparse_features_as_dense_ones(train, quick_jit):
    """The first round trains the same codes to the same weights and scores."""
    config = dataclasses.replace(CONFIG, num_layers=1, fitness="loss")
    algorithm = module.fl_agcns(config)
    begin, step = quick_jit(algorithm.init), quick_jit(algorithm.round)

    def first_round(data):
        key = jax.random.key(0)
        return step(begin(key, data), data, key)[0]

    dense = first_round(train)
    rows = client_graphs.make_splits(is_sparse=True)["train"]
    assert isinstance(rows.features, SparseRows)
    sparse = first_round(rows)
    assert np.sum(dense.cache.scores > -np.inf) > 1
    close = functools.partial(npt.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, sparse.cache, dense.cache)
    jax.tree.map(close, sparse.weights, dense.weights)


@pytest.mark.parametrize("name", METHODS)
def test_what_crosses_is_counted(name, train):
    """A model down and a gradient up each epoch, a score of each client, and codes.

    Clients send up to a population to breed from, and up to a generation of children.
    """
    algorithm = METHODS[name](CONFIG)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), train)
    found = communication.bytes_per_round(
        algorithm.round, state, train, jax.random.key(0)
    )
    size = 4 * sum(x.size for x in jax.tree.leaves(state.weights.model))
    epochs, num_codes = PLAN.num_steps * PLAN.chunk, CONFIG.num_children
    sent = found.up - epochs * NUM_CLIENTS * (size + 4)
    num_sent = 0 if name == "controller_eo" else CONFIG.population_size + num_codes
    assert sent == num_sent * 5 * 4
    codes = NUM_CLIENTS * num_codes * 5 * 4
    assert found.down == epochs * NUM_CLIENTS * size + codes


# --- Trainings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fitness", ["loss", pytest.param("accuracy", marks=pytest.mark.slow)]
)
def test_epochs_are_federated_steps_of_the_network_alone(fitness, train, quick_jit):
    config = dataclasses.replace(CONFIG, num_layers=1, fitness=fitness)
    code, net = jnp.array([3, 2, 5]), PackedNet(config.supernet)
    assert bool(decode_static(code).is_present.all())
    begun = quick_jit(net.init)(jax.random.key(0), code)
    optimizer = config.server_optimizer.build()
    training = code_training.Training(
        begun,
        optimizer.init(begun["params"]),
        begun,
        jnp.float32(-jnp.inf),
        jnp.full(NUM_CLIENTS, -jnp.inf),
    )
    epoch = quick_jit(code_training.make_epoch(config))

    def loss(params, stats, own):
        model, graph = {"params": params, "batch_stats": stats}, subgraphs.as_graph(own)
        outputs, stats = net.apply(model, graph, code, own.is_real)
        return subgraphs.cross_entropy(outputs, own.labels, own.is_trained), stats

    @quick_jit
    def score(model, own):
        outputs, _ = net.apply(model, subgraphs.as_graph(own), code)
        right, entropy = subgraphs.scores(outputs, own)
        return 100 * right if fitness == "accuracy" else -entropy

    gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))
    each = [jax.tree.map(lambda x, i=i: x[i], train) for i in range(NUM_CLIENTS)]
    shares = np.asarray(train.client_weights) / np.sum(train.client_weights)
    counts = np.asarray(train.is_scored).sum(axis=1)
    mean = functools.partial(np.tensordot, axes=1)
    model, opt_state, values = begun, optimizer.init(begun["params"]), []
    for number in range(2):
        training, (value, _) = epoch(training, train, code, jax.random.key(number))
        found = [gradient(model["params"], model["batch_stats"], own) for own in each]
        npt.assert_allclose(
            value, mean(shares, np.array([x[0][0] for x in found])), rtol=1e-4
        )
        grads, stats = (
            jax.tree.map(lambda *x: jnp.asarray(mean(shares, np.stack(x))), *parts)
            for parts in ([x[1] for x in found], [x[0][1] for x in found])
        )
        updates, opt_state = optimizer.update(grads, opt_state, model["params"])
        params = optax.apply_updates(model["params"], updates)
        model = {"params": params, "batch_stats": stats}
        values.append([float(score(model, own)) for own in each])
    close = functools.partial(npt.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, training.model, model)
    close(training.client_scores, np.max(values, axis=0))
    close(training.score, np.max(values @ counts / counts.sum()))


def test_an_epoch_drops_units(train, quick_jit):
    config = dataclasses.replace(CONFIG, num_layers=1, dropout=0.5)
    code, key = jnp.array([3, 2, 5]), jax.random.key(0)
    begun = quick_jit(code_training.make_begin(config))(train, code, key)
    epoch = quick_jit(code_training.make_epoch(config))
    losses = [
        epoch(begun, train, code, jax.random.key(seed))[1][0] for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_a_training_keeps_its_best_epoch(train, monkeypatch):
    """Epochs that add 1 to the only weight, and reach scores by hand.

    That of the second is not known, and in the third nobody takes part.
    """
    federated, losses = iter([2.0, np.nan, 5, 5]), iter([0, 0, NO_LOSS, 0])
    own = iter(np.array([[1.0, 4], [9, 2], [3, 3], [2, 8]]))

    def gradient_round(config, loss):
        del config, loss
        gradient = {"params": jnp.float32(-1), "batch_stats": {}}
        return lambda *args: (gradient, jnp.float32(next(losses)), {})

    def map_clients(function, clients_per_chunk):
        del function, clients_per_chunk
        return lambda data, shared: jnp.asarray(next(own))

    def federated_scores(config, values, data):
        del config, values, data
        return (jnp.float32(next(federated)),), {}

    for fake in (gradient_round, federated_scores):
        monkeypatch.setattr(code_training, fake.__name__, fake)
    mapped = types.SimpleNamespace(map_clients=map_clients)
    monkeypatch.setattr(code_training, "clients", mapped)
    config = dataclasses.replace(CONFIG, server_optimizer=OptimizerConfig("sgd", 1.0))
    epoch, never = code_training.make_epoch(config), jnp.float32(-jnp.inf)
    model = {"params": jnp.float32(0), "batch_stats": {}}
    opt_state = config.server_optimizer.build().init(model["params"])
    training = code_training.Training(model, opt_state, model, never, never)
    kept = []
    for _ in range(4):
        training, _ = epoch(training, train, None, None)
        kept.append((training.best_model["params"], training.score))
    npt.assert_array_equal(kept, [(1, 2), (1, 2), (2, 5), (2, 5)])
    assert training.model["params"] == 3
    npt.assert_array_equal(training.client_scores, [9, 8])


@pytest.mark.parametrize("is_ahead", [True, False])
def test_the_leader_has_the_weights_of_its_best_epoch(is_ahead):
    def model(value):
        return {"params": jnp.float32(value), "batch_stats": {}}

    code = jnp.array([2, 1, 0, 0, 4])
    job = jnp.zeros(1, jnp.int32)
    jobs = trainings.Jobs(code[None], job + 1, job, job == 0, jnp.int32(1))
    never = jnp.float32(-jnp.inf)
    cache = trainings.Cache(
        jnp.zeros((2, 5), jnp.int32), jnp.full((2, 6), never), jnp.full((2, 3), never)
    )
    leader = trainings.Best(jnp.int32(0), jnp.int32(0), jnp.float32(7))
    weights = trainings.Weights(model(1), None)
    state = trainings.ScratchState(weights, 0 * code, jnp.int32(0), leader, cache)
    score, own = jnp.float32(8 if is_ahead else 7), jnp.arange(3.0)
    training = code_training.Training(model(2), None, model(3), score, own)
    after = trainings.record(state, jobs, 0, training)
    assert after.weights.model["params"] == (3 if is_ahead else 1)
    npt.assert_array_equal(after.code, code * is_ahead)
    assert after.best.row == is_ahead and after.best.score == 7 + is_ahead
    npt.assert_array_equal(after.cache.codes, [0 * code, code])
    assert after.cache.scores[1, 0] == score
    npt.assert_array_equal(after.cache.client_scores[1], own)


# --- Bad input -----------------------------------------------------------------------


def test_a_search_is_no_dearer_than_the_papers():
    config = dataclasses.replace(CONFIG, first_epochs=100, num_generations=100)
    with pytest.raises(InputError, match="num_generations=100: .* at most 25000"):
        module.fl_agcns(config)


@pytest.mark.parametrize(
    ("fitness_from", "name", "value"),
    [
        ("scratch", "num_steps", 7),
        ("scratch", "codes_per_step", 7),
        ("scratch", "num_warm_up", 0),
        ("scratch", "warm_up_codes", "fair"),
        ("scratch", "scored_by", "batch"),
        ("shared", "num_generations", 7),
        ("shared", "first_epochs", 7),
        ("shared", "num_epochs", 7),
        ("shared", "rungs", (3, 2, 1)),
    ],
)
def test_a_field_that_does_nothing_is_refused(fitness_from, name, value):
    other = {"scratch": "shared", "shared": "scratch"}[fitness_from]
    values = {"fitness_from": fitness_from, name: value}
    with pytest.raises(InputError) as refusal:
        FLAGCNSConfig(NUM_FEATURES, NUM_CLASSES, **values)
    assert str(refusal.value) == f"{name}={value}: of fitness_from={other}"
    values["fitness_from"] = other
    if name == "warm_up_codes":  # of a warm-up, which the paper's space has none of
        with pytest.raises(InputError, match="fair: there is no warm-up; give num_war"):
            FLAGCNSConfig(NUM_FEATURES, NUM_CLASSES, **values)
        values["num_warm_up"] = 2
    assert getattr(FLAGCNSConfig(NUM_FEATURES, NUM_CLASSES, **values), name) == value


def test_the_first_code_has_the_stages_that_all_have(train):
    algorithm = module.fl_agcns(dataclasses.replace(CONFIG, stages=(3, 5)))
    for seed in range(3):
        code = algorithm.init(jax.random.key(seed), train).code
        assert (code[0], code[-1]) == (3, 5)


def test_rungs_that_grow():
    with pytest.raises(InputError, match=r"rungs=\(2, 3, 1\): expected three counts"):
        dataclasses.replace(CONFIG, rungs=(2, 3, 1))
