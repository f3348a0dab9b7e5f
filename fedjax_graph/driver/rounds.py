"""The driver, the same for every method: rounds, evaluation, early stopping, files.

A run maps its method over seeds and advances it by `eval_every` rounds in one compiled
program, which also evaluates, keeps the best state of each seed, and leaves a seed
that ran out of patience as it is. The host only writes.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import (
    clients,
    communication,
    faults,
    mesh,
    privacy,
    processes,
    reporter,
    termination,
)
from fedjax_graph.core.algorithm import (
    NO_LOSS,
    Data,
    FederatedAlgorithm,
    Metrics,
    Phase,
    State,
)
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import everything, nothing
from fedjax_graph.driver import memory
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.divergence import Divergence, OnNaN
from fedjax_graph.driver.profile import Profile
from fedjax_graph.driver.seeds import (
    SeedState,
    abstract_seeds,
    advance,
    check_in_step,
    init_seeds,
    is_stopped,
    map_seeds,
    of_seed,
)
from fedjax_graph.driver.writers import (
    MetricsWriter,
    Progress,
    check_monitored,
    note_missing_rounds,
)


@dataclasses.dataclass(frozen=True)
class RunConfig(Checked):
    """Says how a method is run: how long, on which seeds, how often it is scored."""

    num_rounds: int = dataclasses.field(metadata=limits(lower=0, below=2**31))
    eval_every: int = limited(1, lower=1, below=2**31)
    patience: int = limited(
        20, lower=1, below=2**31
    )  # rounds without a better validation figure, of a method's last phase
    seeds: tuple[int, ...] = limited((0,), lower=0, below=2**32, is_filled=True)
    # as `clients_per_chunk`, for seeds
    seeds_per_chunk: int | None = limited(None, lower=1)
    examples_per_round: int = limited(0, lower=0)  # for the rate shown, of one seed
    rate_name: str = "windows_per_s"
    is_drawn: Callable[[tuple[Any, ...]], bool] = nothing
    """Path of a leaf in a split -> whether it has a leading axis of seeds, as where
    each seed draws other examples. The other leaves are the same for all seeds."""
    profile: str | None = None
    """Folder for a trace of some rounds, see `driver.profile`."""
    on_nan: OnNaN = "stop"
    """What is done where a training loss or the model is not finite: the run stops and
    keeps its last checkpoint; clients whose update is not finite have weight 0 in that
    round, and the run stops if that does not help; or it goes on."""
    checkpoint_seconds: float = limited(0.0, lower=0)
    """Least time between checkpoints, which are made after evaluations, always after
    the last one and before a SIGTERM ends the run; several processes make all."""
    check_memory: bool = True
    """Whether data or a compiled round that would not fit in memory is refused."""
    keep_last: bool = False
    """Whether the state after the last round counts as the best one, whatever the
    validation figure; no seed stops early."""


# What may differ when a checkpoint is only scored, and when a run is resumed.
TRAINING_SETTINGS = ("num_devices", "num_processes", "precision", "eval_every")
ROUNDING_SETTINGS = ("num_devices", "num_processes")


class RunResult(NamedTuple):
    """Holds what came out of a run; figures have a leading axis of seeds."""

    best_state: State
    test: Metrics
    best_round: np.ndarray  # [seeds] int32
    num_rounds: int  # of the seed that ran longest
    communication: communication.Exchange
    seconds: float  # of training, compilation apart
    compile_seconds: float
    privacy: dict[str, Any] | None = None  # see `core.privacy.spent`


@functools.lru_cache(maxsize=8)
def _traced_once(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Has the ledger and the program share the trace of a round.

    Not for rounds that are watched: what watches them is no argument.
    """
    return algorithm._replace(round=jax.jit(algorithm.round, inline=True))


# Compiled once for an algorithm and shapes: not again for a new seed or a resumed run.
@functools.partial(jax.jit, static_argnums=(0, 3))
def _init_seeds(algorithm, seeds, data, is_drawn):
    states = init_seeds(algorithm, seeds, data, is_drawn)
    return mesh.spread(states, clients.count(data), axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5, 6), donate_argnums=7)
def _advance_seeds(
    algorithm,
    num_rounds,
    patience,
    keep_last,
    is_drawn,
    seeds_per_chunk,
    watch,
    seed_states,
    train,
    validation,
):
    def one(*args):
        return advance(
            algorithm, num_rounds, patience, *args, keep_last=keep_last, watch=watch
        )

    splits = (train, validation)
    seed_states, metrics = map_seeds(
        one, seed_states, splits, is_drawn, seeds_per_chunk
    )
    seed_states = mesh.spread(seed_states, clients.count(train), axis=1)
    return seed_states, mesh.replicated(metrics)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate_seeds(algorithm, is_drawn, states, data):
    scores = map_seeds(algorithm.evaluate, states, (data,), is_drawn)
    return mesh.replicated(scores)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predict_seeds(algorithm, is_drawn, states, data):
    outputs = map_seeds(algorithm.predict, states, (data,), is_drawn)
    return mesh.replicated(outputs)


