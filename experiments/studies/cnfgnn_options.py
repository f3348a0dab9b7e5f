"""The options of CNFGNN's study, and which methods and sweeps they name."""

import dataclasses
from typing import Any, ClassVar

from experiments.studies import cnfgnn_defaults as paper
from experiments.studies.base import titles_of
from experiments.studies.methods import check_concerns, check_participation, having
from experiments.studies.options import option
from experiments.studies.traffic import TrafficStudy
from fedjax_graph import algorithms
from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig
from fedjax_graph.algorithms.cnfgnn.gru_fmtl import REGULARISERS
from fedjax_graph.core import communication
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import pretrained
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask

METHOD_OPTIONS = {  # field: options that concern the methods whose configs have it
    "gn_layers": ("hidden_size", "gn_layers", "gn_mlp_sizes", "server_dtype"),
    "edges_per_chunk": ("edges_per_chunk",),
    "server_rounds": ("server_rounds",),
    "server_batch_size": ("server_batch_size",),
    "exchange_bits": ("exchange_bits",),
    "average_every_step": ("average_every_step",),
    "task": ("gru_hidden_size", "gru_layers"),
    "regulariser": ("fmtl_regulariser", "fmtl_weight", "fmtl_sync_every"),
}
TASK_OPTIONS = {  # field, or of a task: what does not read the option all the same
    "client_batch_size": (),
    "client_rounds": ("gru_centralized", "gru_fmtl"),  # have passes of their own
    "sampling_decay": ("gru_fedavg",),  # whose k is 1
    "masked_loss": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CNFGNNOptions(TrafficStudy):
    """What can be chosen of CNFGNN, its strategies and its baselines."""

    subject: ClassVar[str] = "CNFGNN and its baselines"
    duration: ClassVar[str] = "Without flags: some two minutes on a CPU."
    system: ClassVar[str] = "cnfgnn"

    strategy: tuple[str, ...] | None = option(
        None,
        "CNFGNN's training strategies to run, before --methods if given.",
        choices=list(paper.STRATEGIES),
    )
    pretrained: str | None = option(
        None,
        "With --eval_only, in place of --workdir: a model that comes with the package "
        f"({', '.join(pretrained.names())}), or the .npz of one.",
    )
    sampling_decay: float | None = option(
        None,
        "k of scheduled sampling, but for GRU + FedAvg, which has 1; by default 1000, "
        "on a small dataset times (CNFGNN's steps per global round) / 688, METR-LA's "
        "own.",
        lower=0.1,
    )
    client_rounds: int | None = option(
        None, "R_c, local passes in a global round.", lower=1
    )
    server_rounds: int | None = option(
        None, "R_s, passes of the server's network.", lower=1
    )
    client_batch_size: int | None = option(
        None, "Windows in a client's minibatch.", lower=1
    )
    server_batch_size: int | None = option(
        None, "Windows in a server's minibatch.", lower=1
    )
    client_learning_rate: float | None = option(
        None, "Learning rate on the clients.", lower=0.0
    )
    server_learning_rate: float | None = option(
        None, "Learning rate on the server.", lower=0.0
    )
    hidden_size: int | None = option(
        None, "Of CNFGNN's encoder and embedding.", lower=1
    )
    gn_layers: int | None = option(None, "Layers of the graph network.", lower=1)
    gn_mlp_sizes: tuple[int, ...] | None = option(
        None, "Layer sizes of the graph network's MLPs.", lower=1
    )
    gru_hidden_size: int | None = option(
        None,
        "Of the GRU baselines; 100 for the 63K models, 200 for 727K.",
        lower=1,
    )
    gru_layers: int | None = option(
        None, "Of the GRU baselines; 1 for the 63K models, 2 for 727K.", lower=1
    )
    fmtl_regulariser: str = option(
        "laplacian",
        "Of GRU + FMTL: the paper's, or the released code's.",
        choices=list(REGULARISERS),
    )
    fmtl_weight: float | None = option(
        None, "lambda of GRU + FMTL; by default 0.1, of frobenius 0.01.", lower=0.0
    )
    fmtl_sync_every: int | None = option(
        None,
        "Passes between exchanges of GRU + FMTL; by default 1, of frobenius 5.",
        lower=1,
    )
    masked_loss: bool = option(
        False, "Missing readings count neither in training nor for the best."
    )
    server_dtype: str = option(
        "float32",
        "What the graph network computes in; parameters and Adam stay float32.",
        choices=["float32", "bfloat16"],
    )
    edges_per_chunk: str = option(
        "auto",
        "Edges whose messages the graph network holds at once: a number, 0 for all, or "
        "auto: all, but as many as there are sensors where a layer's messages for a "
        "minibatch take more than 512 MiB.",
    )
    exchange_bits: str = option(
        "32",
        "Of each number that CNFGNN's strategies exchange for the graph network: "
        "hidden states, embeddings and their gradients.",
        choices=[str(bits) for bits in communication.BITS],
    )
    target_rmse: float | None = option(
        None,
        "Report the bytes that each method exchanges until its validation RMSE, in "
        "the unit of the data, is no higher.",
        lower=0.0,
    )
    average_every_step: bool = option(
        False, "SL + FedAvg averages after every minibatch, not once a round."
    )
    train_fraction: float | None = option(
        None,
        "Train on this share of the sensors, the first from west to east, and test on "
        "all.",
    )
    sweep: str | None = option(
        None,
        "Run all pairs of --client_rounds and --server_rounds, whatever their own "
        "values, and draw heat maps.",
        choices=["rounds"],
    )
    sweep_values: tuple[int, ...] | None = option(
        None, "Of both; by default the paper's 1, 10 and 20.", lower=1
    )

    def __post_init__(self) -> None:
        """Checks every option, and those whose values exclude each other.

        Raises:
          InputError: naming the flag.
        """
        share, sizes = self.train_fraction, self.gn_mlp_sizes
        if isinstance(share, int | float) and not 0 < share < 1:
            raise InputError(
                f"--train_fraction={share:g}: expected a number between 0 and 1"
            )
        super().__post_init__()
        if sizes is not None and len(sizes) < 2:
            raise InputError(
                f"--gn_mlp_sizes={','.join(map(str, sizes))}: expected two or more "
                "positive whole numbers, such as 256,256,128"
            )
        chunk = self.edges_per_chunk
        if chunk != "auto" and not (chunk.isascii() and chunk.isdecimal()):
            raise InputError(
                f"--edges_per_chunk={chunk}: expected auto, 0 for all at once, or a "
                "positive number"
            )
        if self.sweep_values and not self.sweep:
            raise InputError("--sweep_values needs --sweep")
        named = self.workdir or self.methods or self.strategy
        if self.pretrained is not None and (not self.eval_only or named):
            raise InputError(
                f"--pretrained={self.pretrained}: is scored, with --eval_only and "
                "without --workdir, --methods and --strategy, which it says itself"
            )
        if self.sweep and self.eval_only:
            raise InputError("--eval_only scores a single run; name its folder")
        if len(set(self.swept_values)) < len(self.swept_values):
            raise InputError("--sweep_values: expected different numbers")

    def known_methods(self) -> dict[str, str]:
        """See `Options.known_methods`."""
        return known()

    @property
    def is_inductive(self) -> bool:
        """Whether only a share of the sensors is trained on."""
        return self.train_fraction is not None

    @property
    def swept_values(self) -> tuple[int, ...]:
        """Client and server rounds of a sweep, as given or the paper's."""
        return self.sweep_values or paper.SWEPT

    def setting(self, name: str, default: Any = None) -> Any:
        """An option's value, else the dataset's own, else `default`."""
        value = getattr(self, name)
        if value is not None:
            return value
        own = paper.of_dataset(self.network_name, self.is_inductive)
        return own.get(name, default)

    def compiled_methods(self) -> tuple[str, ...] | None:
        """See `Study.compiled_methods`; a strategy names one as well."""
        return self.methods if self.strategy else super().compiled_methods()

    def chosen_methods(self) -> list[str]:
        """The methods that `strategy` and `methods` name, each once.

        Raises:
          InputError: if one is unknown, or cannot do what other options ask, or an
            option concerns none of them.
        """
        strategies = [paper.STRATEGIES[name][0] for name in self.strategy or ()]
        default = () if strategies else self._default_methods()
        papers = self.methods == ("all",)
        named = paper.METHODS if papers else self.choose_methods(known(), default)
        methods = strategies + [name for name in named if name not in strategies]
        for method in methods:
            self._check_fits(method)
        for field, names in METHOD_OPTIONS.items():
            concerned = having(field, methods, paper.registered)
            check_concerns(self, names, methods, concerned)
        of_tasks = having("task", methods, paper.registered)
        for name, passed_over in TASK_OPTIONS.items():
            concerned = [x for x in of_tasks if x not in passed_over]
            concerned += having(name, methods, paper.registered)
            check_concerns(self, (name,), methods, concerned)
        check_participation(self, methods, paper.registered)
        self.check_trust(methods, paper.registered)
        self.check_settings(methods, paper.registered)
        return methods

    def flagged_fields(self, registered: str) -> tuple[str, ...]:
        """See `MethodSettings.flagged_fields`."""
        of_fmtl = ("weight",) if registered == "gru_fmtl" else ()
        return (*CNFGNNConfig.__dataclass_fields__, *METHOD_OPTIONS, *of_fmtl)

    def _default_methods(self) -> tuple[str, ...]:
        """The dataset's, but for those that other options exclude."""
        if self.sweep:
            return ("cnfgnn",)
        own = paper.of_dataset(self.network_name, self.is_inductive)
        methods = own.get("methods", ("cnfgnn", "persistence"))
        excluded = paper.OF_SINGLE_SENSORS if self.is_inductive else ()
        return tuple(method for method in methods if method not in excluded)

    def _check_fits(self, method: str) -> None:
        is_single = method in paper.OF_SINGLE_SENSORS or method not in paper.METHODS
        own = self.settings_of(method, paper.registered(method))
        is_single |= own.get("score") == "local"
        if self.is_inductive and is_single:
            may = "" if method in paper.METHODS else "may "
            raise InputError(
                f"--train_fraction is not for {method}, whose models {may}belong to "
                "single sensors: there are none for unseen ones"
            )
        if self.sweep and method not in paper.ALTERNATING:
            raise InputError(
                f"--sweep={self.sweep} is not for {method}, which has no client and "
                f"server rounds; it is for {', '.join(paper.ALTERNATING)}"
            )


def known() -> dict[str, str]:
    """Titles of all methods: the paper's, and whatever else runs on the GRU's task.

    Users' methods that federate any task are among them, whatever they need.
    """
    others = [
        name
        for name, method in algorithms.REGISTRY.items()
        if name not in paper.REGISTERED.values()
        and not algorithms.is_users(name)
        and method.runs_on(TrafficSeq2SeqTask())
    ]
    return titles_of([*paper.METHODS, *others], paper.OWN_TITLES)
