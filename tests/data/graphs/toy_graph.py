"""A small graph, and what compares such graphs."""

import numpy as np
import scipy.sparse


def dense(dataset):
    features = dataset.features
    return features.toarray() if scipy.sparse.issparse(features) else features


# A toy graph: node 4 is isolated, 5 and 6 are a component of their own.
EDGES = [(0, 1), (0, 3), (1, 2), (2, 3), (5, 6)]
LABELS = [0, 0, 1, 2, 1, 2, 0]
FEATURES = np.array(
    [[1, 0, 2], [0, 0, 1], [0, 3, 0], [0, 0, 0], [1, 1, 0], [0, 0, 1], [2, 0, 0]],
    np.float32,
)
