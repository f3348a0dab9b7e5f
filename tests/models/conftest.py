"""A model of `supernet_cases.NET`, and its programs, compiled once for a file."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.models.convolutions import CONVOLUTIONS
from tests.models.supernet_cases import NET, total_loss


@pytest.fixture(scope="module")
def net_model(draw_params):
    drawn = draw_params(NET.init)
    for stats in drawn["batch_stats"].values():
        stats["norm"]["var"] = np.abs(stats["norm"]["var"]) + 0.1
    return jax.tree.map(jnp.asarray, drawn)


@pytest.fixture(scope="module")
def net_apply(quick_jit):
    return quick_jit(NET.apply)


@pytest.fixture(scope="module")
def net_convolve(quick_jit):
    """(variables, graph, mask) -> (outputs, variables that changed), by op."""

    def compiled(op):
        run = CONVOLUTIONS[op](NET.width).apply
        return quick_jit(functools.partial(run, mutable=["batch_stats"]))

    return functools.cache(compiled)


@pytest.fixture(scope="module")
def net_gradient(quick_jit):
    """(model, graph, code, mask) -> gradient of a loss of the masked nodes."""

    def loss(params, stats, graph, code, mask):
        model = {"params": params, "batch_stats": stats}
        outputs, _ = NET.apply(model, graph, code, mask)
        return total_loss(outputs, mask)

    take = quick_jit(jax.grad(loss))
    return lambda model, *args: take(model["params"], model["batch_stats"], *args)
