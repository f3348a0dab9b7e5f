"""Functions of those rows of an array alone that a mask marks when it runs.

Shapes depend on no numbers in JAX, so padding is computed with like all else. Where
most rows are padding that is most of the work: on a CPU, where one client comes after
another, marked rows are taken a block at a time, as many blocks as there are. Elsewhere
clients are computed side by side, and all rows with them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays, mesh

LEAST_BLOCK = 64  # rows; of the last one half is padding in the mean


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedRows:
    """Holds a matrix [N, F] whose rows count where a mask is 1, or several, [K, N, F].

    Its rows are those of parts, one behind another. It has the shape and the type of a
    matrix, and `x @ kernel`, whose other rows are 0; no other layer can read it by
    mistake.
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
        """All rows as they are, also those that do not count."""
        return jnp.concatenate(self.parts, axis=-2)


def map_marked(
    fn: Callable[[Any, Any], jax.Array],
    is_marked: jax.Array,
    rows: Any,
    shared: Any,
    most_blocks: int | None = None,
) -> jax.Array:
    """Maps a function of rows over the marked ones alone.

    On a CPU that is block by block, and so are its gradients in rows and in what is
    shared, for which the function is computed once more as far as they need it: those
    of a linear one do not, so it is quicker alone than in one function with what comes
    after it. Gradients have none themselves there: compiled, JAX refuses those of a
    loop whose length it does not know.

    Args:
      fn: (rows [B, ...], shared) -> [B, ...], a row's result from that row alone,
        finite for any row that there is; with no arrays of its own to differentiate in.
      is_marked: [N] bool.
      rows: pytree of arrays [N, ...].
      shared: pytree of arrays.
      most_blocks: how many there may be at most, of more than `LEAST_BLOCK` rows where
        that takes them; for large `shared`, to whose gradients each block adds.

    Returns:
      [N, ...], 0 for rows that are not marked.
    """
    size = len(is_marked)
    if not size or mesh.backend() != "cpu":
        results = fn(rows, shared)
        return jnp.where(_like(is_marked, results), results, 0)
    block = min(max(LEAST_BLOCK, -(-size // (most_blocks or size))), size)
    num_places = -(-size // block) * block
    (order,) = jnp.nonzero(is_marked, size=num_places, fill_value=size)
    # varying: no device may wait for sums with another, which takes fewer blocks
    args = jax.tree.map(jnp.asarray, (order.reshape(-1, block), rows, shared))
    return _map_blocks(fn, size, *mesh.varying(args))


def linear_of_marked(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    is_marked: jax.Array,
    most_blocks: int | None = None,
) -> jax.Array:
    """Computes x W + b in P parts of W's columns, each of the rows marked for it alone.

    Args:
      x: [N, H].
      kernel: W, [H, P F].
      bias: b, [P F].
      is_marked: [N, P] bool.
      most_blocks: of one part, as in `map_marked`.

    Returns:
      [N, P, F], 0 where nothing is marked.
    """
    size, num_parts = is_marked.shape
    if mesh.backend() != "cpu":
        results = _linear(x, (kernel, bias)).reshape(size, num_parts, -1)
        return jnp.where(is_marked[:, :, None], results, 0)
    parts = jnp.split(kernel, num_parts, axis=1), jnp.split(bias, num_parts)
    results = [
        map_marked(_linear, is_marked[:, part], x, weights, most_blocks)
        for part, weights in enumerate(zip(*parts, strict=True))
    ]
    return jnp.stack(results, axis=1)


def _linear(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    kernel, bias = weights
    return x @ kernel + bias


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map_blocks(fn, size, order, rows, shared):
    """As `map_marked`, of the places of marked rows [blocks, B], N for padding."""
    shape = jax.eval_shape(lambda: fn(_take(rows, order[0]), shared))

    def step(block, results):
        places = order[block]
        return results.at[places].set(fn(_take(rows, places), shared), mode="drop")

    zeros = jnp.zeros((size, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, _num_blocks(order, size), step, mesh.varying(zeros))


def _forward(fn, size, order, rows, shared):
    return _map_blocks(fn, size, order, rows, shared), (order, rows, shared)


def _backward(fn, size, kept, gradient):
    order, rows, shared = kept

    def step(block, totals):
        places = order[block]
        _, pull = jax.vjp(fn, _take(rows, places), shared)
        own = gradient.at[places].get(mode="fill", fill_value=0)
        of_rows, of_shared = pull(own)
        return (
            _map_real(
                lambda x, y: x.at[places].add(y, mode="drop"), totals[0], of_rows
            ),
            _map_real(jnp.add, totals[1], of_shared),
        )

    zeros = _map_real(jnp.zeros_like, rows), _map_real(_precise_zeros, shared)
    num_blocks = _num_blocks(order, size)
    totals = jax.lax.fori_loop(0, num_blocks, step, mesh.varying(zeros))
    return None, *_map_real(_in_type, totals, (rows, shared))


_map_blocks.defvjp(_forward, _backward)


def _num_blocks(order: jax.Array, size: int) -> jax.Array:
    return jnp.sum(order[:, 0] < size)


def _take(rows: Any, places: jax.Array) -> Any:
    return jax.tree.map(lambda x: x.at[places].get(mode="clip"), rows)


def _precise_zeros(x: jax.Array) -> jax.Array:
    return jnp.zeros_like(arrays.precise(x))


def _in_type(gradient: jax.Array, x: jax.Array) -> jax.Array:
    return gradient.astype(x.dtype)


def _map_real(fn: Callable[..., jax.Array], first: Any, *others: Any) -> Any:
    """Maps over leaves, but those of whole numbers, whose gradients are None."""

    def run(x, *more):
        is_real = x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
        return fn(x, *more) if is_real else None

    return jax.tree.map(run, first, *others, is_leaf=lambda x: x is None)
