"""Pictures of architectures: boxes in rows, and arrows between them.

As in `plots`, `f(path, ...)` writes what its `f_figure(...)` draws.
"""

import itertools
import os
from collections.abc import Hashable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Curve
from matplotlib.textpath import text_to_path
from scipy.optimize import isotonic_regression

from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import plots

# In inches.
LINE_HEIGHT = 0.18  # of text
BOX_MARGIN = 0.1  # around the text in a box
LANE_WIDTH = 0.1  # for an arrow that passes between boxes
COLUMN_GAP, ROW_GAP = 0.25, 0.45
PORT_GAP = 0.2  # between arrows at one side of a box
NUM_SWEEPS = 8  # over the rows, to put boxes near those that they are joined to


def architecture(
    path: str | os.PathLike,
    labels: Mapping[int, str],
    edges: Sequence[tuple[int, int]],
    title: str = "",
    colour: str = plots.COLOURS[0],
) -> None:
    """Writes a graph without cycles as boxes in rows, with arrows that lead down.

    Args:
      path: the PNG file.
      labels: text of the box of each place; a colon ends its first line.
      edges: (from, to). A box stands one row below the last from which an arrow leads
        to it. `architecture.diagram` gives labels and edges of a code.
      title: of the picture.
      colour: of boxes between others; the first and the last are black.

    Raises:
      InputError: if there is no box, an edge joins a place without one, or edges make a
        cycle.
    """
    plots.save(architecture_figure(labels, edges, title, colour), path)


def architecture_figure(labels, edges, title="", colour=plots.COLOURS[0]) -> Figure:
    """Draws what `architecture` writes."""
    row_of = _rows(labels, edges)
    chains = _chains(row_of, edges)
    texts = {index: label.replace(": ", ":\n") for index, label in labels.items()}
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
    figure, (axes,) = plots.new_panels(1, 1, high - low + (0.2, 0.5))
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.set_axis_off()
    plots.label_axes(axes, "", "", title)
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
    for index, text in texts.items():
        is_inner = all(index in side for side in zip(*edges, strict=True))
        edge = colour if is_inner else plots.TRUTH_COLOUR
        corner = x[index] - width / 2, y[index] - height / 2
        box = FancyBboxPatch(
            corner,
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=(edge, 0.12),
            edgecolor=edge,
        )
        axes.add_patch(box)
        axes.text(
            x[index], y[index], text, ha="center", va="center", size=plots.FONT_SIZE
        )
    return figure


# A stop is a box, named by its place, or a point (edge, row) where an arrow passes
# between the boxes of a row. Lengths are inches.


def _rows(labels: Mapping[int, str], edges) -> dict[Hashable, int]:
    """Puts each box into the row of the longest path that leads to it."""
    if not labels:
        raise InputError("an architecture without boxes: expected at least one label")
    before = {index: [] for index in labels}
    for edge in edges:
        if not all(index in labels for index in edge):
            raise InputError(
                f"edge {edge} joins a place without label; labelled: "
                f"{', '.join(map(str, labels))}"
            )
        before[edge[1]].append(edge[0])
    row_of = {}
    try:
        for index in TopologicalSorter(before).static_order():
            row_of[index] = max((row_of[p] + 1 for p in before[index]), default=0)
    except CycleError as error:
        cycle = " -> ".join(map(str, error.args[1]))
        raise InputError(
            f"edges make a cycle, {cycle}; expected a graph without"
        ) from None
    return row_of


def _chains(row_of: dict[Hashable, int], edges) -> list[list[Hashable]]:
    """Lists all stops of each edge, and enters the new ones in `row_of`."""
    chains = []
    for i, (start, end) in enumerate(edges):
        passed = {(i, row): row for row in range(row_of[start] + 1, row_of[end])}
        row_of.update(passed)
        chains.append([start, *passed, end])
    return chains


def _columns(row_of, chains, width) -> dict[Hashable, float]:
    """Finds where stops are across: apart within a row, near those they are joined to.

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
    """Finds middles nearest to `goals` of things side by side, in least squares."""
    edges = np.cumsum(np.add(widths, COLUMN_GAP))
    offsets = edges - np.divide(widths, 2)
    return isotonic_regression(goals - offsets).x + offsets


def _ports(chains, x, width) -> np.ndarray:
    """Finds how far from its boxes' middles each arrow starts and ends, [edges, 2].

    Arrows at one side of a box are in the order of where they come from or go to.
    """
    shifts = np.zeros((len(chains), 2))
    for side, (at, near) in enumerate(((0, 1), (-1, -2))):
        for index in {chain[at] for chain in chains}:
            here = [i for i, chain in enumerate(chains) if chain[at] == index]
            here.sort(key=lambda i, near=near: x[chains[i][near]])
            gap = min(PORT_GAP, 0.8 * width / len(here))
            shifts[here, side] = gap * (np.arange(len(here)) - (len(here) - 1) / 2)
    return shifts


def _arrow(points, height, start_shift, end_shift) -> Curve:
    """Joins the stops' centres: curves between rows, upright lines within them."""
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
    font = FontProperties(size=plots.FONT_SIZE)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72
