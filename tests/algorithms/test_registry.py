"""The table of methods, and configs from values as they stand in a file."""

import dataclasses
import json

import numpy as np
import pytest

from fedjax_graph import algorithms
from fedjax_graph.algorithms import get_method, make_config, register_method
from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.core import aggregation, configs
from fedjax_graph.core.aggregators import register_aggregator
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.privacy import Privacy
from fedjax_graph.core.registry import Lazy, Registry
from fedjax_graph.driver.writers import to_jsonable
from fedjax_graph.tasks import register_task
from fedjax_graph.tasks.images import ImageTask
from tests import tables
from tests.algorithms.quadratic import QuadraticTask

SIZES = {"num_features": 6, "num_classes": 3}


@pytest.fixture(autouse=True)
def own_tables():
    with tables.kept():
        yield


# --- Registry ------------------------------------------------------------------------


def test_a_lazy_value_is_made_once_and_on_first_use():
    made = []

    def make():
        made.append(1)
        return "value"

    table = Registry("thing", {"late": Lazy(make), "now": "here"})
    assert list(table) == ["late", "now"] and "late" in table and not made
    assert (table["late"], table.look_up("late"), made) == ("value", "value", [1])
    assert dict(table) == {"late": "value", "now": "here"}


@pytest.mark.parametrize(
    ("name", "runs"), [("fed_prox", True), ("moon", True), ("fed_sgd", False)]
)
def test_a_method_runs_on_a_task_that_has_what_it_needs(name, runs):
    assert get_method(name).runs_on(ImageTask()) == runs
    assert not get_method("cnfgnn").runs_on(ImageTask())  # takes no task


def test_a_name_is_registered_once():
    table = Registry("thing", {"old": 1})
    assert table.register("new", 2) == 2
    assert table.register("newer")(3) == 3
    assert dict(table) == {"old": 1, "new": 2, "newer": 3}
    for name in ("old", "new"):
        with pytest.raises(InputError, match=f"thing '{name}' is taken"):
            table.register(name, 4)
    assert table["old"] == 1
    with pytest.raises(InputError, match="unknown thing 'x'; known: old, new, newer"):
        table.look_up("x")
    with pytest.raises(KeyError):
        table["x"]


BAD_NAMES = ["", ".", "..", "../../esc", "a/b", "a,b", "a b", "a\n", "é", None, 3, []]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_plain_word_is_refused(name):
    table = Registry("thing", {})
    for register in (table.register, lambda name: table.register(name, 1)):
        with pytest.raises(InputError, match="thing name .*: expected letters"):
            register(name)
    with pytest.raises(InputError, match="method name .*: expected letters"):
        register_method(name, lambda config: config, OwnConfig)
    with pytest.raises(InputError, match="unknown thing"):
        table.look_up(name)
    assert not len(table) and table.register("A-b_c.1+", 1) == 1


def test_what_is_called_has_to_be_callable():
    with pytest.raises(InputError, match="aggregator 'one': 1 cannot be called"):
        register_aggregator("one", 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="method 'one': 1 cannot be called"):
        register_method("one", 1, OwnConfig)  # pyright: ignore


def test_a_users_own_method_is_told_from_the_librarys():
    register_method("own", get_method("fed_avg").factory, OwnConfig)
    assert algorithms.is_users("own")
    get_method("fed_sgd")
    assert not any(map(algorithms.is_users, ("fed_avg", "fed_sgd", "nobodys")))


# --- Methods -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OwnConfig(FederatedConfig):
    strength: float = 1.0


def algorithm_of(*found):
    return FederatedAlgorithm(*found, evaluate=None, predict=None)


def test_a_method_of_ones_own_is_registered_by_a_decorator_or_a_call():
    @register_method("own", title="Own method")
    def own(config: OwnConfig):
        return algorithm_of("own", config.strength)

    def other(config):
        return algorithm_of("other", config.strength)

    assert register_method("other", other, OwnConfig, is_trained=False) is other
    first, second = get_method("own"), get_method("other")
    assert (first.title, first.config_type, first.is_trained) == (
        "Own method",
        OwnConfig,
        True,
    )
    assert (second.title, second.config_type, second.is_trained) == (
        "other",
        OwnConfig,
        False,
    )
    assert first.takes_task
    config = make_config("own", {"task": {"kind": "images"}, "strength": 2.0})
    assert config == OwnConfig(ImageTask(), strength=2.0)
    assert get_method("own").factory(config) == algorithm_of("own", 2.0)
    assert algorithms.method_names()[-2:] == ("own", "other")


@pytest.mark.parametrize("name", ["fed_avg", "own"])
def test_a_name_that_is_taken_is_refused(name):
    register_method("own", lambda config: config, OwnConfig)
    with pytest.raises(InputError, match=f"method '{name}' is taken"):
        register_method(name, lambda config: config, OwnConfig)


def test_a_method_without_a_config_is_refused():
    def factory(config: int):
        return config

    for own in (factory, lambda config: config):
        with pytest.raises(InputError, match="'own': its config has to be a dataclass"):
            register_method("own", own)
    assert "own" not in algorithms.REGISTRY


def test_a_config_of_another_method_is_refused():
    for config, found in (
        (FederatedConfig(ImageTask()), "FederatedConfig"),
        (3, "int"),
    ):
        with pytest.raises(InputError) as raised:
            get_method("fed_avg").factory(config)
        message = f"method 'FedAvg': expected a FedAvgConfig, found a {found}"
        assert str(raised.value) == message


