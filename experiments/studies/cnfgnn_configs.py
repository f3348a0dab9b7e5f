"""What the options of CNFGNN's study make of its methods' configs."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.studies import cnfgnn_defaults as paper
from experiments.studies import running
from experiments.studies.cnfgnn_options import CNFGNNOptions
from experiments.studies.methods import (
    TAKES_THE_MEAN,
    check_concerns,
    having,
    server_optimizer_of,
)
from fedjax_graph import algorithms
from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig
from fedjax_graph.core import batching, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models import graph_network
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask


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
    chunk = running.clients_per_chunk(study, workdir, method)
    own = {"clients_per_chunk": chunk, "participation": study.participation}
    name = paper.registered(method)
    values = study.trust_values() | own
    if not having("task", [method], paper.registered):
        values |= _half_values(study, method, num_train)
        return _known(values) | study.settings_of(method, name, values)
    values["task"] = gru_task(study, method, num_train, chunk)
    values["server_optimizer"] = server_optimizer_of(
        study, name, rate=study.server_learning_rate
    )
    if method == "gru_fmtl":
        values["regulariser"] = study.fmtl_regulariser
        values["weight"] = _fmtl_setting(study, "weight")
    return _known(values) | study.settings_of(method, name, values)


def gru_task(
    study: CNFGNNOptions, method: str, num_train: int, chunk: int | None
) -> TrafficSeq2SeqTask:
    """The task of a GRU baseline.

    Args:
      study: the options.
      method: its name in the output.
      num_train: windows to train on.
      chunk: clients side by side in forecasts.
    """
    num_layers = study.setting("gru_layers")
    released = paper.GRU_BATCH_SIZES.get(study.network_name, {})
    small, large = released.get(method, (None, None))
    epochs = study.setting("client_rounds")
    if method == "gru_fmtl":
        epochs = _fmtl_setting(study, "sync_every")
    elif method == "gru_centralized":
        epochs = None  # its rounds are passes
    decay = sampling_decay(study, num_train)
    values = {
        "hidden_size": study.setting("gru_hidden_size"),
        "num_layers": num_layers,
        "optimizer": optimizer(study, "client", TrafficSeq2SeqTask.optimizer),
        "batch_size": study.setting(
            "client_batch_size", large if num_layers and num_layers > 1 else small
        ),
        "local_epochs": epochs,
        "sampling_decay": paper.GRU_FEDAVG_DECAY if method == "gru_fedavg" else decay,
        "masked_loss": study.masked_loss,
        "clients_per_chunk": chunk,
    }
    return TrafficSeq2SeqTask(**_known(values))


def _fmtl_setting(study: CNFGNNOptions, name: str) -> Any:
    """A setting of GRU + FMTL, whose default depends on the regulariser."""
    default = paper.FMTL_DEFAULTS[study.fmtl_regulariser][name]
    return study.setting(f"fmtl_{name}", default)


def _half_values(study: CNFGNNOptions, method: str, num_train: int) -> dict[str, Any]:
    """Those of a method with clients' models and a graph network."""
    return _half_sizes(study, method) | {
        "client_optimizer": optimizer(study, "client", CNFGNNConfig.client_optimizer),
        "server_optimizer": optimizer(study, "server", CNFGNNConfig.server_optimizer),
        "average_every_step": study.average_every_step,
        "sampling_decay": sampling_decay(study, num_train),
        "masked_loss": study.masked_loss,
        "server_dtype": study.server_dtype,
        "exchange_bits": int(study.exchange_bits),
    }


def _half_sizes(study: CNFGNNOptions, method: str) -> dict[str, Any]:
    """How large the two halves and their minibatches are, and how many passes."""
    names = ("client_rounds", "server_rounds", "client_batch_size")
    names += ("hidden_size", "gn_layers", "gn_mlp_sizes")
    released = paper.JOINT_BATCH_SIZES.get(study.network_name, {})
    batch_size = study.setting("server_batch_size", released.get(method))
    sizes = {name: study.setting(name) for name in names}
    return sizes | {"server_batch_size": batch_size}


