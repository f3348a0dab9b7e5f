"""Federated rounds: local updates on a cohort, their aggregation, and whole methods.

`federated_round` is one round of any model; `federated` makes a method of a task from
what tells methods apart: where the clients start, what pulls them, how their models
are merged and which leaves stay personal.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import (
    aggregation,
    channel,
    client_rows,
    client_state,
    clients,
    communication,
    faults,
    local,
    mesh,
    misbehaviour,
    trees,
)
from fedjax_graph.core.aggregation import Aggregator
from fedjax_graph.core.algorithm import NO_LOSS, Data, FederatedAlgorithm
from fedjax_graph.core.channel import DIRECT, ChannelConfig
from fedjax_graph.core.checks import limited
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import HONEST, Misbehaviour
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.server_optimizer import server_step
from fedjax_graph.core.task import Task, TaskConfig
from fedjax_graph.core.trees import IsPersonal, every_leaf, no_leaf


def cohort_update(
    update: Callable[..., tuple[Any, jax.Array]],
    *,
    is_personal: IsPersonal = no_leaf,
    participation: float = 1.0,
    clients_per_chunk: int | None = None,
    misbehaviour_config: Misbehaviour = HONEST,
    reweigh: Callable[[Cohort], Cohort] = lambda cohort: cohort,
) -> Callable[..., tuple[Any, jax.Array, Cohort]]:
    """Factory of the clients' half of a round.

    Args:
      update: (model, client data, key, *shared) -> (model, loss), of ONE client.
      is_personal: which leaves of a model never leave their client.
      participation: share of the clients that take part.
      clients_per_chunk: see `clients.map_clients`.
      misbehaviour_config: who drops out, and who does a part of its local steps.
      reweigh: cohort -> the cohort with the weights of the mean loss.

    Returns:
      (models [1 or K, ...], client data [K, ...], client_ids [K], weights [K], key,
      *shared) -> (updated models [C, ...], mean loss of the cohort, `NO_LOSS` where all
      its weights are 0, Cohort). Of a client with weight 0 the personal leaves are what
      they were, and all others 0.

    Raises:
      InputError: by the function, if its arguments are not of as many clients.
    """

    def run(models, client_data, client_ids, weights, key, *shared):
        cohort_key, update_key = jax.random.split(key)
        num_clients = client_ids.shape[0]
        _check_clients(num_clients, models, client_data)
        cohort = clients.sample_cohort(cohort_key, client_ids, weights, participation)
        models = _cross(
            _send_down(num_clients, len(cohort.indices)), models, is_personal
        )
        own = jax.tree.map(lambda x: x if len(x) == num_clients else None, models)
        common = jax.tree.map(lambda x: None if len(x) == num_clients else x[0], models)
        # of all clients no copy is made, which may fill the memory
        if len(cohort.indices) < num_clients:
            own, client_data = client_rows.take((own, client_data), cohort.indices)

        keys = clients.client_keys(update_key, client_ids[cohort.indices])
        cohort, work = misbehaviour.attendance(misbehaviour_config, cohort, keys)

        def update_one(own, client_data, key, weight, work, common, *shared):
            model = trees.combine(own, common)
            with local.share_of_steps(work):
                updated, loss = update(model, client_data, key, *shared)
            finite = faults.is_finite((updated, loss))
            is_kept = faults.finite_weight(weight, finite) > 0
            updated = _kept(is_kept, updated, trees.partition(model, is_personal)[1])
            return updated, jnp.where(is_kept, loss, 0), finite

        map_ = clients.map_clients(update_one, clients_per_chunk, in_place=True)
        updated, losses, finite = map_(
            own, client_data, keys, cohort.weights, work, shared=(common, *shared)
        )
        cohort = faults.finite_cohort(cohort, client_ids, finite)
        judged = reweigh(cohort).weights
        loss, total = jnp.sum(judged * losses), jnp.sum(judged)
        loss = jnp.where(total > 0, loss / jnp.where(total > 0, total, 1), NO_LOSS)
        return _cross(communication.up, updated, is_personal), loss, cohort

    return run


def _kept(is_kept: jax.Array, updated: Any, before: Any) -> Any:
    """A client's update by a flag [], or what stood there before, or 0.

    What came out of padding may not be finite, so a product with 0 would not do.
    """
    old = trees.by_path(before)

    def keep(path, x):
        return jnp.where(is_kept, x, old.get(jax.tree_util.keystr(path), 0))

    return jax.tree_util.tree_map_with_path(keep, updated)


def _check_clients(num_clients: int, models: Any, client_data: Any) -> None:
    for what, tree, rows in (
        ("the models", models, (1, num_clients)),
        ("client_data", client_data, (num_clients, mesh.padded_size(num_clients))),
    ):
        for x in jax.tree.leaves(tree):
            if not jnp.ndim(x) or x.shape[0] not in rows:
                raise InputError(
                    f"a leaf of {what} has shape {jnp.shape(x)}, expected "
                    f"{' or '.join(map(str, dict.fromkeys(rows)))} rows, of "
                    f"{num_clients} clients"
                )


def _send_down(num_clients: int, cohort_size: int) -> Callable[[Any], Any]:
    """Marks leaves [K, ...], of which the cohort's rows cross, or [1, ...] for all."""

    def send(x):
        copies = Fraction(cohort_size, num_clients if len(x) == num_clients else 1)
        return communication.down(x, copies)

    return lambda models: jax.tree.map(send, models)


