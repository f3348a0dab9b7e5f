"""GraphFL's rounds against loops over clients, with the Hessians written out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_graph.algorithms.graphfl import GraphFLConfig, graphfl
from fedjax_graph.core.algorithm import NO_LOSS
from fedjax_graph.core.communication import Bytes, bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.images import ImageTask
from fedjax_graph.tasks.nodes import NodeTask
from fedjax_graph.tasks.subgraphs import SubgraphTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask
from tests import nodes
from tests.algorithms import quadratic
from tests.algorithms.oracle import draw_cohort
from tests.algorithms.quadratic import (
    KEYS,
    MEAN,
    NUM_CLIENTS,
    PARAMS,
    QuadraticTask,
    Twin,
    assert_rows,
    batches_of,
    run,
    to_rows,
)

TASK = QuadraticTask()


@pytest.fixture(scope="module")
def data():
    return quadratic.make_data()


class MetaTwin(Twin):
    """The equations in NumPy, for losses whose Hessian is X'X / B."""

    def cohort(self, key):
        """{client: key of its updates} of both stages."""
        cohort_key, update_key = jax.random.split(key)
        indices = draw_cohort(cohort_key, self.ids, self.size)
        return {i: jax.random.fold_in(update_key, self.ids[i]) for i in indices}

    def meta_gradient(self, client, v, key, order):
        """Eq. 12 over all inner steps -> (gradient in v, query loss)."""
        jacobian = np.eye(len(v))
        for indices in np.asarray(batches_of(key, self.config)):
            x, y = self.features[client, indices], self.targets[client, indices]
            v = v - self.config.learning_rate * x.T @ (x @ v - y) / len(y)
            hessian = x.T @ x / len(y)
            jacobian = (np.eye(len(v)) - self.config.learning_rate * hessian) @ jacobian
        x, y = self.features[client], self.targets[client, ::-1]
        error = x @ v - y
        gradient = x.T @ error / len(y)
        return jacobian.T @ gradient if order == 2 else gradient, np.mean(error**2) / 2

    def outer_gradients(self, row, key, order=2):
        """Of the cohort -> ([C, 5], mean loss, weights [C])."""
        cohort = self.cohort(key)
        gradients, losses = zip(
            *(
                self.meta_gradient(i, row[PARAMS], jax.random.split(k)[0], order)
                for i, k in cohort.items()
            ),
            strict=True,
        )
        weights = self.weights[list(cohort)]
        return np.stack(gradients), np.average(losses, weights=weights), weights

    def fine_tuned(self, row, key):
        """Eqs. 7 and 8."""
        rows = {
            i: self.steps(i, row, jax.random.fold_in(k, 1))[0]
            for i, k in self.cohort(key).items()
        }
        return self.mean(rows)


def sgd(v, gradient):
    return v - 0.3 * gradient


def first_adam_step(v, gradient):
    """Adam's first step, of a gradient with weight decay."""
    gradient = gradient + 0.05 * v
    return v - 0.3 * gradient / (np.abs(gradient) + 1e-8)


SGD = {"server_optimizer": OptimizerConfig("sgd", 0.3)}
ADAM = {"server_optimizer": OptimizerConfig("adam", 0.3, weight_decay=0.05)}


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize(
    ("settings", "order", "outer"),
    [
        ({}, 2, sgd),
        ({"first_order": True}, 1, sgd),
        (ADAM, 2, first_adam_step),  # as if for the first time in each round
        (ADAM | {"first_order": True}, 1, first_adam_step),
    ],
)
def test_rounds_have_two_stages(data, quick_jit, settings, order, outer, participation):
    """Eqs. 5 to 8."""
    algorithm = graphfl(GraphFLConfig(TASK, participation, **SGD | settings))
    twin = MetaTwin(data, TASK, participation)
    (state, _), *later = run(algorithm, data, quick_jit)
    row = to_rows(state.models)[0]
    for key, (state, metrics) in zip(KEYS, later, strict=True):
        gradients, loss, weights = twin.outer_gradients(row, key, order)
        stepped = row.copy()
        stepped[PARAMS] = outer(row[PARAMS], np.average(gradients, 0, weights))
        row = twin.fine_tuned(stepped, key)
        assert np.abs(row - stepped).max() > 0.05
        assert_rows(state.models, row)
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
    assert state.num_rounds == len(KEYS)


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_new_labels_are_met_by_the_mean_of_the_clients_models(
    data, quick_jit, participation
):
    """Eqs. 9 to 13: each client takes its own meta step, and there is no other."""
    config = GraphFLConfig(TASK, participation, **SGD, fine_tune=False)
    twin = MetaTwin(data, TASK, participation)
    (state, _), *later = run(graphfl(config), data, quick_jit)
    row = to_rows(state.models)[0]
    for key, (state, _) in zip(KEYS, later, strict=True):
        gradients, _, weights = twin.outer_gradients(row, key)
        own = row[PARAMS] - 0.3 * gradients
        row = np.append(np.average(own, axis=0, weights=weights), row[MEAN])
        assert_rows(state.models, row)


