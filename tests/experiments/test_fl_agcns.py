"""Trainings of networks as a user runs them, and bad command lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from experiments.studies import fl_agcns_output, fl_agcns_problem
from experiments.studies.fl_agcns import FLAGCNSStudy
from experiments.studies.fl_agcns_problem import draw_split
from experiments.studies.fl_agcns_runs import retraining_seeds
from experiments.studies.fl_agcns_settings import SHORT_RUN
from fedjax_graph.core.sparse_rows import SparseRows
from fedjax_graph.data.graphs import client_subgraphs, synthetic
from fedjax_graph.driver import diagrams
from tests.experiments import binary
from tests.experiments.fl_agcns_machine import (
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_NODES,
    Machine,
    losses,
    output,
    write_graph,
)

CODE = "3,4,16,5"  # two GCNConv, one after another
BAD = {  # flags: words of the line
    ("--methods=fl_agcns,genetic",): ["unknown method 'genetic'", "all, fl_agcns"],
    ("--methods=gcn,gcn",): ["--methods", "only once"],
    ("--methods=code",): ["--methods=code needs --code"],
    ("--methods=all,code",): ["--methods=code needs --code"],
    ("--methods=all,genetic",): ["unknown method 'genetic'"],
    ("--code=1,13,0,2",): ["layer 1 is 13, which reads layer 1", "0 (absent) to 12"],
    ("--code=1,-1,0,2",): ["layer 1 is -1", "0 (absent) to 12"],
    ("--code=6,1,0,2",): ["input stage 6", "3 ReLU"],
    ("--code=1,1,0,0",): ["output stage 0", "3 ReLU"],
    ("--code=1,2",): ["at least 3 genes", "got 2"],
    ("--code=GCN,ReLU",): ["'GCN,ReLU'", "integers with commas between"],
    ("--code=1,2.5,1",): ["'1,2.5,1'", "integers with commas between"],
    ("--num_seeds=2",): ["--num_seeds", "--seed", "--num_retrain"],
    ("--num_rounds=5",): ["--num_rounds", "--num_generations", "--num_epochs"],
    ("--participation=0.5",): ["--participation", "every client"],
    ("--patience=5",): ["--patience", "--num_epochs"],
    ("--methods=fl_rl", "--num_trials=7"): ["--num_trials=7", "multiple of 5"],
    ("--methods=gcn,code", f"--code={CODE}", "--num_trials=3"): [
        "--num_generations concerns none of the methods gcn, code"
    ],
    ("--num_trials=3",): ["--num_trials concerns none of the methods gcn, fl_agcns"],
    ("--fitness_from=scratch",): ["--num_warm_up: ", "--fitness_from=shared"],
    ("--rungs=3,2,1",): ["--rungs: ", "--fitness_from=scratch"],
    ("--first_epochs=3",): ["--first_epochs: ", "--fitness_from=scratch"],
    ("--space=2021",): ["--space", "paper", "2022"],
    ("--weight_decay=-1",): ["--weight_decay", "0"],
    ("--codes_per_step=5",): ["--codes_per_step=5", "--population_size=4"],
    ("--population_size=1",): ["--population_size"],
    ("--learning_rate=nan",): ["--learning_rate", "number"],
    ("--learning_rate=1e38",): ["gcn", "not finite", "smaller learning rate"],
    ("--dropout=1",): ["--dropout=1"],
    ("--stages=6,5",): ["stages 6,5", "3 ReLU"],
    ("--stages=ReLU",): ["--stages=ReLU", "such as 3,5"],
    ("--ops=GCN",): ["--ops=GCN: name one or more of GATConv, GINConv"],
    ("--ops=",): ["--ops=: name one or more of GATConv"],
    ("--fusion=none",): ["--fusion", "leaves", "all"],
    ("--encryption=rsa",): ["--encryption", "ckks"],
    (f"--num_clients={NUM_NODES + 1}",): [f"{NUM_NODES + 1}", f"{NUM_NODES}"],
    ("--labels=drawn",): ["--labels=drawn: mine has 60", "1560 are drawn: 20 of a"],
    ("--dataset=corra",): ["'corra'", "cora", "citeseer"],
    ("--eval_only",): ["holds no run to score"],
}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The machine where there are all convolutions."""
    folder = tmp_path_factory.mktemp("machine")
    write_graph(folder)
    return Machine(folder)


