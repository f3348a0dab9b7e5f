"""Where a study writes: the options of its folder, and the folder itself."""

import contextlib
import contextvars
import dataclasses
import datetime
import os
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

from experiments.studies.options import Options, option
from fedjax_graph.core import processes
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import lock

TRACES = ("metrics.jsonl", "results.json", "*/checkpoints/*", "*/metrics.jsonl")
RECORDS = {  # what a folder holds, by the file that has its scores
    "results.json": "a single run",
    "sweep.json": "a sweep",
    "robustness.json": "curves of robustness",
}
_held: contextvars.ContextVar[contextlib.ExitStack | None] = contextvars.ContextVar(
    "_held", default=None
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderOptions(Options):
    """Options of the folder, and of what is done with a run that lies there."""

    subject: ClassVar[str] = "Output"
    system: ClassVar[str]  # name of the binary, and of new folders under runs/

    workdir: str | None = option(
        None, "Folder for all output; by default a new one under runs/."
    )
    checkpoint_seconds: float = option(
        15.0,
        "Least time between checkpoints, which are made after evaluations: what a kill "
        "may cost. The last evaluation, and that before SIGTERM ends a run, always "
        "make one; several processes make all.",
        lower=0,
    )
    resume: bool = option(False, "Go on from --workdir's checkpoint.")
    eval_only: bool = option(False, "Score --workdir's checkpoint.")
    split: str = option(
        "test", "What --eval_only scores.", choices=["train", "validation", "test"]
    )

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
          InputError: naming the flag.
        """
        super().__post_init__()
        if self.is_given("split") and not self.eval_only:
            raise InputError("--split needs --eval_only")

    @property
    def record_name(self) -> str:
        """The file of `RECORDS` that this study writes."""
        return "sweep.json" if getattr(self, "sweep", None) else "results.json"

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        new = f"runs/{self.system}-DATASET-TIME"
        return super().in_effect() | {"workdir": self.workdir or new}

    @contextlib.contextmanager
    def holding_folders(self) -> Iterator[None]:
        """Keeps the folder that `make_workdir` makes inside the `with` block."""
        with contextlib.ExitStack() as stack:
            token = _held.set(stack)
            try:
                yield
            finally:
                _held.reset(token)

    def make_workdir(self, dataset: str) -> pathlib.Path:
        """Makes the folder for output if needed; nothing in it is written over.

        Inside `holding_folders` no other run gets it; one that is only scored is not
        locked, as nothing is written.

        Raises:
          InputError: if it holds a run and neither --resume nor --eval_only is given,
            or the other way round, another run is going on there, or it cannot be made.
        """
        workdir = self.named_folder(dataset)
        self._check_content(workdir)
        processes.gather()  # all have looked into it
        if self.eval_only:
            return workdir
        if self.resume and not _holds_run(workdir) and processes.is_first():
            print(
                f"note: --workdir={workdir} holds no run to resume; this is a new run"
            )
        make_folder("workdir", workdir)
        is_locked = not os.access(workdir, os.W_OK)
        if processes.any_says(is_locked):
            raise InputError(
                f"--workdir={workdir} is not writable; name another folder"
            )
        processes.check_shared(workdir)
        held = _held.get()
        if held is not None:
            held.enter_context(lock.locked(workdir))
            self._check_content(workdir)  # as another run may have ended just now
            processes.gather()
        return workdir

    def named_folder(self, dataset: str) -> pathlib.Path:
        if self.workdir is not None:
            return pathlib.Path(self.workdir)
        if self.resume or self.eval_only:
            raise InputError("--resume and --eval_only need --workdir")
        if processes.count() > 1:
            raise InputError("--coordinator: name one --workdir for all processes")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{self.system}-{pathlib.Path(dataset).stem}-{stamp}"
        return pathlib.Path("runs", name)

    def _check_content(self, workdir: pathlib.Path) -> None:
        if workdir.exists() and not workdir.is_dir():
            raise InputError(f"--workdir={workdir} is a file; name a folder")
        found = [name for name in RECORDS if (workdir / name).exists()]
        if found and self.record_name not in found:
            raise InputError(
                f"--workdir={workdir} holds {RECORDS[found[0]]}, not "
                f"{RECORDS[self.record_name]}; name another folder"
            )
        holds_run = _holds_run(workdir)
        if self.eval_only and not holds_run:
            raise InputError(f"--workdir={workdir} holds no run to score")
        if holds_run and not (self.resume or self.eval_only):
            raise InputError(
                f"--workdir={workdir} already holds a run; give --resume to continue "
                "it or name another folder"
            )


def _holds_run(workdir: pathlib.Path) -> bool:
    return any(any(workdir.glob(trace)) for trace in TRACES)


def make_folder(flag: str, folder: pathlib.Path) -> None:
    """Makes the folder that a flag names, if needed.

    Raises:
      InputError: if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--{flag}={folder} cannot be made ({error.strerror}); name another folder"
        ) from error
