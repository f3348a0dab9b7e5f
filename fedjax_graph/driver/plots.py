"""Pictures of results: plain numbers in, a PNG file out.

Each function `f(path, ...)` writes what its `f_figure(...)` draws. Figures are made
with matplotlib's object interface and the Agg canvas, so that there is no global state
and no display is needed. Colours are those of Okabe and Ito, which colour-blind readers
can tell apart; line styles differ as well where lines may lie on top of each other.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
TRUTH_COLOUR = "#222222"
MOST_MARKERS = 50  # points of a line; more would only blur it
DPI = 150


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
) -> None:
    """Writes one panel with a line per entry of `series`."""
    save(curves_figure(series, xlabel, ylabel, title), path)


def curves_figure(series, xlabel, ylabel, title=""):
    figure, (axes,) = _panels(1, 1, size=(7.0, 4.2))
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
    records = sorted(records, key=lambda record: record["round"])
    methods = dict.fromkeys(str(record["method"]) for record in records)
    figure, panels = _panels(1, 2, size=(9.0, 3.8))
    for axes, key in zip(panels, ("train_loss", "validation_loss"), strict=True):
        series = {
            method: _history([r for r in records if str(r["method"]) == method], key)
            for method in methods
        }
        _draw(axes, series, _colours(methods))
        _label(axes, "round", key.replace("_", " ").replace("train ", "training "))
    _legend(figure, panels[0])
    return figure


def _history(records, key):
    known = [r for r in records if r.get(key) is not None]
    spread = [r.get(f"{key}_std", 0.0) for r in known]
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
) -> None:
    """Writes matrices side by side, each with its own scale from 0, dark is large.

    Args:
      path: the PNG file.
      matrices: titles and non-negative matrices [N, M].
      xlabel: what the columns are.
      ylabel: what the rows are.
    """
    save(heat_maps_figure(matrices, xlabel, ylabel), path)


def heat_maps_figure(matrices, xlabel, ylabel):
    figure, panels = _panels(1, len(matrices), size=(4.6 * len(matrices), 4.2))
    for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
        largest = np.max(matrix, initial=0) or 1
        image = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=largest)
        axes.grid(False)
        _label(axes, xlabel, ylabel, title)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


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
    axes.set_title(title, loc="left", fontsize=10)


def _legend(figure: Figure, axes: Axes):
    """One legend for all panels, above them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(handles), 3)
        figure.legend(
            handles, labels, loc="outside upper center", ncols=columns, frameon=False
        )
