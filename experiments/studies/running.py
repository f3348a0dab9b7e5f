"""What every study does with a method: run it, and put its results on record."""

import contextlib
import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from experiments.studies.base import PATIENCE, Study
from fedjax_graph import algorithms
from fedjax_graph.core import configs, mesh, processes
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import compile_for, results, rounds, writers
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.rounds import RunResult

Entry = dict[str, Any]  # of a method in `results.json`
Outcome = TypeVar("Outcome")


class Run(NamedTuple):
    """A method that was run or scored."""

    algorithm: FederatedAlgorithm
    result: RunResult
    config: dict[str, Any]  # JSON-able


def fingerprint(*arrays: np.ndarray) -> int:
    """A checksum of the data: a resumed run must see the same."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    return checksum


def config_of(method: str, values: Mapping[str, Any]) -> Any:
    """A registered method's config from those settings of a study that concern it.

    Args:
      method: as registered.
      values: by name; what is no field of the config concerns other methods.
    """
    config_type = algorithms.get_method(method).config_type
    return algorithms.make_config(method, configs.known_fields(config_type, values))


def build(method: str, values: Mapping[str, Any]) -> tuple[Any, FederatedAlgorithm]:
    """A registered method's config, see `config_of`, and its algorithm.

    A study builds all before it trains one, so that no refusal costs a training.

    Raises:
      InputError: if the settings do not fit the method; naming the flag of `privacy`.
    """
    config = config_of(method, values)
    try:
        return config, algorithms.get_method(method).factory(config)
    except InputError as error:
        said = re.sub("^privacy:", "--dp_noise_multiplier:", str(error))
        raise InputError(said) from error


def clients_per_chunk(study: Study, workdir: pathlib.Path, name: str) -> int | None:
    """The study's value; `auto` on a resumed run is what its checkpoint was made with.

    Raises:
      InputError: if the option cannot be read.
    """
    chosen = study.chunk()
    if study.clients_per_chunk != "auto":
        return chosen
    config = saved_config(workdir, name)
    return (config.get("task", {}) | config).get("clients_per_chunk", chosen)


def saved_config(workdir: pathlib.Path, name: str) -> dict[str, Any]:
    """The config that a method's checkpoints were made with; {} without any."""
    return saved_settings(workdir, name).get("config", {})


def saved_settings(workdir: pathlib.Path, name: str) -> dict[str, Any]:
    """The settings that a method's checkpoints were made with; {} without any."""
    folder = workdir / name / "checkpoints"
    is_begun = folder.is_dir()
    processes.gather()
    if not is_begun:
        return {}
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        is_empty = checkpoints.latest_round() is None
        return {} if is_empty else checkpoints.settings()


def run_method(
    study: Study,
    name: str,
    values: Mapping[str, Any],
    splits: dict[str, Data],
    workdir: pathlib.Path,
    *,
    checksum: int,
    also: Mapping[str, int] | None = None,
    num_rounds: int,
    examples_per_round: int,
    rate_name: str = "windows_per_s",
    registered_name: str | None = None,
    **run_settings: Any,
) -> Run:
    """Runs a method as a study says, or scores it under `eval_only`.

    Args:
      study: seeds, patience, what is resumed or scored.
      name: of the method in the output.
      values: settings, of which the method's config takes its fields.
      splits: train, validation and test data.
      workdir: see `rounds.run`.
      checksum: of the data; a resumed run must have the same.
      also: checksums of more of it by name, which a run of an older version may lack.
      num_rounds: most rounds, of a method that is trained.
      examples_per_round: of all clients, for the rate shown.
      rate_name: of that rate.
      registered_name: of the method, where it is another one.
      run_settings: fields of `rounds.RunConfig`, in place of what the study says.
    """
    also = dict(also or {})
    processes.agree("the data", str((checksum, also)))
    registered_name = registered_name or name
    registered = algorithms.get_method(registered_name)
    config, algorithm = build(registered_name, values)
    # Side by side, a call with rounds of two phases, and scores, would compute both.
    is_alone = study.backend() == "cpu" or bool(algorithm.phases)  # each seed
    run_config = rounds.RunConfig(
        num_rounds=num_rounds if registered.is_trained else 0,
        eval_every=study.eval_every,
        patience=study.patience or PATIENCE,
        seeds=study.seeds if registered.is_trained else study.seeds[:1],
        seeds_per_chunk=1 if is_alone else None,
        examples_per_round=examples_per_round,
        rate_name=rate_name,
        profile=study.profile,
        on_nan=study.on_nan,
        checkpoint_seconds=study.checkpoint_seconds,
        check_memory=study.check_memory,
    )
    run_config = dataclasses.replace(run_config, **run_settings)
    target = study.target
    if target is not None:
        if not registered.is_trained:
            raise InputError(f"--compile_for: {name} is not trained, so has no round")
        _compile(name, algorithm, splits, run_config, target, study.edge_parts)
    settings = writers.to_jsonable(
        {
            "method": registered_name,
            "config": dataclasses.asdict(config),
            "seeds": run_config.seeds,
            "data": checksum,
            **also,
            "num_devices": mesh.num_devices(),
            "num_processes": processes.count(),
            "precision": study.precision_computed(),
            "eval_every": study.eval_every,
        }
    )
    if study.eval_only:
        splits = {**splits, "test": splits[study.split]}
    result = rounds.run(
        name,
        algorithm,
        splits,
        run_config,
        workdir,
        settings,
        resume=study.resume,
        eval_only=study.eval_only,
        defaults={"config": config_defaults(config), **also},
    )
    return Run(algorithm, result, settings["config"])


