"""FL-AGCNS without shared weights: a code's fitness is what it reaches from scratch.

Evolution is that of Wang et al., arXiv 2104.04141, Algorithms 1 and 2, at the
controller and at the clients; what judges codes is not: where a graph is small, all
trainings of a search cost a fifth of the gradients of codes that the SuperNet's takes.
A training says all scores of a code at once, the federated one (Eq. 1) and each
client's, each the best of its epochs. So a client's population is the best of all codes
that were trained, by its own score, and the controller's the best by the federated one
and, in a share d, the clients' best: no code that was good is ever lost. A round trains
`num_children` codes:

    at first    the first population, drawn at random
    then        a generation: the controller's children and the clients', in the shares
                1 - d and d; networks that are known are passed over
    at last     rungs of successive halving (Jamieson, Talwalkar, "Non-stochastic Best
                Arm Identification and Hyperparameter Optimization", AISTATS 2016): the
                best are trained longer, and fewer of them from more initial weights

All trainings are one program, a chunk of epochs with the training's state carried on.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp

from fedjax_graph.algorithms.fl_agcns import evolution
from fedjax_graph.algorithms.fl_agcns.code_training import NEVER
from fedjax_graph.algorithms.fl_agcns.search import Weights, searched, sender_weights
from fedjax_graph.algorithms.fl_agcns.trainings import (
    TRAININGS,
    Best,
    Cache,
    EvolutionConfig,
    Jobs,
    Schedule,
    ScratchState,
    make_schedule,
    make_training,
)
from fedjax_graph.core import clients, communication, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.models.architecture import random_codes
from fedjax_graph.models.packed import PackedNet


def evolutionary(
    config: EvolutionConfig, with_controller: bool, with_clients: bool
) -> FederatedAlgorithm:
    """Factory of the search; see `fl_agcns.evolutionary`."""
    plan, net = make_schedule(config), PackedNet(config.supernet)
    size, train = config.num_children, make_training(config)

    def init(key, data):
        num_rows = plan.num_evolving * size
        (code,) = random_codes(
            key, 1, config.num_layers, space=config.space, choices=config.choices
        )
        cache = Cache(
            jnp.zeros((num_rows, config.num_layers + 2), jnp.int32),
            jnp.full((num_rows, 1 + TRAININGS[-1]), NEVER),
            jnp.full((num_rows, len(data.client_ids)), NEVER),
        )
        best = Best(jnp.int32(0), jnp.int32(0), jnp.float32(NEVER))
        weights = trees.zeros(jax.eval_shape(net.init, key, code))  # of no training yet
        return ScratchState(Weights(weights, None), code, jnp.int32(0), best, cache)

    def share(generation):
        if not with_clients:
            return 0.0
        if not with_controller:
            return 1.0
        return evolution.client_share(
            generation, config.client_share, config.client_share_decay
        )

    def first(state, data, key):
        del data
        codes = random_codes(
            key, size, config.num_layers, space=config.space, choices=config.choices
        )
        ranks = state.num_rounds * size + jnp.arange(size)
        return new_jobs(config, plan, state, codes, ranks < config.population_size)

    def evolve(state, data, key):
        generation = state.num_rounds - plan.num_first
        codes = breed(config, state.cache, data, key, share(generation))
        return new_jobs(config, plan, state, codes, jnp.ones(size, bool))

    def climb(state, data, key):
        del data, key
        return rung_jobs(config, plan, state)

    def round_(state, data, key):
        plan_key, train_key = jax.random.split(key)
        is_later = state.num_rounds >= plan.num_evolving
        phase = (state.num_rounds >= plan.num_first).astype(jnp.int32) + is_later
        jobs = jax.lax.switch(phase, (first, evolve, climb), state, data, plan_key)
        jobs = jobs._replace(codes=communication.down(jobs.codes, len(data.client_ids)))
        state, metrics = train(state, jobs, data, train_key)
        return state._replace(num_rounds=state.num_rounds + 1), metrics

    return searched(config, init, round_, net.apply)


def new_jobs(
    config: EvolutionConfig,
    plan: Schedule,
    state: ScratchState,
    codes: jax.Array,
    is_wanted: jax.Array,
) -> Jobs:
    """First trainings of codes [C, L + 2], but for those whose network is known."""
    codes = evolution.canonical_all(codes, config.space)
    is_needed = is_wanted & ~is_known(config, state.cache, codes)
    rows = state.num_rounds * len(codes) + jnp.arange(len(codes))
    num_chunks = jnp.int32(config.first_epochs // plan.chunk)
    nothing = jnp.zeros(len(codes), jnp.int32)
    return Jobs(codes, rows.astype(jnp.int32), nothing, is_needed, num_chunks)


def is_known(config: EvolutionConfig, cache: Cache, codes: jax.Array) -> jax.Array:
    """Marks the codes [P, L + 2] in the cache, or the same as one before them."""
    codes = evolution.canonical_all(codes, config.space)
    is_cached = jnp.any(jnp.all(codes[:, None] == cache.codes, axis=-1), axis=1)
    return is_cached | evolution.is_repeated(codes, config.space)


def breed(
    config: EvolutionConfig,
    cache: Cache,
    data: SubgraphData,
    key: jax.Array,
    share: jax.Array | float,
) -> jax.Array:
    """Makes the codes [C, L + 2] of a generation, of which `share` are the clients'."""
    controller_key, clients_key = jax.random.split(key)
    size = config.num_children

    def best_by(scores):
        rows = jnp.argsort(-scores, stable=True)[: config.population_size]
        is_code = scores[rows] > NEVER
        return jnp.where(is_code[:, None], cache.codes[rows], cache.codes[rows[0]])

    def children(key, population, rates):
        made = evolution.offspring(key, population, rates, config.choices, config.space)
        order = jnp.argsort(is_known(config, cache, made), stable=True)
        return made[order[:size]]

    def own_children(key, population):
        return children(key, population, config.rates.of_clients)

    best = best_by(cache.scores[:, 0])
    if isinstance(share, float) and not share:  # of a search at the controller alone
        return children(controller_key, best, config.rates)
    own = jax.vmap(best_by, in_axes=1)(cache.client_scores)
    order = jnp.argsort(data.client_ids)  # whatever the order of their data
    weights = sender_weights(data)[order]
    own_made = jax.vmap(own_children)(
        clients.client_keys(clients_key, data.client_ids), own
    )
    parents, sent = (  # at most as many codes as one population or generation has
        communication.up(trees.take(codes, order), Fraction(1, len(order)))
        for codes in (own, own_made)
    )
    population = evolution.merge(best, parents, weights, share)
    made = children(controller_key, population, config.rates)
    return evolution.merge(made, sent, weights, share)


def rung_jobs(config: EvolutionConfig, plan: Schedule, state: ScratchState) -> Jobs:
    """Lists the later trainings of a round: of the best by the rung before."""
    index = jnp.maximum(state.num_rounds - plan.num_evolving, 0)
    index = jnp.minimum(index, len(plan.rung) - 1)
    rung = jnp.asarray(plan.rung)[index]
    ranks, trainings = jnp.asarray(plan.jobs, jnp.int32)[index].T
    scores = state.cache.scores
    before = (scores[:, 0], scores[:, 1], jnp.mean(scores[:, 1:4], axis=1))
    judged = jnp.stack(before)[rung]
    order = jnp.argsort(-judged, stable=True).astype(jnp.int32)
    rows = order[jnp.minimum(ranks, len(order) - 1)]
    is_needed = (trainings > 0) & (ranks < len(order)) & (judged[rows] > NEVER)
    is_over = state.num_rounds >= plan.num_rounds
    num_chunks = jnp.int32(config.num_epochs // plan.chunk)
    codes = state.cache.codes[rows]
    return Jobs(codes, rows, trainings, is_needed & ~is_over, num_chunks)
