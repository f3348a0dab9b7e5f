"""Each binary, killed again and again at moments that nobody chose."""

import signal
import subprocess
import time

import numpy as np
import pytest

from tests.experiments import fl_agcns_machine, test_cnfgnn, test_graphfl, test_sfl
from tests.experiments.binary import assert_same_run

NUM_KILLS = 25
SEED = 19


def cnfgnn(folder):
    return test_cnfgnn.Machine(folder), {}


def sfl(folder):
    return test_sfl.Machine(folder), {"methods": ("fed_avg", "sfl", "sfl_star")}


def graphfl(folder):
    return test_graphfl.Machine(folder), {"methods": test_graphfl.THREE}


def fl_agcns(folder):
    fl_agcns_machine.write_graph(folder)
    return fl_agcns_machine.Machine(folder), {"methods": ("fl_agcns", "gcn")}


def killed_after(machine, seconds, line):
    """Whether a process was killed then; else it has ended well by itself."""
    process = machine.start(*line)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    assert process.returncode == 0, errors
    return False


@pytest.mark.slow
@pytest.mark.parametrize("make", [cnfgnn, sfl, graphfl, fl_agcns])
def test_kills_at_random_moments_change_nothing(tmp_path, make):
    machine, settings = make(tmp_path)
    command = machine.traffic if make is sfl else machine.command_line
    assert machine.run(*command("first", **settings)).returncode == 0  # compiles
    start = time.monotonic()
    assert machine.run(*command("whole", **settings)).returncode == 0
    seconds = time.monotonic() - start
    rng, num_killed, num_finished = np.random.default_rng(SEED), 0, 0
    while num_killed < NUM_KILLS:
        name = f"run {num_finished}"
        line = command(name, "--resume", **settings)
        if killed_after(machine, rng.uniform(0.1, 1) * seconds, line):
            num_killed += 1
            continue
        assert_same_run(machine, name, "whole")
        num_finished += 1
    process = machine.run(*command(name, "--resume", **settings))
    assert process.returncode == 0, process.stderr
    assert_same_run(machine, name, "whole")


@pytest.mark.slow
@pytest.mark.parametrize("make", [cnfgnn, sfl, graphfl, fl_agcns])
def test_a_sigterm_ends_after_a_checkpoint_and_the_run_goes_on(tmp_path, make):
    machine, settings = make(tmp_path)
    command = machine.traffic if make is sfl else machine.command_line
    assert machine.run(*command("whole", **settings)).returncode == 0
    process = machine.start(*command("stopped", **settings))
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    if process.returncode:  # else it was too late
        assert process.returncode == 143
        assert errors.startswith("error: ended by SIGTERM") and "--resume" in errors
        assert len(errors.splitlines()) == 1
    process = machine.run(*command("stopped", "--resume", **settings))
    assert process.returncode == 0, process.stderr
    assert_same_run(machine, "stopped", "whole")
