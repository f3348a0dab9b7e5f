"""Means over clients of which the server sees masked numbers alone, and their sum.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical
Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, Section 4. Each
pair of clients has a seed; one of the two adds the numbers that it draws from it to
what it sends, the other subtracts them. All is in integers modulo 2^32, so the masks
cancel exactly in the sum. If a client drops out, the others reveal the seeds that they
share with it, and the server takes these masks out of the sum.

What is not simulated: the agreement on seeds (here they are folded into the round's
key), secret shares of them, and the second mask of the paper, which protects a client
that is slow and was thought to have dropped out. Threefry draws the masks, as all
randomness of JAX: whoever deploys this takes a cipher.

Numbers are fixed-point with `FRACTION_BITS` after the point. Each client rounds its
share of a mean up or down by chance, so that the expected sum is exact however small
the shares are; a share is off by one unit at most.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_graph.core import aggregation, communication, faults
from fedjax_graph.core.aggregation import Aggregator, Stacked
from fedjax_graph.core.clients import Cohort, client_keys

FRACTION_BITS = 20
LIMIT = 2.0 ** (30 - FRACTION_BITS)  # of a model's numbers: half of what 32 bits hold
_ROUNDING = 2**31 - 4  # folded into a round's key
SEED_BYTES = 32  # of a public key and of a seed that is revealed


def secure_mean(key: jax.Array, may_drop: bool = False) -> Aggregator:
    """Factory of `aggregation.weighted_mean` by masked sums.

    A client multiplies by its own share, as under `encryption.mean`. Those of weight 0,
    who dropped out or are padding, send nothing.

    Args:
      key: of the round, from which seeds of pairs are folded.
      may_drop: whether clients may drop out, for the ledger: keys of all pairs cross,
        and of each that drops out the seeds that it shares with who is left.

    Returns:
      An aggregator, jittable, whose mean is NaN where a number is beyond `LIMIT` or not
      finite; beyond it and known, that raises `InputError`.
    """

    def aggregate(stacked: Stacked, cohort: Cohort) -> Stacked:
        aggregation.check_cohort(stacked, cohort)
        takes_part, size = cohort.weights > 0, len(cohort.indices)
        _count_keys(size, may_drop)
        shares = aggregation.shares_of(cohort.weights)
        reals = jax.tree.map(_as_reals, stacked)
        vectors = jax.vmap(lambda tree: ravel_pytree(tree)[0])(reals)
        _, unravel = ravel_pytree(jax.tree.map(lambda x: x[:1], reals))
        is_beyond = jnp.any(takes_part[:, None] & ~(jnp.abs(vectors) <= LIMIT))
        faults.refuse(
            is_beyond & jnp.all(jnp.isfinite(vectors) | ~takes_part[:, None]),
            f"secure_aggregation=masks holds numbers up to {LIMIT:g}, and a client's "
            "model has a larger one",
        )
        keys = client_keys(jax.random.fold_in(key, _ROUNDING), cohort.indices)
        chance = jax.vmap(lambda key: jax.random.uniform(key, vectors.shape[1:]))(keys)
        numbers = shares[:, None] * vectors + (chance - 0.5) / 2.0**FRACTION_BITS
        integers = to_fixed_point(numbers)
        sent = messages(integers, cohort.indices, takes_part, key)
        total = from_fixed_point(unmasked_sum(sent, cohort.indices, takes_part, key))
        mean = unravel(jnp.where(is_beyond, jnp.nan, total))
        return aggregation.checked(stacked, mean)

    return aggregate


def _as_reals(x: jax.Array) -> jax.Array:
    """So that means of counts are no counts, which would be cut off, before the end."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _count_keys(size: int, may_drop: bool) -> None:
    """Books a public key of each client, and at most as many seeds as are revealed."""
    revealed = (size // 2) * (size - size // 2) if may_drop else 0
    communication.book(
        up=SEED_BYTES * (size + revealed), down=SEED_BYTES * size * (size - 1)
    )


def to_fixed_point(numbers: jax.Array) -> jax.Array:
    """Floats as integers modulo 2^32, uint32."""
    steps = jnp.round(numbers * 2.0**FRACTION_BITS).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(steps, jnp.uint32)


def from_fixed_point(integers: jax.Array) -> jax.Array:
    """What `to_fixed_point` made integers of, float32."""
    steps = jax.lax.bitcast_convert_type(integers, jnp.int32)
    return steps.astype(jnp.float32) / 2.0**FRACTION_BITS


def messages(
    integers: jax.Array, parties: jax.Array, takes_part: jax.Array, key: jax.Array
) -> jax.Array:
    """What each client sends, [C, P] uint32; zeros from those who send nothing.

    Args:
      integers: [C, P] uint32, what they would send in the clear.
      parties: [C] int32, who they are.
      takes_part: [C] bool.
      key: of the round.
    """

    def of_client(one: tuple[jax.Array, jax.Array]) -> jax.Array:
        index, own = one

        def send(own):
            everybody = jnp.ones(len(parties), bool)
            return own + mask(index, everybody, parties, key, own.shape)

        return jax.lax.cond(takes_part[index], send, jnp.zeros_like, own)

    return jax.lax.map(of_client, (jnp.arange(len(parties)), integers))


def unmasked_sum(
    sent: jax.Array, parties: jax.Array, takes_part: jax.Array, key: jax.Array
) -> jax.Array:
    """The sum [P] uint32 of what clients sent; the masks of those missing are drawn.

    Args:
      sent: [C, P] uint32, of `messages`.
      parties, takes_part, key: see there; of the latter the server gets no more than
        the seeds of pairs of whom one has dropped out.
    """

    def with_mask_of(index: jax.Array, total: jax.Array) -> jax.Array:
        def reveal(total):
            return total + mask(index, takes_part, parties, key, total.shape)

        return jax.lax.cond(takes_part[index], lambda total: total, reveal, total)

    total = jnp.sum(sent, axis=0, dtype=jnp.uint32)
    return jax.lax.fori_loop(0, len(parties), with_mask_of, total)


def mask(
    index: jax.Array,
    others: jax.Array,
    parties: jax.Array,
    key: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """The sum of a client's masks with some others, uint32.

    Args:
      index: [] place of the client among the parties.
      others: [C] bool; the client itself is none.
      parties: [C] int32.
      key: of the round.
      shape: of the result.
    """

    def add(other: jax.Array, total: jax.Array) -> jax.Array:
        def with_pair(total):
            low, high = jnp.minimum(index, other), jnp.maximum(index, other)
            pair_key = jax.random.fold_in(key, parties[low])
            pair_key = jax.random.fold_in(pair_key, parties[high])
            drawn = jax.random.bits(pair_key, shape, jnp.uint32)
            return jnp.where(index < other, total + drawn, total - drawn)

        is_pair = others[other] & (other != index)
        return jax.lax.cond(is_pair, with_pair, lambda total: total, total)

    start: Any = jnp.zeros(shape, jnp.uint32)
    return jax.lax.fori_loop(0, len(parties), add, start)
