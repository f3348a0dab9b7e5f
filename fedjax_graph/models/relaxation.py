"""The relaxation of a SuperNet's space: all codes at once, by probabilities of genes.

Liu, Simonyan, Yang, "DARTS: Differentiable Architecture Search", ICLR 2019, Section
2.2: a choice is the mean of its options' outputs. The choices are the genes of
`architecture`.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from fedjax_graph.core import arrays, mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.local import Model
from fedjax_graph.core.trees import take
from fedjax_graph.models.architecture import (
    ACTIVATIONS,
    INPUT,
    OPS,
    Architecture,
    Fusion,
    Space,
    op_branches,
)
from fedjax_graph.models.message_passing import make_structure
from fedjax_graph.models.ops import plain_layer
from fedjax_graph.models.supernet import SuperNet, fully_connected

PRESENCE_FLOOR = 1e-12  # of a layer's probability where it divides


def relaxed(
    net: SuperNet,
    model: Model,
    graph: jraph.GraphsTuple,
    probabilities: dict[str, jax.Array],
    mask: jax.Array | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Classifies nodes by all codes at once, their genes drawn independently.

    The mean output of a layer is that given that it is present. It is read with the
    probability that it is, else its reader takes the input stage and the weights for
    it; fused in proportion to the probability that `SuperNet.apply` would, as is the
    input stage to that of no layers. So probabilities of 0 and 1 are `SuperNet.apply`.

    A gradient computes each op again: what it keeps is the input of each of the
    L (L + 1) / 2 pairs of a layer and what it reads.

    Args:
      net: whose space it is.
      model, graph, mask, key: as for `SuperNet.apply`.
      probabilities: of options, which sum to 1. "input" and "output": [5], by
        activation. "layers": [L, 1 + 12 L], by gene; 0 beyond a layer's largest, and
        of ops that the net does not have, or all outputs are NaN.

    Returns:
      Outputs [N, classes], and the running statistics, of which those of ops with a
      positive share are new.

    Raises:
      InputError: if there are probabilities of another number of genes, or the edges
        are no weights.
    """
    expected = (net.num_layers, 1 + len(OPS) * net.num_layers)
    if probabilities["layers"].shape != expected:
        raise InputError(
            f"probabilities of shape {probabilities['layers'].shape}: expected "
            f"{expected}, options of {net.num_layers} layers"
        )
    params, shares = model["params"], layer_shares(probabilities["layers"], net.space)
    structure = make_structure(graph, mask)
    ops = [mixed_layer(op, net.width, net.space) for op in net.ops]
    is_here = op_branches(net.ops) > 0
    shares, others = shares[:, is_here], shares[:, ~is_here]

    def slot(outputs, step):
        index, source, shares, weights, stats = step
        x, output = outputs[source], 0
        for share, op in zip(shares, ops, strict=True):
            summand, stats = op(share, weights, stats, x, structure)
            output += summand
        return outputs.at[index].add(output), stats

    product = net.input_product(params, graph.nodes, key)
    x = mix_stage(probabilities["input"], product)
    outputs = jnp.zeros((net.num_layers + 1, *x.shape), x.dtype).at[0].set(x)
    layers, sources = np.tril_indices(net.num_layers)
    steps = (layers + 1, sources, shares, params["layers"], model["batch_stats"])
    outputs, stats = jax.lax.scan(slot, mesh.varying(outputs), steps)
    weights = fusion_shares(probabilities["layers"], net.fusion, net.space)
    _, output_key = net.dropout_keys(key)
    x = net.drop(jnp.tensordot(weights, outputs, axes=1), output_key)
    product = fully_connected(take(params["output"], 0), x)
    outputs = mix_stage(probabilities["output"], product)
    if net.ops != OPS:
        outputs = jnp.where(jnp.any(others), jnp.nan, outputs)
    return outputs, stats


def by_source(probabilities: jax.Array) -> jax.Array:
    """Reshapes genes but 0, [L, 1 + 12 L], to [L, L, 12]: layer, what it reads, op."""
    num_layers = len(probabilities)
    return probabilities[:, 1:].reshape(num_layers, num_layers, len(OPS))


