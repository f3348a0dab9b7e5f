"""Training and scoring by codes, against loops over clients and codes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.fl_agcns.fl_random import TrialState
from fedjax_graph.algorithms.fl_agcns.search import (
    WORST,
    SearchConfig,
    Weights,
    codes_loss,
    gradient_round,
    init_weights,
    make_scorer,
    searched,
    touched_step,
    train_step,
)
from fedjax_graph.core import communication
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models.architecture import OPS
from fedjax_graph.tasks import subgraphs
from tests import client_graphs
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone
from tests.few_ops import FEW_OPS

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = SearchConfig(
    NUM_FEATURES,
    NUM_CLASSES,
    num_layers=2,
    width=4,
    ops=FEW_OPS,
    space="2022",
    fusion="leaves",
    server_optimizer=OptimizerConfig("adam", 0.02, weight_decay=0.01),
)
NET, OPTIMIZER = CONFIG.supernet, CONFIG.server_optimizer
CODES = np.array([[1, 2, 14, 5], [3, 2, 6, 4], [3, 0, 13, 5]])  # GIN thrice, APPNP, GAT
OTHERS = np.array([[2, 0, 2, 5], [4, 6, 18, 1], [1, 0, 0, 2]])  # GIN, APPNP twice, none
KEY = jax.random.key(0)  # of dropout; there is none but where a test says so
ERROR = 2e-8  # of an encrypted sum, see `encryption.CKKS`


@pytest.fixture(scope="module")
def model(draw_params):
    drawn = draw_params(NET.init)
    for stats in drawn["batch_stats"].values():
        stats["norm"]["var"] = np.abs(stats["norm"]["var"]) + 0.1
    return jax.tree.map(jnp.asarray, drawn)


@pytest.fixture(scope="module")
def outputs_of(quick_jit):
    """(model, own data, code) -> outputs [N, classes] of ONE client when scored."""
    return quick_jit(
        lambda model, own, code: NET.apply(model, subgraphs.as_graph(own), code)[0]
    )


def row(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def assert_trees_close(left, right, atol=1e-5):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    close = functools.partial(npt.assert_allclose, rtol=1e-4, atol=atol)
    jax.tree.map(close, left, right)


def average(trees, weights):
    return jax.tree.map(lambda *x: np.average(x, axis=0, weights=weights), *trees)


# --- Training ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_gradient(quick_jit):
    """(model, own data, code) -> ((loss, statistics), gradient) of client and code."""

    def loss(params, stats, own, code):
        graph = subgraphs.as_graph(own)
        outputs, stats = NET.apply(
            {"params": params, "batch_stats": stats}, graph, code, own.is_real
        )
        own_losses = -jax.nn.log_softmax(outputs)[jnp.arange(len(outputs)), own.labels]
        return jnp.sum(own_losses * own.is_trained) / jnp.sum(own.is_trained), stats

    take = quick_jit(jax.value_and_grad(loss, has_aux=True))
    return lambda model, *args: take(model["params"], model["batch_stats"], *args)


@pytest.fixture(scope="module")
def slow_gradient(one_gradient):
    """(model, data, codes) -> (gradient and statistics, loss), in Python loops."""

    def run(model, data, codes):
        found, losses = [], []
        for client in range(NUM_CLIENTS):
            own, stats, grads = row(data, client), model["batch_stats"], []
            for code in codes:
                (loss, stats), grad = one_gradient(
                    model | {"batch_stats": stats}, own, code
                )
                losses.append(loss)
                grads.append(grad)
            mean = average(grads, np.ones(len(codes)))
            found.append({"params": mean, "batch_stats": stats})
        weights = np.array(client_graphs.NUM_TRAINED)
        losses = np.reshape(losses, (NUM_CLIENTS, -1)).mean(axis=1)
        return average(found, weights), np.average(losses, weights=weights)

    return run


@pytest.fixture(scope="module")
def mean_gradient(quick_jit):
    return quick_jit(gradient_round(CONFIG, codes_loss(CONFIG)))


def test_a_gradient_is_the_mean_over_clients_and_codes(
    model, train, mean_gradient, slow_gradient
):
    merged, loss, metrics = mean_gradient(model, train, KEY, CODES)
    expected, expected_loss = slow_gradient(model, train, CODES)
    assert_trees_close(merged, expected)
    npt.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert metrics == {}
    own, new = (x["batch_stats"]["GINConv"]["norm"]["mean"] for x in (model, merged))
    moved = np.abs(new - own).max(axis=1) > 1e-3
    npt.assert_array_equal(moved, [True, False, True])  # of the three slots


def test_running_statistics_go_from_code_to_code(model, train, mean_gradient):
    """Codes of one network move them further than one code does."""
    stats = model["batch_stats"]["GINConv"]["norm"]
    moves = []
    for codes in (CODES[[1, 1, 1]], CODES[[1, 2, 2]]):
        merged, _, _ = mean_gradient(model, train, KEY, codes)
        new = merged["batch_stats"]["GINConv"]["norm"]
        moves.append(np.abs(new["mean"][0] - stats["mean"][0]).sum())
    assert moves[0] > 1.5 * moves[1] > 0


@pytest.mark.slow
def test_dropout_differs_by_key_and_client(model, train, quick_jit):
    """The loss of the first client's subgraph, by whoever has it."""
    of_first = train._replace(client_weights=jnp.eye(NUM_CLIENTS)[0])
    losses = {}
    for rate, seed, client in [(0.5, 1, 0), (0.5, 1, 1), (0.5, 2, 0), (0.0, 1, 0)]:
        config = dataclasses.replace(CONFIG, dropout=rate)
        run = quick_jit(gradient_round(config, codes_loss(config)))
        ids = jnp.roll(train.client_ids, client)
        data = of_first._replace(client_ids=ids)
        _, loss, _ = run(model, data, jax.random.key(seed), CODES)
        losses[rate, seed, client] = float(loss)
    assert len(set(losses.values())) == len(losses), losses


