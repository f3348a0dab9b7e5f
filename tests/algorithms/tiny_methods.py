"""Every registered method with a config that is tiny, for what all of them must do."""

from tests import client_graphs
from tests.algorithms.problems import (
    Nodes,
    OverlappingSubgraphs,
    Seq2SeqTraffic,
    Subgraphs,
    Traffic,
)
from tests.few_ops import FEW_OPS

ON_TRAFFIC = {  # data that are one array for all, and random minibatches
    "fed_avg": {"aggregation_noise": 0.01},
    "scaffold": {},
    "sfl_per": {
        "start": "personal",
        "pull_weight": 0.3,
        "pull_distance": "squared_l2",
    },
    "sfl_star": {
        "start": "own",
        "pull_weight": 0.3,
        "score": "local",
        "structure": {"embedding_size": 3, "num_neighbours": 2},
    },
}
ON_SUBGRAPHS = {
    "ada_fgl": {"federated_rounds": 1, "num_hops": 1, "hidden_size": 4},
    "ditto": {},
    "fed_adam": {"participation": 0.6},
    "fed_att": {},
    "fed_avg": {"aggregation_noise": 0.01},
    "fed_avg_m": {},
    "fed_dc": {},
    "fed_gta": {"num_moments": 3},
    "fed_per": {"server_optimizer": {"momentum": 0.5}},
    "fed_prox": {"proximal_weight": 0.5, "score": "local"},
    "fed_pub": {
        "mask_weight": 0.01,
        "pull_weight": 0.1,
        "num_blocks": 2,
        "block_size": 3,
    },
    "fed_sage_plus": {  # in the second of two rounds the graphs are mended
        "generator_rounds": 1,
        "generator": {"num_places": 2, "latent_size": 3, "layer_sizes": (4, 6)},
    },
    "fed_sgd": {"server_optimizer": {"name": "adam", "learning_rate": 0.05}},
    "fed_star": {
        "participation": 0.6,
        "task": Subgraphs.TASK
        | {"model": "decoupled_gin", "structure_size": 2, "hidden_size": 4},
    },
    "fed_yogi": {},
    "fgssl": {"score": "local"},
    "gcfl_plus": {"num_norms": 1, "first_rounds": 0, "mean_below": 10.0},
    "graph_fed_avg": {},
    "lg_fed_avg": {},
    "local": {},
    "moon": {"contrast_on": "all", "participation": 0.6},
    "mp_fed_avg": {},
    "sfl": {"alpha": 0.7, "pull_weight": 0.3},
    "sfl_lg": {},
}
ON_NODES = {
    "fed_avg": {},
    "fed_proto": {"participation": 0.6},
    "graphfl": {"participation": 0.6, "server_optimizer": {"learning_rate": 0.5}},
}
ON_SEQ2SEQ = {  # with scheduled sampling, which counts the rounds
    "fed_avg": {},
    "gru_centralized": {},
    "gru_fmtl": {"regulariser": "frobenius"},
}
HALVES = {
    "hidden_size": 4,
    "gn_layers": 1,
    "gn_mlp_sizes": (6, 6, 6),
    "server_batch_size": 10,
    "sampling_decay": 4.0,
}
FORECASTERS = {
    "at_without_fedavg": HALVES | {"client_batch_size": 12},
    "cnfgnn": HALVES | {"client_batch_size": 12},
    "gru_gn": HALVES,
    "historical_average": {"eval_batch_size": 10},
    "persistence": {"eval_batch_size": 10},
    "split_learning": HALVES,
    "split_learning_fedavg": HALVES,
}
CENTRALISED = {"gru_centralized"}  # trained, and no clients to map over
SEARCH = {
    "num_features": client_graphs.NUM_FEATURES,
    "num_classes": client_graphs.NUM_CLASSES,
    "num_layers": 2,
    "width": 4,
    "ops": FEW_OPS,
    # Decay, or Adam would magnify noise where gradients are 0.
    "server_optimizer": {"name": "adam", "learning_rate": 0.02, "weight_decay": 0.01},
}
EVOLUTION = SEARCH | {
    "population_size": 6,
    "codes_per_step": 2,
    "num_steps": 2,
    "fitness_from": "shared",
    "num_warm_up": 1,  # so the second of two rounds evolves
}
SEARCHES = {
    "client_eo": EVOLUTION,
    "controller_eo": EVOLUTION,
    "fl_agcns": EVOLUTION,
    "fl_gradient": SEARCH | {"num_steps": 2},
    "fl_random": SEARCH | {"num_epochs": 2},
    "fl_rl": SEARCH | {"num_epochs": 2, "codes_per_round": 2, "controller_size": 4},
}


def on(problem, methods):
    return {name: {"task": problem.TASK} | values for name, values in methods.items()}


TINY = {  # problem -> method -> its config
    Traffic: on(Traffic, ON_TRAFFIC) | FORECASTERS,
    Seq2SeqTraffic: on(Seq2SeqTraffic, ON_SEQ2SEQ),
    Nodes: on(Nodes, ON_NODES),
    Subgraphs: on(Subgraphs, ON_SUBGRAPHS) | SEARCHES,
    OverlappingSubgraphs: on(OverlappingSubgraphs, {"fed_gcn": {}}),
}
CASES = {
    f"{name}-{problem.TASK['kind']}": (name, problem)
    for problem, methods in TINY.items()
    for name in methods
}
