"""SCAFFOLD: control variates correct the drift of the clients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, Algorithm 1. Its server step size is the
rate of a `server_optimizer` that is plain SGD, 1 without one.

A client steps along g - c_i + c. Its new control is option II of line 12,
c_i - c + (x - y_i) / (K eta). With plain SGD that is the mean of the gradients g along
the way, and this is how it is computed here, so that it also holds with momentum,
weight decay and step sizes that vary. The server's c is the mean of the c_i over all
clients, which line 17 keeps true from a start at zero, whoever takes part. Clients are
averaged by number of examples (the paper: equally).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.core import aggregation, channel, communication
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.client_memory import with_client_memory
from fedjax_graph.core.clients import cohort_size


class ControlState(NamedTuple):
    """Holds the mean gradient of a client's steps, which its control becomes."""

    count: jax.Array  # [] int32, steps so far
    mean_gradient: Any  # of the steps so far, before the correction


def control(correction: Any) -> optax.GradientTransformation:
    """Adds c - c_i to the gradients, and remembers the mean of what came in."""

    def init(params):
        return ControlState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def add(gradients, state, params=None):
        del params
        count = state.count + 1
        mean = jax.tree.map(
            lambda m, g: m + (g - m) / count, state.mean_gradient, gradients
        )
        corrected = jax.tree.map(jnp.add, gradients, correction)
        return corrected, ControlState(count, mean)

    return optax.GradientTransformation(init, add)


def control_mean(config: FedAvgConfig, controls: Any, data: Data) -> tuple[Any, ...]:
    """Averages what all clients keep, [K, ...] -> [...], which crosses both ways."""
    mean = aggregation.client_mean(controls, data.client_weights)
    size = cohort_size(len(data.client_ids), config.participation)
    # clients send the changes of their controls, as many numbers
    return (communication.up(communication.down(mean, size), size),)


def scaffold(config: FedAvgConfig) -> FederatedAlgorithm:
    """Factory of SCAFFOLD on any task; a client's memory is its control.

    Raises:
      InputError: if the server is not to see models, or clients are to be private: they
        send control variates besides.
    """
    besides = "scaffold's clients send control variates besides their models"
    channel.refuse(config, besides, "privacy", "secure_aggregation")

    def update(task, model, own, client_data, key, data, num_rounds, c):
        adjust = control(jax.tree.map(jnp.subtract, c, own))
        result = task.update(model, client_data, key, data, adjust, num_rounds)
        return result.model, result.opt_state[0].mean_gradient, result.loss

    algorithm = with_client_memory(
        config,
        config.make_aggregator,
        first_memory=lambda model: jax.tree.map(jnp.zeros_like, model["params"]),
        update=update,
        shared=lambda state, data: control_mean(config, state.memories, data),
        server_optimizer=config.server_optimizer,
    )
    return algorithm._replace(reads_all_clients=True)  # for c
