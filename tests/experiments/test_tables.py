"""The papers' tables: their data, which run fills a row, and flagfiles."""

import importlib
import json
import pathlib

import pytest
from absl import flags

from experiments.studies import options
from experiments.tables import commands, papers
from experiments.tables import runs as table_runs
from tests.experiments import binary

ROOT = pathlib.Path(__file__).parents[2]
FLAGFILES = ROOT / "experiments" / "flagfiles"
# What each study checks before it loads anything.
CHECKS = {
    "cnfgnn": ("chosen_methods",),
    "sfl": ("chosen_methods",),
    "graphfl": ("check", "chosen_methods", "swept_values"),
    "fl_agcns": ("check_methods",),
}
PAPERS = {name: papers.load_paper(name) for name in papers.PAPERS}
ROWS = [
    pytest.param(name, table, row, id=f"{name}-{table.number}-{number}")
    for name, paper in PAPERS.items()
    for table in paper.tables
    for number, row in enumerate(table.rows)
    if row.method is not None
]
METR_LA = {"num_sensors": 207, "num_steps": 34272}
SMALL = {"hidden_size": 100, "num_layers": 1}
LARGE = {"hidden_size": 200, "num_layers": 2}
GIB = 2**30


def table_of(name, number):
    (table,) = [table for table in PAPERS[name].tables if table.number == number]
    return table


def put(tree, path, value):
    """Puts a value where a path of keys leads."""
    *keys, last = path.split(".")
    for key in keys:
        tree = tree.setdefault(key, {})
    tree[last] = value


def make_run(name, table, row, flags=None, time=0.0, folder="run", **settings):
    """A run in full that has all figures of a table, each of them 1."""
    entry = {"test": {}, "config": dict(row.config)}
    for metric in table.metrics:
        for path in metric.paths:
            put(entry, path, 1.0)
    sizes = PAPERS[name].datasets[row.dataset].sizes
    settings = entry.pop("settings", {}) | {"flags": flags or {}} | sizes | settings
    return table_runs.Run(folder, time, row.dataset, settings, {row.method: entry})


def taken(name, table, row, *runs, defaults=None):
    return table_runs.find(row, table, PAPERS[name], runs, defaults or {})


def test_a_method_of_an_earlier_command_is_taken_with_its_flags():
    table = table_of("cnfgnn", 7)
    row = next(row for row in table.rows if row.method == "cnfgnn")
    flags = commands.row_flags(row)
    run = make_run("cnfgnn", table, row, flags)
    assert taken("cnfgnn", table, row, run).deviations == ()
    run.methods[row.method]["flags"] = flags | {"num_rounds": 2}
    assert taken("cnfgnn", table, row, run).deviations == ("num_rounds=2",)


# --- The data ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "table", "row"), ROWS)
def test_a_run_fills_its_own_row_only(name, table, row):
    run = make_run(name, table, row, commands.row_flags(row) | PAPERS[name].options)
    filled = [
        other
        for other in table.rows
        if other.method and taken(name, table, other, run) is not None
    ]
    assert filled == [row]
    found = taken(name, table, row, run)
    assert (found.cuts, found.deviations) == ((), ())


@pytest.mark.parametrize("name", PAPERS)
def test_rows_have_what_their_table_has_columns_for(name):
    for table in PAPERS[name].tables:
        for row in table.rows:
            assert len(row.labels) == len(table.columns)
            assert len(row.values) == len(table.metrics)
            assert any(value is not None for value in row.values)
        rows = [(row.labels, row.dataset) for row in table.rows]
        assert len(set(rows)) == len(rows)


def test_some_of_the_printed_figures():
    def value(name, number, labels, dataset):
        (row,) = [
            row
            for row in table_of(name, number).rows
            if (row.labels, row.dataset) == (labels, dataset)
        ]
        return row.values

    assert value("cnfgnn", 7, ("GRU (727K) + FMTL",), "metr_la") == (11.57,)
    assert value("cnfgnn", 9, ("CNFGNN", "5%"), "pems_bay") == (5.869, None, None)
    assert value("cnfgnn", 10, ("SL + FedAvg",), "pems_bay") == (4.383, 80.2)
    assert value("sfl", 1, ("SFL*",), "pems_d8") == (35.82, 34.68, 47.82)
    assert value("sfl", 2, ("SFL", "5"), "cifar10")[2] == (9.2, 5.53)
    assert value("graphfl", 2, ("SGC", "GraphFL", "6"), "cora") == (71.0,)
    assert value("graphfl", 3, ("20",), "citeseer") == (64,)
    assert value("fl_agcns", 4, ("SAGE",), "coauthor_physics")[1] == 1.078


