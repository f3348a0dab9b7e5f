"""FL-AGCNS on a small graph: a search over architectures, then a training of its find."""

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.data.graphs import (
    client_subgraphs,
    node_dataset,
    subgraphs,
    synthetic,
)
from fedjax_graph.driver.rounds import RunConfig, run
from fedjax_graph.models import architecture
from fedjax_graph.tasks.subgraphs import SubgraphTask

NUM_CLASSES, NUM_FEATURES = 3, 60
SIZES = {"num_features": NUM_FEATURES, "num_classes": NUM_CLASSES}
SEARCH = {
    "num_layers": 1,
    "width": 16,
    "population_size": 8,
    "codes_per_step": 4,
    "num_steps": 2,
    "num_warm_up": 3,
    "fitness": "accuracy",
}


def main() -> None:
    graph = synthetic.node_graph(300, NUM_CLASSES, NUM_FEATURES)
    # METIS cuts the graph into a part for each client; edges between parts are lost.
    adjacency = node_dataset.adjacency(graph)
    parts = subgraphs.parts(adjacency, 3, 0.0, "metis", 0)
    split = client_subgraphs.make_split(graph, num_validation=80, num_test=100)
    splits = client_subgraphs.make_splits(graph, parts, split)
    search = get_method("fl_agcns").factory(make_config("fl_agcns", SIZES | SEARCH))
    found = run("search", search, splits, RunConfig(6, keep_last=True))
    code = tuple(int(gene) for gene in found.best_state.code[0])
    print(architecture.describe(code))
    task = SubgraphTask(**SIZES, model="code", code=code, width=16)
    method = get_method("fed_sgd")
    algorithm = method.factory(method.config_type(task=task))
    result = run("training", algorithm, splits, RunConfig(30, eval_every=5))
    print(
        f"code {architecture.to_text(code)}: accuracy {result.test['accuracy'][0]:.1f} %"
    )


if __name__ == "__main__":
    main()
