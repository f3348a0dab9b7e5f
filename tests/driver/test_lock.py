"""One run at a time in a folder, whatever became of the one before."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import lock

HOLD = """
import pathlib, sys, time
from fedjax_graph.driver import lock
with lock.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_one_is_told_who_holds_the_folder(tmp_path):
    with lock.locked(tmp_path):
        with pytest.raises(InputError) as caught, lock.locked(tmp_path):
            pass
        message = str(caught.value)
        assert message.startswith(f"workdir={tmp_path} is in use by process ")
        assert f"process {os.getpid()} on " in message and "\n" not in message
    assert list(tmp_path.iterdir()) == []
    with lock.locked(tmp_path):
        pass


def test_the_lock_of_a_dead_process_is_no_obstacle(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match=f"process {process.pid} on "),
            lock.locked(tmp_path),
        ):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / lock.NAME).exists()
    with lock.locked(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / lock.NAME).read_text()


def test_of_many_at_once_one_at_a_time_is_inside(tmp_path):
    inside, most, refused = [], [], []

    def work():
        for _ in range(50):
            try:
                with lock.locked(tmp_path):
                    inside.append(1)
                    time.sleep(1e-4)  # where the others try
                    most.append(len(inside))
                    inside.pop()
            except InputError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) + len(refused) == 200


def test_a_file_that_was_deleted_before_it_was_locked_is_no_lock(tmp_path, monkeypatch):
    """Of two that waited for a run to end one alone goes on."""
    flock = lock.fcntl.flock

    def after_another(file, operation):
        flock(file, operation)
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        (tmp_path / lock.NAME).unlink()  # as the run before does

    monkeypatch.setattr(lock.fcntl, "flock", after_another)
    with (
        lock.locked(tmp_path),
        pytest.raises(InputError, match="is in use by"),
        lock.locked(tmp_path),
    ):
        pass


def test_where_nothing_can_be_locked_a_note_says_so(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with lock.locked(tmp_path):
        pass
    out = capsys.readouterr().out
    assert out.startswith(f"note: {tmp_path / lock.NAME}: no lock (Operation not")
