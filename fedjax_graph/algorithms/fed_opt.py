"""FedAvgM, FedAdam, FedYogi: FedAvg whose server steps with an optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithms 1 and 2; beta_1 = 0.9, beta_2 = 0.99 and tau = 1e-3
are the paper's, which chooses the server's rate for each problem: ours is 0.01. FedAvgM
is Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", arXiv 1909.06335, with rate 1 and momentum 0.9.

Differences from Algorithm 2: the moments' bias is corrected, as Adam's definition has
it; they start at 0 (FedYogi's at tau^2, FedAdagrad's sum of squares at 0.1), where the
paper has v = tau^2 or more; clients are averaged by number of examples.
"""

import dataclasses

from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.core.optimizers import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class FedAvgMConfig(FedAvgConfig):
    """FedAvg with momentum at the server."""

    server_optimizer: OptimizerConfig | None = OptimizerConfig("sgd", 1.0, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class FedAdamConfig(FedAvgConfig):
    """FedAvg with Adam at the server."""

    server_optimizer: OptimizerConfig | None = OptimizerConfig(
        "adam", 0.01, momentum=0.9, second_momentum=0.99, epsilon=1e-3
    )


@dataclasses.dataclass(frozen=True)
class FedYogiConfig(FedAvgConfig):
    """FedAvg with Yogi at the server."""

    server_optimizer: OptimizerConfig | None = OptimizerConfig(
        "yogi", 0.01, momentum=0.9, second_momentum=0.99, epsilon=1e-3
    )
