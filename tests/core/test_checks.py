"""Configs that say in one line which of their values is wrong."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig
from fedjax_graph.algorithms.cnfgnn.gru_fmtl import GRUFMTLConfig
from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.algorithms.fl_agcns.fl_agcns import FLAGCNSConfig
from fedjax_graph.algorithms.fl_agcns.fl_gradient import FLGradientConfig
from fedjax_graph.algorithms.fl_agcns.fl_random import TrialConfig
from fedjax_graph.algorithms.fl_agcns.fl_rl import FLRLConfig
from fedjax_graph.algorithms.sfl.sfl import SFLConfig, SFLStarConfig
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.driver.rounds import RunConfig
from fedjax_graph.tasks.images import ImageTask
from fedjax_graph.tasks.nodes import NodeTask
from fedjax_graph.tasks.subgraphs import SubgraphTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask

TASK = ImageTask()


@dataclasses.dataclass(frozen=True)
class Sample(Checked):
    count: int = dataclasses.field(metadata=limits(lower=1, upper=9))
    share: float = limited(0.5, above=0, below=1)
    flag: bool = False
    word: str | None = None
    mode: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = limited((1,), lower=1, is_filled=True)
    pair: tuple[int, str] = (1, "a")
    kind: str = limited("x", choices={"x": 1, "y": 2})
    call: Callable[[int], int] = abs
    free: Any = None
    nested: OptimizerConfig | None = None
    row: Sequence[int] = limited((1,), lower=1)


RIGHT = [
    {"count": 9, "share": 1e-9},
    {"flag": True, "word": "", "mode": "b"},
    {"sizes": (1, 2, 3), "pair": (2, "b"), "kind": "y", "call": len},
    {"free": [3], "nested": OptimizerConfig(), "row": [2, 3]},
]
WRONG = [
    ("count", [0, 10, 1.0, 1.5, True, "1", None, np.array([1])]),
    ("share", [0, 0.0, 1, float("nan"), -0.1, False, "a", None]),
    ("flag", [0, 1, "no", None]),
    ("row", [[0], (1, 0), [1.0], "ab", 3, None]),
    ("word", [3, b"a", ("a",)]),
    ("mode", ["c", None, 1]),
    ("sizes", [(), 1, (0,), (1, 0), (1, 2.5), (True,), [1], None]),
    ("pair", [(1,), ("a", 1), (1, "a", 2)]),
    ("kind", ["z", None]),
    ("call", [3, None]),
    ("nested", ["adam", {"name": "adam"}, OptimizerConfig]),
]


@pytest.mark.parametrize("values", RIGHT)
def test_what_fits_stays_as_it_is(values):
    sample = Sample(**{"count": 3} | values)
    for name, value in values.items():
        assert getattr(sample, name) == value


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in WRONG for value in values]
)
def test_what_does_not_fit_is_refused_in_one_line(name, value):
    with pytest.raises(InputError) as raised:
        Sample(**{"count": 3, name: value})
    message = str(raised.value)
    assert message.startswith(f"Sample {name}") and "\n" not in message


def test_scalars_of_numpy_and_jax_become_pythons():
    own: Any = (np.int64(3), jnp.float32(0.25), np.True_)
    sample = Sample(*own, sizes=(np.int32(2), 3))
    assert sample == Sample(3, 0.25, True, sizes=(2, 3))
    assert hash(sample) == hash(Sample(3, 0.25, True, sizes=(2, 3)))
    types = [type(x) for x in (sample.count, sample.share, sample.flag)]
    assert types == [int, float, bool]


def test_a_traced_value_is_refused_and_a_config_may_be_made_while_tracing():
    def trace(x):
        with pytest.raises(InputError, match="Sample count="):
            Sample(x)
        return x * Sample(3).count

    assert jax.eval_shape(trace, 1).shape == ()


ROUNDS = {"num_rounds": 1}


@pytest.mark.parametrize(
    "config_type, values, message",
    [
        (
            FedAvgConfig,
            {"task": TASK, "participation": 2.0},
            "FedAvgConfig participation=2.0: expected a finite number, above 0, 1 or "
            "less",
        ),
        (FederatedConfig, {"task": TASK, "participation": "a"}, "participation='a'"),
        (FederatedConfig, {"task": TASK, "participation": 0.0}, "participation=0.0"),
        (FederatedConfig, {"task": TASK, "clients_per_chunk": 0}, "per_chunk=0: exp"),
        (FederatedConfig, {"task": None}, "task=None: expected a TaskConfig"),
        (FederatedConfig, {"task": "images"}, "task='images': expected a TaskConfig"),
        (
            FedAvgConfig,
            {"task": TASK, "server_optimizer": "adam"},
            "server_optimizer='adam': expected an OptimizerConfig or None",
        ),
        (
            FedAvgConfig,
            {"task": TASK, "aggregator": "zz"},
            "FedAvgConfig aggregator 'zz': unknown; known: median, weighted_mean",
        ),
        (TrafficRNNTask, {"hidden_size": 0}, "TrafficRNNTask hidden_size=0: expected"),
        (TrafficSeq2SeqTask, {"hidden_size": -1}, "hidden_size=-1: expected a whole"),
        (ImageTask, {"batch_size": 0}, "ImageTask batch_size=0: expected a whole"),
        (ImageTask, {"local_epochs": 0}, "local_epochs=0: expected a whole number, 1"),
        (ImageTask, {"optimizer": None}, "optimizer=None: expected an Optimizer"),
        (NodeTask, {"num_features": 3, "num_classes": 2, "dropout": 1}, "dropout=1: e"),
        (RunConfig, {"num_rounds": -1}, "RunConfig num_rounds=-1: expected"),
        (RunConfig, {"num_rounds": 1.5}, "num_rounds=1.5: expected a whole number"),
        (RunConfig, {"num_rounds": "a"}, "num_rounds='a': expected a whole number"),
        (RunConfig, ROUNDS | {"eval_every": 0}, "eval_every=0: expected"),
        (RunConfig, ROUNDS | {"patience": float("nan")}, "patience=nan: expected"),
        (RunConfig, ROUNDS | {"seeds": ()}, "seeds=(): expected a tuple, each a whole"),
        (RunConfig, ROUNDS | {"seeds": 3}, "seeds=3: expected a tuple"),
        (RunConfig, ROUNDS | {"seeds": (3, 3)}, "seeds=(3, 3): expected different"),
        (RunConfig, ROUNDS | {"seeds": (-1,)}, "seeds=(-1,): expected a tuple"),
    ],
)
def test_a_wrong_value_is_named_with_its_config(config_type, values, message):
    with pytest.raises(InputError) as raised:
        config_type(**values)
    assert message in str(raised.value)
    assert str(raised.value).startswith(config_type.__name__)


SEARCHED = {"num_features": 3, "num_classes": 2}
SENSELESS = [
    (CNFGNNConfig, {}, "hidden_size", 0),
    (CNFGNNConfig, {}, "gn_mlp_sizes", ()),
    (CNFGNNConfig, {}, "sampling_decay", 0.0),
    (CNFGNNConfig, {}, "exchange_bits", 7),
    (CNFGNNConfig, {}, "server_dtype", "int8"),
    (CNFGNNConfig, {}, "participation", 2.0),
    (GRUFMTLConfig, {}, "weight", -1.0),
    (SFLConfig, {"task": TASK}, "propagation_steps", -1),
    (SFLConfig, {"task": TASK}, "alpha", 7.0),
    (SFLStarConfig, {"task": TASK}, "learnt_share", -0.1),
    (StructureConfig, {}, "target", "zz"),
    (StructureConfig, {}, "num_neighbours", 0),
    (FLAGCNSConfig, SEARCHED, "population_size", 1),
    (FLAGCNSConfig, SEARCHED, "fitness", "zz"),
    (FLAGCNSConfig, SEARCHED, "client_share", 2.0),
    (FLAGCNSConfig, SEARCHED, "stages", (9, 9)),
    (FLAGCNSConfig, SEARCHED, "ops", ("APPNP", "GINConv")),
    (FLAGCNSConfig, SEARCHED, "server_optimizer", "adam"),
    (FLRLConfig, SEARCHED, "baseline_decay", 3.0),
    (FLGradientConfig, SEARCHED, "num_steps", 0),
    (TrialConfig, SEARCHED, "num_epochs", 0),
    (NodeTask, SEARCHED, "kind", "images"),
]


@pytest.mark.parametrize("config_type, values, field, value", SENSELESS)
def test_what_makes_no_sense_is_no_config(config_type, values, field, value):
    config_type(**values)
    with pytest.raises(InputError, match=f"{field}.*expected"):
        config_type(**values, **{field: value})


def test_a_subgraph_task_has_a_network_of_its_name():
    with pytest.raises(
        InputError, match="unknown subgraph model 'totally_wrong'; known: gat"
    ):
        SubgraphTask(3, 2, model="totally_wrong").build()


def test_a_config_of_ones_own_is_checked_as_the_librarys():
    @dataclasses.dataclass(frozen=True)
    class OwnConfig(FederatedConfig):
        strength: float = 1.0

    assert OwnConfig(TASK, strength=2).strength == 2
    for values, message in (
        ({"strength": "a"}, "OwnConfig strength='a': expected a finite number"),
        ({"participation": 2}, "OwnConfig participation=2: expected"),
    ):
        with pytest.raises(InputError, match=message):
            OwnConfig(TASK, **values)
