"""Runs that are killed, damaged, prolonged or only scored."""

import shutil
import types

import jax
import pytest

from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import loop, rounds
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.driver.rounds import RunConfig
from fedjax_graph.driver.writers import MetricsWriter, read_records
from tests.damage import flip_in_digest
from tests.driver.scripted import (
    ALGORITHM,
    FALLING,
    FALLS_TWICE,
    NAN,
    WITH_PHASES,
    assert_same_bits,
    final_state,
    make_algorithm,
    make_script,
    records,
    run,
)

FULL_OPTIMIZATION = True  # in which one seed alone and several agree bit for bit


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
    for eval_every in (1, 2, 3):
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


def test_the_seconds_of_a_run_are_those_of_all_its_parts(tmp_path):
    script = make_script(FALLING)
    first = run(script, tmp_path, num_rounds=3)
    whole = run(script, tmp_path, resume=True)
    lines = read_records(tmp_path / "metrics.jsonl")
    seconds = [line["seconds"] for line in lines]
    assert len(seconds) == 8
    assert first.seconds == pytest.approx(sum(seconds[:3]))
    assert whole.seconds == pytest.approx(sum(seconds))


def saved_rounds(monkeypatch, seconds):
    """Rounds that get a checkpoint, by a clock on which each call takes `seconds`."""
    now, saved, save, get = [0.0], [], Checkpoints.save, jax.device_get

    def wait(figures):
        now[0] += seconds
        return get(figures)

    def saving(self, round_, tree):
        saved.append(round_)
        save(self, round_, tree)

    clock = {"monotonic": lambda: now[0], "perf_counter": lambda: now[0]}
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(**clock))
    monkeypatch.setattr(loop.jax, "device_get", wait)
    monkeypatch.setattr(Checkpoints, "save", saving)
    return saved


def test_checkpoints_are_made_when_they_are_due(tmp_path, monkeypatch, never_stopped):
    script, folders = never_stopped
    saved = saved_rounds(monkeypatch, seconds=5)
    config = {"seeds": SEEDS, "checkpoint_seconds": 15.0}
    with pytest.raises(Killed), monkeypatch.context() as patch:
        kill_in(patch, MetricsWriter, "write", 6, when="after")
        run(script, tmp_path, **config)
    assert saved == [3]
    run(script, tmp_path, **config, resume=True)
    assert saved == [3, 6, 8]
    assert_same_run(tmp_path, folders[1], script)


def test_a_long_round_has_a_checkpoint_of_its_own(tmp_path, monkeypatch, never_stopped):
    """The next one is not begun before it is made."""
    script, _ = never_stopped
    saved = saved_rounds(monkeypatch, seconds=20)
    run(script, tmp_path, seeds=SEEDS, checkpoint_seconds=15.0)
    assert saved == [*range(1, 9)]


@pytest.mark.parametrize(
    ("eval_every", "config", "backend", "is_ahead"),
    [
        (1, {"checkpoint_seconds": 1e6}, "cpu", True),
        (2, {"checkpoint_seconds": 1e6}, "cpu", True),
        (1, {"checkpoint_seconds": 0.0}, "cpu", False),  # a checkpoint after each call
        (1, {"checkpoint_seconds": 1e6, "on_nan": "skip_client"}, "cpu", False),
        (1, {"checkpoint_seconds": 1e6}, "gpu", False),  # where a call is waited for
    ],
)
def test_the_device_goes_on_while_the_host_writes(
    tmp_path, monkeypatch, never_stopped, eval_every, config, backend, is_ahead
):
    script, folders = never_stopped
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    done, call, write = [], loop.Loop._call, MetricsWriter.write

    def calling(self, round_, seed_state):
        done.append(("computes", self._num_rounds_from(round_) + round_))
        return call(self, round_, seed_state)

    def writing(self, record):
        done.append(("writes", record["round"]))
        write(self, record)

    monkeypatch.setattr(loop.Loop, "_call", calling)
    monkeypatch.setattr(MetricsWriter, "write", writing)
    run(script, tmp_path, seeds=SEEDS, eval_every=eval_every, **config)
    assert_same_run(tmp_path, folders[eval_every], script)
    second, third = 2 * eval_every, 3 * eval_every  # how long the first takes is new
    assert done.index(("writes", eval_every)) < done.index(("computes", second))
    order = [done.index(("computes", third)), done.index(("writes", second))]
    assert (order == sorted(order)) == is_ahead
    numbers = [number for what, number in done if what == "computes"]
    assert numbers == sorted(set(numbers))


