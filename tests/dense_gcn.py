"""`gcn` on ONE client's subgraph, its losses and their gradients, in NumPy doubles."""

import jax
import numpy as np
import numpy.testing as npt


def layers(own, params):
    """(hidden units, which are the embeddings, logits) of a subgraph of `alone`."""
    adjacency = np.eye(len(own.labels))
    adjacency[own.receivers, own.senders] = 1
    scale = adjacency.sum(axis=1) ** -0.5
    spread = scale[:, None] * adjacency * scale
    hidden, head = params["hidden"], params["head"]
    x = spread @ np.asarray(own.features, float) @ hidden["kernel"] + hidden["bias"]
    x = np.maximum(x, 0)
    return x, spread @ x @ head["kernel"] + head["bias"]


def cross_entropy(own, params):
    """Mean over the training nodes."""
    logits = layers(own, params)[1]
    logits = logits - logits.max(axis=1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = np.flatnonzero(own.is_trained)
    return -np.mean(logs[chosen, own.labels[chosen]])


def row(tree, index):
    """Doubles of one client."""
    return jax.tree.map(lambda x: np.asarray(x[index], float), tree)


def assert_gradient(loss, params, gradient, rtol=2e-3, step=1e-5):
    """Compares with differences of a loss of doubles, along random directions."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
        ends = (
            loss(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction))
            for s in (step, -step)
        )
        slope = np.subtract(*ends) / (2 * step)
        products = jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction)
        npt.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol, 1e-4)
