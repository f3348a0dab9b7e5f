"""FedStar: clients share how structure is encoded, and keep what features mean.

Tan, Liu, Long, Jiang, Lu, Zhang, "Federated Learning on Non-IID Graphs via Structural
Knowledge Sharing", AAAI 2023. A client's model is f(x, s; theta_i, w): features x are
read by weights theta_i of its own, encodings of structure s, which `data.graphs.
structure` makes, by w of all:

    theta_i, w_i <- local steps from theta_i, w    (1)
    w <- sum_i (N_i / N) w_i                       (2)

Equation numbers are those of this list. Differences from the paper, which classifies
graphs of several datasets: our clients classify the nodes of one, so nothing is added
up over a graph, see `models.decoupled`; all theta_i start equal. OpenFGL 1.1.0 has it
for graphs only.
"""

import jax

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import client_state
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.models.decoupled import in_structure_encoder


def fed_star(config: FedAvgConfig) -> FederatedAlgorithm:
    """Factory of FedStar on a task whose model encodes structure.

    Raises:
      InputError: if it does not.
    """
    task = client_state.build_task(config.task)
    model = jax.eval_shape(task.init, jax.random.key(0))
    paths, _ = jax.tree_util.tree_flatten_with_path(model)
    if not any(in_structure_encoder(path) for path, _ in paths):
        raise InputError(
            f"fed_star: the model of the task {config.task.kind!r} does not encode "
            "structure; use subgraphs with model='decoupled_gin'"
        )
    return fed_avg(
        config, is_personal=lambda task: lambda path: not in_structure_encoder(path)
    )
