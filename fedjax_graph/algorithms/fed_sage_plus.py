"""FedSage+: clients mend their graphs with generated neighbours, and then average.

Zhang, Yang, Li, Sun, Yiu, "Subgraph Federated Learning with Missing Neighbor
Generation", NeurIPS 2021. A client hides nodes of its graph, and has a generator make
of each other node's encoding z_v how many neighbours it lost, n~_v, and their features
x~_v; it lost n_v, of features x_u. With L_c the cross-entropy on the graph with what is
generated in place of the hidden:

    L_n = smooth L1(n~_v, n_v)                                      (1)
    L_f = mean_v mean_p min_u |x~_vp - x_u|^2 / F                   (2)
    L_j = Eq. 2, u the neighbours of some node of client j          (3)
    L = (L_n + L_f + L_c + sum_j L_j) / K                           (4)

F is the number of features; a place p counts 0 where p >= n~_v or n_v = 0.

In the first `generator_rounds` rounds clients minimise Eq. 4; then each adds generated
neighbours to its whole graph, on which classifiers are trained and averaged. Numbers
are those of this list, v training nodes; half of the validation nodes are hidden.

For Eq. 3 clients send their generators and encodings to all others in each step, and
get gradients of both back: so the ledger counts the rounds of generators, padding too.
Who is not drawn for a round answers as well, in OpenFGL nobody but who is.
Differences from the paper: the task's classifier reads all neighbours; who was in no
round of generators mends with its first one. In OpenFGL 1.1.0 edges lead from nodes to
generated neighbours only, which so change nothing; classifiers begin as the mean of
those of Eq. 4, and count alike; it scores as `score="local"` does.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import (
    aggregation,
    channel,
    client_rows,
    client_state,
    clients,
    trees,
)
from fedjax_graph.core.algorithm import FederatedAlgorithm, Phase, by_phase
from fedjax_graph.core.checks import limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedState, task_round
from fedjax_graph.core.task import with_extra_data
from fedjax_graph.data.graphs import mending
from fedjax_graph.models import neighbour_generator as nets
from fedjax_graph.models.neighbour_generator import GeneratorConfig
from fedjax_graph.tasks.missing_neighbours import find_neighbours, generator_loss
from fedjax_graph.tasks.subgraphs import SubgraphTask


@dataclasses.dataclass(frozen=True)
class FedSagePlusConfig(FedAvgConfig):
    """Configures FedSage+: its two phases, and the generator of neighbours."""

    generator_rounds: int = limited(10, lower=0)
    hidden_share: float = limited(0.5, lower=0, upper=1)  # of the validation nodes
    generator: GeneratorConfig = GeneratorConfig()


class FedSagePlusState(NamedTuple):
    """Holds the global classifier, and what clients keep."""

    server: FederatedState  # of FedAvg
    memories: Any  # {"models": of Eq. 4, "hidden", "found"}, leaves [K, ...]


def fed_sage_plus(config: FedSagePlusConfig) -> FederatedAlgorithm:
    """Factory of FedSage+ on the task `subgraphs`; `InputError` for another."""
    sent = "fed_sage_plus's clients send generators and encodings besides"
    channel.refuse(config, sent, "privacy", "secure_aggregation")
    task, averaging = client_state.build_task(config.task), fed_avg(config)
    train_loss, update_by = task.train_loss, task.update_by
    if not isinstance(config.task, SubgraphTask) or not (train_loss and update_by):
        raise InputError(f"fed_sage_plus: task {config.task.kind!r} has no subgraphs")
    net = config.generator.build(config.task.num_features, config.task.dropout)
    loss = generator_loss(config.participation, task, train_loss, net)
    generator_update = update_by(loss)

    def update(model, client_data, key, data, num_rounds):
        result = generator_update(model, client_data, key, data, None, num_rounds)
        return result.model, result.loss

    def init(key, data):
        keys, ids = jax.random.split(key, 3), data.client_ids
        server, draws = averaging.init(keys[0], data), clients.client_keys(keys[2], ids)
        classifier = client_rows.first_row(server.models)["params"]
        params = {"generator": nets.init(net, keys[1]), "classifier": classifier}
        model = {"params": params, "batch_stats": {}}
        model |= client_state.first_opt_state(config.task, params)
        draw = clients.map_clients(mending.draw_hidden)
        memories = {
            "models": aggregation.broadcast(trees.one_row(model), len(ids)),
            "hidden": draw(draws, data.is_scored, shared=(config.hidden_share,)),
            "found": mending.nothing_found(data, net.num_places),
        }
        return FedSagePlusState(server, memories)

    def generate(state, data, key):
        train_key, other_key = task.round_keys(key)
        own, num_rounds = state.memories, state.server.num_rounds
        view = with_extra_data(task, lambda data: own["hidden"])
        run = task_round(config, view, update, aggregation.none)
        whole = client_rows.whole(data)  # for Eq. 3
        models, loss = run(own["models"], whole, train_key, num_rounds)
        keys = clients.client_keys(other_key, data.client_ids)
        find = functools.partial(find_neighbours, net)
        args = models["params"], task.client_data(data), own["hidden"], keys
        found = jax.lax.cond(
            num_rounds == config.generator_rounds - 1,
            lambda: clients.map_clients(find, config.clients_per_chunk)(*args),
            lambda: own["found"],
        )
        server = state.server._replace(num_rounds=num_rounds + 1)
        after = own | {"models": models, "found": found}
        return FedSagePlusState(server, after), {"train_loss": loss}

    def mended(state, data):
        own, found = task.client_data(data), state.memories["found"]
        fill = functools.partial(mending.fill_structure, num_places=net.num_places)
        fill = clients.map_clients(fill, clients.eval_clients_per_chunk())
        filled = fill(own._replace(features=None), found.counts)
        whole = filled._replace(features=own.features)
        return state.server, mending.fill_features(whole, found)

    def classify(state, data, key):
        server, metrics = averaging.round(*mended(state, data), key)
        return state._replace(server=server), metrics

    phases = Phase(1, generate), Phase(config.generator_rounds + 1, classify)
    phases = phases if config.generator_rounds else phases[1:]

    return FederatedAlgorithm(
        init=init,
        round=by_phase(phases, lambda state: state.server.num_rounds),
        evaluate=lambda state, data: averaging.evaluate(*mended(state, data)),
        predict=lambda s, d: averaging.predict(*mended(s, d))[:, : d.labels.shape[1]],
        monitor=task.monitor,
        reads_all_clients=True,
        participation=config.participation,
        phases=phases,
        kept=lambda state: FedSagePlusState(
            averaging.kept(state.server), {"found": state.memories["found"]}
        ),
    )
