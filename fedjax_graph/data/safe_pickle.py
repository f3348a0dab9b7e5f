"""Pickles that hold data, and nothing that runs.

Research datasets are often pickles, many written by Python 2, and a pickle can call
any function. This reader admits NumPy arrays, data types and scalars, SciPy sparse
matrices and plain containers, and refuses everything else before it is called.
"""

import collections
import os
import pickle
import re
from typing import Any

import numpy as np
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files


def _dtype(spec: str, align: bool = False, copy: bool = False) -> np.dtype:
    """`numpy.dtype`; old pickles give the flags as 0 and 1, which NumPy deprecates."""
    return np.dtype(spec, bool(align), bool(copy))


def _encode(text: str, encoding: str) -> bytes:
    """`codecs.encode`, as Python 3 writes bytes in Python 2's pickle protocols."""
    if encoding != "latin1":
        raise InputError(f"a pickle with bytes in encoding {encoding!r}")
    return text.encode("latin1")


# Functions with which NumPy's own pickles rebuild arrays and scalars. NumPy moved
# them from `numpy.core` to `numpy._core`; pickles name either.
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]
_FROM_BUFFER = np.zeros(1).__reduce_ex__(5)[0]

_ADMITTED = {
    "__builtin__": {kind.__name__: kind for kind in (complex, dict, frozenset, set)}
    | {kind.__name__: kind for kind in (list, tuple)},
    "_codecs": {"encode": _encode},
    "collections": {
        "OrderedDict": collections.OrderedDict,
        "defaultdict": collections.defaultdict,
    },
    "numpy": {"dtype": _dtype, "ndarray": np.ndarray},
    "numpy.core.multiarray": {"_reconstruct": _RECONSTRUCT, "scalar": _SCALAR},
    "numpy.core.numeric": {"_frombuffer": _FROM_BUFFER},
    "scipy.sparse": {
        f"{layout}_{kind}": getattr(scipy.sparse, f"{layout}_{kind}")
        for layout in ("bsr", "coo", "csc", "csr", "dia")
        for kind in ("array", "matrix")
    },
}


def _present_name(module: str) -> str:
    """The name in `_ADMITTED` of a module under any name that it has had."""
    module = re.sub(r"^builtins$", "__builtin__", module)
    module = re.sub(r"^numpy\._core\.", "numpy.core.", module)
    return re.sub(r"^scipy\.sparse\._?(bsr|coo|csc|csr|dia)$", "scipy.sparse", module)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[_present_name(module)][name]
        except KeyError:
            raise InputError(
                f"a pickle that would run {module}.{name}; only NumPy arrays, SciPy "
                "sparse matrices and plain containers are read: get the file from "
                "its publisher again"
            ) from None


def load(path: str | os.PathLike) -> Any:
    """Reads a pickle of arrays, sparse matrices and containers of them.

    Text of Python 2 is decoded as latin1, as its arrays need.

    Raises:
      InputError: if the file is missing, broken, or holds anything else.
    """
    with files.reading(path, "pickle"), open(path, "rb") as file:
        try:
            content = _Unpickler(file, encoding="latin1").load()
        except InputError:
            raise
        except Exception as error:  # a broken pickle can raise nearly anything
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if scipy.sparse.issparse(content) and content.format in ("bsr", "csc", "csr"):
            content.check_format(full_check=True)
        return content
