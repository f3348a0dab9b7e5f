"""GraphFL's study from Python: what the binary does, without flags."""

import dataclasses
import json
import types

import numpy as np
import numpy.testing as npt
import pytest

from experiments.studies import graphfl_sweeps, node_problem, self_training
from experiments.studies.fl_agcns import FLAGCNSStudy
from experiments.studies.fl_agcns_problem import num_clients_of
from experiments.studies.graphfl import GraphFLStudy
from experiments.studies.graphfl_methods import client_optimizer, server_optimizer
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs import subgraphs, synthetic
from tests.experiments import binary

OPTIONS = {
    "methods": ("fl", "graphfl"),
    "num_rounds": 1,
    "num_clients": 4,
    "participation": 0.5,
    "hidden_size": 3,
    "inner_steps": 2,
    "eval_every": 1,
    "num_seeds": 2,
}
OF_SGC = {k: v for k, v in OPTIONS.items() if k != "hidden_size"}  # it has no units
SWEEP = {
    **OF_SGC,
    "methods": ("fl",),
    "model": "sgc",
    "sweep": "labels_per_class",
    "sweep_values": ("5", "20"),
}
# Brings the model SGC, the method FedAvg and a dataset under names of its own.
PLUGIN = """
from fedjax_graph.algorithms import register_method
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.data import register_dataset
from fedjax_graph.data.graphs import datasets
from fedjax_graph.models.gcn import SGC
from fedjax_graph.tasks.nodes import register_model

@register_method("my_method")
def my_method(config: FedAvgConfig):
    return fed_avg(config)

@register_model("my_model")
def my_model(task):
    return SGC(task.num_classes)

@register_dataset("my_graph", kind="graphs")
def my_graph():
    return datasets.load({path!r})
"""
PLUGGED_IN = {
    **OF_SGC,
    "methods": ("my_method",),
    "model": "my_model",
    "dataset": "my_graph",
}
# Runs the studies of which the options come on stdin; gives what they return.
RUN = """
import json, sys
from experiments.studies.graphfl import GraphFLStudy
from fedjax_graph.driver.writers import to_jsonable

found = []
for options in json.load(sys.stdin):
    lists = {k: tuple(v) for k, v in options.items() if isinstance(v, list)}
    found.append(GraphFLStudy(**options | lists).run())
with open(sys.argv[1], "w") as file:
    json.dump(to_jsonable(found), file)
"""


