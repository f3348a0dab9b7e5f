"""What clients of FedGTA measure and how they mix, against dense algebra."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt

from fedjax_graph.algorithms import fed_gta, get_method, make_config
from tests import client_graphs
from tests.algorithms.oracle import draw_cohort
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone


def softmax(x):
    odds = np.exp(x)
    return odds / odds.sum(axis=1, keepdims=True)


def measured(config, own, logits):
    """Eqs. 1 to 3: (confidence, moments)."""
    adjacency = np.zeros((len(logits), len(logits)))
    adjacency[own.receivers, own.senders] = 1
    degrees = adjacency.sum(axis=1)
    scale = np.where(degrees > 0, np.maximum(degrees, 1) ** -0.5, 0)
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


def test_a_cohort_mixes_by_its_own_confidences(quick_jit):
    """Eqs. 4 and 5 of three clients; 0 has weight 0, and one more is not sampled."""
    task = {
        "kind": "subgraphs",
        "num_features": NUM_FEATURES,
        "num_classes": NUM_CLASSES,
        "hidden_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 3.0},
    }
    settings = {"task": task, "participation": 0.8, "similarity": 0.3}
    config = make_config("fed_gta", settings)
    method, built = get_method("fed_gta").factory(config), config.task.build()
    data = client_graphs.make_splits()["train"]
    data = data._replace(client_weights=data.client_weights.at[0].set(0))
    start, key = method.init(jax.random.key(0), data), jax.random.key(0)
    state, _ = quick_jit(method.round)(start, data, key)
    cohort_key = jax.random.split(jax.random.split(key)[0])[0]
    cohort = [1 + i for i in draw_cohort(cohort_key, data.client_ids[1:], 3)]
    trained = {"params": state.models["local"]["params"], "batch_stats": {}}
    logits = np.asarray(built.logits(trained, data), float)
    found = (alone(data, i) for i in cohort)
    found = [
        measured(config, own, logits[i, : len(own.labels)])
        for i, own in zip(cohort, found, strict=True)
    ]
    confidences, moments = map(np.stack, zip(*found, strict=True))
    units = moments / np.linalg.norm(moments, axis=1, keepdims=True)
    shares = (units @ units.T > config.similarity) * confidences
    shares /= shares.sum(axis=1, keepdims=True)
    for u, v, first in zip(
        *(
            map(np.asarray, jax.tree.leaves(models["params"]))
            for models in (state.models, trained, start.models)
        ),
        strict=True,
    ):
        mixed = np.tensordot(shares, v[cohort], 1)
        npt.assert_allclose(u[cohort], mixed, rtol=1e-4, atol=1e-5)
        others = np.setdiff1d(np.arange(NUM_CLIENTS), cohort)
        npt.assert_array_equal(u[others], first[others])
    scored = np.asarray(method.predict(state, data))
    npt.assert_allclose(scored, jax.nn.softmax(logits), rtol=1e-4, atol=1e-5)
    of_mixed = built.predict({**trained, "params": state.models["params"]}, data)
    assert np.abs(scored - of_mixed)[cohort].max() > 0.01
