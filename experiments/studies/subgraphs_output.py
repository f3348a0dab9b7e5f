"""Columns and pictures of a comparison of methods on subgraphs."""

import pathlib
from collections.abc import Mapping

from experiments.studies import running
from experiments.studies.running import Entry, Run
from fedjax_graph.driver import plots


def seconds_per_round(entry: Entry) -> str:
    """Seconds of a round with its evaluation, compilation left out, of one seed."""
    num_seeds = len(entry["best_round_by_seed"])
    num_rounds = max(1, entry["num_rounds"] * num_seeds)
    return f"{entry['seconds'] / num_rounds:.4f}"


def megabytes_per_round(entry: Entry) -> str:
    """Megabytes that a round exchanges on the average, in both directions."""
    return f"{sum(entry['communication_bytes_per_round'].values()) / 1e6:.2f}"


COLUMNS: dict[str, running.Cell] = {
    "accuracy %": "accuracy",
    "round": running.best_round,
    "s / round": seconds_per_round,
    "MB / round": megabytes_per_round,
}


def draw(
    workdir: pathlib.Path,
    runs: Mapping[str, Run],
    titles: Mapping[str, str],
    look: plots.Look,
) -> None:
    """Draws accuracies over rounds, and the training curves."""
    records = running.records_of(workdir, titles)
    known = [r for r in records if "validation_accuracy" in r]
    key = "validation_accuracy"
    series = {
        title: plots.history([r for r in known if r["method"] == title], key)
        for title in dict.fromkeys(r["method"] for r in known)
    }
    label = "validation accuracy (%)"
    plots.curves(workdir / "convergence.png", series, "round", label, look)
    path = workdir / "training_curves.png"
    plots.training_curves(path, records, running.monitors(runs), look)
