"""Model-agnostic meta-learning as pure functions of one client.

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep
Networks", ICML 2017; equation numbers are GraphFL's (Wang, Li, Li, Chen, ICDM
2022). Adaptation is the local update of any federated method, a scan of gradient steps;
the meta-gradient differentiates through all of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.local import LocalResult, Model, Params, local_steps

Adapt = Callable[[Params], Params]


def inner_update(
    loss: Callable[[Params, jax.Array], jax.Array],
    num_steps: int,
    rate: float,
    *,
    adjust: optax.GradientTransformation | None = None,
    checkpoint: bool = False,
) -> Callable[[Model, jax.Array], LocalResult]:
    """Factory of theta_i <- theta - alpha grad L_S(theta), taken `num_steps` times.

    Eqs. 5, 7 and 11.

    Args:
      loss: (params, key of the step) -> L_S, the mean loss on the support set.
      num_steps: inner steps.
      rate: alpha.
      adjust: acts on the gradients first, such as `detached()`.
      checkpoint: whether a differentiation through the steps recomputes each of them
        instead of keeping what is inside; the parameters between steps are kept.

    Returns:
      (model, key) -> LocalResult.
    """
    steps = local_steps(
        lambda params, stats, key: (loss(params, key), stats),
        optax.chain(adjust or optax.identity(), optax.sgd(rate)),
        checkpoint=checkpoint,
    )
    return lambda model, key: steps(model, jax.random.split(key, num_steps))


def meta_gradient(
    adapt: Adapt, query_loss: Callable[[Params], jax.Array]
) -> Callable[[Params], tuple[jax.Array, Params]]:
    """The loss of the adapted parameters and its gradient in the first ones (Eq. 9).

    For one inner step this is Eq. 12's (I - alpha H_S) grad L_Q(theta - alpha grad
    L_S(theta)), without the Hessian H_S ever being formed. Where `adapt` detaches its
    gradients it is the first-order grad L_Q(theta_i).

    Args:
      adapt: theta -> theta_i.
      query_loss: params -> L_Q.

    Returns:
      theta -> (L_Q(theta_i), its gradient in theta).
    """
    return jax.value_and_grad(lambda params: query_loss(adapt(params)))


def detached() -> optax.GradientTransformation:
    """Gradients as constants: what makes a meta-gradient first-order (FOMAML)."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(jax.lax.stop_gradient, updates)
    )


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values [L] where the mask [L] is 1; 0 if it is 0 everywhere."""
    return jnp.sum(mask * values) / jnp.maximum(jnp.sum(mask), 1)