def _cross(mark: Callable[[Any], Any], models: Any, is_personal: IsPersonal) -> Any:
    shared, personal = trees.partition(models, is_personal)
    return trees.combine(mark(shared), personal)


def write_back(
    models: Any,
    merged: Any,
    cohort: Cohort,
    num_clients: int,
    is_personal: IsPersonal = no_leaf,
) -> Any:
    """The models after a round: a leaf for all is replaced, rows go to their clients.

    Who did not take part, or has weight 0, keeps what it had; if nobody took part, so
    does a leaf for all, as long as it has as many rows as before.

    Args:
      models: leaves [1 or K, ...].
      merged: leaves [1 or C, ...].
      cohort: of K clients.
      num_clients: K.
      is_personal: of which leaves `cohort_update` has kept already what was there.
    """
    is_whole = len(cohort.indices) == num_clients

    def put(path, x, new):
        if is_whole and is_personal(path):
            return new
        if len(x) == 1 < len(new) == len(cohort.indices):
            x = jnp.broadcast_to(x, (num_clients, *x.shape[1:]))  # rows from now on
        if x.shape[0] != num_clients or new.shape[0] != len(cohort.indices):
            is_any = jnp.any(cohort.weights > 0)
            return jnp.where(is_any, new, x) if x.shape == new.shape else new
        is_new = trees.expand_like(cohort.weights > 0, x)
        if is_whole:
            return jnp.where(is_new, new, x)
        return x.at[cohort.indices].set(jnp.where(is_new, new, x[cohort.indices]))

    return jax.tree_util.tree_map_with_path(put, models, merged)


