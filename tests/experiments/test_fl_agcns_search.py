"""Searches as a user runs them: their outputs, encryption, and killed runs.

They choose between two convolutions, with which they compile in a fourth of the time.
"""

import importlib.util
import json
import shutil
import signal

import numpy as np
import pytest

from experiments.studies import fl_agcns_choice
from experiments.studies.fl_agcns_methods import titles
from fedjax_graph.algorithms.fl_agcns.fl_agcns import FLAGCNSConfig
from fedjax_graph.algorithms.fl_agcns.trainings import make_schedule, most_code_epochs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.results import OF_COMMAND
from fedjax_graph.models import architecture, supernet
from tests.experiments import binary
from tests.experiments.fl_agcns_machine import (
    NUM_CLASSES,
    NUM_CLIENTS,
    NUM_EPOCHS,
    NUM_FEATURES,
    NUM_GENERATIONS,
    NUM_LAYERS,
    NUM_NODES,
    NUM_RETRAIN,
    NUM_TESTED,
    NUM_TRAINED,
    NUM_VALIDATED,
    OPS,
    Machine,
    losses,
    output,
    write_graph,
)

METHODS = ("fl_agcns", "gcn")
OTHERS = ("controller_eo", "client_eo", "fl_random", "fl_rl", "fl_gradient")
ROUNDS_OF_OTHERS = (NUM_GENERATIONS, NUM_GENERATIONS, 2, 1, 1)
CKKS = "--encryption=ckks"


@pytest.fixture(scope="module")
def searching(tmp_path_factory):
    """The machine of these tests."""
    folder = tmp_path_factory.mktemp("machine")
    write_graph(folder)
    return Machine(folder)


@pytest.fixture(scope="module")
def searches(searching):
    """What a finished search printed, by the name of its folder."""
    line = searching.command_line("whole", methods=METHODS)
    return searching.outputs({"whole": line})


@pytest.fixture(scope="module")
def more_searches(searching, searches):
    """Likewise of others; for slow tests."""
    del searches
    lines = {
        "others": searching.command_line(
            "others", "--num_epochs=1", "--num_retrain=1", methods=OTHERS
        ),
        "finalists": searching.command_line(
            "finalists", "--num_finalists=3", "--dropout=0.3", methods=METHODS[:1]
        ),
    }
    scratch = searching.command_line(
        "scratch",
        "--fitness_from=scratch",
        "--space=paper",
        "--first_epochs=2",
        methods=METHODS[:1],
    )
    of_shared = ("--num_warm_up", "--codes_per_step", "--supernet_steps")
    lines["scratch"] = [x for x in scratch if not x.startswith(of_shared)]
    if importlib.util.find_spec("tenseal"):
        lines["ckks"] = searching.command_line("ckks", CKKS, methods=METHODS[:2])
    return searching.outputs(lines)


# --- Searches ------------------------------------------------------------------------


def test_several_methods_are_run_and_recorded(searching, searches):
    found = searching.results("whole")
    assert found.keys() == {"dataset", "settings", "methods"}
    assert found["dataset"] == "mine"
    assert found["settings"]["num_nodes"] == NUM_NODES
    assert found["settings"]["flags"]["num_generations"] == NUM_GENERATIONS
    assert list(found["methods"]) == list(METHODS)
    for method, entry in found["methods"].items():
        assert entry["test"].keys() == {"accuracy", "cross_entropy"}
        right = np.array(entry["test_by_seed"]["accuracy"]) / 100 * NUM_TESTED
        np.testing.assert_allclose(right, np.round(right), atol=1e-4)
        assert len(right) == NUM_RETRAIN
        assert entry["test"]["accuracy"] == pytest.approx(
            100 * right.mean() / NUM_TESTED
        )
        assert entry["test_std"]["accuracy"] == pytest.approx(
            100 * np.std(right, ddof=1) / NUM_TESTED, abs=1e-4
        )
        assert entry["num_rounds"] == NUM_EPOCHS
        assert entry["inference_seconds"] > 0
        is_found = method == "fl_agcns"
        assert (entry["code"] is not None) == (entry["search"] is not None) == is_found
        assert ("architecture" in entry) == is_found
        assert "encryption" not in entry
        assert entry["config"]["task"]["model"] == ("code" if is_found else method)


