"""Options of clients that are not to be trusted: what they choose, what they refuse."""

import types

import pytest

from experiments.studies import cnfgnn_configs, graphfl_methods, running
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.graphfl import GraphFLStudy
from experiments.studies.running import config_of
from experiments.studies.sfl import SFLStudy
from experiments.studies.subgraphs import SubgraphStudy
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import HONEST, Misbehaviour
from fedjax_graph.core.privacy import Privacy

CONDUCT = {"dropout_rate": 0.2, "byzantine_fraction": 0.1, "attack": "noise"}
STUDIES = (CNFGNNStudy, GraphFLStudy, SFLStudy, SubgraphStudy)


@pytest.mark.parametrize("study_type", STUDIES)
def test_options_become_fields_of_configs(study_type):
    study = study_type(**CONDUCT, aggregator="krum", tolerance=0.3)
    config = config_of("cnfgnn", study.trust_values())
    assert config.misbehaviour == Misbehaviour(**CONDUCT)
    assert (config.aggregator, config.tolerance) == ("krum", 0.3)
    assert config_of("cnfgnn", study_type().trust_values()).misbehaviour == HONEST


@pytest.mark.parametrize("study_type", STUDIES)
def test_privacy_is_promised_where_there_is_noise(study_type):
    assert study_type().trust_values() == {}
    study = study_type(dp_noise_multiplier=2.0, dp_clip_norm=0.5, dp_delta=1e-6)
    promised = Privacy(noise_multiplier=2.0, clip_norm=0.5, delta=1e-6)
    assert config_of("cnfgnn", study.trust_values()).privacy == promised


def values_of_cnfgnn(study, folder, method="cnfgnn"):
    return cnfgnn_configs.config_values(study, method, 9, folder)


def values_of_graphfl(study, folder):
    del folder
    return graphfl_methods.config_values(study, "fl", num_features=4, num_classes=3)


def values_of_sfl(study, folder):
    del folder
    return study.method_values("fed_avg") | {"task": {"kind": "traffic_rnn"}}


def values_of_subgraphs(study, folder, method="fed_avg"):
    del folder
    sizes = {"num_features": 4, "num_classes": 3}
    return study.method_values(method, types.SimpleNamespace(sizes=sizes))


@pytest.mark.parametrize(
    ("study_type", "method", "values_of"),
    [
        (CNFGNNStudy, "cnfgnn", values_of_cnfgnn),
        (CNFGNNStudy, "fed_avg", lambda *a: values_of_cnfgnn(*a, "gru_fedavg")),
        (GraphFLStudy, "fed_avg", values_of_graphfl),
        (SFLStudy, "fed_avg", values_of_sfl),
        (SubgraphStudy, "fed_avg", values_of_subgraphs),
    ],
)
def test_methods_get_what_the_options_say(study_type, method, values_of, tmp_path):
    """By the values that a study makes the config of each of its methods of."""
    robust = {"aggregator": "krum", "tolerance": 0.3}
    for options in (robust, {"secure_aggregation": "masks"}):
        study = study_type(**CONDUCT, **options)
        config = config_of(method, values_of(study, tmp_path))
        assert config.misbehaviour == Misbehaviour(**CONDUCT)
        assert {name: getattr(config, name) for name in options} == options
    private = study_type(dp_noise_multiplier=2.0, dp_clip_norm=0.5)
    config = config_of(method, values_of(private, tmp_path))
    assert config.privacy == Privacy(noise_multiplier=2.0, clip_norm=0.5)


