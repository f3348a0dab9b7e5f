"""Flags of every binary that runs methods, and what follows from them."""

import contextlib
import datetime
import os
import pathlib
import sys
from typing import Any

import jax
from absl import flags

from fedjax_graph.core import clients, mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver.checkpoint import Checkpoints

METHODS = flags.DEFINE_list("methods", None, "Methods, comma-separated.")
flags.register_validator(
    METHODS,
    lambda names: names is None or 0 < len(names) == len(set(names)),
    message="name at least one method, and each only once",
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for all output; by default a new one under runs/."
)
NUM_ROUNDS = flags.DEFINE_integer(
    "num_rounds", None, "Most communication rounds.", lower_bound=1
)
EVAL_EVERY = flags.DEFINE_integer(
    "eval_every", 1, "Rounds between evaluations and checkpoints.", lower_bound=1
)
PATIENCE = flags.DEFINE_integer(
    "patience", 20, "Rounds without a better validation loss.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of all randomness.", 0, 2**31)
NUM_SEEDS = flags.DEFINE_integer(
    "num_seeds", 1, "Seeds run in one program, from --seed on.", lower_bound=1
)


def refuse_nan(*holders: flags.FlagHolder) -> None:
    """NaN lies within all bounds of absl's."""
    for holder in holders:
        flags.register_validator(
            holder, lambda x: x is None or x == x, message="expected a number"
        )


PARTICIPATION = flags.DEFINE_float(
    "participation", 1.0, "Share of the clients in a round.", 1e-9, 1.0
)
refuse_nan(PARTICIPATION)
CLIENTS_PER_CHUNK = flags.DEFINE_string(
    "clients_per_chunk", "auto", "Clients side by side: auto, all or a number."
)
PRECISION = flags.DEFINE_enum(
    "precision",
    "tf32",
    ["float32", "tf32", "bfloat16"],
    "Precision of matrix products on accelerators; a CPU always computes float32.",
)
NUM_CPU_DEVICES = flags.DEFINE_integer(
    "num_cpu_devices",
    None,
    "Without an accelerator: CPU cores that share the work; by default all, but one "
    "for data so large that copies of it would fill the memory.",
    lower_bound=1,
)
RESUME = flags.DEFINE_bool("resume", False, "Go on from --workdir's checkpoint.")
EVAL_ONLY = flags.DEFINE_bool("eval_only", False, "Score --workdir's checkpoint.")
SPLIT = flags.DEFINE_enum(
    "split", "test", ["train", "validation", "test"], "What --eval_only scores."
)

MOST_COPIED_BYTES = 1.3 * 2**30  # METR-LA in full has 1.2 GiB, PEMS-BAY 2.8 GiB
_JAX_PRECISION = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}


def set_up_jax(copied_bytes: int = 0) -> None:
    """Applies --precision, and makes the CPU's cores mesh.

    Args:
      copied_bytes: what each device will hold a copy of. Where that is much, and
        --num_cpu_devices is not given, the CPU stays one device.
    """
    set_precision()
    is_large = copied_bytes > MOST_COPIED_BYTES
    mesh.use_cpu_cores(NUM_CPU_DEVICES.value or (1 if is_large else None))


def set_precision() -> None:
    """Applies --precision to all matrix products."""
    jax.config.update("jax_default_matmul_precision", _JAX_PRECISION[PRECISION.value])


def seeds() -> tuple[int, ...]:
    return tuple(range(SEED.value, SEED.value + NUM_SEEDS.value))


def make_workdir(system: str, dataset: str) -> pathlib.Path:
    """The folder for output, made if needed; nothing in it is written over.

    Raises:
      InputError: if it holds a run and neither --resume nor --eval_only is given, or
        the other way round, or it cannot be made.
    """
    continues = RESUME.value or EVAL_ONLY.value
    if WORKDIR.value is None:
        if continues:
            raise InputError("--resume and --eval_only need --workdir")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        workdir = pathlib.Path("runs", f"{system}-{pathlib.Path(dataset).stem}-{stamp}")
    else:
        workdir = pathlib.Path(WORKDIR.value)
    if workdir.exists() and not workdir.is_dir():
        raise InputError(f"--workdir={workdir} is a file; name a folder")
    traces = ("metrics.jsonl", "results.json", "*/checkpoints/*", "*/metrics.jsonl")
    holds_run = any(any(workdir.glob(trace)) for trace in traces)
    if EVAL_ONLY.value and not holds_run:
        raise InputError(f"--workdir={workdir} holds no run to score")
    if holds_run and not continues:
        raise InputError(
            f"--workdir={workdir} already holds a run; give --resume to continue it or "
            "name another folder"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--workdir={workdir} cannot be made ({error.strerror}); name another"
        ) from error
    if not os.access(workdir, os.W_OK):
        raise InputError(f"--workdir={workdir} is not writable; name another folder")
    return workdir


def clients_per_chunk(workdir: pathlib.Path, method: str) -> int | None:
    """The flag's value; `auto` on a resumed run is what its checkpoint was made with.

    Raises:
      InputError: if the flag cannot be read.
    """
    chosen = clients.parse_clients_per_chunk(CLIENTS_PER_CHUNK.value)
    folder = workdir / method / "checkpoints"
    if CLIENTS_PER_CHUNK.value != "auto" or not folder.is_dir():
        return chosen
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        if checkpoints.latest_round() is None:
            return chosen
        return checkpoints.settings()["config"]["clients_per_chunk"]


def flag_values() -> dict[str, Any]:
    """The flags that the binaries define, for the record."""
    return {
        flag.name: flag.value
        for module, defined in flags.FLAGS.flags_by_module_dict().items()
        if module == sys.argv[0] or module.startswith("experiments.")
        for flag in defined
    }
