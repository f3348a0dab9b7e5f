"""The options of FL-AGCNS's study: which searches and networks, on which clients."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from experiments.studies.base import Study
from experiments.studies.options import option
from fedjax_graph.algorithms.fl_agcns.trainings import EvolutionConfig
from fedjax_graph.models import architecture

EXAMPLE_CODE = "3,4,16,0,0,0,0,5"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FLAGCNSOptions(Study):
    """What can be chosen of the searches and of the trainings."""

    subject: ClassVar[str] = "FL-AGCNS: search and trainings"
    duration: ClassVar[str] = "Without flags: a minute or two on a CPU."
    system: ClassVar[str] = "fl_agcns"
    refused: ClassVar[Mapping[str, str]] = {
        "num_rounds": "a search has --num_generations, --num_trials or "
        "--num_relaxed_rounds, a training --num_epochs",
        "patience": "a training runs --num_epochs, a search all rounds",
        "client_optimizer": "clients send gradients; --server_optimizer says what "
        "steps with them",
        "num_seeds": "a search has one seed, --seed; --num_retrain says how often what "
        "it found is trained",
        "participation": "every client takes part in FL-AGCNS",
    }

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
    ops: tuple[str, ...] | None = option(
        None,
        "Convolutions between which searches choose; by default all twelve.",
        choices=architecture.OPS,
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
    num_retrain: int = option(
        10, "Trainings of each network, of seeds from 1000 times --seed on.", lower=1
    )
    num_finalists: int = option(
        1,
        "With shared weights: of the last population, those that a search trains once "
        "from scratch, to take the best by validation; 1, as in the paper: the best by "
        "shared weights.",
        lower=1,
    )
    dropout: float = option(
        0.0,
        "Of both stages' inputs, in trainings and of a search's shared weights, in "
        "searches to the nearest 1/256; the paper names none.",
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
