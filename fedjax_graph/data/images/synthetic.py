"""Synthetic colour images: a textured shape somewhere before a cluttered background.

A class is a pair of a shape and a texture, so that no single cue tells them all apart:
a few classes share the shape and differ in the texture, others the reverse, and what is
learnt on some classes does not tell the rest. Place, size, rotation, colours, texture
scale and lighting of the shape are drawn for each image, as is a background of smooth
colour with blobs in front of it and behind the shape; then comes pixel noise. Colours
lean a little towards a hue of the class, so a linear classifier finds something too.
"""

import math
from typing import NamedTuple

import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images.datasets import ImageDataset

SHAPES = ("disc", "square", "triangle", "ring", "cross", "star")
TEXTURES = ("striped", "chequered", "dotted", "plain")
MAX_CLASSES = len(SHAPES) * len(TEXTURES)
MIN_SIZE = 8
NUM_BLOBS = 3
NOISE = 0.05  # standard deviation of a pixel, of 1
HUE_SPREAD = 0.15  # standard deviation of the hue within a class, of a full turn
_CHUNK = 500  # images drawn at a time


class _Pose(NamedTuple):
    """Where n shapes lie, all float32; lengths are in half-widths of an image."""

    centre: np.ndarray  # [n, 2] to the right and down
    radius: np.ndarray  # [n]
    stretch: np.ndarray  # [n] along over across
    angle: np.ndarray  # [n] radians


def images(
    num_train: int = 2000,
    num_test: int = 1200,
    num_classes: int = 10,
    size: int = 32,
    seed: int = 0,
) -> ImageDataset:
    """Draws a seeded dataset with as many images of each class, in random order.

    Args:
      num_train: training images, a multiple of `num_classes`.
      num_test: test images, likewise.
      num_classes: 2 to `MAX_CLASSES`.
      size: height and width in pixels.
      seed: the same seed gives the same images.

    Raises:
      InputError: if a number is out of range.
    """
    _check(num_train, num_test, num_classes, size, seed)
    rng = np.random.default_rng(seed)
    train_labels, test_labels = (
        rng.permutation(np.arange(number, dtype=np.int32) % num_classes)
        for number in (num_train, num_test)
    )
    kinds = _kinds(num_classes)
    return ImageDataset(
        name="synthetic_images",
        train_images=_draw(rng, kinds[train_labels], train_labels / num_classes, size),
        train_labels=train_labels,
        test_images=_draw(rng, kinds[test_labels], test_labels / num_classes, size),
        test_labels=test_labels,
        class_names=tuple(f"{TEXTURES[t]} {SHAPES[s]}" for s, t in kinds),
        notes=(f"synthetic: textured shapes before clutter, seed {seed}",),
    )


def _check(num_train, num_test, num_classes, size, seed) -> None:
    if not 2 <= num_classes <= MAX_CLASSES:
        raise InputError(f"num_classes = {num_classes}: expected 2 to {MAX_CLASSES}")
    for name, number in (("num_train", num_train), ("num_test", num_test)):
        if number < 1 or number % num_classes:
            raise InputError(
                f"{name} = {number}: expected a multiple of the {num_classes} classes"
            )
    for name, number, least in (("size", size, MIN_SIZE), ("seed", seed, 0)):
        if number < least:
            raise InputError(f"{name} = {number}: expected at least {least}")


