"""The driver on a method whose losses are scripted."""

import logging
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core import mesh
from fedjax_graph.core.communication import Bytes, Ledger, down, up
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import no_leaf
from fedjax_graph.driver import memory, plots, programs, rounds
from fedjax_graph.driver.config import RunConfig
from fedjax_graph.driver.seeds import init_seeds, of_seed
from fedjax_graph.driver.writers import read_records
from tests.algorithms.problems import Subgraphs
from tests.driver.scripted import (
    ALGORITHM,
    FALLING,
    FALLS_TWICE,
    NAN,
    WITH_PHASES,
    Script,
    assert_same_bits,
    final_state,
    make_algorithm,
    make_script,
    records,
    row,
    run,
)

FULL_OPTIMIZATION = True  # in which one seed alone and several agree bit for bit


# --- Early stopping and the best state -----------------------------------------------


@pytest.mark.parametrize(
    ("losses", "config", "best", "last"),
    [
        (FALLING, {}, 8, 8),
        ([3, 2, 1, 2, 2, 2, 2, 2], {}, 3, 6),
        ([1, 1, 1, 1, 1, 1, 1, 1], {"patience": 2}, 1, 3),  # as good is not better
        ([3, 4, 2, 4, 4, 1, 4, 4], {"patience": 2}, 3, 5),
        ([2, NAN, 1, NAN, NAN, 0, 0, 0], {"patience": 2}, 3, 5),
        ([9, 5, 1, 6, 4], {"eval_every": 2, "num_rounds": 5}, 5, 5),
        ([1, 1, 5, 0, 0, 6, 0, 0], {"eval_every": 3, "patience": 2}, 3, 6),
        ([1, 1, 5, 0, 0, 6, 0, 2], {"eval_every": 3, "patience": 4}, 8, 8),
    ],
)
def test_the_best_round_is_kept_and_patience_ends_the_run(losses, config, best, last):
    finite = np.arange(8.0)
    result = run(make_script(losses, train_losses=finite), **config)
    assert (list(result.best_round), result.num_rounds) == ([best], last)
    assert int(result.best_state.round[0]) == best
    if best:
        assert result.test["loss"] == pytest.approx([100 + losses[best - 1]])


def test_the_best_state_is_that_of_the_best_round():
    worse_later = run(make_script([3, 2, 1, 2, 2, 2, 2, 2]))
    ends_there = run(make_script(FALLING), num_rounds=3)
    assert_same_bits(worse_later.best_state, ends_there.best_state)


def test_of_the_best_state_stays_what_a_method_keeps():
    def kept(state):
        return state._replace(momentum=None)

    script = make_script([3, 2, 1, 2, 2, 2, 2, 2])
    whole, part = (
        run(script, algorithm=algorithm)
        for algorithm in (ALGORITHM, ALGORITHM._replace(kept=kept))
    )
    assert np.any(whole.best_state.momentum)
    assert_same_bits(part.best_state, kept(whole.best_state))
    assert part.test["walk"] == whole.test["walk"]


@pytest.mark.parametrize(
    "seeds_per_chunk", [None, pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_seeds_stop_independently(tmp_path, seeds_per_chunk):
    seeds, losses = (3, 7, 11), [FALLING, FALLS_TWICE, FALLING[::-1]]
    script = make_script(losses, seeds)
    together = run(script, tmp_path, seeds=seeds, seeds_per_chunk=seeds_per_chunk)
    assert list(together.best_round) == [8, 2, 1]
    assert together.num_rounds == 8
    for i, seed in enumerate(seeds):
        alone = run(script, seeds=(seed,))
        assert_same_bits(row(together.best_state, i), alone.best_state)
    stopped_at = list(final_state(tmp_path, script, seeds).round)
    assert stopped_at == [8, 5, 4]
    lines = records(tmp_path)
    assert [line["round"] for line in lines] == list(range(1, 9))
    assert lines[3]["validation_loss_by_seed"] == [6.0, 8.5, 5.0]
    assert lines[4]["validation_loss_by_seed"] == [5.0, 8.5, None]
    assert lines[4]["validation_loss"] == pytest.approx((5.0 + 8.5) / 2)
    assert lines[7]["validation_loss_by_seed"] == [2.0, None, None]
    assert lines[7]["validation_loss"] == 2.0


def test_a_stopped_seed_has_no_figures_of_whole_numbers(tmp_path):
    def round_(state, data, key):
        state, metrics = ALGORITHM.round(state, data, key)
        return state, metrics | {"count": state.round, "is_odd": state.round % 2 == 1}

    counting = ALGORITHM._replace(round=round_)
    script = make_script([FALLING, FALLS_TWICE], (3, 7))
    run(script, tmp_path, algorithm=counting, seeds=(3, 7))
    last = read_records(tmp_path / "metrics.jsonl")[-1]
    assert last["count_by_seed"] == [8, None]
    assert last["is_odd_by_seed"] == [0, None]
    assert (last["count"], last["is_odd"]) == (8, 0)


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({}, "train_loss"),
        ({"train_loss": jnp.zeros(2)}, "train_loss"),
        ({"train_loss": 0.0, "by_layer": {"first": 0.0}}, "by_layer"),
        ({"train_loss": 0.0, "validation": 0.0}, "validation"),
    ],
)
def test_a_round_reports_single_numbers(metrics, name):
    odd = ALGORITHM._replace(round=lambda state, data, key: (state, metrics))
    with pytest.raises(InputError, match=f"round: its metric '{name}' is not one"):
        run(make_script(FALLING), algorithm=odd)