@pytest.fixture(scope="module")
def trainings(training):
    """Answers to command lines that search nothing, by name or flags."""
    lines = {
        "code": training.command_line("code", f"--code={CODE}", methods=()),
        "other code": training.command_line(
            "code", "--code=3,4,4,5", "--resume", methods=()
        ),
    }
    for number, flags in enumerate(BAD):
        lines[" ".join(flags)] = training.command_line(
            f"bad/{number}", *flags, methods=("gcn", "fl_agcns")
        )
    return training.run_many(lines)


@pytest.fixture(scope="module")
def more_outputs(training, trainings):
    """What others printed; for slow tests."""
    del trainings
    lines = {
        "fused": training.command_line(
            "fused", f"--code={CODE}", "--fusion=all", methods=("gcn",)
        ),
        "random": training.command_line("random", "--partition=random"),
        "copies": training.command_line("copies", "--outside_neighbours"),
        "accuracy": training.command_line("accuracy", "--fitness=accuracy"),
    }
    # The last, as it sets defaults of the process.
    lines["synthetic"] = [
        f"--workdir={training.folder / 'synthetic'}",
        "--methods=gcn",
        "--num_epochs=1",
    ]
    return training.outputs(lines)


def test_a_code_is_trained(training, trainings):
    out = output(trainings, "code")
    assert list(binary.table_of(out)) == ["given code"]
    assert list(training.results("code")["methods"]) == ["code"]
    entry = training.entry("code", "code")
    assert entry["code"] == [3, 4, 16, 5]
    assert entry["search"] is None
    assert entry["architecture"] == [
        "input stage: ReLU of a fully connected layer",
        "layer 1: GCNConv of the input stage",
        "layer 2: GCNConv of layer 1, fused",
        "output stage: Identity of a fully connected layer of layer 2",
    ]
    number = (NUM_FEATURES + 1) * 64 + 2 * (64 + 1) * 64 + (64 + 1) * NUM_CLASSES
    assert entry["params_millions"] == pytest.approx(number / 1e6)
    assert losses(training, "code", "code")[-1] < np.log(NUM_CLASSES)
    binary.assert_picture(training.folder / "code" / "architecture_code.png")
    assert not (training.folder / "code" / "search_curves.png").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_fusion_of_all_layers_is_another_network(training):
    assert list(training.results("fused")["methods"]) == ["gcn", "code"]
    entry = training.entry("fused", "code")
    assert entry["architecture"][1] == "layer 1: GCNConv of the input stage, fused"
    assert entry["architecture"][-1].endswith("the mean of layer 1, layer 2")
    plain = training.entry("code", "code")
    assert entry["params_millions"] == plain["params_millions"]
    assert losses(training, "fused", "code")[0] != losses(training, "code", "code")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_a_random_partition_cuts_more_edges(training):
    random, metis = map(training.subgraphs, ("random", "fused"))
    assert random["edges_cut"] > 2 * metis["edges_cut"]
    assert random["edges"] == metis["edges"]


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_outside_neighbours_are_copied(training):
    facts, plain = map(training.subgraphs, ("copies", "fused"))
    # A cut edge has one end with each of the two clients.
    assert all(0 < number <= plain["edges_cut"] for number in facts["outside_copies"])
    assert facts["test_nodes"] == plain["test_nodes"]
    names = ("copies", "fused")
    assert len({losses(training, name, "gcn")[0] for name in names}) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_fitness_can_be_accuracy(training):
    for record in training.metrics("accuracy"):
        error = 1 - record["validation_accuracy"] / 100
        assert record["validation_error"] == pytest.approx(error, abs=1e-6)
    kinds = {
        name: training.entry(name, "gcn")["config"]["task"]["fitness"]
        for name in ("accuracy", "fused")
    }
    assert kinds == {"accuracy": "accuracy", "fused": "loss"}


@pytest.mark.slow
def test_without_a_dataset_it_is_synthetic_and_short(training, more_outputs):
    assert "note: synthetic" in more_outputs["synthetic"]
    found = training.results("synthetic")
    flags = found["settings"]["flags"]
    assert found["dataset"] == "synthetic_mixed"
    of_searches = [flags[name] for name in ("num_generations", "ops")]
    assert of_searches == [None, None]  # none runs
    assert flags["num_retrain"] == SHORT_RUN["num_retrain"]
    assert flags["fitness"] == SHORT_RUN["fitness"]
    assert found["settings"]["subgraphs"]["num_clients"] == 4


