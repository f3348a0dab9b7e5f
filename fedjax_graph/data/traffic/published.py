"""Published sensor networks: how large they are and what their files are called.

METR-LA and PEMS-BAY are looked for also in the subfolders `METR-LA` or `PEMS-BAY` and
`sensor_graph`. Readings are taken from the first of `metr_la.npz`, `metr-la.h5` and
`metr-la.csv` (PEMS-BAY likewise), the graph of the latter two from `adj_mx.pkl`, else
from the road distances in `distances_la_2012.csv` (`adj_mx_bay.pkl`,
`distances_bay_2017.csv`), coordinates, where present, from `graph_sensor_locations.csv`
(`graph_sensor_locations_bay.csv`).

PEMSD4, of which the flow is forecast, is looked for likewise, also in the subfolders
`PEMS04` and `pems_d4_d8`: `pems_d4.npz`, `pems04.npz` or `PEMS04.npz`, the graph of the
latter two from the road distances in `PEMS04.distance.csv`, `PEMS04.csv`, or a
`distance.csv` in the folder of the readings (PEMSD8 with 8 in place of 4). Roads are
listed one way and used both ways. The lists hold roads between neighbours only, so the
threshold of `gaussian_kernel_adjacency` cuts many: 418 of 680 edges stay in PEMSD4, 270
of 548 in PEMSD8, and 67 and 48 sensors keep no edge but that to themselves.

PEMSD3 and PEMSD7 are STSGCN's, in files of the same form but for the channels:
`PEMS03.npz`, `PEMS03.csv` with roads between ids, and `PEMS03.txt` with the ids in the
order of the readings; `PEMS07.npz` and `PEMS07.csv` between sensors 0 to 882. 884 of
the 1092 edges stay in PEMSD3, 1580 of 1732 in PEMSD7, and 15 and 27 sensors keep none
but that to themselves. PEMSD7's readings cover 98 days and are taken to follow each
other from its first day, 2017-05-01, on; the span given for it, to 2017-08-31, is 123
days.

LargeST's networks (`largest_sd`, `largest_gba`, `largest_gla`, `largest_ca`) are read
from the publisher's files of California or of the part, see `largest`; looked for also
in the subfolders `sd`, `ca`, `LargeST/sd`, `LargeST/ca` and `LargeST`.
"""

from typing import NamedTuple

from fedjax_graph.core.batching import FRACTIONS

_FLOW = "vehicles / 5 min"


class Published(NamedTuple):
    """A published dataset: its size, and the names of its files."""

    description: str
    num_sensors: int
    num_steps: int
    readings: tuple[str, ...]  # the first to be found is read
    graphs: tuple[str, ...] = ()  # likewise; not needed beside a .npz file
    coordinates: tuple[str, ...] = ()  # likewise; may be absent, but for LargeST
    ids: tuple[str, ...] = ()  # likewise: sensor ids, where no other file has them
    subfolders: tuple[str, ...] = ()  # of the data folder, looked into as well
    notes: tuple[str, ...] = ()
    start: str = ""  # time of the first row, where the readings have no time stamps
    num_channels: int = 3  # of readings without time stamps; the first is the flow
    unit: str = "mph"
    fractions: tuple[float, float, float] = FRACTIONS  # train, validation and test
    districts: tuple[int, ...] = ()  # of LargeST: those of PeMS that it is made of


def _largest(part: str, place: str, num_sensors: int, *districts: int) -> Published:
    """A network of LargeST; its files are those of the part or of all California."""
    parts = dict.fromkeys((part, "ca"))
    processed = tuple(f"{own}_his_2019.h5" for own in parts)
    return Published(
        f"LargeST {part.upper()}: 15-minute means of flow at {num_sensors} loop "
        f"detectors, {place}, 2019",
        num_sensors=num_sensors,
        num_steps=365 * 96,
        readings=(f"largest_{part}.npz", *processed, "ca_his_raw_2019.h5"),
        graphs=tuple(f"{own}_rn_adj.npy" for own in parts),
        coordinates=tuple(f"{own}_meta.csv" for own in parts),
        subfolders=(*parts, *(f"LargeST/{own}" for own in parts), "LargeST"),
        unit=_FLOW,
        fractions=(0.6, 0.2, 0.2),
        districts=districts,
    )


