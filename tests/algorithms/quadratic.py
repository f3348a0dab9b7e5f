"""A toy task, least squares on a few rows a client, and its twin in NumPy.

A model is {"params": {"base": [3], "head": [2]}, "batch_stats": {"mean": [4]}}. The
twin writes it as one row of nine numbers in double precision, the parameters first, so
that averages and products need not know of leaves.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt

from fedjax_graph.core import graphs
from fedjax_graph.core.local import local_steps
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import Task
from tests.algorithms.oracle import draw_cohort

NUM_CLIENTS, NUM_ROWS, NUM_PADDED = 5, 6, 7
BASE, HEAD, PARAMS, MEAN = slice(0, 3), slice(3, 5), slice(0, 5), slice(5, 9)
IS_HEAD = np.isin(np.arange(9), [3, 4])  # the numbers of a row that are the head
MEAN_DECAY = 0.9


class Rows(NamedTuple):
    """A split: `features @ params` should be `targets`."""

    features: Any  # [K, N, 5]
    targets: Any  # [K, N]
    client_ids: Any  # [K]
    client_weights: Any  # [K]
    graph: graphs.Graph


@dataclasses.dataclass(frozen=True)
class QuadraticTask:
    """Local steps, of SGD by default, on F_i(v) = 1/2 mean_b (x_b . v - y_b)^2."""

    kind: str = "quadratic"
    optimizer: OptimizerConfig = OptimizerConfig("sgd", learning_rate=0.2)
    batch_size: int = 2  # divides the rows of a client
    num_epochs: int = 2

    @property
    def learning_rate(self) -> float:
        return self.optimizer.learning_rate

    @property
    def num_steps(self) -> int:
        return self.num_epochs * NUM_ROWS // self.batch_size

    def build(self) -> Task:
        return Task(
            init=init,
            client_data=lambda data: (data.features, data.targets),
            update=self.update,
            evaluate=lambda models, data: {"loss": jnp.mean(errors(models, data) ** 2)},
            predict=lambda models, data: errors(models, data) + data.targets,
            is_head=lambda path: any(k.key == "head" for k in path),
            query_loss=query_loss,
        )

    def update(self, start, own, key, data, adjust, num_rounds):
        del data, num_rounds
        order = batches_of(key, self)
        batches = jax.tree.map(lambda x: x[order], own)
        steps = local_steps(loss, self.optimizer.build(), adjust=adjust)
        return steps(start, batches)


def init(key):
    parts = jax.random.normal(key, (5,))
    return {
        "params": {"base": parts[BASE], "head": parts[HEAD]},
        "batch_stats": {"mean": jnp.ones(4)},
    }


def loss(params, stats, batch):
    features, targets = batch
    error = features @ jnp.concatenate([params["base"], params["head"]]) - targets
    new = MEAN_DECAY * stats["mean"] + (1 - MEAN_DECAY) * jnp.mean(
        features[:, :4], axis=0
    )
    return jnp.mean(error**2) / 2, {"mean": new}


def query_loss(params, own, key, data):
    """Of pairs that no step sees: each row with the target of another."""
    del key, data
    features, targets = own
    return loss(params, {"mean": jnp.ones(4)}, (features, targets[::-1]))[0]


def errors(models, data):
    params = models["params"]
    own = [
        jnp.broadcast_to(x, (len(data.targets), x.shape[1]))
        for x in (params["base"], params["head"])
    ]
    return jnp.einsum("knp,kp->kn", data.features, jnp.hstack(own)) - data.targets


@functools.partial(jax.jit, static_argnums=1)
def batches_of(key, config):
    """Places of the rows of each minibatch, [steps, B]."""
    keys = jax.random.split(key, config.num_epochs)
    orders = [jax.random.permutation(k, NUM_ROWS) for k in keys]
    return jnp.concatenate(orders).reshape(-1, config.batch_size)


# --- Data -----------------------------------------------------------------------------

EDGES = [(0, 1, 0.7), (1, 0, 0.4), (1, 2, 0.9), (3, 2, 0.2), (1, 1, 2.0)]


def make_data(weights=(2, 1, 5, 3, 4), edges=EDGES) -> Rows:
    """Five clients of unequal weight: 0 <-> 1 -> 2 <- 3, and 4 without an edge."""
    rng = np.random.default_rng(1)
    adjacency = np.zeros((NUM_CLIENTS, NUM_CLIENTS), np.float32)
    for sender, receiver, weight in edges:
        adjacency[sender, receiver] = weight
    draw = rng.normal(size=(NUM_CLIENTS, NUM_ROWS, 6)).astype(np.float32)
    shift = np.arange(NUM_CLIENTS, dtype=np.float32)[:, None]
    return Rows(
        features=jnp.asarray(draw[..., :5]),
        targets=jnp.asarray(draw[..., 5] + shift),
        client_ids=jnp.array([3, 1, 4, 15, 9]),
        client_weights=jnp.array(weights, jnp.float32),
        graph=graphs.from_adjacency(adjacency),
    )


def pad_data(data: Rows) -> Rows:
    """Two more clients of weight 0, with readings that would be noticed."""
    extra = NUM_PADDED - NUM_CLIENTS

    def append(x, value):
        return jnp.concatenate([x, jnp.full((extra, *x.shape[1:]), value, x.dtype)])

    return Rows(
        features=append(data.features, 3),
        targets=append(data.targets, 50),
        client_ids=jnp.append(data.client_ids, 100 + jnp.arange(extra)),
        client_weights=append(data.client_weights, 0),
        graph=graphs.pad_nodes(data.graph, NUM_PADDED),
    )


def pad_state(state):
    """The state with rows for the padded clients; those of matrices: the identity."""

    def pad(x):
        if x.shape == (NUM_CLIENTS, NUM_CLIENTS):
            return jnp.eye(NUM_PADDED).at[:NUM_CLIENTS, :NUM_CLIENTS].set(x)
        if x.ndim and x.shape[0] == NUM_CLIENTS:
            return jnp.concatenate([x, 7 + x[: NUM_PADDED - NUM_CLIENTS]])
        return x

    return jax.tree.map(pad, state)


# --- The twin -------------------------------------------------------------------------


def to_rows(model, num_clients=NUM_CLIENTS):
    """A model of the library, leaves [1 or K, ...], as [K, 9] doubles."""
    params = model["params"]
    leaves = [params["base"], params["head"]]
    leaves += [model["batch_stats"]["mean"]] if "batch_stats" in model else []
    leaves = [np.asarray(x, float) for x in leaves]
    return np.hstack([np.broadcast_to(x, (num_clients, x.shape[1])) for x in leaves])


class Twin:
    """Local training on a split, client by client and step by step."""

    def __init__(self, data: Rows, config: QuadraticTask, participation: float = 1.0):
        self.features = np.asarray(data.features, float)
        self.targets = np.asarray(data.targets, float)
        self.ids, self.config = np.asarray(data.client_ids), config
        self.weights = np.asarray(data.client_weights, float)
        self.size = max(1, round(participation * NUM_CLIENTS))

    def cohort(self, key):
        """{client: key of its updates} of a round."""
        train_key, _ = jax.random.split(key)
        cohort_key, update_key = jax.random.split(train_key)
        indices = draw_cohort(cohort_key, self.ids, self.size)
        return {i: jax.random.fold_in(update_key, self.ids[i]) for i in indices}

    def steps(self, client, row, key, extra=lambda v: 0.0):
        """The local steps of one client -> (row, mean loss).

        Args:
          extra: params [5] -> what is added to the gradient there.
        """
        v, mean, losses = row[PARAMS], row[MEAN], []
        for indices in np.asarray(batches_of(key, self.config)):
            x, y = self.features[client, indices], self.targets[client, indices]
            error = x @ v - y
            losses.append(np.mean(error**2) / 2)
            v = v - self.update(client, x.T @ error / len(y) + extra(v))
            mean = MEAN_DECAY * mean + (1 - MEAN_DECAY) * x[:, :4].mean(axis=0)
        return np.concatenate([v, mean]), np.mean(losses)

    def update(self, client, gradient):
        """What a step of the client's optimizer takes from its parameters."""
        del client
        return self.config.learning_rate * gradient

    def train(self, starts, key, extra=lambda client, v: 0.0):
        """The cohort's local training -> ({client: row}, mean loss by weight)."""
        rows, losses = {}, []
        for i, client_key in self.cohort(key).items():
            rows[i], loss = self.steps(
                i, starts[i], client_key, lambda v, i=i: extra(i, v)
            )
            losses.append(loss)
        return rows, np.average(losses, weights=self.weights[list(rows)])

    def mean(self, rows):
        """Of the cohort's rows, by number of examples."""
        weights = self.weights[list(rows)]
        return np.average(list(rows.values()), axis=0, weights=weights)


