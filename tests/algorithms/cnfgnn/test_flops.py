"""Operations of a forward pass against counts by hand and the paper's figures."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_graph.algorithms.cnfgnn import flops
from fedjax_graph.models.seq2seq import Seq2Seq


def test_a_product_has_two_for_each_pair():
    assert flops.count(jnp.matmul, jnp.ones((3, 5)), jnp.ones((5, 7))) == 2 * 3 * 5 * 7


def test_an_elementwise_operation_has_one_for_each_element():
    assert flops.count(lambda x, y: x * y + x, jnp.ones(6), jnp.ones(6)) == 12


def steps(unroll):
    def run(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=4, unroll=unroll)[0]

    return run


def test_each_step_of_an_unrolled_loop_counts():
    assert flops.count(steps(True), jnp.ones((3, 3))) == 4 * 2 * 27


@pytest.mark.parametrize("unroll", [1, 2])
def test_a_loop_is_refused(unroll):
    with pytest.raises(ValueError, match="unroll it"):
        flops.count(steps(unroll), jnp.ones((3, 3)))


def by_hand(hidden_size, embedding_size):
    """Of a model of one layer: 12 steps of the encoder and 12 of the decoder.

    A step has the recurrent product and its bias, two gates of an addition and a
    logistic function (its exponential apart), and 5 H for the candidate and the new
    state. The encoder's input is a product; the decoder's, of a clock and of a value,
    are scaled rows.
    """

    def step(size):
        return 2 * 3 * size * size + 3 * size + 2 * size * (1 + 3) + 5 * size

    state = hidden_size + embedding_size
    encoder = step(hidden_size) + 3 * hidden_size * (2 * 2 + 1)
    decoder = step(state) + 3 * state * 4 + 2 * state + 1
    return 12 * (encoder + decoder)


@pytest.mark.parametrize("sizes", [(100, 0), (64, 64), (7, 3)])
def test_a_forward_pass_has_what_a_hand_counts(sizes):
    found = flops.forward(Seq2Seq(*sizes))
    assert found == pytest.approx(by_hand(*sizes), rel=0.01)


def test_a_second_layer_reads_the_first():
    size = 50
    found = flops.forward(Seq2Seq(size, 0, 2)) - flops.forward(Seq2Seq(size, 0, 1))
    products = 24 * 2 * 3 * size * (size + size)
    assert products < found < products + 24 * 25 * size


@pytest.mark.parametrize(
    ("model", "gflops"),
    [(Seq2Seq(100, 0), 0.159), (Seq2Seq(200, 0, 2), 1.821), (Seq2Seq(64, 64), 0.162)],
    ids=["63K", "727K", "CNFGNN"],
)
def test_the_papers_figures_are_of_all_sensors_for_one_window(model, gflops):
    assert round(flops.printed(model) / 1e9, 3) == gflops
    assert flops.printed(model, num_sensors=1) * 207 == flops.printed(model)
    assert 1.9 < flops.forward(model) / flops.printed(model, num_sensors=1) < 2.1
