"""What compiled rounds need beside the states that they take and return."""

import jax
import jax.numpy as jnp

from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.driver import programs
from fedjax_graph.driver.config import RunConfig
from fedjax_graph.driver.seeds import abstract_seeds
from tests.driver.scripted import make_script

SIZE = 2**16  # numbers of a state


def temporary_bytes(num_seeds: int) -> int:
    """Of a round of a random walk, seeds one after another."""

    def walk(state, data, key):
        after = state + jax.random.normal(key, (SIZE,))
        return after, {"train_loss": jnp.sum(after)}

    algorithm = FederatedAlgorithm(
        init=lambda key, data: jnp.zeros(SIZE),
        round=walk,
        evaluate=lambda state, data: {"loss": jnp.sum(state**2)},
        predict=lambda state, data: state,
        monitor="loss",
    )
    seeds = tuple(range(num_seeds))
    config = RunConfig(num_rounds=1, seeds=seeds, seeds_per_chunk=1)
    script = make_script([1.0], seeds)
    train, validation = script["train"], script["validation"]
    states = abstract_seeds(algorithm, seeds, train)
    args = algorithm, config, 1, states, train, validation
    compiled = programs.trace(*args).lower().compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_seeds_are_written_over_those_that_were_read():
    """Else each further one would take a state more."""
    few, many = temporary_bytes(2), temporary_bytes(12)
    assert many - few < 4 * SIZE
