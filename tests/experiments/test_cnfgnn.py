"""The binary as a user runs it: kills and resumed runs, results, and bad flags."""

import shutil
import signal

import numpy as np
import pytest

from tests.damage import flip
from tests.experiments import binary

METHODS = ("persistence", "gru_fedavg", "cnfgnn")
NUM_ROUNDS = 3
UNIT = "veh/5min"
HALVES = ("--hidden_size=4", "--gn_mlp_sizes=4,4", "--gn_layers=1")
GRUS = ("--gru_hidden_size=4",)
ONLY_GRUS = ("gru_fedavg", "gru_local", "gru_centralized", "gru_fmtl")
NAIVE = ("persistence", "historical_average")


def small(methods):
    """The sizes that concern some methods."""
    trained = set(methods) - set(NAIVE)
    of_halves = HALVES if trained - set(ONLY_GRUS) else ()
    return [*of_halves, *(GRUS if trained & set(ONLY_GRUS) else ())]


def write_network(path, seed=0, num_steps=130, num_sensors=4):
    rng = np.random.default_rng(seed)
    phase = np.arange(num_steps)[:, None] / 6 + np.arange(num_sensors)
    speed = 50 + 10 * np.sin(phase) + rng.normal(0, 1, phase.shape)
    speed[rng.random(phase.shape) < 0.05] = 0
    np.savez(
        path,
        speed=speed,
        adjacency=np.eye(num_sensors) + 0.5 * np.eye(num_sensors, k=1),
        start_ns=0,
        freq_ns=300 * 10**9,
        unit=UNIT,
    )


class Machine(binary.Machine):
    def __init__(self, folder, **options):
        super().__init__(folder, "experiments.cnfgnn", **options)
        write_network(folder / "tiny.npz")

    def command_line(self, workdir, *flags, methods=METHODS):
        return [
            f"--dataset={self.folder / 'tiny.npz'}",
            f"--workdir={self.folder / workdir}",
            f"--methods={','.join(methods)}",
            f"--num_rounds={NUM_ROUNDS}",
            *small(methods),
            *flags,
        ]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"), all_cores=True)


@pytest.fixture(scope="module")
def whole(machine):
    """The process of a run that was never stopped, in the folder `whole`."""
    flags = ("--num_seeds=2", "--clients_per_chunk=2", binary.EVERY_ROUND)
    line = machine.command_line("whole", *flags)
    process = machine.run(*line)
    assert process.returncode == 0, process.stderr
    return process


# --- A whole run ---------------------------------------------------------------------


def test_a_run_prints_plain_lines_and_a_table(machine, whole):
    assert whole.stderr == ""
    lines = whole.stdout.splitlines()
    assert lines[0] == "tiny: 4 sensors, 130 steps of 5 min"
    for method in ("gru_fedavg", "cnfgnn"):
        shown = [line for line in lines if line.startswith(f"{method}  round ")]
        assert [line.split()[2] for line in shown] == ["1/3", "2/3", "3/3"]
        assert all("windows_per_s" in line for line in shown)
    titles = [UNIT, "---", "persistence", "GRU + FedAvg", "CNFGNN"]
    assert [line for line in lines[-6:-1] if line.startswith(tuple(titles))] == lines[
        -6:-1
    ]
    written = {path.name for path in (machine.folder / "whole").iterdir()}
    names = ("forecasts", "training_curves", "rmse_by_horizon", "communication")
    pictures = {f"{name}.png" for name in names}
    files = {"results.json", "metrics.jsonl", "network.npz", "tensorboard"}
    files |= {"report.html"}
    assert written == pictures | files | {"gru_fedavg", "cnfgnn"}


def test_results_have_the_schema(machine, whole):
    del whole
    found = machine.results("whole")
    assert found.keys() == {"dataset", "settings", "methods"}
    assert found["dataset"] == "tiny"
    assert found["settings"]["flags"]["num_seeds"] == 2
    assert found["settings"]["unit"] == UNIT
    assert found["settings"]["step_seconds"] == 300
    assert list(found["methods"]) == list(METHODS)
    errors = {"mae", "rmse", "mape"}
    for method, entry in found["methods"].items():
        for tree in [entry["test"], entry["test_std"] or entry["test"]]:
            assert tree.keys() == {"rmse", "mae", "masked"}
            assert tree["masked"].keys() == {"15", "30", "60", "all"}
            assert all(leaf.keys() == errors for leaf in tree["masked"].values())
            numbers = [tree["rmse"], tree["mae"]]
            numbers += [x for leaf in tree["masked"].values() for x in leaf.values()]
            assert all(isinstance(x, float) for x in numbers)
        assert isinstance(entry["best_round"], int)
        assert isinstance(entry["seconds"], float)
        sent = entry["communication_bytes"]
        assert sent.keys() == {"up", "down"}
        assert all(isinstance(x, int) for x in sent.values())
        trained = method != "persistence"
        assert (sent["up"] > 0, entry["test_std"] is not None) == (trained, trained)
    assert [(line["method"], line["round"]) for line in machine.metrics("whole")] == [
        (method, round_)
        for method in ("gru_fedavg", "cnfgnn")
        for round_ in range(1, NUM_ROUNDS + 1)
    ]


