"""Dropout by bytes: its shares, and the mean that it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt

from fedjax_graph.models.dropout import drop


def test_dropout_keeps_what_it_says_and_the_mean():
    drawn = drop(jnp.ones((300, 101)), jax.random.key(0), 0.25)
    values, counts = np.unique(drawn, return_counts=True)
    npt.assert_allclose(values, [0, 4 / 3], rtol=1e-6)
    npt.assert_allclose(counts / drawn.size, [0.25, 0.75], atol=0.013)
    again = drop(jnp.ones((300, 101)), jax.random.key(0), 0.25)
    npt.assert_array_equal(drawn, again)
