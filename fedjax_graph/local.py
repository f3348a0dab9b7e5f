"""The local update of ONE client: a scan of optimiser steps over minibatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = Any
Batch = Any
Loss = Callable[[Params, Batch], jax.Array]  # -> [] mean loss of the batch


def optimiser_step(
    loss: Loss, optimiser: optax.GradientTransformation
) -> Callable[[tuple[Params, optax.OptState], Batch], tuple[Any, jax.Array]]:
    """One step, in the form of a `lax.scan` body: (params, state), batch -> loss."""

    def step(carry, batch):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def local_update(
    loss: Loss, optimiser: optax.GradientTransformation
) -> Callable[[Params, Batch], tuple[Params, jax.Array]]:
    """Factory of the client's update.

    What a method adds (a proximal pull, a control variate, clipping, noise) is a
    gradient transformation chained into `optimiser` or a term of `loss`: the loop
    stays this one.

    Args:
      loss: (params, batch) -> mean loss.
      optimiser: started anew at each call.

    Returns:
      (params, batches) -> (params, mean loss over the steps), where `batches` is a
      pytree with a leading axis of steps.
    """

    def update(params, batches):
        carry = (params, optimiser.init(params))
        (params, _), losses = jax.lax.scan(
            optimiser_step(loss, optimiser), carry, batches
        )
        return params, jnp.mean(losses)

    return update
