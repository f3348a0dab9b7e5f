"""The study of subgraphs: what it runs, refuses and leaves."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import numpy.testing as npt
import pytest

from experiments.studies import running, subgraphs_output
from experiments.studies.subgraphs import (
    METHODS,
    NETWORKS,
    SubgraphStudy,
    registered_name,
)
from experiments.studies.subgraphs_problem import make_problem
from fedjax_graph.algorithms import register_method
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import client_state
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.spread_rows import SpreadRows
from fedjax_graph.data.graphs import client_subgraphs
from fedjax_graph.data.graphs.partitions import PARTITIONS
from tests import tables

SMALL = {"num_rounds": 2, "num_clients": 3}
PLUGIN = """
import flax.linen as nn
from fedjax_graph.tasks.subgraphs import register_model

class Perceptron(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, graph, mask=None, is_training=False):
        return nn.Dense(self.num_classes, name="head")(graph.nodes)

@register_model("my_model")
def my_model(task):
    return Perceptron(task.num_classes)
"""


@pytest.fixture(scope="module")
def default_problem():
    return make_problem(SubgraphStudy())


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("run") / "workdir")
    methods = ("fed_avg", "gcn")
    study = SubgraphStudy(methods=methods, hidden_size=4, workdir=folder, **SMALL)
    entries = study.run()
    return folder, entries


def test_a_run_leaves_scores_and_pictures(entries):
    folder, found = entries
    results = json.loads(pathlib.Path(folder, "results.json").read_text())
    assert list(results["methods"]) == list(found) == ["fed_avg", "gcn"]
    assert results["settings"]["subgraphs"]["num_clients"] == 3
    for entry in found.values():
        assert 0 < entry["test"]["accuracy"] <= 100
    assert found["fed_avg"]["config"]["task"]["local_steps"] == 3
    for name in ("convergence.png", "training_curves.png"):
        assert pathlib.Path(folder, name).read_bytes()[:4] == b"\x89PNG"


def test_clients_that_train_on_nothing_are_named(default_problem):
    assert default_problem.notes() == ()
    owners, split = default_problem.parts.owners, default_problem.split
    idle = split._replace(train=split.train[owners[split.train] != 0])
    (note,) = default_problem._replace(split=idle).notes()
    assert note.startswith("1 of ") and "train on nothing" in note


def test_a_run_is_resumed_and_scored(entries, capsys):
    folder, found = entries
    resumed = SubgraphStudy(methods=("gcn",), workdir=folder, resume=True, **SMALL)
    assert resumed.run()["gcn"]["test"] == found["gcn"]["test"]
    scored = SubgraphStudy(methods=("gcn",), workdir=folder, eval_only=True, **SMALL)
    assert scored.run()["gcn"]["test"] == found["gcn"]["test"]
    assert "GCN" in capsys.readouterr().out


def test_methods_of_an_earlier_command_keep_its_flags(tmp_path, capsys):
    settings = {"num_clients": 3, "workdir": str(tmp_path)}
    first = SubgraphStudy(methods=("gcn",), num_rounds=1, **settings)
    first.run()
    assert "note: gcn" not in capsys.readouterr().out
    then = SubgraphStudy(methods=("sgc",), num_rounds=2, resume=True, **settings)
    assert list(then.run()) == ["sgc"]
    note = "note: gcn: on record from a command with --num_rounds=1\n"
    assert note in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["methods"]["gcn"]["flags"] == first.record()
    assert found["methods"]["gcn"]["command"] == first.command()
    assert "flags" not in found["methods"]["sgc"]
    assert found["settings"]["flags"] == then.record()
    page = (tmp_path / "report.html").read_text()
    assert first.command() in page and then.command() in page
    dataclasses.replace(first, resume=True).run()
    found = json.loads((tmp_path / "results.json").read_text())["methods"]
    assert [name for name in found if "flags" in found[name]] == ["sgc"]


@pytest.mark.parametrize(("model", "size"), [("sgc", None), ("gcn", 64)])
def test_a_network_without_hidden_units_is_built_too(model, size, default_problem):
    study = SubgraphStudy(model=model)
    values = study.method_values("fed_avg", default_problem)
    assert values["task"].hidden_size == size
    running.build("fed_avg", values | {"clients_per_chunk": 1})


def test_networks_that_methods_bring_have_as_many_units_too(default_problem):
    settings = ("fed_sage_plus.generator.latent_size=7",)
    study = SubgraphStudy(
        methods=("ada_fgl", "fed_sage_plus"), hidden_size=12, method_settings=settings
    )
    path = pathlib.Path("no-run")
    config, _ = running.build(
        "ada_fgl", study._values("ada_fgl", default_problem, path)
    )
    assert config.hidden_size == 12
    values = study._values("fed_sage_plus", default_problem, path)
    generator = running.build("fed_sage_plus", values)[0].generator
    assert (generator.hidden_size, generator.latent_size) == (12, 7)


def test_the_size_of_ada_fgls_networks_matters_beside_a_network_without_units():
    study = SubgraphStudy(methods=("ada_fgl",), model="sgc", hidden_size=32)
    assert study.chosen_methods() == ["ada_fgl"]


def test_a_fixed_network_steps_as_the_options_say(default_problem):
    study = SubgraphStudy(learning_rate=0.05, weight_decay=0.001)
    found = study.method_values("gcn", default_problem)["server_optimizer"]
    assert found == OptimizerConfig("adam", 0.05, weight_decay=0.001)


@pytest.mark.parametrize(
    ("options", "expected", "first_order"),
    [
        ({}, OptimizerConfig("sgd", 0.1, weight_decay=5e-4), False),
        (
            {"learning_rate": 0.01, "weight_decay": 0.0},  # Adam's default
            OptimizerConfig("sgd", 0.01),
            False,
        ),
        (
            {"client_optimizer": "adam"},
            OptimizerConfig("adam", 0.01, weight_decay=5e-4),
            True,  # the root of its moments has no derivative at 0
        ),
        (
            {"client_optimizer": "yogi,learning_rate=0.02"},
            OptimizerConfig("yogi", 0.02, weight_decay=5e-4),
            True,
        ),
        (
            {"client_optimizer": "sgd,learning_rate=0.3"},
            OptimizerConfig("sgd", 0.3, weight_decay=5e-4),
            False,
        ),
    ],
)
def test_graphfls_clients_step_by_plain_gradients(
    options, expected, first_order, default_problem
):
    """As Eq. 5 has it, and by derivatives of the second order, where none is given."""
    values = SubgraphStudy(**options).method_values("graphfl", default_problem)
    assert values["task"].optimizer == expected
    assert values["first_order"] == first_order
    running.build("graphfl", values | {"clients_per_chunk": 1})


@pytest.mark.parametrize("method", [m for m in METHODS if m != "graphfl"])
def test_clients_moments_go_on_where_a_method_can_keep_them(method, default_problem):
    """As OpenFGL's do, unless the command says what clients step with."""
    study, anew = SubgraphStudy(), SubgraphStudy(client_optimizer="adam")
    values = study.method_values(method, default_problem)
    steps = values["task"].optimizer
    assert steps.stateful == (method not in NETWORKS)
    forgets = method in ("fed_avg_m", "fed_dc")
    assert steps.momentum == (0 if forgets else None)
    assert dataclasses.replace(steps, stateful=False, momentum=None) == (
        anew.method_values(method, default_problem)["task"].optimizer
    )
    running.build(registered_name(method), values | {"clients_per_chunk": 1})


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedConfig(FedAvgConfig):
    """Of a user's, with a field that has no default."""

    bound: float