def test_a_gradient_needs_no_padding(model, train, one_gradient):
    padded = one_gradient(model, row(train, 2), CODES[0])
    own = alone(train, 2)
    assert len(own.labels) < train.labels.shape[1]
    assert_trees_close(one_gradient(model, own, CODES[0]), padded)


OF_GENE = {OPS.index(op) + 1: op for op in FEW_OPS}


def slow_marks(codes):
    """{name: [S] bool}, the sets of weights of some codes with two layers."""
    marks = {name: np.ones(1, bool) for name in ("input", "output")}
    marks |= {op: np.zeros(3, bool) for op in OF_GENE.values()}
    for _, one, two, _ in np.asarray(codes):
        if one:
            marks[OF_GENE[one]][0] = True
        if two:
            predecessor, op = divmod(two - 1, len(OPS))
            marks[OF_GENE[op + 1]][2 if one and predecessor else 1] = True
    return marks


def by_set(tree):
    """{(name of its weights, path): leaf [S, ...]} of params or running statistics."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = [[key.key for key in path if key.key != "layers"] for path, _ in flat]
    return {tuple(key): leaf for key, (_, leaf) in zip(keys, flat, strict=True)}


class Adam:
    """Adam with a decay that is added to the gradient, for one set of weights."""

    def __init__(self, x):
        self.x, self.count = np.asarray(x, np.float64), 0
        self.first = self.second = np.zeros_like(self.x)

    def step(self, gradient):
        gradient, self.count = (
            gradient + OPTIMIZER.weight_decay * self.x,
            self.count + 1,
        )
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        mean = self.first / (1 - 0.9**self.count)
        scale = np.sqrt(self.second / (1 - 0.999**self.count))
        self.x = self.x - OPTIMIZER.learning_rate * mean / (scale + 1e-8)


@pytest.mark.slow
def test_steps_move_the_weights_and_statistics_of_their_codes(
    model, train, slow_gradient, quick_jit
):
    step = quick_jit(train_step(CONFIG))
    init = jax.vmap(OPTIMIZER.build().init)
    weights = Weights(model, jax.tree.map(init, model["params"]))
    sets = by_set(model["params"])
    twins = {name: [Adam(x) for x in leaf] for name, leaf in sets.items()}
    for codes in (CODES, OTHERS, CODES):
        before, marks = weights, slow_marks(codes)
        merged, expected_loss = slow_gradient(before.model, train, codes)
        weights, loss, metrics = step(before, train, KEY, codes)
        npt.assert_allclose(loss, expected_loss, rtol=1e-5)
        assert metrics == {}
        for name, gradient in by_set(merged["params"]).items():
            for index in np.flatnonzero(marks[name[0]]):
                twins[name][index].step(gradient[index])
        for name, leaf in by_set(weights.model["params"]).items():
            expected = [twin.x for twin in twins[name]]
            npt.assert_allclose(leaf, expected, rtol=1e-4, atol=2e-5)
            kept, old = ~marks[name[0]], by_set(before.model["params"])[name]
            npt.assert_array_equal(leaf[kept], old[kept])
        old, new = (by_set(x["batch_stats"]) for x in (before.model, merged))
        for name, leaf in by_set(weights.model["batch_stats"]).items():
            is_new = marks[name[0]]
            npt.assert_allclose(leaf[is_new], new[name][is_new], rtol=1e-5, atol=1e-6)
            npt.assert_array_equal(leaf[~is_new], old[name][~is_new])
    assert step._cache_size() == 1


def test_first_weights_have_an_optimizer_for_each_set(quick_jit):
    model, opt_state = quick_jit(lambda key: init_weights(CONFIG, key))(
        jax.random.key(0)
    )
    counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(model["params"])]
    assert [count.shape for _, count in counts] == [(size,) for size in sizes]
    assert set(sizes) == {1, 3}


# --- Sets of weights -----------------------------------------------------------------


def test_a_set_that_is_not_touched_is_as_if_no_step_had_been(quick_jit):
    """Three sets of two leaves; the optimizer alone on each, whenever it is touched."""
    optimizer, rng = OPTIMIZER.build(), np.random.default_rng(0)

    def draw():
        shapes = {"kernel": (3, 2, 4), "scale": (3,)}
        return {name: jnp.float32(rng.normal(size=s)) for name, s in shapes.items()}

    params = draw()
    opt_state = jax.tree.map(jax.vmap(optimizer.init), params)
    alone = [
        {k: (x[i], optimizer.init(x[i])) for k, x in params.items()} for i in range(3)
    ]
    step = quick_jit(functools.partial(touched_step, optimizer))
    step_alone = quick_jit(optimizer.update)
    for touched in [(0,), (0, 2), (), (2,), (0, 1, 2), (2,)]:
        grads, is_touched = draw(), np.isin(np.arange(3), touched)
        marks = {"kernel": is_touched[:, None, None], "scale": is_touched}
        before, (params, opt_state) = (
            (params, opt_state),
            step(params, opt_state, grads, marks),
        )
        for index in range(3):
            ours = row((params, opt_state), index)
            if index not in touched:
                jax.tree.map(npt.assert_array_equal, ours, row(before, index))
            for name, (x, state) in alone[index].items():
                if index in touched:
                    update, state = step_alone(grads[name][index], state, x)
                    x = optax.apply_updates(x, update)
                    alone[index][name] = x, state
                assert_trees_close((ours[0][name], ours[1][name]), (x, state), 1e-6)


# --- Scores --------------------------------------------------------------------------


def slow_scores(outputs_of, model, data, codes, fitness):
    """Each client's scores of codes [K, C] and the federated ones [C], in loops."""
    values = np.zeros((NUM_CLIENTS, len(codes)))
    counts = np.asarray(data.is_scored).sum(axis=1)
    for client in range(NUM_CLIENTS):
        own = alone(data, client)
        chosen = np.flatnonzero(own.is_scored)
        for index, code in enumerate(codes):
            outputs = outputs_of(model, row(data, client), code)
            outputs = np.asarray(outputs, float)[chosen]
            right = outputs.argmax(axis=1) == own.labels[chosen]
            log_sum = np.log(np.exp(outputs).sum(axis=1))
            entropy = log_sum - outputs[np.arange(len(chosen)), own.labels[chosen]]
            if len(chosen):
                value = 100 * right.mean() if fitness == "accuracy" else -entropy.mean()
                values[client, index] = value
    return values, counts @ values / counts.sum()