def edges_per_chunk(
    study: CNFGNNOptions, values: dict[str, Any], graph: graphs.Graph
) -> int:
    """Edges whose messages the graph network holds at once, 0 for all.

    Args:
      study: the options.
      values: what `config_values` makes of them.
      graph: of the sensors that are trained on.
    """
    if study.edges_per_chunk != "auto":
        return int(study.edges_per_chunk)
    config = running.config_of("cnfgnn", values)
    return graph_network.auto_edges_per_chunk(
        graph.num_nodes,
        len(graph.senders),
        config.server_batch_size,
        max(config.gn_mlp_sizes),
    )


# --- Optimizers ----------------------------------------------------------------------


def optimizer(
    study: CNFGNNOptions, side: str, default: OptimizerConfig
) -> OptimizerConfig:
    """The optimizer of clients or of the server, as the options change the default.

    Args:
      study: the options.
      side: client or server.
      default: of the method's config.

    Raises:
      InputError: if `client_optimizer` or `server_optimizer` cannot be read.
    """
    default = _at_rate(default, study.setting(f"{side}_learning_rate"))
    steps = study.client_steps if side == "client" else study.server_steps
    return steps(default)


def _at_rate(config: OptimizerConfig, rate: float | None) -> OptimizerConfig:
    """An optimizer with another learning rate; None keeps its own."""
    own = config.learning_rate if rate is None else rate
    return dataclasses.replace(config, learning_rate=own)


def check_optimizers(study: CNFGNNOptions, methods: Sequence[str]) -> None:
    """Checks that chosen optimizers can be read and concern one of the methods.

    Raises:
      InputError: naming the flag.
    """
    trained = list(filter(_is_trained, methods))
    stepping = having("server_optimizer", methods, paper.registered)
    check_concerns(study, ("server_optimizer",), methods, stepping)
    rated = [x for x in methods if server_optimizer_of(study, paper.registered(x))]
    check_concerns(study, ("server_learning_rate",), methods, rated)
    of_clients = ("client_optimizer", "client_learning_rate")
    check_concerns(study, of_clients, methods, trained)
    of_server = optimizer(study, "server", TAKES_THE_MEAN)
    if of_server.num_steps and (study.sweep or len(rated) > 1):
        raise InputError(
            f"--server_optimizer={study.server_optimizer}: num_steps are those of one "
            "server; give one method, and no --sweep, as others step more or less often"
        )
    steps = optimizer(study, "client", TAKES_THE_MEAN)
    if steps.schedule != "constant" and not steps.num_steps:
        _check_rounds_apart(study, methods)


def _is_trained(method: str) -> bool:
    return algorithms.get_method(paper.registered(method)).is_trained


def _check_rounds_apart(study: CNFGNNOptions, methods: Sequence[str]) -> None:
    """Checks that clients start their steps anew each round, as a schedule needs."""
    starting_anew = {*having("task", methods, paper.registered), *paper.ALTERNATING}
    for method in filter(_is_trained, methods):
        if method == "gru_centralized" or method not in starting_anew:
            raise InputError(
                f"--client_optimizer={study.client_optimizer}: {method} steps on from "
                "round to round: give num_steps, those of all rounds that its schedule "
                "spans"
            )


