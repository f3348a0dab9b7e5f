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
from fedjax_graph.core import aggregation, communication
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.clients import cohort_size
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import scored, task_round
from fedjax_graph.core.server import server_step


class ControlState(NamedTuple):
    count: jax.Array  # [] int32, steps so far
    mean_gradient: Any  # of the steps so far, before the correction


class ScaffoldState(NamedTuple):
    models: Any  # x, leaves [1, ...]
    num_rounds: jax.Array  # [] int32
    server_opt_state: Any  # of the server's optimizer, () without one
    controls: Any  # c_i, leaves [K, ...]


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


def scaffold(config: FedAvgConfig) -> FederatedAlgorithm:
    """Factory of SCAFFOLD on any task.

    Raises:
      InputError: if the server is not to see models, or clients are to be private: they
        send control variates besides.
    """
    if config.privacy is not None:
        raise InputError(
            "privacy: scaffold's clients send control variates besides their models, "
            "which no noise hides; use fed_avg or fed_prox"
        )
    if config.secure_aggregation != "none":
        raise InputError(
            f"secure_aggregation={config.secure_aggregation}: scaffold's clients send "
            "control variates besides, which it does not hide; use fed_avg or fed_prox"
        )
    task, server = config.task.build(), server_step(config.server_optimizer)

    def update(own, client_data, key, data, num_rounds, c):
        adjust = control(jax.tree.map(jnp.subtract, c, own["control"]))
        result = task.update(own["model"], client_data, key, data, adjust, num_rounds)
        new = result.opt_state[0].mean_gradient
        return {"model": result.model, "control": new}, result.loss

    def is_personal(path):
        return path[0].key == "control"

    def init(key, data):
        model = task.init(key)
        num_clients = len(data.client_ids)
        controls = jax.tree.map(
            lambda x: jnp.zeros((num_clients, *x.shape)), model["params"]
        )
        models = jax.tree.map(lambda x: x[None], model)
        return ScaffoldState(models, jnp.int32(0), server.init(models), controls)

    def round_(state, data, key):
        train_key, aggregate_key = task.round_keys(key)
        c = aggregation.client_mean(state.controls, data.client_weights)
        size = cohort_size(len(data.client_ids), config.participation)
        c = communication.up(communication.down(c, size), size)  # and as many changes
        average = config.average(state, data, aggregate_key)
        run = task_round(config, task, update, average, is_personal=is_personal)
        own = {"model": state.models, "control": state.controls}
        own, loss = run(own, data, train_key, state.num_rounds, c)
        after = state._replace(num_rounds=state.num_rounds + 1, controls=own["control"])
        return server.step(after, own["model"]), {"train_loss": loss}

    return scored(task, init, round_)._replace(reads_all_clients=True)  # for c
