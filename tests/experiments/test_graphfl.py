"""The binary as a user runs it: tasks, models, protocols and sweeps."""

import functools
import json
import signal

import numpy as np
import pytest

from tests.experiments import binary

TITLES = {
    "il": "IL",
    "fl": "FL",
    "graphfl": "GraphFL",
    "fed_prox": "FedProx",
    "scaffold": "SCAFFOLD",
    "ditto": "Ditto",
    "fed_per": "FedPer",
    "lg_fed_avg": "LG-FedAvg",
    "fed_att": "FedAtt",
    "fed_avg_m": "FedAvgM",
    "fed_adam": "FedAdam",
    "fed_yogi": "FedYogi",
}
NUM_NODES, NUM_CLASSES, NUM_FEATURES, NUM_CLIENTS, NUM_ROUNDS = 1400, 4, 12, 4, 2
NUM_HIDDEN, NUM_SEEDS = 3, 2
COHORT = 2
SMALL = (
    f"--num_clients={NUM_CLIENTS}",
    f"--participation={COHORT / NUM_CLIENTS}",
    f"--hidden_size={NUM_HIDDEN}",
    "--inner_steps=2",
    "--eval_every=1",
)


write_graph = functools.partial(
    binary.write_graph,
    num_nodes=NUM_NODES,
    num_classes=NUM_CLASSES,
    num_features=NUM_FEATURES,
)


class Machine(binary.Machine):
    def __init__(self, folder):
        super().__init__(folder, "experiments.graphfl")
        write_graph(folder / "mine.npz")

    def command_line(self, workdir, *flags, dataset="mine.npz", methods=("graphfl",)):
        has_units = "--model=sgc" not in flags
        return [
            f"--workdir={self.folder / workdir}",
            f"--dataset={self.folder / dataset}",
            f"--methods={','.join(methods)}",
            f"--num_rounds={NUM_ROUNDS}",
            *(x for x in SMALL if has_units or not x.startswith("--hidden_size")),
            *flags,
        ]

    def entry(self, workdir, method="graphfl"):
        return self.results(workdir)["methods"][method]

    def sweep(self, workdir):
        return json.loads((self.folder / workdir / "sweep.json").read_text())


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


THREE = ("il", "fl", "graphfl")
SEEDS = f"--num_seeds={NUM_SEEDS}"
SELF_TRAINING = ("--task=self_training", "--pseudo_labels=3", SEEDS)
PSEUDO_SWEEP = (
    "--task=self_training",
    "--sweep=pseudo_labels",
    "--sweep_values=0,2,1",
    "--model=sgc",
    "--num_rounds=1",
)
SWEEP = ("--sweep=participation", "--sweep_values=0.25,1", "--num_rounds=1", SEEDS)


@pytest.fixture(scope="module")
def outputs(machine):
    """What finished runs printed, by the name of their folder."""
    lines = {
        "three": machine.command_line("three", SEEDS, methods=THREE),
        "new_labels": machine.command_line("new_labels", "--task=new_labels"),
    }
    return machine.outputs(lines)


@pytest.fixture(scope="module")
def more_outputs(machine, outputs):
    """Likewise of others; for slow tests."""
    del outputs
    lines = {
        "self_training": machine.command_line("self_training", *SELF_TRAINING),
        "sgc": machine.command_line("sgc", "--model=sgc"),
        "first_order": machine.command_line("first_order", "--first_order"),
        "code": machine.command_line("code", "--protocol=code"),
        "overlap": machine.command_line("overlap", "--overlap=0.5"),
        "sweep": machine.command_line("sweep", *SWEEP, methods=("il", "fl")),
        "pseudo_sweep": machine.command_line(
            "pseudo_sweep", *PSEUDO_SWEEP, methods=("fl",)
        ),
        "synthetic": [
            f"--workdir={machine.folder / 'synthetic'}",
            "--methods=fl",
            "--num_rounds=1",
            *SMALL,
        ],
    }
    return machine.outputs(lines)


def table_of(output):
    """Rows of the table without the seconds."""
    return {title: cells[:-1] for title, cells in binary.table_of(output).items()}


