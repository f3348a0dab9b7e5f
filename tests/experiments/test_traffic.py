"""What studies make of a traffic network: its days, its sensors, its split."""

import pytest

from experiments.studies import sfl_problem
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.sfl import SFLStudy
from fedjax_graph.data.traffic import datasets, synthetic_flows

TWIN = "synthetic_largest_sd"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    published = datasets.PUBLISHED["largest_sd"]._replace(num_sensors=24)
    monkeypatch.setitem(datasets.PUBLISHED, "largest_sd", published)
    monkeypatch.setitem(synthetic_flows.NUM_EDGES, "largest_sd", 60)


def test_a_twin_is_made_for_some_days_and_cut_to_some_sensors():
    study = CNFGNNStudy(dataset=TWIN, num_days=2, num_sensors=5)
    network = study.load_network()
    assert network.speed.shape == (192, 5)
    assert network.notes[1:] == ("cut to 5 of 24 sensors, grown from the first one",)


@pytest.mark.parametrize(
    ("ratio", "sizes"), [(None, [101, 34, 34]), ("70/10/20", [118, 17, 34])]
)
def test_sfl_splits_as_the_dataset_says_unless_told(ratio, sizes):
    study = SFLStudy(dataset=TWIN, num_days=2, num_sensors=4, split_ratio=ratio)
    splits = sfl_problem.traffic_problem(study).splits
    assert [len(data.starts) for data in splits.values()] == sizes
