"""Flags of FL-AGCNS's binary, and what they choose."""

import dataclasses
import pathlib
from typing import Any

from absl import flags

from experiments import _flags, _run_flags
from experiments._client_flags import PARTITION
from fedjax_graph.algorithms.fl_agcns.fl_rl import FLRLConfig
from fedjax_graph.algorithms.fl_agcns.search import SearchConfig
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models import architecture

FUSION = flags.DEFINE_enum(
    "fusion",
    "leaves",
    ["leaves", "all"],
    "Whose outputs an architecture averages: of layers that no other reads, or all.",
)
STAGES = flags.DEFINE_string(
    "stages",
    "0,0",
    "Activations of the input and output stage of all codes that are searched, such as "
    "3,5 for ReLU and Identity; 0: any.",
)
FITNESS = flags.DEFINE_enum(
    "fitness",
    "loss",
    ["loss", "accuracy"],
    "By which validation score architectures, and rounds of a training, are chosen.",
)
NUM_GENERATIONS = flags.DEFINE_integer(
    "num_generations", 250, "Rounds of an evolutionary search.", lower_bound=1
)
POPULATION_SIZE = flags.DEFINE_integer(
    "population_size", 60, "Architectures in a population.", lower_bound=2
)
NUM_WARM_UP = flags.DEFINE_integer(
    "num_warm_up", 50, "First generations, without evolution.", lower_bound=0
)
SUPERNET_STEPS = flags.DEFINE_integer(
    "supernet_steps", 5, "Steps of the shared weights in a round.", lower_bound=1
)
CODES_PER_STEP = flags.DEFINE_integer(
    "codes_per_step", 20, "Architectures that such a step trains.", lower_bound=1
)
NUM_TRIALS = flags.DEFINE_integer(
    "num_trials", 50, "Architectures that FL-Random and FL-RL train.", lower_bound=1
)
NUM_RELAXED_ROUNDS = flags.DEFINE_integer(
    "num_relaxed_rounds", 50, "Rounds of FL-Gradient.", lower_bound=1
)
NUM_LAYERS = flags.DEFINE_integer(
    "num_layers", architecture.NUM_LAYERS, "Of an architecture, at most.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 50, "Rounds of a network's training from scratch.", lower_bound=1
)
NUM_RETRAIN = flags.DEFINE_integer(
    "num_retrain", 10, "Trainings of each network, from --seed on.", lower_bound=1
)
NUM_FINALISTS = flags.DEFINE_integer(
    "num_finalists",
    1,
    "Of the last population, those that an evolutionary search trains once from "
    "scratch, to take the best by validation; 1, as in the paper: the best by shared "
    "weights.",
    lower_bound=1,
)
DROPOUT = flags.DEFINE_float(
    "dropout",
    0.0,
    "Of both stages' inputs, in trainings and of a search's shared weights; the paper "
    "names none.",
    0.0,
    0.99,
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.02, "Of Adam at the server.", lower_bound=0.0
)
CODE = flags.DEFINE_string(
    "code", None, "An architecture to train, as 3,6,0,0,6,54,55,5; method `code`."
)
ENCRYPTION = flags.DEFINE_enum(
    "encryption", "none", ["none", "ckks"], "Of what leaves a client."
)
OUTSIDE_NEIGHBOURS = flags.DEFINE_bool(
    "outside_neighbours", False, "Clients keep copies of their nodes' neighbours."
)
NORMALISE_FEATURES = flags.DEFINE_bool(
    "normalise_features", False, "Divide each node's features by their sum."
)
LABELS = flags.DEFINE_enum(
    "labels",
    "published",
    ["published", "drawn"],
    "Training, validation and test nodes: those published with the dataset, if there "
    "are any, or 20 of a class, 500 and 1000 drawn by --seed.",
)
_run_flags.refuse_nan(DROPOUT, LEARNING_RATE)
flags.set_default(PARTITION, "metis")
# Clients are few and their products large enough for one device's threads: two CPU
# devices took twice as long for a generation on Cora.
flags.set_default(_run_flags.NUM_CPU_DEVICES, 1)

SEARCHES = {
    "fl_agcns": "FL-AGCNS",
    "controller_eo": "ControllerEO",
    "client_eo": "ClientEO",
    "fl_random": "FL-Random",
    "fl_rl": "FL-RL",
    "fl_gradient": "FL-Gradient",
}
EVOLUTIONARY = ("fl_agcns", "controller_eo", "client_eo")
FIXED = {
    "gat": "GAT",
    "sage": "SAGE",
    "gcn": "GCN",
    "sgc": "SGC",
    "appnp": "APPNP",
    "agnn": "AGNN",
    "arma": "ARMA",
    "gated_graph": "GatedGraph",
}
TITLES = SEARCHES | FIXED | {"code": "given code"}
SHORT_RUN = {  # without --dataset
    "num_generations": 20,
    "population_size": 20,
    "num_warm_up": 4,
    "supernet_steps": 2,
    "codes_per_step": 8,
    "num_trials": 5,
    "num_relaxed_rounds": 2,
    "num_finalists": 8,
    "num_retrain": 3,
}
SHORT_RUN_METHODS = ["fl_agcns", "gcn", "appnp"]


