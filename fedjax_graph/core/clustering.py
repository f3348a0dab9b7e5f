"""Clusters of clients: distances of sequences, and cuts of a weighted graph in two."""

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays


def warped_distances(sequences: jax.Array) -> jax.Array:
    """Distances of rows [K, T] under dynamic time warping: [K, K].

    Sakoe, Chiba, "Dynamic Programming Algorithm Optimization for Spoken Word
    Recognition", 1978: the root of the least sum of squared differences along a path
    that goes on in one sequence or in both.
    """
    infinity = jnp.full(1, jnp.inf, sequences.dtype)

    def place(left, ways):  # of the table of least sums
        cost, above, corner = ways
        least = cost + jnp.minimum(jnp.minimum(above, corner), left)
        return least, least

    def row(before, costs):
        _, sums = jax.lax.scan(place, infinity[0], (costs, before[1:], before[:-1]))
        return jnp.append(infinity, sums), None

    def distance(one, other):
        costs = (one[:, None] - other[None]) ** 2
        start = jnp.append(jnp.zeros_like(infinity), jnp.full_like(one, jnp.inf))
        return jnp.sqrt(jax.lax.scan(row, start, costs)[0][-1])

    return jax.vmap(lambda one: jax.vmap(lambda x: distance(one, x))(sequences))(
        sequences
    )


def cut_by_sequences(sequences: jax.Array, is_member: jax.Array) -> jax.Array:
    """One side of the cut in two that parts the least alike: [K] bool.

    It is the minimum cut of a graph with weights max(D) - D, D the `warped_distances`.

    Args:
      sequences: [K, T].
      is_member: [K] bool, two or more; others are left out.
    """
    distances = warped_distances(sequences)
    most = jnp.max(jnp.where(is_member[:, None] & is_member, distances, 0))
    return min_cut(jnp.maximum(most - distances, 0), is_member)


def min_cut(weights: jax.Array, is_member: jax.Array) -> jax.Array:
    """One side of the cut of a graph in two that loses the least weight: [K] bool.

    Stoer, Wagner, "A Simple Min-Cut Algorithm", J. ACM 44, 1997.

    Args:
      weights: [K, K], symmetric, not negative; the diagonal counts nothing.
      is_member: [K] bool, the nodes of the graph, two or more; others are left out.

    Raises:
      InputError: if these are not of as many nodes.
    """
    size = len(is_member)
    arrays.check_shape("weights", weights, (size, size))
    nodes = jnp.arange(size)

    def phase(_, carry):
        weights, is_alive, holds, least, side = carry

        def add(_, state):
            is_added, pulls, last, before, cut = state
            is_left = is_alive & ~is_added
            node = jnp.argmax(jnp.where(is_left, pulls, -1))
            new = is_added.at[node].set(True), pulls + weights[node], node, last
            new = (*new, pulls[node])
            return jax.tree.map(
                lambda a, b: jnp.where(jnp.any(is_left), a, b), new, state
            )

        first = (~is_alive, jnp.zeros_like(weights[0]), nodes[0], nodes[0])
        first = (*first, jnp.zeros_like(least))
        _, _, last, before, cut = jax.lax.fori_loop(0, size, add, first)
        is_possible = jnp.sum(is_alive) > 1
        is_better = is_possible & (cut < least)
        side = jnp.where(is_better, holds[last], side)
        least = jnp.where(is_better, cut, least)
        merged = weights.at[before].add(weights[last]).at[:, before].add(weights[last])
        merged = merged.at[before, before].set(0)
        weights = jnp.where(is_possible, merged, weights)
        holds = holds.at[before].set(holds[before] | holds[last])
        return weights, is_alive & (nodes != last), holds, least, side

    is_edge = is_member[:, None] & is_member & ~jnp.eye(size, dtype=bool)
    first = (
        jnp.where(is_edge, weights, 0),
        is_member,
        jnp.eye(size, dtype=bool),
        jnp.full((), jnp.inf, weights.dtype),
        jnp.zeros(size, bool),
    )
    return jax.lax.fori_loop(0, size - 1, phase, first)[-1]
