"""Where metrics go: `metrics.jsonl`, TensorBoard, the terminal, and atomic files."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import tqdm
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.processes import by_first
from fedjax_graph.data import limits

Record = dict[str, Any]  # one line: method, round, and figures


def to_jsonable(tree: Any) -> Any:
    """Turns arrays into lists and numbers; what is not finite becomes None (null)."""
    if isinstance(tree, dict):
        return {str(key): to_jsonable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_jsonable(value) for value in tree]
    if hasattr(tree, "shape"):
        return to_jsonable(np.asarray(tree).tolist())
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return tree


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of another when the `with` block ends.

    So it does whole: a kill leaves the old one or the new one.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # of a full disk, or of who was interrupted
        raise


@by_first
def write_atomically(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file; see `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_records(path: pathlib.Path) -> list[Record]:
    """Reads all complete lines of a `metrics.jsonl`; a torn last line is left out.

    Raises:
      InputError: if another line is no record of a round.
    """
    if not path.exists():
        return []
    records, lines = [], path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = limits.parse_json(line)
            kinds = type(record["method"]), type(record["round"])
            if kinds != (str, int):
                raise TypeError(f"a record of {kinds}")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise InputError(
                f"{path}: line {number} is no record of a round; take it out or name "
                "another workdir"
            ) from error
        records.append(record)
    return records


def check_monitored(workdir: pathlib.Path, method: str, monitor: str) -> None:
    """Checks that a method's earlier lines have what its best round is chosen by.

    Args:
      workdir: of the run.
      method: whose lines.
      monitor: see `FederatedAlgorithm.monitor`.

    Raises:
      InputError: if a line with scores does not have that one.
    """
    path, key = workdir / "metrics.jsonl", f"validation_{monitor}"
    for record in read_records(path):
        is_scored = any(name.startswith("validation_") for name in record)
        if record["method"] == method and is_scored and key not in record:
            raise InputError(
                f"{path}: round {record['round']} of {method} has no {key}, by which "
                "the best round is chosen; an older version wrote another name: rename "
                "it there, or start anew in another workdir"
            )


def note_missing_rounds(
    workdir: pathlib.Path, method: str, restored_round: int
) -> None:
    """Prints a note where a method's lines end before the round of its checkpoint."""
    path = workdir / "metrics.jsonl"
    last = max(
        (r["round"] for r in read_records(path) if r["method"] == method), default=0
    )
    if last < restored_round:
        print(
            f"note: {path} has lost lines of {method}: its checkpoint is of round "
            f"{restored_round}, its last line of round {last}"
        )


class MetricsWriter:
    """Writes a line for each method and round, and the same scalars for TensorBoard.

    Lines are on disk before the checkpoint of their round is (`sync`). After a kill,
    lines beyond the restored round are dropped, so each round stands there once.
    """

    def __init__(self, workdir: pathlib.Path, method: str, restored_round: int) -> None:
        self._path = workdir / "metrics.jsonl"
        records = read_records(self._path)
        kept = [
            r for r in records if r["method"] != method or self._old(r, restored_round)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        before = self._path.read_text(errors="replace") if records else None
        if before != lines:
            write_atomically(self._path, lines)
        self._file = open(self._path, "a")  # noqa: SIM115, until `close`
        folder = workdir / "tensorboard" / method
        folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = EventsWriter(
            str(folder / "events"),
            filename_suffix=f".{restored_round:06}",  # else named by the second alone
        )
        start = SessionLog(status=SessionLog.START)  # later steps are no longer shown
        self._tensorboard.write_event(Event(step=restored_round + 1, session_log=start))

    @staticmethod
    def _old(record: Record, restored_round: int) -> bool:
        return record["round"] <= restored_round

    def write(self, record: Record) -> None:
        """Appends a record with keys `method` and `round`."""
        record = to_jsonable(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for key, value in record.items():
            if isinstance(value, float):
                self._tensorboard.write_event(
                    Event(
                        summary=summary.scalar(key, value),
                        step=record["round"],
                        wall_time=time.time(),
                    )
                )

    def sync(self) -> None:
        """Waits until all records are on the disk."""
        os.fsync(self._file.fileno())
        self._tensorboard.flush()

    def close(self) -> None:
        """Closes the files, the second also where the first cannot be written."""
        try:
            self._file.close()
        finally:
            self._tensorboard.close()


def _columns(stream: Any) -> int:
    """How wide a terminal is; 0 of one that does not say, and of what is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


class Progress:
    """Shows a bar with figures and rate on a terminal, and plain lines elsewhere.

    Elsewhere is a file, a pipe, or a terminal that does not say how wide it is. Where
    the bar is on a terminal and stdout elsewhere, there are both.
    """

    def __init__(
        self, method: str, num_rounds: int, first_round: int, shown: Sequence[str]
    ) -> None:
        """Starts at a round.

        Args:
          method: its name.
          num_rounds: of the whole run.
          first_round: that is done.
          shown: keys of the figures; rates, which end in `_per_s`, are always shown.
        """
        self._method, self._shown = method, shown
        self._num_rounds = num_rounds
        self._bar = tqdm.tqdm(
            total=num_rounds,
            initial=first_round,
            desc=method,
            unit="round",
            disable=not _columns(sys.stderr),
        )
        self._has_lines = self._bar.disable or not _columns(sys.stdout)

    def note(self, text: str) -> None:
        """Shows a line, above the bar where there is one."""
        if self._has_lines:
            print(text, flush=True)
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def update(self, record: Record) -> None:
        """Shows the record of a round, and a note where clients were left out."""
        if skipped := record.get("skipped_clients"):
            clients = ", ".join(map(str, skipped))
            place = f"{self._method}, round {record['round']}"
            self.note(f"note: {place}: not finite and left out: client {clients}")
        rates = [key for key in record if key.endswith("_per_s")]
        shown = {
            key: f"{record[key]:.4g}"
            for key in (*self._shown, *rates)
            if isinstance(record.get(key), float) and math.isfinite(record[key])
        }
        if self._has_lines:
            figures = "  ".join(f"{key} {value}" for key, value in shown.items())
            progress = f"round {record['round']}/{self._num_rounds}"
            print(f"{self._method}  {progress}  {figures}", flush=True)
        if not self._bar.disable:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(record["round"] - self._bar.n)

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
