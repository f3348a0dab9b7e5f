import itertools

import matplotlib.image
import numpy as np
import numpy.testing as npt
import pytest
from matplotlib.colors import to_rgb

from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.driver import diagrams, plots
from tests.driver.pictures import contains, covers, text_boxes

HOUR = 12
STEP = TimeStep(300)
AHEAD = np.timedelta64(15, "m"), np.timedelta64(1, "h")
START = np.datetime64("2024-01-01T00:00", "ns")
RECORDS = [
    {"method": "cnfgnn", "round": 2, "train_loss": 0.4, "validation_loss": 0.5},
    {"method": "cnfgnn", "round": 1, "train_loss": 0.6},
    {"method": "local", "round": 1, "train_loss": 0.7, "validation_loss": None},
    {
        "method": "local",
        "round": 2,
        "train_loss": float("nan"),
        "validation_loss": 0.6,
        "validation_loss_std": 0.1,
    },
]
GRAPHS = {"given": np.eye(3), "learnt": np.array([[0, 0.2, 0.4], [0.1, 0, 0.3]])}
SEARCH = [
    {"method": "b", "round": 1, "best_score": -0.5, "mean_score": -0.9},
    {
        "method": "a",
        "round": 2,
        "best_score": -0.2,
        "mean_score": -0.6,
        "score_spread": 0.1,
    },
    {"method": "a", "round": 1, "best_score": -0.4, "score_spread": None},
    {"method": "b", "round": 2, "train_loss": 0.3},
]
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
RMSE = {"cnfgnn": np.linspace(2, 6, 12), "persistence": np.linspace(2, 8, 12)}


def speeds(num_sensors):
    hours = np.arange(24 * HOUR)[:, None] / HOUR
    return 60 - 30 * np.exp(-((hours - 8 - np.arange(num_sensors)) ** 2))


def day(num_sensors=2):
    truth = speeds(num_sensors)
    truth[20:30] = np.nan
    late = {ahead: np.roll(truth, int(ahead / STEP.delta), 0) for ahead in AHEAD}
    return {
        "truth": truth,
        "forecasts": {"cnfgnn": late, "local": {AHEAD[1]: truth + 1}},
        "times": START + np.arange(24 * HOUR) * STEP.delta,
        "unit": "km/h",
    }


