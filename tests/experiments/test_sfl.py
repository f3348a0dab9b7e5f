"""The binary as a user runs it: every method, on traffic and on images."""

import signal

import matplotlib.image
import numpy as np
import pytest

from fedjax_graph.data.traffic import windows
from fedjax_graph.driver.serving import load_forecaster
from fedjax_graph.driver.writers import read_records
from tests.experiments import binary

TITLES = {
    "fed_avg": "FedAvg",
    "fed_avg_m": "FedAvgM",
    "fed_adam": "FedAdam",
    "fed_yogi": "FedYogi",
    "fed_att": "FedAtt",
    "fed_prox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fed_per": "FedPer",
    "lg_fed_avg": "LG-FedAvg",
    "ditto": "Ditto",
    "graph_fed_avg": "GraphFedAvg",
    "mp_fed_avg": "MPFedAvg",
    "sfl": "SFL",
    "sfl_star": "SFL*",
    "sfl_per": "SFL + FedPer",
    "sfl_lg": "SFL + LG-FedAvg",
    "local": "local",
}
METHODS = ("fed_avg", "sfl", "sfl_star")
REMEMBERING = ("scaffold", "sfl_star")  # clients' or the server's memory
IMAGE_METHODS = ("sfl_per",)
ACCURACIES = ("mean_accuracy", "best_5_percent", "worst_5_percent")
PICTURES = ("convergence.png", "client_graph.png", "training_curves.png")
NUM_ROUNDS, NUM_SENSORS, NUM_IMAGES, NUM_CLIENTS = 2, 5, 200, 5
TRAFFIC = (
    "--dataset=synthetic",
    f"--num_sensors={NUM_SENSORS}",
    "--num_days=2",
    "--rnn_hidden_size=4",
)
IMAGES = (
    f"--num_clients={NUM_CLIENTS}",
    "--shards=4",
    "--width=1",
    "--batch_size=32",
    "--local_epochs=1",
    "--num_rounds=1",
)
SYNTHETIC_IMAGES = (
    "--dataset=synthetic_images",
    f"--num_images={NUM_IMAGES}",
    f"--num_test_images={NUM_IMAGES}",
)


def write_network(path, **changes):
    """Roads 0 <-> 1 -> 2 <- 3; sensor 4 has none, and 3 takes from nobody."""
    rng = np.random.default_rng(0)
    adjacency = np.eye(NUM_SENSORS)
    adjacency[[0, 1, 1, 3], [1, 0, 2, 2]] = 0.5
    arrays = {
        "speed": rng.uniform(30, 70, (60, NUM_SENSORS)),
        "adjacency": adjacency,
        "start_ns": 0,
        "freq_ns": 300 * 10**9,
        "unit": "km/h",
    }
    arrays = {k: v for k, v in (arrays | changes).items() if v is not None}
    np.savez(path, **arrays)


def write_images(path, size=32):
    """Noise, brighter by label; of the same shapes as `SYNTHETIC_IMAGES`."""
    rng = np.random.default_rng(0)
    labels = np.arange(NUM_IMAGES) % 10
    arrays = {}
    for split in ("train", "test"):
        noise = rng.integers(0, 100, (NUM_IMAGES, size, size, 3))
        pixels = noise + 15 * labels[:, None, None, None]
        arrays |= {f"{split}_images": pixels.astype(np.uint8)}
        arrays |= {f"{split}_labels": labels}
    np.savez(path, **arrays)


