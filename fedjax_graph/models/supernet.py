"""A SuperNet: all graph networks of a search space, their weights shared.

FL-AGCNS, arXiv 2104.04141, Section 3.2; codes are those of `architecture`. Every layer
has weights of its own for each pair of what it reads and op, and both stages for each
activation; a code selects a path through them. A layer whose predecessor is absent
takes the weights for the input stage, so codes of the same network share all weights.

The paper leaves open whether a stage's options share weights; its released code has but
one input stage, always ReLU.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from fedjax_graph.architecture import (
    ACTIVATIONS,
    NUM_LAYERS,
    OPS,
    Architecture,
    Fusion,
    check,
    decode,
    decode_static,
)
from fedjax_graph.clients import take
from fedjax_graph.errors import InputError
from fedjax_graph.local import Model, Params
from fedjax_graph.models.convolutions import CONVOLUTIONS, Structure, make_structure
from fedjax_graph.models.linear import Linear, matmul

WIDTH = 64


def activate(op: str, x: jax.Array) -> jax.Array:
    """What follows a convolution."""
    return nn.elu(x) if op == "GATConv" else nn.relu(x)


def empty_graph(num_features: int) -> jraph.GraphsTuple:
    """One node without edges: weights have the same shapes on any graph."""
    none = jnp.zeros(0, jnp.int32)
    return jraph.GraphsTuple(
        nodes=jnp.zeros((1, num_features)),
        edges=None,
        senders=none,
        receivers=none,
        globals=None,
        n_node=jnp.array([1], jnp.int32),
        n_edge=jnp.array([0], jnp.int32),
    )


class Network(nn.Module):
    """The network of one code, with no more weights than its own."""

    code: tuple[int, ...]
    num_classes: int
    width: int = WIDTH
    fusion: Fusion = "leaves"

    @nn.compact
    def __call__(
        self, graph: jraph.GraphsTuple, mask: jax.Array | None = None
    ) -> jax.Array:
        """Classifies nodes; arguments and result as for `SuperNet.apply`."""
        architecture = decode_static(self.code)
        activations = list(ACTIVATIONS.values())
        structure = make_structure(graph, mask)
        linear = Linear(graph.nodes.shape[-1], self.width, name="input")
        outputs = [activations[architecture.input_stage](linear(graph.nodes))]
        for i, is_present in enumerate(architecture.is_present):
            if not is_present:
                outputs.append(None)
                continue
            op = OPS[architecture.op[i]]
            layer = CONVOLUTIONS[op](self.width, name=f"layer_{i + 1}")
            x = layer.convolve(outputs[architecture.source[i]], structure)
            outputs.append(activate(op, x))
        is_fused = architecture.is_fused(self.fusion)
        fused = [x for x, kept in zip(outputs[1:], is_fused, strict=True) if kept]
        x = sum(fused) / len(fused) if fused else outputs[0]
        x = Linear(self.width, self.num_classes, name="output")(x)
        return activations[architecture.output_stage](x)


@dataclasses.dataclass(frozen=True)
class SuperNet:
    """Pure functions of {"params", "batch_stats"}, whose leaves are stacked:

    - params["input"] and ["output"]: [5, ...], by activation.
    - params["layers"][op] and batch_stats[op]: [L (L + 1) / 2, ...], by layer and what
      it reads. Ops without any are left out.
    """

    num_features: int
    num_classes: int
    num_layers: int = NUM_LAYERS
    width: int = WIDTH
    fusion: Fusion = "leaves"

    def init(self, key: jax.Array) -> Model:
        """Fresh weights, each set drawn as for a network of its own."""
        *stage_keys, layers_key = jax.random.split(key, 3)
        sizes = ((self.num_features, self.width), (self.width, self.num_classes))
        stages = [
            draw_stacked(Linear(*size), len(ACTIVATIONS), key, jnp.zeros((1, size[0])))
            for key, size in zip(stage_keys, sizes, strict=True)
        ]
        graph = empty_graph(self.width)
        layers = {
            op: draw_stacked(CONVOLUTIONS[op](self.width), self._num_slots, key, graph)
            for op, key in zip(OPS, jax.random.split(layers_key, len(OPS)), strict=True)
        }

        def collect(kind):
            return {op: drawn[kind] for op, drawn in layers.items() if kind in drawn}

        params = {
            "input": stages[0]["params"],
            "layers": collect("params"),
            "output": stages[1]["params"],
        }
        return {"params": params, "batch_stats": collect("batch_stats")}

    def apply(
        self,
        model: Model,
        graph: jraph.GraphsTuple,
        code: jax.Array,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Classifies nodes by the network of a code.

        One program for all codes. Mapping over clients, share the code (`in_axes=None`)
        and take codes one after another (`lax.map`): a `vmap` over codes would run
        every op for each.

        Args:
          model: weights and running statistics.
          graph: nodes [N, F], edge weights [E] or None; see `models.convolutions` on
            padding.
          code: [L + 2], valid.
          mask: [N] in training, 0 for padding; None to normalise by the running
            statistics.

        Returns:
          Outputs [N, classes] of the code's output stage, and the running statistics,
          of which only those on the code's path are new.

        Raises:
          InputError: if the code has another number of genes, or the edges are no
            weights.
        """
        if code.shape != (self.num_layers + 2,):
            raise InputError(
                f"architecture code of shape {code.shape}: expected "
                f"{self.num_layers + 2} genes, of {self.num_layers} layers"
            )
        architecture = decode(code)
        params, slots = model["params"], self._slots(architecture)
        own = take((params["layers"], model["batch_stats"]), slots)
        branches = [absent_layer, *(present_layer(op, self.width) for op in OPS)]
        structure = make_structure(graph, mask)

        def layer(outputs, step):
            place, choice, source, own = step
            output, stats = jax.lax.switch(
                choice, branches, *own, outputs[source], structure
            )
            return outputs.at[place].set(output), stats

        x = run_stage(params["input"], architecture.input_stage, graph.nodes)
        outputs = jnp.zeros((self.num_layers + 1, *x.shape), x.dtype).at[0].set(x)
        places = jnp.arange(1, self.num_layers + 1)
        choices = jnp.where(architecture.is_present, architecture.op + 1, 0)
        outputs, stats = jax.lax.scan(
            layer, outputs, (places, choices, architecture.source, own)
        )
        x = jnp.tensordot(self._fusion_weights(architecture), outputs, axes=1)
        x = run_stage(params["output"], architecture.output_stage, x)
        stats = jax.tree.map(
            lambda old, new: old.at[slots].set(new), model["batch_stats"], stats
        )
        return x, stats

    def touched(self, params: Params, codes: jax.Array) -> Params:
        """Which weights some of the codes [C, L + 2] use.

        Returns:
          Like params, bool leaves [5 or L (L + 1) / 2, 1, ...], to broadcast.
        """

        def mark(code):
            architecture = decode(code)
            slots = self._slots(architecture)
            stages = jnp.arange(len(ACTIVATIONS))

            def mark_op(op):
                is_taken = architecture.is_present & (architecture.op == OPS.index(op))
                return jnp.zeros(self._num_slots, bool).at[slots].set(is_taken)

            return {
                "input": stages == architecture.input_stage,
                "layers": {op: mark_op(op) for op in params["layers"]},
                "output": stages == architecture.output_stage,
            }

        def spread(marks, weights):
            marks = jnp.any(marks, axis=0)
            return jax.tree.map(
                lambda x: marks.reshape(-1, *[1] * (x.ndim - 1)), weights
            )

        return jax.tree.map(spread, jax.vmap(mark)(codes), params)

    def network(self, code: Sequence[int]) -> Network:
        """The network of one code.

        Raises:
          InputError: if the code is not valid.
        """
        genes = check(code, self.num_layers).tolist()
        return Network(tuple(genes), self.num_classes, self.width, self.fusion)

    def extract(self, model: Model, code: Sequence[int]) -> Model:
        """What `network(code)` takes of a model's weights and running statistics.

        Raises:
          InputError: if the code is not valid.
        """
        architecture = decode_static(check(code, self.num_layers))
        slots = self._slots(architecture)
        layers = {
            f"layer_{i + 1}": (OPS[architecture.op[i]], slots[i])
            for i in range(self.num_layers)
            if architecture.is_present[i]
        }

        def own(stacked):
            return {
                name: take(stacked[op], slot)
                for name, (op, slot) in layers.items()
                if op in stacked
            }

        params = model["params"]
        own_params = own(params["layers"]) | {
            "input": take(params["input"], architecture.input_stage),
            "output": take(params["output"], architecture.output_stage),
        }
        return {"params": own_params, "batch_stats": own(model["batch_stats"])}

    def num_parameters(self, code: Sequence[int]) -> int:
        """Of the network of one code.

        Raises:
          InputError: if the code is not valid.
        """
        init = self.network(code).init
        drawn = jax.eval_shape(init, jax.random.key(0), empty_graph(self.num_features))
        return sum(x.size for x in jax.tree.leaves(drawn["params"]))

    @property
    def _num_slots(self) -> int:
        """How many sets of weights an op has."""
        return self.num_layers * (self.num_layers + 1) // 2

    def _slots(self, architecture: Architecture) -> jax.Array:
        """[L], where each layer has its weights in the stacks of ops."""
        places = np.arange(self.num_layers)
        return places * (places + 1) // 2 + architecture.source

    def _fusion_weights(self, architecture: Architecture) -> jax.Array:
        """[L + 1], of the input stage's and the layers' outputs in their mean."""
        is_fused = architecture.is_fused(self.fusion)
        count = jnp.sum(is_fused)
        weights = jnp.concatenate([(count == 0)[None], is_fused])
        return weights / jnp.maximum(count, 1)


