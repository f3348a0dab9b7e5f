"""Pictures of results: plain numbers in, a PNG file out.

Each function `f(path, ...)` writes what its `f_figure(...)` draws. Figures are made
with matplotlib's object interface and the Agg canvas, so that there is no global state
and no display is needed. Colours are those of Okabe and Ito, which colour-blind readers
can tell apart; line styles differ as well where lines may lie on top of each other.
"""

import itertools
import math
import os
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Curve
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from fedjax_graph.errors import InputError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
TRUTH_COLOUR = "#222222"
MOST_MARKERS = 50  # points of a line; more would only blur it
DPI = 150
FONT_SIZE = 10  # of titles and boxes, points

# Of a drawn architecture, in inches.
LINE_HEIGHT = 0.18  # of text
BOX_MARGIN = 0.1  # around the text in a box
LANE_WIDTH = 0.1  # for an arrow that passes between boxes
COLUMN_GAP, ROW_GAP = 0.25, 0.45
PORT_GAP = 0.2  # between arrows at one side of a box
NUM_SWEEPS = 8  # over the rows, to put boxes near those that they are joined to

# Of names beside points, in points.
NAME_MARGIN = 2
NAME_DISTANCES = (3, 10, 20, 32, 46)
NAME_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))


class Line(NamedTuple):
    """One curve: y over x, and optionally the half-width of a band around it."""

    x: Sequence
    y: Sequence[float]
    spread: Sequence[float] | None = None


def curves(
    path: str | os.PathLike,
    series: Mapping[str, Line],
    xlabel: str,
    ylabel: str,
    title: str = "",
    log_x: bool = False,
) -> None:
    """Writes one panel with a line per entry of `series`."""
    save(curves_figure(series, xlabel, ylabel, title, log_x), path)


def curves_figure(series, xlabel, ylabel, title="", log_x=False):
    figure, (axes,) = _panels(1, 1, size=(7.0, 4.2))
    axes.set_xscale("log" if log_x else "linear")
    _draw(axes, series, _colours(series))
    _label(axes, xlabel, ylabel, title)
    _legend(figure, axes)
    return figure


def training_curves(path: str | os.PathLike, records: Iterable[Mapping]) -> None:
    """Writes training and validation loss by round, one line per method.

    Args:
      path: the PNG file.
      records: dicts with "method" and "round" and, as far as known in that round,
        "train_loss" and "validation_loss", and "train_loss_std" and
        "validation_loss_std" where the values are means over seeds.
    """
    save(training_curves_figure(records), path)


def training_curves_figure(records):
    panels = {
        "training loss": ("train_loss", "train_loss_std"),
        "validation loss": ("validation_loss", "validation_loss_std"),
    }
    return _histories(records, "round", panels)


def search_curves(path: str | os.PathLike, records: Iterable[Mapping]) -> None:
    """Writes the best and the mean score of a search by generation, a line per method.

    Args:
      path: the PNG file.
      records: dicts with "method" and "round" and, as far as known in that round,
        "best_score" and "mean_score", federated ones, and "score_spread", the standard
        deviation of the best over clients, which is drawn as a band.
    """
    save(search_curves_figure(records), path)


def search_curves_figure(records):
    panels = {
        "best federated score": ("best_score", "score_spread"),
        "mean federated score": ("mean_score", None),
    }
    return _histories(records, "generation", panels)


def _histories(records, xlabel, panels):
    """A panel for each label of `panels`, {label: (key, key of the spread or None)}."""
    records = sorted(records, key=lambda record: record["round"])
    methods = dict.fromkeys(str(record["method"]) for record in records)
    figure, all_axes = _panels(1, len(panels), size=(4.5 * len(panels), 3.8))
    for axes, (label, keys) in zip(all_axes, panels.items(), strict=True):
        series = {
            method: _history([r for r in records if str(r["method"]) == method], *keys)
            for method in methods
        }
        _draw(axes, series, _colours(methods))
        _label(axes, xlabel, label)
    _legend(figure, all_axes[0])
    return figure


