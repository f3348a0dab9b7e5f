"""One architecture trained from scratch, epoch by epoch, and scored after each.

An epoch is a federated step by Eq. 2 of FL-AGCNS (arXiv 2104.04141) on the code alone,
and its score is that of Eq. 1. A training is judged by its best epoch. A search trains
many codes so in one program (`trainings`), FL-Random and FL-RL code after code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.fl_agcns.search import (
    SearchConfig,
    federated_scores,
    gradient_round,
    score_outputs,
)
from fedjax_graph.core import clients, encryption, faults, trees
from fedjax_graph.core.server_optimizer import step_if
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.models.packed import PackedNet
from fedjax_graph.tasks import subgraphs

NEVER = -jnp.inf  # the score of a training that was not


class Training(NamedTuple):
    """Holds a training under way."""

    model: Any
    opt_state: Any
    best_model: Any  # at the epoch with the best federated score
    score: jax.Array  # [] that score
    client_scores: jax.Array  # [K], each the best of its epochs


def build_optimizer(
    config: SearchConfig, num_epochs: int | None
) -> optax.GradientTransformation:
    """Builds a training's optimizer, whose schedule spans its own steps or all epochs.

    Raises:
      InputError: if it has a schedule, and nobody says how long.
    """
    has_own = config.server_optimizer.num_steps is not None
    return config.server_optimizer.build(None if has_own else num_epochs)


def make_epoch(
    config: SearchConfig, num_epochs: int | None = None
) -> Callable[..., tuple[Training, Any]]:
    """Factory of one federated epoch of a code's training, and its scores.

    Args:
      config: of the search.
      num_epochs: of a training, where the optimizer's schedule spans it.

    Returns:
      (training, data, code, key) -> (training, (mean loss, metrics of the encryption)).
    """
    net = PackedNet(config.supernet)
    optimizer = build_optimizer(config, num_epochs)

    def loss(params, stats, client_data, key, code):
        model = {"params": params, "batch_stats": stats}
        graph = subgraphs.as_graph(client_data)
        outputs, stats = net.apply(model, graph, code, client_data.is_real, key)
        labels, mask = client_data.labels, client_data.is_trained
        return subgraphs.cross_entropy(outputs, labels, mask), stats

    def score(client_data, model, code):
        outputs, _ = net.apply(model, subgraphs.as_graph(client_data), code)
        return score_outputs(config, outputs, client_data)

    gradient = gradient_round(config, loss)
    score_all = clients.map_clients(score, config.clients_per_chunk)

    def epoch(training: Training, data: SubgraphData, code, key):
        with faults.trial():
            merged, value, cost = gradient(training.model, data, key, code)
        before = training.opt_state, training.model["params"]
        params, opt_state = step_if(value, optimizer, merged["params"], *before)
        model = merged | {"params": params}
        own = score_all(data, shared=(model, code))
        (federated,), scoring_cost = federated_scores(config, own[:, None], data)
        is_better = federated > training.score
        best_model = trees.select(is_better, model, training.best_model)
        training = Training(
            model,
            opt_state,
            best_model,
            jnp.where(is_better, federated, training.score),
            jnp.maximum(own, training.client_scores),
        )
        return training, (value, encryption.total(cost, scoring_cost))

    return epoch


def make_begin(
    config: SearchConfig, num_epochs: int | None = None
) -> Callable[..., Training]:
    """Factory of (data, code, key) -> a training before its first epoch."""
    net = PackedNet(config.supernet)
    optimizer = build_optimizer(config, num_epochs)

    def begin(data: SubgraphData, code, key):
        model = net.init(key, code)
        opt_state = optimizer.init(model["params"])
        own = jnp.full(len(data.client_ids), NEVER)
        return Training(model, opt_state, model, jnp.float32(NEVER), own)

    return begin
