"""Node classification on the device: each task's receptive field, and no more.

A two-layer GCN classifies a node from the propagated features of its neighbours. So a
task's few labelled nodes need the features of few nodes, and clients compute on these
`ReceptiveField`s: exactly what the whole graph would give, at a fraction of the work.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs.label_splits import Draw, Halves, NodeSets
from fedjax_graph.data.graphs.node_dataset import check_finite


class ReceptiveField(NamedTuple):
    """Holds some labelled nodes and all nodes that a model reads to classify them.

    H nodes, of which the first L are the labelled ones. T tasks stand along leading
    axes, padded to the same sizes.
    """

    rows: jax.Array  # [..., H] int32, rows of the propagated features
    senders: jax.Array  # [..., E] int32, indices among the H nodes
    receivers: jax.Array  # [..., E] int32, ascending, indices among the L nodes
    weights: jax.Array  # [..., E] float32, entries of S; 0 for padding
    labels: jax.Array  # [..., L] int32
    mask: jax.Array  # [..., L] float32, 0 for padding
    gram: jax.Array | None = None  # [..., H, H] float32, inner products of features


class NodeData(NamedTuple):
    """Holds one split of T tasks: T is K, one for each client, or 1, the same for all.

    Of D draws, the fields and weights have a further leading axis [D, ...].
    """

    features: jax.Array  # [M, F] float32, propagated, of the nodes that are read
    support: ReceptiveField  # [T, ...], what a task learns from
    query: ReceptiveField  # [T, ...], what it is judged by
    client_ids: jax.Array  # [K] int32
    client_weights: jax.Array  # [..., K] float32, 0 = padding, or nothing to train on


MOST_GRAM_BYTES = 2**28  # kept for all draws and tasks of a split


def is_drawn(path: tuple[Any, ...]) -> bool:
    """Tells whether a leaf of a `NodeData` has an axis of draws."""
    return path[0].name in ("support", "query", "client_weights")


def make_splits(
    propagation: scipy.sparse.csr_array,
    features: scipy.sparse.csr_array | np.ndarray,
    draw: Draw,
    num_clients: int,
    num_propagations: int = 1,
    num_hops: int = 1,
) -> dict[str, NodeData]:
    """Makes the splits of some draws, which share the features.

    Args:
      propagation: S [N, N].
      features: X [N, F].
      draw: label sets of nodes 0 to N - 1, arrays [D, T, L].
      num_clients: K.
      num_propagations: products of S with X before the model.
      num_hops: products with S inside the model, 0 or 1.

    Raises:
      InputError: if the arrays are not of the same nodes, features are not finite, or
        there are neither 1 nor K tasks.
    """
    num_nodes = features.shape[0]
    arrays.check_shape("propagation", propagation, (num_nodes, num_nodes))
    check_finite(features, "features")
    arrays.check_count("num_propagations", num_propagations, 0)
    if num_hops not in (0, 1):
        raise InputError(f"num_hops={num_hops}: expected 0 or 1")
    for split, halves in draw.items():
        for half in halves:
            arrays.check_indices(f"nodes of {split}", half.nodes, num_nodes)
            if half.nodes.shape[-2] not in (1, num_clients):
                raise InputError(
                    f"{split} has {half.nodes.shape[-2]} tasks, expected 1 or one for "
                    f"each of {num_clients} clients"
                )
    fields = {
        split: Halves(*(_fields(propagation, half, num_hops) for half in halves))
        for split, halves in draw.items()
    }
    used = np.unique(
        np.concatenate([f.rows.ravel() for halves in fields.values() for f in halves])
    )
    for _ in range(num_propagations - 1):
        features = propagation @ features
    rows = propagation[used] @ features if num_propagations else features[used]
    rows = rows.toarray() if scipy.sparse.issparse(rows) else rows
    rows = jnp.asarray(rows, jnp.float32)

    def renumber(field: ReceptiveField) -> ReceptiveField:
        indices = np.searchsorted(used, field.rows).astype(np.int32)
        return jax.tree.map(jnp.asarray, field._replace(rows=indices))

    is_training = np.any(draw["train"].support.mask > 0, axis=-1)
    return {
        split: NodeData(
            features=rows,
            support=with_gram(renumber(halves.support), rows),
            query=renumber(halves.query),
            client_ids=jnp.arange(num_clients, dtype=jnp.int32),
            client_weights=jnp.asarray(is_training, jnp.float32),
        )
        for split, halves in fields.items()
    }


def with_gram(field: ReceptiveField, features: jax.Array) -> ReceptiveField:
    """Adds inner products to a field, unless they are many or longer than features."""
    size = field.rows.shape[-1]
    if size > features.shape[1] or 4 * field.rows.size * size > MOST_GRAM_BYTES:
        return field
    return field._replace(gram=_gram(field.rows, features))


@jax.jit
def _gram(rows: jax.Array, features: jax.Array) -> jax.Array:
    """Computes inner products [..., L, L] of the features of rows [..., L]."""

    def one(rows):
        own = features[rows]
        return jnp.matmul(own, own.T, precision="highest")

    *lead, size = rows.shape
    gram = jax.lax.map(one, rows.reshape(math.prod(lead), size))
    return gram.reshape(*lead, size, size)


def _fields(
    propagation: scipy.sparse.csr_array, sets: NodeSets, num_hops: int
) -> ReceptiveField:
    """Makes the fields of label sets [..., L], padded to common sizes."""
    *lead, size = sets.nodes.shape
    flat = (math.prod(lead), size)
    nodes, labels, mask = (np.reshape(part, flat) for part in sets)
    front = np.argsort(mask <= 0, axis=1, kind="stable")  # padding goes to the end
    nodes, labels, mask = (
        np.take_along_axis(part, front, axis=1) for part in (nodes, labels, mask)
    )
    single = [
        _field(propagation, own[is_real], num_hops, size)
        for own, is_real in zip(nodes, mask > 0, strict=True)
    ]
    num_nodes = max(len(rows) for rows, *_ in single)
    num_edges = max(len(senders) for _, senders, *_ in single)
    sizes = (num_nodes, num_edges, num_edges, num_edges)
    fills = (0, 0, max(size - 1, 0), 0)  # a receiver that keeps them ascending
    parts = [
        np.stack([_padded(part, length, fill) for part in parts])
        for parts, length, fill in zip(
            zip(*single, strict=True), sizes, fills, strict=True
        )
    ]
    return ReceptiveField(
        *(part.reshape(*lead, *part.shape[1:]) for part in (*parts, labels, mask))
    )


def _field(
    propagation: scipy.sparse.csr_array, nodes: np.ndarray, num_hops: int, size: int
) -> Sequence[np.ndarray]:
    """Finds rows [H], senders, receivers, weights [E] of nodes [n] in `size` slots."""
    none = np.zeros(0, np.int32)
    if num_hops == 0 or not len(nodes):
        return _padded(nodes, size, 0), none, none, none.astype(np.float32)
    entries = propagation[nodes]
    around = np.setdiff1d(entries.indices, nodes)
    place_of = np.concatenate([nodes, around])
    order = np.argsort(place_of)
    found = order[np.searchsorted(place_of, entries.indices, sorter=order)]
    is_around = found >= len(nodes)  # they lie behind the padding of the labelled
    senders = found + is_around * (size - len(nodes))
    return (
        np.concatenate([_padded(nodes, size, 0), around]).astype(np.int32),
        senders.astype(np.int32),
        np.repeat(np.arange(len(nodes), dtype=np.int32), np.diff(entries.indptr)),
        entries.data.astype(np.float32),
    )


def _padded(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)), constant_values=fill)