def test_an_error_names_its_own_round_though_the_next_is_computed(tmp_path):
    script = make_script(FALLING, train_losses=[1, 1, NAN, 1, 1, 1, 1, 1])
    with pytest.raises(InputError, match="round 3 is not finite"):
        run(script, tmp_path, checkpoint_seconds=1e6)
    lines = records(tmp_path)
    assert [line["round"] for line in lines] == [1, 2]


@pytest.mark.parametrize(("eval_every", "before"), [(1, 7), (3, 6)])
@pytest.mark.parametrize("killed", [None, "before", "after"])
def test_a_damaged_checkpoint_is_made_again(
    tmp_path, monkeypatch, capsys, never_stopped, eval_every, before, killed
):
    """Also if the run is killed before or after the save that replaces it."""
    script, folders = never_stopped
    config = {"seeds": SEEDS, "eval_every": eval_every}
    workdir = shutil.copytree(folders[eval_every], tmp_path / "run")
    flip_in_digest(workdir / "fake" / "checkpoints" / "8")
    if killed:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_in(patch, Checkpoints, "save", 1, when=killed)
            run(script, workdir, **config, resume=True)
        assert f"going on from that of round {before}" in capsys.readouterr().out
    run(script, workdir, **config, resume=True)
    assert ("going on from" in capsys.readouterr().out) == (killed != "after")
    assert_same_run(workdir, folders[eval_every], script)


def test_a_run_without_a_checkpoint_is_not_scored(tmp_path, never_stopped):
    """Its folder is there from the moment on when it began to compile."""
    script, _ = never_stopped
    (tmp_path / "fake" / "checkpoints").mkdir(parents=True)
    config = RunConfig(8, patience=3, seeds=SEEDS)
    with pytest.raises(InputError, match="no finished round of a run to score"):
        rounds.run("fake", ALGORITHM, script, config, tmp_path, eval_only=True)


def test_nothing_stands_in_for_a_damaged_best_state(tmp_path, never_stopped):
    script, folders = never_stopped
    config = RunConfig(8, patience=3, seeds=SEEDS)
    workdir = shutil.copytree(folders[1], tmp_path / "run")
    flip_in_digest(workdir / "fake" / "checkpoints" / "8")
    with pytest.raises(InputError, match="checkpoints/8: the checkpoint is damaged"):
        rounds.run("fake", ALGORITHM, script, config, workdir, eval_only=True)
    flip_in_digest(workdir / "fake" / "checkpoints" / "7")
    with pytest.raises(InputError, match="no checkpoint is intact"):
        run(script, workdir, seeds=SEEDS, resume=True)
    assert records(workdir) == records(folders[1])


@pytest.mark.parametrize(("eval_every", "first"), [(1, 2), (1, 6), (3, 3), (3, 6)])
def test_a_run_may_be_prolonged(tmp_path, never_stopped, eval_every, first):
    script, folders = never_stopped
    config = {"seeds": SEEDS, "eval_every": eval_every}
    run(script, tmp_path, **config, num_rounds=first)
    run(script, tmp_path, **config, resume=True)
    assert_same_run(tmp_path, folders[eval_every], script)


def test_a_run_is_not_cut_to_fewer_rounds(tmp_path, never_stopped):
    """Its results would be those of the more, under a command of the fewer."""
    script, folders = never_stopped
    workdir = shutil.copytree(folders[1], tmp_path / "run")
    with pytest.raises(InputError) as caught:
        run(script, workdir, seeds=SEEDS, num_rounds=7, resume=True)
    assert str(caught.value) == (
        "num_rounds=7: fake has 8 rounds on record; take no fewer, or begin anew in "
        "another folder"
    )
    assert records(workdir) == records(folders[1])


