import dataclasses
import io
import os
import pickle
import tarfile

import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images import datasets as images
from fedjax_graph.data.images import label_shards as partition
from tests.data.images.toy_images import arrays, toy

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog"]
CLASSES += ["horse", "ship", "truck"]
RNG = np.random.default_rng(0)
BATCH_LABELS = {
    "data_batch_1": [3, 9, 0],
    "data_batch_2": [1],
    "data_batch_3": [2, 4],
    "data_batch_4": [5, 6, 7],
    "data_batch_5": [8],
    "test_batch": [0, 9, 5, 5],
}
BATCHES = {
    name: {
        "batch_label": name,
        "labels": labels,
        "data": RNG.integers(0, 256, (len(labels), 3072), dtype=np.uint8),
    }
    for name, labels in BATCH_LABELS.items()
}


def write_batches(folder, text=str.encode, protocol=2, **changes):
    """A folder as published; keys are bytes or text, as either Python writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in (BATCHES | changes).items():
        batch = {text(key): value for key, value in batch.items()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    return folder


def write_meta(folder, names=CLASSES):
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}))


def write_archive(path, folder):
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"cifar-10-batches-py/{file.name}")
    return path


def unpacked(rows):
    """[B, 32, 32, 3]: a row has all red pixels line by line, then green, then blue."""
    pictures = np.zeros((len(rows), 32, 32, 3), np.uint8)
    for picture, row in zip(pictures, rows, strict=True):
        for place, value in enumerate(row):
            channel, rest = divmod(place, 1024)
            picture[rest // 32, rest % 32, channel] = value
    return pictures


def assert_batches(dataset):
    train = list(BATCHES)[:5]
    labels = [label for name in train for label in BATCH_LABELS[name]]
    rows = np.concatenate([BATCHES[name]["data"] for name in train])
    np.testing.assert_array_equal(dataset.train_images, unpacked(rows))
    np.testing.assert_array_equal(dataset.train_labels, labels)
    test = BATCHES["test_batch"]
    np.testing.assert_array_equal(dataset.test_images, unpacked(test["data"]))
    np.testing.assert_array_equal(dataset.test_labels, test["labels"])
    for pictures in (dataset.train_images, dataset.test_images):
        assert pictures.dtype == np.uint8
    for numbers in (dataset.train_labels, dataset.test_labels):
        assert numbers.dtype == np.int32


def write_npz(path, remove=(), **changes):
    content = arrays(**changes)
    np.savez(path, **{key: v for key, v in content.items() if key not in remove})
    return path


def fails(match, path, data_dir=None, start=None):
    """Loads, expects one line about the file, and returns it."""
    with pytest.raises(InputError, match=match) as raised:
        images.load(str(path), data_dir)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(f"{start or path}: ")
    return message


# --- the formats ---------------------------------------------------------------


def test_a_users_npz(cache, tmp_path):
    path = write_npz(tmp_path / "mine.npz", num_classes=3)
    dataset = images.load(str(path))
    for key, value in arrays(num_classes=3).items():
        np.testing.assert_array_equal(getattr(dataset, key), value)
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32
    assert dataset.train_images.dtype == np.uint8
    assert (dataset.name, dataset.class_names) == ("mine", ("0", "1", "2"))
    assert dataset.notes == ()
    assert images.reads(str(path))


@pytest.mark.parametrize("num_channels", [1, 4])
def test_images_have_any_number_of_channels(cache, tmp_path, num_channels):
    """Grey ones also without an axis of theirs, as MNIST is often kept."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 5, 4, num_channels), dtype=np.uint8)
    forms = [pixels, pixels[..., 0]] if num_channels == 1 else [pixels]
    for i, form in enumerate(forms):
        own = {"train_images": form, "test_images": form[:4]}
        dataset = images.load(str(write_npz(tmp_path / f"mine{i}.npz", **own)))
        np.testing.assert_array_equal(dataset.train_images, pixels)
        np.testing.assert_array_equal(dataset.test_images, pixels[:4])


def test_a_users_npz_may_name_its_classes(cache, tmp_path):
    path = write_npz(tmp_path / "mine.npz", class_names=np.array(["a", "b", "c"]))
    assert images.load(str(path)).class_names == ("a", "b", "c")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("text", [str, str.encode], ids=["text", "bytes"])
