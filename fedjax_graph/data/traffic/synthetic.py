"""A synthetic traffic network in which congestion really travels along the roads.

The cell transmission model (CTM) of Daganzo [1, 2] on a seeded random road graph. It
is the Godunov scheme of the kinematic wave equation dk/dt + dq/dx = 0 with a
triangular fundamental diagram q(k) = min(v k, Q, w (K - k)), where k is the density
in veh/km, q the flow in veh/h, v the free-flow speed and w the speed of waves in
congested traffic (both km/h), Q the capacity in veh/h and K = Q/v + Q/w the jam
density. Roads are cut into cells of length L, about a mile; one cell is one sensor.
With n vehicles in a cell, per time step dt it

    sends     S = min(v dt/L n, Q dt)             vehicles at most and
    receives  R = min(Q dt, w dt/L (K L - n))     vehicles at most,

and the flow across a boundary is the smaller of what upstream sends and downstream
receives. Merges share the room R by priority, splits are first-in-first-out with
fixed turning fractions (see `ctm_step`). Vehicles are conserved, and n stays within
[0, K L] as long as v dt <= L (the CFL condition).

Demand with morning and evening peaks enters at the heads of the roads and at ramps.
Incidents cut the capacity of a cell for a while: a queue then grows upstream at the
Rankine-Hugoniot speed, a few km/h, across cells and through interchanges, and
dissolves from its head at the speed w once the incident is over. So what a sensor will
read within the hour is already visible at its neighbours downstream.

[1] C. F. Daganzo, The cell transmission model: a dynamic representation of highway
    traffic consistent with the hydrodynamic theory, Transp. Res. B 28(4), 1994.
[2] C. F. Daganzo, The cell transmission model, part II: network traffic, Transp.
    Res. B 29(2), 1995.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csgraph, csr_array

from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic.network import TrafficDataset

READING_MINUTES = 5
READINGS_PER_DAY = 24 * 60 // READING_MINUTES
STEPS_PER_READING = 10
STEP_HOURS = READING_MINUTES / 60 / STEPS_PER_READING  # dt: 30 s
WAVE_SPEED = 15.0  # w, km/h
KM_PER_MILE = 1.609344
FIRST_MONDAY = np.datetime64("2024-01-01T00:00", "ns")
SENSOR_NOISE = 0.015  # standard deviation, about 1 mph in free flow
MIN_SPEED = 1.0  # mph; readings are never 0, which would mean "missing"


class RoadNetwork(NamedTuple):
    """N cells, and E directed edges from cells and entry queues to cells.

    Senders 0..N-1 are cells; sender N + i is the queue of vehicles that wait to enter
    the network at cell i. What a cell's edges leave of its outflow, 1 - sum(turning),
    exits the network there. A cell has at most two edges in and two out.
    """

    senders: np.ndarray  # [E] int32, in 0..2N-1
    receivers: np.ndarray  # [E] int32, in 0..N-1
    turning: np.ndarray  # [E] share of the sender's outflow that takes this edge
    priority: np.ndarray  # [E] share of the receiver's room; sums to 1 per receiver
    length: np.ndarray  # [N] L, km
    free_speed: np.ndarray  # [N] v, km/h
    capacity: np.ndarray  # [N] Q, veh/h, all lanes together
    peak_demand: np.ndarray  # [N] veh/h that want to enter at the peak of a usual day
    corridor: np.ndarray  # [N] int32, the road a cell lies on
    position: np.ndarray  # [N, 2] km east and north of the south-western corner

    @property
    def jam_vehicles(self) -> np.ndarray:
        """[N] vehicles in a cell at jam density, K L."""
        return self.capacity * (1 / self.free_speed + 1 / WAVE_SPEED) * self.length


class Traffic(NamedTuple):
    """The state of the model: vehicles in the cells and in the entry queues."""

    vehicles: jax.Array  # [N]
    queue: jax.Array  # [N]


class Moves(NamedTuple):
    """Vehicles that moved within one time step."""

    edge: jax.Array  # [E] along each edge
    out: jax.Array  # [N] out of each cell, along its edges and through its exit


def build_road_network(rng: np.random.Generator, num_sensors: int) -> RoadNetwork:
    """Draws one-way corridors on a grid of east-west and north-south lines.

    Where two corridors cross, a ramp leads from one to the other, always from the
    earlier to the later in a random order: without cycles no gridlock can form.
    Off-ramps take a share of the traffic out, and the ramps behind them let as much
    in, so that the flow of a usual peak is about the same all along a corridor.
    """
    num_corridors = max(2, round(math.sqrt(num_sensors) / 1.5))
    roads = np.array_split(np.arange(num_sensors), num_corridors)
    order = rng.permutation(num_corridors)
    reverse = rng.random(num_corridors) < 0.5
    lines = [num_corridors - num_corridors // 2, num_corridors // 2]  # E-W, N-S
    index = [(c // 2 + 1) / (lines[c % 2] + 1) for c in range(num_corridors)]

    def cut(road, other):  # the first cell of `road` beyond its crossing with `other`
        at = 1 - index[other] if reverse[road] else index[other]
        return min(max(int(at * len(roads[road])), 1), len(roads[road]) - 1)

    ramps = [  # (from, to, merge from): cells at the interchanges
        (roads[a][cut(a, b) - 1], roads[b][cut(b, a)], roads[b][cut(b, a) - 1])
        for a in range(num_corridors)
        for b in range(num_corridors)
        if (a - b) % 2 and order[a] < order[b]
    ]
    corridor = np.repeat(np.arange(num_corridors), [len(road) for road in roads])
    lanes = rng.integers(3, 6, num_corridors)[corridor]
    usual = 2000.0 * lanes * rng.uniform(0.88, 0.96, num_corridors)[corridor]
    ramp_from, ramp_to, merge_from = np.array(ramps).T
    share = rng.uniform(0.1, 0.2, len(ramps))
    leave = rng.uniform(0.03, 0.12, num_sensors) * (rng.random(num_sensors) < 0.5)
    leave[ramp_from] = 0.0
    leave[merge_from] = np.minimum(share * usual[ramp_from] / usual[merge_from], 0.4)

    ahead = np.flatnonzero(corridor[:-1] == corridor[1:])
    stay = 1.0 - leave
    stay[ramp_from] -= share
    inflow = np.bincount(ahead + 1, stay[ahead] * usual[ahead], num_sensors)
    peak_demand = np.maximum(usual - inflow, 0.0)
    peak_demand[ramp_to] = 0.0
    entries = np.flatnonzero(peak_demand)

    receivers = np.concatenate([ahead + 1, ramp_to, entries])
    weight = np.concatenate(
        [np.full(len(ahead), 0.75), np.full(len(ramps) + len(entries), 0.25)]
    )
    network = RoadNetwork(
        senders=np.concatenate([ahead, ramp_from, entries + num_sensors]),
        receivers=receivers,
        turning=np.concatenate([stay[ahead], share, np.ones(len(entries))]),
        priority=weight / np.bincount(receivers, weight)[receivers],
        length=rng.uniform(1.4, 1.7, num_sensors),
        free_speed=rng.uniform(99.0, 107.0, num_corridors)[corridor]
        + rng.uniform(-2.0, 2.0, num_sensors),
        capacity=2000.0 * lanes * rng.uniform(0.97, 1.05, num_sensors),
        peak_demand=peak_demand,
        corridor=corridor,
        position=_positions(rng, roads, index, reverse),
    )
    return jax.tree.map(
        lambda x: x.astype(np.int32 if x.dtype.kind == "i" else np.float32), network
    )


def _positions(rng, roads, index, reverse):
    """[N, 2] km: even corridors run east-west, odd ones north-south, all a bit bent."""
    side = 1.55 * max(len(road) for road in roads)  # the mean length of a cell
    positions = []
    for c, road in enumerate(roads):
        along = (np.arange(len(road)) + 0.5) / len(road)
        along = 1 - along if reverse[c] else along
        bend = 0.03 * np.sin(2 * np.pi * (along + rng.random()))
        east_north = (along, index[c] + bend)
        positions.append(np.stack(east_north[:: -1 if c % 2 else 1], axis=1) * side)
    return np.concatenate(positions)


def ctm_step(
    network: RoadNetwork, traffic: Traffic, demand: jax.Array, capacity: jax.Array
) -> tuple[Traffic, Moves]:
    """Advances the traffic by one time step of `STEP_HOURS`.

    Along edge e from s to r, with turning fraction b_e and priority p_e, want to go
    D_e = b_e S_s vehicles. At a merge, the edge is granted the median of D_e, the
    room that the others leave and its share by priority [2],

        G_e = min(D_e, max(R_r - sum of the others' D, p_e R_r)).

    At a split, a blocked exit blocks all behind it [2, first in, first out]:
    s sends y_s = min(S_s, min over its edges of G_e / b_e), and b_e y_s go along e.
    What an edge is granted but cannot use, its sender being blocked, stays unused.

    Args:
      network: the roads.
      traffic: vehicles [N] and queues [N] before the step.
      demand: [N] veh/h that arrive to enter at each cell; 0 where no edge leads in.
      capacity: [N] veh/h that can pass each cell now (incidents lower it); the jam
        density is that of `network`.

    Returns:
      The traffic after the step and the vehicles moved.
    """
    senders, receivers, turning, priority = network[:4]
    n, num_cells = traffic.vehicles, len(network.length)
    arrived = traffic.queue + STEP_HOURS * demand
    step_per_length = STEP_HOURS / network.length
    limit = STEP_HOURS * capacity
    ready = jnp.concatenate([network.free_speed * step_per_length * n, arrived])
    sending = jnp.minimum(ready, jnp.tile(limit, 2))
    room = jnp.minimum(limit, WAVE_SPEED * step_per_length * (network.jam_vehicles - n))
    room = room[receivers]

    wanted = turning * sending[senders]
    others = jax.ops.segment_sum(wanted, receivers, num_cells)[receivers] - wanted
    granted = jnp.minimum(wanted, jnp.maximum(room - others, priority * room))
    passing = jax.ops.segment_min(granted / turning, senders, 2 * num_cells)
    sent = jnp.minimum(sending, passing)

    edge = turning * sent[senders]
    out, entered = sent[:num_cells], sent[num_cells:]
    n = n + jax.ops.segment_sum(edge, receivers, num_cells) - out
    return Traffic(n, arrived - entered), Moves(edge, out)


@jax.jit
def simulate(
    network: RoadNetwork, demand: jax.Array, capacity: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs the model from empty roads; see `advance`, of which it has the readings."""
    return advance(network, empty_roads(network), demand, capacity)[1]


def empty_roads(network: RoadNetwork) -> Traffic:
    """The traffic before the first vehicle."""
    zero = jnp.zeros(len(network.length), jnp.float32)
    return Traffic(zero, zero)


@jax.jit
def advance(
    network: RoadNetwork, traffic: Traffic, demand: jax.Array, capacity: jax.Array
) -> tuple[Traffic, tuple[jax.Array, jax.Array]]:
    """Runs the model, `STEPS_PER_READING` steps per reading.

    Args:
      network: the roads.
      traffic: what is on them before.
      demand: [T, N] veh/h, as for `ctm_step`, constant within a reading.
      capacity: [T, N] veh/h, likewise.

    Returns:
      The traffic after the last reading. Mean speed [T, N] in km/h, over distance:
      flow over density, both averaged over the time of a reading; and mean density
      [T, N] in veh/km.
    """

    def step(boundary, carry, _):
        traffic, present, gone = carry
        after, moves = ctm_step(network, traffic, *boundary)
        return (after, present + traffic.vehicles, gone + moves.out), None

    def reading(traffic, boundary):
        zero = jnp.zeros_like(traffic.vehicles)
        (traffic, present, gone), _ = jax.lax.scan(
            functools.partial(step, boundary),
            (traffic, zero, zero),
            length=STEPS_PER_READING,
        )
        speed = jnp.where(
            present > 0,
            gone * network.length / (jnp.where(present > 0, present, 1) * STEP_HOURS),
            network.free_speed,
        )
        return traffic, (speed, present / (STEPS_PER_READING * network.length))

    return jax.lax.scan(reading, traffic, (demand, capacity))


def draw_peaks(rng: np.random.Generator, network: RoadNetwork) -> np.ndarray:
    """Weights of the morning and of the evening peak of each corridor, [2, C]."""
    return rng.uniform(0.25, 0.6, (2, network.corridor.max() + 1))


def demand_series(
    rng: np.random.Generator,
    network: RoadNetwork,
    num_days: int,
    peaks: np.ndarray | None = None,
) -> np.ndarray:
    """Draws the demand [T, N], veh/h, of `num_days` days that start on a Monday.

    Peak demand, times the time of day (each corridor with its own weight of the
    morning and of the evening peak; a flat hump on weekends), times a random scale of
    the day and of the entry, times a fluctuation that is smooth over half an hour.
    The weights are `peaks`, [2, C]; None draws them.
    """
    num_cells = len(network.length)
    hours = np.arange(READINGS_PER_DAY) * (24 / READINGS_PER_DAY)

    def bump(center, width):
        return np.exp(-0.5 * ((hours - center) / width) ** 2)[:, None]

    morning, evening = draw_peaks(rng, network) if peaks is None else peaks
    base = 0.08 + 0.5 * np.exp(-(((hours[:, None] - 13.5) / 7.5) ** 4))
    weekday = base + morning * bump(7.7, 1.3) + evening * bump(17.2, 1.7)
    weekend = base + 0.6 * evening * bump(14.5, 3.0)
    profile = [np.minimum(p, 1.0)[:, network.corridor] for p in (weekday, weekend)]

    scale = rng.normal(1.0, 0.05, (num_days, 1)) * rng.normal(
        1.0, 0.05, (num_days, num_cells)
    )
    num_readings = num_days * READINGS_PER_DAY
    demand = _smooth_noise(rng, num_readings, num_cells, every=6, scale=0.12)
    for day in range(num_days):
        today = slice(day * READINGS_PER_DAY, (day + 1) * READINGS_PER_DAY)
        demand[today] *= profile[day % 7 >= 5] * scale[day] * network.peak_demand
    return demand


def draw_risk(rng: np.random.Generator, num_cells: int) -> np.ndarray:
    """Each cell's share of the incidents, [N]: nine in ten are at black spots."""
    risk = np.full(num_cells, 0.1 / num_cells)
    for stretch in np.array_split(np.arange(num_cells), max(1, round(num_cells / 7))):
        spot = rng.choice(stretch[len(stretch) // 2 :])
        risk[spot] += 0.9 * len(stretch) / num_cells
    return risk


def capacity_series(
    rng: np.random.Generator,
    network: RoadNetwork,
    num_days: int,
    incidents_per_day: float = 0.5,
    risk: np.ndarray | None = None,
) -> np.ndarray:
    """Draws the capacity [T, N], veh/h: smooth fluctuations and incidents.

    There are `incidents_per_day` times N incidents a day on average. They happen by
    day, nine in ten of them at black spots, about one per seven cells; they last 60 to
    90 minutes and leave 30 to 50 % of the capacity. Queues of several miles are common.
    """
    num_cells, num_readings = len(network.length), num_days * READINGS_PER_DAY
    capacity = _smooth_noise(rng, num_readings, num_cells, every=3, scale=0.04)
    risk = draw_risk(rng, num_cells) if risk is None else risk
    count = rng.poisson(incidents_per_day * num_cells * num_days)
    days = rng.integers(num_days, size=count) + rng.triangular(0.2, 0.6, 0.9, count)
    starts = (days * READINGS_PER_DAY).astype(int)
    ends = starts + rng.integers(60 // READING_MINUTES, 95 // READING_MINUTES, count)
    where = rng.choice(num_cells, count, p=risk)
    left = rng.uniform(0.3, 0.5, count)
    for start, end, cell, most in zip(starts, ends, where, left, strict=True):
        capacity[start:end, cell] = np.minimum(capacity[start:end, cell], most)
    return capacity * network.capacity


def _smooth_noise(rng, num_readings, num_cells, every, scale):
    """[T, N] float32 around 1, >= 0: normal knots, `every` so many readings, joined."""
    knots = rng.standard_normal((num_readings // every + 2, num_cells), np.float32)
    knots = np.maximum(1 + scale * knots, 0)
    weight = np.linspace(0, 1, every, endpoint=False, dtype=np.float32)[:, None]
    lines = knots[:-1, None] * (1 - weight) + knots[1:, None] * weight
    return lines.reshape(-1, num_cells)[:num_readings]


def road_adjacency(network: RoadNetwork, neighbours: float = 6) -> np.ndarray:
    """Gaussian kernel of the road distance [N, N] float32, as in the real datasets.

    exp(-(d/sigma)^2) with entries below 0.1 set to 0, where d is the length of the
    shortest way between two cells in whichever direction is shorter: speeds travel
    downstream with the vehicles, but congestion travels upstream, so a sensor has as
    much to learn from those ahead as from those behind. sigma is such that a sensor has
    `neighbours` neighbours on average.
    """
    num_cells = len(network.length)
    road = network.senders < num_cells
    senders, receivers = network.senders[road], network.receivers[road]
    length = (network.length[senders] + network.length[receivers]) / 2.0
    one_way = csgraph.shortest_path(
        csr_array((length, (senders, receivers)), shape=(num_cells, num_cells))
    )
    distance = np.minimum(one_way, one_way.T)
    np.fill_diagonal(distance, np.inf)
    wanted = min(round(neighbours * num_cells), int(np.isfinite(distance).sum()))
    reach = np.partition(distance, wanted - 1, axis=None)[wanted - 1]
    kernel = np.exp(np.log(0.1) * (distance / reach) ** 2)
    kernel[kernel < 0.1 * (1 - 1e-9)] = 0.0
    np.fill_diagonal(kernel, 1.0)
    return kernel.astype(np.float32)


def coordinates(network: RoadNetwork) -> tuple[np.ndarray, np.ndarray]:
    """Latitude and longitude [N] in degrees, near Los Angeles."""
    east, north = network.position.astype(float).T
    latitude = 34.0 + north / 110.6
    return latitude, -118.3 + east / (111.3 * np.cos(np.deg2rad(latitude)))


def traffic_network(
    num_sensors: int = 20, num_days: int = 14, seed: int = 0
) -> TrafficDataset:
    """Simulates a seeded network: `num_sensors` sensors, `num_days` days from a Monday.

    Readings are 5-minute mean speeds in mph with relative `SENSOR_NOISE`, at least
    `MIN_SPEED`, so none is missing. The simulation always runs on the CPU: the data
    do not depend on the accelerator.

    Raises:
      InputError: fewer than 4 sensors or less than one day.
    """
    if num_sensors < 4:
        raise InputError(f"num_sensors = {num_sensors}: expected at least 4")
    if num_days < 1:
        raise InputError(f"num_days = {num_days}: expected at least 1")
    rng = np.random.default_rng(seed)
    network = build_road_network(rng, num_sensors)
    demand = demand_series(rng, network, num_days)
    capacity = capacity_series(rng, network, num_days)
    with mesh.on_cpu():
        speed = np.array(simulate(network, demand, capacity)[0])
    speed /= KM_PER_MILE
    speed *= 1 + SENSOR_NOISE * rng.standard_normal(speed.shape, np.float32)

    latitude, longitude = coordinates(network)
    return TrafficDataset(
        name="synthetic",
        speed=np.maximum(speed, np.float32(MIN_SPEED)),
        timestamps=FIRST_MONDAY
        + np.arange(len(speed)) * np.timedelta64(READING_MINUTES, "m"),
        sensor_ids=np.array([f"cell-{i}" for i in range(num_sensors)]),
        adjacency=road_adjacency(network),
        latitude=latitude,
        longitude=longitude,
        notes=(f"synthetic: cell transmission model, seed {seed}",),
        unit="mph",
    )
