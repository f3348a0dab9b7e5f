"""Rounds of methods where OpenFGL departs from the paper, against OpenFGL's in float64.

Each test says in what, and gives our method what OpenFGL would have; see
`openfgl_golden.py` for where the golden numbers come from.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import fed_dc as fed_dc_module
from fedjax_graph.algorithms import fgssl as fgssl_module
from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.algorithms.fed_dc import FedDCConfig, fed_dc
from fedjax_graph.algorithms.fed_proto import FedProtoConfig, Prototypes, fed_proto
from fedjax_graph.algorithms.fed_sage_plus import FedSagePlusConfig, fed_sage_plus
from fedjax_graph.algorithms.fed_star import fed_star
from fedjax_graph.algorithms.fgssl import FGSSLConfig, fgssl
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs import mending
from fedjax_graph.data.graphs.structure import with_structure
from fedjax_graph.models.neighbour_generator import GeneratorConfig
from tests import dense_gcn
from tests.algorithms.test_openfgl import (
    CLIENTS,
    NUM_CLASSES,
    NUM_CLIENTS,
    PROBLEM,
    assert_same,
    in_float64,  # noqa: F401
    load,
    make_data,
    make_task,
    nested,
)
from tests.client_graphs import alone

STEPS, RATE = 3, 0.01
KEY = jax.random.key(1)


def parts_of(golden):
    """Weights in the end; those under other names, as trees."""
    last = {n: x for n, x in golden.items() if n.split("/")[0] in ("hidden", "head")}
    return last, nested({n: x for n, x in golden.items() if n not in last})


def sizes():
    return np.array([len(PROBLEM[f"x_{k}"]) for k in range(NUM_CLIENTS)])


def flat(tree, prefix=""):
    """Trees of dicts -> `a/b`."""
    for name, x in tree.items():
        if isinstance(x, dict):
            yield from flat(x, f"{prefix}{name}/")
        else:
            yield prefix + name, x


def test_fed_proto():
    """OpenFGL weighs clients by their nodes; a class that one lacks counts as 0."""
    last, golden = parts_of(load("fed_proto"))
    data = make_data()
    algorithm = fed_proto(FedProtoConfig(make_task(), distance="examples"))
    round_ = jax.jit(algorithm.round)
    state, _ = round_(algorithm.init(KEY, data), data, KEY)
    assert_same(state.models["params"], dict(flat(golden["first"])))

    expected, weights = 0, sizes() / sizes().sum()
    for client, weight in enumerate(weights):
        own = alone(data, client)
        z, _ = dense_gcn.layers(own, dense_gcn.row(state.models["params"], client))
        members = np.eye(NUM_CLASSES)[own.labels] * own.is_trained[:, None]
        expected += weight * members.T @ z / np.maximum(members.sum(axis=0), 1)[:, None]
    npt.assert_allclose(golden["prototypes"], expected, atol=1e-10)

    theirs = Prototypes(golden["prototypes"][None], jnp.ones((1, NUM_CLASSES)))
    state, _ = round_(state._replace(prototypes=theirs), data, KEY)
    assert_same(state.models["params"], last)


def test_fed_dc(monkeypatch):
    """OpenFGL begins its penalties, and its drifts, a round later, and leaves g out.

    So of its third round: from its drifts, which are the steps of its first.
    """
    _, golden = parts_of(load("fed_dc"))
    data = make_data()
    task = make_task(optimizer=OptimizerConfig("sgd", RATE, weight_decay=5e-4))
    plain = fed_dc(FedDCConfig(task, drift_weight=0.0))
    start = plain.init(KEY, data)
    state, _ = jax.jit(plain.round)(start, data, KEY)
    w = start.models["params"]
    first = jax.tree.map(jnp.add, w, state.memories["drift"])
    assert_same(first, dict(flat(golden["clients_first"])))
    went = jax.tree.map(jnp.subtract, golden["clients_first"], w)
    assert_same(went, dict(flat(golden["drifts"])))

    last = jax.tree.map(jnp.subtract, golden["clients_second"], golden["first"])
    memories = {
        "drift": jax.tree.map(jnp.asarray, golden["drifts"]),
        "gradient": jax.tree.map(lambda g: -g / (RATE * STEPS), last),
    }
    w = jax.tree.map(lambda x: x[None], golden["second"])
    state = state._replace(
        models=state.models | {"params": w}, num_rounds=jnp.int32(1), memories=memories
    )
    no_mean = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), last)
    monkeypatch.setattr(fed_dc_module, "control_mean", lambda *_: (no_mean,))
    state, _ = jax.jit(fed_dc(FedDCConfig(task)).round)(state, data, KEY)

    def server(drifts):
        """The mean of the clients' models and drifts, by their nodes."""
        sent = jax.tree.map(np.add, golden["clients_third"], drifts)
        return jax.tree.map(lambda x: np.average(x, axis=0, weights=sizes()), sent)

    late = jax.tree.map(np.add, golden["drifts"], last)  # with its last round's step
    assert_same(server(late), dict(flat(golden["third"])))
    drifts = jax.tree.map(
        lambda h, v, w: h + v - w, golden["drifts"], golden["clients_third"], w
    )
    assert_same(state.memories["drift"], dict(flat(drifts)))
    found = jax.tree.map(lambda x: x[0], state.models["params"])
    assert_same(found, dict(flat(server(drifts))))