def chosen_methods() -> list[str]:
    """The methods that the flags name.

    Raises:
      InputError: if one is not known here, or flags do not go together.
    """
    if _run_flags.NUM_SEEDS.present and _run_flags.NUM_SEEDS.value > 1:
        raise InputError(
            "--num_seeds: a search has one seed, --seed; --num_retrain says how often "
            "what it found is trained"
        )
    if _run_flags.NUM_ROUNDS.present:
        raise InputError(
            "--num_rounds: a search has --num_generations, --num_trials or "
            "--num_relaxed_rounds, a training --num_epochs"
        )
    if _run_flags.PARTICIPATION.value < 1:
        raise InputError("--participation: every client takes part in FL-AGCNS")
    if CODES_PER_STEP.value > POPULATION_SIZE.value:
        raise InputError(
            f"--codes_per_step={CODES_PER_STEP.value}: expected at most "
            f"--population_size={POPULATION_SIZE.value}, from which they are drawn"
        )
    if _run_flags.PATIENCE.present:
        raise InputError(
            "--patience: a training runs --num_epochs, a search all rounds"
        )
    methods = _run_flags.METHODS.value
    if methods is None:
        if CODE.value:
            return ["code"]
        return SHORT_RUN_METHODS if _flags.DATASET.value is None else ["fl_agcns"]
    if "all" in methods:
        others = [method for method in methods if method != "all"]
        methods = list(dict.fromkeys([*SEARCHES, *FIXED, *others]))
    for method in methods:
        if method not in TITLES:
            raise InputError(
                f"--methods: unknown method {method!r}; known: all, "
                + ", ".join(TITLES)
            )
    num_trials, size = NUM_TRIALS.value, FLRLConfig.codes_per_round
    if "fl_rl" in methods and num_trials > size and num_trials % size:
        raise InputError(
            f"--num_trials={num_trials}: FL-RL trains {size} architectures a round; "
            f"expected a multiple of {size}"
        )
    if "code" in methods and not CODE.value:
        raise InputError("--methods=code needs --code=3,6,0,0,6,54,55,5")
    if CODE.value and "code" not in methods:
        methods = [*methods, "code"]
    return methods


def search_values(
    method: str, sizes: dict[str, int], workdir: pathlib.Path
) -> dict[str, Any]:
    """Flags under the names of a search's config fields; `sizes` are the data's."""
    values = sizes | {
        "num_layers": NUM_LAYERS.value,
        "fusion": FUSION.value,
        "stages": given_stages(),
        "fitness": FITNESS.value,
        "dropout": DROPOUT.value,
        "server_optimizer": server_optimizer(),
        "encryption": ENCRYPTION.value,
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, search_name(method)),
        "population_size": POPULATION_SIZE.value,
        "num_steps": SUPERNET_STEPS.value,
        "codes_per_step": CODES_PER_STEP.value,
        "num_warm_up": NUM_WARM_UP.value,
        "num_epochs": NUM_EPOCHS.value,
    }
    if method == "fl_rl":
        values["codes_per_round"] = min(FLRLConfig.codes_per_round, NUM_TRIALS.value)
    return values


def server_optimizer() -> OptimizerConfig:
    """The default optimizer of the shared weights, with the rate of --learning_rate."""
    default = SearchConfig.server_optimizer
    return dataclasses.replace(default, learning_rate=LEARNING_RATE.value)


def given_stages() -> architecture.Stages:
    """Those that --stages gives.

    Raises:
      InputError: if it is no pair of activations.
    """
    genes = STAGES.value.split(",")
    if not all(gene.strip().isdecimal() for gene in genes):
        raise InputError(f"--stages={STAGES.value}: expected two numbers, such as 3,5")
    return architecture.check_stages(tuple(map(int, genes)))


def search_name(method: str) -> str:
    """Under which a search, not the training of what it found, goes on record."""
    return f"{method}_search"


def note_of_no_evolution(methods: list[str]) -> None:
    """Says so where a search ends before populations change."""
    evolves = any(method in EVOLUTIONARY for method in methods)
    if evolves and NUM_WARM_UP.value >= NUM_GENERATIONS.value:
        print(
            f"note: nothing evolves in {NUM_GENERATIONS.value} generations: the first "
            f"--num_warm_up={NUM_WARM_UP.value} only train weights"
        )


def search_rounds(method: str, config: Any) -> int:
    """Rounds of a search that make up what the flags allow it."""
    if method == "fl_gradient":
        return NUM_RELAXED_ROUNDS.value
    if method in ("fl_random", "fl_rl"):
        return NUM_TRIALS.value // config.codes_per_round
    return NUM_GENERATIONS.value
