"""Pretrained models: a run packed into a file is scored and forecasts as the run."""

import json
import pathlib

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import pretrained, rounds
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.network import save_network
from fedjax_graph.driver.serving import load_forecaster
from tests.algorithms.tiny_methods import HALVES

TASK = {"kind": "traffic_seq2seq", "hidden_size": 4, "num_layers": 1}
CONFIGS = {
    "cnfgnn": HALVES | {"client_batch_size": 12},
    "fed_avg": {"task": TASK},
    "local": {"task": TASK},
}

pytestmark = pytest.mark.usefixtures("rolled_scans")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == "fed_avg" else [pytest.mark.slow])
        for name in CONFIGS
    ],
)
def run(request, network, splits, tmp_path_factory):
    """A run of two rounds and two seeds: (folder, method, algorithm, result)."""
    workdir, method = tmp_path_factory.mktemp("run"), request.param
    config = CONFIGS[method]
    algorithm = get_method(method).factory(make_config(method, config))
    save_network(workdir / "network.npz", network, splits["train"])
    settings = {"method": method, "config": config, "seeds": [3, 4]}
    run_config = rounds.RunConfig(num_rounds=2, seeds=(3, 4))
    result = rounds.run(method, algorithm, splits, run_config, workdir, settings)
    return workdir, method, algorithm, result


@pytest.fixture(scope="module")
def packed(run):
    """With a line in the run's records beyond its last checkpoint, as a kill leaves."""
    workdir, method, *_ = run
    path = workdir / "model.npz"
    late = {"method": method, "round": 3, "validation_loss_by_seed": [0.1, 0.1]}
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(late) + "\n")
    return path, pretrained.pack(workdir, method, path)


def test_an_unpacked_model_has_the_scores_of_the_run(run, packed, splits, tmp_path):
    _, method, algorithm, result = run
    path, card = packed
    assert pretrained.unpack(str(path), tmp_path) == method
    settings = pretrained.read(str(path)).settings
    config = rounds.RunConfig(num_rounds=2, seeds=(3,))
    scored = rounds.run(
        method, algorithm, splits, config, tmp_path, settings, eval_only=True
    )
    jax.tree.map(
        lambda x, y: npt.assert_array_equal(x[0], y[0]), scored.test, result.test
    )
    assert card["best_round"] == result.best_round[0] == scored.best_round[0]
    assert card["last_round"] == 2
    assert len(card["validation_loss"]) == 2


def test_only_what_is_read_is_kept(run, packed):
    _, method, _, result = run
    state = pretrained.read(str(packed[0])).state
    assert not any("opt" in name or "round" in name for name in state)
    kept = {"cnfgnn": ("client_params", "server_params")}.get(method, ("models",))
    assert {name.split("[")[0] for name in state} == {f"state.{x}" for x in kept}
    sizes = [
        np.asarray(x)[0].size
        for part in kept
        for path, x in jax.tree.leaves_with_path(getattr(result.best_state, part))
        if "['global']" not in jax.tree_util.keystr(path)  # of the last layer: unread
    ]
    assert sum(x.size for x in state.values()) == sum(sizes)


def test_a_mesh_of_devices_changes_nothing(run, packed, tmp_path):
    """Under one a client's work is mapped over devices, which seems to read all."""
    with mesh.restored():
        jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:2]))
        pretrained.pack(run[0], run[1], tmp_path / "model.npz")
        load_forecaster(packed[0])
    one, other = (pretrained.read(str(x)) for x in (packed[0], tmp_path / "model.npz"))
    assert list(one.state) == list(other.state)


def test_its_forecasts_are_those_of_the_run(run, packed, network):
    workdir, method, *_ = run
    ours, theirs = load_forecaster(packed[0]), load_forecaster(workdir, method)
    window = network.speed[:12], network.timestamps[:12]
    npt.assert_array_equal(ours(*window), theirs(*window))
    npt.assert_array_equal(ours.sensor_ids, network.sensor_ids)
    assert (ours.unit, ours.step) == (theirs.unit, theirs.step)