def test_a_method_of_ones_own_steps_as_fedavg_does(default_problem, tmp_path):
    """A copy of FedAvg is FedAvg; one that keeps no state of clients begins anew."""

    def restarting(config: FedAvgConfig):
        client_state.build_stateless(config.task, "restarting")
        return fed_avg(config)

    def building(config: BoundedConfig):  # the task itself
        return fed_avg(config)._replace(client_data=config.task.build().client_data)

    with tables.kept():
        register_method("my_avg", fed_avg, FedAvgConfig)
        register_method("restarting", restarting, FedAvgConfig)
        values = {
            name: SubgraphStudy().method_values(name, default_problem)
            for name in ("fed_avg", "my_avg", "restarting")
        }
        running.build("restarting", values["restarting"])
        register_method("building", building, BoundedConfig)
        settings = {"method_settings": ("building.bound=0.5",)}
        study = SubgraphStudy(methods=("building",), **settings)
        own = study._values("building", default_problem, tmp_path)
        config, _ = running.build("building", own)
    assert config.bound == 0.5
    assert not config.task.optimizer.stateful
    assert values["my_avg"] == values["fed_avg"]
    assert values["fed_avg"]["task"].optimizer.stateful
    assert not values["restarting"]["task"].optimizer.stateful


def test_a_model_of_a_plugin_is_trained(tmp_path):
    """On arrays, also where the library's models get sparse features.

    It is chosen by name; models that methods bring are no choice.
    """
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    settings = {"methods": ("fed_avg",), "num_rounds": 1, "num_clients": 3}
    with tables.kept():
        study = SubgraphStudy(
            model="my_model",
            plugin=(str(plugin),),
            workdir=str(tmp_path / "run"),
            **settings,
        )
        entry = study.run()["fed_avg"]
    assert entry["config"]["task"]["model"] == "my_model"
    for name in ("my_model", "decoupled_gin"):
        with pytest.raises(InputError, match=f"--model={name}: unknown; known: gat, "):
            SubgraphStudy(model=name, workdir=str(tmp_path / "no"), **settings).run()


