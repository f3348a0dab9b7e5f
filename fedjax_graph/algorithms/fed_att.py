"""FedAtt: the server moves towards each client by layer-wise attention.

Ji, Long, Pan, Zhu, Jiang, Wang, "Learning Private Neural Language Modeling with
Attentive Aggregation", IJCNN 2019, Algorithm 1. From the code released with SFL, where
this is a baseline: step size 1 and the L1 distance; its noise is `aggregation_noise`.
"""

import dataclasses

from fedjax_graph.core import aggregation, channel, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.federated import FederatedConfig, federated


@dataclasses.dataclass(frozen=True)
class FedAttConfig(FederatedConfig):
    """Configures FedAtt: the server's step along the attention-weighted mean."""

    attention_step_size: float = limited(1.0, lower=0)
    # standard deviation, at each aggregation
    aggregation_noise: float = limited(0.0, lower=0)


def fed_att(config: FedAttConfig) -> FederatedAlgorithm:
    """FedAtt on any task."""
    channel.check_aggregator(config)

    def attend(state, data, key):
        del data
        w, _ = trees.partition(state.models, trees.is_of_optimizer)
        return aggregation.with_noise(
            aggregation.attention(w, config.attention_step_size),
            key,
            config.aggregation_noise,
        )

    return federated(config, attend)
