"""What a function reads of a pytree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.core import clients, trees

TREE = {"a": np.ones(3), "b": (np.ones(2), np.int32(4)), "c": np.zeros(0)}


def of_each_row(tree, clients_per_chunk):
    """Of what is mapped over, one leaf; the others are not looked at."""
    rows = {"a": tree["a"][:2], "b": tree["b"][0]}
    return clients.map_clients(lambda row: row["b"] + 1, clients_per_chunk)(rows)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda tree: tree["a"], [True, False, False, False]),  # as it is
        (lambda tree: jnp.sum(tree["b"][0]), [False, True, False, False]),
        (lambda tree: len(tree["a"]), [False] * 4),  # its shape alone
        (lambda tree: jax.tree.map(jnp.sum, tree), [True] * 4),
        (
            lambda tree: jax.jit(lambda x: 2 * x)(tree["b"][1]),
            [False] * 2 + [True, False],
        ),
        (lambda tree: of_each_row(tree, None), [False, True, False, False]),
        (lambda tree: of_each_row(tree, 1), [False, True, False, False]),
    ],
)
def test_leaves_that_are_read_are_marked(fn, expected):
    assert trees.leaves_read(fn, TREE) == expected