@pytest.mark.parametrize("method", METHODS)
def test_features_are_spread_once_where_nothing_else_reads_them(
    method, default_problem, tmp_path, monkeypatch
):
    dense = default_problem.dataset.features.toarray() + 1
    problem = default_problem._replace(
        dataset=default_problem.dataset._replace(features=dense)
    )
    seen = {}

    def keep(study, method, values, splits, workdir, **settings):
        seen.update(splits)

    monkeypatch.setattr(running, "run_method", keep)
    SubgraphStudy()._run_method(method, problem, tmp_path)
    networks = {*NETWORKS} - {"gcn"}
    others = {"fgssl", "ada_fgl", "fed_gcn", "fed_star", "fed_sage_plus", *networks}
    kind = jax.Array if method in others else SpreadRows
    assert {split: isinstance(data.features, kind) for split, data in seen.items()} == (
        dict.fromkeys(("train", "validation", "test"), True)
    )


@pytest.mark.parametrize(
    "method", [x for x in METHODS if SubgraphStudy()._spreads_features(x)]
)
def test_nothing_else_of_spread_features_is_read(method, default_problem):
    """By shapes alone, which take no compiler."""
    values = SubgraphStudy().method_values(method, default_problem)
    splits = client_subgraphs.with_spread_features(default_problem.splits)
    _, algorithm = running.build(registered_name(method), values)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), splits["train"])
    rounds = algorithm.phases or [algorithm]
    for phase in rounds:
        jax.eval_shape(phase.round, state, splits["train"], jax.random.key(1))
    jax.eval_shape(algorithm.evaluate, state, splits["test"])
    jax.eval_shape(algorithm.predict, state, splits["test"])


@pytest.mark.parametrize("method", ["fed_avg", "fed_pub", "fed_gta", "gcn"])
def test_a_round_on_spread_features_is_one_on_features(method, default_problem):
    study = SubgraphStudy(dropout=0.0, client_optimizer="sgd,learning_rate=0.1")
    values = study.method_values(method, default_problem)
    splits = default_problem.splits
    _, algorithm = running.build(registered_name(method), values)
    ends = []
    for data in (splits, client_subgraphs.with_spread_features(splits)):
        state = jax.jit(algorithm.init)(jax.random.key(0), data["train"])
        state, _ = jax.jit(algorithm.round)(state, data["train"], jax.random.key(1))
        ends.append(algorithm.evaluate(state, data["test"]) | {"state": state})
    jax.tree.map(lambda x, y: npt.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *ends)


