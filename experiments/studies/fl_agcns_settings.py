"""What the options of FL-AGCNS's study mean together."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from experiments.studies.fl_agcns_methods import EVOLUTIONARY, FIXED, METHODS, SEARCHES
from experiments.studies.fl_agcns_options import EXAMPLE_CODE, FLAGCNSOptions
from experiments.studies.methods import check_concerns
from fedjax_graph import algorithms
from fedjax_graph.algorithms.fl_agcns.fl_rl import FLRLConfig
from fedjax_graph.algorithms.fl_agcns.trainings import EvolutionConfig
from fedjax_graph.core import encryption
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models import architecture

SHORT_RUN = {  # without a dataset
    "num_clients": 4,
    "num_layers": 2,
    "stages": "3,5",
    "ops": ("SAGEConv", "GCNConv", "APPNP", "ARMAConv"),
    "num_generations": 2,
    "population_size": 18,
    "codes_per_step": 8,
    "num_trials": 5,
    "num_relaxed_rounds": 2,
    "rungs": (6, 3, 2),
    "num_epochs": 30,
    "num_retrain": 3,
    "fitness": "accuracy",
    "weight_decay": 5e-4,
}
SHORT_RUN_DATASET = "synthetic_mixed"
SHORT_RUN_METHODS = ("fl_agcns", "gcn", "appnp", "sage_relu")
SHARED_GENERATIONS = 250  # the paper's
OPTIONS_OF = {  # a `fitness_from`, and what only a search by it has a use for
    "shared": (
        *("num_warm_up", "warm_up_codes", "scored_by", "num_finalists"),
        *("codes_per_step", "supernet_steps"),
    ),
    "scratch": ("first_epochs", "rungs"),
}
CONCERN = (  # options, and the methods that have a use for them
    (
        ("num_generations", "fitness_from", "population_size", "codes_per_step"),
        EVOLUTIONARY,
    ),
    (("num_warm_up", "warm_up_codes", "num_finalists"), EVOLUTIONARY),
    (OPTIONS_OF["scratch"], EVOLUTIONARY),
    (("supernet_steps", "scored_by"), (*EVOLUTIONARY, "fl_gradient")),
    (("num_trials",), ("fl_random", "fl_rl")),
    (("num_relaxed_rounds",), ("fl_gradient",)),
    (("num_layers", "stages", "ops"), SEARCHES),
    (("space", "fusion"), (*SEARCHES, "code")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FLAGCNSSettings(FLAGCNSOptions):
    """Searches, and trainings of what they found and of fixed networks.

    A search ends with one architecture code. It, like each fixed network, is trained
    `num_retrain` times from other initial weights and tested at its best validation
    round.
    """

    def resolved(self) -> Self:
        """This study; without a dataset, its short form where nothing is given."""
        if self.dataset is not None:
            return self
        methods = self.chosen_methods()
        passed_over = list(OPTIONS_OF[self._other_fitness()])
        if "weight_decay=" in str(self.server_optimizer):
            passed_over.append("weight_decay")
        for names, known in CONCERN:
            if not set(known) & set(methods):
                passed_over += names
        short = {
            name: value
            for name, value in SHORT_RUN.items()
            if not self.is_given(name) and name not in passed_over
        }
        return dataclasses.replace(self, **short)

    def check_given(self) -> None:
        """Checks, before `resolved`, that what is given concerns one of the methods.

        Raises:
          InputError: if an option does not, or see `chosen_methods`.
        """
        methods = self.chosen_methods()
        for names, known in CONCERN:
            check_concerns(self, names, methods, set(methods) & set(known))
        check_concerns(self, ("edge_parts",), methods, ())
        self.check_given_once("server_optimizer", ("learning_rate", "weight_decay"))

    def check_methods(self) -> list[str]:
        """Checks that the settings go together.

        Returns:
          The methods.

        Raises:
          InputError: if they do not.
        """
        self.check_refused()
        is_shared = self.fitness_from == "shared"
        if is_shared and self.codes_per_step > self.population_size:
            raise InputError(
                f"--codes_per_step={self.codes_per_step}: expected at most "
                f"--population_size={self.population_size}, from which they are drawn"
            )
        if len(self.rungs) != len(EvolutionConfig.rungs):
            raise InputError(f"--rungs={self.rungs}: expected three counts, as 18,6,4")
        methods = self.chosen_methods()
        self._check_fitness(methods)
        if self.code:
            architecture.parse(self.code)
        self.given_stages()
        self.adam()  # raises where the server's optimizer cannot be read
        encryption.check(self.encryption)
        if self.encryption != "none" and self.coordinator is not None:
            raise InputError(
                f"--encryption={self.encryption} runs in one process, not --coordinator"
            )
        return methods

    def _check_fitness(self, methods: Sequence[str]) -> None:
        """Checks that no option is of the other `fitness_from` alone.

        FL-Gradient has steps of shared weights whatever the others are judged by.
        """
        other = self._other_fitness()
        of_gradient = ("supernet_steps", "scored_by")
        passed_over = of_gradient if "fl_gradient" in methods else ()
        for name in filter(self.is_given, OPTIONS_OF[other]):
            if name not in passed_over:
                raise InputError(f"--{name}: of a search with --fitness_from={other}")

    def _other_fitness(self) -> str:
        return "scratch" if self.fitness_from == "shared" else "shared"

    def compiled_methods(self) -> tuple[str, ...] | None:
        """See `Study.compiled_methods`; a code names one as well."""
        return self.methods if self.code else super().compiled_methods()

    def chosen_methods(self) -> list[str]:
        """The methods that the settings name.

        Raises:
          InputError: if one is not known here, or lacks what it needs.
        """
        default = SHORT_RUN_METHODS if self.dataset is None else ("fl_agcns",)
        if self.methods is None and self.code:
            default = ("code",)
        named = self.methods or default
        if "all" in named:
            others = [method for method in named if method != "all"]
            named = tuple(dict.fromkeys([*SEARCHES, *FIXED, *others]))
        for method in filter(algorithms.is_users, named):
            raise InputError(
                f"--methods={method}: fl_agcns runs searches and networks; run a "
                "method of one's own with cnfgnn, sfl, graphfl or subgraphs"
            )
        methods = dataclasses.replace(self, methods=named).choose_methods(
            METHODS, named
        )
        size = FLRLConfig.codes_per_round
        if "fl_rl" in methods and self.num_trials > size and self.num_trials % size:
            raise InputError(
                f"--num_trials={self.num_trials}: FL-RL trains {size} architectures a "
                f"round; expected a multiple of {size}"
            )
        if "code" in methods and not self.code:
            raise InputError(f"--methods=code needs --code={EXAMPLE_CODE}")
        if self.code and "code" not in methods:
            methods.append("code")
        return methods

    def chosen_fusion(self) -> architecture.Fusion:
        """Whose outputs an architecture averages."""
        return self.fusion or architecture.FUSIONS[self.space]

    def generations(self) -> int:
        """The number of generations of an evolutionary search."""
        if self.num_generations is not None:
            return self.num_generations
        if self.fitness_from == "shared":
            return SHARED_GENERATIONS
        return EvolutionConfig.num_generations

    def given_stages(self) -> architecture.Stages:
        """The stages that all codes have.

        Raises:
          InputError: if `stages` is no pair of activations.
        """
        genes = self.stages.split(",")
        if not all(gene.strip().isdecimal() for gene in genes):
            raise InputError(
                f"--stages={self.stages}: expected two numbers, such as 3,5"
            )
        return architecture.check_stages(tuple(map(int, genes)))

    def chosen_ops(self) -> architecture.Ops:
        """The convolutions of a search's layers, in the order of all."""
        return architecture.in_order(self.ops or architecture.OPS)

    def adam(self) -> OptimizerConfig:
        """The server's optimizer, of the shared weights and of each training."""
        return self.server_steps(
            dataclasses.replace(
                EvolutionConfig.server_optimizer,
                learning_rate=self.learning_rate,
                weight_decay=self.weight_decay,
            )
        )
