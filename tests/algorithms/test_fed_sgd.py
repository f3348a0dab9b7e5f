"""FedSGD against full-batch training of all subgraphs in one place."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.fed_sgd import FedSGDConfig, fed_sgd
from fedjax_graph.core import communication
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.nodes import NodeTask
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone

TASK = SubgraphTask(NUM_FEATURES, NUM_CLASSES)
KEYS = [jax.random.key(seed) for seed in range(4)]
DECAY = 0.02


@pytest.fixture(scope="module")
def train():
    return client_graphs.make_splits()["train"]


def dense_loss(data):
    """Factory of params -> mean cross-entropy of all training nodes, by `gcn`.

    The subgraphs stand side by side in one dense matrix.
    """
    owns = [alone(data, index) for index in range(len(data.client_ids))]
    sizes = [len(own.labels) for own in owns]
    adjacency = np.eye(sum(sizes))
    for own, start in zip(owns, np.cumsum([0, *sizes[:-1]]), strict=True):
        adjacency[start + own.receivers, start + own.senders] = 1
    scale = adjacency.sum(axis=1) ** -0.5
    propagation = jnp.asarray(scale[:, None] * adjacency * scale)
    features, labels, is_trained = (
        np.concatenate([getattr(own, name) for own in owns])
        for name in ("features", "labels", "is_trained")
    )
    chosen = np.flatnonzero(is_trained)

    def loss(params):
        hidden, head = params["hidden"], params["head"]
        x = propagation @ features @ hidden["kernel"] + hidden["bias"]
        x = propagation @ jax.nn.relu(x) @ head["kernel"] + head["bias"]
        return -jnp.mean(jax.nn.log_softmax(x)[chosen, labels[chosen]])

    return loss


def first_clients(data, count):
    return jax.tree.map(lambda x: x[:count], data)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("num_clients", [1, NUM_CLIENTS])
def test_rounds_are_steps_of_full_batch_training(
    num_clients, optimizer, train, quick_jit
):
    """Of one graph, or of several whose clients weigh as much as they train on."""
    data = first_clients(train, num_clients)
    server_optimizer = OptimizerConfig(optimizer, 0.05, weight_decay=DECAY)
    algorithm = fed_sgd(FedSGDConfig(TASK, server_optimizer=server_optimizer))
    state = quick_jit(algorithm.init)(KEYS[0], data)
    params = jax.tree.map(lambda x: x[0], state.models["params"])
    take = quick_jit(jax.value_and_grad(dense_loss(data)))
    round_ = quick_jit(algorithm.round)
    alone_optimizer = {"adam": optax.adam, "sgd": optax.sgd}[optimizer](0.05)
    opt_state = alone_optimizer.init(params)
    for number, key in enumerate(KEYS, 1):
        state, metrics = round_(state, data, key)
        loss, gradient = take(params)
        gradient = jax.tree.map(lambda g, x: g + DECAY * x, gradient, params)
        update, opt_state = alone_optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, update)
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
        jax.tree.map(
            lambda x, y: npt.assert_allclose(x[0], y, rtol=1e-4, atol=2e-5),
            state.models["params"],
            params,
        )
        assert metrics.keys() == {"train_loss"}
        assert state.num_rounds == number


def test_the_server_rests_while_nobody_takes_part(train, quick_jit):
    algorithm = fed_sgd(FedSGDConfig(TASK))  # Adam with weight decay
    round_ = quick_jit(algorithm.round)
    before, _ = round_(quick_jit(algorithm.init)(KEYS[0], train), train, KEYS[1])
    nobody = train._replace(client_weights=0 * train.client_weights)
    after, _ = round_(before, nobody, KEYS[2])
    jax.tree.map(npt.assert_array_equal, after.models, before.models)
    kept = after.server_opt_state, before.server_opt_state
    jax.tree.map(npt.assert_array_equal, *kept)


def test_the_loss_falls(train, quick_jit):
    algorithm = fed_sgd(FedSGDConfig(TASK))
    state = quick_jit(algorithm.init)(KEYS[0], train)
    round_, losses = quick_jit(algorithm.round), []
    for _ in range(30):
        state, metrics = round_(state, train, KEYS[0])
        losses.append(float(metrics["train_loss"]))
    assert losses[-1] < 0.2 * losses[0]


def test_encrypted_gradients_take_the_same_steps(train, quick_jit):
    """Plain steps, as Adam's first ones make much of a gradient of nearly nothing."""
    pytest.importorskip("tenseal", reason="TenSEAL, of the extra [ckks], is missing")
    if jax.device_count() > 1:
        pytest.skip("encryption runs on one device")
    models = []
    for encryption in ("none", "ckks"):
        sgd = OptimizerConfig("sgd", 0.02, weight_decay=5e-6)
        config = FedSGDConfig(TASK, server_optimizer=sgd, encryption=encryption)
        algorithm = fed_sgd(config)
        state = quick_jit(algorithm.init)(KEYS[0], train)
        state, metrics = quick_jit(algorithm.round)(state, train, KEYS[1])
        models.append(state.models)
    jax.tree.map(lambda x, y: npt.assert_allclose(x, y, atol=1e-7), *models)
    assert metrics.keys() == {
        "train_loss",
        "encryption_bytes",
        "encryption_seconds",
        "encryption_error",
    }
    assert 0 < metrics["encryption_error"] < 2e-8


def test_a_task_without_a_gradient_of_all_its_data_is_refused():
    with pytest.raises(
        InputError, match="fed_sgd: the task 'nodes' .* use fed_avg"
    ) as e:
        fed_sgd(FedSGDConfig(NodeTask(num_features=3, num_classes=2)))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_the_ledger_counts_a_model_and_a_gradient(train, participation):
    algorithm = fed_sgd(FedSGDConfig(TASK, participation=participation))
    state = jax.eval_shape(algorithm.init, KEYS[0], train)
    size = sum(x.size for x in jax.tree.leaves(state.models))
    found = communication.bytes_per_round(algorithm.round, state, train, KEYS[0])
    sent = 4 * size * round(participation * NUM_CLIENTS)
    assert found == communication.Bytes(up=sent, down=sent)


def test_a_schedule_is_refused_as_nobody_knows_the_last_round():
    config = FedSGDConfig(TASK, server_optimizer=OptimizerConfig(schedule="cosine"))
    with pytest.raises(InputError, match="'cosine' needs a number of steps"):
        fed_sgd(config)


def test_gradients_are_hidden_once():
    task = NodeTask(num_features=NUM_FEATURES, num_classes=NUM_CLASSES)
    config = FedSGDConfig(task=task, encryption="ckks", secure_aggregation="masks")
    with pytest.raises(InputError, match="hides the gradients already; leave one"):
        fed_sgd(config)
