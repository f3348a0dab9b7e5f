"""GraphFL on a graph of documents: a start that fits few labels after some steps."""

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.data.graphs import label_splits, receptive_fields, subgraphs
from fedjax_graph.data.graphs import node_dataset, synthetic
from fedjax_graph.driver.rounds import RunConfig, run
from fedjax_graph.tasks.nodes import NodeTask

NUM_CLIENTS, NUM_CLASSES, NUM_FEATURES = 10, 4, 100


def main() -> None:
    graph = synthetic.node_graph(600, NUM_CLASSES, NUM_FEATURES)
    # Few labels, dealt to clients; half of a client's judge what the others taught it.
    draw = label_splits.non_iid(
        graph.labels,
        num_classes=NUM_CLASSES,
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
    task = NodeTask(NUM_FEATURES, NUM_CLASSES, inner_steps=5, inner_rate=0.3)
    config = RunConfig(num_rounds=15, eval_every=5, is_drawn=receptive_fields.is_drawn)
    for name, values in (("fed_avg", {}), ("graphfl", {"outer_rate": 1.0})):
        algorithm = get_method(name).factory(
            make_config(name, {"task": task, **values})
        )
        result = run(name, algorithm, splits, config)
        print(f"{name}: accuracy {result.test['accuracy'][0]:.1f} %")


if __name__ == "__main__":
    main()
