"""Clients that drop out, fall behind or lie, as a simulation has them.

Who drops out or falls behind is drawn anew in each round, from the client's own key of
that round; who lies is drawn once, from its identity, and stays the same in all rounds
and seeds. A client that drops out is as if it had not been sampled.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_graph.core import trees
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.clients import Cohort, client_keys, map_clients
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masks import lowest
from fedjax_graph.core.task import Task

Attack = Literal["sign_flip", "scaling", "noise", "label_flip"]
SCALES = {"sign_flip": 4.0, "scaling": 10.0, "noise": 1.0}  # by default
_DROPOUT, _STRAGGLER = 2**31 - 1, 2**31 - 2  # folded into a client's key
_ATTACKERS_SEED = 19


@dataclasses.dataclass(frozen=True)
class Misbehaviour(Checked):
    """Says how many clients misbehave, and how; by default none does.

    With theta the model that a client would send and w the one that it started from, an
    attacker sends w - s (theta - w) (sign_flip), w + s (theta - w) (scaling), theta + s
    times standard normal noise (noise), or what it learns from labels y turned into
    C - 1 - y (label_flip), with s the `attack_scale`.
    """

    dropout_rate: float = limited(0.0, lower=0, below=1)
    straggler_rate: float = limited(0.0, lower=0, upper=1)
    # share of its local steps that a straggler does; 0: it comes too late, and is out
    straggler_work: float = limited(0.5, lower=0, below=1)
    byzantine_fraction: float = limited(0.0, lower=0, upper=1)
    attack: Attack = "sign_flip"
    attack_scale: float | None = limited(None, above=0)  # by default that of SCALES

    @property
    def may_drop(self) -> bool:
        """Whether clients may send nothing."""
        is_late = self.straggler_rate > 0 and not self.straggler_work
        return self.dropout_rate > 0 or is_late

    @property
    def flips_labels(self) -> bool:
        """Whether there are attackers who learn from false labels."""
        return self.byzantine_fraction > 0 and self.attack == "label_flip"

    @property
    def changes_models(self) -> bool:
        """Whether there are attackers who send another model than they have."""
        return self.byzantine_fraction > 0 and self.attack != "label_flip"


HONEST = Misbehaviour()


def attendance(
    config: Misbehaviour, cohort: Cohort, keys: jax.Array
) -> tuple[Cohort, jax.Array | None]:
    """Draws who drops out and who falls behind.

    Args:
      config: how often.
      cohort: who was sampled.
      keys: of its clients in this round, [C].

    Returns:
      The cohort, in which those have weight 0 who send nothing; and the share [C] of
      its local steps that each client does, or None where every client does all
      of its steps.
    """

    def happens(rate: float, fold: int) -> jax.Array:
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, fold)
        return jax.vmap(jax.random.bernoulli, (0, None))(own, rate)

    is_out, work = jnp.zeros(len(keys), bool), None
    if config.dropout_rate:
        is_out |= happens(config.dropout_rate, _DROPOUT)
    if config.straggler_rate:
        is_slow = happens(config.straggler_rate, _STRAGGLER)
        if config.straggler_work:
            work = jnp.where(is_slow, config.straggler_work, 1.0)
        else:
            is_out |= is_slow
    if config.dropout_rate or config.straggler_rate:
        cohort = cohort._replace(weights=jnp.where(is_out, 0, cohort.weights))
    return cohort, work


def attackers(
    config: Misbehaviour, client_ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """Marks who lies: floor(fraction K) of the K clients of weight > 0, [K] bool."""
    keys = client_keys(jax.random.key(_ATTACKERS_SEED), client_ids)
    draws = jax.vmap(jax.random.uniform)(keys)
    sizes = [
        math.floor(config.byzantine_fraction * n + 1e-9)
        for n in range(len(client_ids) + 1)
    ]
    return lowest(draws, weights > 0, jnp.array(sizes)[jnp.sum(weights > 0)])


def attacked(
    config: Misbehaviour, stacked: Any, start: Any, is_attacker: jax.Array, keys: Any
) -> Any:
    """The models that arrive, those of attackers changed but for counts.

    Args:
      config: the attack.
      stacked: theta, pytree of [C, ...].
      start: w, pytree of [1 or C, ...].
      is_attacker: [C] bool.
      keys: of the clients, [C].
    """
    scale = config.attack_scale or SCALES[config.attack]
    leaves, structure = jax.tree.flatten(stacked)

    def change(index: int, theta: jax.Array, w: jax.Array) -> jax.Array:
        if not jnp.issubdtype(theta.dtype, jnp.floating):
            return theta  # a count
        if config.attack == "noise":
            own = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
            draw = jax.vmap(lambda key: jax.random.normal(key, theta.shape[1:]))
            sent = theta + (scale * draw(own)).astype(theta.dtype)
        else:
            sign = -1 if config.attack == "sign_flip" else 1
            sent = w + sign * scale * (theta - w)
        lies = trees.expand_like(is_attacker, theta)
        return jnp.where(lies, sent, theta)

    parts = zip(leaves, jax.tree.leaves(start), strict=True)
    sent = [change(i, theta, w) for i, (theta, w) in enumerate(parts)]
    return jax.tree.unflatten(structure, sent)


def with_flipped_labels(task: Task, update: Callable[..., Any]) -> Callable[..., Any]:
    """An update whose client data have beside them whether their labels are flipped.

    Args:
      task: says what its labels are.
      update: (model, client data, key, data, *others) -> anything, of ONE client.

    Raises:
      InputError: if the task has no labels.
    """
    flip_labels = task.flip_labels
    if flip_labels is None:
        raise InputError(
            "attack='label_flip': the task has no labels; try sign_flip, scaling or "
            "noise"
        )

    def flipped(model: Any, own: Any, key: jax.Array, data: Any, *others: Any) -> Any:
        client_data, is_attacker = own
        client_data, data = flip_labels(client_data, data, is_attacker)
        return update(model, client_data, key, data, *others)

    return flipped


def flipped_data(
    config: Misbehaviour, task: Task, own: Any, indices: jax.Array, data: Any
) -> Any:
    """Client data [C, ...] as their clients see them: attackers' labels are flipped.

    Args:
      config: who attacks, and how.
      task: says what its labels are.
      own: of the cohort.
      indices: [C], which of all clients these are.
      data: of all clients.
    """
    flip = task.flip_labels
    if not config.flips_labels or flip is None:
        return own
    is_attacker = attackers(config, data.client_ids, data.client_weights)[indices]

    def flipped(own, is_one, data):
        return flip(own, data, is_one)[0]

    return map_clients(flipped)(own, is_attacker, shared=(data,))
