import matplotlib.image
import numpy as np
import numpy.testing as npt
import pytest
from matplotlib.colors import to_rgb

from fedjax_graph.driver import maps, plots
from tests.driver.pictures import plot

GRAPHS = {"given": np.eye(3), "learnt": np.array([[0, 0.2, 0.4], [0.1, 0, 0.3]])}


def test_heat_maps_have_a_scale_each():
    figure = maps.heat_maps_figure(GRAPHS, "sender", "receiver")
    panels, bars = figure.axes[: len(GRAPHS)], figure.axes[len(GRAPHS) :]
    assert [axes.get_title(loc="left") for axes in panels] == list(GRAPHS)
    assert len(bars) == len(panels)
    for axes, bar, matrix in zip(panels, bars, GRAPHS.values(), strict=True):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array(), matrix)
        assert image.get_clim() == bar.get_ylim() == (0, matrix.max())
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("sender", "receiver")


def test_heat_maps_are_dark_where_large():
    matrix = np.array([[0.0, 0.5], [0.25, 2.0]])
    (image,) = maps.heat_maps_figure({"a": matrix}, "x", "y").axes[0].images
    brightness = image.to_rgba(matrix)[..., :3].sum(-1)
    assert list(np.argsort(-brightness, axis=None)) == [0, 2, 1, 3]
    assert brightness[0, 0] > 2.9 and brightness[1, 1] < 1


def test_heat_maps_are_the_same_png_twice(tmp_path):
    paths = [tmp_path / "new" / name for name in ("a.png", "b.png")]
    for path in paths:
        maps.heat_maps(path, GRAPHS, "sender", "receiver")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    pixels = matplotlib.image.imread(paths[0])[..., :3]
    assert min(pixels.shape[:2]) > 400
    darkest = np.array(to_rgb("#08306B"))  # of the colour map: the diagonal
    assert (np.abs(pixels - darkest).max(-1) < 0.02).sum() > 1000


def test_heat_maps_of_no_edges_are_drawn(tmp_path):
    path = tmp_path / "empty.png"
    maps.heat_maps(path, {"none": np.zeros((3, 3))}, "sender", "receiver")
    assert (matplotlib.image.imread(path)[..., :3] > 0.96).all(-1).mean() > 0.9


def test_heat_maps_with_ticks_bear_their_values():
    matrix = np.array([[11.5, 12.25], [11.0, 13.0], [12.0, 11.75]])
    ticks = ([1, 10, 20], [2, 3])
    figure = maps.heat_maps_figure({"a": matrix}, "x", "y", ticks)
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


def test_heat_maps_leave_out_what_is_no_number():
    """As of a pair of a sweep that diverged."""
    matrix, ticks = np.reshape([1.0, None, 2.0, 3.0], (2, 2)), ((1, 2), (1, 2))
    axes = maps.heat_maps_figure({"a": matrix}, "x", "y", ticks).axes[0]
    assert axes.images[0].get_clim() == (1, 3)
    assert [text.get_text() for text in axes.texts] == ["1", "nan", "2", "3"]
    assert axes.texts[1].get_color() == plots.TRUTH_COLOUR
    nothing = np.full((2, 2), None)
    axes = maps.heat_maps_figure({"a": nothing}, "x", "y", ticks).axes[0]
    assert {text.get_text() for text in axes.texts} == {"nan"}


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_heat_maps_of_a_single_cell_are_drawn(tmp_path, value):
    path = tmp_path / "one.png"
    maps.heat_maps(path, {"one": np.full((1, 1), value)}, "x", "y", ([1], [1]))
    assert np.ptp(matplotlib.image.imread(path)) > 0.5


def test_a_map_has_seen_and_unseen_sensors(tmp_path):
    longitude, latitude = np.array([-118.4, -118.2, -118.3]), np.array([34.1, 34, 34.2])
    is_seen = np.array([True, False, True])
    figure = maps.sensor_map_figure(longitude, latitude, is_seen)
    (axes,) = figure.axes
    indices = np.stack([longitude, latitude], axis=1)
    npt.assert_array_equal(plot(axes, "seen in training: 2").get_xydata(), indices[::2])
    npt.assert_array_equal(plot(axes, "unseen: 1").get_xydata(), indices[1:2])
    colours = {to_rgb(line.get_color()) for line in axes.lines}
    assert len(colours) == len(axes.lines) == 2
    kilometres = np.cos(np.deg2rad(np.mean(latitude)))  # of a degree east, over north
    assert axes.get_aspect() == pytest.approx(1 / kilometres)
    path = tmp_path / "map.png"
    maps.sensor_map(path, longitude, latitude, is_seen)
    assert np.ptp(matplotlib.image.imread(path)) > 0.5


def test_clients_have_whole_numbers_on_both_axes():
    look = plots.Look(title="tiny")
    figure = maps.heat_maps_figure({"a": np.eye(3)}, "x", "y", look=look)
    assert figure.get_suptitle() == "tiny"
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert all(tick == int(tick) for tick in axis.get_majorticklocs())
