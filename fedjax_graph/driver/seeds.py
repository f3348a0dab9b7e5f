"""The seeds of a run: their states, and some rounds of each in one program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import clients, faults, mesh, trees
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm, Metrics, State
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import no_leaf


class SeedState(NamedTuple):
    """Holds all that a seed's next round reads; saved whole."""

    state: State
    best_state: State  # what the algorithm's `kept` leaves of it
    best_loss: jax.Array  # [] float32, lowest value of the algorithm's `monitor`
    best_round: jax.Array  # [] int32
    round: jax.Array  # [] int32
    key_data: jax.Array  # random key of the seed


def map_seeds(
    fn: Callable[..., Any],
    own: Any,
    splits: tuple[Data, ...],
    is_drawn: Callable[[tuple[Any, ...]], bool] = no_leaf,
    seeds_per_chunk: int | None = 1,
    in_place: bool = False,
) -> Any:
    """Calls `fn(own, *splits)` for each seed, with what it has of its own.

    Args:
      fn: of one seed.
      own: pytree of [seeds, ...].
      splits: see `RunConfig.is_drawn`.
      is_drawn: likewise.
      seeds_per_chunk, in_place: see `clients.map_axis`.
    """
    common, drawn = trees.partition(splits, lambda path: is_drawn(path[1:]))

    def one(own, drawn):
        return fn(own, *trees.combine(common, drawn))

    return clients.map_axis(one, seeds_per_chunk, in_place)(own, drawn)


def of_seed(data: Data, index: int, is_drawn=no_leaf) -> Data:
    """Takes a split as one seed sees it; see `RunConfig.is_drawn`."""
    common, drawn = trees.partition(data, is_drawn)
    return trees.combine(common, jax.tree.map(lambda x: x[index], drawn))


def init_seeds(
    algorithm: FederatedAlgorithm, seeds, data: Data, is_drawn=no_leaf
) -> SeedState:
    """Makes the state before the first round, with a leading axis of seeds."""

    def one(seed, data):
        key = jax.random.key(seed)
        state = algorithm.init(jax.random.fold_in(key, 0), data)
        return SeedState(
            state=state,
            best_state=algorithm.kept(state),
            best_loss=jnp.float32(jnp.inf),
            best_round=jnp.int32(0),
            round=jnp.int32(0),
            key_data=jax.random.key_data(key),
        )

    return map_seeds(one, jnp.asarray(seeds, jnp.uint32), (data,), is_drawn)


def check_storable(state: State) -> None:
    """Checks that a checkpoint can hold a state.

    Raises:
      InputError: if it has random keys, which are no arrays of numbers.
    """
    for path, x in jax.tree.leaves_with_path(state):
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
            place = jax.tree_util.keystr(path, simple=True, separator=".")
            raise InputError(
                f"init: the state has a random key in {place}, which no file can hold; "
                "keep jax.random.key_data of it"
            )


def abstract_seeds(
    algorithm: FederatedAlgorithm, seeds, data: Data, is_drawn=no_leaf
) -> SeedState:
    """Finds shapes and types of `init_seeds`; nothing is computed."""

    def init(data):
        return init_seeds(algorithm, seeds, algorithm.prepared(data), is_drawn)

    return jax.eval_shape(init, data)


def advance(
    algorithm: FederatedAlgorithm,
    num_rounds: int,
    patience: int,
    seed_state: SeedState,
    train: Data,
    validation: Data,
    keep_last: bool = False,
    watch: faults.Watch | None = None,
) -> tuple[SeedState, Metrics]:
    """Runs `num_rounds` rounds of one seed and an evaluation, unless it has stopped.

    Once the last phase has begun, the best state is one of that phase, whatever those
    before it scored; until then it is the best so far, and no seed stops.

    Args:
      algorithm: the method.
      num_rounds: of this call.
      patience: rounds without a better validation figure, of the last phase.
      seed_state: of one seed.
      train, validation: data.
      keep_last: see `RunConfig`.
      watch: for clients whose updates are not finite.

    Returns:
      The next state and metrics: those of the rounds with a leading axis of rounds,
      those of the evaluation under `validation`. Where the seed has stopped they are
      NaN, and 0 those that are no floats.

    Raises:
      InputError: if the evaluation has no metric that the algorithm's `monitor` names,
        or those of a round are not single numbers, `train_loss` among them.
    """

    @functools.partial(jax.jit, inline=True)  # is traced once, for both branches
    def run(seed_state):
        key = jax.random.wrap_key_data(seed_state.key_data)
        is_active = rounds_waited(algorithm, seed_state) < patience

        def body(state, round_):
            # Under `vmap` seeds that have stopped are computed as well.
            reported = jnp.where(is_active, round_, 0) if watch else round_
            with faults.watching(watch, reported):
                return algorithm.round(state, train, jax.random.fold_in(key, round_))

        rounds = seed_state.round + 1 + jnp.arange(num_rounds, dtype=jnp.int32)
        state, metrics = jax.lax.scan(body, seed_state.state, rounds)
        _check_metrics(metrics)
        kept = algorithm.kept(state)
        scores = algorithm.evaluate(kept, validation)
        monitored = _monitored(algorithm, scores).astype(seed_state.best_loss.dtype)
        first = algorithm.scored_from
        is_outdated = (seed_state.best_round < first) & (rounds[-1] >= first)
        to_beat = jnp.where(is_outdated, jnp.inf, seed_state.best_loss)
        better = (monitored < to_beat) | keep_last
        best_state, best_loss, best_round = trees.select(
            better,
            (kept, monitored, rounds[-1]),
            (seed_state.best_state, seed_state.best_loss, seed_state.best_round),
        )
        seed_state = SeedState(
            state, best_state, best_loss, best_round, rounds[-1], seed_state.key_data
        )
        return seed_state, {**metrics, "validation": scores}

    def skip(seed_state):
        _, metrics = jax.eval_shape(run, seed_state)
        return seed_state, jax.tree.map(_no_figure, metrics)

    waited = rounds_waited(algorithm, seed_state)
    return jax.lax.cond(waited < patience, run, skip, seed_state)


