"""What CNFGNN's study shows of finished runs: costs, the table and the pictures."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies import cnfgnn_defaults as paper
from experiments.studies import pictures, running
from experiments.studies.cnfgnn_options import CNFGNNOptions, known
from experiments.studies.running import Entry, Run
from fedjax_graph import algorithms
from fedjax_graph.algorithms.cnfgnn import flops
from fedjax_graph.algorithms.cnfgnn.cnfgnn import HalvesConfig, make_models
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.network import TrafficDataset
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.driver import maps, plots, programs, results, writers
from fedjax_graph.models.seq2seq import Seq2Seq

GIB = 2**30


def table(
    study: CNFGNNOptions, dataset: TrafficDataset, entries: Mapping[str, Entry]
) -> results.Table:
    """RMSE and MAE in the paper's convention, and the masked ones 12 steps ahead.

    With `train_fraction` also the RMSE of seen and of unseen sensors.
    """
    columns: dict[str, running.Cell] = {"RMSE": "rmse", "MAE": "mae"}
    if study.is_inductive:
        columns["RMSE, seen"] = ("seen", "rmse")
        columns["RMSE, unseen"] = ("unseen", "rmse")
    ahead = dataset.step.words(windows.TARGET_STEPS, minutes="'")
    for name in ("mae", "rmse"):
        path = ("masked", dataset.step.minutes(windows.TARGET_STEPS), name)
        columns[f"masked {name.upper()} {ahead}"] = path
    columns["best round"] = running.best_round
    return running.table(dataset.unit, columns, entries, known())


# --- Costs ---------------------------------------------------------------------------


def client_model(config: Any) -> Seq2Seq | None:
    """The model that runs on a client, or None where nothing is trained."""
    if isinstance(config, HalvesConfig):
        return make_models(config).client
    return config.task.model() if hasattr(config, "task") else None


def device_cost(method: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """GFLOP of a client's forward pass for one window; see `flops`."""
    name = paper.registered(method)
    model = client_model(algorithms.make_config(name, dict(config)))
    if model is None:
        return {}
    return {
        "device_gflops": flops.forward(model) / 1e9,
        "device_gflops_as_printed": flops.printed(model) / 1e9,
    }


def costs(
    study: CNFGNNOptions,
    method: str,
    config: Mapping[str, Any],
    entry: Entry,
    workdir: pathlib.Path,
    std: float,
) -> dict[str, Any]:
    """What a method of a finished run costs on a device and, to a target, in bytes."""
    found = device_cost(method, config)
    curve = exchange_curves(workdir, {method: entry}, std).get(method)
    if study.target_rmse is not None and curve is not None:
        found |= bytes_to_target(curve, study.target_rmse)
    return found


class ExchangeCurve(NamedTuple):
    """What a method had exchanged, and how good it was by then, in R rounds."""

    sizes: np.ndarray  # [R] bytes so far
    rmse: np.ndarray  # [R, seeds] lowest validation RMSE so far

    def bytes_to(self, target: float) -> list[int | None]:
        """Bytes until each seed's RMSE is at most `target`; None where it never is."""
        return [
            next((int(size) for size in self.sizes[lowest <= target]), None)
            for lowest in self.rmse.T
        ]


def exchange_curves(
    workdir: pathlib.Path, entries: Mapping[str, Entry], std: float
) -> dict[str, ExchangeCurve]:
    """Exchanges by `metrics.jsonl`, of those methods that exchange anything.

    The RMSE is that of the validation loss: under `masked_loss` of what was read.

    Args:
      workdir: of the run.
      entries: of `results.json`, by method.
      std: of the readings.
    """
    found, written = {}, writers.read_records(workdir / "metrics.jsonl")
    for method, entry in entries.items():
        records = [
            record
            for record in written
            if record["method"] == method
            and "validation_loss" in record
            and record["round"] <= entry["num_rounds"]  # as others have no checkpoint
        ]
        per_round = sum(entry["communication_bytes_per_round"].values())
        if not records or not per_round:
            continue
        key = "validation_loss"
        losses = [r.get(f"{key}_by_seed", [r[key]]) for r in records]
        found[method] = ExchangeCurve(
            np.array([record["round"] * per_round for record in records]),
            std * np.sqrt(np.fmin.accumulate(np.array(losses, float))),
        )
    return found


def bytes_to_target(curve: ExchangeCurve, target: float) -> dict[str, Any]:
    """For `results.json`, mean and by seed; the mean is None where a seed fails."""
    by_seed = curve.bytes_to(target)
    reached = [size for size in by_seed if size is not None]
    mean = sum(reached) / len(by_seed) if len(reached) == len(by_seed) else None
    return {"bytes_to_target": mean, "bytes_to_target_by_seed": by_seed}


# --- Pictures ------------------------------------------------------------------------


