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
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.testing as npt

from experiments.benchmarks import clients_picture, small_task
from experiments.benchmarks.client_peers import PEERS, Average
from experiments.benchmarks.measure import Measure, in_turn, resident_bytes
from experiments.benchmarks.settings import BenchmarkSettings
from experiments.benchmarks.small_task import Examples, Params
from experiments.studies.folders import make_folder
from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core import clients
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver.client_store import ClientStore

TOLERANCE = 1e-5  # by which models that should be the same may differ
SLOW = ("fedjax",)  # whose rounds take seconds: one a repeat, not --cohort_rounds
PASSED = "ditto"  # whose rounds go through everybody as well
IN_FILES = "_in_files"
Cohort = tuple[np.ndarray, jax.Array]  # indices of its clients, and the round's key


class Candidate(NamedTuple):
    """What is measured."""

    round: Callable[[np.ndarray, jax.Array], Any]  # of a cohort
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


def cohort_of(settings: BenchmarkSettings, num_clients: int, number: int) -> Cohort:
    """Drawn for a round of that number."""
    key = jax.random.fold_in(jax.random.key(1), number)
    size = min(settings.cohort, num_clients)
    return clients.draw_indices(key, num_clients, size), key


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
    gc.collect()
    start = resident_bytes()
    data = small_task.make_examples(num_clients)
    of_data, candidates = resident_bytes() - start, {}
    sizes = {"data": sum(x.nbytes for x in data)}
    sizes["models"] = 4 * small_task.num_parameters() * num_clients
    for name in settings.client_parts:
        if name in PEERS and name not in peers:
            continue
        before, method = resident_bytes(), name.removesuffix(IN_FILES)
        if name in peers:
            candidates[name] = of_peer(peers[name], data)
        else:
            own = None if name == method else folder
            candidates[name] = of_store(method, data, own)
        candidates[name].round(*cohort_of(settings, num_clients, 0))
        sizes[f"{name}_resident"] = of_data + resident_bytes() - before
    assert_same_models(candidates)
    mib = {f"{name}_mib_{num_clients}": x / 2**20 for name, x in sizes.items()}
    return Population(num_clients, candidates, mib)


def drawn(settings: BenchmarkSettings, num_clients: int) -> Iterator[Cohort]:
    """Cohorts of the rounds after the first."""
    return (cohort_of(settings, num_clients, i) for i in itertools.count(1))


def passes(settings: BenchmarkSettings, num_clients: int) -> Iterator[Cohort]:
    """Cohorts that go through all clients, and again."""
    order = np.random.default_rng(0).permutation(num_clients)
    size = min(settings.cohort, num_clients)
    for number in itertools.count():
        places = np.arange(size) + number * size
        key = jax.random.fold_in(jax.random.key(2), number)
        yield np.sort(np.take(order, places, mode="wrap")), key


def next_round(candidate: Candidate, cohorts: Iterator[Cohort], figure: str) -> Measure:
    """Times one round after another, in microseconds for each client."""

    def measure():
        start = time.perf_counter()
        indices, key = next(cohorts)
        candidate.round(indices, key)
        return {figure: 1e6 * (time.perf_counter() - start) / len(indices)}

    return measure


def time_in_turn(
    settings: BenchmarkSettings, populations: Sequence[Population]
) -> dict[str, float]:
    """Microseconds for each client, by candidate and number of clients.

    What writes files takes turns apart from the others, whom the disk would disturb.
    The rounds of a pass go through the largest population once.
    """
    of_pass = max(settings.client_counts) / settings.cohort / settings.repeats
    rounds = {"memory": settings.cohort_rounds, "files": settings.cohort_rounds}
    rounds |= {"slow": 1, "pass": math.ceil(of_pass)}
    groups = {name: {} for name in rounds}
    for num_clients, candidates, _ in populations:
        for name, candidate in candidates.items():
            figure, cohorts = f"{name}_us_{num_clients}", drawn(settings, num_clients)
            own = "files" if name.endswith(IN_FILES) else "memory"
            own = groups["slow" if name in SLOW else own]
            own[figure] = next_round(candidate, cohorts, figure)
        if PASSED in candidates:
            cohorts = passes(settings, num_clients)
            figure = f"{PASSED}_pass_us_{num_clients}"
            groups["pass"][figure] = next_round(candidates[PASSED], cohorts, figure)

    def take_turns(name):
        often = dataclasses.replace(settings, repeats=rounds[name])
        return in_turn(often, groups[name])

    return in_turn(settings, {x: functools.partial(take_turns, x) for x in groups})


def benchmark_clients(settings: BenchmarkSettings) -> dict[str, Any]:
    """Microseconds for each client and resident memory, by number of clients.

    Raises:
      InputError: if nothing of --client_parts is installed, or --workdir cannot be
        made.
    """
    peers = known_peers(settings.client_parts)
    if set(settings.client_parts) <= set(PEERS) - set(peers):
        raise InputError(
            "--client_parts: none of it is installed; see the extra [peers]"
        )
    if settings.workdir:
        make_folder("workdir", pathlib.Path(settings.workdir))
    with tempfile.TemporaryDirectory() as folder:
        first, *folders = (
            pathlib.Path(folder, str(i)) for i in range(1 + len(settings.client_counts))
        )
        populate(settings, peers, first, settings.cohort)  # compiles the programs
        populations = [
            populate(settings, peers, own, num_clients)
            for own, num_clients in zip(folders, settings.client_counts, strict=True)
        ]
        os.sync()  # what the stores wrote
        times = time_in_turn(settings, populations)
    figures = {"cohort": settings.cohort}
    for population in populations:
        figures |= population.mib
    figures |= times
    if settings.workdir:
        path = pathlib.Path(settings.workdir, "many_clients.png")
        clients_picture.write(path, settings.client_counts, figures)
    return figures
