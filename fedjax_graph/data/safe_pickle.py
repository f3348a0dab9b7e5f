"""Pickles that hold data, and nothing that runs.

Research datasets are often pickles, many written by Python 2, and a pickle can call
any function, or make NumPy take bytes of the file for pointers. This reader admits
NumPy arrays and scalars of plain numbers and text, SciPy sparse matrices whose indices
hold, and plain containers, and refuses everything else before it is called. What a
pickle makes is counted as it is made: a few bytes may stand for more than memory holds.
"""

import collections
import io
import math
import os
import pickle
import re
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from fedjax_graph.core.errors import InputError, one_line
from fedjax_graph.data import files, limits, sparse

_PLAIN_KINDS = "fiubcSU"  # of data types: numbers and text of a fixed size
_MATRICES = {
    f"{layout}_{kind}": getattr(scipy.sparse, f"{layout}_{kind}")
    for layout in ("coo", "csc", "csr")
    for kind in ("array", "matrix")
}
_OPERATION_BYTES = 512  # more than any operation takes by itself
_ITEM_BYTES = 64  # of what is read, one thing in a container
_MOST_NESTED = 20  # containers
_CONTAINERS = (list, tuple, dict, set, frozenset)
_KEYS = (str, bytes, int, np.integer, np.str_, type(None))


class _NDArray:
    """Stands for `numpy.ndarray`, which a pickle names and must not call."""

    def __init__(self, *args: Any) -> None:
        raise InputError("a pickle that makes an array of memory; only data are read")


def _dtype(spec: Any, align: bool = False, copy: bool = False) -> np.dtype:
    """`numpy.dtype` of numbers and text; old pickles give the flags as 0 and 1."""
    if not isinstance(spec, str | bytes):
        raise InputError(f"a pickle with a data type {type(spec).__name__}")
    text = spec.decode("latin1") if isinstance(spec, bytes) else spec
    dtype = np.dtype(text, bool(align), bool(copy))
    _check_plain(dtype)
    return dtype


def _check_plain(dtype: Any) -> None:
    if not isinstance(dtype, np.dtype) or dtype.kind not in _PLAIN_KINDS:
        raise InputError(f"a pickle with the data type {dtype}; expected plain numbers")


def _reconstruct(subtype: Any, shape: Any, code: Any) -> np.ndarray:
    """The empty array to which an array's state is given; see NumPy's own."""
    del shape, code
    if subtype is not _NDArray:
        raise InputError("a pickle with an array of another class than numpy.ndarray")
    return np.zeros(0, np.int8)


def _scalar(dtype: Any, content: Any = None) -> Any:
    _check_plain(dtype)
    if not isinstance(content, bytes) or len(content) != dtype.itemsize:
        raise InputError(f"a pickle with a scalar of type {dtype} that is none")
    return np.frombuffer(content, dtype)[0] if content else dtype.type()


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """An array as pickle protocol 5 has it."""
    _check_plain(dtype)
    array = np.frombuffer(content, dtype).reshape(shape, order=order)
    return array.copy(order)


def _encode(text: str, encoding: str) -> bytes:
    """`codecs.encode`, as Python 3 writes bytes in Python 2's pickle protocols."""
    if encoding != "latin1":
        raise InputError(f"a pickle with bytes in encoding {encoding!r}")
    return text.encode("latin1")


# --- Containers -----------------------------------------------------------------------


def _check_keys(keys: Iterable[Any]) -> None:
    """Keys and members of sets are text or integers, or flat tuples of those.

    Others can take for ever to hash or to tell apart.
    """
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        for part in parts:
            is_large = isinstance(part, int) and abs(part) >= 2**61 - 1
            if not isinstance(part, _KEYS) or is_large:
                raise InputError(
                    f"a pickle with a key of type {type(part).__name__}; expected text "
                    "or a number"
                )


def _copied(kind: type) -> Any:
    """`list`, `tuple`, `set` or `frozenset` of another container."""

    def copy(items: Any = ()) -> Any:
        if type(items) not in _CONTAINERS:
            raise InputError(f"a pickle with a {kind.__name__} of no container")
        if kind in (set, frozenset):
            _check_keys(items)
        return kind(items)

    return copy


