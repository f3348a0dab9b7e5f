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
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import _flags, _run_flags, _runs, _traffic_flags
from fedjax_graph import algorithms, clients, devices, flops, forecasting
from fedjax_graph.algorithms.cnfgnn import CNFGNNConfig, SplitConfig, make_models
from fedjax_graph.algorithms.gru_fed_avg import GRUConfig, make_model
from fedjax_graph.algorithms.gru_fmtl import REGULARISERS
from fedjax_graph.data import inductive, windows
from fedjax_graph.data.traffic import TrafficDataset
from fedjax_graph.driver import plots, results, rounds, writers
from fedjax_graph.errors import InputError
from fedjax_graph.models.gru_seq2seq import Seq2Seq
from fedjax_graph.serving import save_network

STRATEGIES = {  # of Table 10: value of --strategy -> (method, title)
    "centralized": ("gru_gn", "Centralized"),
    "sl": ("split_learning", "SL"),
    "sl_fedavg": ("split_learning_fedavg", "SL + FedAvg"),
    "at_without_fedavg": ("at_without_fedavg", "AT, w/o FedAvg"),
    "at_fedavg": ("cnfgnn", "AT + FedAvg"),
}
STRATEGY = flags.DEFINE_list(
    "strategy", None, "CNFGNN's training strategies to run, before --methods if given."
)
flags.register_validator(
    STRATEGY,
    lambda names: (
        names is None
        or 0 < len(names) == len(set(names))
        and set(names) <= set(STRATEGIES)
    ),
    message=f"name one or more of {', '.join(STRATEGIES)}, each only once",
)
SAMPLING_DECAY = flags.DEFINE_float(
    "sampling_decay",
    None,
    "k of scheduled sampling, but for GRU + FedAvg, which has 1; by default 1000, on a "
    "small dataset times (CNFGNN's steps per global round) / 688, METR-LA's own.",
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
    "gru_hidden_size",
    None,
    "Of the GRU baselines; 100 for the 63K models, 200 for 727K.",
    lower_bound=1,
)
GRU_LAYERS = flags.DEFINE_integer(
    "gru_layers",
    None,
    "Of the GRU baselines; 1 for the 63K models, 2 for 727K.",
    lower_bound=1,
)
FMTL_REGULARISER = flags.DEFINE_enum(
    "fmtl_regulariser",
    "laplacian",
    list(REGULARISERS),
    "Of GRU + FMTL: the paper's, or the released code's.",
)
FMTL_WEIGHT = flags.DEFINE_float(
    "fmtl_weight",
    None,
    "lambda of GRU + FMTL; by default 0.1, of frobenius 0.01.",
    lower_bound=0.0,
)
FMTL_SYNC_EVERY = flags.DEFINE_integer(
    "fmtl_sync_every",
    None,
    "Passes between exchanges of GRU + FMTL; by default 1, of frobenius 5.",
    lower_bound=1,
)
AVERAGE_EVERY_STEP = flags.DEFINE_bool(
    "average_every_step",
    False,
    "SL + FedAvg averages after every minibatch, not once a round.",
)
TRAIN_FRACTION = flags.DEFINE_float(
    "train_fraction",
    None,
    "Train on this share of the sensors, the first from west to east, and test on all.",
)
flags.register_validator(
    TRAIN_FRACTION,
    lambda share: share is None or 0 < share < 1,
    message="expected a number between 0 and 1",
)
SWEEP = flags.DEFINE_enum(
    "sweep",
    None,
    ["rounds"],
    "Run all pairs of --client_rounds and --server_rounds, whatever their own values, "
    "and draw heat maps.",
)
SWEEP_VALUES = flags.DEFINE_list(
    "sweep_values", None, "Of both; by default the paper's 1, 10 and 20."
)
_run_flags.refuse_nan(FMTL_WEIGHT)

