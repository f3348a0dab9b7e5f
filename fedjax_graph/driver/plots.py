"""Pictures of results: plain numbers in, a PNG file out.

Each function `f(path, ...)` writes what its `f_figure(...)` draws. Figures are made
with matplotlib's object interface and the Agg canvas, so that there is no global state
and no display is needed. A `Look` gives a method the same colour and line in all
pictures of a run, and all pictures the same title. The first colours are those of Okabe
and Ito, which colour-blind readers can tell apart, the others Paul Tol's. matplotlib
is imported where it draws, since no command should wait for it to start.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_graph.core.processes import by_first
from fedjax_graph.data.traffic.time_steps import UNIT_NAMES, TimeStep, in_words, unit_of
from fedjax_graph.driver.writers import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933", "#332288", "#117733", "#AA4499"),
)
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
TRUTH_COLOUR = "#222222"
MOST_MARKERS = 50  # points of a line; more would only blur it
DPI = 150
FONT_SIZE = 10  # of titles and boxes, points
LEGEND_COLUMNS, LEGEND_ROWS = 3, 3  # pictures have room for; more makes them taller
LEGEND_ROW = 0.22  # inches


class Line(NamedTuple):
    """Holds one curve: y over x, and optionally the half-width of a band around it."""

    x: Sequence
    y: Sequence[float]
    spread: Sequence[float] | None = None


class Look(NamedTuple):
    """What the pictures of a run have in common."""

    methods: tuple[str, ...] = ()  # titles; their order gives colours and line styles
    title: str = ""  # of the data, seeds and whatever else holds for all

    def of(self, names: Iterable[str]) -> dict[str, tuple[str, Any]]:
        """Colour and line style of each name, by name; strangers follow the methods."""
        order = list(dict.fromkeys([*self.methods, *names]))
        return {
            name: (COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)])
            for i, name in enumerate(order)
        }

    def colour(self, name: str) -> str:
        """The colour of a method."""
        return self.of([name])[name][0]


PLAIN = Look()


def curves(
    path: str | os.PathLike,
    series: Mapping[str, Line],
    xlabel: str,
    ylabel: str,
    look: Look = PLAIN,
    log_x: bool = False,
) -> None:
    """Writes one panel with a line per entry of `series`."""
    save(curves_figure(series, xlabel, ylabel, look, log_x), path)


def curves_figure(series, xlabel, ylabel, look=PLAIN, log_x=False) -> "Figure":
    """Draws what `curves` writes."""
    from matplotlib import ticker

    figure, (axes,) = new_panels(1, 1, size=(7.0, 4.2), title=look.title)
    draw_lines(axes, series, look)
    label_axes(axes, xlabel, ylabel)
    xs = [x for line in series.values() for x in line[0]]
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    elif np.all(np.equal(np.mod(xs, 1), 0)):
        whole_ticks(axes.xaxis)
    add_legend(figure, axes)
    return figure


def training_curves(
    path: str | os.PathLike,
    records: Iterable[Mapping],
    monitors: Iterable[str] = ("loss",),
    look: Look = PLAIN,
) -> None:
    """Writes the training loss and what rounds are chosen by, one line per method.

    Args:
      path: the PNG file.
      records: dicts with "method" and "round" and, as far as known in that round,
        "train_loss" and "validation_loss", or what `monitors` name, and the same keys
        with "_by_seed" where the values are means over seeds: the band is their
        standard deviation.
      monitors: of the methods, see `FederatedAlgorithm.monitor`: a panel for each.
      look: of the run.
    """
    save(training_curves_figure(records, monitors, look), path)


def training_curves_figure(records, monitors=("loss",), look=PLAIN) -> "Figure":
    """Draws what `training_curves` writes."""
    panels = {"training loss": ("train_loss", None)}
    for monitor in monitors:
        panels[f"validation {monitor.replace('_', ' ')}"] = (
            f"validation_{monitor}",
            None,
        )
    return _histories(records, "round", panels, look)


def search_curves(
    path: str | os.PathLike, records: Iterable[Mapping], look: Look = PLAIN
) -> None:
    """Writes the best and the mean score of a search by generation, a line per method.

    Args:
      path: the PNG file.
      records: dicts with "method" and "round" and, as far as known in that round,
        "best_score" and "mean_score", federated ones, and "score_spread", the standard
        deviation of the best over clients, which is drawn as a band.
      look: of the run.
    """
    save(search_curves_figure(records, look), path)


def search_curves_figure(records, look=PLAIN) -> "Figure":
    """Draws what `search_curves` writes."""
    panels = {
        "best federated score": ("best_score", "score_spread"),
        "mean federated score": ("mean_score", None),
    }
    return _histories(records, "generation", panels, look)


def _histories(records, xlabel, panels, look):
    """Draws a panel for each label of `panels`, {label: (key, key of the spread)}."""
    records = sorted(records, key=lambda record: record["round"])
    methods = dict.fromkeys(str(record["method"]) for record in records)
    size = (4.5 * len(panels), 3.8)
    figure, all_axes = new_panels(1, len(panels), size, look.title)
    for axes, (label, keys) in zip(all_axes, panels.items(), strict=True):
        series = {
            method: history([r for r in records if str(r["method"]) == method], *keys)
            for method in methods
        }
        draw_lines(axes, series, look)
        label_axes(axes, xlabel, label)
        whole_ticks(axes.xaxis)
    add_legend(figure, all_axes[0])
    return figure


def history(
    records: Iterable[Mapping], key: str, spread_key: str | None = None
) -> Line:
    """A figure of one method over its rounds, those left out that do not have it.

    Args:
      records: of `metrics.jsonl`, or some with the same keys.
      key: of the figure.
      spread_key: of the band; by default it is the deviation over seeds, if any.
    """
    known = [r for r in records if r.get(key) is not None]
    if spread_key:
        spread = [r.get(spread_key) or 0.0 for r in known]
    else:
        spread = [deviation(r.get(f"{key}_by_seed")) for r in known]
    return Line(
        [r["round"] for r in known],
        [r[key] for r in known],
        spread if np.any(spread) else None,
    )


def deviation(by_seed: Sequence[float | None] | None) -> float:
    """Standard deviation over seeds, of which some may not be finite."""
    known = [x for x in by_seed or () if x is not None and np.isfinite(x)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else 0.0


def whole_ticks(axis: "Axis") -> None:
    """Leaves out ticks between whole numbers, as of rounds and of clients."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def rmse_by_horizon(
    path: str | os.PathLike,
    rmse: Mapping[str, Sequence[float]],
    step: TimeStep,
    unit: str,
    look: Look = PLAIN,
    spread: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Writes the error of each method against the time ahead.

    Args:
      path: the PNG file.
      rmse: [12] by method, one `step` ahead, two and so on.
      step: between readings.
      unit: of the errors.
      look: of the run.
      spread: [12] by method, the deviation over seeds of those that have one.
    """
    save(rmse_by_horizon_figure(rmse, step, unit, look, spread), path)


def rmse_by_horizon_figure(rmse, step, unit, look=PLAIN, spread=None) -> "Figure":
    """Draws what `rmse_by_horizon` writes."""
    num_steps = max(map(len, rmse.values()), default=0)
    sign, length = unit_of(num_steps * step.delta)
    ahead = np.arange(num_steps + 1) * (step.delta / length)
    series = {
        method: Line(ahead[1 : len(errors) + 1], errors, (spread or {}).get(method))
        for method, errors in rmse.items()
    }
    figure, (axes,) = new_panels(1, 1, (7.0, 4.2), look.title)
    draw_lines(axes, series, look)
    label_axes(axes, f"{UNIT_NAMES[sign]} ahead", f"RMSE ({unit})")
    axes.set_xticks(ahead[::3])
    axes.set_ylim(bottom=0)
    add_legend(figure, axes)
    return figure


def forecasts(
    path: str | os.PathLike,
    *,
    truth: np.ndarray,
    forecasts: Mapping[str, Mapping[np.timedelta64, np.ndarray]],
    times: np.ndarray,
    unit: str,
    sensors: Sequence[str] | None = None,
    look: Look = PLAIN,
) -> None:
    """Writes forecast against truth, one panel per sensor.

    Args:
      path: the PNG file.
      truth: [T, P] readings of P sensors; NaN, where one is missing, is a gap.
      forecasts: per method and time ahead the forecasts [T, P] *for* the same times as
        the truth, made so much earlier; or [S, T, P] of S seeds, whose mean is drawn
        and whose deviation is a band.
      times: [T] datetime64 of the rows.
      unit: of the readings.
      sensors: [P] names of the panels.
      look: of the run.
    """
    save(
        forecasts_figure(
            truth=truth,
            forecasts=forecasts,
            times=times,
            unit=unit,
            sensors=sensors,
            look=look,
        ),
        path,
    )


def forecasts_figure(
    *, truth, forecasts, times, unit, sensors=None, look=PLAIN
) -> "Figure":
    """Draws what `forecasts` writes."""
    from matplotlib.dates import ConciseDateFormatter

    truth = np.asarray(truth)
    num_panels = truth.shape[1]
    x = np.asarray(times)
    names = [f"sensor {p}" for p in range(num_panels)] if sensors is None else sensors
    horizons = sorted({h for by in forecasts.values() for h in by}, reverse=True)
    styles = look.of(forecasts)
    size = (9.0, 0.9 + 2.0 * num_panels)
    figure, panels = new_panels(num_panels, 1, size, look.title)
    for p, axes in enumerate(panels):
        axes.plot(x, truth[:, p], color=TRUTH_COLOUR, linewidth=2.2, label="measured")
        for method, by_horizon in forecasts.items():
            for ahead, values in sorted(by_horizon.items(), reverse=True):
                seeds = np.asarray(values)[..., p].reshape(-1, len(x))
                colour, mean = styles[method][0], seeds.mean(axis=0)
                axes.plot(
                    x,
                    mean,
                    color=colour,
                    linewidth=1.5,
                    linestyle=DASHES[horizons.index(ahead) % len(DASHES)],
                    label=f"{method}, {in_words(ahead)} ahead",
                )
                if len(seeds) > 1:
                    _band(axes, x, mean, seeds.std(axis=0, ddof=1), colour)
        label_axes(axes, "", f"readings ({unit})", str(names[p]))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        locator = axes.xaxis.get_major_locator()
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    panels[-1].set_xlabel("time")
    add_legend(figure, panels[0])
    return figure


@by_first
def save(figure: "Figure", path: str | os.PathLike) -> None:
    """Writes the figure as a PNG, whole or not at all; makes the folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    as_written(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})


