"""A forecast from a checkpoint is the method's own prediction."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from fedjax_graph import algorithms
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import inductive, windows
from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.driver import pretrained, rounds
from fedjax_graph.driver.network import save_network
from fedjax_graph.driver.serving import load_forecaster
from tests.damage import flip_in_digest, halve

HALVES = {"hidden_size": 4, "gn_mlp_sizes": (6, 4), "gn_layers": 1}
CONFIGS = {"gru_fedavg": {"task": {"kind": "traffic_seq2seq", "hidden_size": 4}}}
REGISTERED = {"gru_fedavg": "fed_avg"}  # where a run has another name for it
SEEDS = (3, 4)
YEAR = np.timedelta64(365 * 24 * 60, "m")
NEVER = np.datetime64("NaT", "ns")


def train_method(name, splits, workdir):
    """One round of a method; its algorithm and the first seed's state."""
    values = CONFIGS.get(name, HALVES) | {"clients_per_chunk": 1}
    registered = REGISTERED.get(name, name)
    config = algorithms.make_config(registered, values)
    algorithm = algorithms.get_method(registered).factory(config)
    settings = {
        "method": registered,
        "config": dataclasses.asdict(config),
        "seeds": SEEDS,
    }
    run_config = rounds.RunConfig(num_rounds=1, seeds=SEEDS, seeds_per_chunk=1)
    result = rounds.run(name, algorithm, splits, run_config, workdir, settings)
    return algorithm, jax.tree.map(lambda x: x[0], result.best_state)


@pytest.fixture(scope="module")
def quick_compilation(rolled_scans):
    del rolled_scans
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, network, splits, quick_compilation):
    """The folder of a run of GRU + FedAvg, its algorithm and state."""
    del quick_compilation
    workdir = tmp_path_factory.mktemp("run")
    save_network(workdir / "network.npz", network, splits["train"])
    return workdir, *train_method("gru_fedavg", splits, workdir)


def last_readings(network, start):
    steps = slice(start, start + windows.INPUT_STEPS)
    return network.speed[steps], network.timestamps[steps]


@pytest.fixture(scope="module")
def forecaster(finished):
    return load_forecaster(finished[0], "gru_fedavg")


@pytest.mark.parametrize(
    "name", ["gru_fedavg", pytest.param("cnfgnn", marks=pytest.mark.slow)]
)
def test_a_forecast_is_the_prediction_of_the_window(finished, network, splits, name):
    workdir, algorithm, state = finished
    if name != "gru_fedavg":
        algorithm, state = train_method(name, splits, workdir)
    expected = jax.jit(algorithm.predict)(state, splits["test"])
    forecast = load_forecaster(str(workdir), name)
    for i in (0, 6):
        start = int(splits["test"].starts[i])
        speeds = forecast(*last_readings(network, start))
        assert speeds.shape == (windows.TARGET_STEPS, network.speed.shape[1])
        np.testing.assert_allclose(speeds, expected[i].T, atol=1e-4)


def test_nan_is_a_missing_reading(forecaster, network):
    readings, timestamps = last_readings(network, 5)
    assert (readings == 0).any()
    with_nan = np.where(readings == 0, np.nan, readings)
    np.testing.assert_array_equal(
        forecaster(with_nan, timestamps), forecaster(readings, timestamps)
    )
    assert np.isnan(with_nan).any()  # the caller's array is left alone


def test_the_time_of_day_matters(forecaster, network):
    readings, timestamps = last_readings(network, 5)
    later = timestamps + np.timedelta64(12, "h")
    changed = forecaster(readings, later) != forecaster(readings, timestamps)
    assert changed.any()


def test_a_forecaster_says_what_it_takes_and_gives(forecaster, network):
    assert (forecaster.unit, str(forecaster.step)) == (network.unit, "5 min")
    np.testing.assert_array_equal(forecaster.sensor_ids, network.sensor_ids)


