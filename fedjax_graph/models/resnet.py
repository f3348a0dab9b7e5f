"""ResNet9 for 32 x 32 images.

Page, "How to Train Your ResNet" (myrtle.ai, 2018): a short residual network (He et al.,
"Deep Residual Learning for Image Recognition", CVPR 2016), in the shape that SFL's
released code gives it: a residual at the first two of three layers.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.models import winograd
from fedjax_graph.models.linear import fan_in_uniform
from fedjax_graph.models.normalization import BatchNorm

MIN_IMAGE_SIZE = 8  # three times halved
LOGIT_SCALE = 0.2


def convolve(x: jax.Array, kernel: jax.Array, is_trained: bool) -> jax.Array:
    """Convolves 3 x 3 with a border of zeros, by what is fast on the backend.

    On a CPU, XLA's gradient of a convolution is slow inside a scan: there, training
    takes matrix products by the algorithm of Winograd. The results differ by rounding
    alone.

    Args:
      x: [B, H, W, I].
      kernel: [3, 3, I, O].
      is_trained: whether a gradient will be taken.

    Returns:
      [B, H, W, O].
    """
    if is_trained and mesh.backend() == "cpu":
        return winograd.convolve(x, kernel)
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, window_strides=(1, 1), padding="SAME", dimension_numbers=layout
    )


class Convolution(nn.Module):
    """Convolves 3 x 3, normalises the batch and applies ReLU."""

    output_size: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        input_size = x.shape[-1]
        init, shape = fan_in_uniform(9 * input_size), (3, 3, input_size)
        kernel = self.param("kernel", init, (*shape, self.output_size))
        x = convolve(x, kernel, is_trained=mask is not None)
        return nn.relu(BatchNorm(name="norm")(x, mask))


class Residual(nn.Module):
    """Adds two convolutions to their input."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        hidden = Convolution(x.shape[-1], name="first")(x, mask)
        return x + Convolution(x.shape[-1], name="second")(hidden, mask)


class ResNet9(nn.Module):
    """Classifies images, channels (w, 2w, 4w, 4w): 2,440,256 parameters by default."""

    width: int = 64
    num_classes: int = 10

    def setup(self) -> None:
        w = self.width
        self.prep = Convolution(w)
        self.layer1, self.residual1 = Convolution(2 * w), Residual()
        self.layer2, self.residual2 = Convolution(4 * w), Residual()
        self.layer3 = Convolution(4 * w)
        init = fan_in_uniform(4 * w)
        self.head = nn.Dense(self.num_classes, use_bias=False, kernel_init=init)

    def __call__(self, images: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Computes the logits of images.

        Args:
          images: [B, H, W, C] normalised, H and W at least 8.
          mask: [B] in training, 0 for padding, and `batch_stats` must be mutable; None
            to normalise by the running statistics.

        Returns:
          Logits [B, num_classes].

        Raises:
          InputError: if the images are smaller.
        """
        if min(images.shape[1:3]) < MIN_IMAGE_SIZE:
            raise InputError(
                f"images of shape {images.shape}: ResNet9 halves them three times, "
                f"expected at least {MIN_IMAGE_SIZE} pixels each way"
            )
        x = self.prep(images, mask)
        x = self.residual1(halve(self.layer1(x, mask)), mask)
        x = self.residual2(halve(self.layer2(x, mask)), mask)
        x = halve(self.layer3(x, mask))
        return LOGIT_SCALE * self.head(jnp.max(x, axis=(1, 2)))


def halve(x: jax.Array) -> jax.Array:
    """Takes the largest of each 2 x 2 pixels: [B, H, W, C] -> [B, H // 2, W // 2, C].

    Written out, as the gradient of a window's maximum is slow on a CPU.
    """
    x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
    rows = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2])