def test_the_driver_runs_in_double_precision():
    with jax.enable_x64(True):
        result = run(make_script([3, 2, 1, 2, 2, 2, 2, 2]))
    assert list(result.best_round) == [3]


def test_a_training_loss_that_is_not_finite_ends_in_one_line(tmp_path):
    script = make_script(FALLING, train_losses=[1, 1, 1, 1, NAN, 1, 1, 1])
    with pytest.raises(InputError, match="round 5 is not finite") as caught:
        run(script, tmp_path, eval_every=3)
    assert "\n" not in str(caught.value)
    assert [line["round"] for line in records(tmp_path)] == [1, 2, 3, 4]
    mended = make_script(FALLING, train_losses=np.arange(8))
    run(mended, tmp_path, eval_every=3, resume=True)
    assert [line["round"] for line in records(tmp_path)] == list(range(1, 9))


def test_a_stopped_seed_may_go_on_being_not_finite():
    seeds, train = (1, 2), [[1] * 8, [1] * 4 + [NAN] * 4]
    script = make_script([FALLING, [1.0, *[2.0] * 7]], seeds, train)
    assert run(script, seeds=seeds, seeds_per_chunk=None).num_rounds == 8


@pytest.mark.parametrize("losses", [[3, 2, 1, 2, 2, 2, 2, 2], [NAN] * 8, FALLING])
def test_the_last_round_counts_where_it_is_to_be_kept(losses):
    finite = np.arange(8.0)
    result = run(make_script(losses, train_losses=finite), keep_last=True)
    assert (list(result.best_round), result.num_rounds) == ([8], 8)
    ends_there = run(make_script(FALLING, train_losses=finite))
    assert_same_bits(result.best_state, ends_there.best_state)


def test_the_ledger_counts_what_comes_before_the_rounds_and_each_of_them():
    def found(algorithm):
        return run(make_script(FALLING), algorithm=algorithm).communication

    sent, nothing = Bytes(up=5 * 4), Bytes()
    assert found(ALGORITHM) == Ledger(nothing, ((1, sent),))
    assert found(WITH_PHASES) == Ledger(nothing, ((1, sent), (4, nothing)))
    sending = ALGORITHM._replace(init=lambda *args: up(ALGORITHM.init(*args)))
    state = Bytes(up=4 + 4 + 5 * 4 + 5 * 2)  # two numbers, weights and momentum
    assert found(sending) == Ledger(state, ((1, sent),))


def test_the_ledger_counts_the_opening_of_a_phase_once():
    def opening(state, data):
        return down(state.weights)

    phases = [phase._replace(opening=opening) for phase in WITH_PHASES.phases]
    algorithm = WITH_PHASES._replace(phases=tuple(phases))
    ledger = run(make_script(FALLING), algorithm=algorithm).communication
    downloads = [ledger.until(number).down for number in range(7)]
    assert downloads == [0, 20, 20, 20, 40, 40, 40]  # in rounds 1 and 4
    assert [ledger.until(number).up for number in (3, 6)] == [60, 60]


def halved(data):
    return {"train_losses": up(data.train_losses) / 2}