def plot(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: plots.curves(
            path,
            {"a": ([0, 1, 2, 3], [1, np.nan, 3, 4])},
            "time (s)",
            "speed (mph)",
            "A",
        ),
        lambda path: plots.training_curves(path, RECORDS),
        lambda path: plots.rmse_by_horizon(path, RMSE, STEP, "mph"),
        lambda path: plots.forecasts(path, **day()),
        lambda path: plots.search_curves(path, SEARCH),
        lambda path: plots.scatter(path, POINTS, "x", "y"),
        lambda path: diagrams.architecture(
            path,
            {index: f"place {index}" for index in range(9)},
            [((index - 1) // 2, index) for index in range(1, 9)],
        ),
    ],
    ids=[
        "curves",
        "training_curves",
        "rmse_by_horizon",
        "forecasts",
        "search_curves",
        "scatter",
        "architecture",
    ],
)
def test_writes_the_same_png_twice(tmp_path, write):
    paths = [tmp_path / "new" / "folder" / name for name in ("a.png", "b.png")]
    for path in paths:
        write(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    pixels = matplotlib.image.imread(paths[0])[..., :3]
    assert min(pixels.shape[:2]) > 400
    coloured = np.abs(pixels - to_rgb(plots.COLOURS[0])).max(-1) < 0.02
    assert coloured.sum() > 200 and (pixels == 1).all(-1).mean() > 0.5


def test_curves_carry_the_data_and_the_band():
    line = plots.Line([1, 2, 3], [4.0, np.nan, 6.0], [0.5, 0.5, 1.0])
    figure = plots.curves_figure({"a": line, "b": ([1], [2])}, "x (s)", "y (m)", "T")
    (axes,) = figure.axes
    np.testing.assert_array_equal(plot(axes, "a").get_ydata(), line.y)
    np.testing.assert_array_equal(plot(axes, "b").get_xdata(), [1])
    (band,) = axes.collections
    assert band.get_datalim(axes.transData).ymax == 7.0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x (s)", "y (m)")
    assert axes.get_title(loc="left") == "T"
    assert legend(figure) == ["a", "b"]
    assert plot(axes, "a").get_color() != plot(axes, "b").get_color()
    assert plot(axes, "a").get_linestyle() != plot(axes, "b").get_linestyle()


def test_training_curves_skip_rounds_without_a_value():
    figure = plots.training_curves_figure(RECORDS)
    train, validation = figure.axes
    assert (train.get_ylabel(), train.get_xlabel()) == ("training loss", "round")
    assert validation.get_ylabel() == "validation loss"
    np.testing.assert_array_equal(plot(train, "cnfgnn").get_xdata(), [1, 2])
    np.testing.assert_array_equal(plot(train, "cnfgnn").get_ydata(), [0.6, 0.4])
    np.testing.assert_array_equal(plot(train, "local").get_ydata(), [0.7, np.nan])
    np.testing.assert_array_equal(plot(validation, "cnfgnn").get_xdata(), [2])
    assert len(train.collections) == 0 and len(validation.collections) == 1
    assert legend(figure) == ["cnfgnn", "local"]
    figure = plots.training_curves_figure(RECORDS, ["error", "loss"])
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["training loss", "validation error", "validation loss"]


@pytest.mark.parametrize(
    ("seconds", "ahead", "ticks", "label"),
    [
        (10, np.arange(10, 121, 10) / 60, [0, 0.5, 1, 1.5, 2], "minutes ahead"),
        (300, np.arange(5, 61, 5), [0, 15, 30, 45, 60], "minutes ahead"),
        (900, np.arange(1, 13) / 4, [0, 0.75, 1.5, 2.25, 3], "hours ahead"),
        (3600, np.arange(1, 13), [0, 3, 6, 9, 12], "hours ahead"),
        (86400, np.arange(1, 13), [0, 3, 6, 9, 12], "days ahead"),
    ],
)
def test_rmse_by_horizon_is_over_real_time(seconds, ahead, ticks, label):
    figure = plots.rmse_by_horizon_figure(RMSE, TimeStep(seconds), "veh/5min")
    (axes,) = figure.axes
    line = plot(axes, "persistence")
    np.testing.assert_allclose(line.get_xdata(), ahead)
    np.testing.assert_allclose(axes.get_xticks(), ticks)
    np.testing.assert_array_equal(line.get_ydata(), RMSE["persistence"])
    assert (axes.get_xlabel(), axes.get_ylabel()) == (label, "RMSE (veh/5min)")
    assert axes.get_ylim()[0] == 0


def test_forecasts_have_a_panel_per_sensor_and_a_line_per_horizon():
    data = day()
    figure = plots.forecasts_figure(**data, sensors=["north", "south"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["north", "south"]
    for p, axes in enumerate(figure.axes):
        truth = plot(axes, "measured")
        np.testing.assert_array_equal(truth.get_ydata(), data["truth"][:, p])
        np.testing.assert_array_equal(truth.get_xdata(), data["times"])
        for ahead, values in data["forecasts"]["cnfgnn"].items():
            line = plot(axes, f"cnfgnn, {ahead / np.timedelta64(1, 'm'):g} min ahead")
            np.testing.assert_array_equal(line.get_ydata(), values[:, p])
        assert axes.get_ylabel() == "readings (km/h)" and len(axes.lines) == 4
    one_method = {plot(axes, f"cnfgnn, {m} min ahead").get_color() for m in (15, 60)}
    assert len(one_method) == 1
    assert figure.axes[-1].get_xlabel() == "time"


def test_forecasts_against_wall_clock_time(tmp_path):
    figure = plots.forecasts_figure(**day(1))
    plots.save(figure, tmp_path / "day.png")
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert "12:00" in labels
    assert figure.axes[0].get_title(loc="left") == "sensor 0"


def test_heat_maps_have_a_scale_each():
    figure = plots.heat_maps_figure(GRAPHS, "sender", "receiver")
    maps, bars = figure.axes[: len(GRAPHS)], figure.axes[len(GRAPHS) :]
    assert [axes.get_title(loc="left") for axes in maps] == list(GRAPHS)
    assert len(bars) == len(maps)
    for axes, bar, matrix in zip(maps, bars, GRAPHS.values(), strict=True):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array(), matrix)
        assert image.get_clim() == bar.get_ylim() == (0, matrix.max())
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("sender", "receiver")


def test_heat_maps_are_dark_where_large():
    matrix = np.array([[0.0, 0.5], [0.25, 2.0]])
    (image,) = plots.heat_maps_figure({"a": matrix}, "x", "y").axes[0].images
    brightness = image.to_rgba(matrix)[..., :3].sum(-1)
    assert list(np.argsort(-brightness, axis=None)) == [0, 2, 1, 3]
    assert brightness[0, 0] > 2.9 and brightness[1, 1] < 1


def test_heat_maps_are_the_same_png_twice(tmp_path):
    paths = [tmp_path / "new" / name for name in ("a.png", "b.png")]
    for path in paths:
        plots.heat_maps(path, GRAPHS, "sender", "receiver")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    pixels = matplotlib.image.imread(paths[0])[..., :3]
    assert min(pixels.shape[:2]) > 400
    darkest = np.array(to_rgb("#08306B"))  # of the colour map: the diagonal
    assert (np.abs(pixels - darkest).max(-1) < 0.02).sum() > 1000


def test_heat_maps_of_no_edges_are_drawn(tmp_path):
    path = tmp_path / "empty.png"
    plots.heat_maps(path, {"none": np.zeros((3, 3))}, "sender", "receiver")
    assert (matplotlib.image.imread(path)[..., :3] > 0.96).all(-1).mean() > 0.9


def test_heat_maps_with_ticks_bear_their_values():
    matrix = np.array([[11.5, 12.25], [11.0, 13.0], [12.0, 11.75]])
    ticks = ([1, 10, 20], [2, 3])
    figure = plots.heat_maps_figure({"a": matrix}, "x", "y", ticks)
    axes = figure.axes[0]
    (image,) = axes.images
    assert image.get_clim() == (11, 13)
    found = {text.get_position(): text.get_text() for text in axes.texts}
    assert found == {(j, i): f"{x:g}" for (i, j), x in np.ndenumerate(matrix)}
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert colours["13"] == "white" and colours["11"] == plots.TRUTH_COLOUR
    rows, columns = axes.get_yticklabels(), axes.get_xticklabels()
    assert [text.get_text() for text in rows] == ["1", "10", "20"]
    assert [text.get_text() for text in columns] == ["2", "3"]


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_heat_maps_of_a_single_cell_are_drawn(tmp_path, value):
    path = tmp_path / "one.png"
    plots.heat_maps(path, {"one": np.full((1, 1), value)}, "x", "y", ([1], [1]))
    assert np.ptp(matplotlib.image.imread(path)) > 0.5


def test_a_map_has_seen_and_unseen_sensors(tmp_path):
    longitude, latitude = np.array([-118.4, -118.2, -118.3]), np.array([34.1, 34, 34.2])
    is_seen = np.array([True, False, True])
    figure = plots.sensor_map_figure(longitude, latitude, is_seen)
    (axes,) = figure.axes
    indices = np.stack([longitude, latitude], axis=1)
    npt.assert_array_equal(plot(axes, "seen in training: 2").get_xydata(), indices[::2])
    npt.assert_array_equal(plot(axes, "unseen: 1").get_xydata(), indices[1:2])
    colours = {to_rgb(line.get_color()) for line in axes.lines}
    assert len(colours) == len(axes.lines) == 2
    kilometres = np.cos(np.deg2rad(np.mean(latitude)))  # of a degree east, over north
    assert axes.get_aspect() == pytest.approx(1 / kilometres)
    path = tmp_path / "map.png"
    plots.sensor_map(path, longitude, latitude, is_seen)
    assert np.ptp(matplotlib.image.imread(path)) > 0.5


def test_search_curves_have_a_band_around_the_best():
    figure = plots.search_curves_figure(SEARCH)
    best, mean = figure.axes
    assert (best.get_xlabel(), best.get_ylabel()) == (
        "generation",
        "best federated score",
    )
    assert mean.get_ylabel() == "mean federated score"
    npt.assert_array_equal(plot(best, "a").get_xydata(), [[1, -0.4], [2, -0.2]])
    npt.assert_array_equal(plot(best, "b").get_xydata(), [[1, -0.5]])
    assert all(tick.is_integer() for tick in best.get_xticks())
    npt.assert_array_equal(plot(mean, "a").get_xydata(), [[2, -0.6]])
    npt.assert_array_equal(plot(mean, "b").get_xydata(), [[1, -0.9]])
    (band,) = best.collections
    limits = band.get_datalim(best.transData)
    npt.assert_allclose([limits.ymin, limits.ymax], [-0.4, -0.1])
    assert to_rgb(band.get_facecolor()[0, :3]) == to_rgb(plot(best, "a").get_color())
    assert not mean.collections and sorted(legend(figure)) == ["a", "b"]


# --- Points with names ---------------------------------------------------------------


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
    figure = plots.scatter_figure(points, "x", "y", highlight=list(points)[:1])
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
        reach = (box.size + markers[name].size) / 2 + plots.NAME_DISTANCES[-1] * 3
        assert (np.abs(np.subtract(*middles)) <= reach).all(), name


def test_points_are_where_they_belong_and_highlighted_ones_larger():
    figure = plots.scatter_figure(POINTS, "size", "score", "T", ["GCN", "SGC"])
    (axes,) = figure.axes
    for name, point in POINTS.items():
        npt.assert_array_equal(plot(axes, name).get_xydata(), [point])
    sizes = {name: plot(axes, name).get_markersize() for name in POINTS}
    colours = {name: plot(axes, name).get_color() for name in POINTS}
    assert sizes["GCN"] == sizes["SGC"] > 1.5 * sizes["GAT"]
    assert colours["GCN"] == colours["SGC"] != colours["GAT"] == colours["SAGE"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("size", "score")
    assert axes.get_title(loc="left") == "T"
