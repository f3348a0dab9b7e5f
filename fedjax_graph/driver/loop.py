"""The host's side of a run: it calls the compiled program, writes, and saves."""

import contextlib
import functools
import math
import pathlib
import time
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
)
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import every_leaf
from fedjax_graph.driver import memory, programs
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.config import RunConfig
from fedjax_graph.driver.divergence import Divergence
from fedjax_graph.driver.profile import Profile
from fedjax_graph.driver.seeds import (
    SeedState,
    abstract_seeds,
    check_in_step,
    check_seeds,
    check_storable,
    is_stopped,
    of_seed,
)
from fedjax_graph.driver.writers import (
    MetricsWriter,
    Progress,
    check_monitored,
    note_missing_rounds,
)


def load_or_init(
    algorithm: FederatedAlgorithm,
    config: RunConfig,
    data: Data,
    checkpoints: Checkpoints | None,
    eval_only: bool,
) -> tuple[SeedState, float]:
    """Returns the latest checkpoint, or else the first state, and seconds so far.

    Args:
      algorithm: the method.
      config: of the run.
      data: the split `train`.
      checkpoints: of the run, where it has any.
      eval_only: whether the latest checkpoint has to be intact; otherwise the latest
        intact one is read.

    Raises:
      InputError: if a checkpoint does not fit, is damaged or of other seeds, or
        none can hold the state.
    """
    if checkpoints and checkpoints.latest_round() is not None:
        like = abstract_seeds(algorithm, config.seeds, data, config.is_drawn)
        if mesh.num_devices() > 1:
            like = mesh.abstract_spread(like, clients.count(data), axis=1)
        read = checkpoints.restore if eval_only else checkpoints.restore_intact
        seed_state, seconds = read((like, np.float64(0)))
        seed_state = mesh.put_spread(seed_state, clients.count(data), axis=1)
        check_seeds(config.seeds, seed_state)
        return seed_state, float(seconds)
    seeds = jnp.asarray(config.seeds, jnp.uint32)
    algorithm = programs.traced_once(algorithm)
    seed_state = programs.init(algorithm, seeds, data, config.is_drawn)
    if checkpoints:
        check_storable(seed_state.state)
    return mesh.put_spread(seed_state, clients.count(data), axis=1), 0.0


class Call(NamedTuple):
    """Holds what a call of the compiled program gives, maybe still to be computed."""

    last: int  # the last of its rounds
    seed_state: SeedState
    metrics: Metrics
    is_stopped: jax.Array  # [seeds] bool
    started: float  # seconds on some clock


class Wanted(NamedTuple):
    """Says what a compiled program computes: equal ones share it."""

    algorithm: FederatedAlgorithm
    num_rounds: int
    watch: faults.Watch | None


