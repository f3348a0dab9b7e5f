"""Evolution's invariants over drawn populations, and hand-made cases."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fl_agcns import evolution
from fedjax_graph.algorithms.fl_agcns.evolution import Rates
from fedjax_graph.models import architecture
from fedjax_graph.models.architecture import (
    Choices,
    canonical,
    check,
    is_gene,
    largest_genes,
)
from tests.few_ops import FEW_OPS

SIZE, NUM_LAYERS, NUM_CLIENTS = 10, 3, 3
seeds = st.integers(0, 10**6)
properties = functools.partial(hypothesis.settings, deadline=None, derandomize=True)

random_codes = functools.partial(architecture.random_codes, space="2022")
draw = jax.jit(lambda seed: random_codes(jax.random.key(seed), SIZE, NUM_LAYERS))
any_offspring = functools.partial(evolution.offspring, space="2022")
offspring = jax.jit(any_offspring, static_argnums=2)
survivors = jax.jit(
    functools.partial(evolution.survivors, space="2022"), static_argnums=2
)
merge = jax.jit(evolution.merge)
quotas = jax.jit(evolution.quotas)
crossover = jax.jit(functools.partial(evolution.crossover, space="2022"))
mutate = jax.jit(functools.partial(evolution.mutate, space="2022"))
canonical_all = jax.jit(jax.vmap(lambda code: canonical(code, "2022")))
RATE = evolution.RATES["2022"].mutation


def rates(crossover, mutation=RATE):
    return Rates(crossover, crossover, mutation)


def rows(codes):
    return [tuple(code) for code in np.asarray(codes).tolist()]


def networks(codes):
    return rows(canonical_all(codes))


# --- Children ------------------------------------------------------------------------


@properties(max_examples=10)
@hypothesis.given(seed=seeds)
def test_children_are_of_the_choices(seed):
    """They have the given stages, and no other ops."""
    key, choices = jax.random.key(seed), Choices((3, 5), FEW_OPS)
    codes = random_codes(key, SIZE, NUM_LAYERS, choices=choices)
    children = np.asarray(any_offspring(key, codes, Rates(0.2, 0.2, 0.9), choices))
    for genes, allowed in zip(children.T, is_gene(NUM_LAYERS, choices), strict=True):
        assert allowed[genes].all()
    assert np.any(children[:, 1:-1] != np.asarray(codes)[: len(children), 1:-1])


def test_more_than_there_are_cannot_be_picked():
    with pytest.raises(ValueError, match="11 codes of a population of 10"):
        evolution.select(jax.random.key(0), draw(0), SIZE + 1)


def test_half_of_a_population_is_picked():
    codes = jnp.arange(SIZE)[:, None] * jnp.ones(NUM_LAYERS + 2, int)
    keys = jax.random.split(jax.random.key(0), 2000)
    select = jax.vmap(lambda key: evolution.select(key, codes, SIZE // 2))
    picked = jax.jit(select)(keys)
    picked = np.sort(np.asarray(picked)[..., 0], axis=1)
    assert (np.diff(picked, axis=1) > 0).all()
    shares = np.bincount(picked.ravel()) / 2000
    npt.assert_allclose(shares, 0.5, atol=0.05)


@properties(max_examples=40)
@hypothesis.given(seed=seeds)
def test_a_crossover_cuts_both_parents_once(seed):
    key = jax.random.key(seed)
    first = jnp.zeros((SIZE, NUM_LAYERS + 2), int)
    children = np.asarray(crossover(key, first, first + 1))
    assert (np.diff(children, axis=1) >= 0).all()
    assert not children[:, 0].any()
    assert children[:, -1].all()


def test_every_cut_is_as_likely():
    first = jnp.zeros((8000, NUM_LAYERS + 2), int)
    children = crossover(jax.random.key(1), first, first + 1)
    counts = np.bincount(np.sum(np.asarray(children), axis=1), minlength=6)
    npt.assert_allclose(counts / 8000, [0, 0.25, 0.25, 0.25, 0.25, 0], atol=0.025)


def test_rate_of_mutation():
    codes = jnp.full((20000, NUM_LAYERS + 2), -1)
    mutated = np.asarray(mutate(jax.random.key(2), codes, RATE))
    npt.assert_allclose(np.mean(mutated >= 0, axis=0), 0.125, atol=0.012)
    present, absent = mutated > 0, mutated == 0
    share = absent.sum(axis=0) / (present | absent).sum(axis=0)
    npt.assert_allclose(share, [0, 0.2, 0.2, 0.2, 0], atol=0.04)
    npt.assert_array_equal(mutated.max(axis=0), largest_genes(NUM_LAYERS))


@pytest.mark.parametrize(("rate", "changes"), [(0.0, False), (1.0, True)])
def test_extreme_rates_of_mutation(rate, changes):
    codes = jnp.full((SIZE, NUM_LAYERS + 2), -1)
    mutated = mutate(jax.random.key(3), codes, rate)
    assert jnp.all((mutated != codes) == changes)


@properties(max_examples=40)
@hypothesis.given(seed=seeds, rate=st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_children_are_valid_codes(seed, rate):
    codes, key = draw(seed), jax.random.key(seed)
    children = offspring(key, codes, rates(rate))
    assert children.shape == (SIZE // 2, NUM_LAYERS + 2)
    for child in rows(children):
        check(child, NUM_LAYERS)
    npt.assert_array_equal(children, offspring(key, codes, rates(rate)))


def test_children_of_crossovers_have_their_parents_genes():
    codes = draw(0)
    children = offspring(jax.random.key(4), codes, rates(1.0))
    for index in range(NUM_LAYERS + 2):
        assert set(children[:, index].tolist()) <= set(codes[:, index].tolist())
    unchanged = offspring(jax.random.key(4), codes, rates(0.0, 0.0))
    assert set(rows(unchanged)) <= set(rows(codes))
    assert len(set(rows(unchanged))) == SIZE // 2


def test_rate_of_crossovers():
    """With every gene mutated, a child of two equal parents is no mutant if crossed."""
    codes = jnp.full((4000, NUM_LAYERS + 2), -1)
    children = offspring(jax.random.key(5), codes, rates(0.2, 1.0))
    npt.assert_allclose(jnp.mean(children[:, 0] < 0), 0.2, atol=0.04)


# --- Survivors -----------------------------------------------------------------------


@st.composite
def judged_populations(draw_from):
    """Codes [2 SIZE, L + 2], some repeated, whose distinct networks differ in fitness.

    Some networks have a fitness of NaN.
    """
    seed = draw_from(seeds)
    rng = np.random.default_rng(seed)
    codes = np.concatenate([draw(seed), draw(seed + 1)])
    codes = codes[rng.integers(0, len(codes), len(codes))]
    scores = {
        network: np.nan if rng.random() < 0.2 else np.float32(rng.normal())
        for network in sorted(set(networks(codes)))
    }
    return codes, np.array([scores[network] for network in networks(codes)])


@properties(max_examples=60)
@hypothesis.given(case=judged_populations(), order=st.permutations(range(2 * SIZE)))
def test_the_best_networks_survive(case, order):
    codes, fitness = case
    survived, survived_fitness = map(np.asarray, survivors(codes, fitness, SIZE))
    scores = dict(zip(networks(codes), fitness, strict=True))
    best = sorted((x for x in scores.values() if not np.isnan(x)), reverse=True)[:SIZE]
    npt.assert_array_equal(survived_fitness[: len(best)], best)
    assert np.isneginf(survived_fitness[len(best) :]).all()
    assert survived.shape == (SIZE, NUM_LAYERS + 2)
    kept = networks(survived)[: len(best)]
    assert [scores[network] for network in kept] == best
    shuffled, shuffled_fitness = survivors(codes[order], fitness[order], SIZE)
    assert networks(shuffled)[: len(best)] == kept
    npt.assert_array_equal(shuffled_fitness, survived_fitness)


def test_nan_never_wins():
    codes = draw(3)
    fitness = jnp.full(SIZE, -jnp.inf).at[:4].set(jnp.nan).at[4].set(-1e30)
    survived, survived_fitness = survivors(codes, fitness, SIZE)
    npt.assert_array_equal(survived[0], codes[4])
    npt.assert_array_equal(survived_fitness, [np.float32(-1e30)] + [-np.inf] * 9)


def test_one_network_in_two_codes():
    codes = jnp.array([[1, 0, 3, 5], [1, 0, 15, 5], [1, 2, 15, 5], [1, 0, 3, 5]])
    repeated = jax.jit(evolution.is_repeated)(codes)
    npt.assert_array_equal(repeated, [False, True, False, True])
    fitness = jnp.array([1.0, 3.0, 2.0, 0.0])
    survived, survived_fitness = survivors(codes, fitness, 3)
    npt.assert_array_equal(survived[:2], codes[jnp.array([1, 2])])
    npt.assert_array_equal(survived_fitness, [3, 2, -jnp.inf])


def test_among_equals_the_first_wins():
    codes = draw(4)
    assert len(set(networks(codes))) == SIZE
    survived, _ = survivors(codes, jnp.zeros(SIZE), 4)
    npt.assert_array_equal(survived, codes[:4])


def test_the_best_never_gets_worse():
    """A few generations, whose fitness is the sum of genes, jitted and mapped."""

    def fitness(codes):
        return jnp.sum(codes, axis=1).astype(jnp.float32)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0))
    def run(key, codes):
        def generation(codes, key):
            children = any_offspring(key, codes, rates(0.5))
            both = jnp.concatenate([codes, children])
            codes, scores = survivors(both, fitness(both), SIZE)
            return codes, scores

        return jax.lax.scan(generation, codes, jax.random.split(key, 60))

    keys = jax.random.split(jax.random.key(6), NUM_CLIENTS)
    start = jnp.stack([draw(seed) for seed in range(NUM_CLIENTS)])
    codes, scores = run(keys, start)
    best = np.asarray(scores).max(axis=2)
    assert (np.diff(best, axis=1) >= 0).all()
    assert (best[:, 0] >= np.sum(start, axis=2).max(axis=1)).all()
    largest = sum(largest_genes(NUM_LAYERS))
    assert (best[:, -1] > 0.9 * largest).all()
    reversed_codes, _ = run(keys[::-1], start[::-1])
    npt.assert_array_equal(reversed_codes[::-1], codes)


# --- Controller and clients ----------------------------------------------------------


@properties(max_examples=100)
@hypothesis.given(
    num=st.integers(0, 60),
    weights=st.lists(st.integers(0, 50), min_size=7, max_size=7).filter(any),
)
def test_quotas(num, weights):
    shared = np.asarray(quotas(num, jnp.asarray(weights, jnp.float32)))
    exact = num * np.array(weights) / sum(weights)
    assert shared.sum() == num
    assert (np.abs(shared - exact) < 1 + 1e-4).all()
    assert not shared[np.array(weights) == 0].any()


def test_quotas_go_to_the_largest_remainders():
    npt.assert_array_equal(quotas(10, jnp.array([4.0, 1.0, 2.0])), [6, 1, 3])


def test_share_of_the_clients():
    assert evolution.client_share(0) == 0.5
    npt.assert_allclose(
        evolution.client_share(jnp.int32(250)), 0.5 * 0.99**250, rtol=1e-5
    )


@properties(max_examples=30)
@hypothesis.given(
    seed=seeds,
    share=st.sampled_from([0.0, 0.04, 0.3, 0.5, 1.0]),
    weights=st.tuples(*[st.integers(0, 5)] * NUM_CLIENTS).filter(any),
)
def test_the_new_population(seed, share, weights):
    codes = np.stack([draw(seed + i) for i in range(NUM_CLIENTS + 1)])
    weights = np.array(weights, np.float32)
    merged = merge(codes[0], codes[1:], weights, np.float32(share))
    assert merged.shape == (SIZE, NUM_LAYERS + 2)
    num_sent = round(share * SIZE)
    counts = [SIZE - num_sent, *np.asarray(quotas(num_sent, weights))]
    expected = []
    for own, count in zip(codes, counts, strict=True):
        expected += rows(own[:count])
    assert rows(merged) == expected


def test_the_order_of_clients_does_not_matter():
    codes = np.stack([draw(i) for i in range(NUM_CLIENTS + 1)])
    weights, order = jnp.array([5.0, 3.0, 2.0]), np.array([2, 0, 1])
    merged = merge(codes[0], codes[1:], weights, 1.0)
    permuted = merge(codes[0], codes[1:][order], weights[order], 1.0)
    assert rows(permuted) != rows(merged)
    assert sorted(rows(permuted)) == sorted(rows(merged))


def test_padded_clients_send_nothing():
    codes = np.stack([draw(i) for i in range(3)])
    alone = merge(codes[0], codes[1:2], jnp.ones(1), 0.5)
    padded = merge(codes[0], codes[1:], jnp.array([1.0, 0.0]), 0.5)
    npt.assert_array_equal(padded, alone)


# --- The paper's space ---------------------------------------------------------------


def test_a_child_of_the_paper_has_each_gene_of_either_parent():
    first = jnp.zeros((4000, 5), jnp.int32)
    children = np.asarray(evolution.crossover(jax.random.key(1), first, first + 1))
    patterns, counts = np.unique(children, axis=0, return_counts=True)
    assert len(patterns) == 2**5
    npt.assert_allclose(counts / 4000, 1 / 32, atol=0.015)


def test_mutated_genes_of_the_paper_are_drawn_as_at_first():
    codes = jnp.ones((4000, 5), jnp.int32)
    mutated = np.asarray(evolution.mutate(jax.random.key(2), codes, 1.0))
    absent = np.mean(mutated == 0, axis=0)
    npt.assert_allclose(absent, [0, 0, 1 / 3, 1 / 2, 0], atol=0.04)


def test_a_network_of_the_paper_survives_once():
    codes = jnp.array([[1, 5, 0, 3, 2], [1, 5, 0, 0, 2], [1, 5, 1, 0, 2]])
    survived, fitness = evolution.survivors(codes, jnp.array([1.0, 2.0, 0.0]), 2)
    assert rows(survived) == [(1, 5, 0, 0, 2), (1, 5, 1, 0, 2)]
    npt.assert_array_equal(fitness, [2, 0])
