"""No federation: every client trains alone. The yardstick of any cooperation."""

from fedjax_graph import aggregation, federated
from fedjax_graph.algorithm import FederatedAlgorithm
from fedjax_graph.federated import FederatedConfig


def local_training(config: FederatedConfig) -> FederatedAlgorithm:
    """Local training on any task; rounds go on where the last one ended."""
    return federated.federated(
        config,
        lambda state, data, key: aggregation.none,
        is_personal=lambda task: federated.everything,
    )
