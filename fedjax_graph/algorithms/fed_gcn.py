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
outside neighbours. The exchange stands in `init`, where the ledger finds it and counts
all of a client's rows, padding too, both ways: of 1 hop as many as of 2.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import channel, clients, communication
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData, dense_features
from fedjax_graph.tasks.subgraphs import SubgraphTask, structure_of


@dataclasses.dataclass(frozen=True)
class FedGCNConfig(FedAvgConfig):
    """Configures FedGCN: from how many hops around its nodes a client is told."""

    num_hops: int = limited(2, lower=1, upper=2)


class Known(NamedTuple):
    """What clients know after the exchange, in place of the fields of their data."""

    features: jax.Array  # [K, N, F], z_u
    senders: jax.Array  # [K, E + N] int32, self edges among the edges
    receivers: jax.Array  # [K, E + N] int32, ascending
    edge_weights: jax.Array  # [K, E + N], s_u s_v


class FedGCNState(NamedTuple):
    """Holds what FedAvg trains, and what the one exchange told the clients."""

    server: Any  # of FedAvg
    known: Known


def fed_gcn(config: FedGCNConfig) -> FederatedAlgorithm:
    """Factory of FedGCN on the task of subgraphs with the model `gcn`.

    Raises:
      InputError: if the task is another one; by `init`, if clients do not know of their
        nodes' neighbours outside.
    """
    besides = "fed_gcn's clients send features besides their models"
    channel.refuse(config, besides, "privacy", "secure_aggregation")
    task = config.task
    if not isinstance(task, SubgraphTask) or task.model != "gcn":
        raise InputError("fed_gcn: expected the task subgraphs with the model gcn")
    spread = dataclasses.replace(task, model="spread_gcn")
    averaging = fed_avg(dataclasses.replace(config, task=spread))

    def init(key, data):
        if data.node_ids is None:
            raise InputError(
                "fed_gcn: clients do not know of outside neighbours; make the data "
                "with outside_neighbours"
            )
        known = exchange(data, config.num_hops, config.clients_per_chunk)
        return FedGCNState(averaging.init(key, data._replace(**known._asdict())), known)

    def on(data, state):
        return data._replace(**state.known._asdict())

    def round_(state, data, key):
        server, metrics = averaging.round(state.server, on(data, state), key)
        return state._replace(server=server), metrics

    return FederatedAlgorithm(
        init=init,
        round=round_,
        evaluate=lambda state, data: averaging.evaluate(state.server, on(data, state)),
        predict=lambda state, data: averaging.predict(state.server, on(data, state)),
        monitor=averaging.monitor,
        reads_all_clients=True,
        participation=config.participation,
    )


def exchange(
    data: SubgraphData, num_hops: int, clients_per_chunk: int | None = None
) -> Known:
    """What clients send and get before the first round."""
    mapped = functools.partial(clients.map_clients, clients_per_chunk=clients_per_chunk)

    def contribution(own):  # Eq. 1
        structure = structure_of(own)
        scale = own.is_own * jax.lax.rsqrt(1 + structure.degrees)
        sent = scale[:, None] * dense_features(own)
        return structure.sum(sent[own.senders]) + sent, scale

    sent = communication.up(mapped(contribution)(data.by_client()))
    ids, size = data.node_ids, data.node_ids.size

    def summed(rows):
        """Of all clients' rows of a node, where a client has one."""
        flat = rows.reshape(size, *rows.shape[2:])
        return jax.ops.segment_sum(flat, ids.ravel(), size)[ids]

    is_known = data.is_own if num_hops == 1 else data.is_real
    sums, scales = communication.down(jax.tree.map(summed, sent))
    scales = scales * is_known

    def entries(own, scale):
        nodes = jnp.arange(len(scale), dtype=own.senders.dtype)
        senders = jnp.append(own.senders, nodes)
        receivers = jnp.append(own.receivers, nodes)
        weights = jnp.append(own.edge_weights, jnp.ones_like(scale))
        weights = weights * scale[senders] * scale[receivers]
        order = jnp.argsort(receivers, stable=True)
        return senders[order], receivers[order], weights[order]

    features = scales[:, :, None] * sums  # Eq. 2
    return Known(features, *mapped(entries)(data.by_client(), scales))