def flags_of(options):
    joined = {k: ",".join(v) for k, v in options.items() if isinstance(v, tuple)}
    return [f"--{name}={value}" for name, value in (options | joined).items()]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Runs by flags in `flags` and `flags_sweep`, the same from Python in others."""
    machine = binary.Machine(tmp_path_factory.mktemp("machine"), "experiments.graphfl")
    folder = machine.folder
    dataset = str(folder / "mine.npz")
    binary.write_graph(dataset, num_nodes=1600, num_classes=4, num_features=12)
    lines = {
        name: [f"--workdir={folder / name}", f"--dataset={dataset}", *flags_of(options)]
        for name, options in (("flags", OPTIONS), ("flags_sweep", SWEEP))
    }
    for status, _, err in machine.run_many(lines).values():
        assert (status, err) == (0, "")
    plugin = folder / "my_plugin.py"
    plugin.write_text(PLUGIN.format(path=dataset))
    kinds = {
        "python": OPTIONS,
        "python_sweep": SWEEP,
        "sgc": OF_SGC | {"methods": ("fl",), "model": "sgc", "local_rate": 0.1},
        "plugin": PLUGGED_IN | {"plugin": (str(plugin),)},
    }
    studies = [
        {"workdir": str(folder / name), "dataset": dataset} | options
        for name, options in kinds.items()
    ]
    process = machine.python(
        RUN, str(folder / "returned.json"), input=json.dumps(studies)
    )
    assert process.returncode == 0, process.stderr
    return machine


@pytest.fixture(scope="module")
def returned(machine):
    return json.loads((machine.folder / "returned.json").read_text())


@pytest.mark.slow
def test_a_study_does_what_the_binary_does(machine, returned):
    ours, theirs = (machine.results(name) for name in ("python", "flags"))
    assert returned[0] == ours["methods"]
    assert list(ours["methods"]) == list(OPTIONS["methods"])
    for method, entry in theirs["methods"].items():
        own = ours["methods"][method]
        assert binary.without_timings(own) == binary.without_timings(entry)
    assert machine.metrics("python") == machine.metrics("flags")
    settings = [binary.settings_of(machine, name) for name in ("python", "flags")]
    assert settings[0] == settings[1]
    assert settings[0]["flags"]["model"] == "gcn"


@pytest.mark.slow
def test_a_sweep_does_what_that_of_the_binary_does(machine, returned):
    rows = json.loads((machine.folder / "flags_sweep" / "sweep.json").read_text())
    assert returned[1] == rows
    assert [row["labels_per_class"] for row in rows] == [5, 20]
    for row in rows:
        name = f"sgc-{row['labels_per_class']}"
        ours, theirs = (
            machine.results(f"{kind}_sweep/{name}") for kind in ("python", "flags")
        )
        assert ours["methods"]["fl"]["test"] == theirs["methods"]["fl"]["test"]
        assert ours["methods"]["fl"]["test"]["accuracy"] == row["accuracy"]
        flags = ours["settings"]["flags"]
        assert (flags["sweep"], flags["model"]) == (None, "sgc")
        assert flags["labels_per_class"] == row["labels_per_class"]
    binary.assert_picture(machine.folder / "python_sweep" / "sweep.png")


@pytest.mark.slow
def test_a_plugin_brings_a_method_a_model_and_a_dataset(returned):
    """The same as FedAvg on SGC, with the rate of GCN."""
    (ours,), (theirs,) = (entries.values() for entries in (returned[3], returned[2]))
    assert list(returned[3]) == ["my_method"]
    assert ours["config"]["task"].pop("model") == "my_model"
    assert theirs["config"]["task"].pop("model") == "sgc"
    assert binary.without_timings(ours) == binary.without_timings(theirs)


# --- What needs no run ---------------------------------------------------------------


def sweep_parts(**options):
    study = GraphFLStudy(dataset="cora", **options)
    return graphfl_sweeps.parts(study, study.sweep)


def test_a_sweep_is_of_single_studies():
    parts = sweep_parts(sweep="participation", overlap=0.25)
    values = (0.1, 0.2, 0.4, 0.6, 0.8)  # of the paper
    keys = [(model, value) for model in ("gcn", "sgc") for value in values]
    assert list(parts) == [f"{model}-{value}" for model, value in keys]
    for part, (model, value) in zip(parts.values(), keys, strict=True):
        part.check()
        expected = GraphFLStudy(
            dataset="cora", overlap=0.25, model=model, participation=value
        )
        assert part == expected


def test_a_sweep_of_new_labels_has_values_of_its_own():
    parts = sweep_parts(sweep="labels_per_class", task="new_labels", model="sgc")
    assert list(parts) == ["sgc-2", "sgc-6", "sgc-10"]


def test_a_short_run_has_few_labels_and_three_draws():
    short = GraphFLStudy().resolved()
    assert short.seeds == (0, 1, 2)
    assert short.label_counts() == {"labels_per_class": 40}
    full = GraphFLStudy(dataset="cora").resolved()
    assert full.seeds == (0,)
    assert full.label_counts() == {"labels_per_class": 80}
    given = GraphFLStudy(num_seeds=1, given=frozenset({"num_seeds"})).resolved()
    assert given.seeds == (0,)


def test_the_code_scores_every_round_and_never_stops():
    code = GraphFLStudy(dataset="cora", protocol="code").resolved()
    assert code.eval_every == 1
    assert code.patience > 1000
    assert code.label_counts() == {"num_train": 300}
    paper = GraphFLStudy(dataset="cora").resolved()
    assert (paper.eval_every, paper.patience) == (5, None)
    given = dataclasses.replace(code, eval_every=7, patience=2).resolved()
    assert (given.eval_every, given.patience) == (7, 2)


def test_options_stand_before_the_protocol():
    study = GraphFLStudy(model="sgc", local_rate=0.7, num_rounds=3)
    figures, plain = study.figures(), GraphFLStudy(model="sgc").figures()
    assert (figures.local_rate, figures.num_rounds) == (0.7, 3)
    assert figures._replace(local_rate=1.0, num_rounds=50) == plain
    new_labels = dataclasses.replace(study, task="new_labels")
    assert new_labels.figures().outer_optimizer.learning_rate == 0.1
    assert plain.outer_optimizer.learning_rate == 1.0


def test_optimizers_of_clients_and_server():
    plain = GraphFLStudy(model="sgc")
    rates = {"graphfl": 0.3, "fl": 1.0, "scaffold": 1.0}
    for method, rate in rates.items():
        assert client_optimizer(plain, method) == OptimizerConfig("sgd", rate)
    assert server_optimizer(plain, "graphfl") == OptimizerConfig("sgd", 1.0)
    assert server_optimizer(plain, "fl") is None
    assert server_optimizer(plain, "fed_adam").name == "adam"
    study = GraphFLStudy(
        model="sgc",
        outer_rate=0.7,
        client_optimizer="sgd,momentum=0.5",
        server_optimizer="adam,weight_decay=0.1",
    )
    adam = dataclasses.replace(study, client_optimizer="adam", first_order=True)
    assert client_optimizer(adam, "graphfl") == OptimizerConfig("adam", 0.3)
    expected = OptimizerConfig("sgd", 0.3, momentum=0.5)
    assert client_optimizer(study, "graphfl") == expected
    expected = OptimizerConfig("adam", 0.7, weight_decay=0.1)
    assert server_optimizer(study, "graphfl") == expected
    with pytest.raises(InputError, match="give learning_rate"):
        server_optimizer(study, "fl")
    last = "adam,schedule=cosine,num_steps=20,last_learning_rate=0.001"
    with pytest.raises(InputError, match="give learning_rate"):
        server_optimizer(GraphFLStudy(server_optimizer=last), "fl")
    rated = GraphFLStudy(server_optimizer="adam,learning_rate=0.1")
    assert server_optimizer(rated, "fl") == OptimizerConfig("adam", 0.1)
    assert server_optimizer(study, "il") is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"participation": 2.0}, ["--participation=2.0", "1.0"]),
        ({"model": "gat"}, ["--model=gat", "gcn, sgc"]),
        ({"client_optimizer": "adam"}, ["--client_optimizer=adam", "--first_order"]),
        ({"plugin": ("mine.py",)}, ["plugin mine.py", "no such file"]),
        ({"inner_rate": float("nan")}, ["--inner_rate", "number"]),
        ({"methods": ("fl", "graph_fl")}, ["unknown method 'graph_fl'"]),
        ({"task": "new_labels", "overlap": 0.2}, ["--overlap", "--task=new_labels"]),
        ({"pseudo_labels": 5}, ["need --task=self_training"]),
        ({"methods": ("il",), "server_optimizer": "adam"}, ["concerns none", "il"]),
        ({"methods": ("il",), "participation": 0.4}, ["--participation concerns none"]),
        *(
            ({"methods": ("il", "fl"), name: value}, [f"--{name} concerns none of"])
            for name, value in (
                ("inner_rate", 0.2),
                ("outer_rate", 0.2),
                ("first_order", True),
            )
        ),
        ({"methods": ("graphfl",), "local_rate": 0.2}, ["--local_rate concerns none"]),
        ({"model": "sgc", "hidden_size": 8}, ["--hidden_size: --model=sgc has no"]),
        ({"model": "sgc", "dropout": 0.2}, ["--dropout: --model=sgc has no hidden"]),
        ({"sweep_values": ("1",)}, ["--sweep_values needs --sweep"]),
        ({"patience": 20}, ["--patience needs --protocol=code"]),
        (
            {"sweep": "participation", "sweep_values": ("0.5", "2")},
            ["--sweep_values", "--participation=2.0"],
        ),
        ({"sweep": "overlap", "eval_only": True}, ["--eval_only", "single run"]),
        ({"dataset": "corra"}, ["'corra'", "cora, citeseer"]),
        ({"dataset": ""}, ["--dataset=: expected a text that is not empty"]),
    ],
)
def test_bad_options_are_one_line(tmp_path, options, words):
    with pytest.raises(InputError) as raised:
        GraphFLStudy(workdir=str(tmp_path / "run"), **options).run()
    (line,) = str(raised.value).splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["physics", "coauthor_physics"])
def test_a_dataset_is_prepared_under_any_of_its_names(monkeypatch, name):
    graph = synthetic.node_graph(num_nodes=200, num_classes=3, num_features=20)
    graph = graph._replace(name="coauthor_physics", features=3 * graph.features)
    monkeypatch.setattr(node_problem.data, "load", lambda *args, **settings: graph)
    found = node_problem.load_dataset(GraphFLStudy(dataset=name))
    assert set(found.features.toarray().ravel()) == {0, 1}
    assert num_clients_of(FLAGCNSStudy(dataset=name), name) == 18


@pytest.mark.parametrize(("size", "expected"), [(15_000, 1000), (15_001, 10_000)])
def test_large_graphs_are_tested_on_more_nodes(size, expected, monkeypatch):
    def count(labels, *, num_test, **settings):
        return num_test

    monkeypatch.setattr(node_problem.label_splits, "non_iid", count)
    world = types.SimpleNamespace(labels=np.zeros(size, int), owners=None)
    args = GraphFLStudy().resolved(), world, 2, None, 0
    assert node_problem.make_draw(*args) == expected


# --- Who holds, learns and is taught what ---------------------------------------------


@pytest.fixture(scope="module")
def graph():
    """Large enough that some nodes are neither trained on nor scored."""
    return synthetic.node_graph(num_nodes=700, num_classes=3, num_features=20)


@pytest.fixture(scope="module")
def overlapping(graph):
    """(problem, owners of nodes, [(client, node)] of its rows): half is shared."""
    study = GraphFLStudy(
        task="self_training",
        overlap=0.5,
        num_clients=4,
        labels_per_class=6,
        num_test=20,
        num_seeds=2,
    )
    problem = node_problem.make_problem(study, graph)
    args = node_problem.node_graphs.adjacency(graph), 4, 0.5, "random", study.seed
    owners, held = subgraphs.parts(*args)
    return problem, owners, [(k, n) for k, own in enumerate(held) for n in own]


def rows_of(sets):
    """The nodes of each task, without the padding."""
    return [set(n[m > 0].tolist()) for n, m in zip(sets.nodes, sets.mask, strict=True)]


def test_only_the_owner_of_a_node_has_its_label(graph, overlapping):
    problem, owners, held = overlapping
    expected = [graph.labels[n] if owners[n] == k else -1 for k, n in held]
    npt.assert_array_equal(problem.world.labels, expected)
    assert 0.3 < np.mean(np.equal(expected, -1)) < 0.35  # a half beside each whole


def test_the_splits_of_a_draw_share_no_node_of_the_graph(overlapping):
    problem, owners, held = overlapping
    assert len(problem.draws) == 2
    for draw in problem.draws:
        found = []
        for split, sets in draw.items():
            for k, rows in enumerate(zip(*map(rows_of, sets), strict=True)):
                own = [held[row] for row in sorted(rows[0] | rows[1])]
                assert len(own) == len(rows[0]) + len(rows[1])
                assert split != "train" or all(owners[n] == k for _, n in own)
                found += [n for _, n in own]
        assert len(set(found)) == len(found) == 3 * 6 + 20 + 500


def test_teachers_learn_from_both_halves(overlapping):
    problem, *_ = overlapping
    for draw in problem.draws:
        taught = self_training.teaching(draw, problem.world)["train"]
        halves = zip(*map(rows_of, draw["train"]), strict=True)
        assert rows_of(taught.support) == [one | other for one, other in halves]


def test_pseudo_labels_are_of_own_nodes_that_nobody_is_scored_on(graph, overlapping):
    """Of clients that are sure of all nodes of the graph, and add all they may."""
    problem, _, held = overlapping
    num_rows, rng = len(held), np.random.default_rng(0)
    guesses = rng.integers(0, 3, (2, 4, num_rows))
    pseudo = self_training.self_train(problem, np.eye(3)[guesses], num_rows)
    draws = zip(problem.draws, pseudo.draws, strict=True)
    for number, (before, after) in enumerate(draws):
        scored = {
            held[row][1]
            for split in ("validation", "test")
            for row in rows_of(before[split].query)[0]
        }
        count, right = 0, 0
        for k in range(4):
            own, more = (
                set.union(*(rows_of(half)[k] for half in draw["train"]))
                for draw in (before, after)
            )
            expected = {
                row
                for row, (client, node) in enumerate(held)
                if client == k and node not in scored
            } - own
            assert expected and more - own == expected and own < more
            count += len(expected)
            right += sum(
                guesses[number, k, row] == graph.labels[held[row][1]]
                for row in expected
            )
        assert pseudo.number[number] == count
        assert pseudo.precision[number] == pytest.approx(100 * right / count)
    assert pseudo.facts(num_rows)["precision"] == np.mean(pseudo.precision)


@pytest.mark.parametrize(("protocol", "power"), [("paper", 0.5), ("code", 1.0)])
def test_the_protocol_says_how_the_adjacency_is_normalised(graph, protocol, power):
    """By D^-1/2 (A + I) D^-1/2, or each row by its sum as the released code does."""
    study = GraphFLStudy(protocol=protocol, num_clients=4, num_test=20)
    problem = node_problem.make_problem(study, graph)
    adjacency = np.eye(700)
    adjacency[tuple(graph.edges.T)] = adjacency[tuple(graph.edges[:, ::-1].T)] = 1
    degrees = adjacency.sum(axis=1)
    adjacency /= degrees[:, None] ** power * degrees ** (1 - power)
    data = problem.splits()["test"]
    nodes, query = problem.draws[0]["test"].query.nodes[0], data.query
    sums = np.zeros(len(nodes))
    np.add.at(sums, query.receivers[0, 0], query.weights[0, 0])
    npt.assert_allclose(sums, adjacency[nodes].sum(axis=1), rtol=1e-5)
    read = data.features[query.rows[0, 0, : len(nodes)]]
    npt.assert_allclose(read, adjacency[nodes] @ graph.features, atol=1e-5)
