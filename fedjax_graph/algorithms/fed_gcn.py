"""FedGCN: neighbours' features are summed over clients once, before FedAvg begins.

Yao, Jin, Ravi, Joe-Wong, "FedGCN: Convergence-Communication Tradeoffs in Federated
Training of Graph Convolutional Networks", NeurIPS 2023, Algorithm 1. With s_v = (1 +
d_v)^(-1/2), d_v the degree of node v in the whole graph, client k sends, for each node
u that an edge joins to its own nodes V_k or that is one of them (numbers of equations
are ours),

    c_k(u) = sum of s_v x_v over v in V_k that are u or its neighbours     (1)

and s_u of its own. The server returns, of 1 hop for a client's own nodes, of 2 hops
also for their neighbours outside, s_u and

    z_u = s_u sum_k c_k(u)                                                 (2)

so that the first layer of a two-layer GCN reads S X of the whole graph; the second one
reads hidden units of own nodes and, of 2 hops, of those neighbours:

    y_u = s_u sum_v s_v ReLU(z_v W_0 + b_0) W_1 + b_1                      (3)

With 2 hops these are the logits of the GCN on the whole graph. Then FedAvg.

Differences from the paper: the sums are not encrypted; with 1 hop, Eq. 3 has no term of
outside neighbours.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import channel, clients, communication
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.spread_rows import SpreadRows
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData, dense_features
from fedjax_graph.tasks.subgraphs import SubgraphTask, structure_of


@dataclasses.dataclass(frozen=True)
class FedGCNConfig(FedAvgConfig):
    """Configures FedGCN: from how many hops around its nodes a client is told."""

    num_hops: int = limited(2, lower=1, upper=2)


def fed_gcn(config: FedGCNConfig) -> FederatedAlgorithm:
    """Factory of FedGCN on the task of subgraphs with the model `gcn`.

    Raises:
      InputError: if the task is another one; by `exchange`, if clients do not know of
        their nodes' neighbours outside; by the others, if they did not exchange.
    """
    besides = "fed_gcn's clients send features besides their models"
    channel.refuse(config, besides, "privacy", "secure_aggregation")
    task = config.task
    if not isinstance(task, SubgraphTask) or task.model != "gcn":
        raise InputError("fed_gcn: expected the task subgraphs with the model gcn")
    spread = dataclasses.replace(task, model="spread_gcn")
    averaging = fed_avg(dataclasses.replace(config, task=spread))

    def after_exchange(fn):
        def run(first, data, *rest):
            if data.is_own is None or data.node_ids is not None:
                raise InputError(
                    "fed_gcn: clients did not exchange their features; give it what "
                    "`prepared` makes of the data"
                )
            return fn(first, data, *rest)

        return run

    names = ("init", "round", "evaluate", "predict")
    checked = {name: after_exchange(getattr(averaging, name)) for name in names}
    told = functools.partial(
        exchange, num_hops=config.num_hops, clients_per_chunk=config.clients_per_chunk
    )
    return averaging._replace(exchange=told, **checked)


def exchange(
    data: SubgraphData, num_hops: int, clients_per_chunk: int | None = None
) -> dict[str, Any]:
    """What clients know after they sent and got, of K nodes' rows and edges.

    Returns:
      `features` z_u [K, N, F]; with self edges among them `senders`, ascending
      `receivers` and `edge_weights` s_u s_v, [K, E + N]; and no `node_ids` any more.

    Raises:
      InputError: if they do not know of neighbours outside, or features are not dense.
    """
    if data.node_ids is None:
        raise InputError(
            "fed_gcn: clients do not know of outside neighbours; make the data with "
            "outside_neighbours"
        )
    mapped = functools.partial(clients.map_clients, clients_per_chunk=clients_per_chunk)

    def contribution(own):  # Eq. 1
        structure = structure_of(own)
        scale = own.is_own * jax.lax.rsqrt(1 + structure.degrees)
        sent = scale[:, None] * dense_features(own)
        return structure.sum(sent[own.senders]) + sent, scale

    sums, scales = mapped(contribution)(data.by_client())
    sent = (
        communication.up(sums, communication.share(data.is_real)),
        communication.up(scales, communication.share(data.is_own)),
    )
    ids, size = data.node_ids, data.node_ids.size

    def summed(rows):
        """Of all clients' rows of a node, where a client has one."""
        flat = rows.reshape(size, *rows.shape[2:])
        return jax.ops.segment_sum(flat, ids.ravel(), size)[ids]

    is_known = data.is_own if num_hops == 1 else data.is_real
    got = jax.tree.map(summed, sent)
    sums, scales = communication.down(got, communication.share(is_known))
    scales = scales * is_known

    def entries(own, scale):
        nodes = jnp.arange(len(scale), dtype=own.senders.dtype)
        senders = jnp.append(own.senders, nodes)
        receivers = jnp.append(own.receivers, nodes)
        weights = jnp.append(own.edge_weights, jnp.ones_like(scale))
        weights = weights * scale[senders] * scale[receivers]
        order = jnp.argsort(receivers, stable=True)
        return senders[order], receivers[order], weights[order]

    senders, receivers, weights = mapped(entries)(data.by_client(), scales)
    return {
        "features": SpreadRows(scales[:, :, None] * sums),  # Eq. 2
        "senders": senders,
        "receivers": receivers,
        "edge_weights": weights,
        "node_ids": None,
    }
