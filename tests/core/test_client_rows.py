"""Rows of clients lie where their clients are, and read as the array they were."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core import (
    client_rows,
    clients,
    mesh,
    misbehaviour,
    sharding,
    sparse_rows,
)
from fedjax_graph.core.client_rows import ClientRows
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import Misbehaviour
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs

SHAPES = ("1x1", "2x1", "3x1", "2x2", "8x1", "1x4")
READINGS = np.random.default_rng(0).normal(size=(5, 30)).astype(np.float32)


class Data(NamedTuple):
    CLIENT_ROWS = ("readings",)

    readings: Any
    clock: Any


@pytest.fixture(params=SHAPES)
def devices(request):
    """The mesh that is set, with as many clients' places as named."""
    along, edges = map(int, request.param.split("x"))
    own = mesh.make_mesh(edges, jax.devices()[: along * edges])
    with jax.set_mesh(own):
        yield along * edges


@pytest.fixture
def data():
    return Data(READINGS, np.arange(30.0))


def test_each_device_has_its_clients_rows(devices, data):
    placed = client_rows.put({"train": data, "test": data._replace(clock=data.clock)})
    found = placed["train"].readings
    assert placed["test"].readings is found
    assert placed["train"].clock.sharding.is_fully_replicated
    if devices == 1:
        return npt.assert_array_equal(found, READINGS)
    assert isinstance(found, ClientRows)
    shares = [np.asarray(shard.data) for shard in found.padded.addressable_shards]
    assert {share.shape for share in shares} == {(mesh.share_size(5), 30)}
    together = np.concatenate(shares)
    npt.assert_array_equal(together[:5], READINGS)
    npt.assert_array_equal(together[5:], 0)
    assert client_rows.put(placed)["train"].readings is found


def test_rows_read_as_an_array(devices, data):
    rows = client_rows.put(data).readings
    assert (len(rows), rows.shape, rows.ndim) == (5, (5, 30), 2)
    assert rows.dtype == READINGS.dtype
    npt.assert_array_equal(jnp.asarray(rows), READINGS)
    npt.assert_array_equal(np.asarray(rows), READINGS)
    npt.assert_array_equal(list(rows), list(READINGS))
    npt.assert_array_equal(client_rows.on_host({"a": rows})["a"], READINGS)
    indices = np.array([[3, 0, 29], [7, 7, 1]])
    for read in (
        lambda rows: rows[2:4, indices],
        lambda rows: jnp.sum(jnp.asarray(rows), axis=0),
        lambda rows: client_rows.columns(rows, jnp.asarray(indices)),
        lambda rows: jnp.where(rows == 0, 7.0, rows[:]) + (rows != 0),
        lambda rows: 2 - rows * 3 + rows / 4 + jnp.ones(30) * rows,
        lambda rows: np.float32(2) * rows - np.arange(30, dtype=np.float32) * rows,
        lambda rows: (rows > 0) & (rows <= 1) | ~(rows < 0.5),
        lambda rows: abs(-rows) @ np.ones((30, 2), np.float32) - rows[:, :2],
        lambda rows: rows + rows,
    ):
        npt.assert_allclose(jax.jit(read)(rows), read(READINGS), 1e-6, 1e-6)


def test_rows_just_made_stay_on_the_host_for_several_devices(devices):
    given = Data(READINGS.astype(np.float64), np.arange(30))
    made = client_rows.to_device(given)
    assert isinstance(made.readings, jax.Array) == (devices == 1)
    assert isinstance(made.clock, jax.Array)
    assert [x.dtype for x in made] == [x.dtype for x in jax.device_put(given)]
    npt.assert_array_equal(made.readings, READINGS)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_splits_are_the_same_for_any_devices(devices, is_sparse):
    found = client_graphs.make_splits(is_sparse=is_sparse, is_linked=True)
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:1])):
        expected = client_graphs.make_splits(is_sparse=is_sparse, is_linked=True)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert x.dtype == y.dtype
        npt.assert_array_equal(x, y)
    on_device = {id(x) for x in jax.tree.leaves(found) if isinstance(x, jax.Array)}
    rows = {id(x) for x in client_rows.named(found)}
    assert bool(rows & on_device) == (devices == 1)


def test_a_share_has_what_it_asks_for(devices, data):
    """Each device reads other steps of all clients, by either way."""
    placed = client_rows.put(data)
    steps = jnp.asarray(np.random.default_rng(1).integers(0, 30, (16, 4, 3)))

    def read(steps, data):  # [16 / D, 4, 3]
        first = jax.lax.map(lambda one: client_rows.columns(data.readings, one), steps)
        second = data.readings[:][:, steps]
        return first, jnp.swapaxes(second, 0, 1)

    parts = jax.jit(lambda x, y: sharding.concat_parts(read)(x, shared=(y,)))
    for found in parts(steps, placed):
        npt.assert_array_equal(found[:16], READINGS[:, steps].swapaxes(0, 1))

    def total(data, steps):
        return jnp.sum(client_rows.columns(data.readings, steps) ** 2, axis=1)

    if 12 % mesh.num_parts((mesh.CLIENTS,)) == 0:
        summed = sharding.sum_parts(total, (None, 0), axes=(mesh.CLIENTS,))
        found = jax.jit(summed)(placed, jnp.arange(12))
        npt.assert_allclose(found, (READINGS[:, :12] ** 2).sum(axis=1), rtol=1e-5)


