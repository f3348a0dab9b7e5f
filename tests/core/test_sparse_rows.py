"""Products with sparse features, and their gradients, against dense algebra."""

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
