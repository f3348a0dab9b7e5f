"""Pulls against the gradients of their distances."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.core.proximal import pull


def draw(seed):
    rng = np.random.default_rng(seed)
    shapes = {"base": {"kernel": (3, 2), "bias": (2,)}, "head": {"scale": ()}}
    return jax.tree.map(
        lambda shape: np.float32(rng.normal(size=shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


PARAMS, CENTRE, GRADIENTS = draw(0), draw(1), draw(2)
MODEL = {"params": CENTRE, "batch_stats": {"mean": np.full(7, np.nan)}}


def is_head(path):
    return any(k.key == "head" for k in path)


def pulled(params, centre=MODEL, weight=0.3, gradients=GRADIENTS, **settings):
    transformation = pull(weight, centre, **settings)
    new, _ = transformation.update(gradients, transformation.init(params), params)
    return new


def flatten(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(float)


def mean_difference(function, v, step=1e-5):
    """The gradient of a function of a vector in double precision."""
    directions = step * np.eye(len(v))
    return np.array([function(v + d) - function(v - d) for d in directions]) / 2 / step


DISTANCES = {
    "squared_l2": lambda v, c: np.sum((v - c) ** 2) / 2,
    "l2": lambda v, c: np.sqrt(np.sum((v - c) ** 2)),
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("weight", [0.0, 0.3, jnp.float32(2.0)])
def test_a_pull_adds_the_gradient_of_its_distance(distance, weight):
    """Over all leaves together; the centre's statistics are not looked at."""
    centre, of = flatten(CENTRE), DISTANCES[distance]
    slope = mean_difference(lambda v: of(v, centre), flatten(PARAMS))
    new = pulled(PARAMS, weight=weight, distance=distance)
    assert jax.tree.structure(new) == jax.tree.structure(PARAMS)
    expected = flatten(GRADIENTS) + float(weight) * slope
    npt.assert_allclose(flatten(new), expected, atol=1e-5)


def test_the_pull_of_a_euclidean_distance_has_the_length_of_its_weight():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    for scale in (1e-4, 1.0, 1e4):
        params = jax.tree.map(lambda c, g, s=scale: c + s * g, CENTRE, GRADIENTS)
        length = np.linalg.norm(flatten(pulled(params, gradients=zeros, distance="l2")))
        npt.assert_allclose(length, 0.3, rtol=1e-5)


@pytest.mark.parametrize("distance", DISTANCES)
def test_at_the_centre_nothing_is_added(distance):
    npt.assert_array_equal(
        flatten(pulled(CENTRE, distance=distance)), flatten(GRADIENTS)
    )


@pytest.mark.parametrize("distance", DISTANCES)
def test_one_can_differentiate_through_a_pull_at_its_centre(distance):
    def total(params):
        leaves = jax.tree.leaves(pulled(params, distance=distance))
        return sum(jnp.sum(x) for x in leaves)

    slope = flatten(jax.grad(total)(CENTRE))
    npt.assert_allclose(slope, 0.3 if distance == "squared_l2" else 0, atol=1e-6)


@pytest.mark.parametrize("distance", DISTANCES)
def test_personal_leaves_neither_pull_nor_are_pulled(distance):
    far = CENTRE | {"head": {"scale": np.float32(1e3)}}
    new, new_far = (
        pulled(PARAMS, {"params": c}, distance=distance, is_personal=is_head)
        for c in (CENTRE, far)
    )
    npt.assert_array_equal(new["head"]["scale"], GRADIENTS["head"]["scale"])
    npt.assert_array_equal(flatten(new), flatten(new_far))
    alone = pulled(
        PARAMS["base"],
        {"params": CENTRE["base"]},
        gradients=GRADIENTS["base"],
        distance=distance,
    )
    npt.assert_allclose(flatten(new["base"]), flatten(alone), rtol=1e-6)


def test_pulls_add_up_and_come_ahead_of_an_optimizer():
    other = {"params": draw(3)}
    optimizer = optax.chain(
        pull(0.3, MODEL, "l2"), pull(0.5, other), optax.sgd(0.1, momentum=0.9)
    )
    updates, _ = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    v, w, u = flatten(PARAMS), flatten(CENTRE), flatten(other["params"])
    pulls = 0.3 * (v - w) / np.linalg.norm(v - w) + 0.5 * (v - u)
    expected = -0.1 * (flatten(GRADIENTS) + pulls)
    npt.assert_allclose(flatten(updates), expected, atol=1e-6)


@pytest.mark.parametrize("distance", DISTANCES)
def test_clients_at_and_off_their_centres_map(distance):
    """The branch for distance 0 is taken client by client."""
    stacked = jax.tree.map(lambda *x: jnp.stack(x), CENTRE, PARAMS)
    mapped = jax.vmap(lambda v: pulled(v, distance=distance))(stacked)
    for i, params in enumerate([CENTRE, PARAMS]):
        own = jax.tree.map(lambda x, i=i: x[i], mapped)
        alone = pulled(params, distance=distance)
        npt.assert_allclose(flatten(own), flatten(alone), rtol=1e-6, atol=1e-6)
