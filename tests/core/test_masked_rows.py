"""Functions of marked rows, and their gradients, against those of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import mesh
from fedjax_graph.core.masked_rows import MaskedRows, linear_of_marked, map_marked

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


def test_on_an_accelerator_all_rows_are_taken_at_once(rows, shared, monkeypatch):
    """Where clients are side by side, each of which has another number of them."""
    is_marked = some(0.4)
    monkeypatch.setattr(mesh, "backend", lambda: "gpu")
    found = map_marked(fn, is_marked, rows, shared)
    npt.assert_allclose(found, of_all(is_marked, rows, shared), rtol=1e-5, atol=1e-6)
    program = jax.jit(lambda mask: map_marked(fn, mask, rows, shared)).lower(is_marked)
    assert "while" not in program.as_text()


def test_gradients_that_are_summed_over_blocks_are_summed_in_float32(quick_jit):
    """Of ten blocks of 65 ones, 650, bfloat16 makes 648, and 644 of sums in it."""
    ones, most = jnp.ones((650, 1), jnp.bfloat16), 10
    is_marked = jnp.ones(len(ones), bool)

    def total(scale):
        results = map_marked(lambda x, y: x * y, is_marked, ones, scale, most)
        return jnp.sum(results.astype(jnp.float32))

    gradient = quick_jit(jax.grad(total))(jnp.ones(1, jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and gradient == 648


def test_arrays_of_the_host_and_none_at_all_are_mapped(rows, shared):
    is_marked, host = np.asarray(some(0.4)), jax.tree.map(np.asarray, (rows, shared))
    found = map_marked(fn, is_marked, *host)
    npt.assert_allclose(found, of_all(is_marked, rows, shared), rtol=1e-5, atol=1e-6)
    nothing = jax.tree.map(lambda x: x[:0], rows)
    assert map_marked(fn, is_marked[:0], nothing, shared).shape == (0, UNITS)


def test_no_block_is_taken_in_vain(rows, shared):
    """Not one of no marked rows, and two of 65; of ten in all each has a tenth."""
    seen, many = [], jax.tree.map(lambda x: jnp.repeat(x, 10, axis=0), rows)

    def counted(rows, shared):
        jax.debug.callback(lambda: seen.append(1))
        return fn(rows, shared)

    few = [(rows, None, *case) for case in ((0, 0), (64, 1), (65, 2), (SIZE, 3))]
    a_few = [(rows, 10, 65, 2), (many, 10, SIZE, 1), (many, 10, SIZE + 1, 2)]
    for rows, most_blocks, number, expected in (*few, *a_few):
        is_marked = jnp.arange(len(rows[0]))[::-1] < number
        map_marked(counted, is_marked, rows, shared, most_blocks)
        jax.effects_barrier()
        assert len(seen) == expected
        seen.clear()


def test_a_masked_matrix_is_multiplied_part_by_part(rows, shared, quick_jit):
    """One of which is smaller than a block."""
    x, kernel, mask = rows[0], shared[0], some(0.5).astype(jnp.float32)
    matrix = MaskedRows((x[:20], x[20:]), mask)
    assert matrix.shape == x.shape and len(matrix) == SIZE and matrix.dtype == x.dtype
    npt.assert_array_equal(matrix.dense(), x)
    product = quick_jit(lambda matrix: matrix @ kernel)(matrix)
    npt.assert_allclose(product, mask[:, None] * (x @ kernel), rtol=1e-5, atol=1e-6)


PARTS = 3


@pytest.fixture(scope="module")
def layer():
    """Weights of three parts of three units, and rows marked for 4, 7 and 0 in ten."""
    rng = np.random.default_rng(4)
    kernel, bias = rng.normal(size=(WIDTH, PARTS * UNITS)), rng.normal(size=9)
    masks = [some(0.4, seed=5), some(0.7, seed=6), some(0.0)]
    weights = (jnp.asarray(x, jnp.float32) for x in (kernel, bias))
    return *weights, jnp.stack(masks, axis=1)


def dense_linear(x, kernel, bias, is_marked):
    """One row and one part after another."""
    results = np.zeros((*is_marked.shape, UNITS))
    for row, part in np.argwhere(is_marked):
        columns = slice(part * UNITS, (part + 1) * UNITS)
        results[row, part] = np.asarray(x)[row] @ kernel[:, columns] + bias[columns]
    return results


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_linear_layer_by_parts_is_that_of_loops(rows, layer, backend, monkeypatch):
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    found = linear_of_marked(rows[0], *layer)
    expected = dense_linear(rows[0], *map(np.asarray, layer))
    npt.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_linear_layer_by_parts(rows, layer, quick_jit):
    """By hand: those of a sum of squares, of rows r, results y and a mask m."""
    kernel, bias, is_marked = layer

    def loss(x, kernel, bias):
        return jnp.sum(linear_of_marked(x, kernel, bias, is_marked, 2) ** 2) / 2

    found = quick_jit(jax.grad(loss, (0, 1, 2)))(rows[0], kernel, bias)
    y = dense_linear(rows[0], *map(np.asarray, layer)).reshape(SIZE, -1)
    x = np.asarray(rows[0])
    for gradient, expected in zip(
        found, (y @ np.asarray(kernel).T, x.T @ y, y.sum(0)), strict=True
    ):
        npt.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_a_linear_layer_by_parts_is_one_product_on_an_accelerator(
    rows, layer, monkeypatch
):
    def products():
        program = jax.jit(lambda *args: linear_of_marked(*args))
        text = program.lower(rows[0], *layer).as_text()
        return text.count("stablehlo.dot_general"), "while" in text

    assert products() == (PARTS, True)
    monkeypatch.setattr(mesh, "backend", lambda: "gpu")
    assert products() == (1, False)
