"""Synthetic graphs of labelled nodes: classes, hubs, and features that tell some of it.

Edges are drawn by a degree-corrected stochastic block model [1] with equal classes: a
given share of them within a class, the rest between a class and the next, as between
neighbouring fields of research. In either, the ends are positions u^2 in their class, u
uniform in (0, 1): the expected degree at place x goes as x^(-1/2), so degrees have the
power-law tail of exponent 3 that growing networks have [2]. Edges are distinct, and
exactly as many as asked for.

[1] B. Karrer and M. E. J. Newman, Stochastic blockmodels and community structure in
    networks, Phys. Rev. E 83, 016107, 2011.
[2] A.-L. Barabasi and R. Albert, Emergence of scaling in random networks, Science 286,
    1999.
"""

from typing import NamedTuple

import numpy as np
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs.node_dataset import NodeDataset, distinct

WORD_SPREAD = 0.7  # of log-probabilities of words between classes
MEAN_SPREAD = 0.3  # standard deviation between class means; within a class it is 1
LARGE_HOMOPHILY = 0.8
MIXED_HOMOPHILY = 0.4
_CHUNK = 1 << 22  # edges or nodes drawn at a time


class _Blocks(NamedTuple):
    """Describes classes: nodes starts[c] to starts[c + 1] - 1 are of class c."""

    starts: np.ndarray  # [C + 1]
    nodes: np.ndarray  # [N] the node at each place

    @property
    def labels(self) -> np.ndarray:
        """Returns the class of each node [N] int32."""
        labels = np.empty(len(self.nodes), np.int32)
        labels[self.nodes] = np.repeat(
            np.arange(len(self.starts) - 1), np.diff(self.starts)
        )
        return labels


def node_graph(
    num_nodes: int = 3000,
    num_classes: int = 6,
    num_features: int = 300,
    mean_degree: float = 4.0,
    homophily: float = 0.8,
    words_per_node: int = 12,
    seed: int = 0,
) -> NodeDataset:
    """Draws a graph of documents, each a bag of words, as in citation networks.

    Args:
      num_nodes: N.
      num_classes: C, 2 or more, of equal size.
      num_features: F, words there are.
      mean_degree: 2 E / N.
      homophily: share of the edges within a class, from 0 to 1.
      words_per_node: draws of a word for each node; a word counts once.
      seed: the same seed gives the same graph.

    Raises:
      InputError: if a number is out of range, or the graph would be too dense.
    """
    if not 1 <= words_per_node <= num_features:
        raise InputError(
            f"words_per_node = {words_per_node}: expected 1 to num_features = "
            f"{num_features}"
        )
    rng = _generator(seed)
    blocks = _blocks(rng, num_nodes, num_classes)
    edges = _edges(rng, blocks, round(mean_degree * num_nodes / 2), homophily)
    features = _bags_of_words(rng, blocks.labels, num_features, words_per_node)
    return _dataset("synthetic", blocks, edges, features, seed)


def mixed_graph(num_nodes: int = 3000, seed: int = 0) -> NodeDataset:
    """Draws a graph of documents most of whose edges lead to the next class.

    Neither a node's own words nor those around it tell its class well; which mixture of
    convolutions does is what a search has to find.

    Args:
      num_nodes: N.
      seed: the same seed gives the same graph.

    Raises:
      InputError: as `node_graph` does.
    """
    graph = node_graph(num_nodes, homophily=MIXED_HOMOPHILY, seed=seed)
    return graph._replace(name="synthetic_mixed")


def large_node_graph(
    num_nodes: int = 2_449_029,
    num_edges: int = 61_859_140,
    num_features: int = 100,
    num_classes: int = 47,
    seed: int = 0,
) -> NodeDataset:
    """Draws a graph of the size of Amazon2M: dense features, class mean plus noise.

    Args:
      num_nodes: N.
      num_edges: E.
      num_features: F.
      num_classes: C, 2 or more, of equal size.
      seed: the same seed gives the same graph.

    Raises:
      InputError: if a number is out of range, or the graph would be too dense.
    """
    if num_features < 1:
        raise InputError(f"num_features = {num_features}: expected at least 1")
    rng = _generator(seed)
    blocks = _blocks(rng, num_nodes, num_classes)
    edges = _edges(rng, blocks, num_edges, LARGE_HOMOPHILY)
    features = _noisy_means(rng, blocks.labels, num_features)
    return _dataset("synthetic_large", blocks, edges, features, seed)


def _dataset(name: str, blocks: _Blocks, edges, features, seed: int) -> NodeDataset:
    return NodeDataset(
        name,
        features,
        edges,
        blocks.labels,
        tuple(map(str, range(len(blocks.starts) - 1))),
        {},
        (f"synthetic: degree-corrected stochastic block model, seed {seed}",),
    )


def _generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise InputError(f"seed = {seed}: expected 0 or more")
    return np.random.default_rng(seed)


def _blocks(rng: np.random.Generator, num_nodes: int, num_classes: int) -> _Blocks:
    if not 2 <= num_classes <= num_nodes // 2:
        raise InputError(
            f"num_classes = {num_classes}: expected 2 to {num_nodes // 2}, as "
            f"num_nodes = {num_nodes} and each class has two nodes"
        )
    starts = np.arange(num_classes + 1) * num_nodes // num_classes
    return _Blocks(starts, rng.permutation(num_nodes).astype(np.int32))


