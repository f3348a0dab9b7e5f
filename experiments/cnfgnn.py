"""Trains CNFGNN and its baselines on a traffic network and reports what the paper does.

python -m experiments.cnfgnn
python -m experiments.cnfgnn --dataset=metr_la --data_dir=FOLDER --workdir=FOLDER
python -m experiments.cnfgnn --strategy=centralized,sl,sl_fedavg,at_fedavg
python -m experiments.cnfgnn --methods=gru_centralized,gru_local,gru_fedavg,gru_fmtl
python -m experiments.cnfgnn --methods=gru_fedavg,cnfgnn --train_fraction=0.25
python -m experiments.cnfgnn --sweep=rounds --sweep_values=1,10,20
python -m experiments.cnfgnn --workdir=FOLDER --resume
python -m experiments.cnfgnn --workdir=FOLDER --eval_only --split=validation
"""

import functools
import itertools
import json
import operator
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import _cnfgnn_flags, _flags, _run_flags, _runs, _traffic_flags
from fedjax_graph import algorithms
from fedjax_graph.algorithms.cnfgnn import flops
from fedjax_graph.algorithms.cnfgnn.cnfgnn import HalvesConfig, make_models
from fedjax_graph.algorithms.cnfgnn.gru_fed_avg import GRUConfig, make_model
from fedjax_graph.core import clients, mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import inductive, windows
from fedjax_graph.data.traffic.network import TrafficDataset
from fedjax_graph.driver import plots, results, rounds, writers
from fedjax_graph.driver.serving import save_network
from fedjax_graph.models.seq2seq import Seq2Seq

TEST_KEYS = ("rmse", "mae", "masked", "all", "seen", "unseen")
GIB = 2**30


def run_method(method: str, splits, workdir: pathlib.Path, checksum: int) -> _runs.Run:
    """Runs or scores one method."""
    num_clients, num_train = len(splits["train"].speed), len(splits["train"].starts)
    values = _cnfgnn_flags.config_values(method, num_train, workdir)
    config = _runs.make_config(method, values)
    cohort = clients.cohort_size(num_clients, getattr(config, "participation", 1.0))
    passes = getattr(config, "client_rounds", getattr(config, "sync_every", 1))
    return _runs.run_method(
        method,
        values,
        splits,
        workdir,
        checksum=checksum,
        examples_per_round=cohort * num_train * passes,
        **_cnfgnn_flags.stopping(method),
    )


def score_views(
    run: _runs.Run, whole: windows.TrafficData, is_seen: np.ndarray
) -> _runs.Run:
    """A run of the seen sensors, with the scores on the whole graph as its test."""
    scores = {
        name: rounds.evaluate_seeds(run.algorithm, run.result.best_state, view)
        for name, view in mesh.put_replicated(inductive.views(whole, is_seen)).items()
    }
    errors = {
        name: {key: score[key] for key in ("rmse", "mae")}
        for name, score in scores.items()
    }
    result = run.result._replace(test={**scores["all"], **errors})
    return run._replace(result=result)


def client_model(config: Any) -> Seq2Seq | None:
    """What runs on a client, or None where nothing is trained."""
    if isinstance(config, HalvesConfig):
        return make_models(config).client
    return make_model(config) if isinstance(config, GRUConfig) else None


def device_cost(method: str, config: dict[str, Any]) -> dict[str, float]:
    """GFLOP of a client's forward pass for one window; see `flops`."""
    model = client_model(_runs.make_config(method, config))
    if model is None:
        return {}
    return {
        "device_gflops": flops.forward(model) / 1e9,
        "device_gflops_as_printed": flops.printed(model) / 1e9,
    }


