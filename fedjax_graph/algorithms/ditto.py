"""Ditto: FedAvg, and beside it a personal model pulled towards the server's.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, Algorithm 1: F_i(v) + lambda/2 |v - w|^2. The personal
steps of a round use the model that the server sent, and as many minibatches as the
global ones. lambda = 0.1 is our choice. Where clients' optimizers go on, a client keeps
a state for each of its two models.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import aggregation, client_state
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.federated import FederatedState, task_algorithm, task_round
from fedjax_graph.core.proximal import pull


@dataclasses.dataclass(frozen=True)
class DittoConfig(FedAvgConfig):
    """Configures Ditto: the pull of personal models to the global one."""

    personal_weight: float = limited(0.1, lower=0)  # lambda


class DittoState(NamedTuple):
    """Holds the global model and each client's personal one."""

    server: FederatedState  # of FedAvg
    models: Any  # v, leaves [K, ...]


def ditto(config: DittoConfig) -> FederatedAlgorithm:
    """Factory of Ditto on any task; the personal models are what is scored."""
    client_state.refuse_local(config, "ditto scores personal models")
    task = client_state.build_task(config.task)
    averaging = fed_avg(config)

    def update(v, client_data, key, data, num_rounds, w):
        adjust = pull(config.personal_weight, centre=w)
        result = task.update(v, client_data, key, data, adjust, num_rounds)
        return result.model, result.loss

    train = task_round(config, task, update, aggregation.none)

    def init(key, data):
        server = averaging.init(key, data)
        personal = aggregation.broadcast(server.models, len(data.client_ids))
        return DittoState(server, personal)

    def round_(state, data, key):
        common = client_state.plain(state.server.models)
        aggregation.check_common(common, "ditto")
        server, _ = averaging.round(state.server, data, key)
        train_key, _ = task.round_keys(key)  # the cohort and minibatches of `server`
        w = jax.tree.map(lambda x: x[0], common)
        num_rounds = state.server.num_rounds
        models, loss = train(state.models, data, train_key, num_rounds, w)
        return DittoState(server, models), {"train_loss": loss}

    return task_algorithm(task, init, round_, config)
