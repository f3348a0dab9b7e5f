"""Synthetic networks as large as LargeST's: the same sensors, edges and steps.

`twin` runs the cell transmission model of `synthetic` on a road network of that size
and reads flows, flow = density times speed, as means over 15 minutes. Weeks are drawn
and simulated one after another, each from the traffic that the one before left, so
that only the flows themselves, [T, N] float32, grow with time.
"""

import numpy as np

from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import synthetic
from fedjax_graph.data.traffic.network import TrafficDataset
from fedjax_graph.data.traffic.published import PUBLISHED

NUM_EDGES = {  # without self edges, as LargeST's authors count them
    "largest_sd": 17319,
    "largest_gba": 61246,
    "largest_gla": 98703,
    "largest_ca": 201363,
}
TWINS = {f"synthetic_{name}": name for name in NUM_EDGES}
"""Name of a twin -> that of its published network."""

INCIDENTS_PER_DAY = 13.0
"""Over the square root of N, for each cell: as many on a road, however many sensors
that has (about 1.5 times the square root of N), or long roads would never clear."""

STEPS_PER_DAY = 96
READINGS_PER_STEP = synthetic.READINGS_PER_DAY // STEPS_PER_DAY


def twin(of: str, num_days: int = 365, seed: int = 0) -> TrafficDataset:
    """Simulates a network of a published one's size, days from a Monday on.

    Flows are vehicles per 5 minutes in all lanes, means over 15 minutes with relative
    `SENSOR_NOISE`, rounded, at least 1, so none is missing. The graph is that of
    `synthetic.road_adjacency`, which is symmetric: an odd number of edges becomes
    even. Fewer days are the first of more.

    Args:
      of: a name of `NUM_EDGES`.
      num_days: how many days.
      seed: of roads and traffic.

    Raises:
      InputError: less than one day.
    """
    if num_days < 1:
        raise InputError(f"num_days = {num_days}: expected at least 1")
    published = PUBLISHED[of]
    rng = np.random.default_rng(seed)
    network = synthetic.build_road_network(rng, published.num_sensors)
    flows = _flows(rng, network, num_days, seed)
    latitude, longitude = synthetic.coordinates(network)
    steps = np.arange(len(flows)) * np.timedelta64(24 * 60 // STEPS_PER_DAY, "m")
    return TrafficDataset(
        name=f"synthetic_{of}",
        speed=flows,
        timestamps=synthetic.FIRST_MONDAY + steps,
        sensor_ids=np.array([f"cell-{i}" for i in range(published.num_sensors)]),
        adjacency=synthetic.road_adjacency(
            network, NUM_EDGES[of] / published.num_sensors
        ),
        latitude=latitude,
        longitude=longitude,
        notes=(f"synthetic: cell transmission model of {of}'s size, seed {seed}",),
        unit=published.unit,
        fractions=published.fractions,
    )


def _flows(
    rng: np.random.Generator, network: synthetic.RoadNetwork, num_days: int, seed: int
) -> np.ndarray:
    """[T, N] float32: what the sensors count."""
    num_sensors = len(network.length)
    peaks = synthetic.draw_peaks(rng, network)
    risk = synthetic.draw_risk(rng, num_sensors)
    incidents = INCIDENTS_PER_DAY / num_sensors**0.5
    flows = np.empty((num_days, STEPS_PER_DAY, num_sensors), np.float32)
    traffic = synthetic.empty_roads(network)
    for week, first in enumerate(range(0, num_days, 7)):
        rng = np.random.default_rng((seed, 1 + week))
        demand = synthetic.demand_series(rng, network, 7, peaks)
        capacity = synthetic.capacity_series(rng, network, 7, incidents, risk)
        with mesh.on_cpu():
            traffic, readings = synthetic.advance(network, traffic, demand, capacity)
        speed, density = map(np.asarray, readings)
        flow = speed * density * np.float32(synthetic.READING_MINUTES / 60)
        flow = flow.reshape(-1, READINGS_PER_STEP, num_sensors).mean(axis=1)
        noise = rng.standard_normal(flow.shape, np.float32)
        flow = np.round(flow * (1 + synthetic.SENSOR_NOISE * noise))
        days = np.maximum(flow, 1).reshape(7, STEPS_PER_DAY, num_sensors)
        flows[first : first + 7] = days[: num_days - first]
    return flows.reshape(-1, num_sensors)
