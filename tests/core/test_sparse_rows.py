"""Products with sparse features, and their gradients, against dense algebra."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core import sparse_rows

SIZE, COLUMNS = 7, 5


@pytest.fixture(scope="module")
def dense():
    """Two matrices, the second of which has fewer rows and, in one of them, nothing."""
    rng = np.random.default_rng(0)
    draw = rng.normal(size=(2, SIZE, COLUMNS)) * (rng.random((2, SIZE, COLUMNS)) < 0.4)
    draw[1, 4:] = draw[1, 2] = 0
    return draw.astype(np.float32)


@pytest.fixture(scope="module")
def stacked(dense):
    matrices = [scipy.sparse.csr_array(dense[0]), scipy.sparse.csr_array(dense[1, :4])]
    return sparse_rows.stack(matrices, SIZE)


def test_products_and_gradients_are_the_dense_ones(dense, stacked):
    kernel = jnp.asarray(
        np.random.default_rng(1).normal(size=(COLUMNS, 3)), jnp.float32
    )
    assert stacked.shape == dense.shape and len(stacked) == 2

    def loss(x, kernel):
        return jnp.sum(jnp.sin(x @ kernel))

    found = jax.jit(jax.vmap(lambda x: x @ kernel))(stacked)
    npt.assert_allclose(found, dense @ kernel, rtol=1e-5, atol=1e-6)
    for k in range(2):
        one = jax.tree.map(lambda x, k=k: x[k], stacked)
        factors = jnp.arange(1.0, COLUMNS + 1)
        npt.assert_allclose((one * factors) @ kernel, dense[k] * factors @ kernel, 1e-5)
        gradient = jax.grad(loss, 1)(one, kernel)
        expected = jax.grad(loss, 1)(jnp.asarray(dense[k]), kernel)
        npt.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
        second = jax.grad(lambda w, one=one: jnp.sum(jax.grad(loss, 1)(one, w) ** 2))
        npt.assert_allclose(
            second(kernel),
            jax.grad(lambda w, k=k: jnp.sum(jax.grad(loss, 1)(dense[k], w) ** 2))(
                kernel
            ),
            rtol=1e-4,
            atol=1e-5,
        )


def test_the_transpose_of_the_transpose_is_the_matrix(dense, stacked):
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), stacked)
    npt.assert_allclose(one.T @ jnp.eye(SIZE), dense[0].T, rtol=1e-6)
    npt.assert_allclose(one.T.T @ jnp.eye(COLUMNS), dense[0], rtol=1e-6)


def test_dropout_of_entries_is_dropout_of_the_matrix(dense, stacked):
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), stacked)

    def every_second(x):
        return x * (jnp.arange(x.size).reshape(x.shape) % 2)

    entries = dense[0][dense[0] != 0]  # row by row, as they are kept
    entries[::2] = 0
    expected = np.zeros_like(dense[0])
    expected[dense[0] != 0] = entries
    found = sparse_rows.map_entries(every_second, one)
    npt.assert_allclose(found @ jnp.eye(COLUMNS), expected, rtol=1e-6)
    npt.assert_array_equal(
        sparse_rows.map_entries(every_second, jnp.ones((2, 2))), [[0, 1], [0, 1]]
    )


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_products_are_the_same_on_any_backend(backend, dense, stacked, monkeypatch):
    """JAX's own product on a CPU, a sum over segments elsewhere."""
    monkeypatch.setattr(sparse_rows.mesh, "backend", lambda: backend)
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), stacked)
    kernel = np.random.default_rng(2).normal(size=(COLUMNS, 4)).astype(np.float32)
    npt.assert_allclose(one @ kernel, dense[0] @ kernel, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda k: jnp.sum((one @ k) ** 2))(kernel)
    expected = 2 * dense[0].T @ (dense[0] @ kernel)
    npt.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


# --- Types ----------------------------------------------------------------------------

TYPES = ("bfloat16", "float16", "float32", "float64")


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("of_kernel", (*TYPES, "int8"))
@pytest.mark.parametrize("of_values", TYPES)
def test_gradients_have_the_types_of_what_they_are_of(
    of_values, of_kernel, backend, dense, stacked, monkeypatch
):
    monkeypatch.setattr(sparse_rows.mesh, "backend", lambda: backend)
    with jax.enable_x64(True):
        one = jax.tree.map(lambda x: jnp.asarray(x[0]), stacked)
        values = one.values.astype(of_values)
        kernel = jnp.asarray(np.arange(-7, 8).reshape(COLUMNS, 3), of_kernel)

        def product(values, kernel):
            return dataclasses.replace(one, values=values) @ kernel

        found, pull_back = jax.vjp(product, values, kernel)
        assert found.dtype == jnp.result_type(values, kernel)
        of = pull_back(jnp.ones_like(found))
        assert of[0].dtype == values.dtype
        rounded, weights = (np.asarray(x, float) for x in (values, kernel))
        matrix = np.zeros_like(dense[0], float)
        matrix[dense[0] != 0] = rounded[: np.count_nonzero(dense[0])]
        npt.assert_allclose(np.asarray(found, float), matrix @ weights, 0.01, 0.01)
        expected = np.ones((SIZE, 3)) @ weights.T
        ours = np.asarray(of[0], float)[: np.count_nonzero(dense[0])]
        npt.assert_allclose(ours, expected[dense[0] != 0], 0.01)
        if of_kernel == "int8":
            assert of[1].dtype == jax.dtypes.float0
        else:
            assert of[1].dtype == kernel.dtype
            expected = matrix.T @ np.ones((SIZE, 3))
            npt.assert_allclose(np.asarray(of[1], float), expected, 0.01, 0.01)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_long_sums_of_short_floats_do_not_stop_at_a_power_of_two(
    dtype, backend, monkeypatch
):
    monkeypatch.setattr(sparse_rows.mesh, "backend", lambda: backend)
    size = 4100  # of float16, 2048 and 1 are 2048
    for shape in ((1, size), (size, 1)):
        rows = sparse_rows.stack([scipy.sparse.csr_array(np.ones(shape))], shape[0])
        one = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
        one = dataclasses.replace(one, values=one.values.astype(dtype))
        kernel = jnp.ones((shape[1], 1), dtype)
        found, pull_back = jax.vjp(lambda k, one=one: one @ k, kernel)
        expected = np.full((shape[0], 1), float(shape[1]))
        npt.assert_allclose(np.asarray(found, float), expected, rtol=0.01)
        expected = np.full((shape[1], 1), float(shape[0]))
        (gradient,) = pull_back(jnp.ones_like(found))
        assert found.dtype == gradient.dtype == dtype
        npt.assert_allclose(np.asarray(gradient, float), expected, rtol=0.01)
