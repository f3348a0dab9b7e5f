"""Functions of those rows of an array alone that a mask marks when it runs.

Shapes depend on no numbers in JAX, so padding is computed with like all else. Where
most rows are padding that is most of the work. Here marked rows are taken a block at a
time, as many blocks as there are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core import mesh

ROWS_PER_BLOCK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedRows:
    """Holds a matrix [N, F] whose rows count where a mask is 1, or several, [K, N, F].

    Its rows are those of parts, one behind another. It has the shape and the type of a
    matrix, and `x @ kernel`, whose other rows are 0 and cost nothing; no other layer
    can read it by mistake.
    """

    parts: tuple[jax.Array, ...]  # [..., N_i, F]
    mask: jax.Array  # [..., N], 0 or 1

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return (*self.mask.shape, self.parts[0].shape[-1])

    @property
    def dtype(self) -> Any:
        """That of the matrix."""
        return jnp.result_type(*self.parts)

    def __len__(self) -> int:
        """The length of the first axis."""
        return len(self.mask)

    def __matmul__(self, kernel: jax.Array) -> jax.Array:
        """The product of ONE matrix with a kernel [F, H]: [N, H]."""
        products, start = [], 0
        for part in self.parts:
            mask = self.mask[start : start + len(part)] > 0
            products.append(map_marked(jnp.matmul, mask, part, kernel))
            start += len(part)
        return jnp.concatenate(products)

    def dense(self) -> jax.Array:
        """The matrix, with all of its rows."""
        return jnp.concatenate(self.parts, axis=-2)


def map_marked(
    fn: Callable[[Any, Any], jax.Array], is_marked: jax.Array, rows: Any, shared: Any
) -> jax.Array:
    """Maps a function of rows over the marked ones alone.

    Its gradients in rows and in what is shared are taken block by block too. They have
    no gradients themselves: JAX refuses those of a loop whose length it does not know.

    Args:
      fn: (rows [B, ...], shared) -> [B, ...], a row's result from that row alone; with
        no arrays of its own.
      is_marked: [N] bool.
      rows: pytree of arrays [N, ...].
      shared: pytree of arrays.

    Returns:
      [N, ...], 0 for rows that are not marked.
    """
    size = len(is_marked)
    block = max(min(ROWS_PER_BLOCK, size), 1)
    num_places = -(-size // block) * block
    (order,) = jnp.nonzero(is_marked, size=num_places, fill_value=size)
    # varying: no device may wait for sums with another, which takes fewer blocks
    args = mesh.varying((order.reshape(-1, block), rows, shared))
    return _map_blocks(fn, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_blocks(fn, order, rows, shared):
    """As `map_marked`, of the places of marked rows [blocks, B], N for padding."""
    shape = jax.eval_shape(lambda: fn(_take(rows, order[0]), shared))
    size = len(jax.tree.leaves(rows)[0])

    def step(block, results):
        places = order[block]
        return results.at[places].set(fn(_take(rows, places), shared), mode="drop")

    zeros = jnp.zeros((size, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, _num_blocks(order, size), step, mesh.varying(zeros))


def _forward(fn, order, rows, shared):
    return _map_blocks(fn, order, rows, shared), (order, rows, shared)


def _backward(fn, kept, gradient):
    order, rows, shared = kept

    def step(block, totals):
        places = order[block]
        _, pull = jax.vjp(fn, _take(rows, places), shared)
        of_rows, of_shared = pull(_take(gradient, places))
        return (
            _map_real(
                lambda x, y: x.at[places].add(y, mode="drop"), totals[0], of_rows
            ),
            _map_real(jnp.add, totals[1], of_shared),
        )

    zeros = jax.tree.map(_zeros, rows), jax.tree.map(_zeros, shared)
    num_blocks = _num_blocks(order, len(gradient))
    totals = jax.lax.fori_loop(0, num_blocks, step, mesh.varying(zeros))
    return None, *totals


_map_blocks.defvjp(_forward, _backward)


def _num_blocks(order: jax.Array, size: int) -> jax.Array:
    return jnp.sum(order[:, 0] < size)


def _take(rows: Any, places: jax.Array) -> Any:
    return jax.tree.map(lambda x: x.at[places].get(mode="fill", fill_value=0), rows)


def _zeros(x: jax.Array) -> jax.Array | None:
    """Of a gradient; None for whole numbers, which have none."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else None


def _map_real(fn: Callable[..., jax.Array], totals: Any, new: Any) -> Any:
    """Maps over the leaves of gradients, of which `_zeros` left some out."""
    return jax.tree.map(
        lambda x, y: None if x is None else fn(x, y),
        totals,
        new,
        is_leaf=lambda x: x is None,
    )
