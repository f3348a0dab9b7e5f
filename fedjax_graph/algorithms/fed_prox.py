"""FedProx: FedAvg whose clients are pulled back to the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020, Eq. 2: F_i(v) + mu/2 |v - w|^2. Differences from the paper: every
client runs the same number of local steps, unless the config's `misbehaviour` makes
some of them slow; mu = 0.01 is our choice.
"""

import dataclasses

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.proximal import pull


@dataclasses.dataclass(frozen=True)
class FedProxConfig(FedAvgConfig):
    """Configures FedProx: the pull of local steps to the global model."""

    proximal_weight: float = limited(0.01, lower=0)  # mu


def fed_prox(config: FedProxConfig) -> FederatedAlgorithm:
    """Factory of FedProx on any task."""

    def update(task, w, client_data, key, data, num_rounds):
        adjust = pull(config.proximal_weight, centre=w)
        result = task.update(w, client_data, key, data, adjust, num_rounds)
        return result.model, result.loss

    return fed_avg(config, update=update)