def rounds_waited(algorithm: FederatedAlgorithm, seed_state: SeedState) -> jax.Array:
    """Rounds of the last phase since the best one; below 1 before there are any."""
    before = algorithm.scored_from - 1
    return seed_state.round - jnp.maximum(seed_state.best_round, before)


def _no_figure(like: jax.ShapeDtypeStruct) -> jax.Array:
    is_float = jnp.issubdtype(like.dtype, jnp.floating)
    return jnp.full(like.shape, jnp.nan if is_float else 0, like.dtype)


def _check_metrics(metrics: Metrics) -> None:
    """Checks what rounds report, each with an axis of rounds."""
    for name in ("train_loss", *metrics):
        if name == "validation" or np.ndim(metrics.get(name)) != 1:
            raise InputError(
                f"round: its metric {name!r} is not one number of a name of its own; "
                "expected `train_loss` and others, but none called `validation`"
            )


def _monitored(algorithm: FederatedAlgorithm, scores: Metrics) -> jax.Array:
    value = scores.get(algorithm.monitor)
    if value is None or jnp.shape(value):
        raise InputError(
            f"evaluate: expected a metric {algorithm.monitor!r}, one number, by which "
            f"the best round is chosen; it returns {', '.join(scores)}"
        )
    return value


def is_stopped(
    algorithm: FederatedAlgorithm, seed_state: SeedState, patience: int
) -> np.ndarray:
    """Marks the seeds [seeds] that have run out of patience."""
    return np.asarray(rounds_waited(algorithm, seed_state)) >= patience


def check_chosen(
    name: str, algorithm: FederatedAlgorithm, seed_state: SeedState
) -> None:
    """Checks that the best states are of rounds that train what is scored.

    Args:
      name: of the method.
      algorithm: the method.
      seed_state: after the last round.

    Raises:
      InputError: if one is not, since no figure of those rounds was a number.
    """
    first, best = algorithm.scored_from, np.asarray(seed_state.best_round)
    if np.any((np.asarray(seed_state.round) >= first) & (best < first)):
        raise InputError(
            f"{name}: validation_{algorithm.monitor} was no number in any round from "
            f"{first} on, so none is the best: give the validation split something to "
            "score, or clients a smaller learning rate"
        )


def seed_keys(seeds: Sequence[int]) -> jax.Array:
    """The data of the random keys of seeds, a row each."""
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    return jax.random.key_data(keys)


def check_seeds(seeds: Sequence[int], seed_state: SeedState) -> None:
    """Checks that a state is of these seeds.

    Raises:
      InputError: if it is of others.
    """
    if not np.array_equal(mesh.whole(seed_state.key_data), seed_keys(seeds)):
        raise InputError(
            f"seeds={tuple(seeds)}: the checkpoint is of others; give those, or a new "
            "folder"
        )


def check_in_step(
    name: str,
    algorithm: FederatedAlgorithm,
    seeds: Sequence[int],
    seed_state: SeedState,
    patience: int,
) -> None:
    """Checks that seeds which would still run have done equally many rounds.

    Args:
      name: of the method.
      algorithm: the method.
      seeds: of the run.
      seed_state: of a checkpoint.
      patience: of the run that goes on from it.

    Raises:
      InputError: if one stopped earlier, and has patience again.
    """
    rounds = np.asarray(seed_state.round)
    is_late = ~is_stopped(algorithm, seed_state, patience) & (rounds < rounds.max())
    if is_late.any():
        places = np.flatnonzero(is_late).tolist()
        late = ", ".join(f"seed {seeds[i]} at round {rounds[i]}" for i in places)
        raise InputError(
            f"{name}: patience={patience} would have seeds that stopped ({late}) go on "
            f"beside round {rounds.max()}: leave patience as it was, or run the seeds "
            "apart"
        )
