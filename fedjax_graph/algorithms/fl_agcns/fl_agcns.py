"""FL-AGCNS: federated evolutionary search for graph networks over a SuperNet.

Wang, Chen, Li, Wang, "FL-AGCNS: Federated Learning Framework for Automatic Graph
Convolutional Network Search", arXiv 2104.04141, Algorithms 1 and 2. The controller
keeps a population P of architecture codes and each client one of its own, P_i. A round
is a generation:

    weights     `num_steps` federated steps on codes drawn from P             Eq. 2
    controller  P' = the best of P and its children by the federated score    Eq. 1
    clients     P_i = the best of P_i and its children by client i's own score
    population  P = the best (1 - d) share of P' and the best of the P_i, d decaying

The code with the best federated score of P and its children is what the search ends
with; the paper scores P once more, with the last codes that clients sent. Its training
anew is `fed_sgd`. What the paper leaves open is the public code's: 20 codes a step, the
rates of `evolution`, d = 0.5 x 0.99^generation, and in the space 2022 no evolution in
the first 50 generations, which train the first population over and over; with
`warm_up_codes="fair"` they train a layer's weights alike. The ledger counts the whole
SuperNet's gradient, though only touched weights have one.

That is fitness from `shared` weights. By default it is that of trainings from
`scratch`, see `from_scratch`.

`controller_eo` (d = 0) and `client_eo` (d = 1) are the ablations of Table 5, whose text
has them the other way round, against its own definition of d as the clients' share.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.algorithms.fl_agcns import evolution, from_scratch
from fedjax_graph.algorithms.fl_agcns.search import (
    WORST,
    Scorer,
    Weights,
    init_weights,
    make_scorer,
    searched,
    sender_weights,
    train_step,
)
from fedjax_graph.algorithms.fl_agcns.trainings import EvolutionConfig
from fedjax_graph.core import clients, communication, encryption, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm, Metrics
from fedjax_graph.core.checks import limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.models.architecture import Space, fair_codes, random_codes

FitnessFrom = Literal["scratch", "shared"]
FAIR_KEY = 2**31  # folded in; far from the numbers of steps
OF_SHARED = ("num_steps", "codes_per_step", "num_warm_up", "warm_up_codes", "scored_by")
"""Fields that only a search by shared weights has a use for."""
OF_SCRATCH = ("num_generations", "first_epochs", "num_epochs", "rungs")
"""Fields that only a search from scratch has a use for."""
WARM_UP: dict[Space, int] = {"paper": 0, "2022": 50}


@dataclasses.dataclass(frozen=True)
class FLAGCNSConfig(EvolutionConfig):
    """Hyper-parameters of the search.

    By default it judges codes by trainings from scratch, and the defaults are ours;
    with `fitness_from="shared"` they are the paper's and its code's.
    """

    fitness_from: FitnessFrom = "scratch"
    # with shared weights: their steps in a generation
    num_steps: int = limited(5, lower=1)
    codes_per_step: int = limited(20, lower=1)
    # first generations, in which the population stays as it is; None: see WARM_UP
    num_warm_up: int | None = limited(None, lower=0)
    # what these train: codes of the population, which stays the same, or new ones each
    # generation that use a layer's weights alike
    warm_up_codes: Literal["population", "fair"] = "population"

    def __post_init__(self) -> None:
        """Checks types and limits, and that each field has a use.

        Raises:
          InputError: naming a field of the other fitness alone, or of a warm-up where
            there is none.
        """
        super().__post_init__()
        is_shared = self.fitness_from == "shared"
        other, names = ("scratch", OF_SCRATCH) if is_shared else ("shared", OF_SHARED)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise InputError(f"{field.name}={value}: of fitness_from={other}")
        if self.warm_up_codes != "population" and not self.warm_up:
            raise InputError(
                f"warm_up_codes={self.warm_up_codes}: there is no warm-up; give "
                f"num_warm_up, which is {self.warm_up} in space={self.space}"
            )

    @property
    def warm_up(self) -> int:
        """The number of first generations in which nothing evolves."""
        return WARM_UP[self.space] if self.num_warm_up is None else self.num_warm_up


class Populations(NamedTuple):
    """Holds the populations of architecture codes."""

    controller: jax.Array  # P [P, L + 2] int32
    clients: jax.Array  # P_i [K, P, L + 2] int32


class EvolutionState(NamedTuple):
    """Holds the weights, the best code and the populations."""

    weights: Weights
    code: jax.Array  # [L + 2] int32
    num_rounds: jax.Array  # [] int32, generations so far
    populations: Populations


class Ranked(NamedTuple):
    """Holds a ranked population P' of codes and their scores, best first."""

    codes: jax.Array  # [P, L + 2] int32
    fitness: jax.Array  # [P] federated scores
    best_by_client: jax.Array  # [K], each client's score of the best code
    cost: Metrics  # of the encryption


def fl_agcns(config: FLAGCNSConfig) -> FederatedAlgorithm:
    """Factory of FL-AGCNS: evolution at the controller and at the clients."""
    return evolutionary(config)


def controller_eo(config: FLAGCNSConfig) -> FederatedAlgorithm:
    """Factory of ControllerEO: the new population is the controller's."""
    return evolutionary(config, with_clients=False)


def client_eo(config: FLAGCNSConfig) -> FederatedAlgorithm:
    """Factory of ClientEO: the new population is the clients', and then scored."""
    return evolutionary(config, with_controller=False)


