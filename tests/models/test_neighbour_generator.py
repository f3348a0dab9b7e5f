"""The generator of neighbours that FedSage+ trains."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.models import neighbour_generator as nets


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_features_are_made_of_noise_and_numbers_of_neighbours_are_not(noise):
    net = nets.GeneratorConfig(2, 4, 3, (4, 5), noise).build(num_features=6)
    params, z = nets.init(net, jax.random.key(0)), jnp.ones((4, 3))
    params["degree"]["bias"] += 3.0  # nodes that miss none are given no features
    one, two = (nets.generate(net, params, z, jax.random.key(seed)) for seed in (1, 2))
    npt.assert_array_equal(one[0], two[0])
    assert np.array_equal(one[1], two[1]) == (noise == 0)


def test_places_that_are_empty_are_given_no_features():
    """The others have the last layer's of dense algebra."""
    net = nets.GeneratorConfig(2, 4, 3, (4, 5), 0.0).build(num_features=6)
    params = nets.init(net, jax.random.key(0))
    z = jax.random.normal(jax.random.key(1), (20, 3))
    weights = [params[name] for name in ("first", "second", "features")]
    params["degree"]["bias"] += 1.5
    counts, features = nets.generate(net, params, z, jax.random.key(0))
    expected = np.asarray(z)
    for i, layer in enumerate(weights):
        expected = expected @ layer["kernel"] + layer["bias"]
        expected = np.tanh(expected) if i == 2 else np.maximum(expected, 0)
    is_filled = np.arange(2) < np.floor(counts)[:, None]
    assert 0 < is_filled[:, 1].sum() < is_filled[:, 0].sum() < 20
    expected = is_filled[:, :, None] * expected.reshape(20, 2, 6)
    npt.assert_allclose(features, expected, rtol=1e-5, atol=1e-6)
