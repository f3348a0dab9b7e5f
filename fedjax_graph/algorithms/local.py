"""No federation: every client trains alone. The yardstick of any cooperation."""

from fedjax_graph.core import aggregation
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.federated import FederatedConfig, federated


def local_training(config: FederatedConfig) -> FederatedAlgorithm:
    """Local training on any task; rounds go on where the last one ended."""
    return federated(config, lambda state, data, key: aggregation.none)
