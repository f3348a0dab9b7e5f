"""Scheduled sampling: minibatches of a client's windows, and what counts in a loss.

Bengio et al., "Scheduled Sampling for Sequence Prediction with Recurrent Neural
Networks", NeurIPS 2015: a decoder is fed the true value in place of its own forecast
with a probability that falls with the optimization steps taken.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays
from fedjax_graph.core.batching import shuffled_batches
from fedjax_graph.data.traffic.windows import TARGET_STEPS


class Batch(NamedTuple):
    """One minibatch of a client's windows."""

    indices: jax.Array  # [B] int32, indices into the split's windows
    mask: jax.Array  # [B] float32, 0 for padding
    feed_truth: jax.Array  # [12] bool


def sampling_probability(step: jax.Array, decay: float) -> jax.Array:
    """Probability k / (k + exp(i / k)) of feeding the truth at optimization step i.

    Bengio et al., "Scheduled Sampling for Sequence Prediction with Recurrent Neural
    Networks", NeurIPS 2015: inverse sigmoid decay.
    """
    return decay / (decay + jnp.exp(step / decay))


def feed_draws(
    key: jax.Array, num_steps: int, first_step: jax.Array, decay: float
) -> jax.Array:
    """Whether the truth is fed, [num_steps, 12] bool, from `first_step` on."""
    probability = sampling_probability(first_step + jnp.arange(num_steps), decay)
    draws = jax.random.uniform(key, (num_steps, TARGET_STEPS))
    return draws < probability[:, None]


def epoch_batches(
    key: jax.Array,
    num_windows: int,
    batch_size: int,
    num_epochs: int,
    first_step: jax.Array,
    sampling_decay: float,
) -> Batch:
    """Shuffled minibatches of `num_epochs` passes, `[num_epochs * steps, ...]`.

    The last batch of a pass is padded and masked. Each batch draws once for each
    decoding step whether the truth is fed.

    Args:
      key: of the client and round.
      num_windows: S, windows in a pass.
      batch_size: B.
      num_epochs: passes.
      first_step: [] optimization steps taken so far.
      sampling_decay: k of `sampling_probability`.
    """
    shuffle_key, feed_key = jax.random.split(key)
    indices, mask = shuffled_batches(shuffle_key, num_windows, batch_size, num_epochs)
    feed_truth = feed_draws(feed_key, len(indices), first_step, sampling_decay)
    return Batch(indices, mask, feed_truth)


def target_weights(
    truth: jax.Array, mask: jax.Array, skip_missing: bool = False
) -> jax.Array:
    """Factors that make a sum over steps and windows the mean over those that count.

    Args:
      truth: [12, B] what is to be forecast; 0 = missing.
      mask: [B], 0 for padding.
      skip_missing: whether missing readings do not count.

    Returns:
      [12, B].

    Raises:
      InputError: if the mask is not of the windows.
    """
    arrays.check_shape("mask", mask, truth.shape[1:])
    counts = mask * (truth != 0) if skip_missing else mask * jnp.ones_like(truth)
    return counts / jnp.maximum(jnp.sum(counts), 1)
