"""Files that a kill cannot tear, TensorBoard, and progress."""

import contextlib
import io
import json
import os
import termios
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import writers
from fedjax_graph.driver.writers import (
    MetricsWriter,
    Progress,
    check_monitored,
    read_records,
)


def make_record(round_, method="cnfgnn", **figures):
    return {"method": method, "round": round_, "train_loss": 1.0 / round_, **figures}


def write_rounds(folder, numbers, method="cnfgnn", restored_round=0, **figures):
    writer = MetricsWriter(folder, method, restored_round)
    for round_ in numbers:
        writer.write(make_record(round_, method, **figures))
    writer.close()


def rounds_of(folder, method="cnfgnn"):
    records = read_records(folder / "metrics.jsonl")
    return [record["round"] for record in records if record["method"] == method]


def test_arrays_become_json_and_what_is_not_finite_null():
    tree = {
        1: jnp.float32(0.5),
        "list": (np.arange(2), np.float64("nan"), float("-inf")),
        "plain": [True, None, "text", 3],
    }
    assert writers.to_jsonable(tree) == {
        "1": 0.5,
        "list": [[0, 1], None, None],
        "plain": [True, None, "text", 3],
    }


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    writers.write_atomically(path, "old")

    def die(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", die)
        writers.write_atomically(path, "new and longer")
    assert path.read_text() == "old"
    writers.write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("torn", ['{"method": "cnfgnn", "rou', "\0\0\0\0", "{", "\n"])
def test_torn_lines_are_left_out_and_mended(tmp_path, torn):
    write_rounds(tmp_path, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    assert rounds_of(tmp_path) == [1, 2]
    write_rounds(tmp_path, [3], restored_round=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


FOREIGN = (
    *(b'{"x": 1}', b"[1]", b"\xff\xfe", b"3", b"[" * 10_000),
    *(b'{"method": "a", "round": "1"}', b'{"method": ["a"], "round": 1}'),
)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_line_is_one_clear_line(tmp_path, foreign):
    write_rounds(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + foreign + b"\n" + second)
    with pytest.raises(InputError, match="metrics.jsonl: line 2 is no record"):
        read_records(path)


def test_lost_lines_are_noted(tmp_path, capsys):
    write_rounds(tmp_path, [1, 2])
    write_rounds(tmp_path, [1], method="gru_fedavg")
    writers.note_missing_rounds(tmp_path, "cnfgnn", 2)
    assert not capsys.readouterr().out
    for method, last in (("cnfgnn", 2), ("gru_fedavg", 1), ("fed_avg", 0)):
        writers.note_missing_rounds(tmp_path, method, 3)
        out = capsys.readouterr().out
        assert out.startswith("note: ") and f"lines of {method}" in out
        assert out.endswith(f"round 3, its last line of round {last}\n")


def test_lines_beyond_the_restored_round_are_dropped(tmp_path):
    write_rounds(tmp_path, [1, 2, 3], method="gru_fedavg")
    write_rounds(tmp_path, [1, 2, 3, 4])
    write_rounds(tmp_path, [3, 4, 5], restored_round=2)
    assert rounds_of(tmp_path) == [1, 2, 3, 4, 5]
    assert rounds_of(tmp_path, "gru_fedavg") == [1, 2, 3]


def test_lines_are_json_without_nan(tmp_path):
    figures = {"validation_loss": float("nan"), "by_seed": np.array([1.0, np.inf])}
    write_rounds(tmp_path, [1], **figures)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=refuse)
    assert line == make_record(1, validation_loss=None, by_seed=[1.0, None])


def test_tensorboard_reads_each_step_once(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own, on import
        accumulators = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator"
        )
    write_rounds(tmp_path, [1, 2, 3, 4], validation_loss=float("nan"))
    write_rounds(tmp_path, [3, 4, 5], restored_round=2, validation_loss=2.0)
    folder = tmp_path / "tensorboard" / "cnfgnn"
    accumulator = accumulators.EventAccumulator(str(folder))
    accumulator.Reload()
    events = accumulator.Scalars("train_loss")
    assert [event.step for event in events] == [1, 2, 3, 4, 5]
    assert [event.value for event in events] == pytest.approx(
        [1 / round_ for round_ in range(1, 6)]
    )
    evaluated = accumulator.Scalars("validation_loss")
    assert [event.step for event in evaluated] == [3, 4, 5]


def test_lines_without_what_chooses_the_round_are_refused(tmp_path):
    write_rounds(tmp_path, [1], validation_loss=2.0)
    check_monitored(tmp_path, "cnfgnn", "loss")
    check_monitored(tmp_path, "another", "error")
    with pytest.raises(InputError, match="round 1 of cnfgnn has no validation_error"):
        check_monitored(tmp_path, "cnfgnn", "error")


@contextlib.contextmanager
def terminal(columns):
    """A terminal's file, and a function that closes it and reads all it was given."""
    main, end = os.openpty()
    termios.tcsetwinsize(end, (24, columns))

    def read():
        file.close()
        written = b""
        with contextlib.suppress(OSError):  # EIO, where all was read
            while piece := os.read(main, 10_000):
                written += piece
        return written.decode()

    with open(end, "w") as file:
        yield file, read
    os.close(main)


SHOWN = ("train_loss", "validation_loss")
RECORD = make_record(4, validation_loss=0.12345, windows_per_s=1234.0, other=1.0)


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    progress = Progress("cnfgnn", 8, 3, SHOWN)
    progress.update(RECORD)
    progress.update(make_record(5, validation_loss=float("nan")))
    progress.close()
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "cnfgnn  round 4/8  train_loss 0.25  validation_loss 0.1235  "
        "windows_per_s 1234",
        "cnfgnn  round 5/8  train_loss 0.2",
    ]


def test_progress_shows_whatever_rate_there_is(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    progress = Progress("sfl", 8, 3, SHOWN)
    progress.update(make_record(4, images_per_s=513.83, rows_per_s=2.0, per_s_not=7.0))
    progress.close()
    assert capsys.readouterr().out.splitlines() == [
        "sfl  round 4/8  train_loss 0.25  images_per_s 513.8  rows_per_s 2"
    ]


@pytest.mark.parametrize("is_kept", [False, True], ids=["seen", "kept"])
def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch, is_kept):
    """And lines as well where stdout goes to a file."""
    with terminal(100) as (file, read):
        monkeypatch.setattr("sys.stderr", file)
        if not is_kept:
            monkeypatch.setattr("sys.stdout", file)
        progress = Progress("cnfgnn", 8, 3, SHOWN)
        progress.note("cnfgnn: compiling the round ...")
        progress.update(RECORD)
        progress.close()
        shown = read()
    assert "compiling the round ..." in shown
    assert "4/8" in shown and "train_loss=0.25" in shown
    lines = capsys.readouterr().out.splitlines()
    assert [line[:17] for line in lines] == (
        ["cnfgnn: compiling", "cnfgnn  round 4/8"] if is_kept else []
    )


def test_a_terminal_of_no_columns_gets_lines(monkeypatch):
    with terminal(0) as (file, read):
        monkeypatch.setattr("sys.stderr", file)
        monkeypatch.setattr("sys.stdout", file)
        progress = Progress("cnfgnn", 8, 3, SHOWN)
        progress.update(RECORD)
        progress.close()
        assert read().startswith("cnfgnn  round 4/8  train_loss 0.25  ")


def test_nothing_is_left_of_what_could_not_be_written(tmp_path, monkeypatch):
    def fill(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", fill)
        writers.write_atomically(tmp_path / "results.json", "long")
    assert not list(tmp_path.iterdir())
