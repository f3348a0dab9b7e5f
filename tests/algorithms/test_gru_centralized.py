"""GRU (centralized) against a loop over minibatches of pairs."""

import jax
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.gru_centralized import gru_centralized, pooled_batches
from fedjax_graph.algorithms.gru_fed_avg import GRUConfig, make_model
from tests.algorithms import oracle

pytestmark = pytest.mark.usefixtures("rolled_scans")

CONFIG = GRUConfig(hidden_size=4, batch_size=24, learning_rate=0.01, sampling_decay=5.0)
KEYS = (jax.random.key(10), jax.random.key(11))


def batches_of(data, key, first_step=0):
    return pooled_batches(CONFIG, data, key, first_step)


def test_a_pass_sees_every_pair_once(train):
    places, mask, feed_truth = batches_of(train, KEYS[0])
    assert places.shape == mask.shape == (6, 24) and feed_truth.shape == (6, 12)
    assert sorted(places[mask > 0]) == list(range(5 * 26))
    first = np.asarray(places[0]) // 26
    assert len(set(first)) > 2  # clients are mixed
    assert not np.array_equal(places, batches_of(train, KEYS[1]).places)


def test_pairs_of_padded_clients_come_last(train):
    weights = np.array(train.client_weights)
    weights[[1, 4]] = 0
    places, mask, _ = batches_of(train._replace(client_weights=weights), KEYS[0])
    pairs = places.reshape(-1)[: 3 * 26]
    assert set(np.asarray(pairs) // 26) == {0, 2, 3}
    assert mask.sum() == 3 * 26 and np.all(mask.reshape(-1)[: 3 * 26] == 1)


def test_rounds_are_those_of_loops(train, quick_jit):
    """The optimiser lasts, and each pair counts alike."""
    algorithm, model = gru_centralized(CONFIG), make_model(CONFIG)
    state, round_ = algorithm.init(jax.random.key(0), train), quick_jit(algorithm.round)
    params = jax.tree.map(lambda x: x[0], state.client_params)
    optimiser = optax.adam(CONFIG.learning_rate)
    opt_state = optimiser.init(params)

    def loss(params, inputs, targets, feed):
        outputs = model.apply(
            {"params": params}, inputs, np.zeros((inputs.shape[1], 0)), targets, feed
        )
        return ((outputs - targets[..., 0]) ** 2).mean()

    value_and_grad = quick_jit(jax.value_and_grad(loss))
    for number, key in enumerate(KEYS):
        state, metrics = round_(state, train, key)
        batches, losses = batches_of(train, key, 6 * number), []
        for places, mask, feed in zip(*batches, strict=True):
            pairs = [divmod(int(p), 26) for p in places[mask > 0]]
            windows = [oracle.read_window(train, *pair) for pair in pairs]
            inputs, targets = (
                np.concatenate(part, axis=1) for part in zip(*windows, strict=True)
            )
            value, grads = value_and_grad(params, inputs, targets, feed)
            updates, opt_state = optimiser.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            losses.append(value)
        jax.tree.map(
            lambda a, b: npt.assert_allclose(a[0], b, atol=2e-5),
            state.client_params,
            params,
        )
        npt.assert_allclose(metrics["train_loss"], np.mean(losses), rtol=1e-4)
        assert int(state.num_steps) == 6 * (number + 1)


def test_steps_of_padding_alone_are_not_taken(train, quick_jit):
    """With momentum a step without a gradient would move the model as well."""
    weights = np.array(train.client_weights)
    weights[2:] = 0
    round_ = quick_jit(gru_centralized(CONFIG).round)
    state = gru_centralized(CONFIG).init(jax.random.key(0), train)
    padded, _ = round_(state, train._replace(client_weights=weights), KEYS[0])
    assert int(padded.num_steps) == int(padded.opt_state[0].count) == 3  # 52 of 24
    fewer = train._replace(
        speed=train.speed[:2],
        client_ids=train.client_ids[:2],
        client_weights=train.client_weights[:2],
    )
    alone, _ = quick_jit(gru_centralized(CONFIG).round)(state, fewer, KEYS[0])
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, atol=1e-6), padded, alone)
