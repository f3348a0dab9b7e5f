"""Functions of marked rows, and their gradients, against those of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import masked_rows
from fedjax_graph.core.masked_rows import MaskedRows, map_marked

SIZE, WIDTH, UNITS = 150, 4, 3  # in blocks of 64


def some(share, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(SIZE) < share)


@pytest.fixture(scope="module")
def rows():
    """Numbers, and whole ones."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(SIZE, WIDTH)), jnp.float32)
    return x, jnp.asarray(rng.integers(0, 5, (SIZE, 2)))


@pytest.fixture(scope="module")
def shared():
    rng = np.random.default_rng(2)
    kernel = rng.normal(size=(WIDTH, UNITS))
    return tuple(jnp.asarray(x, jnp.float32) for x in (kernel, rng.normal(size=5)))


def fn(rows, shared):
    (x, places), (kernel, table) = rows, shared
    return jnp.sin(x @ kernel) * jnp.sum(table[places], axis=1)[:, None]


def of_all(is_marked, rows, shared):
    return jnp.where(is_marked[:, None], fn(rows, shared), 0)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_results_and_gradients_are_those_of_all_rows(rows, shared, share, quick_jit):
    is_marked = some(share)

    def values(run):
        def loss(x, shared):
            return jnp.sum(jnp.cos(run(is_marked, (x, rows[1]), shared)))

        gradients = jax.value_and_grad(loss, (0, 1))
        return quick_jit(gradients)(rows[0], shared)

    found, expected = values(lambda *args: map_marked(fn, *args)), values(of_all)
    jax.tree.map(lambda x, y: npt.assert_allclose(x, y, 1e-4, 1e-5), found, expected)


def test_clients_side_by_side_have_as_many_blocks_as_the_most(rows, shared, quick_jit):
    masks = jnp.stack([some(share, seed=3) for share in (0.05, 0.9, 0)])

    def gradient(run, mask):
        return jax.grad(lambda kernel: jnp.sum(run(mask, rows, (kernel, shared[1]))))

    def all_gradients(run):
        return jax.vmap(lambda mask: gradient(run, mask)(shared[0]))(masks)

    found = quick_jit(lambda: all_gradients(lambda *args: map_marked(fn, *args)))()
    expected = quick_jit(lambda: all_gradients(of_all))()
    npt.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not np.any(found[2])


def test_rows_that_are_not_marked_are_not_read(shared, quick_jit):
    is_marked = some(0.3)
    x = jnp.where(is_marked[:, None], 1.0, jnp.nan) * jnp.ones(WIDTH)

    def product(x, kernel):
        return jnp.sum(map_marked(jnp.matmul, is_marked, x, kernel) ** 2)

    gradients = quick_jit(jax.grad(product, (0, 1)))(x, shared[0])
    assert all(np.isfinite(x).all() for x in gradients)


def test_no_block_is_taken_in_vain(rows, shared):
    """Not one of no marked rows, and two of 65."""
    seen = []

    def counted(rows, shared):
        jax.debug.callback(lambda: seen.append(1))
        return fn(rows, shared)

    for number, expected in ((0, 0), (64, 1), (65, 2), (SIZE, 3)):
        is_marked = jnp.arange(SIZE)[::-1] < number
        map_marked(counted, is_marked, rows, shared)
        jax.effects_barrier()
        assert len(seen) == expected
        seen.clear()


def test_a_masked_matrix_is_multiplied_part_by_part(rows, shared, quick_jit):
    x, kernel, mask = rows[0], shared[0], some(0.5).astype(jnp.float32)
    matrix = MaskedRows((x[:20], x[20:]), mask)
    assert matrix.shape == x.shape and len(matrix) == SIZE and matrix.dtype == x.dtype
    npt.assert_array_equal(matrix.dense(), x)
    product = quick_jit(lambda matrix: matrix @ kernel)(matrix)
    npt.assert_allclose(product, mask[:, None] * (x @ kernel), rtol=1e-5, atol=1e-6)
    assert masked_rows.ROWS_PER_BLOCK > 20  # one part is smaller
