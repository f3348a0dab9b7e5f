"""GraphFL: the server learns an initialisation from which clients adapt quickly.

Wang, Li, Li, Chen, "GraphFL: A Federated Learning Framework for Semi-Supervised Node
Classification on Graphs", arXiv 2012.04187, ICDM 2022. Equation numbers are those of
the paper.

A round for non-IID clients has two stages, with the same clients in both:

    theta_i = theta - alpha grad L_S(theta)            inner steps       (5)
    theta^ = theta - beta grad mean_i L_Q(theta_i)     outer step        (6)
    theta^_i = theta^ - alpha grad L_S(theta^)         fine-tuning       (7)
    theta <- mean_i theta^_i                           FedAvg            (8)

For new label domains the first stage stands alone: Eq. 13's mean of the clients'
theta - beta grad L_i(theta) (10) is theta minus beta times the mean gradient, Eq. 6.

Differences from the paper: it prints the sum over clients in Eq. 6, and the mean in
Eqs. 9 and 13; ours is the mean in both, over clients that have labelled nodes (in Eq. 6
also some to be judged by), each of which counts alike on the task of nodes, and on that
of subgraphs by its number of training nodes. It prints neither alpha nor
beta; BUILD_NOTES.md says how ours were chosen. The released code's first-order
gradients, and its Adam with weight decay, are options: `server_optimizer`, which as
there starts anew each round.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_graph.core import aggregation, client_state, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import (
    FederatedConfig,
    FederatedState,
    plain_update,
    task_algorithm,
    task_round,
)
from fedjax_graph.core.meta_learning import meta_gradient
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.server_optimizer import step_if

ROOTED = ("adam", "adamw")  # divide by the root of moments that start at 0


@dataclasses.dataclass(frozen=True)
class GraphFLConfig(FederatedConfig):
    """The task holds alpha and the number of inner steps: they are its local steps."""

    server_optimizer: OptimizerConfig = OptimizerConfig("sgd", 0.1)  # beta, of Eq. 6
    first_order: bool = False
    # whether a round has its second stage, which alone updates running statistics
    fine_tune: bool = True


def check_optimizer(config: GraphFLConfig) -> None:
    """Checks that the inner steps have a derivative, and the outer one its own rate.

    Raises:
      InputError: if inner steps that are differentiated divide by the root of what may
        be 0, or the outer step, which begins anew each round, has a schedule.
    """
    outer = config.server_optimizer
    if outer.schedule != "constant":
        raise InputError(
            f"graphfl: server_optimizer schedule={outer.schedule}: its outer step "
            "begins anew each round; use constant"
        )
    name = getattr(getattr(config.task, "optimizer", None), "name", None)
    if name in ROOTED and not config.first_order:
        raise InputError(
            f"optimizer={name}: its root has no derivative where a gradient is 0, "
            "which GraphFL needs; set first_order, or take another such as sgd"
        )


def graphfl(config: GraphFLConfig) -> FederatedAlgorithm:
    """Factory of GraphFL on any task with query sets, as MAML over clients.

    Raises:
      InputError: if the task has none, or see `check_optimizer`.
    """
    task = client_state.build_stateless(config.task, "graphfl")
    check_optimizer(config)
    client_query_loss = task.query_loss
    if client_query_loss is None:
        raise InputError(f"graphfl: the task {config.task.kind} has no query sets")
    outer = config.server_optimizer.build()  # of the outer step

    def meta_update(model, client_data, key, data, num_rounds):
        """One client's meta-gradient, in the shape of a model."""
        inner_key, query_key = jax.random.split(key)

        def adapt(params):  # Eqs. 5 and 11
            start = model | {"params": params}
            adapted = task.update(start, client_data, inner_key, data, None, num_rounds)
            return adapted.model["params"]

        def query_loss(params):
            return client_query_loss(params, client_data, query_key, data)

        gradient_of = meta_gradient(adapt, query_loss, config.first_order)
        loss, gradient = gradient_of(model["params"])
        return model | {"params": gradient}, loss

    def fine_tuning(model, client_data, key, data, num_rounds):
        key = jax.random.fold_in(key, 1)
        return plain_update(task, model, client_data, key, data, num_rounds)

    def with_query(data):
        """Cohort -> with weight 0 for clients without query sets."""

        def counted(cohort):
            if task.has_query is None:
                return cohort
            has_query = task.has_query(data)[cohort.indices]
            return cohort._replace(weights=cohort.weights * has_query)

        return counted

    fine_tuning_round = task_round(config, task, fine_tuning, aggregation.weighted_mean)

    def init(key, data):
        del data
        models = trees.one_row(task.init(key))
        return FederatedState(models, jnp.int32(0))

    def round_(state, data, key):
        params = state.models["params"]
        meta_round = task_round(
            config,
            task,
            meta_update,
            aggregation.weighted_mean,
            is_gradient=True,
            reweigh=with_query(data),
        )
        gradient, loss = meta_round(  # Eqs. 6 and 13
            state.models, data, key, state.num_rounds
        )
        start = outer.init(params)
        params, _ = step_if(loss, outer, gradient["params"], start, params)
        models = state.models | {"params": params}
        if config.fine_tune:
            # Eqs. 7 and 8, with the same cohort.
            models, _ = fine_tuning_round(models, data, key, state.num_rounds)
        return FederatedState(models, state.num_rounds + 1), {"train_loss": loss}

    return task_algorithm(task, init, round_, config)
