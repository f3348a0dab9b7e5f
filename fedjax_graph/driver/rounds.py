"""The driver, the same for every method: rounds, evaluation, early stopping, files.

A run maps its method over seeds and advances it by `eval_every` rounds in one compiled
program, which also evaluates, keeps the best state of each seed, and leaves a seed
that ran out of patience as it is. The host only writes.
"""

import contextlib
import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_graph.core import client_rows, clients, communication, mesh, privacy
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm, Metrics, State
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import memory, programs
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.config import RunConfig
from fedjax_graph.driver.loop import Loop, load_or_init
from fedjax_graph.driver.seeds import check_chosen

# What may differ when a run is resumed, and when a checkpoint is only scored.
ROUNDING_SETTINGS = ("num_devices", "num_processes", "precision")
TRAINING_SETTINGS = (*ROUNDING_SETTINGS, "eval_every")


class RunResult(NamedTuple):
    """Holds what came out of a run; figures have a leading axis of seeds."""

    best_state: State  # what the algorithm's `kept` leaves of it
    test: Metrics
    best_round: np.ndarray  # [seeds] int32
    num_rounds: int  # of the seed that ran longest
    communication: communication.Ledger
    seconds: float  # of training, compilation apart
    compile_seconds: float
    privacy: dict[str, Any] | None = None  # see `core.privacy.spent`


def run(
    name: str,
    algorithm: FederatedAlgorithm,
    splits: dict[str, Data],
    config: RunConfig,
    workdir: pathlib.Path | None = None,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    eval_only: bool = False,
    defaults: dict[str, Any] | None = None,
) -> RunResult:
    """Trains a method, keeps the best state by its `monitor`, and tests it.

    Args:
      name: of the method, as it stands in the files.
      algorithm: the method.
      splits: `train`, `validation` and `test` data.
      config: how to run it.
      workdir: receives `metrics.jsonl`, `tensorboard/` and `<name>/checkpoints/`;
        None writes nothing.
      settings: JSON-able; stored with each checkpoint and compared on `resume`.
      resume: whether to go on from the latest intact checkpoint, if there is any.
      eval_only: whether to score the latest checkpoint, which has to be intact.
      defaults: of settings that a checkpoint may be too old to have.

    Raises:
      InputError: in one line, if
        - a split is missing, no client has anything to train on, or two have one id;
        - there are too few rounds, see `check_num_rounds`, or more on record;
        - the loss is no longer finite, or no round has a figure to be chosen by;
        - the checkpoint does not fit, is missing, or is there without `resume`;
        - `resume` or `eval_only` comes without a folder;
        - a split has the clients of `train` in another order;
        - `metrics.jsonl` lacks what the best round is chosen by;
        - seeds that stopped early would go on from other rounds than the rest;
        - `is_drawn` is given to a method whose clients exchange data first.
    """
    missing = [key for key in ("train", "validation", "test") if key not in splits]
    if missing:
        raise InputError(f"splits: expected {' and '.join(missing)} as well")
    if not eval_only:
        check_num_rounds(name, algorithm, config.num_rounds)
    if workdir is None and (resume or eval_only):
        raise InputError("resume and eval_only need the workdir of the run")
    clients.check_clients(splits["train"], "the split train")
    for part in ("validation", "test"):
        clients.check_order(splits["train"], splits[part], f"the split {part}")
    programs.check_exchange(algorithm, config.is_drawn)
    if algorithm.privacy is not None:
        privacy.check(config.on_nan)
    checkpoints = None
    if workdir is not None and config.num_rounds:
        folder = workdir / name / "checkpoints"
        checkpoints = _open_checkpoints(folder, settings, resume, eval_only, defaults)
    with contextlib.closing(checkpoints) if checkpoints else contextlib.nullcontext():
        if config.check_memory:
            memory.check_copies("the data", splits)
        splits = client_rows.put(splits)
        told, splits = _told(name, algorithm, splits, config.check_memory)
        algorithm = algorithm._replace(exchange=None)
        data = splits["train"]
        seed_state, seconds = load_or_init(
            algorithm, config, data, checkpoints, eval_only
        )
        loop = Loop(name, algorithm, splits, config, workdir, checkpoints)
        loop.count(seed_state, told)
        if not eval_only:
            seed_state, seconds = loop.run(seed_state, seconds)
    check_chosen(name, algorithm, seed_state)
    states, data = seed_state.best_state, splits["test"]
    test = programs.evaluate_seeds(algorithm, states, data, config.is_drawn)
    return RunResult(
        best_state=mesh.whole(seed_state.best_state),
        test=test,
        best_round=np.asarray(seed_state.best_round),
        num_rounds=int(np.max(seed_state.round)),
        communication=loop.ledger,
        seconds=seconds,
        compile_seconds=loop.compile_seconds,
        privacy=loop.privacy_after(int(np.max(seed_state.round))),
    )


def _told(
    name: str,
    algorithm: FederatedAlgorithm,
    splits: dict[str, Data],
    check_memory: bool,
) -> tuple[communication.Bytes, dict[str, Data]]:
    """What crossed in `algorithm.exchange`, and the splits after it.

    Raises:
      InputError: if memory does not suffice.
    """
    if algorithm.exchange is None:
        return communication.Bytes(), splits

    def compute(algorithm, data):
        compiled = programs.compute_exchange.lower(algorithm, data).compile()
        if check_memory:
            memory.check_program(f"{name}: what clients exchange", compiled)
        return compiled(data)

    told = functools.partial(algorithm.exchange, splits["train"])
    size = communication.bytes_per_round(told)  # of rows that are no padding
    return size, programs.exchange(algorithm, splits, compute)


def check_num_rounds(name: str, algorithm: FederatedAlgorithm, num_rounds: int) -> None:
    """Refuses a run that ends before a method trains what it is scored by.

    Args:
      name: of the method.
      algorithm: the method.
      num_rounds: of the run; 0 trains nothing, which is no mistake.

    Raises:
      InputError: if the last phase would not begin.
    """
    if 0 < num_rounds < algorithm.scored_from:
        raise InputError(
            f"num_rounds={num_rounds}: {name} trains what it is scored by from round "
            f"{algorithm.scored_from} on; ask for more"
        )


def _open_checkpoints(folder, settings, resume, eval_only, defaults) -> Checkpoints:
    nothing = InputError(f"{folder}: no finished round of a run to score")
    if eval_only and not folder.is_dir():
        raise nothing
    ignored = TRAINING_SETTINGS if eval_only else ROUNDING_SETTINGS
    checkpoints = Checkpoints(folder, settings, ignored, defaults)
    is_empty = checkpoints.latest_round() is None
    if is_empty and eval_only:
        checkpoints.close()
        raise nothing
    if is_empty or eval_only:
        return checkpoints
    if not resume:
        checkpoints.close()
        raise InputError(f"{folder}: holds another run; resume it or name a new folder")
    before, now = (found or {} for found in (checkpoints.settings(), settings))
    parts = ("num_devices", "num_processes")
    devices, ours = ([found.get(key, 1) for key in parts] for found in (before, now))
    if devices != ours:
        print(
            f"note: {folder}: so far on {devices[0]} devices of {devices[1]} processes,"
            f" and now on {ours[0]} of {ours[1]}, which agree up to rounding"
        )
    products, own = (found.get("precision") for found in (before, now))
    if products != own:
        print(f"note: {folder}: products so far in {products}, and now in {own}")
    return checkpoints
