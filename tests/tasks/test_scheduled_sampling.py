"""Scheduled sampling, minibatches and what counts in a loss, against NumPy."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import batching
from fedjax_graph.tasks.scheduled_sampling import (
    epoch_batches,
    sampling_probability,
    target_weights,
)


@pytest.mark.parametrize("decay", [1.0, 60.0, 1000.0])
@pytest.mark.parametrize("step", [0, 1, 100, 5000])
def test_the_truth_is_fed_with_the_stated_probability(step, decay):
    with np.errstate(over="ignore"):
        expected = decay / (decay + np.exp(step / decay))
    probability = sampling_probability(jnp.int32(step), decay)
    npt.assert_allclose(probability, expected, rtol=1e-4, atol=1e-30)


def test_the_probability_runs_from_nearly_one_to_zero():
    steps = jnp.array([0, 6907, 10**5, 10**9], jnp.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = np.asarray(sampling_probability(steps, 1000.0))
    npt.assert_allclose(values[0], 1000 / 1001)
    npt.assert_allclose(values[1], 0.5, atol=1e-3)
    npt.assert_array_equal(values[2:], [0, 0])
    npt.assert_allclose(sampling_probability(jnp.int32(0), 1.0), 0.5)
    npt.assert_array_equal(sampling_probability(steps[1:], 1.0), [0] * 3)


make_batches = functools.partial(
    epoch_batches, num_windows=26, batch_size=8, num_epochs=3
)


@pytest.fixture(scope="module")
def batch():
    return make_batches(
        jax.random.key(0), first_step=jnp.int32(0), sampling_decay=1000.0
    )


def test_each_pass_sees_every_window_once(batch):
    assert batch.indices.shape == batch.mask.shape == (12, 8)
    assert batch.feed_truth.shape == (12, 12)
    indices, mask = (np.reshape(x, (3, 32)) for x in (batch.indices, batch.mask))
    for one_pass, counted in zip(indices, mask, strict=True):
        assert sorted(one_pass[counted > 0]) == list(range(26))
    npt.assert_array_equal(mask.sum(1), [26] * 3)
    assert indices.min() >= 0 and indices.max() < 26


def test_each_pass_has_an_order_of_its_own(batch):
    first, second, third = np.reshape(batch.indices, (3, 32))[:, :26]
    assert not np.array_equal(first, second) and not np.array_equal(second, third)
    assert not np.array_equal(first, np.arange(26))
    other = make_batches(
        jax.random.key(1), first_step=jnp.int32(0), sampling_decay=1000.0
    )
    assert not np.array_equal(other.indices, batch.indices)
    assert batching.steps_per_epoch(26, 8) == 4
    assert batching.steps_per_epoch(24, 8) == 3


def test_feed_draws_have_the_stated_probability_at_each_step():
    keys, decay, first_step = jax.random.split(jax.random.key(2), 1000), 10.0, 15
    draws = jax.vmap(
        lambda key: (
            make_batches(key, first_step=first_step, sampling_decay=decay).feed_truth
        )
    )(keys)
    shares = np.mean(draws, axis=0)  # [12 batches, 12 decoding steps]
    steps = first_step + np.arange(12)
    expected = decay / (decay + np.exp(steps / decay))
    assert expected[0] > 0.65 and expected[-1] < 0.45
    npt.assert_allclose(shares, np.tile(expected[:, None], 12), atol=0.065)
    npt.assert_allclose(shares.mean(1), expected, atol=0.018)  # 4 deviations
    flat = np.reshape(draws, (1000, -1)) - shares.ravel()
    correlation = flat.T @ flat / 1000
    off_diagonal = correlation[~np.eye(len(correlation), dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.05  # one draw for each step and batch


@pytest.mark.parametrize("skip_missing", [False, True])
def test_target_weights_make_a_sum_the_mean_over_what_counts(skip_missing):
    rng = np.random.default_rng(0)
    truth = rng.uniform(1, 60, (12, 5)).astype(np.float32)
    truth[rng.random(truth.shape) < 0.2] = 0
    error = rng.normal(size=truth.shape)
    mask = np.array([1, 0, 1, 1, 0], np.float32)
    weights = target_weights(truth, mask, skip_missing)
    counted = np.broadcast_to(mask > 0, truth.shape)
    if skip_missing:
        counted = counted & (truth != 0)
    npt.assert_allclose(np.sum(weights * error), np.mean(error[counted]), rtol=1e-5)
    assert np.all(target_weights(truth, 0 * mask, skip_missing) == 0)
