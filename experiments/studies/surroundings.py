"""Options of what a study works with: data, plugins, and the machine."""

import abc
import contextlib
import dataclasses
import json
import os
import pathlib
import time
from typing import Any, ClassVar

import jax
from jax.experimental.compilation_cache import compilation_cache

from experiments.studies.options import Options, option
from fedjax_graph.core import mesh, plugins, processes
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import limits
from fedjax_graph.data.download import cache_folder
from fedjax_graph.driver import compile_for
from fedjax_graph.driver.compile_for import Target

MOST_COPIED_BYTES = 1.3 * 2**30
MOST_CPU_DEVICES = 8  # each holds a copy of what is not shared out
UNUSED_SECONDS = 30 * 24 * 3600  # after which a compiled program is removed
_JAX_PRECISION = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}
AUTO_PRECISION = {"cpu": "float32", "gpu": "tf32", "tpu": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Which data, and what plugins bring."""

    subject: ClassVar[str] = "Data"

    dataset: str | None = option(
        None, "Name of a dataset, or the path of your own: .npz, .csv or a folder."
    )
    data_dir: str | None = option(
        None,
        "Folder with the dataset files; by default $FEDJAX_GRAPH_DATA, then the cache "
        "that `python -m experiments.datasets --download` fills.",
    )
    max_file_gib: float = option(
        limits.DEFAULT_GIB,
        "What a file may hold once unpacked, in GiB; larger ones are refused unread.",
        lower=1e-9,
    )
    plugin: tuple[str, ...] | None = option(
        None,
        "Files or modules that register methods, models, datasets, aggregators or "
        "optimizers of one's own.",
    )

    def __post_init__(self) -> None:
        """Takes the environment's folder where none is given, and checks every option.

        Raises:
          InputError: naming the flag.
        """
        if self.data_dir is None:
            folder = os.environ.get("FEDJAX_GRAPH_DATA") or None  # "" is none as well
            object.__setattr__(self, "data_dir", folder)
        super().__post_init__()

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        return super().in_effect() | {"data_dir": self.data_dir or str(cache_folder())}

    def run(self) -> Any:
        """Does all that the binary does, plugins first.

        Returns:
          What `run_loaded` returns.

        Raises:
          InputError: one line, where a plugin cannot be imported, or a setting or a
            file does not fit.
        """
        plugins.load_all(self.plugin or ())
        with mesh.restored(), limits.at_most(self.max_file_gib):
            return self.run_loaded()

    @abc.abstractmethod
    def run_loaded(self) -> Any:
        """Does what the binary does once the plugins are there.

        Raises:
          InputError: one line, where a setting or a file does not fit.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """Options of the hardware: matrix precision, and CPU cores as devices."""

    subject: ClassVar[str] = "Machine"
    keeps_programs: ClassVar[bool] = True  # unless told otherwise

    precision: str = option(
        "tf32",
        "Precision of matrix products of float32, which are added up in float32; a CPU "
        "always computes float32. auto: tf32 on a GPU, bfloat16 on a TPU.",
        choices=["auto", *_JAX_PRECISION],
    )
    num_cpu_devices: int | None = option(
        None,
        "Without an accelerator: CPU cores of a process that share the work; by "
        "default all, up to 8, but of sfl and graphfl one where copies of the models "
        "or features would fill the memory.",
        lower=1,
        upper=1024,
    )

    check_memory: bool = option(
        True, "Refuse a round that needs more memory than is free, once it is compiled."
    )
    compilation_cache: str | None = option(
        None,
        "Folder that keeps compiled programs for later runs, or `off`; by default "
        "$JAX_COMPILATION_CACHE_DIR, or one beside the downloads.",
    )
    compile_for: str | None = option(
        None,
        "Compile a round of --methods and its evaluation for chips that are not here, "
        "such as h200x8 or v5e:2x2, print what they need there, and stop.",
    )
    profile: str | None = option(
        None,
        "Folder for a trace of the second and third call of a method's compiled "
        "program, each of --eval_every rounds, for TensorBoard or XProf.",
    )
    edge_parts: int = option(
        1,
        "Devices that share the edges of CNFGNN's graph; the others share windows.",
        lower=1,
    )
    coordinator: str | None = option(
        None,
        "Several processes run this, on one or many hosts: address and port of the "
        "first, such as 10.0.0.1:1234, or auto under Slurm, Open MPI or on TPU pods.",
    )
    num_processes: int | None = option(
        None, "How many processes there are; with --coordinator.", lower=1
    )
    process_id: int | None = option(
        None, "Which of them this is, from 0; with --coordinator.", lower=0
    )

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        kept = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(programs_folder())
        return super().in_effect() | {
            "num_cpu_devices": self.num_cpu_devices or usual_cpu_devices(),
            "compilation_cache": kept if self.keeps_programs else "off",
        }

    def join_processes(self) -> None:
        """Makes this process one of several, if `coordinator` says so.

        Raises:
          InputError: if the others do not come, or an option of theirs is missing.
        """
        if self.coordinator is None:
            if self.num_processes is not None or self.process_id is not None:
                raise InputError(
                    "--num_processes and --process_id need --coordinator: the address "
                    "and port of the first process, or auto"
                )
            return
        is_found = self.coordinator == "auto"
        address = None if is_found else self.coordinator
        if not is_found and None in (self.num_processes, self.process_id):
            raise InputError(
                f"--coordinator={address}: needs --num_processes and --process_id"
            )
        processes.join(address, self.num_processes, self.process_id)
        own = ("process_id", "workdir", "data_dir", "compilation_cache")
        common = {name: x for name, x in self.record().items() if name not in own}
        processes.agree("the command line", json.dumps(common, default=str))

    @property
    def target(self) -> Target | None:
        """What is compiled for, instead of computed."""
        return compile_for.parse(self.compile_for) if self.compile_for else None

    def backend(self) -> str:
        """The platform that computes, or is compiled for: `cpu`, `gpu` or `tpu`."""
        target = self.target
        return target.backend if target else mesh.backend()

    def precision_in_effect(self) -> str:
        """What `precision` means on the machine that computes, or is compiled for."""
        if self.precision != "auto":
            return self.precision
        return AUTO_PRECISION[self.backend()]

    def precision_computed(self) -> str:
        """`precision_in_effect`, but of a CPU, which has float32 whatever is asked."""
        return "float32" if self.backend() == "cpu" else self.precision_in_effect()

    def set_up_jax(self, copied_bytes: int = 0) -> None:
        """Applies the precision, makes the CPU's cores devices, and sets the mesh.

        In a process that has used JAX before, the CPU's devices stay as many as they
        are, and the mesh has some of them.

        Args:
          copied_bytes: what each device will hold a copy of. Where that is much, and
            `num_cpu_devices` is not given, the CPU stays one device.

        Raises:
          InputError: if JAX is to compute in double precision, more CPU devices are
            asked for than a process has that has used JAX before, `edge_parts` does not
            divide the devices, or a folder is a file.
        """
        if jax.config.jax_enable_x64:  # which some methods' loops do not bear
            raise InputError("JAX_ENABLE_X64 is set, expected single precision")
        for name in ("compilation_cache", "profile"):
            folder = getattr(self, name)
            if folder and pathlib.Path(folder).is_file():
                raise InputError(f"--{name}={folder} is a file; name a folder")
        if self.compile_for is not None:
            compile_for.use_host()
        self._keep_programs()
        is_large = copied_bytes > MOST_COPIED_BYTES
        usual = 1 if is_large else usual_cpu_devices()
        chosen = self.num_cpu_devices or min(map(int, processes.gather(str(usual))))
        if self.compile_for is not None:
            chosen = 1  # which describes the data
        with contextlib.suppress(RuntimeError):  # JAX has been used
            mesh.use_cpu_cores(chosen)
        precision = _JAX_PRECISION[self.precision_in_effect()]
        jax.config.update("jax_default_matmul_precision", precision)
        found = mesh.all_devices()
        if mesh.backend() == "cpu":
            if len(found) < chosen * processes.count() and self.num_cpu_devices:
                raise InputError(
                    f"--num_cpu_devices={chosen}: JAX is already in use with "
                    f"{len(found)}; run the study first in its process"
                )
            found = found[: chosen * processes.count()]
        if self.compile_for is None:
            jax.set_mesh(mesh.make_mesh(self.edge_parts, found))

    def _keep_programs(self) -> None:
        """Lets JAX keep what it compiles, small programs too: a start has dozens."""
        jax.config.update("jax_compilation_cache_dir", self._programs_kept_in())
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        compilation_cache.reset_cache()  # of what another run in the process used

    def _programs_kept_in(self) -> str | None:
        """The folder that is named, the environment's, or the user's own; or none."""
        named, is_alone = self.compilation_cache, processes.count() == 1
        if named is not None:
            return None if named == "off" else named
        if self.compile_for is not None or not is_alone:
            return None  # of several processes JAX lets the first alone keep any
        usual = jax.config.jax_compilation_cache_dir
        return usual or (make_programs_folder() if self.keeps_programs else None)


def usual_cpu_devices() -> int:
    """CPU cores that share the work where nobody says how many."""
    return min(mesh.num_cores(), MOST_CPU_DEVICES)


def programs_folder() -> pathlib.Path:
    """Where compiled programs are kept where nobody says where."""
    return cache_folder() / "programs"


def make_programs_folder() -> str | None:
    """Makes it, without the programs that no run has read for a while.

    Returns:
      Its path; None, with a note, where there can be none.
    """
    folder, oldest = programs_folder(), time.time() - UNUSED_SECONDS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            found = file.stat()
            if max(found.st_atime, found.st_mtime) < oldest:
                file.unlink()
    except FileNotFoundError:  # another run does the same
        pass
    except OSError as error:
        print(f"note: compiled programs are not kept: {folder}: {error.strerror}")
        return None
    return str(folder)
