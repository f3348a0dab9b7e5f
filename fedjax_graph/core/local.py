"""The local update of ONE client: a scan of optimizer steps over minibatches."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import mesh, trees

Params = Any
Batch = Any
Model = dict[str, Any]  # {"params": what is trained, "batch_stats": running statistics}
Loss = Callable[[Params, Batch], jax.Array]  # -> [] mean loss of the batch
ModelLoss = Callable[[Params, Any, Batch], tuple[jax.Array, Any]]
"""(params, batch_stats, batch) -> mean loss of the batch, batch_stats after it."""


class LocalResult(NamedTuple):
    """What a client has after its local steps."""

    model: Model
    opt_state: optax.OptState
    loss: jax.Array  # [] mean over the steps


_share: contextvars.ContextVar[jax.Array | None]
_share = contextvars.ContextVar("_share", default=None)


@contextlib.contextmanager
def share_of_steps(share: jax.Array | None) -> Iterator[None]:
    """Has `local_steps` that are traced inside the `with` block stop early.

    Args:
      share: [] of the steps that are done, rounded up; None: all.
    """
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def optimizer_step(
    loss: Loss, optimizer: optax.GradientTransformation
) -> Callable[[tuple[Params, optax.OptState], Batch], tuple[Any, jax.Array]]:
    """One step, in the form of a `lax.scan` body: (params, state), batch -> loss."""
    model_step = _model_step(_without_statistics(loss), optimizer, lambda p: p)

    def step(carry, batch):
        params, opt_state = carry
        (params, _, opt_state), value = model_step((params, {}, opt_state), batch)
        return (params, opt_state), value

    return step


def local_steps(
    loss: ModelLoss,
    optimizer: optax.GradientTransformation,
    *,
    adjust: optax.GradientTransformation | None = None,
    view: Callable[[Params], Params] = lambda params: params,
    checkpoint: bool = False,
) -> Callable[[Model, Batch], LocalResult]:
    """Factory of the client's update of a whole model.

    What a method adds (a proximal pull, a control variate, clipping, noise) is a
    gradient transformation chained into `optimizer` or a term of `loss`: the loop
    stays this one.

    Args:
      loss: of the parameters, and the new batch statistics.
      optimizer: started anew at each call; what lasts from round to round enters by
        `adjust` (`core.client_state`).
      adjust: acts on the gradients ahead of the optimizer; its state is then the
        first element of `opt_state`.
      view: parameters -> those of the loss, where gradients are taken; they are
        applied to the former as they are.
      checkpoint: whether who differentiates through the steps recomputes each one
        instead of keeping its intermediate results (`jax.checkpoint`).

    Returns:
      (model, batches) -> LocalResult, where `batches` is a pytree with a leading axis
      of steps.
    """

    if adjust is not None:
        optimizer = optax.chain(adjust, optimizer)
    step = _model_step(loss, optimizer, view)
    if checkpoint:
        step = jax.checkpoint(step, prevent_cse=False)

    def run(model, batches):
        params, stats = model["params"], model["batch_stats"]
        start = mesh.varying((params, stats, optimizer.init(params)))
        share = _share.get()
        if share is None:
            (params, stats, opt_state), losses = jax.lax.scan(step, start, batches)
            loss = jnp.mean(losses) if len(losses) else jnp.zeros(())  # of no steps
        else:
            (params, stats, opt_state), loss = _scan_share(step, start, batches, share)
        return LocalResult({"params": params, "batch_stats": stats}, opt_state, loss)

    return run


def local_update(
    loss: Loss, optimizer: optax.GradientTransformation
) -> Callable[[Params, Batch], tuple[Params, jax.Array]]:
    """`local_steps` of a model without batch statistics.

    Args:
      loss: (params, batch) -> mean loss.
      optimizer: started anew at each call.

    Returns:
      (params, batches) -> (params, mean loss over the steps).
    """
    steps = local_steps(_without_statistics(loss), optimizer)

    def update(params, batches):
        result = steps({"params": params, "batch_stats": {}}, batches)
        return result.model["params"], result.loss

    return update


def _model_step(loss: ModelLoss, optimizer: optax.GradientTransformation, view):
    def step(carry, batch):
        params, stats, opt_state = carry
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(
            view(params), stats, batch
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), value

    return step


def _scan_share(step, start, batches, share):
    """A scan that leaves the carry as it is after a share of its steps."""
    num_steps = len(jax.tree.leaves(batches)[0])
    num_done = jnp.maximum(jnp.ceil(share * num_steps - 1e-4), 1)

    def guarded(carry, numbered):
        index, batch = numbered
        new, value = step(carry, batch)
        is_done = index < num_done
        carry = trees.select(is_done, new, carry)
        return carry, jnp.where(is_done, value, 0)

    carry, losses = jax.lax.scan(guarded, start, (jnp.arange(num_steps), batches))
    return carry, jnp.sum(losses) / num_done


def _without_statistics(loss: Loss) -> ModelLoss:
    return lambda params, stats, batch: (loss(params, batch), stats)