def evolutionary(
    config: FLAGCNSConfig, with_controller: bool = True, with_clients: bool = True
) -> FederatedAlgorithm:
    """Factory of the search with evolution at the controller, at clients, or both."""
    if config.fitness_from == "scratch":
        return from_scratch.evolutionary(config, with_controller, with_clients)
    train = weights_trainer(config)

    def init(key, data):
        weights_key, population_key = jax.random.split(key)
        codes = random_codes(
            population_key,
            config.population_size,
            config.num_layers,
            space=config.space,
            choices=config.choices,
        )
        everybody = jnp.broadcast_to(codes, (len(data.client_ids), *codes.shape))
        populations = Populations(codes, everybody)
        weights = init_weights(config, weights_key)
        return EvolutionState(weights, codes[0], jnp.int32(0), populations)

    def client_share(generation):
        if not with_controller:
            return 1.0
        return evolution.client_share(
            generation, config.client_share, config.client_share_decay
        )

    def round_(state, data, key):
        train_key, controller_key, clients_key = jax.random.split(key, 3)
        weights, loss, training_cost = train(
            state.weights,
            state.populations.controller,
            data,
            train_key,
            state.num_rounds < config.warm_up,
        )
        scorer = make_scorer(config, weights.model, data)
        generation = state.num_rounds

        def stay(before):
            return before, rank(config, scorer, before.controller)

        def evolve(before):
            codes = before.controller
            if with_controller:
                codes = with_children(config, controller_key, codes, config.rates)
            ranked = rank(config, scorer, codes)
            if not with_clients:
                return before._replace(controller=ranked.codes), ranked
            own = evolve_clients(config, scorer, before.clients, data, clients_key)
            merged = merge(ranked.codes, own, data, client_share(generation))
            return Populations(merged, own), ranked

        populations, ranked = jax.lax.cond(
            generation < config.warm_up, stay, evolve, state.populations
        )
        state = EvolutionState(weights, ranked.codes[0], generation + 1, populations)
        is_scored = jnp.any(data.is_scored > 0, axis=1)
        metrics = {
            "train_loss": loss,
            "best_score": ranked.fitness[0],
            "mean_score": jnp.mean(ranked.fitness, where=ranked.fitness > WORST),
            "score_spread": jnp.std(ranked.best_by_client, where=is_scored),
        }
        return state, metrics | encryption.total(training_cost, ranked.cost)

    return searched(config, init, round_)


# --- A generation --------------------------------------------------------------------


def weights_trainer(
    config: FLAGCNSConfig,
) -> Callable[..., tuple[Weights, jax.Array, Metrics]]:
    """Factory of the weights' steps of a generation.

    Returns:
      (weights, population [P, L + 2], data, key, whether it is a generation of the
      warm-up) -> (weights, mean loss, metrics of the encryption of each step).
    """
    train = train_step(config)

    def run(weights, population, data, key, is_warm_up):
        fair = fair_steps(config, key) if config.warm_up_codes == "fair" else None

        def step(weights, step):
            key, own = step
            select_key, step_key = jax.random.split(key)
            codes = evolution.select(select_key, population, config.codes_per_step)
            if own is not None:
                codes = jnp.where(is_warm_up, own, codes)
            weights, loss, cost = train(weights, data, step_key, codes)
            return weights, (loss, cost)

        keys = jax.random.split(key, config.num_steps)
        weights, (losses, costs) = jax.lax.scan(step, weights, (keys, fair))
        return weights, jnp.mean(losses), costs

    return run


def fair_steps(config: FLAGCNSConfig, key: jax.Array) -> jax.Array:
    """Draws the codes [steps, C, L + 2] of a fair generation of the warm-up."""
    shape = config.num_steps, config.codes_per_step
    codes = fair_codes(
        jax.random.fold_in(key, FAIR_KEY),
        shape[0] * shape[1],
        config.num_layers,
        space=config.space,
        choices=config.choices,
    )
    return codes.reshape(*shape, -1)


def with_children(
    config: FLAGCNSConfig, key: jax.Array, codes: jax.Array, rates: evolution.Rates
) -> jax.Array:
    """Adds children to a population [P, L + 2]: [P + P // 2, L + 2]."""
    children = evolution.offspring(key, codes, rates, config.choices, config.space)
    return jnp.concatenate([codes, children])


def rank(config: FLAGCNSConfig, scorer: Scorer, codes: jax.Array) -> Ranked:
    """Picks the best of codes [C, L + 2] by the federated score (Eq. 1)."""
    fitness, by_client, cost = scorer.federated(codes)
    best = by_client[:, jnp.argmax(fitness)]
    kept = evolution.survivors(codes, fitness, config.population_size, config.space)
    return Ranked(*kept, best, cost)


def evolve_clients(
    config: FLAGCNSConfig, scorer: Scorer, populations: jax.Array, data, key: jax.Array
) -> jax.Array:
    """Evolves each client's population [K, P, L + 2] by a generation, best first."""

    def breed(key, codes):
        return with_children(config, key, codes, config.rates.of_clients)

    keys = clients.client_keys(key, data.client_ids)
    codes = jax.vmap(breed)(keys, populations)

    def survive(codes, fitness):
        return evolution.survivors(
            codes, fitness, config.population_size, config.space
        )[0]

    return jax.vmap(survive)(codes, scorer.own(codes))


def merge(
    controller: jax.Array, own: jax.Array, data, client_share: jax.Array | float
) -> jax.Array:
    """Makes the new population, for which the clients send their best codes."""
    order = jnp.argsort(data.client_ids)  # whatever the order of their data
    sent = communication.up(trees.take(own, order), Fraction(1, len(order)))
    weights = sender_weights(data)[order]
    return evolution.merge(controller, sent, weights, client_share)