EXCHANGING = ALGORITHM._replace(exchange=halved)


def test_what_clients_exchange_first_is_what_rounds_read_and_counts_once(tmp_path):
    script = make_script(FALLING, train_losses=[8.0] * 8)
    result = run(script, tmp_path, algorithm=EXCHANGING)
    assert [record["train_loss"] for record in records(tmp_path)] == [4.0] * 8
    assert result.communication == Ledger(Bytes(up=8 * 4), ((1, Bytes(up=5 * 4)),))
    once = run(script, algorithm=EXCHANGING, num_rounds=0)
    assert once.communication == Ledger()


def test_a_resumed_run_exchanges_again(tmp_path):
    script = make_script(FALLING, train_losses=[8.0] * 8)
    run(script, tmp_path, algorithm=EXCHANGING, num_rounds=3)
    run(script, tmp_path, algorithm=EXCHANGING, resume=True)
    assert [record["train_loss"] for record in records(tmp_path)] == [4.0] * 8


def test_what_splits_share_is_exchanged_once():
    script = make_script(FALLING)
    other = script["train"]._replace(train_losses=script["train"].train_losses + 1)
    found = programs.exchange(EXCHANGING, script | {"other": other})
    assert found["train"].train_losses is found["test"].train_losses
    for name, split in (script | {"other": other}).items():
        assert found[name].validation_losses is split.validation_losses
        npt.assert_array_equal(found[name].train_losses, split.train_losses / 2)
        npt.assert_array_equal(
            EXCHANGING.prepared(split).train_losses, split.train_losses / 2
        )


def test_splits_of_other_shapes_exchange_for_themselves():
    """Though what is read of them is the same."""

    def twice(data):
        return {"validation_losses": jnp.full_like(data.validation_losses, 2)}

    algorithm = ALGORITHM._replace(exchange=twice)
    script = make_script(FALLING)
    longer = jnp.zeros((1, 9))
    other = script["train"]._replace(validation_losses=longer)
    found = programs.exchange(algorithm, script | {"other": other})
    assert found["train"].validation_losses.shape == (1, 8)
    npt.assert_array_equal(found["other"].validation_losses, np.full((1, 9), 2))


def test_a_state_is_scored_and_predicts_on_what_clients_exchange():
    def twice(data):
        return {"validation_losses": 2 * data.validation_losses}

    script, algorithm = make_script(FALLING), ALGORITHM._replace(exchange=twice)
    result = run(script, algorithm=algorithm)
    plain = run(script)
    found, expected = (
        programs.evaluate_seeds(method, result.best_state, script["test"])
        for method in (algorithm, ALGORITHM)
    )
    assert found["loss"] == result.test["loss"] == 2 * expected["loss"]
    outputs = (
        programs.predict_seeds(method, plain.best_state, script["test"])
        for method in (algorithm, ALGORITHM)
    )
    npt.assert_allclose(
        np.subtract(*outputs), script["test"].validation_losses, rtol=1e-6
    )


def test_an_exchange_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    script = make_script(FALLING)
    monkeypatch.setattr(memory, "free_bytes", lambda: 4 * 8 - 1)
    with pytest.raises(InputError, match="fake: what clients exchange needs"):
        run(script, algorithm=EXCHANGING)
    run(script, algorithm=EXCHANGING, check_memory=False)


def test_clients_do_not_exchange_what_each_seed_draws(drawn):
    with pytest.raises(InputError, match="is_drawn"):
        run(drawn[0], algorithm=EXCHANGING, is_drawn=losses_are_drawn)
    for use in (programs.evaluate_seeds, programs.predict_seeds):
        with pytest.raises(InputError, match="is_drawn"):
            use(EXCHANGING, (), drawn[0]["test"], losses_are_drawn)


@pytest.mark.parametrize("seeds", [(0,), (0, 5)])
@pytest.mark.parametrize(
    ("algorithm", "losses", "first"),
    [(ALGORITHM, [NAN] * 8, 1), (WITH_PHASES, [3, 1, 2, *[NAN] * 5], 4)],
)
def test_no_state_is_the_best_where_no_figure_is_a_number(
    tmp_path, algorithm, losses, first, seeds
):
    """Of the rounds that train what is scored; another seed is no help."""
    figures = [FALLING, losses][-len(seeds) :]
    script = make_script(figures, seeds, train_losses=[np.arange(8.0)] * len(seeds))
    words = f"fake: validation_loss was no number in any round from {first} on"
    with pytest.raises(InputError, match=words):
        run(script, tmp_path, algorithm=algorithm, seeds=seeds, patience=3)
    args = "fake", algorithm, script, RunConfig(8, seeds=seeds), tmp_path, {"h": 4}
    with pytest.raises(InputError, match=words):
        rounds.run(*args, eval_only=True)
    kept = run(script, algorithm=algorithm, seeds=seeds, keep_last=True)
    assert list(kept.best_round) == [8] * len(seeds)