@pytest.mark.parametrize("hours", [1, 24])
def test_a_forecaster_takes_the_step_of_its_run(finished, network, tmp_path, hours):
    workdir = shutil.copytree(finished[0], tmp_path / "run")
    stamps = network.timestamps[0] + np.timedelta64(hours, "h") * np.arange(60)
    slower = dataclasses.replace(network, timestamps=stamps, unit="veh/h")
    (workdir / "network.npz").unlink()
    save_network(workdir / "network.npz", slower, windows.make_splits(slower)["train"])
    forecast = load_forecaster(workdir, "gru_fedavg")
    assert (forecast.unit, forecast.step) == ("veh/h", TimeStep(hours * 3600))
    assert forecast(*last_readings(slower, 5)).shape == (12, 5)
    with pytest.raises(InputError, match=f"expected steps of {forecast.step.words()}"):
        forecast(*last_readings(network, 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r, t: (r[1:], t), r"readings have shape \(11, 5\), expected \(12, 5\)"),
        (lambda r, t: (r[:, :4], t), r"\(12, 4\), expected \(12, 5\)"),
        (lambda r, t: (r, t[:11]), r"timestamps have shape \(11,\)"),
        (lambda r, t: (r, t[::-1]), "expected steps of 5 minutes"),
        (lambda r, t: (r, t[0] + 12 * (t - t[0])), "expected steps of 5 minutes"),
        (lambda r, t: (r, np.where(t == t[3], NEVER, t)), "expected steps of 5"),
        (lambda r, t: (np.where(r > 50, np.inf, r), t), "infinite or negative"),
        (lambda r, t: (-r, t), "infinite or negative"),
        (lambda r, t: (r.astype(str) + "a", t), "readings: expected numbers"),
        (lambda r, t: (r, t.astype("M8[m]") + 988 * YEAR), "has 2999-.*1678 to 2261"),
        (lambda r, t: (r, [f"{x}+05:00" for x in t]), "wall-clock time without a zone"),
        (lambda r, t: (r, ["abc"] * 12), "timestamps has 'abc', expected text such as"),
        (lambda r, t: (r, [1.5] * 12), "timestamps has numbers, expected datetime64"),
    ],
)
def test_readings_that_do_not_fit_are_one_line(forecaster, network, change, words):
    with pytest.raises(InputError, match=words) as caught:
        forecaster(*change(*last_readings(network, 5)))
    assert "\n" not in str(caught.value)


def test_stamps_may_be_text_or_pythons_own(forecaster, network):
    readings, stamps = last_readings(network, 5)
    expected = forecaster(readings, stamps)
    for other in (list(map(str, stamps)), stamps.astype("M8[us]").tolist()):
        np.testing.assert_array_equal(forecaster(readings, other), expected)


def changed_network(**changes):
    def change(run):
        with np.load(run / "network.npz") as kept:
            arrays = dict(kept) | changes
        np.savez(run / "network.npz", **arrays)

    return change


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_ns": 0}, "step_ns=0: expected whole seconds that divide a day"),
        ({"step_ns": -300 * 10**9}, "step_ns=-300000000000: expected"),
        ({"step_ns": 1}, "step_ns=1: expected"),
        ({"step_ns": 7 * 10**9}, "step_ns=7000000000: expected"),
        ({"step_ns": "x"}, "step_ns: expected one finite number"),
        ({"mean": np.nan}, "mean: expected one finite number"),
        ({"mean": [1.0, 2]}, "mean: expected one finite number"),
        ({"std": 0.0}, "std: expected more than 0"),
        (
            {"sensor_ids": 3},
            r"adjacency of shape \(5, 5\) and sensor_ids of \(\), expected \[",
        ),
        ({"adjacency": 1.0}, r"adjacency of shape \(\)"),
        ({"adjacency": np.eye(4)}, r"adjacency of shape \(4, 4\)"),
        ({"adjacency": np.full((5, 5), np.inf)}, "adjacency: expected finite numbers"),
        ({"num_trained": "a"}, "num_trained: expected one finite number"),
        ({"num_trained": 6}, "num_trained: expected 1 to 5"),
    ],
)
def test_a_network_that_makes_no_sense_is_one_line(
    finished, tmp_path, monkeypatch, changes, words
):
    monkeypatch.setattr(pretrained, "Checkpoints", None)  # is not come to
    run = tmp_path / "run"
    (run / "gru_fedavg" / "checkpoints").mkdir(parents=True)
    shutil.copy(finished[0] / "network.npz", run)
    changed_network(**changes)(run)
    with pytest.raises(InputError, match=f"network.npz: {words}") as caught:
        load_forecaster(run, "gru_fedavg")
    assert "\n" not in str(caught.value)