def test_clients_are_mapped_over_with_their_own_rows(devices, data):
    def client(row, factor, data):
        return factor * row[data.clock.astype(int)[::-1]] + len(data.readings)

    def mapped(data):
        factors = jnp.arange(5.0)
        return clients.map_clients(client)(data.readings, factors, shared=(data,))

    found = jax.jit(mapped)(client_rows.put(data))
    npt.assert_allclose(
        found, np.arange(5)[:, None] * READINGS[:, ::-1] + 5, rtol=1e-6, atol=1e-6
    )


def test_rows_alone_are_mapped_without_their_padding(devices, data):
    found = jax.jit(clients.map_clients(jnp.mean))(client_rows.put(data).readings)
    npt.assert_allclose(found, READINGS.mean(axis=1), atol=1e-6)


def test_a_sum_over_shares_has_each_row_once(devices, data):
    rows = client_rows.put(data).readings
    total = sharding.sum_parts(lambda rows: jnp.sum(rows**2), (0,))
    npt.assert_allclose(jax.jit(total)(rows), (READINGS**2).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda rows: jax.vmap(lambda row: row[3])(rows),
        lambda rows: jax.tree.map(lambda x: x[:3], rows)[:],
        lambda rows: jax.tree.map(lambda x: x[:, ::2], rows).columns(0),
    ],
)
def test_what_is_not_all_rows_is_refused(devices, data, misuse):
    rows = client_rows.put(data).readings
    if devices == 1:
        assert isinstance(rows, jax.Array)
        return
    with pytest.raises(InputError, match=r"clients.map_clients, choose .* rows\[:\]"):
        misuse(rows)


def test_what_another_mesh_has_is_placed_anew(devices, data):
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:6])):
        elsewhere = client_rows.put(data)
    here = client_rows.put(elsewhere)
    assert isinstance(here.readings, ClientRows) == (devices > 1)
    npt.assert_array_equal(np.asarray(here.readings), READINGS)


def test_rows_that_are_none_are_refused(data):
    with pytest.raises(InputError, match="readings is no array with a row for a"):
        client_rows.named(data._replace(readings=None))


def test_shapes_are_placed_as_their_arrays(devices, data):
    """The rows are the first leaf, so that none is taken for another."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data)
    described, placed = client_rows.abstract(shapes), client_rows.put(data)
    assert jax.tree.structure(described) == jax.tree.structure(placed)
    for one, other in zip(*map(jax.tree.leaves, (described, placed)), strict=True):
        assert one.shape == other.shape
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_rows_are_named_by_their_data(data):
    found = client_rows.named({"a": data, "b": [data, np.ones(3)]})
    assert [id(x) for x in found] == [id(READINGS)] * 2
    plain = (READINGS, {"x": 3})
    assert client_rows.unwrapped(plain) == plain
    assert client_rows.named(plain) == []


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_device_has_its_clients_graphs(devices, is_sparse):
    """Of five clients, features in one array or in the entries of sparse ones."""
    data = client_graphs.make_splits()["train"]
    if is_sparse:
        matrices = [scipy.sparse.csr_array(np.asarray(x)) for x in data.features]
        data = data._replace(features=sparse_rows.stack(matrices, len(data.labels[0])))
    placed = client_rows.put({"train": data, "test": data})["test"]
    large = placed.features, placed.senders, placed.receivers, placed.edge_weights
    for x in jax.tree.leaves(large) if devices > 1 else ():
        held = {shard.data.shape[0] for shard in x.addressable_shards}
        assert held == {mesh.share_size(5)}

    def outputs(own, kernel):
        sent = (own.features @ kernel)[own.senders] * own.edge_weights[:, None]
        return jax.ops.segment_sum(sent, own.receivers, len(own.labels))

    kernel = jnp.asarray(np.random.default_rng(2).normal(size=(1, 6, 3)))
    mapped = jax.jit(clients.map_rows(outputs))
    features = client_graphs.make_splits()["train"].features
    weights = np.zeros((5, *[data.labels.shape[1]] * 2))
    for k, ends in enumerate(zip(data.receivers, data.senders, strict=True)):
        np.add.at(weights[k], ends, data.edge_weights[k])
    expected = weights @ np.asarray(features) @ np.asarray(kernel)
    npt.assert_allclose(mapped(placed, kernel), expected, rtol=1e-4, atol=1e-5)
    chosen = jnp.array([1, 4])
    npt.assert_allclose(
        mapped(client_rows.take(placed, chosen), kernel),
        expected[[1, 4]],
        rtol=1e-4,
        atol=1e-5,
    )
    first, whole = client_rows.first_row(placed), client_rows.whole(placed)
    for x, row, of_all in zip(
        *(jax.tree.leaves(tree) for tree in (data, first, whole)), strict=True
    ):
        npt.assert_array_equal(row, x[0])
        npt.assert_array_equal(of_all, x)


def test_attackers_see_flipped_labels_wherever_their_graphs_are(devices):
    sizes = {"num_features": 6, "num_classes": 3}
    task = SubgraphTask(**sizes).build()
    conduct = Misbehaviour(byzantine_fraction=0.4, attack="label_flip")
    data = client_graphs.make_splits()["train"]

    def seen(data):
        every = jnp.arange(5)
        return misbehaviour.flipped_data(conduct, task, data, every, data)

    found = jax.jit(seen)(client_rows.put(data))
    lies = misbehaviour.attackers(conduct, data.client_ids, data.client_weights)
    labels = np.asarray(data.labels)
    expected = np.where(np.asarray(lies)[:, None], 2 - labels, labels)
    assert lies.sum() == 2
    npt.assert_array_equal(found.labels, expected)
    npt.assert_array_equal(found.features, data.features)