def test_a_folder_of_batches(cache, tmp_path, text, protocol):
    folder = write_batches(tmp_path / "cifar-10-batches-py", text, protocol)
    dataset = images.load(str(folder))
    assert_batches(dataset)
    assert dataset.name == "cifar10"
    assert dataset.class_names == tuple(CLASSES)
    note = "10 training and 4 test images, where 50000 and 10000 were published"
    assert dataset.notes == (note,)


def test_class_names_come_from_the_list_that_python_2_wrote(cache, tmp_path):
    folder = write_batches(tmp_path / "batches")
    names = "".join(f"S'{name.upper()}'\na" for name in CLASSES)
    (folder / "batches.meta").write_text(f"(dS'label_names'\n(l{names}s.")
    dataset = images.load(str(folder))
    assert dataset.class_names == tuple(name.upper() for name in CLASSES)


@pytest.mark.parametrize("form", ["npz", "folder", "archive"])
@pytest.mark.parametrize("place", ["data", "cache"])
def test_cifar10_is_found_by_name_in_every_form(cache, tmp_path, form, place):
    folder = cache if place == "cache" else tmp_path / "data"
    for each in (cache, tmp_path / "data"):
        each.mkdir()
    if form == "npz":
        path = folder / "cifar10.npz"
        train = [name for name in BATCHES if name != "test_batch"]
        np.savez(
            path,
            train_images=unpacked(np.concatenate([BATCHES[n]["data"] for n in train])),
            train_labels=np.array([label for n in train for label in BATCH_LABELS[n]]),
            test_images=unpacked(BATCHES["test_batch"]["data"]),
            test_labels=np.array(BATCH_LABELS["test_batch"]),
        )
    else:
        path = write_batches(folder / "cifar-10-batches-py")
    if form == "archive":
        write_meta(path)
        path = write_archive(folder / "cifar-10-python.tar.gz", path)
        (folder / "cifar-10-batches-py").rename(tmp_path / "away")
    assert images.locate("cifar10", tmp_path / "data") == path
    dataset = images.load("cifar10", tmp_path / "data")
    assert_batches(dataset)
    assert (dataset.name, dataset.class_names) == ("cifar10", tuple(CLASSES))


def test_the_data_folder_comes_before_the_cache(cache, tmp_path):
    write_batches(cache / "cifar-10-batches-py")
    folder = write_batches(tmp_path / "data" / "cifar-10-batches-py")
    assert images.locate("cifar10", tmp_path / "data") == folder
    assert images.locate("cifar10") == cache / "cifar-10-batches-py"


# --- what cannot be read -------------------------------------------------------


def test_nothing_found_says_how_to_get_it(cache, tmp_path):
    assert images.locate("cifar10", tmp_path) is None
    message = fails("--download", "cifar10", tmp_path)
    for word in ("cifar10.npz", "cifar-10-batches-py", str(tmp_path), str(cache)):
        assert word in message
    assert "unpack" not in message
    (tmp_path / "cifar10_jpeg.npz").touch()
    script = tmp_path / "unpack_cifar10.py"
    assert f"python {script} FOLDER" in fails("--download", "cifar10", tmp_path)


@pytest.mark.parametrize("function", [images.load, images.locate])
def test_an_unknown_name(cache, function):
    with pytest.raises(InputError, match="unknown image dataset 'cifar'; known: cifar"):
        function("cifar")


