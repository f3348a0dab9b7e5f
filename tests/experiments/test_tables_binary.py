"""What `python -m experiments.tables` prints and writes."""

import csv
import os

import numpy as np
import pytest

from fedjax_graph.core.communication import Bytes, Ledger
from fedjax_graph.driver import results
from fedjax_graph.driver.rounds import RunResult
from tests.experiments import binary
from tests.experiments.test_tables import GIB, LARGE, METR_LA, PAPERS, SMALL


def write_run(folder, dataset, sizes, methods, flags):
    """A `results.json` as the binaries write it; errors by method and seed."""
    folder.mkdir(parents=True)
    entries = {}
    for method, (rmse, config) in methods.items():
        result = RunResult(
            best_state=None,
            test={"rmse": np.array(rmse)},
            best_round=np.arange(4, 4 + len(rmse)),
            num_rounds=9,
            communication=Ledger(rounds=((1, Bytes(up=GIB, down=2 * GIB)),)),
            seconds=1.0,
            compile_seconds=1.0,
        )
        entries[method] = results.method_entry(result, ("rmse",), config)
    results.write_results(folder, dataset, {"flags": flags, **sizes}, entries)


CUT = METR_LA | {"num_sensors": 16}
OURS = (12.0, 12.2, 12.5)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with runs, old ones first."""
    machine = binary.Machine(
        tmp_path_factory.mktemp("machine"), "experiments.tables.__main__"
    )
    runs = machine.folder / "runs"
    large = {"gru_hidden_size": 200, "gru_layers": 2}
    for number, (folder, given, *run) in enumerate(
        [
            ("old/gru", {}, "metr_la", METR_LA, {"gru_fedavg": ([99.0], SMALL)}),
            ("gru", {}, "metr_la", METR_LA, {"gru_fedavg": (OURS, SMALL)}),
            ("large", large, "metr_la", METR_LA, {"gru_fedavg": ([11.0], LARGE)}),
            ("$^$", {"num_rounds": 3}, "metr_la", METR_LA, {"cnfgnn": ([11.9], {})}),
            ("cut", {}, "metr_la", CUT, {"gru_local": ([8.0], SMALL)}),
        ]
    ):
        write_run(runs / folder, *run, given)
        os.utime(runs / folder / "results.json", (number, number))
    return machine


@pytest.fixture(scope="module")
def answers(machine):
    """Status, output and errors of many command lines."""
    folder = machine.folder
    (folder / "a_file").write_text("")
    for name, text in {
        "torn": '{"dataset": ',
        "foreign": '{"score": 1}',
        "list": "[1]",
        "no_test": '{"dataset": "a", "settings": {"flags": {}}, "methods": {"b": {}}}',
    }.items():
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep" / "results.json").write_text(text)

    def line(*flags, runs="runs", out="out"):
        return [f"--runs={folder / runs}", f"--out={folder / out}", *flags]

    paper = "--paper=cnfgnn"
    broken = ("torn", "foreign", "list", "no_test")
    return machine.run_many(
        {
            "all": line(paper),
            "cut": line(paper, "--table=7", "--allow_cut", out="cut"),
            "commands": [paper, "--table=9", "--commands"],
            "no paper": line(),
            "unknown paper": line("--paper=mine"),
            "unknown table": line(paper, "--table=1"),
            "no runs": [paper, f"--out={folder / 'out'}"],
            "no out": [paper, f"--runs={folder / 'runs'}"],
            "no folder": line(paper, runs="nowhere"),
            "a file": line(paper, out="a_file"),
            **{name: line(paper, runs=name) for name in broken},
        }
    )


def rows_of(text):
    """Cells of the rows of a Markdown table, by method and dataset."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {(method, dataset): cells for method, dataset, *cells in rows}


def read_table(machine, folder, number):
    path = machine.folder / folder / f"cnfgnn_table_{number}"
    text = path.with_suffix(".md").read_text()
    with open(path.with_suffix(".csv"), newline="") as file:
        return text, list(csv.DictReader(file))


def test_all_tables_are_printed_and_written(machine, answers):
    status, out, err = answers["all"]
    assert (status, err) == (0, "")
    numbers = [table.number for table in PAPERS["cnfgnn"].tables]
    written = {path.name for path in (machine.folder / "out").iterdir()}
    ends = ("md", "csv", "png")
    assert written == {f"cnfgnn_table_{n}.{end}" for n in numbers for end in ends}
    for number in numbers:
        assert read_table(machine, "out", number)[0] in out
        binary.assert_picture(machine.folder / "out" / f"cnfgnn_table_{number}.png")


