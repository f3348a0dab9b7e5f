"""The options of a study of subgraphs: how a graph is dealt out, and what trains."""

import dataclasses
from typing import Any, ClassVar

from experiments.studies.method_settings import MethodSettings
from experiments.studies.options import option
from fedjax_graph.core import batching
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs.partitions import DEALS, PARTITIONS, PartitionConfig
from fedjax_graph.tasks.subgraphs import MODELS, OF_METHODS

NUM_CLIENTS = 10
SHORT_RUN_DATASET = "synthetic_graph"
SHORT_RUN: dict[str, Any] = {"num_clients": 5, "num_rounds": 20}  # without a dataset
ADAM_RATE = 0.01
PLAIN_RATE = 0.1  # of SGD, chosen on Cora's validation nodes
ONLY_OF = {  # option: the partitions that it concerns
    "resolution": ("louvain", "louvain_plus"),
    "balance": ("louvain",),
    "deal": ("louvain",),
    "num_communities": ("metis_plus",),
    "concentration": ("label_dirichlet",),
    "least_nodes": ("label_dirichlet",),
}


def known_models() -> list[str]:
    """Names of the networks that clients may train, those of plugins last."""
    return [name for name in MODELS if name not in OF_METHODS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubgraphSettings(MethodSettings):
    """Settings of a comparison on one graph whose parts are the clients.

    By default those of OpenFGL's subgraph scenario.
    """

    system: ClassVar[str] = "subgraphs"
    subject: ClassVar[str] = "Methods on subgraphs"
    duration: ClassVar[str] = "Without flags: half a minute on a CPU."

    # As in `fl_agcns`: products are small enough for one device.
    num_cpu_devices: int | None = option(
        1, "Without an accelerator: CPU cores that share the work.", lower=1
    )
    num_clients: int | None = option(
        None, "Clients that share the graph; by default 10.", lower=1
    )
    partition: str = option(
        "louvain",
        "How the graph is cut: by communities, by METIS (with _plus in many parts, of "
        "which a client has those of similar labels), at random, or in skewed shares "
        "of each class.",
        choices=list(PARTITIONS),
    )
    resolution: float = option(
        PartitionConfig.resolution,
        "Of louvain and louvain_plus; more: smaller communities.",
        lower=1e-6,
    )
    balance: int = option(
        PartitionConfig.balance,
        "Of louvain: nodes by which a piece of a community stays below the clients' "
        "mean, and by --deal=in_turn those by which a client may exceed it.",
        lower=0,
    )
    deal: str = option(
        PartitionConfig.deal,
        "Of louvain: whether communities go to the client with the fewest nodes, or "
        "fill clients in turn, as OpenFGL's do.",
        choices=list(DEALS),
    )
    num_communities: int = option(
        PartitionConfig.num_communities,
        "Of metis_plus: parts of the graph that are dealt to clients.",
        lower=1,
    )
    concentration: float = option(
        PartitionConfig.concentration,
        "Of label_dirichlet: alpha; less: more skewed.",
        lower=1e-6,
    )
    least_nodes: int = option(
        PartitionConfig.least_nodes, "Of label_dirichlet: of each client.", lower=1
    )
    split_ratio: str = option(
        "20/40/40",
        "Training, validation and test nodes of each class of each client, in percent.",
    )
    model: str = option(
        "gcn",
        f"What clients train: {', '.join(known_models())}, or the name of a model of "
        "--plugin.",
    )
    hidden_size: int = option(64, "Of the model.", lower=1)
    dropout: float = option(0.5, "Of the model's hidden units.", lower=0.0, upper=0.99)
    local_epochs: int = option(
        3, "Steps of a client in a round, each on all its training nodes.", lower=1
    )
    learning_rate: float | None = option(
        None,
        f"Of Adam, by default {ADAM_RATE}: the clients', of fixed networks the "
        f"server's; of graphfl's clients' SGD, by default {PLAIN_RATE}.",
        lower=0.0,
    )
    weight_decay: float = option(5e-4, "Likewise.", lower=0.0)
    normalise_features: bool = option(
        False, "Divide each node's features by their sum."
    )

    def setting(self, name: str, default: Any) -> Any:
        """An option's value, else that of a run without a dataset, else `default`."""
        value = getattr(self, name)
        if value is not None:
            return value
        return SHORT_RUN.get(name, default) if self.dataset is None else default

    def check(self) -> None:
        """Checks what no single option tells.

        Raises:
          InputError: if there is no such model, options do not go together, or one
            cannot be read.
        """
        for name, concerned in ONLY_OF.items():
            if self.is_given(name) and self.partition not in concerned:
                raise InputError(f"--{name} is of --partition={' or '.join(concerned)}")
        if self.model not in known_models():
            known = ", ".join(known_models())
            raise InputError(f"--model={self.model}: unknown; known: {known}")
        self.fractions()
        self.client_optimizer_config()

    def fractions(self) -> tuple[float, float, float]:
        """Shares of training, validation and test nodes."""
        return batching.parse_fractions(self.split_ratio)

    def partition_config(self) -> PartitionConfig:
        """Settings of the partitions."""
        return PartitionConfig(
            **{
                x.name: getattr(self, x.name)
                for x in dataclasses.fields(PartitionConfig)
            }
        )

    def client_optimizer_config(self, is_plain: bool = False) -> OptimizerConfig:
        """What the clients step with; plain steps are SGD's unless another is given."""
        if not is_plain or self.client_optimizer is not None:
            return self.client_steps(self.adam())
        return self._stepping("sgd", PLAIN_RATE)

    def adam(self) -> OptimizerConfig:
        """Adam by the options, of clients or of the server of a fixed network."""
        return self._stepping("adam", ADAM_RATE)

    def _stepping(self, name: str, rate: float) -> OptimizerConfig:
        """An optimizer by the options, at a rate where they give none."""
        given = rate if self.learning_rate is None else self.learning_rate
        return OptimizerConfig(name, given, weight_decay=self.weight_decay)
