"""FL-AGCNS on a small graph: a search for a network, then a training of its find."""

import fedjax_graph as fg
from fedjax_graph.data.graphs import client_subgraphs, node_dataset, subgraphs
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
    graph = fg.load("synthetic_graph", num_nodes=300, **SIZES)
    # METIS cuts the graph into a part for each client; edges between parts are lost.
    parts = subgraphs.parts(node_dataset.adjacency(graph), 3, partition="metis")
    split = client_subgraphs.make_split(graph, num_validation=80, num_test=100)
    splits = client_subgraphs.make_splits(graph, parts, split)
    config = fg.make_config("fl_agcns", SIZES | SEARCH)
    search = fg.get_method("fl_agcns").factory(config)
    found = fg.run("search", search, splits, fg.RunConfig(6, keep_last=True))
    code = tuple(int(gene) for gene in found.best_state.code[0])
    print(architecture.describe(code))
    # The shared weights are dropped: what was found is trained from scratch.
    task = SubgraphTask(**SIZES, model="code", code=code, width=SEARCH["width"])
    config = fg.make_config("fed_sgd", {"task": task})
    training = fg.get_method("fed_sgd").factory(config)
    result = fg.run("training", training, splits, fg.RunConfig(30, eval_every=5))
    accuracy = result.test["accuracy"][0]
    print(f"code {architecture.to_text(code)}: accuracy {accuracy:.1f} %")


if __name__ == "__main__":
    main()
