"""Binaries run as a user runs them, for tests.

Starting a process and compiling costs seconds, so processes share their imports and the
compilation cache of the tests (of the very programs, so results stay bit for bit),
command lines that are not to be killed run one after another in one process, loops are
compiled as loops, and a process has one core, so one device, unless it is asked for
more.
"""

import json
import os
import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
from absl import flags

from tests.experiments import forks

RATES = ("windows_per_s", "images_per_s", "client_steps_per_s")
TIMINGS = ("seconds", "compile_seconds", "inference_seconds", *RATES)

# What each process does first. Only the count of operations has to see each step.
QUICK = """
import gc, os, jax
gc.set_threshold(100_000, 50, 100)
from fedjax_graph.algorithms.cnfgnn import flops
scan, count = jax.lax.scan, flops.count
def rolled(*args, unroll=1, **named):
    return scan(*args, **named)
def unrolled_count(*args):
    jax.lax.scan = scan
    try:
        return count(*args)
    finally:
        jax.lax.scan = rolled
jax.lax.scan, flops.count = rolled, unrolled_count
if os.environ.get("ONE_CORE"):
    os.sched_setaffinity(0, {int(os.environ["ONE_CORE"])})
"""

RUN = """
import runpy, sys
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""

# Runs command lines one after another; gives status, output and errors of each.
MANY = """
import importlib, json, os, sys, tempfile
from absl import flags

binary = importlib.import_module(sys.argv[1])
answers = []
for line in json.load(sys.stdin):
    flags.FLAGS.unparse_flags()
    sys.argv[1:] = line
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        try:
            status = binary.main()
        except SystemExit as error:
            status = error.code
        except BaseException as error:
            status = repr(error)
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        out.seek(0), err.seek(0)
        answers.append([status or 0, out.read(), err.read()])
print(json.dumps(answers))
"""

EVERY_ROUND = "--checkpoint_seconds=0"  # has a checkpoint
# Kills itself before anything is renamed to a path that ends so.
KILLED = """
import os, runpy, signal, sys
module, end = sys.argv.pop(1), sys.argv.pop(1)
def hook(event, args):
    if event == "os.rename" and str(args[1]).endswith(end):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
runpy.run_module(module, run_name="__main__")
"""


class Machine:
    """A folder with datasets and runs of a binary, and the processes started there.

    `preamble` is run before the binary. With `all_cores` a process has as many devices.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        module: str,
        preamble: str = "",
        all_cores: bool = False,
    ):
        self.folder = folder
        self.module = module
        self._preamble = QUICK + preamble
        self._environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("FEDJAX_GRAPH_")
        } | {
            "FEDJAX_GRAPH_CACHE": str(folder / "cache"),
        }
        if not all_cores and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            worker = int(
                os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
            )
            self._environment["ONE_CORE"] = str(cores[worker % len(cores)])

    def python(self, program, *arguments, environment=None, **options):
        return forks.run(
            self._preamble + program,
            *arguments,
            environment=self._environment | (environment or {}),
            **options,
        )

    def run(self, *command_line, **options):
        return self.python(RUN, self.module, *command_line, **options)

    def start(self, *command_line):
        """A run that goes on meanwhile."""
        code = self._preamble + RUN
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, self.module, *command_line],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_killed(self, path, *command_line):
        """A run that dies before anything is renamed to a path that ends so."""
        return self.python(KILLED, self.module, path, *command_line, EVERY_ROUND)

    def run_many(self, command_lines):
        """Status, output and errors of each, by name."""
        lines = json.dumps(list(command_lines.values()))
        process = self.python(MANY, self.module, input=lines)
        assert process.returncode == 0, process.stderr
        return dict(zip(command_lines, json.loads(process.stdout), strict=True))

    def outputs(self, command_lines):
        """What command lines that are in order printed, by name."""
        printed = {}
        for name, (status, out, err) in self.run_many(command_lines).items():
            assert (status, err) == (0, ""), f"{name}: status {status}: {err}"
            printed[name] = out
        return printed

    def results(self, workdir):
        return json.loads((self.folder / workdir / "results.json").read_text())

    def metrics(self, workdir):
        """Lines of `metrics.jsonl` without clock times."""
        lines = (self.folder / workdir / "metrics.jsonl").read_text().splitlines()
        return [without_timings(json.loads(line)) for line in lines]


def forget_flags():
    """Lets this process define the flags of another binary, and none beside."""
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("experiments."):
            for flag in list(defined):
                delattr(flags.FLAGS, flag.name)
    flags.FLAGS.unparse_flags()


def write_graph(path, num_nodes, num_classes, num_features, **changes):
    """Classes in turn, edges within a class, and features that tell it in part."""
    rng = np.random.default_rng(0)
    senders = np.repeat(np.arange(num_nodes), 2)
    steps = num_classes * rng.integers(1, num_nodes // num_classes, len(senders))
    labels = np.arange(num_nodes) % num_classes
    features = rng.normal(size=(num_nodes, num_features))
    features[np.arange(num_nodes), labels] += 1
    arrays = {
        "edges": np.stack([senders, (senders + steps) % num_nodes], axis=1),
        "labels": labels,
        "features": features.astype(np.float32),
    }
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})


def settings_of(machine, workdir):
    """What a run was told, whatever its folder."""
    settings = json.dumps(machine.results(workdir)["settings"])
    return json.loads(settings.replace(str(machine.folder / workdir), "folder"))


def assert_same_run(machine, one, other):
    """Two folders with the same lines, bit for bit, and the same results."""
    assert machine.metrics(one) == machine.metrics(other)
    found, expected = (machine.results(name)["methods"] for name in (one, other))
    assert list(found) == list(expected)
    for method, entry in expected.items():
        assert without_timings(found[method]) == without_timings(entry), method


def without_timings(entry):
    """What stands in `results.json`, and in what is in there, without clock times."""
    if not isinstance(entry, dict):
        return entry
    return {k: without_timings(v) for k, v in entry.items() if k not in TIMINGS}


def table_of(output):
    """Rows below the ruler: the title, and the other cells."""
    lines = output.splitlines()
    (ruler,) = [i for i, line in enumerate(lines) if line.startswith("---")]
    rows = {}
    for line in lines[ruler + 1 :]:
        title, *cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if cells:  # else the last line, which names the folder
            rows[title] = cells
    return rows


def assert_picture(path):
    """An image that is not of one colour."""
    assert np.ptp(matplotlib.image.imread(path)) > 0.5


def assert_refused(answer, words):
    """A bad command line: one line on stderr with these words, and status 2."""
    status, out, err = answer
    assert status == 2, (status, out, err)
    assert "Traceback" not in out, out
    assert len(err.splitlines()) == 1, err
    line = err.strip()
    assert line.startswith("error: "), line
    assert len(line) < 700
    assert all(word in line for word in words), line


def assert_unread_is_said(arguments, stderr):
    """Runs Python with an output that nobody reads, to which errors may go as well."""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, *arguments],
        stdout=write,
        stderr=stderr,
        text=True,
        check=False,
    )
    os.close(write)
    line = "error: nobody reads the output any more\n"
    said = line if stderr == subprocess.PIPE else None
    assert (process.returncode, process.stderr) == (141, said)