def _history(records, key, spread_key):
    known = [r for r in records if r.get(key) is not None]
    spread = [r.get(spread_key) or 0.0 for r in known]
    return Line(
        [r["round"] for r in known],
        [r[key] for r in known],
        spread if np.any(spread) else None,
    )


def rmse_by_horizon(
    path: str | os.PathLike, rmse: Mapping[str, Sequence[float]]
) -> None:
    """Writes the error of each method, [12] mph, against 5, 10, ... minutes ahead."""
    save(rmse_by_horizon_figure(rmse), path)


def rmse_by_horizon_figure(rmse):
    series = {
        method: Line(5 * np.arange(1, len(errors) + 1), errors)
        for method, errors in rmse.items()
    }
    figure, (axes,) = _panels(1, 1, size=(7.0, 4.2))
    _draw(axes, series, _colours(series))
    _label(axes, "minutes ahead", "RMSE (mph)")
    steps = max(map(len, rmse.values()), default=0)
    axes.set_xticks(np.arange(0, 5 * steps + 1, 15))
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def forecasts(
    path: str | os.PathLike,
    *,
    truth: np.ndarray,
    forecasts: Mapping[str, Mapping[int, np.ndarray]],
    times: np.ndarray | None = None,
    sensors: Sequence[str] | None = None,
) -> None:
    """Writes forecast against truth, one panel per sensor.

    Args:
      path: the PNG file.
      truth: [T, P] mph of P sensors at consecutive 5-minute steps; NaN is left out.
      forecasts: per method and minutes ahead (such as 15 and 60) the forecasts [T, P]
        mph *for* the same times as the truth, made so many minutes earlier.
      times: [T] datetime64 of the steps; hours from the first step are shown if None.
      sensors: [P] names of the panels.
    """
    save(
        forecasts_figure(
            truth=truth, forecasts=forecasts, times=times, sensors=sensors
        ),
        path,
    )


def forecasts_figure(*, truth, forecasts, times=None, sensors=None):
    truth = np.asarray(truth)
    num_panels = truth.shape[1]
    x = np.arange(len(truth)) / 12 if times is None else np.asarray(times)
    names = [f"sensor {p}" for p in range(num_panels)] if sensors is None else sensors
    horizons = sorted({h for by in forecasts.values() for h in by}, reverse=True)
    colours = _colours(forecasts)
    figure, panels = _panels(num_panels, 1, size=(9.0, 0.7 + 2.0 * num_panels))
    for p, axes in enumerate(panels):
        axes.plot(x, truth[:, p], color=TRUTH_COLOUR, linewidth=2.2, label="measured")
        for method, by_horizon in forecasts.items():
            for minutes, values in sorted(by_horizon.items(), reverse=True):
                axes.plot(
                    x,
                    np.asarray(values)[:, p],
                    color=colours[method],
                    linewidth=1.5,
                    linestyle=DASHES[horizons.index(minutes) % len(DASHES)],
                    label=f"{method}, {minutes} min ahead",
                )
        _label(axes, "", "speed (mph)", str(names[p]))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        if times is not None:
            locator = axes.xaxis.get_major_locator()
            axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    panels[-1].set_xlabel("hours" if times is None else "time")
    _legend(figure, panels[0])
    return figure


def heat_maps(
    path: str | os.PathLike,
    matrices: Mapping[str, np.ndarray],
    xlabel: str,
    ylabel: str,
    ticks: tuple[Sequence, Sequence] | None = None,
) -> None:
    """Writes matrices side by side, each with its own scale from 0, dark is large.

    Args:
      path: the PNG file.
      matrices: titles and non-negative matrices [N, M].
      xlabel: what the columns are.
      ylabel: what the rows are.
      ticks: names of the N rows and of the M columns. Where given, cells bear their
        values, and scales begin at the smallest.
    """
    save(heat_maps_figure(matrices, xlabel, ylabel, ticks), path)