def test_all_nodes_of_a_small_class_train():
    """As of CoraFull's, the smallest of which has 15."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([-1, 0, 1, 2, 3], [9, 900, 7, 800, 0]))
    dataset = synthetic.node_graph(num_nodes=len(labels), num_classes=4)
    dataset = dataset._replace(labels=labels.astype(np.int32))
    noted, split = draw_split(FLAGCNSStudy(labels="drawn", seed=3), dataset)
    assert noted.notes[-1].startswith("2 of 4 classes have fewer than 20 nodes, which")
    counts = np.bincount(labels[split.train], minlength=4)
    np.testing.assert_array_equal(counts, [20, 7, 20, 0])
    assert (len(split.validation), len(split.test)) == (500, 1000)
    assert set(labels[np.concatenate(split[1:])]) == {0, 2}
    labels = rng.integers(4, size=len(labels), dtype=np.int32)
    whole = dataset._replace(labels=labels)
    same, split = draw_split(FLAGCNSStudy(seed=3), whole)
    expected = client_subgraphs.make_split(whole, published=False, seed=3)
    assert same is whole
    for own, wanted in zip(split, expected, strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_sparse_features_stay_sparse(monkeypatch):
    dataset = synthetic.node_graph(num_nodes=400, num_classes=4, num_features=300)
    study = FLAGCNSStudy(labels="drawn", num_clients=3)
    monkeypatch.setattr(fl_agcns_problem, "PER_CLASS", 5)
    monkeypatch.setattr(fl_agcns_problem, "NUM_VALIDATION", 40)
    monkeypatch.setattr(fl_agcns_problem, "NUM_TEST", 40)
    features = scipy.sparse.random_array(
        (400, 300), density=0.02, dtype=np.float32, format="csr", random_state=0
    )
    dataset = dataset._replace(features=features)
    sparse = fl_agcns_problem.make_problem(study, dataset).splits["train"].features
    assert isinstance(sparse, SparseRows)
    dense = dataset._replace(features=features.toarray() + 1)
    mostly = fl_agcns_problem.make_problem(study, dense).splits["train"]
    assert isinstance(mostly.features, jax.Array)
    monkeypatch.setattr(fl_agcns_problem.node_dataset, "SPARSE", 0)
    expected = fl_agcns_problem.make_problem(study, dataset).splits["train"].features
    for k in range(3):
        one = jax.tree.map(lambda x, k=k: x[k], sparse)
        np.testing.assert_allclose(one @ jnp.eye(300), expected[k], rtol=1e-6)


def test_an_earlier_network_is_drawn_as_it_was(tmp_path, monkeypatch):
    """Whatever space, fusion and number of trainings the present run has."""
    drawn, looks = {}, []

    def architecture(path, labels, edges, said, colour):
        drawn[path.stem] = len(edges), said

    monkeypatch.setattr(diagrams, "architecture", architecture)
    monkeypatch.setattr(
        fl_agcns_output.plots, "training_curves", lambda *args: looks.append(args[2:])
    )

    def entry(fusion, seeds, fitness):
        task = {"fusion": fusion, "space": "paper", "fitness": fitness}
        return {
            "code": [3, 4, 16, 5],
            "config": {"task": task},
            "best_round_by_seed": [1] * seeds,
            "params_millions": 1.0,
            "test": {"accuracy": 70.0},
        }

    earlier = entry("all", 10, "loss") | {"flags": {"seed": 7}}
    entries = {"fl_agcns": earlier, "code": entry("leaves", 3, "accuracy")}
    study = FLAGCNSStudy(fusion="leaves", num_retrain=3)
    fl_agcns_output.draw(study, entries, tmp_path, "mine")
    assert drawn == {
        "architecture_fl_agcns": (4, "FL-AGCNS: mine, seed 7"),
        "architecture_code": (3, "given code: mine, seed 0"),
    }
    ((monitors, look),) = looks
    assert monitors == ["loss", "error"]
    assert (
        look.title == "mine, seeds differ by method, 3 to 10 trainings of each network"
    )


@pytest.mark.parametrize(("flags", "words"), BAD.items())
def test_bad_flags_are_one_line_and_status_2(trainings, flags, words):
    binary.assert_refused(trainings[" ".join(flags)], words)


def test_another_code_is_not_resumed(trainings):
    binary.assert_refused(trainings["other code"], ["code", "16"])


def test_trainings_beside_two_searches_are_others():
    seeds = [
        retraining_seeds(FLAGCNSStudy(seed=seed, num_retrain=10))
        for seed in (0, 1, 2, 2**31 - 1)
    ]
    assert seeds[0] == tuple(range(10))
    assert len(set(sum(seeds, ()))) == 40
    assert max(map(max, seeds)) < 2**32