# --- Kills ---------------------------------------------------------------------------


def test_a_run_killed_again_and_again_ends_as_if_never_stopped(machine, whole):
    del whole
    line = machine.command_line("killed", "--num_seeds=2", "--clients_per_chunk=2")
    metrics = machine.folder / "killed" / "metrics.jsonl"

    def killed_at(path, *flags):
        process = machine.run_killed(path, *line, *flags)
        assert process.returncode == -signal.SIGKILL, process.stderr

    killed_at("network.npz")  # before anything is there
    assert not metrics.exists()
    # In the second save: the line of its round is there, the checkpoint is not.
    killed_at("gru_fedavg/checkpoints/2", "--resume")
    assert len(machine.metrics("killed")) == 2
    saved = {path.name for path in machine.folder.glob("killed/gru_fedavg/*/*")}
    assert "1" in saved
    assert any("tmp" in name for name in saved)
    with open(metrics, "a") as file:
        file.write('{"method": "gru_fedavg", "round": 3, "train')
    # In the first save of the second method, before its first checkpoint.
    killed_at("cnfgnn/checkpoints/1", "--resume")
    assert list(machine.results("killed")["methods"]) == ["persistence", "gru_fedavg"]
    # After the last round, before the pictures.
    killed_at("forecasts.png", "--resume")
    assert not (machine.folder / "killed" / "forecasts.png").exists()
    process = machine.run(*line, "--resume")
    assert (process.returncode, process.stderr) == (0, "")
    binary.assert_same_run(machine, "killed", "whole")


# --- What a finished run is good for -------------------------------------------------