@pytest.mark.parametrize("study_type", STUDIES)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dropout_rate": 1.0}, "--dropout_rate=1.0: expected"),
        ({"attack": "lie"}, "--attack=lie: expected one of sign_flip"),
        ({"attack": "noise"}, "--attack needs --byzantine_fraction"),
        ({"straggler_work": 0.1}, "--straggler_work needs --straggler_rate"),
        ({"aggregator": "mean"}, "--aggregator=mean: unknown; known: median"),
        ({"secure_aggregation": "rsa"}, "--secure_aggregation=rsa: expected one of"),
        ({"dp_noise_multiplier": 0.0}, "--dp_noise_multiplier=0.0: expected"),
        ({"dp_clip_norm": 2.0}, "--dp_clip_norm needs --dp_noise_multiplier"),
        (
            {"dp_noise_multiplier": 1.0, "on_nan": "skip_client"},
            "on_nan=skip_client .* is not private",
        ),
        ({"tolerance": 0.5}, "--tolerance=0.5: expected 0.49 or less"),
        ({"tolerance": 0.4}, "--tolerance: --aggregator=weighted_mean takes none"),
        ({"tolerance": 0.4, "aggregator": "median"}, "--aggregator=median takes none"),
        (
            {"byzantine_fraction": 0.1, "attack": "label_flip", "attack_scale": 9.0},
            "--attack_scale: --attack=label_flip has none",
        ),
        ({"dp_noise_multiplier": 1e7}, "--dp_noise_multiplier=10000000.0: expected"),
    ],
)
def test_what_does_not_fit_is_one_line(study_type, settings, words):
    with pytest.raises(InputError, match=words):
        study_type(**settings).chosen_methods()


@pytest.mark.parametrize(
    ("study", "words"),
    [
        (
            CNFGNNStudy(methods=("cnfgnn", "gru_centralized"), dropout_rate=0.1),
            "--dropout_rate is not for gru_centralized",
        ),
        (
            CNFGNNStudy(methods=("gru_fmtl",), aggregator="median"),
            "--aggregator concerns none of the methods gru_fmtl",
        ),
        (
            CNFGNNStudy(methods=("gru_gn",), secure_aggregation="masks"),
            "--secure_aggregation is not for gru_gn",
        ),
        (GraphFLStudy(methods=("il",), tolerance=0.1), "--tolerance concerns none"),
        (
            CNFGNNStudy(methods=("persistence",), dropout_rate=0.5),
            "--dropout_rate concerns none of the methods persistence",
        ),
        (
            CNFGNNStudy(methods=("gru_fedavg",), edge_parts=2),
            "--edge_parts concerns none of the methods gru_fedavg",
        ),
        (
            CNFGNNStudy(
                methods=("gru_fedavg", "persistence"),
                dp_noise_multiplier=1.0,
                dp_hidden_clip_norm=2.0,
            ),
            "--dp_hidden_clip_norm concerns none of the methods gru_fedavg, persiste",
        ),
        (
            GraphFLStudy(dp_noise_multiplier=1.0, dp_gradient_clip_norm=2.0),
            "--dp_gradient_clip_norm concerns none of the methods il, fl, graphfl",
        ),
    ],
)
def test_methods_that_an_option_does_not_concern_are_refused(study, words):
    with pytest.raises(InputError, match=words):
        study.chosen_methods()


@pytest.mark.parametrize(
    ("study_type", "method", "values_of", "reason"),
    [
        (
            CNFGNNStudy,
            "moon",
            values_of_cnfgnn,
            "epsilon does not account for the last",
        ),
        (CNFGNNStudy, "fed_proto", values_of_cnfgnn, "prototypes, which are neither"),
        (SubgraphStudy, "ada_fgl", values_of_subgraphs, "epsilon does not account for"),
    ],
)
def test_a_method_that_is_not_private_says_why(
    study_type, method, values_of, reason, tmp_path
):
    study = study_type(methods=(method,), dp_noise_multiplier=1.0)
    values = values_of(study, tmp_path, method)
    with pytest.raises(InputError, match=f"^--dp_noise_multiplier: .*{reason}"):
        running.build(method, values)


def test_who_is_not_trained_may_stand_beside_misbehaving_clients():
    study = CNFGNNStudy(methods=("cnfgnn", "persistence"), dropout_rate=0.1)
    assert study.chosen_methods() == ["cnfgnn", "persistence"]
