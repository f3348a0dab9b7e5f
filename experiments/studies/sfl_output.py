"""What the SFL study shows: its table, and its pictures."""

import pathlib
from collections.abc import Mapping

import numpy as np

from experiments.studies import running
from experiments.studies.running import Entry, Run
from experiments.studies.sfl_problem import Problem
from fedjax_graph.core import graphs
from fedjax_graph.driver import maps, plots, results

MOST_CLIENTS = 25  # in a picture of the graph, as in the paper's


def table(
    problem: Problem, entries: Mapping[str, Entry], titles: Mapping[str, str]
) -> results.Table:
    """The paper's columns: Table 1, or Tables 2 and 3."""
    columns = {**problem.columns, "best round": running.best_round}
    return running.table(problem.scores, columns, entries, titles)


def draw(
    workdir: pathlib.Path,
    problem: Problem,
    runs: Mapping[str, Run],
    titles: Mapping[str, str],
    look: plots.Look,
) -> None:
    """Draws the convergence of all methods, and the given and the learnt graph."""
    records = running.records_of(workdir, titles)
    key, label = problem.curve
    known = [r for r in records if key in r]
    series = {
        title: plots.history([r for r in known if r["method"] == title], key)
        for title in dict.fromkeys(r["method"] for r in known)
    }
    plots.curves(workdir / "convergence.png", series, "round", label, look)
    path = workdir / "training_curves.png"
    plots.training_curves(path, records, running.monitors(runs), look)
    given = graphs.row_normalise(graphs.dense_adjacency(problem.splits["train"].graph))
    matrices = {"given, row-normalised": given}
    if "sfl_star" in runs:
        state = runs["sfl_star"].result.best_state
        matrices["learnt by SFL*"] = state.learnt_adjacency[0]
    most = MOST_CLIENTS
    few = {t + cut_note(x): np.asarray(x)[:most, :most] for t, x in matrices.items()}
    path = workdir / "client_graph.png"
    if "sfl_star" in runs or not path.exists():  # keeps what an earlier SFL* learnt
        maps.heat_maps(path, few, "takes from client", "client", look=look)


def cut_note(matrix: np.ndarray) -> str:
    """Says that a picture shows a part of the clients."""
    is_part = len(matrix) > MOST_CLIENTS
    return f", clients 0 to {MOST_CLIENTS - 1} of {len(matrix)}" if is_part else ""