def heat_maps_figure(matrices, xlabel, ylabel, ticks=None):
    figure, panels = _panels(1, len(matrices), size=(4.6 * len(matrices), 4.2))
    for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
        smallest = np.min(matrix) if ticks else 0
        largest = np.max(matrix, initial=0) or 1
        image = axes.imshow(matrix, cmap="Blues", vmin=smallest, vmax=largest)
        axes.grid(False)
        _label(axes, xlabel, ylabel, title)
        figure.colorbar(image, ax=axes, shrink=0.8)
        if ticks:
            _name_cells(axes, image, *ticks)
    return figure


def _name_cells(axes: Axes, image, rows: Sequence, columns: Sequence):
    """Names rows and columns and writes the values of a heat map into its cells."""
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for (i, j), value in np.ndenumerate(image.get_array()):
        colour = "white" if image.norm(value) > 0.5 else TRUTH_COLOUR
        axes.text(j, i, f"{value:.4g}", ha="center", va="center", color=colour)


def sensor_map(
    path: str | os.PathLike,
    longitude: np.ndarray,
    latitude: np.ndarray,
    is_seen: np.ndarray,
) -> None:
    """Writes a map of sensors, those seen in training marked.

    Args:
      path: the PNG file.
      longitude: [N] degrees.
      latitude: [N] degrees.
      is_seen: [N] bool.
    """
    save(sensor_map_figure(longitude, latitude, is_seen), path)


def sensor_map_figure(longitude, latitude, is_seen):
    figure, (axes,) = _panels(1, 1, size=(6.4, 6.0))
    groups = (("seen in training", "o", is_seen), ("unseen", "^", ~is_seen))
    for colour, (name, marker, group) in zip(COLOURS[:2], groups, strict=True):
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
    _label(axes, "longitude (degrees)", "latitude (degrees)")
    _legend(figure, axes)
    return figure


