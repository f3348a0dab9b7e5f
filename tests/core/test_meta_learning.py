"""Meta-gradients against golden numbers, closed forms and finite differences."""

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpy.testing as npt
import optax
import pytest
from jax.test_util import check_grads

from fedjax_graph.core.meta_learning import inner_update, meta_gradient
from fedjax_graph.models.gcn import GCN

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def adaptation(loss, num_steps, rate, **settings):
    """theta -> theta_i of a loss that draws nothing."""
    update = inner_update(
        lambda params, key: loss(params), num_steps, optax.sgd(rate), **settings
    )
    return lambda params: update({"params": params, "batch_stats": {}}, KEY).model[
        "params"
    ]


class GoldenProblem:
    """The two-layer GCN of the golden numbers, dense algebra left to the library."""

    def __init__(self, reference):
        senders, receivers = reference["senders"], reference["receivers"]
        features = reference["x"].astype(np.float64)
        size = len(features)
        entries = np.eye(size)
        entries[receivers, senders] = 1
        scale = entries.sum(axis=1) ** -0.5
        entries = scale[:, None] * entries * scale
        receivers, senders = np.nonzero(entries)
        self.graph = jraph.GraphsTuple(
            nodes=jnp.asarray(entries @ features),
            edges=jnp.asarray(entries[receivers, senders]),
            senders=jnp.asarray(senders),
            receivers=jnp.asarray(receivers),
            globals=None,
            n_node=jnp.array([size]),
            n_edge=jnp.array([len(senders)]),
        )
        own = {
            k.removeprefix("MetaGradient/"): v
            for k, v in reference.items()
            if k.startswith("MetaGradient/")
        }
        self.own = own
        self.model = GCN(own["theta/bias_1"].size, own["theta/bias_0"].size, 0.0)
        self.start = self.tree("theta")

    def tree(self, prefix):
        def layer(i):
            parts = ("kernel", "bias")
            return {k: jnp.asarray(self.own[f"{prefix}/{k}_{i}"]) for k in parts}

        return {"hidden": layer(0), "head": layer(1)}

    def loss(self, nodes):
        labels = self.own["labels"][nodes]

        def mean(params):
            logits = self.model.apply({"params": params}, self.graph)[nodes]
            return jnp.mean(
                optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            )

        return mean

    def adapt(self, **settings):
        own = self.own
        steps, rate = int(own["inner_steps"]), float(own["inner_rate"])
        return adaptation(self.loss(own["support"]), steps, rate, **settings)


@pytest.fixture
def golden(reference):
    return GoldenProblem(reference)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_golden_meta_gradients(golden, order, checkpoint):
    adapt = golden.adapt(checkpoint=checkpoint)
    query_loss = golden.loss(golden.own["query"])
    gradient_of = jax.jit(meta_gradient(adapt, query_loss, first_order=order == 1))
    loss, gradient = gradient_of(golden.start)
    npt.assert_allclose(loss, golden.own["query_loss"], rtol=1e-10)
    jax.tree.map(
        lambda ours, theirs: npt.assert_allclose(ours, theirs, atol=1e-10),
        gradient,
        golden.tree(f"order_{order}"),
    )


def test_meta_gradient_against_finite_differences(golden):
    objective = golden.loss(golden.own["query"])
    adapt = golden.adapt()
    check_grads(lambda p: objective(adapt(p)), (golden.start,), order=1, modes=["rev"])


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_quadratics_in_closed_form(num_steps):
    """L_S = a/2 theta^2 and L_Q = b/2 theta^2, so theta_i = (1 - alpha a)^T theta."""
    a, b, rate, theta = 2.0, 3.0, 0.1, 1.5
    shrink = (1 - rate * a) ** num_steps
    gradients = {}
    adapt = adaptation(lambda p: a / 2 * p**2, num_steps, rate)
    for order in (1, 2):
        gradient_of = meta_gradient(adapt, lambda p: b / 2 * p**2, order == 1)
        loss, gradients[order] = gradient_of(jnp.float64(theta))
        npt.assert_allclose(loss, b / 2 * (shrink * theta) ** 2)
    npt.assert_allclose(gradients[1], b * shrink * theta)
    npt.assert_allclose(gradients[2], b * shrink**2 * theta)


def test_one_step_is_the_hessian_vector_formula():
    """Eq. 12 with the Hessian written out, for logistic losses in three parameters."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 8, 3)), rng.integers(0, 2, (2, 8))
    theta, rate = rng.normal(size=3), 0.7

    def loss(half):
        def mean(params):
            logits = jnp.asarray(x[half]) @ params
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, y[half]))

        return mean

    def by_hand(half, params):
        """Gradient and Hessian of the logistic loss."""
        chance = 1 / (1 + np.exp(-x[half] @ params))
        gradient = x[half].T @ (chance - y[half]) / len(chance)
        curvature = (chance * (1 - chance))[:, None] * x[half]
        return gradient, x[half].T @ curvature / len(chance)

    on_support, hessian = by_hand(0, theta)
    on_query, _ = by_hand(1, theta - rate * on_support)
    _, gradient = meta_gradient(adaptation(loss(0), 1, rate), loss(1))(theta)
    npt.assert_allclose(gradient, (np.eye(3) - rate * hessian) @ on_query, rtol=1e-12)


def test_inner_steps_draw_from_keys_of_their_own():
    """Noise in each step's loss: theta_i is theta minus alpha times its sum."""
    update = inner_update(lambda p, key: p * jax.random.normal(key), 5, optax.sgd(0.1))
    adapted = update({"params": jnp.float64(2), "batch_stats": {}}, KEY).model
    noise = [jax.random.normal(key) for key in jax.random.split(KEY, 5)]
    assert len({float(x) for x in noise}) == 5
    npt.assert_allclose(adapted["params"], 2 - 0.1 * np.sum(noise))
