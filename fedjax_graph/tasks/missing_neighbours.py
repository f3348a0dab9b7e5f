"""Generating the neighbours that a client's nodes lost: the loss, and what is found.

Zhang, Yang, Li, Sun, Yiu, "Subgraph Federated Learning with Missing Neighbor
Generation", NeurIPS 2021. Equations are those of `algorithms.fed_sage_plus`.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax

from fedjax_graph.core import clients, communication, mesh
from fedjax_graph.core.task import Task
from fedjax_graph.data.graphs import mending
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.data.graphs.mending import Neighbours
from fedjax_graph.models import neighbour_generator as nets
from fedjax_graph.tasks.subgraphs import as_graph


def generator_loss(
    participation: float,
    task: Task,
    classifier_loss: Callable[..., tuple[jax.Array, Any]],
    net: nets.NeighbourGenerator,
) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of Eq. 4 in the form of `Task.train_loss`, of ((own, hidden), ...).

    Args:
      participation: share of the clients that a round samples, for the bytes sent.
      task: of the subgraphs.
      classifier_loss: `Task.train_loss` of the classifier on a mended graph.
      net: the generator.
    """

    def loss(params, stats, client_data, key, data):  # Eq. 4
        (own, hidden), keys = client_data, jax.random.split(key, 4)
        impaired, num_clients = mending.without(own, hidden), len(data.client_ids)
        size = clients.cohort_size(num_clients, participation)
        real = Fraction(size, mesh.padded_size(size))  # of what devices share
        sent = {name: params["generator"][name] for name in nets.GENERATES}
        to_all = num_clients * real  # one way there, and gradients of all others back
        sent = communication.down(communication.up(sent, to_all), to_all)
        generator = params["generator"] | sent
        z = nets.encode(net, generator, as_graph(impaired), keys[0])
        z = communication.down(communication.up(z, to_all), to_all)
        made = Neighbours(*nets.generate(net, generator, z, keys[3], True))
        lost = mending.hidden_neighbours(own, hidden, net.num_places)
        mended = mending.fill(mending.remaining(impaired, hidden), made)
        total, _ = classifier_loss(params["classifier"], {}, mended, keys[2], data)
        total += mending.distance_of_counts(made, lost, own)  # Eq. 1
        total += mending.distance_to_own(made, lost, own)  # Eq. 2
        args = keys[1], made, lost.counts, own, task.client_data(data)
        elsewhere, num_real = mending.distance_to_others(*args)  # Eq. 3
        return (total + elsewhere) / num_real, stats

    return loss


def find_neighbours(
    net: nets.NeighbourGenerator,
    weights: Any,
    own: SubgraphData,
    hidden: jax.Array,
    key: jax.Array,
) -> Neighbours:
    """Generates what the nodes of ONE client lost: none of those that it hides [N]."""
    generator = weights["generator"]
    z = nets.encode(net, generator, as_graph(mending.without(own, hidden)))
    counts, features = nets.generate(net, generator, z, key)
    return Neighbours(counts * (1 - hidden), features)