def test_a_search_ends_with_a_code_and_its_network(searching, searches):
    entry = searching.entry("whole", "fl_agcns")
    code, found = entry["code"], entry["search"]
    assert all(type(gene) is int for gene in code)
    assert architecture.check(code, NUM_LAYERS).tolist() == code
    assert (
        entry["architecture"]
        == architecture.describe(code, "leaves", "2022").splitlines()
    )
    net = supernet.SuperNet(NUM_FEATURES, NUM_CLASSES, NUM_LAYERS, space="2022")
    assert entry["params_millions"] == pytest.approx(net.num_parameters(code) / 1e6)
    gcn = (NUM_FEATURES + 1) * 64 + (64 + 1) * NUM_CLASSES
    assert searching.entry("whole", "gcn")["params_millions"] == pytest.approx(
        gcn / 1e6
    )
    assert entry["config"]["task"]["code"] == code
    assert found["num_rounds"] == found["best_round"] == NUM_GENERATIONS
    assert found["test_std"] is None
    assert 0 <= found["test"]["accuracy"] <= 100
    assert found["communication_bytes"]["up"] > 0
    assert "encryption" not in found
    assert f"fl_agcns: {architecture.to_text(code)}" in searches["whole"].splitlines()


def test_the_table_has_means_and_the_code(searching, searches):
    rows = binary.table_of(searches["whole"])
    entries = searching.results("whole")["methods"]
    assert list(rows) == ["FL-AGCNS", "GCN"]
    for cells, entry in zip(rows.values(), entries.values(), strict=True):
        mean, std = entry["test"]["accuracy"], entry["test_std"]["accuracy"]
        assert cells[0] == f"{mean:.3f} ± {std:.3f}"
        assert cells[1] == f"{entry['params_millions']:.3f}"
    text = architecture.to_text(entries["fl_agcns"]["code"])
    assert [cells[3:] for cells in rows.values()] == [
        [f"{entries['fl_agcns']['search']['seconds']:.0f}", text],
        [],
    ]
    assert searches["whole"].splitlines()[-1].endswith(str(searching.folder / "whole"))
    assert f"mine: {NUM_NODES} nodes" in searches["whole"]


