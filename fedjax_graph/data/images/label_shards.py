"""Images dealt to clients that see only a few labels each.

Images are sorted by label and cut into equal shards, of which each client gets a few,
so that clients differ in their labels; the graph links those that share some. Shards
are those of McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Section 3; the graph is that of SFL (Chen et al.,
IJCAI 2022).
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import arrays, batching, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images.datasets import ImageDataset, check

RelationWeights = Literal["binary", "count"]
Ties = Literal["lower", "higher"]


class ImageData(NamedTuple):
    """One split of all clients on the device: a pytree, passed as an argument.

    A padded client has weight 0, mask 0, no edges and any indices.
    """

    images: jax.Array  # [N, H, W, C] uint8, all images, training and test ones
    labels: jax.Array  # [N] int32
    indices: jax.Array  # [K, S] int32, which images are the client's in this split
    mask: jax.Array  # [K, S] float32, 0 for padding
    mean: jax.Array  # [C] float32, of the training pixels in [0, 1]
    std: jax.Array  # [C] float32, likewise
    graph: graphs.Graph  # K nodes
    client_ids: jax.Array  # [K] int32, identity of each client: seeds its randomness
    client_weights: jax.Array  # [K] float32, number of training images; 0 = padding


def shard_partition(
    train_labels: np.ndarray, num_clients: int, shards: int, key_seed: int
) -> np.ndarray:
    """Deals shards of equal size to clients at random.

    A shard is a run of images in the order of their labels (see `shard_indices`).

    Args:
      train_labels: [M], of which there have to be a multiple of K x shards.
      num_clients: K.
      shards: how many each client gets.
      key_seed: of the draw.

    Returns:
      Numbers of shards [K, shards], a permutation of 0 to K x shards - 1.

    Raises:
      InputError: if the images cannot be cut into as many equal shards.
    """
    _check_shards({"training": len(train_labels)}, num_clients, shards)
    if key_seed < 0:
        raise InputError(f"seed = {key_seed}: expected 0 or more")
    order = np.random.default_rng(key_seed).permutation(num_clients * shards)
    return order.reshape(num_clients, shards)


def shard_indices(labels: np.ndarray, shard_numbers: np.ndarray) -> np.ndarray:
    """The images of each client.

    All images are sorted by label, those of one label staying in order, and cut into
    equal shards; shard i is the i-th piece.

    Args:
      labels: [M].
      shard_numbers: [K, shards], as `shard_partition` deals them.

    Returns:
      Places [K, M / K] int32, the images of a client shard by shard.

    Raises:
      InputError: if a shard is missing, or stands twice.
    """
    if not np.array_equal(np.sort(shard_numbers, axis=None), range(shard_numbers.size)):
        raise InputError(f"shard_numbers: expected each of {shard_numbers.size} once")
    pieces = np.argsort(labels, kind="stable").reshape(shard_numbers.size, -1)
    return pieces[shard_numbers].reshape(len(shard_numbers), -1).astype(np.int32)


def _check_shards(sizes: Mapping[str, int], num_clients: int, shards: int) -> None:
    """Checks that each part of the images can be cut into equal shards."""
    for name, value in (("num_clients", num_clients), ("shards", shards)):
        arrays.check_count(name, value)
    wanted = f"{num_clients} clients x {shards} shards = {num_clients * shards} shards"
    for part, size in sizes.items():
        if num_clients * shards > size:
            problem = f"more than the {size} {part} images"
        elif size % (num_clients * shards):
            problem = f"which do not cut {size} {part} images into equal parts"
        else:
            continue
        raise InputError(f"{wanted}, {problem}; {_what_fits(sizes, num_clients)}")


def _what_fits(sizes: Mapping[str, int], num_clients: int) -> str:
    common = math.gcd(*sizes.values())
    if common % num_clients:
        fits = sorted(_divisors(common), key=lambda d: abs(d - num_clients))
        return f"numbers of clients that fit: {_few(sorted(fits[:4]))}"
    fits = _divisors(common // num_clients)
    return f"shards per client that fit {num_clients} clients: {_few(fits)}"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _few(numbers: list[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + ", ..." * (len(numbers) > most)


def relation_graph(
    label_counts: np.ndarray,
    most: int = 5,
    weights: RelationWeights = "binary",
    ties: Ties = "lower",
) -> np.ndarray:
    """Links clients that share any of their most frequent labels.

    The code released with SFL has `binary` links, and a line for `count` that does not
    run; equal counts go to the `higher` label there.

    Args:
      label_counts: [K, C] images of each label that a client has.
      most: how many labels count, of those that it has.
      weights: of a link: 1, or the number of labels that are shared.
      ties: which of two labels with as many images counts first.

    Returns:
      [K, K] float32, symmetric; each client has a link to itself, which by `count`
      weighs as many labels as it has, at most `most`.

    Raises:
      InputError: if the counts are none, or no label is to count.
    """
    arrays.check_shape("label_counts", label_counts, (None, None))
    arrays.check_weights("label_counts", label_counts)
    arrays.check_count("most", most)
    counts = np.asarray(label_counts)
    turn = 1 if ties == "lower" else -1
    order = np.argsort(-counts[:, ::turn], axis=1, kind="stable")[:, :most]
    has = np.zeros(counts.shape, np.int64)
    np.put_along_axis(has[:, ::turn], order, 1, axis=1)
    has *= counts > 0
    links = has @ has.T
    if weights == "binary":
        links = np.minimum(links, 1)
    np.fill_diagonal(links, np.maximum(np.diagonal(links), 1))
    return links.astype(np.float32)


def _label_counts(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """[K, C] from labels [K, S]."""
    return np.stack([np.bincount(own, minlength=num_classes) for own in labels])


def make_splits(
    dataset: ImageDataset,
    num_clients: int,
    shards: int,
    seed: int = 0,
    validation_fraction: float = 0.1,
    relation_weights: RelationWeights = "binary",
    ties: Ties = "lower",
) -> dict[str, ImageData]:
    """Deals a dataset to clients: one `ImageData` for each name in `batching.SPLITS`.

    Training and test images are cut into as many shards, each sorted by label, and a
    client gets the shards at the same indices of both: where the two have their labels
    in the same proportions, a client is tested on its own mix. Part of a client's
    training images, drawn from its identity, serves for validation; the graph links
    clients by the labels of all of them, and pixels are scaled by the moments of all of
    them. The splits share all arrays but the indices.

    Args:
      dataset: M training and L test images.
      num_clients: K.
      shards: of each client.
      seed: of the shards and of the validation images.
      validation_fraction: share of each client's M / K training images, rounded.
      relation_weights, ties: of the graph, see `relation_graph`.

    Raises:
      InputError: if images and labels do not fit together, the images cannot be cut
        into as many equal shards, a client had no image to train or to validate on, or
        the images are all of one colour.
    """
    check(dataset)
    labels = (dataset.train_labels, dataset.test_labels)
    _check_shards(
        {"training": len(labels[0]), "test": len(labels[1])}, num_clients, shards
    )
    numbers = shard_partition(labels[0], num_clients, shards, seed)
    own, test = (shard_indices(part, numbers) for part in labels)
    is_validation = _validation_draw(
        own.shape[0], own.shape[1], validation_fraction, seed
    )
    indices = (
        own[~is_validation].reshape(num_clients, -1),
        own[is_validation].reshape(num_clients, -1),
        test + np.int32(len(labels[0])),
    )
    counts = _label_counts(labels[0][own], len(dataset.class_names))
    mean, std = _moments(dataset)
    shared = ImageData(
        images=jnp.asarray(np.concatenate([dataset.train_images, dataset.test_images])),
        labels=jnp.asarray(np.concatenate(labels), jnp.int32),
        indices=jnp.zeros((num_clients, 0), jnp.int32),
        mask=jnp.zeros((num_clients, 0), jnp.float32),
        mean=jnp.asarray(mean, jnp.float32),
        std=jnp.asarray(std, jnp.float32),
        graph=graphs.from_adjacency(
            relation_graph(counts, weights=relation_weights, ties=ties)
        ),
        client_ids=jnp.arange(num_clients, dtype=jnp.int32),
        client_weights=jnp.full(num_clients, indices[0].shape[1], jnp.float32),
    )
    return {
        name: shared._replace(
            indices=jnp.asarray(part), mask=jnp.ones(part.shape, jnp.float32)
        )
        for name, part in zip(batching.SPLITS, indices, strict=True)
    }


def _validation_draw(
    num_clients: int, num_images: int, fraction: float, seed: int
) -> np.ndarray:
    """[K, S] bool: as many images of each client, drawn from its identity."""
    number = round(fraction * num_images) if 0 < fraction < 1 else 0
    if not 0 < number < num_images:
        raise InputError(
            f"validation_fraction = {fraction} of {num_images} training images for "
            "each client; expected between 0 and 1, at least one image to validate "
            "and one to train on"
        )
    drawn = np.zeros((num_clients, num_images), bool)
    for client in range(num_clients):
        sequence = np.random.SeedSequence(seed, spawn_key=(client,))
        order = np.random.default_rng(sequence).permutation(num_images)
        drawn[client, order[:number]] = True
    return drawn


def _moments(dataset: ImageDataset) -> tuple[np.ndarray, np.ndarray]:
    """Mean [C] and standard deviation [C] of the training pixels in [0, 1]."""
    num_channels = dataset.train_images.shape[-1]
    # How many pixels have each value: exact, and small.
    counts = np.zeros((num_channels, 256))
    for image in dataset.train_images:
        for channel in range(num_channels):
            values = image[..., channel].ravel()
            counts[channel] += np.bincount(values, minlength=256)
    weights = counts / counts.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255
    mean = weights @ values
    std = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(axis=1))
    if not (std > 0).all():
        raise InputError(
            f"{dataset.name}: a colour is the same in all training pixels; expected "
            "images that differ"
        )
    return mean, std
