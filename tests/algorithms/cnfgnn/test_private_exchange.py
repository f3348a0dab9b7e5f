"""What CNFGNN's sensors send under differential privacy: clipped, noisy, none twice."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.cnfgnn import cnfgnn as module
from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig, cnfgnn
from fedjax_graph.algorithms.cnfgnn.exchange import Hidden
from fedjax_graph.algorithms.cnfgnn.private_exchange import PrivateExchange
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.privacy import Privacy

pytest.importorskip("jax_privacy", reason="JAX-Privacy, of the extra [dp], is missing")

KEY = jax.random.key(2)
KEY_DATA = jax.random.key_data(KEY)
NOISY = Privacy(noise_multiplier=3.0, hidden_clip_norm=0.5, gradient_clip_norm=0.1)
SIZE = 64
TINY = {
    "hidden_size": 4,
    "gn_layers": 1,
    "gn_mlp_sizes": (6, 6, 6),
    "server_batch_size": 10,
    "client_batch_size": 12,
}


def clipped(rows, norm):
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows * np.minimum(1, norm / np.maximum(norms, 1e-30))


def rows_of(train, num_windows, seed=0):
    rng = np.random.default_rng(seed)
    shape = (len(train.client_ids), num_windows, SIZE)
    return (rng.normal(size=shape) / 8).astype(np.float32)


def test_hidden_states_have_the_noise_of_all_rows_of_a_sensor(train):
    starts = train.starts
    rows = rows_of(train, len(starts))
    exchange = PrivateExchange(NOISY, server_rounds=1)
    sent = exchange.hidden(rows, train, starts, KEY_DATA)
    noise = np.asarray(sent) - clipped(rows, 0.5)
    assert noise.std() == pytest.approx(3 * 0.5 * np.sqrt(len(starts)), rel=0.03)
    part = starts[3:7]
    again = exchange.hidden(rows[:, 3:7], train, part, KEY_DATA)
    npt.assert_allclose(again - clipped(rows[:, 3:7], 0.5), noise[:, 3:7], atol=1e-4)


def test_gradients_have_the_noise_of_all_passes_and_padding_has_none(train):
    """Padding has the window of another row, whose noise it must not give away."""
    starts = jnp.append(train.starts[:6], train.starts[:2])
    rows = rows_of(train, 8)
    weights = np.ones((len(rows), 12, 8), np.float32)
    weights[:, :, 6:] = 0
    weights[2] = 0  # a padded client
    exchange = PrivateExchange(NOISY, server_rounds=4)
    sent = np.asarray(exchange.gradients(rows, train, starts, weights, KEY_DATA))
    npt.assert_array_equal(sent[:, 6:], 0)
    npt.assert_array_equal(sent[2], 0)
    real = np.array([0, 1, 3, 4])
    noise = sent[real, :6] - clipped(rows, 0.1)[real, :6]
    expected = 3 * 0.1 * np.sqrt(4 * len(train.starts))
    assert noise.std() == pytest.approx(expected, rel=0.06)


@pytest.mark.usefixtures("rolled_scans")
def test_the_server_learns_from_private_gradients_alone(train, quick_jit, draw_params):
    """Clipped to next to nothing they are noise, whose sum moves the last bias."""
    norm, deviation = 1e-9, 1e-4
    config = CNFGNNConfig(
        **TINY,
        server_optimizer=OptimizerConfig("sgd", 1.0),
        privacy=Privacy(noise_multiplier=deviation / norm, gradient_clip_norm=norm),
    )
    client_params, before = draw_params(module.make_models(config).init)
    num_windows = len(train.starts)
    hidden = Hidden.of(jnp.asarray(rows_of(train, num_windows)[..., :4]), bits=32)
    step = quick_jit(module.server_phase(config))
    opt_state = config.server_optimizer.build().init(before)
    args = client_params, hidden.as_rows(), train, KEY, jnp.int32(0)
    after, *_ = step(before, opt_state, *args)
    change = after["out"]["bias"] - before["out"]["bias"]
    num_rows = len(train.client_ids) * num_windows
    found = np.linalg.norm(change) / np.sqrt(len(change) * num_rows * num_windows)
    assert deviation / 5 < found < deviation * 5  # of four numbers


@pytest.mark.usefixtures("rolled_scans")
def test_hidden_states_are_sent_once_a_round_with_noise_of_their_own(
    train, quick_jit, draw_params, monkeypatch
):
    """Nobody learns, so that two rounds differ in their noise alone."""

    def clients_rest(client_params, h_g, *_):
        return client_params, h_g, 0

    def server_rests(server_params, opt_state, client_params, hidden, *_):
        return server_params, opt_state, hidden, 0

    monkeypatch.setattr(module, "client_phase", lambda *_: clients_rest)
    monkeypatch.setattr(module, "server_phase", lambda *_: server_rests)
    config = CNFGNNConfig(
        **TINY, privacy=Privacy(noise_multiplier=0.1, hidden_clip_norm=0.05)
    )
    method, models = cnfgnn(config), module.make_models(config)
    client_params, server_params = draw_params(models.init)
    state = module.CNFGNNState(
        client_params, server_params, (), jnp.int32(0), jnp.int32(0), KEY_DATA
    )
    round_, embed = quick_jit(method.round), quick_jit(models.embed)
    num_clients, num_windows = len(train.client_ids), len(train.starts)
    noises, expected = [], 0  # as the first h_G
    for seed in (3, 4):
        state, metrics = round_(state, train, jax.random.key(seed))
        npt.assert_allclose(metrics["train_loss"], expected, atol=1e-6)
        hidden = metrics["server_loss"].of_clients(num_clients)
        sent = hidden.at_server()
        noise = sent - clipped(np.asarray(hidden.at_clients), 0.05)
        noises.append(noise[:, :num_windows])
        expected = embed(state.server_params, train, sent)  # of the next round
    for noise in noises:
        deviation = 0.1 * 0.05 * np.sqrt(num_windows)
        assert noise.std() == pytest.approx(deviation, rel=0.15)
    assert abs(np.corrcoef(*(noise.ravel() for noise in noises))[0, 1]) < 0.2


def test_noise_is_scaled_for_the_servers_passes(monkeypatch):
    made = []

    def spied(*args):
        made.append(PrivateExchange(*args))
        return made[-1]

    monkeypatch.setattr(module, "PrivateExchange", spied)
    cnfgnn(CNFGNNConfig(**TINY, privacy=NOISY, server_rounds=3))
    assert len(made) == 2  # of the round, and of the server's phase
    assert all(exchange == (NOISY, 3) for exchange in made)


@pytest.mark.slow
def test_without_noise_or_clipping_two_rounds_are_those_in_the_clear(train, quick_jit):
    """So each part is where it belongs; clients have the same weight."""
    train = train._replace(client_weights=jnp.ones(len(train.client_ids)))
    loose = Privacy(
        noise_multiplier=1e-12,
        clip_norm=1e4,
        hidden_clip_norm=1e4,
        gradient_clip_norm=1e4,
    )

    def after_rounds(privacy):
        method = cnfgnn(CNFGNNConfig(**TINY, privacy=privacy))
        state, round_ = method.init(KEY, train), quick_jit(method.round)
        for seed in (3, 4):
            state, metrics = round_(state, train, jax.random.key(seed))
        return (state.client_params, state.server_params), metrics

    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        after_rounds(loose),
        after_rounds(None),
    )
