"""FL-Gradient: genes become weights of their options, which gradients learn.

The baseline of FL-AGCNS (Wang et al., arXiv 2104.04141, Section 4.1): DARTS (Liu,
Simonyan, Yang, "DARTS: Differentiable Architecture Search", ICLR 2019) with federated
gradients, on the space of codes. With p = softmax(alpha) of each gene's options (its
Eq. 2) and the network of `relaxation.relaxed`, a round takes `num_steps` times

    w     <- Adam, sum_i (N_i / N) grad_w L_i(w, p), L_i of the training nodes
    alpha <- Adam, sum_i (V_i / V) grad_alpha L'_i(w, p), L'_i of the scored nodes

N_i and V_i are client i's numbers of those nodes; the first sum is Eq. 2 of FL-AGCNS
with all codes at once. This is DARTS of first order (its Eq. 6 with xi = 0). The code
is each gene's likeliest option, absence among them, which DARTS rules out; it is judged
as in other searches, with the shared weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.fl_agcns.search import (
    SearchConfig,
    Weights,
    gradient_round,
    init_weights,
    make_scorer,
    searched,
    touched_step,
)
from fedjax_graph.core import encryption, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm, Metrics
from fedjax_graph.core.checks import limited
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models.architecture import ANYTHING, Choices, is_gene
from fedjax_graph.models.relaxation import relaxed
from fedjax_graph.tasks import subgraphs

FIRST_DEVIATION = 1e-3  # DARTS's, of the first alphas


@dataclasses.dataclass(frozen=True)
class FLGradientConfig(SearchConfig):
    """Hyper-parameters of the search; those of the alphas' optimizer are DARTS's."""

    num_steps: int = limited(5, lower=1)
    architecture_optimizer: OptimizerConfig = OptimizerConfig(
        "adam", 3e-4, momentum=0.5, second_momentum=0.999, weight_decay=1e-3
    )


class Learnt(NamedTuple):
    """Holds what is learnt about architectures."""

    alphas: jax.Array  # [L + 2, 12 L + 1], 0 where a gene has no such value
    opt_state: Any


class RelaxationState(NamedTuple):
    """Holds the weights, the likeliest code and what is learnt about all."""

    weights: Weights
    code: jax.Array  # [L + 2] int32
    num_rounds: jax.Array  # [] int32
    learnt: Learnt


def fl_gradient(config: FLGradientConfig) -> FederatedAlgorithm:
    """Factory of the search by gradients of a relaxation."""
    train, learn = weights_step(config), alphas_step(config)

    def init(key, data):
        del data
        weights_key, alphas_key = jax.random.split(key)
        alphas = first_alphas(alphas_key, config.num_layers, config.choices)
        optimizer = config.architecture_optimizer.build()
        learnt = Learnt(alphas, optimizer.init(alphas))
        weights = init_weights(config, weights_key)
        code = derive(alphas, config.choices)
        return RelaxationState(weights, code, jnp.int32(0), learnt)

    def round_(state, data, key):
        def step(carry, key):
            weights, learnt = carry
            weights, loss, training_cost = train(weights, data, key, learnt.alphas)
            learnt, learning_cost = learn(learnt, data, weights.model)
            costs = encryption.total(training_cost, learning_cost)
            return (weights, learnt), (loss, costs)

        (weights, learnt), (losses, costs) = jax.lax.scan(
            step,
            (state.weights, state.learnt),
            jax.random.split(key, config.num_steps),
        )
        code = derive(learnt.alphas, config.choices)
        scorer = make_scorer(config, weights.model, data)
        (score,), by_client, scoring_cost = scorer.federated(code[None])
        is_scored = jnp.any(data.is_scored > 0, axis=1)
        metrics = {
            "train_loss": jnp.mean(losses),
            "best_score": score,
            "mean_score": score,
            "score_spread": jnp.std(by_client[:, 0], where=is_scored),
        }
        state = RelaxationState(weights, code, state.num_rounds + 1, learnt)
        return state, metrics | encryption.total(costs, scoring_cost)

    return searched(config, init, round_)


# --- Architectures -------------------------------------------------------------------


def first_alphas(
    key: jax.Array, num_layers: int, choices: Choices = ANYTHING
) -> jax.Array:
    """Draws the first alphas [L + 2, 12 L + 1], nearly equal."""
    mask = is_gene(num_layers, choices)
    return jnp.where(mask, FIRST_DEVIATION * jax.random.normal(key, mask.shape), 0)


def masked(alphas: jax.Array, choices: Choices) -> jax.Array:
    """Sets alphas to minus infinity where a gene has no such value."""
    return jnp.where(is_gene(len(alphas) - 2, choices), alphas, -jnp.inf)


def derive(alphas: jax.Array, choices: Choices = ANYTHING) -> jax.Array:
    """Picks the likeliest code [L + 2] int32."""
    return jnp.argmax(masked(alphas, choices), axis=1).astype(jnp.int32)


def probabilities(
    alphas: jax.Array, choices: Choices = ANYTHING
) -> dict[str, jax.Array]:
    """Computes the softmax over each gene's options, as `relaxed` takes it."""
    rows = jax.nn.softmax(masked(alphas, choices))
    first, last = rows[:, 1:6][jnp.array([0, -1])]
    return {"input": first, "layers": rows[1:-1], "output": last}


