"""The client axis: chunks, identities, cohorts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph import algorithms
from fedjax_graph.core import clients, communication, mesh, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm, Phase
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from tests.algorithms.quadratic import QuadraticTask


@pytest.mark.parametrize("clients_per_chunk", [None, 1, 2, 3, 5, 9])
def test_chunks_agree_with_a_loop_over_clients(clients_per_chunk):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 3, 2)), "b": rng.normal(size=(5, 2))}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    x = rng.normal(size=(5, 4, 3)).astype(np.float32)

    def fn(params, x):
        y = jnp.tanh(x @ params["w"] + params["b"])
        return {"y": y}, jnp.sum(y)

    outputs, totals = clients.map_clients(fn, clients_per_chunk)(params, x)
    for client in range(5):
        expected = np.tanh(x[client] @ params["w"][client] + params["b"][client])
        npt.assert_allclose(outputs["y"][client], expected, atol=1e-6)
        npt.assert_allclose(totals[client], expected.sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clients_per_chunk", [None, 1, 2])
@pytest.mark.parametrize("num_params, num_inputs", [(1, 1), (1, 5), (5, 1), (5, 5)])
def test_one_row_is_for_all_clients(clients_per_chunk, num_params, num_inputs):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(num_params, 3)), "b": rng.normal(size=(1, 2))}
    inputs, common = rng.normal(size=(num_inputs, 4, 3)), rng.normal(size=3)
    given = jax.tree.map(np.float32, (params, inputs))

    def fn(params, x, common):
        return {"y": x @ params["w"], "z": params["b"] + common[:2]}

    mapped = clients.map_rows(fn, clients_per_chunk)
    found = mapped(*given, shared=(np.float32(common),))
    num_rows = max(num_params, num_inputs)
    assert jax.tree.map(len, found) == {"y": num_rows, "z": num_rows}
    for i in range(num_rows):
        y = inputs[i % num_inputs] @ params["w"][i % num_params]
        npt.assert_allclose(found["y"][i], y, rtol=1e-5, atol=1e-6)
        npt.assert_allclose(found["z"][i], params["b"][0] + common[:2], rtol=1e-5)


@pytest.mark.parametrize("clients_per_chunk, chunk", [(None, 5), (1, 1), (2, 2)])
def test_as_many_clients_run_side_by_side_as_asked(clients_per_chunk, chunk):
    def fn(x):
        return jnp.sin(x)

    jaxpr = jax.make_jaxpr(clients.map_clients(fn, clients_per_chunk))(jnp.zeros(5))
    first_sine = str(jaxpr).split("= sin")[0].split()[-1]
    assert first_sine.endswith("f32[]" if chunk == 1 else f"f32[{chunk}]")


@pytest.mark.parametrize(
    "text, count", [("all", None), ("1", 1), ("16", 16), ("0010", 10)]
)
def test_chunk_sizes_are_read(text, count):
    assert clients.parse_clients_per_chunk(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "many"])
def test_other_chunk_sizes_are_refused(text):
    with pytest.raises(InputError, match="clients_per_chunk"):
        clients.parse_clients_per_chunk(text)


def test_auto_chooses_by_backend():
    assert clients.auto_clients_per_chunk("cpu") == 1
    assert clients.auto_clients_per_chunk("gpu") is None
    assert clients.auto_clients_per_chunk("tpu") is None
    chosen = clients.parse_clients_per_chunk("auto")
    assert chosen == clients.auto_clients_per_chunk(jax.default_backend())


def test_what_is_scored_is_in_chunks_of_its_own():
    scored = clients.with_eval_chunk(lambda x: (x, clients.eval_clients_per_chunk()), 3)
    auto = clients.auto_clients_per_chunk()
    assert (
        clients.eval_clients_per_chunk(),
        scored(5),
        clients.eval_clients_per_chunk(),
    ) == (
        auto,
        (5, 3),
        auto,
    )


def test_clients_scored_inside_a_round_are_in_chunks_too():
    def fake(config):
        def function(*args):
            return clients.eval_clients_per_chunk()

        phases = Phase(1, function), Phase(3, function)
        return FederatedAlgorithm(*[function] * 4, phases=phases)

    factory = algorithms._method(fake, "fake", FederatedConfig).factory
    algorithm = factory(FederatedConfig(QuadraticTask(), clients_per_chunk=3))
    phases = [phase.round for phase in algorithm.phases]
    for function in (*algorithm[:4], *phases):
        assert function() == 3


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_rows_are_written_over_those_that_were_read(num_devices):
    """Each result from what stood there before: no row sees what another has made."""
    rng = np.random.default_rng(0)
    given = {name: np.float32(rng.normal(size=(4, 3))) for name in "abc"}
    given["d"] = np.float32(rng.normal(size=(4, 2)))

    def fn(own, x):
        new = own["a"] + own["b"] + x  # of which both that are written over are read
        results = {"a": new * own["c"][0], "b": new + own["a"], "d": own["d"][:1]}
        return results | {"e": new}, jnp.sum(own["c"])

    x = np.float32(rng.normal(size=4))
    in_place = jax.jit(clients.map_clients(fn, 1, in_place=True))
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:num_devices])):
        found, sums = in_place(given, x)
    new = given["a"] + given["b"] + x[:, None]
    expected = {"a": new * given["c"][:, :1], "b": new + given["a"], "e": new}
    npt.assert_allclose(sums, given["c"].sum(axis=1), rtol=1e-5)
    npt.assert_array_equal(found["d"], given["d"][:, :1])  # another shape
    for name, rows in expected.items():
        npt.assert_allclose(found[name], rows, rtol=1e-5, atol=1e-6)


def test_no_row_is_copied_to_write_another():
    """XLA copies whole arrays where it cannot tell reading and writing apart."""
    shape = (37, 8)

    def fn(own, x):
        new = own["a"] + own["b"] + x
        return {"a": new, "b": new * own["a"]}, new + own["b"]

    given = {"a": jnp.ones(shape), "b": jnp.ones(shape)}
    in_place = jax.jit(clients.map_axis(fn, 1, in_place=True), donate_argnums=0)
    text = in_place.lower(given, jnp.ones(37)).compile().as_text()
    body = text[: text.index("ENTRY")]
    assert "dynamic-update-slice" in body
    assert not re.search(r"= f32\[37,8\]\S* copy\(", body)


def test_one_row_alone_takes_one_branch():
    """Under `vmap` a choice becomes a selection among what all branches compute."""
    mapped = clients.map_axis(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))
    branches = [
        {eqn.primitive.name for eqn in jax.make_jaxpr(mapped)(jnp.ones(n)).eqns}
        & {"cond", "select_n"}
        for n in (1, 2)
    ]
    assert branches == [{"cond"}, {"select_n"}]
    npt.assert_allclose(mapped(jnp.array([2.0])), [np.sin(2)], rtol=1e-6)


def test_one_row_may_give_plain_numbers():
    found = clients.map_axis(lambda x: {"twice": 2 * x, "share": 0.5})(jnp.ones(1))
    npt.assert_array_equal(found["twice"], [2])
    npt.assert_array_equal(found["share"], [0.5])


@pytest.mark.parametrize("rows", [(1, 3), (3, 1), (2, 3)])
def test_leaves_of_unequal_rows_are_refused(rows):
    leaves = jnp.ones((rows[0], 2)), jnp.ones(rows[1])
    with pytest.raises(InputError, match="leaves of shapes .*: expected as many rows"):
        clients.map_clients(lambda x, y: x + y)(*leaves)


def test_a_key_belongs_to_an_identity_not_to_a_place():
    key = jax.random.key(3)
    ids = jnp.array([4, 0, 9])
    keys = clients.client_keys(key, ids)
    for index, client_id in enumerate(ids):
        expected = jax.random.fold_in(key, client_id)
        assert jax.random.key_data(keys[index]).tolist() == (
            jax.random.key_data(expected).tolist()
        )


@pytest.mark.parametrize(
    "num_clients, participation, size",
    [(207, 1.0, 207), (207, 0.5, 104), (5, 0.4, 2), (325, 0.01, 3), (5, 0.01, 1)],
)
def test_cohort_sizes(num_clients, participation, size):
    assert clients.cohort_size(num_clients, participation) == size


def cohort_ids(key, client_ids, weights, participation):
    indices, kept = clients.sample_cohort(key, client_ids, weights, participation)
    assert indices.shape == (clients.cohort_size(len(client_ids), participation),)
    assert np.all(np.diff(indices) > 0)  # ascending, without replacement
    takes_part = np.asarray(kept) > 0
    npt.assert_array_equal(kept[takes_part], weights[indices][takes_part])
    assert np.sum(takes_part) == clients.cohort_size(np.sum(weights > 0), participation)
    return set(np.asarray(client_ids)[indices][takes_part].tolist())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("participation", [0.2, 0.6, 1.0])
def test_a_cohort_depends_on_identities_alone(seed, participation):
    key, ids, weights = jax.random.key(seed), jnp.arange(5) * 7, jnp.arange(1.0, 6)
    cohort = cohort_ids(key, ids, weights, participation)
    order = np.array([3, 1, 4, 0, 2])
    assert cohort_ids(key, ids[order], weights[order], participation) == cohort
    assert cohort_ids(key, ids, weights[::-1], participation) == cohort
    padded_ids = jnp.array([100, *ids[:2], 101, *ids[2:], 102])
    padded_weights = jnp.array([0, *weights[:2], 0, *weights[2:], 0])
    assert cohort_ids(key, padded_ids, padded_weights, participation) == cohort


def test_a_cohort_is_the_smallest_draws():
    key, ids = jax.random.key(1), jnp.array([2, 5, 8, 11])
    draws = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in ids]
    expected = {int(ids[index]) for index in np.argsort(draws)[:2]}
    assert cohort_ids(key, ids, jnp.ones(4), 0.5) == expected


def test_every_client_is_as_likely_as_the_others():
    keys = jax.random.split(jax.random.key(0), 2000)
    ids, weights = jnp.arange(6), jnp.array([1.0, 5, 0, 1, 9, 1])
    sample = jax.vmap(lambda key: clients.sample_cohort(key, ids, weights, 0.4))
    cohorts, kept = map(np.asarray, sample(keys))
    shares = np.bincount(cohorts[kept > 0], minlength=6) / 2000
    assert shares[2] == 0  # padding
    npt.assert_allclose(shares[[0, 1, 3, 4, 5]], 0.4, atol=0.04)  # 3.6 deviations


def test_take_picks_rows():
    tree = {"a": np.arange(10).reshape(5, 2), "b": np.arange(5)}
    taken = trees.take(tree, np.array([3, 0]))
    npt.assert_array_equal(taken["a"], [[6, 7], [0, 1]])
    npt.assert_array_equal(taken["b"], [3, 0])


@pytest.mark.parametrize("num_devices", [1, 2])
def test_chunks_that_do_not_divide_the_rows_are_one_program(num_devices):
    x, keys = jnp.arange(14.0).reshape(7, 2), jax.random.split(jax.random.key(0), 7)
    traces = []

    def fn(x, key):
        traces.append(None)
        return jnp.sum(jnp.sin(x)), jax.random.normal(key), key

    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:num_devices])):
        mapped = jax.jit(clients.map_clients(fn, 3))
        sums, drawn, back = mapped(x, keys)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, keys)[0] ** 2)))(x)
    assert len(traces) == 1
    npt.assert_allclose(sums, np.sin(x).sum(axis=1), rtol=1e-6)
    npt.assert_array_equal(drawn, jax.vmap(jax.random.normal)(keys))
    npt.assert_array_equal(*map(jax.random.key_data, (back, keys)))
    expected = 2 * np.sin(x).sum(axis=1, keepdims=True) * np.cos(x)
    npt.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("clients_per_chunk", [None, 1, 2, 3])
def test_the_ledger_leaves_out_what_a_chunk_computes_again(
    num_devices, clients_per_chunk
):
    def fn(x):
        return jnp.sum(communication.up(x) ** 2)

    x = jnp.ones((10, 4))  # of ten clients, which two devices share evenly
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:num_devices])):
        mapped = clients.map_clients(fn, clients_per_chunk)
        sent = communication.bytes_per_round(mapped, x)
        with_gradient = jax.value_and_grad(lambda x: jnp.sum(mapped(x)))
        again = communication.bytes_per_round(with_gradient, x)
    assert sent == communication.Bytes(up=10 * 4 * 4)
    assert again == sent
