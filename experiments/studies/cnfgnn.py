"""A run of CNFGNN, its strategies and its baselines on a traffic network."""

import dataclasses
import itertools
import pathlib
import tempfile
from typing import Any

import numpy as np

from experiments import report
from experiments.studies import cnfgnn_configs as configs
from experiments.studies import cnfgnn_defaults as paper
from experiments.studies import cnfgnn_output as output
from experiments.studies import pictures, running, sweeps
from experiments.studies.cnfgnn_options import CNFGNNOptions
from experiments.studies.recording import Record
from experiments.studies.running import Entry, Run
from experiments.studies.traffic import measures, time_checksum
from fedjax_graph.core import client_rows, clients
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import inductive, windows
from fedjax_graph.data.traffic.network import TrafficDataset
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.driver import maps, plots, pretrained, programs, results
from fedjax_graph.driver.network import save_network

SCORES = ("rmse", "mae")  # of `forecasting.error_metrics`
TEST_KEYS = (*SCORES, "masked", "all", "seen", "unseen")
ENTRY_KEYS = ("rmse_by_horizon",)
Splits = dict[str, TrafficData]  # train, validation and test


@dataclasses.dataclass(frozen=True, kw_only=True)
class CNFGNNStudy(CNFGNNOptions):
    """Trains CNFGNN, its strategies and baselines, and reports what the paper does.

    CNFGNNStudy(dataset="metr_la", methods=("cnfgnn",), workdir="runs/mine").run()
    """

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        return super().in_effect() | configs.in_effect(self)

    def run_loaded(self) -> dict[str, Entry] | list[dict[str, Any]]:
        """Does all that the binary does.

        Returns:
          The entries of `results.json` by method, or the rows of `sweep.json`.

        Raises:
          InputError: one line, where an option or a file does not fit.
        """
        self.set_up_jax()
        if self.pretrained is not None:
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                method = pretrained.unpack(self.pretrained, folder)
                saved = running.saved_settings(folder, method)
                made_with = configs.flags_of(saved)
                card = pretrained.read(self.pretrained).card
                changes = made_with | {"dataset": card.get("dataset")}
                changes = {x: v for x, v in changes.items() if not self.is_given(x)}
                args = method, paper.registered(method), saved["config"]
                changes["method_settings"] = self.settings_made_with(*args) or None
                changes |= {"workdir": name, "methods": (method,), "pretrained": None}
                return dataclasses.replace(self, **changes).run_loaded()
        methods = self.chosen_methods()
        configs.check_optimizers(self, methods)
        dataset = self.load_network()
        is_seen = None
        if self.train_fraction is not None:
            is_seen = inductive.first_by_longitude(dataset, self.train_fraction)
        workdir = self.make_workdir(dataset.name)
        if self.sweep:
            rows = sweep(self, dataset, is_seen, methods, workdir)
            sweeps.announce(workdir)
            return rows
        return run_methods(self, dataset, is_seen, methods, workdir)


def run_methods(
    study: CNFGNNStudy,
    dataset: TrafficDataset,
    is_seen: np.ndarray | None,
    methods: list[str],
    workdir: pathlib.Path,
) -> dict[str, Entry]:
    """Runs or scores methods and writes what came out.

    Args:
      study: the options.
      dataset: N sensors.
      is_seen: [N] bool, those to train on; None for all, without a report by sensors.
      methods: names.
      workdir: receives the output.

    Returns:
      The entries of `results.json`.
    """
    splits, whole, notes = split(dataset, is_seen)
    if study.masked_loss:
        check_readings(dataset.name, splits)
    num_train = len(splits["train"].starts)
    for method in methods:
        values = configs.config_values(study, method, num_train, workdir)
        running.build(paper.registered(method), values)
    num_steps, num_sensors = dataset.speed.shape
    size = f"{dataset.name}: {num_sensors} sensors, {num_steps} steps of {dataset.step}"
    counts = {"num_sensors": num_sensors, "num_steps": num_steps}
    settings = {"notes": notes, **counts, **measures(dataset)}
    arrays = [dataset.speed, dataset.adjacency, is_seen]
    checksum = running.fingerprint(*(x for x in arrays if x is not None))
    also = time_checksum(dataset)
    known = also | {"data": checksum}  # which results of an older version lack
    record = Record[Run](study, workdir, dataset.name, size, settings, also=known)
    network = workdir / "network.npz"
    save_network(network, dataset, splits["train"], is_read_only=study.eval_only)
    std = float(splits["train"].std)

    def run_one(method: str) -> tuple[Run, Entry]:
        run = run_method(study, method, splits, workdir, checksum, also)
        if is_seen is not None:
            scored = whole[study.split if study.eval_only else "test"]
            run = score_views(run, scored, is_seen)
        entry = results.method_entry(run.result, TEST_KEYS, run.config, ENTRY_KEYS)
        if not study.eval_only:
            entry |= output.costs(study, method, run.config, entry, workdir, std)
        return run, entry

    def table(entries: dict[str, Entry]) -> results.Table:
        return output.table(study, dataset, entries)

    def draw(runs: dict[str, Run], on_record: dict[str, Entry]) -> None:
        entries = {method: on_record[method] for method in runs}
        curves = output.exchange_curves(workdir, entries, std)
        output.draw(study, workdir, dataset, whole["test"], runs, on_record, curves)
        if is_seen is not None:
            coordinates = (dataset.longitude, dataset.latitude)
            look = plots.Look(title=dataset.name)
            maps.sensor_map(workdir / "sensors.png", *coordinates, is_seen, look)

    return record.run(methods, run_one, table, draw)


