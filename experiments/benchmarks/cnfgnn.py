"""The hot loops of CNFGNN: client phase and server step, and a peer's."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.measure import (
    Measure,
    compiled,
    in_turn,
    matmul_rate,
    peak_memory_bytes,
    peer_output,
    seconds,
)
from experiments.benchmarks.settings import TRAFFIC, BenchmarkSettings
from fedjax_graph.algorithms.cnfgnn import cnfgnn
from fedjax_graph.core import aggregation, clients, graphs, mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.models import seq2seq


def random_network(num_nodes: int, num_edges: int, num_windows: int):
    """Random data of a dataset's shape, with `num_windows` training windows."""
    rng = np.random.default_rng(0)
    num_steps = num_windows + windows.WINDOW_STEPS - 1
    return windows.TrafficData(
        speed=jnp.asarray(rng.normal(55, 10, (num_nodes, num_steps)), jnp.float32),
        clock=jnp.asarray(np.arange(num_steps) % 288 / 288, jnp.float32),
        week_slot=jnp.asarray(np.arange(num_steps) % 2016, jnp.int32),
        starts=jnp.arange(num_windows, dtype=jnp.int32),
        mean=jnp.float32(55),
        std=jnp.float32(10),
        graph=graphs.Graph(
            senders=jnp.asarray(rng.integers(0, num_nodes, num_edges), jnp.int32),
            receivers=jnp.asarray(
                np.sort(rng.integers(0, num_nodes, num_edges)), jnp.int32
            ),
            weights=jnp.asarray(rng.random(num_edges), jnp.float32),
            node_mask=jnp.ones(num_nodes),
        ),
        client_ids=jnp.arange(num_nodes, dtype=jnp.int32),
        client_weights=jnp.full(num_nodes, num_windows, jnp.float32),
        step=TimeStep(300),
    )


def client_window_flops(hidden: int) -> int:
    """FLOPs of training on one window: forward and twice that backward."""

    def gru(size):
        return 3 * size * (seq2seq.NUM_FEATURES + size)

    macs = windows.INPUT_STEPS * gru(hidden)
    macs += windows.TARGET_STEPS * (gru(2 * hidden) + 2 * hidden)
    return 3 * 2 * macs


def server_step_flops(config: cnfgnn.CNFGNNConfig, nodes: int, edges: int) -> int:
    """FLOPs of a server step as the model is computed here: split first layers, the
    last edge layer on nodes, a decoder without weight gradients."""
    hidden, (first, *rest) = config.hidden_size, config.gn_mlp_sizes
    out, node_macs, edge_macs = rest[-1], 0, 0
    v, e, u = hidden, 1, hidden
    for depth in range(config.gn_layers):
        is_last = depth == config.gn_layers - 1
        sizes = [first, *rest]
        inner = sum(a * b for a, b in zip(sizes[:-2], sizes[1:-1], strict=True))
        edge_macs += (e * first if depth else 0) + inner
        last = sizes[-2] * out
        node_macs += 2 * v * first + (v + out) * first + inner + last
        node_macs += last if is_last else 0
        edge_macs += 0 if is_last else last
        v, e, u = v + out, e + out, u + out
    node_macs += v * hidden
    state = 2 * hidden
    decoder = windows.TARGET_STEPS * (3 * state * (state + 1) + state)
    batch = config.server_batch_size
    network = 3 * (nodes * node_macs + edges * edge_macs)
    return 2 * batch * (network + 2 * nodes * decoder)


