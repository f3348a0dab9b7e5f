"""What all pictures of a run have in common: a colour for each method, and a title."""

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.studies.base import Study
from fedjax_graph.driver.plots import Look


def look(
    study: Study,
    data: str,
    methods: Iterable[str],
    titles: Mapping[str, str],
    *said: str,
) -> Look:
    """The look of a run's pictures.

    Args:
      study: its seeds.
      data: name and size of the dataset.
      methods: of the run, resumed ones first, whose order gives the colours; maybe
        with their entries of `results.json`, of which some may be of other seeds.
      titles: of the methods.
      said: what the title says else, such as whether missing readings count.
    """
    shown = tuple(titles.get(method, method) for method in methods)
    entries = methods.values() if isinstance(methods, Mapping) else ()
    seeds = {_seeds(entry["flags"]) for entry in entries if "flags" in entry}
    is_same = seeds <= {_seeds(study.record())}
    words = seeds_in_words(study) if is_same else "seeds differ by method"
    return Look(shown, ", ".join([data, words, *filter(None, said)]))


def _seeds(flags: Mapping[str, Any]) -> tuple[Any, ...]:
    return flags.get("seed"), flags.get("num_seeds")


def seeds_in_words(study: Study) -> str:
    """The seeds of a run: `seed 0`, `seeds 0 to 4`."""
    first, last = study.seeds[0], study.seeds[-1]
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def masked(is_masked: bool, what: str) -> str:
    """Whether readings that are missing count in an error or a loss."""
    return f"{what} {'masked' if is_masked else 'unmasked'}"