def table(entries: dict[str, dict[str, Any]]) -> str:
    """RMSE and MAE in the paper's convention, and the masked one at 60 minutes.

    With --train_fraction also the RMSE of seen and of unseen sensors.
    """
    columns = {"RMSE": ("rmse",), "MAE": ("mae",)}
    if _cnfgnn_flags.TRAIN_FRACTION.value is not None:
        columns["RMSE, seen"] = ("seen", "rmse")
        columns["RMSE, unseen"] = ("unseen", "rmse")
    columns["masked MAE 60'"] = ("masked", "60", "mae")
    columns["masked RMSE 60'"] = ("masked", "60", "rmse")

    def cell(entry, path):
        mean, std = (
            tree and functools.reduce(operator.getitem, path, tree)
            for tree in (entry["test"], entry["test_std"])
        )
        return results.with_std(mean, std)

    rows = [
        [
            _cnfgnn_flags.TITLES[method],
            *(cell(entry, path) for path in columns.values()),
            str(entry["best_round"]),
        ]
        for method, entry in entries.items()
    ]
    return results.format_table(["mph", *columns, "best round"], rows)


class Exchange(NamedTuple):
    """What a method had exchanged, and how good it was by then, in R rounds."""

    sizes: np.ndarray  # [R] bytes so far
    rmse: np.ndarray  # [R, seeds] lowest validation RMSE so far, mph

    def bytes_to(self, target: float) -> list[int | None]:
        """Bytes until each seed's RMSE is at most `target`; None where it never is."""
        return [
            next((int(size) for size in self.sizes[lowest <= target]), None)
            for lowest in self.rmse.T
        ]


def exchanges_of(
    workdir: pathlib.Path, entries: dict[str, dict[str, Any]], std: float
) -> dict[str, Exchange]:
    """By `metrics.jsonl`, of methods that exchange anything.

    The RMSE is that of the validation loss: under --masked_loss of what was read.
    """
    found, written = {}, writers.read_records(workdir / "metrics.jsonl")
    for method, entry in entries.items():
        records = [
            record
            for record in written
            if record["method"] == method and "validation_loss" in record
        ]
        per_round = sum(entry["communication_bytes_per_round"].values())
        if not records or not per_round:
            continue
        key = "validation_loss"
        losses = [r.get(f"{key}_by_seed", [r[key]]) for r in records]
        found[method] = Exchange(
            np.array([record["round"] * per_round for record in records]),
            std * np.sqrt(np.fmin.accumulate(np.array(losses, float))),
        )
    return found


def bytes_to_target(exchange: Exchange) -> dict[str, Any]:
    """For `results.json`, mean and by seed; the mean is None where a seed fails."""
    by_seed = exchange.bytes_to(_cnfgnn_flags.TARGET_RMSE.value)
    mean = None if None in by_seed else sum(by_seed) / len(by_seed)
    return {"bytes_to_target": mean, "bytes_to_target_by_seed": by_seed}


def draw(workdir: pathlib.Path, dataset, test_data, runs, entries) -> None:
    """Pictures: forecast against truth, training curves, RMSE by horizon."""
    one_day = test_data._replace(starts=test_data.starts[:288])
    steps = np.asarray(one_day.starts)[:, None] + windows.INPUT_STEPS + np.arange(12)
    liveliest = np.argsort(dataset.speed[steps[:, 0]].std(axis=0))[-3:]
    sensors = np.sort(liveliest)
    trained = [m for m in runs if algorithms.get_method(m).is_trained]
    forecasts = {}
    for method in trained or runs:
        algorithm, result, _ = runs[method]
        state = jax.tree.map(lambda x: x[0], result.best_state)
        forecast = np.asarray(jax.jit(algorithm.predict)(state, one_day))
        forecasts[_cnfgnn_flags.TITLES[method]] = {60: forecast[:, sensors, -1]}
    plots.forecasts(
        workdir / "forecasts.png",
        times=dataset.timestamps[steps[:, -1]],
        truth=dataset.speed[steps[:, -1]][:, sensors],
        forecasts=forecasts,
        sensors=[f"sensor {dataset.sensor_ids[i]}, an hour ahead" for i in sensors],
    )
    if records := _runs.records_of(workdir, _cnfgnn_flags.TITLES):
        plots.training_curves(workdir / "training_curves.png", records)
    if records and _cnfgnn_flags.STRATEGY.value:
        titles = dict(
            _cnfgnn_flags.STRATEGIES[name] for name in _cnfgnn_flags.STRATEGY.value
        )
        records = _runs.records_of(workdir, titles)
        records = [r for r in records if r["method"] in titles.values()]
        plots.training_curves(workdir / "strategies.png", records)
    plots.rmse_by_horizon(
        workdir / "rmse_by_horizon.png",
        {
            _cnfgnn_flags.TITLES[m]: entry["rmse_by_horizon"]
            for m, entry in entries.items()
        },
    )


