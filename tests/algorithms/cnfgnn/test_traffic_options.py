"""Options of the traffic methods beyond the papers: missing readings, types, bits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph import algorithms
from fedjax_graph.algorithms.cnfgnn import cnfgnn
from fedjax_graph.core import aggregation, communication
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks import forecasting

pytestmark = pytest.mark.usefixtures("rolled_scans")

SMALL = {
    "hidden_size": 4,
    "gn_mlp_sizes": (6, 6),
    "gn_layers": 1,
    "sampling_decay": 1e-3,  # the truth is never fed
    "server_batch_size": 200,  # all windows in one batch
}
ALTERNATING = ("cnfgnn", "at_without_fedavg")
TASK = {  # of the plain GRU
    "kind": "traffic_seq2seq",
    "hidden_size": 4,
    "sampling_decay": 1e-3,
    "batch_size": 200,
}
GRUS = ("gru_centralized", "fed_avg", "gru_fmtl")
LOSSES = (
    "split_learning",
    "fed_avg",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("cnfgnn", "gru_centralized", "gru_fmtl")
    ),
)
EXCHANGING = (
    "cnfgnn",
    "at_without_fedavg",
    "split_learning",
    "split_learning_fedavg",
)


def make(method, **values):
    if method in GRUS:
        values = {"task": TASK | values}
    else:
        batch = {"client_batch_size": 200} if method in ALTERNATING else {}
        values = SMALL | batch | values
    return algorithms.get_method(method).factory(algorithms.make_config(method, values))


def still(method):
    """Optimizers that move nothing."""
    names = (
        ["optimizer"] if method in GRUS else ["client_optimizer", "server_optimizer"]
    )
    return dict.fromkeys(names, OptimizerConfig("adam", 0.0))


def squared_errors(forecast, data, clients):
    """Of [S, K, 12] forecasts: over the readings that are there, and over all."""
    steps = np.asarray(data.starts)[:, None] + 12 + np.arange(12)
    truth = np.asarray(data.speed)[clients][:, steps].swapaxes(0, 1)
    error = (np.asarray(forecast)[:, clients] - truth) / float(data.std)
    assert 0 < np.mean(truth == 0) < 0.3
    return np.mean(error[truth != 0] ** 2), np.mean(error**2)


def masked_error(forecast, data, clients):
    """Mean squared error of [S, K, 12] forecasts over the readings that are there."""
    return squared_errors(forecast, data, clients)[0]


def without_server(state, data):
    """Forecasts [S, K, 12] of the clients' halves alone."""
    models = cnfgnn.make_models(algorithms.make_config("cnfgnn", SMALL))
    windows = forecasting.gather_all(data, data.starts)
    h_c = models.encode(state.client_params, windows[0])
    outputs, _ = models.decode(
        state.client_params,
        windows,
        h_c,
        0 * h_c,
        jnp.zeros(12, bool),
    )
    return jnp.transpose(outputs, (2, 0, 1)) * data.std + data.mean


@pytest.mark.parametrize("method", LOSSES)
def test_a_masked_loss_runs_over_what_was_read(method, splits, quick_jit):
    data = splits["train"]
    algorithm = make(method, masked_loss=True, **still(method))
    state = algorithm.init(jax.random.key(0), data)
    forecast = quick_jit(algorithm.predict)(state, data)
    _, metrics = quick_jit(algorithm.round)(state, data, jax.random.key(1))
    by_client = [masked_error(forecast, data, [i]) for i in range(5)]
    together, unmasked = squared_errors(forecast, data, range(5))
    assert abs(np.mean(by_client) / together - 1) > 1e-4  # clients miss unequally
    expected = np.mean(by_client)
    if method == "cnfgnn":  # its clients begin with h_G = 0
        npt.assert_allclose(metrics["server_loss"], expected, rtol=1e-4)
        expected = np.mean(
            [masked_error(without_server(state, data), data, [i]) for i in range(5)]
        )
    npt.assert_allclose(metrics["train_loss"], expected, rtol=1e-4)
    scores = quick_jit(algorithm.evaluate)(state, data)
    npt.assert_allclose(scores["loss"], together, rtol=1e-4)
    assert abs(unmasked / together - 1) > 0.1


