"""Every dataset by one name: published ones, synthetic ones, files and one's own.

`load` is the door to all of them; `traffic`, `images` and `graphs` say what the
datasets of a kind are and in which forms they are read.
"""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, overload

from fedjax_graph.core.errors import InputError, meant
from fedjax_graph.core.registry import Registry
from fedjax_graph.data.files import Folder
from fedjax_graph.data.graphs import datasets as graphs
from fedjax_graph.data.graphs import node_dataset
from fedjax_graph.data.graphs import synthetic as synthetic_graphs
from fedjax_graph.data.graphs.node_dataset import NodeDataset
from fedjax_graph.data.images import datasets as images
from fedjax_graph.data.images import synthetic as synthetic_images
from fedjax_graph.data.images.datasets import ImageDataset
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import synthetic as synthetic_traffic
from fedjax_graph.data.traffic import synthetic_flows
from fedjax_graph.data.traffic.network import TrafficDataset

Dataset = TrafficDataset | ImageDataset | NodeDataset
Loader = Callable[..., Dataset]
L = TypeVar("L", bound=Loader)


class Kind(NamedTuple):
    """What the datasets of a kind have in common."""

    dataset_type: type
    module: ModuleType
    """With `PUBLISHED` (name -> what has a description), `load(name, data_dir,
    **options)`, `locate(name, data_dir)`, `reads(path)` and `PATHS`."""
    statistics: Callable[[Any], dict[str, Any]]


KINDS = {  # in the order in which they are asked whether they read a path
    "graphs": Kind(NodeDataset, graphs, node_dataset.statistics),
    "images": Kind(ImageDataset, images, images.statistics),
    "traffic": Kind(TrafficDataset, traffic, traffic.statistics),
}


class Entry(NamedTuple):
    """A dataset of the catalog."""

    kind: str  # a key of KINDS
    description: str
    load: Callable[..., Any]  # (name, data_dir, **options) -> dataset
    locate: Callable[[str, Folder], Path | None] | None = None
    """(name, data_dir) -> its file, or None where it is missing; None for a dataset
    that needs no file."""


def _published(kind: str) -> dict[str, Entry]:
    module = KINDS[kind].module
    return {
        name: Entry(kind, published.description, module.load, module.locate)
        for name, published in module.PUBLISHED.items()
    }


def _made(kind: str, description: str, make: Loader) -> Entry:
    """A dataset that comes from a function of options alone."""

    def load(name: str, data_dir: Folder, **options: Any) -> Dataset:
        _check_options(name, make, options)
        if "data_dir" in inspect.signature(make).parameters:
            options["data_dir"] = data_dir
        return make(**options)

    return Entry(kind, description, load)


DATASETS: Registry[Entry] = Registry(
    "dataset",
    {
        **_published("traffic"),
        "synthetic": _made(
            "traffic",
            "cell transmission model on a random road network, 20 sensors, 14 days",
            synthetic_traffic.traffic_network,
        ),
        **{
            name: _made(
                "traffic",
                f"the same at {of}'s size: flows, 15 minutes apart, 365 days",
                functools.partial(synthetic_flows.twin, of),
            )
            for name, of in synthetic_flows.TWINS.items()
        },
        **_published("images"),
        "synthetic_images": _made(
            "images",
            "textured shapes before clutter, 3200 images of 32 x 32 pixels, 10 classes",
            synthetic_images.images,
        ),
        **_published("graphs"),
        "synthetic_graph": _made(
            "graphs",
            "stochastic block model with hubs and bags of words, 3000 nodes, 6 classes",
            synthetic_graphs.node_graph,
        ),
        "synthetic_mixed": _made(
            "graphs",
            "the same, with three edges of five to the next class",
            synthetic_graphs.mixed_graph,
        ),
        "synthetic_large": _made(
            "graphs",
            "the same at Amazon2M's size, dense features; needs 6 GiB",
            synthetic_graphs.large_node_graph,
        ),
    },
)
ALIASES = {
    **graphs.ALIASES,
    ("synthetic", "images"): "synthetic_images",
    ("synthetic", "graphs"): "synthetic_graph",
}
"""Name, or name and kind -> the name in DATASETS."""


