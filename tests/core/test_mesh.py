"""One device or several: the same numbers and the same bytes, whatever the mesh."""

import itertools
import os
import re
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import REGISTRY, get_method, make_config
from fedjax_graph.core import clients, communication, mesh, sharding
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import rounds
from tests.algorithms.problems import Seq2SeqTraffic, all_problems
from tests.algorithms.tiny_methods import TINY
from tests.conftest import forget_programs_if_many

pytestmark = pytest.mark.usefixtures("rolled_scans")

MESHES = ("1x1", "2x1", "3x1", "4x1", "8x1", "2x2", "1x3", "5x1")  # clients x edges
IN_SHORT = ("2x2",)  # which does not divide 5 clients; 3 not the minibatch either
SYSTEMS = ("cnfgnn", "fed_avg", "fl_agcns", "graphfl", "sfl_star")
LONG = ("cnfgnn", "fed_avg", "fl_agcns", "graphfl")  # to compile
CASES = {"fed_avg": Seq2SeqTraffic}


def make(name):
    clients, edges = map(int, name.split("x"))
    return mesh.make_mesh(edges, jax.devices()[: clients * edges])


@pytest.fixture(autouse=True)
def few_programs_after_each_test():
    """All meshes and methods in one file: more programs than a process may map."""
    yield
    forget_programs_if_many()


@pytest.fixture(scope="module")
def problems(train):
    return all_problems(train)


def outcome_of(method, problems):
    """Two rounds and what they exchange, by the driver."""
    kinds = [kind for kind, methods in TINY.items() if method in methods]
    kind = CASES.get(method, kinds[0])
    values = dict(TINY[kind][method])
    if method == "fed_avg":
        values["participation"] = 0.6
    algorithm = get_method(method).factory(make_config(method, values))
    data = problems[kind].train
    splits = dict.fromkeys(("train", "validation", "test"), data)
    found = rounds.run(method, algorithm, splits, rounds.RunConfig(2, eval_every=2))
    predict = jax.jit(algorithm.predict)
    state = jax.tree.map(lambda x: x[0], found.best_state)
    outputs = predict(state, algorithm.prepared(data))
    return found.test, outputs, state, found.communication


@pytest.fixture(scope="module")
def alone(problems):
    """What a method gives without a mesh, found once."""
    found = {}

    def outcome(method):
        if method not in found:
            found[method] = outcome_of(method, problems)
        return found[method]

    return outcome


def is_short(method, shape):
    return shape in IN_SHORT and method not in LONG


@pytest.mark.parametrize(
    "method, shape",
    [
        pytest.param(*case, marks=[] if is_short(*case) else [pytest.mark.slow])
        for case in itertools.product(SYSTEMS, MESHES)
    ],
)
def test_numbers_do_not_depend_on_the_mesh(alone, problems, method, shape):
    expected = alone(method)
    with jax.set_mesh(make(shape)):
        found = outcome_of(method, problems)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=2e-4, atol=1e-4),
        found,
        expected,
    )
    assert found[-1] == expected[-1]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*REGISTRY} - {*SYSTEMS}))
def test_no_method_depends_on_the_mesh(alone, problems, method):
    test_numbers_do_not_depend_on_the_mesh(alone, problems, method, "2x2")


@pytest.mark.slow
def test_joint_training_where_edges_alone_are_cut(alone, problems):
    """All windows of a minibatch are on each device: there is nothing to add up."""
    test_numbers_do_not_depend_on_the_mesh(alone, problems, "split_learning", "1x3")


def test_without_a_mesh_all_is_the_plain_call():
    assert mesh.num_devices() == 1
    assert mesh.padded_size(5) == mesh.share_size(5) == 5
    rows = jnp.arange(3)
    npt.assert_array_equal(sharding.concat_parts(lambda x: x + 1)(rows), [1, 2, 3])
    assert sharding.sum_parts(jnp.sum, in_axes=(0,))(rows) == 3
    for same in (mesh.replicated, mesh.split_edges, mesh.cut_clients, mesh.varying):
        assert same(rows) is rows