# --- Which run counts ----------------------------------------------------------------


def gru_fedavg(size):
    """The row of Table 7 on METR-LA."""
    table = table_of("cnfgnn", 7)
    label = f"GRU ({size}) + FedAvg"
    (row,) = [r for r in table.rows if (*r.labels, r.dataset) == (label, "metr_la")]
    return table, row


def test_runs_of_another_binary_are_left_out(tmp_path):
    runs = {"a": "experiments.cnfgnn", "b": "experiments.sfl", "c": None}
    for name, module in runs.items():
        settings = {"flags": {}}
        if module is not None:
            settings["command"] = f"python -m {module} --dataset=metr_la"
        found = {"dataset": "metr_la", "settings": settings, "methods": {}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(found))
    found = [run.folder for run in table_runs.read_runs(tmp_path, "cnfgnn")]
    assert found == ["a", "c"]
    found = [run.folder for run in table_runs.read_runs(tmp_path, "sfl")]
    assert found == ["b", "c"]


def test_the_newest_run_counts():
    table, row = gru_fedavg("63K")
    old, new = (
        make_run("cnfgnn", table, row, time=time, folder=folder)
        for time, folder in ((1.0, "z"), (2.0, "a"))
    )
    for runs in ((old, new), (new, old)):
        assert taken("cnfgnn", table, row, *runs).run.folder == "a"


def test_a_run_by_the_defaults_counts_before_a_newer_one():
    table, row = gru_fedavg("63K")
    plain = make_run("cnfgnn", table, row, {"num_rounds": None}, time=1.0)
    short = make_run("cnfgnn", table, row, {"num_rounds": 3}, time=2.0)
    assert taken("cnfgnn", table, row, plain, short).run is plain
    alone = taken("cnfgnn", table, row, short)
    assert alone.deviations == ("num_rounds=3",)
    nothing = taken("cnfgnn", table, row, short, defaults={"num_rounds": 3})
    assert nothing.deviations == ()


def test_of_cut_runs_the_one_with_the_fewest_other_flags_counts():
    table, row = gru_fedavg("63K")
    cut = {"num_sensors": 16, "num_steps": 34272}
    flags = {"num_sensors": 16}
    plain = make_run("cnfgnn", table, row, flags, time=1.0, **cut)
    masked = make_run(
        "cnfgnn", table, row, flags | {"masked_loss": True}, time=2.0, **cut
    )
    for runs in ((plain, masked), (masked, plain)):
        assert taken("cnfgnn", table, row, *runs).run is plain


def test_a_dataset_in_full_counts_before_all_else():
    table, row = gru_fedavg("63K")
    flags = {"participation": 0.5}
    whole = make_run("cnfgnn", table, row, flags, time=1.0)
    cut = make_run("cnfgnn", table, row, time=2.0, num_sensors=16)
    assert taken("cnfgnn", table, row, cut, whole).run is whole
    assert taken("cnfgnn", table, row, cut).cuts == ("num_sensors is 16, not 207",)


def test_a_part_of_a_dataset_is_a_cut_of_it():
    table, row = table_of("cnfgnn", 7), table_of("cnfgnn", 7).rows[-2]
    run = make_run("cnfgnn", table, row, num_sensors=67)
    run = run._replace(dataset="pems_bay_subset")
    assert taken("cnfgnn", table, row, run).cuts == ("num_sensors is 67, not 325",)
    assert taken("cnfgnn", table, row, run._replace(dataset="synthetic")) is None


def test_a_run_with_all_figures_counts_before_one_without():
    table = table_of("cnfgnn", 8)
    row = table.rows[-1]
    whole = make_run("cnfgnn", table, row, time=1.0)
    part = make_run("cnfgnn", table, row, time=2.0)
    del part.methods[row.method]["device_gflops_as_printed"]
    assert taken("cnfgnn", table, row, part, whole).run is whole
    assert taken("cnfgnn", table, row, part).ours == (None, 2 / GIB)
    del part.methods[row.method]["communication_bytes"]
    assert taken("cnfgnn", table, row, part) is None


