"""Minibatches of examples, and shares of train, validation and test."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError

SPLITS = ("train", "validation", "test")


FRACTIONS = (0.7, 0.1, 0.2)  # of the windows in each of `SPLITS`


def parse_fractions(text: str) -> tuple[float, float, float]:
    """Reads fractions of train, validation and test from percentages: "70/10/20".

    Raises:
      InputError: if these are not three positive percentages that sum to 100.
    """
    try:
        return checked_fractions([float(part) / 100 for part in text.split("/")])
    except ValueError as error:  # an InputError is one
        raise InputError(
            f"split {text!r}: expected three positive percentages of train, validation "
            "and test that sum to 100, such as 70/10/20"
        ) from error


def checked_fractions(fractions: Sequence[float]) -> tuple[float, float, float]:
    """Checks fractions of train, validation and test.

    Raises:
      InputError: if they are not three positive numbers that sum to 1.
    """
    valid = len(fractions) == 3 and min(fractions) > 0
    if not valid or not math.isclose(sum(fractions), 1, abs_tol=1e-6):
        raise InputError(
            f"fractions {tuple(fractions)} of train, validation and test: expected "
            "three positive numbers that sum to 1"
        )
    train, validation, test = fractions
    return train, validation, test


def batches(examples: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Cuts examples into equal batches; the last one is padded and masked.

    Args:
      examples: [S], such as starts of windows, in the order wanted.
      batch_size: B.

    Returns:
      Examples [ceil(S / B), B] (padding repeats the first) and mask, float32, same
      shape.

    Raises:
      InputError: if there are no examples, or the size is no count.
    """
    size = examples.shape[0]
    arrays.check_count("number of examples", size)
    arrays.check_count("batch_size", batch_size)
    num_batches = -(-size // batch_size)
    padded = jnp.arange(num_batches * batch_size)
    mask = (padded < size).astype(jnp.float32)
    examples = examples[jnp.where(padded < size, padded, 0)]
    shape = (num_batches, batch_size)
    return examples.reshape(shape), mask.reshape(shape)


def shuffled_batches(
    key: jax.Array,
    num_examples: int,
    batch_size: int,
    num_epochs: int,
    drop_last: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Shuffles minibatches: indices and their mask, both `[num_epochs * steps, B]`.

    Args:
      key: of all passes.
      num_examples: S.
      batch_size: B.
      num_epochs: passes.
      drop_last: whether a pass leaves out the examples of its last batch where that is
        not full, in place of padding it.

    Raises:
      InputError: if a number is no count, or all examples would be left out.
    """
    arrays.check_count("num_epochs", num_epochs)
    arrays.check_count("batch_size", batch_size)
    kept = num_examples - num_examples % batch_size if drop_last else num_examples
    if drop_last and not kept:
        raise InputError(
            f"drop_last: {num_examples} examples are fewer than batch_size="
            f"{batch_size}, so that none would be trained on"
        )

    def one_pass(key):
        order = jax.random.permutation(key, num_examples)[:kept]
        return batches(order.astype(jnp.int32), batch_size)

    indices, mask = jax.vmap(one_pass)(jax.random.split(key, num_epochs))
    return indices.reshape(-1, batch_size), mask.reshape(-1, batch_size)


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Counts the optimisation steps of one pass."""
    return -(-num_examples // batch_size)