def test_a_pickle_that_would_run_code_is_refused(cache, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    evil = BATCHES["data_batch_2"] | {"data": Evil()}
    folder = write_batches(tmp_path / "batches", data_batch_2=evil)
    fails("would run", folder, start=folder / "data_batch_2")
    assert not (tmp_path / "ran").exists()
    write_meta(folder)
    archive = write_archive(tmp_path / "cifar-10-python.tar.gz", folder)
    fails("would run", archive, start=archive / "data_batch_2")
    assert not (tmp_path / "ran").exists()


GOOD = BATCHES["data_batch_3"]


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (GOOD | {"data": GOOD["data"][:, :3071]}, r"\(2, 3071\).*\[images, 3072\]"),
        (GOOD | {"data": GOOD["data"].astype(np.float32)}, "float32"),
        (GOOD | {"data": GOOD["data"].ravel()}, r"\(6144,\)"),
        (GOOD | {"data": [1, 2]}, "array `data`"),
        (GOOD | {"labels": [2, 10]}, "the label 10, expected 0 to 9"),
        (GOOD | {"labels": [-1, 2]}, "the label -1"),
        (GOOD | {"labels": [2]}, r"\(1,\).*each of 2 images"),
        (GOOD | {"labels": [2, 4, 4]}, r"\(3,\).*each of 2 images"),
        (GOOD | {"labels": [2, 0.5]}, "float64"),
        (GOOD | {"labels": [2, [3]]}, "not a readable CIFAR-10 batch"),
        ({"data": GOOD["data"], "fine_labels": [2, 4]}, "fine_labels"),
        ({}, "keys of none"),
    ],
)
def test_a_batch_that_does_not_fit(cache, tmp_path, batch, match):
    folder = write_batches(tmp_path / "batches", data_batch_3=batch)
    fails(match, folder, start=folder / "data_batch_3")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (pickle.dumps([1, 2]), "list found, expected a dict"),
        (pickle.dumps(GOOD)[:-40], "not a readable"),
        (b"", "not a readable"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_no_batch(cache, tmp_path, content, match):
    folder = write_batches(tmp_path / "batches")
    path = folder / "test_batch"
    path.unlink() if content is None else path.write_bytes(content)
    fails(match, folder, start=path)


@pytest.mark.parametrize("names", [None, CLASSES[:9], "ten"])
def test_a_list_of_names_that_does_not_fit(cache, tmp_path, names):
    folder = write_batches(tmp_path / "batches")
    write_meta(folder, names)
    fails("label_names of 10", folder, start=folder / "batches.meta")


@pytest.mark.parametrize("kind", ["short", "no tar", "lacks", "folder"])
def test_an_archive_that_cannot_be_read(cache, tmp_path, kind):
    folder = write_batches(tmp_path / "batches")
    path = tmp_path / "cifar-10-python.tar.gz"
    if kind == "lacks":
        (folder / "data_batch_5").unlink()
    write_archive(path, folder)
    if kind == "short":
        path.write_bytes(path.read_bytes()[:-200])
    if kind == "no tar":
        path.write_bytes(b"<html>moved</html>")
    if kind == "folder":
        with tarfile.open(path, "w:gz") as archive:
            entry = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            entry.type = tarfile.DIRTYPE
            archive.addfile(entry, io.BytesIO())
    match = (
        "no plain file" if kind == "folder" else "not a readable archive of CIFAR-10"
    )
    fails(match, path)


PIXELS = arrays()["train_images"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"remove": ("test_labels",)}, "no array 'test_labels'; found test_images"),
        ({"train_images": PIXELS / 255}, "train_images.*float64.*uint8"),
        ({"train_images": PIXELS[..., :1]}, "of one size, and of as many channels"),
        ({"train_images": PIXELS[0, 0]}, r"\(4, 3\).*height, width, channels"),
        ({"train_images": PIXELS[:0]}, "at least one image"),
        ({"test_images": PIXELS[:4, :4]}, "5 x 4 and test images of 4 x 4"),
        ({"train_labels": np.zeros(5, int)}, r"\(5,\).*each of 6 images"),
        ({"train_labels": np.zeros((6, 1), int)}, r"\(6, 1\)"),
        ({"train_labels": np.zeros(6)}, "float64"),
        ({"train_labels": np.full(6, -1)}, "the label -1"),
        ({"train_labels": np.full(6, 2**40)}, f"the label {2**40}"),
        ({"test_labels": np.full(4, 2)}, "test_labels has the label 2.* 2 classes"),
        ({"class_names": np.array(["one"])}, "the label 1, expected 0 to 0"),
        ({"class_names": np.array([1, 2])}, "class_names.*list of text"),
    ],
)
def test_an_npz_that_does_not_fit(cache, tmp_path, changes, match):
    fails(match, write_npz(tmp_path / "mine.npz", **changes))


