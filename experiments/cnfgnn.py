"""Trains CNFGNN and its baselines on a traffic network and reports what the paper does.

python -m experiments.cnfgnn
python -m experiments.cnfgnn --dataset=metr_la --data_dir=FOLDER --workdir=FOLDER
python -m experiments.cnfgnn --workdir=FOLDER --resume
python -m experiments.cnfgnn --workdir=FOLDER --eval_only --split=validation
"""

import pathlib
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import _flags, _run_flags, _runs, _traffic_flags
from fedjax_graph import algorithms, clients, forecasting
from fedjax_graph.algorithms.cnfgnn import CNFGNNConfig
from fedjax_graph.data import windows
from fedjax_graph.driver import plots, results
from fedjax_graph.serving import save_network

SAMPLING_DECAY = flags.DEFINE_float(
    "sampling_decay",
    None,
    "k of scheduled sampling for CNFGNN; by default 1000, on a small dataset times "
    "(steps per global round) / 688, METR-LA's own.",
    lower_bound=0.1,
)
CLIENT_ROUNDS = flags.DEFINE_integer(
    "client_rounds", None, "R_c, local passes in a global round.", lower_bound=1
)
SERVER_ROUNDS = flags.DEFINE_integer(
    "server_rounds", None, "R_s, passes of the server's network.", lower_bound=1
)
CLIENT_BATCH_SIZE = flags.DEFINE_integer(
    "client_batch_size", None, "Windows in a client's minibatch.", lower_bound=1
)
SERVER_BATCH_SIZE = flags.DEFINE_integer(
    "server_batch_size", None, "Windows in a server's minibatch.", lower_bound=1
)
CLIENT_LEARNING_RATE = flags.DEFINE_float(
    "client_learning_rate", None, "Adam's, on the clients.", lower_bound=0.0
)
SERVER_LEARNING_RATE = flags.DEFINE_float(
    "server_learning_rate", None, "Adam's, on the server.", lower_bound=0.0
)
HIDDEN_SIZE = flags.DEFINE_integer(
    "hidden_size", None, "Of CNFGNN's encoder and embedding.", lower_bound=1
)
GN_LAYERS = flags.DEFINE_integer(
    "gn_layers", None, "Layers of the graph network.", lower_bound=1
)
GN_MLP_SIZES = flags.DEFINE_list(
    "gn_mlp_sizes", None, "Layer sizes of the graph network's MLPs."
)
_run_flags.refuse_nan(SAMPLING_DECAY, CLIENT_LEARNING_RATE, SERVER_LEARNING_RATE)
flags.register_validator(
    GN_MLP_SIZES,
    lambda sizes: (
        sizes is None
        or len(sizes) > 1
        and all(size.isdecimal() and int(size) for size in sizes)
    ),
    message="expected two or more positive whole numbers, such as 256,256,128",
)
GRU_HIDDEN_SIZE = flags.DEFINE_integer(
    "gru_hidden_size", None, "Of GRU + FedAvg; 100 for the 63K model.", lower_bound=1
)
GRU_LAYERS = flags.DEFINE_integer(
    "gru_layers", None, "Of GRU + FedAvg; 1 for the 63K model.", lower_bound=1
)

TITLES = {
    "cnfgnn": "CNFGNN",
    "gru_fedavg": "GRU + FedAvg",
    "historical_average": "historical average",
    "persistence": "persistence",
}
# The paper's and its released code's, where they differ from the configs' defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "metr_la": {"num_rounds": 500},
    "pems_bay": {"num_rounds": 200, "server_rounds": 20},
    "pems_bay_subset": {"num_rounds": 200, "server_rounds": 20},
    "synthetic": {  # a smaller model, so that two cores need a minute or two
        "num_rounds": 6,
        "server_rounds": 3,
        "hidden_size": 32,
        "gn_mlp_sizes": (64, 64, 64),
        "gru_hidden_size": 50,
        "client_learning_rate": 3e-3,
        "server_learning_rate": 3e-3,
        "sampling_decay": 30.0,
        "methods": ["persistence", "historical_average", "gru_fedavg", "cnfgnn"],
    },
}
TEST_KEYS = ("rmse", "mae", "masked")
STEPS_PER_ROUND_METR_LA = 688


def setting(name: str, default: Any = None) -> Any:
    """A flag's value, else the dataset's default, else `default`."""
    value = flags.FLAGS[name].value
    if value is not None:
        return value
    return DEFAULTS.get(_traffic_flags.dataset_name(), {}).get(name, default)