def test_without_inner_steps_it_descends_the_query_loss(data, quick_jit):
    still = QuadraticTask(optimizer=OptimizerConfig("sgd", learning_rate=0.0))
    config = GraphFLConfig(still, **SGD)
    (state, _), *later = run(graphfl(config), data, quick_jit)
    v = to_rows(state.models)[0, PARAMS]
    weights = np.asarray(data.client_weights) / np.sum(data.client_weights)
    x, y = np.asarray(data.features, float), np.asarray(data.targets)[:, ::-1]
    for state, _ in later:
        error = x @ v - y
        v = v - 0.3 * np.einsum("k,kbp,kb->p", weights, x, error) / y.shape[1]
        npt.assert_allclose(to_rows(state.models)[0, PARAMS], v, rtol=1e-5, atol=1e-5)


def test_both_stages_have_the_same_clients(data, quick_jit):
    """What the others have is never read."""
    config = GraphFLConfig(TASK, participation=0.6, **SGD)
    algorithm, key = graphfl(config), KEYS[0]
    cohort = MetaTwin(data, TASK, 0.6).cohort(key)
    for changed in range(NUM_CLIENTS):
        other = data._replace(targets=data.targets.at[changed].add(1.0))
        results = [
            to_rows(run(algorithm, split, quick_jit, [key])[-1][0].models)
            for split in (data, other)
        ]
        assert np.array_equal(*results) == (changed not in cohort)


def test_of_those_sampled_who_has_no_query_set_has_no_say(data, quick_jit):
    """In Eq. 6, nor in the loss."""
    twin, key = MetaTwin(data, TASK, 0.6), KEYS[0]
    cohort = list(twin.cohort(key))
    without = cohort[-1]
    assert without >= len(cohort)

    class Queried(QuadraticTask):
        def build(self):
            return (
                super()
                .build()
                ._replace(has_query=lambda data: data.client_ids != twin.ids[without])
            )

    config = GraphFLConfig(Queried(), 0.6, **SGD, fine_tune=False)
    (state, _), (after, metrics) = run(graphfl(config), data, quick_jit, [key])
    row = to_rows(state.models)[0]
    twin.weights[without] = 0
    gradients, loss, weights = twin.outer_gradients(row, key)
    row[PARAMS] = sgd(row[PARAMS], np.average(gradients, 0, weights))
    assert_rows(after.models, row)
    npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)


@pytest.mark.parametrize("fine_tune", [False, True])
def test_weights_do_not_decay_while_nobody_takes_part(data, quick_jit, fine_tune):
    nobody = data._replace(client_weights=0 * data.client_weights)
    algorithm = graphfl(GraphFLConfig(TASK, **ADAM, fine_tune=fine_tune))
    (before, _), (after, _) = run(algorithm, nobody, quick_jit, KEYS[:1])
    jax.tree.map(npt.assert_array_equal, after.models, before.models)


@pytest.mark.parametrize("task", [TrafficRNNTask(), ImageTask()])
def test_a_task_without_query_sets_is_refused(task):
    with pytest.raises(InputError, match=f"{task.kind} has no query sets"):
        graphfl(GraphFLConfig(task))


def test_an_optimizer_without_a_derivative_is_refused_where_it_is_taken():
    task = NodeTask(3, 2, inner_steps=2, optimizer=OptimizerConfig("adam", 0.1))
    with pytest.raises(InputError, match="optimizer=adam: its root has no derivative"):
        graphfl(GraphFLConfig(task))
    graphfl(GraphFLConfig(task, first_order=True))


def test_an_outer_step_that_begins_anew_has_no_schedule():
    outer = OptimizerConfig("sgd", 0.1, schedule="cosine", num_steps=9)
    config = GraphFLConfig(NodeTask(3, 2), server_optimizer=outer)
    with pytest.raises(InputError, match="outer step begins anew each round"):
        graphfl(config)


def test_a_task_of_queries_alone_is_refused():
    with pytest.raises(InputError, match="query_every=1 leaves no training node"):
        SubgraphTask(3, 2, query_every=1)


# --- On nodes ------------------------------------------------------------------------

MODELS = {"gcn": 1, "sgc": 0}  # name: hops left to the model


