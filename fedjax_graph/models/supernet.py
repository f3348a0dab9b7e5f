"""A SuperNet: all graph networks of a search space, their weights shared.

FL-AGCNS, arXiv 2104.04141, Section 3.2; codes are those of `architecture`. Every layer
has weights of its own for each pair of what it reads and op; a code selects a path
through them: `SuperNet.path` is the mask of Eqs. 1 and 2, which keeps of all weights
those of a code, and `SuperNet.touched` where the gradient of Eq. 2 may be other than 0.
Codes of the same network share all weights: in the space 2022 a layer whose predecessor
is absent takes the weights for the input stage.

The paper leaves open whether the five activations of a stage share its linear map. Here
they do: maps of their own, each of which a fifth of the codes trains, took half as many
steps again until shared weights told codes apart at all.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from fedjax_graph.core import arrays, mesh, sparse_rows
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.graphs import one_graph
from fedjax_graph.core.local import Model, Params
from fedjax_graph.core.trees import expand_like, take
from fedjax_graph.models.architecture import (
    ACTIVATIONS,
    NUM_LAYERS,
    OPS,
    Architecture,
    Fusion,
    Ops,
    Space,
    check,
    check_ops,
    decode,
    decode_static,
    op_branches,
    to_text,
)
from fedjax_graph.models.convolutions import Convolution
from fedjax_graph.models.dropout import drop
from fedjax_graph.models.linear import Linear, matmul
from fedjax_graph.models.message_passing import make_structure
from fedjax_graph.models.ops import absent_layer, activate, convolution, present_layer

WIDTH = 64


def empty_graph(num_features: int) -> jraph.GraphsTuple:
    """Makes a graph of one node without edges: weights have the same shapes on any."""
    none = jnp.zeros(0, jnp.int32)
    return one_graph(jnp.zeros((1, num_features)), none, none)


class Network(nn.Module):
    """Classifies nodes by the network of one code, which has its own weights alone."""

    code: tuple[int, ...]
    num_classes: int
    width: int = WIDTH
    fusion: Fusion = "all"
    dropout: float = 0.0  # of both stages' inputs
    space: Space = "paper"
    reads_masked_rows: ClassVar[bool] = True  # of features, which it multiplies first

    @nn.compact
    def __call__(
        self,
        graph: jraph.GraphsTuple,
        mask: jax.Array | None = None,
        is_training: bool = False,
    ) -> jax.Array:
        """Classifies nodes; arguments and result as for `SuperNet.apply`."""
        dropout = nn.Dropout(self.dropout, deterministic=not is_training)
        drop = partial(sparse_rows.map_entries, dropout)
        architecture = decode_static(self.code, self.space)
        activations = list(ACTIVATIONS.values())
        structure = make_structure(graph, mask)
        linear = Linear(graph.nodes.shape[-1], self.width, name="input")
        outputs = [activations[architecture.input_stage](linear(drop(graph.nodes)))]
        for i, is_present in enumerate(architecture.is_present):
            if not is_present:
                outputs.append(None)
                continue
            op = OPS[architecture.op[i]]
            layer = convolution(op, self.space)(self.width, name=f"layer_{i + 1}")
            x = layer.convolve(outputs[architecture.source[i]], structure)
            outputs.append(activate(op, x, self.space))
        is_fused = architecture.is_fused(self.fusion)
        fused = [x for x, kept in zip(outputs[1:], is_fused, strict=True) if kept]
        x = sum(fused) / len(fused) if fused else outputs[0]
        x = Linear(self.width, self.num_classes, name="output")(drop(x))
        return activations[architecture.output_stage](x)


@dataclasses.dataclass(frozen=True)
class SuperNet(Checked):
    """Classifies nodes by any code, in pure functions of {"params", "batch_stats"}.

    Their leaves are stacked, so that an optimizer can step those sets of weights alone
    that a code touches:

    - params["input"] and ["output"]: [1, ...], of all activations.
    - params["layers"][op] and batch_stats[op]: [L (L + 1) / 2, ...], by layer and what
      it reads. Ops without any are left out.
    """

    num_features: int = dataclasses.field(metadata=limits(lower=1))
    num_classes: int = dataclasses.field(metadata=limits(lower=1))
    num_layers: int = limited(NUM_LAYERS, lower=1)
    width: int = limited(WIDTH, lower=1)
    fusion: Fusion = "all"
    dropout: float = limited(0.0, lower=0, below=1)  # of both stages' inputs
    space: Space = "paper"
    ops: Ops = OPS  # those of its codes' layers; there are weights of no other

    def __post_init__(self) -> None:
        """Checks types, limits and ops; raises `InputError`."""
        super().__post_init__()
        check_ops(self.ops)

    def init(self, key: jax.Array) -> Model:
        """Draws fresh weights, each set as for a network of its own."""
        *stage_keys, layers_key = jax.random.split(key, 3)
        sizes = ((self.num_features, self.width), (self.width, self.num_classes))
        stages = [
            draw_stacked(Linear(*size), 1, key, jnp.zeros((1, size[0])))
            for key, size in zip(stage_keys, sizes, strict=True)
        ]
        graph = empty_graph(self.width)
        layers = {
            op: draw_stacked(self.module(op), self._num_slots, key, graph)
            for op, key in zip(OPS, jax.random.split(layers_key, len(OPS)), strict=True)
            if op in self.ops
        }

        def collect(kind):
            return {op: drawn[kind] for op, drawn in layers.items() if kind in drawn}

        params = {
            "input": stages[0]["params"],
            "layers": collect("params"),
            "output": stages[1]["params"],
        }
        return {"params": params, "batch_stats": collect("batch_stats")}

    def module(self, op: str) -> Convolution:
        """Builds a layer of one op."""
        return convolution(op, self.space)(self.width)

    def apply(
        self,
        model: Model,
        graph: jraph.GraphsTuple,
        code: jax.Array,
        mask: jax.Array | None = None,
        product: jax.Array | None = None,
        key: jax.Array | None = None,
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
          product: [N, width], what `input_product` gives: for who applies many codes
            to one graph. None: computed.
          key: of dropout, in training; None: there is none. A given `product` has its
            own behind it.

        Returns:
          Outputs [N, classes] of the code's output stage, NaN if a layer has an op that
          is not here, and the running statistics, of which only those on the code's
          path are new.

        Raises:
          InputError: if the code has another number of genes, or the edges are no
            weights; see `check_code`.
        """
        path = self.path(model, code)
        outputs, stats = self.apply_path(path, graph, code, mask, product, key)
        model = self.with_path(model, code, {"batch_stats": stats})
        return outputs, model["batch_stats"]

    def path(self, model: Model, code: jax.Array) -> Model:
        """Takes what the network of a code reads of a model's weights and statistics.

        Returns:
          {"params", "batch_stats"}: of both stages the weights, [...]; of each op a
          stack [L, ...] for the layers, by what they read, also where the code has
          another op there.

        Raises:
          InputError: see `check_code`.
        """
        self.check_code(code)
        return jax.tree.map(
            lambda x, index: x[index], model, self._indices(model, code)
        )

    def check_code(self, code: jax.Array) -> None:
        """Checks that a code is one of this space, and as long as the net is deep.

        Raises:
          InputError: if it has another number of genes, or they are no whole numbers,
            or one whose value is known is out of its range or of an op that is not
            here.
        """
        arrays.check_are_arrays(**{"architecture code": code})
        if code.shape != (self.num_layers + 2,):
            raise InputError(
                f"architecture code of shape {code.shape}: expected "
                f"{self.num_layers + 2} genes, of {self.num_layers} layers"
            )
        if arrays.is_known(code):
            self._check_ops(check(code, self.num_layers))
        elif not jnp.issubdtype(code.dtype, jnp.integer):
            raise InputError(
                f"architecture code of type {code.dtype}: expected whole numbers"
            )

    def _check_ops(self, code: Sequence[int]) -> None:
        """Checks that the layers of a valid code have ops that are here.

        Raises:
          InputError: if one has not.
        """
        network = decode_static(code, self.space)
        for layer in np.flatnonzero(network.is_present):
            if (op := OPS[network.op[layer]]) not in self.ops:
                raise InputError(
                    f"architecture code {to_text(code)}: layer {layer + 1} is {op}; "
                    f"expected one of {', '.join(self.ops)}"
                )

    def branches_of(self, architecture: Architecture) -> jax.Array:
        """Numbers what each layer [L] is: 0 absent, i the i-th of `ops`."""
        numbers = jnp.asarray(op_branches(self.ops))[architecture.op]
        return jnp.where(architecture.is_present, numbers, 0)

    def with_path(self, model: Model, code: jax.Array, path: Model) -> Model:
        """Puts a `path`, or a part of one, back in its place in a model."""
        parts = {kind: model[kind] for kind in path}
        return model | jax.tree.map(
            lambda x, index, new: x.at[index].set(new),
            parts,
            self._indices(parts, code),
            path,
        )

    def apply_path(
        self,
        path: Model,
        graph: jraph.GraphsTuple,
        code: jax.Array,
        mask: jax.Array | None = None,
        product: jax.Array | None = None,
        key: jax.Array | None = None,
        layers: Sequence[Callable[..., tuple[jax.Array, Any]]] | None = None,
    ) -> tuple[jax.Array, Any]:
        """Classifies nodes as `apply` does, from the `path` of the code alone.

        Args:
          path, graph, code, mask, product, key: see there.
          layers: what each op does with its row of a path that holds its layers
            otherwise, see `present_layer`.

        Returns:
          Outputs [N, classes], and the path's running statistics.
        """
        architecture, params = decode(code, self.space), path["params"]
        layers = layers or [
            present_layer(op, self.width, self.space) for op in self.ops
        ]
        branches = [absent_layer, *layers]
        structure = make_structure(graph, mask)

        def layer(outputs, step):
            index, number, source, own = step
            output, stats = jax.lax.switch(
                number, branches, *own, outputs[source], structure
            )
            return outputs.at[index].set(output), stats

        input_key, output_key = self.dropout_keys(key)
        if product is None:
            product = fully_connected(
                params["input"], self.drop(graph.nodes, input_key)
            )
        x = activate_stage(architecture.input_stage, product)
        outputs = jnp.zeros((self.num_layers + 1, *x.shape), x.dtype).at[0].set(x)
        indices = jnp.arange(1, self.num_layers + 1)
        numbers = self.branches_of(architecture)
        own = (params["layers"], path["batch_stats"])
        outputs, stats = jax.lax.scan(
            layer,
            mesh.varying(outputs),
            (indices, numbers, architecture.source, own),
        )
        x = jnp.tensordot(self._fusion_weights(architecture), outputs, axes=1)
        x = self.drop(x, output_key)
        x = fully_connected(params["output"], x)
        x = activate_stage(architecture.output_stage, x)
        if self.ops != OPS:  # of a traced code `check_code` knows nothing
            is_here = jnp.all(architecture.is_present == (numbers > 0))
            x = jnp.where(is_here, x, jnp.nan)
        return x, stats

    def input_product(
        self, params: Params, nodes: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Computes the input stage before its activation: [N, F] -> [N, width].

        With a key, of the dropout that `apply` would do.
        """
        input_key, _ = self.dropout_keys(key)
        return fully_connected(take(params["input"], 0), self.drop(nodes, input_key))

    def dropout_keys(
        self, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
        """Splits a key into those of the input and of the output stage."""
        return (None, None) if key is None else tuple(jax.random.split(key))

    def drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Drops out of what a stage takes; nothing without a key."""
        if key is None or not self.dropout:
            return x
        dropped = partial(drop, key=key, rate=self.dropout)
        return cast(jax.Array, sparse_rows.map_entries(dropped, x))

    def touched(self, model: Model, codes: jax.Array) -> Model:
        """Marks the weights and running statistics that some codes [C, L + 2] use.

        Returns:
          Like the model, bool leaves [1 or L (L + 1) / 2, 1, ...], to broadcast.
        """

        def mark(code):
            architecture = decode(code, self.space)
            slots = self._slots(architecture)

            def mark_op(op):
                is_taken = architecture.is_present & (architecture.op == OPS.index(op))
                return jnp.zeros(self._num_slots, bool).at[slots].set(is_taken)

            params = {
                "input": jnp.ones(1, bool),
                "layers": {op: mark_op(op) for op in model["params"]["layers"]},
                "output": jnp.ones(1, bool),
            }
            stats = {op: mark_op(op) for op in model["batch_stats"]}
            return {"params": params, "batch_stats": stats}

        def spread(marks, weights):
            marks = jnp.any(marks, axis=0)
            return jax.tree.map(lambda x: expand_like(marks, x), weights)

        return jax.tree.map(spread, jax.vmap(mark)(codes), model)

    def network(self, code: Sequence[int]) -> Network:
        """Builds the network of one code.

        Raises:
          InputError: if the code is not valid, or a layer's op is none of `ops`.
        """
        genes = check(code, self.num_layers).tolist()
        self._check_ops(genes)
        return Network(
            tuple(genes),
            self.num_classes,
            self.width,
            self.fusion,
            self.dropout,
            self.space,
        )

    def extract(self, model: Model, code: Sequence[int]) -> Model:
        """Takes the weights and running statistics of `network(code)` out of a model.

        Raises:
          InputError: if the code is not valid.
        """
        genes = check(code, self.num_layers)
        architecture = decode_static(genes, self.space)
        path = self.path(model, jnp.asarray(genes))

        def own(stacked):
            ops = [OPS[op] for op in architecture.op]
            return {
                f"layer_{i + 1}": take(stacked[op], i)
                for i, op in enumerate(ops)
                if architecture.is_present[i] and op in stacked
            }

        params = path["params"]
        stages = {name: params[name] for name in ("input", "output")}
        own_params = own(params["layers"]) | stages
        return {"params": own_params, "batch_stats": own(path["batch_stats"])}

    def num_parameters(self, code: Sequence[int]) -> int:
        """Counts the parameters of the network of one code; errors as `network`."""
        init = self.network(code).init
        drawn = jax.eval_shape(init, jax.random.key(0), empty_graph(self.num_features))
        return sum(x.size for x in jax.tree.leaves(drawn["params"]))

    @property
    def _num_slots(self) -> int:
        """Counts the sets of weights that an op has."""
        return self.num_layers * (self.num_layers + 1) // 2

    def _slots(self, architecture: Architecture) -> jax.Array:
        """Finds where each layer [L] has its weights in the stacks of ops."""
        indices = np.arange(self.num_layers)
        return cast(jax.Array, indices * (indices + 1) // 2 + architecture.source)

    def _indices(self, model: Model, code: jax.Array) -> Model:
        """Finds where each leaf of a model, or of a part, has a code's path."""
        slots = self._slots(decode(code, self.space))

        def index(path, leaf):
            del leaf
            is_stage = path[0].key == "params" and path[1].key != "layers"
            return jnp.int32(0) if is_stage else slots

        return jax.tree_util.tree_map_with_path(index, model)

    def _fusion_weights(self, architecture: Architecture) -> jax.Array:
        """Weighs the input stage's and the layers' outputs [L + 1] in their mean."""
        is_fused = architecture.is_fused(self.fusion)
        count = jnp.sum(is_fused)
        weights = jnp.concatenate([(count == 0)[None], is_fused])
        return weights / jnp.maximum(count, 1)


def draw_stacked(module: nn.Module, num: int, key: jax.Array, *args: Any) -> Any:
    """Draws independent fresh variables of a module, leaves [num, ...]."""
    draw = jax.vmap(lambda key: module.init(key, *args))
    return draw(jax.random.split(key, num))


def fully_connected(params: Params, x: jax.Array) -> jax.Array:
    """Applies a linear layer: [N, F] -> [N, features]."""
    return matmul(x, params["kernel"]) + params["bias"]


def activate_stage(choice: jax.Array, x: jax.Array) -> jax.Array:
    """Applies one of the activations of the input and output stage."""
    return jax.lax.switch(choice, list(ACTIVATIONS.values()), x)
