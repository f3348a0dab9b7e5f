"""Seconds from a quickstart's command to the end of its first round.

Each binary is started twice as a user starts it: with no compiled programs kept from
before, and with those of the first start. What the round itself takes, once compiled,
stands beside the second.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

from experiments.benchmarks.settings import BenchmarkSettings
from fedjax_graph.core.errors import InputError

POLL_SECONDS = 0.02


def benchmark_start(settings: BenchmarkSettings) -> dict[str, float]:
    """Cold and warm start of the binaries that `starts` names.

    Raises:
      InputError: if one ends before its first round.
    """
    figures = {}
    for name in settings.starts:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                seconds, of_round = first_round(
                    name, pathlib.Path(folder), kind, settings
                )
                figures[f"{name}_{kind}_s"] = seconds
            figures[f"{name}_warm_round_s"] = of_round
    return figures


def first_round(
    name: str, folder: pathlib.Path, kind: str, settings: BenchmarkSettings
) -> tuple[float, float]:
    """Seconds until a run's first line of metrics is there, and those in its round.

    Args:
      name: of the binary.
      folder: whose `programs` keeps what is compiled, beside the run's own.
      kind: of the start, which names the run's folder.
      settings: for the CPU's cores.

    Raises:
      InputError: if the process ends before.
    """
    command = [
        *(sys.executable, "-m", f"experiments.{name}"),
        f"--workdir={folder / kind}",
        "--eval_every=1",  # so that the first line of metrics follows the first round
        f"--compilation_cache={folder / 'programs'}",
    ]
    if settings.num_cpu_devices:
        command.append(f"--num_cpu_devices={settings.num_cpu_devices}")
    start = time.perf_counter()
    with open(folder / f"{kind}.log", "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while (line := _first_metrics(folder / kind)) is None:
                if process.poll() is not None:
                    log.seek(0)
                    last = log.read().strip().rpartition("\n")[2]
                    raise InputError(f"{name} ended before its first round: {last}")
                time.sleep(POLL_SECONDS)
            return time.perf_counter() - start, line["seconds"]
        finally:
            process.kill()
            process.wait()


def _first_metrics(workdir: pathlib.Path) -> dict[str, float] | None:
    for path in workdir.rglob("metrics.jsonl"):
        first, end, _ = path.read_text().partition("\n")
        if end:
            return json.loads(first)
    return None
