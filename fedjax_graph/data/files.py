"""Files that others wrote: where they lie, and one line when they cannot be read."""

import contextlib
import csv
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import download

Folder = str | os.PathLike[str] | None
"""Where the files of datasets lie; None: see `folders`."""
_UNREADABLE = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    csv.Error,
    zipfile.BadZipFile,
    zlib.error,
)


@contextlib.contextmanager
def reading(path: str | os.PathLike, kind: str) -> Iterator[None]:
    """Turns whatever goes wrong inside into an `InputError` that names the file.

    Args:
      path: the file that is read inside the `with` block.
      kind: what was expected of it, such as "NumPy .npz file".

    Raises:
      InputError: one line; an `InputError` raised inside gets the path in front.
    """
    try:
        yield
    except InputError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise InputError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; expected a {kind}") from error
    except _UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"{path}: not a readable {kind} ({reason}); replace it with a whole copy"
        ) from error


def read_npz(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads all arrays of a .npz file; object arrays (pickles) are refused."""
    kind = "NumPy .npz file without object arrays"
    with reading(path, kind), open(path, "rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError("a single array; expected a .npz file of named arrays")
        return {key: archive[key] for key in archive.files}


def folders(data_dir: Folder = None) -> list[Path]:
    """Folders with data: `data_dir` or $FEDJAX_GRAPH_DATA, then the download cache.

    Raises:
      InputError: if a folder was named and does not exist.
    """
    named = data_dir or os.environ.get("FEDJAX_GRAPH_DATA")
    if not named:
        return [download.cache_folder()]
    if not Path(named).is_dir():
        raise InputError(
            f"{named}: no such folder; data_dir or FEDJAX_GRAPH_DATA has to name "
            "the folder with the dataset files"
        )
    return [Path(named), download.cache_folder()]


def not_found(
    name: str,
    wanted: Iterable[str],
    data_dir: Folder = None,
    *,
    first: str = "",
    by_hand: str = "put one of them there, or name their folder with data_dir",
) -> InputError:
    """The error where a published dataset is in no form that can be read.

    Args:
      name: of the dataset.
      wanted: names of files or folders, of which one would do.
      data_dir: see `folders`.
      first: what else can be done, ahead of the download; ends in ", or ".
      by_hand: what to do without the download.
    """
    searched = " or ".join(map(str, folders(data_dir)))
    message = f"{name}: no {' or '.join(wanted)} in {searched}; {first}"
    if name in download.REGISTRY:
        message += f"run `python -m experiments.datasets --dataset={name} --download`, "
    return InputError(message + by_hand)


def unknown(
    kind: str, name: str, known: Iterable[str], paths: Iterable[str]
) -> InputError:
    """The error where a name is neither that of a dataset nor a path of one's own.

    Args:
      kind: of the datasets.
      name: that is not known.
      known: names.
      paths: what a path may be of, each as in "of a .npz file".
    """
    return InputError(
        f"unknown {kind} dataset {name!r}; known: {', '.join(known)}; or the path "
        + ", ".join(paths)
    )


def find(
    names: Iterable[str], paths: Iterable[Path], subfolders: Iterable[str] = ()
) -> Path | None:
    """The first file of these names, tried in order, in the first place with one."""
    for path in paths:
        for folder in (path, *(path / sub for sub in subfolders)):
            for name in names:
                if (folder / name).is_file():
                    return folder / name
    return None
