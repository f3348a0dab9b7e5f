"""Seen and unseen sensors against sorted longitudes, NumPy loops and other readings."""

import dataclasses

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph import algorithms
from fedjax_graph.core import graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import inductive, windows

LONGITUDE = np.array([-118.2, -118.4, -118.1, -118.4, -118.3])  # 1, 3, 4, 0, 2
TINY = {
    "hidden_size": 3,
    "gn_layers": 1,
    "gn_mlp_sizes": (3, 3),
    "server_batch_size": 4,
}
TASK = {"kind": "traffic_seq2seq", "hidden_size": 3, "batch_size": 8}


@pytest.fixture(scope="module")
def placed(network):
    return dataclasses.replace(network, longitude=LONGITUDE, latitude=np.full(5, 34.0))


@pytest.fixture(scope="module")
def is_seen(placed):
    return inductive.first_by_longitude(placed, 0.6)


@pytest.fixture(scope="module")
def halves(placed, is_seen):
    return inductive.make_splits(placed, is_seen)


def of_size(dataset, size, seed=0):
    """Anything with coordinates of `size` sensors; the readings do not matter."""
    longitude = np.random.default_rng(seed).normal(size=size)
    return dataclasses.replace(
        dataset,
        sensor_ids=np.arange(size),
        longitude=longitude,
        latitude=np.zeros(size),
    )


# --- Which sensors are seen -----------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "seen"),
    [(0.1001, [1]), (0.4, [1, 3]), (0.6, [1, 3, 4]), (0.89, [0, 1, 3, 4])],
)
def test_sensors_are_seen_from_west_to_east(placed, fraction, seen):
    is_seen = inductive.first_by_longitude(placed, fraction)
    npt.assert_array_equal(np.flatnonzero(is_seen), seen)


@pytest.mark.parametrize(
    ("size", "numbers"),
    [(207, (10, 52, 104, 155, 186)), (325, (16, 81, 162, 244, 292))],
)
def test_shares_of_the_papers_networks(network, size, numbers):
    dataset = of_size(network, size)
    for fraction, number in zip((0.05, 0.25, 0.5, 0.75, 0.9), numbers, strict=True):
        is_seen = inductive.first_by_longitude(dataset, fraction)
        assert is_seen.sum() == number
        limit = sorted(dataset.longitude)[number]
        npt.assert_array_equal(is_seen, dataset.longitude < limit)


@pytest.mark.parametrize("missing", ["longitude", "latitude"])
def test_sensors_without_coordinates_are_refused(placed, missing):
    dataset = dataclasses.replace(placed, **{missing: None})
    with pytest.raises(InputError, match="tiny: no latitude and longitude"):
        inductive.first_by_longitude(dataset, 0.5)


@pytest.mark.parametrize(("fraction", "number"), [(0.05, 0), (0.95, 5)])
def test_none_and_all_are_refused(placed, fraction, number):
    with pytest.raises(InputError, match=f"is {number} of 5 sensors"):
        inductive.first_by_longitude(placed, fraction)


# --- What is trained on ---------------------------------------------------------------


def test_training_is_on_the_subgraph_of_seen_sensors(placed, halves):
    part, _ = halves
    for name, data in part.items():
        npt.assert_array_equal(data.speed, placed.speed[:, [1, 3, 4]].T)
        npt.assert_array_equal(data.client_ids, [1, 3, 4])
        npt.assert_array_equal(data.starts, windows.make_splits(placed)[name].starts)
        expected = graphs.from_adjacency(np.diag(np.float32([1, 1, 0])))
        jax.tree.map(npt.assert_array_equal, data.graph, expected)


def test_the_scaler_is_of_seen_sensors(placed, halves):
    readings = []
    for start in windows.split_starts(len(placed.speed))["train"]:
        for sensor in (1, 3, 4):
            readings.extend(placed.speed[start : start + 12, sensor].tolist())
    for splits in halves:
        for data in splits.values():
            npt.assert_allclose(data.mean, np.mean(readings), rtol=1e-6)
            npt.assert_allclose(data.std, np.std(readings), rtol=1e-6)


