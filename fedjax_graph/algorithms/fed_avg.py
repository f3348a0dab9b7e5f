"""FedAvg: everybody starts from the mean of all models.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1. Differences from the
paper: none known. `aggregation_noise` is what the code released with SFL adds to its
averaging baselines. With a `server_optimizer` it is FedOpt, see `fed_opt`.
"""

import dataclasses
from typing import Any

import jax

from fedjax_graph.core import aggregation, channel
from fedjax_graph.core.aggregators import NamedAggregator
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_state import Score
from fedjax_graph.core.federated import FederatedConfig, federated
from fedjax_graph.core.optimizers import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class FedAvgConfig(NamedAggregator, FederatedConfig):
    """What every method that averages has."""

    # standard deviation, at each aggregation
    aggregation_noise: float = limited(0.0, lower=0)
    server_optimizer: OptimizerConfig | None = None  # None: the mean is taken over
    score: Score = "aggregated"  # or a client's model after its last local steps

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        super().__post_init__()
        named = None if self.aggregation_noise else self.named_aggregator()
        channel.check_aggregator(self, named)
        if self.aggregation_noise and self.aggregator == FedAvgConfig.aggregator:
            reason = "beside aggregation_noise, noise would be on each model"
            channel.refuse(self, reason, "privacy", instead="leave one of them out")

    def make_aggregator(
        self, state: Any, data: Data, key: jax.Array
    ) -> aggregation.Aggregator:
        """The aggregator of a round: the named one, with `aggregation_noise` added."""
        del state, data
        aggregate = self.named_aggregator()
        return aggregation.with_noise(aggregate, key, self.aggregation_noise)


def fed_avg(config: FedAvgConfig, **settings: Any) -> FederatedAlgorithm:
    """Factory of FedAvg on any task.

    Args:
      config: of the method.
      settings: of `federated`: what a method that averages does besides.
    """
    return federated(
        config,
        config.make_aggregator,
        server_optimizer=config.server_optimizer,
        **settings,
    )
