"""Joint minibatches: each step takes the same windows of all clients at once.

So the server of CNFGNN trains (Algorithm 1, lines 19-30), so do the strategies that
train both halves end to end, and the centralized GRU: the loss of a minibatch is the
sum of the clients' mean losses. Its windows are shared out to the devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import mesh, sharding
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.tasks import forecasting
from fedjax_graph.tasks.scheduled_sampling import Batch, epoch_batches, target_weights

NOISE = 2**31 - 5  # folded into the key of a call, for the steps' noise


class JointBatch(NamedTuple):
    """Holds what a gradient of a joint minibatch is of."""

    starts: jax.Array  # [B] int32, the windows
    weights: jax.Array  # [K, 12, B] of the squared errors
    feed_truth: jax.Array  # [12] bool, see `scheduled_sampling`
    own: Any  # pytree of [B, N], a row of each window
    common: Any  # what all minibatches share
    noise_key: jax.Array  # data of a key of the step


def joint_training(
    gradients: Callable[..., tuple[jax.Array, Any]],
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    num_epochs: int,
    sampling_decay: float,
    masked_loss: bool,
    after_step: Callable[[Any, TrafficData], Any] = lambda params, data: params,
) -> Callable[..., tuple[Any, optax.OptState, jax.Array, int]]:
    """Factory of passes over joint minibatches.

    Args:
      gradients: (params, data, `JointBatch`) -> (sum of the weighted squared errors,
        its gradients). No closed-over tracers.
      optimizer: lasts over the minibatches and, by its state, over calls.
      batch_size: B, windows in a minibatch.
      num_epochs: passes over all windows.
      sampling_decay: see `epoch_batches`.
      masked_loss: whether missing readings are left out.
      after_step: (params, data) -> params, follows every step.

    Returns:
      (params, opt_state, data, key, num_steps, own=(), common=()) -> (params,
      opt_state, mean loss of a client, steps taken), where `own` is a pytree of
      [S, N], a row of each window, whose minibatch `gradients` gets, and `common` one
      that it gets as it is. A device holds its share of the windows of `own` alone.
      `num_steps` is [] int32, steps taken before.
    """

    def of_share(params, data, starts, weights, feed_truth, own, indices, *rest):
        own = jax.tree.map(lambda x: sharding.take_windows(x, indices), own)
        return gradients(
            params, data, JointBatch(starts, weights, feed_truth, own, *rest)
        )

    spread = sharding.sum_parts(
        of_share, (None, None, 0, 2, None, 0, None, None, None), axes=(mesh.CLIENTS,)
    )

    def train(params, opt_state, data: TrafficData, key, num_steps, own=(), common=()):
        batches = joint_batches(
            key, len(data.starts), batch_size, num_epochs, num_steps, sampling_decay
        )
        noise_keys = jax.random.split(jax.random.fold_in(key, NOISE), len(batches.mask))

        def step(carry, numbered):
            params, opt_state = carry
            batch, noise_key = numbered
            loss, grads = spread(
                params,
                data,
                data.starts[batch.indices],
                joint_weights(data, batch, masked_loss),
                batch.feed_truth,
                own,
                batch.indices,
                common,
                noise_key,
            )
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = after_step(optax.apply_updates(params, updates), data)
            return (params, opt_state), loss

        (params, opt_state), losses = jax.lax.scan(
            step, (params, opt_state), (batches, jax.random.key_data(noise_keys))
        )
        loss = jnp.mean(losses) / jnp.maximum(jnp.sum(data.client_weights > 0), 1)
        return params, opt_state, loss, len(losses)

    return train


def joint_batches(key: jax.Array, num_windows: int, batch_size: int, *args) -> Batch:
    """`epoch_batches`, padded to a size that the devices divide."""
    batches = epoch_batches(key, num_windows, batch_size, *args)
    padded = mesh.padded_size(batch_size, (mesh.CLIENTS,))
    extra = ((0, 0), (0, padded - batch_size))
    return batches._replace(
        indices=jnp.pad(batches.indices, extra), mask=jnp.pad(batches.mask, extra)
    )


def joint_weights(
    data: TrafficData, batch: Batch, masked_loss: bool = False
) -> jax.Array:
    """Factors [K, 12, B] that make squared errors the sum of the clients' losses.

    Those of padded clients are 0.
    """

    truth = forecasting.truth_of_all(data, data.starts[batch.indices])
    weights = jax.vmap(lambda one: target_weights(one, batch.mask, masked_loss))(truth)
    return (data.client_weights > 0).astype(jnp.float32)[:, None, None] * weights


def of_each_client(config: OptimizerConfig) -> optax.GradientTransformation:
    """Optimizer of stacked models [K, ...], which acts on each as if it were alone.

    Only where it looks at norms, as clipping does, whose gradients they are matters.
    """
    one = config.build()
    if config.is_elementwise:
        return one
    return optax.GradientTransformation(jax.vmap(one.init), jax.vmap(one.update))


def side_by_side(
    *optimizers: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """One optimizer for a tuple of pytrees, each of which has one of its own."""

    def init(params):
        return tuple(o.init(x) for o, x in zip(optimizers, params, strict=True))

    def update(updates, state, params):
        stepped = [
            optimizer.update(*one)
            for optimizer, *one in zip(optimizers, updates, state, params, strict=True)
        ]
        return tuple(zip(*stepped, strict=True))

    return optax.GradientTransformation(init, update)