def test_the_server_computes_in_bfloat16_and_keeps_float32(splits, quick_jit):
    data, key = splits["train"], jax.random.key(3)
    exact, short = (
        cnfgnn.make_models(cnfgnn.CNFGNNConfig(server_dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    _, params = exact.init(key)
    hidden = jax.random.uniform(key, (5, 7, 64), minval=-1)
    jaxpr = jax.make_jaxpr(short.embed)(params, data, hidden)
    types = {
        str(operand.aval.dtype)
        for equation in _equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
        for operand in equation.invars
    }
    assert types == {"bfloat16"}
    outputs, expected = (
        quick_jit(models.embed)(params, data, hidden) for models in (short, exact)
    )
    assert outputs.dtype == jnp.float32
    error = np.abs(outputs - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < 2e-2
    algorithm = make("cnfgnn", server_dtype="bfloat16")
    state = jax.eval_shape(algorithm.init, key, data)
    moved, _ = jax.eval_shape(algorithm.round, state, data, key)
    assert all(
        x.dtype == jnp.float32
        for x in jax.tree.leaves((moved.server_params, moved.server_opt_state))
        if jnp.issubdtype(x.dtype, jnp.floating)
    )


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from _equations(value.jaxpr)


@pytest.mark.parametrize("method", EXCHANGING)
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_the_ledger_counts_the_bits_that_cross(method, bits, splits):
    data = splits["train"]
    algorithm = make(method, exchange_bits=bits)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    counted = communication.bytes_per_round(
        algorithm.round, state, data, jax.random.key(0)
    )
    row = {32: 16, 16: 8, 8: 4 + 4, 4: 2 + 4}[bits]  # 4 numbers, and their scale
    is_averaged = method in ("cnfgnn", "split_learning_fedavg")
    one = aggregation.num_models(state.client_params)
    weights = sum(x.size * 4 for x in jax.tree.leaves(state.client_params)) // one
    expected = 2 * 5 * 26 * row + is_averaged * 5 * weights
    assert counted == (expected, expected)


@pytest.mark.slow
def test_fewer_bits_change_little(splits, quick_jit):
    """Two rounds are close to those of 32 bits, not the same, closer with more bits."""
    data, keys = splits["train"], jax.random.split(jax.random.key(5))

    def forecast(bits):
        algorithm = make("cnfgnn", exchange_bits=bits, server_batch_size=12)
        state = algorithm.init(jax.random.key(0), data)
        for key in keys:
            state, _ = quick_jit(algorithm.round)(state, data, key)
        return np.asarray(quick_jit(algorithm.predict)(state, data))

    exact = forecast(32)
    errors = [np.sqrt(np.mean((forecast(bits) - exact) ** 2)) for bits in (4, 8, 16)]
    assert errors[2] > 1e-6 and errors[1] < errors[0] < 0.1 * exact.std()


@pytest.mark.parametrize("bits", [pytest.param(32, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    "method", [pytest.param("cnfgnn", marks=pytest.mark.slow), "split_learning"]
)
def test_training_meets_what_forecasts_do(method, bits, splits, quick_jit):
    """The clients have their own h_c as it was; without a step the losses agree."""
    data, key = splits["train"], jax.random.key(2)
    algorithm = make(method, exchange_bits=bits, **still(method))
    state = algorithm.init(key, data)
    _, metrics = quick_jit(algorithm.round)(state, data, key)
    loss = metrics.get("server_loss", metrics["train_loss"])
    scores = quick_jit(algorithm.evaluate)(state, data)
    npt.assert_allclose(loss, scores["loss"], rtol=1e-5)


@pytest.mark.parametrize("method", ["cnfgnn", "split_learning"])
def test_unknown_bits_are_refused(method):
    with pytest.raises(InputError, match="exchange_bits=7: expected 32 or 16 or 8"):
        make(method, exchange_bits=7)