def damage_the_newest(run):
    """Of two checkpoints; the older one's best state may be another."""
    folder = run / "gru_fedavg" / "checkpoints"
    shutil.copytree(folder / "1", folder / "2")
    flip_in_digest(folder / "2")


@pytest.mark.parametrize(
    ("method", "damage", "words"),
    [
        ("persistence", lambda run: None, "no finished round of persistence"),
        ("gru_fedavg", shutil.rmtree, "no finished round"),
        ("gru_fedavg", lambda run: (run / "network.npz").unlink(), "no finished round"),
        ("gru_fedavg", lambda run: halve(run / "network.npz"), "not a readable"),
        (
            "gru_fedavg",
            lambda run: np.savez(run / "network.npz", mean=0),
            "network.npz: not a readable network",
        ),
        (
            "gru_fedavg",
            lambda run: shutil.rmtree(run / "gru_fedavg" / "checkpoints" / "1"),
            "no finished round",
        ),
        (
            "gru_fedavg",
            lambda run: halve(
                run / "gru_fedavg" / "checkpoints" / "1" / "settings" / "metadata"
            ),
            "no checkpoint is intact",
        ),
        ("gru_fedavg", damage_the_newest, "checkpoints/2: the checkpoint is damaged"),
    ],
)
def test_a_missing_or_broken_run_is_one_line(finished, tmp_path, method, damage, words):
    run = shutil.copytree(finished[0], tmp_path / "run")
    damage(run)
    with pytest.raises(InputError, match=words) as caught:
        load_forecaster(run, method)
    assert "\n" not in str(caught.value)


def test_a_run_of_an_unknown_method_asks_for_its_plugin(finished, monkeypatch):
    others = {k: v for k, v in algorithms.REGISTRY._entries.items() if k != "fed_avg"}
    monkeypatch.setattr(algorithms.REGISTRY, "_entries", others)
    with pytest.raises(InputError, match="'fed_avg' is unknown; load its plugin first"):
        load_forecaster(finished[0], "gru_fedavg")


@pytest.mark.slow
def test_a_forecaster_of_a_run_on_some_of_the_sensors(
    tmp_path, network, quick_compilation
):
    """Its state has a row for each sensor trained on, its forecasts are of all."""
    is_seen = np.array([True, False, True, True, False])
    splits, whole = inductive.make_splits(network, is_seen)
    save_network(tmp_path / "network.npz", network, splits["train"])
    algorithm, state = train_method("split_learning_fedavg", splits, tmp_path)
    expected = jax.jit(algorithm.predict)(state, whole["test"])
    forecast = load_forecaster(tmp_path, "split_learning_fedavg")
    speeds = forecast(*last_readings(network, int(whole["test"].starts[0])))
    assert speeds.shape == (windows.TARGET_STEPS, 5)
    np.testing.assert_allclose(speeds, expected[0].T, atol=1e-4)


def test_the_network_of_a_run_is_not_written_over(tmp_path, network, splits):
    path = tmp_path / "network.npz"
    path.write_bytes(b"half written, and no checkpoint yet")
    save_network(path, network, splits["train"])
    before = path.read_bytes()
    (tmp_path / "cnfgnn" / "checkpoints" / "1").mkdir(parents=True)
    save_network(path, network, splits["train"])
    for change in ({"adjacency": network.adjacency.T}, {"unit": "veh/h"}):
        other = dataclasses.replace(network, **change)
        with pytest.raises(
            InputError, match=rf"other data \({next(iter(change))} diff"
        ):
            save_network(path, other, splits["train"])
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "cnfgnn"}
