"""Encodings of structure against powers of dense matrices."""

import jax
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core import sparse_rows
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import structure
from tests import client_graphs
from tests.client_graphs import NUM_CLIENTS, NUM_FEATURES, alone


@pytest.mark.parametrize("num_steps", [1, 2, 5, 6])
def test_a_walk_is_back_with_the_probability_of_its_power(num_steps):
    rng = np.random.default_rng(0)
    adjacency = np.triu(rng.random((9, 9)) < 0.4, 1).astype(float)
    adjacency[3] = adjacency[:, 3] = 0
    adjacency += adjacency.T
    degrees = adjacency.sum(axis=1, keepdims=True)
    step = adjacency / np.where(degrees > 0, degrees, 1)
    expected = [
        np.diag(np.linalg.matrix_power(step, k)) for k in range(1, num_steps + 1)
    ]
    found = structure.return_probabilities(scipy.sparse.csr_array(adjacency), num_steps)
    npt.assert_allclose(found, np.transpose(expected), atol=1e-12)


def test_degrees_are_classes_of_which_the_last_is_open():
    found = structure.degree_classes(np.array([0, 1, 3, 9]), 3)
    npt.assert_array_equal(found, [[1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1]])


def test_encodings_are_the_last_features_of_real_nodes():
    splits = client_graphs.make_splits()
    longer = structure.with_structure(splits, 4, 3)
    train = longer["train"]
    assert train.features is longer["test"].features
    assert train.features.shape[2] == NUM_FEATURES + 7
    npt.assert_array_equal(train.features[..., :NUM_FEATURES], splits["train"].features)
    assert not np.any(np.asarray(train.features)[np.asarray(train.is_real) == 0])
    for client in range(NUM_CLIENTS):
        own = alone(train, client)
        degrees = np.bincount(own.receivers, minlength=len(own.labels))
        classes = own.features[:, NUM_FEATURES + 4 :].argmax(axis=1)
        npt.assert_array_equal(classes, np.clip(degrees, 1, 3) - 1)
    jax.tree.map(
        npt.assert_array_equal,
        train._replace(features=0),
        splits["train"]._replace(features=0),
    )


@pytest.mark.parametrize("name", ["num_walks", "num_degrees"])
def test_what_is_no_number_is_refused(name):
    with pytest.raises(InputError, match="expected a whole number, at least 1"):
        structure.with_structure(client_graphs.make_splits(), **{name: 0})


def test_sparse_features_are_refused():
    train = client_graphs.make_splits()["train"]
    none = scipy.sparse.csr_array((2, 3))
    sparse = train._replace(features=sparse_rows.stack([none, none], 2))
    with pytest.raises(InputError, match="features are sparse, expected dense ones"):
        structure.with_structure({"train": sparse})
