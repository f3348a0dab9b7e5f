"""What every binary does with a method: run it, and put its results on record."""

import dataclasses
import pathlib
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import _run_flags
from fedjax_graph import algorithms
from fedjax_graph.core import configs
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.driver import results, rounds, writers
from fedjax_graph.driver.rounds import RunResult


class Run(NamedTuple):
    """A method that was run or scored."""

    algorithm: FederatedAlgorithm
    result: RunResult
    config: dict[str, Any]  # JSON-able


def make_config(method: str, values: dict[str, Any]) -> Any:
    """A method's config from those of the flags' values that are its fields."""
    config_type = algorithms.get_method(method).config_type
    return algorithms.make_config(method, configs.known_fields(config_type, values))


def fingerprint(*arrays: np.ndarray) -> int:
    """A checksum of the data: a resumed run must see the same."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    return checksum


def run_method(
    method: str,
    values: dict[str, Any],
    splits: dict[str, Data],
    workdir: pathlib.Path,
    *,
    checksum: int,
    num_rounds: int,
    examples_per_round: int,
    rate_name: str = "windows_per_s",
    registered_name: str | None = None,
    **run_settings: Any,
) -> Run:
    """Runs a method by the flags, or scores it under --eval_only.

    Args:
      method: its name in the output.
      values: fields of its config.
      splits: train, validation and test data.
      workdir: see `rounds.run`.
      checksum: of the data; a resumed run must have the same.
      num_rounds: most rounds, of a method that is trained.
      examples_per_round: of all clients, for the rate shown.
      rate_name: of that rate.
      registered_name: of the method, where it is another one.
      run_settings: fields of `rounds.RunConfig`, in place of what the flags say.
    """
    registered_name = registered_name or method
    registered = algorithms.get_method(registered_name)
    config = make_config(registered_name, values)
    algorithm = registered.factory(config)
    seeds = _run_flags.seeds() if registered.is_trained else _run_flags.seeds()[:1]
    run_config = rounds.RunConfig(
        num_rounds=num_rounds if registered.is_trained else 0,
        eval_every=_run_flags.EVAL_EVERY.value,
        patience=_run_flags.PATIENCE.value,
        seeds=seeds,
        seeds_per_chunk=1 if jax.default_backend() == "cpu" else None,
        examples_per_round=examples_per_round,
        rate_name=rate_name,
    )
    run_config = dataclasses.replace(run_config, **run_settings)
    settings = writers.to_jsonable(
        {
            "method": registered_name,
            "config": dataclasses.asdict(config),
            "seeds": run_config.seeds,
            "data": checksum,
            "num_devices": jax.device_count(),
            "precision": _run_flags.PRECISION.value,
            "eval_every": _run_flags.EVAL_EVERY.value,
        }
    )
    if _run_flags.EVAL_ONLY.value:
        splits = {**splits, "test": splits[_run_flags.SPLIT.value]}
    result = rounds.run(
        method,
        algorithm,
        splits,
        run_config,
        workdir,
        settings,
        resume=_run_flags.RESUME.value,
        eval_only=_run_flags.EVAL_ONLY.value,
        defaults={"config": defaults_of(registered.config_type)},
    )
    return Run(algorithm, result, settings["config"])


def defaults_of(config_type: type) -> dict[str, Any]:
    """Values of a config's fields where none is given, of those that have one."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_type)}
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        for name, value in defaults.items()
        if value is not dataclasses.MISSING
    }


def entries_of(runs: dict[str, Run], keys: tuple[str, ...]) -> dict[str, Any]:
    """The entries of `results.json`; `keys` of the metrics make `test`."""
    return {
        method: results.method_entry(run.result, keys, run.config, ("rmse_by_horizon",))
        for method, run in runs.items()
    }


def records_of(workdir: pathlib.Path, titles: dict[str, str]) -> list[dict[str, Any]]:
    """The run's `metrics.jsonl`, methods under their titles."""
    records = writers.read_records(workdir / "metrics.jsonl")
    return [{**r, "method": titles.get(r["method"], r["method"])} for r in records]


def announce(text: str, notes: tuple[str, ...], workdir: pathlib.Path) -> None:
    """Says what runs on what, and what was done to the data."""
    for note in notes:
        print(f"note: {note}")
    print(text)
    verb = "scoring" if _run_flags.EVAL_ONLY.value else "writing to"
    print(f"on {jax.devices()[0].device_kind}; {verb} {workdir}", flush=True)
