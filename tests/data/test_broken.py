"""Files that a parser trips over: one line, whatever it raises."""

import io
import pickle
import zipfile

import h5py
import numpy as np
import pytest

from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import formats, hdf
from tests.data.traffic.traffic_files import SPEED, TIMESTAMPS, write_h5


def zipped(path, members, packing=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def npy(array):
    written = io.BytesIO()
    np.save(written, array)
    return written.getvalue()


def no_npy(path):
    zipped(path, {"edges.npy": npy(np.zeros((1, 2), int)), "labels": b"text"})


def no_magic(path):
    zipped(path, {"edges.npy": b"text", "labels.npy": b"text"})


def corrupt_lzma(path):
    content = npy(np.random.default_rng(0).bytes(999))
    zipped(path, {"labels.npy": content, "edges.npy": content}, zipfile.ZIP_LZMA)
    damaged = bytearray(path.read_bytes())
    damaged[60:90] = bytes(30)
    path.write_bytes(damaged)


def header_syntax(path):
    content = npy(np.zeros(3)).replace(b"(3,)", b"(3,(")
    zipped(path, {"labels.npy": content, "edges.npy": content})


def zip_version(path):
    zipped(path, {"labels.npy": npy(np.zeros(3)), "edges.npy": npy(np.zeros(3))})
    content = path.read_bytes()
    place = content.index(b"PK\1\2") + 6
    path.write_bytes(content[:place] + b"\xff\0" + content[place + 2 :])


def names_of_no_text(path):
    np.savez(
        path,
        edges=[[0, 1]],
        labels=[0, 1],
        features=np.eye(2),
        class_names=["\ud800", "b"],
    )


def huge_numbers(path):
    content = {"labels": np.array([0, 2**64 - 1], np.uint64), "features": np.eye(2)}
    np.savez(path, edges=np.array([[0, 2**64 - 1]], np.uint64), **content)


@pytest.mark.parametrize(
    "make",
    [
        no_npy,
        no_magic,
        corrupt_lzma,
        header_syntax,
        zip_version,
        names_of_no_text,
        huge_numbers,
    ],
)
def test_a_broken_npz_is_one_line(tmp_path, make):
    path = tmp_path / "own.npz"
    make(path)
    for kind in (None, "traffic", "images", "graphs"):
        refused(path, data.load, kind=kind)


def refused(path, load, **settings):
    with pytest.raises(InputError) as caught:
        load(path, **settings)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and line.isprintable() and len(line) < 700
    return line


@pytest.mark.parametrize("key", ["df/axis0", "df/axis1", "df/block0_values"])
def test_a_group_for_an_array_is_one_line(tmp_path, key):
    path = tmp_path / "table.h5"
    with h5py.File(path, "w") as file:
        for name in ("axis0", "axis1", "block0_items"):
            file[f"df/{name}"] = np.arange(2)
        file["df/block0_values"] = np.zeros((2, 2))
        del file[key]
        file.create_group(key)
    assert "is not an array" in refused(path, hdf.read)


@pytest.mark.parametrize("dtype", [complex, bool, "S3", [("a", float)]])
def test_readings_that_are_no_numbers_are_one_line(tmp_path, dtype):
    path = write_h5(tmp_path / "table.h5")
    with h5py.File(path, "r+") as file:
        del file["df/block0_values"]
        file["df/block0_values"] = np.zeros(SPEED.shape, dtype)
    line = refused(path, hdf.read)
    assert "block0_values has" in line and "type" in line and "expected numbers" in line


def test_an_axis_says_what_it_is_in_text_of_any_form(tmp_path):
    path = write_h5(tmp_path / "table.h5")
    for kind in ("datetime64[ns]", np.bytes_(b"datetime64[ns]")):
        with h5py.File(path, "r+") as file:
            file["df/axis1"].attrs["kind"] = kind
        np.testing.assert_array_equal(hdf.read(path).timestamps, TIMESTAMPS)


@pytest.mark.parametrize("link", [h5py.ExternalLink, lambda *_: h5py.SoftLink("/own")])
def test_a_table_that_lies_elsewhere_is_one_line(tmp_path, link):
    path, other = tmp_path / "table.h5", write_h5(tmp_path / "other.h5")
    with h5py.File(path, "w") as file:
        file["df"] = link(str(other), "/df")
    assert "found 0 under the keys ['df']" in refused(path, hdf.read)
    with h5py.File(path, "w") as file:
        file.create_group("df")["axis0"] = link(str(other), "/df/axis0")
    assert "axis1 is not an array that lies in this file" in refused(path, hdf.read)


@pytest.mark.parametrize(
    ("content", "reader"),
    [
        (b"time,a\n2012-01-01,\xff\n", formats.read_csv),
        (b"time,a\xed\xa0\x80\n", formats.read_csv),
        (b"2012-01-01,60,61\n2012-01-02,62,63\n", formats.read_csv),  # no header
        (b"time,a\x1b[31m\n2012-01-01,1\n", formats.read_csv),
        (
            b"time" + b",1" * 100_000 + b"\n2012-01-01" + b",1" * 99_999,
            formats.read_csv,
        ),
        (b"a,b,c\n" + b"1," * 100_000, formats.read_triples),
        (b"1,2,3\n\xff,2,3\n", formats.read_triples),
    ],
)
def test_a_broken_text_is_one_line(tmp_path, content, reader):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    refused(path, reader)


@pytest.mark.parametrize(
    "content",
    [
        [["a"], {"a": 0}, [[2**70]]],
        [["a"], {"a": 2**70}, np.eye(1)],
        [[2**70], {2**70: 0}, np.eye(1)],
        [["a"], [0], np.eye(1)],
        [["a"], {"a": 0}, {}],
        [[["a"]], {"a": 0}, np.eye(1)],
    ],
)
def test_a_sensor_graph_of_other_things_is_one_line(tmp_path, content):
    path = tmp_path / "graph.pkl"
    path.write_bytes(pickle.dumps(content, 2))
    refused(path, formats.read_graph_pickle)
