"""The curves of `experiments.robustness`: which runs they are of, and what they say."""

import dataclasses
import json

import pytest

from experiments.robustness import RobustnessStudy
from experiments.studies.graphfl import GraphFLStudy
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import plots


def test_each_pair_is_a_study(tmp_path, monkeypatch, capsys):
    seen = []

    def run(study):
        seen.append(study)
        accuracy = 80.0 - 100 * study.byzantine_fraction
        return {"fl": {"test": {"accuracy": accuracy}, "test_std": None}}

    monkeypatch.setattr(GraphFLStudy, "run_loaded", run)
    study = RobustnessStudy(
        aggregators=("krum", "median"),
        fractions=("0", "0.2"),
        attack="noise",
        tolerance=0.3,
        workdir=str(tmp_path / "run"),
    )
    rows = study.run_loaded()
    pairs = [(x.aggregator, x.byzantine_fraction, x.attack) for x in seen]
    assert pairs == [
        ("krum", 0.0, "sign_flip"),
        ("krum", 0.2, "noise"),
        ("median", 0.0, "sign_flip"),
        ("median", 0.2, "noise"),
    ]
    assert [x.tolerance for x in seen] == [0.3, 0.3, 0.2, 0.2]  # the median has none
    assert len({x.workdir for x in seen}) == 4
    assert [row["accuracy"] for row in rows] == [80, 60, 80, 60]
    assert json.loads((tmp_path / "run" / "robustness.json").read_text()) == rows
    assert (tmp_path / "run" / "robustness.png").exists()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "share of clients that misbehave" in page and "<td>krum</td>" in page
    assert "median      80.0  60.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("vary", "settings", "conduct"),
    [
        ("dropout_rate", {"byzantine_fraction": 0.1, "attack": "noise"}, {}),
        ("straggler_rate", {"straggler_work": 0.0}, {"straggler_work": 0.0}),
    ],
)
def test_what_varies_may_be_something_else(
    vary, settings, conduct, tmp_path, monkeypatch
):
    seen, drawn = [], []

    def run(study):
        seen.append(study)
        return {"fl": {"test": {"accuracy": 71.0}, "test_std": None}}

    monkeypatch.setattr(GraphFLStudy, "run_loaded", run)
    monkeypatch.setattr(plots, "curves", lambda *args: drawn.append(args))
    study = RobustnessStudy(
        aggregators=("median",),
        fractions=("0", "0.5"),
        vary=vary,
        given=frozenset({"vary", *settings}),
        workdir=str(tmp_path / "run"),
        **settings,
    )
    rows = study.run_loaded()
    assert [getattr(x, vary) for x in seen] == [0, 0.5]
    assert {x.attack for x in seen} == {settings.get("attack", "sign_flip")}
    assert [x.straggler_work for x in seen] == [0.5, conduct.get("straggler_work", 0.5)]
    scores = {"accuracy": 71.0, "std": None}
    assert rows == [
        {"aggregator": "median", vary: share} | conduct | scores for share in (0, 0.5)
    ]
    (_, lines, label, _, look), *others = drawn
    assert not others and lines["median"].x == [0, 0.5]
    assert label.startswith("share of a round's clients that")
    assert ("noise" in look.title) == ("attack" in settings)


def test_runs_that_are_scored_are_left_as_they_are(tmp_path, monkeypatch, capsys):
    entry = {"test": {"accuracy": 71.0}, "test_std": None}
    monkeypatch.setattr(GraphFLStudy, "run_loaded", lambda study: {"fl": entry})
    (tmp_path / "metrics.jsonl").touch()
    study = RobustnessStudy(
        aggregators=("krum",),
        fractions=("0",),
        workdir=str(tmp_path),
        eval_only=True,
        split="validation",
    )
    assert [row["accuracy"] for row in study.run_loaded()] == [71]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert "krum        71.0" in capsys.readouterr().out


def test_fed_avg_is_compiled_for_chips_that_are_not_here():
    study = RobustnessStudy(compile_for="h200x1")
    assert study.compiled_methods() == ("fl",)
    assert dataclasses.replace(study, methods=("fl",)).parts() == study.parts()


def test_the_picture_names_all_draws(tmp_path, monkeypatch):
    entry, looks = {"test": {"accuracy": 71.0}, "test_std": None}, []
    monkeypatch.setattr(GraphFLStudy, "run_loaded", lambda study: {"fl": entry})
    monkeypatch.setattr(plots, "curves", lambda *args: looks.append(args[-1]))
    RobustnessStudy(workdir=str(tmp_path / "run")).run_loaded()
    assert looks[0].title == "synthetic, seeds 0 to 2, sign_flip"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fractions": ("a",)}, "--fractions: 'a' is no number"),
        ({"fractions": ("0", "1.5")}, "--fractions: 1.5: expected a number from 0"),
        ({"fractions": ("nan",)}, "--fractions: nan: expected a number from 0 to 1"),
        ({"aggregators": ("mean",)}, "--aggregators: unknown aggregator 'mean'; known"),
        ({"methods": ("fl", "il")}, "--methods: FedAvg is what runs"),
        ({"aggregator": "krum"}, "--aggregator: --aggregators names those"),
        (
            {"aggregators": ("median", "weighted_mean"), "tolerance": 0.4},
            "--tolerance: none of the --aggregators takes it",
        ),
        ({"byzantine_fraction": 0.2}, "--byzantine_fraction: --fractions has"),
        ({"vary": "dropout_rate", "dropout_rate": 0.2}, "--dropout_rate: --fractions"),
        ({"vary": "dropout_rate", "attack": "noise"}, "--attack needs --byz"),
        ({"vary": "dropout_rate", "fractions": ("1",)}, "--dropout_rate"),
        ({"on_nan": "skip_client"}, "--on_nan: a model that diverges is scored"),
        ({"sweep": "overlap"}, "--sweep: --aggregators and --fractions are what is"),
        ({"model": "gat"}, "--model=gat: unknown"),
        ({"patience": 3}, "--patience needs --protocol=code"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    settings, words, tmp_path
):
    study = RobustnessStudy(**settings, workdir=str(tmp_path / "run"))
    with pytest.raises(InputError, match=words):
        study.run_loaded()
    assert not list(tmp_path.iterdir())