class Machine(binary.Machine):
    def __init__(self, folder):
        super().__init__(folder, "experiments.sfl")
        write_network(folder / "mine.npz")
        write_images(folder / "pictures.npz")
        write_images(folder / "small.npz", size=6)
        write_network(folder / "bare.npz", adjacency=None)

    def command_line(self, workdir, *flags, methods=("fed_avg",)):
        return [
            f"--workdir={self.folder / workdir}",
            f"--methods={','.join(methods)}",
            *flags,
        ]

    def traffic(self, workdir, *flags, methods=("sfl",), num_rounds=NUM_ROUNDS):
        flags = (*TRAFFIC, f"--num_rounds={num_rounds}", *flags)
        return self.command_line(workdir, *flags, methods=methods)

    def of_file(self, name, *flags, methods=("sfl",)):
        """One round on the network of a file of that name."""
        dataset = f"--dataset={self.folder / name}.npz"
        flags = (dataset, "--rnn_hidden_size=4", "--num_rounds=1", *flags)
        return self.command_line(name, *flags, methods=methods)

    def records(self, workdir):
        return read_records(self.folder / workdir / "metrics.jsonl")

    def validation_mae(self, workdir, method, round_=1):
        (record,) = [
            record
            for record in self.records(workdir)
            if (record["method"], record["round"]) == (method, round_)
        ]
        return record["validation_mae"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def outputs(machine):
    """What finished runs printed, by the name of their folder."""
    lines = {
        "several": machine.traffic("several", methods=METHODS),
        "mine": machine.of_file("mine"),
        "images": machine.command_line(
            "images", *SYNTHETIC_IMAGES, *IMAGES, methods=IMAGE_METHODS
        ),
    }
    return machine.outputs(lines)


@pytest.fixture(scope="module")
def more_outputs(machine, outputs):
    """Likewise of others; for slow tests."""
    del outputs
    one_round = {"num_rounds": 1}
    star = one_round | {"methods": ("sfl_star",)}
    protocols = {"methods": ("fed_avg", "fed_prox")}
    bare = ("bare", "--client_graph=none")
    pictures = f"--dataset={machine.folder / 'pictures.npz'}"
    lines = {
        "remembering": machine.traffic("remembering", methods=REMEMBERING),
        "paper": machine.traffic("paper", **protocols),
        "code": machine.traffic("code", "--protocol=code", **protocols),
        "local": machine.traffic("local", **one_round | {"methods": ("local",)}),
        "alpha": machine.traffic("alpha", "--alpha=0", **one_round),
        "steps": machine.traffic("steps", "--propagation_steps=0", **one_round),
        "none": machine.traffic("none", "--client_graph=none", **star),
        "similar": machine.traffic("similar", "--structure_target=similarity", **star),
        "bare": machine.of_file(*bare, methods=("sfl_star",)),
        "pictures": machine.command_line("pictures", pictures, *IMAGES),
    }
    return machine.outputs(lines)


# --- Traffic -------------------------------------------------------------------------


def test_several_methods_are_run_on_traffic(machine, outputs):
    found = machine.results("several")
    assert found.keys() == {"dataset", "settings", "methods"}
    assert (found["dataset"], found["settings"]["num_sensors"]) == ("synthetic", 5)
    assert found["settings"]["flags"]["rnn_hidden_size"] == 4
    assert list(found["methods"]) == list(METHODS)
    assert_all_differ(found["methods"])


@pytest.mark.slow
def test_all_stands_for_every_method(machine):
    line = machine.traffic("all", methods=("all",))
    ((status, out, err),) = machine.run_many({"all": line}).values()
    assert (status, err) == (0, "")
    assert list(binary.table_of(out)) == list(TITLES.values())
    found = machine.results("all")["methods"]
    assert list(found) == list(TITLES)
    assert_all_differ(found)


def assert_all_differ(methods):
    scores = set()
    for method, entry in methods.items():
        test, sent = entry["test"], entry["communication_bytes"]
        assert test.keys() == {"mae", "mape", "rmse", "masked"}
        assert test["masked"].keys() == {"15", "30", "60", "all"}
        assert 0 < test["mae"] <= test["rmse"] < 100
        assert (sent["up"] > 0, sent["down"] > 0) == (method != "local",) * 2
        assert entry["config"]["task"]["kind"] == "traffic_rnn"
        scores.add(test["mae"])
    assert len(scores) == len(methods), "no two methods do the same"


def test_the_table_names_every_method(machine, outputs):
    assert outputs["several"].splitlines()[-1].endswith(str(machine.folder / "several"))
    assert "synthetic: sensors 5, steps 576" in outputs["several"].splitlines()
    rows = binary.table_of(outputs["several"])
    assert list(rows) == [TITLES[method] for method in METHODS]
    for method, entry in machine.results("several")["methods"].items():
        scores = [f"{entry['test'][key]:.3f}" for key in ("mae", "mape", "rmse")]
        assert rows[TITLES[method]] == [*scores, str(entry["best_round"])]


def test_metrics_have_a_line_for_each_method_and_round(machine, outputs):
    records = machine.records("several")
    assert [(record["method"], record["round"]) for record in records] == [
        (method, round_) for method in METHODS for round_ in range(1, NUM_ROUNDS + 1)
    ]
    for record in records:
        assert 0 < record["validation_mae"] < 100
        assert record["windows_per_s"] > 0


@pytest.mark.parametrize("workdir", ["several", "images"])
def test_pictures_are_there(machine, outputs, workdir):
    folder = machine.folder / workdir
    assert {path.name for path in folder.glob("*.png")} == set(PICTURES)
    for name in PICTURES:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert np.ptp(matplotlib.image.imread(folder / name)) > 0.5


def test_a_run_on_traffic_forecasts(machine, outputs, quick_compiles):
    """Of the same readings FedAvg's clients make one forecast, SFL's each their own."""
    readings = np.repeat(np.linspace(60, 40, 12)[:, None], NUM_SENSORS, axis=1)
    start = np.datetime64("2024-01-03T08:00", "ns")
    stamps = start + windows.FIVE_MINUTES * np.arange(12)
    spreads = []
    for method in ("fed_avg", "sfl"):
        forecast = load_forecaster(machine.folder / "several", method)(readings, stamps)
        assert forecast.shape == (12, NUM_SENSORS)
        assert ((forecast > 0) & (forecast < 100)).all()
        spreads.append(np.ptp(forecast, axis=1).max())
    assert spreads[0] < 1e-4 < 1e-2 < spreads[1]


def test_a_network_of_ones_own_has_its_unit(machine, outputs):
    assert machine.results("mine")["dataset"] == "mine"
    assert "at 60 minutes (km/h)" in outputs["mine"]
    assert list(binary.table_of(outputs["mine"])) == ["SFL"]


def test_clients_without_neighbours_are_named(machine, outputs):
    (note,) = [line for line in outputs["mine"].splitlines() if "neighbour" in line]
    assert note.startswith("note: 2 of 5 clients take from no neighbour")
    assert "(indices 3, 4)" in note
    assert note.removeprefix("note: ") in machine.results("mine")["settings"]["notes"]


@pytest.mark.slow
def test_without_a_graph_there_is_no_neighbour_to_lack(more_outputs):
    assert "neighbour" not in more_outputs["none"]


# --- Flags ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_the_protocol_of_the_code_is_recorded_and_felt(machine):
    paper, code = (machine.results(name)["methods"] for name in ("paper", "code"))
    for method, key, values in [
        ("fed_prox", "proximal_weight", (0.01, 0)),
        ("fed_avg", "aggregation_noise", (0, 1e-3)),
    ]:
        assert (paper[method]["config"][key], code[method]["config"][key]) == values
        assert paper[method]["test"] != code[method]["test"]
        assert code[method]["test"]["mae"] == pytest.approx(
            paper[method]["test"]["mae"], rel=0.1
        )


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
@pytest.mark.parametrize(
    ("workdir", "key"), [("alpha", "alpha"), ("steps", "propagation_steps")]
)
def test_sfl_that_takes_nothing_along_the_graph_starts_as_local_training(
    machine, workdir, key
):
    assert machine.results(workdir)["methods"]["sfl"]["config"][key] == 0
    local = machine.validation_mae("local", "local")
    assert machine.validation_mae("several", "sfl") != pytest.approx(local, rel=1e-4)
    assert machine.validation_mae(workdir, "sfl") == pytest.approx(local, rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_sfl_star_learns_its_graph_as_it_is_told(machine):
    configs = {
        name: machine.results(name)["methods"]["sfl_star"]["config"]
        for name in ("several", "none", "similar")
    }
    assert {
        name: (config["client_graph"], config["structure"]["target"])
        for name, config in configs.items()
    } == {
        "several": ("given", "distance"),
        "none": ("none", "distance"),
        "similar": ("given", "similarity"),
    }
    scores = {machine.validation_mae(name, "sfl_star") for name in configs}
    assert len(scores) == len(configs)


# --- Images --------------------------------------------------------------------------


def test_scores_on_images_are_of_the_clients(machine, outputs):
    found = machine.results("images")
    assert found["dataset"] == "synthetic_images"
    assert found["settings"]["num_images"] == NUM_IMAGES
    assert list(found["methods"]) == list(IMAGE_METHODS)
    rows = binary.table_of(outputs["images"])
    for method, entry in found["methods"].items():
        test = entry["test"]
        assert test.keys() == {
            f"{name}{end}" for name in ACCURACIES for end in ("", "_client_std")
        }
        mean, best, worst = (test[name] for name in ACCURACIES)
        assert 0 <= worst <= mean <= best <= 100
        assert (worst < best) == (test["mean_accuracy_client_std"] > 0)
        shown = [f"{test[n]:.2f} ± {test[f'{n}_client_std']:.2f}" for n in ACCURACIES]
        assert rows[TITLES[method]] == [*shown, "1"]
        assert entry["communication_bytes"]["up"] > 0


def test_the_rate_is_of_images(machine, outputs):
    records = machine.records("images")
    assert [record["method"] for record in records] == list(IMAGE_METHODS)
    for record in records:
        images = record["images_per_s"] * record["seconds"]
        assert images == pytest.approx(0.9 * NUM_IMAGES)  # a tenth is for validation
        error = 1 - record["validation_accuracy"] / 100
        assert record["validation_error"] == pytest.approx(error, abs=1e-6)
        assert "validation_loss" not in record
        assert "windows_per_s" not in record
    assert all(
        "images_per_s" in line
        for line in outputs["images"].splitlines()
        if "  round " in line
    )


@pytest.mark.slow
def test_images_of_ones_own_are_dealt_out(machine, more_outputs):
    assert machine.results("pictures")["dataset"] == "pictures"
    assert "pictures: clients 5, shards 4, images 200" in more_outputs["pictures"]
    (entry,) = machine.results("pictures")["methods"].values()
    assert entry["test"].keys() >= set(ACCURACIES)
    assert entry["config"]["task"]["kind"] == "images"
    of_sfl_per = machine.results("images")["methods"]["sfl_per"]
    sent = [e["communication_bytes"]["up"] for e in (of_sfl_per, entry)]
    assert 0 < sent[0] < sent[1]  # a head is not sent


# --- Finished and killed runs, and bad input -----------------------------------------


@pytest.fixture(scope="module")
def answers(machine, outputs):
    """Answers to many command lines, by name."""
    folder = machine.folder
    write_network(folder / "size.npz", adjacency=np.eye(4))
    write_network(folder / "negative.npz", adjacency=-np.eye(NUM_SENSORS))
    (folder / "cut.tar.gz").write_bytes(b"CIFAR-10")
    lines = {}
    scored = ("--eval_only", "--split=validation")
    methods = ("fed_avg", "sfl_star")
    lines["scored"] = machine.traffic("several", "--eval_only", methods=methods)
    lines["scored on validation"] = machine.traffic("several", *scored, methods=methods)

    def add(*flags, methods=("fed_avg",)):
        lines[flags[-1]] = machine.command_line(
            f"bad/{len(lines)}", *flags, methods=methods
        )

    mine, pictures = (
        f"--dataset={folder / name}" for name in ("mine.npz", "pictures.npz")
    )
    add(*TRAFFIC, "--methods=fed_avg,sfn")
    add(*TRAFFIC, "--methods=sfl", "--client_graph=none")
    add(pictures, *IMAGES, "--shards=3")
    add(pictures, *IMAGES, "--shards=100")
    add(mine, "--num_clients=5")
    add(mine, "--alpha=0.5")
    add(mine, "--alpha=2")
    add(mine, "--alpha=nan")
    add(mine, "--client_optimizer=sgd,speed=2")
    add(mine, "--methods=sfl", "--server_optimizer=adam")
    add(mine, "--model=transformer")
    add(mine, "--split_ratio=70/30")
    add(mine, "--split_ratio=70/10/30")
    add(mine, "--split_ratio=most")
    add(f"--dataset={folder / 'size.npz'}")
    add(f"--dataset={folder / 'negative.npz'}")
    add("--width=1", f"--dataset={folder / 'cut.tar.gz'}")
    add("--dataset=metrla")
    add("--width=1", "--dataset=cifar10")
    add(f"--dataset={folder / 'bare.npz'}")
    add(*IMAGES, f"--dataset={folder / 'small.npz'}")
    add(*SYNTHETIC_IMAGES, *IMAGES, "--split_ratio=80/10/10")
    lines["other images"] = machine.command_line(
        "images", *SYNTHETIC_IMAGES, *IMAGES, "--seed=1", "--resume", methods=("local",)
    )
    before = {path: path.stat().st_mtime_ns for path in (folder / "several").rglob("*")}
    found = machine.run_many(lines)
    after = {path: path.stat().st_mtime_ns for path in (folder / "several").rglob("*")}
    assert after == before, "a run that is only scored is not touched"
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("more_outputs")
def test_a_killed_run_ends_as_if_never_stopped(machine):
    """It is killed in two methods with a memory."""
    flags = machine.traffic("killed", methods=REMEMBERING)
    for number, method in enumerate(REMEMBERING):
        process = machine.run_killed(f"{method}/checkpoints/2", *flags)
        assert process.returncode == -signal.SIGKILL, process.stderr
        # The lines of two rounds are there, the checkpoint of the second is not.
        records = machine.records("killed")
        assert len(records) == NUM_ROUNDS * (number + 1)
        checkpoints = machine.folder / "killed" / method / "checkpoints"
        assert (checkpoints / "1").is_dir() and not (checkpoints / "2").exists()
        flags = [*flags, *["--resume"][number:]]
    process = machine.run(*flags)
    assert process.returncode == 0, process.stderr
    binary.assert_same_run(machine, "killed", "remembering")
    names = ("killed", "remembering")
    learnt = [machine.folder / name / "client_graph.png" for name in names]
    assert learnt[0].read_bytes() == learnt[1].read_bytes()


def test_a_checkpoint_is_scored_on_any_split(machine, outputs, answers):
    tables = {}
    for name in ("scored", "scored on validation"):
        status, out, err = answers[name]
        assert (status, err) == (0, "")
        tables[name] = binary.table_of(out)
    whole = binary.table_of(outputs["several"])
    assert tables["scored"] == {title: whole[title] for title in ("FedAvg", "SFL*")}
    for method in ("fed_avg", "sfl_star"):
        row = tables["scored on validation"][TITLES[method]]
        best_round = int(row[-1])
        mae = machine.validation_mae("several", method, best_round)
        assert float(row[0]) == pytest.approx(mae, abs=1e-3)


@pytest.mark.slow
def test_data_without_a_graph_run_where_it_is_learnt(machine, more_outputs):
    assert "note: no graph is given" in more_outputs["bare"]
    assert set(machine.results("bare")["methods"]) == {"sfl_star"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("--methods=fed_avg,sfn", ["unknown method 'sfn'", "all, ", "sfl_star"]),
        ("--client_graph=none", ["sfl needs the graph", "run sfl_star"]),
        ("--shards=3", ["3 shards", "200 training images", "shards per client that"]),
        ("--shards=100", ["100 shards", "more than the 200", "that fit 5 clients"]),
        ("--num_clients=5", ["--num_clients is for images", "--num_sensors"]),
        ("--alpha=0.5", ["--alpha concerns none of the methods fed_avg"]),
        ("--alpha=2", ["--alpha=2", "1.0"]),
        ("--alpha=nan", ["--alpha=nan", "number"]),
        ("--client_optimizer=sgd,speed=2", ["--client_optimizer", "speed=2"]),
        ("--server_optimizer=adam", ["none of the methods sfl"]),
        ("--model=transformer", ["'transformer'", "known: rnn"]),
        ("--split_ratio=70/30", ["70/30"]),
        ("--split_ratio=70/10/30", ["70/10/30"]),
        ("--split_ratio=most", ["most"]),
        ("size.npz", ["size.npz", "adjacency has shape (4, 4), expected (5, 5)"]),
        ("negative.npz", ["negative.npz", "adjacency", "weights that are negative"]),
        ("cut.tar.gz", ["cut.tar.gz", "archive of CIFAR-10"]),
        ("--dataset=metrla", ["'metrla'", "metr_la", "pems_bay"]),
        ("--dataset=cifar10", ["cifar10", "--dataset=cifar10 --download"]),
        ("bare.npz", ["bare.npz", "no array 'adjacency'"]),
        ("small.npz", ["6 x 6 pixels", "at least 8"]),
        ("--split_ratio=80/10/10", ["--split_ratio is for traffic"]),
        ("other images", ["results.json", "other data"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(machine, answers, name, words):
    (key,) = [key for key in answers if key == name or key.endswith(f"/{name}")]
    binary.assert_refused(answers[key], words)
    assert not (machine.folder / "bad").exists()
