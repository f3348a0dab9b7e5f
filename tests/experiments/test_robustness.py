"""The curves of `experiments.robustness`: which runs they are of, and what they say."""

import json

import pytest

from experiments.robustness import RobustnessStudy
from experiments.studies.graphfl import GraphFLStudy
from fedjax_graph.core.errors import InputError


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
    assert {x.tolerance for x in seen} == {0.3}
    assert len({x.workdir for x in seen}) == 4
    assert [row["accuracy"] for row in rows] == [80, 60, 80, 60]
    assert json.loads((tmp_path / "run" / "robustness.json").read_text()) == rows
    assert (tmp_path / "run" / "robustness.png").exists()
    assert "median      80.0  60.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fractions": ("a",)}, "--fractions: 'a' is no number"),
        ({"fractions": ("2",)}, "--byzantine_fraction=2.0: expected 1.0 or less"),
        ({"aggregators": ("mean",)}, "--aggregator=mean: unknown; known: median"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    settings, words, tmp_path
):
    study = RobustnessStudy(**settings, workdir=str(tmp_path / "run"))
    with pytest.raises(InputError, match=words):
        study.run_loaded()
    assert not list(tmp_path.iterdir())
