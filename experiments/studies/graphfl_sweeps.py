"""GraphFL's sweeps: the values of one option, the rows and the curves they give."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from experiments.studies import graphfl_methods
from experiments.studies.graphfl_protocols import PAPER
from experiments.studies.graphfl_settings import GraphFLSettings
from experiments.studies.running import Entry
from fedjax_graph.core import clients
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import plots

StudyType = TypeVar("StudyType", bound=GraphFLSettings)

AXIS_TITLES = {
    "labels_per_class": "labelled nodes of a class",
    "participation": "participating clients",
    "overlap": "share of nodes that neighbouring clients share",
    "pseudo_labels": "pseudo-labels of a class",
}


def parts(study: StudyType, field: str) -> dict[str, StudyType]:
    """The studies of a sweep, by name of their folder: each model over all values.

    Args:
      study: the study of the whole sweep.
      field: name of the option that is swept.

    Raises:
      InputError: if the values cannot be read, or one is not allowed.
    """
    models = [study.model] if study.model else list(PAPER)
    chosen = study.swept_values()
    single = dataclasses.replace(
        study,
        sweep=None,
        sweep_values=None,
        given=study.given - {"sweep", "sweep_values"},
    )
    try:
        return {
            f"{model}-{value}": dataclasses.replace(
                single, model=model, **{field: value}
            )
            for model in models
            for value in chosen
        }
    except InputError as error:
        raise InputError(f"--sweep_values: {error}") from error


def rows(
    field: str,
    part: GraphFLSettings,
    entries: Mapping[str, Entry],
    facts: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The rows of `sweep.json` for one of its studies: one for each method.

    Args:
      field: name of the option that is swept.
      part: the study.
      entries: of that study's `results.json`, by method.
      facts: what else is known of it.
    """
    return [
        {
            "model": part.model,
            "method": method,
            field: getattr(part, field),
            "accuracy": entry["test"]["accuracy"],
            "std": (entry["test_std"] or {}).get("accuracy"),
            **facts,
        }
        for method, entry in entries.items()
    ]


def series(
    sweep: GraphFLSettings, field: str, rows: Sequence[Mapping[str, Any]]
) -> dict[str, plots.Line]:
    """The test accuracy over the values, a curve for each model and method.

    Args:
      sweep: the study of the whole sweep.
      field: name of the option that is swept.
      rows: of `sweep.json`.
    """
    curves, titles = {}, graphfl_methods.titles()
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        own = [row for row in rows if (row["model"], row["method"]) == (model, method)]
        curves[f"{titles.get(method, method)}, {model.upper()}"] = plots.Line(
            [_abscissa(sweep, field, row[field]) for row in own],
            [row["accuracy"] for row in own],
            [row["std"] or 0.0 for row in own],
        )
    return curves


def _abscissa(sweep: GraphFLSettings, field: str, value: float) -> float:
    """Where a swept value stands in the picture: clients, not their share."""
    if field == "participation":
        return clients.cohort_size(sweep.num_clients, value)
    return value
