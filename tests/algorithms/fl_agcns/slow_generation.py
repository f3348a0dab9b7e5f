"""A generation of FL-AGCNS's search (arXiv 2104.04141, Section 3.3) in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.algorithms.fl_agcns import evolution
from fedjax_graph.algorithms.fl_agcns import fl_agcns as module
from fedjax_graph.algorithms.fl_agcns.fl_agcns import Populations
from fedjax_graph.core import clients
from fedjax_graph.models import architecture
from fedjax_graph.models.architecture import canonical

select = jax.jit(evolution.select, static_argnums=2)
offspring = jax.jit(
    functools.partial(evolution.offspring, space="2022"),
    static_argnames=("rates", "choices"),
)
random_codes = functools.partial(architecture.random_codes, space="2022")
fair_codes = functools.partial(architecture.fair_codes, space="2022")
client_keys = jax.jit(clients.client_keys)
networks_of = jax.jit(jax.vmap(lambda code: canonical(code, "2022")))


def canonical_2022(code):
    return canonical(code, "2022")


def rows(codes):
    return [tuple(code) for code in np.asarray(codes).tolist()]


def slow_survivors(codes, fitness, num):
    """The best of different networks and then the repeated ones, [(code, score)]."""
    networks = rows(networks_of(jnp.asarray(codes)))
    order = sorted(range(len(codes)), key=lambda i: -fitness[i])
    first, repeated, seen = [], [], set()
    for i in order:
        kept = repeated if networks[i] in seen else first
        kept.append((rows(codes)[i], float(fitness[i])))
        seen.add(networks[i])
    return (first + [(code, -np.inf) for code, _ in repeated])[:num]


def slow_quotas(num, weights):
    exact = num * np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.floor(exact).astype(int)
    for index in np.argsort(counts - exact, kind="stable")[: num - counts.sum()]:
        counts[index] += 1
    return counts


def slow_generation(name, config, step, score, state, data, key):
    """One round in Python -> (weights, populations, best code, metrics).

    Args:
      step: (weights, key, codes) -> (weights, loss).
      score: (weights, codes of all, codes of each client) -> (federated, by client,
        each client's own).
    """
    train_key, controller_key, clients_key = jax.random.split(key, 3)
    weights, population, losses = state.weights, state.populations.controller, []
    evolves, fair = state.num_rounds >= config.num_warm_up, None
    if config.warm_up_codes == "fair" and not evolves:
        num = config.num_steps * config.codes_per_step
        drawn = fair_codes(
            jax.random.fold_in(train_key, module.FAIR_KEY),
            num,
            config.num_layers,
            space=config.space,
            choices=config.choices,
        )
        fair = drawn.reshape(config.num_steps, config.codes_per_step, -1)
    for step_key in jax.random.split(train_key, config.num_steps):
        select_key, step_key = jax.random.split(step_key)
        codes = select(select_key, population, config.codes_per_step)
        if fair is not None:
            codes = fair[len(losses)]
        weights, loss = step(weights, step_key, codes)
        losses.append(loss)

    def breed(key, codes, rates):
        children = offspring(key, codes, rates, choices=config.choices)
        return np.concatenate([codes, children])

    everybody = population
    if evolves and name != "client_eo":
        everybody = breed(controller_key, population, config.rates)
    own = [
        breed(key, codes, config.rates.of_clients)
        for key, codes in zip(
            client_keys(clients_key, data.client_ids),
            state.populations.clients,
            strict=True,
        )
    ]
    federated, by_client, own_scores = score(weights, everybody, np.stack(own))
    size = config.population_size
    ranked = slow_survivors(everybody, federated, size)
    controller, everyones = rows(population), state.populations.clients
    if evolves:
        controller = [code for code, _ in ranked]
    if evolves and name != "controller_eo":
        tops = [
            slow_survivors(*pair, size) for pair in zip(own, own_scores, strict=True)
        ]
        everyones = np.array([[code for code, _ in top] for top in tops])
        share = 1.0
        if name == "fl_agcns":
            share = config.client_share * config.client_share_decay**state.num_rounds
        num_sent = round(float(share) * size)
        controller = controller[: size - num_sent]
        has_scores = np.asarray(data.is_scored).any(axis=1)  # the others send none
        sending = np.where(has_scores, data.client_weights, 0)
        for index, count in enumerate(slow_quotas(num_sent, sending)):
            controller += rows(everyones[index][:count])
    scores = np.array([score for _, score in ranked])
    best = np.asarray(by_client)[:, np.argmax(federated)]
    metrics = {
        "train_loss": np.mean(losses),
        "best_score": scores[0],
        "mean_score": scores[np.isfinite(scores)].mean(),
        "score_spread": best[np.asarray(data.is_scored).any(axis=1)].std(),
    }
    populations = Populations(np.array(controller), everyones)
    return weights, populations, np.array(ranked[0][0]), metrics
