import codecs
import collections
import os
import pickle

import numpy as np
import pytest
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import safe_pickle


def _dump(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["717447", "773869"]),
        np.float64(2.5),
        np.zeros(0),
    ],
    ids=["float32", "fortran", "text", "scalar", "empty"],
)
def test_arrays_come_back_in_every_protocol(tmp_path, array, protocol):
    loaded = safe_pickle.load(_dump(tmp_path / "a.pkl", array, protocol))
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("kind", ["matrix", "array"])
def test_sparse_matrices_come_back(tmp_path, layout, kind):
    dense = np.array([[0, 2.0], [0, 0], [1, 0]])
    matrix = getattr(scipy.sparse, f"{layout}_{kind}")(dense)
    loaded = safe_pickle.load(_dump(tmp_path / "m.pkl", matrix))
    assert type(loaded) is type(matrix)
    np.testing.assert_array_equal(loaded.toarray(), dense)


def test_containers_come_back(tmp_path):
    graph = collections.defaultdict(list, {0: [1, 2], 1: [0]})
    content = {"graph": graph, "pair": (1, [2.5, None]), "labels": {3, 4}}
    assert safe_pickle.load(_dump(tmp_path / "c.pkl", content)) == content


@pytest.mark.parametrize("copy", [b"K\x00", b"K\x01"])
def test_a_python_2_pickle_is_read_without_deprecation(tmp_path, copy):
    # An array as Python 2 wrote it: byte string, old module paths, flags as integers.
    path = tmp_path / "old.pkl"
    path.write_bytes(
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b"
        b"\x87R(K\x01K\x02\x85cnumpy\ndtype\nU\x02u1K\x00" + copy + b"\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x02\x07\xfetb."
    )
    np.testing.assert_array_equal(safe_pickle.load(path), np.uint8([7, 254]))


class _Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "function", [os.mkdir, eval, getattr, np.load, np.save, pickle.loads]
)
def test_a_pickle_that_runs_code_is_refused_before_it_does(
    tmp_path, function, protocol
):
    made = tmp_path / "made"
    path = _dump(tmp_path / "x.pkl", [_Runs(function, str(made))], protocol)
    with pytest.raises(InputError, match="would run .*") as raised:
        safe_pickle.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)
    assert not made.exists()


def test_bytes_in_another_encoding_are_refused(tmp_path):
    path = _dump(tmp_path / "x.pkl", _Runs(codecs.encode, "abc", "rot13"))
    with pytest.raises(InputError, match="encoding 'rot13'"):
        safe_pickle.load(path)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x02]q\x00(K"])
def test_a_broken_pickle_is_one_line(tmp_path, content):
    path = tmp_path / "broken.pkl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a readable pickle") as raised:
        safe_pickle.load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def _broken(layout, **parts):
    """A sparse matrix of the unit matrix's parts, some of which are replaced."""
    matrix = getattr(scipy.sparse, f"{layout}_array")(np.eye(3))
    matrix.__dict__.update(parts)
    return matrix


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (_broken("csr", indices=np.array([0, 99, 2])), "hold 99, expected 0 to 2"),
        (_broken("csr", indices=np.array([0, -1, 2])), "hold -1"),
        (_broken("csr", indptr=np.array([0, 1, 2, 0])), "expected to rise"),
        (_broken("csr", indptr=np.array([0, 9, 2, 3])), "expected to rise"),
        (_broken("csr", indptr=np.array([0, 3])), "2 numbers, expected 4"),
        (_broken("csc", indices=np.array([0, 1, 3])), "hold 3"),
        (_broken("csr", data=np.array([1.0])), "1 entries for 3 indices"),
        (_broken("csr", data=None), "no row of numbers"),
        (_broken("csr", _shape=(3, -1)), "expected two sizes"),
        (
            _broken("coo", coords=(np.array([0, 1, 2]), np.array([0, 1, 10**6]))),
            "hold 1000000",
        ),
        (_broken("coo", coords=(np.array([0, 1]), np.array([0, 1]))), "2 coordinates"),
    ],
)
def test_a_sparse_matrix_that_points_outside_itself_is_refused(tmp_path, matrix, words):
    path = _dump(tmp_path / "m.pkl", {"nested": [matrix]})
    with pytest.raises(InputError, match=words) as raised:
        safe_pickle.load(path)
    assert "\n" not in str(raised.value)