def trace(
    algorithm: FederatedAlgorithm,
    config: RunConfig,
    num_rounds: int,
    seed_states: SeedState,
    train: Data,
    validation: Data,
    watch: faults.Watch | None = None,
) -> Any:
    """Traces the program that a run executes: rounds of all seeds and an evaluation.

    Args:
      algorithm: the method.
      config: of the run.
      num_rounds: of one call of the program.
      seed_states, train, validation: arrays, or shapes and where the arrays would lie.
      watch: for clients whose updates are not finite.
    """
    return _advance_seeds.trace(
        algorithm if watch else _traced_once(algorithm),
        num_rounds,
        config.patience,
        config.keep_last,
        config.is_drawn,
        config.seeds_per_chunk,
        watch,
        seed_states,
        train,
        validation,
    )


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
      InputError: if the loss is no longer finite, or the checkpoint does not fit, is
        missing, or is there and not asked for, or its lines of `metrics.jsonl` lack
        what the best round is chosen by, or seeds that stopped early would go on from
        other rounds than the rest; or no client has anything to train on, or two
        have the same id; or see `check_num_rounds`.
    """
    if not eval_only:
        check_num_rounds(name, algorithm, config.num_rounds)
    clients.check_clients(splits["train"], "the split train")
    if algorithm.privacy is not None:
        privacy.check(config.on_nan)
    checkpoints = None
    if workdir is not None and config.num_rounds:
        folder = workdir / name / "checkpoints"
        checkpoints = _open_checkpoints(folder, settings, resume, eval_only, defaults)
    with contextlib.closing(checkpoints) if checkpoints else contextlib.nullcontext():
        if config.check_memory:
            memory.check_copies("the data", splits)
        splits = mesh.put_replicated(splits)
        data = splits["train"]
        seed_state, seconds = _start(algorithm, config, data, checkpoints, eval_only)
        loop = _Loop(name, algorithm, splits, config, workdir, checkpoints)
        loop.count(seed_state)
        if not eval_only:
            seed_state, seconds = loop.run(seed_state, seconds)
    states, data = seed_state.best_state, splits["test"]
    test = evaluate_seeds(algorithm, states, data, config.is_drawn)
    return RunResult(
        best_state=mesh.whole(seed_state.best_state),
        test=test,
        best_round=np.asarray(seed_state.best_round),
        num_rounds=int(np.max(seed_state.round)),
        communication=loop.exchange,
        seconds=seconds,
        compile_seconds=loop.compile_seconds,
        privacy=loop.privacy_after(int(np.max(seed_state.round))),
    )


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
    before, now = (
        [(found or {}).get(key, 1) for key in ROUNDING_SETTINGS]
        for found in (checkpoints.settings(), settings)
    )
    if before != now:
        print(
            f"note: {folder}: so far on {before[0]} devices of {before[1]} processes, "
            f"and now on {now[0]} of {now[1]}, which agree up to rounding"
        )
    return checkpoints


def _start(algorithm, config, data, checkpoints, eval_only) -> tuple[SeedState, float]:
    """Returns the latest checkpoint, or else the first state, and seconds so far."""
    if checkpoints and checkpoints.latest_round() is not None:
        like = abstract_seeds(algorithm, config.seeds, data, config.is_drawn)
        read = checkpoints.restore if eval_only else checkpoints.restore_intact
        seed_state, seconds = read((like, np.float64(0)))
        seed_state = mesh.put_spread(seed_state, clients.count(data), axis=1)
        return seed_state, float(seconds)
    seeds = jnp.asarray(config.seeds, jnp.uint32)
    seed_state = _init_seeds(algorithm, seeds, data, config.is_drawn)
    return mesh.put_spread(seed_state, clients.count(data), axis=1), 0.0


def evaluate_seeds(
    algorithm: FederatedAlgorithm, states: State, data: Data, is_drawn=nothing
) -> Metrics:
    """Scores each seed's state on a split; NumPy, with a leading axis of seeds."""
    return jax.device_get(_evaluate_seeds(algorithm, is_drawn, states, data))


