"""What every federated architecture search shares: training and scoring by codes.

FL-AGCNS, arXiv 2104.04141, Section 3.2. Codes are those of `architecture`, weights
those of a `SuperNet`:

    scores    P(c) = sum_i (N_i / N) P_i(c)              federated performance, Eq. 1
    training  g = sum_i (N_i / N) mean_c grad L_i(c)     gradient of all codes, Eq. 2

Eq. 2 is the paper's unnumbered gradient of one code, summed over a population: ours is
the mean over codes. N_i are client i's scored nodes in Eq. 1 and its training nodes in
Eq. 2. Both sums can be taken under encryption, the EN and DE of these equations. The
bilevel problem of Definition 2, also unnumbered, is solved in turn: a step of the
weights by Eq. 2, then one of the codes by Eq. 1. The released code's Adam (0.02, weight
decay 5e-6) is kept apart for each set of weights: one that no code touched is as if the
step had not been.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import clients, communication, encryption, mesh, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm, Metrics
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.federated import federated_round
from fedjax_graph.core.local import Model, Params
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.models.architecture import (
    ANY_STAGES,
    NUM_LAYERS,
    OPS,
    Choices,
    Fusion,
    Ops,
    Space,
    Stages,
    check_ops,
    check_stages,
)
from fedjax_graph.models.supernet import WIDTH, SuperNet
from fedjax_graph.tasks import subgraphs
from fedjax_graph.tasks.subgraphs import Fitness


@dataclasses.dataclass(frozen=True)
class SearchConfig(Checked):
    """Describes the search space, its weights, and how codes are judged."""

    num_features: int = dataclasses.field(metadata=limits(lower=1))
    num_classes: int = dataclasses.field(metadata=limits(lower=1))
    num_layers: int = limited(NUM_LAYERS, lower=1)
    width: int = limited(WIDTH, lower=1)
    space: Space = "paper"
    fusion: Fusion = "all"
    stages: Stages = ANY_STAGES  # given to all codes; the code of 2022 has input 3
    ops: Ops = OPS  # the convolutions that layers may have
    fitness: Fitness = "loss"
    # by what a code that is scored is normalised: running statistics, mixed over the
    # codes that were trained, or those of its own on the client's graph, as in training
    scored_by: Literal["running", "batch"] = "running"
    # in training, of the shared weights too
    dropout: float = limited(0.0, lower=0, below=1)
    server_optimizer: OptimizerConfig = OptimizerConfig(
        "adam", 0.02, weight_decay=5e-6
    )  # of one set of weights, clipping too
    encryption: Literal["none", "ckks"] = "none"
    clients_per_chunk: int | None = limited(None, lower=1)

    def __post_init__(self) -> None:
        """Checks types, limits, stages and ops; raises `InputError`."""
        super().__post_init__()
        check_stages(self.stages)
        check_ops(self.ops)

    @property
    def choices(self) -> Choices:
        """What codes may have."""
        return Choices(self.stages, self.ops)

    @property
    def supernet(self) -> SuperNet:
        """The network that holds those of all codes."""
        return SuperNet(
            self.num_features,
            self.num_classes,
            self.num_layers,
            self.width,
            self.fusion,
            self.dropout,
            self.space,
            self.ops,
        )


class Weights(NamedTuple):
    """Holds a SuperNet in training, leaves stacked: [1 or L (L + 1) / 2, ...]."""

    model: Model
    opt_state: Any


class SearchState(Protocol):
    """Names what the states of all searches have, which are NamedTuples."""

    @property
    def weights(self) -> Weights:
        """The weights of all codes."""
        ...

    @property
    def code(self) -> jax.Array:
        """The code [L + 2] int32 that the search would end with."""
        ...

    @property
    def num_rounds(self) -> jax.Array:
        """Rounds so far, [] int32."""
        ...


# --- Training ------------------------------------------------------------------------


def init_weights(config: SearchConfig, key: jax.Array) -> Weights:
    """Draws fresh weights, with an optimizer's state for each set of them."""
    model = config.supernet.init(key)
    init = jax.vmap(config.server_optimizer.build().init)
    return Weights(model, jax.tree.map(init, model["params"]))


def touched_step(
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: Any,
    grads: Params,
    touched: Params,
) -> tuple[Params, Any]:
    """Steps those sets of weights alone that are touched.

    Args:
      optimizer: of one set.
      params: leaves [S, ...], S sets of weights.
      opt_state: for each leaf, the state of its S sets.
      grads: like params.
      touched: bool leaves [S, 1, ...].

    Returns:
      The next params and states.
    """

    def step(x, grad, state):
        update, state = optimizer.update(grad, state, x)
        return optax.apply_updates(x, update), state

    def step_sets(x, state, grad, is_touched):
        def keep(new, old):
            return jnp.where(trees.expand_like(is_touched, new), new, old)

        return jax.tree.map(keep, jax.vmap(step)(x, grad, state), (x, state))

    leaves, structure = jax.tree.flatten(params)
    states = structure.flatten_up_to(opt_state)
    others = map(jax.tree.leaves, (grads, touched))
    stepped = [step_sets(*one) for one in zip(leaves, states, *others, strict=True)]
    params, states = zip(*stepped, strict=True)
    return structure.unflatten(params), structure.unflatten(states)


