"""Measures a system's hot loops on this machine.

python -m experiments.benchmark --system=cnfgnn --shape=metr_la
python -m experiments.benchmark --system=cnfgnn --shape=pems_bay --json
python -m experiments.benchmark --system=cnfgnn --peer --peer_script=YOURS.py
python -m experiments.benchmark --system=sfl
python -m experiments.benchmark --system=graphfl --dataset=cora --data_dir=FOLDER
python -m experiments.benchmark --system=fl_agcns --num_cpu_devices=1
python -m experiments.benchmark --system=clients --num_cpu_devices=1 --workdir=FOLDER
python -m experiments.benchmark --system=start
python -m experiments.benchmark --system=graphfl --shape=tiny  # only whether it runs

Speeds vary with what else the machine does. Everything compared is measured in turn,
`--repeats` times over, and the medians are printed.
"""

import dataclasses
import json
from typing import Any, ClassVar

from experiments import cli
from experiments.benchmarks.clients import benchmark_clients
from experiments.benchmarks.cnfgnn import benchmark_cnfgnn
from experiments.benchmarks.fl_agcns import benchmark_fl_agcns
from experiments.benchmarks.graphfl import benchmark_graphfl
from experiments.benchmarks.settings import BenchmarkSettings
from experiments.benchmarks.sfl import benchmark_sfl
from experiments.benchmarks.start import benchmark_start
from fedjax_graph.core import mesh
from fedjax_graph.driver import results
from fedjax_graph.driver.results import format_table

BENCHMARKS = {
    "cnfgnn": benchmark_cnfgnn,
    "sfl": benchmark_sfl,
    "graphfl": benchmark_graphfl,
    "fl_agcns": benchmark_fl_agcns,
    "clients": benchmark_clients,
    "start": benchmark_start,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkStudy(BenchmarkSettings):
    """Measurements of one system's hot loops."""

    keeps_programs: ClassVar[bool] = False  # compiling is measured

    def run_loaded(self) -> dict[str, Any]:
        """Measures, prints and returns the figures.

        Raises:
          InputError: one line, where a setting or a file does not fit.
        """
        self.check_refused()
        self.set_up_jax()
        figures = {
            "system": self.system,
            "device": mesh.device_kind(),
            "precision": results.precision(),
            **BENCHMARKS[self.system](self),
        }
        if self.json:
            print(json.dumps(figures))
            return figures
        rows = [
            [key, f"{value:,.4g}" if isinstance(value, float) else str(value)]
            for key, value in figures.items()
        ]
        print(format_table(["figure", "value"], rows))
        return figures


def main() -> None:
    """Measures what the command line says."""
    cli.run_study(BenchmarkStudy, __doc__)


if __name__ == "__main__":
    main()