def split(
    dataset: TrafficDataset, is_seen: np.ndarray | None
) -> tuple[Splits, Splits, tuple[str, ...]]:
    """The parts to run on, those of the whole network, and notes on the data."""
    if is_seen is None:
        splits = whole = windows.make_splits(dataset)
        notes = ()
    else:
        splits, whole = inductive.make_splits(dataset, is_seen)
        share = f"{is_seen.sum()} of {len(is_seen)} sensors"
        notes = (f"trained on the first {share} from west to east",)
    return splits, whole, dataset.notes + notes + windows.notes_on(dataset, splits)


def check_readings(name: str, splits: Splits) -> None:
    """Checks that a loss without missing readings has something to count.

    Raises:
      InputError: if all targets of the training or of the validation part are missing.
    """
    for part in ("train", "validation"):
        first, last = (int(splits[part].starts[i]) for i in (0, -1))
        targets = splits[part].speed[:, first + windows.INPUT_STEPS :]
        if not np.any(targets[:, : last - first + windows.TARGET_STEPS]):
            raise InputError(
                f"{name}: no reading to forecast in the {part} part, of which "
                "--masked_loss leaves nothing"
            )


def run_method(
    study: CNFGNNStudy,
    method: str,
    splits: Splits,
    workdir: pathlib.Path,
    checksum: int,
    also: dict[str, int],
) -> Run:
    """Runs or scores one method; for the checksums see `running.run_method`."""
    num_clients, num_train = len(splits["train"].speed), len(splits["train"].starts)
    values = configs.config_values(study, method, num_train, workdir)
    values["edges_per_chunk"] = configs.edges_per_chunk(
        study, values, splits["train"].graph
    )
    name = paper.registered(method)
    config = running.config_of(name, values)
    cohort = clients.cohort_size(num_clients, getattr(config, "participation", 1.0))
    task = getattr(config, "task", None)
    passes = task.local_epochs if task else getattr(config, "client_rounds", 1)
    return running.run_method(
        study,
        method,
        values,
        splits,
        workdir,
        checksum=checksum,
        also=also,
        examples_per_round=cohort * num_train * passes,
        registered_name=name,
        num_rounds=configs.most_rounds(study, method),
        patience=configs.patience(study, method),
    )


def score_views(run: Run, whole: TrafficData, is_seen: np.ndarray) -> Run:
    """Scores a run of the seen sensors on the whole graph, which makes its test."""
    scores = {
        name: programs.evaluate_seeds(run.algorithm, run.result.best_state, view)
        for name, view in client_rows.put(inductive.views(whole, is_seen)).items()
    }
    errors = {
        name: {key: score[key] for key in SCORES} for name, score in scores.items()
    }
    result = run.result._replace(test={**scores["all"], **errors})
    return run._replace(result=result)


def sweep(
    study: CNFGNNStudy,
    dataset: TrafficDataset,
    is_seen: np.ndarray | None,
    methods: list[str],
    workdir: pathlib.Path,
) -> list[dict[str, Any]]:
    """Runs all pairs of R_c and R_s; writes `sweep.json` and `sweep.png` (Figure 4).

    Each run's folder, R_c-R_s, is that of a run with these two options, and one
    `sampling_decay` for all: that of R_c and R_s as the study has them.

    Returns:
      The rows of `sweep.json`.
    """
    num_steps = len(dataset.speed)
    num_train, _, _ = windows.split_sizes(num_steps, dataset.fractions)
    decay = configs.sampling_decay(study, num_train)
    part = dataclasses.replace(
        study,
        methods=tuple(methods),
        sampling_decay=decay,
        sweep=None,
        sweep_values=None,
        given=study.given - {"sweep", "sweep_values"},
    )
    folders = {
        f"{client}-{server}": dataclasses.replace(
            part, client_rounds=client, server_rounds=server
        )
        for client, server in itertools.product(study.swept_values, repeat=2)
    }

    def run_one(study: CNFGNNStudy, folder: pathlib.Path) -> list[dict[str, Any]]:
        entries = run_methods(study, dataset, is_seen, methods, folder)
        return [sweep_row(study, *item) for item in entries.items()]

    rows = sweeps.run(folders, run_one, workdir)
    title = f"{dataset.name}, {pictures.seeds_in_words(study)}, errors unmasked"
    output.draw_sweep(workdir, rows, methods, study.swept_values, dataset.unit, title)
    report.write_sweep(workdir, study.system, dataset.name, study.command(), rows)
    return rows


def sweep_row(study: CNFGNNStudy, method: str, entry: Entry) -> dict[str, Any]:
    """A row of `sweep.json`."""
    return {
        "method": method,
        "client_rounds": study.client_rounds,
        "server_rounds": study.server_rounds,
        "rmse": entry["test"]["rmse"],
        "std": (entry["test_std"] or {}).get("rmse"),
        "best_round": entry["best_round"],
        "communication_bytes": entry["communication_bytes"],
    }
