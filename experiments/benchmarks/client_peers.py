"""A round of FedAvg on the small task as others write it.

A plain `vmap`; DrJAX (Rush et al., "DrJAX: Scalable and Differentiable MapReduce
Primitives in JAX", 2024); and FedJAX (Ro, Suresh, Wu, "FedJAX: Federated learning
simulation with JAX", 2021), by its own FedAvg. Both are in the extra `[peers]`.
"""

from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.small_task import (
    NUM_EXAMPLES,
    NUM_STEPS,
    RATE,
    Params,
    squared_error,
)

Average = Callable[[Params, np.ndarray, np.ndarray], Params]
"""(model, x [C, M, F], y [C, M]) -> the mean of a cohort's models after their steps."""


def local_sgd(params: Params, x: jax.Array, y: jax.Array) -> Params:
    """A client's model after its steps."""

    def step(params, _):
        grads = jax.grad(squared_error)(params, x, y)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), None

    return jax.lax.scan(step, params, length=NUM_STEPS)[0]


def plain_vmap() -> Average:
    """By hand."""

    def average(params, x, y):
        models = jax.vmap(local_sgd, (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda p: jnp.mean(p, axis=0), models)

    return jax.jit(average)


def drjax() -> Average:
    """By DrJAX's broadcast, map and mean, along the axis `clients` of the mesh.

    Raises:
      ImportError: if it is not there.
    """
    import drjax

    def average(params, x, y):
        @drjax.program(clients=len(x))
        def round_(params, x, y):
            models = drjax.map_fn(local_sgd, (drjax.broadcast(params), x, y))
            return drjax.reduce_mean(models)

        return round_(params, x, y)

    return jax.jit(average)


def fedjax() -> Average:
    """By FedJAX's `federated_averaging`, which calls a program for each client's step.

    Release 0.0.17 asks for `jax.tree_map`, which it is given while it runs. All
    clients have one key, as their batches are not shuffled.

    Raises:
      ImportError: if it is not there.
    """
    import fedjax

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        lambda params, batch, key: jax.grad(squared_error)(params, **batch),
        client_optimizer=fedjax.optimizers.sgd(RATE),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            NUM_EXAMPLES, num_epochs=None, num_steps=NUM_STEPS, skip_shuffle=True
        ),
    )
    key = jax.random.key(0)

    def average(params, x, y):
        cohort = [
            (i, fedjax.ClientDataset({"x": x[i], "y": y[i]}), key)
            for i in range(len(x))
        ]
        with mock.patch.object(jax, "tree_map", jax.tree.map, create=True):
            return algorithm.apply(algorithm.init(params), cohort)[0].params

    return average


PEERS = {"plain_vmap": plain_vmap, "drjax": drjax, "fedjax": fedjax}
