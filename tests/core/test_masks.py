"""Tests of means over what a mask marks, and of its lowest entries."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.core.masks import lowest, masked_mean


def test_a_masked_mean_is_over_what_the_mask_marks():
    values, mask = jnp.array([3.0, 5.0, 100.0]), jnp.array([1.0, 1.0, 0.0])
    assert masked_mean(values, mask) == 4
    assert masked_mean(values, 0 * mask) == 0
    for other in (jnp.nan, jnp.inf):
        hidden = jnp.where(mask > 0, values, other)
        assert masked_mean(hidden, mask) == 4


def test_what_is_not_meant_may_be_no_number():
    values = jnp.array([1.0, jnp.nan, 4.0, jnp.inf])
    assert masked_mean(values, jnp.isfinite(values)) == 2.5
    assert masked_mean(values, jnp.zeros(4, bool)) == 0


@pytest.mark.parametrize("number", range(5))
def test_the_lowest_are_those_that_come_first_when_sorted(number):
    values = np.array([4.0, -1.0, 0.5, -3.0, 2.0])
    is_real = np.array([True, True, True, False, True])
    marked = lowest(jnp.array(values), jnp.array(is_real), jnp.int32(number))
    expected = sorted(values[is_real])[:number]
    assert sorted(values[np.asarray(marked)]) == expected


def test_more_than_there_are_is_all_that_are_real():
    is_real = jnp.array([True, False, True])
    assert lowest(jnp.array([2.0, 0.0, 1.0]), is_real, jnp.int32(9)).tolist() == [
        True,
        False,
        True,
    ]


def test_a_real_one_comes_before_what_is_not_however_large_it_is():
    values, is_real = jnp.full(3, jnp.inf), jnp.array([False, True, True])
    assert lowest(values, is_real, jnp.int32(1)).tolist() == [False, True, False]
    assert lowest(values, is_real, jnp.int32(2)).tolist() == [False, True, True]
