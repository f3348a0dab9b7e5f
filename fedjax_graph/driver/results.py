"""`results.json`, the same for every system, and the table on the terminal.

    {"dataset": str, "settings": {...},
     "methods": {name: {"test": {...}, "test_std": {...} or null, "best_round": int,
                        "communication_bytes": {"up": int, "down": int},
                        "seconds": float, ...}}}

Leaves of `test` are means over seeds; `test_std` and `test_by_seed` have the same tree.
Which metrics it holds is said by who runs the method; some stand beside it, as means.
Errors are in the unit of the data, of traffic `settings["unit"]`; MAPE and accuracies
in percent. What `mae` and `rmse` mean is the system's: see its page in docs/.
`communication_bytes` are those of training up to the best round, the papers'
convention; `communication_bytes_in_all` those of all rounds, each with what is sent
once before the rounds; `communication_bytes_per_round` the latter by round, rounded
down, as of a method with phases rounds differ. An entry that an earlier command put on
record has the `command` and the `flags` of that one beside; those of the others stand
in `settings`.
"""

import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import limits
from fedjax_graph.driver import provenance
from fedjax_graph.driver.rounds import RunResult
from fedjax_graph.driver.writers import to_jsonable, write_atomically

# Settings that an entry of an earlier command has itself.
OF_COMMAND = ("command", "flags", "setting", "source", "hardware", "versions")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jraph", "numpy", "orbax-checkpoint")


def environment() -> dict[str, Any]:
    """Records hardware, versions, and which code it is."""
    return {
        "source": provenance.source(),
        "hardware": {
            "device": mesh.device_kind(),
            "backend": mesh.backend(),
            "num_devices": mesh.num_devices(),
            "precision": precision(),
            "machine": platform.machine(),
            "num_cpus": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
        },
    }


def precision() -> str:
    """The precision of matrix products of float32, as JAX names it.

    That which is set counts on accelerators; a CPU computes float32 whatever is set.
    """
    chosen = jax.config.jax_default_matmul_precision or "default"
    return "float32" if mesh.backend() == "cpu" else chosen


def method_entry(
    result: RunResult,
    test_keys: Sequence[str],
    config: dict[str, Any],
    entry_keys: Sequence[str] = (),
) -> dict[str, Any]:
    """Makes the entry of one method, without metrics that the method does not have.

    Args:
      result: of the run.
      test_keys: of the metrics that make `test`.
      config: hyper-parameters, for the record.
      entry_keys: of the metrics that stand beside `test`, arrays as means over seeds,
        and of several with their deviations.
    """
    kept = {key: result.test[key] for key in test_keys if key in result.test}
    beside = {key: result.test[key] for key in entry_keys if key in result.test}
    mean = jax.tree.map(lambda x: float(np.mean(x, dtype=np.float64)), kept)
    std = None
    num_seeds = len(result.best_round)
    if num_seeds > 1:
        std = jax.tree.map(lambda x: float(np.std(x, dtype=np.float64, ddof=1)), kept)
    best_round = float(np.mean(result.best_round))
    exchanged, last = result.communication, result.num_rounds
    up_to_best = [exchanged.until(best) for best in result.best_round]
    by_seed = [sum(size) for size in up_to_best]
    entry = {
        "test": mean,
        "test_std": std,
        "test_by_seed": kept if num_seeds > 1 else None,
        "best_round": round(best_round),
        "best_round_by_seed": result.best_round,
        "num_rounds": result.num_rounds,
        "communication_bytes": {
            "up": round(Fraction(sum(x.up for x in up_to_best), num_seeds)),
            "down": round(Fraction(sum(x.down for x in up_to_best), num_seeds)),
        },
        "communication_bytes_by_seed": by_seed if num_seeds > 1 else None,
        "communication_bytes_per_round": exchanged.per_round(last)._asdict(),
        "communication_bytes_in_all": exchanged.until(last)._asdict(),
        "seconds": result.seconds,
        "compile_seconds": result.compile_seconds,
        "config": config,
    }
    if result.privacy is not None:
        entry["privacy"] = result.privacy
    entry |= jax.tree.map(lambda x: np.mean(x, axis=0), beside)
    if num_seeds > 1:
        for key, values in beside.items():
            entry[f"{key}_std"] = np.std(values, axis=0, dtype=np.float64, ddof=1)
    return to_jsonable(entry)


def read_methods(
    workdir: pathlib.Path,
    system: str,
    checksum: int | None = None,
    also: Mapping[str, int] | None = None,
) -> dict[str, dict[str, Any]]:
    """Reads the entries of an earlier run in the same folder, by method.

    Each has the command that put it on record beside, and its flags.

    Args:
      workdir: of the run.
      system: the name of the binary.
      checksum: of the data now; None where that is checked elsewhere.
      also: checksums of more of it by name, which results of an older version lack.

    Raises:
      InputError: if its `results.json` cannot be read, or is of another binary or of
        other data.
    """
    path = workdir / "results.json"
    if not path.exists():
        return {}
    try:
        limits.check_plain(path)
        found = limits.parse_json(path.read_text())
        settings = found.get("settings", {})
        methods, before = found["methods"], settings.get("data")
        made_by = system_of(settings)
        for entry in methods.values():
            _ = entry["test"].keys(), entry["test_std"], entry["best_round"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: expected the results of an earlier run, cannot read them; delete "
            "it or name another workdir"
        ) from error
    if made_by not in (None, system):
        raise InputError(
            f"{path}: the results are of {made_by}, not of {system}; name another "
            "workdir"
        )
    differs = any(settings.get(key, x) != x for key, x in (also or {}).items())
    if checksum not in (None, before) or differs:
        raise InputError(
            f"{path}: the results are of other data; resume with the same dataset "
            "flags or name another workdir"
        )
    made = {key: settings[key] for key in OF_COMMAND if key in settings}
    return {
        name: entry | {key: x for key, x in made.items() if key not in entry}
        for name, entry in methods.items()
    }


def settings_of(settings: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, of which an entry of an earlier command has some of its own."""
    return settings | {key: entry[key] for key in OF_COMMAND if key in entry}


def system_of(settings: dict[str, Any]) -> str | None:
    """The name of the binary that made some results; None where they do not say it."""
    words = str(settings.get("command", "")).split()
    return words[2].removeprefix("experiments.") if words[2:] else None


def write_results(
    workdir: pathlib.Path,
    dataset: str,
    settings: dict[str, Any],
    methods: dict[str, dict[str, Any]],
) -> None:
    """Writes `results.json` whole."""
    results = {
        "dataset": dataset,
        "settings": to_jsonable({**settings, **environment()}),
        "methods": methods,
    }
    write_atomically(workdir / "results.json", json.dumps(results, indent=2) + "\n")


class Table(NamedTuple):
    """A table of texts, which `str` aligns for a terminal."""

    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """Aligns the columns."""
        return format_table(self.header, self.rows)


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Aligns columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells):
        first, *rest = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join([first, *rest]).rstrip()

    return "\n".join(
        [line(header), "  ".join("-" * w for w in widths), *map(line, rows)]
    )


def with_std(mean: float | None, std: float | None) -> str:
    """Writes `11.49` or, over seeds, `11.49 ± 0.02`; `nan` for what is not finite."""
    if mean is None:
        return "nan"
    return f"{mean:.3f}" if std is None else f"{mean:.3f} ± {std:.3f}"