def draw_stacked(module: nn.Module, num: int, key: jax.Array, *args: Any) -> Any:
    """Independent fresh variables of a module, leaves [num, ...]."""
    draw = jax.vmap(lambda key: module.init(key, *args))
    return draw(jax.random.split(key, num))


def run_stage(params: Params, choice: jax.Array, x: jax.Array) -> jax.Array:
    """One of the fully connected stages stacked in params: [N, F] -> [N, features]."""
    own = take(params, choice)
    x = matmul(x, own["kernel"]) + own["bias"]
    return jax.lax.switch(choice, list(ACTIVATIONS.values()), x)


def absent_layer(weights: Params, stats: Any, x: jax.Array, structure: Structure):
    """A layer that is left out: zeros, which nobody reads."""
    del weights, structure
    return jnp.zeros_like(x), stats


def present_layer(op: str, width: int) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of one layer.

    A gradient computes it again, as a switch keeps what each of its branches would:
    236 MB instead of 40 for three clients of a third of Cora.

    Returns:
      (weights by op, statistics by op, x [N, width], structure) -> ([N, width],
      statistics).
    """
    module = CONVOLUTIONS[op](width)

    def run(weights, stats, x, structure):
        variables = {
            "params": weights.get(op, {}),
            "batch_stats": stats.get(op, {}),
        }
        x, new = module.apply(
            variables, x, structure, method="convolve", mutable=["batch_stats"]
        )
        if op in stats:
            stats = stats | {op: new["batch_stats"]}
        return activate(op, x), stats

    return jax.checkpoint(run, prevent_cse=False)