def test_sizes_of_models_are_told_apart_by_config():
    table, row = gru_fedavg("63K")
    run = make_run("cnfgnn", table, row, {"gru_hidden_size": 100})
    assert taken("cnfgnn", table, row, run) is not None
    for config in (LARGE, {"task": LARGE}):
        run.methods["gru_fedavg"]["config"] = config
        assert taken("cnfgnn", table, row, run) is None
    run.methods["gru_fedavg"]["config"] = {"task": SMALL | {"kind": "traffic_seq2seq"}}
    assert taken("cnfgnn", table, row, run) is not None


def test_none_in_a_row_is_the_default():
    table, row = gru_fedavg("63K")
    run = make_run("cnfgnn", table, row, {"train_fraction": 1.0})
    assert taken("cnfgnn", table, row, run) is None
    assert taken("cnfgnn", table, row, run, defaults={"train_fraction": 1.0})


def test_a_sweep_is_read_by_its_setting():
    table = table_of("graphfl", 2)
    row = table.rows[1]  # GCN, 6 labels of a class
    flags = {"task": "new_labels", "model": "gcn", "sweep": "labels_per_class"}
    setting = {"model": "gcn", "labels_per_class": 6, "overlap": None}
    run = make_run("graphfl", table, row, flags, setting=setting)
    assert [taken("graphfl", table, r, run) is not None for r in table.rows[:3]] == [
        False,
        True,
        False,
    ]
    assert taken("graphfl", table, row, run).deviations == ()


def test_what_another_sweep_changed_is_said():
    table = table_of("graphfl", 3)
    row = table.rows[0]
    flags = {"task": "self_training", "model": "gcn", "sweep": "overlap"}
    setting = {"model": "gcn", "pseudo_labels": 5, "overlap": 0.2}
    run = make_run("graphfl", table, row, flags, setting=setting)
    assert taken("graphfl", table, row, run).deviations == ("overlap=0.2",)


def test_deviations_over_draws_and_over_clients():
    table = table_of("graphfl", 3)
    row = table.rows[0]
    self_training = {"precision": 80.0, "precision_by_draw": [78.0, 80.0, 82.0]}
    run = make_run(
        *("graphfl", table, row, commands.row_flags(row)), self_training=self_training
    )
    assert taken("graphfl", table, row, run).ours == ((80.0, 2.0),)
    self_training["precision_by_draw"] = [80.0]
    assert taken("graphfl", table, row, run).ours == (80.0,)
    table = table_of("sfl", 2)
    row = table.rows[0]
    run = make_run("sfl", table, row, commands.row_flags(row))
    run.methods[row.method]["test"]["mean_accuracy_client_std"] = 9.0
    assert taken("sfl", table, row, run).ours == ((1.0, 9.0), 1.0, 1.0)


# --- Flagfiles -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPERS)
def test_flagfiles_are_those_of_the_tables(name):
    expected = commands.flagfiles(name, PAPERS[name])
    found = {path.name: path.read_text() for path in (FLAGFILES / name).iterdir()}
    assert found == expected


@pytest.mark.parametrize("name", PAPERS)
def test_each_row_is_in_a_flagfile(name):
    files = []
    for text in commands.flagfiles(name, PAPERS[name]).values():
        lines = [line[2:] for line in text.splitlines() if line.startswith("--")]
        files.append(dict(line.split("=", 1) for line in lines))
    for table in PAPERS[name].tables:
        for row in table.rows:
            flags = {k: str(v) for k, v in commands.row_flags(row).items()}
            value = flags.pop(table.sweep, None)
            assert row.method is None or any(
                flags.items() <= file.items()
                and row.method in file["methods"].split(",")
                and (value is None or value in file["sweep_values"].split(","))
                for file in files
            )


@pytest.mark.parametrize("name", CHECKS)
def test_a_binary_reads_its_flagfiles(name):
    module, study = table_runs.STUDIES[name].split(":")
    study_type = getattr(importlib.import_module(module), study)
    binary.forget_flags()
    options.define_flags(study_type)
    for path in (FLAGFILES / name).iterdir():
        flags.FLAGS.unparse_flags()
        flags.FLAGS([name, f"--flagfile={path}"])
        study = options.from_flags(study_type)
        for check in CHECKS[name]:
            getattr(study, check)()
    binary.forget_flags()
    defaults = options.defaults_of(study_type)
    rows = [row for table in PAPERS[name].tables for row in table.rows]
    named = {flag for row in rows for flag in row.flags} | PAPERS[name].options.keys()
    assert named | {"num_rounds", "seed"} <= defaults.keys()
    assert not {"paper", "table", "runs", "out"} & defaults.keys()
