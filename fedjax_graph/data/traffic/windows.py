"""Forecasting windows, gathered from the raw series and never materialised.

A window is `INPUT_STEPS` readings followed by `TARGET_STEPS` readings to forecast,
whatever the step between them: an hour and an hour where readings are 5 minutes apart.
All overlapping windows of PEMS-BAY would fill several GiB; the series fills 68 MB.
So data stay a `[K, T]` series, a split is a vector of window starts, and a batch of
windows is one gather on the device.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import client_rows, graphs
from fedjax_graph.core.batching import FRACTIONS, SPLITS, checked_fractions
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import network, time_steps
from fedjax_graph.data.traffic.network import TrafficDataset
from fedjax_graph.data.traffic.time_steps import TimeStep

INPUT_STEPS = 12
TARGET_STEPS = 12
WINDOW_STEPS = INPUT_STEPS + TARGET_STEPS
FIVE_MINUTES = np.timedelta64(300, "s").astype("timedelta64[ns]")


class TrafficData(NamedTuple):
    """One split of a sensor network on the device: a pytree, passed as an argument.

    Clients are sensors. A padded client has weight 0, no edges and any readings.
    """

    CLIENT_ROWS = ("speed",)  # of which a device of several holds its clients' alone

    # [K, T] float32, what is forecast, in any unit; 0 = missing. In NumPy until it is
    # placed on several devices, and `ClientRows` there
    speed: jax.Array
    clock: jax.Array  # [T] float32, time of day in [0, 1)
    week_slot: jax.Array  # [T] int32, 5-minute slot of the week in [0, 2016)
    starts: jax.Array  # [S] int32, first step of each window of this split
    mean: jax.Array  # [] float32, unit of `speed`, of the training inputs
    std: jax.Array  # [] float32, unit of `speed`, of the training inputs
    graph: graphs.Graph  # K nodes
    client_ids: jax.Array  # [K] int32, identity of each client: seeds its randomness
    client_weights: jax.Array  # [K] float32, number of training windows; 0 = padding
    step: TimeStep  # from one reading to the next; no leaf


class Windows(NamedTuple):
    """A batch of windows of one client (leading axes may be added by vmap)."""

    inputs: jax.Array  # [12, B, 2] normalised speed and time of day
    targets: jax.Array  # [12, B, 2] normalised speed and time of day


def split_sizes(
    num_steps: int, fractions: Sequence[float] = FRACTIONS
) -> tuple[int, int, int]:
    """Numbers of train, validation and test windows of a series of `num_steps`.

    Args:
      num_steps: length T of the series.
      fractions: shares of train, validation and test; positive, with sum 1.

    Returns:
      Sizes that sum to T - 23, in order of time: train and test are rounded shares,
      validation has the rest.

    Raises:
      InputError: if a part would be empty, or for other fractions.
    """
    fractions = checked_fractions(fractions)
    num_windows = num_steps - WINDOW_STEPS + 1
    train, test = (round(fractions[i] * num_windows) for i in (0, 2))
    sizes = (train, num_windows - train - test, test)
    if min(sizes) < 1:
        raise InputError(
            f"{num_steps} time steps are too few: train, validation and test need at "
            f"least one window of {WINDOW_STEPS} steps each"
        )
    return sizes


def split_starts(
    num_steps: int, fractions: Sequence[float] = FRACTIONS
) -> dict[str, np.ndarray]:
    """First steps of the windows of each split, in order of time.

    Arguments and errors are those of `split_sizes`.
    """
    bounds = np.cumsum((0, *split_sizes(num_steps, fractions)))
    return {
        name: np.arange(low, high, dtype=np.int32)
        for name, low, high in zip(SPLITS, bounds[:-1], bounds[1:], strict=True)
    }


def notes_on(
    dataset: TrafficDataset, splits: Mapping[str, TrafficData]
) -> tuple[str, ...]:
    """What a reader of scores should know of the series and of its parts.

    Args:
      dataset: the series.
      splits: its parts, of `make_splits`.
    """
    notes = []
    num_shared = TARGET_STEPS - 1 - len(splits["validation"].starts)
    if num_shared > 0:
        test = len(splits["test"].starts) + TARGET_STEPS - 1
        notes.append(
            f"a short series: {min(num_shared, test)} time steps are targets of "
            "training and of the test; give more for scores to be trusted"
        )
    skips = time_steps.clock_skips(dataset.timestamps)
    if len(skips):
        rows = ", ".join(map(str, skips))
        notes.append(f"the clock skips an hour before row {rows}")
    return tuple(notes)


def training_moments(
    speed: np.ndarray, fractions: Sequence[float] = FRACTIONS
) -> tuple[float, float]:
    """Mean and standard deviation over the inputs of all training windows.

    A reading counts once for each training window that has it among its inputs, and
    missing readings (0) count as they are.

    Args:
      speed: [T, N] readings in any unit.
      fractions: as for `split_sizes`.

    Returns:
      Both in the unit of the readings.
    """
    train, _, _ = split_sizes(len(speed), fractions)
    steps = np.arange(train + INPUT_STEPS - 1)
    counts = np.minimum.reduce([steps + 1, steps[::-1] + 1, np.full_like(steps, 12)])
    counts = np.minimum(counts, train).astype(np.float64)
    readings = speed[: len(steps)].astype(np.float64)
    weights = counts / (counts.sum() * speed.shape[1])
    mean = np.einsum("t,tn->", weights, readings)
    variance = np.einsum("t,tn->", weights, (readings - mean) ** 2)
    return float(mean), float(np.sqrt(variance))


def week_slots(timestamps: np.ndarray) -> np.ndarray:
    """Five-minute slot of the week, Monday 00:00 = 0, of [T] datetime64 stamps."""
    monday = np.datetime64("1970-01-05", "ns")
    return ((timestamps - monday) // FIVE_MINUTES % (7 * 288)).astype(np.int32)


def time_of_day(timestamps: np.ndarray) -> np.ndarray:
    """Fraction of the day in [0, 1) of [T] datetime64 stamps."""
    day = np.timedelta64(1, "D")
    return ((timestamps - timestamps.astype("datetime64[D]")) / day).astype(np.float32)


def make_splits(
    dataset: TrafficDataset, fractions: Sequence[float] | None = None
) -> dict[str, TrafficData]:
    """Puts a dataset on the device: one `TrafficData` for each name in `SPLITS`.

    The splits share their arrays and differ only in `starts`. Of several devices each
    will hold its sensors' readings alone; until they are there, these stay on the host.

    Args:
      dataset: readings and graph.
      fractions: as for `split_sizes`; None takes those of the dataset.

    Raises:
      InputError: if the arrays do not fit together, a split would be empty, for other
        fractions, if all training readings are equal, rows are not evenly spaced, or
        the mesh that is set is not `mesh.make_mesh`'s.
    """
    network.check(dataset)
    fractions = dataset.fractions if fractions is None else fractions
    num_clients = dataset.speed.shape[1]
    mean, std = training_moments(dataset.speed, fractions)
    if not std > 1e-6 * abs(mean):  # equal but for rounding
        raise InputError(f"{dataset.name}: all training readings are equal")
    starts = split_starts(len(dataset.speed), fractions)
    speed = np.ascontiguousarray(dataset.speed.T, np.float32)
    shared = TrafficData(
        speed=speed,
        clock=jnp.asarray(time_of_day(dataset.timestamps)),
        week_slot=jnp.asarray(week_slots(dataset.timestamps)),
        starts=jnp.zeros(0, jnp.int32),
        mean=jnp.float32(mean),
        std=jnp.float32(std),
        graph=graphs.from_adjacency(dataset.adjacency),
        client_ids=jnp.arange(num_clients, dtype=jnp.int32),
        client_weights=jnp.full(num_clients, len(starts["train"]), jnp.float32),
        step=dataset.step,
    )
    shared = client_rows.to_device(shared)
    return {name: shared._replace(starts=jnp.asarray(starts[name])) for name in SPLITS}


def gather(data: TrafficData, speed: jax.Array, starts: jax.Array) -> Windows:
    """Gathers a batch of windows of one client.

    Args:
      data: supplies clock, mean and standard deviation.
      speed: [T] readings of the client.
      starts: [B] first steps.
    """
    steps = window_steps(starts)
    return of_readings(data, speed[steps], steps)


def of_readings(data: TrafficData, readings: jax.Array, steps: jax.Array) -> Windows:
    """Makes a batch of windows of one client from their readings.

    Args:
      data: supplies clock, mean and standard deviation.
      readings: [24, B] of the client.
      steps: [24, B] that they are of.
    """
    value = (readings - data.mean) / data.std
    windows = jnp.stack([value, data.clock[steps]], axis=-1)  # [24, B, 2]
    return Windows(windows[:INPUT_STEPS], windows[INPUT_STEPS:])


def window_steps(starts: jax.Array) -> jax.Array:
    """The steps [24, B] of the windows at `starts` [B]."""
    return starts + jnp.arange(WINDOW_STEPS)[:, None]


def target_steps(starts: jax.Array) -> jax.Array:
    """The steps [12, B] of the windows at `starts` [B] that are to be forecast."""
    return starts + INPUT_STEPS + jnp.arange(TARGET_STEPS)[:, None]


def truth(speed: jax.Array, starts: jax.Array) -> jax.Array:
    """What is to be forecast in the windows at `starts` [B], [12, B], as it was read.

    Args:
      speed: [T] readings of one client.
      starts: [B] first steps.
    """
    return speed[target_steps(starts)]
