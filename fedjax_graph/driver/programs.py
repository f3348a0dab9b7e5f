"""The compiled programs of a run, each over all of its seeds.

Each is compiled once for an algorithm and shapes: not again for a new seed or a resumed
run.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_graph.core import client_rows, clients, faults, mesh, trees
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm, Metrics, State
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import no_leaf
from fedjax_graph.driver.config import RunConfig
from fedjax_graph.driver.seeds import (
    SeedState,
    advance,
    init_seeds,
    map_seeds,
    rounds_waited,
)


@functools.lru_cache(maxsize=8)
def traced_once(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Has the ledger and the programs share the traces of a method's functions.

    Not for rounds that are watched: what watches them is no argument.
    """
    names = ("init", "round", "evaluate")
    traced = {name: jax.jit(getattr(algorithm, name), inline=True) for name in names}
    return algorithm._replace(**traced)


@functools.partial(jax.jit, static_argnums=0)
def compute_exchange(algorithm: FederatedAlgorithm, data: Data) -> dict[str, Any]:
    """Computes `algorithm.exchange`, and places the fields as those of a split."""
    fields = algorithm.exchange(data) if algorithm.exchange else {}
    placed = client_rows.spread(data._replace(**fields))
    return {name: getattr(placed, name) for name in fields}


def exchange(
    algorithm: FederatedAlgorithm,
    splits: Mapping[str, Data],
    compute: Callable[[FederatedAlgorithm, Data], dict[str, Any]] = compute_exchange,
) -> dict[str, Data]:
    """The splits as a method reads them, where they live; see `prepared`.

    What is made of leaves that splits of equal shapes share is made, and kept, once.

    Args:
      algorithm: the method.
      splits: arrays, or shapes and where the arrays would lie.
      compute: (algorithm, split) -> what `algorithm.exchange` makes of it.
    """
    found: dict[Any, dict[str, Any]] = {}

    def of(data):
        leaves, structure = jax.tree.flatten(data)
        is_read = trees.leaves_read(algorithm.exchange, data)
        read = zip(leaves, is_read, strict=True)
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        known = structure, shapes, tuple(id(x) for x, is_read in read if is_read)
        if known not in found:
            found[known] = compute(algorithm, data)
        return data._replace(**found[known])

    return {name: of(data) for name, data in splits.items()}


def check_exchange(
    algorithm: FederatedAlgorithm, is_drawn: Callable[[tuple[Any, ...]], bool]
) -> None:
    """Checks that clients who exchange data first have the same for all seeds.

    Raises:
      InputError: if they do not.
    """
    if algorithm.exchange and is_drawn is not no_leaf:
        raise InputError(
            "clients of this method exchange data once for all seeds, so is_drawn, by "
            "which each seed draws its own, has to be left out"
        )


def _exchanged(
    algorithm: FederatedAlgorithm, data: Data, is_drawn=no_leaf
) -> tuple[FederatedAlgorithm, Data]:
    """A method whose clients need not exchange any more, and what they know then."""
    check_exchange(algorithm, is_drawn)
    if algorithm.exchange:
        data = exchange(algorithm, {"": data})[""]
    return algorithm._replace(exchange=None), data


def abstract_exchange(algorithm: FederatedAlgorithm, data: Data) -> dict[str, Any]:
    """Shapes and types of what `algorithm.exchange` makes; nothing is computed."""
    return jax.eval_shape(algorithm.exchange, data)


def _init_seeds(algorithm, seeds, data, is_drawn):
    states = init_seeds(algorithm, seeds, data, is_drawn)
    return mesh.spread(states, clients.count(data), axis=1)


_INIT_OPTIONS = {"cpu": {"xla_backend_optimization_level": 1}}
"""Of a program that runs once: draws compile three times as fast, to the same bits."""


@functools.cache
def _init_program(backend: str) -> Callable[..., SeedState]:
    options = _INIT_OPTIONS.get(backend)
    return jax.jit(_init_seeds, static_argnums=(0, 3), compiler_options=options)


def init(
    algorithm: FederatedAlgorithm,
    seeds: jax.Array,
    data: Data,
    is_drawn: Callable[[tuple[Any, ...]], bool],
) -> SeedState:
    """Makes the states of all seeds [seeds] before the first round, where they live."""
    return _init_program(mesh.backend())(algorithm, seeds, data, is_drawn)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5, 6), donate_argnums=7)
def _advance_seeds(
    algorithm,
    num_rounds,
    patience,
    keep_last,
    is_drawn,
    seeds_per_chunk,
    watch,
    seed_states,
    train,
    validation,
):
    def one(*args):
        return advance(
            algorithm, num_rounds, patience, *args, keep_last=keep_last, watch=watch
        )

    splits = (train, validation)
    seed_states, metrics = map_seeds(
        one, seed_states, splits, is_drawn, seeds_per_chunk, in_place=True
    )
    seed_states = mesh.spread(seed_states, clients.count(train), axis=1)
    is_stopped = rounds_waited(algorithm, seed_states) >= patience
    return seed_states, *mesh.replicated((metrics, is_stopped))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate_seeds(algorithm, is_drawn, states, data):
    scores = map_seeds(algorithm.evaluate, states, (data,), is_drawn)
    return mesh.replicated(scores)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predict_seeds(algorithm, is_drawn, states, data):
    outputs = map_seeds(algorithm.predict, states, (data,), is_drawn)
    return mesh.replicated(outputs)


def trace(
    algorithm: FederatedAlgorithm,
    config: RunConfig,
    num_rounds: int,
    seed_states: SeedState,
    train: Data,
    validation: Data,
    watch: faults.Watch | None = None,
) -> Any:
    """Traces the program that a run executes: rounds of all seeds and an evaluation.

    It takes and donates the states, and returns the next ones, metrics and whether
    each seed has stopped.

    Args:
      algorithm: the method.
      config: of the run.
      num_rounds: of one call of the program.
      seed_states, train, validation: arrays, or shapes and where the arrays would lie.
      watch: for clients whose updates are not finite.
    """
    return _advance_seeds.trace(
        algorithm if watch else traced_once(algorithm),
        num_rounds,
        config.patience,
        config.keep_last,
        config.is_drawn,
        config.seeds_per_chunk,
        watch,
        seed_states,
        train,
        validation,
    )


def evaluate_seeds(
    algorithm: FederatedAlgorithm, states: State, data: Data, is_drawn=no_leaf
) -> Metrics:
    """Scores each seed's state on a split; NumPy, with a leading axis of seeds."""
    algorithm, data = _exchanged(algorithm, data, is_drawn)
    scores = _evaluate_seeds(traced_once(algorithm), is_drawn, states, data)
    return jax.device_get(scores)


def predict_seeds(
    algorithm: FederatedAlgorithm, states: State, data: Data, is_drawn=no_leaf
) -> np.ndarray:
    """Predicts a split by each seed's state, [seeds, ...]."""
    algorithm, data = _exchanged(algorithm, client_rows.put(data), is_drawn)
    return jax.device_get(_predict_seeds(algorithm, is_drawn, states, data))
