"""FL-AGCNS's networks on a small graph: of two codes, the better by validation.

A search (`fg.get_method("fl_agcns")`) draws its codes from all twelve convolutions, or
some (`ops`), and compiles them all: `python -m experiments.fl_agcns` runs one.
"""

import fedjax_graph as fg
from fedjax_graph.data.graphs import client_subgraphs, node_dataset, subgraphs
from fedjax_graph.driver import programs
from fedjax_graph.models import architecture
from fedjax_graph.tasks.subgraphs import SubgraphTask

SIZES = {"num_features": 60, "num_classes": 3}
CODES = ((3, 2, 5), (3, 8, 5))  # the input stage's activation, a layer, the output's


def main() -> None:
    graph = fg.load("synthetic_graph", num_nodes=300, **SIZES)
    # METIS cuts the graph into a part for each client; edges between parts are lost.
    parts = subgraphs.parts(node_dataset.adjacency(graph), 3, partition="metis")
    split = client_subgraphs.make_split(graph, num_validation=80, num_test=100)
    splits = client_subgraphs.make_splits(graph, parts, split)
    losses, accuracies = {}, {}
    for code in CODES:
        task = SubgraphTask(**SIZES, model="code", code=code, width=16)
        config = fg.make_config("fed_sgd", {"task": task})
        training = fg.get_method("fed_sgd").factory(config)
        result = fg.run("fed_sgd", training, splits, fg.RunConfig(30, eval_every=5))
        validation = splits["validation"]
        scores = programs.evaluate_seeds(training, result.best_state, validation)
        losses[code] = float(scores["loss"][0])
        accuracies[code] = float(result.test["accuracy"][0])
    best = min(CODES, key=losses.__getitem__)
    print(architecture.describe(best))
    print(f"code {architecture.to_text(best)}: accuracy {accuracies[best]:.1f} %")


if __name__ == "__main__":
    main()
