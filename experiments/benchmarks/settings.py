"""Settings of the benchmark: what is measured, how often, and how large."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import ClassVar

from experiments.studies.options import option
from experiments.studies.surroundings import DataOptions, MachineOptions
from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import synthetic
from fedjax_graph.data.graphs.node_dataset import NodeDataset, largest_component

BINARIES = ("cnfgnn", "sfl", "graphfl", "fl_agcns")
SYSTEMS = (*BINARIES, "clients", "start")
SFL_PARTS = ("graph_convolution", "weighted_mean", "distances", "images")
GRAPHFL_PARTS = ("round", "memory", "fed_avg", "first_layer")
CLIENT_PARTS = ("fed_avg", "plain_vmap", "drjax", "fedjax", "ditto", "ditto_in_files")
TRAFFIC = {"metr_la": (207, 1722), "pems_bay": (325, 2694), "tiny": (6, 12)}
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(DataOptions, MachineOptions):
    """What is measured of one system."""

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("coordinator", "num_processes", "process_id"),
            "the benchmarks run in one process",
        ),
        "compile_for": "what is here is measured; the binaries compile for other chips",
        "profile": "the binaries trace their rounds",
    }

    system: str = option("cnfgnn", "What to measure.", choices=SYSTEMS)
    json: bool = option(False, "Print one JSON line instead of a table.")
    repeats: int = option(3, "Measurements of each.", lower=1)
    shape: str = option(
        "metr_la",
        "Of CNFGNN's data; with `tiny` the synthetic graphs of the other systems, and "
        "the arrays that give the machine's rates, are tiny as well: for a trial, no "
        "figures.",
        choices=list(TRAFFIC),
    )
    num_clients: int | None = option(None, "Clients that share the data.", lower=1)
    # CNFGNN
    client_steps: int = option(4, "Optimization steps of each client.", lower=1)
    server_steps: int = option(4, "Optimization steps of the server.", lower=1)
    peer: bool = option(
        False, "Measure a PyTorch peer of CNFGNN, or of SFL on images, in turn."
    )
    peer_script: str | None = option(
        None,
        "With --peer: a script that prints a JSON line of CNFGNN, or images/s of SFL.",
    )
    peer_python: str = option(sys.executable, "A Python that has torch.")
    # SFL
    parts: tuple[str, ...] = option(
        SFL_PARTS, "What to measure of SFL.", choices=SFL_PARTS
    )
    models: int = option(325, "Clients whose models are aggregated.", lower=2)
    parameters: int = option(1_000_000, "Of each of those models.", lower=1)
    image_clients: int = option(100, "Clients in the round of ResNet9.", lower=2)
    image_batch: int | None = option(
        None, "Images of a client's one step; by default 128, on CPU 16.", lower=1
    )
    image_width: int | None = option(
        None, "Of ResNet9; by default the paper's 64, on CPU 8.", lower=1
    )
    # GraphFL
    graphfl_parts: tuple[str, ...] = option(
        GRAPHFL_PARTS, "What to measure of GraphFL.", choices=GRAPHFL_PARTS
    )
    meta_steps: int = option(10, "Inner steps of a client of GraphFL.", lower=1)
    chunk: tuple[int, ...] = option(
        (1, 2, 5, 10, 25),
        "Clients of GraphFL side by side on a device, besides all of them.",
        lower=1,
        is_repeated=True,
    )
    memory_steps: tuple[int, ...] = option(
        (1, 5, 10, 20), "Inner steps to tell the memory of.", lower=1, is_repeated=True
    )
    memory_chunk: tuple[int, ...] = option(
        (1, 5, 25), "Clients side by side, likewise.", lower=1, is_repeated=True
    )
    # FL-AGCNS
    search_population: int = option(60, "Codes in a population of FL-AGCNS.", lower=2)
    search_steps: int = option(5, "Steps of the SuperNet in a generation.", lower=1)
    search_codes: int = option(20, "Codes that such a step trains.", lower=1)
    # From a command to its first round
    starts: tuple[str, ...] = option(
        BINARIES, "Binaries whose start is measured.", choices=BINARIES
    )
    # Clients whose states the host keeps
    client_counts: tuple[int, ...] = option(
        (1000, 10_000, 100_000, 1_000_000),
        "How many clients there are, in ascending order.",
        lower=2,
        is_repeated=True,
    )
    client_parts: tuple[str, ...] = option(
        CLIENT_PARTS,
        "Whose rounds of them are measured: of the library, and FedAvg by a plain vmap "
        "and by DrJAX and FedJAX, of which one that is not installed is left out.",
        choices=CLIENT_PARTS,
    )
    cohort: int = option(1000, "Clients in a round of theirs.", lower=1)
    cohort_rounds: int = option(30, "Such rounds in each of --repeats.", lower=1)
    workdir: str | None = option(
        None, "Folder for a picture of the figures of many clients."
    )

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
          InputError: naming the flag.
        """
        super().__post_init__()
        if self.peer and self.peer_script is None:
            raise InputError("--peer needs --peer_script=FILE, which measures the peer")
        if self.peer and self.system not in ("cnfgnn", "sfl"):
            raise InputError(f"--peer is of --system=cnfgnn or sfl, not {self.system}")
        if self.workdir is not None and self.system != "clients":
            raise InputError(f"--workdir is of --system=clients, not {self.system}")
        if list(self.client_counts) != sorted(set(self.client_counts)):
            raise InputError("--client_counts: expected numbers in ascending order")

    def check_refused(self) -> None:
        """See `Options.check_refused`; and that what is given is measured."""
        super().check_refused()
        of_graphs = [x for x in ("dataset", "num_clients") if self.is_given(x)]
        if of_graphs and self.system not in ("graphfl", "fl_agcns"):
            raise InputError(
                f"--{of_graphs[0]} is of --system=graphfl or fl_agcns, not "
                f"{self.system}"
            )
        if self.peer and self.system == "sfl" and "images" not in self.parts:
            raise InputError("--peer is of --parts=images")

    @property
    def is_tiny(self) -> bool:
        """Whether only it is tried whether the benchmark runs."""
        return self.shape == "tiny"

    def load_graph(self, connected: bool = False) -> NodeDataset:
        """Loads the graph, or makes a synthetic one of Cora's size or a tiny one.

        Args:
          connected: whether a dataset's largest component is taken.

        Raises:
          InputError: if the dataset's file cannot be read.
        """
        if self.dataset is None:
            return synthetic.node_graph(**(TINY if self.is_tiny else CORA))
        dataset = data.load(self.dataset, self.data_dir, kind="graphs")
        return largest_component(dataset) if connected else dataset
