"""GraphFedAvg and MPFedAvg: parameters averaged over the neighbours in the graph.

The two baselines of arXiv:2507.09805, which report RMSE close to CNFGNN's on PEMS-BAY
and METR-LA. Each is a special case of SFL's aggregation: no read-out and no pull, every
client goes on from its own model. GraphFedAvg is V <- A A V with A row-normalised, self
edges included; MPFedAvg is v_i <- 0.8 v_i + 0.2 (mean of the neighbours' v), the mean
weighted by the edges. Both from the figures as they are quoted; the source itself was
not at hand.
"""

import dataclasses

import jax.numpy as jnp

from fedjax_graph.core import aggregation, channel, graphs
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.federated import FederatedConfig, federated


def graph_fed_avg(config: FederatedConfig) -> FederatedAlgorithm:
    """GraphFedAvg on any task."""
    channel.check_aggregator(config)
    return federated(
        config,
        lambda state, data, key: aggregation.graph_convolution(
            graphs.client_adjacency(data), num_steps=2
        ),
    )


@dataclasses.dataclass(frozen=True)
class MPFedAvgConfig(FederatedConfig):
    """Configures MPFedAvg: the share of its own model in what a client gets."""

    own_share: float = limited(0.8, lower=0, upper=1)


def mp_fed_avg(config: MPFedAvgConfig) -> FederatedAlgorithm:
    """MPFedAvg on any task; a client without neighbours keeps its model."""
    channel.check_aggregator(config)

    def average_neighbours(state, data, key):
        del state, key
        adjacency = graphs.client_adjacency(data)
        return aggregation.graph_convolution(
            adjacency * (1 - jnp.eye(len(adjacency))),
            num_steps=1,
            alpha=1 - config.own_share,
        )

    return federated(config, average_neighbours)
