"""LG-FedAvg: personal representation layers, a shared head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act
Globally: Federated Learning with Local and Global Representations", arXiv:2001.01523,
Algorithm 1. Differences from the paper: no warm start by FedAvg, and no auxiliary or
adversarial losses, which its image experiments do without as well.
"""

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.task import Task
from fedjax_graph.core.trees import IsPersonal


def is_representation(task: Task) -> IsPersonal:
    """Factory of path -> whether a leaf is personal: all but the head are."""
    return lambda path: not task.is_head(path)


def lg_fed_avg(config: FedAvgConfig) -> FederatedAlgorithm:
    """Factory of LG-FedAvg on any task."""
    return fed_avg(config, is_personal=is_representation)
