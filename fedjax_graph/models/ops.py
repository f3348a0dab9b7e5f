"""The ops of FL-AGCNS's layers: what a gene stands for in each space.

An op is a graph convolution and what follows it; the spaces are those of
`architecture`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core.local import Params
from fedjax_graph.models.architecture import Space
from fedjax_graph.models.convolutions import CONVOLUTIONS, OF_THE_PAPER, Convolution
from fedjax_graph.models.message_passing import Structure


def convolution(op: str, space: Space) -> Callable[..., Convolution]:
    """Looks up what an op of a space is: (features, name) -> module."""
    return (OF_THE_PAPER if space == "paper" else CONVOLUTIONS)[op]


def activate(op: str, x: jax.Array, space: Space) -> jax.Array:
    """Applies what follows a convolution.

    Nothing in the paper's space; in that of 2022 ELU to GAT's, ReLU to all others.
    """
    if space == "paper":
        return x
    return nn.elu(x) if op == "GATConv" else nn.relu(x)


def absent_layer(
    weights: Params, stats: Any, x: jax.Array, structure: Structure
) -> tuple[jax.Array, Any]:
    """Returns zeros, which nobody reads, for a layer that is left out."""
    del weights, structure
    return jnp.zeros_like(x), stats


def present_layer(
    op: str, width: int, space: Space
) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of a `plain_layer` that stands in a switch.

    A gradient computes it again, as a switch keeps what each of its branches would:
    236 MB instead of 40 for three clients of a third of Cora.
    """
    return jax.checkpoint(plain_layer(op, width, space), prevent_cse=False)


def plain_layer(
    op: str, width: int, space: Space
) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of one layer of one op.

    Returns:
      (weights by op, statistics by op, x [N, width], structure) -> ([N, width],
      statistics).
    """
    module = convolution(op, space)(width)

    def run(weights, stats, x, structure):
        variables = {
            "params": weights.get(op, {}),
            "batch_stats": stats.get(op, {}),
        }
        x, new = module.apply(
            variables, x, structure, method="convolve", mutable=["batch_stats"]
        )
        if op in stats:
            stats = stats | {op: new["batch_stats"]}
        return activate(op, x, space), stats

    return run
