"""The local update against optimizer steps written out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.core.local import local_steps, local_update, optimizer_step

NUM_STEPS, BATCH = 6, 4
LEARNING_RATE = 0.05


def batches(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(NUM_STEPS, BATCH, 3)).astype(np.float32)
    y = rng.normal(size=(NUM_STEPS, BATCH)).astype(np.float32)
    mask = np.ones((NUM_STEPS, BATCH), np.float32)
    mask[-1, 2:] = 0
    return {"x": x, "y": y, "mask": mask}


def loss(params, batch):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.sum(batch["mask"] * error**2) / jnp.sum(batch["mask"])


def gradient(params, x, y):
    """Of the mean squared error, by hand."""
    error = x @ params["w"] + params["b"] - y
    return {"w": 2 * error @ x / len(y), "b": 2 * error.mean()}, (error**2).mean()


class SGD:
    def __call__(self, name, gradient):
        return -LEARNING_RATE * gradient


class Momentum:
    def __init__(self):
        self.trace = {"w": 0, "b": 0}

    def __call__(self, name, gradient):
        self.trace[name] = gradient + 0.9 * self.trace[name]
        return -LEARNING_RATE * self.trace[name]


class Adam:
    def __init__(self):
        self.mean, self.square = {"w": 0, "b": 0}, {"w": 0, "b": 0}
        self.count = {"w": 0, "b": 0}

    def __call__(self, name, gradient):
        self.count[name] += 1
        self.mean[name] = 0.9 * self.mean[name] + 0.1 * gradient
        self.square[name] = 0.999 * self.square[name] + 0.001 * gradient**2
        mean = self.mean[name] / (1 - 0.9 ** self.count[name])
        square = self.square[name] / (1 - 0.999 ** self.count[name])
        return -LEARNING_RATE * mean / (np.sqrt(square) + 1e-8)


OPTIMIZERS = {
    "sgd": (optax.sgd(LEARNING_RATE), SGD),
    "momentum": (optax.sgd(LEARNING_RATE, momentum=0.9), Momentum),
    "adam": (optax.adam(LEARNING_RATE), Adam),
}


def start_params():
    return {"w": np.array([0.5, -1.0, 2.0], np.float32), "b": np.float32(0.3)}


def loop(make_optimizer, params, data):
    """All steps in NumPy, with the masked rows cut off."""
    optimizer, losses = make_optimizer(), []
    for x, y, mask in zip(data["x"], data["y"], data["mask"], strict=True):
        grads, value = gradient(params, x[mask > 0], y[mask > 0])
        params = {k: v + optimizer(k, grads[k]) for k, v in params.items()}
        losses.append(value)
    return params, np.mean(losses)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_a_loop_of_steps(name):
    optimizer, make_optimizer = OPTIMIZERS[name]
    data = batches()
    params, mean_loss = local_update(loss, optimizer)(start_params(), data)
    expected, expected_loss = loop(make_optimizer, start_params(), data)
    npt.assert_allclose(params["w"], expected["w"], rtol=1e-5, atol=1e-6)
    npt.assert_allclose(params["b"], expected["b"], rtol=1e-5, atol=1e-6)
    npt.assert_allclose(mean_loss, expected_loss, rtol=1e-5)


def test_masked_rows_change_nothing():
    data = batches()
    altered = data | {"x": np.where(data["mask"][..., None] > 0, data["x"], 1e3)}
    update = local_update(loss, optax.adam(LEARNING_RATE))
    for left, right in zip(
        jax.tree.leaves(update(start_params(), data)),
        jax.tree.leaves(update(start_params(), altered)),
        strict=True,
    ):
        npt.assert_array_equal(left, right)


def test_the_optimizer_starts_anew_at_each_call():
    update = local_update(loss, optax.adam(LEARNING_RATE))
    data = batches()
    params, _ = update(start_params(), data)
    params, _ = update(params, data)
    expected, _ = loop(Adam, start_params(), data)
    expected, _ = loop(Adam, expected, data)
    npt.assert_allclose(params["w"], expected["w"], rtol=1e-5, atol=1e-6)


def test_a_gradient_transformation_extends_the_step():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    step = optimizer_step(loss, optimizer)
    params = start_params()
    batch = jax.tree.map(lambda x: x[0], batches())
    (moved, _), value = step((params, optimizer.init(params)), batch)
    grads, expected_value = gradient(params, batch["x"], batch["y"])
    norm = np.sqrt(np.sum(grads["w"] ** 2) + grads["b"] ** 2)
    assert norm > 0.1
    npt.assert_allclose(
        moved["w"], params["w"] - 0.1 / norm * grads["w"], rtol=1e-5, atol=1e-6
    )
    npt.assert_allclose(value, expected_value, rtol=1e-5)


def centred_loss(params, stats, batch):
    """Depends on the running mean of x, and moves it."""
    mean = 0.8 * stats["mean"] + 0.2 * jnp.mean(batch["x"], axis=0)
    moved = batch | {"x": batch["x"] - stats["mean"]}
    return loss(params, moved), {"mean": mean, "count": stats["count"] + 1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batch_statistics_pass_from_step_to_step(name):
    """A batch is centred by the statistics before it; no gradient goes into them."""
    optimizer, make_optimizer = OPTIMIZERS[name]
    data, by_hand, losses = batches(), make_optimizer(), []
    params, mean = start_params(), np.array([0.1, -0.2, 0.3])
    stats = {"mean": np.float32(mean), "count": np.int32(2)}
    model = {"params": start_params(), "batch_stats": stats}
    result = local_steps(centred_loss, optimizer)(model, data)
    for x, y, mask in zip(data["x"], data["y"], data["mask"], strict=True):
        grads, value = gradient(params, x[mask > 0] - mean, y[mask > 0])
        params = {k: v + by_hand(k, grads[k]) for k, v in params.items()}
        mean = 0.8 * mean + 0.2 * x.mean(axis=0)
        losses.append(value)
    for name, expected in params.items():
        npt.assert_allclose(result.model["params"][name], expected, 1e-5, 1e-6)
    npt.assert_allclose(result.model["batch_stats"]["mean"], mean, rtol=1e-5, atol=1e-6)
    assert result.model["batch_stats"]["count"] == 2 + NUM_STEPS
    npt.assert_allclose(result.loss, np.mean(losses), rtol=1e-5)


def test_the_last_state_of_the_optimizer_is_returned():
    optimizer = optax.chain(optax.identity(), optax.trace(decay=0.0), optax.scale(-0.1))
    model = {"params": start_params(), "batch_stats": {}}
    data = batches()
    before, after = (
        local_steps(lambda p, s, b: (loss(p, b), s), optimizer)(
            model, jax.tree.map(lambda x, n=n: x[:n], data)
        )
        for n in (NUM_STEPS - 1, NUM_STEPS)
    )
    params, mask = before.model["params"], data["mask"][-1] > 0
    last, _ = gradient(params, data["x"][-1][mask], data["y"][-1][mask])
    npt.assert_allclose(after.opt_state[1].trace["w"], last["w"], rtol=1e-4, atol=1e-5)


def test_the_local_update_is_a_model_without_statistics():
    data, optimizer = batches(), optax.adam(LEARNING_RATE)
    params, mean_loss = local_update(loss, optimizer)(start_params(), data)
    steps = local_steps(lambda p, s, b: (loss(p, b), s), optimizer)
    result = steps({"params": start_params(), "batch_stats": {}}, data)
    for name, expected in result.model["params"].items():
        npt.assert_array_equal(params[name], expected)
    assert result.model["batch_stats"] == {}
    assert mean_loss == result.loss


def test_recomputed_steps_are_the_same_steps():
    data, model = batches(), {"params": start_params(), "batch_stats": {}}
    results = []
    for checkpoint in (False, True):
        steps = local_steps(
            lambda p, s, b: (loss(p, b), s),
            optax.adam(LEARNING_RATE),
            checkpoint=checkpoint,
        )

        def adapted_loss(params, steps=steps):
            result = steps(model | {"params": params}, data)
            return loss(result.model["params"], jax.tree.map(lambda x: x[0], data))

        results.append((steps(model, data), jax.grad(adapted_loss)(model["params"])))
    for left, right in zip(*map(jax.tree.leaves, results), strict=True):
        npt.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_an_adjustment_acts_ahead_of_the_optimizer():
    data, model = batches(), {"params": start_params(), "batch_stats": {}}
    result = local_steps(
        lambda p, s, b: (loss(p, b), s),
        optax.adam(LEARNING_RATE),
        adjust=optax.add_decayed_weights(0.5),
    )(model, data)
    optimizer, params = Adam(), start_params()
    for x, y, mask in zip(data["x"], data["y"], data["mask"], strict=True):
        grads, _ = gradient(params, x[mask > 0], y[mask > 0])
        grads = {k: g + 0.5 * params[k] for k, g in grads.items()}
        params = {k: v + optimizer(k, grads[k]) for k, v in params.items()}
    for name, expected in params.items():
        npt.assert_allclose(result.model["params"][name], expected, 1e-5, 1e-6)


def test_gradients_are_taken_in_what_is_viewed():
    """Parameters v seen as 3 v - 1 move by the gradient there, not by its triple."""
    data, params = batches(), start_params()
    result = local_steps(
        lambda p, s, b: (loss(p, b), s),
        optax.sgd(LEARNING_RATE),
        view=lambda params: jax.tree.map(lambda v: 3 * v - 1, params),
    )({"params": params, "batch_stats": {}}, data)
    losses = []
    for x, y, mask in zip(data["x"], data["y"], data["mask"], strict=True):
        seen = {k: 3 * v - 1 for k, v in params.items()}
        grads, value = gradient(seen, x[mask > 0], y[mask > 0])
        params = {k: v - LEARNING_RATE * grads[k] for k, v in params.items()}
        losses.append(value)
    for name, expected in params.items():
        npt.assert_allclose(result.model["params"][name], expected, 1e-4, 1e-5)
    npt.assert_allclose(result.loss, np.mean(losses), rtol=1e-5)