def _kinds(num_classes: int) -> np.ndarray:
    """[C, 2] shape and texture of each class, of a grid as square as can be."""
    num_textures = min(len(TEXTURES), math.isqrt(num_classes - 1) + 1)
    while num_textures * len(SHAPES) < num_classes:
        num_textures += 1
    classes = np.arange(num_classes)
    return np.stack([classes // num_textures, classes % num_textures], axis=1)


def _draw(
    rng: np.random.Generator, kinds: np.ndarray, hues: np.ndarray, size: int
) -> np.ndarray:
    """Images [N, size, size, 3] uint8 of kinds [N, 2] and hues [N] in [0, 1)."""
    parts = range(0, len(kinds), _CHUNK)
    return np.concatenate(
        [
            _draw_chunk(rng, kinds[i : i + _CHUNK], hues[i : i + _CHUNK], size)
            for i in parts
        ]
    )


def _draw_chunk(rng, kinds, hues, size) -> np.ndarray:
    pose = _draw_pose(rng, len(hues), 0.3, (0.5, 0.85), (0.8, 1.25), 0.7)
    across, along = _own_coordinates(pose, size)
    mix = _texture(rng, kinds[:, 1], across, along)[..., None]
    first, second = _colour_pair(rng, hues)[:, :, None, None]
    light = 1 + 0.25 * (across + along).clip(-1, 1)[..., None]
    picture = _background(rng, len(hues), size)
    surface = light * (first + mix * (second - first))
    _paint(picture, kinds[:, 0], pose, surface)
    picture += NOISE * rng.standard_normal(picture.shape, np.float32)
    return (255 * picture.clip(0, 1)).round().astype(np.uint8)


def _draw_pose(rng, n: int, reach: float, radius, stretch, turn: float) -> _Pose:
    """Uniform: centres within +-reach, angles within +-turn, the others (low, high)."""
    drawn = (
        rng.uniform(-reach, reach, (n, 2)),
        rng.uniform(*radius, n),
        rng.uniform(*stretch, n),
        rng.uniform(-turn, turn, n),
    )
    return _Pose(*(field.astype(np.float32) for field in drawn))


def _paint(picture, shapes: np.ndarray, pose: _Pose, surface: np.ndarray) -> None:
    """Puts a shape with its surface, [n, size, size, 3] or alike, on each picture."""
    size = picture.shape[1]
    pixel = 2 / (size * pose.radius[:, None, None])
    distance = _inside(shapes, *_own_coordinates(pose, size))
    picture += _soft(distance, pixel)[..., None] * (surface - picture)


def _colour_pair(rng: np.random.Generator, hues: np.ndarray) -> np.ndarray:
    """[2, n, 3] float32: a bright and a dark colour of like hue, in random order."""
    n = len(hues)
    hue = hues + HUE_SPREAD * rng.standard_normal(n)
    bright = _colour(rng, hue, rng.uniform(0.65, 1.0, n))
    dark = _colour(rng, hue + rng.uniform(-0.2, 0.2, n), rng.uniform(0.17, 0.3, n))
    swap = (rng.random(n) < 0.5)[:, None]
    pair = np.stack([np.where(swap, dark, bright), np.where(swap, bright, dark)])
    return pair.astype(np.float32)


def _colour(rng, hue: np.ndarray, bright: np.ndarray) -> np.ndarray:
    """[n, 3] from hue (1 is a full turn) and brightness in [0, 1]; pale at random."""
    turns = hue[:, None] + np.array([0, 1, 2]) / 3
    pale = rng.uniform(0.1, 0.7, len(hue))[:, None]
    return bright[:, None] * (
        pale + (1 - pale) * (0.5 + 0.5 * np.cos(2 * np.pi * turns))
    )


def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixel centres to the right and down, [1, size, size], both in (-1, 1)."""
    line = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    return line[None, None, :], line[None, :, None]


def _own_coordinates(pose: _Pose, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [n, size, size] as seen from the shape: turned, in radii of it."""
    right, down = _grid(size)
    right, down = (
        (line - pose.centre[:, axis, None, None]) / pose.radius[:, None, None]
        for axis, line in enumerate((right, down))
    )
    cos, sin = (f(pose.angle)[:, None, None] for f in (np.cos, np.sin))
    stretch = np.sqrt(pose.stretch)[:, None, None]
    return (cos * right + sin * down) * stretch, (cos * down - sin * right) / stretch


def _inside(shapes: np.ndarray, across: np.ndarray, along: np.ndarray) -> np.ndarray:
    """Distances to the outline, roughly, in radii and positive within the shape."""
    distance = np.empty_like(across)
    for index, name in enumerate(SHAPES):
        is_it = shapes == index
        x, y = across[is_it], along[is_it]
        distance[is_it] = _OUTLINES[name](x, y)
    return distance


def _polygon(x: np.ndarray, y: np.ndarray, corners: int) -> np.ndarray:
    """Of a regular polygon within the unit circle."""
    sides = 2 * np.pi * np.arange(corners) / corners
    reach = math.cos(math.pi / corners)
    normals = np.stack([np.cos(sides), np.sin(sides)], axis=1).astype(np.float32)
    return np.min([reach - (a * x + b * y) for a, b in normals], axis=0)


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    bars = [np.minimum(0.95 - abs(a), 0.32 - abs(b)) for a, b in ((x, y), (y, x))]
    return np.maximum(*bars)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 0.7 + 0.3 * np.cos(5 * np.arctan2(y, x)) - np.hypot(x, y)


_OUTLINES = {
    "disc": lambda x, y: 0.85 - np.hypot(x, y),
    "square": lambda x, y: _polygon(x, y, 4),
    "triangle": lambda x, y: 1.15 * _polygon(x / 1.15, y / 1.15, 3),
    "ring": lambda x, y: 0.27 - abs(np.hypot(x, y) - 0.68),
    "cross": _cross,
    "star": _star,
}


def _texture(rng, kinds: np.ndarray, across, along) -> np.ndarray:
    """How much of the second colour, [n, size, size] in [0, 1]; waves drawn here."""
    frequency = rng.uniform(7.0, 11.0, (len(kinds), 1, 1)).astype(np.float32)
    phase = rng.uniform(0, 2 * np.pi, (2, len(kinds), 1, 1)).astype(np.float32)
    x, y = np.sin(frequency * across + phase[0]), np.sin(frequency * along + phase[1])
    waves = {"striped": x, "chequered": x * y, "dotted": x + y - 0.7}
    mix = np.zeros_like(x)
    for index, name in enumerate(TEXTURES):
        if name in waves:
            mix[kinds == index] = _soft(waves[name][kinds == index], 0.5)
    return mix


def _background(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """[n, size, size, 3] in [0, 1]: a smooth change of colours, and blobs before it."""
    right, down = _grid(size)
    corners = rng.uniform(0.1, 0.8, (2, 2, n, 1, 1, 3)).astype(np.float32)
    right, down = (0.5 + 0.5 * line[..., None] for line in (right, down))
    top, bottom = (row[0] + right * (row[1] - row[0]) for row in corners)
    picture = top + down * (bottom - top)
    for _ in range(NUM_BLOBS):
        pose = _draw_pose(rng, n, 1.0, (0.1, 0.35), (0.3, 3.0), np.pi)
        colour = rng.uniform(0, 1, (n, 1, 1, 3)).astype(np.float32)
        _paint(picture, rng.integers(0, 2, n), pose, colour)
    return picture


def _soft(distance: np.ndarray, width: np.ndarray | float) -> np.ndarray:
    """A step from 0 to 1 at distance 0, over `width`."""
    return (distance / width + 0.5).clip(0, 1)
