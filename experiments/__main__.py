"""The binaries by name: `fedjax-graph cnfgnn --dataset=metr_la`.

fedjax-graph cnfgnn       sensors with a graph network on the server, and baselines
fedjax-graph sfl          personalised methods on traffic or images
fedjax-graph graphfl      few node labels, by meta-learning
fedjax-graph fl_agcns     search for graph networks
fedjax-graph subgraphs    the field's methods on the parts of one graph
fedjax-graph robustness   clients that attack, aggregator by aggregator
fedjax-graph datasets     what data there is; fetch and count it
fedjax-graph pretrained   models that come with the package; make one of a run
fedjax-graph tables       runs beside the papers' tables
fedjax-graph benchmark    speed on this machine
fedjax-graph doctor       what is broken in an installation, and what to do

`fedjax-graph NAME --help` lists the flags of one. `python -m experiments.NAME` is the
same, and so is `python -m fedjax_graph.doctor`.
"""

import importlib
import sys

import fedjax_graph
from fedjax_graph.core import exits
from fedjax_graph.core.errors import meant

MODULES = {
    **{
        name: f"experiments.{name}"
        for name in (
            *("cnfgnn", "sfl", "graphfl", "fl_agcns", "subgraphs", "robustness"),
            *("datasets", "benchmark", "pretrained"),
        )
    },
    "tables": "experiments.tables.__main__",
    "doctor": "fedjax_graph.doctor",
}


def main() -> int | None:
    """Runs the binary that the command line names first, with the flags behind it.

    Returns:
      The status, unless the binary ends the process.
    """
    with exits.in_one_line():
        return _run()


def _run() -> int | None:
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        print((__doc__ or "").strip())
        return 0
    if name == "--version":
        print(f"fedjax_graph {fedjax_graph.__version__}")
        return 0
    if name not in MODULES:
        known = ", ".join(MODULES)
        said = f"{name!r} is no command{meant(name, MODULES)}; known: {known}"
        print(f"error: {said}", file=sys.stderr)
        return 2
    sys.argv = [f"fedjax-graph {name}", *flags]
    return importlib.import_module(MODULES[name]).main()


if __name__ == "__main__":
    sys.exit(main())