def test_nothing_of_unseen_sensors_is_trained_on(placed, is_seen, halves):
    rng = np.random.default_rng(1)
    speed, adjacency = placed.speed.copy(), placed.adjacency.copy()
    speed[:, ~is_seen] = rng.uniform(0, 500, speed[:, ~is_seen].shape)
    adjacency[~is_seen] = 0.5
    adjacency[:, ~is_seen] = 0.5
    other = dataclasses.replace(placed, speed=speed, adjacency=adjacency)
    part, whole = inductive.make_splits(other, is_seen)
    jax.tree.map(npt.assert_array_equal, part, halves[0])
    assert whole["test"].mean == halves[1]["test"].mean
    assert not np.array_equal(whole["test"].speed, halves[1]["test"].speed)


def test_the_whole_graph_differs_in_its_scaler_only(placed, halves):
    for name, data in windows.make_splits(placed).items():
        whole = halves[1][name]
        jax.tree.map(
            npt.assert_array_equal, whole, data._replace(mean=whole.mean, std=whole.std)
        )
        assert whole.mean != data.mean


# --- What is scored -------------------------------------------------------------------


def trained(method, data):
    values = TINY if algorithms.get_method(method).is_trained else {}
    if method in ("fed_avg", "gru_centralized", "gru_fmtl", "local"):
        values = {"task": TASK}
    config = algorithms.make_config(method, values)
    algorithm = algorithms.get_method(method).factory(config)
    return algorithm, jax.eval_shape(algorithm.init, jax.random.key(0), data)


def models_of(state):
    """What is averaged or not; of an untrained method, its state."""
    for name in ("client_params", "models"):
        state = getattr(state, name, state)
    return state


@pytest.mark.parametrize("method", ["persistence", "fed_avg", "cnfgnn"])
def test_views_are_scored_on_their_sensors(
    halves, is_seen, method, quick_jit, rolled_scans
):
    part, whole = halves
    algorithm, _ = trained(method, part["train"])
    state = algorithm.init(jax.random.key(0), part["train"])
    data = whole["test"]
    forecast = np.asarray(quick_jit(algorithm.predict)(state, data))  # [S, K, 12]
    steps = np.asarray(data.starts)[:, None] + windows.INPUT_STEPS + np.arange(12)
    truth = np.asarray(data.speed)[:, steps].transpose(1, 0, 2)
    errors = (forecast - truth).astype(np.float64)
    evaluate = quick_jit(algorithm.evaluate)
    scores = {
        name: evaluate(state, view)
        for name, view in inductive.views(data, is_seen).items()
    }
    masks = {"all": is_seen | True, "seen": is_seen, "unseen": ~is_seen}
    assert scores.keys() == masks.keys()
    for name, mask in masks.items():
        expected = errors[:, mask]
        npt.assert_allclose(
            scores[name]["rmse"], np.sqrt(np.mean(expected**2)), rtol=1e-5
        )
        npt.assert_allclose(scores[name]["mae"], np.mean(abs(expected)), rtol=1e-5)
    parts = 3 * scores["seen"]["mae"] + 2 * scores["unseen"]["mae"]
    npt.assert_allclose(parts, 5 * scores["all"]["mae"], rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "is_common"),
    {
        "cnfgnn": True,
        "split_learning_fedavg": True,
        "gru_gn": True,
        "gru_centralized": True,
        "fed_avg": True,
        "persistence": True,
        "at_without_fedavg": False,
        "split_learning": False,
        "local": False,
        "gru_fmtl": False,
        "historical_average": False,
    }.items(),
)
def test_only_common_models_fit_another_graph(halves, method, is_common):
    part, whole = halves
    states = [trained(method, data["train"])[1] for data in (part, whole)]
    shapes = [
        [leaf.shape for leaf in jax.tree.leaves(models_of(state))] for state in states
    ]
    assert (shapes[0] == shapes[1]) == is_common