def test_a_split_that_is_missing_is_named():
    splits = {"train": None}
    with pytest.raises(InputError, match="splits: expected validation and test as"):
        rounds.run("fake", ALGORITHM, splits, RunConfig(1))


@pytest.mark.parametrize("given", ["resume", "eval_only"])
def test_what_needs_a_folder_is_refused_without(given):
    script = make_script(FALLING)
    with pytest.raises(InputError, match="resume and eval_only need the workdir"):
        rounds.run("fake", ALGORITHM, script, RunConfig(1), **{given: True})


def test_clients_in_another_order_are_refused():
    train = types.SimpleNamespace(client_ids=np.arange(3), client_weights=np.ones(3))
    other = types.SimpleNamespace(client_ids=np.array([0, 2, 1]))
    splits = {"train": train, "validation": train, "test": other}
    with pytest.raises(InputError, match="split test: client_ids stand in another"):
        rounds.run("fake", ALGORITHM, splits, RunConfig(1))


def test_a_random_key_in_a_state_is_refused_where_it_would_be_written(tmp_path):
    def with_key(round_):
        def run(state, data, key):
            inner, metrics = round_(state["of"], data, key)
            return {"of": inner, "noise": key}, metrics

        return run

    algorithm = ALGORITHM._replace(
        init=lambda key, data: {"of": ALGORITHM.init(key, data), "noise": key},
        round=with_key(ALGORITHM.round),
        evaluate=lambda state, data: ALGORITHM.evaluate(state["of"], data),
        predict=lambda state, data: ALGORITHM.predict(state["of"], data),
    )
    script = make_script(FALLING)
    with pytest.raises(InputError, match="a random key in noise, which no file"):
        run(script, tmp_path, algorithm=algorithm)
    assert list(run(script, algorithm=algorithm).best_round) == [8]


# --- Seeds with data of their own -----------------------------------------------------

DRAWN_SEEDS = (3, 7, 11)


def losses_are_drawn(path):
    return path[0].name.endswith("_losses")


@pytest.fixture
def drawn():
    """(script of all seeds, [script of each seed]); they share `first_keys`."""
    rng = np.random.default_rng(0)
    alone = [
        make_script(
            rng.permuted([FALLING] * 3, axis=1), DRAWN_SEEDS, rng.random((3, 8))
        )
        for _ in DRAWN_SEEDS
    ]
    together = {
        split: Script(
            alone[0][split].first_keys,
            jnp.stack([script[split].train_losses for script in alone]),
            jnp.stack([script[split].validation_losses for script in alone]),
        )
        for split in alone[0]
    }
    return together, alone


@pytest.mark.parametrize(
    "seeds_per_chunk",
    [2, *(pytest.param(x, marks=pytest.mark.slow) for x in (None, 1))],
)
def test_a_seed_with_its_own_data_is_as_if_alone(tmp_path, drawn, seeds_per_chunk):
    script, alone = drawn
    settings = {"seeds_per_chunk": seeds_per_chunk, "is_drawn": losses_are_drawn}
    together = run(script, tmp_path, seeds=DRAWN_SEEDS, **settings)
    outputs = programs.predict_seeds(
        ALGORITHM, together.best_state, script["test"], losses_are_drawn
    )
    assert len(set(together.best_round)) > 1
    lines = records(tmp_path)
    for i, seed in enumerate(DRAWN_SEEDS):
        folder = tmp_path / str(seed)
        single = run(alone[i], folder, seeds=(seed,))
        assert_same_bits(row(together.best_state, i), single.best_state)
        assert_same_bits(row(together.test, i), single.test)
        assert together.best_round[i] == single.best_round[0]
        own = programs.predict_seeds(ALGORITHM, single.best_state, alone[i]["test"])
        assert_same_bits(outputs[i : i + 1], own)
        for line, own_line in zip(lines, records(folder), strict=False):
            for key in ("train_loss", "validation_loss", "noise"):
                assert line[f"{key}_by_seed"][i] == own_line[key]