@pytest.fixture(scope="module")
def answers(machine, whole):
    """Answers to many command lines, by name."""
    del whole
    folder = machine.folder
    for name in ("resumed", "broken", "broken_score", "broken_network"):
        shutil.copytree(folder / "whole", folder / name)
    for name in ("broken", "broken_score"):
        checkpoint = folder / name / "cnfgnn" / "checkpoints" / "3"
        flip(checkpoint / "state" / "manifest.ocdbt", 8 * 50)
    network = folder / "broken_network" / "network.npz"
    network.write_bytes(network.read_bytes()[:100])
    write_network(folder / "other.npz", seed=1)
    write_network(folder / "short.npz", num_steps=25)
    content = (folder / "tiny.npz").read_bytes()
    (folder / "cut.npz").write_bytes(content[: len(content) // 2])
    (folder / "file").write_text("mine")
    other = f"--dataset={folder / 'other.npz'}"
    lines = {}

    def add(name, workdir, *flags, methods=METHODS):
        lines[name] = machine.command_line(workdir, *flags, methods=methods)

    def add_bad(*flags):
        add(
            flags[-1], f"bad{len(lines)}", *flags, methods=("gru_fedavg", "persistence")
        )

    two = "--num_seeds=2"
    add("resumed", "resumed", two, "--resume")  # clients_per_chunk as stored
    add("scored", "whole", two, "--eval_only")
    add("scored_on_validation", "whole", two, "--eval_only", "--split=validation")

    add("not resumed", "whole", two)
    add("other size", "whole", two, "--resume", "--hidden_size=8")
    add("other seeds", "whole", "--num_seeds=3", "--resume")
    add("other data", "whole", two, "--resume", other)
    add("other chunks", "whole", two, "--resume", "--clients_per_chunk=all")
    add("broken", "broken", two, "--resume")
    add("broken score", "broken_score", two, "--eval_only")
    add("broken network", "broken_network", two, "--resume")
    add("nothing to score", "nowhere", "--eval_only")
    add("a file", "file")
    add("below a file", "file/below")
    lines["no workdir"] = ["--resume", *machine.command_line("")[:1]]

    add_bad("--clients_per_chunk=zero")
    add_bad("--clients_per_chunk=0")
    add_bad("--participation=0")
    add_bad("--participation=1.5")
    add_bad("--participation=half")
    add_bad("--num_rounds=0")
    add_bad("--num_seeds=0")
    add_bad("--seed=-1")
    add_bad("--precision=float8")
    add_bad("--num_sensors=5")
    add_bad("--num_days=2")
    add_bad("--dataset=metrla")
    add_bad("--dataset=metr_la")
    add_bad(f"--data_dir={folder / 'nowhere'}", "--dataset=pems_bay")
    add_bad(f"--dataset={folder / 'short.npz'}")
    add_bad(f"--dataset={folder / 'cut.npz'}")
    add_bad(f"--dataset={folder / 'missing.npz'}")
    add_bad("--methods=cnfgnn,cnfnn")
    add_bad("--methods=")
    add_bad("--methods=cnfgnn,cnfgnn")
    add_bad("--methods=cnfgnn", "--gn_mlp_sizes=8,x")
    add_bad("--methods=cnfgnn", "--gn_mlp_sizes=8,0")
    add_bad("--no_such_flag=1")
    add_bad("stray")
    before = {path: path.stat().st_mtime_ns for path in (folder / "whole").rglob("*")}
    found = machine.run_many(lines)
    after = {path: path.stat().st_mtime_ns for path in (folder / "whole").rglob("*")}
    assert after == before, "a run that is only scored or refused is not touched"
    return found


def table_of(output):
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(UNIT))
    return lines[first : first + 2 + len(METHODS)]


def test_a_finished_run_resumed_is_the_same(machine, whole, answers):
    status, out, err = answers["resumed"]
    assert (status, err) == (0, "")
    assert "round" not in out.split(UNIT)[0]
    assert table_of(out) == table_of(whole.stdout)
    binary.assert_same_run(machine, "resumed", "whole")


def test_a_damaged_checkpoint_is_passed_over_with_a_note(machine, whole, answers):
    status, out, err = answers["broken"]
    assert (status, err) == (0, "")
    (note,) = [line for line in out.splitlines() if line.startswith("note:")]
    assert "cnfgnn/checkpoints/3: the checkpoint is damaged (" in note
    assert note.endswith("; going on from that of round 2")
    assert table_of(out) == table_of(whole.stdout)
    binary.assert_same_run(machine, "broken", "whole")


def test_a_checkpoint_is_scored_on_any_split(whole, answers):
    for name in ("scored", "scored_on_validation"):
        status, _, err = answers[name]
        assert (status, err) == (0, "")
    assert table_of(answers["scored"][1]) == table_of(whole.stdout)
    assert table_of(answers["scored_on_validation"][1]) != table_of(whole.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_two_seeds_are_two_runs(machine):
    chunks, method = "--clients_per_chunk=2", ("gru_fedavg",)
    lines = {
        name: machine.command_line(name, f"--seed={seed}", chunks, methods=method)
        for seed, name in enumerate(("seed0", "seed1"))
    }
    machine.outputs(lines)

    def score(workdir, key="test"):
        entry = machine.results(workdir)["methods"]["gru_fedavg"][key]
        return np.array([entry["rmse"], entry["masked"]["60"]["mae"]])

    alone = np.stack([score("seed0"), score("seed1")])
    assert not np.allclose(alone[0], alone[1])
    np.testing.assert_allclose(score("whole"), alone.mean(0), rtol=1e-5)
    deviation = alone.std(0, ddof=1)
    np.testing.assert_allclose(score("whole", "test_std"), deviation, rtol=1e-3)


# --- Bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not resumed", ["whole", "already holds a run", "--resume"]),
        ("other size", ["cnfgnn", "config.hidden_size=4, not 8"]),
        ("other seeds", ["saved with seeds=[0, 1], not [0, 1, 2]"]),
        ("other data", ["results.json", "other data"]),
        ("other chunks", ["config.clients_per_chunk=2, not None"]),
        ("broken score", ["cnfgnn/checkpoints/3", "is damaged", "resume the run"]),
        ("broken network", ["network.npz", "not a readable"]),
        ("nothing to score", ["nowhere", "holds no run to score"]),
        ("a file", ["is a file", "name a folder"]),
        ("below a file", ["file/below", "cannot be made"]),
        ("no workdir", ["need --workdir"]),
        ("--clients_per_chunk=zero", ["zero", "auto, all or a positive number"]),
        ("--clients_per_chunk=0", ["--clients_per_chunk=0", "positive number"]),
        ("--participation=0", ["--participation=0"]),
        ("--participation=1.5", ["--participation=1.5"]),
        ("--participation=half", ["--participation=half"]),
        ("--num_rounds=0", ["--num_rounds=0"]),
        ("--num_seeds=0", ["--num_seeds=0"]),
        ("--seed=-1", ["--seed=-1"]),
        ("--precision=float8", ["--precision=float8", "bfloat16"]),
        ("--num_sensors=5", ["4 sensors", "5"]),
        ("--num_days=2", ["1 days", "2"]),
        ("--dataset=metrla", ["metrla", "metr_la", "pems_bay"]),
        ("--dataset=metr_la", ["metr_la", "--download", "--data_dir"]),
        ("--dataset=pems_bay", ["nowhere", "no such folder"]),
        ("short.npz", ["short.npz", "25 time steps are too few"]),
        ("cut.npz", ["cut.npz", "not a readable"]),
        ("missing.npz", ["missing.npz", "no such file"]),
        ("--methods=cnfgnn,cnfnn", ["unknown method 'cnfnn'", "gru_fedavg"]),
        ("--methods=", ["--methods", "at least one"]),
        ("--methods=cnfgnn,cnfgnn", ["--methods", "each only once"]),
        ("--gn_mlp_sizes=8,x", ["--gn_mlp_sizes", "'x'", "whole number"]),
        ("--gn_mlp_sizes=8,0", ["--gn_mlp_sizes=8,0", "1 or more"]),
        ("--no_such_flag=1", ["no_such_flag"]),
        ("stray", ["unexpected argument 'stray'"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(answers, name, words):
    (key,) = [key for key in answers if key == name or key.endswith(f"/{name}")]
    binary.assert_refused(answers[key], words)


def test_a_file_in_the_way_is_left_alone(machine, answers):
    assert answers["a file"][0] == 2
    assert (machine.folder / "file").read_text() == "mine"
