"""Pickles that hold data, and nothing that runs.

Research datasets are often pickles, many written by Python 2, and a pickle can call
any function, or make NumPy take bytes of the file for pointers. This reader admits
NumPy arrays and scalars of plain numbers and text, SciPy sparse matrices whose indices
hold, and plain containers, and refuses everything else before it is called. What a
pickle makes is counted as it is made: a few bytes may stand for more than memory holds.
"""

import collections
import io
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
from fedjax_graph.data import files, limits
from fedjax_graph.data import pickled_arrays as arrays

_OPERATION_BYTES = 512  # more than any operation takes by itself
_ITEM_BYTES = 64  # of what is read, one thing in a container
_MOST_NESTED = 20  # containers
_CONTAINERS = (list, tuple, dict, set, frozenset)
_KEYS = (str, bytes, int, np.integer, np.str_, type(None))
_KEY_BYTES = 2**14  # for each key: among so many, those that meet end in seconds


def _encode(text: str, encoding: str) -> bytes:
    """`codecs.encode`, as Python 3 writes bytes in Python 2's pickle protocols."""
    if encoding != "latin1":
        raise InputError(f"a pickle with bytes in encoding {encoding!r}")
    return text.encode("latin1")


# --- Containers -----------------------------------------------------------------------


def _check_keys(keys: Iterable[Any]) -> int:
    """Keys and members of sets are text, or integers that no hash takes for another.

    Others can take for ever to hash or to tell apart, as tuples of integers of one
    hash: they are easily made, while that of text is secret. How many integers there
    may be is limited too, since those of different hashes can still meet in a table.

    Returns:
      The number of integers.
    """
    num_integers = 0
    for key in keys:
        is_integer = isinstance(key, int | np.integer)
        if not isinstance(key, _KEYS) or (is_integer and abs(int(key)) >= 2**61 - 1):
            raise InputError(
                f"a pickle with a key of type {type(key).__name__}; expected text or a "
                "number"
            )
        num_integers += is_integer
    limits.check_bytes("its integers as keys", num_integers * _KEY_BYTES)
    return num_integers


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
    "numpy": {"dtype": arrays.dtype, "ndarray": arrays.NDArray},
    "numpy.core.multiarray": {
        "_reconstruct": arrays.reconstruct,
        "scalar": arrays.scalar,
    },
    "numpy.core.numeric": {"_frombuffer": arrays.frombuffer},
    "scipy.sparse": arrays.MATRICES,
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
        self._empty: dict[int, np.ndarray] = {}  # by identity, arrays without content
        self._num_bytes = len(content)
        self._made = 0  # bytes
        self._num_keys = 0  # that are integers

    def _count(self, num_bytes: int) -> None:
        self._made += num_bytes
        limits.check_bytes("what it makes", self._made)

    def _count_keys(self, keys: Iterable[Any]) -> None:
        self._num_keys += _check_keys(keys)
        limits.check_bytes("its integers as keys", self._num_keys * _KEY_BYTES)

    def _count_made(self, made: Any) -> None:
        self._count(sys.getsizeof(made))
        if isinstance(made, dict | set | frozenset):
            self._count_keys(made)

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
        self._count_made(self.stack[-1])

    def load_reduce(self) -> None:
        function = self.stack[-2]
        _refuse_to_call(function)
        super().load_reduce()
        made = self.stack[-1]
        self._count_made(made)
        if function is arrays.reconstruct:
            self._empty[id(made)] = made

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_newobj(self) -> None:
        args, kind = self.stack[-1], self.stack[-2]
        if kind not in arrays.MATRICES.values() or args:
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
        self._count_keys(entries[::2])

    def load_dict(self) -> None:
        self._count_keys(self.stack[::2])
        super().load_dict()

    dispatch[pickle.DICT[0]] = load_dict

    def load_additems(self) -> None:
        self._count_keys(self.stack)
        super().load_additems()

    dispatch[pickle.ADDITEMS[0]] = load_additems

    def load_frozenset(self) -> None:
        self._count_keys(self.stack)
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
            arrays.check_dtype_state(instance, state)
        elif isinstance(instance, np.ndarray):
            if self._empty.pop(id(instance), None) is None:
                raise InputError("a pickle that changes an array once it is made")
            self.stack[-1] = arrays.checked_state(state)
            self._count(len(state[4]))
        elif scipy.sparse.issparse(instance):
            self._count(arrays.fill_matrix(instance, state))
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
    if any(kind is matrix for matrix in arrays.MATRICES.values()):
        raise InputError("a pickle that makes a sparse matrix of another; only data")


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
