"""FedPer: a shared base, a personal head.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization
Layers", arXiv:1912.00818, Algorithms 1 and 2. The head is the last linear layer.
All heads start equal. Of a model that is a linear layer alone, as SGC, nothing is
shared: clients train by themselves.
"""

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core.algorithm import FederatedAlgorithm


def fed_per(config: FedAvgConfig) -> FederatedAlgorithm:
    """Factory of FedPer on any task."""
    return fed_avg(config, is_personal=lambda task: task.is_head)