def test_metrics_have_the_search_and_the_trainings(searching, searches):
    lines = (searching.folder / "whole" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    expected = [("fl_agcns_search", 1 + i) for i in range(NUM_GENERATIONS)]
    expected += [(m, 1 + i) for m in METHODS for i in range(NUM_EPOCHS)]
    assert [(r["method"], r["round"]) for r in records] == expected
    scores = {"best_score", "mean_score", "score_spread"}
    for record in records[:NUM_GENERATIONS]:
        assert record.keys() >= scores
        assert record["best_score"] >= record["mean_score"]
        # The best code is that whose federated score is the best.
        assert -record["best_score"] == pytest.approx(
            record["validation_loss"], abs=1e-5
        )
    for record in records[NUM_GENERATIONS:]:
        assert not record.keys() & scores
        steps = record["client_steps_per_s"] * record["seconds"]
        assert steps == pytest.approx(NUM_CLIENTS * NUM_RETRAIN)


@pytest.mark.parametrize(
    "name",
    [
        "architecture_fl_agcns",
        "accuracy_and_complexity",
        "search_curves",
        "training_curves",
    ],
)
def test_pictures_are_there(searching, searches, name):
    binary.assert_picture(searching.folder / "whole" / f"{name}.png")


def test_subgraphs_are_described(searching, searches):
    facts = searching.subgraphs("whole")
    assert facts["num_clients"] == NUM_CLIENTS
    assert sum(facts["train_nodes"]) == 15
    assert sum(facts["validation_nodes"]) == NUM_VALIDATED
    assert sum(facts["test_nodes"]) == NUM_TESTED
    assert facts["outside_copies"] == [0, 0]
    assert 0 < facts["edges_cut_share"] < 0.5
    assert f"{facts['edges_cut_share']:.1%} lie between the 2" in searches["whole"]


@pytest.mark.slow
def test_every_search_finds_a_code(searching, more_searches):
    found = searching.results("others")["methods"]
    assert list(found) == list(OTHERS)
    for (method, entry), rounds in zip(found.items(), ROUNDS_OF_OTHERS, strict=True):
        code = architecture.check(entry["code"], NUM_LAYERS)
        space = entry["search"]["config"]["space"]
        network = architecture.decode_static(code, space)
        found_ops = {architecture.OPS[op] for op in network.op[network.is_present]}
        assert found_ops <= set(OPS)
        assert entry["code"] == architecture.canonical(code, space).tolist()
        assert entry["search"]["num_rounds"] == rounds
        assert len(losses(searching, "others", f"{method}_search")) == rounds
        assert entry["test_std"] is None  # of one training
        binary.assert_picture(
            searching.folder / "others" / f"architecture_{method}.png"
        )
    expected = [titles()[method] for method in OTHERS]
    assert list(binary.table_of(more_searches["others"])) == expected


@pytest.mark.slow
def test_a_search_from_scratch(searching, more_searches):
    entry = searching.entry("scratch", "fl_agcns")
    values = {
        name: tuple(x) if isinstance(x, list) else x
        for name, x in entry["search"]["config"].items()
    }
    config = FLAGCNSConfig(**{**values, "server_optimizer": OptimizerConfig()})
    assert entry["search"]["num_rounds"] == make_schedule(config).num_rounds
    network = architecture.canonical(np.array(entry["code"]))
    assert entry["code"] == network.tolist()
    records = searching.metrics("scratch")
    epochs = [r["code_epochs"] for r in records if r["method"] == "fl_agcns_search"]
    assert 0 < sum(epochs) <= most_code_epochs(config)


@pytest.mark.slow
def test_finalists_are_judged_from_scratch(searching, more_searches):
    entry = searching.entry("finalists", "fl_agcns")
    finalists = entry["search"]["finalists"]
    codes, scores = finalists["codes"], np.array(finalists["scores"])
    assert 1 < len(codes) <= 3 and len(scores) == len(codes)
    networks = [
        architecture.canonical(np.array(code), "2022").tolist() for code in codes
    ]
    assert len(set(map(tuple, networks))) == len(codes)
    assert entry["code"] == networks[scores.argmax()]
    assert np.all(scores < 0) and finalists["seconds"] > 0  # minus losses
    config = entry["search"]["config"]
    assert config["dropout"] == entry["config"]["task"]["dropout"] == 0.3


@pytest.mark.slow
def test_evolution_differs_by_who_evolves(searching, more_searches):
    """Up to the first generation that evolves, all three searches are the same."""
    metrics = searching.metrics("whole") + searching.metrics("others")
    figures = {
        method: [
            (record["train_loss"], record["mean_score"])
            for record in metrics
            if record["method"] == f"{method}_search"
        ]
        for method in ("fl_agcns", "controller_eo", "client_eo")
    }
    first, *others = (np.array(figures[method]) for method in figures)
    for other in others:
        np.testing.assert_allclose(other[0], first[0], rtol=1e-5)
    lasts = [figures[method][-1] for method in figures]
    assert len(set(lasts)) == 3


@pytest.mark.slow
def test_encryption_costs_and_changes_nothing_else(searching, more_searches):
    if "ckks" not in more_searches:
        pytest.skip("TenSEAL, of the extra [ckks], is missing")
    encrypted = searching.results("ckks")["methods"]
    for method, entry in encrypted.items():
        plain = searching.entry("whole", method)
        assert entry["config"]["encryption"] == "ckks"
        assert entry["code"] == plain["code"]
        costs = [entry["encryption"]]
        if entry["search"]:
            costs.append(entry["search"]["encryption"])
        for cost in costs:
            assert cost.keys() == {"bytes", "seconds", "largest_error"}
            assert cost["bytes"] > 0 and cost["seconds"] > 0
            assert 0 < cost["largest_error"] < 1e-6
        np.testing.assert_allclose(
            losses(searching, "ckks", method),
            losses(searching, "whole", method),
            rtol=1e-3,
        )
    # Of each client a vector up and the sum down, 32 bytes a number and up to 2048 in
    # a ciphertext.
    cost = encrypted["gcn"]["encryption"]
    num_ciphertexts = 2 * NUM_CLIENTS * NUM_EPOCHS * NUM_RETRAIN
    assert 10_000 < cost["bytes"] / num_ciphertexts < 70_000


# --- Killed and finished runs --------------------------------------------------------


@pytest.fixture(scope="module")
def answers(searching, searches):
    """Answers to command lines about runs that are there."""

    def again(*flags, methods=METHODS, workdir="whole"):
        return searching.command_line(workdir, *flags, methods=methods)

    lines = {
        "scored": again("--eval_only"),
        "scored on validation": again("--eval_only", "--split=validation"),
        "scored on training": again("--eval_only", "--split=train"),
        "again": again(),
        "other rate": again("--resume", "--learning_rate=0.5"),
        "other population": again("--resume", "--population_size=5"),
        "other data": again("--resume", "--partition=random"),
        "not yet run": again("--eval_only", methods=("sage",)),
        "no network yet": again("--eval_only", methods=METHODS[:1], workdir="searched"),
    }
    (searching.folder / "searched").mkdir()
    shutil.copytree(
        searching.folder / "whole" / "fl_agcns_search",
        searching.folder / "searched" / "fl_agcns_search",
        ignore=shutil.ignore_patterns("choice.json"),
    )
    for name in ("metrics.jsonl", "results.json"):
        shutil.copy(searching.folder / "whole" / name, searching.folder / "searched")
    whole = searching.folder / "whole"
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    found = searching.run_many(lines)
    after = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert after == before, "a run that is only scored is not touched"
    return found


@pytest.mark.slow
def test_a_killed_search_ends_as_if_never_stopped(searching, searches):
    """It is killed in its second generation; then a method is added."""
    del searches
    flags = searching.command_line("killed", methods=METHODS)
    process = searching.run_killed("fl_agcns_search/checkpoints/2", *flags)
    assert process.returncode == -signal.SIGKILL, process.stderr
    checkpoints = searching.folder / "killed" / "fl_agcns_search" / "checkpoints"
    assert (checkpoints / "1").is_dir() and not (checkpoints / "2").exists()
    assert not (searching.folder / "killed" / "fl_agcns").exists()
    added = searching.command_line("killed", "--resume", methods=("sgc",))
    answers = searching.run_many({"resumed": [*flags, "--resume"], "added": added})
    assert answers["resumed"][0] == 0  # stderr names the checkpoint half written
    whole, resumed = map(searching.metrics, ("whole", "killed"))
    assert resumed[: len(whole)] == whole
    for method in METHODS:
        killed, never_stopped = (
            binary.without_timings(searching.entry(name, method))
            for name in ("killed", "whole")
        )
        made = {key: killed.pop(key) for key in OF_COMMAND if key in killed}
        assert made["flags"]["methods"] == list(METHODS)  # of the command before
        assert "--methods=fl_agcns,gcn" in made["command"]
        assert made.keys() >= {"source", "hardware", "versions"}
        assert killed == never_stopped
    assert list(binary.table_of(output(answers, "added"))) == ["SGC"]
    assert list(searching.results("killed")["methods"]) == [*METHODS, "sgc"]
    assert searching.entry("killed", "sgc")["num_rounds"] == NUM_EPOCHS


@pytest.mark.slow
def test_finalists_are_judged_once(searching, more_searches):
    """Seconds are a clock's: had they been judged again, they would differ."""

    def again(*flags):
        return searching.command_line(
            "finalists", "--dropout=0.3", *flags, methods=METHODS[:1]
        )

    lines = {
        "scored": again("--num_finalists=3", "--eval_only"),
        "others": again("--resume"),
        "resumed": again("--num_finalists=3", "--resume"),
    }
    answers = searching.run_many(lines)
    rows = [
        binary.table_of(out)["FL-AGCNS"][:2]
        for out in (more_searches["finalists"], output(answers, "scored"))
    ]
    assert rows[0] == rows[1]
    words = ["chosen among 3 finalists", "--num_finalists=3"]
    binary.assert_refused(answers["others"], words)
    output(answers, "resumed")
    made = fl_agcns_choice.read(searching.folder / "finalists" / "fl_agcns_search")
    entry = searching.entry("finalists", "fl_agcns")
    assert made.finalists._asdict() == entry["search"]["finalists"]
    assert made.finalists.best == made.code == entry["code"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"a": 1}',
        "[]",
        '{"round": 1, "num_finalists": 1, "code": [9], "finalists": 0}',
    ],
)
def test_a_damaged_choice_is_one_clear_line(tmp_path, text):
    (tmp_path / "choice.json").write_text(text)
    with pytest.raises(InputError, match="choice.json: expected the network that"):
        fl_agcns_choice.read(tmp_path)


