"""Floating-point operations of a client's forward pass (CNFGNN's Table 8).

`count` is XLA's count, `forward` that of one client's model for one window. The paper
prints 0.159, 1.821 and 0.162 GFLOPs "on a device" and not how they were counted. They
are what `printed` returns, to all digits, for the three models: multiply-accumulates
and element-wise operations for one window, of all 207 sensors of METR-LA together. A
sensor has 1/207 of it, and twice that where a multiply-accumulate is two operations.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core import mesh
from fedjax_graph.data.traffic.windows import INPUT_STEPS, TARGET_STEPS
from fedjax_graph.models.seq2seq import NUM_FEATURES, Seq2Seq, init_params

NUM_SENSORS_PRINTED = 207


def count(fn: Callable[..., Any], *args: Any) -> float:
    """Operations of `fn(*args)` by XLA's cost analysis; nothing is computed.

    A product of [I, J] and [J, L] has 2 I J L, an element-wise operation one for each
    element. Exponentials, hyperbolic tangents and the like are not among them: XLA
    counts these apart. The program is analysed as it was traced: an optimized one also
    has what fusions compute twice, and depends on the machine.

    Args:
      fn: traceable.
      *args: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: if there is a loop; XLA counts its body once.
    """
    with mesh.on_cpu():
        lowered = jax.jit(fn).lower(*args)
        if "stablehlo.while" in lowered.as_text():
            raise ValueError("a loop, of which XLA counts one pass: unroll it")
        return lowered.cost_analysis()["flops"]


def forward(model: Seq2Seq) -> float:
    """Operations of a client's encoder and decoder for one window; h_G is given."""

    def abstract(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(params, *args):
        return model.apply({"params": params}, *args)

    return count(
        run,
        jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0)),
        abstract(INPUT_STEPS, 1, NUM_FEATURES),
        abstract(1, model.embedding_size),
        abstract(TARGET_STEPS, 1, NUM_FEATURES),
        abstract(TARGET_STEPS, dtype=jnp.bool_),
    )


def printed(model: Seq2Seq, num_sensors: int = NUM_SENSORS_PRINTED) -> int:
    """What the paper prints: operations of all sensors for one window.

    A GRU of H units and F inputs has 3 H (F + H) multiply-accumulates and 13 H others
    in a step, of biases and gates; the read-out has one for each of its inputs.
    """

    def layers(size):
        widths = [NUM_FEATURES] + [size] * (model.num_layers - 1)
        return sum(3 * size * (width + size) + 13 * size for width in widths)

    state_size = model.hidden_size + model.embedding_size
    encoder = INPUT_STEPS * layers(model.hidden_size)
    decoder = TARGET_STEPS * (layers(state_size) + state_size)
    return num_sensors * (encoder + decoder)