def _compile(name: str, *args: Any) -> NoReturn:
    """Compiles a round, see `compile_for.compile_round`, and prints its report.

    A search has more rounds than one kind, and GraphFL's self-training a teacher: what
    is trained first is compiled, and `name` says which it was.

    Raises:
      compile_for.Compiled: with the report's record.
    """
    report = compile_for.compile_round(*args)
    first, *lines = report.lines()
    print("\n".join([f"{name}: {first}", *lines]))
    record = {"method": name, **dataclasses.asdict(report)}
    print(json.dumps(record), flush=True)
    raise compile_for.Compiled([record])


def compile_all(methods: Sequence[str], run_one: Callable[[str], Any]) -> NoReturn:
    """Compiles a round of each method, see `run_method`.

    Args:
      methods: names.
      run_one: see `run_all`.

    Raises:
      compile_for.Compiled: with the records of all.
      InputError: if a method has no round.
    """
    records = []
    for method in methods:
        try:
            run_one(method)
        except compile_for.Compiled as done:
            records += done.records
        else:
            raise InputError(f"--compile_for: {method} has no round")
    raise compile_for.Compiled(records)


def run_all(
    study: Study,
    methods: Sequence[str],
    run_one: Callable[[str], tuple[Outcome, Entry]],
    before: Mapping[str, Entry],
    write: Callable[[dict[str, Entry]], None],
) -> tuple[dict[str, Outcome], dict[str, Entry]]:
    """Runs or scores methods; after each its scores are on record, come what may.

    Args:
      study: under `eval_only` nothing is written.
      methods: names.
      run_one: name -> what came out, and its entry of `results.json`.
      before: what is on record, which stays as it is unless all methods are run.
      write: all entries so far -> the file.

    Returns:
      What came out and the entries, by method.
    """
    outcomes, entries = {}, {}
    for method in methods:
        outcomes[method], entries[method] = run_one(method)
        is_news = method not in before or method == methods[-1]
        if is_news and not study.eval_only:
            write({**before, **entries})
    return outcomes, entries


def config_defaults(config: Any) -> dict[str, Any]:
    """Values of a config's fields where none is given, of those that have one.

    So of the configs that it holds: an optimizer's, a task's and its optimizer's. What
    the data say (`of_data`) is as it is: they have a checksum of their own.
    """
    defaults = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("of_data"):
            defaults[field.name] = value
        elif dataclasses.is_dataclass(value) and field.default != value:
            defaults[field.name] = config_defaults(value)
        elif dataclasses.is_dataclass(field.default):
            defaults[field.name] = dataclasses.asdict(field.default)
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return defaults


# --- Output --------------------------------------------------------------------------


def announce(
    study: Study, text: str, notes: Sequence[str], workdir: pathlib.Path
) -> None:
    """Prints what runs on what, and what was done to the data.

    Where that is only compiled, not on what.
    """
    for note in notes:
        print(f"note: {note}")
    print(text)
    if study.compile_for is not None:
        return
    verb = "scoring" if study.eval_only else "writing to"
    print(f"on {mesh.device_kind()}; {verb} {workdir}", flush=True)


def records_of(workdir: pathlib.Path, titles: Mapping[str, str]) -> list[Entry]:
    """The run's `metrics.jsonl`, methods under their titles."""
    records = writers.read_records(workdir / "metrics.jsonl")
    return [{**r, "method": titles.get(r["method"], r["method"])} for r in records]


def monitors(runs: Mapping[str, Run]) -> tuple[str, ...]:
    """What the best rounds of some runs are chosen by, each name once."""
    return tuple(dict.fromkeys(run.algorithm.monitor for run in runs.values()))


Cell = str | tuple[str, ...] | Callable[[Entry], str]


def table(
    first: str,
    columns: Mapping[str, Cell],
    entries: Mapping[str, Entry],
    titles: Mapping[str, str],
) -> results.Table:
    """The table of a study: a row for each method.

    Args:
      first: header of the column of titles.
      columns: header -> key or path in an entry's `test`, or a function of the entry.
      entries: of `results.json`, by method.
      titles: of the methods.
    """
    rows = [
        [titles.get(name, name), *(_cell(entry, cell) for cell in columns.values())]
        for name, entry in entries.items()
    ]
    return results.Table([first, *columns], rows)


def _cell(entry: Entry, cell: Cell) -> str:
    if callable(cell):
        return cell(entry)
    path = (cell,) if isinstance(cell, str) else cell
    mean, std = entry["test"], entry["test_std"]
    for key in path:
        mean, std = mean.get(key, ""), std and std.get(key)
        if mean == "":  # of an earlier run, which was scored otherwise
            return ""
    return results.with_std(mean, std)


def best_round(entry: Entry) -> str:
    """The round whose state was tested, for a column of `table`."""
    return str(entry["best_round"])
