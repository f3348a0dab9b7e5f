"""Windows against naive slices, loops and the calendar."""

import dataclasses
import datetime

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import batching
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import windows


@pytest.mark.parametrize(
    "num_steps, sizes",
    [(34272, (23974, 3425, 6850)), (52116, (36465, 5209, 10419)), (60, (26, 4, 7))],
)
def test_split_sizes_are_the_papers(num_steps, sizes):
    assert windows.split_sizes(num_steps) == sizes


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.integers(34, 10**6))
def test_splits_cover_all_windows_in_order_of_time(num_steps):
    train, validation, test = windows.split_sizes(num_steps)
    assert train + validation + test == num_steps - 23
    assert min(train, validation, test) >= 1
    assert abs(train - 0.7 * (num_steps - 23)) <= 0.5
    assert abs(test - 0.2 * (num_steps - 23)) <= 0.5


@pytest.mark.parametrize(
    "num_steps, fractions, sizes",
    [
        (34272, (0.7, 0.1, 0.2), (23974, 3425, 6850)),
        (123, (0.6, 0.2, 0.2), (60, 20, 20)),
        (33, (0.25, 0.5, 0.25), (2, 6, 2)),  # halves are rounded to even: 2.5 to 2
        (34, [0.5, 0.25, 0.25], (6, 2, 3)),  # 5.5 to 6, 2.75 to 3, the rest
    ],
)
def test_the_split_is_a_setting(num_steps, fractions, sizes):
    assert windows.split_sizes(num_steps, fractions) == sizes
    starts = windows.split_starts(num_steps, fractions)
    assert tuple(map(len, starts.values())) == sizes
    npt.assert_array_equal(
        np.concatenate(list(starts.values())), np.arange(num_steps - 23)
    )


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(1, 98).flatmap(
        lambda first: st.tuples(st.just(first), st.integers(1, 99 - first))
    ),
    st.integers(223, 10**5),
)
def test_any_percentages_split_all_windows(percentages, num_steps):
    train, validation = percentages
    text = f"{train}/{validation}/{100 - train - validation}"
    fractions = batching.parse_fractions(text)
    npt.assert_allclose(fractions, [int(part) / 100 for part in text.split("/")])
    sizes = windows.split_sizes(num_steps, fractions)
    assert sum(sizes) == num_steps - 23
    npt.assert_allclose(sizes, np.array(fractions) * (num_steps - 23), atol=1.001)


@pytest.mark.parametrize(
    "text, fractions",
    [
        ("70/10/20", (0.7, 0.1, 0.2)),
        ("60/20/20", (0.6, 0.2, 0.2)),
        ("33.4/33.3/33.3", (0.334, 0.333, 0.333)),
    ],
)
def test_fractions_are_read_from_percentages(text, fractions):
    npt.assert_allclose(batching.parse_fractions(text), fractions, rtol=1e-15)


def test_the_percentages_of_the_papers_are_the_default():
    assert batching.parse_fractions("70/10/20") == batching.FRACTIONS == (0.7, 0.1, 0.2)


@pytest.mark.parametrize(
    "text",
    ["", "70", "70/30", "70/10/20/0", "80/20/0", "120/-40/20", "70/10/21", "a/b/c"]
    + ["0.7/0.1/0.2", "70//20", "nan/10/20", "inf/10/20", "70,10,20"],
)
def test_rubbish_is_no_split(text):
    with pytest.raises(InputError, match="such as 70/10/20$") as raised:
        batching.parse_fractions(text)
    assert repr(text) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fractions",
    [(), (1.0,), (0.7, 0.3), (0.7, 0.3, 0.0), (1.2, -0.4, 0.2), (0.7, 0.1, 0.1)]
    + [(0.7, 0.1, np.nan), (np.inf, 0.1, 0.2), (70, 10, 20), (0.25,) * 4],
)
def test_fractions_are_three_that_sum_to_1(network, fractions):
    for use in (
        lambda: windows.split_sizes(60, fractions),
        lambda: windows.split_starts(60, fractions),
        lambda: windows.training_moments(network.speed, fractions),
        lambda: windows.make_splits(network, fractions),
    ):
        with pytest.raises(InputError, match="three positive numbers that sum to 1"):
            use()