def test_clients_may_misbehave_and_servers_withstand_it(tmp_path):
    study = SubgraphStudy(
        methods=("fed_avg",),
        aggregator="median",
        byzantine_fraction=0.4,
        attack="label_flip",
        num_rounds=1,
        num_clients=3,
        workdir=str(tmp_path / "run"),
    )
    config = study.run()["fed_avg"]["config"]
    assert config["aggregator"] == "median"
    assert config["misbehaviour"]["attack"] == "label_flip"
    for changes, words in (
        ({"methods": ("local",)}, "--aggregator concerns none of the methods local"),
        ({"methods": ("gcfl_plus",), "aggregator": "weighted_mean"}, "gcfl_plus does"),
    ):
        other = dataclasses.replace(study, workdir=str(tmp_path / "no"), **changes)
        with pytest.raises(InputError, match=words):
            other.run()


@pytest.mark.parametrize(
    ("num_rounds", "federated", "generators"),
    [(None, 10, 10), (2, 1, 1), (7, 3, 3), (100, 50, 10)],  # 20 without a dataset
)
def test_phases_share_the_rounds(num_rounds, federated, generators, default_problem):
    study, problem = SubgraphStudy(num_rounds=num_rounds), default_problem
    for method, field, expected in (
        ("ada_fgl", "federated_rounds", federated),
        ("fed_sage_plus", "generator_rounds", generators),
    ):
        values = study.method_values(method, problem) | {"clients_per_chunk": 1}
        config, algorithm = running.build(method, values)
        assert getattr(config, field) == expected
        assert algorithm.scored_from == expected + 1


@pytest.mark.parametrize("method", METHODS)
def test_hidden_units_alone_are_dropped(method, default_problem):
    task = SubgraphStudy().method_values(method, default_problem)["task"]
    assert not task.drops_features


def test_the_training_split_is_scored_on_training_nodes(
    default_problem, tmp_path, monkeypatch
):
    """In a run they are validation nodes, which choose the round."""
    seen = {}

    def keep(study, method, values, splits, workdir, **settings):
        seen.update(splits)

    monkeypatch.setattr(running, "run_method", keep)
    study = SubgraphStudy(eval_only=True, split="train", workdir=str(tmp_path))
    study._run_method("fed_avg", default_problem, tmp_path)
    npt.assert_array_equal(seen["train"].is_scored, seen["train"].is_trained)


def test_seconds_are_of_a_round_of_one_seed():
    entry = {"best_round_by_seed": [1, 2], "num_rounds": 5, "seconds": 20.0}
    assert subgraphs_output.seconds_per_round(entry) == "2.0000"


@pytest.mark.slow
def test_a_method_with_phases_is_prolonged_with_its_own(tmp_path):
    """Half of two rounds stay FedAvg's when the run goes on to four."""
    settings = {"num_clients": 3, "hidden_size": 4, "workdir": str(tmp_path / "run")}
    first = SubgraphStudy(methods=("ada_fgl",), num_rounds=2, **settings)
    entry = first.run()["ada_fgl"]
    assert entry["best_round"] == 2
    per_round = entry["communication_bytes_in_all"]["up"]  # of the first one
    assert entry["communication_bytes_per_round"]["up"] == per_round // 2
    entry = dataclasses.replace(first, num_rounds=4, resume=True).run()["ada_fgl"]
    assert entry["config"]["federated_rounds"] == 1
    assert entry["num_rounds"] == 4
    assert entry["best_round"] > 1
    assert entry["communication_bytes_in_all"]["up"] == per_round
    scored = dataclasses.replace(first, num_rounds=None, eval_only=True).run()
    assert scored["ada_fgl"]["test"] == entry["test"]


