"""Model-agnostic meta-learning as pure functions of one client.

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep
Networks", ICML 2017; equation numbers are GraphFL's (Wang, Li, Li, Chen, ICDM
2022). Adaptation is the local update of any federated method, a scan of gradient steps;
the meta-gradient differentiates through all of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from fedjax_graph.core.local import LocalResult, Model, Params, local_steps

Adapt = Callable[[Params], Params]


def inner_update(
    loss: Callable[[Params, jax.Array], jax.Array],
    num_steps: int,
    optimizer: optax.GradientTransformation,
    **settings: Any,
) -> Callable[[Model, jax.Array], LocalResult]:
    """Factory of theta_i <- theta - alpha grad L_S(theta), taken `num_steps` times.

    Eqs. 5, 7 and 11, where the optimizer is plain gradient descent.

    Args:
      loss: (params, key of the step) -> L_S, the mean loss on the support set.
      num_steps: inner steps.
      optimizer: of the inner steps, started anew at each call; `sgd` of rate alpha.
      settings: of `local_steps`. With `checkpoint`, who differentiates through the
        steps keeps the parameters between them alone.

    Returns:
      (model, key) -> LocalResult.
    """
    steps = local_steps(
        lambda params, stats, key: (loss(params, key), stats),
        optimizer,
        **settings,
    )
    return lambda model, key: steps(model, jax.random.split(key, num_steps))


def meta_gradient(
    adapt: Adapt, query_loss: Callable[[Params], jax.Array], first_order: bool = False
) -> Callable[[Params], tuple[jax.Array, Params]]:
    """The loss of the adapted parameters and its gradient in the first ones (Eq. 9).

    For one inner step this is Eq. 12's (I - alpha H_S) grad L_Q(theta - alpha grad
    L_S(theta)), without the Hessian H_S ever being formed. First-order (FOMAML) it is
    grad L_Q(theta_i): the gradients of the inner steps are constants.

    Args:
      adapt: theta -> theta_i.
      query_loss: params -> L_Q.
      first_order: whether theta_i counts as theta plus a constant.

    Returns:
      theta -> (L_Q(theta_i), its gradient in theta).
    """

    def objective(params):
        adapted = adapt(params)
        if first_order:
            constant = jax.lax.stop_gradient
            adapted = jax.tree.map(
                lambda new, x: x + constant(new - x), adapted, params
            )
        return query_loss(adapted)

    return jax.value_and_grad(objective)