@pytest.fixture(scope="module")
def scorer(quick_jit):
    """Changes of the config -> (model, data, codes) -> what `federated` returns."""

    @functools.cache
    def compiled(**changes):
        config = dataclasses.replace(CONFIG, **changes)

        def run(model, data, codes):
            return make_scorer(config, model, data).federated(codes)

        return quick_jit(run)

    return compiled


@pytest.mark.parametrize("fitness", ["loss", "accuracy"])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_federated_score_is_the_mean_by_scored_nodes(
    split, fitness, model, splits, scorer, outputs_of
):
    data = splits[split]
    federated, by_client, metrics = scorer(fitness=fitness)(model, data, CODES)
    expected = slow_scores(outputs_of, model, data, CODES, fitness)
    assert 0 in data.is_scored.sum(axis=1)
    npt.assert_allclose(by_client, expected[0], rtol=1e-4, atol=1e-5)
    npt.assert_allclose(federated, expected[1], rtol=1e-4, atol=1e-5)
    assert metrics == {}


def test_a_code_may_be_scored_by_its_own_statistics(
    model, splits, scorer, outputs_of, quick_jit
):
    """Those of the client's real nodes; the running ones are not read."""
    data = splits["validation"]
    outputs = quick_jit(
        lambda model, own, code: NET.apply(
            model, subgraphs.as_graph(own), code, own.is_real
        )[0]
    )
    expected = slow_scores(outputs, model, data, CODES, "loss")
    unread = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model["batch_stats"])
    unread = model | {"batch_stats": unread}
    federated, by_client, _ = scorer(scored_by="batch")(unread, data, CODES)
    npt.assert_allclose(by_client, expected[0], rtol=1e-4, atol=1e-5)
    npt.assert_allclose(federated, expected[1], rtol=1e-4, atol=1e-5)
    running = slow_scores(outputs_of, model, data, CODES, "loss")
    assert np.abs(running[1] - federated).max() > 0.01


