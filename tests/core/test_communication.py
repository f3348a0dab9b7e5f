"""The ledger: what programs ledger, and the totals printed in CNFGNN's paper."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph import algorithms
from fedjax_graph.algorithms.cnfgnn import byte_formulas
from fedjax_graph.core import communication
from fedjax_graph.core.communication import Bytes, bytes_per_round, down, up
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask

X = jnp.zeros((3, 4))  # 48 bytes


def test_marks_compute_nothing():
    tree = {"a": jnp.arange(3.0), "b": (jnp.int32(2),)}
    marked = up(down(tree), Fraction(1, 3))
    assert jax.tree.map(jnp.array_equal, marked, tree) == {"a": True, "b": (True,)}
    assert jax.grad(lambda x: up(x) ** 2)(3.0) == 6


def test_bytes_follow_sizes_and_types():
    def ledger(x):
        half = x.astype(jnp.bfloat16)
        return up({"whole": x, "half": half}), down(half[0])

    assert bytes_per_round(ledger, X) == Bytes(up=48 + 24, down=8)
    assert bytes_per_round(jnp.sin, X) == Bytes(0, 0)


def test_shapes_alone_are_enough():
    shape = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)  # 4 TB
    assert bytes_per_round(up, shape) == Bytes(up=4 * 10**12)


@pytest.mark.parametrize("direction", [up, down])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_what_arrives_of_fewer_bits(bits, direction):
    rows = np.random.default_rng(0).normal(size=(5, 3, 64)).astype(np.float32)
    rows[0, 0], rows[1, 1] = 0, rows[1, 1] * 1e-12
    arrived = direction({"x": jnp.asarray(rows)}, bits=bits)["x"]
    assert arrived.dtype == np.float32 and not np.any(arrived[0, 0])
    if bits == 16:
        npt.assert_array_equal(arrived, jnp.asarray(rows).astype(jnp.bfloat16))
    else:
        step = np.abs(rows).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
        assert np.all(np.abs(arrived - rows) <= 0.5001 * step)
        levels = arrived / np.where(step > 0, step, 1)
        npt.assert_allclose(levels, np.round(levels), atol=1e-4)
        assert np.abs(np.round(levels)).max() == 2 ** (bits - 1) - 1
    packed = communication.pack(rows, bits)
    npt.assert_array_equal(communication.unpack(packed), arrived)
    size = 5 * 3 * (64 * bits // 8 + (4 if bits < 16 else 0))
    counted = bytes_per_round(lambda x: direction(x, Fraction(1), bits), rows)
    assert counted == (Bytes(up=size) if direction is up else Bytes(down=size))
    assert bytes_per_round(lambda x: up(communication.pack(x, bits)), rows).up == size


def test_padding_is_left_out_exactly():
    def ledger(x):
        def step(carry, _):
            return carry, up(x, Fraction(5, 7))

        return jax.lax.scan(step, 0, length=7)[1]

    assert bytes_per_round(ledger, X) == Bytes(up=48 * 5)


def scan(body):
    return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, length=5)[0]


NESTED = {
    "jit": (jax.jit(up), 1),
    "scan": (scan(up), 5),
    "scan in scan": (scan(scan(up)), 25),
    "jit in scan": (scan(jax.jit(up)), 5),
    "map": (lambda x: jax.lax.map(up, x), 1),
    "map in chunks": (lambda x: jax.lax.map(up, x, batch_size=2), 1),
    "vmap": (jax.vmap(up), 1),
    "remat": (jax.checkpoint(up), 1),
    "gradient": (jax.grad(lambda x: jnp.sum(up(x) ** 2)), 1),
    "fori": (lambda x: jax.lax.fori_loop(0, 4, lambda _, x: up(x), x), 4),
}


@pytest.mark.parametrize("name", NESTED)
def test_loops_multiply(name):
    fn, times = NESTED[name]
    assert bytes_per_round(fn, X) == Bytes(up=48 * times)


def test_branches_count_at_most():
    branches = (lambda x: up(x[0]), lambda x: down(up(x))[0], lambda x: x[0])
    exchanged = bytes_per_round(lambda i: jax.lax.switch(i, branches, X), 0)
    assert exchanged == Bytes(up=48, down=48)
    each = bytes_per_round(
        lambda p: jax.lax.cond(p, lambda: up(X)[0], lambda: down(X[0])), True
    )
    assert each == Bytes(up=48, down=16)


def test_a_loop_of_unknown_length_is_refused():
    def fn(body):
        return lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 3, body, x)

    with pytest.raises(ValueError, match="unknown length"):
        bytes_per_round(fn(up), X)
    assert bytes_per_round(fn(lambda x: x + 1), X) == Bytes()


# --- One round of a method ------------------------------------------------------------


def round_bytes(name, config, data):
    method = algorithms.REGISTRY[name]
    algorithm = method.factory(method.config_type(**config))
    key = jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key, data)
    model = jax.tree.leaves(getattr(state, "client_params", None) or state.models)
    model_bytes = sum(4 * x.size for x in model)
    return bytes_per_round(algorithm.round, state, data, key), model_bytes


@pytest.mark.parametrize("participation, cohort", [(1.0, 5), (0.4, 2), (0.1, 1)])
@pytest.mark.parametrize("clients_per_chunk", [None, 2])
def test_fed_avg_exchanges_models(train, participation, cohort, clients_per_chunk):
    config = {
        "task": TrafficSeq2SeqTask(hidden_size=4, batch_size=8, local_epochs=2),
        "participation": participation,
        "clients_per_chunk": clients_per_chunk,
    }
    exchanged, model = round_bytes("fed_avg", config, train)
    assert exchanged == Bytes(up=cohort * model, down=cohort * model)


@pytest.mark.parametrize(
    "participation, cohort, server_batch_size, server_rounds",  # of 26 windows
    [(1.0, 5, 6, 1), (1.0, 5, 48, 3), (0.4, 2, 48, 1), (0.4, 2, 6, 3)],
)
def test_cnfgnn_exchanges_what_its_formula_says(
    train, rolled_scans, participation, cohort, server_batch_size, server_rounds
):
    config = {
        "hidden_size": 4,
        "gn_mlp_sizes": (6, 6, 6),
        "client_batch_size": 8,
        "server_batch_size": server_batch_size,
        "client_rounds": 2,
        "server_rounds": server_rounds,
        "participation": participation,
    }
    exchanged, model = round_bytes("cnfgnn", config, train)
    hidden = 26 * 4 * 4  # windows x hidden size x float32, of one sensor
    # Up: h_c once and the gradient of h_G in each server round. Down: h_G likewise.
    one_way = cohort * model + 5 * hidden * (1 + server_rounds)
    assert exchanged == Bytes(up=one_way, down=one_way)
    if cohort == 5:
        total = byte_formulas.split_learning_total(1, 5, hidden, model, server_rounds)
        assert total == exchanged.up + exchanged.down


@pytest.mark.parametrize("server_batch_size", [6, 48])  # 26 windows
@pytest.mark.parametrize(
    "name, has_average, server_rounds",
    [
        ("split_learning", False, 1),
        ("split_learning_fedavg", True, 1),
        ("at_without_fedavg", False, 1),
        ("at_without_fedavg", False, 3),
    ],
)
def test_strategies_exchange_what_their_formulas_say(
    train, rolled_scans, name, has_average, server_rounds, server_batch_size
):
    config = {
        "hidden_size": 4,
        "gn_mlp_sizes": (6, 6, 6),
        "server_batch_size": server_batch_size,
    }
    if server_rounds > 1:
        config["server_rounds"] = server_rounds
    exchanged, model = round_bytes(name, config, train)
    total = byte_formulas.split_learning_total(
        1, 5, 26 * 4 * 4, model if has_average else 0, server_rounds
    )
    assert exchanged == Bytes(up=total // 2, down=total // 2)


def test_averages_after_every_minibatch_cost_as_many_models(train, rolled_scans):
    config = {"hidden_size": 4, "gn_mlp_sizes": (6, 6, 6), "server_batch_size": 6}
    once, model = round_bytes("split_learning_fedavg", config, train)
    often, _ = round_bytes(
        "split_learning_fedavg", config | {"average_every_step": True}, train
    )
    assert often == once.plus(Bytes(4 * 5 * model, 4 * 5 * model))  # 5 minibatches


@pytest.mark.parametrize("name", ["gru_centralized", "gru_gn", "local"])
def test_what_is_not_federated_exchanges_nothing(train, rolled_scans, name):
    config = {"task": TrafficSeq2SeqTask(hidden_size=4)}
    if name == "gru_gn":
        config = {"hidden_size": 4, "gn_mlp_sizes": (6, 6, 6)}
    assert round_bytes(name, config, train)[0] == Bytes(0, 0)


# --- Tables 2 to 6 of the paper -------------------------------------------------------

GIB = 2**30
NODES = {"pems_bay": 325, "metr_la": 207}
EDGES = {"pems_bay": 2369, "metr_la": 1515}
HIDDEN = {"pems_bay": 36465 * 64 * 4, "metr_la": 23974 * 64 * 4}
SMALL_GRU, LARGE_GRU, CLIENT = 63_000 * 4, 727_000 * 4, 64_000 * 4


@pytest.mark.parametrize(
    "dataset, rounds, model, printed",
    [
        ("pems_bay", 104, SMALL_GRU, 57.823),
        ("pems_bay", 56, LARGE_GRU, 359.292),
        ("metr_la", 279, SMALL_GRU, 99.201),
        ("metr_la", 176, LARGE_GRU, 722.137),
    ],
)
def test_table_2(dataset, rounds, model, printed):
    total = byte_formulas.multi_task_total(rounds, EDGES[dataset], model)
    assert total / GIB == pytest.approx(printed, rel=5e-4)


@pytest.mark.parametrize(
    "dataset, rounds, model, server_rounds, printed",
    [
        pytest.param("pems_bay", 2, CLIENT, 20, 237.654, id="table_3-pems_bay"),
        pytest.param("metr_la", 46, CLIENT, 1, 222.246, id="table_3-metr_la"),
        pytest.param("pems_bay", 31, 0, 1, 350.366, id="table_4-pems_bay"),
        pytest.param("metr_la", 65, 0, 1, 307.627, id="table_4-metr_la"),
        pytest.param("pems_bay", 7, CLIENT, 1, 80.200, id="table_5-pems_bay"),
        pytest.param("metr_la", 71, CLIENT, 1, 343.031, id="table_5-metr_la"),
        pytest.param("pems_bay", 44, 0, 20, 5221.576, id="table_6-pems_bay"),
        # The table prints 1 server round; the total is that of 20.
        pytest.param("metr_la", 49, 0, 20, 2434.985, id="table_6-metr_la"),
    ],
)
def test_tables_3_to_6(dataset, rounds, model, server_rounds, printed):
    total = byte_formulas.split_learning_total(
        rounds, NODES[dataset], HIDDEN[dataset], model, server_rounds
    )
    assert total / GIB == pytest.approx(printed, rel=5e-4)


def test_bytes_of_many_rounds_do_not_overflow():
    per_round = communication.Bytes(2**31 + 7, 2**30)
    in_three = (3 * (2**31 + 7), 3 * 2**30)
    assert per_round.times(np.int32(3)) == in_three
    ledger = communication.Ledger(rounds=((1, per_round),))
    assert ledger.until(np.int32(3)) == in_three
    assert ledger.per_round(np.int32(3)) == per_round


def test_a_run_exchanges_what_its_phases_do():
    """Round by round, one after another."""
    first, sizes = (1, 3, 4), [Bytes(10, 1), Bytes(), Bytes(7, 0)]
    rounds = tuple(zip(first, sizes, strict=True))
    ledger, total = communication.Ledger(Bytes(100, 50), rounds), Bytes(100, 50)
    for number in range(8):
        if number:
            phase = 0 if number < 3 else 1 if number < 4 else 2
            total = Bytes(total.up + sizes[phase].up, total.down + sizes[phase].down)
        assert ledger.until(number) == total
        share = max(1, number)
        assert ledger.per_round(number) == (total.up // share, total.down // share)
    assert communication.Ledger().until(5) == Bytes()
