"""What a node's place in a graph looks like: encodings of structure, without features.

Tan, Liu, Long, Jiang, Lu, Zhang, "Federated Learning on Non-IID Graphs via Structural
Knowledge Sharing", AAAI 2023: the degree as one of some classes, and the probabilities
that a random walk is back after 1, 2, ... steps.
"""

import numpy as np
import scipy.sparse

from fedjax_graph.core import arrays, client_rows
from fedjax_graph.data.graphs.client_subgraphs import (
    SubgraphData,
    adjacencies,
    dense_features,
)

NUM_WALKS, NUM_DEGREES = 16, 16


def return_probabilities(
    adjacency: scipy.sparse.csr_array, num_steps: int = NUM_WALKS
) -> np.ndarray:
    """Computes the diagonals of the powers 1 to `num_steps` of D^-1 A: [N, steps].

    Half of the powers are enough, as diag(P^(a + b)) are the sums over j of P^a_ij
    P^b_ji. 0 for a node without edges.

    Raises:
      InputError: if the number is no count.
    """
    arrays.check_count("num_steps", num_steps)
    degrees = np.asarray(adjacency.sum(axis=1), float)
    scale = np.where(degrees > 0, 1 / np.where(degrees > 0, degrees, 1), 0)
    power = step = scale[:, None] * adjacency.toarray().astype(float)
    columns = [np.diag(step)]
    while len(columns) < num_steps:
        columns.append(np.sum(power * power.T, axis=1))
        following = power @ step
        columns.append(np.sum(power * following.T, axis=1))
        power = following
    return np.stack(columns[:num_steps], axis=1)


def degree_classes(degrees: np.ndarray, num_degrees: int = NUM_DEGREES) -> np.ndarray:
    """Marks each node's degree, 1 for none, the last for all above: [N, num_degrees].

    Raises:
      InputError: if the number is no count.
    """
    arrays.check_count("num_degrees", num_degrees)
    classes = np.clip(degrees.astype(int), 1, num_degrees) - 1
    return np.eye(num_degrees, dtype=np.float32)[classes]


def with_structure(
    splits: dict[str, SubgraphData],
    num_walks: int = NUM_WALKS,
    num_degrees: int = NUM_DEGREES,
) -> dict[str, SubgraphData]:
    """Appends encodings of structure to the features of clients' subgraphs.

    Args:
      splits: with the same graphs.
      num_walks: most steps of a walk.
      num_degrees: classes of degrees.

    Returns:
      The splits with `num_walks + num_degrees` features more, the last ones.

    Raises:
      InputError: if a number is no count, or the features are sparse.
    """
    data = next(iter(splits.values()))
    own = dense_features(data)
    rows = []
    for adjacency in adjacencies(data):
        walks = return_probabilities(adjacency, num_walks)
        degrees = degree_classes(np.asarray(adjacency.sum(axis=1)), num_degrees)
        rows.append(np.concatenate([walks, degrees], axis=1))
    encodings = np.stack(rows) * np.asarray(data.is_real)[:, :, None]
    both = np.concatenate([np.asarray(own), encodings], axis=2)
    made = client_rows.to_device(data._replace(features=both.astype(own.dtype)))
    return {
        name: split._replace(features=made.features) for name, split in splits.items()
    }
