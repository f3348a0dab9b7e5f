"""A method whose losses are scripted, and runs of it."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import communication
from fedjax_graph.core.algorithm import FederatedAlgorithm, Phase, by_phase
from fedjax_graph.core.trees import no_leaf
from fedjax_graph.driver import rounds
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.config import RunConfig
from fedjax_graph.driver.seeds import abstract_seeds

FALLING = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
FALLS_TWICE = [9.0, 8.0, 8.5, 8.5, 8.5, 8.5, 8.5, 8.5]
NAN = float("nan")
TIMINGS = ("seconds", "windows_per_s")


class Script(NamedTuple):
    """What happens to each seed, by round."""

    first_keys: jax.Array  # [seeds, 2], by which a seed knows its row
    train_losses: jax.Array  # [seeds, R]
    validation_losses: jax.Array  # [seeds, R]


class ScriptState(NamedTuple):
    row: jax.Array  # [] int32
    round: jax.Array  # [] int32
    weights: jax.Array  # [5], a random walk
    momentum: jax.Array  # [5] bfloat16


def make_script(validation_losses, seeds=(0,), train_losses=None) -> dict[str, Script]:
    keys = [jax.random.fold_in(jax.random.key(seed), 0) for seed in seeds]
    validation = np.atleast_2d(np.array(validation_losses, np.float32))
    train = validation if train_losses is None else np.atleast_2d(train_losses)
    script = Script(
        jnp.stack([jax.random.key_data(key) for key in keys]),
        jnp.asarray(train, jnp.float32),
        jnp.asarray(validation),
    )
    test = script._replace(validation_losses=script.validation_losses + 100)
    return {"train": script, "validation": script, "test": test}


def draw(key: jax.Array, least: int) -> jax.Array:
    """Multiples of 1/64 below 1, so that no sum is rounded, however it is compiled."""
    return jax.random.randint(key, (5,), least, 64).astype(jnp.float32) / 64


def make_algorithm(
    traced: list | None = None, last_phase: int | None = None
) -> FederatedAlgorithm:
    """The scripted method.

    Args:
      traced: each tracing of a round leaves an entry there.
      last_phase: the round from which on nothing is sent, and what is scored trained.
    """

    def init(key, data):
        same = jnp.all(data.first_keys == jax.random.key_data(key), axis=-1)
        momentum = jnp.zeros(5, jnp.bfloat16)
        row = jnp.argmax(same).astype(jnp.int32)
        return ScriptState(row, jnp.int32(0), draw(key, -64), momentum)

    def walk(noise, state, data):
        if traced is not None:
            traced.append(1)
        state = ScriptState(
            state.row,
            state.round + 1,
            state.weights + noise / 4,
            (state.momentum / 2 + noise).astype(jnp.bfloat16),
        )
        loss = data.train_losses[state.row, state.round - 1]
        return state, {"train_loss": loss, "noise": jnp.sum(noise)}

    def round_(state, data, key):
        return walk(communication.up(draw(key, -64)), state, data)

    def last(state, data, key):
        return walk(draw(key, 0), state, data)

    def evaluate(state, data):
        loss = data.validation_losses[state.row, state.round - 1]
        return {
            "loss": loss,
            "root": jnp.sqrt(loss),
            "walk": jnp.sum(state.weights),
            "weights": state.weights,
            "by_sign": {"positive": jnp.sum(state.weights > 0, dtype=jnp.float32)},
        }

    def predict(state, data):
        return data.validation_losses[state.row] + state.weights[0]

    algorithm = FederatedAlgorithm(init, round_, evaluate, predict)
    if last_phase is None:
        return algorithm
    phases = Phase(1, round_), Phase(last_phase, last)
    return algorithm._replace(
        round=by_phase(phases, lambda state: state.round), phases=phases
    )


ALGORITHM = make_algorithm()
WITH_PHASES = make_algorithm(last_phase=4)


def run(script, workdir=None, *, algorithm=ALGORITHM, resume=False, **config):
    config = RunConfig(**{"num_rounds": len(FALLING), "patience": 3} | config)
    return rounds.run(
        "fake", algorithm, script, config, workdir, {"h": 4}, resume=resume
    )


def final_state(workdir, script, seeds=(0,), is_drawn=no_leaf):
    like = abstract_seeds(ALGORITHM, seeds, script["train"], is_drawn)
    checkpoints = Checkpoints(workdir / "fake" / "checkpoints")
    state, _ = checkpoints.restore((like, np.float64(0)))
    checkpoints.close()
    return state


def records(workdir):
    """The lines of `metrics.jsonl` without clock times."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMINGS}
        for line in lines
    ]


def row(tree, seed):
    return jax.tree.map(lambda x: x[seed : seed + 1], tree)


def assert_same_bits(one, other):
    def same(x, y):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

    jax.tree.map(same, one, other)
