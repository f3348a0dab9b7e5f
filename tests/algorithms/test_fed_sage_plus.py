"""FedSage+'s phases, mended graphs and ledger; numbers: `test_openfgl_departures`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fed_sage_plus import FedSagePlusConfig, fed_sage_plus
from fedjax_graph.algorithms.local import local_training
from fedjax_graph.core.client_state import OPT_STATE, aggregated
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs import mending
from fedjax_graph.models.neighbour_generator import GeneratorConfig
from fedjax_graph.tasks import missing_neighbours as module
from fedjax_graph.tasks.nodes import NodeTask
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs
from tests.client_graphs import MOST_NODES, NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES

KEY, LATENT, SIZES, PLACES = jax.random.key(3), 3, (4, 5), 2
STEPS = 2
TASK = SubgraphTask(
    NUM_FEATURES,
    NUM_CLASSES,
    model="sage_relu",
    hidden_size=4,
    local_steps=STEPS,
    optimizer=OptimizerConfig("sgd", 0.1),
)
GENERATOR = GeneratorConfig(PLACES, 4, LATENT, SIZES)


@pytest.fixture(scope="module")
def train():
    return client_graphs.make_splits()["train"]


def assert_close(left, right):
    jax.tree.map(lambda x, y: npt.assert_allclose(x, y, 1e-4, 1e-6), left, right)


def find_some(weights):
    """Has generators find neighbours from the start: no ReLU makes them none."""
    weights["generator"]["degree"]["bias"] += 3.0


def sizes_of(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_generators_are_trained_first_and_then_classifiers(train, quick_jit):
    config = FedSagePlusConfig(TASK, generator=GENERATOR, generator_rounds=2)
    algorithm = fed_sage_plus(config)
    states, round_ = [algorithm.init(KEY, train)], quick_jit(algorithm.round)
    find_some(states[0].memories["models"]["params"])
    for key in jax.random.split(KEY, 4):
        states.append(round_(states[-1], train, key)[0])

    def changes(what):
        trees = [jax.tree.leaves(what(state)) for state in states]
        return [
            any(np.any(x != y) for x, y in zip(*pair, strict=True))
            for pair in zip(trees, trees[1:], strict=False)
        ]

    assert changes(lambda s: s.server.models) == [False, False, True, True]
    assert changes(lambda s: s.memories["models"]) == [True, True, False, False]
    assert changes(lambda s: s.memories["found"].features) == [
        False,
        True,
        False,
        False,
    ]
    assert changes(lambda s: s.memories["hidden"]) == [False] * 4
    hidden = np.asarray(states[0].memories["hidden"])
    candidates = np.asarray(train.is_scored)
    npt.assert_array_equal(hidden.sum(axis=1), candidates.sum(axis=1) // 2)
    counts = np.asarray(states[-1].memories["found"].counts)
    assert np.any(counts[hidden == 0]) and not np.any(counts[hidden > 0])
    outputs = algorithm.predict(states[-1], train)
    assert outputs.shape == (NUM_CLIENTS, MOST_NODES, NUM_CLASSES)


def test_without_generators_it_is_fed_avg_up_to_rounding(train, quick_jit):
    """The graphs have padding in place of neighbours."""
    ours = fed_sage_plus(FedSagePlusConfig(TASK, generator_rounds=0))
    assert [phase.first_round for phase in ours.phases] == [1]
    plain = fed_avg(FedAvgConfig(TASK))
    start = plain.init(KEY, train)
    state = ours.init(KEY, train)._replace(server=start)
    after = quick_jit(ours.round)(state, train, KEY)[0]
    expected = quick_jit(plain.round)(start, train, KEY)[0]
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x, y, atol=1e-6), after.server, expected
    )


@pytest.fixture(scope="module")
def found(train):
    """Up to two neighbours of each node of each client."""
    rng, nodes = np.random.default_rng(0), train.labels.shape
    counts = jnp.asarray(rng.integers(0, PLACES + 1, nodes), jnp.float32)
    features = rng.normal(size=(*nodes, PLACES, NUM_FEATURES)).astype(np.float32)
    return mending.Neighbours(counts, jnp.asarray(features))


def second_phase(ours, train, found):
    """The state before it, and the graphs mended by these neighbours."""
    state = ours.init(KEY, train)
    server = state.server._replace(num_rounds=jnp.int32(1))
    state = state._replace(server=server, memories=state.memories | {"found": found})
    return state, jax.vmap(mending.fill)(train.by_client(), found)


def test_classifiers_are_trained_and_scored_on_mended_graphs(train, found, quick_jit):
    """As FedAvg's on data that have these neighbours."""
    config = FedSagePlusConfig(TASK, generator=GENERATOR, generator_rounds=1)
    ours, plain = fed_sage_plus(config), fed_avg(FedAvgConfig(TASK))
    state, mended = second_phase(ours, train, found)
    after = quick_jit(ours.phases[-1].round)(state, train, KEY)[0]
    expected = quick_jit(plain.round)(state.server, mended, KEY)[0]
    assert_close(after.server, expected)
    pairs = (ours, after, train), (plain, expected, mended)
    assert_close(*(quick_jit(x.evaluate)(*args) for x, *args in pairs))
    outputs, wanted = (quick_jit(x.predict)(*args) for x, *args in pairs)
    assert_close(outputs, wanted[:, :MOST_NODES])


