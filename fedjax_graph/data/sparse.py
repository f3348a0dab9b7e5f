"""Sparse matrices from files: every index is checked before compiled code follows it.

SciPy's own check trusts a matrix that says it has no entries, and none is made of
coordinates; a wrong index then reads or writes memory that is not the matrix's.
"""

from collections.abc import Sequence

import numpy as np
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import limits

NUMBERS = "fiub"  # kinds of data types that entries may have


def csr_array(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    shape: Sequence[int],
    name: str,
) -> scipy.sparse.csr_array:
    """A CSR matrix [R, C] of parts that fit together.

    Args:
      data: [n] numbers.
      indices: [n] integers, columns.
      indptr: [R + 1] integers, where rows begin.
      shape: R and C.
      name: of the matrix, for the message.

    Raises:
      InputError: naming what does not fit.
    """
    check_compressed(data, indices, indptr, tuple(shape), name)
    return scipy.sparse.csr_array((data, indices, indptr), tuple(shape))


def check_compressed(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    shape: tuple[int, ...],
    name: str,
) -> None:
    """Checks the parts of a matrix that is compressed along its first axis.

    Raises:
      InputError: naming what does not fit.
    """
    rows, columns = check_shape(shape, name)
    _check_part(data, NUMBERS, f"{name}: the entries")
    _check_part(indices, "iu", f"{name}: the indices")
    _check_part(indptr, "iu", f"{name}: indptr")
    if len(indptr) != rows + 1:
        raise InputError(
            f"{name}: indptr has {len(indptr)} numbers, expected {rows + 1}, one more "
            "than rows"
        )
    starts = indptr.astype(np.int64)
    if starts[0] != 0 or starts[-1] != len(indices) or np.any(np.diff(starts) < 0):
        raise InputError(
            f"{name}: indptr runs from {starts[0]} to {starts[-1]}, expected to rise "
            f"from 0 to the number of indices, {len(indices)}"
        )
    if len(data) != len(indices):
        raise InputError(f"{name}: {len(data)} entries for {len(indices)} indices")
    _check_range(indices, columns, f"{name}: the indices")


def check_coordinates(
    data: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    shape: tuple[int, ...],
    name: str,
) -> None:
    """Checks the parts of a matrix of entries with coordinates.

    Raises:
      InputError: naming what does not fit.
    """
    sizes = check_shape(shape, name)
    _check_part(data, NUMBERS, f"{name}: the entries")
    for indices, size in zip((rows, columns), sizes, strict=True):
        _check_part(indices, "iu", f"{name}: the coordinates")
        if len(indices) != len(data):
            raise InputError(
                f"{name}: {len(indices)} coordinates for {len(data)} entries"
            )
        _check_range(indices, size, f"{name}: the coordinates")


def check_shape(shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """The two sizes of a matrix.

    Raises:
      InputError: if they are none.
    """
    is_shape = isinstance(shape, tuple) and len(shape) == 2
    if not is_shape or not all(
        isinstance(size, int | np.integer) and 0 <= size < 2**31 for size in shape
    ):
        raise InputError(f"{name}: shape {shape}, expected two sizes")
    limits.check_bytes(f"{name} of shape {shape}", 8 * int(max(shape)))  # of indptr
    return int(shape[0]), int(shape[1])


def _check_part(part: np.ndarray, kinds: str, name: str) -> None:
    if not isinstance(part, np.ndarray) or part.ndim != 1:
        raise InputError(f"{name} are no row of numbers")
    if part.dtype.kind not in kinds:
        raise InputError(f"{name} have type {part.dtype}")


def _check_range(indices: np.ndarray, size: int, name: str) -> None:
    if len(indices) and not 0 <= indices.min() <= indices.max() < size:
        wrong = indices.max() if indices.max() >= size else indices.min()
        raise InputError(f"{name} hold {wrong}, expected 0 to {size - 1}")