def client_measures(data, config) -> tuple[dict[str, Measure], dict[str, float]]:
    """Step (1) of a round in three forms: chosen mapping, one vmap, Python loop."""
    num_clients, num_windows = len(data.client_ids), len(data.starts)
    params, _ = cnfgnn.make_models(config).init(jax.random.key(0))
    embeddings = jnp.zeros((num_clients, num_windows, config.hidden_size))
    args = (params, embeddings, data, jax.random.key(1), jnp.int32(0))
    programs, compile_s = {}, {}
    chunks = {"client": clients.auto_clients_per_chunk(), "client_vmap": None}
    for name, chunk in chunks.items():
        chosen = dataclasses.replace(config, clients_per_chunk=chunk)
        phase = cnfgnn.client_phase(chosen)
        programs[name], compile_s[name] = compiled(phase, *args)
    one = cnfgnn.client_phase(config, aggregation.none)

    def take_one(i):
        index = jnp.array([i])
        return data._replace(
            speed=data.speed[index],
            client_ids=data.client_ids[index],
            client_weights=data.client_weights[index],
        )

    one_args = (params, embeddings[:1], take_one(0), *args[3:])
    one_program, _ = compiled(one, *one_args)

    def loop():
        updated = [
            one_program(params, embeddings[i : i + 1], take_one(i), *args[3:])[0]
            for i in range(num_clients)
        ]
        stacked = jax.tree.map(lambda *rows: jnp.concatenate(rows), *updated)
        everybody = clients.Cohort(jnp.arange(num_clients), data.client_weights)
        return aggregation.weighted_mean(stacked, everybody)

    def measure(name, fn, *fn_args):
        def run():
            rate = num_clients * num_windows / seconds(fn, *fn_args)
            return {f"{name}_windows_per_s": rate}

        return run

    measures = {n: measure(n, program, *args) for n, program in programs.items()}
    measures["client_loop"] = measure("client_loop", loop)
    return measures, {"client_compile_s": compile_s["client"]}


def server_measure(data, config) -> tuple[Measure, dict[str, float]]:
    """Step (3) of a round."""
    state = cnfgnn.cnfgnn(config).init(jax.random.key(0), data)
    shape = (len(data.client_ids), len(data.starts), config.hidden_size)
    h_c = jax.random.normal(jax.random.key(2), shape)
    args = (
        state.server_params,
        state.server_opt_state,
        state.client_params,
        cnfgnn.Hidden.of(h_c, config.exchange_bits).as_rows(),
        data,
        jax.random.key(3),
        jnp.int32(0),
    )
    program, compile_s = compiled(cnfgnn.server_phase(config), *args)
    steps = -(-len(data.starts) // config.server_batch_size)
    return (
        lambda: {"server_step_s": seconds(program, *args) / steps},
        {"server_compile_s": compile_s},
    )


def peer_measure(
    settings: BenchmarkSettings, num_nodes: int, num_edges: int
) -> Measure:
    """The peer's own figures, under names that begin with `peer_`.

    Raises:
      InputError: by the measure, if it fails or prints none.
    """

    def run():
        arguments = [f"--nodes={num_nodes}", f"--edges={num_edges}"]
        if mesh.backend() == "gpu":
            arguments += ["--device=cuda"]
        keys = ("client_windows_per_s", "server_step_s")
        printed = peer_output(settings, arguments)
        try:
            figures = json.loads(printed.splitlines()[-1])
            return {f"peer_{key}": float(figures[key]) for key in keys}
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"the peer {settings.peer_script} prints no last line of JSON with "
                f"{' and '.join(keys)}"
            ) from error

    return run


def benchmark_cnfgnn(settings: BenchmarkSettings) -> dict[str, Any]:
    """All figures of CNFGNN at --shape."""
    num_nodes, num_edges = TRAFFIC[settings.shape]
    config = cnfgnn.CNFGNNConfig()
    client_data = random_network(
        num_nodes, num_edges, settings.client_steps * config.client_batch_size
    )
    server_data = random_network(
        num_nodes, num_edges, settings.server_steps * config.server_batch_size
    )
    measures, compile_s = client_measures(client_data, config)
    measures["server"], server_compile_s = server_measure(server_data, config)
    if settings.peer:
        measures["peer"] = peer_measure(settings, num_nodes, num_edges)
    figures = in_turn(settings, measures)
    rate = matmul_rate(settings)
    client_rate = figures["client_windows_per_s"] * client_window_flops(
        config.hidden_size
    )
    server_flops = server_step_flops(config, num_nodes, num_edges)
    figures |= {**compile_s, **server_compile_s}
    figures |= {
        "shape": settings.shape,
        "compile_s": sum([*compile_s.values(), *server_compile_s.values()]),
        "peak_memory_bytes": peak_memory_bytes(),
        "matmul_flops_per_s": rate,
        "flops_utilisation": client_rate / rate,
        "server_flops_utilisation": server_flops / figures["server_step_s"] / rate,
    }
    if settings.peer:
        client, server = "client_windows_per_s", "server_step_s"
        figures["client_speedup"] = figures[client] / figures[f"peer_{client}"]
        figures["server_time_ratio"] = figures[server] / figures[f"peer_{server}"]
    return figures
