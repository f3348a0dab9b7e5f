"""ResNet9 against loops, flax's batch normalisation and the paper's parameter count."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.models import normalization, resnet, winograd


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def convolution(x, kernel):
    """Pixel by pixel, with zeros outside."""
    out = np.zeros((*x.shape[:3], kernel.shape[-1]))
    height, width = x.shape[1:3]
    for i in range(height):
        for j in range(width):
            for di in range(3):
                for dj in range(3):
                    row, column = i + di - 1, j + dj - 1
                    if 0 <= row < height and 0 <= column < width:
                        out[:, i, j] += x[:, row, column] @ kernel[di, dj]
    return out


def largest_of_four(x):
    out = np.zeros((len(x), x.shape[1] // 2, x.shape[2] // 2, x.shape[3]))
    for i in range(out.shape[1]):
        for j in range(out.shape[2]):
            out[:, i, j] = x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max(axis=(1, 2))
    return out


def init_model(model, key):
    return model.init(key, jnp.zeros((1, 32, 32, 3)))


def test_the_number_of_parameters_is_that_of_the_paper():
    shapes = jax.eval_shape(
        lambda key: init_model(resnet.ResNet9(), key), jax.random.key(0)
    )
    kernels = 9 * (3 * 64 + 64 * 128 + 128 * 256 + 256 * 256)
    residuals = 2 * 128**2 * 9 + 2 * 256**2 * 9
    norms = 2 * (64 + 3 * 128 + 3 * 256 + 256)
    sizes = [x.size for x in jax.tree.leaves(shapes["params"])]
    assert sum(sizes) == kernels + residuals + norms + 256 * 10 == 2_440_256
    statistics = [x.size for x in jax.tree.leaves(shapes["batch_stats"])]
    assert sum(statistics) == norms
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {np.dtype("float32")}


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_convolutions_see_zeros_outside(backend, is_trained, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x, kernel = normal(2, 4, 5, 3), normal(3, 3, 3, 2, seed=1)
    outputs = resnet.convolve(x, kernel, is_trained)
    npt.assert_allclose(outputs, convolution(x, kernel), rtol=1e-4, atol=1e-5)


def test_both_ways_to_convolve_have_the_same_gradients(monkeypatch):
    x, kernel, weights = normal(2, 4, 5, 3), normal(3, 3, 3, 2), normal(2, 4, 5, 2)
    results, has_convolution = [], []
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)

        def loss(x, kernel):
            return jnp.sum(weights * resnet.convolve(x, kernel, is_trained=True))

        results.append(jax.grad(loss, (0, 1))(x, kernel))
        has_convolution.append("conv_general" in str(jax.make_jaxpr(loss)(x, kernel)))
    assert has_convolution == [False, True]
    for left, right in zip(*results, strict=True):
        npt.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (1, 2), (16, 17)])
def test_convolutions_with_fewer_multiplications(size, shape):
    x = normal(2, *shape, 3).astype(float)
    kernel = normal(3, 3, 3, 2, seed=1).astype(float)
    with jax.enable_x64(True):
        outputs = winograd.convolve(x, kernel, size)
    npt.assert_allclose(outputs, convolution(x, kernel), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_narrow_types_are_refused(dtype):
    x, kernel = jnp.ones((1, 4, 4, 1), dtype), jnp.ones((3, 3, 1, 1), dtype)
    with pytest.raises(InputError, match=f"^x: expected float32 .*, found {dtype}"):
        winograd.convolve(x, kernel)


@pytest.mark.parametrize(
    ("x", "kernel", "size", "match"),
    [
        ((4, 4, 3), (3, 3, 3, 2), None, r"x has shape \(4, 4, 3\), expected \(any"),
        (
            (1, 4, 4, 9),
            (5, 5, 9, 2),
            None,
            r"kernel .* \(5, 5, 9, 2\), expected \(3, 3",
        ),
        ((1, 4, 4, 1), (1, 1, 1, 9), None, r"kernel .* expected \(3, 3, 1, any\)"),
        ((1, 4, 4, 3), (3, 3, 1, 3), None, r"kernel .* expected \(3, 3, 3, any\)"),
        ((1, 4, 4, 3), (3, 3, 3), None, r"kernel .* expected \(3, 3, 3, any\)"),
        ((1, 4, 4, 3), (3, 3, 3, 2), 0, "size=0: expected None, 2 or 4"),
        ((1, 4, 4, 3), (3, 3, 3, 2), 3, "size=3: expected None, 2 or 4"),
        ((1, 4, 4, 3), (3, 3, 3, 2), 2.0, "size=2.0: expected None, 2 or 4"),
    ],
)
def test_other_kernels_and_tiles_are_refused_in_one_line(x, kernel, size, match):
    with pytest.raises(InputError, match=match) as raised:
        winograd.convolve(jnp.ones(x), jnp.ones(kernel), size)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("shape", "points"), [((16, 17), 36), ((15, 16), 16)])
def test_large_images_have_larger_tiles(shape, points):
    kernels = jax.make_jaxpr(winograd.convolve)(
        np.zeros((1, *shape, 3), np.float32), np.zeros((3, 3, 3, 2), np.float32)
    )
    assert f"f32[{points},3,2]" in str(kernels)


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_halving_keeps_the_largest(size):
    x = normal(2, *size, 3)
    npt.assert_array_equal(resnet.halve(x), largest_of_four(x).astype(np.float32))


# --- Batch normalisation -------------------------------------------------------------


def norm_variables(channels=3):
    return {
        "params": {"scale": normal(channels, seed=3), "bias": normal(channels, seed=4)},
        "batch_stats": {
            "mean": normal(channels, seed=5),
            "var": np.exp(normal(channels, seed=6)),
        },
    }


def normalise(variables, x, mask):
    return normalization.BatchNorm().apply(variables, x, mask, mutable=["batch_stats"])


def test_padding_has_no_part_in_batch_normalisation():
    x = 2 + 3 * normal(5, 4, 4, 3)
    mask = np.array([1, 0, 1, 1, 0], np.float32)
    variables = norm_variables()
    outputs, changed = normalise(variables, x, mask)
    real = x[mask > 0].astype(np.float64)
    mean, var = real.mean(axis=(0, 1, 2)), real.var(axis=(0, 1, 2))
    scale, bias = variables["params"]["scale"], variables["params"]["bias"]
    expected = scale * (x - mean) / np.sqrt(var + 1e-5) + bias
    npt.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
    before, after = variables["batch_stats"], changed["batch_stats"]
    npt.assert_allclose(after["mean"], 0.9 * before["mean"] + 0.1 * mean, rtol=1e-5)
    npt.assert_allclose(after["var"], 0.9 * before["var"] + 0.1 * var, rtol=1e-5)


def test_batch_normalisation_is_that_of_flax():
    x, variables = normal(4, 3, 3, 3), norm_variables()
    outputs, changed = normalise(variables, x, np.ones(4, np.float32))
    flax_norm = nn.BatchNorm(momentum=0.9, epsilon=1e-5)
    expected, expected_changed = flax_norm.apply(
        variables, x, use_running_average=False, mutable=["batch_stats"]
    )
    npt.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=1e-5), changed, expected_changed
    )
    npt.assert_allclose(
        normalization.BatchNorm().apply(variables, x),
        flax_norm.apply(variables, x, use_running_average=True),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_batch_of_padding_changes_no_statistics():
    x, variables = normal(4, 3, 3, 3), norm_variables()
    outputs, changed = normalise(variables, x, np.zeros(4, np.float32))
    npt.assert_array_equal(outputs, normalization.BatchNorm().apply(variables, x))
    jax.tree.map(
        npt.assert_array_equal, changed["batch_stats"], variables["batch_stats"]
    )


# --- The network ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    """Width 2, with weights and running statistics that keep all layers alive."""
    model = resnet.ResNet9(2, 5)
    rng = np.random.default_rng(0)

    def draw(path, x):
        name = path[-1].key
        low = {"scale": 0.8, "var": 0.8, "bias": 0.2}.get(name, -0.4)
        return rng.uniform(low, low + 0.8, x.shape).astype(np.float32)

    shapes = jax.eval_shape(lambda key: init_model(model, key), jax.random.key(0))
    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def test_the_network_is_its_layers_in_turn(network):
    model, variables = network
    params, stats = variables["params"], variables["batch_stats"]

    def block(x, *path):
        own, seen = params, stats
        for name in path:
            own, seen = own[name], seen[name]
        x = convolution(x, np.asarray(own["kernel"]))
        x = (x - seen["norm"]["mean"]) / np.sqrt(seen["norm"]["var"] + 1e-5)
        return np.maximum(x * own["norm"]["scale"] + own["norm"]["bias"], 0)

    def residual(x, name):
        first = block(x, name, "first")
        return x + block(first, name, "second")

    images = normal(2, 16, 16, 3)
    x = block(images, "prep")
    x = residual(largest_of_four(block(x, "layer1")), "residual1")
    x = residual(largest_of_four(block(x, "layer2")), "residual2")
    x = largest_of_four(block(x, "layer3"))
    assert x.shape == (2, 2, 2, 8)
    logits = 0.2 * x.max(axis=(1, 2)) @ np.asarray(params["head"]["kernel"])
    assert np.ptp(logits) > 1e-3
    npt.assert_allclose(model.apply(variables, images), logits, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def train_step(network):
    """(images, mask) -> gradients of a masked sum and the new statistics."""
    model, variables = network

    def loss(params, images, mask):
        logits, changed = model.apply(
            {**variables, "params": params}, images, mask, mutable=["batch_stats"]
        )
        return jnp.sum(mask[:, None] * logits**2), changed["batch_stats"]

    step = jax.jit(jax.grad(loss, has_aux=True))
    return lambda images, mask: step(variables["params"], images, mask)


def test_padding_has_no_part_in_training(train_step):
    images, mask = normal(4, 16, 16, 3), np.array([1, 0, 1, 0], np.float32)
    altered = images.copy()
    altered[mask == 0] *= 50
    results = train_step(images, mask)
    assert all(np.any(x) for x in jax.tree.leaves(results[0]))
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        results,
        train_step(altered, mask),
    )


def test_a_batch_of_padding_trains_nothing(network, train_step):
    grads, stats = train_step(1e3 * normal(4, 16, 16, 3), np.zeros(4, np.float32))
    jax.tree.map(lambda x: npt.assert_array_equal(x, np.zeros_like(x)), grads)
    jax.tree.map(npt.assert_array_equal, stats, network[1]["batch_stats"])


def test_images_that_are_too_small_are_refused():
    with pytest.raises(InputError, match="at least 8 pixels each way"):
        resnet.ResNet9(4).init(jax.random.key(0), jnp.zeros((1, 6, 9, 1)))


def test_first_weights_are_bounded_by_the_inputs_of_a_unit(quick_jit):
    model = resnet.ResNet9(8)
    init = quick_jit(lambda key: init_model(model, key)["params"])
    kernel = init(jax.random.key(0))["layer1"]["kernel"]
    bound = (9 * 8) ** -0.5
    assert 0.99 * bound < np.abs(kernel).max() <= bound
