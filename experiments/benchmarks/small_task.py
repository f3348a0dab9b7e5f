"""A small regression for the benchmark of many clients.

One hidden layer of 16 units, 289 parameters; each client has 8 examples and takes 10
steps of SGD on all of them.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import clients
from fedjax_graph.core.local import local_steps
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import Task

NUM_EXAMPLES, NUM_FEATURES, WIDTH, NUM_STEPS = 8, 16, 16, 10
RATE = 0.05
Params = dict[str, jax.Array]


class Examples(NamedTuple):
    """What the clients train on."""

    x: np.ndarray  # [K, M, F]
    y: np.ndarray  # [K, M]
    client_ids: np.ndarray  # [K]
    client_weights: np.ndarray  # [K]


def make_examples(num_clients: int) -> Examples:
    """Random ones."""
    rng = np.random.default_rng(0)
    shape = (num_clients, NUM_EXAMPLES, NUM_FEATURES)
    x = rng.standard_normal(shape, np.float32)
    ids = np.arange(num_clients, dtype=np.int32)
    weights = np.full(num_clients, NUM_EXAMPLES, np.float32)
    return Examples(x, x[..., 0] * x[..., 1], ids, weights)


def init(key: jax.Array) -> Params:
    """Weights of the hidden layer and of the output."""
    hidden = jax.random.normal(key, (NUM_FEATURES, WIDTH)) / NUM_FEATURES**0.5
    zeros = jnp.zeros(WIDTH)
    return {"hidden": hidden, "bias": zeros, "output": zeros, "mean": jnp.zeros(())}


def num_parameters() -> int:
    """Of a model."""
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))


def squared_error(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of a client's examples, [M, F] and [M]."""
    hidden = jnp.tanh(x @ params["hidden"] + params["bias"])
    return jnp.mean((hidden @ params["output"] + params["mean"] - y) ** 2)


@dataclasses.dataclass(frozen=True)
class SmallTask:
    """The regression as a task of the library."""

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
