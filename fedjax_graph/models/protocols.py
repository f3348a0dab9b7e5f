"""What a task asks of a model; a user's own model has to offer the same."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, get_type_hints

import jax
import jraph

from fedjax_graph.core.checks import described, fits
from fedjax_graph.core.errors import InputError

M = TypeVar("M")


class FlaxModule(Protocol):
    """The part of `flax.linen.Module` that tasks use; a subclass of it has all this."""

    init: Any
    """(key, *inputs) -> {"params": ...}."""
    apply: Any
    """({"params": ...}, *inputs) -> outputs."""


class NodeModel(FlaxModule, Protocol):
    """A model of labelled nodes, on which the task `nodes` runs.

    Its last layer is called `head`, and stands in no other; FedPer and LG-FedAvg tell
    it by this name. Random streams besides `params` are not available, but for
    `dropout` while training.
    """

    num_hops: int
    """Products with the normalised adjacency S that are left to the model: 1 if it
    reads the graph's edges, and gets S X for features X; 0 if not, and gets S^2 X."""
    first_layer: str | None
    """Name of the parameters with the `kernel` [F, units] that multiplies the features
    and nothing else does: local steps may then be taken on products in its place. None
    if there is no such kernel."""

    def __call__(
        self, graph: jraph.GraphsTuple, is_training: bool = False
    ) -> jax.Array:
        """Logits [N, classes] of all nodes.

        Args:
          graph: nodes [N, F], edges S's entries [E], receivers ascending.
          is_training: whether to drop hidden units.
        """
        ...


class SubgraphModel(FlaxModule, Protocol):
    """A model of whole graphs, on which the task `subgraphs` runs.

    Its last layer is called `head`, and stands in no other; FedPer and LG-FedAvg tell
    it by this name, and what it reads are the embeddings of nodes. Besides `params` it
    may keep `batch_stats`; random streams are not available, but for `dropout` while
    training. A class whose first layer is `x @ kernel`, and no one that extends it, may
    say `reads_masked_rows = True` to be given `core.masked_rows.MaskedRows` as nodes
    where most of them are padding.
    """

    def __call__(
        self,
        graph: jraph.GraphsTuple,
        mask: jax.Array | None = None,
        is_training: bool = False,
    ) -> jax.Array:
        """Logits [N, classes] of all nodes; those of padding are finite.

        Args:
          graph: nodes [N, F], edge weights [E] or None, receivers ascending. An
            undirected edge is stored both ways, no node has an edge to itself, and
            padding edges have weight 0.
          mask: [N], 0 for padding nodes; None where a model that keeps `batch_stats` is
            scored, and is to take those.
          is_training: whether to drop units.
        """
        ...


class ImageModel(FlaxModule, Protocol):
    """A model of images, on which the task `images` runs.

    Its last layer is called `head`, and stands in no other; FedPer and LG-FedAvg tell
    it by this name, and what it reads are the embeddings of images. Besides `params` it
    may keep `batch_stats`; random streams are not available.
    """

    def __call__(self, images: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Logits [B, classes]; those of padding are finite.

        Args:
          images: [B, H, W, C], standardised by channel.
          mask: [B] in training, 0 for padding, where `batch_stats` may change; None
            where a model is scored, and is to take those.
        """
        ...


class TrafficModel(FlaxModule, Protocol):
    """A model of one sensor's readings, on which the task `traffic_rnn` runs.

    Its last layer is called `head`, and stands in no other; FedPer and LG-FedAvg tell
    it by this name.
    """

    num_features: int
    """F of its inputs: 2, the standardised reading and the time of day."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Standardised readings ahead: [12 steps, B, F] -> [12 steps, B]."""
        ...


def built(factory: Callable[[Any], M], config: Any, protocol: type, what: str) -> M:
    """Builds a model by a registered factory: the task's config -> module.

    Raises:
      InputError: as the factory does; or naming `what` the model is, where the factory
        fails otherwise or what it returns is not what the protocol asks for.
    """
    try:
        model = factory(config)
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{what}: its factory, called with the {type(config).__name__}, raised "
            f"{type(error).__name__}: {reason}"
        ) from error
    if model is None or isinstance(model, type):
        raise InputError(
            f"{what}: its factory, called with the {type(config).__name__}, returned "
            f"{model!r}, expected a module"
        )
    for field in dataclasses.fields(model) if dataclasses.is_dataclass(model) else ():
        if getattr(model, field.name) is config and not fits(config, field.type):
            raise InputError(
                f"{what}: {type(model).__name__} was given the {type(config).__name__} "
                f"as {field.name}; register a function of it that returns a module"
            )
    return checked(model, protocol, what)


def checked(model: M, protocol: type, what: str) -> M:
    """Returns a model that has what its protocol asks for.

    Raises:
      InputError: naming `what` the model is, and what it lacks.
    """
    hints = get_type_hints(protocol)
    asked = [
        name
        for base in reversed(protocol.__mro__)
        for name in base.__dict__.get("__annotations__", {})
    ]
    for name in (*asked, "__call__"):
        if not hasattr(model, name):
            raise InputError(
                f"{what}: a {type(model).__name__} without {name!r}; see "
                f"{protocol.__module__}.{protocol.__name__} for what a model offers"
            )
        value, hint = getattr(model, name), hints.get(name, Any)
        if not fits(value, hint):
            raise InputError(
                f"{what}: {name}={value!r} of a {type(model).__name__}, expected "
                f"{described(hint)}; register a function of the task's config"
            )
    return model
