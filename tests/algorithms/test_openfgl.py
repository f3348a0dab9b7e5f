"""A round of each method against OpenFGL's, from the same weights, in float64.

The golden numbers are made by `openfgl_golden.py`, which says what OpenFGL was given.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import get_method
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests.client_graphs import NODE_FIELDS

FOLDER = pathlib.Path(__file__).parent / "data" / "openfgl"
ADAM = OptimizerConfig("adam", 0.01, weight_decay=5e-4)


def load(name):
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


PROBLEM = load("problem")
NUM_CLIENTS = sum(name.startswith("x_") for name in PROBLEM)
NUM_CLASSES, NUM_HIDDEN = (
    PROBLEM[f"{layer}/bias"].size for layer in ("head", "hidden")
)


def nested(arrays):
    """`a/b` -> trees of dicts."""
    tree = {}
    for name, x in arrays.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = jnp.asarray(x)
    return tree


@dataclasses.dataclass(frozen=True)
class Begun(SubgraphTask):
    """The task, whose models begin with the golden script's weights."""

    weights: Any = None  # a model; None: the script's

    def build(self):
        weights = {name: x for name, x in PROBLEM.items() if "/" in name}
        start = self.weights or {"batch_stats": {}, "params": nested(weights)}
        return super().build()._replace(init=lambda key: start)


def make_task(**changes):
    settings = {"local_steps": 3, "optimizer": ADAM} | changes
    return Begun(
        PROBLEM["x_0"].shape[1], NUM_CLASSES, hidden_size=NUM_HIDDEN, **settings
    )


def make_data():
    """OpenFGL weighs clients by all their nodes."""
    own = [
        {n: PROBLEM[f"{n}_{k}"] for n in ("x", "y", "set", "edges")} for k in CLIENTS
    ]
    for one in own:
        one["edges"] = one["edges"][np.argsort(one["edges"][:, 1], kind="stable")]
    nodes, edges = (max(len(one[name]) for one in own) for name in ("x", "edges"))

    def pad(rows, size, fill=0):
        widths = [[(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)] for x in rows]
        padded = zip(rows, widths, strict=True)
        return jnp.stack([np.pad(x, w, constant_values=fill) for x, w in padded])

    sets = pad([one["set"] for one in own], nodes, -1)
    sizes = jnp.array([len(one["x"]) for one in own])
    is_edge = [np.ones(len(one["edges"])) for one in own]
    return SubgraphData(
        features=pad([one["x"] for one in own], nodes),
        senders=pad([one["edges"][:, 0] for one in own], edges),
        receivers=pad([one["edges"][:, 1] for one in own], edges, nodes - 1),
        edge_weights=pad(is_edge, edges),
        labels=pad([one["y"] for one in own], nodes),
        is_real=(jnp.arange(nodes) < sizes[:, None]).astype(float),
        is_trained=(sets == 0).astype(float),
        is_scored=(sets == 1).astype(float),
        client_ids=jnp.arange(NUM_CLIENTS),
        client_weights=sizes.astype(float),
    )


CLIENTS = range(NUM_CLIENTS)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


CASES = {  # method -> its config, rounds
    "fed_avg": ({}, 1),
    "fed_gta": ({"similarity": 0.8}, 2),
    "fed_prox": ({"proximal_weight": 1e-3}, 2),
    "gcfl_plus": (
        {"mean_below": 10.0, "largest_above": 0.0, "num_norms": 2, "first_rounds": 0},
        2,
    ),
    "local": ({}, 1),
    "moon": ({"contrast_on": "all"}, 2),
}


def run(name, values, num_rounds, data, begin=lambda state: state, **task):
    """The state after some rounds; `begin` changes the first one."""
    method = get_method(name)
    algorithm = method.factory(method.config_type(task=make_task(**task), **values))
    state, key = (
        begin(jax.jit(algorithm.init)(jax.random.key(0), data)),
        jax.random.key(1),
    )
    round_ = jax.jit(algorithm.round)
    for _ in range(num_rounds):
        state, _ = round_(state, data, key)
    return state


def assert_same(params, expected, atol=1e-10):
    """Leaves [1 or K, ...] against golden ones."""
    for name, x in expected.items():
        found = params
        for key in name.split("/"):
            found = found[key]
        assert found.dtype == jnp.float64
        npt.assert_allclose(found.reshape(x.shape), x, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_round_gives_openfgls_parameters(name):
    values, num_rounds = CASES[name]
    state = run(name, values, num_rounds, make_data())
    assert_same(state.models["params"], load(name))


def test_fed_pub_gives_openfgls_parameters_and_masks():
    """The random graph is that of client 1, without its padding."""
    data, size = make_data(), len(PROBLEM["x_1"])
    proxy = jax.tree.map(lambda x: x[1:2], data)
    nodes = {name: getattr(proxy, name)[:, :size] for name in NODE_FIELDS}
    proxy = proxy._replace(**nodes)
    state = run("fed_pub", {}, 2, data, lambda state: state._replace(proxy=proxy))
    assert_same(state.models["params"], load("fed_pub"))


def test_ada_fgls_networks_step_as_openfgls():
    """A round of FedAvg, and one step from the networks that OpenFGL drew."""
    golden = nested(load("ada_fgl"))

    def begin(state):
        return state._replace(models=state.models | {"params": golden["first"]})

    sizes = {"hidden_size": NUM_HIDDEN, "dropout": 0.0}
    values = {"federated_rounds": 1, "personal_optimizer": ADAM} | sizes
    state = run("ada_fgl", values, 2, make_data(), begin)
    assert_same(state.models["params"], golden["last"])


def test_an_adam_that_goes_on_gives_openfgls_parameters():
    """Three rounds, whose clients keep their moments."""
    goes_on = dataclasses.replace(ADAM, stateful=True)
    state = run("fed_avg", {}, 3, make_data(), optimizer=goes_on)
    assert_same(state.models["params"], load("fed_avg_goes_on"))


def test_scaffold_gives_openfgls_parameters_and_controls():
    """By plain SGD, under which our mean gradient is the change over the rate."""
    sgd = OptimizerConfig("sgd", 0.1)
    state = run("scaffold", {}, 3, make_data(), optimizer=sgd)
    found = state.models["params"] | {"controls": state.memories}
    assert_same(found, load("scaffold"))