def test_a_search_that_goes_on_forgets_its_old_network(tmp_path, capsys):
    """Not the network that it ends with again."""
    folder = tmp_path / "fl_agcns"
    fl_agcns_choice.forget_other_network(folder, (3, 4, 5))
    settings = {"config": {"task": {"code": (3, 4, 5)}}}
    checkpoints = Checkpoints(folder / "checkpoints", settings)
    checkpoints.save(1, {"x": np.zeros(1)})
    checkpoints.close()
    fl_agcns_choice.forget_other_network(folder, (3, 4, 5))
    assert folder.exists() and not capsys.readouterr().out
    fl_agcns_choice.forget_other_network(folder, (3, 5, 5))
    assert not folder.exists()
    assert "went on from 3,4,5" in capsys.readouterr().out


def test_a_checkpoint_is_scored_on_any_split(searching, searches, answers):
    rows = {
        name: {title: cells[:2] for title, cells in binary.table_of(out).items()}
        for name, out in {
            "whole": searches["whole"],
            "test": output(answers, "scored"),
            "validation": output(answers, "scored on validation"),
            "train": output(answers, "scored on training"),
        }.items()
    }
    for title, cells in rows["train"].items():
        mean = float(cells[0].split(" ±")[0])
        right = NUM_TRAINED * NUM_RETRAIN * mean / 100
        assert right == pytest.approx(round(right), abs=0.01), title
    assert rows["test"] == rows["whole"]
    records = {r["method"]: r for r in searching.metrics("whole")}
    for method in METHODS:
        assert (
            searching.entry("whole", method)["best_round_by_seed"]
            == [NUM_EPOCHS] * NUM_RETRAIN
        )
        accuracy = rows["validation"][titles()[method]][0].split(" ±")[0]
        expected = records[method]["validation_accuracy"]
        assert float(accuracy) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("again", ["already holds a run", "--resume"]),
        ("other rate", ["server_optimizer", "0.5"]),
        ("other population", ["population_size", "5"]),
        ("other data", ["results.json", "other data"]),
        ("not yet run", ["sage", "no finished round"]),
        ("no network yet", ["not ended with a network", "--resume"]),
    ],
)
def test_a_run_goes_on_only_as_it_was(answers, name, words):
    binary.assert_refused(answers[name], words)