def _mapping(kind: type) -> Any:
    """`dict` or `OrderedDict` of pairs, as Python 2 has them."""

    def mapped(items: Any = ()) -> Any:
        pairs = list(items.items()) if type(items) is dict else items
        is_pairs = type(pairs) in (list, tuple) and all(
            type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs
        )
        if not is_pairs:
            raise InputError(f"a pickle with a {kind.__name__} of no pairs")
        _check_keys(key for key, _ in pairs)
        return kind(pairs)

    return mapped


def _defaultdict(kind: Any = None) -> Any:
    del kind  # which is what Planetoid's has, and nobody asks for what is not there
    return collections.defaultdict(list)


def _check_size(content: Any) -> None:
    """Checks how much there is to read where containers stand in others many times.

    Raises:
      InputError: if it is too much, too deep, or a container stands in itself.
    """
    most = limits.most_bytes() // _ITEM_BYTES
    sizes: dict[int, int] = {}  # of containers by identity; 0 while it is being counted

    def size_of(item: Any, depth: int) -> int:
        if not isinstance(item, _CONTAINERS):
            return 1
        known = sizes.get(id(item))
        if known == 0 or depth > _MOST_NESTED:
            raise InputError(
                f"a pickle of containers over {_MOST_NESTED} deep, or in themselves"
            )
        if known is None:
            sizes[id(item)] = 0
            parts = item.values() if isinstance(item, dict) else item
            known = 1 + sum(size_of(part, depth + 1) for part in parts)
            sizes[id(item)] = known
        if known > most:
            raise InputError(
                f"a pickle of more than {most} things, as containers stand in others "
                "many times"
            )
        return known

    size_of(content, 0)


# --- What a pickle may name -----------------------------------------------------------


def _no_bytes() -> bytes:
    """`bytes()`, as Python 3 writes empty ones in Python 2's pickle protocols."""
    return b""


# NumPy moved its functions from `numpy.core` to `numpy._core`; pickles name either.
_ADMITTED = {
    "__builtin__": {"bytes": _no_bytes, "complex": complex, "dict": _mapping(dict)}
    | {kind.__name__: _copied(kind) for kind in (list, tuple, set, frozenset)},
    "_codecs": {"encode": _encode},
    "collections": {
        "OrderedDict": _mapping(collections.OrderedDict),
        "defaultdict": _defaultdict,
    },
    "numpy": {"dtype": _dtype, "ndarray": _NDArray},
    "numpy.core.multiarray": {"_reconstruct": _reconstruct, "scalar": _scalar},
    "numpy.core.numeric": {"_frombuffer": _frombuffer},
    "scipy.sparse": _MATRICES,
}


def _present_name(module: str) -> str:
    """The name in `_ADMITTED` of a module under any name that it has had."""
    module = re.sub(r"^builtins$", "__builtin__", module)
    module = re.sub(r"^numpy\._core\.", "numpy.core.", module)
    return re.sub(r"^scipy\.sparse\._?(coo|csc|csr)$", "scipy.sparse", module)


class _Counted(dict):
    """What is done for each operation, so many times and no more."""

    def __init__(self, operations: dict[int, Any]) -> None:
        super().__init__(operations)
        self._left = limits.most_bytes() // _OPERATION_BYTES

    def __getitem__(self, code: int) -> Any:
        self._left -= 1
        if self._left < 0:
            limits.check_bytes("its operations", limits.most_bytes() + 1)
        return super().__getitem__(code)


