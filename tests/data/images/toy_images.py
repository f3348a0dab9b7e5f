"""Small images and labels for tests."""

import numpy as np

from fedjax_graph.data.images import datasets as images


def arrays(num_train=6, num_test=4, num_classes=2, size=(5, 4), **changes):
    rng = np.random.default_rng(num_train)
    drawn = {}
    for split, number in (("train", num_train), ("test", num_test)):
        shape = (number, *size, 3)
        drawn[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        labels = rng.permutation(np.arange(number) % num_classes)
        drawn[f"{split}_labels"] = labels.astype(np.uint8)
    return drawn | changes


def toy(num_train=120, num_test=60, num_classes=4, notes=()):
    drawn = arrays(num_train, num_test, num_classes, size=(2, 3))
    for split in ("train", "test"):
        drawn[f"{split}_labels"] = drawn[f"{split}_labels"].astype(np.int32)
    names = tuple(f"class {c}" for c in range(num_classes))
    return images.ImageDataset("toy", **drawn, class_names=names, notes=notes)
