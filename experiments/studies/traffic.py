"""What the studies of traffic networks share: the dataset, and how it is cut."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from experiments.studies.method_settings import MethodSettings
from experiments.studies.options import option
from experiments.studies.running import fingerprint
from fedjax_graph import data
from fedjax_graph.data.traffic import datasets, synthetic_flows
from fedjax_graph.data.traffic.network import TrafficDataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficStudy(MethodSettings):
    """A study whose dataset may be a traffic network."""

    subject: ClassVar[str] = "Data"

    num_sensors: int | None = option(
        None, "Cut the dataset to this many sensors.", lower=1
    )
    num_days: int | None = option(None, "Cut the dataset to its first days.", lower=1)

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        size = {"num_sensors": "all", "num_days": "all"}
        if self.network_name == "synthetic":
            size = {"num_sensors": 20, "num_days": 14}
        return super().in_effect() | size

    @property
    def network_name(self) -> str:
        """Name of the network; the synthetic one where none is given."""
        return self.dataset or "synthetic"

    def load_network(self, needs_graph: bool = True) -> TrafficDataset:
        """Loads, makes or cuts the network.

        Args:
          needs_graph: see `datasets.load`.

        Raises:
          InputError: one line, as in `datasets.load` and `datasets.cut`.
        """
        name = self.network_name
        size = {"num_sensors": self.num_sensors, "num_days": self.num_days}
        if name == "synthetic":
            given = {key: value for key, value in size.items() if value is not None}
            return data.load(name, kind="traffic", **given)
        if name in synthetic_flows.TWINS:
            days = size.pop("num_days")
            dataset = data.load(name, **({} if days is None else {"num_days": days}))
            return datasets.cut(dataset, **size)
        is_plugged_in = name in data.DATASETS and name not in datasets.PUBLISHED
        settings = {} if is_plugged_in else {"needs_graph": needs_graph}
        dataset = data.load(name, self.data_dir, kind="traffic", **settings)
        return datasets.cut(dataset, **size)


def time_checksum(dataset: TrafficDataset) -> dict[str, int]:
    """A checksum of the time stamps, which are inputs; see `running.run_method`."""
    stamps = dataset.timestamps.astype("M8[ns]").astype(np.int64)
    return {"time_stamps": fingerprint(stamps)}


def measures(dataset: TrafficDataset) -> dict[str, Any]:
    """What errors and horizons are measured in, for `settings` of `results.json`."""
    return {"unit": dataset.unit, "step_seconds": dataset.step.seconds}
