"""Checkpoints: bit for bit, and never what damaged files would give."""

import contextlib
import errno
import hashlib
import json
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_graph.core import mesh, processes
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import checkpoint, digests
from fedjax_graph.driver.checkpoint import DIGESTS, Checkpoints, DamagedError
from fedjax_graph.driver.digests import digest
from tests.damage import flip, flip_in_digest, halve

# Orbax's reads in flight when one of them fails complain from threads, a bit later.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
SETTINGS = {"method": "fake", "config": {"sizes": (8, 4), "rate": 0.1}, "seeds": (0,)}
STORED = {"method": "fake", "config": {"sizes": [8, 4], "rate": 0.1}, "seeds": [0]}


@contextlib.contextmanager
def opened(folder, settings=SETTINGS):
    with contextlib.closing(Checkpoints(folder, settings)) as checkpoints:
        yield checkpoints


def make_tree(seed=0):
    key = jax.random.key(seed)
    large = jax.random.normal(key, (300, 70))
    return {
        "params": [large, jnp.float32(jnp.nan), jnp.full(3, -0.0)],
        "half": large[0].astype(jnp.bfloat16),
        "key_data": jax.random.key_data(key),
        "round": jnp.int32(7),
        "flag": jnp.array([True, False]),
        "seconds": np.float64(1 / 3),
    }


def assert_same_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def assert_refused(folder, like, match, read=Checkpoints.restore):
    with opened(folder) as checkpoints:
        with pytest.raises(InputError, match=match) as caught:
            read(checkpoints, like)
        message = str(caught.value)
        assert "\n" not in message
        assert str(folder) in message
        assert len(message) < 500 + len(str(folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with opened(folder) as checkpoints:
        checkpoints.save(1, make_tree(1))
        checkpoints.save(2, make_tree(2))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_every_bit_comes_back(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, make_tree())
    with opened(tmp_path) as checkpoints:
        abstract = jax.eval_shape(make_tree) | {"seconds": np.float64(0)}
        assert_same_bits(checkpoints.restore(abstract), make_tree())


def test_the_latest_two_are_kept(tmp_path):
    with opened(tmp_path) as checkpoints:
        assert checkpoints.latest_round() is None
        for round_ in (3, 6, 8):
            checkpoints.save(round_, make_tree(round_))
    with opened(tmp_path) as checkpoints:
        assert checkpoints.latest_round() == 8
        assert_same_bits(checkpoints.restore(make_tree()), make_tree(8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "8"]


def test_what_a_run_that_goes_on_has_deleted_is_no_damage(tmp_path):
    with opened(tmp_path) as running, opened(tmp_path) as reading:
        running.save(1, make_tree(1))
        reading._manager.reload()
        for round_ in (2, 3):
            running.save(round_, make_tree(round_))
        assert reading.latest_round() == 1
        assert_same_bits(reading.restore(make_tree()), make_tree(3))


def test_settings_are_stored_as_json(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, make_tree())
    with opened(tmp_path, settings=None) as checkpoints:
        stored = checkpoints.settings()
    assert stored == STORED


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seeds": [0, 1]}, "saved with seeds=[0], not [0, 1];"),
        ({"config": {"sizes": [8, 4]}}, "saved with config.rate=0.1, not None;"),
        (
            {"config": {"sizes": [8, 2], "rate": 0.1}, "method": "other"},
            "saved with config.sizes=[8, 4], not [8, 2]; method=fake, not other;",
        ),
    ],
)
def test_other_settings_are_refused(tmp_path, other, words):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, make_tree())
    with opened(tmp_path, SETTINGS | other) as checkpoints:
        with pytest.raises(InputError) as caught:
            checkpoints.restore(make_tree())
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_setting_that_is_younger_than_the_checkpoint_has_its_default(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, make_tree())
    defaults = {"config": {"dropout": 0.5, "rate": 0.3}}
    for dropout, refused in ((0.5, False), (0.0, True)):
        config = SETTINGS["config"] | {"dropout": dropout}
        checkpoints = Checkpoints(
            tmp_path, SETTINGS | {"config": config}, defaults=defaults
        )
        with contextlib.closing(checkpoints):
            if not refused:
                checkpoints.restore(make_tree())
                continue
            with pytest.raises(InputError, match=r"config.dropout=0.5, not 0.0;"):
                checkpoints.restore(make_tree())


