"""FedAvg: everybody starts from the mean of all models.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1. Differences from the
paper: none known. `aggregation_noise` is what the code released with SFL adds to its
averaging baselines.
"""

import dataclasses

import jax

from fedjax_graph.core import aggregation
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.federated import FederatedConfig, FederatedState, federated


@dataclasses.dataclass(frozen=True)
class FedAvgConfig(FederatedConfig):
    aggregation_noise: float = 0.0  # standard deviation, at each aggregation
    aggregator: str = "weighted_mean"  # a name of `aggregation.AGGREGATORS`

    def average(
        self, state: FederatedState, data, key: jax.Array
    ) -> aggregation.Aggregator:
        """The named aggregator; by default the mean by number of examples."""
        del state, data
        aggregate = aggregation.AGGREGATORS.look_up(self.aggregator)
        return aggregation.with_noise(aggregate, key, self.aggregation_noise)


def fed_avg(config: FedAvgConfig) -> FederatedAlgorithm:
    """FedAvg on any task."""
    return federated(config, config.average)
