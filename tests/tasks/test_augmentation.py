"""Random views against NumPy loops from the same draws, and the draws' frequencies."""

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.tasks import augmentation

SHAPE = (12, 10, 11, 3)


@pytest.fixture(scope="module")
def images():
    """No two numbers are the same, and none is 0."""
    return 1 + np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


def views(images, draws):
    """One image at a time."""
    for image, crop, is_flipped, cutout in zip(images, *draws, strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
        rows, columns = (
            slice(n, n + m) for n, m in zip(crop, image.shape, strict=False)
        )
        view = padded[rows, columns]
        if is_flipped:
            view = view[:, ::-1]
        view = view.copy()
        view[cutout[0] : cutout[0] + 8, cutout[1] : cutout[1] + 8] = 0
        yield view


def test_views_are_cropped_then_mirrored_then_cut_out(images):
    key = jax.random.key(3)
    draws = jax.device_get(augmentation.draw(key, *SHAPE[:3]))
    expected = np.stack(list(views(images, draws)))
    outputs = jax.jit(augmentation.augment)(key, images)
    npt.assert_array_equal(outputs, expected)
    assert 0 < draws.is_flipped.sum() < len(images)
    assert len(np.unique(draws.crop, axis=0)) > 6


@pytest.mark.parametrize("offset", [0, 4, 8])
def test_extreme_crops_reflect_the_border(images, offset):
    draws = augmentation.Draws(
        np.full((12, 2), offset), np.zeros(12, bool), np.zeros((12, 2), int)
    )
    outputs = augmentation.transform(images, draws)
    npt.assert_array_equal(outputs, np.stack(list(views(images, draws))))
    cut = np.zeros(SHAPE[1:3], bool)
    cut[:8, :8] = True
    npt.assert_array_equal(
        np.asarray(outputs) == 0, np.broadcast_to(cut[None, ..., None], SHAPE)
    )


def test_draws_are_uniform():
    number = 20_000
    draws = jax.device_get(augmentation.draw(jax.random.key(0), number, 10, 11))
    for values, size in [
        (draws.crop[:, 0], 9),
        (draws.crop[:, 1], 9),
        (draws.is_flipped.astype(int), 2),
        (draws.cutout[:, 0], 3),
        (draws.cutout[:, 1], 4),
    ]:
        counts = np.bincount(values, minlength=size)
        assert len(counts) == size
        deviation = np.sqrt(number / size)
        npt.assert_allclose(counts, number / size, atol=4.5 * deviation)


def test_draws_are_independent():
    draws = jax.device_get(augmentation.draw(jax.random.key(1), 20_000, 40, 40))
    columns = np.column_stack([draws.crop, draws.is_flipped, draws.cutout])
    correlation = np.corrcoef(columns.astype(float), rowvar=False)
    npt.assert_allclose(correlation, np.eye(5), atol=0.035)