def test_a_run_shortened_below_its_phases_is_refused_before_any_method_runs(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "saved_config", lambda *_: {"federated_rounds": 3})
    study = SubgraphStudy(methods=("fed_avg", "ada_fgl"), num_rounds=3)
    with pytest.raises(InputError, match="num_rounds=3: ada_fgl .* from round 4 on"):
        dataclasses.replace(study, workdir=str(tmp_path / "run")).run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "backend", "expected"),
    [("fed_avg", "gpu", None), ("fed_avg", "cpu", 1), ("ada_fgl", "gpu", 1)],
)
def test_on_a_gpu_seeds_are_side_by_side_but_for_phases(
    method, backend, expected, tmp_path, monkeypatch
):
    """Scores, and calls with rounds of two phases, would compute both."""

    class AskedError(Exception):
        pass

    def run(name, algorithm, splits, config, *args, **settings):
        raise AskedError(config.seeds_per_chunk)

    monkeypatch.setattr(running.rounds, "run", run)
    monkeypatch.setattr(SubgraphStudy, "backend", lambda study: backend)
    study = SubgraphStudy(methods=(method,), workdir=str(tmp_path / "run"))
    with pytest.raises(AskedError) as asked:
        study.run()
    assert asked.value.args == (expected,)


def test_every_setting_of_partitions_is_an_option():
    given = {"resolution": 2.0, "balance": 3, "concentration": 0.5, "least_nodes": 2}
    given |= {"deal": "in_turn", "num_communities": 7}
    config = SubgraphStudy(**given).partition_config()
    assert dataclasses.asdict(config) == given


@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_partition_deals_all_nodes(partition):
    problem = make_problem(SubgraphStudy(partition=partition, num_clients=4))
    assert sum(len(nodes) for nodes in problem.parts.nodes) == len(
        problem.dataset.labels
    )
    outside = problem.deal(outside_neighbours=True)["train"]
    trained = np.asarray(problem.splits["train"].is_trained).sum()
    assert np.asarray(outside.is_trained).sum() == trained > 0


@pytest.mark.parametrize(
    "match, settings",
    [
        ("--balance is of --partition=louvain", {"partition": "metis", "balance": 3}),
        ("--concentration is of", {"concentration": 0.5}),
        ("--deal is of --partition=louvain", {"partition": "metis", "deal": "in_turn"}),
        ("--num_communities is of --partition=metis_plus", {"num_communities": 50}),
        (
            "--resolution is of --partition=louvain or louvain_plus",
            {"partition": "random", "resolution": 2.0},
        ),
        ("split '20/20'", {"split_ratio": "20/20"}),
        (
            "--split_ratio=20/40/40: the share of train nodes of a class is below one",
            {"num_clients": 2000, "partition": "random"},
        ),
        ("unknown method 'fed_none'", {"methods": ("fed_none",)}),
        (
            "num_rounds=1: ada_fgl trains what it is scored by from round 2 on",
            {"methods": ("fed_avg", "ada_fgl"), "num_rounds": 1},
        ),
        (
            "--server_optimizer concerns none",
            {"methods": ("local",), "server_optimizer": "adam"},
        ),
        (
            "--local_epochs concerns none of the methods gcn, gat",
            {"methods": ("gcn", "gat"), "local_epochs": 2},
        ),
        (
            "--hidden_size concerns none of the methods fed_avg, gat",
            {"methods": ("fed_avg", "gat"), "model": "sgc", "hidden_size": 32},
        ),
        (
            "--dropout concerns none of the methods fed_avg, sgc",
            {"methods": ("fed_avg", "sgc"), "model": "sgc", "dropout": 0.2},
        ),
        (
            "--model concerns none of the methods fed_star, gcn",
            {"methods": ("fed_star", "gcn"), "model": "sgc"},
        ),
    ],
)
def test_what_does_not_fit_is_one_line(match, settings):
    with pytest.raises(InputError, match=match):
        SubgraphStudy(**settings).run()


def test_all_methods_have_a_config(default_problem):
    study, problem = SubgraphStudy(methods=("all",)), default_problem
    methods = study.chosen_methods()
    assert tuple(methods) == METHODS
    for method in methods:
        task = study.method_values(method, problem)["task"]
        assert task.num_classes == len(problem.dataset.class_names)
