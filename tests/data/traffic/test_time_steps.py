"""Steps read off time stamps, and spans of time in words."""

import datetime

import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import time_steps
from fedjax_graph.data.traffic.time_steps import TimeStep, in_words, step_of

NUM_STEPS = 100
DAY = np.timedelta64(1, "D")
SATURDAY = np.datetime64("2017-03-11T20:00", "ns")


def stamps(step, start=SATURDAY):
    return start + np.arange(NUM_STEPS) * np.timedelta64(*step)


def later(rows, span, step=(5, "m"), start=SATURDAY):
    """Evenly spaced stamps, but for those from each of `rows` on: later by `span`."""
    moved = np.arange(NUM_STEPS) >= np.array(rows)[:, None]
    return stamps(step, start) + moved.sum(axis=0) * np.timedelta64(*span)


@pytest.mark.parametrize(
    ("seconds", "one", "three", "twelve", "key"),
    [
        (1, "1 s", "3 s", "12 s", "0.2"),
        (30, "30 s", "90 s", "6 min", "6"),
        (300, "5 min", "15 min", "60 min", "60"),
        (900, "15 min", "45 min", "3 h", "180"),
        (3600, "60 min", "3 h", "12 h", "720"),
        (86400, "24 h", "3 d", "12 d", "17280"),
    ],
)
def test_horizons_are_named_by_real_time(seconds, one, three, twelve, key):
    step = TimeStep(seconds)
    assert [step.words(n) for n in (1, 3, 12)] == [one, three, twelve]
    assert (str(step), step.minutes(12)) == (one, key)
    assert step.words(12, minutes="'") == twelve.replace(" min", "'")
    assert step_of(stamps((seconds, "s"))) == step


def test_odd_spans_have_words_too():
    spans = [(1, "ns"), (1, "m"), (90, "m"), (61, "s"), (1500, "ms")]
    words = [in_words(np.timedelta64(*span)) for span in spans]
    assert words == ["1 ns", "1 min", "90 min", "61 s", "1500000000 ns"]


@pytest.mark.parametrize(
    ("rows", "start", "step"),
    [
        ([72], SATURDAY, (5, "m")),  # 2 o'clock on Sunday, as in PEMS-BAY
        ([6], SATURDAY, (1, "h")),
        ([4], np.datetime64("2025-03-30T00:00"), (15, "m")),  # 1 o'clock in London
    ],
)
def test_clocks_that_are_put_forward_skip_an_hour(rows, start, step):
    shifted = later(rows, (1, "h"), step, start.astype("M8[ns]"))
    assert step_of(shifted).delta == np.timedelta64(*step)


def with_stamp(row, stamp):
    series = stamps((5, "m"))
    series[row] = stamp
    return series


@pytest.mark.parametrize(
    ("series", "words"),
    [
        (
            later([50], (30, "D")),
            "row 50 (2017-04-11T00:10) follows 2017-03-12T00:05, expected 5 min from "
            "row to row; give every step one row, with 0 or NaN",
        ),
        (later([50], (1, "h")), "row 50 (2017-03-12T01:10) follows 2017-03-12T00:05"),
        (later([72], (1, "h"), start=SATURDAY - DAY), "row 72 (2017-03-11T03:00)"),
        (later([72], (2, "h")), "row 72 (2017-03-12T04:00)"),
        (later([7], (5, "m")), "row 7 (2017-03-11T20:40) follows 2017-03-11T20:30"),
        (later([7], (1, "ns")), "row 7 (2017-03-11T20:35:00.000000001) follows"),
        (with_stamp(7, "2017-03-11T20:31"), "row 7 (2017-03-11T20:31) follows"),
        (stamps((1, "ns")), "rows are 1 ns apart, expected whole seconds that divide"),
        (stamps((1500, "ms")), "rows are 1500000000 ns apart"),
        (stamps((5, "m"))[:1], "1 rows, expected at least 2"),
        (stamps((7, "m")), "rows are 7 min apart, expected whole seconds that divide"),
        (stamps((30, "D")), "rows are 30 d apart"),
        (stamps((0, "m")), "row 1 (2017-03-11T20:00) follows 2017-03-11T20:00; time"),
        (stamps((-5, "m")), "stamps have to increase from row to row"),
        (with_stamp(3, "NaT"), "row 3 (NaT) follows 2017-03-11T20:10; time stamps"),
        (with_stamp(9, "2012-01-01"), "row 9 (2012-01-01) follows 2017-03-11T20:40"),
    ],
)
def test_uneven_rows_are_refused_in_one_line(series, words):
    with pytest.raises(InputError) as caught:
        step_of(series)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("timestamps: ") and words in line


def test_an_hour_is_skipped_once_a_year():
    """Rows that are missing every Sunday are not the clock."""
    hours = SATURDAY + np.arange(8 * 24) * np.timedelta64(1, "h")
    is_gap = np.isin(np.arange(len(hours)), [6, 6 + 7 * 24])  # at 2 o'clock
    assert step_of(hours[:100][~is_gap[:100]]) == TimeStep(3600)
    with pytest.raises(InputError, match="2017-03-19T03:00. follows 2017-03-19T01:00"):
        step_of(hours[~is_gap])


def test_stamps_beyond_nanoseconds_are_refused_and_pythons_own_taken():
    late = np.datetime64("3000-01-01T00:00", "s") + np.timedelta64(
        300, "s"
    ) * np.arange(4)
    with pytest.raises(
        InputError, match="timestamps has 3000-.*expected years 1678 to"
    ):
        step_of(late)
    assert step_of(stamps((5, "m")).astype("M8[us]").astype(object)) == TimeStep(300)


def test_an_outage_is_no_clock():
    """Of the same hour of a Sunday, where no country puts its clock forward."""
    sunday_in_july = np.datetime64("2024-07-06T20:00", "ns")
    with pytest.raises(InputError, match="2024-07-07T03:00. follows 2024-07-07T01:55"):
        step_of(later([72], (1, "h"), start=sunday_in_july))
    rows = time_steps.clock_skips(later([72], (1, "h")))
    assert rows.tolist() == [72] and not len(time_steps.clock_skips(stamps((5, "m"))))


def test_pythons_stamps_with_a_zone_are_refused():
    zone = datetime.timezone(datetime.timedelta(hours=-8))
    rows = [datetime.datetime(2024, 1, 1, k, tzinfo=zone) for k in range(4)]
    with pytest.raises(InputError, match="-08:00.*expected wall-clock time without a"):
        step_of(np.array(rows))
    naive = np.array([row.replace(tzinfo=None) for row in rows])
    assert step_of(naive) == TimeStep(3600)