class _Unpickler(pickle._Unpickler):
    """Reads a pickle operation by operation, which lets every state be checked."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.dispatch = _Counted(self.dispatch)
        self.matrices: list[Any] = []  # sparse ones, of which some may lack their parts
        self._num_bytes = len(content)
        self._made = 0  # bytes

    def _count(self, num_bytes: int) -> None:
        self._made += num_bytes
        limits.check_bytes("what it makes", self._made)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[_present_name(module)][name]
        except KeyError:
            what = one_line(f"{module}.{name}", 100)
            raise InputError(
                f"a pickle that would run {what}; only NumPy arrays, SciPy "
                "sparse matrices and plain containers are read: get the file from "
                "its publisher again"
            ) from None

    def _instantiate(self, klass: Any, args: Any) -> None:
        _refuse_to_call(klass)
        super()._instantiate(klass, args)
        self._count(sys.getsizeof(self.stack[-1]))

    def load_reduce(self) -> None:
        _refuse_to_call(self.stack[-2])
        super().load_reduce()
        self._count(sys.getsizeof(self.stack[-1]))

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_newobj(self) -> None:
        args, kind = self.stack[-1], self.stack[-2]
        if kind not in _MATRICES.values() or args:
            raise InputError(f"a pickle with an object of {kind}; only data are read")
        self.stack[-2:] = [kind.__new__(kind)]
        self.matrices.append(self.stack[-1])

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_newobj_ex(self) -> None:
        raise InputError("a pickle with an object and its settings; only data are read")

    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex

    def load_setitem(self) -> None:
        self._check_entries(self.stack[-3], self.stack[-2:])
        super().load_setitem()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        self._check_entries(self.metastack[-1][-1], self.stack)
        super().load_setitems()

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def _check_entries(self, mapping: Any, entries: list[Any]) -> None:
        if not isinstance(mapping, dict):
            raise InputError(f"a pickle with entries of a {type(mapping).__name__}")
        _check_keys(entries[::2])

    def load_dict(self) -> None:
        _check_keys(self.stack[::2])
        super().load_dict()

    dispatch[pickle.DICT[0]] = load_dict

    def load_additems(self) -> None:
        _check_keys(self.stack)
        super().load_additems()

    dispatch[pickle.ADDITEMS[0]] = load_additems

    def load_frozenset(self) -> None:
        _check_keys(self.stack)
        super().load_frozenset()

    dispatch[pickle.FROZENSET[0]] = load_frozenset

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self._num_bytes:
            raise InputError(f"a pickle of {self._num_bytes} bytes with {size}")
        self.append(bytearray(self.read(size)))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def load_build(self) -> None:
        instance, state = self.stack[-2:]
        if isinstance(instance, np.dtype):
            _check_dtype_state(state)
        elif isinstance(instance, np.ndarray):
            _check_array_state(state)
            self._count(len(state[4]))
        elif scipy.sparse.issparse(instance):
            _fill_matrix(instance, state)
            self._count(sum(x.nbytes for x in state.values() if hasattr(x, "nbytes")))
            self.stack.pop()
            return
        elif isinstance(state, dict) and not state:  # Python 2's OrderedDict
            self.stack.pop()
            return
        else:
            raise InputError(
                f"a pickle with a {type(instance).__name__} and attributes; only data "
                "are read"
            )
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _refuse_to_call(kind: Any) -> None:
    if any(kind is matrix for matrix in _MATRICES.values()):
        raise InputError("a pickle that makes a sparse matrix of another; only data")


def _check_dtype_state(state: Any) -> None:
    """A plain data type has a byte order and sizes: no parts, names or fields."""
    is_known = isinstance(state, tuple) and len(state) >= 7
    version, order, *parts = list(state[:5]) if is_known else [None, None]
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or any(parts):
        raise InputError("a pickle with a data type of parts; expected plain numbers")


def _check_array_state(state: Any) -> None:
    """An array's state is (version, shape, data type, is Fortran's, bytes)."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise InputError("a pickle with an array that lacks its parts")
    _, shape, dtype, _, content = state
    _check_plain(dtype)
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


def _fill_matrix(matrix: Any, state: Any) -> None:
    """Gives a sparse matrix its parts, once they are known to fit together.

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
        content = (data, coordinates)
    else:
        compressed = parts.get("indices"), parts.get("indptr")
        along = shape
        if matrix.format == "csc":
            along = sparse.check_shape(shape, name)[::-1]
        sparse.check_compressed(data, *compressed, along, name)
        content = (data, *compressed)
    matrix.__dict__.update(type(matrix)(content, shape=shape).__dict__)


def load(path: str | os.PathLike) -> Any:
    """Reads a pickle of arrays, sparse matrices and containers of them.

    Text of Python 2 is decoded as latin1, as its arrays need.

    Raises:
      InputError: if the file is missing, broken, or holds anything else.
    """
    with files.reading(path, "pickle"):
        limits.check_file(path)
        unpickler = _Unpickler(Path(path).read_bytes())
        try:
            content = unpickler.load()
        except InputError:
            raise
        except Exception as error:  # a broken pickle can raise nearly anything
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not all("_shape" in matrix.__dict__ for matrix in unpickler.matrices):
            raise InputError("a pickle with a sparse matrix that lacks its parts")
        _check_size(content)
        return content