# --- Steps ---------------------------------------------------------------------------


def weights_step(
    config: FLGradientConfig,
) -> Callable[..., tuple[Weights, jax.Array, Metrics]]:
    """Factory of one federated step of the SuperNet's weights, all of them.

    Returns:
      (weights, data, key, alphas) -> (weights, mean loss, metrics of the encryption).
    """

    def loss(params, stats, client_data, key, alphas):
        return relaxed_loss(
            config, params, stats, client_data, alphas, client_data.is_trained, key
        )

    run = gradient_round(config, loss)
    optimizer = config.server_optimizer.build()

    def step(weights: Weights, data, key, alphas):
        model = weights.model
        merged, value, metrics = run(model, data, key, alphas)
        everything = jax.tree.map(
            lambda x: trees.expand_like(jnp.ones(len(x), bool), x), model["params"]
        )
        params, opt_state = touched_step(
            optimizer,
            model["params"],
            weights.opt_state,
            merged["params"],
            everything,
        )
        return Weights(merged | {"params": params}, opt_state), value, metrics

    return step


def alphas_step(config: FLGradientConfig) -> Callable[..., tuple[Learnt, Metrics]]:
    """Factory of one federated step of the alphas.

    Returns:
      (learnt, data, model) -> (learnt, metrics of the encryption).
    """

    def loss(alphas, unused_stats, client_data, unused_key, model):
        value, _ = relaxed_loss(
            config,
            model["params"],
            model["batch_stats"],
            client_data,
            alphas,
            client_data.is_scored,
        )
        return value, unused_stats

    # The ledger counts the alphas here, and the model in the weights' next step.
    run = gradient_round(config, loss)
    optimizer = config.architecture_optimizer.build()

    def step(learnt: Learnt, data, model):
        counts = jnp.sum(data.is_scored, axis=1)
        alphas = {"params": learnt.alphas, "batch_stats": {}}
        data, unused_key = data._replace(client_weights=counts), jax.random.key(0)
        merged, _, metrics = run(alphas, data, unused_key, model)
        updates, opt_state = optimizer.update(
            merged["params"], learnt.opt_state, learnt.alphas
        )
        return Learnt(optax.apply_updates(learnt.alphas, updates), opt_state), metrics

    return step


def relaxed_loss(
    config: FLGradientConfig, params, stats, client_data, alphas, mask, key=None
) -> tuple[jax.Array, Any]:
    """Computes ONE client's mean loss over the nodes of a mask, and batch_stats.

    Both losses normalise by the statistics of all the client's nodes, as in DARTS. The
    key is that of dropout, None without.
    """
    model = {"params": params, "batch_stats": stats}
    outputs, stats = relaxed(
        config.supernet,
        model,
        subgraphs.as_graph(client_data),
        probabilities(alphas, config.choices),
        client_data.is_real,
        key,
    )
    return subgraphs.cross_entropy(outputs, client_data.labels, mask), stats
