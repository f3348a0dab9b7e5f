"""Rounds of many clients: the library's and its peers' against a loop in NumPy."""

import itertools
import sys

import jax
import numpy as np
import numpy.testing as npt
import pytest

from experiments.benchmark import BenchmarkStudy
from experiments.benchmarks import clients_picture, measure, small_task
from experiments.benchmarks.client_peers import PEERS
from experiments.benchmarks.clients import (
    Candidate,
    assert_same_models,
    benchmark_clients,
    known_peers,
    of_peer,
    of_store,
    passes,
)
from experiments.benchmarks.settings import CLIENT_PARTS
from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from tests.driver.pictures import plot

DATA = small_task.make_examples(5)
COHORT, KEY = np.array([0, 2, 3]), jax.random.key(7)


@pytest.fixture(autouse=True)
def one_device():
    """The mesh that the benchmark sets, without which DrJAX warns."""
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:1])):
        yield


def steps(model, x, y):
    """A client's model after its steps, by the gradient written out."""
    w, b, o, m = (model[name] for name in ("hidden", "bias", "output", "mean"))
    for _ in range(small_task.NUM_STEPS):
        h = np.tanh(x @ w + b)
        error = 2 / len(y) * (h @ o + m - y)
        inner = error[:, None] * o * (1 - h**2)
        grads = x.T @ inner, inner.sum(0), h.T @ error, error.sum()
        w, b, o, m = (
            p - small_task.RATE * g for p, g in zip((w, b, o, m), grads, strict=True)
        )
    return {"hidden": w, "bias": b, "output": o, "mean": m}


def rounds(num_rounds):
    """The mean model after some rounds of one cohort."""
    model = jax.device_get(small_task.init(jax.random.key(0)))
    for _ in range(num_rounds):
        models = [steps(model, DATA.x[i], DATA.y[i]) for i in COHORT]
        model = {name: np.mean([x[name] for x in models], axis=0) for name in model}
    return model


def candidate(name, folder):
    if name in PEERS:
        return of_peer(PEERS[name](), DATA)
    is_in_files = name == "ditto_in_files"
    return of_store(
        "ditto" if is_in_files else name, DATA, folder if is_in_files else None
    )


@pytest.mark.parametrize("name", CLIENT_PARTS)
def test_two_rounds_are_those_of_a_loop(name, tmp_path):
    if name in ("drjax", "fedjax"):
        pytest.importorskip(name, reason=f"{name}, of the extra [peers], is missing")
    found = candidate(name, tmp_path)
    for _ in range(2):
        found.round(COHORT, KEY)
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x, y, rtol=0, atol=1e-5),
        dict(found.model()),
        rounds(2),
    )


def test_models_that_differ_are_named():
    same, other = ({"bias": np.full(3, x)} for x in (0.0, 2e-5))
    models = {"fed_avg": same, "plain_vmap": same, "drjax": other}
    found = {name: Candidate(None, lambda x=x: x) for name, x in models.items()}
    with pytest.raises(AssertionError, match="bias: drjax, fed_avg"):
        assert_same_models(found)
    assert_same_models({name: found[name] for name in ("fed_avg", "plain_vmap")})


def test_what_is_not_installed_is_left_out_in_a_line(monkeypatch, capsys):
    for name in ("drjax", "fedjax"):
        monkeypatch.setitem(sys.modules, name, None)
    assert list(known_peers(CLIENT_PARTS)) == ["plain_vmap"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "drjax is left out",
        "fedjax is left out",
    ]
    with pytest.raises(InputError, match="--client_parts: none of it is installed"):
        benchmark_clients(BenchmarkStudy(client_parts=("drjax", "fedjax")))


def test_a_pass_has_each_client_in_one_cohort():
    cohorts = passes(BenchmarkStudy(cohort=4), num_clients=12)
    found = [indices for indices, _ in itertools.islice(cohorts, 6)]
    assert all((np.diff(indices) > 0).all() for indices in found)
    for three in (found[:3], found[3:]):
        npt.assert_array_equal(np.sort(np.concatenate(three)), np.arange(12))


def test_turns_are_taken_in_changing_order():
    order = []

    def measure_of(name):
        def run():
            order.append(name)
            return {name: float(order.count(name))}

        return run

    settings = BenchmarkStudy(repeats=5)
    medians = measure.in_turn(settings, {name: measure_of(name) for name in "abc"})
    turns = [order[i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len({turn[0] for turn in turns}) > 1
    assert list(medians.items()) == [("a", 3.0), ("b", 3.0), ("c", 3.0)]


def test_the_picture_has_a_line_for_whom_was_measured(tmp_path):
    counts, figures = (10, 1000), {}
    for name, us in (("fed_avg", 2.0), ("fedjax", 90.0)):
        for x in counts:
            figures |= {f"{name}_us_{x}": us, f"{name}_resident_mib_{x}": x / 10}
    clients_picture.write(tmp_path / "many_clients.png", counts, figures)
    assert (tmp_path / "many_clients.png").exists()
    time, memory = clients_picture.figure(counts, figures).axes
    assert {x.get_xscale() for x in (time, memory)} == {"log"}
    lines = {x.get_label(): x.get_ydata().tolist() for x in time.lines}
    assert lines == {"FedAvg": [2, 2], "FedAvg in FedJAX": [90, 90]}
    npt.assert_array_equal(plot(memory, "FedAvg").get_xydata(), [[10, 1], [1000, 100]])
    colours = [plot(x, "FedAvg in FedJAX").get_color() for x in (time, memory)]
    assert colours[0] == colours[1]