def validation_error(machine, workdir, method="graphfl"):
    """Of the last round."""
    records = [r for r in machine.metrics(workdir) if r["method"] == method]
    assert [r["round"] for r in records] == list(range(1, len(records) + 1))
    return records[-1]["validation_error"]


# --- What is written -----------------------------------------------------------------


@pytest.mark.slow
def test_every_method_is_run(machine):
    line = machine.command_line("all", "--num_rounds=1", methods=("all",))
    ((status, _, err),) = machine.run_many({"all": line}).values()
    assert (status, err) == (0, "")
    found = machine.results("all")
    assert found.keys() == {"dataset", "settings", "methods"}
    assert found["dataset"] == "mine"
    assert found["settings"]["num_nodes"] == NUM_NODES
    assert found["settings"]["flags"]["hidden_size"] == NUM_HIDDEN
    assert list(found["methods"]) == list(TITLES)
    for method, entry in found["methods"].items():
        assert entry["test"].keys() == {"accuracy", "cross_entropy"}
        assert 0 <= entry["test"]["accuracy"] <= 100
        assert entry["test_std"] is None  # of one draw
        sent = entry["communication_bytes"]
        assert (sent["up"] > 0, sent["down"] > 0) == (method != "il",) * 2
        assert entry["config"]["task"]["kind"] == "nodes"
        everybody = method == "il"
        assert entry["config"]["participation"] == (1.0 if everybody else 0.5)
    assert len({e["test"]["cross_entropy"] for e in found["methods"].values()}) > 5


def test_the_table_and_the_files_of_several_draws(machine, outputs):
    rows, entries = table_of(outputs["three"]), machine.results("three")["methods"]
    assert list(rows) == [TITLES[method] for method in THREE]
    for method, entry in entries.items():
        mean, std = entry["test"]["accuracy"], entry["test_std"]["accuracy"]
        assert std > 0
        assert rows[TITLES[method]] == [f"{mean:.3f} ± {std:.3f}", str(NUM_ROUNDS)]
        assert entry["best_round_by_seed"] == [NUM_ROUNDS] * NUM_SEEDS
    assert outputs["three"].splitlines()[-1].endswith(str(machine.folder / "three"))
    assert "mine: 1400 nodes" in outputs["three"]


def test_metrics_have_a_line_for_each_method_and_round(machine, outputs):
    lines = (machine.folder / "three" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["method"], r["round"]) for r in records] == [
        (method, round_) for method in THREE for round_ in range(1, NUM_ROUNDS + 1)
    ]
    for record in records:
        cohort = NUM_CLIENTS if record["method"] == "il" else COHORT
        steps = record["client_steps_per_s"] * record["seconds"]
        assert steps == pytest.approx(2 * cohort * NUM_SEEDS)
        assert len(record["validation_error_by_seed"]) == NUM_SEEDS
        assert (
            record["validation_error_by_seed"][0]
            != (record["validation_error_by_seed"][1])
        )


def test_a_picture_is_there(machine, outputs):
    binary.assert_picture(machine.folder / "three" / "training_curves.png")


def crossings(machine, workdir, method, num_classes):
    """How often a round sends a GCN to each client of the cohort, and back."""
    sent = machine.entry(workdir, method)["communication_bytes"]
    assert sent["up"] == sent["down"]
    numbers = NUM_HIDDEN * (NUM_FEATURES + 1) + num_classes * (NUM_HIDDEN + 1)
    return sent["up"] / (4 * numbers * COHORT * NUM_ROUNDS)


def test_bytes_are_of_both_stages(machine, outputs):
    """A model goes to each client twice; for new labels once."""
    times = {"il": 0, "fl": 1, "graphfl": 2}
    assert {m: crossings(machine, "three", m, NUM_CLASSES) for m in THREE} == times
    assert crossings(machine, "new_labels", "graphfl", 2) == 1


# --- Tasks, models and protocols -----------------------------------------------------


@pytest.mark.slow
def test_models_differ(machine, outputs, more_outputs):
    tasks = {name: machine.entry(name)["config"]["task"] for name in ("three", "sgc")}
    assert [task["model"] for task in tasks.values()] == ["gcn", "sgc"]
    up = machine.entry("sgc")["communication_bytes"]["up"]
    assert up == NUM_ROUNDS * 2 * 4 * NUM_FEATURES * NUM_CLASSES * COHORT
    assert "sgc" in more_outputs["sgc"] and "gcn" in outputs["three"]