def check_readings(name: str, splits: dict[str, windows.TrafficData]) -> None:
    """Raises `InputError` where a loss without missing readings would be of nothing."""
    for part in ("train", "validation"):
        first, last = (int(splits[part].starts[i]) for i in (0, -1))
        targets = splits[part].speed[:, first + windows.INPUT_STEPS :]
        if not np.any(targets[:, : last - first + windows.TARGET_STEPS]):
            raise InputError(
                f"{name}: no reading to forecast in the {part} part, of which "
                "--masked_loss leaves nothing"
            )


def run_methods(
    dataset: TrafficDataset,
    is_seen: np.ndarray | None,
    methods: list[str],
    workdir: pathlib.Path,
) -> dict[str, dict[str, Any]]:
    """Runs or scores methods and writes what came out.

    Args:
      dataset: N sensors.
      is_seen: [N] bool, those to train on; None for all, without a report by sensors.
      methods: names.
      workdir: receives the output.

    Returns:
      The entries of `results.json`.
    """
    arrays, notes = [dataset.speed, dataset.adjacency], dataset.notes
    num_steps, num_sensors = dataset.speed.shape
    if is_seen is None:
        splits = whole = windows.make_splits(dataset)
    else:
        splits, whole = inductive.make_splits(dataset, is_seen)
        arrays.append(is_seen)
        chosen = f"the first {is_seen.sum()} of {num_sensors} sensors from west to east"
        notes += (f"trained on {chosen}",)
    if _cnfgnn_flags.MASKED_LOSS.value:
        check_readings(dataset.name, splits)
    size = f"{dataset.name}: {num_sensors} sensors, {num_steps} steps"
    _runs.announce(size, notes, workdir)
    before = results.read_methods(workdir)
    save_network(workdir / "network.npz", dataset, splits["train"])
    checksum = _runs.fingerprint(*arrays)
    runs = {m: run_method(m, splits, workdir, checksum) for m in methods}
    is_scored = _run_flags.EVAL_ONLY.value
    if is_seen is not None:
        scored = whole[_run_flags.SPLIT.value if is_scored else "test"]
        runs = {m: score_views(run, scored, is_seen) for m, run in runs.items()}
    entries = _runs.entries_of(runs, TEST_KEYS)
    print(table(entries))
    if is_scored:
        return entries
    for method, run in runs.items():
        entries[method] |= device_cost(method, run.config)
    exchanges = exchanges_of(workdir, entries, float(splits["train"].std))
    if _cnfgnn_flags.TARGET_RMSE.value is not None:
        for method, exchange in exchanges.items():
            entries[method] |= bytes_to_target(exchange)
    results.write_results(
        workdir,
        dataset.name,
        {
            "flags": _run_flags.flag_values(),
            "notes": notes,
            "num_sensors": num_sensors,
            "num_steps": num_steps,
        },
        {**before, **entries},
    )
    draw(workdir, dataset, whole["test"], runs, entries)
    lines = {
        _cnfgnn_flags.TITLES[method]: plots.Line(
            exchange.sizes / GIB, exchange.rmse.mean(1), exchange.rmse.std(1)
        )
        for method, exchange in exchanges.items()
    }
    if lines:
        labels = ("GiB exchanged", "lowest validation RMSE so far (mph)")
        plots.curves(workdir / "communication.png", lines, *labels, log_x=True)
    if is_seen is not None:
        coordinates = (dataset.longitude, dataset.latitude)
        plots.sensor_map(workdir / "sensors.png", *coordinates, is_seen)
    return entries


