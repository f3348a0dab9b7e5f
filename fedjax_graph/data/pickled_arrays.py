"""What a pickle says of arrays and sparse matrices, made once it is known to fit.

Nothing of it is shared with what the pickle goes on to change: an array has a data type
of its own, and a sparse matrix parts of its own.
"""

import math
from typing import Any

import numpy as np
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import sparse

_PLAIN_KINDS = "fiubcSU"  # of data types: numbers and text of a fixed size
MATRICES = {
    f"{layout}_{kind}": getattr(scipy.sparse, f"{layout}_{kind}")
    for layout in ("coo", "csc", "csr")
    for kind in ("array", "matrix")
}


class NDArray:
    """Stands for `numpy.ndarray`, which a pickle names and must not call."""

    def __init__(self, *args: Any) -> None:
        raise InputError("a pickle that makes an array of memory; only data are read")


def dtype(spec: Any, align: bool = False, copy: bool = False) -> np.dtype:
    """`numpy.dtype` of numbers and text; old pickles give the flags as 0 and 1."""
    if not isinstance(spec, str | bytes):
        raise InputError(f"a pickle with a data type {type(spec).__name__}")
    text = spec.decode("latin1") if isinstance(spec, bytes) else spec
    found = np.dtype(text, bool(align), bool(copy))
    _plain(found)
    return found


def _plain(dtype: Any) -> np.dtype:
    """A data type of numbers or text, made anew: the pickle may change its own yet."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in _PLAIN_KINDS:
        raise InputError(f"a pickle with the data type {dtype}; expected plain numbers")
    return np.dtype(dtype.str)


def reconstruct(subtype: Any, shape: Any, code: Any) -> np.ndarray:
    """The empty array to which an array's state is given; see NumPy's own."""
    del shape, code
    if subtype is not NDArray:
        raise InputError("a pickle with an array of another class than numpy.ndarray")
    return np.zeros(0, np.int8)


def scalar(dtype: Any, content: Any = None) -> Any:
    """A number or a text of its bytes."""
    dtype = _plain(dtype)
    if not isinstance(content, bytes) or len(content) != dtype.itemsize:
        raise InputError(f"a pickle with a scalar of type {dtype} that is none")
    return np.frombuffer(content, dtype)[0] if content else dtype.type()


def frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """An array as pickle protocol 5 has it."""
    array = np.frombuffer(content, _plain(dtype)).reshape(shape, order=order)
    return array.copy(order)


def check_dtype_state(dtype: np.dtype, state: Any) -> None:
    """Checks that a plain data type gets a byte order, and what else it has already.

    Raises:
      InputError: if it gets parts, names, fields, another size or other flags.
    """
    is_known = isinstance(state, tuple) and len(state) >= 7
    version, order, *parts = list(state[:5]) if is_known else [None, None]
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or any(parts):
        raise InputError("a pickle with a data type of parts; expected plain numbers")
    size, alignment, *flags = list(state[5:8])
    unsaid = () if dtype.kind in "SU" else (-1,)
    is_same = size in (dtype.itemsize, *unsaid)
    is_same &= alignment in (dtype.alignment, *unsaid)
    if not is_same or any(x not in (0, dtype.flags) for x in flags):
        raise InputError(f"a pickle with the data type {dtype} that is made another")


def checked_state(state: Any) -> tuple[Any, ...]:
    """An array's state: (version, shape, data type, is Fortran's, bytes).

    Raises:
      InputError: if these do not fit together.
    """
    if not isinstance(state, tuple) or len(state) != 5:
        raise InputError("a pickle with an array that lacks its parts")
    version, shape, dtype, is_fortran, content = state
    dtype = _plain(dtype)
    is_shape = isinstance(shape, tuple) and all(
        type(size) is int and size >= 0 for size in shape
    )
    if not is_shape or not isinstance(content, bytes | str):
        raise InputError("a pickle with an array that lacks its shape or its data")
    wanted = math.prod(shape) * dtype.itemsize
    is_endless = not dtype.itemsize and math.prod(shape) > 1
    if len(content) != wanted or is_endless:  # text stands for bytes, one each
        raise InputError(
            f"a pickle with an array of shape {shape} and type {dtype} in "
            f"{len(content)} bytes, expected {wanted}"
        )
    return version, shape, dtype, is_fortran, content


def fill_matrix(matrix: Any, state: Any) -> int:
    """Gives a sparse matrix copies of its parts, once they are known to fit together.

    Returns:
      The bytes of the copies.

    Raises:
      InputError: if they do not.
    """
    parts = state if isinstance(state, dict) else {}
    name, shape = f"the sparse matrix ({matrix.format})", parts.get("_shape")
    data = parts.get("data")
    if matrix.format == "coo":
        coordinates = parts.get("coords", (parts.get("row"), parts.get("col")))
        if not isinstance(coordinates, tuple) or len(coordinates) != 2:
            raise InputError(f"{name} lacks its coordinates")
        sparse.check_coordinates(data, *coordinates, shape, name)
        content, copied = (data, coordinates), (data, *coordinates)
    else:
        compressed = parts.get("indices"), parts.get("indptr")
        along = shape
        if matrix.format == "csc":
            along = sparse.check_shape(shape, name)[::-1]
        sparse.check_compressed(data, *compressed, along, name)
        content = copied = (data, *compressed)
    own = type(matrix)(content, shape=shape, copy=True)
    matrix.__dict__.update(own.__dict__)
    return sum(part.nbytes for part in copied)