def codes_loss(config: SearchConfig) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of one client's mean training loss over codes.

    Returns:
      (params, batch_stats, client_data, key, codes [C, L + 2]) -> ([], batch_stats
      after the codes, one after another). What is dropped of the features is the same
      for all of them.
    """
    net = config.supernet

    def loss(params, stats, client_data: SubgraphData, key, codes):
        graph = subgraphs.as_graph(client_data)
        input_key, output_key = jax.random.split(key)
        product = net.input_product(params, client_data.features, input_key)

        def one(stats, step):
            code, key = step
            model = {"params": params, "batch_stats": stats}
            outputs, stats = net.apply(
                model, graph, code, client_data.is_real, product, key
            )
            value = subgraphs.cross_entropy(
                outputs, client_data.labels, client_data.is_trained
            )
            return stats, value

        keys = jax.random.split(output_key, len(codes))
        stats, losses = jax.lax.scan(one, mesh.varying(stats), (codes, keys))
        return jnp.mean(losses), stats

    return loss


def gradient_round(
    config: SearchConfig, loss: Callable[..., Any]
) -> Callable[..., tuple[Model, jax.Array, Metrics]]:
    """Factory of the clients' mean gradient of a loss of the SuperNet's weights, Eq. 2.

    Args:
      config: of the search.
      loss: (params, batch_stats, client_data, key, *shared) -> (loss, batch_stats) of
        ONE client.

    Returns:
      (model, data, key, *shared, sent=None) -> (gradient and mean batch_stats, mean
      loss, metrics of the encryption). Where no client has any weight the gradient is 0
      and batch_stats stay.
    """

    def client_gradient(model, client_data, key, *shared):
        take = jax.value_and_grad(loss, has_aux=True)
        (value, stats), grads = take(
            model["params"], model["batch_stats"], client_data, key, *shared
        )
        return {"params": grads, "batch_stats": stats}, value

    mean = encryption.mean(config.encryption)

    def round_(model, data: SubgraphData, key, *shared, sent=None):
        run = federated_round(
            client_gradient,
            lambda stacked, cohort: mean(stacked, cohort, sent),
            has_aux=True,
            is_gradient=True,
            clients_per_chunk=config.clients_per_chunk,
        )
        rows, ids, weights = trees.one_row(model), data.client_ids, data.client_weights
        merged, value, metrics = run(rows, data, ids, weights, key, *shared)
        return jax.tree.map(lambda x: x[0], merged), value, metrics

    return round_


def train_step(
    config: SearchConfig,
) -> Callable[..., tuple[Weights, jax.Array, Metrics]]:
    """Factory of one federated step of the SuperNet's weights on codes.

    Returns:
      (weights, data, key, codes [C, L + 2]) -> (weights, mean loss, metrics of the
      encryption).
    """
    run = gradient_round(config, codes_loss(config))
    optimizer = config.server_optimizer.build()

    def step(weights: Weights, data: SubgraphData, key, codes):
        model, touched = weights.model, config.supernet.touched(weights.model, codes)
        merged, value, metrics = run(model, data, key, codes, sent=touched)
        params, opt_state = touched_step(
            optimizer,
            model["params"],
            weights.opt_state,
            merged["params"],
            touched["params"],
        )
        stats = jax.tree.map(
            jnp.where,
            touched["batch_stats"],
            merged["batch_stats"],
            model["batch_stats"],
        )
        model = {"params": params, "batch_stats": stats}
        return Weights(model, opt_state), value, metrics

    return step


# --- Scores --------------------------------------------------------------------------


class Scorer(NamedTuple):
    """Scores codes by ONE set of weights; larger is better.

    The loss counts negative, the accuracy in percent. What is not finite at some client
    is the worst everywhere.
    """

    federated: Callable[[jax.Array], tuple[jax.Array, jax.Array, Any]]
    """codes [C, L + 2], the same for all clients -> federated scores [C] (Eq. 1), those
    of each client [K, C], metrics of the encryption."""
    own: Callable[[jax.Array], jax.Array]
    """codes [K, C, L + 2], of each client its own -> its own scores [K, C], which Eq. 1
    would sum up."""


def make_scorer(config: SearchConfig, model: Model, data: SubgraphData) -> Scorer:
    """Builds a scorer of codes from a model and the nodes that a split scores."""
    net = config.supernet

    def multiply(client_data, params):
        return net.input_product(params, client_data.features)

    products = clients.map_clients(multiply, config.clients_per_chunk)(
        data, shared=(model["params"],)
    )

    def score(client_data, product, codes, model):
        graph = subgraphs.as_graph(client_data)
        mask = scoring_mask(config, client_data)

        def one(code):
            outputs, _ = net.apply(model, graph, code, mask, product)
            return score_outputs(config, outputs, client_data)

        return jax.lax.map(one, codes)

    def score_shared(client_data, product, model, codes):
        return score(client_data, product, codes, model)

    # A model crosses with the gradients; only codes and scores do here.
    def federated(codes):
        codes = communication.down(codes, len(data.client_ids))
        values = clients.map_clients(score_shared, config.clients_per_chunk)(
            data, products, shared=(model, codes)
        )
        scores, metrics = federated_scores(config, values, data)
        return scores, values, metrics

    def own(codes):
        # One client after another: a switch on codes of several at once would run all
        # its branches.
        return clients.map_clients(score, 1)(data, products, codes, shared=(model,))

    return Scorer(federated, own)


def scoring_mask(config: SearchConfig, client_data: SubgraphData) -> jax.Array | None:
    """What `SuperNet.apply` takes for `mask` where ONE client scores a code."""
    return client_data.is_real if config.scored_by == "batch" else None


def score_outputs(
    config: SearchConfig, outputs: jax.Array, client_data: SubgraphData
) -> jax.Array:
    """Scores ONE client's outputs [N, classes]: [], see `Scorer`."""
    share_right, entropy = subgraphs.scores(outputs, client_data)
    value = -entropy if config.fitness == "loss" else 100 * share_right
    return jnp.where(jnp.isfinite(entropy), value, WORST)