def test_new_labels_are_adapted_to(machine, outputs):
    config = machine.entry("new_labels")["config"]
    assert config["task"]["num_classes"] == 2  # K0 of a task
    assert config["task"]["adapt_steps"] == 2
    assert not config["fine_tune"]
    assert machine.results("new_labels")["settings"]["setting"]["labels_per_class"] == 2
    other = machine.entry("three")["config"]
    assert (other["task"]["adapt_steps"], other["fine_tune"]) == (0, True)


def counts_of(facts):
    """[(pseudo-labels, right ones)] of the draws; all nodes have a label."""
    counts = []
    for percent, number in zip(
        facts["precision_by_draw"], facts["number_by_draw"], strict=True
    ):
        counts.append((number, round(percent / 100 * number)))
        assert percent == pytest.approx(100 * counts[-1][1] / number)
    return counts


@pytest.mark.slow
def test_pseudo_labels_are_counted_and_compared_with_the_truth(machine, more_outputs):
    facts = machine.results("self_training")["settings"]["self_training"]
    assert facts["per_class"] == 3
    most = 3 * NUM_CLASSES * NUM_CLIENTS
    assert all(0 < number <= most for number in facts["number_by_draw"])
    assert len(facts["precision_by_draw"]) == NUM_SEEDS
    for number, right in counts_of(facts):
        assert number / NUM_CLASSES < right < number  # better than by chance
    assert facts["precision"] == pytest.approx(np.mean(facts["precision_by_draw"]))
    assert f"{facts['precision']:.1f} % of them right" in more_outputs["self_training"]
    plain = machine.metrics("three")[-1]
    assert machine.metrics("self_training")[-1]["train_loss"] != plain["train_loss"]