def test_every_method_has_a_title_of_its_own():
    titles = [method.title for method in algorithms.REGISTRY.values()]
    assert all(titles) and len(set(titles)) == len(titles)


# --- Configs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("fed_avg", {"proximal_weight": 1.0}, "fed_avg: no field 'proximal_weight'"),
        ("cnfgnn", {"num_hidden": 3}, "cnfgnn: no field 'num_hidden'; known: "),
        (
            "fed_avg",
            {"task": {"kind": "nodes", **SIZES, "depth": 3}},
            "fed_avg.task: no field 'depth'",
        ),
        (
            "fed_avg",
            {"task": {"kind": "nodes", "num_features": 3}},
            "fed_avg.task: the field 'num_classes' has no default",
        ),
        ("fed_avg", {"task": {"kind": "node"}}, "fed_avg.task: unknown kind 'node'"),
        ("fed_avg", {"task": {}}, "fed_avg.task: unknown kind None; known: images, "),
        (
            "fed_avg",
            {"task": "images"},
            "fed_avg.task: 'images' found, expected",
        ),
        ("fed_avg", {}, "fed_avg: the field 'task' has no default"),
        (
            "sfl_star",
            {"task": {"kind": "images"}, "structure": {"size": 3}},
            "sfl_star.structure: no field 'size'",
        ),
    ],
)
def test_what_is_no_field_is_refused_by_name(name, values, words):
    with pytest.raises(InputError) as raised:
        make_config(name, values)
    assert str(raised.value).startswith(words)


def test_unknown_methods_have_no_config():
    with pytest.raises(InputError, match="unknown method 'fed_avgs'"):
        make_config("fed_avgs", {})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sfl_star", {"task": {"kind": "images"}, "structure": {"embedding_size": 3}}),
        ("cnfgnn", {"gn_mlp_sizes": [6, 6, 6]}),
        ("fed_sgd", {"task": {"kind": "subgraphs", **SIZES, "code": [1, 2, 3]}}),
        ("fl_gradient", SIZES | {"architecture_optimizer": {"name": "sgd"}}),
        ("fl_random", SIZES | {"stages": [3, 0]}),
    ],
)
def test_a_config_comes_back_from_json(name, values):
    config = make_config(name, values)
    text = json.dumps(to_jsonable(dataclasses.asdict(config)))
    again = make_config(name, json.loads(text))
    assert again == config
    assert hash(again) == hash(config)  # no lists, at any depth


@dataclasses.dataclass(frozen=True)
class Nested:
    optimizer: OptimizerConfig
    other: OptimizerConfig | None = None
    several: tuple[OptimizerConfig, ...] = ()
    pair: tuple[int, OptimizerConfig] | None = None
    plain: dict | None = None


def test_a_dict_becomes_what_its_fields_type_names():
    adam, sgd = {"name": "adam"}, {"learning_rate": 0.5}
    config = configs.from_dict(
        Nested,
        {
            "optimizer": adam,
            "other": OptimizerConfig("yogi"),
            "several": [adam, sgd],
            "pair": [3, sgd],
            "plain": {"name": "adam"},
        },
    )
    half = OptimizerConfig(learning_rate=0.5)
    assert config == Nested(
        OptimizerConfig("adam"),
        OptimizerConfig("yogi"),
        (OptimizerConfig("adam"), half),
        (3, half),
        {"name": "adam"},
    )
    other = configs.from_dict(Nested, {"optimizer": adam, "other": sgd})
    assert (other.other, other.pair) == (half, None)
    with pytest.raises(InputError, match=r"Nested\.several\[1\]: no field 'rate'"):
        configs.from_dict(Nested, {"optimizer": adam, "several": [sgd, {"rate": 1}]})


def test_known_fields_are_chosen_where_that_is_asked_for():
    values = {"strength": 2.0, "sampling_decay": 3.0, "participation": 0.5}
    chosen = configs.known_fields(OwnConfig, values)
    assert chosen == {"strength": 2.0, "participation": 0.5}


def test_a_task_of_ones_own_is_built_by_its_kind():
    @register_task
    @dataclasses.dataclass(frozen=True)
    class OwnTask:
        kind: str = "own"
        width: int = 3

        def build(self):
            raise NotImplementedError

    config = make_config("local", {"task": {"kind": "own", "width": 5}})
    assert config.task == OwnTask(width=5)
    with pytest.raises(InputError, match="task 'own' is taken"):
        register_task(OwnTask)


def test_a_method_that_ignores_the_privacy_of_its_config_is_refused():
    @register_method("careless")
    def careless(config: FederatedConfig) -> FederatedAlgorithm:
        return FederatedAlgorithm(*[None] * 4)  # pyright: ignore[reportArgumentType]

    config = FederatedConfig(ImageTask(), privacy=Privacy(noise_multiplier=1.0))
    with pytest.raises(InputError, match="'careless': privacy is promised and"):
        get_method("careless").factory(config)


@pytest.mark.parametrize("made", [None, aggregation.none])
def test_a_factory_that_makes_no_algorithm_is_one_line(made):
    def factory(config: FedAvgConfig):
        return made

    register_method("makes_nothing", factory, title="Nothing")
    with pytest.raises(InputError, match="factory returned a .* expected a Federa"):
        get_method("makes_nothing").factory(FedAvgConfig(QuadraticTask()))


def test_weights_are_no_cohort():
    with pytest.raises(InputError, match="expected a Cohort, found a .*_replace"):
        aggregation.weighted_mean({"w": np.ones((2, 3))}, np.ones(2))