@pytest.mark.parametrize("shape", ["3x1", "2x2"])
def test_parts_are_shared_out(shape):
    """Five rows, which the devices do not divide."""

    def double(x, factor):
        assert x.shape[0] == mesh_size.pop()
        return x * factor

    with jax.set_mesh(make(shape)):
        mesh_size = [mesh.share_size(5)]
        assert mesh.padded_size(5) == mesh.share_size(5) * mesh.num_devices()
        parts = jax.jit(lambda x: sharding.concat_parts(double)(x, shared=(2.0,)))
        npt.assert_array_equal(parts(jnp.arange(5.0)), [0, 2, 4, 6, 8])
        total = sharding.sum_parts(lambda x, y: jnp.sum(x * y), in_axes=(0, None))
        assert jax.jit(total)(jnp.arange(12.0), 2.0) == 132


@pytest.mark.parametrize("shape", ["1x1", "3x1", "2x2"])
def test_windows_move_to_their_clients(shape):
    """Twelve windows of five clients, shared out by windows and then by clients."""
    values = np.random.default_rng(0).normal(size=(12, 5, 2)).astype(np.float32)

    def move(share):  # [12 / D, 5, 2]
        moved = sharding.to_clients(jnp.swapaxes(share, 0, 1))
        return moved.reshape(len(moved), -1, 2)

    with jax.set_mesh(make(shape)):
        parts = sharding.concat_parts(move)
        moved = np.asarray(jax.jit(lambda x: parts(x))(values))
        assert len(moved) == mesh.padded_size(5)
    npt.assert_array_equal(moved[:5], np.swapaxes(values, 0, 1))
    npt.assert_array_equal(moved[5:], 0)


@pytest.mark.parametrize("shape", ["1x1", "3x1", "2x2"])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_minibatches_are_gathered_from_the_shares(shape, bits):
    """Exactly, of what crosses in fewer bits as well; indices may repeat."""
    values = np.random.default_rng(0).normal(size=(12, 20)).astype(np.float32)
    packed = communication.pack(jnp.asarray(values), bits)
    indices = jnp.array([7, 0, 11, 3, 3, 8])

    def take(packed, indices):
        taken = jax.tree.map(lambda x: sharding.take_windows(x, indices), packed)
        return communication.unpack(taken)

    def gathered(packed, indices):
        if mesh.num_devices() == 1:
            return take(packed, indices)
        return jax.shard_map(
            take,
            in_specs=(mesh.spec(0, (mesh.CLIENTS,)), mesh.spec(None)),
            out_specs=mesh.spec(0, (mesh.CLIENTS,)),
            axis_names={mesh.CLIENTS},
        )(packed, indices)

    with jax.set_mesh(make(shape)):
        found = np.asarray(jax.jit(gathered)(packed, indices))
    npt.assert_array_equal(found, communication.unpack(packed)[indices])


@pytest.mark.parametrize("shape", ["1x1", "3x1", "2x2"])
def test_columns_are_shared_out(shape):
    """Seven columns, which the devices do not divide, of five rows."""
    rng = np.random.default_rng(0)
    matrix, mixing = rng.normal(size=(5, 7)), rng.normal(size=(2, 5))
    widths = []

    def product(x, mixing):
        widths.append(x.shape[1])
        return mixing @ x

    with jax.set_mesh(make(shape)):
        width = mesh.share_size(7)
        mixed = jax.jit(sharding.map_columns(product))(matrix, mixing)
        summed = jax.jit(sharding.sum_columns(lambda x: x @ x.T))(matrix)
    npt.assert_allclose(mixed, mixing @ matrix, rtol=1e-5, atol=1e-5)
    npt.assert_allclose(summed, matrix @ matrix.T, rtol=1e-5, atol=1e-5)
    assert set(widths) == {width}


PARTS = {  # of [K, 3], [K, 6, 4], [K, 0] and [9] on four devices, by K
    8: [(2, 3), (2, 6, 4), (8, 0), (9,)],
    6: [(6, 3), (6, 6, 1), (6, 0), (9,)],  # by columns where these are divided
    0: [(6, 3), (6, 6, 4), (6, 0), (9,)],  # data without clients
}


@pytest.mark.parametrize("num_clients", PARTS)
def test_rows_of_clients_are_shared_out(num_clients):
    shapes = [(num_clients or 6, *rest) for rest in ((3,), (6, 4), (0,))] + [(9,)]
    rng = np.random.default_rng(0)
    tree = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    with jax.set_mesh(make("2x2")):
        placed = mesh.put_spread(tree, num_clients)
        constrained = jax.jit(lambda x: mesh.spread(x, num_clients))(tree)
        for found in (placed, constrained):
            assert parts_of(found) == PARTS[num_clients]
            jax.tree.map(npt.assert_array_equal, mesh.whole(found), tree)


