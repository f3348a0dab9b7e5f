"""What a client of FedGTA measures, against dense algebra."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt

from fedjax_graph.algorithms import fed_gta
from tests import client_graphs
from tests.client_graphs import NUM_CLASSES


def softmax(x):
    odds = np.exp(x)
    return odds / odds.sum(axis=1, keepdims=True)


def measured(config, own, logits):
    """Eqs. 1 to 3: (confidence, moments)."""
    adjacency = np.zeros((len(logits), len(logits)))
    adjacency[own.receivers, own.senders] = 1
    degrees = adjacency.sum(axis=1)
    scale = degrees**-0.5
    spread = scale[:, None] * adjacency * scale
    is_trained = own.is_trained[:, None] > 0
    first = labels = softmax(logits) * is_trained
    for _ in range(config.propagation_steps):
        labels = config.kappa * spread @ labels + (1 - config.kappa) * first
        labels = np.clip(labels, 0, 1)
    known = np.eye(NUM_CLASSES)[own.labels]
    q, plain = (
        np.where(is_trained, known, softmax(labels / t))
        for t in (config.temperature, 1)
    )
    entropies = np.sum(np.exp(-1) + q * np.log(q + 1e-8), axis=1)
    moments = [
        np.mean(values**order, axis=0)
        for values in (plain, plain - plain.mean(axis=0))
        for order in range(1, config.num_moments + 1)
    ]
    return np.sum(2 * degrees * entropies), np.concatenate(moments)


def test_clients_measure_what_the_equations_say():
    """On a star most of whose leaves are trained on: S Y exceeds 1 in its centre."""
    own = jax.tree.map(lambda x: x[0], client_graphs.make_splits()["train"])
    leaves, centre = np.arange(1, 8), np.zeros(7, int)
    own = own._replace(
        senders=np.append(leaves, centre),
        receivers=np.append(centre, leaves),
        edge_weights=jnp.ones(14),
        is_trained=np.array([0.0, 1, 1, 1, 1, 1, 1, 0]),
    )
    logits = np.zeros((8, NUM_CLASSES))
    logits[:, 1] = 5
    config = types.SimpleNamespace(
        propagation_steps=2, kappa=0.8, temperature=2.0, num_moments=3
    )
    found = fed_gta.measure(config, own, jnp.asarray(logits))
    for value, expected in zip(found, measured(config, own, logits), strict=True):
        npt.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
