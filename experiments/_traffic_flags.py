"""Flags of the binaries that run on traffic networks, and the dataset they name."""

from absl import flags

from experiments import _flags
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import synthetic
from fedjax_graph.data.traffic.network import TrafficDataset

NUM_SENSORS = flags.DEFINE_integer(
    "num_sensors", None, "Cut the dataset to this many sensors.", lower_bound=1
)
NUM_DAYS = flags.DEFINE_integer(
    "num_days", None, "Cut the dataset to its first days.", lower_bound=1
)


def dataset_name() -> str:
    return _flags.DATASET.value or "synthetic"


def num_readings() -> int:
    """Readings of the dataset as the flags alone tell; 0 for a user's own file."""
    name = dataset_name()
    if name == "synthetic":
        num_sensors, num_steps = 20, 14 * 288
    elif name in traffic.PUBLISHED:
        num_sensors = traffic.PUBLISHED[name].num_sensors
        num_steps = traffic.PUBLISHED[name].num_steps
    else:
        num_sensors = num_steps = 0
    num_sensors = NUM_SENSORS.value or num_sensors
    return num_sensors * (NUM_DAYS.value * 288 if NUM_DAYS.value else num_steps)


def load_dataset(needs_graph: bool = True) -> TrafficDataset:
    """Loads, makes or cuts the dataset that the flags name.

    Args:
      needs_graph: see `traffic.load`.

    Raises:
      InputError: one line, as in `traffic.load` and `traffic.cut`.
    """
    size = {"num_sensors": NUM_SENSORS.value, "num_days": NUM_DAYS.value}
    if dataset_name() == "synthetic":
        return synthetic.traffic_network(
            **{key: value for key, value in size.items() if value is not None}
        )
    dataset = traffic.load(dataset_name(), _flags.DATA_DIR.value, needs_graph)
    return traffic.cut(dataset, **size)
