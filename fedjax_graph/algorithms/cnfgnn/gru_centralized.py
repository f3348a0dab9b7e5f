"""GRU (centralized), a baseline of CNFGNN's Table 7.

Meng, Rambhatla, Liu, "Cross-Node Federated Graph Neural Network for Spatio-Temporal
Data Modeling", KDD 2021: one GRU encoder-decoder on the windows of all sensors in one
place; nothing crosses. A round is one pass over the windows, and the optimizer lasts
over the rounds. Differences from the paper: none known. From the released code, where
it is silent: a minibatch is of windows, each of all sensors, and scheduled sampling.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.cnfgnn.joint_training import joint_training
from fedjax_graph.core import client_state, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import Checked
from fedjax_graph.core.federated import task_algorithm
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask, apply_all


@dataclasses.dataclass(frozen=True)
class GRUCentralizedConfig(Checked):
    """The task holds all: its local epochs are the passes of a round."""

    task: TrafficSeq2SeqTask = TrafficSeq2SeqTask()


class GRUCentralizedState(NamedTuple):
    """Holds the one model of all sensors and its optimizer's state."""

    models: Any  # {"params": ..., "batch_stats": {}}, leaves [1, ...]
    opt_state: optax.OptState
    num_steps: jax.Array  # [] int32, optimization steps so far


def gru_centralized(config: GRUCentralizedConfig) -> FederatedAlgorithm:
    """One GRU for all sensors, trained on their windows together."""
    settings = config.task
    # That of the task's own update, which would begin anew each round, is not used.
    unused = dataclasses.replace(
        settings.optimizer, schedule="constant", num_steps=None
    )
    plain = dataclasses.replace(settings, optimizer=unused)
    task = client_state.build_stateless(plain, "gru_centralized")
    optimizer = settings.optimizer.build()

    def init(key: jax.Array, data: TrafficData) -> GRUCentralizedState:
        del data
        models = trees.one_row(task.init(key))
        opt_state = optimizer.init(models["params"])
        return GRUCentralizedState(models, opt_state, jnp.int32(0))

    def gradients(params, data, batch):
        def loss(params):
            args = params, data, batch.starts, batch.feed_truth
            outputs, targets = apply_all(settings, *args)
            return jnp.sum(batch.weights * (outputs - targets) ** 2)

        return jax.value_and_grad(loss)(params)

    train = joint_training(
        gradients,
        optimizer,
        batch_size=settings.batch_size,
        num_epochs=settings.local_epochs,
        sampling_decay=settings.sampling_decay,
        masked_loss=settings.masked_loss,
    )

    def round_(state: GRUCentralizedState, data: TrafficData, key: jax.Array):
        params, opt_state, loss, steps = train(
            state.models["params"], state.opt_state, data, key, state.num_steps
        )
        models = state.models | {"params": params}
        state = GRUCentralizedState(models, opt_state, state.num_steps + steps)
        return state, {"train_loss": loss}

    return task_algorithm(task, init, round_)