def _array(dtype_state, content=b"\x00" * 8, spec="V8", shape=b"K\x01\x85"):
    """A pickle of an array whose data type has a state of its own."""
    dtype = b"cnumpy\ndtype\n" + pickle.dumps((spec, 0, 1), 2)[2:-1] + b"R"
    if dtype_state is not None:
        dtype += pickle.dumps(dtype_state, 2)[2:-1] + b"b"
    data = pickle.dumps(content, 4)[2:-1].split(b"\x95", 1)[-1][8:]
    return (
        b"\x80\x04cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b"
        b"\x87R(K\x01" + shape + dtype + b"\x89" + data + b"tb."
    )


OBJECTS = np.dtype([("pointer", object)])


@pytest.mark.parametrize(
    "content",
    [
        _array(OBJECTS.__reduce__()[2]),  # 8 bytes of the file would be a pointer
        _array(None, spec="O8"),
        _array((3, "|", None, ("a",), {"a": ("f8", 0)}, 8, 1, 0), spec="f8"),
        _array((3, "<", ("f8", (1,)), None, None, -1, -1, 0), spec="f8"),
        _array(None, spec="f8", content=b"\x00" * 7),
        _array(None, spec="f8", shape=b"J\xff\xff\xff\xff\x85"),
        b"\x80\x02cnumpy\nndarray\nK\x05\x85R.",
        b"\x80\x02cscipy.sparse\ncsr_array\n)\x81.",
        b"\x80\x02cscipy.sparse\ncsr_array\nK\x05\x85R.",
    ],
)
def test_what_would_reach_into_memory_is_refused(tmp_path, content):
    path = tmp_path / "x.pkl"
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        safe_pickle.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"


def _dtype_of(spec, memo):
    """Keeps a data type that the pickle may still change."""
    return (
        b"cnumpy\ndtype\n" + pickle.dumps((spec, 0, 1), 2)[2:-1] + b"Rq" + memo + b"0"
    )


def _state(content, memo, size):
    """An array's state, of a kept data type, and what fills the array with it."""
    data = b"C" + bytes([len(content)]) + content
    return b"(K\x01K" + bytes([size]) + b"\x85h" + memo + b"\x89" + data + b"tb"


def _changed(dtype_state, spec=b"S1", content=b"abcd", memo=b"\x41"):
    """An array whose data type is changed once its size was checked."""
    made = _dtype_of(spec.decode(), memo) + ARRAY + b"q\x42"
    made += _state(content, memo, 4) + b"0"
    change = b"h" + memo + pickle.dumps(dtype_state, 2)[2:-1] + b"b0"
    return b"\x80\x03" + made + change + b"h\x42."


@pytest.mark.parametrize(
    "content",
    [
        _changed((3, "|", None, None, None, 1000, 1, 0)),
        _changed((3, "|", None, None, None, -1, -1, 0)),
        _changed((3, "|", None, None, None, 1, 0, 0)),
        _changed((3, "|", None, None, None, 1, 1, 1)),  # would hold pointers
        _changed((3, "<", None, None, None, -1, -1, 63), b"u1"),
    ],
)
def test_a_data_type_keeps_its_size_and_what_it_is_of(tmp_path, content):
    path = tmp_path / "x.pkl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="that is made another"):
        safe_pickle.load(path)


def test_an_array_has_a_data_type_of_its_own(tmp_path):
    path = tmp_path / "x.pkl"
    order = (3, ">", None, None, None, -1, -1, 0)
    path.write_bytes(_changed(order, b"u2", np.arange(4, dtype="<u2").tobytes()))
    assert safe_pickle.load(path).tolist() == [0, 1, 2, 3]