def normalised_adjacency(edges=EDGES, indices=range(NUM_CLIENTS)):
    """[i, j] = what i takes from j, self edges included, rows of sum 1."""
    takes = np.zeros((NUM_CLIENTS, NUM_CLIENTS))
    for sender, receiver, weight in edges:
        takes[receiver, sender] = weight
    for i in range(NUM_CLIENTS):
        takes[i, i] = takes[i, i] or 1
    takes = takes[np.ix_(indices, indices)]
    return takes / takes.sum(axis=1, keepdims=True)


# --- Running both ---------------------------------------------------------------------

KEYS = tuple(jax.random.key(seed) for seed in (5, 6, 7))


def run(algorithm, data, jit, keys=KEYS, state=None):
    """[(state, metrics)] of the start (no metrics) and after each round."""
    state = algorithm.init(jax.random.key(0), data) if state is None else state
    history, round_ = [(state, {})], jit(algorithm.round)
    for key in keys:
        history.append(round_(history[-1][0], data, key))
    return history


def assert_rows(models, expected, atol=1e-5):
    """A model of the library is the rows [K, 9] (or [9], the same for all)."""
    expected = np.broadcast_to(expected, (NUM_CLIENTS, np.shape(expected)[-1]))
    npt.assert_allclose(to_rows(models), expected, rtol=atol, atol=atol)
