"""What clients learn, apart from how they cooperate.

A task brings the model, one client's local steps and the scores; a federated method
decides where the clients start, what pulls them and how their models are merged, and
knows no more of a task than `Task` says. A task is built by the `build()` of a frozen
config, which also records it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_graph.core.algorithm import Data, Metrics
from fedjax_graph.core.local import LocalResult, Model, Params


class Embedded(NamedTuple):
    """Holds examples of ONE client as the last layer of a model reads them."""

    embeddings: jax.Array  # [B, D] float32
    labels: jax.Array  # [B] int32
    is_trained: jax.Array  # [B], 0 for those whose labels are not trained on
    is_real: jax.Array  # [B], 0 for padding


Embed = Callable[[Model], jax.Array]
"""Another model -> its embeddings [B, D] of the examples of a step, as it scores."""
Term = Callable[[Embed], Callable[[Params, Embedded, jax.Array], jax.Array]]
"""What a method adds to the loss of ONE client's steps.

embed -> (params, what the step's model reads, key of the step) -> []. What `embed`
gives is computed once for all steps where these see the same examples.
"""


class Task(NamedTuple):
    """Holds a task's pure functions of K clients, whose models have the same shapes."""

    init: Callable[[jax.Array], Model]
    """key -> {"params": ..., "batch_stats": ...} of one client; the latter is {} for a
    model without running statistics."""
    client_data: Callable[[Data], Any]
    """data -> what each client trains on: a pytree of [K, ...]."""
    update: Callable[..., LocalResult]
    """(model, own client data, key, data, adjust, num_rounds) -> the local steps of ONE
    client. `adjust`, if any, is a `GradientTransformation` that acts on the gradients
    ahead of the task's optimizer; its state is the first element of the result's
    `opt_state`. `num_rounds` is how many rounds there were before this one, [] int32.
    A task with `embed` also takes `term`, a `Term` of the loss, or None; in a minibatch
    that is not full it weighs as much less as the loss."""
    evaluate: Callable[[Model, Data], Metrics]
    """(models, data) -> scores; the models' leaves are [1 or K, ...]."""
    predict: Callable[[Model, Data], jax.Array]
    """(models, data) -> outputs of all clients; leaves as in `evaluate`."""
    is_head: Callable[[tuple[Any, ...]], bool]
    """Path of a leaf in the model (`jax.tree_util` keys) -> whether it belongs to the
    last layer, which FedPer keeps personal and LG-FedAvg shares."""
    query_loss: Callable[[Params, Any, jax.Array, Data], jax.Array] | None = None
    """(params, own client data, key, data) -> [] loss of ONE client on the examples
    that its local steps do not see; None for a task without such."""
    has_query: Callable[[Data], jax.Array] | None = None
    """data -> [K] bool, which clients have such examples; None if all have."""
    train_loss: (
        Callable[[Params, Any, Any, jax.Array, Data], tuple[jax.Array, Any]] | None
    ) = None
    """(params, batch_stats, own client data, key, data) -> [] mean loss over all that
    ONE client trains on, and the new batch_stats; None for a task with minibatches."""
    embed: Callable[..., Embedded] | None = None
    """(model, own client data, data) -> what the last layer reads, of ONE client and
    all that it trains on, as the model scores; with `key=` that of a dropout as it
    trains. None for a task without a last layer or classes."""
    num_classes: int = 0
    """Of its labels; 0 for a task without classes."""
    update_by: Callable[[Callable[..., tuple[jax.Array, Any]]], Any] | None = None
    """A loss in the form of `train_loss`, of parameters of any shape -> local steps in
    the form of `update` that minimise it; None for a task with minibatches."""
    logits: Callable[[Model, Data], jax.Array] | None = None
    """(models, data) -> what `predict` takes a softmax of; None for other tasks."""
    flip_labels: Callable[[Any, Data, jax.Array], tuple[Any, Data]] | None = None
    """(own client data, data, [] bool) -> both as ONE client has them, with labels y
    turned into C - 1 - y where the flag is set; None for a task without labels."""
    round_keys: Callable[[jax.Array], Iterable[jax.Array]] = jax.random.split
    """Key of a round -> that of the cohort and its local steps, and that of the
    aggregator."""
    monitor: str = "loss"
    """The metric of `evaluate` by which the best round is chosen; see
    `FederatedAlgorithm.monitor`."""
    scored: Callable[[Model], Model] = lambda models: models
    """models -> the parts of them that `evaluate` and `predict` read."""


def with_extra_data(task: Task, beside: Callable[[Data], Any]) -> Task:
    """A task whose clients have something beside their data: (own data, beside).

    Args:
      task: its `client_data` and `flip_labels` change, its other functions do not.
      beside: data -> pytree of [K, ...].
    """

    if flip_labels := task.flip_labels:

        def flip(own, data, is_flipped):
            client_data, rest = own
            client_data, data = flip_labels(client_data, data, is_flipped)
            return (client_data, rest), data

        task = task._replace(flip_labels=flip)
    own_data = task.client_data
    return task._replace(client_data=lambda data: (own_data(data), beside(data)))


def layer_name(path: tuple[Any, ...]) -> str | None:
    """Name of the model's own layer, not of one inside of it, that has a leaf.

    Args:
      path: of a leaf in a model, such as of params/head/kernel.
    """
    return getattr(path[1], "key", None) if len(path) > 1 else None


def in_head(path: tuple[Any, ...]) -> bool:
    """`Task.is_head` of a model whose last layer is called `head`."""
    return layer_name(path) == "head"


def flipped(labels: jax.Array, num_classes: int, is_flipped: jax.Array) -> jax.Array:
    """Labels y as C - 1 - y where the flag [] is set; negative ones, of none, stay."""
    return jnp.where(is_flipped & (labels >= 0), num_classes - 1 - labels, labels)


class TaskConfig(Protocol):
    """A frozen dataclass of hyper-parameters."""

    @property
    def kind(self) -> str:
        """Name of the task, under which its config stands in a file."""
        ...

    def build(self) -> Task:
        """The task's functions."""
        ...
