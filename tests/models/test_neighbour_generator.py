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
    one, two = (nets.generate(net, params, z, jax.random.key(seed)) for seed in (1, 2))
    npt.assert_array_equal(one[0], two[0])
    assert np.array_equal(one[1], two[1]) == (noise == 0)