@pytest.mark.parametrize("num_steps", [0, 23, 24, 26])
def test_too_few_steps_are_refused(num_steps):
    with pytest.raises(InputError, match=f"{num_steps} time steps"):
        windows.split_sizes(num_steps)


def test_starts_follow_each_other():
    starts = windows.split_starts(60)
    assert list(starts) == ["train", "validation", "test"]
    npt.assert_array_equal(np.concatenate(list(starts.values())), np.arange(37))
    assert [len(part) for part in starts.values()] == [26, 4, 7]
    assert starts["train"].dtype == np.int32


@pytest.mark.parametrize(
    "num_steps, split, num_training",
    [(33, (), 7), (39, (), 11), (60, (), 26), (60, ((0.5, 0.25, 0.25),), 18)],
)
def test_moments_are_those_of_all_training_inputs(num_steps, split, num_training):
    rng = np.random.default_rng(num_steps)
    speed = rng.uniform(0, 70, (num_steps, 3)).astype(np.float32)
    speed[rng.random(speed.shape) < 0.2] = 0
    inputs = [speed[start : start + 12] for start in range(num_training)]
    mean, std = windows.training_moments(speed, *split)
    npt.assert_allclose(mean, np.mean(inputs, dtype=np.float64), rtol=1e-9)
    npt.assert_allclose(std, np.std(inputs, dtype=np.float64), rtol=1e-9)


STAMPS = np.concatenate(
    [
        np.datetime64("2017-03-11T20:00", "ns") + windows.FIVE_MINUTES * np.arange(72),
        np.datetime64("2017-03-12T03:00", "ns") + windows.FIVE_MINUTES * np.arange(600),
        np.array(["1969-12-31T23:55", "2000-02-29T12:00"], "datetime64[ns]"),
    ]
)  # a week's end, an hour skipped, before 1970


def test_slots_and_clocks_are_those_of_the_calendar():
    slots, clocks = windows.week_slots(STAMPS), windows.time_of_day(STAMPS)
    assert slots.dtype == np.int32 and clocks.dtype == np.float32
    for stamp, slot, clock in zip(STAMPS, slots, clocks, strict=True):
        moment = stamp.astype("datetime64[us]").astype(datetime.datetime)
        minute = 60 * moment.hour + moment.minute
        assert slot == moment.weekday() * 288 + minute // 5
        npt.assert_allclose(clock, minute / 1440, atol=1e-7)
    assert slots.min() >= 0 and slots.max() < 2016
    assert clocks.min() >= 0 and clocks.max() < 1


def naive_windows(network, mean, std, sensor, starts):
    clock = [
        (stamp - stamp.astype("datetime64[D]")) / np.timedelta64(1, "D")
        for stamp in network.timestamps
    ]
    slices = []
    for start in starts:
        value = (network.speed[start : start + 24, sensor] - mean) / std
        slices.append(np.stack([value, clock[start : start + 24]], axis=-1))
    return np.stack(slices, axis=1)  # [24, B, 2]


@pytest.mark.parametrize("split", batching.SPLITS)
@pytest.mark.parametrize("sensor", [0, 4])
def test_gathered_windows_are_slices(network, splits, split, sensor):
    data = splits[split]
    order = np.random.default_rng(0).permutation(len(data.starts))
    starts = data.starts[order]
    inputs, targets = windows.gather(data, data.speed[sensor], starts)
    mean, std = windows.training_moments(network.speed)
    expected = naive_windows(network, mean, std, sensor, np.asarray(starts))
    npt.assert_allclose(inputs, expected[:12], atol=1e-5)
    npt.assert_allclose(targets, expected[12:], atol=1e-5)


