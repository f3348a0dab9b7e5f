"""Traffic networks of which some sensors are not seen in training.

Inductive learning as in Meng, Rambhatla, Liu, "Cross-Node Federated Graph Neural
Network for Spatio-Temporal Data Modeling", KDD 2021, Section 4.2: training on the
subgraph of the first sensors by longitude, tests on the whole graph.
"""

import jax.numpy as jnp
import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import network, windows
from fedjax_graph.data.traffic.network import TrafficDataset
from fedjax_graph.data.traffic.windows import TrafficData


def first_by_longitude(dataset: TrafficDataset, fraction: float) -> np.ndarray:
    """Which sensors are seen: a share of them, from west to east.

    The number is rounded, halves to even; of equal longitudes the first sensor comes
    first.

    Args:
      dataset: N sensors with coordinates.
      fraction: share in (0, 1).

    Returns:
      [N] bool.

    Raises:
      InputError: if there are no coordinates, or no sensor would be seen or unseen.
    """
    if dataset.longitude is None or dataset.latitude is None:
        raise InputError(
            f"{dataset.name}: no latitude and longitude of the sensors, by which those "
            "to train on are chosen"
        )
    num_sensors = len(dataset.sensor_ids)
    num_seen = round(fraction * num_sensors)
    if not 0 < num_seen < num_sensors:
        raise InputError(
            f"{dataset.name}: a share of {fraction:g} is {num_seen} of {num_sensors} "
            "sensors; at least one has to be seen in training and one unseen"
        )
    is_seen = np.zeros(num_sensors, bool)
    is_seen[np.argsort(dataset.longitude, kind="stable")[:num_seen]] = True
    return is_seen


def make_splits(
    dataset: TrafficDataset, is_seen: np.ndarray
) -> tuple[dict[str, TrafficData], dict[str, TrafficData]]:
    """`windows.make_splits` of the seen sensors, and of all sensors to score on.

    Both have the mean and standard deviation of the seen sensors' training windows, and
    a sensor has the same client id in both.

    Args:
      dataset: N sensors.
      is_seen: [N] bool.

    Raises:
      InputError: as `windows.make_splits`, or if `is_seen` is no mask of the sensors.
    """
    network.check_mask("is_seen", is_seen, len(dataset.sensor_ids))
    seen = np.flatnonzero(is_seen)
    part = windows.make_splits(network.take_sensors(dataset, seen))
    whole = windows.make_splits(dataset)
    moments = {"mean": part["train"].mean, "std": part["train"].std}
    ids = jnp.asarray(seen, jnp.int32)
    return (
        {name: data._replace(client_ids=ids) for name, data in part.items()},
        {name: data._replace(**moments) for name, data in whole.items()},
    )


def views(whole: TrafficData, is_seen: np.ndarray) -> dict[str, TrafficData]:
    """The whole graph three times: scored on `all`, `seen` and `unseen` sensors.

    Sensors that are not scored have weight 0; they stay in the graph.

    Raises:
      InputError: if `is_seen` is no mask of the sensors.
    """
    network.check_mask("is_seen", is_seen, len(whole.client_ids))
    masks = {"all": np.ones_like(is_seen), "seen": is_seen, "unseen": ~is_seen}
    return {
        name: whole._replace(client_weights=whole.client_weights * mask)
        for name, mask in masks.items()
    }
