import jax
import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import synthetic

CAPACITY, FREE_SPEED = 8000.0, 100.0


def straight_road(num_cells):
    """Equal cells of 1.5 km in a row, fed by a queue at the head."""
    cells = np.arange(num_cells, dtype=np.int32)
    each = np.ones(num_cells, np.float32)
    return synthetic.RoadNetwork(
        senders=np.append(cells[:-1], num_cells).astype(np.int32),
        receivers=np.append(cells[1:], 0).astype(np.int32),
        turning=each,
        priority=each,
        length=1.5 * each,
        free_speed=FREE_SPEED * each,
        capacity=CAPACITY * each,
        peak_demand=CAPACITY * (cells == 0).astype(np.float32),
        corridor=0 * cells,
        position=np.stack([1.5 * cells, 0 * cells], 1).astype(np.float32),
    )


def congested_density(flow):
    """k with w (K - k) = flow, veh/km."""
    return CAPACITY / FREE_SPEED + (CAPACITY - flow) / synthetic.WAVE_SPEED


def random_boundary(network, seed):
    rng = np.random.default_rng(seed)
    num_cells = len(network.length)
    traffic = synthetic.Traffic(
        rng.choice([0, 0.1, 0.5, 1], num_cells) * network.jam_vehicles,
        rng.choice([0.0, 10.0, 1000.0], num_cells) * (network.peak_demand > 0),
    )
    demand = rng.uniform(0, 2, num_cells) * network.peak_demand
    capacity = rng.choice([0.0, 0.3, 1.0], num_cells) * network.capacity
    return traffic, demand, capacity


def exact(network):
    return jax.tree.map(
        lambda x: x.astype(np.float64) if x.dtype.kind == "f" else x, network
    )


