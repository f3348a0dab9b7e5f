"""What sensors send to CNFGNN's server besides models, clipped and with noise.

h_c of a window and the gradient in its h_G are rows of 64 numbers, clipped each. A
sensor sends S of the former in a round, and S R_s of the latter, so all of them
together change by the clipping norm times the root of that number at most, which with
the noise multiplier gives the noise. Steps of the server depend on those before, and
Gaussian mechanisms compose adaptively as one of their joint norm: a round's hidden
states are one release, its gradients another.
"""

import math

import jax
import jax.numpy as jnp

from fedjax_graph.core.privacy import Privacy, private_windows
from fedjax_graph.data.traffic.windows import TrafficData

HIDDEN, GRADIENTS = 2**31 - 4, 2**31 - 5  # folded into a round's key


def sent_hidden(
    config: Privacy, h_c: jax.Array, data: TrafficData, starts: jax.Array, key_data
) -> jax.Array:
    """Hidden states as they are sent.

    Args:
      config: clipping and noise.
      h_c: [K, B, H].
      data: of the clients.
      starts: [B], the windows.
      key_data: of the release: under the same key a window's noise is the same.
    """
    key = jax.random.wrap_key_data(key_data)
    norm = config.hidden_clip_norm
    std = config.noise_multiplier * norm * math.sqrt(len(data.starts))
    return private_windows(norm, std, h_c, data.client_ids, starts, key)


def sent_gradients(
    config: Privacy,
    gradients: jax.Array,
    data: TrafficData,
    starts: jax.Array,
    weights: jax.Array,
    key_data: jax.Array,
    num_passes: int,
) -> jax.Array:
    """Gradients in h_G as they are sent; those of padding are 0.

    Args:
      config: clipping and noise.
      gradients: [K, B, H].
      data: of the clients.
      starts: [B], the windows.
      weights: [K, 12, B] of the errors, 0 for padded windows and clients alone.
      key_data: of the step.
      num_passes: R_s, in each of which a window is sent once.
    """
    key = jax.random.wrap_key_data(key_data)
    norm, num_rows = config.gradient_clip_norm, num_passes * len(data.starts)
    std = config.noise_multiplier * norm * math.sqrt(num_rows)
    noisy = private_windows(norm, std, gradients, data.client_ids, starts, key)
    is_real = jnp.any(weights > 0, axis=1)
    return jnp.where(is_real[..., None], noisy, 0)