def layer_shares(probabilities: jax.Array, space: Space) -> jax.Array:
    """Computes how probable a layer's options are, given that it is present.

    Args:
      probabilities: [L, 1 + 12 L], of genes that are drawn independently.
      space: what a gene of 0 means; in the paper's, layers before are present.

    Returns:
      [L (L + 1) / 2, 12], by layer and what it really reads, and op: the sum for a
      layer is 1, or 0 if it is certainly absent.
    """
    dtype = arrays.float_type(probabilities.dtype)
    probabilities = arrays.precise(probabilities)
    genes, is_absent = by_source(probabilities), probabilities[:, 0]
    is_present = jnp.sum(genes, axis=(1, 2))
    can_be_read = jnp.append(1, is_present[:-1])
    shares = genes
    if space == "2022":
        read_instead = jnp.einsum("lso,s->lo", genes[:, 1:], is_absent[:-1])
        shares = (can_be_read[:, None] * genes).at[:, INPUT].add(read_instead)
    shares /= jnp.maximum(is_present, PRESENCE_FLOOR)[:, None, None]
    return shares[np.tril_indices(len(probabilities))].astype(dtype)


def fusion_shares(probabilities: jax.Array, fusion: Fusion, space: Space) -> jax.Array:
    """Computes how probable it is that an output is fused, [L + 1], of sum 1.

    The sum is at least 1, as every code fuses something.

    Args:
      probabilities: [L, 1 + 12 L], of genes that are drawn independently.
      fusion: see `Architecture.is_fused`.
      space: what a gene of 0 means.
    """
    dtype = arrays.float_type(probabilities.dtype)
    probabilities = arrays.precise(probabilities)
    is_read = jnp.sum(by_source(probabilities), axis=2)  # [L, L], by its reader
    if space == "paper":
        is_present = jnp.cumprod(1 - probabilities[:, 0])
        is_leaf = leaf_chances(is_read, is_present)
        is_empty = probabilities[0, 0]
    else:
        is_present = jnp.sum(is_read, axis=1)
        is_leaf = is_present * jnp.append(jnp.prod(1 - is_read[:, 1:], axis=0), 1)
        is_empty = jnp.prod(probabilities[:, 0])
    layers = Architecture(None, is_present, None, None, is_leaf, None)
    chances = jnp.append(is_empty, layers.is_fused(fusion))
    return (chances / jnp.sum(chances)).astype(dtype)


def leaf_chances(is_read: jax.Array, is_present: jax.Array) -> jax.Array:
    """Computes how probable it is, in the paper's space, that nobody reads a layer.

    The sum over ends e from layer i on of P(e is the last layer) x the product over the
    layers j between i and e, e included, of P(j does not read i | j is present).

    Args:
      is_read: [L, L], probability that a layer's gene is not 0 and names a source.
      is_present: [L].
    """
    goes_on = jnp.sum(is_read, axis=1)  # the gene is not 0
    is_last = is_present * (1 - jnp.append(goes_on[1:], 0))
    spared = 1 - is_read / jnp.maximum(goes_on, PRESENCE_FLOOR)[:, None]
    chances = []
    for i in range(len(is_read)):
        spares = jnp.append(1, jnp.cumprod(spared[i + 1 :, (i + 1) % len(is_read)]))
        chances.append(jnp.sum(is_last[i:] * spares))
    return jnp.stack(chances)


def mix_stage(probabilities: jax.Array, product: jax.Array) -> jax.Array:
    """Averages the activations of a product [N, features] by their probabilities."""
    stages = zip(probabilities, ACTIVATIONS.values(), strict=True)
    mixed = (share * activation(product) for share, activation in stages)
    return cast(jax.Array, sum(mixed))


def mixed_layer(
    op: str, width: int, space: Space
) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of a `plain_layer` with a share in a sum.

    Returns:
      (share [], what `plain_layer` takes) -> (share x [N, width], statistics, new if
      the share is positive). A gradient computes it again.
    """
    layer = plain_layer(op, width, space)

    def run(share, weights, stats, x, structure):
        x, new = layer(weights, stats, x, structure)
        keep = functools.partial(jnp.where, share > 0)
        return share * x, jax.tree.map(keep, new, stats)

    return jax.checkpoint(run, prevent_cse=False)