def test_figures_stand_beside_the_papers(machine, answers):
    del answers
    text, lines = read_table(machine, "out", 7)
    rows = rows_of(text)
    mean, std = np.mean(OURS), np.std(OURS, ddof=1)
    ours = f"{mean:.3f} ± {std:.3f}"
    gap = f"+{mean - 12.132:.3f}"
    assert rows["GRU (63K) + FedAvg", "METR-LA"] == [
        *("12.132", ours, gap, "in full", "[1]")
    ]
    assert rows["GRU (727K) + FedAvg", "METR-LA"] == [
        *("12.058", "11.000", "-1.058", "in full", "[2]")
    ]
    assert rows["CNFGNN", "METR-LA"][1:] == ["11.900", "+0.413", "in full", "[3]"]
    for method, dataset in (("GRU (local, 63K)", "METR-LA"), ("CNFGNN", "PEMS-BAY")):
        assert rows[method, dataset][1:] == ["not run", "", "", ""]
    notes = [line for line in text.splitlines() if line.startswith("[")]
    assert notes[0].startswith("[1] gru: 3 seeds, of 19")
    assert "flags" not in notes[0] + notes[1]
    assert notes[2].endswith("; flags that are not the defaults: num_rounds=3")
    assert "of a cut dataset only, which --allow_cut shows: 1." in text
    assert "8.000" not in text
    found = {(line["method"], line["dataset"]): line for line in lines}
    line = found["GRU (63K) + FedAvg", "METR-LA"]
    assert float(line["ours"]) == pytest.approx(mean)
    assert float(line["ours ±"]) == pytest.approx(std)
    assert float(line["difference"]) == pytest.approx(mean - 12.132)
    assert (line["paper"], line["seeds"], line["run"]) == ("12.132", "3", "gru")
    line = found["CNFGNN", "PEMS-BAY"]
    assert (line["paper"], line["ours"], line["seeds"]) == ("3.822", "", "not run")


def test_traffic_is_in_gib_up_to_the_best_round(machine, answers):
    del answers
    text, _ = read_table(machine, "out", 3)
    cells = rows_of(text)["AT + FedAvg", "METR-LA"]
    assert cells[:3] == ["46", "4", "-42"]
    assert cells[3:6] == ["222.246", "12.000", "-210.246"]  # 4 rounds of 3 GiB


def test_a_figure_that_a_run_lacks(machine, answers):
    del answers
    text, _ = read_table(machine, "out", 8)
    cells = rows_of(text)["CNFGNN", "METR-LA"]
    assert cells[:3] == ["0.1620", "not in the run", ""]


def test_a_cut_dataset_is_shown_on_demand_and_said(machine, answers):
    status, out, err = answers["cut"]
    assert (status, err) == (0, "")
    text, lines = read_table(machine, "cut", 7)
    cells = rows_of(text)["GRU (local, 63K)", "METR-LA"]
    assert cells == ["11.801", "8.000", "-3.801", "cut", "[1]"]
    notes = [line for line in text.splitlines() if line.startswith("[1]")]
    assert "CUT DATASET metr_la: num_sensors is 16, not 207" in notes[0]
    assert [line["data"] for line in lines].count("cut") == 1
    assert rows_of(text)["GRU (63K) + FedAvg", "METR-LA"][3] == "in full"


def test_commands_of_rows(answers):
    status, out, err = answers["commands"]
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 2 * 20
    assert lines[lines.index("# Table 9: CNFGNN, 25%, METR-LA") + 1] == (
        "python -m experiments.cnfgnn --dataset=metr_la --train_fraction=0.25 "
        "--methods=cnfgnn"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "no paper": ["--paper", "fl_agcns"],
        "unknown paper": ["--paper", "mine", "fl_agcns"],
        "unknown table": ["--table=1", "CNFGNN", "2, 3, 4", "10"],
        "no runs": ["--runs and --out"],
        "no out": ["--runs and --out"],
        "no folder": ["--runs=", "nowhere", "not a folder"],
        "a file": ["--out=", "a_file", "cannot be made"],
        "torn": ["torn/deep/results.json", "cannot read"],
        "foreign": ["foreign/deep/results.json", "cannot read"],
        "list": ["list/deep/results.json", "cannot read"],
        "no_test": ["no_test/deep/results.json", "cannot read"],
    }.items(),
)
def test_bad_input_is_one_line_and_status_2(answers, name, words):
    binary.assert_refused(answers[name], words)