def test_a_resumed_run_of_drawn_data_ends_as_if_never_stopped(tmp_path, drawn):
    script, _ = drawn
    settings = {"seeds": DRAWN_SEEDS, "is_drawn": losses_are_drawn}
    run(script, tmp_path / "whole", **settings)
    run(script, tmp_path / "cut", **settings, num_rounds=3)
    run(script, tmp_path / "cut", **settings, resume=True)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert_same_bits(
        *(
            final_state(tmp_path / name, script, DRAWN_SEEDS, losses_are_drawn)
            for name in ("cut", "whole")
        )
    )


def test_a_split_as_a_seed_sees_it(drawn):
    script, alone = drawn
    for index in range(len(DRAWN_SEEDS)):
        own = of_seed(script["train"], index, losses_are_drawn)
        assert_same_bits(own, alone[index]["train"])
    assert_same_bits(of_seed(script["train"], 1), script["train"])


# --- What is written -----------------------------------------------------------------


def test_metrics_have_one_line_for_each_round(tmp_path):
    run(make_script(FALLING), tmp_path, eval_every=3, examples_per_round=10)
    lines = read_records(tmp_path / "metrics.jsonl")
    assert [(line["method"], line["round"]) for line in lines] == [
        ("fake", round_) for round_ in range(1, 9)
    ]
    evaluated = {line["round"] for line in lines if "validation_loss" in line}
    assert evaluated == {3, 6, 8}
    every = {"method", "round", "train_loss", "noise", "seconds", "windows_per_s"}
    scalars = {f"validation_{name}" for name in ("loss", "root", "walk")}
    for line in lines:
        more = scalars if line["round"] in evaluated else set()
        assert line.keys() == every | more
        assert line["train_loss"] == FALLING[line["round"] - 1]
        if more:
            root = np.sqrt(line["validation_loss"])
            assert line["validation_root"] == pytest.approx(root)
        assert line["windows_per_s"] == pytest.approx(10 / line["seconds"])


def test_the_rate_counts_the_seeds_that_still_run(tmp_path):
    script = make_script([FALLING, FALLS_TWICE], (3, 7))
    run(script, tmp_path, seeds=(3, 7), examples_per_round=10)
    lines = read_records(tmp_path / "metrics.jsonl")
    examples = [line["windows_per_s"] * line["seconds"] for line in lines]
    assert examples == pytest.approx([20] * 5 + [10] * 3)  # one stops after round 5


def test_the_seconds_of_all_rounds_are_those_of_the_run(tmp_path):
    """Also where three rounds are one call."""
    result = run(make_script(FALLING), tmp_path, eval_every=3)
    lines = read_records(tmp_path / "metrics.jsonl")
    assert sum(line["seconds"] for line in lines) == pytest.approx(result.seconds)


@pytest.mark.parametrize("on_nan", ["stop", "skip_client", "ignore"])
def test_a_round_of_nobody_has_no_training_loss(tmp_path, capsys, on_nan):
    """Of two seeds: in round 2 nobody took part in the first, in round 3 in both."""
    losses = np.array([[3, -np.inf, -np.inf, 1], [5, 4, -np.inf, 2]])
    script = make_script([FALLING] * 2, (0, 5), losses)
    run(script, tmp_path, seeds=(0, 5), num_rounds=4, on_nan=on_nan)
    lines = read_records(tmp_path / "metrics.jsonl")
    assert [line["train_loss"] for line in lines] == [4, 4, None, 1.5]
    by_seed = [[3, 5], [None, 4], [None, None], [1, 2]]
    assert [line["train_loss_by_seed"] for line in lines] == by_seed
    assert "round 3/4  validation_loss 7" in capsys.readouterr().out
    curve = plots.history(lines, "train_loss")
    assert (curve.x, curve.y) == ([1, 2, 4], [4, 4, 1.5])


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_seed_that_diverges_beside_a_round_of_nobody_ends_the_run(loss):
    script = make_script([FALLING] * 2, (0, 5), np.array([[3, -np.inf], [5, loss]]))
    with pytest.raises(InputError, match="the training loss of round 2 is not finite"):
        run(script, seeds=(0, 5), num_rounds=2)


