"""Settings of single methods: read, refused, passed on, and in the docs."""

import dataclasses
import pathlib
import re

import pytest

from experiments.studies import (
    cnfgnn_configs,
    cnfgnn_defaults,
    graphfl_methods,
    running,
)
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.graphfl import GraphFLStudy
from experiments.studies.sfl import SFLStudy
from experiments.studies.subgraphs import METHODS, SubgraphStudy, registered_name
from experiments.studies.subgraphs_problem import make_problem
from fedjax_graph.algorithms import get_method
from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "methods.md"
NOT_LISTED = (  # of all that extend FedAvg, or said in the text
    "aggregation_noise",
    *("federated_rounds", "generator_rounds"),
)


def read(*texts):
    """Settings of the methods that they name, by method."""
    methods = tuple(dict.fromkeys(text.partition(".")[0] for text in texts))
    study = SubgraphStudy(methods=methods, method_settings=texts)
    assert study.chosen_methods() == list(methods)
    return {x: study.settings_of(x, registered_name(x)) for x in methods}


def test_settings_have_the_types_of_their_fields():
    found = read(
        "fed_gta.kappa=0.25",
        "fed_gta.num_moments=3",
        "fed_gta.score=aggregated",
        "fed_avg.score=local",
        "graphfl.fine_tune=false",
        "moon.contrast_on=all",
    )
    assert found["fed_avg"] == {"score": "local"}
    assert found["fed_gta"] == {"kappa": 0.25, "num_moments": 3, "score": "aggregated"}
    assert type(found["fed_gta"]["num_moments"]) is int
    assert found["graphfl"]["fine_tune"] is False
    assert found["moon"] == {"contrast_on": "all"}


def test_a_tuple_is_read_with_an_x_between_its_items():
    found = read("fed_sage_plus.generator.layer_sizes=32x64")["fed_sage_plus"]
    assert found["generator"]["layer_sizes"] == (32, 64)
    assert found["generator"]["num_places"] == 5


@pytest.mark.parametrize("text", ["32", "1x2x3", "(8;16)", ""])
def test_a_tuple_of_another_length_is_refused(text):
    expected = "expected 2 values with an x between, each a whole number"
    with pytest.raises(InputError, match=f"{re.escape(repr(text))} found, {expected}"):
        read(f"fed_sage_plus.generator.layer_sizes={text}")


def test_nested_settings_leave_the_other_defaults_as_they_are():
    name = "ada_fgl.personal_optimizer"
    found = read(f"{name}.learning_rate=0.5", f"{name}.clip_norm=2")
    default = get_method("ada_fgl").fields["personal_optimizer"].default
    expected = dataclasses.replace(default, learning_rate=0.5, clip_norm=2.0)
    assert found["ada_fgl"] == {"personal_optimizer": dataclasses.asdict(expected)}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["fed_prox"], "expected METHOD.FIELD=VALUE"),
        (["fed_prox.proximal_weight"], "expected METHOD.FIELD=VALUE"),
        (["fed_prox.=1"], "expected METHOD.FIELD=VALUE"),
        (["fed_avg.x=1"], "fed_avg is none of the methods that run: fed_prox, fed_gta"),
        (["fed_prx.x=1"], r"fed_prx .* \(is fed_prox meant\?\)"),
        (["fed_gta.kapa=1"], r"'kapa' is no setting of fed_gta \(is kappa meant\?\)"),
        (["fed_gta.kappa=x"], "'x' found, expected a finite number"),
        (["fed_gta.kappa="], "'' found, expected a finite number"),
        (["fed_gta.num_moments=1.5"], "'1.5' found, expected a whole number"),
        (["fed_gta.score=mine"], "'mine' found, expected 'aggregated' or 'local'"),
        (["fed_gta.kappa.x=1"], "'kappa' has no field 'x'"),
        (["fed_prox.task=1"], "'task' is no setting of fed_prox"),
        (["fed_prox.participation=1"], "'participation' is no setting of fed_prox"),
        (["fed_prox.privacy=1"], "'privacy' is no setting of fed_prox"),
        (["fed_gta.num_moments=10000000"], "found, expected 1e.06 or less"),
        (["fed_gta.temperature=1e39"], "found, expected 1e.06 or less"),
        (["fed_gta.kappa=0", "fed_gta.kappa=1"], "fed_gta.kappa is given twice"),
    ],
)
def test_what_cannot_be_read_is_refused(texts, words):
    study = SubgraphStudy(methods=("fed_prox", "fed_gta"), method_settings=tuple(texts))
    start = re.escape(f"--method_settings={texts[-1]}: ")
    with pytest.raises(InputError, match=f"^{start}.*{words}"):
        study.chosen_methods()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("personal_optimizer=adam", "known: personal_optimizer.name, .*learning_rate"),
        ("personal_optimizer.rate=1", "no field 'rate'; known: name, learning_rate"),
    ],
)
def test_a_nested_setting_that_is_none_is_refused(text, words):
    with pytest.raises(InputError, match=words):
        read(f"ada_fgl.{text}")


