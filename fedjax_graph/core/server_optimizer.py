"""The server's step from its models towards those that came out of a round.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021: the server takes w - mean_i theta_i for a gradient in w
(Algorithm 1, FedOpt) and steps along it with an optimizer whose moments last over
rounds (Algorithm 2: FedAdagrad, FedYogi, FedAdam).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import trees
from fedjax_graph.core.algorithm import NO_LOSS
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.trees import IsPersonal, no_leaf


class ServerStep(NamedTuple):
    """How the server goes on after a round; states are NamedTuples."""

    init: Callable[[Any], Any]
    """Models [1, ...] -> the first `server_opt_state`."""
    step: Callable[[Any, Any, jax.Array], Any]
    """(state, models that came out of the round, its mean loss) -> the state with its
    next `models` and, with an optimizer, `server_opt_state`."""


def server_step(
    config: OptimizerConfig | None, is_personal: IsPersonal = no_leaf
) -> ServerStep:
    """Factory of the server's step.

    With an optimizer it moves the shared parameters w along the pseudo-gradient w -
    mean; batch statistics and personal leaves are taken over as they come. Without one
    all leaves are. Of a round in which nobody took part, no step is taken.

    Args:
      config: the optimizer; None for none.
      is_personal: path of a leaf in a model -> whether it stays with its client.

    Raises:
      InputError: if the optimizer has a schedule without `num_steps`, as nobody knows
        the last round.
    """
    if config is None:
        return ServerStep(
            init=lambda models: (),
            step=lambda state, models, loss: state._replace(models=models),
        )
    optimizer = config.build()

    def shared_params(models):
        return trees.partition(models, is_personal)[0]["params"]

    def step(state, models, loss):
        shared, personal = trees.partition(models, is_personal)
        w = shared_params(state.models)
        pseudo_gradient = jax.tree.map(jnp.subtract, w, shared["params"])
        params, opt_state = step_if(
            loss, optimizer, pseudo_gradient, state.server_opt_state, w
        )
        shared = shared | {"params": params}
        return state._replace(
            models=trees.combine(shared, personal), server_opt_state=opt_state
        )

    return ServerStep(lambda models: optimizer.init(shared_params(models)), step)


def step_if(
    loss: jax.Array,
    optimizer: optax.GradientTransformation,
    gradient: Any,
    opt_state: optax.OptState,
    params: Any,
) -> tuple[Any, optax.OptState]:
    """A step of an optimizer, or none: its moments and counts then stay as well.

    The step is computed outside of the branches: fused with a `where`, it would be
    rounded in another way.

    Args:
      loss: [] mean of the round; `NO_LOSS`: nobody took part, and no step is taken.
      optimizer: of the server.
      gradient: like the parameters.
      opt_state: of the optimizer.
      params: before the step.

    Returns:
      The parameters and the optimizer's state after it.
    """
    updates, new = optimizer.update(gradient, opt_state, params)
    stepped = optax.apply_updates(params, updates), new
    return jax.lax.cond(
        loss != NO_LOSS,
        lambda new, old: new,
        lambda new, old: old,
        stepped,
        (params, opt_state),
    )
