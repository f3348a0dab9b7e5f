"""The driver on a method whose losses are scripted."""

import json
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.core import communication
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import nothing
from fedjax_graph.driver import rounds
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.rounds import RunConfig
from fedjax_graph.driver.writers import MetricsWriter, read_records

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


def make_algorithm(traced: list | None = None) -> FederatedAlgorithm:
    """The scripted method; each tracing of `round` leaves an entry in `traced`."""

    def init(key, data):
        same = jnp.all(data.first_keys == jax.random.key_data(key), axis=-1)
        momentum = jnp.zeros(5, jnp.bfloat16)
        row = jnp.argmax(same).astype(jnp.int32)
        return ScriptState(row, jnp.int32(0), jax.random.normal(key, (5,)), momentum)

    def round_(state, data, key):
        if traced is not None:
            traced.append(1)
        noise = communication.up(jax.random.normal(key, (5,)))
        state = ScriptState(
            state.row,
            state.round + 1,
            state.weights + noise / 3,
            (0.9 * state.momentum + noise).astype(jnp.bfloat16),
        )
        loss = data.train_losses[state.row, state.round - 1]
        return state, {"train_loss": loss, "noise": jnp.sum(noise)}

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

    return FederatedAlgorithm(init, round_, evaluate, predict)


ALGORITHM = make_algorithm()


@pytest.fixture(scope="module")
def quick_compiles():
    """Nothing: one seed alone and several agree bit for bit as users have them."""


def run(script, workdir=None, *, algorithm=ALGORITHM, resume=False, **config):
    config = RunConfig(**{"num_rounds": len(FALLING), "patience": 3} | config)
    return rounds.run(
        "fake", algorithm, script, config, workdir, {"h": 4}, resume=resume
    )


def final_state(workdir, script, seeds=(0,), is_drawn=nothing):
    like = rounds.abstract_seeds(ALGORITHM, seeds, script["train"], is_drawn)
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


# --- Early stopping and the best state -----------------------------------------------


