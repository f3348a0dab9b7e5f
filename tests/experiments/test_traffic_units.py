"""Tables, labels and pictures say the unit and the time ahead of the data."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import cnfgnn_output, sfl_problem, traffic
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.running import Run
from experiments.studies.sfl import SFLStudy
from fedjax_graph import algorithms
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import datasets, windows
from fedjax_graph.driver import plots
from fedjax_graph.driver.rounds import RunResult

NUM_STEPS = 400
UNITS = {None: "units of the data", "veh/5min": "veh/5min"}
AHEAD = {  # seconds between rows -> (in CNFGNN's table, in SFL's, in pictures, key)
    300: ("60'", "60 minutes", "60 min", "60"),
    900: ("3 h", "3 h", "3 h", "180"),
    3600: ("12 h", "12 h", "12 h", "720"),
}


def write_network(path, seconds=300, unit=None):
    """Three sensors, of which the second reads least alike and misses five readings."""
    rng = np.random.default_rng(0)
    speed = rng.uniform(40, 60, (NUM_STEPS, 3)) + [0, 20, 0]
    last = windows.split_starts(NUM_STEPS)["test"][0] + windows.WINDOW_STEPS - 1
    speed[last + 2 : last + 7, 1] = [0, np.nan, 0, np.nan, 0]
    arrays = {"speed": speed, "adjacency": np.eye(3), "start_ns": 0}
    own = {} if unit is None else {"unit": unit}
    np.savez(path, **arrays, freq_ns=seconds * 10**9, **own)
    return str(path)


@pytest.fixture
def figures(monkeypatch):
    """Pictures that are drawn, by name, in place of files."""
    drawn = {}
    monkeypatch.setattr(plots, "save", lambda fig, path: drawn.update({path.name: fig}))
    return drawn


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seconds", AHEAD)
def test_tables_and_labels(tmp_path, unit, seconds):
    path = write_network(tmp_path / "mine.npz", seconds, unit)
    dataset, named = datasets.load(path), UNITS[unit]
    in_minutes, in_words, _, key = AHEAD[seconds]
    assert traffic.measures(dataset) == {"unit": named, "step_seconds": seconds}
    test = {"rmse": 1.0, "mae": 2.0, "masked": {key: {"mae": 3.0, "rmse": 4.0}}}
    entry = {"test": test, "test_std": None, "best_round": 0}
    table = cnfgnn_output.table(CNFGNNStudy(), dataset, {"persistence": entry})
    head, _, row = str(table).splitlines()
    assert head.startswith(named) and head.split("  ")[-1].strip() == "best round"
    assert f"  masked MAE {in_minutes}  masked RMSE {in_minutes}  " in head
    assert row.split()[1:] == ["1.000", "2.000", "3.000", "4.000", "0"]
    problem = sfl_problem.make(SFLStudy(dataset=path))
    assert problem.scores == f"at {in_words} ({named})"
    assert problem.curve[1] == f"validation MAE at {in_words} ({named})"


@pytest.mark.parametrize("seconds", AHEAD)
def test_pictures(tmp_path, figures, seconds):
    dataset = datasets.load(write_network(tmp_path / "mine.npz", seconds, "veh"))
    data = windows.make_splits(dataset)["test"]
    method = algorithms.get_method("persistence")
    algorithm = method.factory(method.config_type())
    result = RunResult(*[None] * len(RunResult._fields))
    result = result._replace(best_state=jnp.zeros(1))
    runs = {"persistence": Run(algorithm, result, {})}
    cnfgnn_output.draw_forecasts(tmp_path, dataset, data, runs, plots.PLAIN)
    panels = figures["forecasts.png"].axes
    rows = np.asarray(data.starts) + windows.WINDOW_STEPS - 1
    rows = rows[: 86400 // seconds]
    for sensor, axes in enumerate(panels):
        truth, forecast = axes.lines
        read = dataset.speed[rows, sensor]
        np.testing.assert_array_equal(
            truth.get_ydata(), np.where(read == 0, np.nan, read)
        )
        assert np.isnan(truth.get_ydata()).sum() == (5 if sensor == 1 else 0)
        assert forecast.get_label() == f"persistence, {AHEAD[seconds][2]} ahead"
        assert axes.get_ylabel() == "readings (veh)"
        np.testing.assert_array_equal(truth.get_xdata(), dataset.timestamps[rows])


def naive(path, workdir, method, **options):
    study = CNFGNNStudy(
        dataset=path, workdir=str(workdir), methods=(method,), **options
    )
    return study.run()[method]["test"]["rmse"]


def test_methods_on_other_test_readings_do_not_share_results(tmp_path):
    """Of which the naive ones have no checkpoint that would tell."""
    path, workdir = write_network(tmp_path / "mine.npz"), tmp_path / "run"
    first = naive(path, workdir, "persistence")
    arrays = dict(np.load(path))
    arrays["speed"][-30:] += 30
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=r"results.json: the results are of other dat"):
        naive(path, workdir, "historical_average", resume=True)
    assert naive(path, tmp_path / "other", "persistence") != first


def test_what_is_scored_is_not_written(tmp_path):
    path, workdir = write_network(tmp_path / "mine.npz"), tmp_path / "run"
    first = naive(path, workdir, "persistence")
    (workdir / "network.npz").unlink()
    before = sorted(workdir.rglob("*"))
    assert naive(path, workdir, "persistence", eval_only=True) == first
    assert sorted(workdir.rglob("*")) == before


def test_a_masked_loss_concerns_who_has_a_loss(tmp_path):
    path = write_network(tmp_path / "mine.npz")
    with pytest.raises(InputError, match="--masked_loss concerns none of the methods"):
        naive(path, tmp_path / "run", "persistence", masked_loss=True)