def test_clients_may_be_scored_after_their_own_steps(train, found, quick_jit):
    """As if each trained alone from the server's model, which is what it was."""
    config = FedSagePlusConfig(TASK, generator=GENERATOR, generator_rounds=1)
    ours = fed_sage_plus(dataclasses.replace(config, score="local"))
    alone = local_training(FederatedConfig(TASK))
    state, mended = second_phase(ours, train, found)
    for _ in range(2):
        start = alone.init(KEY, mended)
        common = aggregated(state.server.models)
        rows = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), common, start[0])
        start = start._replace(models=rows, num_rounds=state.server.num_rounds)
        state = quick_jit(ours.phases[-1].round)(state, train, KEY)[0]
        expected = quick_jit(alone.round)(start, mended, KEY)[0]
        kept = ours.kept(state)
        scores = quick_jit(ours.evaluate)(kept, train)
        assert_close(scores, quick_jit(alone.evaluate)(expected, mended))
    models = aggregated(state.server.models)
    on_average = state._replace(server=state.server._replace(models=models))
    of_mean = quick_jit(fed_sage_plus(config).evaluate)(on_average, train)
    assert of_mean["cross_entropy"] != scores["cross_entropy"]


def test_neighbours_are_found_on_the_graph_that_hides_some(train, quick_jit):
    """What a client hides has no say in what its other nodes lost."""
    config = FedSagePlusConfig(TASK, generator=GENERATOR)
    net = GENERATOR.build(NUM_FEATURES)
    find = quick_jit(functools.partial(module.find_neighbours, net))
    models = fed_sage_plus(config).init(KEY, train).memories["models"]
    weights, own = jax.tree.map(lambda x: x[0], (models["params"], train))
    find_some(weights)
    sender, receiver = own.senders[0], own.receivers[0]
    hidden = jnp.zeros(MOST_NODES).at[sender].set(1)
    one, two = (
        find(weights, own._replace(features=x), hidden, KEY)
        for x in (own.features, own.features.at[sender].add(5.0))
    )
    npt.assert_array_equal(one.features[receiver], two.features[receiver])
    npt.assert_array_equal(np.asarray(one.counts) > 0, np.asarray(hidden) == 0)


