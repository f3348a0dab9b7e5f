"""The encoder-decoder against golden numbers and a loop over steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import mesh
from fedjax_graph.models import seq2seq


def num_params(model):
    params = jax.eval_shape(
        lambda key: seq2seq.init_params(model, key), jax.random.key(0)
    )
    return sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("sizes, count", [((64, 64, 1), 63_873), ((100, 0, 1), 62_501)])
def test_number_of_parameters(sizes, count):
    assert num_params(seq2seq.Seq2Seq(*sizes)) == count


def test_the_large_baseline_has_the_papers_size():
    assert round(num_params(seq2seq.Seq2Seq(200, 0, 2)), -3) == 727_000


def golden_params(reference):
    """torch's weights, transposed."""

    def cell(part):
        prefix = f"Seq2Seq/param/{part}"
        return {
            "input_kernel": reference[f"{prefix}/weight_ih_l0"].T,
            "hidden_kernel": reference[f"{prefix}/weight_hh_l0"].T,
            "input_bias": reference[f"{prefix}/bias_ih_l0"],
            "hidden_bias": reference[f"{prefix}/bias_hh_l0"],
        }

    return {
        "encoder_0": cell("encoder"),
        "decoder_0": cell("decoder"),
        "head": {
            "kernel": reference["Seq2Seq/param/head/weight"].T,
            "bias": reference["Seq2Seq/param/head/bias"],
        },
    }


@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # which projects in each step
def test_golden_numbers(reference, backend, monkeypatch):
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    model = seq2seq.Seq2Seq(6, 6)
    variables = {"params": golden_params(reference)}
    inputs = reference["Seq2Seq/x"]
    clock = reference["Seq2Seq/target_clock"]
    targets = np.concatenate([np.full_like(clock, 1e3), clock], axis=-1)
    hidden = model.apply(variables, inputs, method=model.encode)
    npt.assert_allclose(hidden, reference["Seq2Seq/hidden"], atol=1e-5)
    outputs = model.apply(
        variables, inputs, reference["Seq2Seq/embedding"], targets, np.zeros(12, bool)
    )
    npt.assert_allclose(outputs, reference["Seq2Seq/output"][..., 0], atol=1e-5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def loop_cell(weights, x, state):
    """torch.nn.GRUCell for one window: gates r, z, n."""
    size = len(state)
    from_input = x @ weights["input_kernel"] + weights["input_bias"]
    from_state = state @ weights["hidden_kernel"] + weights["hidden_bias"]
    reset = sigmoid(from_input[:size] + from_state[:size])
    update = sigmoid(from_input[size : 2 * size] + from_state[size : 2 * size])
    new = np.tanh(from_input[2 * size :] + reset * from_state[2 * size :])
    return (1 - update) * new + update * state


def loop_over_steps(params, inputs, embedding, targets, feed_truth):
    """The model for one window in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    num_layers = sum(name.startswith("encoder") for name in params)
    states = [np.zeros(len(params["encoder_0"]["hidden_kernel"]))] * num_layers
    for x in inputs:
        for depth in range(num_layers):
            states[depth] = x = loop_cell(params[f"encoder_{depth}"], x, states[depth])
    states = [np.concatenate([state, embedding]) for state in states]
    value, clock, outputs = *inputs[-1], []
    for target, feed in zip(targets, feed_truth, strict=True):
        x = np.array([value, clock])
        for depth in range(num_layers):
            states[depth] = x = loop_cell(params[f"decoder_{depth}"], x, states[depth])
        output = (x @ params["head"]["kernel"] + params["head"]["bias"])[0]
        outputs.append(output)
        # The next input is this step's value beside this step's own clock.
        value, clock = (target[0] if feed else output), target[1]
    return np.array(outputs)


FEEDS = {
    "never": np.zeros(12, bool),
    "always": np.ones(12, bool),
    "sometimes": np.arange(12) % 3 == 1,
}


@pytest.mark.parametrize("sizes", [(4, 3, 1), (4, 0, 1), (4, 0, 2), (3, 2, 2)])
@pytest.mark.parametrize("feed", FEEDS)
def test_a_loop_over_steps(sizes, feed, rolled_scans, draw_params, quick_jit):
    model = seq2seq.Seq2Seq(*sizes)
    params = draw_params(functools.partial(seq2seq.init_params, model))
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(12, 3, 2)).astype(np.float32)
    targets = rng.normal(size=(12, 3, 2)).astype(np.float32)
    embedding = rng.normal(size=(3, sizes[1])).astype(np.float32)
    outputs = quick_jit(model.apply)(
        {"params": params}, inputs, embedding, targets, FEEDS[feed]
    )
    for window in range(3):
        expected = loop_over_steps(
            params,
            inputs[:, window],
            embedding[window],
            targets[:, window],
            FEEDS[feed],
        )
        npt.assert_allclose(outputs[:, window], expected, atol=1e-5)


def test_rolled_and_unrolled_scans_agree(rolled_scans, draw_params, quick_jit):
    model = seq2seq.Seq2Seq(4, 3)
    params = draw_params(functools.partial(seq2seq.init_params, model))
    x = np.random.default_rng(0).normal(size=(12, 3, 2)).astype(np.float32)
    arguments = {"params": params}, x, np.ones((3, 3), np.float32), x, np.arange(12) < 4
    rolled = quick_jit(model.apply)(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "scan", jax.lax.scan.__wrapped__)
        unrolled = quick_jit(model.apply)(*arguments)
    npt.assert_allclose(rolled, unrolled, atol=1e-6)


def test_first_weights_are_bounded_by_the_hidden_size():
    params = seq2seq.init_params(seq2seq.Seq2Seq(9, 7), jax.random.key(0))
    for name, size in {"encoder_0": 9, "decoder_0": 16, "head": 16}.items():
        largest = max(float(jnp.abs(x).max()) for x in params[name].values())
        assert 0.8 * size**-0.5 < largest <= size**-0.5
