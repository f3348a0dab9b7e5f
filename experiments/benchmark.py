"""Measures a system's hot loops on this machine.

python -m experiments.benchmark --system=cnfgnn --shape=metr_la
python -m experiments.benchmark --system=cnfgnn --shape=pems_bay --json
python -m experiments.benchmark --system=cnfgnn --peer --peer_script=torch_peer.py
python -m experiments.benchmark --system=sfl
python -m experiments.benchmark --system=graphfl --dataset=cora --data_dir=FOLDER
python -m experiments.benchmark --system=fl_agcns --num_cpu_devices=1
python -m experiments.benchmark --system=graphfl --shape=tiny  # only whether it runs

Speeds vary with what else the machine does. Everything compared is measured in turn,
`--repeats` times over, and the medians are printed.
"""

import json

import jax
from absl import flags

from experiments import _flags, _run_flags
from experiments.benchmarks.cnfgnn import benchmark_cnfgnn
from experiments.benchmarks.fl_agcns import benchmark_fl_agcns
from experiments.benchmarks.graphfl import benchmark_graphfl
from experiments.benchmarks.sfl import benchmark_sfl
from fedjax_graph.driver.results import format_table

BENCHMARKS = {
    "cnfgnn": benchmark_cnfgnn,
    "sfl": benchmark_sfl,
    "graphfl": benchmark_graphfl,
    "fl_agcns": benchmark_fl_agcns,
}
SYSTEM = flags.DEFINE_enum("system", "cnfgnn", list(BENCHMARKS), "What to measure.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON line instead of a table.")


def main(argv: list[str]) -> None:
    del argv
    _run_flags.set_up_jax()
    figures = {
        "system": SYSTEM.value,
        "device": jax.devices()[0].device_kind,
        "precision": _run_flags.PRECISION.value,
        **BENCHMARKS[SYSTEM.value](),
    }
    if JSON.value:
        print(json.dumps(figures))
        return
    rows = [
        [key, f"{value:,.4g}" if isinstance(value, float) else str(value)]
        for key, value in figures.items()
    ]
    print(format_table(["figure", "value"], rows))


if __name__ == "__main__":
    _flags.run(main)