def test_a_config_that_was_none_has_no_defaults(tmp_path):
    config = SETTINGS["config"] | {"server": None}
    with contextlib.closing(Checkpoints(tmp_path, {"config": config})) as checkpoints:
        checkpoints.save(1, make_tree())
    wanted = {"config": config | {"server": {"name": "sgd", "rate": 0.1}}}
    checkpoints = Checkpoints(tmp_path, wanted, defaults=wanted)
    refused = pytest.raises(InputError, match=r"config.server.name=None, not sgd")
    with contextlib.closing(checkpoints), refused:
        checkpoints.restore(make_tree())


@pytest.mark.parametrize("read", [Checkpoints.restore, Checkpoints.restore_intact])
def test_no_checkpoint_is_one_line(tmp_path, read):
    assert_refused(tmp_path, make_tree(), "no finished round", read)


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"other": jnp.zeros(3)}, "another version.* it has .* and it lacks other"),
        (make_tree() | {"more": jnp.zeros(3)}, "of another method: it lacks more[);]"),
        (make_tree() | {"half": None}, "of another method: it has half[);]"),
        (make_tree() | {"round": jnp.zeros(2, jnp.int32)}, "array of shape"),
        (make_tree() | {"half": jnp.zeros((70, 2), jnp.bfloat16)}, "array of shape"),
    ],
    ids=["other", "more", "less", "longer", "wider"],
)
def test_a_tree_of_another_structure_is_one_line(saved, like, words):
    assert_refused(saved, like, words)
    assert_refused(saved, like, words, Checkpoints.restore_intact)


# --- Digests -------------------------------------------------------------------------


def split_mix(place, bits):
    """The finalizer of SplitMix64 in whole numbers of Python."""
    x = (bits + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("num_at_once", [2**20, 2])
def test_the_digest_is_that_of_paths_types_shapes_and_bits(monkeypatch, num_at_once):
    monkeypatch.setattr(digests, "NUM_AT_ONCE", num_at_once)
    tree = {
        "b": jnp.array([1, -2, 0], jnp.bfloat16),
        "a": [np.float64(0), np.zeros((0, 3))],
        "c": np.array([[True], [False]]),
    }
    heads = [
        ["a/0", "float64", []],
        ["a/1", "float64", [0, 3]],
        ["b", "bfloat16", [3]],
        ["c", "bool", [2, 1]],
    ]
    bits = [0], [], [0x3F80, 0xC000, 0], [1, 0]
    sums = [sum(map(split_mix, range(9), each)) % 2**64 for each in bits]
    text = json.dumps([heads, sums]).encode()
    assert digest(tree) == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.array([[-0.0, 1.0]], np.float32)},
        {"x": np.array([[1.0, 0.0]], np.float32)},
        {"x": np.zeros(2, np.float32)},
        {"x": np.zeros((1, 2), np.int32)},
        {"y": np.zeros((1, 2), np.float32)},
        [np.zeros((1, 2), np.float32)],
    ],
    ids=["bit", "place", "shape", "type", "name", "structure"],
)
def test_the_digest_of_another_tree_differs(other):
    assert digest(other) != digest({"x": np.array([[0.0, 1.0]], np.float32)})


def test_a_digest_sees_both_halves_of_a_wide_number():
    numbers = [{"x": np.array([1 + 2j, z])} for z in (3 + 4j, 3 + 5j, 4 + 4j, 4 + 3j)]
    assert len(set(map(digest, numbers))) == 4


SPECS = {
    "all": (),
    "rows": ("clients",),
    "both": ("clients", "edges"),
    "last": (None, "edges"),
}


def placed_on(devices, edge_parts, values):
    """Specs' names -> where such an array is on a mesh of so many devices."""
    own = mesh.make_mesh(edge_parts, jax.devices()[:devices])
    shardings = {key: NamedSharding(own, PartitionSpec(*x)) for key, x in SPECS.items()}
    return {
        key: jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
        for key, sharding in shardings.items()
    }


