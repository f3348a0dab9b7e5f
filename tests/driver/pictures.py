"""Where things are in a figure, for tests of pictures."""

from matplotlib.text import Text

from fedjax_graph.driver import plots


def covers(a, b):
    """Whether two boxes have an area in common."""
    return min(a.x1, b.x1) > max(a.x0, b.x0) and min(a.y1, b.y1) > max(a.y0, b.y0)


def contains(outer, inner):
    return (outer.min <= inner.min).all() and (inner.max <= outer.max).all()


def text_boxes(figure):
    """Where the texts of the first panel are, in pixels; arrows left out."""
    figure.dpi = plots.DPI
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    return {
        text.get_text(): Text.get_window_extent(text, renderer)
        for text in figure.axes[0].texts
    }


def plot(axes, label):
    """The line of that label."""
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line