def packed_beside(run, tmp_path, entry):
    """The card where an entry of the method is on record."""
    workdir, method, *_ = run
    settings = {
        "command": "python -m experiments.cnfgnn --dataset=/own/tiny.npz "
        f"'--workdir={workdir} b' --plugin=/own/p.py --num_rounds=2",
        **dict.fromkeys(("source", "hardware", "versions"), {}),
    }
    methods = {method: entry} if entry else {}
    results = {"dataset": "tiny", "settings": settings, "methods": methods}
    path = workdir / "results.json"
    path.write_text(json.dumps(results))
    card = pretrained.pack(workdir, method, tmp_path / "model.npz", note="of a GPU")
    path.unlink()
    return card


def test_a_card_names_no_folder(run, tmp_path):
    best = run[3].best_round.tolist()
    entry = {"test": {"rmse": 1.5}, "best_round_by_seed": best}
    card = packed_beside(run, tmp_path, entry)
    expected = "python -m experiments.cnfgnn --dataset=tiny.npz --num_rounds=2"
    assert card["command"] == expected
    assert card["test"] == {"rmse": 1.5}
    assert card["note"] == "of a GPU"
    assert str(run[0]) not in json.dumps(card)


def test_a_run_without_a_best_round_is_not_packed(run, tmp_path, monkeypatch):
    restore = Checkpoints.restore

    def unchosen(self, like):
        seeds, seconds = restore(self, like)
        return seeds._replace(best_round=0 * seeds.best_round), seconds

    monkeypatch.setattr(Checkpoints, "restore", unchosen)
    with pytest.raises(InputError, match="no number in any round from 1 on"):
        pretrained.pack(*run[:2], tmp_path / "model.npz")
    assert not list(tmp_path.iterdir())


def test_a_card_is_of_the_seed_that_is_packed(run, packed, tmp_path):
    workdir, method, _, result = run
    by_seed = {"rmse": [1.0, 2.0], "masked": {"15": {"mae": [3.0, 4.0]}}}
    best = result.best_round.tolist()
    entry = {"test": {}, "test_by_seed": by_seed, "best_round_by_seed": best}
    card = packed_beside(run, tmp_path, entry)
    assert card["test"] == {"rmse": 1.0, "masked": {"15": {"mae": 3.0}}}
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [
        record for record in map(json.loads, lines) if record["method"] == method
    ]
    expected = [record["validation_loss_by_seed"][0] for record in records[:2]]
    assert packed[1]["validation_loss"] == expected
    assert expected != [record["validation_loss"] for record in records[:2]]
    entry["best_round_by_seed"] = [best[0] + 1, best[1]]  # of before a resumed run
    assert "test" not in packed_beside(run, tmp_path, entry)
    assert "test" not in packed_beside(run, tmp_path, None)


def changed(packed, path, **changes):
    """A file whose description is changed: an entry by its path, joined by `__`."""
    arrays = dict(np.load(packed[0]))
    about = json.loads(str(arrays["about"]))
    for name, value in changes.items():
        *folders, key = name.split("__")
        inner = about
        for folder in folders:
            inner = inner[folder]
        inner[key] = value
    np.savez(path, **arrays | {"about": np.array(json.dumps(about))})
    return path


def nested(depth):
    return {} if not depth else {"a": nested(depth - 1)}


