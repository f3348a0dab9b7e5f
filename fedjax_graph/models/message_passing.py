"""Message passing over a padded graph: what all graph convolutions share.

N(i) are the senders of node i, N+(i) those and i itself, d_i is the size of N(i); an
edge of weight w counts as w edges. S is the symmetrically normalised adjacency matrix
with self edges, S_0 the one without.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import jraph

from fedjax_graph.core import arrays, graphs
from fedjax_graph.core.masked_rows import MaskedRows
from fedjax_graph.core.sparse_rows import SparseRows


class Structure(NamedTuple):
    """Holds all of a padded graph but its features."""

    senders: jax.Array  # [E]
    receivers: jax.Array  # [E]
    weights: jax.Array  # [E], of a floating type
    degrees: jax.Array  # [N], summed weights of the received edges, at least float32
    mask: jax.Array | None  # [N], whose nodes give the batch statistics

    def sum(self, messages: jax.Array) -> jax.Array:
        """Sums weighted messages over N(i): [E, F] -> [N, F]."""
        return self.plain_sum(self.weights[:, None] * messages)

    def plain_sum(self, messages: jax.Array) -> jax.Array:
        """Sums messages that have their weights already over N(i): [E, F] -> [N, F]."""
        return graphs.segment_sum(messages, self.receivers, len(self.degrees))

    def result_type(self, *operands: jax.Array | float) -> Any:
        """The type of what is made of weights and operands, however it was summed."""
        return jnp.result_type(self.weights, *operands)

    def mean(self, messages: jax.Array) -> jax.Array:
        """Averages messages over N(i), 0 where it is empty: [E, F] -> [N, F]."""
        counts = jnp.where(self.degrees > 0, self.degrees, 1)
        mean = self.sum(messages) / counts[:, None]
        return mean.astype(self.result_type(messages))

    def normalised_sum(self, x: jax.Array, self_weight: float = 1) -> jax.Array:
        """Computes S x, or S_0 x where self edges have weight 0: [N, F] -> [N, F]."""
        totals = self.degrees + self_weight
        scale = jax.lax.rsqrt(jnp.where(totals > 0, totals, jnp.inf))[:, None]
        scaled = scale * x
        summed = scale * (self.sum(scaled[self.senders]) + self_weight * scaled)
        return summed.astype(self.result_type(x))

    def attention(
        self, logits: jax.Array, self_logits: jax.Array | float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes a softmax over N+(i), times a factor of node i.

        Args:
          logits: [E, 1], or [E, F] for a softmax in every channel.
          self_logits: [N, 1] or [N, F]; minus infinity for a softmax over N(i).

        Returns:
          Shares of messages [E, F], those of nodes themselves [N, F], and what both are
          to be divided by [N, F], 1 where the neighbourhood is empty; in at least
          float32.
        """
        logits = arrays.precise(logits)
        logits = jnp.where(self.weights[:, None] > 0, logits, -jnp.inf)
        peaks = jraph.segment_max(logits, self.receivers, len(self.degrees))
        peaks = jax.lax.stop_gradient(jnp.maximum(peaks, self_logits))
        peaks = jnp.where(jnp.isfinite(peaks), peaks, 0)
        shares = self.weights[:, None] * jnp.exp(logits - peaks[self.receivers])
        self_shares = jnp.exp(self_logits - peaks)
        totals = self.plain_sum(shares) + self_shares
        return shares, self_shares, jnp.where(totals > 0, totals, 1)

    def attend(
        self, logits: jax.Array, self_logits: jax.Array | float, values: jax.Array
    ) -> jax.Array:
        """Sums neighbours' values, weighted by a softmax over N+(i).

        Args:
          logits, self_logits: see `attention`.
          values: [N, F].

        Returns:
          [N, F], 0 where the neighbourhood is empty.
        """
        shares, self_shares, totals = self.attention(logits, self_logits)
        summed = self.plain_sum(shares * values[self.senders]) + self_shares * values
        types = self.result_type(logits, self_logits, values)
        return (summed / totals).astype(types)


def make_structure(graph: jraph.GraphsTuple, mask: jax.Array | None) -> Structure:
    """Reads weights and degrees off a graph.

    Raises:
      InputError: if the mask is not of the nodes, or the edges are none; see
        `graphs.check_edges`.
    """
    weights, size = graph.edges, graph.receivers.shape
    num_nodes = len(graph.nodes)
    graphs.check_edges(num_nodes, graph.senders, graph.receivers, weights, "edges")
    if mask is not None:
        arrays.check_shape("mask", mask, (num_nodes,))
    if weights is None:
        weights = jnp.ones(size, graph.nodes.dtype)
    weights = weights.astype(arrays.float_type(weights.dtype))
    degrees = graphs.segment_sum(arrays.precise(weights), graph.receivers, num_nodes)
    return Structure(graph.senders, graph.receivers, weights, degrees, mask)


def spread_and_project(
    spread: Callable[[jax.Array], jax.Array],
    x: jax.Array | SparseRows | MaskedRows,
    kernel: jax.Array,
) -> jax.Array:
    """Computes `spread(x) W`; the linear map over nodes acts on the narrower side.

    Sparse and masked ones are projected first: spread, they would be so no more.
    """
    if isinstance(x, SparseRows | MaskedRows) or kernel.shape[1] < x.shape[1]:
        return spread(x @ kernel)
    return spread(x) @ kernel


def spread_and_project_all(
    spread: Callable[[int, jax.Array], jax.Array], x: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Sums `spread(m, x) W_m` over m, W_m one of the M slices of [F, M, features]."""
    parts = (
        spread_and_project(partial(spread, m), x, kernel[:, m])
        for m in range(kernel.shape[1])
    )
    return cast(jax.Array, sum(parts))


def repeat(
    step: Callable[[jax.Array], jax.Array], x: jax.Array, times: int
) -> jax.Array:
    """Applies a step so many times, several as a loop that is compiled once."""
    if times < 2:
        return step(x) if times else x
    x = x.astype(jax.eval_shape(step, x).dtype)
    return jax.lax.fori_loop(0, times, lambda _, x: step(x), x)
