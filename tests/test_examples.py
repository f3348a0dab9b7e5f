"""The scripts in `examples/` run as they stand and print the scores they should."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def scores_of(name: str) -> dict[str, float]:
    """Runs a script -> the number in each line `key: ... number ...` that it prints.

    It runs in a process of its own, which shares the compilation cache of
    `JAX_COMPILATION_CACHE_DIR` where that is set.
    """
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = re.findall(r"(?m)^([\w ,]+): \D*(-?[\d.]+)", result.stdout)
    return {key: float(score) for key, score in lines}


@pytest.mark.slow
def test_cnfgnn_forecasts_better_than_persistence():
    scores = scores_of("cnfgnn")
    assert scores["cnfgnn"] < scores["persistence"] - 0.3  # mph
    assert 5 < scores["persistence"] < 8


@pytest.mark.slow
def test_sfl_forecasts_better_than_fed_avg():
    scores = scores_of("sfl")
    assert scores["sfl"] < scores["fed_avg"] < 3  # mph


@pytest.mark.slow
def test_graphfl_tells_four_classes_apart():
    scores = scores_of("graphfl")
    assert scores["graphfl"] > 70 and scores["fed_avg"] > 50  # percent


@pytest.mark.slow
def test_fl_agcns_trains_networks_and_takes_one():
    scores = scores_of("fl_agcns")
    (accuracy,) = [score for key, score in scores.items() if key.startswith("code")]
    assert accuracy > 60  # percent, of three classes


@pytest.mark.slow
def test_clients_of_a_graph_gain_by_cooperation():
    scores = scores_of("subgraphs")
    assert scores["fed_avg"] > scores["local"] > 40  # percent, of four classes
    assert scores["fed_gta"] > 60


def test_a_method_of_ones_own_withstands_broken_clients():
    scores = scores_of("own_method")
    assert scores["bounded_mean"] < 0.01 < 1 < scores["fed_avg"]


def test_clients_who_took_part_have_personal_models():
    scores = scores_of("many_clients")
    assert scores["cohorts"] < 0.7 * scores["others"] < 7


def test_every_script_is_run_here():
    tested = re.findall(r'scores_of\("(\w+)"\)', pathlib.Path(__file__).read_text())
    assert sorted(tested) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
