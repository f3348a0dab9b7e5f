"""What stands below the pictures of a run: what is drawn, and what bands mean."""

import fnmatch
from typing import NamedTuple

SEEDS = (
    "Of several seeds the line is their mean and the band one standard deviation to "
    "either side."
)


class Caption(NamedTuple):
    """A picture's heading and text."""

    title: str
    text: str


CAPTIONS = {  # file name or pattern -> caption, in the order of the report
    "forecasts.png": Caption(
        "Forecast against truth",
        "Readings over a day of the test part at the three sensors whose readings vary "
        "most, and what each trained method had said twelve steps before. Gaps are "
        f"readings that are missing. {SEEDS}",
    ),
    "rmse_by_horizon.png": Caption(
        "Error by how far ahead is forecast",
        "Root of the mean squared error on the test part, over all sensors, a missing "
        f"reading counted as the 0 that the file has. {SEEDS}",
    ),
    "convergence.png": Caption(
        "Convergence",
        "The figure of the validation part that the paper's plots show, by round. "
        f"{SEEDS}",
    ),
    "search_curves.png": Caption(
        "The searches",
        "The best and the mean score of the architectures of each generation, higher "
        "is better. The band around the best is its standard deviation over the "
        "clients, not over seeds.",
    ),
    "accuracy_and_complexity.png": Caption(
        "Accuracy and size",
        "Each point is a network: its parameters, and its test accuracy averaged over "
        "its trainings. Large points are networks that a search found, small ones are "
        "fixed networks; the size of a point means nothing else.",
    ),
    "architecture_*.png": Caption(
        "The network that was found",
        "Boxes are layers, arrows say whose output a layer reads. The grey boxes are "
        "the input and the output stage.",
    ),
    "training_curves.png": Caption(
        "Training",
        "The training loss, and the figure of the validation part by which the best "
        f"round is chosen. {SEEDS}",
    ),
    "strategies.png": Caption(
        "Training strategies",
        f"As above, of the chosen strategies under the paper's names. {SEEDS}",
    ),
    "communication.png": Caption(
        "Error by what was exchanged",
        "The lowest validation error so far over the bytes that clients and server had "
        f"sent by then, on a logarithmic axis. {SEEDS}",
    ),
    "client_graph.png": Caption(
        "The graph of clients",
        "A row is a client and a column one that it takes from: the darker the cell, "
        "the larger the weight. Each panel has a scale of its own.",
    ),
    "sensors.png": Caption(
        "Sensors",
        "Where the sensors are; circles were trained on, triangles only tested on.",
    ),
    "robustness.png": Caption(
        "Accuracy by the share of clients that misbehave",
        f"Test accuracy of FedAvg by each aggregator, in percent. {SEEDS}",
    ),
    "sweep.png": Caption(
        "The sweep",
        "The scores of the runs over the values that were swept. Of curves the band is "
        "one standard deviation over seeds to either side; cells of a heat map bear "
        "their values.",
    ),
}


def find(name: str) -> tuple[int, Caption]:
    """The place and the caption of a picture; others come last, under their names."""
    for place, (pattern, caption) in enumerate(CAPTIONS.items()):
        if fnmatch.fnmatch(name, pattern):
            return place, caption
    return len(CAPTIONS), Caption(name.removesuffix(".png").replace("_", " "), "")
