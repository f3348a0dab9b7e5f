import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images import label_shards as partition
from fedjax_graph.data.images import synthetic as synthetic_images


@pytest.fixture(scope="module")
def dataset():
    return synthetic_images.images(num_train=600, num_test=300)


def guessed_by_class_means(dataset, classes):
    """Share of test images of some classes that lie nearest to their own mean."""
    means = {
        c: dataset.train_images[dataset.train_labels == c].mean(axis=0) for c in classes
    }
    right = []
    for picture, label in zip(dataset.test_images, dataset.test_labels, strict=True):
        if label in means:
            far = {c: np.square(picture - mean).sum() for c, mean in means.items()}
            right.append(min(far, key=far.get) == label)
    assert len(right) == 30 * len(classes)
    return np.mean(right)


def test_shapes_types_and_balance(dataset):
    assert dataset.train_images.shape == (600, 32, 32, 3)
    assert dataset.test_images.shape == (300, 32, 32, 3)
    assert dataset.train_images.dtype == dataset.test_images.dtype == np.uint8
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32
    np.testing.assert_array_equal(np.bincount(dataset.train_labels), [60] * 10)
    np.testing.assert_array_equal(np.bincount(dataset.test_labels), [30] * 10)
    assert (np.diff(dataset.train_labels) < 0).any()  # not sorted by class
    assert len(set(dataset.class_names)) == 10
    assert dataset.name == "synthetic_images"
    assert dataset.notes == ("synthetic: textured shapes before clutter, seed 0",)


def test_the_seed_decides():
    first, again, other = (
        synthetic_images.images(20, 10, seed=seed) for seed in (1, 1, 2)
    )
    for key in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(first, key), getattr(again, key))
    assert (first.train_images != other.train_images).any()


def test_all_images_differ(dataset):
    both = np.concatenate([dataset.train_images, dataset.test_images])
    assert len(np.unique(both.reshape(len(both), -1), axis=0)) == 900


def test_pixels_use_the_range_and_differ_within_every_image(dataset):
    pictures = dataset.train_images.astype(float)
    assert 0.25 < pictures.mean() / 255 < 0.65
    assert pictures.std(axis=(1, 2)).min() > 5
    assert (dataset.train_images == 255).mean() < 0.05
    assert (dataset.train_images == 0).mean() < 0.05


def test_class_means_find_something_but_not_much(dataset):
    assert 0.13 < guessed_by_class_means(dataset, range(10)) < 0.45


def test_a_shape_has_several_textures_and_a_texture_several_shapes(dataset):
    textures, shapes = zip(*map(str.split, dataset.class_names), strict=True)
    assert set(textures) <= set(synthetic_images.TEXTURES)
    assert set(shapes) <= set(synthetic_images.SHAPES)
    assert all(textures.count(texture) > 1 for texture in textures)
    assert all(shapes.count(shape) > 1 for shape in shapes)


@pytest.mark.parametrize("num_classes", range(2, synthetic_images.MAX_CLASSES + 1))
def test_any_number_of_classes(num_classes):
    number = 2 * num_classes
    dataset = synthetic_images.images(number, num_classes, num_classes, size=8)
    assert len(set(dataset.class_names)) == num_classes
    assert dataset.train_images.shape == (number, 8, 8, 3)
    assert sorted(dataset.test_labels) == list(range(num_classes))


def test_without_noise_the_class_is_what_is_seen(monkeypatch):
    """Discs: a striped one has two colours inside, a plain one hardly varies."""
    monkeypatch.setattr(synthetic_images, "NOISE", 0.0)
    dataset = synthetic_images.images(400, 10, size=64)
    spread = {}
    for c, name in enumerate(dataset.class_names):
        pictures = dataset.train_images[dataset.train_labels == c].astype(float)
        spread[name] = pictures[:, 24:40, 24:40].std(axis=(1, 2)).mean()
    assert spread["striped disc"] > 2 * spread["plain disc"]
    assert spread["striped square"] > 2 * spread["plain square"]


def test_it_can_be_dealt_to_clients(dataset):
    splits = partition.make_splits(dataset, num_clients=10, shards=2)
    assert splits["train"].indices.shape == (10, 54)
    assert splits["test"].indices.shape == (10, 30)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_train": 15}, "num_train = 15: expected a multiple of the 10 classes"),
        ({"num_train": 0}, "num_train = 0"),
        ({"num_test": -10}, "num_test = -10"),
        ({"num_classes": 1}, "num_classes = 1: expected 2 to 24"),
        ({"num_classes": 25}, "num_classes = 25: expected 2 to 24"),
        ({"size": 7}, "size = 7: expected at least 8"),
        ({"seed": -1}, "seed = -1: expected at least 0"),
    ],
)
def test_numbers_out_of_range(changes, words):
    with pytest.raises(InputError, match=f"^{words}"):
        synthetic_images.images(**changes)
