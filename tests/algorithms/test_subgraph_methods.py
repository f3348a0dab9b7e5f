"""What OpenFGL's numbers do not show of methods made for subgraphs, by algebra."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import (
    ada_fgl,
    fed_gta,
    gcfl_plus,
    get_method,
    make_config,
)
from fedjax_graph.core import client_state, clients
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import Misbehaviour, attackers
from fedjax_graph.models import adaptive_propagation
from fedjax_graph.models.adaptive_propagation import homophily
from fedjax_graph.models.message_passing import Structure
from fedjax_graph.tasks.subgraphs import query_halves, random_blocks
from tests import client_graphs
from tests.algorithms import quadratic
from tests.algorithms.oracle import draw_cohort
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone

RATE = 0.1
TASK = {
    "kind": "subgraphs",
    "num_features": NUM_FEATURES,
    "num_classes": NUM_CLASSES,
    "hidden_size": 4,
    "optimizer": {"name": "sgd", "learning_rate": RATE},
}

ADA_FGL = {  # one program for several tests
    "federated_rounds": 1,
    "num_hops": 1,
    "hidden_size": 4,
    "dropout": 0.0,
    "personal_optimizer": {"name": "sgd", "learning_rate": 0.2, "momentum": 0.9},
}


@pytest.fixture(scope="module")
def data():
    return client_graphs.make_splits()["train"]


@pytest.fixture(scope="module")
def trained(data, quick_jit):
    """(method, its config, number of steps) -> its params after one round."""

    def run(name, local_steps=1, **values):
        task = TASK | {"local_steps": local_steps}
        method = get_method(name).factory(make_config(name, {"task": task} | values))
        state = method.init(jax.random.key(0), data)
        return quick_jit(method.round)(state, data, jax.random.key(1))[0].models

    return run


def assert_close(left, right):
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, 1e-4, 1e-6), left, right)


@pytest.mark.slow
def test_fed_pubs_penalties_are_those_of_its_loss(trained):
    plain, sparse = (
        trained("fed_pub", mask_weight=weight, block_size=3)["params"]["masks"]
        for weight in (0.0, 0.5)
    )
    assert_close(sparse, jax.tree.map(lambda x: x - RATE * 0.5, plain))
    one, two, pulled = (
        trained("fed_pub", steps, block_size=3, pull_weight=weight, sharpness=0.0)
        for steps, weight in ((1, 0.0), (2, 0.0), (2, 0.5))
    )
    first = get_method("fed_pub").factory(
        make_config("fed_pub", {"task": TASK, "block_size": 3})
    )
    start = first.init(jax.random.key(0), client_graphs.make_splits()["train"]).models
    w0, w1, w2, found = (x["params"]["weights"] for x in (start, one, two, pulled))
    expected = jax.tree.map(lambda c, b, a: c - RATE * (b - a), w2, w1, w0)
    assert_close(found, expected)


def test_fed_pubs_moments_go_on_of_weights_and_masks(data, quick_jit):
    """Where nobody is alike, two rounds of Adam are one of twice as many steps."""
    models, sizes = [], []
    for num_rounds, local_steps, stateful in ((2, 2, True), (1, 4, False)):
        optimizer = {"name": "adam", "learning_rate": 0.1, "stateful": stateful}
        task = {"optimizer": optimizer, "local_steps": local_steps, "dropout": 0.0}
        values = {"task": TASK | task, "block_size": 3, "sharpness": 1e8}
        by_server = make_config("fed_pub", values | {"score": "aggregated"})
        assert get_method("fed_pub").factory(by_server).init  # is not refused either
        method = get_method("fed_pub").factory(make_config("fed_pub", values))
        state, step = method.init(jax.random.key(0), data), quick_jit(method.round)
        for number in range(num_rounds):
            state, _ = step(state, data, jax.random.key(number))
        assert (client_state.OPT_STATE in state.models) == stateful
        models.append(state.models[client_state.LOCAL]["params"])
        sizes.append(bytes_per_round(method.round, state, data, jax.random.key(0)))
    assert sizes[0] == sizes[1]
    assert_close(*models)


def test_fed_pub_takes_nothing_of_who_trains_on_nothing(data, quick_jit):
    """The others mix as if the fifth client were not there."""
    values = {"task": TASK, "block_size": 3, "sharpness": 0.5}
    method = get_method("fed_pub").factory(make_config("fed_pub", values))
    step, start = quick_jit(method.round), method.init(jax.random.key(0), data)
    idle = data._replace(client_weights=data.client_weights.at[4].set(0))
    four = [jax.tree.map(lambda x: x[:4], tree) for tree in (data, start.models)]
    found, expected = (
        step(state, own, jax.random.key(1))[0].models
        for state, own in ((start, idle), (start._replace(models=four[1]), four[0]))
    )
    assert_close(jax.tree.map(lambda x: x[:4], found), expected)


def test_fed_pub_scores_mixed_or_trained_weights_times_masks(data, quick_jit):
    """Mixed alike, as nothing is sharp."""
    task = TASK | {"optimizer": {"name": "sgd", "learning_rate": 1.0}}
    values = {"task": task, "block_size": 3, "sharpness": 0.0}
    local, aggregated = (
        get_method("fed_pub").factory(make_config("fed_pub", values | {"score": score}))
        for score in ("local", "aggregated")
    )
    start, first = (x.init(jax.random.key(0), data) for x in (local, aggregated))
    state = quick_jit(local.round)(start, data, jax.random.key(1))[0]
    mixed, own = state.models["params"], state.models["local"]["params"]
    mean = jax.tree.map(lambda x: x.mean(0, keepdims=True), own["weights"])
    of_each = jax.tree.map(lambda x: x.repeat(NUM_CLIENTS, 0), mean)
    assert_close(mixed["weights"], of_each)

    plain = make_config("fed_avg", {"task": task}).task.build()
    predict = quick_jit(plain.predict)

    def outputs(params):
        used = jax.tree.map(
            lambda mask, x: x if mask is None else mask * x,
            *(params["masks"], params["weights"]),
            is_leaf=lambda x: x is None,
        )
        return predict({"params": used, "batch_stats": {}}, data)

    given = first._replace(models=first.models | {"params": mixed})
    pairs = (local, state), (aggregated, given)
    found = [quick_jit(method.predict)(after, data) for method, after in pairs]
    assert_close(found, [outputs(own), outputs(mixed)])
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_methods_that_mix_alike_are_fed_avg(trained, monkeypatch):
    mean = trained("fed_avg")["params"]
    clusters = trained("gcfl_plus")["params"]  # one cluster, by numbers of examples
    of_each = jax.tree.map(lambda x: x.repeat(NUM_CLIENTS, 0), mean)
    assert_close(clusters, of_each)
    measure = fed_gta.measure

    def as_confident(config, own, logits):
        return own.client_weights, measure(config, own, logits)[1]

    monkeypatch.setattr(fed_gta, "measure", as_confident)
    alike = trained("fed_gta", similarity=-1.0, score="aggregated")["params"]
    assert_close(alike, of_each)


def test_ada_fgls_alpha_is_the_share_of_the_graph(data):
    """S of alpha A + (1 - alpha) U + I, where U joins nodes of like predictions."""
    own = jax.tree.map(lambda x: x[0], data)
    known = jax.random.normal(jax.random.key(0), (8, NUM_CLASSES))
    known = known.at[3].set(known[5])  # two that are alike
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    _, *graph = ada_fgl.inputs(own, known)
    found = adaptive_propagation.propagation(*graph, 0.2)(x)
    q = np.asarray(jax.nn.softmax(known), float)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    alike, adjacency = (q @ q.T > 0.999) * (1 - np.eye(8)), np.zeros((8, 8))
    assert alike.sum() >= 2
    plain = alone(data, 0)
    adjacency[plain.receivers, plain.senders] = 1
    matrix = 0.2 * adjacency + 0.8 * alike + np.eye(8)
    scale = matrix.sum(axis=1) ** -0.5
    assert_close(found, (scale[:, None] * matrix * scale) @ x)


@pytest.mark.parametrize("name", ["ada_fgl", "fed_gcn", "fed_gta", "fed_pub"])
def test_a_task_without_subgraphs_is_refused(name):
    task = {"kind": "traffic_rnn"}
    with pytest.raises(InputError, match=name):
        get_method(name).factory(make_config(name, {"task": task}))


@pytest.mark.parametrize(
    ("size", "share", "num_edges"),
    [(6, 0.2, 3), (3, 0.1, 1)],  # of 15 and of 3 pairs; a part of one counts as one
)
def test_random_blocks_have_edges_inside_alone(size, share, num_edges):
    graph = random_blocks(jax.random.key(0), 2, 3, size, share)
    assert graph.features.shape == (1, 3 * size, 2)
    senders, receivers = np.asarray(graph.senders[0]), np.asarray(graph.receivers[0])
    assert (senders // size == receivers // size).all() and (senders != receivers).all()
    pairs = set(zip(senders.tolist(), receivers.tolist(), strict=True))
    assert len(pairs) == len(senders) == 2 * 3 * num_edges  # both ways
    assert {(b, a) for a, b in pairs} == pairs
    assert (np.diff(receivers) >= 0).all()


def test_random_blocks_differ_and_have_as_many_edges():
    graph = random_blocks(jax.random.key(0), 2, 4, 6, 0.4)
    senders, receivers = np.asarray(graph.senders[0]), np.asarray(graph.receivers[0])
    blocks = [
        frozenset(zip(senders[own] % 6, receivers[own] % 6, strict=True))
        for own in (senders // 6 == block for block in range(4))
    ]
    assert [len(block) for block in blocks] == [2 * 6] * 4  # of 15 pairs, both ways
    assert len(set(blocks)) == 4


@pytest.mark.parametrize("is_alike", [True, False])
def test_homophily_is_what_label_propagation_gets_right(is_alike):
    """Two cliques of one label each, or of both in turn."""
    labels = np.repeat([0, 1], 6) if is_alike else np.tile([0, 1], 6)
    senders, receivers = np.nonzero(np.kron(np.eye(2), np.ones((6, 6))) - np.eye(12))
    ones = jnp.ones(len(senders))
    structure = Structure(senders, receivers, ones, jnp.full(12, 5.0), None)
    args = structure, jnp.asarray(labels), jnp.ones(12), 2
    found = [float(homophily(*args, jax.random.key(seed))) for seed in range(3)]
    one = jnp.zeros(12).at[0].set(1)  # of label 0, which argmax gives where all tie
    assert homophily(*args[:2], one, 2, jax.random.key(0)) == 0
    halves = [known_half(seed, 12) for seed in range(3)]
    cliques = np.kron(np.eye(2), np.ones((6, 6)))  # S, with self edges
    expected = [propagated_right(cliques / 6, labels, half) for half in halves]
    npt.assert_allclose(found, expected, atol=1e-6)
    assert len({tuple(half) for half in halves}) == 3
    assert (expected == [1, 1, 1]) == is_alike


def known_half(seed, size):
    """Which half of the nodes is drawn: those of the lowest numbers."""
    draws = np.asarray(jax.random.uniform(jax.random.key(seed), (size,)))
    return np.argsort(np.argsort(draws)) < size // 2


def propagated_right(matrix, labels, half):
    """Eq. 5 in a loop: what is right of the nodes whose labels are hidden."""
    first = np.where(half[:, None], np.eye(2)[labels], 0.5)
    spread = first
    for _ in range(adaptive_propagation.PROPAGATION_STEPS):
        spread = (matrix @ spread + first) / 2
        spread = spread + half[:, None] * first
    right = np.argmax(spread, axis=1) == labels
    return right[~half].mean()


def test_homophily_weighs_what_the_two_networks_say():
    """Eq. 4, of one client's three nodes and two classes."""
    logits = np.random.default_rng(0).normal(size=(5, 3, 2))
    odds = np.exp(logits)
    smooth, own, spread, signed, known = odds / odds.sum(axis=2, keepdims=True)
    expected = 0.8 * (smooth + known) / 2 + 0.2 * (own + spread + signed) / 3
    found = adaptive_propagation.Predictions(*map(jnp.asarray, logits[:4]))
    mixed = adaptive_propagation.mixed(found, jnp.asarray(logits[4]), jnp.float32(0.8))
    npt.assert_allclose(np.exp(mixed), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def adaptive(data, quick_jit):
    """(AdaFGL with one federated round, its round, the states after 1, 2 and 3)."""
    config = make_config("ada_fgl", {"task": TASK} | ADA_FGL)
    method = get_method("ada_fgl").factory(config)
    state, states = quick_jit(method.init)(jax.random.key(0), data), []
    step = quick_jit(method.round)
    for seed in range(3):
        state, _ = step(state, data, jax.random.key(seed))
        states.append(state)
    return method, step, states


def test_ada_fgl_scores_the_common_model_until_clients_train_alone(
    adaptive, data, quick_jit
):
    method, step, states = adaptive
    common = get_method("fed_avg").factory(make_config("fed_avg", {"task": TASK}))
    expected = quick_jit(common.predict)(states[0].server, data)
    predict = quick_jit(method.predict)
    found = [predict(state, data) for state in states[:2]]
    npt.assert_allclose(found[0], expected, rtol=1e-5)
    assert np.abs(found[1] - expected).max() > 0.01
    without = data._replace(client_weights=data.client_weights.at[1].set(0))
    state, _ = step(states[0], without, jax.random.key(1))  # as if it was not sampled
    of_later = predict(state, data)
    npt.assert_allclose(of_later[1], expected[1], rtol=1e-5)
    npt.assert_array_equal(of_later[2:], found[1][2:])
    npt.assert_array_equal(state.models["num_steps"], [1, 0, 1, 1, 1])


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_ada_fgl_drops_units_in_training(adaptive, data, quick_jit, rate):
    """Of the same state, the loss of another key is another."""
    _, step, (state, *_) = adaptive
    if rate:
        config = make_config("ada_fgl", {"task": TASK} | ADA_FGL | {"dropout": rate})
        last = get_method("ada_fgl").factory(config).phases[-1]
        step = quick_jit(last.round)
    losses = [step(state, data, jax.random.key(s))[1]["train_loss"] for s in (1, 2)]
    assert (losses[0] == losses[1]) == (rate == 0)


def test_fed_pubs_shares_are_numbers_however_sharp_they_are(trained):
    """At the limit a client takes its own model and those that compute the same."""
    models = trained("fed_pub", block_size=3, sharpness=1000.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(models))


@pytest.mark.parametrize("share", [0.0, 1e-3, 1.0])
def test_what_is_mixed_for_a_client_stays_a_logarithm(share):
    """Even of probabilities that float32 does not have."""
    logits = jnp.array([[200.0, 0, 0]])
    found = adaptive_propagation.Predictions(*[logits] * 4)
    mixed = adaptive_propagation.mixed(found, logits, jnp.float32(share))
    npt.assert_allclose(mixed, [[0, -200, -200]], atol=1e-4)


def test_the_moments_of_ada_fgls_clients_last(adaptive, data):
    """A second step goes on with 0.9 of the first, unless moments begin anew."""
    _, step, (before, one, two) = adaptive
    anew = one._replace(models=one.models | {"opt_state": before.models["opt_state"]})
    alone, _ = step(anew, data, jax.random.key(2))
    params = [x.models["params"] for x in (before, one, alone)]
    expected = jax.tree.map(lambda a, b, c: c + 0.9 * (b - a), *params)
    assert_close(two.models["params"], expected)
    assert max(np.abs(x).max() for x in jax.tree.leaves(one.models["opt_state"])) > 0.01


def test_query_nodes_are_every_second_training_node(data):
    more = data._replace(is_trained=data.is_real.at[:, 2].set(0))
    for own in (data, more):
        support, query = query_halves(own, 2)
        for client, is_trained in enumerate(np.asarray(own.is_trained)):
            chosen = np.flatnonzero(is_trained)
            found = (
                np.flatnonzero(half.is_trained[client]) for half in (query, support)
            )
            for nodes, expected in zip(found, (chosen[1::2], chosen[::2]), strict=True):
                npt.assert_array_equal(nodes, expected)
    same, none = query_halves(data, 0)
    assert same is data and not np.asarray(none.is_trained).any()


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("fed_gta", {"privacy": {"noise_multiplier": 1.0}}, "confidences and moments"),
        ("fed_dc", {"privacy": {"noise_multiplier": 1.0}}, "gradients besides"),
        ("fed_gcn", {"secure_aggregation": "masks"}, "features besides"),
        ("fed_sage_plus", {"secure_aggregation": "masks"}, "encodings besides"),
        ("fed_pub", {"secure_aggregation": "masks"}, "fed_pub does not have it"),
        ("gcfl_plus", {"misbehaviour": {"dropout_rate": 0.5}}, "gcfl_plus does not"),
        *(
            (name, {"privacy": {"noise_multiplier": 1.0}}, f"{name}'s clients")
            for name in ("moon", "fed_proto", "ada_fgl")
        ),
    ],
)
def test_nothing_is_promised_that_a_method_does_not_keep(name, settings, words):
    config = make_config(name, {"task": TASK} | settings)
    with pytest.raises(InputError, match=f"{next(iter(settings))}.*{words}"):
        get_method(name).factory(config)


