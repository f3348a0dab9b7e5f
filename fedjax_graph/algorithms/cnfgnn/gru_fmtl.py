"""GRU + FMTL, federated multi-task learning, a baseline of CNFGNN's Table 7.

Smith, Chiang, Sanjabi, Talwalkar, "Federated Multi-Task Learning", NeurIPS 2017, with
the graph of the sensors as the clusters: Meng, Rambhatla, Liu, "Cross-Node Federated
Graph Neural Network for Spatio-Temporal Data Modeling", KDD 2021, Eqs. 4 to 6. Each
client has a model of its own, pulled towards its neighbours' as last communicated; a_ij
is the weight of the edge i -> j. To the gradient at w_i the pull adds that of

    laplacian    lambda sum_j a_ij |w_i - w_j|^2
    frobenius    lambda sum_j a_ij |w_i - w_j|, the released code's

The first is 2 lambda sum_j a_ij (w_i - w_j), as of Eq. 5 where a_ij = a_ji. A round is
an exchange of models and the task's local epochs on the client's windows. Differences
from the paper: none known. The defaults are the paper's; the released code's are
`frobenius`, 0.01 and 5 passes, and a fresh optimizer each round and scheduled sampling
are from there.

The ledger follows Eq. 6: each model crosses once for each edge that needs it, from
client to client. That is booked as what arrives, `down`; `up` stays 0.
"""

import dataclasses
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import aggregation, client_state, communication, graphs, trees
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.federated import FederatedState, federated_round, task_algorithm
from fedjax_graph.core.proximal import ROUNDING, pull, squared_norm
from fedjax_graph.core.task import TaskConfig
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask

CANCELLATION = 1e-5  # relative error of a squared distance from inner products


@dataclasses.dataclass(frozen=True)
class GRUFMTLConfig(Checked):
    """Hyper-parameters; defaults: the paper's."""

    task: TaskConfig = TrafficSeq2SeqTask()  # its local epochs are between exchanges
    regulariser: Literal["laplacian", "frobenius"] = "laplacian"
    weight: float = limited(0.1, lower=0)  # lambda
    clients_per_chunk: int | None = limited(None, lower=1)


class Neighbours(NamedTuple):
    """What pulls one client (with a leading client axis where stacked)."""

    weights: jax.Array  # [] sum_j a_ij, or [K] a_ij
    mean: Any  # sum_j a_ij w_j / sum_j a_ij, or None


class Centred(NamedTuple):
    """All models as communicated, about a common centre."""

    models: Any  # pytree of [K, ...], w_j - centre
    squares: jax.Array  # [K], their squared norms
    centre: Any  # pytree of [...]


def gru_fmtl(config: GRUFMTLConfig) -> FederatedAlgorithm:
    """GRU + FMTL on traffic; any task with a graph of its clients will do."""
    communicate, pull_of = REGULARISERS[config.regulariser]
    task = client_state.build_stateless(config.task, "gru_fmtl")

    def update(model, client, key, data, num_rounds, shared):
        own, neighbours = client
        adjust = pull_of(config.weight, neighbours, shared)
        result = task.update(model, own, key, data, adjust, num_rounds)
        return result.model, result.loss

    run = federated_round(
        update, aggregation.none, clients_per_chunk=config.clients_per_chunk
    )

    def init(key: jax.Array, data: Data) -> FederatedState:
        models = trees.one_row(task.init(key))
        models = aggregation.broadcast(models, len(data.client_ids))
        return FederatedState(models, jnp.int32(0))

    def round_(state: FederatedState, data: Data, key: jax.Array):
        communicated = exchange(state.models["params"], graphs.client_graph(data))
        neighbours, shared = communicate(communicated, data)
        update_key, _ = task.round_keys(key)
        models, loss = run(
            state.models,
            (task.client_data(data), neighbours),
            data.client_ids,
            data.client_weights,
            update_key,
            data,
            state.num_rounds,
            shared,
        )
        return FederatedState(models, state.num_rounds + 1), {"train_loss": loss}

    return task_algorithm(task, init, round_)._replace(reads_all_clients=True)


def exchange(models: Any, graph: graphs.Graph) -> Any:
    """Marks the exchange of all models [K, ...]: one crosses for each edge."""
    share = Fraction(len(graph.neighbours), graph.num_nodes)
    return communication.down(models, share)


# --- The regularisers -----------------------------------------------------------------


def neighbours_mean(models: Any, data: Data) -> tuple[Neighbours, None]:
    """Computes each client's weighted mean of its neighbours' models.

    Beside it stands the sum of those weights, 0 for a client alone.
    """
    total = graphs.neighbour_sum(data.graph, jnp.ones(data.graph.num_nodes))
    share = 1 / jnp.where(total > 0, total, 1)

    def mean(x):
        sums = graphs.neighbour_sum(data.graph, x)
        return trees.expand_like(share, x) * sums

    return Neighbours(total, jax.tree.map(mean, models)), None


def laplacian_pull(
    weight: float, neighbours: Neighbours, shared: None
) -> optax.GradientTransformation:
    """2 lambda sum_j a_ij (w_i - w_j), as a pull towards the neighbours' mean."""
    del shared
    centre = {"params": neighbours.mean}
    return pull(2 * weight * neighbours.weights, centre)


def all_models(models: Any, data: Data) -> tuple[Neighbours, Centred]:
    """What `frobenius_pull` needs.

    Its distances change with every step. They come from inner products, which are
    accurate about a centre that is near all models.
    """
    centre = aggregation.client_mean(models, data.client_weights)
    centred = jax.tree.map(jnp.subtract, models, centre)
    squares = jax.vmap(squared_norm)(centred)
    weights = graphs.neighbour_weights(data.graph)
    return Neighbours(weights, None), Centred(centred, squares, centre)


def frobenius_pull(
    weight: float, neighbours: Neighbours, others: Centred
) -> optax.GradientTransformation:
    """lambda sum_j a_ij (w_i - w_j) / |w_i - w_j|, with 0 for equal models."""

    def product(rows, x, axes):
        return jnp.tensordot(rows, x, axes, precision=jax.lax.Precision.HIGHEST)

    def add(updates, params):
        gap = jax.tree.map(jnp.subtract, params, others.centre)
        inner = jax.tree.map(lambda c, x: product(c, x, x.ndim), others.models, gap)
        sizes = squared_norm(gap) + others.squares
        squares = sizes - 2 * sum(jax.tree.leaves(inner))
        rounding = ROUNDING**2 * squared_norm(params) + CANCELLATION * sizes
        is_apart = squares > rounding
        inverse = jax.lax.rsqrt(jnp.where(is_apart, squares, 1))
        factors = weight * neighbours.weights * jnp.where(is_apart, inverse, 0)
        return jax.tree.map(
            lambda g, x, c: g + jnp.sum(factors) * x - product(factors, c, 1),
            updates,
            gap,
            others.models,
        )

    return optax.stateless(add)


REGULARISERS = {  # name -> (models, data -> what pulls), (weight, what pulls -> pull)
    "laplacian": (neighbours_mean, laplacian_pull),
    "frobenius": (all_models, frobenius_pull),
}
