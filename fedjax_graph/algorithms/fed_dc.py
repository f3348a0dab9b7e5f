"""FedDC: each client tracks its drift from the server, which is then corrected.

Gao, Fu, Li, Chen, Xu, Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift
Decoupling and Correction", CVPR 2022. A client with drift h_i, which went g_i in its
last round where all went g on average, minimises

    F_i(theta) + alpha / 2 |h_i + theta - w|^2 + <theta, g_i - g> / (eta K)    (1)
    h_i <- h_i + theta_i - w                                                   (2)
    w <- sum_i (N_i / N) (theta_i + h_i)                                       (3)

with K steps of rate eta. Equation numbers are those of this list. With plain SGD
-g_i / (eta K) is the mean of the gradients of (1) along the way, and this is how it is
computed here, so that it also holds with momentum and step sizes that vary. g is the
mean over all clients. alpha = 0.1 is that of the released code's MNIST; it has 0.01 for
CIFAR-10 and CIFAR-100, and divides alpha by a client's examples over the clients' mean.

Differences from the paper: batch statistics are averaged without a drift. OpenFGL 1.1.0
differs: it has no penalties in the first round, its gradient of the last term of (1) is
g_i / (eta K) without g, and (2) adds the step of the round before.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.algorithms.scaffold import control, control_mean
from fedjax_graph.core import channel
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_memory import with_client_memory
from fedjax_graph.core.proximal import pull


@dataclasses.dataclass(frozen=True)
class FedDCConfig(FedAvgConfig):
    """Configures FedDC: the weight of the penalty on a client's drift."""

    drift_weight: float = limited(0.1, lower=0)  # alpha


def fed_dc(config: FedDCConfig) -> FederatedAlgorithm:
    """Factory of FedDC on any task; memories are h_i and the last mean gradient.

    Raises:
      InputError: if the server is not to see models, or clients are to be private.
    """
    besides = "fed_dc's clients send gradients besides their models"
    channel.refuse(config, besides, "privacy", "secure_aggregation")

    def first_memory(model):
        zeros = jax.tree.map(jnp.zeros_like, model["params"])
        return {"drift": zeros, "gradient": zeros}

    def update(task, model, own, client_data, key, data, num_rounds, mean):
        w, drift = model["params"], own["drift"]
        correction = jax.tree.map(jnp.subtract, mean, own["gradient"])
        centre = {"params": jax.tree.map(jnp.subtract, w, drift)}
        adjust = optax.chain(pull(config.drift_weight, centre), control(correction))
        result = task.update(model, client_data, key, data, adjust, num_rounds)
        _, controls = result.opt_state[0]
        theta = result.model["params"]
        drift = jax.tree.map(lambda h, v, c: h + v - c, drift, theta, w)  # Eq. 2
        sent = jax.tree.map(jnp.add, theta, drift)  # of Eq. 3
        gradient = jax.tree.map(jnp.add, controls.mean_gradient, correction)
        memory = {"drift": drift, "gradient": gradient}
        return result.model | {"params": sent}, memory, result.loss

    algorithm = with_client_memory(
        config,
        config.make_aggregator,
        first_memory=first_memory,
        update=update,
        shared=lambda state, data: control_mean(
            config, state.memories["gradient"], data
        ),
        server_optimizer=config.server_optimizer,
    )
    return algorithm._replace(reads_all_clients=True)  # for g
