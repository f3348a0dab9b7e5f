"""Dense layers against NumPy, and kernels split by rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import mesh
from fedjax_graph.models import linear


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_thin_kernels_are_multiplied_alike(monkeypatch, backend, size):
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(3, 5, size)), rng.normal(size=(size, 6))
    found = linear.matmul(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    npt.assert_allclose(found, x @ kernel, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_inputs_are_projected_alike_before_and_in_a_scan(monkeypatch, backend, size):
    """A thin kernel's gradient is made step by step on a GPU; inputs are scanned."""
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    rng = np.random.default_rng(1)
    sizes = ((7, 5, size), (size, 6), (6,))
    inputs, kernel, bias = (np.float32(rng.normal(size=x)) for x in sizes)

    def total(kernel, bias):
        scanned, project = linear.over_time(jnp.asarray(inputs), kernel, bias)
        is_hoisted = scanned.shape[-1] == 6
        assert is_hoisted == (backend == "cpu" or size > linear.THIN)
        _, found = jax.lax.scan(lambda _, now: (None, project(now)), None, scanned)
        return jnp.sum(found**2) / 2, found

    (_, found), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(kernel, bias)
    expected = inputs @ kernel + bias
    npt.assert_allclose(found, expected, atol=1e-5)
    rows = expected.reshape(-1, 6)
    npt.assert_allclose(grads[0], inputs.reshape(-1, size).T @ rows, rtol=1e-4)
    npt.assert_allclose(grads[1], rows.sum(0), rtol=1e-4)


@pytest.mark.parametrize("shape", [(4,), (6, 4), (3, 5, 4), (0, 2, 4)])
def test_linear_multiplies_the_last_axis(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layer = linear.Linear(4, 3)
    params = layer.init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    expected = x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])
    outputs = layer.apply({"params": params}, x)
    assert outputs.shape == (*shape[:-1], 3)
    npt.assert_allclose(outputs, expected, atol=1e-6)


@pytest.mark.parametrize("fan_in", [4, 100])
def test_first_weights_fill_the_interval_of_the_released_code(fan_in):
    draws = linear.fan_in_uniform(fan_in)(jax.random.key(1), (200, 200))
    bound = fan_in**-0.5
    assert 0.999 * bound < np.abs(draws).max() <= bound
    npt.assert_allclose(np.mean(draws), 0, atol=0.02 * bound)
    npt.assert_allclose(np.var(draws), bound**2 / 3, rtol=0.02)


@pytest.mark.parametrize("layer_sizes", [(7, 3), (6, 5, 3)])
def test_the_parts_of_an_mlp_make_the_mlp_of_the_concatenation(layer_sizes):
    rng = np.random.default_rng(0)
    sizes = (2, 4, 1)
    parts = [rng.normal(size=(9, size)).astype(np.float32) for size in sizes]

    class FromParts(linear.MLP):
        def __call__(self, parts):
            kernels = self.first_kernels()
            first = sum(p @ k for p, k in zip(parts, kernels, strict=True))
            return self.output(self.hidden(first + self.first_bias()))

    mlp = FromParts(sizes, layer_sizes)
    params = mlp.init(jax.random.key(0), parts)["params"]
    x = np.concatenate(parts, axis=-1)
    for depth in range(len(layer_sizes)):
        layer = params[f"layers_{depth}"]
        x = np.maximum(x, 0) if depth else x
        x = x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
    assert x.shape == (9, 3)
    npt.assert_allclose(mlp.apply({"params": params}, parts), x, atol=1e-6)
