"""The pretrained models as a user meets them."""

import json
import os
import shlex

import numpy.testing as npt
import pytest

from experiments.pretrained import PretrainedStudy
from experiments.studies.cnfgnn import CNFGNNStudy
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import pretrained
from tests.experiments import forks


def test_models_are_listed_and_shown(capsys):
    PretrainedStudy().run()
    _, _, *rows = capsys.readouterr().out.splitlines()
    listed = {name: rest for name, *rest in map(str.split, rows)}
    assert list(listed) == pretrained.names()
    gru = ["gru_fedavg", "metr_la", "62,501", "12.134"]
    assert listed["metr_la_gru_fedavg"] == gru
    PretrainedStudy(name="synthetic_cnfgnn").run()
    card = json.loads(capsys.readouterr().out)
    assert card["method"] == "cnfgnn"
    assert card["dataset"] == "synthetic"
    assert card["parameters"] > 10_000


@pytest.mark.parametrize("name", pretrained.names())
def test_a_card_names_a_command_that_anybody_can_give(name):
    card = pretrained.read(name).card
    words = shlex.split(card["command"])
    given = {word.partition("=")[0].removeprefix("--") for word in words}
    assert not given & set(pretrained.OWN_FLAGS)
    assert len(card["source"]["git_commit"]) == 40  # and not "dirty"


# Asked for a number that is not JAX's own, in a process that has not used JAX.
SCORED = """
import jax
from experiments.studies.cnfgnn import CNFGNNStudy
def stop(study):
    print(jax.device_count(), study.methods)
    raise SystemExit
CNFGNNStudy.chosen_methods = stop
CNFGNNStudy(pretrained="synthetic_cnfgnn", eval_only=True, num_cpu_devices=3).run()
"""


def test_a_model_is_scored_on_as_many_devices_as_asked():
    process = forks.run(SCORED, environment=dict(os.environ))
    assert (process.stdout, process.stderr) == ("3 ('cnfgnn',)\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", pretrained.names())
def test_a_model_of_the_package_has_the_scores_of_its_card(request, name):
    model = pretrained.read(name)
    card, options = model.card, {}
    if card["dataset"] != "synthetic":
        folder = request.getfixturevalue("data_dir")
        options = {"dataset": card["dataset"], "data_dir": str(folder)}
    study = CNFGNNStudy(pretrained=name, eval_only=True, **options)
    entry = study.run()[model.method]
    npt.assert_allclose(entry["test"]["rmse"], card["test"]["rmse"], rtol=1e-3)
    assert entry["best_round"] == card["best_round"]


@pytest.mark.parametrize(
    "name, given, expected",
    [
        ("metr_la_cnfgnn", {}, 100.0),
        ("metr_la_cnfgnn", {"sampling_decay": 60.0}, 60.0),
        ("metr_la_gru_fedavg", {}, None),
    ],
)
def test_what_only_training_reads_is_the_models(monkeypatch, name, given, expected):
    scored = []

    def stop(study):
        scored.append(study)
        raise InputError("enough")

    monkeypatch.setattr(CNFGNNStudy, "set_up_jax", lambda study: None)
    monkeypatch.setattr(CNFGNNStudy, "chosen_methods", stop)
    with pytest.raises(InputError, match="enough"):
        CNFGNNStudy(pretrained=name, eval_only=True, **given).run()
    assert scored[0].sampling_decay == expected
    assert scored[0].dataset == "metr_la"  # as the card says


@pytest.mark.parametrize(
    "options, words",
    [
        ({"workdir": "runs/mine"}, "--workdir needs --to=FILE.npz"),
        ({"workdir": "runs/mine", "to": "mine.txt"}, "--workdir needs --to=FILE.npz"),
        ({"name": "nothing"}, "no such model"),
        ({"name": "synthetic_cnfgnn", "to": "x.npz"}, "--method and --note need --wor"),
        ({"method": "sfl"}, "--method and --note need --workdir"),
        ({"note": "of a GPU"}, "--method and --note need --workdir"),
    ],
)
def test_what_does_not_fit_is_one_line(options, words):
    with pytest.raises(InputError, match=words) as error:
        PretrainedStudy(**options).run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_only": True, "workdir": "runs/mine"},
        {"eval_only": True, "methods": ("gru_fedavg",)},
    ],
)
def test_a_pretrained_model_is_scored_and_nothing_else(options):
    with pytest.raises(InputError, match="--pretrained=synthetic_cnfgnn: is scored"):
        CNFGNNStudy(pretrained="synthetic_cnfgnn", **options)


def test_a_model_is_scored_by_the_settings_that_it_was_trained_with(tmp_path):
    size = {"num_sensors": 4, "num_days": 2}
    study = CNFGNNStudy(
        methods=("fed_prox",),
        method_settings=("fed_prox.proximal_weight=0.25",),
        num_rounds=1,
        workdir=str(tmp_path / "run"),
        **size,
    )
    trained = study.run()["fed_prox"]["test"]
    path = tmp_path / "model.npz"
    pretrained.pack(tmp_path / "run", "fed_prox", path)
    scored = CNFGNNStudy(pretrained=str(path), eval_only=True, **size).run()
    npt.assert_allclose(scored["fed_prox"]["test"]["rmse"], trained["rmse"], rtol=1e-5)
