"""Training codes from scratch: a search's schedule, and one program for all trainings.

A search by such trainings (`from_scratch`) has rounds of S steps, and a step is a chunk
of epochs of one training (`code_training`), whose state goes on to the next: fifteen
epochs of many codes or fifty of few are the same program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.algorithms.fl_agcns import evolution
from fedjax_graph.algorithms.fl_agcns.code_training import (
    Training,
    make_begin,
    make_epoch,
)
from fedjax_graph.algorithms.fl_agcns.search import WORST, SearchConfig, Weights
from fedjax_graph.core import encryption, trees
from fedjax_graph.core.algorithm import Metrics
from fedjax_graph.core.checks import limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masks import masked_mean
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData

TRAININGS = (1, 3, 5)  # of a code after each rung, from other initial weights
MOST_CODE_EPOCHS = 25_000  # 250 generations of 5 steps of 20 codes


@dataclasses.dataclass(frozen=True)
class EvolutionConfig(SearchConfig):
    """Hyper-parameters of the evolution, by default those of the space's code."""

    population_size: int = limited(60, lower=2)
    # None: those of the space, see `evolution.RATES`
    crossover_rate: float | None = limited(None, lower=0, upper=1)
    client_crossover_rate: float | None = limited(None, lower=0, upper=1)
    mutation_rate: float | None = limited(None, lower=0, upper=1)
    client_share: float = limited(
        0.5, lower=0, upper=1
    )  # d before the first generation
    client_share_decay: float = limited(0.99, lower=0, upper=1)
    # from scratch: generations after the first population
    num_generations: int = limited(6, lower=0)
    first_epochs: int = limited(15, lower=1)  # of a code's first training
    num_epochs: int = limited(50, lower=1)  # of its later ones
    rungs: tuple[int, int, int] = (18, 6, 4)  # codes that get those, see TRAININGS

    def __post_init__(self) -> None:
        """Checks types, limits and rungs; raises `InputError`."""
        super().__post_init__()
        if not self.rungs[0] >= self.rungs[1] >= self.rungs[2] >= 1:
            raise InputError(
                f"rungs={self.rungs}: expected three counts, each no larger than the "
                "one before"
            )

    @property
    def rates(self) -> evolution.Rates:
        """The rates of the evolution: those given, and the space's."""
        names = evolution.Rates._fields
        own = {name: getattr(self, f"{name}_rate") for name in names}
        own = {name: rate for name, rate in own.items() if rate is not None}
        return evolution.RATES[self.space]._replace(**own)

    @property
    def num_children(self) -> int:
        """Codes that a generation from scratch trains, a third of a population."""
        return max(self.population_size // 3, 1)


# --- What a round trains -------------------------------------------------------------


class Schedule(NamedTuple):
    """Says what the rounds of a search train; S steps of a chunk of epochs each."""

    chunk: int  # epochs of a step
    num_steps: int  # S
    num_first: int  # rounds of the first population
    num_evolving: int  # those, and the generations
    rung: np.ndarray  # [R] which one each later round is of
    jobs: np.ndarray  # [R, C, 2] rank among its codes, and which training; 0: no job

    @property
    def num_rounds(self) -> int:
        """All rounds: generations, and steps of the rungs."""
        return self.num_evolving + len(self.rung)


def make_schedule(config: EvolutionConfig) -> Schedule:
    """Lays out the rounds of a search.

    Raises:
      InputError: if it trains more codes and epochs than `MOST_CODE_EPOCHS`.
    """
    check_code_epochs(config)
    size = config.num_children
    chunk = math.gcd(config.first_epochs, config.num_epochs)
    per_first, per_later = config.first_epochs // chunk, config.num_epochs // chunk
    num_jobs = min(max(size * per_first // per_later, 1), size)
    num_first = -(-config.population_size // size)
    rungs, rows, before = [], [], 0
    for rung, (num_codes, last) in enumerate(zip(config.rungs, TRAININGS, strict=True)):
        jobs = [
            (rank, training)
            for rank in range(num_codes)
            for training in range(before + 1, last + 1)
        ]
        for start in range(0, len(jobs), num_jobs):
            own = jobs[start : start + num_jobs]
            rows.append(own + [(0, 0)] * (size - len(own)))
            rungs.append(rung)
        before = last
    return Schedule(
        chunk,
        max(size * per_first, num_jobs * per_later),
        num_first,
        num_first + config.num_generations,
        np.array(rungs),
        np.array(rows),
    )


def most_code_epochs(config: EvolutionConfig) -> int:
    """Counts the epochs of codes that a search trains at most."""
    first = config.population_size + config.num_generations * config.num_children
    later = int(np.dot(config.rungs, np.diff([0, *TRAININGS])))
    return first * config.first_epochs + later * config.num_epochs


def check_code_epochs(config: EvolutionConfig) -> None:
    """Checks that a search costs no more than the paper's.

    Raises:
      InputError: otherwise.
    """
    num = most_code_epochs(config)
    if num > MOST_CODE_EPOCHS:
        raise InputError(
            f"num_generations={config.num_generations}: with population_size="
            f"{config.population_size} that is up to {num} epochs of codes from "
            f"scratch, expected at most {MOST_CODE_EPOCHS}, the gradients of codes "
            "that the paper's search takes"
        )


class Cache(NamedTuple):
    """Holds all codes that were trained; C rows for each round that evolves."""

    codes: jax.Array  # [M, L + 2] int32, canonical; 0 where there is none
    scores: jax.Array  # [M, 6] federated, of the first and the later trainings
    client_scores: jax.Array  # [M, K] of the first training


class Jobs(NamedTuple):
    """Lists the trainings of a round."""

    codes: jax.Array  # [C, L + 2] int32
    rows: jax.Array  # [C] int32, in the cache
    trainings: jax.Array  # [C] int32, which one of its code; 0: the first
    is_needed: jax.Array  # [C] bool
    num_chunks: jax.Array  # [] int32, of each


class Best(NamedTuple):
    """The leading code: of those with most trainings the one of the best mean."""

    row: jax.Array  # [] int32
    training: jax.Array  # [] int32, its latest; 0: the first
    score: jax.Array  # [] mean over its later trainings, or that of the first


class ScratchState(NamedTuple):
    """Holds the best code, its latest weights and all codes that were trained."""

    weights: Weights  # of a `PackedNet`
    code: jax.Array  # [L + 2] int32
    num_rounds: jax.Array  # [] int32
    best: Best
    cache: Cache


# --- Trainings -----------------------------------------------------------------------


def make_chunk(config: EvolutionConfig) -> Callable[..., tuple[Training, Any]]:
    """Factory of a step of a round: some epochs of one training.

    Returns:
      (training, data, code, key of the training, turn) -> (training, (losses [epochs],
      metrics of the encryption)). The first turn, 0, starts from fresh weights.
    """
    chunk = make_schedule(config).chunk
    begin, epoch = make_begin(config), make_epoch(config)

    def run(training: Training, data: SubgraphData, code, key, turn):
        init_key, epochs_key = jax.random.split(key)
        fresh = functools.partial(begin, data, code, init_key)
        training = jax.lax.cond(turn == 0, fresh, lambda: training)
        numbers = turn * chunk + jnp.arange(chunk)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(epochs_key, numbers)
        return jax.lax.scan(
            lambda training, key: epoch(training, data, code, key), training, keys
        )

    return run


def make_training(
    config: EvolutionConfig,
) -> Callable[..., tuple[ScratchState, Metrics]]:
    """Factory of a round's trainings.

    Returns:
      (state, jobs, data, key) -> (state, metrics).
    """
    plan = make_schedule(config)
    begin, run_chunk = make_begin(config), make_chunk(config)

    def run(state: ScratchState, jobs: Jobs, data: SubgraphData, key):
        keys = jax.random.split(key, len(jobs.codes))

        def step(carry, index):
            number, turn = jnp.divmod(index, jobs.num_chunks)
            job = jnp.minimum(number, len(jobs.codes) - 1)
            is_needed = (number < len(jobs.codes)) & jobs.is_needed[job]

            @functools.partial(jax.jit, inline=True)  # traced once, for both branches
            def work(carry):
                state, training = carry
                code, job_key = jobs.codes[job], keys[job]
                training, outcome = run_chunk(training, data, code, job_key, turn)
                ended = record(state, jobs, job, training)
                is_done = turn == jobs.num_chunks - 1
                state = trees.select(is_done, ended, state)
                return (state, training), outcome

            def skip(carry):
                _, (losses, costs) = jax.eval_shape(work, carry)
                return carry, (jnp.full(losses.shape, jnp.nan), trees.zeros(costs))

            return jax.lax.cond(is_needed, work, skip, carry)

        nothing = trees.zeros(jax.eval_shape(begin, data, jobs.codes[0], keys[0]))
        (state, _), (losses, costs) = jax.lax.scan(
            step, (state, nothing), jnp.arange(plan.num_steps)
        )
        figures = measured(plan, state, jobs, data)
        loss = masked_mean(losses, jnp.isfinite(losses))  # divergence ends no search
        return state, {"train_loss": loss} | figures | encryption.total(costs)

    return run


def record(
    state: ScratchState, jobs: Jobs, job: jax.Array, training: Training
) -> ScratchState:
    """Writes a finished training down, and whether its code is ahead now.

    A code leads if it has had more trainings than the leader, or as many and a better
    score. Its score is that of the first training, or the mean of the later ones.
    """
    row, number, code = jobs.rows[job], jobs.trainings[job], jobs.codes[job]
    codes, scores, own = state.cache
    cache = Cache(
        codes.at[row].set(code),
        scores.at[row, number].set(training.score),
        jnp.where(number == 0, own.at[row].set(training.client_scores), own),
    )
    indices = jnp.arange(scores.shape[1])
    is_later = (indices > 0) & (indices <= number)
    is_judged = jnp.where(number == 0, indices == 0, is_later)
    judged = jnp.where(is_judged, cache.scores[row], 0)
    score = jnp.sum(judged) / jnp.maximum(number, 1)
    is_ahead = (number == state.best.training) & (score > state.best.score)
    is_ahead |= number > state.best.training
    best, weights, code = trees.select(
        is_ahead,
        (Best(row, number, score), Weights(training.best_model, None), code),
        (state.best, state.weights, state.code),
    )
    return state._replace(weights=weights, code=code, best=best, cache=cache)


def measured(
    plan: Schedule, state: ScratchState, jobs: Jobs, data: SubgraphData
) -> Metrics:
    """Computes the figures of a round."""
    scores = state.cache.scores[jobs.rows, jobs.trainings]
    is_scored = jobs.is_needed & (scores > WORST)
    own = state.cache.client_scores[state.best.row]
    num_jobs = jnp.sum(jobs.is_needed, dtype=jnp.float32)
    return {
        "best_score": state.best.score,
        "mean_score": masked_mean(scores, is_scored),
        "score_spread": jnp.std(own, where=jnp.any(data.is_scored > 0, axis=1)),
        "code_epochs": num_jobs * (jobs.num_chunks * plan.chunk),
    }
