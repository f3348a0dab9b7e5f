"""Optimizers of both halves, against each model's own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.cnfgnn.joint_training import (
    joint_training,
    of_each_client,
    side_by_side,
)
from fedjax_graph.core import optimizers
from fedjax_graph.core.optimizers import OptimizerConfig
from tests import tables


def stacked_trees(num):
    """Parameters of 3 clients and `num` gradients, which differ in size."""
    rng = np.random.default_rng(0)
    scale = np.array([0.1, 1, 10])

    def draw(*shape):
        drawn = scale.reshape(-1, *[1] * (len(shape) - 1)) * rng.normal(size=shape)
        return drawn.astype(np.float32)

    params, *gradients = (
        {"kernel": draw(3, 4, 2), "bias": draw(3, 2)} for _ in range(1 + num)
    )
    return params, gradients


def run(optimizer, params, gradients):
    state = optimizer.init(params)
    for one in gradients:
        updates, state = optimizer.update(one, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_clients_step_is_that_of_its_model_alone(name, clip_norm):
    config = OptimizerConfig(name, 0.1, weight_decay=0.1, clip_norm=clip_norm)
    params, gradients = stacked_trees(3)
    together = run(of_each_client(config), params, gradients)
    for client in range(3):
        own, *own_gradients = (
            jax.tree.map(lambda x, i=client: x[i], tree)
            for tree in (params, *gradients)
        )
        alone = run(config.build(), own, own_gradients)
        jax.tree.map(
            lambda a, b, i=client: npt.assert_allclose(a[i], b, rtol=1e-5),
            together,
            alone,
        )


def test_an_optimizer_that_looks_at_norms_looks_at_each_clients():
    params, gradients = stacked_trees(3)
    with tables.kept():
        rule = optimizers.Rule(lambda config, rate: optax.lamb(rate))
        optimizers.register_optimizer("lamb", rule)
        together = run(of_each_client(OptimizerConfig("lamb", 0.1)), params, gradients)
    for client in range(3):
        own, *own_gradients = (
            jax.tree.map(lambda x, i=client: x[i], tree)
            for tree in (params, *gradients)
        )
        alone = run(optax.lamb(0.1), own, own_gradients)
        jax.tree.map(
            lambda a, b, i=client: npt.assert_allclose(a[i], b, rtol=1e-5),
            together,
            alone,
        )


def test_each_step_of_the_server_has_noise_of_its_own(train, quick_jit):
    """Two passes of 26 windows in threes; the gradient of a step is its first draw."""

    def draw(params, data, batch):
        key = jax.random.wrap_key_data(batch.noise_key)
        return jnp.zeros(()), jax.random.uniform(key)

    kept = optax.GradientTransformation(  # each gradient in a place of its own
        lambda params: jnp.int32(0),
        lambda grad, step, _: (jnp.zeros(18).at[step].set(grad), step + 1),
    )
    settings = {"batch_size": 3, "num_epochs": 2, "sampling_decay": 5.0}
    run = quick_jit(joint_training(draw, kept, **settings, masked_loss=False))
    args = jnp.zeros(18), jnp.int32(0), train
    rounds = [run(*args, jax.random.key(seed), jnp.int32(0)) for seed in (1, 2)]
    assert [found[3] for found in rounds] == [18, 18]
    draws = np.concatenate([found[0] for found in rounds])
    assert len(np.unique(draws)) == 36
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.5


def test_trees_side_by_side_have_an_optimizer_each():
    optimizers = optax.adam(0.1), optax.sgd(0.5, momentum=0.9)
    params, gradients = stacked_trees(3)
    both = run(
        side_by_side(*optimizers),
        (params["kernel"], params["bias"]),
        [(one["kernel"], one["bias"]) for one in gradients],
    )
    for ours, name, optimizer in zip(both, params, optimizers, strict=True):
        alone = run(optimizer, params[name], [one[name] for one in gradients])
        npt.assert_array_equal(ours, alone)
        assert jnp.abs(ours - params[name]).max() > 0.01