def test_the_encoder_of_a_generator_drops_units_in_training(
    train, quick_jit, monkeypatch
):
    """Of Eq. 4 the numbers of neighbours alone, which nothing else drops units of."""
    monkeypatch.setattr(mending, "distance", lambda *args: 0.0)
    config = FedSagePlusConfig(
        dataclasses.replace(TASK, dropout=0.5), generator=GENERATOR
    )
    net = GENERATOR.build(NUM_FEATURES, config.task.dropout)
    memories = fed_sage_plus(config).init(KEY, train).memories

    def no_classifier(*args):
        return 0.0, None

    loss = quick_jit(
        module.generator_loss(1.0, config.task.build(), no_classifier, net)
    )
    own, weights, hidden = jax.tree.map(
        lambda x: x[0], (train, memories["models"]["params"], memories["hidden"])
    )
    find_some(weights)
    losses = [
        float(loss(weights, {}, (own, hidden), jax.random.key(seed), train)[0])
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("rounds", [2, 0])
def test_moments_go_on_in_either_phase(train, quick_jit, rounds):
    """The second step of a momentum goes on with 0.9 of the first, if it is kept."""
    heavy = OptimizerConfig("sgd", 0.1, momentum=0.9, stateful=True)
    task = dataclasses.replace(TASK, local_steps=1, optimizer=heavy)
    config = FedSagePlusConfig(task, generator=GENERATOR, generator_rounds=rounds)
    algorithm = fed_sage_plus(config)

    def parts(state):
        return state.memories["models"] if rounds else state.server.models

    before, round_ = algorithm.init(KEY, train), quick_jit(algorithm.phases[0].round)
    one, _ = round_(before, train, KEY)
    two, _ = round_(one, train, KEY)
    forgets = parts(one) | {OPT_STATE: parts(before)[OPT_STATE]}
    if rounds:
        anew = one._replace(memories=one.memories | {"models": forgets})
    else:
        anew = one._replace(server=one.server._replace(models=forgets))
    alone, _ = round_(anew, train, KEY)
    params = [parts(x)["params"] for x in (before, one, alone, two)]
    expected = jax.tree.map(lambda a, b, c: c + 0.9 * (b - a), *params[:3])
    assert_close(params[3], expected)
    assert max(np.abs(x).max() for x in jax.tree.leaves(parts(one)[OPT_STATE])) > 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_nodes_to_hide_is_a_setting(train, share):
    config = FedSagePlusConfig(TASK, generator=GENERATOR, hidden_share=share)
    hidden = fed_sage_plus(config).init(KEY, train).memories["hidden"]
    npt.assert_array_equal(hidden, share * np.asarray(train.is_scored))


def test_the_server_steps_as_told(train, quick_jit):
    """By half of the way to what clients send."""
    algorithms = [
        fed_sage_plus(FedSagePlusConfig(TASK, generator_rounds=0, server_optimizer=x))
        for x in (None, OptimizerConfig("sgd", 0.5))
    ]
    starts = [algorithm.init(KEY, train) for algorithm in algorithms]
    whole, half = (
        quick_jit(algorithm.round)(start, train, KEY)[0].server.models["params"]
        for algorithm, start in zip(algorithms, starts, strict=True)
    )
    first = starts[0].server.models["params"]
    assert_close(half, jax.tree.map(lambda x, y: (x + y) / 2, first, whole))


def test_the_ledger_counts_generators_or_classifiers(train):
    """A generator and encodings to four others, and gradients back, in a step."""

    def cost(participation):
        values = {"generator_rounds": 3, "participation": participation}
        config = FedSagePlusConfig(TASK, generator=GENERATOR, **values)
        phases = fed_sage_plus(config).phases
        assert [phase.first_round for phase in phases] == [1, 4]
        return [bytes_per_round(x.round, state, train, KEY) for x in phases]

    algorithm = fed_sage_plus(FedSagePlusConfig(TASK, generator=GENERATOR))
    state = jax.eval_shape(algorithm.init, KEY, train)
    early, later = cost(1.0)
    assert later.up == later.down == 4 * NUM_CLIENTS * sizes_of(state.server.models)
    generator, encodings = 0, MOST_NODES * LATENT
    for wide, narrow in ((LATENT, 4), SIZES, (5, PLACES * NUM_FEATURES)):
        generator += (wide + 1) * narrow
    up = generator + encodings + 4 * (generator + encodings)  # own, others' gradients
    down = 4 * (generator + encodings) + generator + encodings  # others', own gradients
    assert early.up == 4 * STEPS * NUM_CLIENTS * up
    assert early.down == 4 * STEPS * NUM_CLIENTS * down
    for everybody, two in zip((early, later), cost(0.4), strict=True):
        assert two.times(NUM_CLIENTS) == everybody.times(2)


def test_a_task_without_graphs_is_refused():
    with pytest.raises(InputError, match="fed_sage_plus: task 'nodes' has no"):
        fed_sage_plus(FedSagePlusConfig(NodeTask(3, 2)))