def dense_loss(params, chosen):
    """Mean cross-entropy of the nodes with a one in `chosen` [N, C]; 0 of none."""
    propagation, features = nodes.dense_graph()
    x, head = propagation @ features, params["head"]
    if "hidden" in params:
        x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = propagation @ x @ head["kernel"] + head.get("bias", 0.0)
    return -jnp.sum(chosen * jax.nn.log_softmax(logits)) / max(1, chosen.sum())


def chosen_nodes(half, client):
    chosen, own = np.zeros((nodes.NUM_NODES, nodes.NUM_CLASSES)), half.mask[client] > 0
    chosen[half.nodes[client, own], half.labels[client, own]] = 1
    return chosen


def dense_round(params, alpha, beta, fine_tune):
    """One inner step, so that Eq. 12's Hessian can be formed; clients count alike."""
    theta, unravel = ravel_pytree(params)
    support, query = nodes.make_draw()["train"]

    def loss(half, client):
        chosen = chosen_nodes(half, client)
        return lambda flat: dense_loss(unravel(flat), chosen)

    gradients, losses = [], []
    training = [0, 1, 3, 4]  # those with support sets
    for client in training:
        on_support, on_query = loss(support, client), loss(query, client)
        adapted = theta - alpha * jax.grad(on_support)(theta)
        curvature = jnp.eye(len(theta)) - alpha * jax.hessian(on_support)(theta)
        gradients.append(curvature @ jax.grad(on_query)(adapted))
        losses.append(on_query(adapted))
    theta -= beta * sum(gradients) / 3  # client 3 has no query set
    if fine_tune:
        tuned = [
            theta - alpha * jax.grad(loss(support, client))(theta)
            for client in training
        ]
        theta = sum(tuned) / len(tuned)
    return unravel(theta), sum(losses) / 3


@pytest.mark.parametrize("fine_tune", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_round_on_nodes_is_algebra_of_whole_matrices(model, fine_tune, quick_jit):
    task = NodeTask(
        nodes.NUM_FEATURES,
        nodes.NUM_CLASSES,
        model=model,
        hidden_size=7,
        dropout=0.0,
        inner_steps=1,
        optimizer=OptimizerConfig("sgd", 0.7),
    )
    outer = OptimizerConfig("sgd", 0.9)
    algorithm = graphfl(
        GraphFLConfig(task, server_optimizer=outer, fine_tune=fine_tune)
    )
    train = nodes.make_splits(MODELS[model])["train"]
    state = algorithm.init(jax.random.key(0), train)
    before = jax.tree.map(lambda x: x[0], state.models["params"])
    after, metrics = quick_jit(algorithm.round)(state, train, KEYS[0])
    by_hand = quick_jit(lambda params: dense_round(params, 0.7, 0.9, fine_tune))
    expected, loss = by_hand(before)
    for found, new, old in zip(
        *map(jax.tree.leaves, (after.models["params"], expected, before)), strict=True
    ):
        assert np.abs(new - old).max() > 0.01
        npt.assert_allclose(found[0], new, atol=1e-5)
    npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)


def test_without_any_query_set_there_is_no_loss_and_no_outer_step(quick_jit):
    task = NodeTask(nodes.NUM_FEATURES, nodes.NUM_CLASSES, hidden_size=4, dropout=0.0)
    decaying = OptimizerConfig("sgd", 0.9, weight_decay=0.1)
    config = GraphFLConfig(task, server_optimizer=decaying, fine_tune=False)
    train = nodes.make_splits()["train"]
    only = jnp.zeros_like(train.client_weights).at[3].set(1)  # has a support set alone
    algorithm = graphfl(config)
    before = algorithm.init(jax.random.key(0), train)
    args = before, train._replace(client_weights=only), KEYS[0]
    after, metrics = quick_jit(algorithm.round)(*args)
    assert metrics["train_loss"] == NO_LOSS
    jax.tree.map(
        npt.assert_array_equal, after.models["params"], before.models["params"]
    )


@pytest.mark.parametrize(("fine_tune", "times"), [(True, 2), (False, 1)])
@pytest.mark.parametrize(("participation", "cohort"), [(1.0, 5), (0.6, 3)])
def test_the_model_crosses_once_a_stage(fine_tune, times, participation, cohort):
    task = NodeTask(nodes.NUM_FEATURES, nodes.NUM_CLASSES, hidden_size=4)
    algorithm = graphfl(GraphFLConfig(task, participation, fine_tune=fine_tune))
    train = nodes.make_splits()["train"]
    state = jax.eval_shape(algorithm.init, KEYS[0], train)
    numbers = 4 * (nodes.NUM_FEATURES + 1) + nodes.NUM_CLASSES * (4 + 1)
    sent = 4 * numbers * cohort * times
    assert bytes_per_round(algorithm.round, state, train, KEYS[0]) == Bytes(sent, sent)
