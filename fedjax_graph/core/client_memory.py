"""Methods whose clients keep something from round to round beside the model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import aggregation, client_state, trees
from fedjax_graph.core.aggregation import Aggregator
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.federated import FederatedConfig, task_algorithm, task_round
from fedjax_graph.core.local import Model
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.server_optimizer import server_step


class ClientMemoryState(NamedTuple):
    """What the server and the clients keep."""

    # {"params": ..., "batch_stats": ...}, leaves [1, ...]; what clients' optimizers
    # keep, if they do, is [K, ...]
    models: Any
    num_rounds: jax.Array  # [] int32, rounds so far
    server_opt_state: Any  # of the server's optimizer, () without one
    memories: Any  # of each client, leaves [K, ...]


def with_client_memory(
    config: FederatedConfig,
    aggregator: Callable[[ClientMemoryState, Data, jax.Array], Aggregator],
    *,
    first_memory: Callable[[Model], Any],
    update: Callable[..., tuple[Model, Any, jax.Array]],
    shared: Callable[[ClientMemoryState, Data], tuple] = lambda state, data: (),
    server_optimizer: OptimizerConfig | None = None,
) -> FederatedAlgorithm:
    """Factory of a method of one model for all whose clients have a memory.

    A memory never leaves its client, and who takes no part keeps the one it has. Where
    `update` sends more than a model, refuse privacy: see `channel.refuse`.

    Args:
      config: task, participation and mapping.
      aggregator: (state, data, key of the round) -> aggregator.
      first_memory: first model -> memory of ONE client before its first round.
      update: (task, model, memory, client data, key, data, num_rounds, *shared) ->
        (what the server averages, memory, loss), of ONE client.
      shared: (state, data) -> what `update` gets besides, the same for all clients.
      server_optimizer: see `server_optimizer.server_step`.

    Raises:
      InputError: if clients are to be scored by the models that they trained last.
    """
    kept = "of this method's clients no model is kept as they trained it last"
    client_state.refuse_local(config, kept)
    task = client_state.build_task(config.task)
    server = server_step(server_optimizer, trees.is_of_optimizer)
    is_personal = client_state.or_kept(lambda path: path[0].key == "memory")

    def update_one(own, *args):
        model, memory, loss = update(task, own["model"], own["memory"], *args)
        return {"model": model, "memory": memory}, loss

    def init(key, data):
        model = task.init(key)
        size = len(data.client_ids)
        models = client_state.broadcast_own(model, size)
        memories = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (size, *x.shape)), first_memory(model)
        )
        return ClientMemoryState(models, jnp.int32(0), server.init(models), memories)

    def round_(state, data, key):
        train_key, aggregate_key = task.round_keys(key)
        run = task_round(
            config,
            task,
            update_one,
            aggregator(state, data, aggregate_key),
            is_personal=is_personal,
        )
        own = {"model": state.models, "memory": state.memories}
        extra = shared(state, data)
        own, loss = run(own, data, train_key, state.num_rounds, *extra)
        common = trees.partition(own["model"], trees.is_of_optimizer)[0]
        aggregation.check_common(common, "a method whose clients keep something")
        after = state._replace(num_rounds=state.num_rounds + 1, memories=own["memory"])
        return server.step(after, own["model"], loss), {"train_loss": loss}

    algorithm = task_algorithm(task, init, round_, config)
    return algorithm._replace(kept=lambda x: algorithm.kept(x._replace(memories=None)))
