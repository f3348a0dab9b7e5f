"""Synthetic networks of LargeST's sizes; here of a few sensors."""

import numpy as np
import pytest

from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import datasets, synthetic, synthetic_flows


@pytest.fixture(autouse=True)
def small(monkeypatch):
    published = datasets.PUBLISHED["largest_sd"]._replace(num_sensors=24)
    monkeypatch.setitem(datasets.PUBLISHED, "largest_sd", published)
    monkeypatch.setitem(synthetic_flows.NUM_EDGES, "largest_sd", 60)


def test_a_twin_has_the_published_shape():
    dataset = data.load("synthetic_largest_sd", num_days=9)
    assert dataset.speed.shape == (9 * 96, 24)
    assert dataset.speed.dtype == dataset.adjacency.dtype == np.float32
    assert (dataset.name, dataset.unit) == ("synthetic_largest_sd", "vehicles / 5 min")
    assert dataset.fractions == (0.6, 0.2, 0.2)
    assert set(np.diff(dataset.timestamps)) == {np.timedelta64(15, "m")}
    assert dataset.speed.min() >= 1
    np.testing.assert_array_equal(dataset.speed, np.round(dataset.speed))
    edges = dataset.adjacency != 0
    assert edges.sum() - 24 == 60 and edges.diagonal().all()

    fewer = data.load("synthetic_largest_sd", num_days=2)
    np.testing.assert_array_equal(fewer.speed, dataset.speed[: 2 * 96])
    other = data.load("synthetic_largest_sd", num_days=2, seed=1)
    assert not np.array_equal(other.speed, fewer.speed)


def test_flow_is_density_times_speed(monkeypatch):
    """Without noise, against the model run through both weeks at once."""
    monkeypatch.setattr(synthetic, "SENSOR_NOISE", 0.0)
    network = synthetic.build_road_network(np.random.default_rng(5), 24)
    rng = np.random.default_rng(5)
    synthetic.build_road_network(rng, 24)
    peaks, risk = synthetic.draw_peaks(rng, network), synthetic.draw_risk(rng, 24)
    weeks = []
    for week in (1, 2):
        rng = np.random.default_rng((5, week))
        demand = synthetic.demand_series(rng, network, 7, peaks)
        incidents = synthetic_flows.INCIDENTS_PER_DAY / 24**0.5
        capacity = synthetic.capacity_series(rng, network, 7, incidents, risk)
        weeks.append((demand, capacity))
    speed, density = synthetic.simulate(
        network, *(np.concatenate(part) for part in zip(*weeks, strict=True))
    )
    flow = np.array(speed, np.float64) * np.array(density) / 12
    expected = np.maximum(flow.reshape(-1, 3, 24).mean(1), 1)
    twin = synthetic_flows.twin("largest_sd", num_days=14, seed=5)
    np.testing.assert_allclose(twin.speed, expected, atol=0.501)


def test_twins_are_of_the_published_networks():
    assert set(synthetic_flows.TWINS) <= set(data.DATASETS)
    assert synthetic_flows.NUM_EDGES.keys() <= datasets.PUBLISHED.keys()


@pytest.mark.parametrize(
    ("options", "match"),
    [({"num_days": 0}, "expected at least 1"), ({"num_sensors": 9}, "no option")],
)
def test_what_a_twin_does_not_take(options, match):
    with pytest.raises(InputError, match=match):
        data.load("synthetic_largest_sd", **options)
