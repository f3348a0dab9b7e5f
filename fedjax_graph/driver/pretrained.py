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
from fedjax_graph.core import trees
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits
from fedjax_graph.driver import results, writers
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.network import Network
from fedjax_graph.driver.seeds import (
    SeedState,
    abstract_seeds,
    check_chosen,
    seed_keys,
)

FOLDER = pathlib.Path(__file__).parents[1] / "pretrained"
STATE, NETWORK = "state", "network/"  # what names of arrays begin with
OWN_FLAGS = (  # of a command, which no card repeats: of its folders, and of a kill
    *("workdir", "data_dir", "compilation_cache", "profile", "plugin"),
    *("resume", "checkpoint_seconds", "coordinator", "num_processes", "process_id"),
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
    if not path.exists():
        raise InputError(
            f"pretrained={name}: no such model; known: {', '.join(names())}, or a path "
            "that ends in .npz"
        )
    arrays = files.read_npz(path)
    with files.reading(path, "pretrained model"):
        about = limits.parse_json(str(arrays.pop("about")))
        _check(about)
        own = {key: x for key, x in arrays.items() if not key.startswith(NETWORK)}
        network = {
            key.removeprefix(NETWORK): x for key, x in arrays.items() if key not in own
        }
    return Pretrained(about["method"], about["settings"], about["card"], own, network)


def _check(about: Any) -> None:
    """Checks what a file says of its model: it may be anybody's.

    Raises:
      InputError: if something that is read is missing, or of another type.
    """
    about = about if isinstance(about, dict) else {}
    method, settings, card = (about.get(key) for key in ("method", "settings", "card"))
    if (
        not isinstance(method, str)
        or pathlib.PurePath(method).name != method  # it names a folder
        or method in ("", "..")
        or not method.isprintable()
    ):
        raise InputError(f"expected a plain name of its method, found {method!a}")
    if not isinstance(settings, dict) or not isinstance(card, dict):
        raise InputError("expected its settings and its card")
    is_config = isinstance(settings.get("config"), dict)
    if not is_config or not isinstance(settings.get("method"), str):
        raise InputError("expected a method and its config in its settings")
    seeds, best_round = settings.get("seeds"), card.get("best_round")
    if not isinstance(seeds, list) or len(seeds) != 1 or not _is_count(seeds[0], 2**32):
        raise InputError(f"expected one seed in its settings, found {seeds!a}")
    if not _is_count(best_round, 2**31):
        raise InputError(f"expected a best round on its card, found {best_round!a}")


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value < most


def pack(
    workdir: pathlib.Path, method: str, path: pathlib.Path, note: str | None = None
) -> dict[str, Any]:
    """Writes the best state of a run's first seed.

    Args:
      workdir: of a run on a traffic network.
      method: a trained one of it.
      path: of the file, which ends in .npz.
      note: what the card should say beside, such as where earlier rounds were run.

    Returns:
      The card, of that seed: the best round and the last one, the validation curve,
      the note, and of a run that ended its test scores, with command, commit, hardware
      and versions of the last command, which may have been resumed elsewhere.

    Raises:
      InputError: if there is no such run, or it cannot be read.
    """
    network, settings, algorithm, seeds = read_run(workdir, method)
    data = network.example()
    best = jax.tree.map(lambda x: np.asarray(x[0]), seeds.best_state)
    best_round = int(seeds.best_round[0])
    rounds = {"best_round": best_round, "last_round": int(seeds.round[0])}
    card = _card(workdir, method, algorithm.monitor, **rounds) | rounds
    if note is not None:
        card["note"] = note
    settings = settings | {"seeds": settings["seeds"][:1]}
    about = {"method": method, "settings": settings, "card": card}
    arrays = {
        name: leaf
        for (name, leaf), is_read in zip(
            _leaves(best).items(), _leaves_used(algorithm, best, data), strict=True
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
    model, what = read(name), f"pretrained={name}"
    with files.reading(what, "pretrained model"):
        network = Network(model.network)
        state = _state_of(model, network)
    network.write(workdir / "network.npz")
    folder = workdir / model.method / "checkpoints"
    with contextlib.closing(Checkpoints(folder, model.settings)) as kept:
        kept.save(int(state.best_round[0]), (state, np.float64(0)))
    return model.method


def _state_of(model: Pretrained, network: Network) -> SeedState:
    """A state whose best one is the model's, and 0 where only training reads.

    Raises:
      InputError: if the model lacks a part that is read, or has another.
    """
    algorithm, data = algorithm_of(model.settings), network.example()
    like = abstract_seeds(algorithm, model.settings["seeds"], data)
    best = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), like)
    best, known = best.best_state, f"what {model.method} keeps in this version"
    leaves = _leaves(best)
    for key, value in model.state.items():
        what = f"{key} of shape {value.shape} and type {value.dtype}"
        wanted = leaves.get(key, value[None])
        if (wanted.shape, wanted.dtype) != (value.shape, value.dtype):
            raise InputError(f"{what} is no part of {known}")
    for key, is_read in zip(leaves, _leaves_used(algorithm, best, data), strict=True):
        if is_read and key not in model.state:
            raise InputError(f"no {key}, a part of {known}")
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    zeros = _leaves(jax.tree.map(lambda x: x[0], state.best_state))
    filled = [model.state.get(key, x)[None] for key, x in zeros.items()]
    best_round = np.full(1, model.card["best_round"], np.int32)
    return state._replace(
        best_state=jax.tree.unflatten(jax.tree.structure(state.best_state), filled),
        best_round=best_round,
        round=best_round,
        key_data=np.asarray(seed_keys(model.settings["seeds"])),
    )


def read_run(
    workdir: pathlib.Path, method: str
) -> tuple[Network, dict[str, Any], FederatedAlgorithm, SeedState]:
    """Reads the latest checkpoint of a method on a traffic network.

    Returns:
      The network, the checkpoint's settings, the method, and the states of all seeds.

    Raises:
      InputError: if there is none, it cannot be read, or it has no best round.
    """
    folder, path = workdir / method / "checkpoints", workdir / "network.npz"
    if not folder.is_dir() or not path.exists():
        raise InputError(f"{workdir}: no finished round of {method} to forecast from")
    network = Network.read(path)
    with contextlib.closing(Checkpoints(folder)) as kept:
        settings = kept.settings()
        algorithm = algorithm_of(settings)
        like = abstract_seeds(algorithm, settings["seeds"], network.example())
        seeds, _ = kept.restore((like, np.float64(0)))
    check_chosen(method, algorithm, seeds)
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


def _leaves_used(algorithm: FederatedAlgorithm, state: Any, data: Data) -> list[bool]:
    """Marks the leaves of a state that are read when it is scored or predicts."""

    def use(state):
        known = algorithm.prepared(data)
        return algorithm.predict(state, known), algorithm.evaluate(state, known)

    return trees.leaves_read(use, state)


def _card(
    workdir: pathlib.Path, method: str, monitor: str, best_round: int, last_round: int
) -> dict[str, Any]:
    """What the run's own files say of a first seed; no folder of the machine's.

    Without test scores where those are of another round than the best one now.
    """
    records = writers.read_records(workdir / "metrics.jsonl")
    curve = f"validation_{monitor}"
    values = [
        record.get(f"{curve}_by_seed", [record.get(curve)])[0]
        for record in records
        if record["method"] == method and record["round"] <= last_round
    ]
    card: dict[str, Any] = {curve: values}
    path = workdir / "results.json"
    if path.exists():
        with files.reading(path, "results of a run"):
            found = limits.parse_json(path.read_text())
            settings, entry = found["settings"], found["methods"].get(method)
            settings = results.settings_of(settings, entry or {})
            words = shlex.split(settings["command"])
            flags = {f"--{name}" for name in OWN_FLAGS}
            command = [word for word in words if word.partition("=")[0] not in flags]
            card |= {
                "dataset": found["dataset"],
                "command": shlex.join(map(_without_folder, command)),
                **{key: settings[key] for key in ("source", "hardware", "versions")},
            }
            if entry is not None and entry["best_round_by_seed"][0] == best_round:
                card["test"] = _of_first_seed(entry)
    return card


def _of_first_seed(entry: dict[str, Any]) -> Any:
    """The test scores of a method's first seed; of one seed those of all."""
    by_seed = entry.get("test_by_seed")
    if by_seed is None:
        return entry["test"]
    return jax.tree.map(lambda x: x[0], by_seed, is_leaf=lambda x: isinstance(x, list))


def _without_folder(word: str) -> str:
    """A word of a command, where a path is a file's name alone."""
    flag, equals, value = word.partition("=")
    return flag + equals + pathlib.PurePath(value).name if "/" in value else word