def _csr(change=b""):
    """The unit matrix [2, 2], and an operation on its parts once they are checked."""
    parts = {"indices": ("\x41", [0, 1]), "indptr": ("\x41", [0, 1, 2])}
    parts |= {"data": ("\x42", [1, 1])}
    made, state = (
        b"\x80\x03" + _dtype_of("<i4", b"\x41") + _dtype_of("<f8", b"\x42"),
        b"",
    )
    for number, (name, (memo, values)) in enumerate(parts.items(), 10):
        content = np.array(values, "<i4" if memo == "\x41" else "<f8").tobytes()
        made += (
            ARRAY + b"q" + bytes([number]) + _state(content, memo.encode(), len(values))
        )
        made += b"0"
        state += b"X" + len(name).to_bytes(4, "little") + name.encode()
        state += b"h" + bytes([number])
    made += (
        b"cscipy.sparse\ncsr_matrix\n)\x81q\x20}(X\x06\x00\x00\x00_shapeK\x02K\x02\x86"
    )
    return made + state + b"ub0" + change + b"h\x20."


def test_what_stands_in_a_checked_matrix_stays(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(_csr())
    np.testing.assert_array_equal(safe_pickle.load(path).toarray(), np.eye(2))
    path.write_bytes(_csr(b"h\x0a" + _state(b"\xff" * 8, b"\x41", 2) + b"0"))
    with pytest.raises(InputError, match="changes an array once it is made"):
        safe_pickle.load(path)
    order = (3, ">", None, None, None, -1, -1, 0)
    path.write_bytes(_csr(b"h\x41" + pickle.dumps(order, 2)[2:-1] + b"b0"))
    np.testing.assert_array_equal(safe_pickle.load(path).toarray(), np.eye(2))


def test_keys_are_text_or_integers(tmp_path):
    content = {"a": 1, b"b": 2, 3: 4, None: 5, np.int64(6): 7}
    assert safe_pickle.load(_dump(tmp_path / "k.pkl", content)) == content
    for key in ((1, 2), 1.5, frozenset([1]), 2**61 - 1, np.uint64(2**61 - 1)):
        for content in ({key: 1}, {key}):
            path = _dump(tmp_path / "k.pkl", content, 4)
            with pytest.raises(InputError, match="expected text or a number"):
                safe_pickle.load(path)


def test_an_array_written_operation_by_operation_is_read(tmp_path):
    """So that the pickles above are refused for what is wrong with them."""
    path = tmp_path / "x.pkl"
    state = (3, "<", None, None, None, -1, -1, 0)
    path.write_bytes(_array(state, np.float64(2.5).tobytes(), spec="f8"))
    assert safe_pickle.load(path).tolist() == [2.5]


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        safe_pickle.load(tmp_path / "absent.pkl")


def test_planetoid_files_are_read(original):
    folder = original / "planetoid"
    if not folder.is_dir():
        pytest.skip("real data: no folder `planetoid`")
    names = ("x", "tx", "allx", "y", "ty", "ally", "graph")
    x, tx, allx, y, ty, ally, graph = (
        safe_pickle.load(folder / f"ind.cora.{name}") for name in names
    )
    assert (x.shape, tx.shape, allx.shape) == ((140, 1433), (1000, 1433), (1708, 1433))
    assert (y.shape, ty.shape, ally.shape) == ((140, 7), (1000, 7), (1708, 7))
    assert allx.nnz + tx.nnz == 49216  # non-zero features of Cora
    assert x.toarray().max() == 1
    edges = {(min(i, j), max(i, j)) for i in graph for j in graph[i] if i != j}
    assert (len(graph), len(edges)) == (2708, 5278)


def test_a_name_of_any_length_is_refused_in_a_short_line(tmp_path):
    path = tmp_path / "long.pkl"
    path.write_bytes(b"c" + b"module\x01" * 300 + b"\nname\n.")
    with pytest.raises(InputError, match="would run module") as raised:
        safe_pickle.load(path)
    assert len(str(raised.value)) < 500
    assert str(raised.value).isprintable()