def config_values(method: str, num_train: int, workdir: pathlib.Path) -> dict[str, Any]:
    """Flags and defaults under the names of the method's config fields."""
    values = {
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, method),
        "participation": _run_flags.PARTICIPATION.value,
        "client_rounds": setting("client_rounds"),
    }
    if method == "gru_fedavg":
        values["hidden_size"] = setting("gru_hidden_size")
        values["num_layers"] = setting("gru_layers")
        values["batch_size"] = setting("client_batch_size")
        values["learning_rate"] = setting("client_learning_rate")
    else:
        for name in (
            "server_rounds",
            "client_batch_size",
            "server_batch_size",
            "client_learning_rate",
            "server_learning_rate",
            "hidden_size",
            "gn_layers",
            "sampling_decay",
        ):
            values[name] = setting(name)
        if setting("gn_mlp_sizes"):
            values["gn_mlp_sizes"] = tuple(int(s) for s in setting("gn_mlp_sizes"))
    given = {key: value for key, value in values.items() if value is not None}
    if method == "cnfgnn" and "sampling_decay" not in given:
        steps = steps_per_round(algorithms.make_config(method, given), num_train)
        given["sampling_decay"] = 1000.0 * min(1.0, steps / STEPS_PER_ROUND_METR_LA)
    return given


def steps_per_round(config: CNFGNNConfig, num_train: int) -> int:
    """Optimisation steps of a global round, client and server steps together."""
    client = forecasting.steps_per_epoch(num_train, config.client_batch_size)
    server = forecasting.steps_per_epoch(num_train, config.server_batch_size)
    return config.client_rounds * client + config.server_rounds * server


def hidden_bytes() -> int:
    """Bytes of h_c of all training windows, 70 % of the readings or so."""
    size = setting("hidden_size", CNFGNNConfig.hidden_size)
    return int(0.7 * 4 * size * _traffic_flags.num_readings())


def run_method(method: str, splits, workdir: pathlib.Path, checksum: int) -> _runs.Run:
    """Runs or scores one method."""
    num_clients, num_train = len(splits["train"].speed), len(splits["train"].starts)
    values = config_values(method, num_train, workdir)
    cohort = clients.cohort_size(num_clients, _run_flags.PARTICIPATION.value)
    return _runs.run_method(
        method,
        values,
        splits,
        workdir,
        checksum=checksum,
        num_rounds=setting("num_rounds", 500),
        examples_per_round=cohort * num_train * values.get("client_rounds", 1),
    )


def table(entries: dict[str, dict[str, Any]]) -> str:
    """RMSE and MAE in the paper's convention, and the masked one at 60 minutes."""
    rows = []
    for method, entry in entries.items():
        test, std = entry["test"], entry["test_std"] or {}
        masked, masked_std = test["masked"]["60"], std.get("masked", {}).get("60", {})
        rows.append(
            [
                TITLES[method],
                results.with_std(test["rmse"], std.get("rmse")),
                results.with_std(test["mae"], std.get("mae")),
                results.with_std(masked["mae"], masked_std.get("mae")),
                results.with_std(masked["rmse"], masked_std.get("rmse")),
                str(entry["best_round"]),
            ]
        )
    header = ["mph", "RMSE", "MAE", "masked MAE 60'", "masked RMSE 60'", "best round"]
    return results.format_table(header, rows)


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
        forecasts[TITLES[method]] = {60: forecast[:, sensors, -1]}
    plots.forecasts(
        workdir / "forecasts.png",
        times=dataset.timestamps[steps[:, -1]],
        truth=dataset.speed[steps[:, -1]][:, sensors],
        forecasts=forecasts,
        sensors=[f"sensor {dataset.sensor_ids[i]}, an hour ahead" for i in sensors],
    )
    if records := _runs.records_of(workdir, TITLES):
        plots.training_curves(workdir / "training_curves.png", records)
    plots.rmse_by_horizon(
        workdir / "rmse_by_horizon.png",
        {TITLES[m]: entry["rmse_by_horizon"] for m, entry in entries.items()},
    )


def main(argv: list[str]) -> None:
    del argv
    _run_flags.set_up_jax(copied_bytes=hidden_bytes())
    methods = setting("methods", ["cnfgnn", "persistence"])
    for method in methods:
        algorithms.get_method(method)
    dataset = _traffic_flags.load_dataset()
    workdir = _run_flags.make_workdir("cnfgnn", dataset.name)
    splits = windows.make_splits(dataset)
    num_steps, num_sensors = dataset.speed.shape
    size = f"{dataset.name}: {num_sensors} sensors, {num_steps} steps"
    _runs.announce(size, dataset.notes, workdir)
    before = results.read_methods(workdir)
    save_network(workdir / "network.npz", dataset, splits["train"])
    checksum = _runs.fingerprint(dataset.speed, dataset.adjacency)
    runs = {m: run_method(m, splits, workdir, checksum) for m in methods}
    entries = _runs.entries_of(runs, TEST_KEYS)
    print(table(entries))
    if _run_flags.EVAL_ONLY.value:
        return
    results.write_results(
        workdir,
        dataset.name,
        {
            "flags": _run_flags.flag_values(),
            "notes": dataset.notes,
            "num_sensors": num_sensors,
            "num_steps": num_steps,
        },
        {**before, **entries},
    )
    draw(workdir, dataset, splits["test"], runs, entries)
    print(f"results.json, metrics.jsonl and pictures are in {workdir}")


if __name__ == "__main__":
    _flags.run(main)