def exact_step(*arguments):
    """One step in float64, back as NumPy arrays."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, synthetic.ctm_step(*arguments))


def road_network(num_sensors, seed=0):
    return synthetic.build_road_network(np.random.default_rng(seed), num_sensors)


@pytest.mark.parametrize("num_sensors", [*range(4, 30), 100, 325])
def test_road_network_is_well_formed(num_sensors):
    network = road_network(num_sensors, seed=num_sensors)
    edges_in = np.bincount(network.receivers, minlength=num_sensors)
    edges_out = np.bincount(network.senders, minlength=2 * num_sensors)
    assert edges_in.min() >= 1 and edges_in.max() <= 2 and edges_out.max() <= 2
    shares = np.bincount(network.receivers, network.priority)
    np.testing.assert_allclose(shares, 1, rtol=1e-6)
    leaving = np.bincount(network.senders, network.turning)
    assert network.turning.min() > 0 and leaving.max() <= 1 + 1e-6
    fed = np.isin(np.arange(num_sensors) + num_sensors, network.senders)
    np.testing.assert_array_equal(fed, network.peak_demand > 0)
    assert np.all(network.free_speed * synthetic.STEP_HOURS < network.length)  # CFL
    assert np.unique(network.position, axis=0).shape == (num_sensors, 2)
    for value in network:
        assert value.dtype in (np.int32, np.float32)


def test_corridors_merge_and_split():
    network = road_network(20)
    road = network.senders < 20
    across = (
        network.corridor[network.senders[road]]
        != (network.corridor[network.receivers[road]])
    )
    assert across.sum() == 2


@pytest.mark.parametrize("seed", range(8))
def test_a_step_conserves_vehicles_and_keeps_densities_in_bounds(seed):
    network = exact(road_network(40, seed))
    traffic, demand, capacity = random_boundary(network, seed)
    after, moves = exact_step(network, traffic, demand, capacity)
    stay = np.bincount(network.senders, network.turning, 80)[:40]
    left = np.sum(moves.out * (1 - stay))
    before = traffic.vehicles.sum() + traffic.queue.sum()
    arrived = synthetic.STEP_HOURS * demand.sum()
    now = after.vehicles.sum() + after.queue.sum()
    assert now == pytest.approx(before + arrived - left, rel=1e-13)
    assert np.all(after.vehicles >= 0) and np.all(after.queue >= 0) and left > 0
    assert np.all(after.vehicles <= network.jam_vehicles * (1 + 1e-12))


@pytest.mark.parametrize("seed", range(4))
def test_junctions_match_a_loop(seed):
    network = exact(road_network(30, seed))
    traffic, demand, capacity = random_boundary(network, seed)
    after, moves = exact_step(network, traffic, demand, capacity)

    dt, num_cells = synthetic.STEP_HOURS, 30
    sends = np.empty(2 * num_cells)
    room = np.empty(num_cells)
    for i in range(num_cells):
        n, length = traffic.vehicles[i], network.length[i]
        sends[i] = min(network.free_speed[i] * dt / length * n, capacity[i] * dt)
        sends[num_cells + i] = min(traffic.queue[i] + demand[i] * dt, capacity[i] * dt)
        free = network.jam_vehicles[i] - n
        room[i] = min(capacity[i] * dt, synthetic.WAVE_SPEED * dt / length * free)
    sent = sends.copy()
    for s, r, b, p in zip(*network[:4], strict=True):
        rivals = (network.receivers == r) & (network.senders != s)
        taken = np.sum(network.turning[rivals] * sends[network.senders[rivals]])
        if taken + b * sends[s] <= room[r]:
            granted = b * sends[s]
        else:  # the middle one of the three, as Daganzo has it
            granted = sorted([b * sends[s], room[r] - taken, p * room[r]])[1]
        sent[s] = min(sent[s], granted / b)
    expected = traffic.vehicles - sent[:num_cells]
    for s, r, b in zip(*network[:3], strict=True):
        expected[r] += b * sent[s]
    np.testing.assert_allclose(moves.out, sent[:num_cells], rtol=1e-12)
    np.testing.assert_allclose(after.vehicles, expected, rtol=1e-12, atol=1e-12)


def test_two_full_roads_merge_by_priority():
    network = straight_road(3)._replace(  # 0 and 1 lead into 2
        senders=np.array([0, 1], np.int32),
        receivers=np.array([2, 2], np.int32),
        turning=np.ones(2, np.float32),
        priority=np.array([0.75, 0.25], np.float32),
    )
    traffic = synthetic.Traffic(np.array([200.0, 200.0, 0.0], np.float32), np.zeros(3))
    _, moves = synthetic.ctm_step(network, traffic, np.zeros(3), network.capacity)
    np.testing.assert_allclose(moves.edge * 120, [6000, 2000], rtol=1e-5)


def test_light_traffic_moves_at_free_speed():
    network = road_network(20)
    demand = np.tile(0.5 * network.peak_demand, (100, 1))
    speed, density = synthetic.simulate(
        network, demand, np.tile(network.capacity, (100, 1))
    )
    np.testing.assert_allclose(
        speed, np.broadcast_to(network.free_speed, speed.shape), rtol=1e-4
    )
    assert np.all(np.asarray(density[-1]) > 0)


def test_waves_travel_upstream_at_rankine_hugoniot_speeds():
    network, inflow, bottleneck = straight_road(20), 6000.0, 3000.0
    readings, drop, clear = 300, 60, 160
    demand = np.zeros((readings, 20), np.float32)
    demand[:, 0] = inflow
    capacity = np.tile(network.capacity, (readings, 1))
    capacity[drop:clear, 18] = bottleneck
    _, density = synthetic.simulate(network, demand, capacity)
    density = np.asarray(density)
    light, queued = inflow / FREE_SPEED, congested_density(bottleneck)

    def crossing(cell, level, start):  # readings until the density passes the level
        above = density[start:, cell] > level
        return np.argmax(above != above[0])

    cells, km = (15, 9), 6 * 1.5
    hour = 60 / synthetic.READING_MINUTES
    arrive = [crossing(c, (light + queued) / 2, drop) for c in cells]
    shock = (inflow - bottleneck) / (queued - light)  # km/h
    assert np.diff(arrive)[0] / hour == pytest.approx(km / shock, abs=1.5 / shock)
    assert density[clear - 1, 12] == pytest.approx(queued, rel=1e-3)

    critical = CAPACITY / FREE_SPEED
    dissolve = [crossing(c, (critical + queued) / 2, clear) for c in cells]
    w = synthetic.WAVE_SPEED
    assert np.diff(dissolve)[0] / hour == pytest.approx(km / w, abs=1.5 / w)
    assert density[clear - 1, 19] == pytest.approx(bottleneck / FREE_SPEED, rel=1e-3)


def test_adjacency():
    network = road_network(20)
    adjacency = synthetic.road_adjacency(network)
    assert adjacency.shape == (20, 20) and adjacency.dtype == np.float32
    np.testing.assert_array_equal(np.diag(adjacency), 1)
    np.testing.assert_array_equal(adjacency, adjacency.T)
    others = adjacency[~np.eye(20, dtype=bool)]
    assert np.all((others == 0) | ((others >= np.float32(0.1)) & (others < 1)))
    assert 4 <= np.mean(np.sum(adjacency > 0, axis=1) - 1) <= 8
    for s, r in zip(network.senders, network.receivers, strict=True):
        assert s >= 20 or adjacency[s, r] > 0.5  # the next cell


@pytest.fixture(scope="module")
def dataset():
    return synthetic.traffic_network()


def test_dataset(dataset):
    assert dataset.speed.shape == (14 * 288, 20)
    assert dataset.speed.dtype == np.float32
    assert np.all(np.isfinite(dataset.speed)) and np.all(dataset.speed > 0)
    assert 50 < dataset.speed.mean() < 60
    congested = dataset.speed < 0.7 * np.quantile(dataset.speed, 0.95, axis=0)
    assert 0.1 < congested.mean() < 0.3
    assert dataset.timestamps.dtype == "datetime64[ns]"
    assert dataset.timestamps[0].astype("datetime64[D]").astype(object).weekday() == 0
    assert set(np.diff(dataset.timestamps)) == {np.timedelta64(5, "m")}
    assert len(set(dataset.sensor_ids)) == 20
    assert np.ptp(dataset.latitude) < 0.5 and np.ptp(dataset.longitude) < 0.5
    assert dataset.notes == ("synthetic: cell transmission model, seed 0",)


def test_the_seed_decides():
    first, again, other = (synthetic.traffic_network(8, 1, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.speed, again.speed)
    np.testing.assert_array_equal(first.adjacency, again.adjacency)
    assert np.mean(first.speed != other.speed) > 0.9


@pytest.mark.parametrize("num_sensors", [4, 5, 7, 11])
def test_small_networks(num_sensors):
    dataset = synthetic.traffic_network(num_sensors, 1)
    assert dataset.speed.shape == (288, num_sensors)
    assert np.all(dataset.speed > 0) and np.all(np.isfinite(dataset.adjacency))


@pytest.mark.parametrize("arguments", [(3, 1), (0, 1), (4, 0)])
def test_bad_arguments(arguments):
    with pytest.raises(InputError, match="expected at least"):
        synthetic.traffic_network(*arguments)


def test_neighbours_tell_what_is_coming(dataset):
    """Ridge regression of the next hour: own past hour; the neighbours' as well."""
    split = int(0.7 * len(dataset.speed))
    train, test = dataset.speed[:split].astype(float), dataset.speed[-split * 2 // 7 :]
    mean, scale = train.mean(), train.std()

    def windows(speed, columns):  # [M, 12 * columns + 1]
        view = np.lib.stride_tricks.sliding_window_view(speed, 12, axis=0)[:-12]
        flat = ((view[:, columns] - mean) / scale).reshape(len(view), -1)
        return np.append(flat, np.ones((len(flat), 1)), axis=1)

    def target(speed, sensor):  # [M, 12]
        return np.lib.stride_tricks.sliding_window_view(speed[12:, sensor], 12) - mean

    def errors(sensor, columns):
        x, y = windows(train, columns), target(train, sensor)
        weights = np.linalg.solve(x.T @ x + 300 * np.eye(x.shape[1]), x.T @ y)
        return windows(test, columns) @ weights - target(test, sensor)

    def rmse(errors):
        return np.sqrt(np.mean(np.square(errors)))

    sensors, adjacency = range(20), dataset.adjacency
    own = rmse([errors(i, [i]) for i in sensors])
    neighbours = rmse([errors(i, np.flatnonzero(adjacency[:, i])) for i in sensors])
    persistence = rmse(
        [target(test, i) + mean - test[11:-12, i, None] for i in sensors]
    )
    days = train[: 9 * 288].reshape(9, 288, 20).mean(0)
    average = rmse(days[np.arange(14 * 288)[-len(test) :] % 288] - test)
    assert neighbours < 0.9 * own
    assert neighbours < 0.87 * persistence
    assert neighbours < 0.65 * average