class Loop:
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
        self.ledger = communication.Ledger()
        self._num_releases: int | None = None  # of a round that is private

    def count(self, seed_state: SeedState, told: communication.Bytes) -> None:
        """Counts the bytes of a run and, of a private method, releases of a round.

        Args:
          seed_state: before the first of the rounds.
          told: what crossed in `algorithm.exchange`.
        """
        config = self._config
        if not config.num_rounds:
            return

        def of_first(states, data):
            state = of_seed(states, 0, every_leaf)
            return state, of_seed(data, 0, config.is_drawn), jax.random.key(0)

        algorithm = programs.traced_once(self._algorithm)
        args = mesh.abstract(jax.eval_shape(of_first, seed_state.state, self._data[0]))
        state, data, key = args
        rounds = []
        for first, round_, opening in algorithm.phases or (Phase(1, algorithm.round),):
            size = communication.bytes_per_round(round_, *args)
            if opening:
                once = communication.bytes_per_round(opening, state, data)
                rounds.append((first, size.plus(once)))
                first += 1
            rounds.append((first, size))
        before = communication.bytes_per_round(algorithm.init, key, data)
        self.ledger = communication.Ledger(before.plus(told), tuple(rounds))
        if algorithm.privacy is not None:
            args = algorithm.round, *args
            self._num_releases = privacy.releases_per_round(*args)
            self.privacy_after(config.num_rounds)  # raises before the first

    def run(self, seed_state: SeedState, seconds: float) -> tuple[SeedState, float]:
        config, round_ = self._config, int(np.max(seed_state.round))
        if not config.num_rounds:
            return seed_state, seconds
        if round_ > config.num_rounds:
            raise InputError(
                f"num_rounds={config.num_rounds}: {self._name} has {round_} rounds on "
                "record; take no fewer, or begin anew in another folder"
            )
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
            self._prepare(seed_state, round_)
            if self._checkpoints:
                stack.enter_context(termination.deferred())
            return self._rounds(seed_state, seconds, round_, writer, progress, profile)

    def privacy_after(self, num_rounds: int) -> dict[str, Any] | None:
        """What the rounds so far have cost, of a method that is private."""
        if self._num_releases is None:
            return None
        return privacy.spent(self._algorithm.privacy, self._num_releases, num_rounds)

    def _rounds(self, seed_state, seconds, round_, writer, progress, profile):
        again = functools.partial(self._again, round_)
        running = ~self._is_stopped(seed_state)
        watched = running  # at any time since the last checkpoint
        following, ready, elapsed = None, 0.0, math.inf
        while round_ < self._config.num_rounds and running.any():
            with profile.call():
                call = following or self._call(round_, seed_state)
                seed_state, following = call.seed_state, None
                if self._may_go_ahead(call.last, elapsed):  # as long as the last one
                    # The device goes on while the host writes. Where all seeds turn
                    # out to have stopped, this call leaves the states as they are.
                    following = self._call(call.last, seed_state)
                    seed_state = following.seed_state
                metrics, is_stopped = jax.device_get((call.metrics, call.is_stopped))
                if not following:  # figures may be there before all devices are done
                    jax.block_until_ready(seed_state)
                before, ready = max(call.started, ready), time.perf_counter()
                elapsed = ready - before
            seconds += elapsed
            if self._divergence.watch:
                jax.effects_barrier()
            again = functools.partial(self._again, call.last)
            each = elapsed / (call.last - round_)
            for i in range(call.last - round_):
                number = round_ + 1 + i
                losses = metrics["train_loss"][running, i]
                self._divergence.check_losses(number, losses, again)
                record = self._record(metrics, i, number, running, each)
                if writer:
                    writer.write(record)
                progress.update(record)
            round_ = call.last
            running = ~is_stopped
            is_last = round_ >= self._config.num_rounds or not running.any()
            if self._checkpoints and (is_last or not following):
                is_asked = termination.is_asked()
                if is_last or is_asked or self._is_due():
                    if writer:
                        writer.sync()
                    self._save(round_, seed_state, seconds, watched, again)
                    watched = running
                if is_asked:
                    termination.end(f"round {round_} of {self._name}")
        if not self._checkpoints:
            args = watched, self._first_state, again
            self._divergence.check_state(round_, seed_state.state, *args)
        return seed_state, seconds

    def _is_stopped(self, seed_state: SeedState) -> np.ndarray:
        return is_stopped(self._algorithm, seed_state, self._config.patience)

    def _save(self, round_, seed_state, seconds, watched, again) -> None:
        """Makes a checkpoint of what is finite."""
        args = watched, self._first_state, again
        self._divergence.check_state(round_, seed_state.state, *args)
        self._checkpoints.save(round_, (seed_state, np.float64(seconds)))
        self._saved_at = time.monotonic()

    def _is_due(self, later: float = 0.0) -> bool:
        """Tells whether the last checkpoint is old; processes do not share a clock.

        Args:
          later: asks for a time so many seconds from now.
        """
        age = time.monotonic() - self._saved_at + later
        return processes.count() > 1 or age >= self._config.checkpoint_seconds

    def _first_state(self) -> Any:
        args = self._algorithm, self._config, self._data[0], None
        seed_state, _ = load_or_init(*args, eval_only=False)
        return seed_state.state

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
        seed_state, _ = load_or_init(*args, eval_only=False)
        round_ = int(np.max(seed_state.round))
        while round_ < last:
            program = self._program(round_, seed_state, watch)
            seed_state, *_ = program(seed_state, *self._data)
            round_ += self._num_rounds_from(round_)
        jax.effects_barrier()

    def _call(self, round_: int, seed_state: SeedState) -> Call:
        """Has the device compute the rounds after one, up to the next evaluation."""
        program = self._program(round_, seed_state, self._divergence.watch)
        started, last = time.perf_counter(), round_ + self._num_rounds_from(round_)
        seed_state, metrics, is_stopped = program(seed_state, *self._data)
        return Call(last, seed_state, metrics, is_stopped, started)

    def _may_go_ahead(self, round_: int, seconds: float) -> bool:
        """Tells whether rounds may be computed before the last ones' figures are read.

        Not where a checkpoint is to be made in between; not while somebody watches or
        traces each call; not in several processes, which have to agree; not on several
        devices of a CPU, which share threads: one that waits in the next call could
        leave the others none for this one; and not on a GPU, where a call returns when
        it is almost done, so that its time would be counted as that of the last one.

        Args:
          round_: the rounds after it.
          seconds: how long those before it are going to take.
        """
        if self._checkpoints and self._is_due(later=seconds):
            return False
        is_seen = self._divergence.watch or self._config.profile
        shares_threads = mesh.backend() == "cpu" and mesh.num_devices() > 1
        waits = shares_threads or mesh.backend() == "gpu"
        if is_seen or waits or processes.count() > 1:
            return False
        is_last = round_ >= self._config.num_rounds
        if is_last or termination.is_asked():
            return False
        return self._wanted(round_, None) in self._programs  # compiled

    def _prepare(self, seed_state: SeedState, round_: int) -> None:
        """Compiles what a method's phases to come begin with: none is refused later."""
        every, last = self._config.eval_every, self._config.num_rounds
        for phase in self._algorithm.phases:
            start = max(round_, (phase.first_round - 1) // every * every)
            after = start + self._num_rounds_from(start)
            for call in (start, after):  # the first one may have rounds of two phases
                if call < last:
                    self._program(call, seed_state, self._divergence.watch)

    def _wanted(self, round_: int, watch: faults.Watch | None) -> Wanted:
        """The program of the rounds after one: of their phase alone, if it is one."""
        num_rounds = self._num_rounds_from(round_)
        algorithm = self._algorithm.during(round_ + 1, round_ + num_rounds)
        return Wanted(algorithm, num_rounds, watch)

    def _program(
        self, round_: int, seed_state: SeedState, watch: faults.Watch | None
    ) -> Any:
        """Compiles `advance` over all seeds, once for all rounds that may share it."""
        wanted = self._wanted(round_, watch)
        if wanted not in self._programs:
            self._note(f"{self._name}: compiling the round ...")
            start = time.perf_counter()
            args = self._config, wanted.num_rounds, seed_state, *self._data, watch
            lowered = programs.trace(wanted.algorithm, *args).lower()
            with reporter.without_alarms():
                self._programs[wanted] = lowered.compile()
            self.compile_seconds += time.perf_counter() - start
            if self._config.check_memory:
                memory.check_program(f"{self._name}: a round", self._programs[wanted])
        return self._programs[wanted]

    def _record(self, metrics, i, round_, running, seconds) -> dict[str, Any]:
        """Makes a line of `metrics.jsonl`: a round's figures, its speed and its cost.

        Args:
          metrics: of a call.
          i: index of the round in it.
          round_: its number.
          running: [seeds] bool, which ones had not stopped before the call.
          seconds: that the round took.
        """
        config, record = self._config, self._figures(metrics, i, round_, ~running)
        record["seconds"] = seconds
        if config.examples_per_round:
            examples = config.examples_per_round * int(np.sum(running))
            record[config.rate_name] = examples / seconds
        if cost := self.privacy_after(round_):
            record["epsilon"] = cost["epsilon"]
        if skipped := self._divergence.skipped(round_):
            record["skipped_clients"] = skipped
        return record

    def _figures(self, metrics, i, round_, stopped) -> dict[str, Any]:
        """Means over the seeds still running, and each one's own.

        The training loss is a mean over those in which somebody took part. Of the
        evaluation there is each metric that is one number for a seed.
        """
        scores = metrics["validation"]
        figures = {k: v[:, i] for k, v in metrics.items() if k != "validation"}
        if i == metrics["train_loss"].shape[1] - 1:
            for key, values in scores.items():
                if np.ndim(values) == 1:  # [seeds]
                    figures[f"validation_{key}"] = values
        record = {"method": self._name, "round": round_}
        for key, values in figures.items():
            if stopped.any():
                values = np.where(stopped, np.nan, values)
            known = values[~stopped]
            if key == "train_loss":
                known = known[known != NO_LOSS]
            record[key] = float(np.mean(known)) if known.size else None
            if len(values) > 1:
                record[f"{key}_by_seed"] = values
        return record