def load(
    name: str | os.PathLike[str],
    data_dir: Folder = None,
    *,
    kind: str | None = None,
    **options: Any,
) -> Any:
    """Loads a dataset: a published or synthetic one, a registered one, or a file.

    See `data.traffic.datasets.load`, `data.images.datasets.load` and
    `data.graphs.datasets.load` for the files of the published datasets and the forms
    of a user's own.

    Args:
      name: a name of DATASETS, or the path of a file or folder.
      data_dir: folder with the files of published datasets; by default
        $FEDJAX_GRAPH_DATA, then the download cache.
      kind: which kind it has to be of: "traffic", "images" or "graphs"; by default any,
        where a file is told by what is in it.
      options: of the dataset's loader, such as `needs_graph` of traffic networks, and
        `num_sensors`, `num_days` or `seed` of the synthetic one.

    Returns:
      A `TrafficDataset`, an `ImageDataset` or a `NodeDataset`.

    Raises:
      InputError: one line; there is no such dataset, it is of another kind or takes no
        such option, or a file is missing, broken or not what it should be.
    """
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"dataset {name!r}: expected a name or a path")
    name = resolve(os.fspath(name), kind)
    entry = find(name, kind)
    _check_options(name, entry.load, options)
    dataset = entry.load(name, data_dir, **options)
    expected = KINDS[entry.kind].dataset_type
    if not isinstance(dataset, expected):
        raise InputError(
            f"dataset {name!r}: its loader returned a {type(dataset).__name__}, "
            f"expected a {expected.__name__}"
        )
    return dataset


def kind_of(name: str) -> str:
    """Tells the kind of a dataset: "traffic", "images" or "graphs".

    Raises:
      InputError: if there is no such dataset.
    """
    return find(name).kind


def statistics(dataset: Dataset) -> dict[str, Any]:
    """Counts what is in a dataset, in the terms of its kind."""
    for kind in KINDS.values():
        if isinstance(dataset, kind.dataset_type):
            return kind.statistics(dataset)
    raise InputError(f"dataset is a {type(dataset).__name__}, not one of a known kind")


def resolve(name: str, kind: str | None = None) -> str:
    """The name in DATASETS of what also has another name."""
    return ALIASES.get((name, kind), ALIASES.get(name, name))


def find(name: str, kind: str | None = None) -> Entry:
    """Finds a dataset without loading it.

    Raises:
      InputError: if there is no such dataset, or none of this kind.
    """
    name = resolve(name, kind)
    if kind is not None and kind not in KINDS:
        raise InputError(f"kind={kind!r}: unknown; known: {', '.join(KINDS)}")
    if name in DATASETS:
        entry = DATASETS[name]
        if kind not in (None, entry.kind):
            raise InputError(
                f"dataset {name!r} is of the kind {entry.kind}, expected one of the "
                f"kind {kind}: {_known(kind)}"
            )
        return entry
    if not (name.endswith((".npz", ".csv", ".tar.gz")) or Path(name).is_dir()):
        hint = meant(name, DATASETS)
        raise InputError(f"unknown dataset {name!r}{hint}; known: {_known(kind)}")
    if kind is None:  # else the kind's own loader says what it cannot read
        kind = next((k for k in KINDS if KINDS[k].module.reads(name)), "traffic")
    return Entry(kind, "a user's own", KINDS[kind].module.load)


def _known(kind: str | None) -> str:
    """Names, and what a path may be of."""
    names = [name for name in DATASETS if kind in (None, DATASETS[name].kind)]
    modules = [KINDS[own].module for own in KINDS if kind in (None, own)]
    paths = dict.fromkeys(path for module in modules for path in module.PATHS)
    return f"{', '.join(names)}; or the path {', '.join(paths)}"


def _check_options(name: str, load: Loader, options: dict[str, Any]) -> None:
    """Refuses options that a loader does not take."""
    parameters = inspect.signature(load).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    taken = [key for key in parameters if key not in ("name", "data_dir")]
    for key in options:
        if key not in taken:
            raise InputError(
                f"dataset {name!r}: no option {key!r}; known: "
                f"{', '.join(taken) or 'none'}"
            )


@overload
def register_dataset(
    name: str, loader: L, *, kind: str, description: str = ""
) -> L: ...


@overload
def register_dataset(
    name: str, loader: None = None, *, kind: str, description: str = ""
) -> Callable[[L], L]: ...


def register_dataset(
    name: str, loader: Any = None, *, kind: str, description: str = ""
) -> Any:
    """Registers a dataset of one's own; without a loader, returns a decorator of it.

        @register_dataset("my_roads", kind="traffic", description="12 sensors")
        def my_roads() -> TrafficDataset: ...

    Args:
      name: under which `load` and the binaries find it.
      loader: makes the dataset; its arguments are the options of `load`, and
        `data_dir` if it has such.
      kind: "traffic", "images" or "graphs".
      description: for the list of datasets.

    Raises:
      InputError: if the name is taken or there is no such kind.
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind!r}: unknown; known: {', '.join(KINDS)}")

    def register(loader: L) -> L:
        DATASETS.register(name, _made(kind, description or "a plugin's", loader))
        return loader

    return register if loader is None else register(loader)
