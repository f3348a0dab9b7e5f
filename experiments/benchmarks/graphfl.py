"""The hot loops of GraphFL: a meta-gradient round, its memory, FedAvg, first layers.

Without --dataset the graph is synthetic and of Cora's size. A round is what the server
calls a round: no evaluation, no validation or test data.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import sparse

from experiments.benchmarks.measure import (
    Measure,
    compiled,
    in_turn,
    num_compilations,
    peak_memory_bytes,
    seconds,
)
from experiments.benchmarks.settings import BenchmarkSettings
from fedjax_graph import algorithms
from fedjax_graph.core import clients, mesh
from fedjax_graph.core.meta_learning import meta_gradient
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs import label_splits, subgraphs
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import receptive_fields as nodes
from fedjax_graph.tasks.nodes import NodeTask

FED_AVG_CLIENTS, FED_AVG_STEPS = 10, (1, 15)
RATE = 0.3  # of inner and outer steps


def training_data(
    settings: BenchmarkSettings, dataset: node_graphs.NodeDataset, num_clients: int
) -> nodes.NodeData:
    """Of clients that hold the whole graph; labelled nodes as the paper deals them."""
    draw = label_splits.non_iid(
        dataset.labels,
        num_classes=len(dataset.class_names),
        num_clients=num_clients,
        **({"labels_per_class": 40, "num_test": 50} if settings.is_tiny else {}),
    )
    propagation = subgraphs.normalise(node_graphs.adjacency(dataset))
    train = {"train": draw["train"]}
    splits = nodes.make_splits(propagation, dataset.features, train, num_clients)
    return splits["train"]


def make_method(
    name: str,
    settings: BenchmarkSettings,
    dataset: node_graphs.NodeDataset,
    chunk: int | None,
    task: dict[str, Any] | None = None,
    **values: Any,
):
    """A method that trains a GCN, where everybody takes part."""
    config = algorithms.make_config(
        name,
        {
            "task": NodeTask(
                num_features=dataset.features.shape[1],
                num_classes=len(dataset.class_names),
                optimizer=OptimizerConfig("sgd", RATE),
                **{"inner_steps": settings.meta_steps, **(task or {})},
            ),
            "clients_per_chunk": chunk,
            **values,
        },
    )
    return algorithms.get_method(name).factory(config), config


make_graphfl = partial(
    make_method,
    "graphfl",
    server_optimizer=OptimizerConfig("sgd", RATE),
    fine_tune=False,
)


def start_of(method, data: nodes.NodeData, key: jax.Array):
    """Replicated arguments of a method's first round."""
    data, key = mesh.put_replicated((data, key))
    return mesh.put_replicated(jax.jit(method.init)(key, data)), data, key


def timed(name: str, fn, *args) -> Measure:
    return lambda: {f"{name}_s": seconds(fn, *args)}


# --- A round -------------------------------------------------------------------------


def client_loop(config, params, data: nodes.NodeData, key: jax.Array, adjust=None):
    """The same round as a Python loop over one compiled meta-gradient of one client.

    Args:
      config: of GraphFL, second-order and with plain outer steps.
      params: the server's.
      data: of all clients.
      key: of the round.
      adjust: see `Task.update`; given, the steps are taken as they are written down.
    """
    task = config.task.build()

    @jax.jit
    def one(params, own, key, data):
        inner_key, query_key = jax.random.split(key)

        def adapt(params):
            start = {"params": params, "batch_stats": {}}
            return task.update(start, own, inner_key, data, adjust, 0).model["params"]

        def query_loss(params):
            return task.query_loss(params, own, query_key, data)

        return meta_gradient(adapt, query_loss)(params)[1]

    @jax.jit
    def step(params, gradients):
        return jax.tree.map(
            lambda x, *g: x - RATE * sum(g) / len(g), params, *gradients
        )

    with mesh.on_first():
        data, params, key = mesh.put_on_first((data, params, key))
        keys = clients.client_keys(jax.random.split(key)[1], data.client_ids)
        pairs = task.client_data(data), keys
        rows = [
            jax.tree.map(lambda x, i=i: x[i], pairs)
            for i in range(len(data.client_ids))
        ]

    def loop():
        with mesh.on_first():
            return step(params, [one(params, own, key, data) for own, key in rows])

    return loop


def largest_difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two pytrees' entries."""
    gaps = jax.tree.map(
        lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(), ours, theirs
    )
    return float(max(jax.tree.leaves(gaps)))