def sweep(
    dataset: TrafficDataset,
    is_seen: np.ndarray | None,
    methods: list[str],
    values: list[int],
    workdir: pathlib.Path,
) -> None:
    """Runs all pairs of R_c and R_s; `sweep.json`, and `sweep.png` (Figure 4).

    Each run's folder, R_c-R_s, is that of a run with these two flags, and one
    --sampling_decay for all: that of R_c and R_s as the flags have them.
    """
    rows, size = [], len(values)
    num_train, _, _ = windows.split_sizes(len(dataset.speed))
    flags.FLAGS["sampling_decay"].value = _cnfgnn_flags.sampling_decay(num_train)
    for pair in itertools.product(values, repeat=2):
        swept = dict(zip(("client_rounds", "server_rounds"), pair, strict=True))
        for name, value in swept.items():
            flags.FLAGS[name].value = value
        folder = workdir / "-".join(map(str, pair))
        folder.mkdir(exist_ok=True)
        for method, entry in run_methods(dataset, is_seen, methods, folder).items():
            kept = ("best_round", "communication_bytes")
            rows.append(
                {
                    "method": method,
                    **swept,
                    "rmse": entry["test"]["rmse"],
                    "std": (entry["test_std"] or {}).get("rmse"),
                    **{key: entry[key] for key in kept},
                }
            )
        text = json.dumps(writers.to_jsonable(rows), indent=2)
        writers.write_atomically(workdir / "sweep.json", text + "\n")
    maps = {}
    for method in methods:
        own = [row for row in rows if row["method"] == method]
        rmse = [row["rmse"] for row in own]
        gib = [sum(row["communication_bytes"].values()) / GIB for row in own]
        maps[f"{_cnfgnn_flags.TITLES[method]}: RMSE (mph)"] = np.reshape(
            rmse, (size, size)
        )
        maps[f"{_cnfgnn_flags.TITLES[method]}: GiB to the best round"] = np.reshape(
            gib, (size, size)
        )
    labels = ("server rounds, R_s", "client rounds, R_c")
    plots.heat_maps(workdir / "sweep.png", maps, *labels, ticks=(values, values))


def main(argv: list[str]) -> None:
    del argv
    _run_flags.set_up_jax(copied_bytes=_cnfgnn_flags.hidden_bytes())
    methods, values = _cnfgnn_flags.chosen_methods(), _cnfgnn_flags.swept_values()
    dataset = _traffic_flags.load_dataset()
    is_seen = None
    if _cnfgnn_flags.TRAIN_FRACTION.value is not None:
        is_seen = inductive.first_by_longitude(
            dataset, _cnfgnn_flags.TRAIN_FRACTION.value
        )
    workdir = _run_flags.make_workdir("cnfgnn", dataset.name)
    if _cnfgnn_flags.SWEEP.value:
        if (workdir / "results.json").exists():
            raise InputError(f"--workdir={workdir} holds a single run, not a sweep")
        sweep(dataset, is_seen, methods, values, workdir)
        print(f"sweep.json, sweep.png and a folder of each run are in {workdir}")
        return
    if (workdir / "sweep.json").exists():
        raise InputError(f"--workdir={workdir} holds a sweep; name one of its folders")
    run_methods(dataset, is_seen, methods, workdir)
    if not _run_flags.EVAL_ONLY.value:
        print(f"results.json, metrics.jsonl and pictures are in {workdir}")


if __name__ == "__main__":
    _flags.run(main)