def test_clients_are_gathered_side_by_side_under_vmap(splits):
    data = splits["train"]
    starts = data.starts[:4]
    inputs, _ = jax.vmap(lambda speed: windows.gather(data, speed, starts))(data.speed)
    assert inputs.shape == (5, 12, 4, 2)
    for sensor in range(5):
        alone, _ = windows.gather(data, data.speed[sensor], starts)
        npt.assert_array_equal(inputs[sensor], alone)


def test_truth_is_what_follows_the_inputs(splits):
    data = splits["train"]
    starts = data.starts[np.array([5, 0, 1, 25])]
    found = windows.truth(data.speed[3], starts)
    assert found.shape == (12, 4)
    for index, start in enumerate(starts):
        npt.assert_array_equal(found[:, index], data.speed[3, start + 12 : start + 24])


def test_splits_share_all_but_their_starts(network, splits):
    for name, size in zip(batching.SPLITS, (26, 4, 7), strict=True):
        data = splits[name]
        assert len(data.starts) == size
        npt.assert_array_equal(data.speed, network.speed.T)
        npt.assert_array_equal(data.client_weights, [26] * 5)
        npt.assert_array_equal(data.client_ids, range(5))
        assert data.speed is splits["train"].speed
    assert int(splits["test"].starts[-1]) + 24 == len(network.speed)


def test_splits_of_other_fractions(network):
    splits = windows.make_splits(network, (0.5, 0.25, 0.25))
    sizes = {name: len(data.starts) for name, data in splits.items()}
    assert sizes == {"train": 18, "validation": 10, "test": 9}
    inputs = [network.speed[start : start + 12] for start in range(18)]
    for data in splits.values():
        npt.assert_array_equal(data.client_weights, [18] * 5)
        npt.assert_allclose(data.mean, np.mean(inputs, dtype=float), rtol=1e-6)
        npt.assert_allclose(data.std, np.std(inputs, dtype=float), rtol=1e-6)
    starts = np.concatenate([splits[name].starts for name in batching.SPLITS])
    npt.assert_array_equal(starts, np.arange(37))


@pytest.mark.parametrize("reading", [0, 60, 63.7])
def test_a_constant_network_is_refused(network, reading):
    speed = np.full_like(network.speed, reading)
    with pytest.raises(InputError, match="tiny.*equal"):
        windows.make_splits(dataclasses.replace(network, speed=speed))


@pytest.mark.parametrize(
    "size, batch_size, num_batches", [(26, 8, 4), (24, 8, 3), (3, 8, 1), (5, 1, 5)]
)
def test_batches_are_padded_and_masked(size, batch_size, num_batches):
    order = np.random.default_rng(size).permutation(size).astype(np.int32)
    starts, mask = batching.batches(jnp.asarray(order), batch_size)
    assert starts.shape == mask.shape == (num_batches, batch_size)
    npt.assert_array_equal(np.ravel(starts)[:size], order)
    npt.assert_array_equal(np.ravel(starts)[size:], order[0])
    npt.assert_array_equal(np.ravel(mask), np.arange(starts.size) < size)


@pytest.mark.parametrize(
    ("num_steps", "shared"), [(60, 7), (100, 3), (125, 0), (30, 10)]
)
def test_a_short_series_says_what_is_trained_on_and_tested(network, num_steps, shared):
    """By the rows that are targets of both."""
    rows = np.arange(num_steps) % len(network.speed)
    short = dataclasses.replace(
        network,
        speed=network.speed[rows],
        timestamps=network.timestamps[0] + network.step.delta * np.arange(num_steps),
    )
    splits = windows.make_splits(short)
    train, test = (
        {start + k for start in np.asarray(splits[x].starts) for k in range(12, 24)}
        for x in ("train", "test")
    )
    assert len(train & test) == shared
    notes = windows.notes_on(short, splits)
    assert [note.split(":")[1].split()[0] for note in notes] == [str(shared)] * (
        shared > 0
    )
