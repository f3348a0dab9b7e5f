"""What CNFGNN's paper and its released code run with, by dataset and method."""

from typing import Any

METHODS = (
    *("cnfgnn", "at_without_fedavg", "split_learning", "split_learning_fedavg"),
    *("gru_gn", "gru_centralized", "gru_local", "gru_fedavg", "gru_fmtl"),
    *("historical_average", "persistence"),
)
OWN_TITLES = {"gru_local": "GRU (local)", "gru_fedavg": "GRU + FedAvg"}
STRATEGIES = {  # of Table 10: value of --strategy -> (method, title)
    "centralized": ("gru_gn", "Centralized"),
    "sl": ("split_learning", "SL"),
    "sl_fedavg": ("split_learning_fedavg", "SL + FedAvg"),
    "at_without_fedavg": ("at_without_fedavg", "AT, w/o FedAvg"),
    "at_fedavg": ("cnfgnn", "AT + FedAvg"),
}
REGISTERED = {"gru_local": "local", "gru_fedavg": "fed_avg"}  # under other names
ALTERNATING = ("cnfgnn", "at_without_fedavg")
OF_SINGLE_SENSORS = (  # models that an unseen sensor lacks
    "at_without_fedavg",
    "split_learning",
    "gru_local",
    "gru_fmtl",
    "historical_average",
)

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
        "methods": ("persistence", "historical_average", "gru_fedavg", "cnfgnn"),
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
GRU_FEDAVG_DECAY = 1.0  # k of scheduled sampling, of the released code
NUM_ROUNDS = 500  # most, on a dataset of one's own
STEPS_PER_ROUND_METR_LA = 688  # CNFGNN's optimization steps in a global round
MOST_ROUNDS_WITHOUT_FEDAVG = 50  # on the paper's datasets, from the released code
OTHERS_PATIENCE = 50  # of all but the alternating methods, from the released code
SWEPT = (1, 10, 20)  # client and server rounds of Figure 4


def registered(method: str) -> str:
    """The name under which the registry has a method of this system."""
    return REGISTERED.get(method, method)


def of_dataset(name: str, is_inductive: bool) -> dict[str, Any]:
    """The settings that a dataset has of its own.

    Args:
      name: of the dataset.
      is_inductive: whether only a share of the sensors is trained on.
    """
    defaults = DEFAULTS.get(name, {})
    return defaults | INDUCTIVE_DEFAULTS.get(name, {}) if is_inductive else defaults
