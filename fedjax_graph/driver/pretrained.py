"""Trained models in a file each: of a run's best state, what forecasts and scores read.

A file holds parameters, the run's settings and network, and a card that says what it
is. `unpack` makes a run's folder of it again, to score and to forecast from, not to
train on: what only training reads is 0 there. Some come with the package, see `names`.
"""

import contextlib
import json
import pathlib
import shlex
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_graph import algorithms
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files
from fedjax_graph.driver import rounds, writers
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.network import Network
from fedjax_graph.driver.seeds import SeedState

FOLDER = pathlib.Path(__file__).parents[1] / "pretrained"
STATE, NETWORK = "state", "network/"  # what names of arrays begin with
FOLDER_FLAGS = tuple(  # of a command, which no card repeats
    f"--{name}="
    for name in ("workdir", "data_dir", "compilation_cache", "profile", "plugin")
)


class Pretrained(NamedTuple):
    """Holds what a file says of its model."""

    method: str  # its name in the run
    settings: dict[str, Any]  # of its checkpoint
    card: dict[str, Any]  # see `pack`
    state: dict[str, np.ndarray]  # path of a leaf -> parameters
    network: dict[str, np.ndarray]


def names() -> list[str]:
    """Lists the models that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def read(name: str) -> Pretrained:
    """Reads a model.

    Args:
      name: one of `names`, or a path that ends in .npz.

    Raises:
      InputError: if there is none, or the file is not one that `pack` wrote.
    """
    path = pathlib.Path(name if name.endswith(".npz") else FOLDER / f"{name}.npz")
    if not path.is_file():
        raise InputError(
            f"pretrained={name}: no such model; known: {', '.join(names())}, or a path "
            "that ends in .npz"
        )
    arrays = files.read_npz(path)
    with files.reading(path, "pretrained model"):
        about = json.loads(str(arrays.pop("about")))
        method, settings, card = (about[key] for key in ("method", "settings", "card"))
        own = {key: x for key, x in arrays.items() if not key.startswith(NETWORK)}
        network = {
            key.removeprefix(NETWORK): x for key, x in arrays.items() if key not in own
        }
    return Pretrained(method, settings, card, own, network)


def pack(workdir: pathlib.Path, method: str, path: pathlib.Path) -> dict[str, Any]:
    """Writes the best state of a run's first seed.

    Args:
      workdir: of a run on a traffic network.
      method: a trained one of it.
      path: of the file, which ends in .npz.

    Returns:
      The card: the best round and the last one, the validation curve, and of a run
      that ended its test scores, command, commit, hardware and versions.

    Raises:
      InputError: if there is no such run, or it cannot be read.
    """
    network, settings, algorithm, seeds = read_run(workdir, method)
    data = network.example()
    best = jax.tree.map(lambda x: np.asarray(x[0]), seeds.best_state)
    card = _card(workdir, method, algorithm.monitor)
    card |= {"best_round": int(seeds.best_round[0]), "last_round": int(seeds.round[0])}
    settings = settings | {"seeds": settings["seeds"][:1]}
    about = {"method": method, "settings": settings, "card": card}
    arrays = {
        name: leaf
        for (name, leaf), is_read in zip(
            _leaves(best).items(), _is_read(algorithm, best, data), strict=True
        )
        if is_read
    }
    arrays |= {NETWORK + key: x for key, x in network.arrays.items()}
    with writers.replacing(path) as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
    return card


def unpack(name: str, workdir: pathlib.Path) -> str:
    """Makes a run's folder of a model, to score or to forecast from.

    Args:
      name: see `read`.
      workdir: an empty folder.

    Returns:
      The method's name.

    Raises:
      InputError: if there is no such model, or it is not of this version's methods.
    """
    model = read(name)
    network = Network(model.network)
    algorithm = algorithm_of(model.settings)
    seeds = model.settings["seeds"]
    like = rounds.abstract_seeds(algorithm, seeds, network.example())
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    leaves = _leaves(jax.tree.map(lambda x: x[0], state.best_state))
    for key, value in model.state.items():
        if key not in leaves or leaves[key].shape != value.shape:
            raise InputError(
                f"pretrained={name}: {key} of shape {value.shape} is no part of what "
                f"{model.method} keeps in this version"
            )
    filled = [model.state.get(key, x)[None] for key, x in leaves.items()]
    best = jax.tree.unflatten(jax.tree.structure(state.best_state), filled)
    best_round = np.full(1, model.card["best_round"], np.int32)
    state = state._replace(best_state=best, best_round=best_round, round=best_round)
    network.write(workdir / "network.npz")
    folder = workdir / model.method / "checkpoints"
    with contextlib.closing(Checkpoints(folder, model.settings)) as kept:
        kept.save(int(best_round[0]), (state, np.float64(0)))
    return model.method


def read_run(
    workdir: pathlib.Path, method: str
) -> tuple[Network, dict[str, Any], FederatedAlgorithm, SeedState]:
    """Reads the latest checkpoint of a method on a traffic network.

    Returns:
      The network, the checkpoint's settings, the method, and the states of all seeds.

    Raises:
      InputError: if there is none, or it cannot be read.
    """
    folder, path = workdir / method / "checkpoints", workdir / "network.npz"
    if not folder.is_dir() or not path.exists():
        raise InputError(f"{workdir}: no finished round of {method} to forecast from")
    network = Network.read(path)
    with contextlib.closing(Checkpoints(folder)) as kept:
        settings = kept.settings()
        algorithm = algorithm_of(settings)
        like = rounds.abstract_seeds(algorithm, settings["seeds"], network.example())
        seeds, _ = kept.restore((like, np.float64(0)))
    return network, settings, algorithm, seeds


def algorithm_of(settings: dict[str, Any]) -> FederatedAlgorithm:
    """Builds the method that a checkpoint's settings name.

    Raises:
      InputError: if it is not registered.
    """
    name = settings["method"]  # `method` under its registered name
    if name not in algorithms.REGISTRY:
        raise InputError(
            f"the method {name!r} is unknown; load its plugin first (fg.plugins.load)"
        )
    config = algorithms.make_config(name, settings["config"])
    return algorithms.get_method(name).factory(config)


def _leaves(state: Any) -> dict[str, Any]:
    return {
        STATE + jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _is_read(algorithm: FederatedAlgorithm, state: Any, data: Data) -> list[bool]:
    """Marks the leaves of a state that are read when it is scored or predicts."""

    def use(state):
        return algorithm.predict(state, data), algorithm.evaluate(state, data)

    jaxpr = jax.make_jaxpr(use)(state).jaxpr
    used = [*jaxpr.outvars, *(x for step in jaxpr.eqns for x in step.invars)]
    indices = {id(x) for x in used}
    return [id(x) in indices for x in jaxpr.invars]


def _card(workdir: pathlib.Path, method: str, monitor: str) -> dict[str, Any]:
    """What the run's own files say of a method; no folder of the machine's."""
    records = writers.read_records(workdir / "metrics.jsonl")
    curve = f"validation_{monitor}"
    values = [record.get(curve) for record in records if record["method"] == method]
    card: dict[str, Any] = {curve: values}
    path = workdir / "results.json"
    if path.exists():
        with files.reading(path, "results of a run"):
            found = json.loads(path.read_text())
            settings, entry = found["settings"], found["methods"][method]
            words = shlex.split(settings["command"])
            command = [word for word in words if not word.startswith(FOLDER_FLAGS)]
            card |= {
                "dataset": found["dataset"],
                "command": shlex.join(map(_without_folder, command)),
                **{key: settings[key] for key in ("source", "hardware", "versions")},
                "test": entry["test"],
            }
    return card


def _without_folder(word: str) -> str:
    """A word of a command, where a path is a file's name alone."""
    flag, equals, value = word.partition("=")
    return flag + equals + pathlib.PurePath(value).name if "/" in value else word