PUBLISHED = {
    "metr_la": Published(
        "METR-LA: 207 loop detectors, Los Angeles, 119 days of 2012",
        num_sensors=207,
        num_steps=34272,
        readings=("metr_la.npz", "metr-la.h5", "metr-la.csv"),
        graphs=("adj_mx.pkl", "distances_la_2012.csv"),
        coordinates=("graph_sensor_locations.csv",),
        subfolders=("METR-LA", "sensor_graph"),
    ),
    "pems_bay": Published(
        "PEMS-BAY: 325 loop detectors, San Francisco Bay Area, 181 days of 2017",
        num_sensors=325,
        num_steps=52116,
        readings=("pems_bay.npz", "pems-bay.h5", "pems-bay.csv"),
        graphs=("adj_mx_bay.pkl", "distances_bay_2017.csv"),
        coordinates=("graph_sensor_locations_bay.csv",),
        subfolders=("PEMS-BAY", "sensor_graph"),
    ),
    "pems_bay_subset": Published(
        "67 of the 325 sensors of PEMS-BAY, on five freeways",
        num_sensors=67,
        num_steps=52116,
        readings=("pems_bay_subset.npz",),
        notes=(
            "67 of the 325 sensors of PEMS-BAY: not comparable with published results",
        ),
    ),
    "pems_d3": Published(
        "PEMSD3: flow at 358 loop detectors, North Central California, 91 days of 2018",
        num_sensors=358,
        num_steps=26208,
        readings=("pems_d3.npz", "PEMS03.npz", "pems03.npz"),
        graphs=("PEMS03.csv", "PEMS03.distance.csv"),
        ids=("PEMS03.txt",),
        subfolders=("PEMS03",),
        start="2018-09-01T00:00",
        num_channels=1,
        unit=_FLOW,
    ),
    "pems_d4": Published(
        "PEMSD4: flow at 307 loop detectors, San Francisco Bay Area, 59 days of 2018",
        num_sensors=307,
        num_steps=16992,
        readings=("pems_d4.npz", "pems04.npz", "PEMS04.npz"),
        graphs=("PEMS04.distance.csv", "PEMS04.csv"),
        subfolders=("PEMS04", "pems_d4_d8"),
        start="2018-01-01T00:00",
        unit=_FLOW,
    ),
    "pems_d7": Published(
        "PEMSD7: flow at 883 loop detectors, Los Angeles, 98 days of 2017",
        num_sensors=883,
        num_steps=28224,
        readings=("pems_d7.npz", "PEMS07.npz", "pems07.npz"),
        graphs=("PEMS07.csv", "PEMS07.distance.csv"),
        subfolders=("PEMS07",),
        start="2017-05-01T00:00",
        num_channels=1,
        unit=_FLOW,
    ),
    "pems_d8": Published(
        "PEMSD8: flow at 170 loop detectors, San Bernardino, 62 days of 2016",
        num_sensors=170,
        num_steps=17856,
        readings=("pems_d8.npz", "pems08.npz", "PEMS08.npz"),
        graphs=("PEMS08.distance.csv", "PEMS08.csv"),
        subfolders=("PEMS08", "pems_d4_d8"),
        start="2016-07-01T00:00",
        unit=_FLOW,
    ),
    "largest_sd": _largest("sd", "San Diego", 716, 11),
    "largest_gba": _largest("gba", "Greater Bay Area", 2352, 4),
    "largest_gla": _largest("gla", "Greater Los Angeles", 3834, 7, 8, 12),
    "largest_ca": _largest("ca", "California", 8600, 3, 4, 5, 6, 7, 8, 10, 11, 12),
}