@pytest.mark.parametrize(
    ("losses", "config", "best", "last"),
    [
        (FALLING, {}, 8, 8),
        ([3, 2, 1, 2, 2, 2, 2, 2], {}, 3, 6),
        ([1, 1, 1, 1, 1, 1, 1, 1], {"patience": 2}, 1, 3),  # as good is not better
        ([3, 4, 2, 4, 4, 1, 4, 4], {"patience": 2}, 3, 5),
        ([2, NAN, 1, NAN, NAN, 0, 0, 0], {"patience": 2}, 3, 5),
        ([NAN] * 8, {"patience": 2}, 0, 2),
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


@pytest.mark.parametrize("seeds_per_chunk", [None, 1, 2])
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


def test_the_ledger_counts_one_round():
    assert run(make_script(FALLING)).communication == communication.Bytes(up=5 * 4)


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


@pytest.mark.parametrize("seeds_per_chunk", [None, 1, 2])
def test_a_seed_with_its_own_data_is_as_if_alone(tmp_path, drawn, seeds_per_chunk):
    script, alone = drawn
    settings = {"seeds_per_chunk": seeds_per_chunk, "is_drawn": losses_are_drawn}
    together = run(script, tmp_path, seeds=DRAWN_SEEDS, **settings)
    outputs = rounds.predict_seeds(
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
        own = rounds.predict_seeds(ALGORITHM, single.best_state, alone[i]["test"])
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
        own = rounds.of_seed(script["train"], index, losses_are_drawn)
        assert_same_bits(own, alone[index]["train"])
    assert_same_bits(rounds.of_seed(script["train"], 1), script["train"])


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
    assert capsys.readouterr().out.count("images_per_s ") == 2


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


# --- Resuming ------------------------------------------------------------------------


class Killed(BaseException):
    """As a kill: no handler of errors sees it."""


def kill_in(monkeypatch, owner, name, call, *, when):
    """Dies in the `call`-th call of a method, before it, after it, or half way."""
    real, calls = getattr(owner, name), []

    def method(self, *args):
        calls.append(1)
        if len(calls) < call:
            return real(self, *args)
        if when == "after":
            real(self, *args)
        if when == "half way":
            with open(self._path, "a") as file:
                file.write('{"method": "fake", "round": 4, "train_lo')
        raise Killed

    monkeypatch.setattr(owner, name, method)


SEEDS = (0, 5)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """For each `eval_every`: the folder of a run of two seeds, one of which stops."""
    script = make_script([FALLING, FALLS_TWICE], SEEDS)
    folders = {}
    for eval_every in (1, 3):
        folders[eval_every] = tmp_path_factory.mktemp("whole")
        run(script, folders[eval_every], seeds=SEEDS, eval_every=eval_every)
    return script, folders


def assert_same_run(workdir, reference, script):
    assert records(workdir) == records(reference)
    assert_same_bits(
        final_state(workdir, script, SEEDS), final_state(reference, script, SEEDS)
    )


@pytest.mark.parametrize("eval_every", [1, 3])
@pytest.mark.parametrize(
    ("owner", "name", "calls", "when"),
    [
        (Checkpoints, "save", 1, "before"),  # no checkpoint at all
        (Checkpoints, "save", 2, "before"),  # lines ahead of the checkpoint
        (Checkpoints, "save", 2, "after"),
        (Checkpoints, "save", 3, "after"),  # the last one, where eval_every is 3
        (MetricsWriter, "write", 4, "before"),
        (MetricsWriter, "write", 4, "half way"),  # a torn line
        (MetricsWriter, "write", 5, "after"),
    ],
)
def test_a_killed_run_ends_as_if_never_stopped(
    tmp_path, monkeypatch, never_stopped, eval_every, owner, name, calls, when
):
    script, folders = never_stopped
    config = {"seeds": SEEDS, "eval_every": eval_every}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_in(patch, owner, name, calls, when=when)
        run(script, tmp_path, **config)
    run(script, tmp_path, **config, resume=True)
    assert_same_run(tmp_path, folders[eval_every], script)


@pytest.mark.parametrize(("eval_every", "first"), [(1, 2), (1, 6), (3, 3), (3, 6)])
def test_a_run_may_be_prolonged(tmp_path, never_stopped, eval_every, first):
    script, folders = never_stopped
    config = {"seeds": SEEDS, "eval_every": eval_every}
    run(script, tmp_path, **config, num_rounds=first)
    run(script, tmp_path, **config, resume=True)
    assert_same_run(tmp_path, folders[eval_every], script)


def test_a_finished_run_is_not_trained_again(tmp_path):
    script, traced = make_script([3, 2, 1, 2, 2, 2, 2, 2]), []
    algorithm = make_algorithm(traced)
    first = run(script, tmp_path, algorithm=algorithm)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = run(script, tmp_path, algorithm=algorithm, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert_same_bits(first.best_state, again.best_state)
    assert_same_bits(first.test, again.test)
    assert list(again.best_round) == list(first.best_round)
    assert again[3:6] == first[3:6]  # rounds, bytes and seconds


def test_other_settings_are_refused_by_name(tmp_path):
    script = make_script(FALLING)
    run(script, tmp_path, num_rounds=2)
    with pytest.raises(InputError, match="saved with h=4, not 5;"):
        rounds.run(
            "fake", ALGORITHM, script, RunConfig(3), tmp_path, {"h": 5}, resume=True
        )


def test_a_run_is_not_written_over(tmp_path):
    script = make_script(FALLING)
    run(script, tmp_path, num_rounds=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="holds another run"):
        run(script, tmp_path, num_rounds=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_scoring_only_reads(tmp_path):
    script, config = make_script([3, 1, 2, 2, 2, 2, 2, 2]), RunConfig(8, patience=3)

    def score(splits, folder):
        return rounds.run("fake", ALGORITHM, splits, config, folder, eval_only=True)

    with pytest.raises(InputError, match="no finished round"):
        score(script, tmp_path)
    assert list(tmp_path.iterdir()) == []
    trained = run(script, tmp_path)
    files = sorted(tmp_path.rglob("*"))
    assert_same_bits(score(script, tmp_path).test, trained.test)
    other = score(script | {"test": script["validation"]}, tmp_path)
    assert other.test["loss"] == [1.0]
    assert sorted(tmp_path.rglob("*")) == files


# --- Compilation ---------------------------------------------------------------------


COMPILING = tuple(
    f"Compiling jit({name})"
    for name in ("init_seeds", "_advance_seeds", "_evaluate_seeds")
)


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
