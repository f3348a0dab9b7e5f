"""Files that would take more memory or time than they are worth: refused unread."""

import gzip
import io
import itertools
import os
import pickle
import struct
import tarfile
import time
import zipfile

import h5py
import numpy as np
import pytest
import scipy.sparse

from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import limits, safe_pickle
from fedjax_graph.data.graphs import formats as graph_formats
from fedjax_graph.data.images import datasets as images
from fedjax_graph.data.traffic import formats as traffic_formats
from fedjax_graph.data.traffic import hdf, largest
from fedjax_graph.driver import pretrained
from tests.data.traffic.traffic_files import write_csv

MIB = 1 / 1024  # in GiB
LARGE = 2**21
SECONDS = 5  # of which most is waiting for a core


def npz_of_zeros(path):
    np.savez_compressed(path, train_images=np.zeros(LARGE, np.uint8))
    return data.load


def npz_that_lies(path):
    header = io.BytesIO()
    described = {"descr": "<f8", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("speed.npy", header.getvalue())
    return data.load


def own_npz(path, **arrays):
    time = {"start_ns": 0, "freq_ns": 300 * 10**9}
    own = {"speed": np.ones((30, 2)), "adjacency": np.eye(2)} | time | arrays
    np.savez_compressed(path, **own)
    return data.load


def npz_of_no_steps(path):
    return own_npz(path, speed=np.zeros((0, 2**24)))


def npz_of_no_steps_of_few(path):
    return own_npz(path, speed=np.zeros((0, 9)))


def npz_of_nothing_often(path):
    header = io.BytesIO()
    described = {"descr": "<U0", "fortran_order": False, "shape": (LARGE,)}
    np.lib.format.write_array_header_1_0(header, described)
    load = own_npz(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("unit.npy", header.getvalue())
    return load


def npz_of_many_ids(path):
    return npz_with_roads(path, sensor_ids=np.zeros(2**18, np.int8))


def npz_of_few_distances(path):
    return npz_with_roads(path, speed=np.ones((24, 1000), np.uint8))


def npz_with_roads(path, **arrays):
    two = np.array([0, 1])
    ends = {"distance_from": two, "distance_to": two[::-1], "distance_cost": two + 1.0}
    load = own_npz(path, **ends, **arrays)
    kept = dict(np.load(path))
    del kept["adjacency"]
    np.savez_compressed(path, **kept)
    return load


def tar_with(path, name, size, **settings):
    folder = images._FOLDER
    with tarfile.open(path, "w:gz", **settings) as archive:
        member = tarfile.TarInfo(f"{folder}/{name}")
        member.size = size
        member.pax_headers = {"comment": "x" * size} if settings else {}
        archive.addfile(member, io.BytesIO(bytes(size)))
    return data.load


def tar_ahead(path):
    return tar_with(path, "another", LARGE)


def tar_member(path):
    return tar_with(path, "data_batch_1", LARGE)


def tar_sparse(path):
    """A member without content that says to be all holes."""
    member = tarfile.TarInfo(f"{images._FOLDER}/data_batch_1")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = header[124:136] * 2  # a piece at 0 of no bytes
    header[483:495] = b"%011o\0" % LARGE  # the size it would have
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(gzip.compress(bytes(header) + bytes(1024)))
    return data.load


def tar_header(path):
    return tar_with(path, "data_batch_1", LARGE, format=tarfile.PAX_FORMAT)


def hdf_with(path, num_rows, chunks=None):
    with h5py.File(path, "w") as file:
        table = file.create_group("df")
        table["axis0"] = np.arange(2)
        table.create_dataset("axis1", (num_rows,), np.int64, chunks=chunks)
    return hdf.read


def hdf_of_fill_values(path):
    return hdf_with(path, 10**12, (100,))


def hdf_of_large_chunks(path):
    return hdf_with(path, 10**8, (10**8,))


def hdf_of_a_wide_table(path):
    with h5py.File(path, "w") as file:
        table = file.create_group("df")
        table["axis0"] = table["axis1"] = np.arange(1000)
    return hdf.read


def hdf_of_long_texts(path):
    """A short file of one text that stands in its column labels very often."""
    with h5py.File(path, "w") as file:
        table = file.create_group("df")
        texts = h5py.string_dtype()
        table.create_dataset("axis0", (99,), texts, fillvalue="0" * LARGE)
        table["axis1"] = np.arange(2)
    return hdf.read


def hdf_of_many_attributes(path):
    with h5py.File(path, "w") as file:
        table = file.create_group("df")
        table["axis0"] = table["axis1"] = np.arange(2)
        kinds = np.array(["0" * 99] * 99, h5py.string_dtype())
        table["axis1"].attrs["kind"] = kinds
    return hdf.read


def npz_of_many_arrays(path):
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(20_000):
            archive.writestr(f"{number:010}.npy", b"")
    return data.load


def pickled(path, content):
    path.write_bytes(content)
    return safe_pickle.load


def nested(path, container=list):
    shared = container()
    for _ in range(18):
        shared = container([shared, shared])
    return pickled(path, pickle.dumps(shared, 4))


def nested_tuples(path):
    """As a key, whose hash would take 2^60 steps."""
    twice = b"2\x86" * 60  # DUP, TUPLE2
    return pickled(path, b"\x80\x04})" + twice + b"Ns.")


def deep(path):
    return pickled(path, b"\x80\x04" + b"]" * 900 + b"a" * 899 + b".")


def in_itself(path):
    shared = []
    shared.append(shared)
    return pickled(path, pickle.dumps(shared, 4))


def operations(path):
    return pickled(path, b"\x80\x04" + b"]0" * 10_000 + b"].")


def copies(path):
    """The same list of a thousand things, copied again and again."""
    once = b"h\x01h\x02\x85R0"  # list(...)
    listed = b"\x80\x04c__builtin__\nlist\nq\x01](" + b"N" * 1000 + b"eq\x02"
    return pickled(path, listed + once * 160 + b".")


def colliding_keys(path):
    keys = {(2**61 - 1) * i: None for i in range(100)}
    return pickled(path, pickle.dumps(keys, 4))


def tuples_of_one_hash(path):
    """Python takes -1 and -2 for the same, and so all tuples of them."""
    keys = dict.fromkeys(itertools.product((-1, -2), repeat=6))
    assert len(keys) == 2**6 and len({*map(hash, keys)}) == 1
    return pickled(path, pickle.dumps(keys, 4))


def many_integers(path):
    keys = [dict.fromkeys(range(40)) for _ in range(2)]
    return pickled(path, pickle.dumps(keys, 4))


def many_integers_copied(path):
    listed = b"\x80\x04c__builtin__\nset\nq\x01](K\x01K\x02eq\x02"
    return pickled(path, listed + b"h\x01h\x02\x85R0" * 33 + b"h\x02.")


def bytes_of_no_end(path):
    return pickled(path, b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".")


def sparse_of_many_rows(path):
    empty = np.zeros(0, int)
    shape = (2**31 - 1, 3)
    matrix = scipy.sparse.coo_array((np.zeros(0), (empty, empty)), shape=shape)
    return pickled(path, pickle.dumps(matrix, 2))


def table_of(path, text):
    raw = path / "raw"
    raw.mkdir(parents=True)
    (raw / "edge.csv.gz").write_bytes(gzip.compress(text))
    return graph_formats.read_products


def table_of_rows(path):
    return table_of(path, b"0,0\n" * LARGE)


def table_of_columns(path):
    return table_of(path, b"0," * LARGE)


def table_of_a_number(path):
    return table_of(path, b"0" * LARGE)


def table_of_comments(path):
    return table_of(path, b"0,0\n" + b"# one\n" * LARGE)


def table_of_blank_lines(path):
    return table_of(path, b"0,0\n" + b"\n" * LARGE)


def table_of_other_blank_lines(path):
    return table_of(path, b"\r\n" * LARGE + b"0,0\n")


def table_of_wide_comments(path):
    return table_of(path, (b"0#" + b"," * 999 + b"\n") * 2000)


def readings_of_blank_lines(path):
    path.write_bytes(b",a\n" + b"\n" * 20_000 + b"2012-03-01,1\n")
    return traffic_formats.read_csv


def readings_of_many_rows(path):
    path.write_bytes(b",a\n" + b"0,\n" * 5000)
    return traffic_formats.read_csv


def roads_of_blank_lines(path):
    path.write_bytes(b"1,2,3\n" + b"\n" * 12_000)
    return traffic_formats.read_triples


def text_file(path):
    path.write_bytes(b"0" * LARGE)
    return traffic_formats.read_triples


def long_id(path):
    path.write_bytes(b"1,2,3\n" * 1000 + b"1" * 9000 + b",2,3\n")
    return traffic_formats.read_triples


def long_header(path):
    path.write_bytes(b"," + b"0" * 90_000 + b",0" * 100 + b"\n")
    return traffic_formats.read_csv


def long_stamp(path):
    rows = [b"2012-03-01,1\n"] * 1000
    path.write_bytes(b"".join([b",a\n", *rows, b"0" * 9000 + b",1\n"]))
    return traffic_formats.read_csv


def wide_weights(path):
    write_csv(path)
    path.with_name(f"{path.stem}_adjacency.csv").write_bytes(b"1," * 1000)
    return data.load


BOMBS = {
    "npz": (npz_of_zeros, "its arrays: 0.00195 GiB, more than max_file_gib="),
    "npz ": (npz_that_lies, "has 0 bytes, expected 8000000000000000"),
    "  npz": (npz_of_no_steps, "speed.npy': 0.125 GiB, more than"),
    "   npz": (npz_of_no_steps_of_few, "expected at least one step and one sensor"),
    "    npz": (npz_of_nothing_often, "'unit.npy' of type <U0, of no bytes"),
    "     npz": (npz_of_many_ids, "its sensor ids: 0.0156 GiB, more than"),
    "      npz": (npz_of_few_distances, "the adjacency of its sensors: 0.00745 GiB"),
    " npz": (npz_of_many_arrays, "lists its members in 1200000 bytes, expected at"),
    "a.tar.gz": (tar_ahead, "its content"),
    "b.tar.gz": (tar_member, "its content"),
    "c.tar.gz": (tar_header, "its content"),
    "d.tar.gz": (tar_sparse, "data_batch_1 is no plain file"),
    "a.h5": (hdf_of_fill_values, "its array axis1"),
    "b.h5": (hdf_of_large_chunks, "its array axis1"),
    "c.h5": (hdf_of_a_wide_table, "its table"),
    "d.h5": (hdf_of_long_texts, "axis0 has text of any length, expected numbers or"),
    "e.h5": (hdf_of_many_attributes, "the attribute kind of its axis is no text"),
    "a.pkl": (nested, "stand in others many times"),
    "b.pkl": (nested_tuples, "a key of type tuple"),
    "j.pkl": (tuples_of_one_hash, "a key of type tuple; expected text or a number"),
    "k.pkl": (many_integers, "its integers as keys"),
    "l.pkl": (many_integers_copied, "its integers as keys"),
    "c.pkl": (deep, "deep, or in themselves"),
    "d.pkl": (in_itself, "deep, or in themselves"),
    "e.pkl": (operations, "its operations"),
    "f.pkl": (copies, "what it makes"),
    "g.pkl": (colliding_keys, "a key of type int"),
    "h.pkl": (bytes_of_no_end, "with 1099511627776"),
    "i.pkl": (sparse_of_many_rows, "of shape .* GiB"),
    "a.csv": (table_of_rows, "its table"),
    "b.csv": (table_of_columns, "a line"),
    "c.csv": (table_of_a_number, "a line"),
    "d.csv": (text_file, "its size"),
    "e.csv": (long_id, "its ids: "),
    "f.csv": (long_header, "its sensor ids: "),
    "g.csv": (long_stamp, "its time stamps: "),
    "h.csv": (wide_weights, "its weights: "),
    "i.csv": (table_of_comments, "bytes of text with 1 rows; take out blank lines"),
    "j.csv": (table_of_blank_lines, "bytes of text with 1 rows; take out blank lines"),
    "k.csv": (table_of_other_blank_lines, "more than 1 MiB of blank lines"),
    "l.csv": (table_of_wide_comments, "bytes of text with .* rows; take out blank"),
    "m.csv": (readings_of_blank_lines, "more than 10000 blank lines; take them out"),
    "n.csv": (readings_of_many_rows, "its time stamps: "),
    "o.csv": (roads_of_blank_lines, "more than 10000 blank lines; take them out"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, name):
    make, words = BOMBS[name]
    path = tmp_path / (f"{name.strip()}.npz" if "npz" in name else name)
    load = make(path)
    start = time.monotonic()
    with limits.at_most(MIB), pytest.raises(InputError, match=words) as caught:
        load(path)
    assert time.monotonic() - start < SECONDS
    place = str(path.with_suffix("")).removesuffix(".tar")  # or of what lies beside it
    assert "\n" not in str(caught.value) and place in str(caught.value)


def test_a_larger_limit_lets_a_larger_file_through(tmp_path):
    path = tmp_path / "own.npz"
    np.savez_compressed(
        path,
        edges=[[0, 1]],
        labels=[0, 1],
        features=np.ones((2, 2**18), np.float32),
    )
    with limits.at_most(MIB), pytest.raises(InputError, match="max_file_gib="):
        data.load(path)
    with limits.at_most(4 * MIB):
        assert data.load(path).features.shape == (2, 2**18)
    assert limits.most_bytes() == 2 * 2**30


def test_a_table_may_have_comments_and_blank_lines(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("# a,b\n\n1,2 # one\n\n# two\n3,4\r\n\r\n5,6\n\n")
    table = graph_formats._read_csv(path, np.int64, 2)
    assert table.tolist() == [[1, 2], [3, 4], [5, 6]]


LOADERS = {
    "own.npz": data.load,
    "own.csv": data.load,
    "own.tar.gz": data.load,
    "own.h5": hdf.read,
    "own.pkl": safe_pickle.load,
    "roads.csv": traffic_formats.read_triples,
    "matrix.npy": lambda path: largest.read_adjacency(path, None, 2),
    "edges.csv": lambda path: graph_formats.read_csv_folder(path.parent),
    "model.npz": lambda path: pretrained.read(str(path)),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_not_read(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(InputError) as caught:
        LOADERS[name](path)
    line = str(caught.value)
    assert line.startswith(f"{path}: a device, a pipe or a socket; expected a plain")
    assert "\n" not in line


@pytest.mark.parametrize("depth", [51, 900, 10**6])
def test_json_is_not_nested_deep(depth):
    for opened, closed in (("[", "]"), ('{"a": [', "]}")):
        with pytest.raises(InputError, match="JSON nested more than 50 deep"):
            limits.parse_json(opened * depth + closed * depth)
    assert limits.parse_json("[" * 50 + "]" * 50)
    assert limits.parse_json('{"a": [1, {"b": "c"}]}') == {"a": [1, {"b": "c"}]}


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number(gib):
    with pytest.raises(InputError, match="max_file_gib="), limits.at_most(gib):
        pass
