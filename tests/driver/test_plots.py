import matplotlib.image
import numpy as np
import numpy.testing as npt
import pytest
from matplotlib.colors import to_rgb

from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.driver import diagrams, plots, scatter
from tests.driver.pictures import plot

LOOK = plots.Look(("persistence", "local", "cnfgnn"), "tiny, 5 sensors, seeds 0 to 2")
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
        "validation_loss_by_seed": [0.5, 0.7, None],
    },
]
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
        ),
        lambda path: plots.training_curves(path, RECORDS),
        lambda path: plots.rmse_by_horizon(path, RMSE, STEP, "mph"),
        lambda path: plots.forecasts(path, **day()),
        lambda path: plots.search_curves(path, SEARCH),
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


@pytest.mark.parametrize("text", ["$_$", "a$b$c", "$5"])
def test_a_users_text_is_no_formula(tmp_path, text):
    """Nor does it keep powers of ten from being drawn as such."""
    series = {text: plots.Line([1, 10, 100], [1.0, 10.0, 100.0])}
    look = plots.Look((text,), text)
    figure = plots.curves_figure(series, text, text, look)
    panel = figure.axes[0]
    panel.set_yscale("log")
    plots.save(figure, tmp_path / "curves.png")
    assert figure.get_suptitle() == panel.get_xlabel() == text
    assert legend(figure) == [text]
    texts = [panel.xaxis.label, panel.yaxis.label, *figure.legends[0].get_texts()]
    assert not any(x.get_parse_math() for x in texts)
    assert all(x.get_parse_math() for x in panel.get_yticklabels())
    points = {text: (1.0, 2.0)}
    scatter.scatter(tmp_path / "scatter.png", points, text, text, look)


def test_curves_carry_the_data_and_the_band():
    line = plots.Line([1, 2, 3], [4.0, np.nan, 6.0], [0.5, 0.5, 1.0])
    figure = plots.curves_figure({"a": line, "b": ([1], [2])}, "x (s)", "y (m)", LOOK)
    (axes,) = figure.axes
    np.testing.assert_array_equal(plot(axes, "a").get_ydata(), line.y)
    np.testing.assert_array_equal(plot(axes, "b").get_xdata(), [1])
    (band,) = axes.collections
    assert band.get_datalim(axes.transData).ymax == 7.0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x (s)", "y (m)")
    assert figure.get_suptitle() == LOOK.title
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


def test_a_method_looks_the_same_in_all_pictures_of_a_run():
    """Also where others are left out, or a stranger comes first."""
    figures = [
        plots.training_curves_figure(RECORDS, look=LOOK),
        plots.rmse_by_horizon_figure(RMSE, STEP, "mph", LOOK),
        plots.curves_figure({"a": ([1], [2]), "local": ([1], [2])}, "x", "y", LOOK),
        plots.forecasts_figure(**day(), look=LOOK),
        scatter.scatter_figure({"cnfgnn": (1, 1), "local": (2, 3)}, "x", "y", LOOK),
    ]
    for figure in figures:
        assert figure.get_suptitle() == LOOK.title
        for line in (line for axes in figure.axes for line in axes.lines):
            name = line.get_label().partition(",")[0]
            if name in LOOK.methods:
                assert line.get_color() == plots.COLOURS[LOOK.methods.index(name)]
    assert LOOK.colour("a stranger") == plots.COLOURS[3]
    styles = plots.Look(tuple(map(str, range(30)))).of(())
    assert len(set(styles.values())) == 30


def test_the_deviation_over_seeds_is_a_band():
    data = day(1)
    truth = data["truth"]
    seeds = np.stack([truth, truth + 2])
    data["forecasts"] = {"cnfgnn": {AHEAD[1]: seeds}, "local": {AHEAD[1]: seeds[:1]}}
    (axes,) = plots.forecasts_figure(**data).axes
    line = plot(axes, "cnfgnn, 60 min ahead")
    np.testing.assert_allclose(line.get_ydata(), truth[:, 0] + 1)
    assert len(axes.collections) == 1
    spread = {"cnfgnn": np.full(12, 0.5)}
    (axes,) = plots.rmse_by_horizon_figure(RMSE, STEP, "mph", LOOK, spread).axes
    (band,) = axes.collections
    assert band.get_datalim(axes.transData).ymax == 6.5
    line = plots.history(RECORDS[3:], "validation_loss")
    np.testing.assert_allclose(line.spread, [np.std([0.5, 0.7], ddof=1)])
    assert plots.history(RECORDS[:2], "train_loss").spread is None


def test_whole_numbers_get_whole_ticks():
    figure = plots.curves_figure({"a": ([1, 2, 3], [1, 2, 3])}, "clients", "y")
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())
    figure = plots.curves_figure({"a": ([0.1, 0.2], [1, 2])}, "share", "y")
    assert any(tick != int(tick) for tick in figure.axes[0].get_xticks())


def panel_height(num_lines):
    """Inches of a panel with so many lines in its legend."""
    series = {f"method {i}": plots.Line([1, 2], [0, i]) for i in range(num_lines)}
    figure = plots.curves_figure(series, "round", "accuracy")
    figure.draw_without_rendering()
    return figure.axes[0].get_position().height * figure.get_figheight()


def test_a_long_legend_takes_nothing_from_the_panel():
    assert panel_height(31) == pytest.approx(panel_height(9), rel=0.1)