def draw(
    study: CNFGNNOptions,
    workdir: pathlib.Path,
    dataset: TrafficDataset,
    test_data: TrafficData,
    runs: Mapping[str, Run],
    entries: Mapping[str, Entry],
    curves: Mapping[str, ExchangeCurve],
) -> None:
    """Draws forecast against truth, training curves, RMSE by horizon and traffic.

    Args:
      study: the options.
      workdir: of the run.
      dataset: N sensors.
      test_data: of all of them.
      runs: of the methods that were run now.
      entries: of all methods in `results.json`, which have a colour each.
      curves: see `exchange_curves`.
    """

    def look(*said: str) -> plots.Look:
        data = f"{dataset.name}, {len(dataset.sensor_ids)} sensors"
        return pictures.look(study, data, entries, known(), *said)

    def by_horizon(key: str) -> dict[str, Any]:
        return {known()[m]: entries[m][key] for m in runs if key in entries[m]}

    of_loss = look(pictures.masked(study.masked_loss, "loss"))
    draw_forecasts(workdir, dataset, test_data, runs, look())
    draw_curves(study, workdir, entries, of_loss)
    draw_exchanges(workdir, curves, dataset.unit, of_loss)
    plots.rmse_by_horizon(
        workdir / "rmse_by_horizon.png",
        by_horizon("rmse_by_horizon"),
        dataset.step,
        dataset.unit,
        look(pictures.masked(False, "errors")),
        by_horizon("rmse_by_horizon_std"),
    )


def draw_forecasts(
    workdir: pathlib.Path,
    dataset: TrafficDataset,
    test_data: TrafficData,
    runs: Mapping[str, Run],
    look: plots.Look,
) -> None:
    """Draws `forecasts.png`: a day of the three sensors whose readings vary most.

    Of readings more than an hour apart it is 24 steps. Missing ones are gaps.
    """
    num_rows = max(np.timedelta64(1, "D") // dataset.step.delta, 24)
    one_day = test_data._replace(starts=test_data.starts[:num_rows])
    rows = np.asarray(one_day.starts) + windows.WINDOW_STEPS - 1
    readings = np.ma.masked_equal(dataset.speed[rows], 0)
    sensors = np.sort(np.argsort(readings.std(axis=0).filled(0))[-3:])
    ahead = windows.TARGET_STEPS * dataset.step.delta
    trained = [
        method
        for method in runs
        if algorithms.get_method(paper.registered(method)).is_trained
    ]
    forecasts = {}
    for method in trained or runs:
        algorithm, result, _ = runs[method]
        forecast = programs.predict_seeds(algorithm, result.best_state, one_day)
        forecasts[known()[method]] = {ahead: forecast[:, :, sensors, -1]}
    plots.forecasts(
        workdir / "forecasts.png",
        times=dataset.timestamps[rows],
        truth=readings[:, sensors].filled(np.nan),
        forecasts=forecasts,
        unit=dataset.unit,
        sensors=[f"sensor {dataset.sensor_ids[i]}" for i in sensors],
        look=look,
    )


def draw_curves(
    study: CNFGNNOptions,
    workdir: pathlib.Path,
    methods: Iterable[str],
    look: plots.Look,
) -> None:
    """Draws `training_curves.png`, and of chosen strategies `strategies.png`."""
    if records := running.records_of(workdir, known()):
        plots.training_curves(workdir / "training_curves.png", records, look=look)
    if records and study.strategy:
        titles = dict(paper.STRATEGIES[name] for name in study.strategy)
        records = running.records_of(workdir, titles)
        records = [r for r in records if r["method"] in titles.values()]
        look = look._replace(methods=tuple(titles.get(m, m) for m in methods))
        plots.training_curves(workdir / "strategies.png", records, look=look)


def draw_exchanges(
    workdir: pathlib.Path,
    curves: Mapping[str, ExchangeCurve],
    unit: str,
    look: plots.Look,
) -> None:
    """Draws `communication.png`, where anything was exchanged."""
    lines = {
        known()[method]: plots.Line(
            curve.sizes / GIB,
            curve.rmse.mean(1),
            [plots.deviation(rmse) for rmse in curve.rmse.tolist()],
        )
        for method, curve in curves.items()
    }
    if lines:
        labels = ("GiB exchanged", f"lowest validation RMSE so far ({unit})")
        path = workdir / "communication.png"
        plots.curves(path, lines, *labels, look, log_x=True)


def draw_sweep(
    workdir: pathlib.Path,
    rows: Sequence[Mapping[str, Any]],
    methods: Sequence[str],
    values: Sequence[int],
    unit: str,
    title: str,
) -> None:
    """Draws `sweep.png` (Figure 4): errors and traffic by R_c and R_s.

    Args:
      workdir: of the sweep.
      rows: of `sweep.json`, a method's in the order of R_c and then R_s.
      methods: whose maps to draw.
      values: of both.
      unit: of the errors.
      title: of the picture.
    """
    matrices, shape = {}, (len(values), len(values))
    for method in methods:
        own, name = [r for r in rows if r["method"] == method], known()[method]
        rmse = [row["rmse"] for row in own]
        gib = [sum(row["communication_bytes"].values()) / GIB for row in own]
        matrices[f"{name}: RMSE ({unit})"] = np.reshape(rmse, shape)
        matrices[f"{name}: GiB to the best round"] = np.reshape(gib, shape)
    labels = ("server rounds, R_s", "client rounds, R_c")
    look, ticks = plots.Look(title=title), (values, values)
    maps.heat_maps(workdir / "sweep.png", matrices, *labels, ticks, look)
