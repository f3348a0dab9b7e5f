"""SFL: personalised models from a graph convolution over the clients' parameters.

Chen, Long, Wu, Zhou, Jiang, "Personalized Federated Learning With Graph", IJCAI 2022,
Algorithm 1, which approaches Eq. 3:

    min over v_1 ... v_K of   sum_i F_i(v_i) + lambda [R(v_i, w) + R(v_i, u_i)]

Written in V, the clients' models stacked to [K, P]:

    client (lines 5-9)     v_i: local steps on F_i(v) + lambda [R(v, w) + R(v, u_i)]
    server (lines 11-12)   u = alpha A^m V + (1 - alpha) V, A row-normalised
    read-out (line 13)     w = mean of the u_i
    structure (line 15)    SFL*: A <- (1 - beta) A + beta A_learnt

lambda = 0 in the first round (line 3). The state holds u, of which w is read out at the
start of a round. Lines 7 and 8 go on from v_i, the client's own model: `start="own"`,
under which a client keeps its v_i beside u_i. By default clients start from w, as in
the code released for images. The paper does not say what is scored: that code scores
u_i, Eq. 3 minimises over the v_i, which `score="local"` scores. What else the paper
leaves open is that code's: R is the Euclidean distance, m = 3, alpha = 1, beta = 0.05.

The paper prints no lambda. That code has 0.3, added to each example's loss and so
beside the mean loss here, but of detached vectors, which have no gradient: lambda is 0
by default. Under `start="own"` the pulls are all that a client's training gets from the
others. Differences from that code: a node takes from its senders, A_ji of Eq. 3; a
round with part of the clients mixes those alone, w being the mean of all u_i still, so
that it moves less than FedAvg's model. What SFL* learns mixes the same round, and is
blended with the given A, in the paper with the last one and for the next round. The
ledger counts u_i as sent down also where it does not pull: it is the client's model.

`sfl_per` and `sfl_lg` (Table 4) keep the head, or all but the head, personal.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.lg_fed_avg import is_representation
from fedjax_graph.algorithms.sfl import structure_learning
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core import aggregation, channel, communication, graphs, trees
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_state import (
    LOCAL,
    LocalModelTask,
    Score,
    aggregated,
    build_task,
    or_kept,
)
from fedjax_graph.core.clients import cohort_size
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import (
    FederatedConfig,
    FederatedState,
    federated,
    write_back,
)
from fedjax_graph.core.local import Model
from fedjax_graph.core.proximal import Distance, pull
from fedjax_graph.core.task import Task
from fedjax_graph.core.trees import IsPersonal, no_leaf


@dataclasses.dataclass(frozen=True)
class SFLConfig(FederatedConfig):
    """Configures SFL: the graph convolution, the pulls, and where clients start."""

    propagation_steps: int = limited(3, lower=0)  # m
    alpha: float = limited(1.0, lower=0, upper=1)
    pull_weight: float = limited(0.0, lower=0)  # lambda, of each of the two pulls
    pull_distance: Distance = "l2"  # R
    start: Literal["global", "personal", "own"] = "global"  # from w, u_i or v_i
    score: Score = "aggregated"  # u_i, or v_i after line 8


@dataclasses.dataclass(frozen=True)
class SFLStarConfig(SFLConfig):
    """Configures SFL*: SFL along a graph that is in part learnt."""

    client_graph: Literal["given", "none"] = "given"
    """none: A_learnt alone, which has no self edges, as in the released code."""
    learnt_share: float = limited(0.05, lower=0, upper=1)  # beta
    structure: StructureConfig = StructureConfig()


class SFLStarState(NamedTuple):
    """Holds the clients' models, and the graph learnt from them."""

    models: Any  # u, leaves [K, ...]
    num_rounds: jax.Array  # [] int32
    learnt_adjacency: jax.Array  # A_learnt [K, K], a row as its client last took part


def sfl(config: SFLConfig) -> FederatedAlgorithm:
    """Factory of SFL on any task, with the graph of the data."""
    return _sfl(config, convolution(config))


def sfl_per(config: SFLConfig) -> FederatedAlgorithm:
    """Factory of SFL + FedPer: a graph convolution of the base, a personal head."""
    return _sfl(config, convolution(config), lambda task: task.is_head)


def sfl_lg(config: SFLConfig) -> FederatedAlgorithm:
    """Factory of SFL + LG-FedAvg: personal base, a graph convolution of the head."""
    return _sfl(config, convolution(config), is_representation)


def convolution(config: SFLConfig) -> Callable[..., aggregation.Aggregator]:
    """Factory of the server's half along the graph of the data (lines 11 and 12)."""

    def convolve(state, data, key):
        del state, key
        adjacency = graphs.client_adjacency(data)
        return aggregation.graph_convolution(
            adjacency, config.propagation_steps, config.alpha
        )

    return convolve