def test_other_codes_and_weights_compile_nothing(model, train, scorer):
    run = scorer(fitness="loss")
    run(model, train, CODES)
    run(jax.tree.map(lambda x: x / 2, model), train, OTHERS)
    assert run._cache_size() == 1


def test_chunks_of_clients_and_padding_change_no_score(model, train, scorer):
    expected = scorer(fitness="loss")(model, train, CODES)
    assert_trees_close(scorer(clients_per_chunk=2)(model, train, CODES), expected)
    longer = client_graphs.padded(train)
    assert_trees_close(scorer(fitness="loss")(model, longer, CODES), expected)


def test_a_clients_own_scores_are_its_share_of_the_federated(
    model, train, scorer, quick_jit
):
    """Of codes that differ from client to client."""
    everything = np.concatenate([CODES, OTHERS])
    indices = np.array([[0, 1], [5, 2], [3, 3], [4, 0], [2, 5]])
    own = quick_jit(lambda codes: make_scorer(CONFIG, model, train).own(codes))(
        everything[indices]
    )
    _, by_client, _ = scorer(fitness="loss")(model, train, everything)
    for client, chosen in enumerate(indices):
        npt.assert_allclose(own[client], by_client[client, chosen], rtol=1e-5)


def diverged_in_one_layer(model):
    """NaN in the second layer's GAT, which the last code has."""
    broken = model["params"]["layers"]["GATConv"]
    broken = jax.tree.map(lambda x: x.at[1].set(jnp.nan), broken)
    layers = model["params"]["layers"] | {"GATConv": broken}
    return model | {"params": model["params"] | {"layers": layers}}


def test_what_is_not_finite_is_the_worst(model, train, scorer):
    """Of one code, or in a client's features."""
    diverged = diverged_in_one_layer(model)
    for fitness in ("loss", "accuracy"):
        run = scorer(fitness=fitness)
        federated, _, _ = run(diverged, train, CODES)
        npt.assert_array_equal(federated == WORST, [False, False, True])
        expected, _, _ = run(model, train, CODES)
        npt.assert_array_equal(federated[:2], expected[:2])
        features = train.features.at[0, 0].set(jnp.nan)
        federated, by_client, _ = run(model, train._replace(features=features), CODES)
        assert np.all(by_client[0] == WORST) and np.all(federated == WORST)


def test_what_crosses_is_counted(model, train):
    """Weights and gradients in training, codes and scores in scoring."""
    size = sum(x.size for x in jax.tree.leaves(model))
    run = gradient_round(CONFIG, codes_loss(CONFIG))
    found = communication.bytes_per_round(run, model, train, KEY, CODES)
    assert found == communication.Bytes(*(NUM_CLIENTS * size * 4,) * 2)
    found = communication.bytes_per_round(
        lambda *args: make_scorer(CONFIG, *args).federated(CODES), model, train
    )
    values = NUM_CLIENTS * len(CODES) * 4
    assert found == communication.Bytes(up=values, down=4 * values)  # 4 genes a code


