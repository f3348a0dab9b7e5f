"""Evolution of populations of architecture codes, as pure array operations.

Wang et al., "FL-AGCNS: Federated Learning Framework for Automatic Graph Convolutional
Network Search", arXiv 2104.04141, Section 3.3; what the paper leaves open is the public
code's, of the year of the space: half of a population has one child each, by crossover
or else by mutation, and the best of parents and children survive. In the paper's space
a child has each gene of either parent with equal chances, and a mutated gene is drawn
as in the first population. In that of 2022 ours are the single cut of the crossover
(Holland, "Adaptation in Natural and Artificial Systems", 1975) and how a mutated gene
is drawn. A network counts once however often it occurs.

A population is an array of codes [P, L + 2], see `architecture`; larger fitness [P] is
better. Everything can be traced, and mapped over clients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError
from fedjax_graph.models.architecture import (
    ANYTHING,
    Choices,
    Space,
    canonical,
    check_space,
    random_codes,
)


class Rates(NamedTuple):
    """Holds how often a child comes about by what."""

    crossover: float  # of the controller's children; the others mutate
    client_crossover: float  # of a client's
    mutation: float  # of each gene

    @property
    def of_clients(self) -> "Rates":
        """Those at a client."""
        return self._replace(crossover=self.client_crossover)


RATES: dict[Space, Rates] = {
    "paper": Rates(0.5, 0.5, 0.1),
    "2022": Rates(0.2, 0.5, 0.125),
}


def select(key: jax.Array, population: jax.Array, num: int) -> jax.Array:
    """Draws `num` codes of a population, without replacement, in a drawn order.

    Raises:
      InputError: if it has fewer.
    """
    if num > len(population):
        raise InputError(f"{num} codes of a population of {len(population)}")
    return jax.random.permutation(key, population)[:num]


def crossover(
    key: jax.Array, first: jax.Array, second: jax.Array, space: Space = "paper"
) -> jax.Array:
    """Makes children [P, L + 2] of pairs of parents [P, L + 2].

    A child has each gene of either parent with equal chances. In the space 2022 it has
    the first's genes up to a drawn cut, then the other's, and at least one of each. A
    gene stays in its place, so a child of valid codes is valid.

    Raises:
      InputError: if there are not as many parents of both, or there is no such space.
    """
    arrays.check_same_shape(first=first, second=second)
    num, num_genes = first.shape
    if check_space(space) == "paper":
        return jnp.where(jax.random.bernoulli(key, 0.5, first.shape), first, second)
    cuts = jax.random.randint(key, (num, 1), 1, num_genes)
    return jnp.where(jnp.arange(num_genes) < cuts, first, second)


def mutate(
    key: jax.Array,
    codes: jax.Array,
    rate: float,
    choices: Choices = ANYTHING,
    space: Space = "paper",
) -> jax.Array:
    """Draws each gene of codes [P, L + 2] anew with probability `rate`.

    In the space 2022 a mutated layer, also one of the first two, is absent with
    probability 0.2, as later layers are at the start. Genes are drawn from `choices`,
    so given stages stay as they are.
    """
    gene_key, value_key = jax.random.split(key)
    num, num_genes = codes.shape
    values = random_codes(
        value_key, num, num_genes - 2, space=space, num_certain=0, choices=choices
    )
    return jnp.where(jax.random.bernoulli(gene_key, rate, codes.shape), values, codes)


def offspring(
    key: jax.Array,
    population: jax.Array,
    rates: Rates,
    choices: Choices = ANYTHING,
    space: Space = "paper",
) -> jax.Array:
    """Makes one child of each of a uniformly random half of a population.

    Args:
      key: of all draws.
      population: [P, L + 2].
      rates: the probability of a crossover with another of the half, and what else
        comes about how often; a client's are `rates.of_clients`.
      choices: what codes may have, see `random_codes`.
      space: of the codes.

    Returns:
      [P // 2, L + 2].
    """
    select_key, choice_key, crossover_key, mutate_key = jax.random.split(key, 4)
    parents = select(select_key, population, len(population) // 2)
    partners = jnp.roll(parents, 1, axis=0)  # their order is drawn
    crossed = crossover(crossover_key, parents, partners, space)
    mutated = mutate(mutate_key, parents, rates.mutation, choices, space)
    is_crossed = jax.random.bernoulli(choice_key, rates.crossover, (len(parents), 1))
    return jnp.where(is_crossed, crossed, mutated)


def is_repeated(codes: jax.Array, space: Space = "paper") -> jax.Array:
    """Marks the codes [P, L + 2] that are the same network as one before them."""
    networks = canonical_all(codes, space)
    is_equal = jnp.all(networks[:, None] == networks, axis=-1)
    return jnp.any(jnp.tril(is_equal, -1), axis=1)


def canonical_all(codes: jax.Array, space: Space) -> jax.Array:
    """Writes codes [P, L + 2] as their networks."""
    return jax.vmap(lambda code: canonical(code, space))(codes)


def survivors(
    codes: jax.Array, fitness: jax.Array, num: int, space: Space = "paper"
) -> tuple[jax.Array, jax.Array]:
    """Picks the fittest networks, best first.

    A fitness that is NaN counts as minus infinity, and so does that of a network that
    occurs with a larger one. Among equals the first wins.

    Args:
      codes: [P, L + 2], such as parents and then children.
      fitness: [P].
      num: how many survive.
      space: of the codes.

    Returns:
      Codes [num, L + 2] and their fitness [num].

    Raises:
      InputError: if there are fewer codes, or not a fitness of each.
    """
    arrays.check_shape("fitness", fitness, codes.shape[:1])
    if num > len(codes):
        raise InputError(f"{num} survivors of {len(codes)} codes")

    def best_first(codes, fitness):
        order = jnp.argsort(-fitness, stable=True)
        return codes[order], fitness[order]

    fitness = jnp.where(jnp.isnan(fitness), -jnp.inf, fitness)
    codes, fitness = best_first(codes, fitness)
    fitness = jnp.where(is_repeated(codes, space), -jnp.inf, fitness)
    codes, fitness = best_first(codes, fitness)
    return codes[:num], fitness[:num]


# --- Controller and clients ----------------------------------------------------------


def client_share(
    generation: jax.Array | int, first: float = 0.5, decay: float = 0.99
) -> jax.Array | float:
    """Computes the clients' share of the population, `first` x `decay`^generation."""
    return first * decay**generation


def quotas(num: jax.Array | int, weights: jax.Array) -> jax.Array:
    """Shares out `num` units by weights [K] (largest remainders): [K] int32.

    Their sum is `num`; a client of weight 0 gets none. Where all weights are 0 nobody
    gets any.
    """
    total = jnp.sum(weights)
    exact = num * weights / jnp.where(total > 0, total, 1)
    whole = jnp.floor(exact)
    left = jnp.where(total > 0, num - jnp.sum(whole), 0)
    rank = jnp.argsort(jnp.argsort(whole - exact, stable=True))
    return (whole + (rank < left)).astype(jnp.int32)


def merge(
    controller: jax.Array,
    clients: jax.Array,
    weights: jax.Array,
    share: jax.Array | float,
) -> jax.Array:
    """Makes the new population: the controller's best codes, then the clients'.

    A code of several of them occurs as often.

    Args:
      controller: [P, L + 2], best first.
      clients: [K, P, L + 2], likewise, by each client's own score.
      weights: [K], by which the clients send codes; 0 for padding.
      share: of the population that comes from the clients, 0 to 1.

    Returns:
      [P, L + 2]; all of it the controller's where all weights are 0.

    Raises:
      InputError: if there are not as many codes of each client, or not a weight.
    """
    size, num_genes = controller.shape
    arrays.check_shape("clients", clients, (None, size, num_genes))
    arrays.check_shape("weights", weights, (len(clients),))
    num_sent = jnp.round(share * size).astype(jnp.int32)
    num_sent = jnp.where(jnp.any(weights > 0), num_sent, 0)
    counts = jnp.append(size - num_sent, quotas(num_sent, weights))
    is_taken = jnp.arange(size) < counts[:, None]
    codes = jnp.concatenate([controller[None], clients]).reshape(-1, num_genes)
    return codes[jnp.argsort(~is_taken.reshape(-1), stable=True)[:size]]
