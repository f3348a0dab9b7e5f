"""Pytrees taken apart by the paths of their leaves, and put together again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from fedjax_graph.core import arrays

IsPersonal = Callable[[tuple[Any, ...]], bool]  # path of a leaf -> stays on the client


def partition(tree: Any, is_chosen: IsPersonal) -> tuple[Any, Any]:
    """Splits a tree into the other and the chosen leaves, such as shared and personal.

    None stands where those of the other half stood.
    """

    def keep(wanted):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if is_chosen(path) == wanted else None, tree
        )

    return keep(False), keep(True)


def combine(shared: Any, personal: Any) -> Any:
    """Puts together the tree that `partition` took apart."""
    return jax.tree.map(
        lambda a, b: b if a is None else a,
        shared,
        personal,
        is_leaf=lambda x: x is None,
    )


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, in the tree's order."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def take(tree: Any, indices: jax.Array) -> Any:
    """Takes the rows `indices` [C] of a pytree of [K, ...].

    Raises:
      InputError: if the indices are no whole numbers, or known ones are no rows.
    """
    for size in {len(x) for x in jax.tree.leaves(tree)}:
        arrays.check_indices("indices", indices, size)
    return jax.tree.map(lambda x: x[indices], tree)


def select(is_new: jax.Array, new: Any, old: Any) -> Any:
    """Takes one tree or the other, by a flag []."""
    return jax.tree.map(lambda x, y: jnp.where(is_new, x, y), new, old)


def one_row(tree: Any) -> Any:
    """Gives each leaf a leading axis [1, ...]: one model, for all clients."""
    return jax.tree.map(lambda x: x[None], tree)


def zeros(like: Any) -> Any:
    """Makes zeros of the shapes and types of a tree of arrays, or of abstract ones."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def no_leaf(path: tuple[Any, ...]) -> bool:
    """Chooses no leaf by its path: all are shared."""
    del path
    return False


def every_leaf(path: tuple[Any, ...]) -> bool:
    """Chooses every leaf by its path: of personal ones, no federation."""
    del path
    return True


def is_of_optimizer(path: tuple[Any, ...]) -> bool:
    """Path of a leaf of models or a state -> whether an optimizer has gathered it.

    Such a part has a name that ends with `opt_state`.
    """
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return any(name.endswith("opt_state") for name in names)


def without_opt_state(tree: Any) -> Any:
    """A tree with None in place of what optimizers gathered."""
    return partition(tree, is_of_optimizer)[0]


def expand_like(rows: jax.Array, x: jax.Array) -> jax.Array:
    """Numbers of rows [C] as [C, 1, ...], to broadcast against x [C, ...]."""
    return rows.reshape(-1, *[1] * (x.ndim - 1))


def kept_rows(tree: Any, is_kept: jax.Array) -> Any:
    """Rows [C, ...] of a pytree where `is_kept` [C], and zeros in the others.

    What came out of padding may not be finite, so a product with 0 would not do.
    """
    return jax.tree.map(lambda x: jnp.where(expand_like(is_kept, x), x, 0), tree)


def leaves_read(fn: Callable[[Any], Any], tree: Any) -> list[bool]:
    """Marks the leaves of an argument that a function's result is computed from.

    Args:
      fn: traced, not computed.
      tree: its argument, arrays or their shapes.

    Returns:
      One for each leaf, in the order of `jax.tree.leaves`.
    """
    shapes = jax.eval_shape(lambda x: x, tree)
    jaxpr = jax.make_jaxpr(fn)(shapes).jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
