"""The network that a search ends with: chosen once, and kept beside the search.

A search's own best code stands on shared weights; of several finalists the one that
does best after a training of its own is taken. `choice.json` in the search's folder
says which, so that a run that goes on, or is scored, has the same.
"""

import contextlib
import json
import pathlib
import shutil
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.studies.fl_agcns_methods import EVOLUTIONARY
from experiments.studies.fl_agcns_settings import FLAGCNSSettings
from experiments.studies.running import config_of
from fedjax_graph.algorithms.fl_agcns import evolution
from fedjax_graph.algorithms.fl_agcns.fl_random import make_trial
from fedjax_graph.algorithms.fl_agcns.search import make_scorer
from fedjax_graph.core import mesh, processes
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import limits
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.driver import writers
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.models import architecture


class Finalists(NamedTuple):
    """Codes that were trained once from scratch."""

    codes: list[list[int]]  # [C, L + 2], best first by shared weights
    scores: list[float]  # [C] federated validation scores after that training
    seconds: float  # of all, compilation included

    @property
    def best(self) -> list[int]:
        return self.codes[np.argmax(self.scores)]


class Choice(NamedTuple):
    """What `choice.json` holds."""

    round: int  # of the search, after which it was made
    num_finalists: int
    code: list[int]
    finalists: Finalists | None


def search_name(method: str) -> str:
    """The name under which a search, not what it found, goes on record."""
    return f"{method}_search"


def choose(
    study: FLAGCNSSettings,
    method: str,
    state: Any,
    values: dict[str, Any],
    data: SubgraphData,
    workdir: pathlib.Path,
) -> Choice:
    """The network that a search ends with, as it was chosen or else chosen now.

    Its code is the canonical one: a random one may have genes that nobody reads.

    Args:
      study: how many finalists, and whether a run is scored.
      method: the search.
      state: of the search after its last round.
      values: of its config.
      data: the clients', with the validation nodes to choose by.
      workdir: of the run.

    Raises:
      InputError: if it was chosen among another number of finalists, or is to be scored
        and was not chosen yet.
    """
    folder = workdir / search_name(method)
    num_finalists = 1
    if method in EVOLUTIONARY:
        num_finalists = study.num_finalists
    made = read(folder)
    processes.gather()  # all have looked
    if made and made.round == int(state.num_rounds):
        if made.num_finalists != num_finalists:
            raise InputError(
                f"{folder}: the network was chosen among {made.num_finalists} "
                f"finalists, not {num_finalists}; give --num_finalists="
                f"{made.num_finalists} or another --workdir"
            )
        return made
    if study.eval_only:
        raise InputError(
            f"{folder}: the search has not ended with a network yet; finish the run "
            "with --resume"
        )
    finalists, code = None, state.code
    if num_finalists > 1:
        finalists = judge(study, state, values, data)
        code = np.array(finalists.best)
    code = architecture.canonical(code, study.space).tolist()
    forget_other_network(workdir / method, tuple(code))
    made = Choice(int(state.num_rounds), num_finalists, code, finalists)
    named = made._asdict() | {"finalists": finalists and finalists._asdict()}
    text = json.dumps(writers.to_jsonable(named), indent=2)
    writers.write_atomically(folder / "choice.json", text + "\n")
    return made


def read(folder: pathlib.Path) -> Choice | None:
    """The choice in a search's folder, if one was made.

    Raises:
      InputError: if it cannot be read.
    """
    path = folder / "choice.json"
    if not path.exists():
        return None
    try:
        made = Choice(**limits.parse_json(path.read_text()))
        architecture.check(made.code)
        return made._replace(finalists=made.finalists and Finalists(**made.finalists))
    except (InputError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: expected the network that the search ended with, cannot read it; "
            "delete it, and it is chosen anew"
        ) from error


def judge(
    study: FLAGCNSSettings, state: Any, values: dict[str, Any], data: SubgraphData
) -> Finalists:
    """Trains the different networks of the last population that shared weights prefer.

    Args:
      study: how many finalists there are at most, and how and by which seed they train.
      state: of an evolutionary search after its last round.
      values: of its config.
      data: the clients'.
    """
    search = config_of("fl_agcns", values)
    trained = {"scored_by": "running", "num_epochs": study.num_epochs}
    config = config_of("fl_random", values | trained)
    codes = np.concatenate([state.code[None], state.populations.controller])
    codes = codes[~np.asarray(evolution.is_repeated(codes, config.space))]
    start = time.perf_counter()

    @jax.jit
    def by_shared_weights(model, data, codes):
        scores, _, _ = make_scorer(search, model, data).federated(codes)
        return mesh.replicated(scores)

    @jax.jit
    def from_scratch(data, codes, keys):
        trial = make_trial(config)
        scores = jax.lax.map(lambda args: trial(data, *args).score, (codes, keys))
        return mesh.replicated(scores)

    scores = np.asarray(by_shared_weights(state.weights.model, data, codes))
    codes = codes[np.argsort(-scores, stable=True)][: study.num_finalists]
    keys = jax.random.split(jax.random.key(study.seed), len(codes))
    scores = np.asarray(from_scratch(data, codes, keys))
    return Finalists(codes.tolist(), scores.tolist(), time.perf_counter() - start)


def forget_other_network(folder: pathlib.Path, code: tuple[int, ...]) -> None:
    """Removes the training of a network that a search left behind when it went on."""
    if not (folder / "checkpoints").is_dir():
        return
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        if checkpoints.latest_round() is None:
            return
        trained = checkpoints.settings()["config"]["task"]["code"]
    if tuple(trained) != code:
        text = architecture.to_text(trained)
        print(f"note: the search went on from {text}, whose training is removed")
        processes.by_first(shutil.rmtree)(folder)
        processes.gather()
