"""What sensors send to CNFGNN's server besides models, clipped and with noise.

h_c of a window and the gradient in its h_G are rows of 64 numbers, clipped each. A
sensor sends S of the former in a round, and S R_s of the latter, so all of them
together change by the clipping norm times the root of that number at most, which with
the noise multiplier gives the noise. Steps of the server depend on those before, and
Gaussian mechanisms compose adaptively as one of their joint norm: a round's hidden
states are one release, its gradients another.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core.privacy import Privacy, private_windows, release
from fedjax_graph.data.traffic.windows import TrafficData

_HIDDEN = 2**31 - 4  # folded into a round's key


class PrivateExchange(NamedTuple):
    """What happens to h_c and gradients on their way: nothing without privacy."""

    privacy: Privacy | None
    server_rounds: int  # R_s, in each of which a window's gradient is sent once

    def noise_key(self, key: jax.Array) -> Any:
        """Of a round's key, data of that of its hidden states' noise, or ()."""
        if self.privacy is None:
            return ()
        return jax.random.key_data(jax.random.fold_in(key, _HIDDEN))

    def hidden(
        self, h_c: jax.Array, data: TrafficData, starts: jax.Array, noise_key: Any
    ) -> jax.Array | None:
        """Hidden states as they are sent, or None for as they are.

        Args:
          h_c: [K, B, H].
          data: of the clients.
          starts: [B], the windows.
          noise_key: see `noise_key`: under the same one a window's noise is the same.
        """
        if self.privacy is None:
            return None
        norm, num_rows = self.privacy.hidden_clip_norm, len(data.starts)
        return self._noisy(norm, num_rows, h_c, data, starts, noise_key)

    def gradients(
        self,
        gradients: jax.Array,
        data: TrafficData,
        starts: jax.Array,
        weights: jax.Array,
        noise_key: jax.Array,
    ) -> jax.Array:
        """Gradients in h_G as they are sent; with noise, those of padding are 0.

        Args:
          gradients: [K, B, H].
          data: of the clients.
          starts: [B], the windows.
          weights: [K, 12, B] of the errors, 0 for padded windows and clients alone.
          noise_key: data of a key of the step.
        """
        if self.privacy is None:
            return gradients
        norm = self.privacy.gradient_clip_norm
        num_rows = self.server_rounds * len(data.starts)
        noisy = self._noisy(norm, num_rows, gradients, data, starts, noise_key)
        is_real = jnp.any(weights > 0, axis=1)
        return jnp.where(is_real[..., None], noisy, 0)

    def release(self) -> None:
        """Marks all of a round's hidden states, or gradients, as one mechanism."""
        if self.privacy is not None:
            release()

    def _noisy(self, norm, num_rows, rows, data, starts, noise_key) -> jax.Array:
        assert self.privacy is not None
        std = self.privacy.noise_multiplier * norm * math.sqrt(num_rows)
        key = jax.random.wrap_key_data(noise_key)
        return private_windows(norm, std, rows, data.client_ids, starts, key)