def _edges(
    rng: np.random.Generator, blocks: _Blocks, num_edges: int, homophily: float
) -> np.ndarray:
    """Draws distinct edges [E, 2] int32, a share `homophily` of them within a class."""
    if not 0 <= homophily <= 1:
        raise InputError(f"homophily = {homophily}: expected 0 to 1")
    if num_edges < 1:
        raise InputError(f"num_edges = {num_edges}: expected at least 1")
    num_within = round(homophily * num_edges)
    sizes = np.diff(blocks.starts)
    within_pairs = (sizes * (sizes - 1) // 2).sum()
    between_pairs = (
        sizes[0] * sizes[1] if len(sizes) == 2 else sizes @ np.roll(sizes, 1)
    )
    num_nodes = len(blocks.nodes)
    for number, pairs, kind in (
        (num_within, within_pairs, "within a class"),
        (num_edges - num_within, between_pairs, "between a class and the next"),
    ):
        if number > pairs // 4:
            raise InputError(
                f"{number} edges {kind} of {num_nodes} nodes: expected at most "
                f"{pairs // 4}, a quarter of the pairs; ask for fewer edges"
            )
    keys = np.concatenate(
        [
            _distinct_keys(rng, blocks, num_within, True),
            _distinct_keys(rng, blocks, num_edges - num_within, False),
        ]
    )
    keys.sort()
    edges = np.empty((num_edges, 2), np.int32)
    np.floor_divide(keys, num_nodes, out=edges[:, 0], casting="unsafe")
    np.remainder(keys, num_nodes, out=edges[:, 1], casting="unsafe")
    return edges


def _distinct_keys(
    rng: np.random.Generator, blocks: _Blocks, number: int, is_within: bool
) -> np.ndarray:
    """Draws that many different edges, as first node x N + second node."""
    keys = np.zeros(0, np.int64)
    while len(keys) < number:
        drawn = [keys]
        missing = (number - len(keys)) * 5 // 4 + 1
        for start in range(0, missing, _CHUNK):
            size = min(_CHUNK, missing - start)
            drawn.append(_draw_keys(rng, blocks, size, is_within))
        keys = distinct(np.concatenate(drawn))
    surplus = rng.choice(len(keys), len(keys) - number, replace=False, shuffle=False)
    return np.delete(keys, surplus)


def _draw_keys(
    rng: np.random.Generator, blocks: _Blocks, number: int, is_within: bool
) -> np.ndarray:
    num_classes = len(blocks.starts) - 1
    first = rng.integers(num_classes, size=number)
    second = first
    if not is_within:
        second = (first + 1) % num_classes
    senders, receivers = (_draw_nodes(rng, blocks, kind) for kind in (first, second))
    keys = np.minimum(senders, receivers).astype(np.int64) * len(blocks.nodes)
    keys += np.maximum(senders, receivers)
    return keys[senders != receivers]


def _draw_nodes(
    rng: np.random.Generator, blocks: _Blocks, classes: np.ndarray
) -> np.ndarray:
    """Draws a node of each class, by its expected degree."""
    offsets = rng.random(len(classes)) ** 2
    offsets *= np.diff(blocks.starts)[classes]
    return blocks.nodes[blocks.starts[classes] + offsets.astype(np.int64)]


def _bags_of_words(
    rng: np.random.Generator, labels: np.ndarray, num_words: int, draws: int
) -> scipy.sparse.csr_array:
    """Draws binary features [N, F]: words by Zipf's law, likelier in their class.

    A class shares some of its taste for words with the one before it.
    """
    num_classes = labels.max() + 1
    taste = rng.standard_normal((num_classes, num_words))
    taste += np.roll(taste, 1, axis=0) / 2
    weights = np.exp(WORD_SPREAD * taste) / np.arange(1, num_words + 1)
    limits = np.cumsum(weights, axis=1)
    rows, words = [], []
    for kind in range(num_classes):
        own = np.flatnonzero(labels == kind)
        at = rng.random((len(own), draws)) * limits[kind, -1]
        rows.append(np.repeat(own, draws))
        words.append(np.searchsorted(limits[kind], at.ravel(), side="right"))
    keys = distinct(np.concatenate(rows) * num_words + np.concatenate(words))
    ones = np.ones(len(keys), np.float32)
    shape = (len(labels), num_words)
    return scipy.sparse.csr_array((ones, np.divmod(keys, num_words)), shape)


def _noisy_means(
    rng: np.random.Generator, labels: np.ndarray, num_features: int
) -> np.ndarray:
    """Draws features [N, F] float32: the mean of the class, and noise of variance 1."""
    means = MEAN_SPREAD * rng.standard_normal((labels.max() + 1, num_features))
    means = means.astype(np.float32)
    features = rng.standard_normal((len(labels), num_features), np.float32)
    for start in range(0, len(labels), _CHUNK // 16):
        part = slice(start, start + _CHUNK // 16)
        features[part] += means[labels[part]]
    return features