def as_written(figure: "Figure") -> None:
    """Has all texts drawn as they are: a $ in a user's unit or name is no formula.

    But for the powers of ten at an axis with a logarithmic scale, which are.
    """
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    powers = [
        label
        for axis in axes
        if axis.get_scale() == "log"
        for label in axis.get_ticklabels(which="both")
    ]
    for text in figure.findobj(Text):
        if not any(text is label for label in powers):
            text.set_parse_math(False)


def new_figure(size: tuple[float, float], **options: Any) -> "Figure":
    """Makes a white figure of a size in inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def new_panels(rows, columns, size, title="") -> "tuple[Figure, np.ndarray]":
    """Makes a figure in the common style and its axes, row by row."""
    figure = new_figure(size, layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_SIZE)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def draw_lines(axes: "Axes", series: Mapping[str, Line], look: Look) -> None:
    """Draws a line per entry of `series`, with markers where there are few points."""
    styles = look.of(series)
    for name, line in series.items():
        x, y, spread = Line(*line)
        y, (colour, dashes) = np.asarray(y, float), styles[name]
        axes.plot(
            x,
            y,
            label=name,
            color=colour,
            linewidth=1.8,
            linestyle=dashes,
            marker="o" if len(y) <= MOST_MARKERS else None,
            markersize=4,
        )
        if spread is not None:
            _band(axes, x, y, spread, colour)


def _band(axes: "Axes", x, y, spread, colour):
    """Draws what is within `spread` of a line."""
    low, high = np.subtract(y, spread), np.add(y, spread)
    axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def label_axes(axes: "Axes", xlabel, ylabel, title="") -> None:
    """Writes the labels of both axes and the title of a panel."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontsize=FONT_SIZE)


def add_legend(figure: "Figure", axes: "Axes") -> None:
    """Puts one legend for all panels below them, which keep their height."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(handles), LEGEND_COLUMNS)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False
        )
        more = max(0, math.ceil(len(handles) / columns) - LEGEND_ROWS)
        figure.set_figheight(figure.get_figheight() + more * LEGEND_ROW)
