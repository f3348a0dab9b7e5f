"""Matrices as heat maps, and sensors on a map.

As in `plots`, `f(path, ...)` writes what its `f_figure(...)` draws.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_graph.driver import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def heat_maps(
    path: str | os.PathLike,
    matrices: Mapping[str, np.ndarray],
    xlabel: str,
    ylabel: str,
    ticks: tuple[Sequence, Sequence] | None = None,
    look: plots.Look = plots.PLAIN,
) -> None:
    """Writes matrices side by side, each with its own scale from 0, dark is large.

    Args:
      path: the PNG file.
      matrices: titles and non-negative matrices [N, M]; what is no number is left
        white.
      xlabel: what the columns are.
      ylabel: what the rows are.
      ticks: names of the N rows and of the M columns. Where given, cells bear their
        values, and scales begin at the smallest. Else they are whole numbers.
      look: of the run.
    """
    plots.save(heat_maps_figure(matrices, xlabel, ylabel, ticks, look), path)


def heat_maps_figure(
    matrices, xlabel, ylabel, ticks=None, look=plots.PLAIN
) -> "Figure":
    """Draws what `heat_maps` writes."""
    size = (4.6 * len(matrices), 4.4)
    figure, panels = plots.new_panels(1, len(matrices), size, look.title)
    for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
        matrix = np.asarray(matrix, float)  # of who diverged, None is no number
        known = matrix[np.isfinite(matrix)]
        smallest = np.min(known, initial=np.inf if known.size else 0) if ticks else 0
        largest = np.max(known, initial=0) or 1
        image = axes.imshow(matrix, cmap="Blues", vmin=smallest, vmax=largest)
        axes.grid(False)
        plots.label_axes(axes, xlabel, ylabel, title)
        figure.colorbar(image, ax=axes, shrink=0.8)
        if ticks:
            _name_cells(axes, image, *ticks)
        else:
            plots.whole_ticks(axes.xaxis)
            plots.whole_ticks(axes.yaxis)
    return figure


def _name_cells(axes: "Axes", image, rows: Sequence, columns: Sequence):
    """Names rows and columns and writes the values of a heat map into its cells."""
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for (i, j), value in np.ndenumerate(image.get_array().filled(np.nan)):
        is_dark = np.isfinite(value) and image.norm(value) > 0.5
        colour = "white" if is_dark else plots.TRUTH_COLOUR
        axes.text(j, i, f"{value:.4g}", ha="center", va="center", color=colour)


def sensor_map(
    path: str | os.PathLike,
    longitude: np.ndarray,
    latitude: np.ndarray,
    is_seen: np.ndarray,
    look: plots.Look = plots.PLAIN,
) -> None:
    """Writes a map of sensors, those seen in training marked.

    Args:
      path: the PNG file.
      longitude: [N] degrees.
      latitude: [N] degrees.
      is_seen: [N] bool.
      look: of the run.
    """
    plots.save(sensor_map_figure(longitude, latitude, is_seen, look), path)


def sensor_map_figure(longitude, latitude, is_seen, look=plots.PLAIN) -> "Figure":
    """Draws what `sensor_map` writes."""
    figure, (axes,) = plots.new_panels(1, 1, (6.4, 6.0), look.title)
    groups = (("seen in training", "o", is_seen), ("unseen", "^", ~is_seen))
    for colour, (name, marker, group) in zip(plots.COLOURS[:2], groups, strict=True):
        axes.plot(
            longitude[group],
            latitude[group],
            marker,
            color=colour,
            markersize=5,
            label=f"{name}: {np.sum(group)}",
        )
    axes.set_aspect(1 / np.cos(np.deg2rad(np.mean(latitude))), adjustable="datalim")
    axes.ticklabel_format(useOffset=False)
    plots.label_axes(axes, "longitude (degrees)", "latitude (degrees)")
    plots.add_legend(figure, axes)
    return figure