@pytest.mark.slow
def test_the_protocol_of_the_code_is_recorded_and_felt(machine, more_outputs):
    config = machine.entry("code")["config"]
    outer = config["server_optimizer"]
    kept = [outer[key] for key in ("name", "weight_decay", "learning_rate")]
    assert [config["first_order"], *kept] == [True, "adam", 5e-4, 0.02]
    assert config["task"]["optimizer"]["learning_rate"] == 0.01
    assert machine.results("code")["settings"]["setting"]["num_train"] == 300
    assert "not a fair estimate" in more_outputs["code"]
    # The highest test accuracy over the rounds: the test set is what is validated on.
    records = machine.metrics("code")
    best = 100 * (1 - min(record["validation_error"] for record in records))
    accuracy = machine.entry("code")["test"]["accuracy"]
    assert accuracy == pytest.approx(best, abs=1e-3)
    paper = machine.entry("three")["config"]
    assert paper["server_optimizer"]["name"] == "sgd"
    assert paper["server_optimizer"]["weight_decay"] == 0
    assert not paper["first_order"]


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_first_order_gradients_are_others(machine):
    assert machine.entry("first_order")["config"]["first_order"]
    first = machine.metrics("first_order")
    second = [r for r in machine.metrics("three") if r["method"] == "graphfl"]
    # The first draw's first query loss comes before any meta-gradient.
    assert first[0]["train_loss"] == pytest.approx(
        second[0]["train_loss_by_seed"][0], rel=1e-5
    )
    assert first[1]["train_loss"] != pytest.approx(
        second[1]["train_loss_by_seed"][0], rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_subgraphs_are_described(machine):
    facts = machine.results("overlap")["settings"]["subgraphs"]
    assert facts["num_clients"] == NUM_CLIENTS
    assert facts["overlap"] == pytest.approx(0.5)
    assert 0 < facts["edges_kept"] < 1
    assert "subgraphs" not in machine.results("three")["settings"]


@pytest.mark.slow
def test_without_a_dataset_it_is_synthetic(machine, more_outputs):
    assert machine.results("synthetic")["dataset"] == "synthetic"
    assert "note: synthetic" in more_outputs["synthetic"]


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_a_sweep_has_a_run_for_each_model_value_and_method(machine):
    binary.assert_picture(machine.folder / "sweep" / "sweep.png")
    rows = machine.sweep("sweep")
    keys = [(row["model"], row["participation"], row["method"]) for row in rows]
    assert keys == [
        (model, value, method)
        for model in ("gcn", "sgc")
        for value in (0.25, 1.0)
        for method in ("il", "fl")
    ]
    for row, (model, value, method) in zip(rows, keys, strict=True):
        entry = machine.entry(f"sweep/{model}-{value}", method)
        assert row["accuracy"] == entry["test"]["accuracy"]
        assert row["std"] == entry["test_std"]["accuracy"]
        assert entry["config"]["participation"] == (1 if method == "il" else value)


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_a_sweep_of_pseudo_labels_has_one_teacher(machine):
    rows = machine.sweep("pseudo_sweep")
    assert [(row["model"], row["pseudo_labels"]) for row in rows] == [
        ("sgc", number) for number in (0, 2, 1)
    ]
    none, two, one = (row.get("self_training") for row in rows)
    assert none is None
    ((fewer, right),), ((more, others),) = counts_of(one), counts_of(two)
    assert 0 < fewer < more  # the surest of each class are in both
    assert 0 < right <= others <= right + more - fewer
    folder = machine.folder / "pseudo_sweep"
    teachers = sorted(folder.glob("*/teacher"))
    assert teachers == [folder / f"sgc-{number}" / "teacher" for number in (1, 2)]
    first, second = (
        sorted(path.relative_to(x) for path in x.rglob("*")) for x in teachers
    )
    assert first == second  # the same one, so that each part can be scored
    binary.assert_picture(folder / "sweep.png")


# --- Finished and killed runs, and bad input -----------------------------------------


BAD = {  # flags: words of the line
    ("--methods=fl,graph_fl",): ["unknown method 'graph_fl'", "all, il, fl, graphfl"],
    ("--methods=fl,fl",): ["--methods", "only once"],
    ("--task=new_labels", "--overlap=0.2"): ["--overlap", "--task=new_labels"],
    ("--task=new_labels", "--sweep=overlap"): ["--overlap", "--task=new_labels"],
    ("--pseudo_labels=5",): ["need --task=self_training"],
    ("--methods=il", "--server_optimizer=adam"): ["--server_optimizer", "none", "il"],
    ("--server_optimizer=adm",): ["'adm'", "sgd", "adam"],
    ("--client_optimizer=sgd,rate=1",): ["'rate=1'", "learning_rate"],
    ("--sweep=pseudo_labels",): ["need --task=self_training"],
    ("--labels_per_class=400",): ["labels_per_class = 400", "only 350", "fewer"],
    ("--task=new_labels", "--labels_per_class=340"): ["only 350", "fewer"],
    ("--sweep=participation", "--sweep_values=2"): ["--sweep_values", "1.0"],
    ("--sweep=participation", "--sweep_values=few"): ["--sweep_values", "few"],
    ("--sweep=participation", "--sweep_values=nan"): ["--sweep_values", "number"],
    ("--sweep=labels_per_class", "--sweep_values=1.5"): ["--sweep_values", "1.5"],
    ("--sweep_values=0.1",): ["--sweep_values needs --sweep"],
    ("--sweep=participation", "--sweep_values=1,1"): ["--sweep_values", "only once"],
    ("--sweep=participation", "--sweep_values=1,1.0"): ["--sweep_values", "different"],
    ("--partition=metis",): ["--partition needs --overlap"],
    ("--task=new_labels", "--num_test=5"): ["--num_test", "--task=new_labels"],
    ("--outer_rate=1e38", "--num_rounds=1"): ["graphfl", "not finite", "smaller"],
    ("--sweep=participation", "--eval_only"): ["--eval_only", "single run"],
    ("--model=gat",): ["--model", "gat", "gcn", "sgc"],
    ("--inner_rate=nan",): ["--inner_rate", "number"],
    ("--dropout=1",): ["--dropout=1"],
    ("--overlap=1.5",): ["--overlap=1.5"],
    ("--num_clients=2000", "--overlap=0.2"): ["num_clients = 2000", "1 to 1400"],
    ("--dataset=corra",): ["'corra'", "cora", "citeseer"],
    ("--dataset=amazon2m",): ["amazon2m", "ogbn-products"],
    ("--dataset=small.npz",): ["labels_per_class = 80", "only 50", "fewer"],
    ("--dataset=small.npz", "--labels_per_class=5"): ["num_test = 1000", "fewer"],
    ("--dataset=bare.npz",): ["bare.npz", "labels"],
    ("--dataset=edges.npz",): ["edges.npz", "1400"],
}


@pytest.fixture(scope="module")
def answers(machine, outputs):
    """Answers to many command lines, by name or flags."""
    folder = machine.folder
    write_graph(folder / "small.npz", num_nodes=200)
    write_graph(folder / "bare.npz", labels=None)
    write_graph(folder / "edges.npz", edges=np.array([[0, NUM_NODES]]))
    three = {"methods": THREE}
    lines = {
        "scored": machine.command_line("three", SEEDS, "--eval_only", **three),
        "scored on validation": machine.command_line(
            "three", SEEDS, "--eval_only", "--split=validation", **three
        ),
        "again": machine.command_line("three", SEEDS),
        "other draws": machine.command_line(
            "three", "--num_seeds=2", "--seed=1", "--resume", methods=("fed_prox",)
        ),
        "other data": machine.command_line(
            "three", SEEDS, "--resume", "--labels_per_class=5"
        ),
        "other rate": machine.command_line(
            "three", SEEDS, "--resume", "--outer_rate=0.7"
        ),
    }
    for number, bad in enumerate(BAD):
        flags = [
            f"--dataset={folder / flag.removeprefix('--dataset=')}"
            if flag.endswith(".npz")
            else flag
            for flag in bad
        ]
        lines[" ".join(bad)] = machine.command_line(f"bad/{number}", *flags)
    before = {path: path.stat().st_mtime_ns for path in (folder / "three").rglob("*")}
    found = machine.run_many(lines)
    after = {path: path.stat().st_mtime_ns for path in (folder / "three").rglob("*")}
    assert after == before, "a run that is only scored is not touched"
    return found


@pytest.mark.slow
def test_a_killed_run_ends_as_if_never_stopped(machine, more_outputs):
    """It is killed in the teachers and in GraphFL."""
    del more_outputs
    flags = machine.command_line("killed", *SELF_TRAINING)
    for number, method in enumerate(("teacher/il", "graphfl")):
        process = machine.run_killed(f"{method}/checkpoints/2", *flags)
        assert process.returncode == -signal.SIGKILL, process.stderr
        checkpoints = machine.folder / "killed" / method / "checkpoints"
        assert (checkpoints / "1").is_dir() and not (checkpoints / "2").exists()
        flags = [*flags, *["--resume"][number:]]
    process = machine.run(*flags)
    assert process.returncode == 0, process.stderr
    names = ("self_training", "killed")
    for folder in ("", "teacher"):
        whole, resumed = (machine.metrics(f"{name}/{folder}") for name in names)
        assert resumed == whole
    entries = [binary.without_timings(machine.entry(name)) for name in names]
    assert entries[0] == entries[1]
    facts = [machine.results(n)["settings"]["self_training"] for n in names]
    assert facts[0] == facts[1]


def test_a_checkpoint_is_scored_on_any_split(machine, outputs, answers):
    tables = {}
    for name in ("scored", "scored on validation"):
        status, out, err = answers[name]
        assert (status, err) == (0, "")
        tables[name] = table_of(out)
    assert tables["scored"] == table_of(outputs["three"])
    for method in THREE:
        (accuracy, _) = tables["scored on validation"][TITLES[method]]
        expected = 100 * (1 - validation_error(machine, "three", method))
        assert float(accuracy.split(" ±")[0]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_a_sweep_goes_on_where_it_ended(machine):
    line = machine.command_line("sweep", *SWEEP, "--resume", methods=("il", "fl"))
    machine.outputs({"sweep": line})
    assert len(machine.sweep("sweep")) == 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((" ".join(flags), words) for flags, words in BAD.items()),
        ("again", ["already holds a run", "--resume"]),
        ("other draws", ["results.json", "other data"]),
        ("other data", ["results.json", "other data"]),
        ("other rate", ["server_optimizer", "0.7"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(answers, name, words):
    binary.assert_refused(answers[name], words)
