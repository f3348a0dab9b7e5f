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
import optax

from fedjax_graph.core import encryption
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import (
    FederatedConfig,
    FederatedState,
    scored,
    task_round,
)

SERVER_OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}


@dataclasses.dataclass(frozen=True)
class FedSGDConfig(FederatedConfig):
    server_optimizer: str = "adam"
    server_rate: float = 0.02
    weight_decay: float = 5e-6  # added to the gradient
    encryption: Literal["none", "ckks"] = "none"

    def optimizer(self) -> optax.GradientTransformation:
        """The server's.

        Raises:
          InputError: if its name is unknown.
        """
        if self.server_optimizer not in SERVER_OPTIMIZERS:
            raise InputError(
                f"unknown optimizer {self.server_optimizer!r}; known: "
                f"{', '.join(SERVER_OPTIMIZERS)}"
            )
        return optax.chain(
            optax.add_decayed_weights(self.weight_decay),
            SERVER_OPTIMIZERS[self.server_optimizer](self.server_rate),
        )


def fed_sgd(config: FedSGDConfig) -> FederatedAlgorithm:
    """FedSGD on a task whose clients take gradients of all their data at once.

    Raises:
      InputError: if the task has no such gradient.
    """
    task, optimizer = config.task.build(), config.optimizer()
    if task.train_loss is None:
        raise InputError(
            f"fed_sgd: the task {config.task.kind!r} trains on minibatches; use fed_avg"
        )

    def client_gradient(model, own, key, data):
        take = jax.value_and_grad(task.train_loss, has_aux=True)
        (loss, stats), grads = take(
            model["params"], model["batch_stats"], own, key, data
        )
        return {"params": grads, "batch_stats": stats}, loss

    gradient_round = task_round(
        config, task, client_gradient, encryption.mean(config.encryption), has_aux=True
    )

    def init(key, data):
        del data
        model = task.init(key)
        models = jax.tree.map(lambda x: x[None], model)
        return FederatedState(models, jnp.int32(0), optimizer.init(models["params"]))

    def round_(state, data, key):
        params = state.models["params"]
        merged, loss, cost = gradient_round(state.models, data, key)
        updates, opt_state = optimizer.update(merged["params"], state.memory, params)
        models = merged | {"params": optax.apply_updates(params, updates)}
        state = FederatedState(models, state.num_rounds + 1, opt_state)
        return state, {"train_loss": loss} | cost

    return scored(task, init, round_)
