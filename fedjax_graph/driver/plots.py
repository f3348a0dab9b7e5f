"""Pictures of results: plain numbers in, a PNG file out.

Each function `f(path, ...)` writes what its `f_figure(...)` draws. Figures are made
with matplotlib's object interface and the Agg canvas, so that there is no global state
and no display is needed. Colours are those of Okabe and Ito, which colour-blind readers
can tell apart; line styles differ as well where lines may lie on top of each other.
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.path import Path as Curve
from matplotlib.transforms import Bbox

from fedjax_graph.core.processes import by_first
from fedjax_graph.data.traffic.time_steps import UNIT_NAMES, TimeStep, in_words, unit_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
TRUTH_COLOUR = "#222222"
MOST_MARKERS = 50  # points of a line; more would only blur it
DPI = 150
FONT_SIZE = 10  # of titles and boxes, points

# Of names beside points, in points.
NAME_MARGIN = 2
NAME_DISTANCES = (3, 10, 20, 32, 46)
NAME_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))


class Line(NamedTuple):
    """Holds one curve: y over x, and optionally the half-width of a band around it."""

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


def curves_figure(series, xlabel, ylabel, title="", log_x=False) -> Figure:
    """Draws what `curves` writes."""
    figure, (axes,) = new_panels(1, 1, size=(7.0, 4.2))
    axes.set_xscale("log" if log_x else "linear")
    _draw(axes, series, _colours(series))
    label_axes(axes, xlabel, ylabel, title)
    _legend(figure, axes)
    return figure


def training_curves(
    path: str | os.PathLike,
    records: Iterable[Mapping],
    monitors: Iterable[str] = ("loss",),
) -> None:
    """Writes the training loss and what rounds are chosen by, one line per method.

    Args:
      path: the PNG file.
      records: dicts with "method" and "round" and, as far as known in that round,
        "train_loss" and "validation_loss", or what `monitors` name, and the same keys
        with "_std" where the values are means over seeds.
      monitors: of the methods, see `FederatedAlgorithm.monitor`: a panel for each.
    """
    save(training_curves_figure(records, monitors), path)


def training_curves_figure(records, monitors=("loss",)) -> Figure:
    """Draws what `training_curves` writes."""
    panels = {"training loss": ("train_loss", "train_loss_std")}
    for monitor in monitors:
        key = f"validation_{monitor}"
        panels[key.replace("_", " ")] = (key, f"{key}_std")
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


def search_curves_figure(records) -> Figure:
    """Draws what `search_curves` writes."""
    panels = {
        "best federated score": ("best_score", "score_spread"),
        "mean federated score": ("mean_score", None),
    }
    return _histories(records, "generation", panels)


def _histories(records, xlabel, panels):
    """Draws a panel for each label of `panels`, {label: (key, key of the spread)}."""
    records = sorted(records, key=lambda record: record["round"])
    methods = dict.fromkeys(str(record["method"]) for record in records)
    figure, all_axes = new_panels(1, len(panels), size=(4.5 * len(panels), 3.8))
    for axes, (label, keys) in zip(all_axes, panels.items(), strict=True):
        series = {
            method: _history([r for r in records if str(r["method"]) == method], *keys)
            for method in methods
        }
        _draw(axes, series, _colours(methods))
        label_axes(axes, xlabel, label)
        axes.xaxis.get_major_locator().set_params(integer=True)
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
    path: str | os.PathLike,
    rmse: Mapping[str, Sequence[float]],
    step: TimeStep,
    unit: str,
) -> None:
    """Writes the error of each method against the time ahead.

    Args:
      path: the PNG file.
      rmse: [12] by method, one `step` ahead, two and so on.
      step: between readings.
      unit: of the errors.
    """
    save(rmse_by_horizon_figure(rmse, step, unit), path)


def rmse_by_horizon_figure(rmse, step, unit) -> Figure:
    """Draws what `rmse_by_horizon` writes."""
    num_steps = max(map(len, rmse.values()), default=0)
    sign, length = unit_of(num_steps * step.delta)
    ahead = np.arange(num_steps + 1) * (step.delta / length)
    series = {
        method: Line(ahead[1 : len(errors) + 1], errors)
        for method, errors in rmse.items()
    }
    figure, (axes,) = new_panels(1, 1, size=(7.0, 4.2))
    _draw(axes, series, _colours(series))
    label_axes(axes, f"{UNIT_NAMES[sign]} ahead", f"RMSE ({unit})")
    axes.set_xticks(ahead[::3])
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def forecasts(
    path: str | os.PathLike,
    *,
    truth: np.ndarray,
    forecasts: Mapping[str, Mapping[np.timedelta64, np.ndarray]],
    times: np.ndarray,
    unit: str,
    sensors: Sequence[str] | None = None,
) -> None:
    """Writes forecast against truth, one panel per sensor.

    Args:
      path: the PNG file.
      truth: [T, P] readings of P sensors; NaN, where one is missing, is a gap.
      forecasts: per method and time ahead the forecasts [T, P] *for* the same times as
        the truth, made so much earlier.
      times: [T] datetime64 of the rows.
      unit: of the readings.
      sensors: [P] names of the panels.
    """
    save(
        forecasts_figure(
            truth=truth, forecasts=forecasts, times=times, unit=unit, sensors=sensors
        ),
        path,
    )


def forecasts_figure(*, truth, forecasts, times, unit, sensors=None) -> Figure:
    """Draws what `forecasts` writes."""
    truth = np.asarray(truth)
    num_panels = truth.shape[1]
    x = np.asarray(times)
    names = [f"sensor {p}" for p in range(num_panels)] if sensors is None else sensors
    horizons = sorted({h for by in forecasts.values() for h in by}, reverse=True)
    colours = _colours(forecasts)
    figure, panels = new_panels(num_panels, 1, size=(9.0, 0.7 + 2.0 * num_panels))
    for p, axes in enumerate(panels):
        axes.plot(x, truth[:, p], color=TRUTH_COLOUR, linewidth=2.2, label="measured")
        for method, by_horizon in forecasts.items():
            for ahead, values in sorted(by_horizon.items(), reverse=True):
                axes.plot(
                    x,
                    np.asarray(values)[:, p],
                    color=colours[method],
                    linewidth=1.5,
                    linestyle=DASHES[horizons.index(ahead) % len(DASHES)],
                    label=f"{method}, {in_words(ahead)} ahead",
                )
        label_axes(axes, "", f"readings ({unit})", str(names[p]))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        locator = axes.xaxis.get_major_locator()
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    panels[-1].set_xlabel("time")
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


def heat_maps_figure(matrices, xlabel, ylabel, ticks=None) -> Figure:
    """Draws what `heat_maps` writes."""
    figure, panels = new_panels(1, len(matrices), size=(4.6 * len(matrices), 4.2))
    for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
        smallest = np.min(matrix) if ticks else 0
        largest = np.max(matrix, initial=0) or 1
        image = axes.imshow(matrix, cmap="Blues", vmin=smallest, vmax=largest)
        axes.grid(False)
        label_axes(axes, xlabel, ylabel, title)
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


def sensor_map_figure(longitude, latitude, is_seen) -> Figure:
    """Draws what `sensor_map` writes."""
    figure, (axes,) = new_panels(1, 1, size=(6.4, 6.0))
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
    label_axes(axes, "longitude (degrees)", "latitude (degrees)")
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


def scatter_figure(points, xlabel, ylabel, title="", highlight=()) -> Figure:
    """Draws what `scatter` writes."""
    figure, (axes,) = new_panels(1, 1, size=(7.0, 4.8))
    for name, (x, y) in points.items():
        is_large = name in highlight
        size, colour = (11, COLOURS[1]) if is_large else (6, COLOURS[0])
        axes.plot(x, y, "o", color=colour, markersize=size, label=name)
    axes.margins(0.12)
    label_axes(axes, xlabel, ylabel, title)
    _name_points(figure, axes)
    return figure


def _name_points(figure: Figure, axes: Axes):
    """Writes the label of each line, which is one point, beside it.

    A name takes, of the positions around its point, one where it covers least of other
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


@by_first
def save(figure: Figure, path: str | os.PathLike) -> None:
    """Writes the figure as a PNG, whole or not at all; makes the folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
    os.replace(temporary, path)


def new_panels(rows, columns, size) -> tuple[Figure, np.ndarray]:
    """Makes a figure in the common style and its axes, row by row."""
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


def label_axes(axes: Axes, xlabel, ylabel, title="") -> None:
    """Writes the labels of both axes and the title of a panel."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontsize=FONT_SIZE)


def _legend(figure: Figure, axes: Axes):
    """Puts one legend for all panels above them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(handles), 3)
        figure.legend(
            handles, labels, loc="outside upper center", ncols=columns, frameon=False
        )
