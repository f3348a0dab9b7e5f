"""Several processes on loopback are one process with as many devices."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from fedjax_graph.core import processes, reporter
from fedjax_graph.core.errors import InputError
from tests.experiments import binary, test_cnfgnn

FLAGS = (
    "--dataset=synthetic",
    "--num_sensors=5",
    "--num_days=2",
)
OF_CNFGNN = ("--server_batch_size=56",)  # whose parts cut the test windows into 8
TITLES = {"gru_fedavg": "GRU + FedAvg", "cnfgnn": "CNFGNN"}
NUM_ROUNDS = 2
MANY_ROUNDS = 1000  # of a run that is going to be killed
AT_MOST_SECONDS = 60


class Machine(binary.Machine):
    MODULE = "experiments.cnfgnn"

    def __init__(self, folder):
        super().__init__(folder, self.MODULE, all_cores=True)

    def line(self, workdir, num_devices, num_rounds=NUM_ROUNDS, method="cnfgnn"):
        return [
            *FLAGS,
            *(OF_CNFGNN if method == "cnfgnn" else ()),
            *test_cnfgnn.small([method]),
            f"--methods={method}",
            f"--workdir={self.folder / workdir}",
            f"--num_cpu_devices={num_devices}",
            f"--num_rounds={num_rounds}",
            f"--patience={num_rounds}",
        ]

    def start(self, workdir, num_processes, num_devices, *flags, **settings):
        """Starts processes that run together, `num_devices` each."""
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        started = []
        for i in range(num_processes):
            line = [
                *self.line(workdir, num_devices, **settings),
                f"--coordinator=localhost:{port}",
                f"--num_processes={num_processes}",
                f"--process_id={i}",
                *flags,
            ]
            code = self._preamble + binary.RUN
            started.append(
                subprocess.Popen(
                    [sys.executable, "-W", "error", "-c", code, self.module, *line],
                    env=self._environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    def finish(self, started):
        """(status, output, errors) of each."""
        try:
            outputs = [process.communicate(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
        return [
            (process.returncode, *texts)
            for process, texts in zip(started, outputs, strict=True)
        ]

    def wait_for_rounds(self, workdir, num_rounds, started):
        path = self.folder / workdir / "metrics.jsonl"
        for _ in range(3000):
            if path.exists() and len(path.read_text().splitlines()) >= num_rounds:
                return
            assert all(process.poll() is None for process in started)
            time.sleep(0.1)
        raise AssertionError("no round in five minutes")


class SubgraphMachine(Machine):
    MODULE = "experiments.subgraphs"

    def line(self, workdir, num_devices):
        return [
            "--methods=fed_avg,fed_gta,fed_gcn",  # the last from outside neighbours
            "--num_clients=3",  # which the devices do not divide
            "--num_rounds=2",
            f"--workdir={self.folder / workdir}",
            f"--num_cpu_devices={num_devices}",
        ]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def alone(machine):
    """Method -> what one process of four devices wrote."""

    @functools.cache
    def run(method):
        name = f"{method} alone"
        done = machine.run(*machine.line(name, 4, method=method))
        assert (done.returncode, done.stderr) == (0, "")
        return machine.results(name)["methods"][method], machine.metrics(name)

    return run


def assert_close(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_close(*pair)
    elif isinstance(one, float):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("method", "num_processes"),
    [
        ("gru_fedavg", 2),
        pytest.param("cnfgnn", 2, marks=pytest.mark.slow),
        pytest.param("cnfgnn", 4, marks=pytest.mark.slow),
    ],
)
def test_processes_are_one_with_as_many_devices(machine, alone, method, num_processes):
    name = f"{method} of {num_processes}"
    started = machine.start(name, num_processes, 4 // num_processes, method=method)
    first, *others = machine.finish(started)
    assert [status for status, _, _ in (first, *others)] == [0] * num_processes
    assert [err for _, _, err in (first, *others)] == [""] * num_processes
    assert TITLES[method] in binary.table_of(first[1])
    assert all(TITLES[method] not in out for _, out, _ in others)
    found, metrics = machine.results(name)["methods"][method], machine.metrics(name)
    expected, expected_metrics = alone(method)
    assert_close(binary.without_timings(found), binary.without_timings(expected))
    assert_close(metrics, expected_metrics)
    for path in ("forecasts.png", "training_curves.png"):
        binary.assert_picture(machine.folder / name / path)


@pytest.mark.slow
def test_processes_have_their_own_clients_subgraphs(tmp_path):
    machine = SubgraphMachine(tmp_path)
    done = machine.finish(machine.start("two", 2, 1))
    assert [(status, err) for status, _, err in done] == [(0, "")] * 2
    assert machine.run(*machine.line("one", 2)).returncode == 0
    found, expected = (
        {name: entry["test"] for name, entry in machine.results(x)["methods"].items()}
        for x in ("two", "one")
    )
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "sign"),
    [
        (1, signal.SIGKILL),
        (0, signal.SIGKILL),
        (1, signal.SIGSTOP),
        (1, signal.SIGTERM),
    ],
)
def test_when_one_is_lost_the_other_ends_and_a_process_alone_resumes(
    machine, lost, sign
):
    name = f"lost {lost} by {sign}"
    started = machine.start(name, 2, 1, num_rounds=MANY_ROUNDS)
    try:
        machine.wait_for_rounds(name, NUM_ROUNDS, started)
        os.kill(started[lost].pid, sign)
        _, errors = started[1 - lost].communicate(timeout=AT_MOST_SECONDS)
        assert started[1 - lost].returncode != 0
    finally:
        for process in started:
            process.kill()
            process.communicate()
    *logged, last_line = errors.splitlines()  # logged: by XLA's own service, if any
    assert last_line.startswith("error: ") and "--resume" in last_line, errors
    assert not any("Traceback" in line for line in logged), errors
    done = [r["round"] for r in machine.metrics(name)]
    more = len(done) + 1
    line = machine.line(name, 1, MANY_ROUNDS)
    line[-2:] = [f"--num_rounds={more}", f"--patience={MANY_ROUNDS}"]
    resumed = machine.run(*line, "--resume")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "so far on 2 devices of 2 processes, and now on 1 of 1," in resumed.stdout
    rounds = [r["round"] for r in machine.metrics(name)]
    assert rounds == list(range(1, more + 1))


@pytest.mark.slow
def test_a_run_is_resumed_by_more_processes_and_by_fewer(machine):
    """One, two, four and two of them, a round each, are one that never stopped."""
    name, last = "moved", 4
    for num_rounds, num_processes in enumerate((1, 2, 4, 2), start=1):
        flags = () if num_rounds == 1 else ("--resume",)
        started = machine.start(
            name, num_processes, 4 // num_processes, *flags, num_rounds=num_rounds
        )
        done = machine.finish(started)
        assert [(status, err) for status, _, err in done] == [(0, "")] * num_processes
        is_said = f"and now on 4 of {num_processes}," in done[0][1]
        assert is_said == (num_rounds > 1)
    assert machine.run(*machine.line("unmoved", 4, last)).returncode == 0
    assert_close(machine.metrics(name), machine.metrics("unmoved"))
    found, expected = (
        machine.results(folder)["methods"]["cnfgnn"] for folder in (name, "unmoved")
    )
    assert_close(found["test"], expected["test"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num_processes=2",), "need --coordinator"),
        (("--coordinator=here:1",), "needs --num_processes and --process_id"),
        (
            ("--coordinator=here", "--num_processes=2", "--process_id=0"),
            "--coordinator=here: expected an address and a port",
        ),
        (
            ("--coordinator=here:1", "--num_processes=2", "--process_id=2"),
            "--process_id=2: expected 0 to --num_processes - 1",
        ),
        (("--coordinator=here:1", "--compile_for=v5e:2x2"), "compiles in one process"),
    ],
)
def test_options_that_make_no_sense_are_one_line(refusals, flags, words):
    binary.assert_refused(refusals[flags], [words])


@pytest.fixture(scope="module")
def refusals(machine, request):
    cases = [
        mark.args[1]
        for mark in test_options_that_make_no_sense_are_one_line.pytestmark
        if mark.name == "parametrize"
    ][0]
    lines = {flags: [*machine.line("none", 1), *flags] for flags, _ in cases}
    return machine.run_many(lines)


def test_one_process_is_the_first_and_waits_for_nobody():
    assert (processes.count(), processes.is_first()) == (1, True)
    assert processes.gather("here") == ["here"]
    processes.agree("all", "this")


def test_an_address_without_a_port_is_refused():
    with pytest.raises(InputError, match="coordinator=10.0.0.1: expected an address"):
        processes.join("10.0.0.1", 2, 0)


LOG = b"E1122 17:38:38.133886   16842 coordination_service_agent.cc:289] Polled it\n"
LAST = b"F1122 17:38:38.133892   16842 client.h:80] Terminating process because\n"
TRACE = b"    @     0x7f692e640634  absl::lts_20260107::log_internal::LogMessage\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([b"note: a\n", b"Traceback\n"], b"note: a\nTraceback\n"),
        ([b"note: a\n", LOG, LAST, TRACE], b"note: a\n" + reporter.ENDED),
        ([b"error: of its own\n", LOG, LAST, TRACE], b"error: of its own\n"),
        ([LOG, b"what followed\n"], LOG + b"what followed\n"),
    ],
)
def test_xlas_last_words_become_one_line(tmp_path, lines, expected):
    with open(tmp_path / "out", "w+b") as out:
        reporter.report(lines, out)
        out.seek(0)
        assert out.read() == expected


def test_only_the_first_writes(monkeypatch):
    written = []
    write = processes.by_first(written.append)
    write(json.dumps(1))
    monkeypatch.setattr(processes, "is_first", lambda: False)
    assert write(json.dumps(2)) is None
    assert written == ["1"]
