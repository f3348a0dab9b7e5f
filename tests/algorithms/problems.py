"""What the conformance suite runs methods on: tiny data of five clients, and changes.

A problem is changed by the order of its clients, and by two more of weight 0.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import graphs
from tests import client_graphs, nodes

NUM_CLIENTS, NUM_PADDED = 5, 7


class Problem(abc.ABC):
    """Training data; `OUTPUTS_AXIS` is that of the clients in what `predict` gives."""

    TASK: dict[str, Any]
    SCORES: set[str]
    OUTPUTS_AXIS: int

    def __init__(self, train, outputs_shape: tuple[int, ...]):
        self.train = train
        self.outputs_shape = outputs_shape

    @abc.abstractmethod
    def reordered(self, order) -> dict[str, Any]:
        """Fields with the clients in another order."""

    @abc.abstractmethod
    def extended(self, fill: str) -> dict[str, Any]:
        """Fields with two clients more, which have `zero` or `random` data."""

    def permute(self, order):
        return self.train._replace(
            client_ids=self.train.client_ids[order],
            client_weights=self.train.client_weights[order],
            **self.reordered(order),
        )

    def pad(self, fill: str = "zero"):
        extra = NUM_PADDED - NUM_CLIENTS
        return self.train._replace(
            client_ids=jnp.append(self.train.client_ids, 1000 + jnp.arange(extra)),
            client_weights=jnp.append(self.train.client_weights, jnp.zeros(extra)),
            **self.extended(fill),
        )

    def is_of_clients(self, path, leaf) -> bool:
        """Whether a leaf of a state has a row for each client.

        No tiny weight has this size.
        """
        del path
        return jnp.ndim(leaf) > 0 and leaf.shape[0] in (NUM_CLIENTS, NUM_PADDED)

    def outputs_of(self, indices, outputs):
        return jnp.take(outputs, jnp.asarray(indices), axis=self.OUTPUTS_AXIS)


class Traffic(Problem):
    TASK = {
        "kind": "traffic_rnn",
        "hidden_size": 4,
        "batch_size": 12,
        "eval_batch_size": 10,
    }
    SCORES = {"loss", "rmse", "mae", "rmse_by_horizon", "masked"}
    OUTPUTS_AXIS = 1

    def __init__(self, train):
        super().__init__(train, (len(train.starts), NUM_CLIENTS, 12))

    def reordered(self, order):
        return {
            "speed": self.train.speed[order],
            "graph": graphs.permute(self.train.graph, order),
        }

    def extended(self, fill):
        shape = (NUM_PADDED - NUM_CLIENTS, self.train.speed.shape[1])
        readings = np.zeros(shape, np.float32)
        if fill == "random":
            draw = np.random.default_rng(0).uniform(1, 90, shape)
            readings = draw.astype(np.float32)
        return {
            "speed": jnp.concatenate([self.train.speed, readings]),
            "graph": graphs.pad_nodes(self.train.graph, NUM_PADDED),
        }


class Seq2SeqTraffic(Traffic):
    TASK = Traffic.TASK | {
        "kind": "traffic_seq2seq",
        "num_layers": 2,
        "sampling_decay": 4.0,
    }


class Nodes(Problem):
    TASK = {
        "kind": "nodes",
        "num_features": nodes.NUM_FEATURES,
        "num_classes": nodes.NUM_CLASSES,
        "hidden_size": 4,
        "dropout": 0.5,
        "inner_steps": 2,
        "optimizer": {"learning_rate": 0.3},
    }
    SCORES = {"error", "accuracy", "cross_entropy"}
    OUTPUTS_AXIS = 0

    def __init__(self):
        weights = jnp.array([3.0, 2, 2, 3, 1])
        train = nodes.make_splits()["train"]._replace(client_weights=weights)
        num_outputs = train.query.labels.shape[1]
        super().__init__(train, (NUM_CLIENTS, num_outputs, nodes.NUM_CLASSES))

    def _fields(self, change):
        fields = {"support": self.train.support, "query": self.train.query}
        return jax.tree.map(change, fields)

    def reordered(self, order):
        return self._fields(lambda x: x[order])

    def extended(self, fill):
        def extend(x):
            more = x[: NUM_PADDED - NUM_CLIENTS]
            return jnp.concatenate([x, 0 * more if fill == "zero" else more])

        return self._fields(extend)


class Subgraphs(Problem):
    TASK = {
        "kind": "subgraphs",
        "num_features": client_graphs.NUM_FEATURES,
        "num_classes": client_graphs.NUM_CLASSES,
        "dropout": 0.5,
        "local_steps": 2,
        "optimizer": {"learning_rate": 0.3},
    }
    SCORES = {"loss", "accuracy", "cross_entropy"}
    OUTPUTS_AXIS = 0

    def __init__(self, **settings):
        train = client_graphs.make_splits(**settings)["train"]
        num_outputs = train.labels.shape[1]
        super().__init__(train, (NUM_CLIENTS, num_outputs, client_graphs.NUM_CLASSES))

    def is_of_clients(self, path, leaf):
        """Of a search, whose stacks of weights may have as many rows, by name."""
        names = {getattr(key, "name", None) for key in path}
        of_rows = names & {"models", "homophily", "known"}
        is_row = super().is_of_clients(path, leaf)
        return bool(names & {"clients", "memories"} or of_rows and is_row)

    def _fields(self, change):
        fields = self.train._asdict()
        del fields["client_ids"], fields["client_weights"], fields["graph"]
        return {name: change(name, x) for name, x in fields.items() if x is not None}

    def reordered(self, order):
        return self._fields(lambda name, x: x[order])

    def extended(self, fill):
        def extend(name, x):
            more = x[: NUM_PADDED - NUM_CLIENTS]
            marks = ("is_trained", "is_scored", "is_own")
            is_kept = fill == "random" and name not in marks
            return jnp.concatenate([x, more if is_kept else 0 * more])

        return self._fields(extend)


class LinkedSubgraphs(Subgraphs):
    """Clients know of their nodes' neighbours outside, and have edges between them."""

    def __init__(self):
        super().__init__(outside_neighbours=True, is_linked=True)

    def reordered(self, order):
        graph = graphs.permute(self.train.graph, order)
        return super().reordered(order) | {"graph": graph}

    def extended(self, fill):
        graph = graphs.pad_nodes(self.train.graph, NUM_PADDED)
        return super().extended(fill) | {"graph": graph}


def all_problems(train) -> dict[type[Problem], Problem]:
    """One of each kind; `train` is the traffic of five sensors."""
    return {
        Traffic: Traffic(train),
        Seq2SeqTraffic: Seq2SeqTraffic(train),
        Nodes: Nodes(),
        Subgraphs: Subgraphs(),
        LinkedSubgraphs: LinkedSubgraphs(),
    }
