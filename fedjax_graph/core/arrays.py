"""Checks of arrays at the boundary: what JAX would clamp, broadcast or average to NaN.

Shapes and types are checked also while a program is traced, and cost nothing when it
runs; values where they are known, which they are not in a traced program.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core.errors import InputError


def is_known(*arrays: Any) -> bool:
    """Tells whether the values of arrays are there: none is being traced."""
    return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def _shape(array: Any) -> tuple[int, ...]:
    return array.shape if hasattr(array, "shape") else np.shape(array)


def float_type(dtype: Any) -> Any:
    """The type of results of numbers of a type: float32 of whole numbers.

    As JAX has it, so float32 of NumPy's float64 where JAX has no such.
    """
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return jax.dtypes.canonicalize_dtype(dtype if is_float else jnp.float32)


def precise(array: Any) -> Any:
    """An array in at least float32, in which many shorter numbers are summed.

    In their own type, 256 and 1 are 256 of bfloat16 and 0 of uint8.
    """
    return array.astype(float_type(jnp.promote_types(array.dtype, jnp.float32)))


def check_are_arrays(**values: Any) -> None:
    """Checks that values, by their names, are arrays and no lists.

    Raises:
      InputError: naming the first that is none.
    """
    for name, value in values.items():
        if not all(hasattr(value, x) for x in ("shape", "dtype")):
            kind = type(value).__name__
            raise InputError(f"{name} is a {kind}, expected an array")


def check_shape(what: str, array: Any, shape: Sequence[int | None]) -> None:
    """Checks the shape of an array.

    Args:
      what: it is, for messages.
      array: of NumPy or JAX, traced or not.
      shape: the sizes of its axes; None for any.

    Raises:
      InputError: if it has another one.
    """
    found = _shape(array)
    fits = len(found) == len(shape) and all(
        size in (None, own) for own, size in zip(found, shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{what} has shape {found}, expected ({sizes})")


def check_same_shape(**arrays: Any) -> None:
    """Checks that arrays, by their names, have one shape: nothing is broadcast.

    Raises:
      InputError: if they have not.
    """
    shapes = {name: _shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"{found}: expected the same shape")


def check_indices(what: str, indices: Any, size: int, of: str = "") -> None:
    """Checks that indices are whole numbers, none beyond what they index.

    Args:
      what: they are, for messages.
      indices: of any shape.
      size: of the axis that they index.
      of: what is indexed, for messages.

    Raises:
      InputError: naming the first wrong one, where values are known.
    """
    indices = np.asarray(indices) if is_known(indices) else indices
    if indices.size and not jnp.issubdtype(indices.dtype, jnp.integer):
        raise InputError(f"{what} has type {indices.dtype}, expected whole numbers")
    if is_known(indices):
        wrong = indices[(indices < 0) | (indices >= size)]
        if len(wrong):
            of = of and f" of {of}"
            raise InputError(f"{what} has {wrong[0]}, expected 0 to {size - 1}{of}")


def check_count(what: str, count: Any, least: int = 1) -> None:
    """Checks that a count, known while a program is traced, is a whole number.

    Raises:
      InputError: if it is not, or less than the least.
    """
    is_whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not is_whole or count < least:
        raise InputError(
            f"{what} = {count!r}: expected a whole number, at least {least}"
        )


def check_weights(what: str, weights: Any) -> None:
    """Checks that weights are real numbers, finite and not negative.

    Raises:
      InputError: if they have another type, or naming the first that is negative or not
        finite, where values are known.
    """
    weights = np.asarray(weights) if is_known(weights) else weights
    is_real = weights.dtype == bool or jnp.issubdtype(weights.dtype, jnp.integer)
    if not (is_real or jnp.issubdtype(weights.dtype, jnp.floating)):
        raise InputError(f"{what} has type {weights.dtype}, expected real numbers")
    if is_known(weights):
        wrong = weights[~(np.isfinite(weights) & (weights >= 0))]
        if len(wrong):
            raise InputError(f"{what} has {wrong[0]}, expected finite numbers >= 0")


def check_share(what: str, share: Any) -> None:
    """Checks that a number is a share, 0 to 1, where it is known.

    Raises:
      InputError: naming it.
    """
    if is_known(share) and not 0 <= share <= 1:
        raise InputError(f"{what}={share}: expected a number from 0 to 1")
