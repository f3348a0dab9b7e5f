"""Checkpoints: bit for bit, and one clear line where they are broken."""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.driver.checkpoint import Checkpoints

# Orbax's reads in flight when one of them fails complain from threads, a bit later.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
SETTINGS = {"method": "fake", "config": {"sizes": (8, 4), "rate": 0.1}, "seeds": (0,)}


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


def assert_unreadable(folder, like, match="cannot be read"):
    with opened(folder) as checkpoints:
        with pytest.raises(InputError, match=match) as caught:
            checkpoints.restore(like)
        message = str(caught.value)
        assert "\n" not in message
        assert str(folder) in message
        assert len(message) < 500 + len(str(folder))


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


def test_settings_are_stored_as_json(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, make_tree())
    with opened(tmp_path, settings=None) as checkpoints:
        stored = checkpoints.settings()
    assert stored == {
        "method": "fake",
        "config": {"sizes": [8, 4], "rate": 0.1},
        "seeds": [0],
    }


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


def test_no_checkpoint_is_one_line(tmp_path):
    assert_unreadable(tmp_path, make_tree(), "no finished round")


@pytest.mark.parametrize(
    "like",
    [
        {"other": jnp.zeros(3)},
        make_tree() | {"more": jnp.zeros(3)},
        make_tree() | {"round": jnp.zeros(2, jnp.int32)},
        make_tree() | {"half": jnp.zeros((70, 2), jnp.bfloat16)},
    ],
    ids=["other", "more", "longer", "wider"],
)
def test_a_tree_of_another_structure_is_one_line(tmp_path, like):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, make_tree())
    assert_unreadable(tmp_path, like)


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


def halve(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def largest_data_file(folder):
    return max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda two: shutil.rmtree(two / "state"),
        lambda two: shutil.rmtree(two / "settings"),
        lambda two: (two / "settings" / "metadata").unlink(),
        lambda two: halve(two / "settings" / "metadata"),
        lambda two: halve(two / "state" / "_METADATA"),
        lambda two: halve(two / "state" / "manifest.ocdbt"),
        lambda two: halve(largest_data_file(two)),
        lambda two: largest_data_file(two).unlink(),
        lambda two: (two.parent / "3").mkdir(),
    ],
    ids=[
        "no state",
        "no settings",
        "settings gone",
        "settings cut",
        "metadata cut",
        "manifest cut",
        "data cut",
        "data gone",
        "empty folder",
    ],
)
def test_a_broken_checkpoint_is_one_line_and_the_one_before_it_serves(copy, damage):
    damage(copy / "2")
    assert_unreadable(copy, make_tree(), "cannot be read.*delete this folder")
    with opened(copy) as checkpoints:
        latest = checkpoints.latest_round()
    while latest > 1:
        shutil.rmtree(copy / str(latest))
        latest -= 1
    with opened(copy) as checkpoints:
        assert_same_bits(checkpoints.restore(make_tree()), make_tree(1))


def test_what_a_kill_leaves_half_written_is_passed_over(copy):
    for name in ("3.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-17"):
        shutil.copytree(copy / "2", copy / name)
        halve(largest_data_file(copy / name))
    with opened(copy) as checkpoints:
        assert checkpoints.latest_round() == 2
        assert_same_bits(checkpoints.restore(make_tree()), make_tree(2))
        checkpoints.save(3, make_tree(3))
        assert_same_bits(checkpoints.restore(make_tree()), make_tree(3))
