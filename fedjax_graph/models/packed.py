"""The network of one code with weights of its own alone, in one program for all codes.

A layer's weights are a row as long as those of the largest op, of which its op reads
the beginning, so that optimizers and clients move a quarter of what a `SuperNet.path`
holds: six layers of rows in place of six layers of all twelve ops.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
from jax.flatten_util import ravel_pytree

from fedjax_graph.core import trees
from fedjax_graph.core.local import Model
from fedjax_graph.models.architecture import decode
from fedjax_graph.models.linear import Linear
from fedjax_graph.models.ops import plain_layer
from fedjax_graph.models.supernet import SuperNet, empty_graph


@dataclasses.dataclass(frozen=True)
class PackedNet:
    """Classifies nodes by a code, in pure functions of {"params", "batch_stats"}.

    - params["input"] and ["output"]: of the fully connected stages.
    - params["layers"]: [L, W], batch_stats: [L, S], a row for each layer.
    """

    net: SuperNet  # whose space it is, as deep and as wide

    def init(self, key: jax.Array, code: jax.Array) -> Model:
        """Draws fresh weights of the network of a code [L + 2].

        Raises:
          InputError: see `SuperNet.check_code`.
        """
        self.net.check_code(code)
        net, (*stage_keys, layers_key) = self.net, jax.random.split(key, 3)
        sizes = ((net.num_features, net.width), (net.width, net.num_classes))
        stages = [
            Linear(*size).init(key, jnp.zeros((1, size[0])))["params"]
            for key, size in zip(stage_keys, sizes, strict=True)
        ]
        graph = empty_graph(net.width)
        num_weights, num_statistics = self._row_sizes()

        def draw(op):
            def fresh(key):
                drawn = net.module(op).init(key, graph)
                weights, statistics = _parts(drawn)
                return _padded(weights, num_weights), _padded(
                    statistics, num_statistics
                )

            return fresh

        def absent(key):
            del key
            return jnp.zeros(num_weights), jnp.zeros(num_statistics)

        branches = [absent, *map(draw, net.ops)]
        numbers = net.branches_of(decode(code, net.space))
        keys = jax.random.split(layers_key, net.num_layers)
        layers, stats = jax.lax.map(
            lambda step: jax.lax.switch(step[0], branches, step[1]), (numbers, keys)
        )
        params = {"input": stages[0], "layers": layers, "output": stages[1]}
        return {"params": params, "batch_stats": stats}

    def apply(
        self,
        model: Model,
        graph: jraph.GraphsTuple,
        code: jax.Array,
        mask: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Classifies nodes; arguments, result and errors as for `SuperNet.apply`."""
        self.net.check_code(code)
        layers = [self._layer(op) for op in self.net.ops]
        return self.net.apply_path(model, graph, code, mask, key=key, layers=layers)

    def _layer(self, op: str) -> Callable[..., tuple[jax.Array, Any]]:
        """Factory of a layer of one op on rows, see `ops.present_layer`."""
        layer = plain_layer(op, self.net.width, self.net.space)
        zeros = trees.zeros(_shapes(self.net, op))
        params, unravel_params = ravel_pytree(zeros["params"])
        stats, unravel_stats = ravel_pytree(zeros["batch_stats"])

        def run(weights, statistics, x, structure):
            own = {op: unravel_params(weights[: params.size])}
            kept = {op: unravel_stats(statistics[: stats.size])} if stats.size else {}
            x, new = layer(own, kept, x, structure)
            flat, _ = ravel_pytree(new.get(op, {}))
            return x, statistics.at[: stats.size].set(flat)

        return jax.checkpoint(run, prevent_cse=False)

    def _row_sizes(self) -> tuple[int, int]:
        """Counts numbers in a row of weights, and in one of statistics.

        One at least, as arrays of none are not stored.
        """

        def size(op, kind):
            return sum(x.size for x in jax.tree.leaves(_shapes(self.net, op)[kind]))

        weights, statistics = (
            max(1, *(size(op, kind) for op in self.net.ops))
            for kind in ("params", "batch_stats")
        )
        return weights, statistics


@functools.cache
def _shapes(net: SuperNet, op: str) -> dict[str, Any]:
    """Finds shapes of an op's weights and statistics."""
    init, graph = net.module(op).init, empty_graph(net.width)
    drawn = jax.eval_shape(init, jax.random.key(0), graph)
    drawn = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drawn)
    return {kind: drawn.get(kind, {}) for kind in ("params", "batch_stats")}


def _parts(drawn: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    weights, statistics = (
        ravel_pytree(drawn.get(kind, {}))[0] for kind in ("params", "batch_stats")
    )
    return weights, statistics


def _padded(row: jax.Array, size: int) -> jax.Array:
    return jnp.zeros(size).at[: len(row)].set(row)