TITLES = {
    "cnfgnn": "CNFGNN",
    "at_without_fedavg": "CNFGNN (AT, w/o FedAvg)",
    "split_learning": "CNFGNN (SL)",
    "split_learning_fedavg": "CNFGNN (SL + FedAvg)",
    "gru_gn": "GRU + GN (centralized)",
    "gru_centralized": "GRU (centralized)",
    "gru_local": "GRU (local)",
    "gru_fedavg": "GRU + FedAvg",
    "gru_fmtl": "GRU + FMTL",
    "historical_average": "historical average",
    "persistence": "persistence",
}
GRUS = ("gru_centralized", "gru_local", "gru_fedavg", "gru_fmtl")
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
# Those of the released commands with --train_fraction.
INDUCTIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "metr_la": {"num_rounds": 200, "server_rounds": 20},
}
# Batch sizes of the released commands, for the 63K and for the 727K models.
GRU_BATCH_SIZES = {
    "metr_la": {
        "gru_centralized": (256, 128),
        "gru_local": (256, 256),
        "gru_fedavg": (256, 256),
        "gru_fmtl": (256, 256),
    },
    "pems_bay": {
        "gru_centralized": (64, 64),
        "gru_local": (128, 128),
        "gru_fedavg": (256, 128),
        "gru_fmtl": (256, 128),
    },
}
GRU_BATCH_SIZES["pems_bay_subset"] = GRU_BATCH_SIZES["pems_bay"]
# Likewise windows in a minibatch of joint training; CNFGNN's are its config's defaults.
JOINT_BATCH_SIZES = {
    "metr_la": {"gru_gn": 64, "split_learning": 128, "split_learning_fedavg": 128},
    "pems_bay": {"gru_gn": 128, "split_learning": 128, "split_learning_fedavg": 128},
}
JOINT_BATCH_SIZES["pems_bay_subset"] = JOINT_BATCH_SIZES["pems_bay"]
FMTL_DEFAULTS = {
    "laplacian": {"weight": 0.1, "sync_every": 1},
    "frobenius": {"weight": 0.01, "sync_every": 5},
}
ALTERNATING = ("cnfgnn", "at_without_fedavg")
MOST_ROUNDS_WITHOUT_FEDAVG = 50  # on the paper's datasets, from the released code
OTHERS_PATIENCE = 50  # of all but the alternating methods, from the released code
OF_SINGLE_SENSORS = (  # models that an unseen sensor lacks
    "at_without_fedavg",
    "split_learning",
    "gru_local",
    "gru_fmtl",
    "historical_average",
)
TEST_KEYS = ("rmse", "mae", "masked", "all", "seen", "unseen")
SWEPT = (1, 10, 20)
GIB = 2**30
STEPS_PER_ROUND_METR_LA = 688


def setting(name: str, default: Any = None) -> Any:
    """A flag's value, else the dataset's default, else `default`."""
    value = flags.FLAGS[name].value
    if value is not None:
        return value
    dataset = _traffic_flags.dataset_name()
    defaults = DEFAULTS.get(dataset, {})
    if TRAIN_FRACTION.value is not None:
        defaults = defaults | INDUCTIVE_DEFAULTS.get(dataset, {})
    return defaults.get(name, default)


def config_values(method: str, num_train: int, workdir: pathlib.Path) -> dict[str, Any]:
    """Flags and defaults under the names of the method's config fields."""
    values = {
        **(gru_values(method) if method in GRUS else half_values(method)),
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, method),
        "participation": _run_flags.PARTICIPATION.value,
        "client_rounds": setting("client_rounds"),
        "average_every_step": AVERAGE_EVERY_STEP.value,
    }
    if method != "gru_fedavg":
        values["sampling_decay"] = setting("sampling_decay", default_decay(num_train))
    return {key: value for key, value in values.items() if value is not None}


def gru_values(method: str) -> dict[str, Any]:
    """Those of a baseline, None where its config's default holds."""
    num_layers = setting("gru_layers")
    released = GRU_BATCH_SIZES.get(_traffic_flags.dataset_name(), {})
    small, large = released.get(method, (None, None))
    values = {
        "hidden_size": setting("gru_hidden_size"),
        "num_layers": num_layers,
        "batch_size": setting(
            "client_batch_size", large if num_layers and num_layers > 1 else small
        ),
        "learning_rate": setting("client_learning_rate"),
    }
    if method == "gru_fmtl":
        defaults = FMTL_DEFAULTS[FMTL_REGULARISER.value]
        values["regulariser"] = FMTL_REGULARISER.value
        values["weight"] = setting("fmtl_weight", defaults["weight"])
        values["sync_every"] = setting("fmtl_sync_every", defaults["sync_every"])
    return values


