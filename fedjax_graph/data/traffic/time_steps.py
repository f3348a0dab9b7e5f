"""The time between the rows of a series, and spans of time in words."""

import contextlib
import dataclasses
import re

import jax
import numpy as np

from fedjax_graph.core.errors import InputError, one_line

UNIT_NAMES = {"d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ns": "ns"}
_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")
_CLOCKS_GO_FORWARD = (3, 4, 8, 9, 10, 11)  # months, in the north and in the south
_ZONE = re.compile(r"(Z|[T ]\d.*[+-]\d\d(:?\d\d)?)\s*$")
_DAY, _HOUR, _MINUTE, _SECOND, _NANOSECOND = (
    np.timedelta64(1, code) for code in ("D", "h", "m", "s", "ns")
)
_UNITS = dict(
    zip(UNIT_NAMES, (_DAY, _HOUR, _MINUTE, _SECOND, _NANOSECOND), strict=True)
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TimeStep:
    """The time from one row of readings to the next.

    A pytree without leaves: it travels with the data, and is known while a program
    is traced.
    """

    seconds: int  # a day is a multiple of it

    def __str__(self) -> str:
        return self.words()

    @property
    def delta(self) -> np.timedelta64:
        """The step as NumPy has it, to be added to time stamps."""
        return np.timedelta64(self.seconds, "s")

    def minutes(self, num_steps: int) -> str:
        """What `num_steps` steps last in minutes, as a key: "15", "60", "180"."""
        return f"{num_steps * self.seconds / 60:g}"

    def words(self, num_steps: int = 1, minutes: str = " min") -> str:
        """What `num_steps` steps last; see `in_words`."""
        return in_words(num_steps * self.delta, minutes)


def unit_of(span: np.timedelta64) -> tuple[str, np.timedelta64]:
    """The unit to give a span of time in: the largest that it is a whole number of.

    One hour is 60 min, and one day 24 h.

    Returns:
      A key of `UNIT_NAMES`, and the length of one.
    """
    for sign, unit in _UNITS.items():
        count = span // unit
        if count * unit == span and count >= (2 if sign in ("d", "h") else 1):
            return sign, unit
    return "ns", _NANOSECOND


def in_words(span: np.timedelta64, minutes: str = " min") -> str:
    """A span of time for readers: "5 min", "60 min", "3 h", "30 s".

    Args:
      span: the time.
      minutes: what stands behind a number of minutes.
    """
    sign, unit = unit_of(span)
    return f"{span // unit}{minutes if sign == 'min' else f' {sign}'}"


def is_stamp(text: str) -> bool:
    """Whether a text is a day, or a time of it, in ISO 8601."""
    with contextlib.suppress(ValueError):
        return "-" in text and not np.isnat(np.datetime64(text))
    return False


def as_stamps(key: str, stamps: np.ndarray) -> np.ndarray:
    """Time stamps as datetime64[ns].

    Args:
      key: what has them, for the message.
      stamps: [T] datetime64 of any unit, text in ISO 8601, or nanoseconds since 1970.

    Raises:
      InputError: if they are none of these, or out of the range of nanoseconds.
    """
    if stamps.dtype.kind == "O":  # as of Python's `datetime`
        for stamp in stamps.ravel():
            if getattr(stamp, "tzinfo", None) is not None:
                raise _has_zone(key, str(stamp))
        with contextlib.suppress(TypeError, ValueError, Warning):
            stamps = stamps.astype("M8[us]")
    kind = stamps.dtype.kind
    if stamps.ndim != 1 or kind not in "MUiuf":
        raise InputError(
            f"{key} has shape {stamps.shape} and type {stamps.dtype}, expected [T] of "
            "datetime64, of text such as 2012-03-01T00:05, or of integers"
        )
    if kind in "iuf":
        if key == "timestamps":
            raise InputError(
                "timestamps has numbers, expected datetime64 or text; save nanoseconds "
                "since 1970 as 'timestamps_ns', or seconds by "
                "timestamps.astype('datetime64[s]')"
            )
        is_inside = np.abs(stamps.astype(np.float64)) < 2.0**63
        if not is_inside.all():
            raise InputError(
                f"{key} has {stamps[np.argmin(is_inside)]}, expected nanoseconds in "
                "years 1678 to 2261"
            )
        return stamps.astype("M8[ns]")
    if kind == "U":
        stamps = _parsed(key, stamps)
    years = stamps.astype("M8[Y]").astype(np.int64) + 1970
    is_inside = ((years >= 1678) & (years <= 2261)) | np.isnat(stamps)
    if not is_inside.all():
        first = np.datetime_as_string(stamps[np.argmin(is_inside)])
        raise InputError(f"{key} has {first}, expected years 1678 to 2261")
    return stamps.astype("M8[ns]")


def _has_zone(key: str, stamp: str) -> InputError:
    said = f"{key} has {one_line(stamp, 100)!a}"
    return InputError(f"{said}, expected wall-clock time without a zone")


def _parsed(key: str, stamps: np.ndarray) -> np.ndarray:
    """Text as datetime64, which by itself NumPy takes of numbers and of zones too."""
    expected = "expected text such as 2012-03-01T00:05"
    for stamp in stamps.tolist():
        if not _DATE.match(stamp):
            raise InputError(f"{key} has {one_line(stamp, 100)!a}, {expected}")
        if _ZONE.search(stamp):
            raise _has_zone(key, stamp)
    try:
        return stamps.astype("M8[us]")
    except ValueError as error:
        raise InputError(f"{key}: {error}; {expected}") from error


def step_of(timestamps: np.ndarray) -> TimeStep:
    """Reads the one step between all rows off their time stamps, [T] datetime64.

    Once a year the clock may skip an hour, from 0, 1, 2 or 3 o'clock on a Sunday of the
    months in which daylight saving time begins somewhere, as in PEMS-BAY: the rows
    around it follow each other.

    Raises:
      InputError: if they are no time stamps (`as_stamps`), do not increase or are not
        evenly spaced, or a step is not a whole number of seconds of which a day is a
        multiple.
    """
    stamps = as_stamps("timestamps", timestamps)
    if len(stamps) < 2:
        raise InputError(f"timestamps: {len(stamps)} rows, expected at least 2")
    steps = np.diff(stamps)
    falls = ~(steps > np.timedelta64(0, "ns"))  # or is NaT
    if falls.any():
        raise InputError(
            f"timestamps: {_row(stamps, falls)}; time stamps have to increase from row "
            "to row"
        )
    values, counts = np.unique(steps, return_counts=True)
    step = values[np.argmax(counts)]
    uneven = (steps != step) & ~_clock_skips(stamps, steps, step)
    if uneven.any():
        raise InputError(
            f"timestamps: {_row(stamps, uneven)}, expected {in_words(step)} from row "
            "to row; give every step one row, with 0 or NaN where a reading is missing"
        )
    if step // _SECOND * _SECOND != step or _DAY // step * step != _DAY:
        raise InputError(
            f"timestamps: rows are {in_words(step)} apart, expected whole seconds that "
            "divide a day, such as 5 min: the time of day is an input of the models"
        )
    return TimeStep(int(step // _SECOND))


def clock_skips(timestamps: np.ndarray) -> np.ndarray:
    """The rows before which the clock skips an hour; for time stamps see `step_of`."""
    stamps, step = as_stamps("timestamps", timestamps), step_of(timestamps).delta
    return 1 + np.flatnonzero(_clock_skips(stamps, np.diff(stamps), step))


def _clock_skips(
    stamps: np.ndarray, steps: np.ndarray, step: np.timedelta64
) -> np.ndarray:
    """Where the clock skips an hour, [T - 1] bool: see `step_of`."""
    expected = stamps[:-1] + step
    days, hours = (expected.astype(f"datetime64[{code}]") for code in "Dh")
    is_sunday = (days.astype(int) + 4) % 7 == 0  # 1970-01-01 was a Thursday
    is_night = (hours - days < 4 * _HOUR) & (expected - hours < step)
    months = expected.astype("datetime64[M]").astype(int) % 12 + 1
    is_season = np.isin(months, _CLOCKS_GO_FORWARD)
    is_skip = (steps == step + _HOUR) & is_sunday & is_night & is_season
    rows = np.flatnonzero(is_skip)
    _, firsts = np.unique(days[rows].astype("datetime64[Y]"), return_index=True)
    return np.isin(np.arange(len(steps)), rows[firsts])


def _row(stamps: np.ndarray, after: np.ndarray) -> str:
    """Names the first row that `after`, [T - 1] bool, is true ahead of; from 0."""
    row = int(np.argmax(after)) + 1
    before, stamp = (
        np.datetime_as_string(x, unit="auto") for x in stamps[row - 1 : row + 1]
    )
    return f"row {row} ({stamp}) follows {before}"