def test_seeds_that_stopped_do_not_go_on_beside_later_rounds(tmp_path):
    """One at round 5, its best 2 and patience 3; the other went on to 6, the last."""
    script, config = make_script([FALLING, FALLS_TWICE], SEEDS), {"seeds": SEEDS}
    run(script, tmp_path, **config, num_rounds=6)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError) as caught:
        run(script, tmp_path, **config, patience=100, resume=True)
    assert str(caught.value) == (
        "fake: patience=100 would have seeds that stopped (seed 5 at round 5) go on "
        "beside round 6: leave patience as it was, or run the seeds apart"
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run(script, tmp_path, **config, resume=True)
    assert [line["round"] for line in records(tmp_path)] == [*range(1, 9)]


def test_seeds_that_stopped_together_may_be_given_more_patience(tmp_path):
    script, config = make_script([FALLS_TWICE] * 2, SEEDS), {"seeds": SEEDS}
    run(script, tmp_path / "cut", **config)
    run(script, tmp_path / "cut", **config, patience=100, resume=True)
    run(script, tmp_path / "whole", **config, patience=100)
    assert_same_run(tmp_path / "cut", tmp_path / "whole", script)


def test_a_run_prolonged_between_evaluations_says_that_it_may_differ(tmp_path, capsys):
    """Its best round is 4, which one that did not end there never evaluates."""
    script = make_script([9, 8, 7, 1, 5, 4, 4, 4])
    run(script, tmp_path, num_rounds=4, eval_every=3)
    assert "note" not in capsys.readouterr().out
    prolonged = run(script, tmp_path, eval_every=3, resume=True, patience=9)
    (note,) = [x for x in capsys.readouterr().out.splitlines() if "note: " in x]
    assert note == (
        "note: fake: the run so far ended with round 4, which it evaluated beside "
        "those of eval_every=3; one that did not end there may have another best round "
        "and stop elsewhere"
    )
    whole = run(script, eval_every=3, patience=9)
    assert (prolonged.best_round, whole.best_round) == ([4], [6])


@pytest.mark.parametrize("eval_every", [1, 3])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_run_killed_in_either_phase_ends_as_if_never_stopped(
    tmp_path, monkeypatch, eval_every, calls
):
    """The last phase begins in round 4, and one seed's first rounds are its best."""
    script = make_script([FALLING, [1.0, 2, 2, 9, 8, 9, 9, 9]], SEEDS)
    config = {"seeds": SEEDS, "eval_every": eval_every, "algorithm": WITH_PHASES}
    run(script, tmp_path / "whole", **config)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_in(patch, Checkpoints, "save", calls, when="after")
        run(script, tmp_path / "cut", **config)
    if (eval_every, calls) == (1, 2):  # its best state so far can be scored
        args = "fake", WITH_PHASES, script, RunConfig(8, seeds=SEEDS)
        scored = rounds.run(*args, tmp_path / "cut", {"h": 4}, eval_only=True)
        assert list(scored.best_round) == [2, 1]
        assert list(scored.test["loss"]) == [108, 101]
    run(script, tmp_path / "cut", **config, resume=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole", script)


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


@pytest.mark.parametrize("how", ["resume", "eval_only"])
def test_other_seeds_are_refused(tmp_path, how):
    """Also of a run whose settings do not name them."""
    run(make_script(FALLING), tmp_path, num_rounds=2)
    script, config = make_script(FALLING, seeds=(7,)), RunConfig(3, seeds=(7,))
    args = "fake", ALGORITHM, script, config, tmp_path, {"h": 4}
    with pytest.raises(InputError, match=r"seeds=\(7,\): the checkpoint is of others"):
        rounds.run(*args, **{how: True})


def test_what_computes_may_change_and_is_said_to(tmp_path, capsys):
    script = make_script(FALLING)
    places = (
        {"num_devices": 2, "num_processes": 1, "precision": "float32"},
        {"num_devices": 2, "num_processes": 1, "precision": "tf32"},
        {"num_devices": 4, "num_processes": 2, "precision": "tf32"},
    )
    notes = (
        [],
        ["products so far in float32, and now in tf32"],
        ["so far on 2 devices of 1 processes, and now on 4 of 2, which agree up to"],
    )
    for number, (settings, expected) in enumerate(zip(places, notes, strict=True)):
        config = RunConfig(2 + number)
        args = "fake", ALGORITHM, script, config, tmp_path, settings
        rounds.run(*args, resume=number > 0)
        lines = capsys.readouterr().out.splitlines()
        found = [line for line in lines if line.startswith("note: ")]
        assert len(found) == len(expected)
        assert all(x in line for x, line in zip(expected, found, strict=True))


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
    scored = score(script, tmp_path)
    assert_same_bits(scored.test, trained.test)
    assert scored[3:6] == trained[3:6]  # rounds, bytes and seconds
    assert scored.communication.until(1).up > 0
    other = score(script | {"test": script["validation"]}, tmp_path)
    assert other.test["loss"] == [1.0]
    assert sorted(tmp_path.rglob("*")) == files