def test_a_method_is_built_by_its_own_settings_alone(tmp_path):
    texts = "fed_prox.proximal_weight=0.5", "ada_fgl.federated_rounds=7"
    study = SubgraphStudy(
        methods=("fed_prox", "ditto", "ada_fgl"), method_settings=texts
    )
    problem = make_problem(study)
    built = {
        name: running.build(name, study._values(name, problem, tmp_path))[0]
        for name in study.methods
    }
    assert built["fed_prox"].proximal_weight == 0.5
    assert (
        built["ditto"].personal_weight
        == get_method("ditto").config_type.personal_weight
    )
    assert built["ada_fgl"].federated_rounds == 7


def sfl_values(study, method, workdir):
    return study.method_values(method) | {"task": TrafficRNNTask()}


def graphfl_values(study, method, workdir):
    return graphfl_methods.config_values(study.resolved(), method, 5, 3)


def test_what_flags_say_is_no_setting_of_a_method(tmp_path):
    """Or a setting would override a flag, or be overridden, without a word."""
    studies = (
        (CNFGNNStudy(), cnfgnn_values, cnfgnn_defaults.METHODS),
        (GraphFLStudy(first_order=True), graphfl_values, graphfl_methods.METHODS),
    )
    for study, values_of, methods in studies:
        for method in methods:
            name = registered_in(study, method)
            fields = get_method(name).fields
            said = set(values_of(study, method, tmp_path)) & set(fields)
            assert not said & set(study.own_fields(name)), method


def registered_in(study, method):
    of_graphfl = isinstance(study, GraphFLStudy)
    names = (
        graphfl_methods.registered_name if of_graphfl else cnfgnn_defaults.registered
    )
    return names(method)


def cnfgnn_values(study, method, workdir):
    return cnfgnn_configs.config_values(study, method, 100, workdir)


@pytest.mark.parametrize(
    ("study_type", "values_of", "flagged"),
    [
        (SFLStudy, sfl_values, "sfl.alpha"),
        (GraphFLStudy, graphfl_values, "graphfl.fine_tune"),
        (CNFGNNStudy, cnfgnn_values, "cnfgnn.hidden_size"),
        (CNFGNNStudy, cnfgnn_values, "gru_fmtl.weight"),
        (CNFGNNStudy, cnfgnn_values, "split_learning_fedavg.average_every_step"),
    ],
)
def test_other_studies_take_what_they_have_no_flags_for(
    study_type, values_of, flagged, tmp_path
):
    name, _, _ = flagged.partition(".")
    texts = "fed_prox.proximal_weight=0.25", "ditto.personal_weight=0.75"
    methods = ("fed_prox", "ditto", name)
    study = study_type(methods=methods, method_settings=texts)
    assert set(study.chosen_methods()) == set(methods)
    found = {
        x: running.build(x, values_of(study, x, tmp_path))[0]
        for x in ("fed_prox", "ditto")
    }
    assert found["fed_prox"].proximal_weight == 0.25
    assert found["ditto"].personal_weight == 0.75
    other = study_type(methods=methods, method_settings=(f"{flagged}=1",))
    with pytest.raises(InputError, match="this field has a flag of its own"):
        other.chosen_methods()