# --- Encryption ----------------------------------------------------------------------


@pytest.fixture
def ckks():
    pytest.importorskip("tenseal", reason="TenSEAL, of the extra [ckks], is missing")
    if jax.device_count() > 1:
        pytest.skip("encryption runs on one device")
    return dataclasses.replace(CONFIG, encryption="ckks")


def test_an_encrypted_gradient_is_that_in_the_clear(ckks, model, train, quick_jit):
    """Of a loss whose gradients are the weights times a client's training nodes."""

    def loss(params, stats, own, key, codes):
        del key, codes
        squares = sum(jnp.sum(x**2) / 2 for x in jax.tree.leaves(params))
        return jnp.sum(own.is_trained) * squares, stats

    sent = NET.touched(model, CODES)
    runs = [gradient_round(config, loss) for config in (ckks, CONFIG)]
    (merged, value, metrics), (plain, plain_value, _) = (
        quick_jit(run)(model, train, KEY, CODES, sent=sent) for run in runs
    )
    counts = np.array(client_graphs.NUM_TRAINED)
    mean = counts @ counts / counts.sum()
    expected = jax.tree.map(
        lambda x, kept: mean * x * kept, model["params"], sent["params"]
    )
    for tree in (expected, plain["params"]):
        jax.tree.map(
            functools.partial(npt.assert_allclose, rtol=1e-6, atol=5 * ERROR),
            merged["params"],
            tree,
        )
    assert_trees_close(merged["batch_stats"], plain["batch_stats"], 5 * ERROR)
    assert value == plain_value
    assert 0 < metrics["encryption_error"] < ERROR
    assert metrics["encryption_bytes"] > 0


def test_encrypted_scores_are_those_in_the_clear(ckks, model, train, scorer):
    plain, plain_by_client, _ = scorer(fitness="loss")(model, train, CODES)
    federated, by_client, metrics = scorer(encryption="ckks")(model, train, CODES)
    npt.assert_allclose(federated, plain, atol=1e-6)
    npt.assert_allclose(by_client, plain_by_client, rtol=1e-6)
    assert 0 < metrics["encryption_error"] < ERROR


def test_what_is_not_finite_is_the_worst_under_encryption(ckks, model, train, scorer):
    diverged = diverged_in_one_layer(model)
    plain, _, _ = scorer(fitness="loss")(diverged, train, CODES)
    federated, by_client, _ = scorer(encryption="ckks")(diverged, train, CODES)
    assert np.all(by_client[:, -1] == WORST)
    npt.assert_array_equal(federated == WORST, [False, False, True])
    npt.assert_allclose(federated, plain, atol=1e-6)


# --- The best code as a model --------------------------------------------------------


@pytest.mark.parametrize("fitness", ["loss", "accuracy"])
def test_a_search_is_scored_by_its_best_code(
    fitness, model, splits, outputs_of, quick_jit
):
    config, data = dataclasses.replace(CONFIG, fitness=fitness), splits["test"]
    algorithm = searched(config, None, None)
    state = TrialState(Weights(model, None), CODES[1], jnp.int32(1), jnp.float32(0))
    scores = quick_jit(algorithm.evaluate)(state, data)
    by_fitness = {
        name: slow_scores(outputs_of, model, data, CODES[1:2], name)[1][0]
        for name in ("loss", "accuracy")
    }
    npt.assert_allclose(scores["accuracy"], by_fitness["accuracy"], rtol=1e-5)
    npt.assert_allclose(scores["cross_entropy"], -by_fitness["loss"], rtol=1e-5)
    name, monitored = {
        "loss": ("loss", -by_fitness["loss"]),
        "accuracy": ("error", 1 - by_fitness["accuracy"] / 100),
    }[fitness]
    assert algorithm.monitor == name
    npt.assert_allclose(scores[name], monitored, rtol=1e-5)
    outputs = quick_jit(algorithm.predict)(state, data)
    for client in range(NUM_CLIENTS):
        expected = jax.nn.softmax(outputs_of(model, row(data, client), CODES[1]))
        npt.assert_allclose(outputs[client], expected, rtol=1e-5, atol=1e-6)