def parts_of(tree):
    """The shapes of what the first device has."""
    return [x.addressable_shards[0].data.shape for x in jax.tree.leaves(tree)]


class Clients(NamedTuple):
    client_ids: np.ndarray
    client_weights: np.ndarray


def test_a_run_shares_out_the_state_of_its_clients(tmp_path):
    """Whether it is new, after a round, or resumed."""
    grow = clients.map_clients(lambda x: x + 1)
    algorithm = FederatedAlgorithm(
        init=lambda key, data: jnp.zeros((len(data.client_ids), 3)),
        round=lambda state, data, key: (grow(state), {"train_loss": jnp.zeros(())}),
        evaluate=lambda state, data: {"loss": -jnp.mean(state)},
        predict=lambda state, data: state,
    )
    splits = dict.fromkeys(
        ("train", "validation", "test"), Clients(np.arange(8), np.ones(8))
    )

    def run(num_rounds, **kwargs):
        config = rounds.RunConfig(num_rounds)
        return rounds.run("grow", algorithm, splits, config, tmp_path, **kwargs)

    with jax.set_mesh(make("2x2")):
        for found in (run(1), run(2, resume=True), run(2, resume=True)):
            assert parts_of(found.best_state) == [(1, 2, 3)]
            assert np.all(found.best_state == found.num_rounds)


def test_a_mesh_is_refused_that_cannot_be():
    with pytest.raises(InputError, match="edge_parts=3: expected a divisor of the 8"):
        mesh.make_mesh(edge_parts=3)
    with (
        jax.set_mesh(jax.sharding.Mesh(jax.devices()[:2], ("mine",))),
        pytest.raises(InputError, match="expected one of fg.make_mesh"),
    ):
        mesh.share_size(5)
    explicit = jax.make_mesh(
        (2, 1), mesh.AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with (
        jax.set_mesh(explicit),
        pytest.raises(InputError, match="expected one of fg.make_mesh"),
    ):
        mesh.num_devices()


def test_the_mesh_from_before_is_set_again():
    with mesh.restored():
        jax.set_mesh(make("2x1"))
        assert mesh.num_devices() == 2
        with mesh.on_cpu():
            assert mesh.num_devices() == 1
        assert mesh.num_devices() == 2
    assert mesh.num_devices() == 1


def test_nothing_else_asks_for_devices(pytestconfig):
    asks = re.compile(
        r"jax\.(local_)?(devices|device_count)\b|default_backend|process_(index|count)"
    )
    for folder in ("fedjax_graph", "experiments"):
        for path in (pytestconfig.rootpath / folder).rglob("*.py"):
            if path.name != "mesh.py":
                assert not asks.search(path.read_text()), path


APART = """
from fedjax_graph.core import mesh, sharding
mesh.use_cpu_cores(2)
import jax, jax.numpy as jnp

def work(counts):
    step = lambda i, x: jnp.sin(x) + 1e-3
    return jax.lax.fori_loop(0, counts[0], step, mesh.varying(jnp.ones(2000)))

with jax.set_mesh(mesh.make_mesh()):
    total = sharding.sum_parts(work, in_axes=(0,))
    print(jax.jit(total)(jnp.array([1, 50_000_000]))[0])
"""


@pytest.mark.slow
def test_a_device_waits_for_another_longer_than_xla_does():
    """XLA's limit is 40 seconds, after which it aborts the process."""
    start = time.monotonic()
    command = [sys.executable, "-c", APART]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert time.monotonic() - start > 45


@pytest.mark.parametrize(
    ("num_devices", "num_processes", "threads"),
    [(1, 1, None), (4, 1, None), (5, 1, "20"), (2, 2, "16")],
)
def test_threads_are_more_than_cores_where_devices_have_to_wait_for_each_other(
    num_devices, num_processes, threads, monkeypatch
):
    monkeypatch.setattr(mesh, "num_cores", lambda: 4)
    monkeypatch.setattr(mesh.processes, "count", lambda: num_processes)
    monkeypatch.setattr(mesh, "_let_devices_wait", lambda: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    names = ("NPROC", "PJRT_NPROC")
    for name in names:  # whatever is set is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    mesh.use_cpu_cores(num_devices)
    assert [os.environ.get(name) for name in names] == [threads] * 2
