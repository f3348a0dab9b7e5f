"""Settings of FL-AGCNS's study: which searches and networks, on which clients."""

import dataclasses
from typing import ClassVar, Self

from experiments.studies.base import Study
from experiments.studies.fl_agcns_methods import FIXED, METHODS, SEARCHES
from experiments.studies.options import option
from fedjax_graph import algorithms
from fedjax_graph.algorithms.fl_agcns.fl_rl import FLRLConfig
from fedjax_graph.algorithms.fl_agcns.trainings import EvolutionConfig
from fedjax_graph.core import encryption
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models import architecture

SHORT_RUN = {  # without a dataset
    "num_layers": 3,
    "stages": "3,5",
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
EXAMPLE_CODE = "3,4,16,0,0,0,0,5"


OF_SHARED = ("num_warm_up", "warm_up_codes", "scored_by", "num_finalists")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FLAGCNSSettings(Study):
    """Searches, and trainings of what they found and of fixed networks.

    A search ends with one architecture code. It, like each fixed network, is trained
    `num_retrain` times from other initial weights and tested at its best validation
    round.
    """

    subject: ClassVar[str] = "FL-AGCNS: search and trainings"
    duration: ClassVar[str] = "Without flags: one to three minutes on a CPU."
    system: ClassVar[str] = "fl_agcns"

    # Clients are few and their products large enough for one device's threads: two CPU
    # devices took twice as long for a generation on Cora.
    num_cpu_devices: int | None = option(
        1, "Without an accelerator: CPU cores that share the work.", lower=1
    )
    num_clients: int | None = option(None, "Clients that share the data.", lower=1)
    partition: str = option(
        "metis", "How a graph is cut into subgraphs.", choices=["random", "metis"]
    )
    space: str = option(
        "paper",
        "Architectures: the paper's, which end at the first 0, or those of its code of "
        "June 2022.",
        choices=["paper", "2022"],
    )
    fusion: str | None = option(
        None,
        "Whose outputs an architecture averages: of layers that no other reads, or "
        "all; by default those of the space, all or in 2022 leaves.",
        choices=["leaves", "all"],
    )
    stages: str = option(
        "0,0",
        "Activations of the input and output stage of all codes that are searched, "
        "such as 3,5 for ReLU and Identity; 0: any.",
    )
    fitness: str = option(
        "loss",
        "By which validation score architectures, and rounds of a training, are "
        "chosen.",
        choices=["loss", "accuracy"],
    )
    fitness_from: str = option(
        "scratch",
        "What an evolutionary search judges architectures by: trainings of each from "
        "scratch, or weights that all share.",
        choices=["scratch", "shared"],
    )
    num_generations: int | None = option(
        None,
        "Generations of an evolutionary search; by default 6 from scratch, after the "
        "first population and before the best are trained longer, else 250.",
        lower=1,
    )
    first_epochs: int = option(
        15, "From scratch: rounds of an architecture's first training.", lower=1
    )
    rungs: tuple[int, ...] = option(
        EvolutionConfig.rungs,
        "From scratch: how many of the best are trained for --num_epochs, how many of "
        "those from three initial weights, and how many from five.",
        lower=1,
    )
    population_size: int = option(60, "Architectures in a population.", lower=2)
    num_warm_up: int | None = option(
        None,
        "With shared weights: first generations, without evolution; by default none, "
        "in the space 2022 50.",
        lower=0,
    )
    warm_up_codes: str = option(
        "population",
        "What these train: architectures of the first population, or new ones that use "
        "a layer's weights alike.",
        choices=["population", "fair"],
    )
    scored_by: str = option(
        "running",
        "With shared weights: batch statistics of an architecture that is scored, "
        "running ones or those of the client's graph.",
        choices=["running", "batch"],
    )
    supernet_steps: int = option(5, "Steps of the shared weights in a round.", lower=1)
    codes_per_step: int = option(20, "Architectures that such a step trains.", lower=1)
    num_trials: int = option(
        50, "Architectures that FL-Random and FL-RL train.", lower=1
    )
    num_relaxed_rounds: int = option(50, "Rounds of FL-Gradient.", lower=1)
    num_layers: int = option(
        architecture.NUM_LAYERS, "Of an architecture, at most.", lower=1
    )
    num_epochs: int = option(
        50, "Rounds of a network's training from scratch.", lower=1
    )
    num_retrain: int = option(10, "Trainings of each network, from --seed on.", lower=1)
    num_finalists: int = option(
        1,
        "With shared weights: of the last population, those that a search trains once "
        "from scratch, to take the best by validation; 1, as in the paper: the best by "
        "shared weights.",
        lower=1,
    )
    dropout: float = option(
        0.0,
        "Of both stages' inputs, in trainings and of a search's shared weights; the "
        "paper names none.",
        lower=0.0,
        upper=0.99,
    )
    learning_rate: float = option(0.02, "Of Adam at the server.", lower=0.0)
    weight_decay: float = option(
        EvolutionConfig.server_optimizer.weight_decay,
        "Of the server's optimizer, in searches and in trainings; Kipf and Welling's "
        "is 5e-4.",
        lower=0.0,
    )
    code: str | None = option(
        None, f"An architecture to train, as {EXAMPLE_CODE}; method `code`."
    )
    encryption: str = option(
        "none", "Of what leaves a client.", choices=["none", "ckks"]
    )
    outside_neighbours: bool = option(
        False, "Clients keep copies of their nodes' neighbours."
    )
    normalise_features: bool = option(
        False, "Divide each node's features by their sum."
    )
    labels: str = option(
        "published",
        "Training, validation and test nodes: those published with the dataset, if "
        "there are any, or 20 of a class, 500 and 1000 drawn by --seed.",
        choices=["published", "drawn"],
    )

    def resolved(self) -> Self:
        """This study; without a dataset, its short form where nothing is given."""
        if self.dataset is not None:
            return self
        short = {
            name: value for name, value in SHORT_RUN.items() if not self.is_given(name)
        }
        return dataclasses.replace(self, **short)

    def check_methods(self) -> list[str]:
        """Checks that the settings go together.

        Returns:
          The methods.

        Raises:
          InputError: if they do not.
        """
        for name, reason in (
            (
                "num_rounds",
                "a search has --num_generations, --num_trials or "
                "--num_relaxed_rounds, a training --num_epochs",
            ),
            ("patience", "a training runs --num_epochs, a search all rounds"),
            (
                "client_optimizer",
                "clients send gradients; --server_optimizer says what steps with them",
            ),
        ):
            if self.is_given(name):
                raise InputError(f"--{name}: {reason}")
        if self.num_seeds > 1:
            raise InputError(
                "--num_seeds: a search has one seed, --seed; --num_retrain says how "
                "often what it found is trained"
            )
        if self.participation < 1:
            raise InputError("--participation: every client takes part in FL-AGCNS")
        is_shared = self.fitness_from == "shared"
        if is_shared and self.codes_per_step > self.population_size:
            raise InputError(
                f"--codes_per_step={self.codes_per_step}: expected at most "
                f"--population_size={self.population_size}, from which they are drawn"
            )
        if self.fitness_from == "scratch":
            for name in filter(self.is_given, OF_SHARED):
                raise InputError(f"--{name}: of a search with --fitness_from=shared")
        if len(self.rungs) != len(EvolutionConfig.rungs):
            raise InputError(f"--rungs={self.rungs}: expected three counts, as 18,6,4")
        methods = self.chosen_methods()
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

    def adam(self) -> OptimizerConfig:
        """The server's optimizer, of the shared weights and of each training."""
        return self.server_steps(
            dataclasses.replace(
                EvolutionConfig.server_optimizer,
                learning_rate=self.learning_rate,
                weight_decay=self.weight_decay,
            )
        )
