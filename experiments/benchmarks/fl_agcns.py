"""The hot loops of FL-AGCNS: a generation, and scoring codes.

Without --dataset the graph is synthetic and of Cora's size. The loop scores the same
codes client by client and code by code with a compiled program of one of them, which is
itself one for all codes; what compiling a network of its own for each would cost stands
beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.measure import (
    Measure,
    compiled,
    in_turn,
    num_compilations,
    peak_memory_bytes,
    seconds,
)
from experiments.benchmarks.settings import BenchmarkSettings
from fedjax_graph.algorithms.fl_agcns.fl_agcns import FLAGCNSConfig, fl_agcns
from fedjax_graph.algorithms.fl_agcns.search import make_scorer, train_step
from fedjax_graph.core import clients, trees
from fedjax_graph.data.graphs import client_subgraphs as client_graphs
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import subgraphs
from fedjax_graph.models.architecture import random_codes
from fedjax_graph.tasks import subgraphs as subgraph_task


def training_data(
    settings: BenchmarkSettings,
) -> tuple[client_graphs.SubgraphData, int]:
    """The clients' subgraphs by METIS, and the number of classes."""
    dataset = settings.load_graph()
    parts = subgraphs.parts(
        node_graphs.adjacency(dataset), settings.num_clients or 3, partition="metis"
    )
    drawn = {"per_class": 10, "num_validation": 50, "num_test": 50}
    split = client_graphs.make_split(dataset, **(drawn if settings.is_tiny else {}))
    is_sparse = node_graphs.has_sparse_features(dataset)
    splits = client_graphs.make_splits(dataset, parts, split, is_sparse=is_sparse)
    return splits["train"], len(dataset.class_names)


def benchmark_fl_agcns(settings: BenchmarkSettings) -> dict[str, Any]:
    """Seconds of a generation and of its parts, and codes scored per second."""
    data, num_classes = training_data(settings)
    num_clients, _, num_features = data.features.shape
    config = FLAGCNSConfig(
        num_features=num_features,
        num_classes=num_classes,
        population_size=settings.search_population,
        num_steps=settings.search_steps,
        codes_per_step=settings.search_codes,
        space="2022",
        fusion="leaves",
        fitness_from="shared",
        num_warm_up=0,
        clients_per_chunk=clients.auto_clients_per_chunk(),
        **({"num_layers": 2, "width": 4} if settings.is_tiny else {}),
    )
    method, net, key = fl_agcns(config), config.supernet, jax.random.key(0)
    state = jax.jit(method.init)(key, data)
    model = state.weights.model
    figures = {"num_compilations": num_compilations(method.round, state, data, key)}
    generation, compile_s = compiled(method.round, state, data, key)

    num_codes = config.population_size + config.population_size // 2
    codes = random_codes(
        key, num_codes, config.num_layers, space=config.space, choices=config.choices
    )
    own_codes = jnp.broadcast_to(codes, (num_clients, *codes.shape))

    def score(model, data, codes, own_codes):
        scorer = make_scorer(config, model, data)
        federated, _, _ = scorer.federated(codes)
        return federated, scorer.own(own_codes)

    scoring, _ = compiled(score, model, data, codes, own_codes)
    step, _ = compiled(
        train_step(config), state.weights, data, key, codes[: config.codes_per_step]
    )

    def score_one(model, own, code):
        outputs, _ = net.apply(model, subgraph_task.as_graph(own), code)
        return subgraph_task.scores(outputs, own)[1]

    each = [trees.take(data, index) for index in range(num_clients)]
    one, _ = compiled(score_one, model, each[0], codes[0])

    def loop():
        return [
            [one(model, own, code) for code in codes] for own in each for _ in range(2)
        ]

    num_scores = 2 * num_codes * num_clients

    def timed(name, fn, *args) -> Measure:
        return lambda: {f"{name}_s": seconds(fn, *args)}

    figures |= {
        "generation_compile_s": compile_s,
        "network_compile_s": network_compile_seconds(net, codes[0], each[0]),
    }
    figures |= in_turn(
        settings,
        {
            "generation": timed("generation", generation, state, data, key),
            "step": timed(
                "supernet_step",
                step,
                state.weights,
                data,
                key,
                codes[: config.codes_per_step],
            ),
            "scoring": timed("scoring", scoring, model, data, codes, own_codes),
            "loop": timed("loop", loop),
        },
    )
    return figures | {
        "scores_per_s": num_scores / figures["scoring_s"],
        "loop_scores_per_s": num_scores / figures["loop_s"],
        "speed_over_loop": figures["loop_s"] / figures["scoring_s"],
        "peak_memory_bytes": peak_memory_bytes(),
    }


def network_compile_seconds(net, code: jax.Array, own) -> float:
    """Of the network of one code alone, as a search without a SuperNet compiles it."""
    module, graph = net.network(code.tolist()), subgraph_task.as_graph(own)
    variables = jax.jit(module.init)(jax.random.key(0), graph)
    _, elapsed = compiled(module.apply, variables, graph)
    return elapsed
