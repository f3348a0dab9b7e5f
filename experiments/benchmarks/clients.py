"""Rounds of many clients whose states and data the host keeps; see `ClientStore`.

A small model (one hidden layer of 16 units, 289 parameters, 10 steps of SGD on 8
examples) and as many clients as --client_counts says. Each round has a cohort of
--cohort clients: drawn anew from all, and as a pass in which each client is in one
cohort. The yardstick is what one would write by hand: the same cohorts of FedAvg,
gathered by NumPy, a `vmap` of local SGD, and the mean.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.measure import in_turn, resident_bytes, seconds
from experiments.benchmarks.settings import BenchmarkSettings
from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core import clients
from fedjax_graph.core.local import local_steps
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import Task
from fedjax_graph.driver.client_store import ClientStore

NUM_EXAMPLES, NUM_FEATURES, WIDTH, NUM_STEPS = 8, 16, 16, 10
RATE = 0.05
Round = Callable[[np.ndarray, jax.Array], Any]


class Examples(NamedTuple):
    """What the clients train on."""

    x: np.ndarray  # [K, M, F]
    y: np.ndarray  # [K, M]
    client_ids: np.ndarray  # [K]
    client_weights: np.ndarray  # [K]


@dataclasses.dataclass(frozen=True)
class SmallTask:
    """Regression by one hidden layer, with steps on all of a client's examples."""

    kind: str = "small"

    def build(self) -> Task:
        """The functions of one client's learning."""
        steps = OptimizerConfig("sgd", learning_rate=RATE).build()

        def update(model, own, key, data, adjust, num_rounds):
            def loss(params, stats, step):
                return squared_error(params, *own), stats

            return local_steps(loss, steps, adjust=adjust)(model, jnp.arange(NUM_STEPS))

        def evaluate(models, data):
            losses = clients.map_rows(squared_error)(models["params"], data.x, data.y)
            return {"loss": jnp.mean(losses)}

        return Task(
            init=lambda key: {"params": init(key), "batch_stats": {}},
            client_data=lambda data: (data.x, data.y),
            update=update,
            evaluate=evaluate,
            predict=lambda models, data: data.y,
            is_head=lambda path: False,
        )


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Weights of the hidden layer and of the output."""
    hidden = jax.random.normal(key, (NUM_FEATURES, WIDTH)) / NUM_FEATURES**0.5
    zeros = jnp.zeros(WIDTH)
    return {"hidden": hidden, "bias": zeros, "output": zeros, "mean": jnp.zeros(())}


def squared_error(params: dict[str, jax.Array], x, y) -> jax.Array:
    """Of a client's examples, [M, F] and [M]."""
    hidden = jnp.tanh(x @ params["hidden"] + params["bias"])
    return jnp.mean((hidden @ params["output"] + params["mean"] - y) ** 2)


def make_examples(num_clients: int) -> Examples:
    """Random ones."""
    rng = np.random.default_rng(0)
    shape = (num_clients, NUM_EXAMPLES, NUM_FEATURES)
    x = rng.standard_normal(shape, np.float32)
    ids = np.arange(num_clients, dtype=np.int32)
    weights = np.full(num_clients, NUM_EXAMPLES, np.float32)
    return Examples(x, x[..., 0] * x[..., 1], ids, weights)


def store_of(method: str, data: Examples, folder: str | None = None) -> ClientStore:
    """A store of one of the library's methods."""
    algorithm = get_method(method).factory(make_config(method, {"task": SmallTask()}))
    return ClientStore(algorithm, data, jax.random.key(0), folder)


def plain_round(data: Examples) -> Round:
    """FedAvg by hand."""

    @jax.jit
    def average(params, x, y):
        def one(x, y):
            def step(params, _):
                grads = jax.grad(squared_error)(params, x, y)
                return jax.tree.map(lambda p, g: p - RATE * g, params, grads), None

            return jax.lax.scan(step, params, length=NUM_STEPS)[0]

        return jax.tree.map(lambda p: jnp.mean(p, axis=0), jax.vmap(one)(x, y))

    params = init(jax.random.key(0))

    def round_(indices, key):
        nonlocal params
        del key
        params = jax.device_get(average(params, data.x[indices], data.y[indices]))

    return round_


def drawn(round_: Round, num_clients: int, size: int, num_rounds: int) -> float:
    """Microseconds for each client of cohorts that are drawn anew."""

    def rounds():
        for number in range(num_rounds):
            key = jax.random.fold_in(jax.random.key(1), number)
            round_(clients.draw_indices(key, num_clients, size), key)

    return 1e6 * seconds(rounds) / (num_rounds * size)


def passed(store: ClientStore, size: int) -> float:
    """Microseconds for each client of a pass over all, each in one cohort."""
    order = np.random.default_rng(0).permutation(store.num_clients)

    def rounds():
        for start in range(0, len(order), size):
            key = jax.random.fold_in(jax.random.key(2), start)
            store.round(np.sort(order[start : start + size]), key)

    return 1e6 * seconds(rounds) / len(order)


def figures_of(settings: BenchmarkSettings, num_clients: int) -> dict[str, float]:
    """Everything that is measured with so many clients."""
    size, before = min(settings.cohort, num_clients), resident_bytes()
    data = make_examples(num_clients)
    ditto = store_of("ditto", data)
    with tempfile.TemporaryDirectory() as folder:
        rounds = {
            "fed_avg": store_of("fed_avg", data).round,
            "ditto": ditto.round,
            "plain_vmap": plain_round(data),
        }

        def us(name: str) -> dict[str, float]:
            each = drawn(rounds[name], num_clients, size, settings.cohort_rounds)
            return {f"{name}_us": each}

        for name in rounds:
            us(name)  # compiles
        held = resident_bytes() - before
        rounds["ditto_in_files"] = store_of("ditto", data, folder).round
        us("ditto_in_files")
        measures = {name: functools.partial(us, name) for name in rounds}
        measures["pass"] = lambda: {"ditto_pass_us": passed(ditto, size)}
        figures = in_turn(settings, measures)
    models, _ = ditto.gather(np.arange(1))
    of_models = sum(4 * x.size for x in jax.tree.leaves(models.models)) * num_clients
    kept = sum(x.nbytes for x in data) + of_models
    return figures | {"kept_mib": kept / 2**20, "resident_mib": held / 2**20}


def benchmark_clients(settings: BenchmarkSettings) -> dict[str, Any]:
    """Microseconds for each client and resident memory, by number of clients."""
    figures: dict[str, Any] = {"cohort": settings.cohort}
    for num_clients in settings.client_counts:
        found = figures_of(settings, num_clients)
        figures |= {f"{name}_{num_clients}": value for name, value in found.items()}
    return figures
