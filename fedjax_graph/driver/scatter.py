"""Points with their names beside them, none of which covers another.

As in `plots`, `f(path, ...)` writes what its `f_figure(...)` draws.
"""

import os
from collections.abc import Collection, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path as Curve
from matplotlib.transforms import Bbox

from fedjax_graph.driver import plots

# Of names beside points, in points.
NAME_MARGIN = 2
NAME_DISTANCES = (3, 10, 20, 32, 46)
NAME_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))


def scatter(
    path: str | os.PathLike,
    points: Mapping[str, tuple[float, float]],
    xlabel: str,
    ylabel: str,
    look: plots.Look = plots.PLAIN,
    highlight: Collection[str] = (),
) -> None:
    """Writes points (x, y) with their names beside them.

    Args:
      path: the PNG file.
      points: by name.
      xlabel: of the first coordinate.
      ylabel: of the second.
      look: of the run.
      highlight: names of points to be larger.
    """
    plots.save(scatter_figure(points, xlabel, ylabel, look, highlight), path)


def scatter_figure(points, xlabel, ylabel, look=plots.PLAIN, highlight=()) -> Figure:
    """Draws what `scatter` writes."""
    figure, (axes,) = plots.new_panels(1, 1, (7.0, 4.8), look.title)
    styles = look.of(points)
    for name, (x, y) in points.items():
        size = 11 if name in highlight else 6
        axes.plot(x, y, "o", color=styles[name][0], markersize=size, label=name)
    axes.margins(0.12)
    plots.label_axes(axes, xlabel, ylabel)
    _name_points(figure, axes)
    return figure


def _name_points(figure: Figure, axes: Axes):
    """Writes the label of each line, which is one point, beside it.

    A name takes, of the positions around its point, one where it covers least of other
    names and points, of those one where links cross fewest, and of those the first.
    Places are found in pixels of the finished layout, large points first.
    """
    plots.as_written(figure)
    figure.draw_without_rendering()
    pixels = figure.dpi / 72  # per point
    lines = sorted(axes.lines, key=lambda line: -line.get_markersize())
    centres = [axes.transData.transform(line.get_xydata()[0]) for line in lines]
    radii = [line.get_markersize() / 2 * pixels for line in lines]
    markers = [_box(c, 2 * r) for c, r in zip(centres, radii, strict=True)]
    names, links = [], []
    for i, line in enumerate(lines):
        note = axes.annotate(
            line.get_label(),
            line.get_xydata()[0],
            (0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            zorder=1.5,  # the link lies under the points
            parse_math=False,
            arrowprops={
                "arrowstyle": "-",
                "color": "#888888",
                "linewidth": 0.6,
                "shrinkB": 0,
            },
        )
        note.set_in_layout(False)
        size = np.array(note.get_window_extent().size) + NAME_MARGIN * pixels
        others = names + markers[:i] + markers[i + 1 :]

        def hidden(position, size=size, centre=centres[i], others=others):
            name, link = _box(position, size), Curve([centre, position])
            crossed = [link.intersects_bbox(other) for other in others]
            crossed += [other.intersects_bbox(name) for other in links]
            covered = [_overlap(name, other) for other in others]
            outside = size.prod() - _overlap(name, axes.bbox)
            return round(outside + sum(covered), 3), sum(crossed)

        positions = [
            centres[i] + np.array(direction) * (size / 2 + radii[i] + distance * pixels)
            for distance in NAME_DISTANCES
            for direction in NAME_DIRECTIONS
        ]
        position = min(positions, key=hidden)
        note.set_position((position - centres[i]) / pixels)
        names.append(_box(position, size))
        links.append(Curve([centres[i], position]))


def _box(centre, size) -> Bbox:
    return Bbox([centre - np.divide(size, 2), centre + np.divide(size, 2)])


def _overlap(a: Bbox, b: Bbox) -> float:
    """Computes the area that two boxes have in common."""
    common = Bbox.intersection(a, b)
    return 0.0 if common is None else common.width * common.height