def test_fgssl(monkeypatch):
    """OpenFGL computes its contrast and leaves it out; the same is dropped in steps."""
    last, golden = parts_of(load("fgssl"))
    data = make_data()
    config = FGSSLConfig(make_task(), contrast_weight=0.0, structure="edges")
    orders = [np.argsort(PROBLEM[f"edges_{k}"][:, 1], kind="stable") for k in CLIENTS]

    def kept(name, what):
        rows = [golden[name][f"{what}_{k}"] for k in CLIENTS]
        if what == "edges":
            rows = [row[order] for row, order in zip(rows, orders, strict=True)]
            rows = [np.pad(r, (0, data.senders.shape[1] - len(r))) for r in rows]
        return jnp.stack(rows).astype(float)

    views = {
        share: (kept(name, "edges"), kept(name, "features"))
        for share, name in (
            (config.server_edges, "augWeak"),
            (config.client_edges, "augStrongF"),
        )
    }

    def augment(key, own, edges, features):
        is_kept, is_seen = (x[own.client_ids] for x in views[edges])
        return own._replace(
            edge_weights=own.edge_weights * is_kept, features=own.features * is_seen
        )

    monkeypatch.setattr(fgssl_module, "augment", augment)
    algorithm = fgssl(config)
    state, round_ = algorithm.init(KEY, data), jax.jit(algorithm.round)
    for _ in range(2):
        state, _ = round_(state, data, KEY)
    assert_same(state.models["params"], last)


def rank_of_trained(own):
    return jnp.cumsum(own.is_trained.astype(int)) - 1


def first_neighbours(key, other, own, num_places):
    """What the golden script chooses in place of a draw."""
    nodes = rank_of_trained(own) % jnp.sum(other.is_real).astype(int)
    degrees = jnp.bincount(
        jnp.where(other.edge_weights > 0, other.receivers, len(other.labels)),
        length=len(other.labels) + 1,
    )[:-1]
    starts = jnp.cumsum(degrees) - degrees
    places = jnp.arange(num_places) % degrees[nodes][:, None]
    return other.senders[starts[nodes][:, None] + places]


@pytest.mark.slow
def test_fed_sage_plus(monkeypatch):
    """OpenFGL's edges lead to what is generated only; its classifiers go on."""
    _, golden = parts_of(load("fed_sage_plus"))
    data = make_data()._replace(client_weights=jnp.ones(NUM_CLIENTS))
    generator = GeneratorConfig(2, PROBLEM["hidden/bias"].size, 6, (7, 8), noise=0.0)
    task = make_task(
        model="sage_relu",
        optimizer=OptimizerConfig("sgd", 10 * RATE),
        weights={"params": golden["start"]["classifier"], "batch_stats": {}},
    )
    algorithm = fed_sage_plus(FedSagePlusConfig(task, 1.0, generator=generator))
    fill = mending.fill

    def fill_outward(own, found):
        filled = fill(own, found)
        is_inward = filled.senders >= len(own.labels)
        weights = jnp.where(is_inward, 0, filled.edge_weights)
        return filled._replace(edge_weights=weights)

    monkeypatch.setattr(mending, "fill", fill_outward)
    monkeypatch.setattr(mending, "draw_neighbours", first_neighbours)
    state = algorithm.init(KEY, data)
    start = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (NUM_CLIENTS, *x.shape)), golden["start"]
    )
    is_first = jnp.cumsum(data.is_scored, axis=1) == 1  # half of two or three nodes
    hidden = data.is_scored * is_first
    models = state.memories["models"] | {"params": start}
    memories = state.memories | {"models": models, "hidden": hidden}
    state, round_ = state._replace(memories=memories), jax.jit(algorithm.round)
    for _ in range(2):
        state, _ = round_(state, data, KEY)
    found = state.memories["models"]["params"]
    assert_same(found, dict(flat(golden["clients"])), 1e-7)  # Eq. 2 is in float32

    means = jax.tree.map(lambda x: x.mean(axis=0), golden["clients"]["classifier"])
    assert_same(means, dict(flat(golden["middle"]["classifier"])))
    models = {"params": jax.tree.map(lambda x: x[None], means), "batch_stats": {}}
    server = state.server._replace(models=models, num_rounds=jnp.int32(10))
    state, _ = round_(state._replace(server=server), data, KEY)
    found = state.server.models["params"]
    assert_same(found, dict(flat(golden["server"]["classifier"])))


def test_fed_star():
    """OpenFGL classifies graphs: here each node is one, in its own batch."""
    _, golden = parts_of(load("fed_star"))
    plain = make_data()
    data = with_structure({"train": plain})["train"]
    for k in CLIENTS:
        found = data.features[k, : sizes()[k], plain.features.shape[2] :]
        npt.assert_allclose(found, golden[f"encoding_{k}"], atol=1e-7)
    start = {"params": golden["start"], "batch_stats": {}}
    task = dataclasses.replace(
        make_task(model="decoupled_gin", structure_size=32),
        num_features=data.features.shape[2],
        weights=start,
    )
    algorithm = fed_star(FedAvgConfig(task))
    state, _ = jax.jit(algorithm.round)(algorithm.init(KEY, data), data, KEY)
    assert_same(state.models["params"], dict(flat(golden["server"])), 1e-7)
    own = {n: x for n, x in flat(golden["clients"]) if not n.startswith("structure")}
    assert_same(state.models["params"], own, 1e-7)
