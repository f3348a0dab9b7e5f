"""GraphFL on a graph of documents: a start that fits few labels after some steps."""

import fedjax_graph as fg
from fedjax_graph.data.graphs import (
    label_splits,
    node_dataset,
    receptive_fields,
    subgraphs,
)
from fedjax_graph.tasks.nodes import NodeTask

NUM_CLIENTS, SIZES = 10, {"num_classes": 4, "num_features": 100}


def main() -> None:
    graph = fg.load("synthetic_graph", num_nodes=600, **SIZES)
    # Few labels, dealt to clients; half of a client's judge what the others taught it.
    draw = label_splits.non_iid(
        graph.labels,
        num_classes=SIZES["num_classes"],
        num_clients=NUM_CLIENTS,
        labels_per_class=20,
        num_validation=100,
        num_test=200,
    )
    splits = receptive_fields.make_splits(
        subgraphs.normalise(node_dataset.adjacency(graph), "symmetric"),
        graph.features,
        label_splits.stack([draw]),  # as many draws as there are seeds
        NUM_CLIENTS,
    )
    optimizer = fg.OptimizerConfig("sgd", 0.3)
    task = NodeTask(**SIZES, inner_steps=5, optimizer=optimizer)
    outer = {"server_optimizer": fg.OptimizerConfig("sgd", 1.0)}
    config = fg.RunConfig(15, eval_every=5, is_drawn=receptive_fields.is_drawn)
    for name, settings in (("fed_avg", {}), ("graphfl", outer)):
        method = fg.get_method(name)
        algorithm = method.factory(method.config_type(task=task, **settings))
        result = fg.run(name, algorithm, splits, config)
        print(f"{name}: accuracy {result.test['accuracy'][0]:.1f} %")


if __name__ == "__main__":
    main()
