"""What tests of several searches share: the clients' parts of a graph, and resuming."""

import pytest

from fedjax_graph.driver import rounds
from fedjax_graph.driver.rounds import RunConfig
from tests import client_graphs


@pytest.fixture(scope="module")
def splits():
    return client_graphs.make_splits()


@pytest.fixture(scope="module")
def train(splits):
    return splits["train"]


@pytest.fixture
def cut_and_whole(tmp_path, splits):
    """(algorithm, *round numbers) -> results of a search stopped there, and of one run.

    The last number is that of both ends.
    """

    def run(algorithm, *stops):
        def search(workdir, num_rounds, resume=False):
            settings = RunConfig(num_rounds, keep_last=True, seeds=(3,))
            return rounds.run(
                "fl_agcns", algorithm, splits, settings, workdir, {}, resume=resume
            )

        whole = search(None, stops[-1])
        for i, stop in enumerate(stops):
            cut = search(tmp_path, stop, resume=i > 0)
        return cut, whole

    return run
