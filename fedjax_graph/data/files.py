"""Files that others wrote: where they lie, and one line when they cannot be read."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fedjax_graph.core.errors import InputError, one_line
from fedjax_graph.data import download, limits

Folder = str | os.PathLike[str] | None
"""Where the files of datasets lie; None: see `folders`."""


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
        limits.check_plain(path)
        yield
    except InputError as error:
        said = str(error).removeprefix(f"{path}: ")
        raise InputError(f"{path}: {one_line(said)}") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; expected a {kind}") from error
    except MemoryError as error:
        raise InputError(f"{path}: needs more memory than there is") from error
    except Exception as error:  # whatever a parser makes of broken bytes
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise InputError(
            f"{path}: not a readable {kind} ({reason}); replace it with a whole copy"
        ) from error


def check_texts(what: str, texts: Iterable[str]) -> None:
    """Checks that names can be printed, in one line.

    Raises:
      InputError: naming the first that cannot.
    """
    for text in texts:
        if not text.isprintable():
            raise InputError(f"{what} has {text!a}, expected text that can be printed")


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_npz(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads all arrays of a .npz file; object arrays (pickles) are refused."""
    kind = "NumPy .npz file without object arrays"
    with reading(path, kind), open_npz(path) as archive:
        return {key: archive[key] for key in archive.files}


@contextlib.contextmanager
def open_npz(path: str | os.PathLike) -> Iterator[np.lib.npyio.NpzFile]:
    """Opens a .npz file inside `reading`, once the sizes of its arrays are checked.

    Raises:
      InputError: without the file's name, if it is none or too large.
    """
    with open(path, "rb") as file:
        start = file.read(len(np.lib.format.MAGIC_PREFIX))
        if start == np.lib.format.MAGIC_PREFIX:
            raise InputError("a single array; expected a .npz file of named arrays")
        with limits.open_zip(path) as archive:
            limits.check_npz(archive)
        file.seek(0)
        yield np.load(file, allow_pickle=False)


def npz_keys(path: str | os.PathLike) -> set[str]:
    """The names of the arrays of a .npz file; none of a file that is no such."""
    try:
        with reading(path, "NumPy .npz file"), limits.open_zip(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except InputError:  # which reading it says
        return set()


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
