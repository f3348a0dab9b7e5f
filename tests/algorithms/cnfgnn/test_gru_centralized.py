"""GRU (centralized) against a loop over minibatches, clients and windows."""

import dataclasses

import jax
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.cnfgnn.gru_centralized import (
    GRUCentralizedConfig,
    gru_centralized,
)
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask
from tests.algorithms import oracle

pytestmark = pytest.mark.usefixtures("rolled_scans")

# 26 windows: the last minibatch is ragged.
TASK = TrafficSeq2SeqTask(
    hidden_size=4,
    batch_size=10,
    optimizer=OptimizerConfig("adam", 0.01),
    sampling_decay=5.0,
)
CONFIG = GRUCentralizedConfig(TASK)
KEYS = (jax.random.key(10), jax.random.key(11))


def test_rounds_are_those_of_loops(train, quick_jit):
    """Of two passes; the optimizer lasts, and all clients' windows count alike."""
    task = dataclasses.replace(TASK, local_epochs=2)
    algorithm, model = gru_centralized(GRUCentralizedConfig(task)), TASK.model()
    state = quick_jit(algorithm.init)(jax.random.key(0), train)
    round_ = quick_jit(algorithm.round)
    params = jax.tree.map(lambda x: x[0], state.models["params"])
    optimizer = optax.adam(0.01)
    opt_state = optimizer.init(params)

    def loss(params, inputs, targets, feed):
        outputs = model.apply(
            {"params": params}, inputs, np.zeros((inputs.shape[1], 0)), targets, feed
        )
        return ((outputs - targets[..., 0]) ** 2).mean()

    value_and_grad = quick_jit(jax.value_and_grad(loss))
    for number, key in enumerate(KEYS):
        state, metrics = round_(state, train, key)
        losses = []
        for indices, feed in oracle.draw_batches(
            key, 26, 10, 2, 6 * number, TASK.sampling_decay
        ):
            found = [
                value_and_grad(params, *oracle.read_window(train, client, index), feed)
                for client in range(5)
                for index in indices
            ]
            values, grads = zip(*found, strict=True)
            updates, opt_state = optimizer.update(oracle.mean_of(grads), opt_state)
            params = optax.apply_updates(params, updates)
            losses.append(np.mean(values))
        jax.tree.map(
            lambda a, b: npt.assert_allclose(a[0], b, atol=3e-4),  # a step is 0.01
            state.models["params"],
            params,
        )
        npt.assert_allclose(metrics["train_loss"], np.mean(losses), rtol=1e-4)
        assert int(state.num_steps) == 6 * (number + 1)


def test_a_schedule_spans_all_rounds(train, quick_jit):
    """It ends after the three steps of the first, so the second changes nothing."""
    falling = OptimizerConfig("sgd", 0.1, schedule="linear", num_steps=3)
    task = dataclasses.replace(TASK, optimizer=falling)
    algorithm = gru_centralized(GRUCentralizedConfig(task))
    states = [algorithm.init(jax.random.key(0), train)]
    for key in KEYS:
        states.append(quick_jit(algorithm.round)(states[-1], train, key)[0])
    first, second, third = (jax.tree.leaves(state.models) for state in states)
    assert all((a != b).any() for a, b in zip(first, second, strict=True))
    jax.tree.map(npt.assert_array_equal, second, third)
    lasting = dataclasses.replace(falling, stateful=True)
    with pytest.raises(InputError, match="gru_centralized: optimizer stateful=True"):
        gru_centralized(
            GRUCentralizedConfig(dataclasses.replace(TASK, optimizer=lasting))
        )


def test_padded_clients_do_not_count(train, quick_jit):
    weights = np.array(train.client_weights)
    weights[2:] = 0
    round_ = gru_centralized(CONFIG).round
    state = gru_centralized(CONFIG).init(jax.random.key(0), train)
    padded = quick_jit(round_)(state, train._replace(client_weights=weights), KEYS[0])
    fewer = train._replace(
        speed=train.speed[:2],
        client_ids=train.client_ids[:2],
        client_weights=train.client_weights[:2],
    )
    alone = quick_jit(round_)(state, fewer, KEYS[0])
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, atol=1e-5), padded, alone)
