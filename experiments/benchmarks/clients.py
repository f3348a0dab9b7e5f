"""Rounds of many clients whose states and data the host keeps; see `ClientStore`.

As many clients as --client_counts says learn a small model. Each round has a cohort of
--cohort clients: drawn anew from all, and as a pass in which each client is in one
cohort. Beside the library stand the same rounds of FedAvg as others write them, on the
same cohorts of the same arrays. All have to come to one model before they are timed;
then they take turns, a round at a time.
"""

import dataclasses
import functools
import gc
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.testing as npt

from experiments.benchmarks import clients_picture, small_task
from experiments.benchmarks.client_peers import PEERS, Average
from experiments.benchmarks.measure import Measure, in_turn, resident_bytes, seconds
from experiments.benchmarks.settings import BenchmarkSettings
from experiments.benchmarks.small_task import Examples, Params
from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core import clients
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.driver.client_store import ClientStore

TOLERANCE = 1e-5  # by which models that should be the same may differ
SLOW = ("fedjax",)  # whose rounds take seconds: one a repeat, not --cohort_rounds
PASSED = "ditto"  # whose rounds go through everybody as well
IN_FILES = "_in_files"


class Candidate(NamedTuple):
    """What is measured."""

    round: Callable[[np.ndarray, jax.Array], Any]  # of a cohort's indices, with a key
    model: Callable[[], Params]  # the mean after the last round


class Population(NamedTuple):
    """Clients, who runs rounds of them, and the memory that they take."""

    num_clients: int
    candidates: dict[str, Candidate]
    mib: dict[str, float]


@functools.cache
def algorithm_of(method: str) -> FederatedAlgorithm:
    """A method of the library, whose programs all of its stores share."""
    config = make_config(method, {"task": small_task.SmallTask()})
    return get_method(method).factory(config)


def of_store(
    method: str, data: Examples, folder: pathlib.Path | None = None
) -> Candidate:
    """The library's rounds, with states in memory or in a folder."""
    store = ClientStore(algorithm_of(method), data, jax.random.key(0), folder)

    def model():
        state, _ = store.gather(np.arange(1))
        server = getattr(state, "server", state)
        return jax.tree.map(lambda x: x[0], server.models["params"])

    return Candidate(store.round, model)


def of_peer(average: Average, data: Examples) -> Candidate:
    """Another's rounds, of cohorts that NumPy gathers."""
    params = jax.device_get(small_task.init(jax.random.key(0)))

    def round_(indices, key):
        nonlocal params
        del key
        params = jax.device_get(average(params, data.x[indices], data.y[indices]))

    return Candidate(round_, lambda: params)


def known_peers(names: Sequence[str]) -> dict[str, Average]:
    """Those that can be imported; one line on stderr for each other."""
    found = {}
    for name in filter(PEERS.__contains__, names):
        try:
            found[name] = PEERS[name]()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def assert_same_models(candidates: Mapping[str, Candidate]) -> None:
    """Checks that rounds which should give one model have done so.

    Raises:
      AssertionError: naming who differs from the first.
    """
    first, *_ = models = {name: x.model() for name, x in candidates.items()}
    for name, model in models.items():
        for leaf, x in model.items():
            npt.assert_allclose(
                x, models[first][leaf], 0, TOLERANCE, err_msg=f"{leaf}: {name}, {first}"
            )


def cohort_of(
    settings: BenchmarkSettings, num_clients: int, number: int
) -> tuple[np.ndarray, jax.Array]:
    """The cohort of a round, as indices, and the round's key."""
    key = jax.random.fold_in(jax.random.key(1), number)
    size = min(settings.cohort, num_clients)
    return clients.draw_indices(key, num_clients, size), key


def settled_bytes() -> int:
    """Resident memory without what nobody holds any more."""
    gc.collect()
    return resident_bytes()


def populate(
    settings: BenchmarkSettings,
    peers: Mapping[str, Average],
    folder: pathlib.Path,
    num_clients: int,
) -> Population:
    """Makes clients and who runs their rounds, and runs a first round of each.

    Raises:
      AssertionError: see `assert_same_models`.
    """
    start = settled_bytes()
    data = small_task.make_examples(num_clients)
    of_data, candidates = settled_bytes() - start, {}
    sizes = {"data": sum(x.nbytes for x in data)}
    sizes["models"] = 4 * small_task.num_parameters() * num_clients
    for name in settings.client_parts:
        if name in PEERS and name not in peers:
            continue
        before, method = settled_bytes(), name.removesuffix(IN_FILES)
        if name in peers:
            candidates[name] = of_peer(peers[name], data)
        else:
            own = None if name == method else folder
            candidates[name] = of_store(method, data, own)
        candidates[name].round(*cohort_of(settings, num_clients, 0))
        sizes[f"{name}_resident"] = of_data + settled_bytes() - before
    assert_same_models(candidates)
    mib = {f"{name}_mib_{num_clients}": x / 2**20 for name, x in sizes.items()}
    return Population(num_clients, candidates, mib)


def next_round(
    settings: BenchmarkSettings, population: Population, name: str
) -> Measure:
    """Times one round after another, in microseconds for each client of a cohort."""
    num_clients, numbers = population.num_clients, itertools.count(1)

    def round_():
        cohort, key = cohort_of(settings, num_clients, next(numbers))
        population.candidates[name].round(cohort, key)

    size = min(settings.cohort, num_clients)
    return lambda: {f"{name}_us_{num_clients}": 1e6 * seconds(round_) / size}


def whole_pass(
    settings: BenchmarkSettings, population: Population, name: str
) -> Measure:
    """Times rounds in which each client is in one cohort."""
    num_clients, size = population.num_clients, settings.cohort
    order = np.random.default_rng(0).permutation(num_clients)

    def pass_():
        for start in range(0, num_clients, size):
            key = jax.random.fold_in(jax.random.key(2), start)
            cohort = np.sort(order[start : start + size])
            population.candidates[name].round(cohort, key)

    return lambda: {f"{name}_pass_us_{num_clients}": 1e6 * seconds(pass_) / num_clients}


def time_in_turn(
    settings: BenchmarkSettings, populations: Sequence[Population]
) -> dict[str, float]:
    """Microseconds for each client, by candidate and number of clients."""
    often = dataclasses.replace(settings, repeats=settings.cohort_rounds)
    fast, rare = {}, {}
    for x in populations:
        for name in x.candidates:
            measures = rare if name in SLOW else fast
            measures[f"{name}_{x.num_clients}"] = next_round(settings, x, name)
        if PASSED in x.candidates:
            rare[f"pass_{x.num_clients}"] = whole_pass(settings, x, PASSED)
    return in_turn(settings, {"fast": lambda: in_turn(often, fast)} | rare)


def benchmark_clients(settings: BenchmarkSettings) -> dict[str, Any]:
    """Microseconds for each client and resident memory, by number of clients."""
    peers = known_peers(settings.client_parts)
    with tempfile.TemporaryDirectory() as folder:
        first, *folders = (
            pathlib.Path(folder, str(i)) for i in range(1 + len(settings.client_counts))
        )
        populate(settings, peers, first, settings.cohort)  # compiles the programs
        populations = [
            populate(settings, peers, own, num_clients)
            for own, num_clients in zip(folders, settings.client_counts, strict=True)
        ]
        times = time_in_turn(settings, populations)
    figures = {"cohort": settings.cohort}
    for population in populations:
        figures |= population.mib
    figures |= times
    if settings.workdir:
        path = pathlib.Path(settings.workdir, "many_clients.png")
        clients_picture.write(path, settings.client_counts, figures)
    return figures
