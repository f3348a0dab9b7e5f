"""Random views of images, drawn on the device.

Crops of the padded image and mirror images, as He et al. ("Deep Residual Learning for
Image Recognition", CVPR 2016) train on CIFAR-10, and cutout (DeVries and Taylor,
"Improved Regularization of Convolutional Neural Networks with Cutout", 2017), here of a
square that lies inside the image.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays

BORDER = 4
CUTOUT_SIZE = 8


class Draws(NamedTuple):
    """What is drawn for each of B images."""

    crop: jax.Array  # [B, 2] int32, row and column of the crop, 0 to 2 BORDER
    is_flipped: jax.Array  # [B] bool, left to right, after the crop
    cutout: jax.Array  # [B, 2] int32, first row and column that are set to 0


def draw(key: jax.Array, num_images: int, height: int, width: int) -> Draws:
    """Draws independently and uniformly for each image.

    Args:
      key: of the batch.
      num_images: B.
      height, width: of the images, at least `CUTOUT_SIZE`.

    Raises:
      InputError: if they are smaller.
    """
    for name, size in (("height", height), ("width", width)):
        arrays.check_count(f"{name} of the images", size, CUTOUT_SIZE)
    crop_key, flip_key, cutout_key = jax.random.split(key, 3)
    limits = jnp.array([height, width]) - CUTOUT_SIZE + 1
    return Draws(
        jax.random.randint(crop_key, (num_images, 2), 0, 2 * BORDER + 1),
        jax.random.bernoulli(flip_key, shape=(num_images,)),
        jax.random.randint(cutout_key, (num_images, 2), 0, limits),
    )


def transform(images: jax.Array, draws: Draws) -> jax.Array:
    """Crops, mirrors and cuts out as drawn.

    Args:
      images: [B, H, W, C], normalised, so that 0 is the mean colour. Outside is what
        its border reflects.
      draws: of the B images.

    Returns:
      [B, H, W, C].
    """
    height, width = images.shape[1:3]
    rows = jnp.arange(height) + draws.crop[:, :1] - BORDER  # [B, H]
    columns = jnp.arange(width)
    columns = jnp.where(draws.is_flipped[:, None], columns[::-1], columns)
    columns = columns + draws.crop[:, 1:] - BORDER  # [B, W]
    rows, columns = reflect(rows, height), reflect(columns, width)
    batch = jnp.arange(len(images))[:, None, None]
    views = images[batch, rows[:, :, None], columns[:, None, :]]
    in_rows = is_cut(draws.cutout[:, 0], height)[:, :, None]
    in_columns = is_cut(draws.cutout[:, 1], width)[:, None, :]
    return jnp.where((in_rows & in_columns)[..., None], 0, views)


def reflect(positions: jax.Array, size: int) -> jax.Array:
    """Positions from -size + 1 to 2 size - 2 mirrored at the end pixels, to inside."""
    return (size - 1) - jnp.abs(size - 1 - jnp.abs(positions))


def is_cut(starts: jax.Array, size: int) -> jax.Array:
    """Whether each of `size` pixels is in the square from `starts` [B]: [B, size]."""
    distance = jnp.arange(size) - starts[:, None]
    return (distance >= 0) & (distance < CUTOUT_SIZE)


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """A random view of each image: see `draw` and `transform`."""
    return transform(images, draw(key, *images.shape[:3]))
