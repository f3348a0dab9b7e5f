"""Time and memory of rounds of many clients, against how many there are."""

import os
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from fedjax_graph.driver import plots
from fedjax_graph.driver.plots import Line

TITLES = {
    "fed_avg": "FedAvg",
    "ditto": "Ditto",
    "ditto_in_files": "Ditto in a file",
    "plain_vmap": "FedAvg, plain vmap",
    "drjax": "FedAvg in DrJAX",
    "fedjax": "FedAvg in FedJAX",
}
PANELS = {  # of a figure, after the candidate's name: the label
    "us": "microseconds for each client",
    "resident_mib": "resident memory, with the data (MiB)",
}


def write(
    path: str | os.PathLike, counts: Sequence[int], figures: Mapping[str, float]
) -> None:
    """Writes a line for each candidate, by its microseconds and its memory.

    Args:
      path: the PNG file.
      counts: of clients.
      figures: as the benchmark prints them; who was not measured is left out.
    """
    plots.save(figure(counts, figures), path)


def figure(counts, figures) -> Figure:
    """Draws what `write` writes."""
    look = plots.Look(tuple(TITLES.values()))
    result, panels = plots.new_panels(1, len(PANELS), (4.5 * len(PANELS), 4.0))
    for axes, (kind, label) in zip(panels, PANELS.items(), strict=True):
        series = {
            title: Line(counts, [figures[f"{name}_{kind}_{x}"] for x in counts])
            for name, title in TITLES.items()
            if f"{name}_{kind}_{counts[0]}" in figures
        }
        plots.draw_lines(axes, series, look)
        plots.label_axes(axes, "clients", label)
        axes.set_xscale("log")
        axes.set_yscale("log", nonpositive="mask")
    plots.add_legend(result, panels[0])
    return result