def test_other_npz_files(cache, tmp_path):
    path = tmp_path / "other.npz"
    assert not images.reads(str(path))
    path.write_bytes(b"PK\x03\x04 and then nothing")
    assert not images.reads(str(path))
    fails("not a readable", path)
    np.savez(path, speed=np.ones(3))
    assert not images.reads(str(path))
    write_npz(tmp_path / "cifar10.npz")
    fails(
        "32 x 32 images of cifar10 in colour, found 5 x 4",
        "cifar10",
        tmp_path,
        start=tmp_path / "cifar10.npz",
    )


# --- cutting and counting ------------------------------------------------------


def test_cut_keeps_the_first_of_each_class_in_order():
    dataset = toy(notes=("from somewhere",))
    small = images.cut(dataset, 20, 8)
    for split, number in (("train", 5), ("test", 2)):
        kept, seen = [], [0] * 4
        for place, label in enumerate(getattr(dataset, f"{split}_labels")):
            seen[label] += 1
            if seen[label] <= number:
                kept.append(place)
        for key in (f"{split}_images", f"{split}_labels"):
            expected = getattr(dataset, key)[kept]
            np.testing.assert_array_equal(getattr(small, key), expected)
    assert small.notes == (
        "from somewhere",
        "cut to 20 of 120 training images, the first 5 of each class",
        "cut to 8 of 60 test images, the first 2 of each class",
    )


def test_cut_leaves_what_is_not_named():
    dataset = toy()
    assert images.cut(dataset) == dataset
    assert images.cut(dataset, 120, 60).notes == ()
    only_test = images.cut(dataset, None, 4)
    assert only_test.train_images is dataset.train_images
    assert len(only_test.test_labels) == 4


@pytest.mark.parametrize(
    ("train", "test", "match"),
    [
        (10, None, "10 training images.* multiple of the 4 classes from 4 to 120"),
        (0, None, "0 training"),
        (124, None, "124 training.*smallest class has 30"),
        (None, -4, "-4 test"),
    ],
)
def test_cuts_that_do_not_fit(train, test, match):
    with pytest.raises(InputError, match=match):
        images.cut(toy(), train, test)


def test_statistics():
    dataset = toy(notes=("a note",))
    dataset = dataclasses.replace(
        dataset,
        train_images=dataset.train_images[:7],
        train_labels=np.int32([0, 1, 1, 1, 3, 3, 0]),
    )
    assert images.statistics(dataset) == {
        "name": "toy",
        "train_images": 7,
        "test_images": 60,
        "image_size": "2 x 3",
        "num_classes": 4,
        "smallest_class": 0,
        "largest_class": 3,
        "class_names": ["class 0", "class 1", "class 2", "class 3"],
        "notes": ["a note"],
    }


# --- the real data -------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar10(data_dir):
    if images.locate("cifar10", data_dir) is None:
        pytest.skip("real data: no unpacked CIFAR-10 in FEDJAX_GRAPH_DATA or the cache")
    return images.load("cifar10", data_dir)


def test_cifar10_is_complete(cifar10):
    assert cifar10.train_images.shape == (50000, 32, 32, 3)
    assert cifar10.test_images.shape == (10000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(cifar10.train_labels), [5000] * 10)
    np.testing.assert_array_equal(np.bincount(cifar10.test_labels), [1000] * 10)
    first = [CLASSES[label] for label in cifar10.train_labels[:5]]
    assert first == ["frog", "truck", "truck", "deer", "automobile"]
    assert cifar10.class_names == tuple(CLASSES)
    assert cifar10.notes == ()
    splits = partition.make_splits(cifar10, 100, 5)
    assert splits["train"].indices.shape == (100, 450)
    # widely used constants of the published images; a JPEG changes little
    np.testing.assert_allclose(splits["train"].mean, [0.491, 0.482, 0.447], atol=2e-3)
    np.testing.assert_allclose(splits["train"].std, [0.247, 0.243, 0.262], atol=4e-3)


def test_the_forms_of_cifar10_hold_the_same(cifar10, data_dir):
    folder = data_dir / "cifar-10-batches-py"
    if not (folder.is_dir() and (data_dir / "cifar10.npz").is_file()):
        pytest.skip("real data: FEDJAX_GRAPH_DATA has not both forms of CIFAR-10")
    batches = images.load(str(folder))
    for key in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(batches, key), getattr(cifar10, key))