@pytest.mark.parametrize("method", ["../evil", "a/b", "..", ".", "", 3, "a\n"])
def test_a_file_names_no_folder_but_its_own(packed, tmp_path, method):
    inside = tmp_path / "inside"
    inside.mkdir()
    path = changed(packed, tmp_path / "model.npz", method=method)
    with pytest.raises(InputError, match="expected a plain name of its method, found"):
        pretrained.unpack(str(path), inside)
    assert not list(inside.iterdir())
    assert [x.name for x in tmp_path.iterdir()] == ["inside", "model.npz"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": None}, "expected its settings and its card"),
        ({"card": []}, "expected its settings and its card"),
        ({"settings__method": None}, "expected a method and its config"),
        ({"settings__config": []}, "expected a method and its config"),
        ({"settings__seeds": []}, r"expected one seed in its settings, found \[\]"),
        ({"settings__seeds": "ab"}, "expected one seed in its settings, found 'ab'"),
        ({"settings__seeds": [-1]}, "expected one seed in its settings"),
        ({"card__best_round": "2"}, "expected a best round on its card, found '2'"),
        ({"card__best_round": None}, "expected a best round on its card, found None"),
        ({"settings__method": "strange"}, "the method 'strange' is unknown"),
        ({"settings__config__task": nested(900)}, "JSON nested more than 50 deep"),
        ({"card__command": nested(60)}, "JSON nested more than 50 deep"),
    ],
)
def test_a_description_that_lacks_something_is_one_line(
    packed, tmp_path, changes, words
):
    path = changed(packed, tmp_path / "model.npz", **changes)
    with pytest.raises(InputError, match=words) as refusal:
        pretrained.unpack(str(path), tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_model_has_all_that_is_read_in_its_type(packed, tmp_path):
    arrays = dict(np.load(packed[0]))
    name = next(key for key in arrays if key.startswith("state"))
    path = tmp_path / "model.npz"
    np.savez(path, **{key: x for key, x in arrays.items() if key != name})
    with pytest.raises(InputError, match="no state.*, a part of what"):
        pretrained.unpack(str(path), tmp_path)
    np.savez(path, **arrays | {name: arrays[name].astype(np.float64)})
    with pytest.raises(InputError, match="and type float64 is no part of what"):
        pretrained.unpack(str(path), tmp_path)
    np.savez(path, **arrays | {"network/adjacency": np.ones(3)})
    with pytest.raises(InputError, match="pretrained=.*: "):
        pretrained.unpack(str(path), tmp_path)


def test_what_is_no_model_is_one_line(run, packed, tmp_path):
    with pytest.raises(InputError, match="pretrained=nothing: no such model; known"):
        pretrained.read("nothing")
    with pytest.raises(InputError, match="no finished round of gru"):
        pretrained.pack(run[0], "gru", tmp_path / "model.npz")
    other = tmp_path / "other.npz"
    for about in ("[]", "3", "{", "[" * 10_000):
        np.savez(other, about=np.array(about))
        with pytest.raises(InputError) as refusal:
            pretrained.read(str(other))
        assert "\n" not in str(refusal.value)
    np.savez(other, speed=np.ones(3))
    with pytest.raises(InputError, match="not a readable pretrained model"):
        pretrained.read(str(other))
    arrays = dict(np.load(packed[0]))
    name = next(key for key in arrays if key.startswith("state"))
    np.savez(other, **arrays | {name: np.ones((2, 3, 5))})
    with pytest.raises(InputError, match=r"of shape \(2, 3, 5\) .*is no part"):
        pretrained.unpack(str(other), tmp_path)


@pytest.mark.parametrize("name", pretrained.names())
def test_models_of_the_package_forecast(name):
    model, forecaster = pretrained.read(name), load_forecaster(name)
    num_sensors = len(forecaster.sensor_ids)
    mean = float(model.network["mean"])
    stamps = np.datetime64(
        "2012-03-05T08:00", "ns"
    ) + forecaster.step.delta * np.arange(12)
    std = float(model.network["std"])
    is_rising = np.arange(num_sensors) % 2 == 0
    ramp = std * np.linspace(-1, 1, 12)[:, None]
    ahead = forecaster(mean + np.where(is_rising, ramp, -ramp), stamps)
    assert ahead.shape == (12, num_sensors)
    assert np.all(np.abs(ahead - mean) < 6 * std)
    # Roads that were fast last stay ahead of those that were slow: weights matter.
    assert ahead[0, is_rising].mean() > ahead[0, ~is_rising].mean() + 0.5 * std
    assert {"dataset", "command", "source", "test"} <= model.card.keys()
    assert pathlib.Path(pretrained.FOLDER, f"{name}.npz").stat().st_size < 8e6