def half_values(method: str) -> dict[str, Any]:
    """Those of a method with clients' models and a graph network."""
    values = {
        name: setting(name)
        for name in (
            "server_rounds",
            "client_batch_size",
            "client_learning_rate",
            "server_learning_rate",
            "hidden_size",
            "gn_layers",
        )
    }
    released = JOINT_BATCH_SIZES.get(_traffic_flags.dataset_name(), {})
    values["server_batch_size"] = setting("server_batch_size", released.get(method))
    if setting("gn_mlp_sizes"):
        values["gn_mlp_sizes"] = tuple(int(s) for s in setting("gn_mlp_sizes"))
    return values


def default_decay(num_train: int) -> float:
    """k of scheduled sampling, the same for all methods of a dataset."""
    values = half_values("cnfgnn") | {"client_rounds": setting("client_rounds")}
    given = {key: value for key, value in values.items() if value is not None}
    steps = steps_per_round(algorithms.make_config("cnfgnn", given), num_train)
    return 1000.0 * min(1.0, steps / STEPS_PER_ROUND_METR_LA)


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
    config = algorithms.make_config(method, values)
    cohort = clients.cohort_size(num_clients, getattr(config, "participation", 1.0))
    passes = getattr(config, "client_rounds", getattr(config, "sync_every", 1))
    num_rounds = setting("num_rounds", 500)
    is_published = _traffic_flags.dataset_name() in GRU_BATCH_SIZES
    if method == "at_without_fedavg" and is_published and not given("num_rounds"):
        num_rounds = MOST_ROUNDS_WITHOUT_FEDAVG
    has_own_patience = method not in ALTERNATING and not given("patience")
    return _runs.run_method(
        method,
        values,
        splits,
        workdir,
        checksum=checksum,
        num_rounds=num_rounds,
        examples_per_round=cohort * num_train * passes,
        **({"patience": OTHERS_PATIENCE} if has_own_patience else {}),
    )


def score_views(
    run: _runs.Run, whole: windows.TrafficData, is_seen: np.ndarray
) -> _runs.Run:
    """A run of the seen sensors, with the scores on the whole graph as its test."""
    scores = {
        name: rounds.evaluate_seeds(run.algorithm, run.result.best_state, view)
        for name, view in devices.put_replicated(
            inductive.views(whole, is_seen)
        ).items()
    }
    errors = {
        name: {key: score[key] for key in ("rmse", "mae")}
        for name, score in scores.items()
    }
    result = run.result._replace(test={**scores["all"], **errors})
    return run._replace(result=result)


def client_model(config: Any) -> Seq2Seq | None:
    """What runs on a client, or None where nothing is trained."""
    if isinstance(config, SplitConfig):
        return make_models(config).client
    return make_model(config) if isinstance(config, GRUConfig) else None


def device_cost(method: str, config: dict[str, Any]) -> dict[str, float]:
    """GFLOP of a client's forward pass for one window; see `flops`."""
    model = client_model(algorithms.make_config(method, config))
    if model is None:
        return {}
    return {
        "device_gflops": flops.forward(model) / 1e9,
        "device_gflops_as_printed": flops.printed(model) / 1e9,
    }


def given(flag: str) -> bool:
    """Whether the user gave the flag."""
    return bool(flags.FLAGS[flag].present)


def table(entries: dict[str, dict[str, Any]]) -> str:
    """RMSE and MAE in the paper's convention, and the masked one at 60 minutes.

    With --train_fraction also the RMSE of seen and of unseen sensors.
    """
    columns = {"RMSE": ("rmse",), "MAE": ("mae",)}
    if TRAIN_FRACTION.value is not None:
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
            TITLES[method],
            *(cell(entry, path) for path in columns.values()),
            str(entry["best_round"]),
        ]
        for method, entry in entries.items()
    ]
    return results.format_table(["mph", *columns, "best round"], rows)


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
    if records and STRATEGY.value:
        titles = dict(STRATEGIES[name] for name in STRATEGY.value)
        records = _runs.records_of(workdir, titles)
        records = [r for r in records if r["method"] in titles.values()]
        plots.training_curves(workdir / "strategies.png", records)
    plots.rmse_by_horizon(
        workdir / "rmse_by_horizon.png",
        {TITLES[m]: entry["rmse_by_horizon"] for m, entry in entries.items()},
    )


