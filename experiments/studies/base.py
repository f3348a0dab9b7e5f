"""What every study has: which data and methods, how long, where to, on what.

A study is a frozen record of one run of a binary. `run()` does all that the binary
does; `dataclasses.replace` makes another one of it, and a sweep is a list of those.
"""

import abc
import contextlib
import dataclasses
import functools
import os
import pathlib
import shlex
import tempfile
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from experiments.studies import options
from experiments.studies.folders import FolderOptions
from experiments.studies.options import option
from experiments.studies.surroundings import DataOptions, MachineOptions
from fedjax_graph import algorithms
from fedjax_graph.core import clients, optimizers, plugins, processes
from fedjax_graph.core.errors import InputError, meant
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.driver import compile_for

MOST_ROUNDS = 2**31 - 1  # they are counted in 32 bits
COMPILES = {  # options that are not for --compile_for, and what it compiles instead
    "coordinator": "compiles in one process",
    "sweep": "compiles one run",
    "eval_only": "compiles what trains",
    "pretrained": "compiles what trains",
}
PATIENCE = 20  # rounds without a better validation figure, where none is given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(DataOptions, MachineOptions, FolderOptions):
    """Settings that all systems share; each field is a flag of the same name."""

    subject: ClassVar[str] = "Methods and rounds"

    methods: tuple[str, ...] | None = option(None, "Methods, comma-separated.")
    num_rounds: int | None = option(
        None, "Most communication rounds.", lower=1, upper=MOST_ROUNDS
    )
    eval_every: int = option(
        1, "Rounds between evaluations.", lower=1, upper=MOST_ROUNDS
    )
    patience: int | None = option(
        None,
        "Rounds without a better validation figure before a seed stops.",
        lower=1,
        upper=MOST_ROUNDS,
    )
    on_nan: str = option(
        "stop",
        "Where what a client sends is not finite: stop, leave it out of the round, or "
        "go on.",
        choices=["stop", "skip_client", "ignore"],
    )
    seed: int = option(0, "Seed of all randomness.", lower=0, upper=2**31)
    num_seeds: int = option(1, "Seeds run in one program, from --seed on.", lower=1)
    participation: float = option(
        1.0, "Share of the clients in a round.", lower=1e-9, upper=1.0
    )
    clients_per_chunk: str = option(
        "auto", "Clients side by side: auto, all or a number."
    )
    client_optimizer: str | OptimizerConfig | None = option(
        None,
        "What clients step with, and fields that differ from the defaults, such as "
        "sgd,momentum=0.9; the rate here or by the flag of its own.",
    )
    server_optimizer: str | OptimizerConfig | None = option(
        None, "What the server steps with, such as adam,second_momentum=0.99."
    )

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
          InputError: naming the flag.
        """
        super().__post_init__()
        _ = self.target
        if self.clients_per_chunk != "auto":  # which asks JAX for the device
            self.chunk()

    @abc.abstractmethod
    def run_loaded(self) -> Any:
        """Does what the binary does once the plugins are there.

        Returns:
          The entries of `results.json` by method, or of a sweep its rows.

        Raises:
          InputError: one line, where a setting or a file does not fit.
        """

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        return super().in_effect() | {"patience": self.patience or PATIENCE}

    def command(self) -> str:
        """A command line that runs the same."""
        given = [name for name in options.options_of(type(self)) if self.is_given(name)]
        texts = [options.flag(name, getattr(self, name)) for name in given]
        return shlex.join(["python", "-m", f"experiments.{self.system}", *texts])

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the run."""
        return tuple(range(self.seed, self.seed + self.num_seeds))

    # --- Methods and optimizers -------------------------------------------------------

    def choose_methods(
        self, known: Collection[str], default: tuple[str, ...]
    ) -> list[str]:
        """The methods that `methods` names; `all` stands for those that are known.

        A plugin's method of any task is known by its own name.

        Args:
          known: names of the methods of this study, in their order.
          default: what runs where none is named.

        Raises:
          InputError: if one is not known.
        """
        named = self.methods or default
        if named == ("all",):
            return list(known)
        if "all" in named:
            raise InputError("--methods: all stands alone")
        for method in named:
            if method not in (both := [*known, *plugged_in()]):
                raise InputError(
                    f"--methods: unknown method {method!r}{meant(method, both)}; "
                    f"known: all, {', '.join(both)}"
                )
        return list(named)

    def client_steps(self, default: OptimizerConfig) -> OptimizerConfig:
        """The clients' optimizer: the default, with what `client_optimizer` changes.

        Raises:
          InputError: if it cannot be read.
        """
        return self._steps("client_optimizer", default)

    def server_steps(self, default: OptimizerConfig) -> OptimizerConfig:
        """The server's optimizer: the default, with what `server_optimizer` changes.

        Raises:
          InputError: if it cannot be read, or has a schedule without `num_steps`: no
            method tells its server how many steps it is going to take.
        """
        steps = self._steps("server_optimizer", default)
        given = self.server_optimizer is not None
        if given and steps.schedule != "constant" and not steps.num_steps:
            raise InputError(
                f"--server_optimizer={self.server_optimizer}: give num_steps, those of "
                f"the server that schedule={steps.schedule} spans"
            )
        return steps

    def _steps(self, name: str, default: OptimizerConfig) -> OptimizerConfig:
        chosen = getattr(self, name)
        if chosen is None:
            return default
        side, _, _ = name.partition("_")
        others = [f"{side}_learning_rate"]
        if side == "client":
            others += ["learning_rate", "weight_decay"]
        self.check_given_once(name, filter(functools.partial(hasattr, self), others))
        text = options.flag(name, chosen)
        if not isinstance(chosen, str):
            return chosen
        try:
            return optimizers.parse(chosen, default)
        except InputError as error:
            raise InputError(f"{text}: {error}") from error

    def check_given_once(self, name: str, others: Iterable[str]) -> None:
        """Checks that an optimizer does not say what another option says as well.

        Args:
          name: of the option of the optimizer.
          others: those of its rate, and `weight_decay`.

        Raises:
          InputError: if it does.
        """
        chosen = getattr(self, name)
        text = "" if chosen is None else options.flag(name, chosen)
        for other in filter(self.is_given, others):
            field = other if other == "weight_decay" else "learning_rate"
            if field in optimizers.fields_given(text.partition("=")[2]):
                raise InputError(
                    f"{text} and --{other} both give the {field}; give it once"
                )

    def chunk(self) -> int | None:
        """Clients side by side, as `clients.map_clients` takes it.

        Raises:
          InputError: if the option cannot be read.
        """
        backend = self.target.backend if self.target else None
        return clients.parse_clients_per_chunk(self.clients_per_chunk, backend)

    # --- Chips that are not here -----------------------------------------------------

    def run(self) -> Any:
        """Does all that the binary does; under `compile_for` it only compiles.

        Returns:
          What `run_loaded` returns, or the records of `compile_for.Report`s.

        Raises:
          InputError: one line, where a plugin cannot be imported, or a setting or a
            file does not fit.
        """
        if self.compile_for is None:
            self.join_processes()
            with contextlib.ExitStack() as stack:
                if not processes.is_first():
                    nowhere = stack.enter_context(open(os.devnull, "w"))
                    stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(self.holding_folders())
                return super().run()
        for name, reason in COMPILES.items():
            if getattr(self, name, None):
                raise InputError(f"--compile_for {reason}, not --{name}")
        plugins.load_all(self.plugin or ())
        if self.methods and "all" in self.methods:
            raise InputError("--compile_for: name the methods; all is none")
        with tempfile.TemporaryDirectory() as folder:
            workdir, methods = str(pathlib.Path(folder, "run")), self.compiled_methods()
            changed = dataclasses.replace(self, methods=methods, workdir=workdir)
            try:
                return super(Study, changed).run()
            except compile_for.Compiled as done:
                return done.records

    def compiled_methods(self) -> tuple[str, ...] | None:
        """`methods` under `compile_for`: those named, else the system's own."""
        return self.methods or (self.system,)


# --- Methods -------------------------------------------------------------------------


def plugged_in() -> list[str]:
    """The names of users' methods that run on any task."""
    names = filter(algorithms.is_users, algorithms.method_names())
    return [name for name in names if algorithms.get_method(name).takes_task]


def titles_of(
    methods: Iterable[str], own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Titles of a study's methods and of users', as they are registered.

    Args:
      methods: names.
      own: titles that the study has itself, by name.
    """
    own, names = own or {}, dict.fromkeys((*methods, *plugged_in()))
    return {x: own[x] if x in own else algorithms.get_method(x).title for x in names}
