"""What --help of the binaries says."""

import dataclasses
import importlib
import re

import pytest

from experiments import usage
from experiments.robustness import RobustnessStudy
from experiments.studies import options
from experiments.studies.base import Study
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.fl_agcns import FLAGCNSStudy
from experiments.studies.graphfl import GraphFLStudy
from experiments.studies.sfl import SFLStudy
from experiments.studies.subgraphs import SubgraphStudy
from experiments.studies.trust import TrustStudy
from fedjax_graph.core.errors import InputError
from tests.experiments import binary

SYSTEMS = (CNFGNNStudy, SFLStudy, GraphFLStudy, FLAGCNSStudy, SubgraphStudy)
OTHERS = (
    "datasets:DatasetsStudy",
    "benchmark:BenchmarkStudy",
    "tables.__main__:TablesStudy",
)


def study_types():
    for name in OTHERS:
        module, _, study_type = name.partition(":")
        yield getattr(importlib.import_module(f"experiments.{module}"), study_type)
    yield from SYSTEMS


def entries(study, columns=88):
    """What stands behind each flag, on one line."""
    text = usage.text(study, "About.", columns)
    parts = re.split(r"\n  --", text)[1:]
    found = {re.match(r"(?:\[no\])?(\w+)", part)[1]: part for part in parts}
    return {name: " ".join(part.split()) for name, part in found.items()}


@pytest.mark.parametrize("study_type", [*study_types()])
def test_every_flag_has_what_it_does_and_its_default(study_type):
    study = study_type()
    found = entries(study)
    known = options.options_of(study_type)
    assert found.keys() >= known.keys() - study.refused.keys()
    for name in known.keys() & found.keys():
        field = known[name]
        assert " ".join(field.metadata["help"].split()) in found[name]
        assert re.search(r" \[[^]]+\]", found[name]), name
        for choice in field.metadata["choices"] or ():
            assert choice in found[name]


@pytest.mark.parametrize("study_type", SYSTEMS)
def test_flags_stand_under_their_subjects_and_methods_are_listed(study_type):
    text = usage.text(study_type(), "Trains.\n", 88)
    subjects = re.findall(r"(?m)^(\S.*)\n  --", text)
    assert subjects[:2] == ["Data", "Methods and rounds"]
    trust = [TrustStudy.subject] if issubclass(study_type, TrustStudy) else []
    assert subjects[2:] == [study_type.subject, *trust, "Output", "Machine", "Help"]
    assert text.startswith(f"Trains.\n\n{study_type.duration}")
    methods = entries(study_type())["methods"]
    for name, title in study_type().known_methods().items():
        assert f" {name} {title}" in methods


@pytest.mark.parametrize("study_type", [FLAGCNSStudy, RobustnessStudy])
def test_what_a_study_refuses_is_left_out(study_type):
    shown, refused = entries(study_type()), study_type.refused
    assert refused and refused.keys() <= options.options_of(study_type).keys()
    assert shown.keys().isdisjoint(refused)


@pytest.mark.parametrize("columns", [0, 20, 40, 60, 88, 300])
def test_lines_fit_any_terminal(columns):
    text = usage.text(CNFGNNStudy(), "About.", columns)
    widest = 88 if columns in (0, 300) else max(columns, 40)
    assert max(map(len, text.splitlines())) <= widest


@pytest.mark.parametrize(
    ("study", "expected"),
    [
        (CNFGNNStudy(), {"num_rounds": "6", "hidden_size": "32", "dataset": "synth"}),
        (
            CNFGNNStudy(dataset="metr_la"),
            {"num_rounds": "500", "hidden_size": "64", "num_sensors": "all"},
        ),
        (CNFGNNStudy(dataset="pems_bay"), {"server_rounds": "20"}),
        (SFLStudy(), {"num_clients": "20", "width": "8", "methods": "fed_avg,sfl"}),
        (SFLStudy(dataset="cifar10"), {"num_clients": "100", "local_epochs": "20"}),
        (SFLStudy(dataset="metr_la"), {"learning_rate": "0.01", "model": "rnn"}),
        (GraphFLStudy(), {"num_seeds": "3", "labels_per_class": "40"}),
        (
            GraphFLStudy(dataset="cora", model="sgc"),
            {"num_seeds": "1", "labels_per_class": "80", "local_rate": "1]"},
        ),
        (
            SFLStudy(dataset="synthetic_largest_sd"),
            {"split_ratio": "60/20/20]"},
        ),
        (SFLStudy(dataset="largest_sd"), {"split_ratio": "60/20/20]"}),
        (SFLStudy(dataset="metr_la"), {"split_ratio": "70/10/20]"}),
        (GraphFLStudy(), {"patience": "none]"}),
        (
            GraphFLStudy(protocol="code", patience=7),
            {"eval_every": "1]", "first_order": "yes", "patience": "7]"},
        ),
        (
            FLAGCNSStudy(),
            {"dataset": "synthetic_mixed]", "num_generations": "2", "num_retrain": "3"},
        ),
        (FLAGCNSStudy(space="2022", fitness_from="shared"), {"num_warm_up": "50]"}),
        (
            FLAGCNSStudy(space="2022", fitness_from="shared", num_warm_up=0),
            {"num_warm_up": "0]"},
        ),
        (FLAGCNSStudy(dataset="physics"), {"num_clients": "18]"}),
        (
            RobustnessStudy(attack="noise"),
            {"methods": "fl]", "on_nan": "ignore]", "workdir": "runs/robustness-"},
        ),
        (RobustnessStudy(), {"dataset": "synthetic]", "patience": "none]"}),
        (SubgraphStudy(), {"dataset": "synthetic_graph]", "num_rounds": "20]"}),
        (SubgraphStudy(dataset="cora"), {"dataset": "cora]", "num_rounds": "100]"}),
        (
            FLAGCNSStudy(dataset="pubmed"),
            {"num_clients": "12", "num_generations": "6", "num_retrain": "10"},
        ),
    ],
)
def test_defaults_are_those_of_the_dataset_beside_help(study, expected):
    found = entries(study)
    for name, value in expected.items():
        assert f"[{value}" in found[name], (name, found[name])


def test_a_default_that_depends_on_nonsense_is_refused():
    with pytest.raises(InputError, match="unknown dataset 'nonsense'"):
        usage.text(SFLStudy(dataset="nonsense"), "", 88)


def test_every_option_of_a_study_has_a_subject():
    """A mixin without one of its own has that of the classes below it."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mixin(options.Options):
        subject = "A mixin's"
        extra: int = options.option(1, "Of the mixin.", lower=1)

    assert options.subject_of(Mixin, "extra") == "A mixin's"
    assert options.subject_of(GraphFLStudy, "participation") == Study.subject


def test_help_and_version_of_a_binary_end_well(tmp_path):
    machine = binary.Machine(tmp_path, "experiments.tables")
    answers = [machine.run(flag) for flag in ("--help", "--version")]
    assert [(x.returncode, x.stderr) for x in answers] == [(0, ""), (0, "")]
    assert "--paper=TEXT" in answers[0].stdout
    assert re.fullmatch(r"fedjax_graph \d+\.\d+\.\d+\n", answers[1].stdout)