def chosen_methods() -> list[str]:
    """What --strategy and --methods name.

    Raises:
      InputError: if a method is not one of traffic, or cannot do what other flags ask.
    """
    strategies = [STRATEGIES[name][0] for name in STRATEGY.value or ()]
    if strategies or given("methods"):
        methods = _run_flags.METHODS.value or []
    else:
        methods = default_methods()
    for method in methods:
        if method not in TITLES:
            raise InputError(f"unknown method {method!r}; known: {', '.join(TITLES)}")
    methods = strategies + [method for method in methods if method not in strategies]
    for method in methods:
        if TRAIN_FRACTION.value is not None and method in OF_SINGLE_SENSORS:
            raise InputError(
                f"--train_fraction is not for {method}, whose models belong to single "
                "sensors: there are none for unseen ones"
            )
        if SWEEP.value and method not in ALTERNATING:
            raise InputError(
                f"--sweep={SWEEP.value} is not for {method}, which has no client and "
                f"server rounds; it is for {', '.join(ALTERNATING)}"
            )
    return methods


def default_methods() -> list[str]:
    """The dataset's, but for those that other flags exclude."""
    if SWEEP.value:
        return ["cnfgnn"]
    methods = setting("methods", ["cnfgnn", "persistence"])
    if TRAIN_FRACTION.value is None:
        return methods
    return [method for method in methods if method not in OF_SINGLE_SENSORS]


def swept_values() -> list[int]:
    """The values of --sweep, as the paper has them or as given.

    Raises:
      InputError: if they cannot be read, or other flags exclude them.
    """
    if SWEEP_VALUES.present and not SWEEP.value:
        raise InputError("--sweep_values needs --sweep")
    if SWEEP.value and _run_flags.EVAL_ONLY.value:
        raise InputError("--eval_only scores a single run; name its folder")
    if SWEEP_VALUES.value is None:
        return list(SWEPT)
    try:
        parser = flags.FLAGS["client_rounds"].parser
        values = [parser.parse(text) for text in SWEEP_VALUES.value]
    except ValueError as error:
        raise InputError(f"--sweep_values: {error}") from error
    if not values or len(set(values)) < len(values):
        raise InputError("--sweep_values: expected different numbers")
    return values


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
    if is_seen is not None:
        places = (dataset.longitude, dataset.latitude)
        plots.sensor_map(workdir / "sensors.png", *places, is_seen)
    return entries


def sweep(
    dataset: TrafficDataset,
    is_seen: np.ndarray | None,
    methods: list[str],
    values: list[int],
    workdir: pathlib.Path,
) -> None:
    """Runs all pairs of R_c and R_s; `sweep.json`, and `sweep.png` (Figure 4).

    Each run's folder, R_c-R_s, is that of a run with these two flags.
    """
    rows, size = [], len(values)
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
        maps[f"{TITLES[method]}: RMSE (mph)"] = np.reshape(rmse, (size, size))
        maps[f"{TITLES[method]}: GiB to the best round"] = np.reshape(gib, (size, size))
    labels = ("server rounds, R_s", "client rounds, R_c")
    plots.heat_maps(workdir / "sweep.png", maps, *labels, ticks=(values, values))


def main(argv: list[str]) -> None:
    del argv
    _run_flags.set_up_jax(copied_bytes=hidden_bytes())
    methods, values = chosen_methods(), swept_values()
    dataset = _traffic_flags.load_dataset()
    is_seen = None
    if TRAIN_FRACTION.value is not None:
        is_seen = inductive.first_by_longitude(dataset, TRAIN_FRACTION.value)
    workdir = _run_flags.make_workdir("cnfgnn", dataset.name)
    if SWEEP.value:
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
