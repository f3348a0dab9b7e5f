"""Drawn architectures: boxes apart, arrows around them."""

import itertools

import numpy as np
import numpy.testing as npt
import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text

from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import diagrams
from fedjax_graph.models.architecture import diagram, parse
from tests.driver.pictures import contains, covers, text_boxes

CODES = (
    "3,6,0,0,6,54,55,5",  # published for Cora
    "3,1,14,27,2,52,66,5",  # two chains
    "3,2,3,4,5,6,7,5",  # all read the input stage
    "3,5,2,16,30,44,12,1",
    "1,0,0,0,0,0,0,5",
)


def drawn(labels, edges, title=""):
    """A figure, its boxes by text and its arrows, both in the panel's units."""
    figure = diagrams.architecture_figure(labels, edges, title)
    (axes,) = figure.axes
    boxes = [p for p in axes.patches if isinstance(p, FancyBboxPatch)]
    arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    indices = {
        text.get_text(): box.get_bbox()
        for text, box in zip(axes.texts, boxes, strict=True)
    }
    return figure, indices, [arrow._path_original for arrow in arrows]


def ladder(num_rows):
    """Two chains, and an edge from every place to every place after the next."""
    indices = range(2 * num_rows)
    labels = {index: f"place {index}" for index in indices}
    edges = [(a, b) for a in indices for b in indices if b == a + 2 or b > a + 4]
    return labels, edges


@pytest.mark.parametrize(
    "labels, edges",
    [
        *(
            diagram(parse(code), fusion, "2022")
            for code in CODES
            for fusion in ("leaves", "all")
        ),
        ladder(4),
        ({0: "alone"}, []),
    ],
)
def test_boxes_are_apart_and_arrows_lead_around_them(labels, edges):
    figure, boxes, arrows = drawn(labels, edges, "a title")
    assert set(boxes) == {text.replace(": ", ":\n") for text in labels.values()}
    assert len(arrows) == len(edges)
    for a, b in itertools.combinations(boxes.values(), 2):
        assert not covers(a, b)
    by_index = dict(zip(labels, boxes.values(), strict=True))
    for (start, end), arrow in zip(edges, arrows, strict=True):
        first, last = arrow.vertices[[0, -1]]
        npt.assert_allclose([first[1], last[1]], [by_index[start].y0, by_index[end].y1])
        assert by_index[start].x0 < first[0] < by_index[start].x1
        assert by_index[end].x0 < last[0] < by_index[end].x1
        assert by_index[start].y0 > by_index[end].y1
        curve = arrow.to_polygons(closed_only=False)
        points = np.concatenate(
            [
                np.linspace(a, b, 20)
                for line in curve
                for a, b in itertools.pairwise(line)
            ]
        )
        for box in boxes.values():
            inside = (points > box.min + 1e-6) & (points < box.max - 1e-6)
            assert not inside.all(axis=1).any()
    (axes,), texts = figure.axes, text_boxes(figure)
    for text, box in boxes.items():
        in_pixels = box.transformed(axes.transData)
        assert contains(in_pixels, texts[text]), text
        assert contains(figure.bbox, in_pixels), text


def test_rows_are_the_longest_paths():
    labels = {i: f"layer: {i}" for i in (7, 1, 2, 3, 4)}
    edges = [(7, 1), (1, 2), (2, 4), (7, 4), (3, 4)]
    _, boxes, _ = drawn(labels, edges)
    heights = {int(text[-1]): box.y0 for text, box in boxes.items()}
    assert boxes["layer:\n7"].y0 == -boxes["layer:\n7"].y1
    assert heights[7] == heights[3] > heights[1] > heights[2] > heights[4]
    steps = np.diff([heights[index] for index in (7, 1, 2, 4)])
    npt.assert_allclose(steps, steps[0])


def test_both_ends_have_another_colour_than_what_is_between():
    figure = diagrams.architecture_figure({0: "a", 1: "b", 2: "c"}, [(0, 1), (1, 2)])
    colours = [
        patch.get_edgecolor()
        for patch in figure.axes[0].patches
        if isinstance(patch, FancyBboxPatch)
    ]
    assert colours[0] == colours[2] != colours[1]


def test_the_arrow_of_a_chain_is_straight_and_a_wide_title_fits():
    title = "a title that is longer than the boxes are wide"
    figure, _, (arrow,) = drawn({0: "a", 1: "b"}, [(0, 1)], title)
    npt.assert_allclose(arrow.vertices[:, 0], arrow.vertices[0, 0], atol=1e-9)
    text_boxes(figure)
    (written,) = figure.findobj(lambda x: isinstance(x, Text) and x.get_text() == title)
    assert contains(figure.bbox, written.get_window_extent())


@pytest.mark.parametrize(
    "labels, edges, message",
    [
        ({}, [], "without boxes: expected at least one"),
        ({0: "a"}, [(0, 1)], r"edge \(0, 1\) joins a place without label; labelled: 0"),
        ({0: "a", 1: "b"}, [(0, 1), (1, 0)], "a cycle, (0 -> 1 -> 0|1 -> 0 -> 1);"),
    ],
)
def test_no_architecture(tmp_path, labels, edges, message):
    with pytest.raises(InputError, match=message):
        diagrams.architecture(tmp_path / "a.png", labels, edges)
    assert not list(tmp_path.iterdir())