def federated_scores(
    config: SearchConfig, values: jax.Array, data: SubgraphData
) -> tuple[jax.Array, Metrics]:
    """Sums up what the clients send, Eq. 1.

    Args:
      config: of the search.
      values: each client's scores [K, C].
      data: of the clients, with the nodes that were scored.

    Returns:
      [C], `WORST` where some client's is or the mean cannot be computed, and metrics
      of the encryption.
    """
    values = communication.up(values)
    counts = jnp.sum(data.is_scored, axis=1)
    everybody = Cohort(jnp.arange(len(counts)), counts)
    is_worst = (values == WORST).astype(jnp.float32)
    average = encryption.mean(config.encryption)
    merged, metrics = average((values, is_worst), everybody)
    mean, share_worst = (x[0] for x in merged)
    is_known = jnp.isfinite(mean) & (share_worst <= ROUNDING)
    return jnp.where(is_known, mean, WORST), metrics


def sender_weights(data: SubgraphData) -> jax.Array:
    """Returns by what each client sends codes into a population, [K].

    It is the number of its training nodes, or 0 for a client that has no node to score
    codes by: which of them it takes for its best would be chance.
    """
    return jnp.where(jnp.any(data.is_scored > 0, axis=1), data.client_weights, 0)


WORST = -1e4  # below any loss of a usable network, and small enough to be encrypted
ROUNDING = 1e-6  # of a mean that is 0, as encryption leaves it


def searched(
    config: SearchConfig, init, round_, apply: Callable[..., Any] | None = None
) -> FederatedAlgorithm:
    """Factory of a method of a search: its state's best code is what is scored.

    Args:
      config: of the search.
      init, round_: of the method.
      apply: (the state's model, graph, code, mask) -> outputs and statistics; by
        default of a SuperNet.
    """
    apply = apply or config.supernet.apply

    def map_outputs(state: SearchState, data: SubgraphData, reduce):
        def one(client_data, model, code):
            graph = subgraphs.as_graph(client_data)
            mask = scoring_mask(config, client_data)
            outputs, _ = apply(model, graph, code, mask)
            return reduce(outputs, client_data)

        mapped = clients.map_clients(one, clients.eval_clients_per_chunk())
        return mapped(data, shared=(state.weights.model, state.code))

    def evaluate(state, data):
        share_right, entropy = map_outputs(state, data, subgraphs.scores)
        return subgraphs.federated_scores(share_right, entropy, data, config.fitness)

    def predict(state, data):
        return map_outputs(
            state, data, lambda outputs, client_data: jax.nn.softmax(outputs)
        )

    def of_clients(function):
        """Data that have a graph of the clients besides are searched without it."""
        return lambda first, data, *key: function(first, data.by_client(), *key)

    return FederatedAlgorithm(
        of_clients(init),
        of_clients(round_),
        of_clients(evaluate),
        of_clients(predict),
        subgraphs.MONITORS[config.fitness],
    )
