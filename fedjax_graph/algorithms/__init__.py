"""Every method under one name each; the conformance suite runs over this table."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_graph.algorithms import (
    ditto,
    fed_att,
    fed_avg,
    fed_opt,
    fed_per,
    fed_prox,
    fed_sgd,
    graph_fed_avg,
    graphfl,
    lg_fed_avg,
    scaffold,
)
from fedjax_graph.algorithms import local as local_training
from fedjax_graph.algorithms.cnfgnn import (
    cnfgnn,
    gru_centralized,
    gru_fed_avg,
    gru_fmtl,
    naive,
    split_learning,
)
from fedjax_graph.algorithms.fl_agcns import fl_agcns, fl_gradient, fl_random, fl_rl
from fedjax_graph.algorithms.sfl import sfl
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.images import ImageTask
from fedjax_graph.tasks.nodes import NodeTask
from fedjax_graph.tasks.subgraphs import SubgraphTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask


class Method(NamedTuple):
    """A registered method: `factory(config_type(...))` is its algorithm."""

    config_type: type
    factory: Callable[[Any], FederatedAlgorithm]
    is_trained: bool = True

    @property
    def takes_task(self) -> bool:
        """Whether it works on any task, which its config then names."""
        return issubclass(self.config_type, FederatedConfig)


REGISTRY: dict[str, Method] = {
    "at_without_fedavg": Method(cnfgnn.CNFGNNConfig, cnfgnn.at_without_fedavg),
    "client_eo": Method(fl_agcns.FLAGCNSConfig, fl_agcns.client_eo),
    "cnfgnn": Method(cnfgnn.CNFGNNConfig, cnfgnn.cnfgnn),
    "controller_eo": Method(fl_agcns.FLAGCNSConfig, fl_agcns.controller_eo),
    "ditto": Method(ditto.DittoConfig, ditto.ditto),
    "fed_adam": Method(fed_opt.FedAdamConfig, fed_avg.fed_avg),
    "fed_att": Method(fed_att.FedAttConfig, fed_att.fed_att),
    "fed_avg": Method(fed_avg.FedAvgConfig, fed_avg.fed_avg),
    "fed_avg_m": Method(fed_opt.FedAvgMConfig, fed_avg.fed_avg),
    "fed_per": Method(fed_avg.FedAvgConfig, fed_per.fed_per),
    "fed_prox": Method(fed_prox.FedProxConfig, fed_prox.fed_prox),
    "fed_sgd": Method(fed_sgd.FedSGDConfig, fed_sgd.fed_sgd),
    "fed_yogi": Method(fed_opt.FedYogiConfig, fed_avg.fed_avg),
    "fl_agcns": Method(fl_agcns.FLAGCNSConfig, fl_agcns.fl_agcns),
    "fl_gradient": Method(fl_gradient.FLGradientConfig, fl_gradient.fl_gradient),
    "fl_random": Method(fl_random.TrialConfig, fl_random.fl_random),
    "fl_rl": Method(fl_rl.FLRLConfig, fl_rl.fl_rl),
    "graph_fed_avg": Method(FederatedConfig, graph_fed_avg.graph_fed_avg),
    "graphfl": Method(graphfl.GraphFLConfig, graphfl.graphfl),
    "gru_centralized": Method(gru_fed_avg.GRUConfig, gru_centralized.gru_centralized),
    "gru_fedavg": Method(gru_fed_avg.GRUFedAvgConfig, gru_fed_avg.gru_fed_avg),
    "gru_fmtl": Method(gru_fmtl.GRUFMTLConfig, gru_fmtl.gru_fmtl),
    "gru_gn": Method(cnfgnn.HalvesConfig, split_learning.gru_gn),
    "gru_local": Method(gru_fed_avg.GRULocalConfig, gru_fed_avg.gru_local),
    "historical_average": Method(
        naive.NaiveConfig, naive.historical_average, is_trained=False
    ),
    "lg_fed_avg": Method(fed_avg.FedAvgConfig, lg_fed_avg.lg_fed_avg),
    "local": Method(FederatedConfig, local_training.local_training),
    "mp_fed_avg": Method(graph_fed_avg.MPFedAvgConfig, graph_fed_avg.mp_fed_avg),
    "persistence": Method(naive.NaiveConfig, naive.persistence, is_trained=False),
    "scaffold": Method(fed_avg.FedAvgConfig, scaffold.scaffold),
    "sfl": Method(sfl.SFLConfig, sfl.sfl),
    "sfl_lg": Method(sfl.SFLConfig, sfl.sfl_lg),
    "sfl_per": Method(sfl.SFLConfig, sfl.sfl_per),
    "sfl_star": Method(sfl.SFLStarConfig, sfl.sfl_star),
    "split_learning": Method(cnfgnn.SplitConfig, split_learning.split_learning),
    "split_learning_fedavg": Method(
        split_learning.SplitLearningFedAvgConfig, split_learning.split_learning_fedavg
    ),
}
TASKS = {
    config.kind: config
    for config in (ImageTask, NodeTask, SubgraphTask, TrafficRNNTask)
}


def get_method(name: str) -> Method:
    """Looks a method up.

    Raises:
      InputError: if there is none of that name.
    """
    if name not in REGISTRY:
        raise InputError(f"unknown method {name!r}; known: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def make_config(name: str, values: dict[str, Any]) -> Any:
    """A method's config from those of `values` that are its fields.

    Nested configs may be given as dicts, as they stand in a file.
    """
    chosen = _fields(get_method(name).config_type, values)
    if isinstance(chosen.get("task"), dict):
        task_type = TASKS[chosen["task"]["kind"]]
        chosen["task"] = task_type(**_fields(task_type, chosen["task"]))
    if isinstance(chosen.get("structure"), dict):
        chosen["structure"] = StructureConfig(**chosen["structure"])
    return get_method(name).config_type(**chosen)


def _fields(config_type: type, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that are fields, as JSON has them or as they are."""
    names = {field.name for field in dataclasses.fields(config_type)}
    return {key: _value(key, x) for key, x in values.items() if key in names}


def _value(key: str, value: Any) -> Any:
    if isinstance(value, dict) and key.endswith("optimizer"):
        return OptimizerConfig(**value)
    return tuple(value) if isinstance(value, list) else value