def predict_seeds(
    algorithm: FederatedAlgorithm, states: State, data: Data, is_drawn=nothing
) -> np.ndarray:
    """Predicts a split by each seed's state, [seeds, ...]."""
    data = mesh.put_replicated(data)
    return jax.device_get(_predict_seeds(algorithm, is_drawn, states, data))


def _on_host(states: Any) -> Any:
    return jax.device_get(mesh.whole(states))


class _Loop:
    """Does the host's side of a run: calls the compiled program and writes."""

    def __init__(self, name, algorithm, splits, config, workdir, checkpoints) -> None:
        self._name, self._algorithm, self._config = name, algorithm, config
        self._data = (splits["train"], splits["validation"])
        self._workdir, self._checkpoints = workdir, checkpoints
        self._programs = {}
        self._note = lambda text: None  # until there is progress to show
        self._saved_at = time.monotonic()
        self._divergence = Divergence(name, config.on_nan)
        self.compile_seconds = 0.0
        self.exchange = communication.Exchange()
        self._num_releases: int | None = None  # of a round that is private

    def count(self, seed_state: SeedState) -> None:
        """Counts the bytes of a run and, of a private method, releases of a round."""
        config = self._config
        if not config.num_rounds:
            return

        def of_first(states, data):
            state = of_seed(states, 0, everything)
            return state, of_seed(data, 0, config.is_drawn), jax.random.key(0)

        algorithm = _traced_once(self._algorithm)
        args = mesh.abstract(jax.eval_shape(of_first, seed_state.state, self._data[0]))
        _, data, key = args
        self.exchange = communication.Exchange(
            communication.bytes_per_round(algorithm.init, key, data),
            tuple(
                (phase.first_round, communication.bytes_per_round(phase.round, *args))
                for phase in algorithm.phases or (Phase(1, algorithm.round),)
            ),
        )
        if algorithm.privacy is not None:
            args = algorithm.round, *args
            self._num_releases = privacy.releases_per_round(*args)

    def run(self, seed_state: SeedState, seconds: float) -> tuple[SeedState, float]:
        config, round_ = self._config, int(np.max(seed_state.round))
        if not config.num_rounds:
            return seed_state, seconds
        if self._workdir and round_:
            monitor = self._algorithm.monitor
            check_monitored(self._workdir, self._name, monitor)
            note_missing_rounds(self._workdir, self._name, round_)
        if round_ >= config.num_rounds or self._is_stopped(seed_state).all():
            return seed_state, seconds
        args = self._algorithm, config.seeds, seed_state, config.patience
        check_in_step(self._name, *args)
        if round_ % config.eval_every:
            print(
                f"note: {self._name}: the run so far ended with round {round_}, which "
                f"it evaluated beside those of eval_every={config.eval_every}; one "
                "that did not end there may have another best round and stop elsewhere"
            )
        shown = ("train_loss", f"validation_{self._algorithm.monitor}")
        progress = Progress(self._name, config.num_rounds, round_, shown)
        self._note = progress.note
        writes = self._workdir and processes.is_first()
        writer = writes and MetricsWriter(self._workdir, self._name, round_)
        with contextlib.ExitStack() as stack:
            stack.callback(progress.close)
            if writer:
                stack.callback(writer.close)
            is_traced = config.profile and processes.is_first()
            folder = pathlib.Path(config.profile, self._name) if is_traced else None
            profile = stack.enter_context(contextlib.closing(Profile(folder)))
            if self._checkpoints:
                stack.enter_context(termination.deferred())
            return self._rounds(seed_state, seconds, round_, writer, progress, profile)

    def privacy_after(self, num_rounds: int) -> dict[str, Any] | None:
        """What the rounds so far have cost, of a method that is private."""
        if self._num_releases is None:
            return None
        return privacy.spent(self._algorithm.privacy, self._num_releases, num_rounds)

    def _rounds(self, seed_state, seconds, round_, writer, progress, profile):
        config, divergence = self._config, self._divergence
        again = functools.partial(self._again, round_)
        running = ~self._is_stopped(seed_state)
        watched = running  # at any time since the last checkpoint
        while round_ < config.num_rounds and running.any():
            num_rounds = self._num_rounds_from(round_)
            program = self._program(num_rounds, seed_state, divergence.watch)
            with profile.call():
                start = time.perf_counter()
                seed_state, metrics = program(seed_state, *self._data)
                metrics = jax.device_get(metrics)
                elapsed = time.perf_counter() - start
            seconds += elapsed
            if divergence.watch:
                jax.effects_barrier()
            again = functools.partial(self._again, round_ + num_rounds)
            for i in range(num_rounds):
                number = round_ + 1 + i
                losses = metrics["train_loss"][running, i]
                divergence.check_losses(number, losses, again)
                record = self._record(metrics, i, number, ~running)
                record["seconds"] = elapsed / num_rounds
                if config.examples_per_round:
                    examples = config.examples_per_round * int(np.sum(running))
                    record[config.rate_name] = examples / record["seconds"]
                if cost := self.privacy_after(number):
                    record["epsilon"] = cost["epsilon"]
                if skipped := divergence.skipped(number):
                    record["skipped_clients"] = skipped
                if writer:
                    writer.write(record)
                progress.update(record)
            round_ += num_rounds
            running = ~self._is_stopped(seed_state)
            if self._checkpoints:
                is_last = round_ >= config.num_rounds or not running.any()
                is_asked = termination.is_asked()
                if is_last or is_asked or self._is_due():
                    if writer:
                        writer.sync()
                    self._save(round_, seed_state, seconds, watched, again)
                    watched = running
                if is_asked:
                    termination.end(f"round {round_} of {self._name}")
        if not self._checkpoints:
            state = _on_host(seed_state.state)
            divergence.check_state(round_, state, watched, self._first_state, again)
        return seed_state, seconds

    def _is_stopped(self, seed_state: SeedState) -> np.ndarray:
        return is_stopped(self._algorithm, seed_state, self._config.patience)

    def _save(self, round_, seed_state, seconds, watched, again) -> None:
        """Makes a checkpoint of what is finite."""
        saved = _on_host(seed_state)
        args = watched, self._first_state, again
        self._divergence.check_state(round_, saved.state, *args)
        self._checkpoints.save(round_, (saved, np.float64(seconds)))
        self._saved_at = time.monotonic()

    def _is_due(self) -> bool:
        """Tells whether the last checkpoint is old; processes do not share a clock."""
        age = time.monotonic() - self._saved_at
        return processes.count() > 1 or age >= self._config.checkpoint_seconds

    def _first_state(self) -> Any:
        args = self._algorithm, self._config, self._data[0], None
        seed_state, _ = _start(*args, eval_only=False)
        return _on_host(seed_state.state)

    def _num_rounds_from(self, round_: int) -> int:
        """Rounds up to the next evaluation: a multiple of `eval_every`, or the last.

        So it is where a run was killed. One that ended between two multiples and is
        prolonged has evaluated one round more than if it had not ended there.
        """
        every, last = self._config.eval_every, self._config.num_rounds
        return min(every - round_ % every, last - round_)

    def _again(self, last: int, watch: faults.Watch) -> None:
        """Computes the rounds since the last checkpoint once more, watched."""
        args = self._algorithm, self._config, self._data[0], self._checkpoints
        seed_state, _ = _start(*args, eval_only=False)
        round_ = int(np.max(seed_state.round))
        while round_ < last:
            num_rounds = self._num_rounds_from(round_)
            program = self._program(num_rounds, seed_state, watch)
            seed_state, _ = program(seed_state, *self._data)
            round_ += num_rounds
        jax.effects_barrier()

    def _program(
        self, num_rounds: int, seed_state: SeedState, watch: faults.Watch | None
    ) -> Any:
        """Compiles `advance` over all seeds, once for each number of rounds."""
        if (num_rounds, watch) not in self._programs:
            config = self._config
            self._note(f"{self._name}: compiling the round ...")
            start = time.perf_counter()
            args = self._algorithm, config, num_rounds, seed_state, *self._data
            lowered = trace(*args, watch).lower()
            with reporter.without_alarms():
                self._programs[num_rounds, watch] = lowered.compile()
            self.compile_seconds += time.perf_counter() - start
            if config.check_memory:
                memory.check_program(self._name, self._programs[num_rounds, watch])
        return self._programs[num_rounds, watch]

    def _record(self, metrics, i, round_, stopped) -> dict[str, Any]:
        """Makes a line of `metrics.jsonl`: means over the seeds still running.

        The training loss is a mean over those in which somebody took part.

        Of the evaluation, each metric that is one number for a seed.
        """
        scores = metrics["validation"]
        figures = {k: v[:, i] for k, v in metrics.items() if k != "validation"}
        if i == metrics["train_loss"].shape[1] - 1:
            for key, values in scores.items():
                if np.ndim(values) == 1:  # [seeds]
                    figures[f"validation_{key}"] = values
        record = {"method": self._name, "round": round_}
        for key, values in figures.items():
            known = values[~stopped]
            if key == "train_loss":
                known = known[known != NO_LOSS]
            record[key] = float(np.mean(known)) if known.size else None
            if len(values) > 1:
                record[f"{key}_by_seed"] = values
        return record