def scatter(
    path: str | os.PathLike,
    points: Mapping[str, tuple[float, float]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    highlight: Collection[str] = (),
) -> None:
    """Writes points (x, y) with their names beside them.

    Args:
      path: the PNG file.
      points: by name.
      xlabel: of the first coordinate.
      ylabel: of the second.
      title: of the picture.
      highlight: names of points to be larger and of another colour.
    """
    save(scatter_figure(points, xlabel, ylabel, title, highlight), path)


def scatter_figure(points, xlabel, ylabel, title="", highlight=()):
    figure, (axes,) = _panels(1, 1, size=(7.0, 4.8))
    for name, (x, y) in points.items():
        is_large = name in highlight
        size, colour = (11, COLOURS[1]) if is_large else (6, COLOURS[0])
        axes.plot(x, y, "o", color=colour, markersize=size, label=name)
    axes.margins(0.12)
    _label(axes, xlabel, ylabel, title)
    _name_points(figure, axes)
    return figure


def _name_points(figure: Figure, axes: Axes):
    """Writes the label of each line, which is one point, beside it.

    A name takes, of the places around its point, one where it covers least of other
    names and points, of those one where links cross fewest, and of those the first.
    Places are found in pixels of the finished layout, large points first.
    """
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

        def hidden(place, size=size, centre=centres[i], others=others):
            name, link = _box(place, size), Curve([centre, place])
            crossed = [link.intersects_bbox(other) for other in others]
            crossed += [other.intersects_bbox(name) for other in links]
            covered = [_overlap(name, other) for other in others]
            outside = size.prod() - _overlap(name, axes.bbox)
            return round(outside + sum(covered), 3), sum(crossed)

        places = [
            centres[i] + np.array(direction) * (size / 2 + radii[i] + distance * pixels)
            for distance in NAME_DISTANCES
            for direction in NAME_DIRECTIONS
        ]
        place = min(places, key=hidden)
        note.set_position((place - centres[i]) / pixels)
        names.append(_box(place, size))
        links.append(Curve([centres[i], place]))


def _box(centre, size) -> Bbox:
    return Bbox([centre - np.divide(size, 2), centre + np.divide(size, 2)])


def _overlap(a: Bbox, b: Bbox) -> float:
    """The area that two boxes have in common."""
    common = Bbox.intersection(a, b)
    return 0.0 if common is None else common.width * common.height


def architecture(
    path: str | os.PathLike,
    labels: Mapping[int, str],
    edges: Sequence[tuple[int, int]],
    title: str = "",
) -> None:
    """Writes a graph without cycles as boxes in rows, with arrows that lead down.

    Args:
      path: the PNG file.
      labels: text of the box of each place; a colon ends its first line.
      edges: (from, to). A box stands one row below the last from which an arrow leads
        to it. `architecture.diagram` gives labels and edges of a code.
      title: of the picture.

    Raises:
      InputError: if there is no box, an edge joins a place without one, or edges make a
        cycle.
    """
    save(architecture_figure(labels, edges, title), path)


def architecture_figure(labels, edges, title=""):
    row_of = _rows(labels, edges)
    chains = _chains(row_of, edges)
    texts = {place: label.replace(": ", ":\n") for place, label in labels.items()}
    lines = [text.split("\n") for text in texts.values()]
    width = 2 * BOX_MARGIN + max(_text_width(line) for text in lines for line in text)
    height = 2 * BOX_MARGIN + LINE_HEIGHT * max(map(len, lines))
    x = _columns(row_of, chains, width)
    y = {stop: -row * (height + ROW_GAP) for stop, row in row_of.items()}
    margin = np.array([width, height]) / 2 + 0.05
    low = np.array([min(x.values()), min(y.values())]) - margin
    high = np.array([max(x.values()), 0]) + margin
    missing = max(_text_width(title) - (high - low)[0], 0)
    low[0], high[0] = low[0] - missing / 2, high[0] + missing / 2
    figure, (axes,) = _panels(1, 1, high - low + (0.2, 0.5))
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.set_axis_off()
    _label(axes, "", "", title)
    for chain, shifts in zip(chains, _ports(chains, x, width), strict=True):
        axes.add_patch(
            FancyArrowPatch(
                path=_arrow([(x[stop], y[stop]) for stop in chain], height, *shifts),
                arrowstyle="-|>",
                mutation_scale=12,
                color="#555555",
                linewidth=1.2,
            )
        )
    for place, text in texts.items():
        is_inner = all(place in side for side in zip(*edges, strict=True))
        colour = COLOURS[not is_inner]
        corner = x[place] - width / 2, y[place] - height / 2
        box = FancyBboxPatch(
            corner,
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=(colour, 0.12),
            edgecolor=colour,
        )
        axes.add_patch(box)
        axes.text(x[place], y[place], text, ha="center", va="center", size=FONT_SIZE)
    return figure


# A stop is a box, named by its place, or a point (edge, row) where an arrow passes
# between the boxes of a row. Lengths are inches.


def _rows(labels: Mapping[int, str], edges) -> dict[Hashable, int]:
    """The longest path to each place."""
    if not labels:
        raise InputError("an architecture without boxes: expected at least one label")
    before = {place: [] for place in labels}
    for edge in edges:
        if not all(place in labels for place in edge):
            raise InputError(
                f"edge {edge} joins a place without label; labelled: "
                f"{', '.join(map(str, labels))}"
            )
        before[edge[1]].append(edge[0])
    row_of = {}
    try:
        for place in TopologicalSorter(before).static_order():
            row_of[place] = max((row_of[p] + 1 for p in before[place]), default=0)
    except CycleError as error:
        cycle = " -> ".join(map(str, error.args[1]))
        raise InputError(
            f"edges make a cycle, {cycle}; expected a graph without"
        ) from None
    return row_of


def _chains(row_of: dict[Hashable, int], edges) -> list[list[Hashable]]:
    """All stops of each edge, the new ones entered in `row_of`."""
    chains = []
    for i, (start, end) in enumerate(edges):
        passed = {(i, row): row for row in range(row_of[start] + 1, row_of[end])}
        row_of.update(passed)
        chains.append([start, *passed, end])
    return chains


def _columns(row_of, chains, width) -> dict[Hashable, float]:
    """Where stops are across: apart within a row, else near those they are joined to.

    Sugiyama, Tagawa, Toda, "Methods for Visual Understanding of Hierarchical System
    Structures", 1981: rows are put in the order of the mean of what they are joined to
    in the row above, then below, and so on.
    """
    above = {stop: [] for stop in row_of}
    below = {stop: [] for stop in row_of}
    for upper, lower in itertools.chain(*map(itertools.pairwise, chains)):
        above[lower].append(upper)
        below[upper].append(lower)
    both = {stop: above[stop] + below[stop] for stop in row_of}
    rows = [[] for _ in range(max(row_of.values()) + 1)]
    for stop, row in row_of.items():
        rows[row].append(stop)
    x = dict.fromkeys(row_of, 0.0)
    for joined in [above, below] * NUM_SWEEPS + [both] * NUM_SWEEPS:
        for stops in rows[:: -1 if joined is below else 1]:
            goals = {
                stop: np.mean([x[other] for other in joined[stop] or [stop]])
                for stop in stops
            }
            stops.sort(key=lambda stop, goals=goals: round(goals[stop], 6))
            widths = [LANE_WIDTH if isinstance(s, tuple) else width for s in stops]
            placed = _apart([goals[stop] for stop in stops], widths)
            x.update(zip(stops, placed, strict=True))
    return x


def _apart(goals, widths) -> np.ndarray:
    """Middles nearest to `goals` of things side by side, in least squares."""
    edges = np.cumsum(np.add(widths, COLUMN_GAP))
    offsets = edges - np.divide(widths, 2)
    return isotonic_regression(goals - offsets).x + offsets


def _ports(chains, x, width) -> np.ndarray:
    """How far from the middle of its boxes each arrow starts and ends, [edges, 2].

    Arrows at one side of a box are in the order of where they come from or go to.
    """
    shifts = np.zeros((len(chains), 2))
    for side, (at, near) in enumerate(((0, 1), (-1, -2))):
        for place in {chain[at] for chain in chains}:
            here = [i for i, chain in enumerate(chains) if chain[at] == place]
            here.sort(key=lambda i, near=near: x[chains[i][near]])
            gap = min(PORT_GAP, 0.8 * width / len(here))
            shifts[here, side] = gap * (np.arange(len(here)) - (len(here) - 1) / 2)
    return shifts


def _arrow(points, height, start_shift, end_shift) -> Curve:
    """Through the stops' centres: curves between rows, upright lines within them."""
    x, y = np.transpose(points)
    x[[0, -1]] += start_shift, end_shift
    tops, bottoms = y + height / 2, y - height / 2
    vertices, codes = [(x[0], bottoms[0])], [Curve.MOVETO]
    for i in range(1, len(points)):
        middle = (bottoms[i - 1] + tops[i]) / 2
        vertices += [(x[i - 1], middle), (x[i], middle), (x[i], tops[i])]
        codes += [Curve.CURVE4] * 3
        if i < len(points) - 1:
            vertices.append((x[i], bottoms[i]))
            codes.append(Curve.LINETO)
    return Curve(vertices, codes)


def _text_width(text: str) -> float:
    font = FontProperties(size=FONT_SIZE)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def save(figure: Figure, path: str | os.PathLike) -> None:
    """Writes the figure as a PNG and makes the folder if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


def _panels(rows, columns, size):
    """A figure in the common style and its axes, row by row."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def _colours(names: Iterable[str]) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _draw(axes: Axes, series: Mapping[str, Line], colours):
    num_styles = math.lcm(len(COLOURS), len(DASHES))  # then the pairs would repeat
    for i, (name, line) in enumerate(series.items()):
        x, y, spread = Line(*line)
        y = np.asarray(y, float)
        axes.plot(
            x,
            y,
            label=name,
            color=colours[name],
            linewidth=1.8,
            linestyle=DASHES[(i + i // num_styles) % len(DASHES)],
            marker="o" if len(y) <= MOST_MARKERS else None,
            markersize=4,
        )
        if spread is not None:
            low, high = y - spread, y + spread
            axes.fill_between(x, low, high, color=colours[name], alpha=0.18, lw=0)


def _label(axes: Axes, xlabel, ylabel, title=""):
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontsize=FONT_SIZE)


def _legend(figure: Figure, axes: Axes):
    """One legend for all panels, above them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(handles), 3)
        figure.legend(
            handles, labels, loc="outside upper center", ncols=columns, frameon=False
        )
