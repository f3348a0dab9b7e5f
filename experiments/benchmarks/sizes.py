"""How large the data are that the hot loops are measured on."""

from absl import flags

from experiments import _flags
from experiments._client_flags import NUM_CLIENTS
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs import synthetic
from fedjax_graph.data.graphs.node_dataset import NodeDataset, largest_component

TRAFFIC = {"metr_la": (207, 1722), "pems_bay": (325, 2694), "tiny": (6, 12)}
SHAPE = flags.DEFINE_enum(
    "shape",
    "metr_la",
    list(TRAFFIC),
    "Of CNFGNN's data; with `tiny` the synthetic graphs of the other systems, and the "
    "arrays that give the machine's rates, are tiny as well: for a trial, no figures.",
)
CORA = {
    "num_nodes": 2708,
    "num_classes": 7,
    "num_features": 1433,
    "mean_degree": 3.9,
    "words_per_node": 18,
}
TINY = {
    "num_nodes": 600,
    "num_classes": 3,
    "num_features": 20,
    "mean_degree": 3.9,
    "words_per_node": 4,
}


def is_tiny() -> bool:
    """Whether --shape=tiny."""
    return SHAPE.value == "tiny"


def traffic() -> tuple[int, int]:
    """Numbers of sensors and edges at --shape."""
    return TRAFFIC[SHAPE.value]


def num_clients(default: int) -> int:
    """The value of --num_clients, or the default of a system."""
    return NUM_CLIENTS.value or default


def load_graph(connected: bool = False) -> NodeDataset:
    """The graph of --dataset, else a synthetic one of Cora's size or a tiny one.

    Args:
      connected: whether a dataset's largest component is taken.

    Raises:
      InputError: if the dataset's file cannot be read.
    """
    if _flags.DATASET.value is None:
        return synthetic.node_graph(**(TINY if is_tiny() else CORA))
    dataset = citation.load(_flags.DATASET.value, _flags.DATA_DIR.value)
    return largest_component(dataset) if connected else dataset