def federated_round(
    update: Callable[..., tuple[Any, jax.Array]],
    aggregate: Aggregator,
    *,
    has_aux: bool = False,
    is_gradient: bool = False,
    is_personal: IsPersonal = no_leaf,
    reweigh: Callable[[Cohort], Cohort] = lambda cohort: cohort,
    client_start: Callable[..., Any] = lambda models, *args: models,
    participation: float = 1.0,
    clients_per_chunk: int | None = None,
    channel_config: ChannelConfig = DIRECT,
) -> Callable[..., tuple[Any, ...]]:
    """Factory of one round of local updates on a cohort, and their aggregation.

    Args:
      update, participation, clients_per_chunk: see `cohort_update`.
      aggregate: of what is not personal.
      has_aux: whether `aggregate` returns (models, what the server learnt besides).
      is_gradient: whether `update` returns a gradient as the model's "params"; that of
        a round in which nobody takes part is 0, where models stay as they are.
      reweigh: cohort -> the cohort with the weights of `aggregate` and the mean loss.
      client_start: (models, *shared) -> the models that clients start from, leaves
        [1 or K, ...]; what an attacker or noise changes is the way from there.
      is_personal: which leaves stay with their client; all if `aggregate` is
        `aggregation.none`.
      channel_config: what lies between clients and aggregator.

    Returns:
      (models [1 or K, ...], client data [K, ...], client_ids [K], weights [K], key,
      *shared) -> (models [1 or K, ...], mean loss of the cohort or `NO_LOSS`), with
      `has_aux` also what the server learnt.

    Raises:
      InputError: by the round, if `aggregate` returns another structure or shape.
    """
    if aggregate is aggregation.none:
        is_personal = every_leaf
    train = cohort_update(
        update,
        is_personal=is_personal,
        participation=participation,
        clients_per_chunk=clients_per_chunk,
        misbehaviour_config=channel_config.misbehaviour,
        reweigh=reweigh,
    )

    def with_rows(models, num_clients):
        def first(*args):
            return aggregate(*args)[0] if has_aux else aggregate(*args)

        whole = aggregation.partial(first, is_personal)
        one = jax.tree.map(lambda x: x[:1], models)
        every = aggregation.initial(whole, one, num_clients)
        return jax.tree.map(lambda x, y: x if len(x) == len(y) else y, models, every)

    def round_(models, client_data, client_ids, weights, key, *args):
        updated, loss, cohort = train(
            models, client_data, client_ids, weights, key, *args
        )
        kept = is_personal
        if is_gradient:
            models, kept = without_params(models), no_leaf
        shared, personal = trees.partition(updated, is_personal)
        start = trees.partition(client_start(models, *args), is_personal)[0]
        start = rows_of(start, cohort, client_ids)
        key = jax.random.fold_in(key, is_gradient)
        sent = channel.Sent(start, client_ids, weights, key)
        merge = channel.through(channel_config, aggregate, sent)
        if has_aux or jax.tree.leaves(shared):
            merged = merge(shared, reweigh(cohort))
        else:
            merged = shared  # nothing is sent
        merged, *aux = merged if has_aux else (merged,)
        merged = trees.combine(aggregation.checked(shared, merged), personal)
        if len(cohort.indices) == 1 < len(client_ids):  # one row: for all, or its own?
            models = with_rows(models, len(client_ids))
        models = write_back(models, merged, cohort, client_ids.shape[0], kept)
        return models, loss, *aux

    return round_


def rows_of(models: Any, cohort: Cohort, client_ids: jax.Array) -> Any:
    """The cohort's rows [C, ...] of leaves [K, ...]; those [1, ...] are for all."""
    num_clients = len(client_ids)
    if len(cohort.indices) == num_clients:
        return models
    return jax.tree.map(
        lambda x: x[cohort.indices] if len(x) == num_clients else x, models
    )


def without_params(models: Any) -> Any:
    """Models whose "params" are 0: in place of which gradients may be written."""
    return models | {"params": jax.tree.map(jnp.zeros_like, models["params"])}


# --- Methods of a task ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FederatedConfig(ChannelConfig):
    """Base of the configs of all methods of a task."""

    task: TaskConfig
    # share of the clients that take part in a round
    participation: float = limited(1.0, above=0, upper=1)
    # that run side by side on a device; None: all
    clients_per_chunk: int | None = limited(None, lower=1)


class FederatedState(NamedTuple):
    """What the server keeps; a method that keeps more has a state of its own."""

    models: Any  # {"params": ..., "batch_stats": ...}, leaves [1 or K, ...]
    num_rounds: jax.Array  # [] int32, rounds so far
    server_opt_state: Any = ()  # of the server's optimizer, () without one


def plain_update(
    task: Task,
    model: Any,
    client_data: Any,
    key: jax.Array,
    data: Data,
    num_rounds: jax.Array,
) -> tuple[Any, jax.Array]:
    """The task's local steps from the client's own copy, with nothing added."""
    result = task.update(model, client_data, key, data, None, num_rounds)
    return result.model, result.loss


def task_round(
    config: FederatedConfig, task: Task, update, aggregate: Aggregator, **settings
) -> Callable[..., tuple[Any, ...]]:
    """Builds a federated round that reads clients, ids and weights from a task's data.

    Returns:
      (models, data, key, *shared) -> as of `federated_round`.
    """
    conduct = config.misbehaviour
    if conduct.flips_labels:
        update = misbehaviour.with_flipped_labels(task, update)
    run = federated_round(
        update,
        aggregate,
        participation=config.participation,
        clients_per_chunk=config.clients_per_chunk,
        channel_config=config,
        **settings,
    )

    def round_(models, data, key, *shared):
        ids, weights = data.client_ids, data.client_weights
        own = task.client_data(data)
        if conduct.flips_labels:
            own = (own, misbehaviour.attackers(conduct, ids, weights))
        return run(models, own, ids, weights, key, data, *shared)

    return round_


