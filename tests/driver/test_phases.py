"""Methods whose later rounds do something else, with scripted losses."""

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import programs
from tests.driver.scripted import (
    ALGORITHM,
    FALLING,
    WITH_PHASES,
    make_script,
    records,
    run,
)

FULL_OPTIMIZATION = True  # in which one seed alone and several agree bit for bit


@pytest.mark.parametrize(
    ("losses", "config", "best", "last"),
    [
        (FALLING, {}, 8, 8),
        ([1, 1, 1, 9, 8, 9, 9, 9], {"patience": 2}, 5, 7),
        ([1, 2, 2, 9, 9, 9, 9, 9], {"patience": 2}, 4, 6),  # round 1 would end it in 3
        ([1, 2, 2, 9], {"patience": 1, "num_rounds": 4}, 4, 4),
        ([0, 0, 1, 0, 0, 6, 0, 5], {"eval_every": 3, "patience": 3}, 8, 8),
        ([0, 0, 1, 0, 0, 6, 0, 7], {"eval_every": 3, "patience": 1}, 6, 8),
        ([0, 0, 0, 0, 6, 0, 0, 7], {"eval_every": 5, "patience": 2}, 5, 8),
    ],
)
def test_the_best_round_is_one_of_the_last_phase(losses, config, best, last):
    """Of rounds 4 to 8, from which on patience counts; the others stand for cuts."""
    script = make_script([*losses, *[0] * (8 - len(losses))], train_losses=np.arange(8))
    result = run(script, algorithm=WITH_PHASES, **config)
    assert (list(result.best_round), result.num_rounds) == ([best], last)
    assert int(result.best_state.round[0]) == best
    assert result.test["loss"] == pytest.approx([100 + losses[best - 1]])


def test_seeds_reach_the_last_phase_independently():
    losses = [1.0, 9, 9, 8, 9, 9, 9, 9], FALLING
    script = make_script(losses, (3, 7))
    args = {"algorithm": WITH_PHASES, "patience": 2}
    together = run(script, seeds=(3, 7), seeds_per_chunk=None, **args)
    assert list(together.best_round) == [4, 8]
    for i, seed in enumerate((3, 7)):
        alone = run(script, seeds=(seed,), **args).best_state.weights
        npt.assert_array_equal(together.best_state.weights[i], alone[0])


@pytest.mark.parametrize("eval_every", [1, 2, 8])
def test_a_phase_is_the_round_of_its_rounds(eval_every):
    """Weights are those of the two rounds in a loop, also where a call has both."""
    script, key = make_script(FALLING), jax.random.key(0)
    state = ALGORITHM.init(jax.random.fold_in(key, 0), script["train"])
    first, last = (jax.jit(phase.round) for phase in WITH_PHASES.phases)
    for number in range(1, 9):
        round_ = first if number < 4 else last
        state, _ = round_(state, script["train"], jax.random.fold_in(key, number))
    config = {"eval_every": eval_every, "keep_last": True}
    found = run(script, algorithm=WITH_PHASES, **config).best_state
    npt.assert_array_equal(found.weights[0], state.weights)


@pytest.mark.parametrize(
    ("eval_every", "expected"),
    [
        (1, ["first", "last"]),
        (2, ["first", "both", "last"]),
        (3, ["first", "last", "last"]),
    ],
)
def test_rounds_of_one_phase_have_a_program_of_their_own(
    eval_every, expected, monkeypatch
):
    """Round 4 begins the last phase, and round 8 ends the run; a program is kept."""
    names = {
        phase.round: name
        for phase, name in zip(WITH_PHASES.phases, ("first", "last"), strict=True)
    }
    traced, trace = [], programs.trace

    def spy(algorithm, *args):
        traced.append(names.get(algorithm.round, "both"))
        return trace(algorithm, *args)

    monkeypatch.setattr(programs, "trace", spy)
    run(make_script(FALLING), algorithm=WITH_PHASES, eval_every=eval_every)
    assert traced == expected


def test_a_phase_that_is_refused_is_so_before_the_first_round(tmp_path, monkeypatch):
    trace = programs.trace

    def refuse(algorithm, *args):
        if algorithm.round is WITH_PHASES.phases[-1].round:
            raise InputError("too large")
        return trace(algorithm, *args)

    monkeypatch.setattr(programs, "trace", refuse)
    with pytest.raises(InputError, match="too large"):
        run(make_script(FALLING), tmp_path, algorithm=WITH_PHASES)
    assert not records(tmp_path)


def test_a_run_that_ends_before_the_last_phase_is_refused(tmp_path):
    words = "num_rounds=3: fake trains what it is scored by from round 4 on; ask for"
    with pytest.raises(InputError, match=words):
        run(make_script(FALLING), tmp_path, algorithm=WITH_PHASES, num_rounds=3)
    assert list(tmp_path.iterdir()) == []
    for num_rounds in (0, 4):
        run(make_script(FALLING), algorithm=WITH_PHASES, num_rounds=num_rounds)
