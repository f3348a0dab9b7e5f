"""FL-AGCNS: federated evolutionary search for graph networks over a SuperNet.

Wang, Chen, Zhou, Zhang, Ren, Gao, Yu, "FL-AGCNS: Federated Learning Framework for
Automatic Graph Convolutional Network Search", arXiv 2104.04141, Algorithms 1 and 2. The
controller keeps a population P of architecture codes and each client one of its own,
P_i. A round is a generation:

    weights     `num_steps` federated steps on codes drawn from P               (2)
    controller  P' = the best of P and its children by the federated score      (1)
    clients     P_i = the best of P_i and its children by client i's own score
    population  P = the best (1 - d) share of P' and the best of the P_i, d decaying

The code with the best federated score of P and its children is what the search ends
with; the paper scores P once more, with the last codes that clients sent. Its training
anew is `fed_sgd`. What the paper leaves open is the released code's: 20 codes a step,
no evolution in the first 50 generations, the rates of `evolution`, d = 0.5 x
0.99^generation. The ledger counts the whole SuperNet's gradient, though only touched
weights have one.

`controller_eo` (d = 0) and `client_eo` (d = 1) are the ablations of Table 5.
"""

import dataclasses
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph import clients, communication, encryption, evolution
from fedjax_graph.algorithm import FederatedAlgorithm
from fedjax_graph.architecture import random_codes
from fedjax_graph.architecture_search import (
    WORST,
    SearchConfig,
    SearchState,
    init_weights,
    make_scorer,
    searched,
    train_step,
)


@dataclasses.dataclass(frozen=True)
class FLAGCNSConfig(SearchConfig):
    population_size: int = 60
    num_steps: int = 5  # of the weights in a generation
    codes_per_step: int = 20
    num_warm_up: int = 50  # generations in which the population stays as it is
    crossover_rate: float = 0.2
    client_crossover_rate: float = 0.5
    mutation_rate: float = 0.125
    client_share: float = 0.5  # d before the first generation
    client_share_decay: float = 0.99


class Populations(NamedTuple):
    controller: jax.Array  # P [P, L + 2] int32
    clients: jax.Array  # P_i [K, P, L + 2] int32


def fl_agcns(config: FLAGCNSConfig) -> FederatedAlgorithm:
    """Evolution at the controller and at the clients."""
    return _evolutionary(config)


def controller_eo(config: FLAGCNSConfig) -> FederatedAlgorithm:
    """ControllerEO: the new population is the controller's."""
    return _evolutionary(config, with_clients=False)


def client_eo(config: FLAGCNSConfig) -> FederatedAlgorithm:
    """ClientEO: the new population is the clients', and scored for the best code."""
    return _evolutionary(config, with_controller=False)


def _evolutionary(config, with_controller=True, with_clients=True):
    train, size = train_step(config), config.population_size

    def init(key, data):
        weights_key, population_key = jax.random.split(key)
        codes = random_codes(
            population_key, size, config.num_layers, stages=config.stages
        )
        everybody = jnp.broadcast_to(codes, (len(data.client_ids), *codes.shape))
        populations = Populations(codes, everybody)
        weights = init_weights(config, weights_key)
        return SearchState(weights, codes[0], jnp.int32(0), populations)

    def train_weights(state, data, key):
        def step(weights, key):
            select_key, step_key = jax.random.split(key)
            codes = evolution.select(
                select_key, state.memory.controller, config.codes_per_step
            )
            weights, loss, cost = train(weights, data, step_key, codes)
            return weights, (loss, cost)

        keys = jax.random.split(key, config.num_steps)
        weights, (losses, costs) = jax.lax.scan(step, state.weights, keys)
        return weights, jnp.mean(losses), costs

    def with_children(key, population, crossover_rate):
        children = evolution.offspring(
            key, population, crossover_rate, config.mutation_rate, config.stages
        )
        return jnp.concatenate([population, children])

    def rank(scorer, codes):
        """(P', its scores, each client's score of its best code, cost)."""
        fitness, by_client, cost = scorer.federated(codes)
        best = by_client[:, jnp.argmax(fitness)]
        return *evolution.survivors(codes, fitness, size), best, cost

    def evolve_clients(scorer, populations, data, key):
        """(P_i, their own clients' scores)."""

        def breed(population, key):
            return with_children(key, population, config.client_crossover_rate)

        keys = clients.client_keys(key, data.client_ids)
        codes = jax.vmap(breed)(populations, keys)
        fitness = scorer.own(codes)
        return jax.vmap(lambda *own: evolution.survivors(*own, size))(codes, fitness)

    def merge(controller, own, data, generation):
        num_clients = len(data.client_ids)
        order = jnp.argsort(data.client_ids)  # whatever the order of their data
        codes, fitness = clients.take(own, order)
        share = 1.0
        if with_controller:
            share = evolution.client_share(
                generation, config.client_share, config.client_share_decay
            )
        codes = communication.up(codes, Fraction(1, num_clients))
        weights = data.client_weights[order]
        return evolution.merge(controller, (codes, fitness), weights, share)

    def round_(state, data, key):
        train_key, controller_key, clients_key = jax.random.split(key, 3)
        weights, loss, training_cost = train_weights(state, data, train_key)
        scorer = make_scorer(config, weights.model, data)
        generation = state.num_rounds

        def stay(before):
            return before, rank(scorer, before.controller)

        def evolve(before):
            codes = before.controller
            if with_controller:
                codes = with_children(controller_key, codes, config.crossover_rate)
            ranked = rank(scorer, codes)
            if not with_clients:
                return before._replace(controller=ranked[0]), ranked
            own = evolve_clients(scorer, before.clients, data, clients_key)
            return Populations(merge(ranked[:2], own, data, generation), own[0]), ranked

        populations, (codes, fitness, best_by_client, scoring_cost) = jax.lax.cond(
            generation < config.num_warm_up, stay, evolve, state.memory
        )
        state = SearchState(weights, codes[0], generation + 1, populations)
        is_scored = jnp.any(data.is_scored > 0, axis=1)
        metrics = {
            "train_loss": loss,
            "best_score": fitness[0],
            "mean_score": jnp.mean(fitness, where=fitness > WORST),
            "score_spread": jnp.std(best_by_client, where=is_scored),
        }
        return state, metrics | encryption.total(training_cost, scoring_cost)

    return searched(config, init, round_)
