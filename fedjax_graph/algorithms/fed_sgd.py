"""FedSGD with an optimizer at the server: one gradient of each client a round.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Section 2; the server's optimizer
as in Reddi et al., "Adaptive Federated Optimization", ICLR 2021. So FL-AGCNS (arXiv
2104.04141, Eq. 2) trains weights: g = sum_i (N_i / N) grad L_i, one Adam for all. The
gradients can be summed under encryption.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_graph.core import aggregation, channel, client_state, encryption, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import (
    FederatedConfig,
    FederatedState,
    task_algorithm,
    task_round,
)
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.server_optimizer import step_if


@dataclasses.dataclass(frozen=True)
class FedSGDConfig(FederatedConfig):
    """Configures FedSGD.

    The default server optimizer has the rate and decay of FL-AGCNS's code.
    """

    server_optimizer: OptimizerConfig = OptimizerConfig("adam", 0.02, weight_decay=5e-6)
    encryption: Literal["none", "ckks"] = "none"


def fed_sgd(config: FedSGDConfig) -> FederatedAlgorithm:
    """Factory of FedSGD on a task with gradients of all of a client's data at once.

    Raises:
      InputError: if the task has no such gradient, or privacy or
        secure aggregation is asked for under CKKS.
    """
    is_plain = config.encryption == "none"
    if not is_plain:
        reason = "under encryption='ckks' there is no noise on the mean"
        one = {"instead": "leave one of them out"}
        channel.refuse(config, reason, "privacy", **one)
        reason = "encryption='ckks' hides the gradients already"
        channel.refuse(config, reason, "secure_aggregation", **one)
    task = client_state.build_stateless(config.task, "fed_sgd")
    optimizer = config.server_optimizer.build()
    if task.train_loss is None:
        raise InputError(
            f"fed_sgd: the task {config.task.kind!r} has no gradient of all of a "
            "client's data at once; use fed_avg"
        )

    def client_gradient(model, client_data, key, data):
        take = jax.value_and_grad(task.train_loss, has_aux=True)
        (loss, stats), grads = take(
            model["params"], model["batch_stats"], client_data, key, data
        )
        return {"params": grads, "batch_stats": stats}, loss

    mean = aggregation.weighted_mean if is_plain else encryption.mean("ckks")
    gradient_round = task_round(
        config,
        task,
        client_gradient,
        mean,
        has_aux=not is_plain,
        is_gradient=True,
    )

    def init(key, data):
        del data
        model = task.init(key)
        models = trees.one_row(model)
        return FederatedState(models, jnp.int32(0), optimizer.init(models["params"]))

    def round_(state, data, key):
        merged, loss, *cost = gradient_round(state.models, data, key)
        params, opt_state = step_if(
            loss,
            optimizer,
            merged["params"],
            state.server_opt_state,
            state.models["params"],
        )
        models = merged | {"params": params}
        state = FederatedState(models, state.num_rounds + 1, opt_state)
        return state, {"train_loss": loss} | dict(*cost)

    return task_algorithm(task, init, round_, config)
