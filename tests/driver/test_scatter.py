import itertools

import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.driver import plots, scatter
from tests.driver.pictures import contains, covers, plot, text_boxes

LOOK = plots.Look(("SGC",), "T")
POINTS = {  # millions of parameters and accuracy on Cora, Table 3 of FL-AGCNS
    "FL-AGCNS": (0.105, 82.9),
    "FL-Gradient": (0.045, 65.4),
    "FL-RL": (0.101, 75.6),
    "FL-Random": (0.113, 79.8),
    "GAT": (0.092, 79.0),
    "SAGE": (0.184, 78.8),
    "GCN": (0.102, 81.3),
    "SGC": (0.010, 78.1),
    "APPNP": (0.092, 82.2),
    "AGNN": (0.023, 81.2),
    "ARMA": (0.092, 75.2),
    "GatedGraph": (0.130, 76.6),
}


def scattered(num_points, spread, seed):
    """A cloud, and two points apart from it that make it small."""
    cloud = np.random.default_rng(seed).normal(0, spread, (num_points, 2))
    points = {f"model {i}": tuple(xy) for i, xy in enumerate(cloud)}
    return points | {"low": (-1, -1), "high": (1, 1)}


@pytest.mark.parametrize(
    "points",
    [POINTS, scattered(10, 0.3, 0), scattered(10, 0.1, 1), scattered(6, 0.03, 2)],
)
def test_names_cover_neither_names_nor_points(points):
    figure = scatter.scatter_figure(points, "x", "y", highlight=list(points)[:1])
    (axes,), boxes = figure.axes, text_boxes(figure)
    assert set(boxes) == set(points)
    markers = {line.get_label(): line.get_window_extent() for line in axes.lines}
    for a, b in itertools.combinations(boxes, 2):
        assert not covers(boxes[a], boxes[b]), (a, b)
    for a, b in itertools.product(boxes, markers):
        assert not covers(boxes[a], markers[b]), (a, b)
    for name, box in boxes.items():
        assert contains(axes.bbox, box), name
        middles = (box.min + box.max) / 2, axes.transData.transform(points[name])
        reach = (box.size + markers[name].size) / 2 + scatter.NAME_DISTANCES[-1] * 3
        assert (np.abs(np.subtract(*middles)) <= reach).all(), name


def test_points_are_where_they_belong_and_highlighted_ones_larger():
    figure = scatter.scatter_figure(POINTS, "size", "score", LOOK, ["GCN", "SGC"])
    (axes,) = figure.axes
    for name, point in POINTS.items():
        npt.assert_array_equal(plot(axes, name).get_xydata(), [point])
    sizes = {name: plot(axes, name).get_markersize() for name in POINTS}
    assert sizes["GCN"] == sizes["SGC"] > 1.5 * sizes["GAT"]
    assert plot(axes, "SGC").get_color() == plots.COLOURS[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("size", "score")
    assert figure.get_suptitle() == "T"


def test_it_is_the_same_png_twice(tmp_path):
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        scatter.scatter(path, POINTS, "x", "y")
    assert paths[0].read_bytes() == paths[1].read_bytes()