def round_figures(
    settings: BenchmarkSettings, dataset: node_graphs.NodeDataset
) -> dict[str, Any]:
    """GraphFL's first stage, in several forms, and Python loops over its clients.

    The loops run the round's own program of one client, and one whose steps are not
    rewritten (`tasks.nodes.support_steps`); where there are several devices, on the
    first of them. `..._difference` is the largest between the parameters they lead to.
    """
    data = training_data(settings, dataset, settings.num_clients or 50)
    auto = clients.auto_clients_per_chunk()
    method, config = make_graphfl(settings, dataset, auto)
    start = start_of(method, data, jax.random.key(0))
    figures = {"num_compilations": num_compilations(method.round, *start)}
    forms = {
        "round": (auto, {}),
        "first_order_round": (auto, {"first_order": True}),
        "checkpointed_round": (auto, {"task": {"checkpoint_inner": True}}),
        **{f"chunk_{chunk}": (chunk, {}) for chunk in settings.chunk},
        "chunk_all": (None, {}),
    }
    measures = {}
    for name, (chunk, values) in forms.items():
        program, compile_s = compiled(
            make_graphfl(settings, dataset, chunk, **values)[0].round, *start
        )
        figures[f"{name}_compile_s"] = compile_s
        measures[name] = timed(name, program, *start)
        if name == "round":
            after = program(*start)[0].models["params"]
    params = jax.tree.map(lambda x: np.asarray(x)[0], start[0].models["params"])
    loops = {
        name: client_loop(config, params, data, jax.random.key(0), adjust)
        for name, adjust in (("loop", None), ("plain_loop", optax.identity()))
    }
    for name, loop in loops.items():
        theirs = jax.tree.map(lambda x: np.asarray(x)[None], loop())
        figures[f"{name}_difference"] = largest_difference(after, theirs)
        measures[name] = timed(name, loop)
    figures |= in_turn(settings, measures)
    for name in loops:
        figures[f"speed_over_{name}"] = figures[f"{name}_s"] / figures["round_s"]
    return figures


def memory_figures(
    settings: BenchmarkSettings, dataset: node_graphs.NodeDataset
) -> dict[str, int]:
    """Bytes on one device that the round's program takes besides what it is given."""
    data = training_data(settings, dataset, settings.num_clients or 50)
    start = start_of(make_graphfl(settings, dataset, 1)[0], data, jax.random.key(0))
    figures = {}
    for prefix, is_checkpointed in (("memory", False), ("checkpointed_memory", True)):
        for steps, chunk in itertools.product(
            settings.memory_steps, settings.memory_chunk
        ):
            task = {"inner_steps": steps, "checkpoint_inner": is_checkpointed}
            method, _ = make_graphfl(settings, dataset, chunk, task)
            program = jax.jit(method.round).lower(*start).compile()
            analysis = program.memory_analysis()
            key = f"{prefix}_{steps}_steps_chunk_{chunk}_bytes"
            figures[key] = analysis.temp_size_in_bytes
    return figures


def fed_avg_figures(
    settings: BenchmarkSettings, dataset: node_graphs.NodeDataset
) -> dict[str, float]:
    """A round of FedAvg: clients' steps on their support sets, and the mean."""
    data = training_data(settings, dataset, FED_AVG_CLIENTS)
    measures = {}
    for steps in FED_AVG_STEPS:
        chunk = clients.auto_clients_per_chunk()
        method, _ = make_method(
            "fed_avg", settings, dataset, chunk, {"inner_steps": steps}
        )
        start = start_of(method, data, jax.random.key(0))
        program, _ = compiled(method.round, *start)
        name = f"fed_avg_{FED_AVG_CLIENTS}_clients_{steps}_steps"
        measures[name] = timed(name, program, *start)
    return in_turn(settings, measures)


# --- First layers --------------------------------------------------------------------


def first_layer_figures(
    settings: BenchmarkSettings, dataset: node_graphs.NodeDataset
) -> dict[str, float]:
    """Rows of S X times a weight, and the gradient in it, for each client in turn.

    The rows are those that a client's support set reads. Sparse, they are gathered
    rows of the weight, and sums: BCOO, padded to the most entries of a client.
    """
    data = training_data(settings, dataset, settings.num_clients or 50)
    fields = data.features[data.support.rows]  # [K, H, F]
    num_entries = int(np.count_nonzero(fields, axis=(1, 2)).max())
    to_sparse = partial(sparse.BCOO.fromdense, nse=num_entries)
    bcoo = jax.jit(jax.vmap(to_sparse))(fields)
    weight = jax.random.normal(
        jax.random.key(0), (fields.shape[2], NodeTask.hidden_size)
    )

    def dense(own):
        return own

    def padded(own):
        return sparse.BCOO(own, shape=fields.shape[1:])

    def gradients(weight, own, rows_of):
        def one(own):
            rows = rows_of(own)
            return jax.grad(lambda weight: jnp.sum((rows @ weight) ** 2))(weight)

        return jax.lax.map(one, own)

    forms = {"dense": (dense, fields), "sparse": (padded, (bcoo.data, bcoo.indices))}
    measures = {}
    for name, (rows_of, own) in forms.items():
        own = jax.device_put(own)
        program, _ = compiled(partial(gradients, rows_of=rows_of), weight, own)
        measures[name] = timed(f"first_layer_{name}", program, weight, own)
    share = np.count_nonzero(fields) / fields.size
    return in_turn(settings, measures) | {"first_layer_nonzero_share": float(share)}


FIGURES = {
    "round": round_figures,
    "memory": memory_figures,
    "fed_avg": fed_avg_figures,
    "first_layer": first_layer_figures,
}


def benchmark_graphfl(settings: BenchmarkSettings) -> dict[str, Any]:
    """The figures of GraphFL that --graphfl_parts names."""
    dataset = settings.load_graph(connected=True)
    figures: dict[str, Any] = {"dataset": dataset.name}
    for part, figures_of in FIGURES.items():
        if part in settings.graphfl_parts:
            figures |= figures_of(settings, dataset)
    return figures | {"peak_memory_bytes": peak_memory_bytes()}
