"""FL-Random: architectures drawn at random, each trained from scratch and judged.

The baseline of FL-AGCNS (Wang et al., arXiv 2104.04141, Section 4.1), where each is
trained for 50 epochs. A round is one trial of `codes_per_round` codes, and the best so
far is kept. A trial is judged by its best epoch, as the training of what a search ends
with is; the paper does not say which epoch counts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.algorithms.fl_agcns.code_training import make_begin, make_epoch
from fedjax_graph.algorithms.fl_agcns.search import (
    WORST,
    SearchConfig,
    Weights,
    searched,
)
from fedjax_graph.core import communication, encryption, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm, Metrics
from fedjax_graph.core.checks import limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masks import masked_mean
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.models.architecture import random_codes
from fedjax_graph.models.packed import PackedNet


@dataclasses.dataclass(frozen=True)
class TrialConfig(SearchConfig):
    """Hyper-parameters of the trials."""

    codes_per_round: int = limited(1, lower=1)
    num_epochs: int = limited(50, lower=1)  # of a code's training

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`, for shared weights' fields."""
        super().__post_init__()
        if self.scored_by != "running":
            raise InputError(f"scored_by={self.scored_by}: of shared weights alone")


class Trial(NamedTuple):
    """Holds what became of a code."""

    code: jax.Array  # [L + 2]
    score: jax.Array  # [] federated, of the best epoch
    client_scores: jax.Array  # [K], each the best of its epochs
    weights: Weights  # of a `PackedNet`, after that epoch
    loss: jax.Array  # [] mean over the epochs with a finite one
    cost: Metrics  # of the encryption


class TrialState(NamedTuple):
    """Holds the best code so far, its weights and its score."""

    weights: Weights
    code: jax.Array  # [L + 2] int32, the best so far
    num_rounds: jax.Array  # [] int32
    best_score: jax.Array  # [] of that code


def fl_random(config: TrialConfig) -> FederatedAlgorithm:
    """Factory of random search."""

    def init(key, data):
        del data
        return first_state(config, key)

    def round_(state, data, key):
        code_key, trial_key = jax.random.split(key)
        codes = draw_codes(config, code_key, config.codes_per_round)
        state, _, metrics = try_codes(config, state, data, codes, trial_key)
        return state, metrics

    return searched(config, init, round_, PackedNet(config.supernet).apply)


def first_state(config: TrialConfig, key: jax.Array) -> TrialState:
    """Makes the state before the first trial, with a score that any code exceeds."""
    code_key, weights_key = jax.random.split(key)
    code = draw_codes(config, code_key, 1)[0]
    worst = jnp.float32(-jnp.finfo(jnp.float32).max)
    weights = Weights(PackedNet(config.supernet).init(weights_key, code), None)
    return TrialState(weights, code, jnp.int32(0), worst)


def draw_codes(config: TrialConfig, key: jax.Array, num: int) -> jax.Array:
    """Draws random codes [num, L + 2] of the search space."""
    return random_codes(
        key, num, config.num_layers, space=config.space, choices=config.choices
    )


def try_codes(
    config: TrialConfig, state: Any, data, codes: jax.Array, key: jax.Array
) -> tuple[Any, jax.Array, Metrics]:
    """Takes one round of trials.

    Args:
      config: of the search.
      state: before it, a NamedTuple with the fields of `TrialState`.
      data: training data.
      codes: [C, L + 2].
      key: of the fresh weights and of dropout.

    Returns:
      The next state, scores [C] and metrics.
    """
    run = make_trial(config)
    codes = communication.down(codes, len(data.client_ids))

    def one(best, step):
        weights, code, score = best
        trial = run(data, *step)
        is_better = trial.score > score
        best = trees.select(
            is_better,
            (trial.weights, trial.code, trial.score),
            best,
        )
        return best, (trial.score, trial.client_scores, trial.loss, trial.cost)

    (weights, code, best_score), (scores, by_client, losses, costs) = jax.lax.scan(
        one,
        (state.weights, state.code, state.best_score),
        (codes, jax.random.split(key, len(codes))),
    )
    is_scored = jnp.any(data.is_scored > 0, axis=1)
    metrics = {
        "train_loss": jnp.mean(losses),
        "best_score": best_score,
        "mean_score": jnp.mean(scores, where=scores > WORST),
        "score_spread": jnp.std(by_client[jnp.argmax(scores)], where=is_scored),
    }
    state = state._replace(
        weights=weights,
        code=code,
        num_rounds=state.num_rounds + 1,
        best_score=best_score,
    )
    return state, scores, metrics | encryption.total(costs)


def make_trial(
    config: TrialConfig,
) -> Callable[[SubgraphData, jax.Array, jax.Array], Trial]:
    """Factory of (data, code [L + 2], key) -> Trial."""
    begin = make_begin(config, config.num_epochs)
    epoch = make_epoch(config, config.num_epochs)

    def run(data, code, key):
        init_key, epochs_key = jax.random.split(key)
        training, (losses, costs) = jax.lax.scan(
            lambda training, key: epoch(training, data, code, key),
            begin(data, code, init_key),
            jax.random.split(epochs_key, config.num_epochs),
        )
        return Trial(
            code,
            training.score,
            training.client_scores,
            Weights(training.best_model, None),
            masked_mean(losses, jnp.isfinite(losses)),  # divergence ends no search
            encryption.total(costs),
        )

    return run
