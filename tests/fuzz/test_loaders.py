"""A few hundred damaged files; the nightly script reads a hundred thousand."""

import pytest

from tests.fuzz.inputs import Inputs

SEED, NUM_INPUTS = 19, 20  # of each case
CASES = (
    *("traffic_npz", "distances_npz", "stamps_npz", "own_csv", "own_weights"),
    *("hdf", "csv", "sensor_graph", "roads", "ids"),
    *("pems", "largest_flows", "largest_sensors", "largest_adjacency"),
    *("compact_graph", "benchmark_graph", "geometric_graph", "edges_csv"),
    *("features_csv", "planetoid_allx", "planetoid_ally"),
    *("planetoid_graph", "planetoid_test.index", "planetoid_dense"),
    *("products_edge", "products_node-feat", "products_num-node-list"),
    *("images_npz", "cifar_batch", "cifar_meta", "cifar_archive"),
    *("pretrained", "network", "results", "metrics"),
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    found = Inputs(tmp_path_factory.mktemp("corpus"), SEED)
    assert tuple(found.cases) == CASES
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused_in_one_line(inputs, name):
    outcomes = {number: inputs.outcome(name, number) for number in range(NUM_INPUTS)}
    strange = {n: x for n, x in outcomes.items() if x not in ("read", "refused")}
    assert not strange
    assert "refused" in outcomes.values()
