"""What CNFGNN's sensors send under differential privacy: clipped, noisy, none twice."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig, cnfgnn
from fedjax_graph.algorithms.cnfgnn.private_exchange import Exchange
from fedjax_graph.core.privacy import Privacy

pytest.importorskip("jax_privacy", reason="JAX-Privacy, of the extra [dp], is missing")

KEY = jax.random.key(2)
KEY_DATA = jax.random.key_data(KEY)
NOISY = Privacy(noise_multiplier=3.0, hidden_clip_norm=0.5, gradient_clip_norm=0.1)
SIZE = 64


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
    exchange = Exchange(NOISY, server_rounds=1)
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
    exchange = Exchange(NOISY, server_rounds=4)
    sent = np.asarray(exchange.gradients(rows, train, starts, weights, KEY_DATA))
    npt.assert_array_equal(sent[:, 6:], 0)
    npt.assert_array_equal(sent[2], 0)
    real = np.array([0, 1, 3, 4])
    noise = sent[real, :6] - clipped(rows, 0.1)[real, :6]
    expected = 3 * 0.1 * np.sqrt(4 * len(train.starts))
    assert noise.std() == pytest.approx(expected, rel=0.06)


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
        config = CNFGNNConfig(
            hidden_size=4,
            gn_layers=1,
            gn_mlp_sizes=(6, 6, 6),
            server_batch_size=10,
            client_batch_size=12,
            privacy=privacy,
        )
        method = cnfgnn(config)
        state, round_ = method.init(KEY, train), quick_jit(method.round)
        for seed in (3, 4):
            state, metrics = round_(state, train, jax.random.key(seed))
        return (state.client_params, state.server_params), metrics

    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        after_rounds(loose),
        after_rounds(None),
    )