@pytest.mark.parametrize(("devices", "edge_parts"), [(8, 2), (2, 1), (1, 1)])
def test_what_several_devices_hold_is_saved_and_read_by_their_parts(
    tmp_path, devices, edge_parts
):
    """On as many devices or others, each of which gets its own part."""
    values = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    whole = dict.fromkeys(SPECS, values)
    shared = {
        key: jax.device_put(values, x.sharding)
        for key, x in placed_on(8, 2, values).items()
    }
    assert digest(shared) == digest(whole)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, shared)
        found = checkpoints.restore(whole)
        assert all(isinstance(x, np.ndarray) for x in found.values())
        assert_same_bits(found, whole)
        like = placed_on(devices, edge_parts, values)
        found = checkpoints.restore(like)
    assert {key: x.sharding for key, x in found.items()} == {
        key: x.sharding for key, x in like.items()
    }
    assert_same_bits(found, whole)


def test_what_one_process_cannot_read_is_damaged_for_all(saved, monkeypatch):
    """Or they would go on from different rounds."""
    other = "1its state, or its digest, cannot be read: gone"
    monkeypatch.setattr(processes, "gather", lambda text="": [text, other])
    with opened(saved, None) as checkpoints, pytest.raises(DamagedError, match="gone"):
        checkpoints.restore(make_tree())


# --- Damage --------------------------------------------------------------------------


def data_file(folder):
    """The file that holds the large array."""
    return max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


def test_damage_is_found_or_changes_nothing(copy):
    """Three flipped bits in each file, more where the arrays are; cut; gone."""
    rng = np.random.default_rng(0)
    files = [path for path in (copy / "2").rglob("*") if path.is_file()]
    files.sort(key=lambda path: (path.parent, path.stat().st_size))
    found, num_flips = [], 0

    def check(path, damage, *args):
        content = path.read_bytes()
        damage(path, *args)
        with opened(copy) as checkpoints:
            try:
                assert_same_bits(checkpoints.restore(make_tree()), make_tree(2))
            except DamagedError as error:
                found.append(str(error))
        path.write_bytes(content)

    for path in [*files, *[data_file(copy / "2")] * 5]:
        for bit in rng.integers(8 * path.stat().st_size, size=3):
            check(path, flip, int(bit))
            num_flips += 1
    assert num_flips >= 50
    only_by_digest = [x for x in found if "the digest of its state does not match" in x]
    assert len(only_by_digest) >= 12
    assert len(found) - len(only_by_digest) >= 6
    for path in files:
        check(path, halve)
        check(path, pathlib.Path.unlink)


DAMAGES = {
    "no state": lambda two: shutil.rmtree(two / "state"),
    "no settings": lambda two: shutil.rmtree(two / "settings"),
    "no digests": lambda two: shutil.rmtree(two / DIGESTS),
    "settings gone": lambda two: (two / "settings" / "metadata").unlink(),
    "settings cut": lambda two: halve(two / "settings" / "metadata"),
    "settings flipped": lambda two: flip(two / "settings" / "metadata", 8 * 14),
    "digests cut": lambda two: halve(two / DIGESTS / "metadata"),
    "digests of a list": lambda two: (two / DIGESTS / "metadata").write_text("[]"),
    "metadata cut": lambda two: halve(two / "state" / "_METADATA"),
    "digests flipped": flip_in_digest,
    "manifest flipped": lambda two: flip(two / "state" / "manifest.ocdbt", 8 * 50),
    "manifest cut": lambda two: halve(two / "state" / "manifest.ocdbt"),
    "data cut": lambda two: halve(data_file(two)),
    "data gone": lambda two: data_file(two).unlink(),
    "data flipped": lambda two: flip(data_file(two), 8 * 5000),
    "all gone": lambda two: [shutil.rmtree(two), two.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_one_before_a_damaged_checkpoint_serves(copy, capsys, damage):
    damage(copy / "2")
    words = "copy/2: the checkpoint is damaged .*; resume the run, which goes on from"
    assert_refused(copy, make_tree(), words)
    with opened(copy) as checkpoints:
        assert checkpoints.settings() == STORED
        assert not capsys.readouterr().out
        assert_same_bits(checkpoints.restore_intact(make_tree()), make_tree(1))
        note = capsys.readouterr().out
        assert note.startswith(f"note: {copy / '2'}: the checkpoint is damaged (")
        assert note.endswith("); going on from that of round 1\n")
        assert "()" not in note and note.count("\n") == 1
        assert (copy / "2").exists()
        checkpoints.save(2, make_tree(3))
    with opened(copy) as checkpoints:
        assert_same_bits(checkpoints.restore_intact(make_tree()), make_tree(3))
    assert not capsys.readouterr().out
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2"]


def test_a_kill_before_a_damaged_checkpoint_is_replaced_loses_nothing(
    copy, monkeypatch
):
    flip(data_file(copy / "2"), 8 * 5000)
    with opened(copy) as checkpoints:
        checkpoints.restore_intact(make_tree())
        monkeypatch.setattr(checkpoints._manager, "save", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(2, make_tree(2))
    with opened(copy) as checkpoints:
        assert_same_bits(checkpoints.restore_intact(make_tree()), make_tree(1))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EMFILE, "Too many open files"),
        ValueError("PERMISSION_DENIED: d/1 [os_error_code='13' from='x']"),
    ],
)
def test_a_read_that_fails_for_now_is_no_damage(copy, monkeypatch, error):
    def fail(*_, **__):
        raise error

    with opened(copy) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "restore", fail)
        with pytest.raises(InputError, match="cannot be read now") as caught:
            checkpoints.restore_intact(make_tree())
        assert not isinstance(caught.value, DamagedError)


