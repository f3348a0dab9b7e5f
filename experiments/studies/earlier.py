"""Methods that an earlier command put on record, and the flags that it had."""

from collections.abc import Collection, Mapping
from typing import Any

from experiments.studies import options
from experiments.studies.options import Options

# Flags that say where and on what a method runs, which method, and how often.
NOT_COMPARED = (
    *("data_dir", "dataset", "max_file_gib", "plugin", "workdir", "methods", "code"),
    *("strategy", "sweep", "sweep_values"),
    *("resume", "eval_only", "split", "num_retrain", "repeats"),
    "target_rmse",
    *("clients_per_chunk", "edges_per_chunk", "num_cpu_devices", "checkpoint_inner"),
    *("check_memory", "checkpoint_seconds", "compilation_cache", "profile"),
    *("coordinator", "num_processes", "process_id"),
)


def note(
    study: Options, before: Mapping[str, Mapping[str, Any]], methods: Collection[str]
) -> None:
    """Prints which methods stay on record that had other flags, and which flags.

    Args:
      study: what runs now.
      before: entries on record, by method; see `results.read_methods`.
      methods: those that run now.
    """
    alike: dict[str, list[str]] = {}
    for method, entry in before.items():
        if method not in methods and (said := _differing(study, entry)):
            alike.setdefault(said, []).append(method)
    for said, names in alike.items():
        print(f"note: {', '.join(names)}: on record from a command with {said}")


def _differing(study: Options, entry: Mapping[str, Any]) -> str:
    """The flags that an entry had and a study has otherwise, as the entry had them."""
    now = study.record()
    return " ".join(
        f"no --{name}"
        if value is None
        else options.flag(name, tuple(value) if isinstance(value, list) else value)
        for name, value in entry.get("flags", {}).items()
        if name not in NOT_COMPARED and value != now.get(name)
    )
