"""What FedStar shares; its numbers are compared in `test_openfgl_departures`."""

import jax
import pytest

from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.algorithms.fed_star import fed_star
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES

KEY, SIZE, STRUCTURE = jax.random.key(0), 4, 2
TASK = SubgraphTask(
    NUM_FEATURES,
    NUM_CLASSES,
    model="decoupled_gin",
    hidden_size=SIZE,
    structure_size=STRUCTURE,
)


def test_a_round_exchanges_the_structure_encoder():
    """A linear map of the encodings, and two graph convolutions."""
    train = client_graphs.make_splits()["train"]
    algorithm = fed_star(FedAvgConfig(TASK))
    state = jax.eval_shape(algorithm.init, KEY, train)
    cost = bytes_per_round(algorithm.round, state, train, KEY)
    weights = (STRUCTURE + 1) * SIZE + 2 * (SIZE + 1) * SIZE
    assert cost.up == cost.down == 4 * NUM_CLIENTS * weights
    rows = {name: x.shape[0] for name, x in of_kernels(state.models["params"])}
    assert rows.pop("structure_input") == 1
    assert {rows.pop(f"structure_{i}") for i in range(2)} == {1}
    assert set(rows.values()) == {NUM_CLIENTS}


def of_kernels(params):
    for name, layer in params.items():
        if not name.startswith("layer"):
            yield name, layer["kernel"]


@pytest.mark.parametrize(
    "task, match",
    [
        (SubgraphTask(NUM_FEATURES, NUM_CLASSES), "fed_star: the model of the task"),
        (
            SubgraphTask(NUM_FEATURES, NUM_CLASSES, model="decoupled_gin"),
            "structure_size=0 of 6 features: expected at least 1",
        ),
    ],
)
def test_a_model_without_structure_is_refused(task, match):
    with pytest.raises(InputError, match=match):
        fed_star(FedAvgConfig(task))
