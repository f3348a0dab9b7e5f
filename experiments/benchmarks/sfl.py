"""The hot loops of SFL: aggregation of large models, and a round of ResNet9."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.measure import (
    Measure,
    compiled,
    copy_rate,
    in_turn,
    matmul_rate,
    peak_memory_bytes,
    peer_output,
    seconds,
)
from experiments.benchmarks.settings import BenchmarkSettings
from fedjax_graph import algorithms
from fedjax_graph.algorithms.sfl import structure_learning
from fedjax_graph.core import aggregation, clients, graphs, mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images.label_shards import ImageData
from fedjax_graph.tasks.images import ImageTask


def random_models(settings: BenchmarkSettings) -> dict[str, jax.Array]:
    """One leaf [C, P], drawn a row at a time: it may fill most of the memory."""
    keys = jax.random.split(jax.random.key(0), settings.models)

    def row(key):
        return jax.random.normal(key, (settings.parameters,))

    return {"w": jax.jit(lambda keys: jax.lax.map(row, keys))(keys)}


def aggregation_measures(settings: BenchmarkSettings) -> dict[str, Measure]:
    """Seconds of A^m V, of the mean and of the distances, of all models."""
    num_models, stacked = settings.models, random_models(settings)
    adjacency = jax.random.uniform(jax.random.key(1), (num_models, num_models))
    everybody = clients.Cohort(jnp.arange(num_models), jnp.ones(num_models))

    def convolve(stacked, adjacency):
        return aggregation.graph_convolution(adjacency)(stacked, everybody)

    def mean(stacked):
        return aggregation.weighted_mean(stacked, everybody)

    programs = {
        "graph_convolution": (convolve, (stacked, adjacency)),
        "weighted_mean": (mean, (stacked,)),
        "distances": (structure_learning.squared_distances, (stacked,)),
    }

    def measure(name, fn, args):
        program, _ = compiled(fn, *args)
        return lambda: {f"{name}_s": seconds(program, *args)}

    return {
        name: measure(name, *programs[name])
        for name in programs
        if name in settings.parts
    }


def bounds(settings: BenchmarkSettings) -> dict[str, float]:
    """The least seconds that copying and multiplying allow, at their measured rates."""
    num_models, size = settings.models, settings.parameters
    with jax.default_matmul_precision("float32"):  # as the aggregators have it
        rate = matmul_rate(settings)
    return {
        "copy_bound_s": 2 * 4 * num_models * size / copy_rate(settings),
        "product_bound_s": 2 * num_models**2 * size / rate,
    }


def random_images(num_clients: int, images_per_client: int) -> ImageData:
    """Random images, each client with its own; one edge in ten."""
    rng = np.random.default_rng(0)
    total = num_clients * images_per_client
    adjacency = (rng.random((num_clients, num_clients)) < 0.1).astype(np.float32)
    return ImageData(
        images=jnp.asarray(rng.integers(0, 256, (total, 32, 32, 3)), jnp.uint8),
        labels=jnp.asarray(rng.integers(0, 10, total), jnp.int32),
        indices=jnp.arange(total, dtype=jnp.int32).reshape(num_clients, -1),
        mask=jnp.ones((num_clients, images_per_client)),
        mean=jnp.full(3, 0.5),
        std=jnp.full(3, 0.25),
        graph=graphs.from_adjacency(adjacency),
        client_ids=jnp.arange(num_clients, dtype=jnp.int32),
        client_weights=jnp.full(num_clients, float(images_per_client)),
    )


def image_measures(settings: BenchmarkSettings) -> dict[str, Measure]:
    """Images/s of a round of FedAvg with ResNet9, and of a Python loop over clients.

    Where there are several devices, each of them computes the loop's one client.
    """
    is_cpu = mesh.backend() == "cpu"
    batch = settings.image_batch or (16 if is_cpu else 128)
    width = settings.image_width or (8 if is_cpu else 64)
    num_clients = settings.image_clients
    data = random_images(num_clients, batch)
    task = ImageTask(width=width, batch_size=batch, local_epochs=1)
    values = {"task": task, "clients_per_chunk": clients.auto_clients_per_chunk()}

    def build(method):
        config = algorithms.make_config(method, values)
        return algorithms.get_method(method).factory(config)

    key = jax.random.key(0)
    method, alone = build("fed_avg"), build("local")
    state = jax.jit(method.init)(key, data)
    program, compile_s = compiled(method.round, state, data, key)

    def one(i):
        index = jnp.array([i])
        return data._replace(
            indices=data.indices[index],
            mask=data.mask[index],
            graph=graphs.from_adjacency(np.ones((1, 1), np.float32)),
            client_ids=data.client_ids[index],
            client_weights=data.client_weights[index],
        )

    each = [one(i) for i in range(num_clients)]
    start = jax.jit(alone.init)(key, each[0])
    one_program, _ = compiled(alone.round, start, each[0], key)

    def loop():
        # One at a time: of many programs under way, CPU devices wait for each other's.
        models = [
            jax.block_until_ready(one_program(start, own, key)[0].models)
            for own in each
        ]
        stacked = jax.tree.map(lambda *rows: jnp.concatenate(rows), *models)
        everybody = clients.Cohort(jnp.arange(num_clients), data.client_weights)
        return aggregation.weighted_mean(stacked, everybody)

    def rate(name, fn, *args):
        return lambda: {
            f"{name}_images_per_s": num_clients * batch / seconds(fn, *args)
        }

    measures = {
        "compile": lambda: {"round_compile_s": compile_s},
        "round": rate("round", program, state, data, key),
        "loop": rate("loop", loop),
    }
    if settings.peer:
        measures["peer"] = lambda: peer_measure(settings, width, batch, num_clients)
    return measures


def peer_measure(
    settings: BenchmarkSettings, width: int, batch: int, num_clients: int
) -> dict[str, float]:
    """The best of the rates that a peer's script prints as `X images/s`.

    Its arguments are the width, the images of a client's one step, and the clients.

    Raises:
      InputError: if it fails or prints none.
    """
    printed = peer_output(settings, [str(n) for n in (width, batch, num_clients)])
    rates = [float(rate) for rate in re.findall(r"([\d.]+) images/s", printed)]
    if not rates:
        raise InputError(f"the peer {settings.peer_script} prints no images/s")
    return {"peer_images_per_s": max(rates)}


def benchmark_sfl(settings: BenchmarkSettings) -> dict[str, Any]:
    """The figures of SFL that --parts names."""
    parts, figures = settings.parts, {}
    if set(parts) - {"images"}:
        figures |= in_turn(settings, aggregation_measures(settings))
        figures["aggregation_peak_memory_bytes"] = peak_memory_bytes()
        figures |= bounds(settings)
    if "graph_convolution" in parts:
        bound = max(figures["copy_bound_s"], figures["product_bound_s"])
        figures["aggregation_share_of_bound"] = bound / figures["graph_convolution_s"]
    if "images" in parts:
        figures |= in_turn(settings, image_measures(settings))
        rate, loop_rate = figures["round_images_per_s"], figures["loop_images_per_s"]
        figures["speed_over_loop"] = rate / loop_rate
        if settings.peer:
            figures["speed_over_peer"] = rate / figures["peer_images_per_s"]
    return figures
