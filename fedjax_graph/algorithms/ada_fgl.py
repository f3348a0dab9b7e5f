"""AdaFGL: FedAvg gives each client knowledge, by which it then trains alone.

Li, Wu, Zhang, Sun, Li, Wang, "AdaFGL: A New Paradigm for Federated Node Classification
with Topology Heterogeneity", ICDE 2024. In its first rounds it is FedAvg. In the later
ones the global model stays as it is and gives P, the probabilities of a client's nodes,
and the client trains the networks of `models.adaptive_propagation`, which has Eqs. 1 to
5. Then Eq. 4 is scored. All clients get the global model once more before the later
rounds, in which nothing crosses. Differences from the paper: what it leaves open is
OpenFGL's (Eq. 3 compares logits with P, Eq. 4 takes a softmax of P; a step a round,
moments last); who has not trained its networks yet is scored by the global model.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import aggregation, channel, clients, communication, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm, Phase, by_phase
from fedjax_graph.core.building import logits_task
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_rows import first_row
from fedjax_graph.core.client_state import plain, refuse_local
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedState, task_round
from fedjax_graph.core.local import optimizer_step
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import with_extra_data
from fedjax_graph.models import adaptive_propagation as adaptive
from fedjax_graph.tasks import subgraphs

ADAM = OptimizerConfig("adam", 0.01, weight_decay=5e-4)


@dataclasses.dataclass(frozen=True)
class AdaFGLConfig(FedAvgConfig):
    """Configures AdaFGL: the rounds of FedAvg, then the networks of each client."""

    federated_rounds: int = limited(50, lower=1)  # of FedAvg
    alpha: float = limited(0.5, lower=0, upper=1)  # of Eq. 2
    num_hops: int = limited(3, lower=0)  # k
    hidden_size: int = limited(64, lower=1)
    dropout: float = limited(0.5, lower=0, below=1)
    personal_optimizer: OptimizerConfig = ADAM


class AdaFGLState(NamedTuple):
    """Holds the global model and each client's own networks."""

    server: FederatedState  # of FedAvg
    models: Any  # {"params", "opt_state", "num_steps"} of networks, leaves [K, ...]
    homophily: jax.Array  # [K], w


def ada_fgl(config: AdaFGLConfig) -> FederatedAlgorithm:
    """Factory of AdaFGL; `InputError` for a task not of subgraphs, or privacy."""
    settings = config.task
    if not isinstance(settings, subgraphs.SubgraphTask):
        raise InputError(f"ada_fgl: the task {settings.kind!r} is not of subgraphs")
    reason = "epsilon does not account for the networks that ada_fgl's clients keep"
    channel.refuse(config, reason, "privacy")
    refuse_local(config, "ada_fgl scores the mean, and then networks of each client")
    (task, common_logits), averaging = logits_task(settings, "ada_fgl"), fed_avg(config)
    sizes = settings.num_classes, config.hidden_size, config.num_hops
    module = adaptive.AdaptivePropagation(*sizes, config.dropout, config.alpha)
    optimizer = config.personal_optimizer.build()

    def beside(models):  # P of the global model beside the data of each client
        return with_extra_data(task, lambda data: task.predict(models, data))

    def init(key, data):
        params_key, halves_key = jax.random.split(jax.random.fold_in(key, 1))
        rows, keys = data.by_client(), clients.client_keys(halves_key, data.client_ids)
        known = jnp.zeros((rows.labels.shape[1], settings.num_classes))
        params = module.init(params_key, *inputs(first_row(rows), known))["params"]
        opt_state = optimizer.init(params)
        one = {"params": params, "opt_state": opt_state, "num_steps": jnp.int32(0)}
        models = aggregation.broadcast(trees.one_row(one), len(keys))

        def measure(own, key):
            args = own.labels, own.is_trained, settings.num_classes, key
            return adaptive.homophily(subgraphs.structure_of(own), *args)

        server = averaging.init(key, data)
        return AdaFGLState(server, models, clients.map_clients(measure)(rows, keys))

    def loss(params, key, own, known):  # Eq. 3
        args = {"params": params}, *inputs(own, known), True
        found = module.apply(*args, rngs={"dropout": key})
        terms = [subgraphs.cross_entropy(x, own.labels, own.is_trained) for x in found]
        return sum(terms) + adaptive.distance(found, known, own.is_real)

    def step(model, client_data, key, *_):
        one = optimizer_step(lambda *args: loss(*args, *client_data), optimizer)
        (params, opt_state), value = one((model["params"], model["opt_state"]), key)
        own = {"params": params, "opt_state": opt_state}
        return own | {"num_steps": model["num_steps"] + 1}, value

    def together(state, data, key):
        server, metrics = averaging.round(state.server, data, key)
        return state._replace(server=server), metrics

    def alone(state, data, key):
        run = task_round(config, beside(state.server.models), step, aggregation.none)
        models, loss = run(state.models, data, task.round_keys(key)[0])
        server = state.server._replace(num_rounds=state.server.num_rounds + 1)
        return state._replace(server=server, models=models), {"train_loss": loss}

    def download(state, data):
        communication.down(plain(state.server.models), len(data.client_ids))

    phases = Phase(1, together), Phase(config.federated_rounds + 1, alone, download)

    def shared_logits(state, data):
        return common_logits(state.server.models, data)

    def own_logits(state, data):
        def one(params, client_data, homophily):
            found = module.apply({"params": params}, *inputs(*client_data))
            return adaptive.mixed(found, client_data[1], homophily)

        client_data = beside(state.server.models).client_data(data)
        mapped = clients.map_clients(one, clients.eval_clients_per_chunk())
        own = mapped(state.models["params"], client_data, state.homophily)
        is_trained = state.models["num_steps"][:, None, None] > 0
        return jnp.where(is_trained, own, shared_logits(state, data))

    def logits(state, data):
        is_late = state.server.num_rounds > config.federated_rounds
        return jax.lax.cond(is_late, own_logits, shared_logits, state, data)

    return FederatedAlgorithm(
        init=init,
        round=by_phase(phases, lambda state: state.server.num_rounds),
        evaluate=lambda state, data: subgraphs.evaluate_outputs(
            logits(state, data), data, settings.fitness
        ),
        predict=lambda state, data: jax.nn.softmax(logits(state, data)),
        monitor=task.monitor,
        reads_all_clients=averaging.reads_all_clients,
        participation=config.participation,
        phases=phases,
    )


def inputs(own: subgraphs.SubgraphData, known: jax.Array) -> tuple[Any, ...]:
    """What the networks of ONE client read of its graph and of P [N, C]."""
    return own.features, subgraphs.structure_of(own), known, own.is_real
