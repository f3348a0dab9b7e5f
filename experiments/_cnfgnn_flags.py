"""Flags of CNFGNN's binary, and what they and the datasets' own values choose."""

import pathlib
from typing import Any

from absl import flags

from experiments import _run_flags, _runs, _traffic_flags
from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig
from fedjax_graph.algorithms.cnfgnn.gru_fmtl import REGULARISERS
from fedjax_graph.core import batching, communication
from fedjax_graph.core.errors import InputError

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
MASKED_LOSS = flags.DEFINE_bool(
    "masked_loss", False, "Missing readings count neither in training nor for the best."
)
SERVER_DTYPE = flags.DEFINE_enum(
    "server_dtype",
    "float32",
    ["float32", "bfloat16"],
    "What the graph network computes in; parameters and Adam stay float32.",
)
EXCHANGE_BITS = flags.DEFINE_enum(
    "exchange_bits",
    "32",
    [str(bits) for bits in communication.BITS],
    "Of each number that CNFGNN's strategies exchange for the graph network: hidden "
    "states, embeddings and their gradients.",
)
TARGET_RMSE = flags.DEFINE_float(
    "target_rmse",
    None,
    "Report the bytes that each method exchanges until its validation RMSE, in mph, is "
    "no higher.",
    lower_bound=0.0,
)
_run_flags.refuse_nan(TARGET_RMSE)
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
STEPS_PER_ROUND_METR_LA = 688
MOST_ROUNDS_WITHOUT_FEDAVG = 50  # on the paper's datasets, from the released code
OTHERS_PATIENCE = 50  # of all but the alternating methods, from the released code
ALTERNATING = ("cnfgnn", "at_without_fedavg")
OF_SINGLE_SENSORS = (  # models that an unseen sensor lacks
    "at_without_fedavg",
    "split_learning",
    "gru_local",
    "gru_fmtl",
    "historical_average",
)
SWEPT = (1, 10, 20)


def given(flag: str) -> bool:
    """Whether the user gave the flag."""
    return bool(flags.FLAGS[flag].present)


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
        "masked_loss": MASKED_LOSS.value,
        "server_dtype": SERVER_DTYPE.value,
        "exchange_bits": int(EXCHANGE_BITS.value),
    }
    if method != "gru_fedavg":
        values["sampling_decay"] = sampling_decay(num_train)
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


def sampling_decay(num_train: int) -> float:
    """k of scheduled sampling, the same for all methods of a dataset."""
    chosen = setting("sampling_decay")
    if chosen is not None:
        return chosen
    values = half_values("cnfgnn") | {"client_rounds": setting("client_rounds")}
    given = {key: value for key, value in values.items() if value is not None}
    steps = steps_per_round(_runs.make_config("cnfgnn", given), num_train)
    return 1000.0 * min(1.0, steps / STEPS_PER_ROUND_METR_LA)


def steps_per_round(config: CNFGNNConfig, num_train: int) -> int:
    """Optimisation steps of a global round, client and server steps together."""
    client = batching.steps_per_epoch(num_train, config.client_batch_size)
    server = batching.steps_per_epoch(num_train, config.server_batch_size)
    return config.client_rounds * client + config.server_rounds * server


def stopping(method: str) -> dict[str, int]:
    """When a method's training ends: most rounds, and its patience."""
    num_rounds, patience = setting("num_rounds", 500), _run_flags.PATIENCE.value
    is_published = _traffic_flags.dataset_name() in GRU_BATCH_SIZES
    if method == "at_without_fedavg" and is_published and not given("num_rounds"):
        num_rounds = MOST_ROUNDS_WITHOUT_FEDAVG
    if method not in ALTERNATING and not given("patience"):
        patience = OTHERS_PATIENCE
    return {"num_rounds": num_rounds, "patience": patience}


def hidden_bytes() -> int:
    """Bytes of h_c of all training windows, 70 % of the readings or so."""
    size = setting("hidden_size", CNFGNNConfig.hidden_size)
    return int(0.7 * 4 * size * _traffic_flags.num_readings())


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
                f"--sweep={SWEEP.value} is not for {method}, which has no "
                f"client and server rounds; it is for {', '.join(ALTERNATING)}"
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