@pytest.mark.parametrize(
    "name, values",
    [
        ("fed_gta", {}),
        pytest.param("ada_fgl", ADA_FGL, marks=pytest.mark.slow),
        pytest.param(
            "fed_sage_plus",
            {"generator_rounds": 1, "generator": {"hidden_size": 4}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_attackers_of_labels_have_false_ones_all_along(data, quick_jit, name, values):
    """As if the data of these clients had been flipped, in either phase."""
    conduct = Misbehaviour(byzantine_fraction=0.4, attack="label_flip")
    lies = attackers(conduct, data.client_ids, data.client_weights)
    assert np.any(lies)
    false = jnp.where(lies[:, None], NUM_CLASSES - 1 - data.labels, data.labels)
    task = TASK | {"dropout": 0.0}

    def after_two_rounds(data, **changes):
        values_ = {"task": task} | values | changes
        method = get_method(name).factory(make_config(name, values_))
        state, step = method.init(jax.random.key(0), data), quick_jit(method.round)
        for seed in (1, 2):
            state, _ = step(state, data, jax.random.key(seed))
        if name == "fed_sage_plus":
            return state.memories["models"], state.server.models
        return state.models

    assert_close(
        after_two_rounds(data, misbehaviour=conduct),
        after_two_rounds(data._replace(labels=false)),
    )


@pytest.mark.slow
def test_two_of_five_train_their_own_networks(data, quick_jit):
    """Those of AdaFGL, in the second round, which exchanges nothing."""
    values = {"federated_rounds": 1, "num_hops": 1, "hidden_size": 4}
    settings = {"task": TASK, "participation": 0.4} | values
    method = get_method("ada_fgl").factory(make_config("ada_fgl", settings))
    keys = [jax.random.key(seed) for seed in (1, 2)]
    *_, (before, _), (after, _) = quadratic.run(method, data, quick_jit, keys)
    for old, new in zip(
        *(jax.tree.leaves(state.models["params"]) for state in (before, after)),
        strict=True,
    ):
        changed = np.any(np.reshape(old != new, (NUM_CLIENTS, -1)), axis=1)
        assert changed.sum() == 2


def test_a_cluster_takes_the_mean_of_who_came(quick_jit):
    """All five are in one, also those who did not come."""
    task, data = quadratic.QuadraticTask(), quadratic.make_data()
    config = make_config("gcfl_plus", {"task": task, "participation": 0.4})
    method = get_method("gcfl_plus").factory(config)
    (state, _), *later = quadratic.run(method, data, quick_jit)
    twin, rows = quadratic.Twin(data, task, 0.4), quadratic.to_rows(state.models)
    for key, (state, _) in zip(quadratic.KEYS, later, strict=True):
        cohort_key, update_key = jax.random.split(key)
        sampled = draw_cohort(cohort_key, twin.ids, twin.size)
        keys = {i: jax.random.fold_in(update_key, twin.ids[i]) for i in sampled}
        trained = {i: twin.steps(i, rows[i], own)[0] for i, own in keys.items()}
        assert len(trained) == 2
        rows = np.tile(twin.mean(trained), (NUM_CLIENTS, 1))
        quadratic.assert_rows(state.models, rows)


def test_who_does_not_come_keeps_its_norms(quick_jit):
    task, data = quadratic.QuadraticTask(), quadratic.make_data()
    everybody, two = (
        get_method("gcfl_plus").factory(make_config("gcfl_plus", {"task": task} | more))
        for more in ({}, {"participation": 0.4})
    )
    start, key = everybody.init(jax.random.key(0), data), quadratic.KEYS[0]
    first = quick_jit(everybody.round)(start, data, jax.random.key(0))[0]
    state = start._replace(norms=first.norms, num_norms=first.num_norms)
    last = quick_jit(two.round)(state, data, key)[0]
    came = draw_cohort(jax.random.split(key)[0], data.client_ids, 2)
    others = np.setdiff1d(np.arange(NUM_CLIENTS), came)
    before, after = np.asarray(first.norms), np.asarray(last.norms)
    assert np.all(before[:, -1] > 0)
    npt.assert_array_equal(after[others], before[others])
    npt.assert_array_equal(after[came, -2], before[came, -1])
    assert np.all(after[came, -1] != before[came, -1])
    npt.assert_array_equal(first.num_norms, np.ones(NUM_CLIENTS))
    npt.assert_array_equal(last.num_norms, 1 + np.isin(np.arange(NUM_CLIENTS), came))


def test_no_cluster_is_split_before_each_client_has_enough_norms(quick_jit):
    """With two of five in a round: by OpenFGL's counts, one for each that came."""
    values = {"task": quadratic.QuadraticTask(), "participation": 0.4, "num_norms": 2}
    values |= {"mean_below": 1e6, "largest_above": 0.0, "first_rounds": 0}
    method = get_method("gcfl_plus").factory(make_config("gcfl_plus", values))
    data, step = quadratic.make_data(), quick_jit(method.round)
    state = method.init(jax.random.key(0), data)
    counts, num_splits, num_early = np.zeros(NUM_CLIENTS, int), 0, 0
    for seed in range(30):
        key, before = jax.random.key(seed), state.together
        state, _ = step(state, data, key)
        counts[draw_cohort(jax.random.split(key)[0], data.client_ids, 2)] += 1
        is_split = bool(jnp.any(state.together != before))
        assert not is_split or counts.min() >= 2
        num_early += seed > 2 and counts.min() < 2
        num_splits += is_split
        if is_split:
            counts[:] = 0
        npt.assert_array_equal(state.num_norms, counts)
    assert num_splits >= 2
    assert num_early >= 5


@pytest.mark.parametrize("num_idle", [0, 1, 2])
def test_who_has_nothing_to_train_on_is_no_cluster_of_gcfl_plus(num_idle):
    """Two pairs whose last norms are alike, and clients of weight 0."""
    config = make_config("gcfl_plus", {"task": TASK, "mean_below": 10.0})
    weights = jnp.array([1.0, 1, 1, 1] + [0] * num_idle)
    size = len(weights)
    norms = jnp.array([[1.0, 1], [1, 1.1], [5, 5], [5, 5.1]] + [[0, 0]] * num_idle)
    changes = {"w": jnp.concatenate([jnp.eye(4), jnp.zeros((num_idle, 4))])}
    cohort = clients.Cohort(jnp.arange(size), weights)
    args = jnp.ones((size, size)), weights > 0, norms, changes, cohort, jnp.bool_(True)
    together, is_split = gcfl_plus.split(config, *args)
    assert is_split
    pairs = np.kron(np.eye(2), np.ones((2, 2)))
    npt.assert_array_equal(together[:4, :4], pairs)
    for idle in np.asarray(together[4:]):  # is with one of them
        assert idle[:4].tolist() in pairs.tolist()
    again, is_split = gcfl_plus.split(config, together, *args[1:])
    assert not is_split
    npt.assert_array_equal(again, together)


@pytest.fixture(scope="module")
def is_split(quick_jit):
    """(eps_1, eps_2, who is with whom, weights, changes, who came) -> is one split?"""

    @quick_jit
    def run(below, above, together, weights, changes, came=None):
        config = types.SimpleNamespace(mean_below=below, largest_above=above)
        came = jnp.arange(len(weights)) if came is None else came
        cohort = clients.Cohort(came, weights[came])
        args = together, weights > 0, jnp.zeros((len(weights), 2)), changes, cohort
        return gcfl_plus.split(config, *args, jnp.bool_(True))[1]

    return run


def test_a_cluster_is_split_between_the_thresholds_of_gcfl_plus(is_split):
    """Eq. 2 of clients 0, 2, 4 and 5; 6 is idle, and 1 and 3 still move as one."""
    together = np.zeros((7, 7), np.float32)
    members, others = [0, 2, 4, 5], [1, 3]
    together[np.ix_([*members, 6], [*members, 6])] = 1
    together[np.ix_(others, others)] = 1
    weights = np.array([1, 2, 5, 1, 2, 3, 0], np.float32)
    random = np.random.default_rng(0)
    w, b = random.normal(size=(7, 3, 2)), random.normal(size=(7, 4))
    w[6] = 100
    changes = {"w": jnp.asarray(w), "b": jnp.asarray(b)}
    flat = np.hstack([w.reshape(7, -1), b])
    mean, of_others = (np.linalg.norm(flat[x].mean(axis=0)) for x in (members, others))
    largest = np.linalg.norm(flat[members], axis=1).max()
    assert mean < of_others
    for below, above, expected in (
        (1.001 * mean, 0.999 * largest, True),
        (0.999 * mean, 0.999 * largest, False),
        (1.001 * mean, 1.001 * largest, False),
    ):
        assert is_split(below, above, together, weights, changes) == expected


def test_a_cluster_is_split_by_those_of_it_who_came(is_split):
    """Eq. 2 of 1, 3 and 4; of the other cluster 5 came alone, who moves the most."""
    together, ours = np.zeros((6, 6), np.float32), [1, 3, 4]
    for members in (ours, [0, 2, 5]):
        together[np.ix_(members, members)] = 1
    w = np.random.default_rng(0).normal(size=(4, 3))
    w[3] *= 100
    mean = np.linalg.norm(w[:3].mean(axis=0))
    largest = np.linalg.norm(w[:3], axis=1).max()
    came = np.array([*ours, 5])
    for below, above, expected in (
        (1.001 * mean, 0.999 * largest, True),
        (0.999 * mean, 0.999 * largest, False),
        (1.001 * mean, 1.001 * largest, False),
    ):
        args = below, above, together, np.ones(6, np.float32), {"w": jnp.asarray(w)}
        assert is_split(*args, came) == expected


def test_what_a_cohort_changes_is_of_its_own_models(quick_jit):
    """Of two clusters, far apart, one came whole, and is split by Eq. 2."""
    task, data = quadratic.QuadraticTask(), quadratic.make_data()
    twin, key = quadratic.Twin(data, task, 0.6), quadratic.KEYS[0]
    cohort_key, update_key = jax.random.split(key)
    came = draw_cohort(cohort_key, twin.ids, twin.size)
    others = np.setdiff1d(np.arange(NUM_CLIENTS), came)
    assert came != [0, 1, 2]
    together = np.zeros((NUM_CLIENTS, NUM_CLIENTS), np.float32)
    for members in (came, others):
        together[np.ix_(members, members)] = 1

    def factory(**values):
        values |= {"task": task, "participation": 0.6, "num_norms": 1}
        config = make_config("gcfl_plus", values | {"first_rounds": 0})
        return get_method("gcfl_plus").factory(config)

    start = factory().init(jax.random.key(0), data)
    far = jnp.zeros(NUM_CLIENTS).at[others].set(5)[:, None]
    models = jax.tree.map(lambda x: x + far, start.models)
    rows = quadratic.to_rows(models)
    keys = {i: jax.random.fold_in(update_key, twin.ids[i]) for i in came}
    trained = {i: twin.steps(i, rows[i], own)[0] for i, own in keys.items()}
    changes = np.stack([trained[i] - rows[i] for i in came])[:, quadratic.PARAMS]
    below = 1.001 * np.linalg.norm(changes.mean(axis=0))
    above = 0.999 * np.linalg.norm(changes, axis=1).max()
    method = factory(mean_below=float(below), largest_above=float(above))
    start = start._replace(models=models, num_rounds=jnp.int32(1), together=together)
    start = start._replace(num_norms=jnp.ones(NUM_CLIENTS, jnp.int32))
    after = quick_jit(method.round)(start, data, key)[0]
    pairs = np.asarray(after.together)
    assert not pairs[np.ix_(came, came)].all()
    npt.assert_array_equal(pairs[others], together[others])
    shares = (pairs * twin.weights)[:, came]
    for i in came:
        rows[i] = np.average(list(trained.values()), axis=0, weights=shares[i])
    quadratic.assert_rows(after.models, rows)


def test_a_cluster_of_two_is_not_split(is_split):
    changes = {"w": jnp.asarray([[1.0], [-1.0], [0.5], [0.0]])}
    for size in (2, 3):
        together = np.eye(4, dtype=np.float32)
        together[:size, :size] = 1
        found = is_split(10.0, 0.0, together, np.ones(4, np.float32), changes)
        assert found == (size == 3)


def test_a_cluster_of_a_diverged_client_is_not_split():
    """Whose norms are no numbers, by which it would be cut."""
    together, weights = jnp.ones((3, 3)), jnp.ones(3)
    changes = {"w": jnp.array([[1.0], [-1.0], [jnp.nan]])}
    config = types.SimpleNamespace(mean_below=1.0, largest_above=0.9)
    cohort = clients.Cohort(jnp.arange(3), weights)
    for last, expected in ((0.0, True), (jnp.nan, False)):
        norms = jnp.array([[1.0, 2], [3, 4], [5, last]])
        args = together, weights > 0, norms, changes, cohort, jnp.bool_(True)
        after, is_split = gcfl_plus.split(config, *args)
        assert is_split == expected == bool(jnp.any(after != together))


def test_one_diverged_client_keeps_no_other_cluster_together(is_split):
    together = np.kron(np.eye(2, dtype=np.float32), np.ones((3, 3), np.float32))
    changes = np.array([[1.0], [-1.0], [0.5], [0.1], [0.1], [np.nan]])
    for last in (0.1, np.nan, np.inf):
        changes[5] = last
        args = 1.0, 0.9, together, np.ones(6, np.float32)
        assert is_split(*args, {"w": jnp.asarray(changes)})


def test_when_gcfl_plus_splits_clusters(data, quick_jit):
    """After round 2 for the first time, then with two more rounds' norms."""
    when = {"first_rounds": 2, "num_norms": 2}
    values = {"task": TASK, "mean_below": 1e6, "largest_above": 0.0} | when
    method = get_method("gcfl_plus").factory(make_config("gcfl_plus", values))
    state, step = method.init(jax.random.key(0), data), quick_jit(method.round)
    counts = []
    for seed in range(6):
        state, _ = step(state, data, jax.random.key(seed))
        counts.append(len(np.unique(state.together, axis=0)))
    assert counts == [1, 1, 1, 2, 2, 3]