def _sfl(
    config: SFLConfig,
    aggregator: Callable[..., aggregation.Aggregator],
    is_personal: Callable[[Task], IsPersonal] = lambda task: no_leaf,
    **settings: Any,
) -> FederatedAlgorithm:
    """What SFL and its kin share: the clients' half, and which models they keep."""
    channel.check_aggregator(config)
    if config.start == "own":  # noise promises something of the way from a known start
        reason = "under start='own' clients begin at models that no other knows"
        instead = "use start='global' or 'personal'"
        channel.refuse(config, reason, "privacy", instead=instead)
        if config.score == "local" and not config.pull_weight:
            raise InputError(
                "start='own' with score='local' and pull_weight=0: no client would "
                "learn from another, as in `local`; give pull_weight a value"
            )
    if config.start == "own":
        keeping = LocalModelTask(config.task, config.score)
        config = dataclasses.replace(config, task=keeping)

    personal = or_kept(is_personal(build_task(config.task)))
    algorithm = federated(
        config,
        aggregator,
        update=pulled_update(config, personal),
        shared=read_out(config, personal),
        client_start=functools.partial(started, config),
        is_personal=is_personal,
        **settings,
    )
    return algorithm._replace(reads_all_clients=True)  # w is the mean of all u_i


def sfl_star(config: SFLStarConfig) -> FederatedAlgorithm:
    """Factory of SFL*, which learns the graph."""

    def learn_and_convolve(state, data, key):
        def aggregate(stacked, cohort):
            is_whole = config.structure.compares == "state"
            learnt = structure_learning.learn(
                config.structure,
                stacked if is_whole else stacked["params"],
                jnp.asarray(data.client_ids)[cohort.indices],
                cohort.weights > 0,
                key,
            )
            adjacency = learnt
            if config.client_graph == "given":
                given = graphs.client_adjacency(data)
                given = aggregation.cohort_adjacency(given, cohort)
                adjacency = (1 - config.learnt_share) * graphs.row_normalise(given)
                adjacency = adjacency + config.learnt_share * learnt
            everybody = cohort._replace(indices=jnp.arange(len(cohort.indices)))
            convolve = aggregation.graph_convolution(
                adjacency, config.propagation_steps, config.alpha
            )
            num_clients = len(data.client_ids)
            rows = jnp.zeros((len(cohort.indices), num_clients))
            rows = rows.at[:, cohort.indices].set(learnt)
            rows = write_back(state.learnt_adjacency, rows, cohort, num_clients)
            return convolve(stacked, everybody), {"learnt_adjacency": rows}

        return aggregate

    return _sfl(
        config,
        learn_and_convolve,
        first_state=lambda state, data: SFLStarState(
            state.models, state.num_rounds, jnp.eye(len(data.client_ids))
        ),
    )


# --- A round -------------------------------------------------------------------------


def read_out(
    config: SFLConfig, is_personal: IsPersonal
) -> Callable[[FederatedState, Data], tuple[Any, jax.Array]]:
    """Factory of (state, data) -> (w, lambda of this round)."""

    def read(state: FederatedState, data):
        w = aggregation.client_mean(aggregated(state.models), data.client_weights)
        if config.start == "global" or config.pull_weight:  # it crosses beside u_i
            crossing, personal = trees.partition(w, is_personal)
            count = cohort_size(len(data.client_ids), config.participation)
            w = trees.combine(communication.down(crossing, count), personal)
        return w, jnp.where(state.num_rounds > 0, config.pull_weight, 0.0)

    return read


def started(config: SFLConfig, models: Any, w: Any, weight: jax.Array) -> Any:
    """The models from which clients start (line 5), but for what is personal."""
    del weight
    if config.start == "global":
        return models | trees.one_row(w)
    return models | models[LOCAL] if config.start == "own" else models


def pulled_update(
    config: SFLConfig, is_personal: IsPersonal
) -> Callable[..., tuple[Model, jax.Array]]:
    """Factory of the client's half (lines 5 to 9)."""

    def update(task: Task, model, client_data, key, data, num_rounds, w, weight):
        u = aggregated(model)
        start = u | model[LOCAL] if config.start == "own" else u
        if config.start == "global":
            _, personal = trees.partition(u, is_personal)
            start = trees.combine(trees.partition(w, is_personal)[0], personal)
        pulls = [
            pull(weight, centre, config.pull_distance, is_personal) for centre in (w, u)
        ]
        adjust = optax.chain(*pulls) if config.pull_weight else None
        result = task.update(start, client_data, key, data, adjust, num_rounds)
        return result.model, result.loss

    return update
