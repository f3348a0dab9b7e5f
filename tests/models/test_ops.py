"""What the paper's space makes of the convolutions."""

import jax
import numpy as np
import numpy.testing as npt

from fedjax_graph.models import ops
from fedjax_graph.models.convolutions import GATConv
from tests.models.supernet_cases import NUM_FEATURES, make_graph


def test_heads_are_the_mean_of_single_ones(draw_params, quick_jit):
    graph, _ = make_graph(3)
    conv = GATConv(4, num_heads=3)
    drawn = draw_params(lambda key: conv.init(key, graph))["params"]
    assert drawn["kernel"].shape == (3, NUM_FEATURES, 4)
    alone = quick_jit(GATConv(4).apply)
    heads = [
        alone({"params": {"kernel": k, "attention": a, "bias": drawn["bias"]}}, graph)
        for k, a in zip(drawn["kernel"], drawn["attention"], strict=True)
    ]
    outputs = quick_jit(conv.apply)({"params": drawn}, graph)
    npt.assert_allclose(outputs, np.mean(heads, axis=0), rtol=1e-5, atol=1e-6)


def test_the_papers_ops_have_its_hops_steps_and_heads():
    fields = {
        "GATConv": {"num_heads": 6, "concatenates": False},
        "SGConv": {"num_hops": 2},
        "APPNP": {"num_hops": 10, "teleport": 0.1},
        "GatedGraphConv": {"num_steps": 3, "num_kernels": 3},
    }
    for op, expected in fields.items():
        module = ops.convolution(op, "paper")(64)
        assert {name: getattr(module, name) for name in expected} == expected
        once = ops.convolution(op, "2022")(64)
        assert any(getattr(once, name) == 1 for name in expected)


def test_nothing_follows_an_op_of_the_paper():
    x = jax.numpy.array([-1.0, 2.0])
    npt.assert_array_equal(ops.activate("GCNConv", x, "paper"), x)
    npt.assert_array_equal(ops.activate("GCNConv", x, "2022"), [0, 2])
