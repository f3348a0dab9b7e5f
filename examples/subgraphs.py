"""Clients hold communities of a graph: alone, by FedAvg, and mixed by FedGTA."""

import fedjax_graph as fg
from fedjax_graph.data.graphs import client_subgraphs, node_dataset, subgraphs
from fedjax_graph.tasks.subgraphs import SubgraphTask

SIZES = {"num_features": 100, "num_classes": 4}


def main() -> None:
    graph = fg.load("synthetic_graph", num_nodes=600, **SIZES)
    adjacency = node_dataset.adjacency(graph)
    parts = subgraphs.parts(adjacency, 4, partition="louvain")
    # Of each class of each client: 20 % to train, 40 % to validate, 40 % to test.
    split = client_subgraphs.client_split(graph.labels, parts.owners)
    splits = client_subgraphs.make_splits(graph, parts, split)
    optimizer = fg.OptimizerConfig("adam", 0.01, weight_decay=5e-4)
    steps = {"local_steps": 3, "optimizer": optimizer, "fitness": "accuracy"}
    task = SubgraphTask(**SIZES, hidden_size=32, dropout=0.5, **steps)
    for name in ("local", "fed_avg", "fed_gta"):
        config = fg.make_config(name, {"task": task})
        algorithm = fg.get_method(name).factory(config)
        result = fg.run(name, algorithm, splits, fg.RunConfig(15, eval_every=5))
        print(f"{name}: accuracy {result.test['accuracy'][0]:.1f} %")


if __name__ == "__main__":
    main()