def test_a_nested_setting_keeps_what_flags_say_beside_it():
    study = SFLStudy(
        methods=("sfl_star",),
        structure_target="similarity",
        method_settings=("sfl_star.structure.embedding_size=3",),
    )
    values = study.method_values("sfl_star") | {"task": TrafficRNNTask()}
    structure = running.build("sfl_star", values)[0].structure
    expected = StructureConfig(target="similarity", embedding_size=3)
    assert structure == expected
    texts = ("sfl_star.structure.target=distance",)
    with pytest.raises(InputError, match="this field has a flag of its own"):
        dataclasses.replace(study, method_settings=texts).chosen_methods()


def test_a_saved_config_says_which_settings_it_needs():
    settings = {
        "fed_prox.proximal_weight": 0.25,
        "sfl_star.structure.embedding_size": 3,
        "sfl_star.structure.compares": "state",
        "fed_sage_plus.generator.layer_sizes": [8, 16],
        "graphfl.fine_tune": False,
    }
    study = SubgraphStudy(method_settings=("fed_prox.aggregation_noise=0.5",))
    for path, value in settings.items():
        method, *fields = path.split(".")
        saved: dict = {}
        inner = saved
        for name in fields[:-1]:
            inner = inner.setdefault(name, {})
        inner[fields[-1]] = value
        *found, last = study.settings_made_with(method, method, saved)
        assert last == "fed_prox.aggregation_noise=0.5"
        again = SubgraphStudy(method_settings=tuple(found))
        default = get_method(method).fields[fields[0]].default
        read_back = again.settings_of(method, method)[fields[0]]
        if len(fields) > 1:
            assert read_back == dataclasses.asdict(default) | {
                fields[1]: tuple(value) if isinstance(value, list) else value
            }
        else:
            assert read_back == value
    text = "fed_prox.proximal_weight=0.5"
    given = SubgraphStudy(method_settings=(text,))
    saved = {"proximal_weight": 0.25, "aggregation_noise": 0.0}
    assert given.settings_made_with("fed_prox", "fed_prox", saved) == (text,)


def test_a_run_records_its_settings_and_goes_on_with_them_alone(tmp_path):
    study = SubgraphStudy(
        methods=("fed_prox",),
        num_clients=2,
        num_rounds=1,
        hidden_size=2,
        method_settings=("fed_prox.proximal_weight=0.5",),
        workdir=str(tmp_path / "run"),
    )
    entry = study.run()["fed_prox"]
    assert entry["config"]["proximal_weight"] == 0.5
    assert "--method_settings=fed_prox.proximal_weight=0.5" in study.command()
    other = dataclasses.replace(study, method_settings=None, resume=True, num_rounds=2)
    with pytest.raises(InputError, match="proximal_weight"):
        other.run()


def settings_by_default(method):
    """The fields that `method_settings` may give a method and the docs list."""
    registered, found = registered_name(method), {}
    for name in SubgraphStudy().own_fields(registered):
        default = get_method(registered).fields[name].default
        is_nested = dataclasses.is_dataclass(default)
        inner = dataclasses.asdict(default) if is_nested else {"": default}
        for key, value in inner.items():
            is_optimizers = isinstance(default, OptimizerConfig)
            if value is None or value is False or (is_optimizers and not value):
                continue
            is_tuple = isinstance(value, tuple)
            text = "x".join(map(str, value)) if is_tuple else str(value)
            found[f"{name}.{key}".rstrip(".")] = text
    extends = issubclass(get_method(registered).config_type, FedAvgConfig)
    left_out = {*NOT_LISTED, "score"} if extends else NOT_LISTED
    return {key: x for key, x in found.items() if key not in left_out}


def test_the_docs_have_every_setting_and_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (`.*) \|$", DOCS.read_text(), re.M)
    said = {
        method: dict(re.findall(r"`([\w.]+)` ([^ ,]+)", text)) for method, text in rows
    }
    expected = {method: settings_by_default(method) for method in METHODS}
    expected = {method: own for method, own in expected.items() if own}
    assert expected.pop("sfl_per") == expected.pop("sfl_lg") == expected["sfl"]
    assert {method: said.get(method) for method in expected} == expected
