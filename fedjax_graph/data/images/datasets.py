"""Labelled images on the host.

`load` reads CIFAR-10 in the forms that users have it, or a user's own .npz file; `cut`
makes a dataset smaller, `statistics` counts what is in it. `label_shards` deals the
images to clients.
"""

import dataclasses
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits, safe_pickle

CIFAR10 = "cifar10"
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR10_SIZES = (50000, 10000)
PATHS = (  # of a user's own dataset
    "of a .npz file",
    "of a folder or archive with the batches of CIFAR-10",
)
_ARCHIVE = "cifar-10-python.tar.gz"
_FOLDER = "cifar-10-batches-py"
_FORMS = ("cifar10.npz", _FOLDER, _ARCHIVE)  # the first to be found is read
_TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST_BATCH, _META = "test_batch", "batches.meta"
_ENCODED, _UNPACK = "cifar10_jpeg.npz", "unpack_cifar10.py"
_KEYS = ("train_images", "train_labels", "test_images", "test_labels")


class Published(NamedTuple):
    """A published dataset."""

    description: str


PUBLISHED = {
    CIFAR10: Published("CIFAR-10: 60000 photographs of 32 x 32 pixels, 10 classes")
}


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Images and their labels, on the host. A label is an index into `class_names`."""

    name: str
    train_images: np.ndarray  # [M, H, W, C] uint8
    train_labels: np.ndarray  # [M] int32
    test_images: np.ndarray  # [L, H, W, C] uint8
    test_labels: np.ndarray  # [L] int32
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what was done to the data since it was published


def load(name: str, data_dir: files.Folder = None) -> ImageDataset:
    """Loads CIFAR-10 by name, or a user's own file.

    CIFAR-10 is looked for in `data_dir`, else in $FEDJAX_GRAPH_DATA, and then in the
    download cache, as `cifar10.npz`, as the published folder `cifar-10-batches-py`
    and as the published archive `cifar-10-python.tar.gz`, which stays packed.

    A .npz file is a `numpy.savez` archive without object arrays:

        train_images [M, H, W, C], test_images [L, H, W, C]     uint8, C channels,
                                  or [M, H, W], [L, H, W] of grey images
        train_labels [M], test_labels [L]                       integers from 0 on
        class_names, a list                                     optional: text

    Args:
      name: `cifar10`, or a path: of a .npz file, of a folder `cifar-10-batches-py` or
        of the archive of it.
      data_dir: folder with the files.

    Raises:
      InputError: one line; a file is missing, broken or not what it should be.
    """
    if name == CIFAR10:
        path = locate(name, data_dir)
        if path is None:
            raise _not_found(data_dir)
        return _noted(_read_cifar10(path))
    path = Path(name)
    if path.suffix == ".npz":
        return _read_npz(path, path.stem)
    if path.is_dir() or path.suffixes[-2:] == [".tar", ".gz"]:
        return _noted(_read_cifar10(path))
    raise files.unknown("image", name, PUBLISHED, PATHS)


def locate(name: str, data_dir: files.Folder = None) -> Path | None:
    """The file or folder with CIFAR-10, or None if there is none.

    Raises:
      InputError: if the dataset is not known or the folder does not exist.
    """
    if name != CIFAR10:
        raise files.unknown("image", name, PUBLISHED, PATHS)
    paths = (folder / form for folder in files.folders(data_dir) for form in _FORMS)
    return next((path for path in paths if path.exists()), None)


def reads(path: str) -> bool:
    """Whether a path is that of a user's own images.

    A .npz file is told by its keys, and is none if it cannot be read.
    """
    if path.endswith(".npz"):
        return _KEYS[0] in files.npz_keys(path)
    return not path.endswith(".csv")


def _not_found(data_dir: files.Folder) -> InputError:
    """The error where CIFAR-10 is in no form that can be read."""
    encoded, first = files.find((_ENCODED,), files.folders(data_dir)), ""
    if encoded is not None:
        first = (
            f"{encoded} has to be unpacked first: run `python "
            f"{encoded.with_name(_UNPACK)} FOLDER` and pass data_dir=FOLDER, or "
        )
    return files.not_found(CIFAR10, _FORMS, data_dir, first=first)


def _noted(dataset: ImageDataset) -> ImageDataset:
    """Notes where there are more or fewer images than CIFAR-10 has."""
    sizes = (len(dataset.train_labels), len(dataset.test_labels))
    if sizes == CIFAR10_SIZES:
        return dataset
    words = "{} training and {} test images, where {} and {} were published"
    notes = (*dataset.notes, words.format(*sizes, *CIFAR10_SIZES))
    return dataclasses.replace(dataset, notes=notes)


def _read_cifar10(path: Path) -> ImageDataset:
    if path.suffix == ".npz":
        dataset = _read_npz(path, CIFAR10, CIFAR10_CLASSES)
        if dataset.train_images.shape[1:] != (32, 32, 3):
            raise InputError(
                f"{path}: expected the 32 x 32 images of {CIFAR10} in colour, found "
                f"{_size(dataset)}; pass the path of a .npz to read it as your own"
            )
        return dataset
    return _read_folder(path) if path.is_dir() else _read_archive(path)


def _read_archive(path: Path) -> ImageDataset:
    """Reads the batches inside the published archive, by way of a folder that goes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with (
            files.reading(path, "archive of CIFAR-10"),
            limits.unpacked(path) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            for name in (*_TRAIN_BATCHES, _TEST_BATCH, _META):
                (folder / name).write_bytes(_member(archive, f"{_FOLDER}/{name}"))
        try:
            return _read_folder(folder)
        except InputError as error:
            raise InputError(str(error).replace(temporary, str(path))) from error


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    """The content of a file that is in an archive whole."""
    if not (member := archive.getmember(name)).isfile() or member.issparse():
        raise InputError(f"{name} is no plain file in it; get CIFAR-10 again")
    limits.check_bytes(f"its file {name}", member.size)
    return archive.extractfile(member).read()


def _read_folder(folder: Path) -> ImageDataset:
    """Reads the pickled batches as published for Python; `batches.meta` may lack."""
    class_names = CIFAR10_CLASSES
    if (folder / _META).exists():
        class_names = _read_meta(folder / _META)
    batches = [_read_batch(folder / name) for name in _TRAIN_BATCHES]
    images, labels = map(np.concatenate, zip(*batches, strict=True))
    test = _read_batch(folder / _TEST_BATCH)
    return ImageDataset(CIFAR10, images, labels, *test, class_names)


def _read_dict(path: Path, kind: str) -> dict:
    """A pickled dict with keys of text, whichever Python wrote it."""
    content = safe_pickle.load(path)
    if not isinstance(content, dict):
        raise InputError(f"{path}: {type(content).__name__} found, expected {kind}")
    return {_text(key): value for key, value in content.items()}


def _text(value) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _read_meta(path: Path) -> tuple[str, ...]:
    with files.reading(path, "CIFAR-10 list of class names"):
        names = _read_dict(path, "a dict with label_names").get("label_names")
        if not isinstance(names, list) or len(names) != len(CIFAR10_CLASSES):
            raise InputError(
                f"no list label_names of {len(CIFAR10_CLASSES)} names; get CIFAR-10 "
                "again, or move the file away"
            )
        names = tuple(map(_text, names))
        files.check_texts("label_names", names)
        return names


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [B, 32, 32, 3] uint8 and labels [B] int32 of one pickled batch."""
    with files.reading(path, "CIFAR-10 batch"):
        batch = _read_dict(path, "a dict with data and labels")
        data, labels = batch.get("data"), batch.get("labels")
        if not isinstance(data, np.ndarray) or not isinstance(labels, list):
            raise InputError(
                "expected an array `data` and a list `labels`, found the keys "
                f"{', '.join(sorted(batch)) or 'of none'}; is it a batch of CIFAR-10?"
            )
        if data.ndim != 2 or data.shape[1] != 3072 or data.dtype != np.uint8:
            raise InputError(
                f"data has shape {data.shape} and type {data.dtype}, expected "
                "[images, 3072] uint8; get CIFAR-10 again"
            )
        images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        found = _checked_labels("labels", np.array(labels), images, 10)
        return np.ascontiguousarray(images), found


def _read_npz(
    path: Path, name: str, class_names: tuple[str, ...] | None = None
) -> ImageDataset:
    """Reads a .npz file; `class_names` are those it must have, if any."""
    arrays = files.read_npz(path)
    with files.reading(path, "image dataset"):
        missing = [key for key in _KEYS if key not in arrays]
        if missing:
            raise InputError(
                f"no array {missing[0]!r}; found {', '.join(sorted(arrays))}; an image "
                f"dataset has {', '.join(_KEYS)}"
            )
        if class_names is None:
            class_names = _npz_class_names(arrays)
        fields = {key: arrays[key] for key in _KEYS}
        for key in ("train_images", "test_images"):
            if fields[key].ndim == 3:  # grey ones, as MNIST is often kept
                fields[key] = fields[key][..., None]
        dataset = ImageDataset(name, **fields, class_names=class_names)
        check(dataset)
        return dataclasses.replace(
            dataset,
            train_labels=dataset.train_labels.astype(np.int32),
            test_labels=dataset.test_labels.astype(np.int32),
        )


def _npz_class_names(arrays: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    names = arrays.get("class_names")
    if names is None:
        labels = arrays["train_labels"]
        is_valid = labels.dtype.kind in "iu" and labels.size
        num_classes = int(labels.max()) + 1 if is_valid else 1
        return tuple(map(str, range(min(max(num_classes, 1), 1 << 16))))
    if names.ndim != 1 or names.dtype.kind not in "US" or not len(names):
        raise InputError(
            f"class_names has shape {names.shape} and type {names.dtype}, expected a "
            "list of text"
        )
    texts = tuple(_text(name) for name in names.tolist())
    files.check_texts("class_names", texts)
    return texts


def check(dataset: ImageDataset) -> None:
    """Checks that images and labels of a dataset fit together.

    Raises:
      InputError: naming what does not fit.
    """
    arrays.check_are_arrays(**{key: getattr(dataset, key) for key in _KEYS})
    for split in ("train", "test"):
        images = getattr(dataset, f"{split}_images")
        _checked_images(f"{split}_images", images)
        labels = getattr(dataset, f"{split}_labels")
        num_classes = len(dataset.class_names)
        _checked_labels(f"{split}_labels", labels, images, num_classes)
    if dataset.test_images.shape[1:] != dataset.train_images.shape[1:]:
        raise InputError(
            f"training images of {_size(dataset)} and test images of "
            f"{_size(dataset, 'test_images')}; they have to be of one size, and of as "
            "many channels"
        )


def _checked_images(key: str, images: np.ndarray) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != 4 or not images.size:
        raise InputError(
            f"{key} has shape {images.shape} and type {images.dtype}, expected "
            "[images, height, width, channels] uint8, at least one image"
        )
    return images


def _checked_labels(
    key: str, labels: np.ndarray, images: np.ndarray, num_classes: int
) -> np.ndarray:
    """The labels as int32, one for each image, each below `num_classes`."""
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise InputError(
            f"{key} has shape {labels.shape} and type {labels.dtype}, expected an "
            f"integer for each of {len(images)} images"
        )
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise InputError(
            f"{key} has the label {wrong[0]}, expected 0 to {num_classes - 1} for "
            f"{num_classes} classes"
        )
    return labels.astype(np.int32)


def _size(dataset: ImageDataset, key: str = "train_images") -> str:
    return "{} x {}".format(*getattr(dataset, key).shape[1:3])


def cut(
    dataset: ImageDataset, num_train: int | None = None, num_test: int | None = None
) -> ImageDataset:
    """Keeps the first images of each class, as many of each, in the same order.

    Args:
      dataset: what to cut; arrays that do not change are shared with the result.
      num_train: training images to keep in all; None keeps them as they are.
      num_test: test images to keep in all; likewise.

    Returns:
      The smaller dataset, with a line in `notes` for each cut.

    Raises:
      InputError: if the number is not a multiple of the number of classes, or a class
        has not as many images.
    """
    dataset = _cut_split(dataset, "train", "training", num_train)
    return _cut_split(dataset, "test", "test", num_test)


def _cut_split(dataset, split: str, word: str, number: int | None) -> ImageDataset:
    if number is None:
        return dataset
    labels = getattr(dataset, f"{split}_labels")
    num_classes = len(dataset.class_names)
    counts = np.bincount(labels, minlength=num_classes)
    most = int(counts.min()) * num_classes
    if number % num_classes or not 0 < number <= most:
        raise InputError(
            f"{dataset.name}: cannot take {number} {word} images; expected a multiple "
            f"of the {num_classes} classes from {num_classes} to {most}, as the "
            f"smallest class has {counts.min()}"
        )
    if number == len(labels):
        return dataset
    by_label = np.argsort(labels, kind="stable")
    firsts = (np.cumsum(counts) - counts)[:, None] + np.arange(number // num_classes)
    kept = np.sort(by_label[firsts.ravel()])
    note = (
        f"cut to {number} of {len(labels)} {word} images, the first "
        f"{number // num_classes} of each class"
    )
    images = getattr(dataset, f"{split}_images")
    changes = {f"{split}_images": images[kept], f"{split}_labels": labels[kept]}
    return dataclasses.replace(dataset, **changes, notes=(*dataset.notes, note))


def statistics(dataset: ImageDataset) -> dict:
    """Counts of images, of classes and of the training images of a class."""
    counts = np.bincount(dataset.train_labels, minlength=len(dataset.class_names))
    return {
        "name": dataset.name,
        "train_images": len(dataset.train_labels),
        "test_images": len(dataset.test_labels),
        "image_size": _size(dataset),
        "num_classes": len(dataset.class_names),
        "smallest_class": int(counts.min()),
        "largest_class": int(counts.max()),
        "class_names": list(dataset.class_names),
        "notes": list(dataset.notes),
    }
