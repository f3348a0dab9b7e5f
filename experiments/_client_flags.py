"""Flags of binaries whose datasets do not say who the clients are."""

from absl import flags

NUM_CLIENTS = flags.DEFINE_integer(
    "num_clients", None, "Clients that share the data.", lower_bound=1
)
PARTITION = flags.DEFINE_enum(
    "partition", "random", ["random", "metis"], "How a graph is cut into subgraphs."
)