def task_algorithm(
    task: Task, init, round_, config: FederatedConfig | None = None
) -> FederatedAlgorithm:
    """A method whose states, NamedTuples, have the `models` that the task scores.

    Args:
      task: evaluates and predicts.
      init, round_: as in `FederatedAlgorithm`.
      config: of the method; None where all clients take part and no channel lies
        between them and the server.
    """
    between: ChannelConfig = config or DIRECT

    def kept(state):
        scored = state._replace(models=task.scored(state.models))
        return trees.without_opt_state(scored)

    return FederatedAlgorithm(
        init=init,
        round=round_,
        evaluate=lambda state, data: task.evaluate(state.models, data),
        predict=lambda state, data: task.predict(state.models, data),
        monitor=task.monitor,
        privacy=between.privacy,
        participation=config.participation if config else 1.0,
        # attackers are drawn among all of them
        reads_all_clients=between.misbehaviour.byzantine_fraction > 0,
        client_data=task.client_data,
        kept=kept,
    )


def federated(
    config: FederatedConfig,
    aggregator: Callable[[FederatedState, Data, jax.Array], Aggregator],
    *,
    update: Callable[..., tuple[Any, jax.Array]] = plain_update,
    shared: Callable[[FederatedState, Data], tuple] = lambda state, data: (),
    client_start: Callable[..., Any] = lambda models, *shared: models,
    is_personal: Callable[[Task], IsPersonal] = lambda task: no_leaf,
    server_optimizer: OptimizerConfig | None = None,
    first_state: Callable[[FederatedState, Data], Any] | None = None,
) -> FederatedAlgorithm:
    """Factory of a method of a task: local updates and an aggregator.

    Args:
      config: task, participation and mapping; where it has a `score` that is "local",
        clients are scored by what their last local steps made.
      aggregator: (state, data, key of the round) -> aggregator.
      update: (task, model, client data, key, data, num_rounds, *shared) ->
        (model, loss), of ONE client.
      shared: (state, data) -> what `update` gets besides, the same for all clients.
      client_start: (models, *shared) -> the models that clients start from.
      is_personal: task -> which leaves of a model stay with their client.
      server_optimizer: takes the server's step to what the aggregator returns, see
        `server_optimizer.server_step`; by default the server takes that over as it is.
      first_state: (FederatedState, data) -> first state of a method that keeps more,
        a NamedTuple with `models`, `num_rounds` and fields of its own; the aggregator
        then returns (models, {own field: new value}).
    """
    task = client_state.build_task(client_state.task_of(config))
    personal = client_state.or_kept(is_personal(task))
    server = server_step(server_optimizer, personal)

    def init(key, data):
        one = trees.one_row(task.init(key))
        start = FederatedState(one, jnp.int32(0))
        start = first_state(start, data) if first_state else start

        def aggregate(stacked, cohort):
            merged = aggregator(start, data, key)(stacked, cohort)
            return merged[0] if first_state else merged

        models = aggregation.initial(
            aggregation.partial(aggregate, personal), one, len(data.client_ids)
        )
        start = start._replace(models=models)
        if server_optimizer is None:
            return start
        return start._replace(server_opt_state=server.init(models))

    def round_(state, data, key):
        train_key, aggregate_key = task.round_keys(key)
        run = task_round(
            config,
            task,
            lambda *args: update(task, *args),
            aggregator(state, data, aggregate_key),
            has_aux=first_state is not None,
            is_personal=personal,
            client_start=lambda models, data, num_rounds, *rest: client_start(
                models, *rest
            ),
        )
        models, loss, *learnt = run(
            state.models, data, train_key, state.num_rounds, *shared(state, data)
        )
        after = state._replace(num_rounds=state.num_rounds + 1, **dict(*learnt))
        return server.step(after, models, loss), {"train_loss": loss}

    return task_algorithm(task, init, round_, config)
