"""Inductive runs, cost and sweep of `experiments.cnfgnn` as a user runs them."""

import itertools
import json

import numpy as np
import pytest

from tests.experiments import binary
from tests.experiments.test_cnfgnn import METHODS, Machine

pytestmark = pytest.mark.slow
LONGITUDE = np.array([-118.1, -118.4, -118.3, -118.2])
SEEN = [1, 2]
HALF = "--train_fraction=0.5"
SWEEP = ("--sweep=rounds", "--sweep_values=2,1")
PAIRS = list(itertools.product((2, 1), repeat=2))
ROUNDS = {"client_rounds", "server_rounds"}
OF_SINGLE_SENSORS = (
    *("at_without_fedavg", "split_learning", "gru_local", "gru_fmtl"),
    "historical_average",
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = Machine(tmp_path_factory.mktemp("machine"))
    with np.load(machine.folder / "tiny.npz") as arrays:
        arrays = dict(arrays)
    indices = {"longitude": LONGITUDE, "latitude": np.linspace(34, 35, 4)}
    np.savez(machine.folder / "placed.npz", **arrays, **indices)
    return machine


@pytest.fixture(scope="module")
def answers(machine):
    """Answers to many command lines, by name."""
    placed = f"--dataset={machine.folder / 'placed.npz'}"

    def line(name, *flags, methods=METHODS):
        flags = (placed, "--num_rounds=1", *flags)
        return machine.command_line(name, *flags, methods=methods)

    def sweep(name, *flags, methods=("cnfgnn",)):
        return line(name, *SWEEP, *flags, methods=methods)

    lines = {
        "inductive": line("inductive", HALF),
        "scored": line("inductive", HALF, "--eval_only"),
        "on training": line("inductive", HALF, "--eval_only", "--split=train"),
        "other share": line("inductive", "--train_fraction=0.75", "--resume"),
        "sweep": sweep("sweep"),
        "resumed": sweep("sweep", "--resume"),
        "sweep over a run": sweep("inductive", "--resume"),
        "run over a sweep": line("sweep", "--resume"),
        "scored sweep": sweep("sweep", "--eval_only"),
        "no indices": line("bad", HALF)[1:] + machine.command_line("bad")[:1],
        "too few": line("bad", "--train_fraction=0.1"),
        "zero": line("bad", "--train_fraction=0"),
        "all": line("bad", "--train_fraction=1"),
        "nan": line("bad", "--train_fraction=nan"),
        "strategy": line("bad", HALF, "--strategy=at_fedavg,sl"),
        "other sweep": line("bad", "--sweep=hidden_size"),
        "zero rounds": line("bad", "--sweep=rounds", "--sweep_values=1,0"),
        "same rounds": line("bad", "--sweep=rounds", "--sweep_values=1,1"),
        "no sweep": line("bad", "--sweep_values=1,2"),
        "sweep of others": sweep("bad", methods=("cnfgnn", "gru_fedavg")),
    }
    for name in ("same rounds", "zero rounds"):
        lines[name] = [*lines[name], "--methods=cnfgnn"]
    for method in OF_SINGLE_SENSORS:
        lines[method] = line("bad", HALF, methods=("cnfgnn", method))
    answers = machine.run_many(lines)
    assert not (machine.folder / "bad").exists()
    return answers


# --- Inductive ------------------------------------------------------------------------


def test_errors_are_of_all_seen_and_unseen_sensors(machine, answers):
    status, out, err = answers["inductive"]
    assert (status, err) == (0, "")
    rows = binary.table_of(out)
    found = machine.results("inductive")
    for entry, cells in zip(found["methods"].values(), rows.values(), strict=True):
        test = entry["test"]
        assert test["all"] == {key: test[key] for key in ("rmse", "mae")}
        groups = [test["seen"], test["unseen"]]  # two sensors each
        assert groups[0] != groups[1]
        mean = np.mean([group["rmse"] ** 2 for group in groups])
        assert test["rmse"] == pytest.approx(mean**0.5, rel=1e-5)
        mean = np.mean([group["mae"] for group in groups])
        assert test["mae"] == pytest.approx(mean, rel=1e-5)
        assert cells[2:4] == [f"{group['rmse']:.3f}" for group in groups]
    note = "trained on the first 2 of 4 sensors from west to east"
    assert f"note: {note}" in out and note in found["settings"]["notes"]
    assert found["settings"]["num_sensors"] == 4
    assert found["settings"]["flags"]["train_fraction"] == 0.5


def test_persistence_is_scored_on_the_sensors_themselves(machine, answers):
    del answers
    with np.load(machine.folder / "placed.npz") as arrays:
        speed = np.float32(arrays["speed"])
    starts = np.arange(107)[-21:, None]  # the last fifth of the windows
    truth = speed[starts + 12 + np.arange(12)]  # [S, 12, 4]
    errors = (truth - speed[starts + 11]) ** 2
    test = machine.results("inductive")["methods"]["persistence"]["test"]
    unseen = [sensor for sensor in range(4) if sensor not in SEEN]
    for name, sensors in (("seen", SEEN), ("unseen", unseen)):
        expected = np.sqrt(np.mean(errors[..., sensors]))
        assert test[name]["rmse"] == pytest.approx(expected, rel=1e-5)


def test_only_seen_sensors_exchange_bytes(machine, answers):
    del answers
    entry = machine.results("inductive")["methods"]["gru_fedavg"]
    size = 4 * (2 * (3 * 4 * (2 + 4) + 6 * 4) + 4 + 1)  # of a model of 4 units
    sent = {"up": len(SEEN) * size, "down": len(SEEN) * size}
    assert entry["communication_bytes_per_round"] == sent


def test_the_network_kept_is_whole_and_its_scaler_of_seen_sensors(machine, answers):
    del answers
    with np.load(machine.folder / "placed.npz") as arrays:
        speed = np.float32(arrays["speed"])
    inputs = [speed[start : start + 12, SEEN] for start in range(75)]
    with np.load(machine.folder / "inductive" / "network.npz") as network:
        assert network["adjacency"].shape == (4, 4)
        assert network["mean"] == pytest.approx(np.mean(inputs), rel=1e-5)
        assert network["std"] == pytest.approx(np.std(inputs), rel=1e-5)
    binary.assert_picture(machine.folder / "inductive" / "sensors.png")


def test_a_checkpoint_is_scored_on_the_whole_graph(answers):
    tables = {}
    for name in ("inductive", "scored", "on training"):
        status, out, err = answers[name]
        assert (status, err) == (0, "")
        tables[name] = binary.table_of(out)
    assert tables["scored"] == tables["inductive"] != tables["on training"]


# --- Cost -----------------------------------------------------------------------------


def test_trained_methods_have_a_cost_on_a_device(machine, answers):
    del answers
    found = machine.results("inductive")["methods"]
    costs = [entry.get("device_gflops") for entry in found.values()]
    assert costs[0] is None  # persistence
    products = [24 * 6 * 4 * 4, 12 * 6 * (4 * 4 + 8 * 8)]  # recurrent ones alone
    for cost, least in zip(costs[1:], products, strict=True):
        assert least < 1e9 * cost < 4 * least
    shown = [entry.get("device_gflops_as_printed") for entry in found.values()]
    step = 3 * 4 * (2 + 4) + 13 * 4
    assert shown[1] == pytest.approx(207 * (24 * step + 12 * 4) / 1e9)


# --- Sweep ----------------------------------------------------------------------------


def test_a_sweep_has_a_run_for_each_pair(machine, answers):
    status, _, err = answers["sweep"]
    assert (status, err) == (0, "")
    rows = json.loads((machine.folder / "sweep" / "sweep.json").read_text())
    assert [(row["client_rounds"], row["server_rounds"]) for row in rows] == PAIRS
    for row, (client, server) in zip(rows, PAIRS, strict=True):
        found = machine.results(f"sweep/{client}-{server}")
        entry = found["methods"][row["method"]]
        chosen = {key: found["settings"]["flags"][key] for key in row.keys() & ROUNDS}
        assert chosen == {"client_rounds": client, "server_rounds": server}
        assert {key: entry["config"][key] for key in chosen} == chosen
        assert row["rmse"] == entry["test"]["rmse"] and row["std"] is None
        for key in ("best_round", "communication_bytes"):
            assert row[key] == entry[key]
    assert len({row["rmse"] for row in rows}) == len(PAIRS)
    sent = [sum(row["communication_bytes"].values()) for row in rows]
    assert sent[0] == sent[2] > sent[1] == sent[3]  # R_s = 2 and 1
    binary.assert_picture(machine.folder / "sweep" / "sweep.png")


def test_a_finished_sweep_resumed_is_the_same(answers):
    status, out, err = answers["resumed"]
    assert (status, err) == (0, "")
    assert "round 1/1" not in out and out.count("best round") == len(PAIRS)


# --- Bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other share", ["results.json", "other data"]),
        ("sweep over a run", ["inductive", "holds a single run"]),
        ("run over a sweep", ["sweep", "holds a sweep"]),
        ("scored sweep", ["--eval_only", "single run"]),
        ("no indices", ["tiny: no latitude and longitude"]),
        ("too few", ["placed: a share of 0.1 is 0 of 4 sensors"]),
        ("zero", ["--train_fraction=0", "between 0 and 1"]),
        ("all", ["--train_fraction=1", "between 0 and 1"]),
        ("nan", ["--train_fraction=nan", "between 0 and 1"]),
        ("strategy", ["--train_fraction is not for split_learning", "unseen"]),
        ("other sweep", ["--sweep=hidden_size", "rounds"]),
        ("zero rounds", ["--sweep_values", "0"]),
        ("same rounds", ["--sweep_values", "different"]),
        ("no sweep", ["--sweep_values needs --sweep"]),
        ("sweep of others", ["gru_fedavg", "cnfgnn, at_without_fedavg"]),
        *((name, [f"not for {name}", "single"]) for name in OF_SINGLE_SENSORS),
    ],
)
def test_bad_input_is_one_line_and_status_2(answers, name, words):
    binary.assert_refused(answers[name], words)