def test_a_checkpoint_from_before_digests_is_of_an_older_version(copy):
    shutil.rmtree(copy / "2" / DIGESTS)
    path = copy / "2" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    del metadata["item_handlers"][DIGESTS]
    path.write_text(json.dumps(metadata))
    words = "copy/2: the checkpoint is of an older version"
    for read in (Checkpoints.restore, Checkpoints.restore_intact):
        assert_refused(copy, make_tree(), words, read)


def test_no_intact_checkpoint_is_one_line(copy):
    flip(data_file(copy / "1"), 8 * 5000)
    shutil.rmtree(copy / "2" / "state")
    words = (
        "no checkpoint is intact .of round 2: .*; of round 1: the digest of its state"
    )
    assert_refused(copy, make_tree(), words, Checkpoints.restore_intact)
    assert {path.name for path in copy.iterdir()} == {"1", "2"}


def test_other_settings_are_no_damage(copy):
    other, words = SETTINGS | {"seeds": (1,)}, r"saved with seeds=\[0\], not \[1\]"
    with opened(copy, other) as checkpoints, pytest.raises(InputError, match=words):
        checkpoints.restore_intact(make_tree())


def test_what_a_kill_leaves_half_written_is_passed_over(copy):
    for name in ("3.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-17"):
        shutil.copytree(copy / "2", copy / name)
        halve(data_file(copy / name))
    with opened(copy) as checkpoints:
        assert checkpoints.latest_round() == 2
        assert_same_bits(checkpoints.restore(make_tree()), make_tree(2))
        checkpoints.save(3, make_tree(3))
        assert_same_bits(checkpoints.restore(make_tree()), make_tree(3))


PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_arrays_are_neither_copied_nor_all_compressed_before_they_are_written(
    tmp_path, monkeypatch
):
    """Of a state of 128 MiB, in files of 4, less than the half is in memory besides."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 2**22)
    rng = np.random.default_rng(0)  # nothing that could be made smaller
    state = {name: jnp.asarray(rng.random((2**12, 2**11), "f4")) for name in "abcd"}
    status, forget = (pathlib.Path("/proc/self", x) for x in ("status", "clear_refs"))

    def peak():
        return int(PEAK.search(status.read_text())[1]) * 1024

    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(3)})  # what orbax needs of its own
        forget.write_text("5")  # the highest there was
        before = peak()
        checkpoints.save(2, state)
        assert peak() - before < 2**26
        assert_same_bits(checkpoints.restore(state), state)
    files = [x.stat().st_size for x in tmp_path.glob("2/state/**/*") if x.is_file()]
    assert max(files) < 2**23 < sum(files)