def flags_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The options that a saved model was trained by, to score it without them.

    They are what only training reads, and the bits of an exchange.

    Args:
      settings: of its checkpoint.
    """
    config, seeds = settings["config"], settings["seeds"]
    names = ("client_rounds", "server_rounds", "client_batch_size", "server_batch_size")
    names += ("sampling_decay", "exchange_bits", "participation", "masked_loss")
    names += ("aggregator", "tolerance")
    optimizers = ("client_optimizer", "server_optimizer")
    found = _known({name: config.get(name) for name in (*names, *optimizers)})
    if task := config.get("task"):
        found["client_optimizer"] = task["optimizer"]
        found["client_batch_size"] = task["batch_size"]
        found["masked_loss"] = task["masked_loss"]
        is_chosen = task["local_epochs"] != TrafficSeq2SeqTask.local_epochs
        if is_chosen and "regulariser" not in config:  # GRU + FMTL has its own option
            found["client_rounds"] = task["local_epochs"]
        if task["sampling_decay"] != paper.GRU_FEDAVG_DECAY:  # which has no option
            found["sampling_decay"] = task["sampling_decay"]
    if "exchange_bits" in found:
        found["exchange_bits"] = str(found["exchange_bits"])
    for name in filter(found.get, optimizers):
        found[name] = OptimizerConfig(**found[name])
    return found | {"seed": seeds[0], "num_seeds": len(seeds)}


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


# --- What follows from them ----------------------------------------------------------


def sampling_decay(study: CNFGNNOptions, num_train: int) -> float:
    """Computes k of scheduled sampling, the same for all methods of a dataset."""
    chosen = study.setting("sampling_decay")
    if chosen is not None:
        return chosen
    sizes = _known(_half_sizes(study, "cnfgnn"))
    steps = steps_per_round(running.config_of("cnfgnn", sizes), num_train)
    return 1000.0 * min(1.0, steps / paper.STEPS_PER_ROUND_METR_LA)


def steps_per_round(config: CNFGNNConfig, num_train: int) -> int:
    """Counts the optimization steps of a global round, on clients and server."""
    client = batching.steps_per_epoch(num_train, config.client_batch_size)
    server = batching.steps_per_epoch(num_train, config.server_batch_size)
    return config.client_rounds * client + config.server_rounds * server


def most_rounds(study: CNFGNNOptions, method: str) -> int:
    """Most rounds of a method."""
    is_published = study.network_name in paper.GRU_BATCH_SIZES
    if method == "at_without_fedavg" and is_published and study.num_rounds is None:
        return paper.MOST_ROUNDS_WITHOUT_FEDAVG
    return study.setting("num_rounds", paper.NUM_ROUNDS)


def patience(study: CNFGNNOptions, method: str) -> int:
    """Rounds without a better validation figure after which a method stops."""
    is_alternating = method in paper.ALTERNATING
    default = running.PATIENCE if is_alternating else paper.OTHERS_PATIENCE
    return study.patience or default


def in_effect(study: CNFGNNOptions) -> dict[str, Any]:
    """What options stand for that are not given; see `Options.in_effect`."""
    task, config, on_small = TrafficSeq2SeqTask(), CNFGNNConfig(), "1000 or less"
    fmtl = paper.FMTL_DEFAULTS[study.fmtl_regulariser]
    others = {
        "methods": study.chosen_methods(),
        "num_rounds": most_rounds(study, "cnfgnn"),
        "patience": f"{patience(study, 'cnfgnn')}, or "
        f"{patience(study, 'gru_fedavg')} of methods that do not alternate",
        "gru_hidden_size": study.setting("gru_hidden_size", task.hidden_size),
        "gru_layers": study.setting("gru_layers", task.num_layers),
        "sampling_decay": study.setting("sampling_decay", on_small),
        "fmtl_weight": study.setting("fmtl_weight", fmtl["weight"]),
        "fmtl_sync_every": study.setting("fmtl_sync_every", fmtl["sync_every"]),
        "sweep_values": study.swept_values,
    }
    for side in ("client", "server"):
        steps = optimizer(study, side, getattr(config, f"{side}_optimizer"))
        others |= {
            f"{side}_optimizer": steps,
            f"{side}_learning_rate": steps.learning_rate,
        }
    own = ("hidden_size", "gn_layers", "gn_mlp_sizes", "client_rounds")
    own += ("server_rounds", "client_batch_size", "server_batch_size")
    sizes = {name: study.setting(name, getattr(config, name)) for name in own}
    return {"dataset": study.network_name, **sizes, **others}
