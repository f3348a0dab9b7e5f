"""Tables 2 and 3 of Wang, Li, Li, Chen, ICDM 2022; Table 1 counts datasets.

The paper prints the results on few and skewed labels as figures only.
"""

from experiments.tables.papers import Dataset, Metric, Paper, Row, Table, of_test

DATASETS = {
    "cora": Dataset("Cora", {"num_nodes": 2485}),
    "citeseer": Dataset("CiteSeer", {"num_nodes": 2110}),
    "coauthor_cs": Dataset("Coauthor CS", {"num_nodes": 18333}),
    "amazon2m": Dataset("Amazon2M", {"num_nodes": 2449029}),
}
ACCURACY = of_test("accuracy (%)", "accuracy", 1)
PRECISION = Metric(
    "right pseudo-labels (%)",
    ("settings.self_training.precision",),
    digits=1,
    spread="settings.self_training.precision_by_draw",
)
TITLES = {"fl": "FL + transfer", "graphfl": "GraphFL"}

# Model, method, dataset: accuracy with these many labels of a class.
LABELS_PER_CLASS = (2, 6, 10)
NEW_LABELS = {
    "gcn": {
        "fl": {
            "cora": (52.7, 62.3, 66.7),
            "citeseer": (50.0, 50.3, 52.7),
            "coauthor_cs": (66.4, 66.7, 71.1),
            "amazon2m": (61.4, 62.6, 63.7),
        },
        "graphfl": {
            "cora": (66.7, 76.7, 84.3),
            "citeseer": (62.0, 63.0, 67.0),
            "coauthor_cs": (77.4, 83.5, 88.9),
            "amazon2m": (69.9, 70.6, 76.4),
        },
    },
    "sgc": {
        "fl": {
            "cora": (50.0, 51.7, 54.3),
            "citeseer": (45.3, 48.3, 49.4),
            "coauthor_cs": (60.7, 64.7, 68.7),
            "amazon2m": (60.1, 61.4, 62.6),
        },
        "graphfl": {
            "cora": (64.7, 71.0, 77.3),
            "citeseer": (58.3, 60.3, 65.3),
            "coauthor_cs": (74.0, 80.6, 86.2),
            "amazon2m": (69.7, 70.2, 75.7),
        },
    },
}
# Dataset: share of right ones with these many pseudo-labels of a class.
PSEUDO_LABELS = (5, 10, 15, 20)
RIGHT = {
    "cora": (90, 85, 81, 69),
    "citeseer": (90, 80, 72, 64),
    "coauthor_cs": (95, 90, 83, 74),
    "amazon2m": (83, 76, 73, 69),
}


def new_labels_row(model, method, dataset, labels_per_class, accuracy) -> Row:
    flags = {
        "task": "new_labels",
        "model": model,
        "labels_per_class": labels_per_class,
    }
    labels = (model.upper(), TITLES[method], str(labels_per_class))
    return Row(labels, dataset, method, (accuracy,), flags)


def pseudo_labels_row(dataset, pseudo_labels, share) -> Row:
    flags = {"task": "self_training", "model": "gcn", "pseudo_labels": pseudo_labels}
    return Row((str(pseudo_labels),), dataset, "graphfl", (share,), flags)


PAPER = Paper(
    "GraphFL",
    DATASETS,
    (
        Table(
            2,
            "new label domains",
            ("model", "method", "labels per class"),
            (ACCURACY,),
            tuple(
                new_labels_row(model, method, dataset, labels_per_class, accuracy)
                for model, by_method in NEW_LABELS.items()
                for method, by_dataset in by_method.items()
                for dataset, accuracies in by_dataset.items()
                for labels_per_class, accuracy in zip(
                    LABELS_PER_CLASS, accuracies, strict=True
                )
            ),
            sweep="labels_per_class",
        ),
        Table(
            3,
            "right pseudo-labels of self-training",
            ("pseudo-labels per class",),
            (PRECISION,),
            tuple(
                pseudo_labels_row(dataset, pseudo_labels, share)
                for dataset, shares in RIGHT.items()
                for pseudo_labels, share in zip(PSEUDO_LABELS, shares, strict=True)
            ),
            "± is over draws of labels. Ours are those of GCN.",
            sweep="pseudo_labels",
        ),
    ),
    options={"num_seeds": 5, "eval_every": 50},
)
