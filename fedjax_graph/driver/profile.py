"""A trace of some rounds, for TensorBoard, XProf or Perfetto."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax

FIRST, LAST = 2, 3  # calls of a compiled program; the first warms up


class Profile:
    """Traces the second and third call of a run with JAX's profiler.

    A call is of `eval_every` rounds and the evaluation after them. Where there are
    fewer, the trace ends with the run; of a single one there is none, and a note says
    so.

    Args:
      folder: receives `plugins/profile/<time>/`; None traces nothing.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder
        self._num_calls, self._is_running = 0, False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A context around each call, which waits for its results."""
        self._num_calls += 1
        if self._folder and self._num_calls == FIRST:
            jax.profiler.start_trace(self._folder)
            self._is_running = True
        yield
        if self._num_calls == LAST:
            self._stop()

    def close(self) -> None:
        """Ends the trace."""
        self._stop()
        if self._folder and self._num_calls < FIRST:
            print(
                f"note: {self._folder}: no trace, which begins with call {FIRST} of "
                "the program; run more rounds, or evaluate more often"
            )

    def _stop(self) -> None:
        if self._is_running:
            jax.profiler.stop_trace()
        self._is_running = False
