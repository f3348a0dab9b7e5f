"""Convolution of 3 x 3 with fewer multiplications, as matrix products.

Paper: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016,
Section 4. Each tile d of (m + 2) x (m + 2) pixels and kernel g give m x m outputs,

  Y = A^T [(G g G^T) * (B^T d B)] A,

with (m + 2)^2 multiplications of a channel by a channel where the sums have 9 m^2: 16
for 36 with m = 2, and 36 for 144 with m = 4. Here B^T d B and A^T [...] A are products
by the Kronecker squares of B^T and A^T, for all tiles and channels at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError

LARGE = 16  # pixels of a side from which on tiles of 4 x 4 outputs are faster


class Transform(NamedTuple):
    """F(m x m, 3 x 3): matrices of m + 2 polynomial points."""

    input: np.ndarray  # B^T [m + 2, m + 2]
    kernel: np.ndarray  # G [m + 2, 3]
    output: np.ndarray  # A^T [m, m + 2]


TRANSFORMS = {
    2: Transform(
        input=np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
        kernel=np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]]) / 2,
        output=np.array([[1, 1, 1, 0], [0, 1, -1, -1]]),
    ),
    4: Transform(
        input=np.array(
            [
                [4, 0, -5, 0, 1, 0],
                [0, -4, -4, 1, 1, 0],
                [0, 4, -4, -1, 1, 0],
                [0, -2, -1, 2, 1, 0],
                [0, 2, -1, -2, 1, 0],
                [0, 4, 0, -5, 0, 1],
            ]
        ),
        kernel=np.array(
            [
                *([6, 0, 0], [-4, -4, -4], [-4, 4, -4]),
                *([1, 2, 4], [1, -2, 4], [0, 0, 24]),
            ]
        )
        / 24,
        output=np.array(
            [
                *([1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0]),
                *([0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]),
            ]
        ),
    ),
}


def convolve(x: jax.Array, kernel: jax.Array, size: int | None = None) -> jax.Array:
    """Convolves 3 x 3 with a border of zeros.

    Args:
      x: [B, H, W, I], float32 or float64, as narrower types lose too much on the way.
      kernel: [3, 3, I, O].
      size: m, the outputs of a tile along a side: 2, which rounds as the sum itself
        does, or 4, with ten to twenty times that error. None for what is fast.

    Returns:
      [B, H, W, O].

    Raises:
      InputError: if x or the kernel have another shape, x is of another type, or there
        are no such tiles.
    """
    arrays.check_shape("x", x, (None,) * 4)
    arrays.check_shape("kernel", kernel, (3, 3, x.shape[-1], None))
    is_known = isinstance(size, int | np.integer) and size in TRANSFORMS
    if size is not None and not is_known:
        raise InputError(f"size={size!r}: expected None, 2 or 4")
    if x.dtype not in (jnp.float32, jnp.float64):
        raise InputError(f"x: expected float32 or float64, found {x.dtype}")
    batch, height, width, num_inputs = x.shape
    num_outputs = kernel.shape[-1]
    size = size or (4 if min(height, width) >= LARGE else 2)
    transform, points = TRANSFORMS[size], (size + 2) ** 2
    inputs, rows, columns = _tiles(x, size)
    inputs = _square(transform.input, x) @ inputs.reshape(points, -1)
    kernels = _square(transform.kernel, x) @ kernel.reshape(9, -1)
    products = jnp.matmul(
        inputs.reshape(points, -1, num_inputs),
        kernels.reshape(points, num_inputs, num_outputs),
    )
    outputs = _square(transform.output, x) @ products.reshape(points, -1)
    outputs = outputs.reshape(size, size, batch, rows, columns, num_outputs)
    outputs = outputs.transpose(2, 3, 0, 4, 1, 5)
    outputs = outputs.reshape(batch, rows * size, columns * size, num_outputs)
    return outputs[:, :height, :width]


def _tiles(x: jax.Array, size: int) -> tuple[jax.Array, int, int]:
    """Cuts images into tiles that overlap by two pixels.

    Returns:
      [size + 2, size + 2, B, rows, columns, I], rows and columns of tiles.
    """
    batch, height, width, num_inputs = x.shape
    rows, columns = -(-height // size), -(-width // size)
    ends = [
        (1, (number + 1) * size - length - 1)
        for number, length in ((rows, height), (columns, width))
    ]
    blocks = jnp.pad(x, ((0, 0), *ends, (0, 0)))
    blocks = blocks.reshape(batch, rows + 1, size, columns + 1, size, num_inputs)
    blocks = blocks.transpose(2, 4, 0, 1, 3, 5)  # and two pixels of the next one each
    tiles = jnp.concatenate([blocks[:, :, :, :-1], blocks[:2, :, :, 1:]], axis=0)
    tiles = jnp.concatenate([tiles[..., :-1, :], tiles[:, :2, ..., 1:, :]], axis=1)
    return tiles, rows, columns


def _square(matrix: np.ndarray, like: jax.Array) -> jax.Array:
    return jnp.asarray(np.kron(matrix, matrix), like.dtype)
