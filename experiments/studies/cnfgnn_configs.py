"""What the options of CNFGNN's study make of its methods' configs."""

import pathlib
from typing import Any

from experiments.studies import cnfgnn_defaults as paper
from experiments.studies import running
from experiments.studies.cnfgnn_options import CNFGNNOptions
from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig
from fedjax_graph.core import batching


def config_values(
    study: CNFGNNOptions, method: str, num_train: int, workdir: pathlib.Path
) -> dict[str, Any]:
    """Options and defaults under the names of a method's config fields.

    Args:
      study: the options.
      method: its name in the output.
      num_train: windows to train on.
      workdir: of the run, whose checkpoint may say how clients are mapped.
    """
    values = _gru_values if method in paper.GRUS else _half_values
    chosen = {
        **values(study, method),
        "clients_per_chunk": running.clients_per_chunk(study, workdir, method),
        "participation": study.participation,
        "client_rounds": study.setting("client_rounds"),
        "average_every_step": study.average_every_step,
        "masked_loss": study.masked_loss,
        "server_dtype": study.server_dtype,
        "exchange_bits": int(study.exchange_bits),
    }
    if method != "gru_fedavg":
        chosen["sampling_decay"] = sampling_decay(study, num_train)
    return _known(chosen)


def _gru_values(study: CNFGNNOptions, method: str) -> dict[str, Any]:
    """Those of a baseline, None where its config's default holds."""
    num_layers = study.setting("gru_layers")
    released = paper.GRU_BATCH_SIZES.get(study.network_name, {})
    small, large = released.get(method, (None, None))
    values = {
        "hidden_size": study.setting("gru_hidden_size"),
        "num_layers": num_layers,
        "batch_size": study.setting(
            "client_batch_size", large if num_layers and num_layers > 1 else small
        ),
        "learning_rate": study.setting("client_learning_rate"),
    }
    if method == "gru_fmtl":
        defaults = paper.FMTL_DEFAULTS[study.fmtl_regulariser]
        values["regulariser"] = study.fmtl_regulariser
        values["weight"] = study.setting("fmtl_weight", defaults["weight"])
        values["sync_every"] = study.setting("fmtl_sync_every", defaults["sync_every"])
    return values


def _half_values(study: CNFGNNOptions, method: str) -> dict[str, Any]:
    """Those of a method with clients' models and a graph network."""
    names = (
        "server_rounds",
        "client_batch_size",
        "client_learning_rate",
        "server_learning_rate",
        "hidden_size",
        "gn_layers",
        "gn_mlp_sizes",
    )
    released = paper.JOINT_BATCH_SIZES.get(study.network_name, {})
    batch_size = study.setting("server_batch_size", released.get(method))
    return {
        **{name: study.setting(name) for name in names},
        "server_batch_size": batch_size,
    }


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


# --- What follows from them ----------------------------------------------------------


def sampling_decay(study: CNFGNNOptions, num_train: int) -> float:
    """Computes k of scheduled sampling, the same for all methods of a dataset."""
    chosen = study.setting("sampling_decay")
    if chosen is not None:
        return chosen
    values = _half_values(study, "cnfgnn")
    values["client_rounds"] = study.setting("client_rounds")
    steps = steps_per_round(running.config_of("cnfgnn", _known(values)), num_train)
    return 1000.0 * min(1.0, steps / paper.STEPS_PER_ROUND_METR_LA)


def steps_per_round(config: CNFGNNConfig, num_train: int) -> int:
    """Counts the optimization steps of a global round, on clients and server."""
    client = batching.steps_per_epoch(num_train, config.client_batch_size)
    server = batching.steps_per_epoch(num_train, config.server_batch_size)
    return config.client_rounds * client + config.server_rounds * server


def stopping(study: CNFGNNOptions, method: str) -> dict[str, int]:
    """When a method's training ends: most rounds, and its patience."""
    num_rounds = study.setting("num_rounds", paper.NUM_ROUNDS)
    is_published = study.network_name in paper.GRU_BATCH_SIZES
    if method == "at_without_fedavg" and is_published and study.num_rounds is None:
        num_rounds = paper.MOST_ROUNDS_WITHOUT_FEDAVG
    is_alternating = method in paper.ALTERNATING
    patience = running.PATIENCE if is_alternating else paper.OTHERS_PATIENCE
    return {"num_rounds": num_rounds, "patience": study.patience or patience}


def hidden_bytes(study: CNFGNNOptions) -> int:
    """Bytes of h_c of all training windows, 70 % of the readings or so."""
    size = study.setting("hidden_size", CNFGNNConfig.hidden_size)
    return int(0.7 * 4 * size * study.num_readings())