@pytest.mark.parametrize("monitor", ["error", "weights"])
def test_what_chooses_the_round_is_one_number_of_the_evaluation(monitor):
    algorithm = ALGORITHM._replace(monitor=monitor)
    with pytest.raises(InputError, match=f"expected a metric '{monitor}', one number"):
        run(make_script(FALLING), algorithm=algorithm)


def test_the_rate_has_the_name_it_is_given(tmp_path, capsys):
    config = {"num_rounds": 2, "examples_per_round": 10, "rate_name": "images_per_s"}
    run(make_script(FALLING), tmp_path, **config)
    lines = read_records(tmp_path / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["images_per_s"] == pytest.approx(10 / line["seconds"])
        assert "windows_per_s" not in line
    out = capsys.readouterr().out
    assert out.count("images_per_s ") == 2
    assert out.count("compiling the round ...") == 1


def test_the_checkpoint_holds_what_the_next_round_reads(tmp_path):
    script = make_script([5, 4, 6, 6, 6, 6, 6, 6])
    result = run(script, tmp_path, num_rounds=4)
    state = final_state(tmp_path, script)
    assert [int(state.round[0]), int(state.best_round[0])] == [4, 2]
    assert float(state.best_loss[0]) == 4.0
    assert_same_bits(state.best_state, result.best_state)
    key_data = jax.random.key_data(jax.random.key(0))
    np.testing.assert_array_equal(state.key_data[0], key_data)
    assert state.state.momentum.dtype == jnp.bfloat16
    assert np.any(np.asarray(state.state.momentum[0], np.float32))


def test_nothing_is_written_without_a_folder_or_rounds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(make_script(FALLING), num_rounds=1)
    run(make_script(FALLING), tmp_path / "empty", num_rounds=0)
    assert list(tmp_path.iterdir()) == []


# --- Compilation ---------------------------------------------------------------------


COMPILING = tuple(
    f"Compiling jit({name})"
    for name in ("_init_seeds", "_advance_seeds", "_evaluate_seeds")
)


def test_first_states_are_compiled_quickly_to_the_same_bits():
    """Of a network with draws, statistics and an optimizer's state."""
    problem, seeds = Subgraphs(), np.arange(3, dtype=np.uint32)
    settings = {"task": Subgraphs.TASK | {"model": "gat"}}
    algorithm = get_method("fed_sgd").factory(make_config("fed_sgd", settings))
    found = programs.init(algorithm, seeds, problem.train, no_leaf)
    expected = jax.jit(lambda data: init_seeds(algorithm, seeds, data))(problem.train)
    jax.tree.map(npt.assert_array_equal, found, expected)


def test_nothing_is_compiled_twice(tmp_path, caplog):
    traced = []
    algorithm = make_algorithm(traced)
    script = make_script([FALLING] * 2, seeds=(0, 1))

    def compiled(**config):
        """Programs compiled and rounds traced by a run."""
        caplog.clear()
        del traced[:]
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            run(script, algorithm=algorithm, **config)
        messages = [record.getMessage() for record in caplog.records]
        return [m for m in messages if m.startswith(COMPILING)], len(traced)

    programs, num_traced = compiled(workdir=tmp_path / "a", num_rounds=1)
    assert (len(programs), num_traced > 0) == (3, True)  # init, advance, evaluate
    nothing = ([], 0)
    assert compiled(workdir=tmp_path / "b", num_rounds=5) == nothing
    assert compiled(workdir=tmp_path / "a", num_rounds=5, resume=True) == nothing
    assert compiled(workdir=tmp_path / "c", seeds=(1,)) == nothing


@pytest.mark.parametrize("num_devices", [0, 1, 2], ids=["no mesh", "one", "two"])
def test_the_ledger_and_the_program_share_the_trace_of_a_round(num_devices):
    """Whatever types the first state has: the numbers here have a weak one."""
    traced = []
    algorithm = make_algorithm(traced)

    def init(key, data):
        return algorithm.init(key, data)._replace(weights=jnp.full(5, 0.5))

    devices = jax.devices()[:num_devices]
    on = jax.set_mesh(mesh.make_mesh(devices=devices)) if devices else nullcontext()
    with on:
        run(make_script(FALLING), algorithm=algorithm._replace(init=init))
    assert len(traced) == 1
