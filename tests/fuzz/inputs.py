"""One damaged file after another, read; only an `InputError` may come out."""

import contextlib
import io
import traceback
from pathlib import Path

import numpy as np

from fedjax_graph.core.errors import InputError
from tests.fuzz import corpus
from tests.fuzz.damage import damaged


class Inputs:
    """Damaged files, each known by its case, a seed and a number."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._seed = seed
        self.cases = corpus.make(folder)
        self._content = {
            name: case.path.read_bytes() for name, case in self.cases.items()
        }
        for case in self.cases.values():
            case.load()

    def outcome(self, name: str, number: int) -> str:
        """What reading a damaged file gives: `read`, `refused`, or else a traceback."""
        case = self.cases[name]
        place = list(self.cases).index(name)
        rng = np.random.default_rng([self._seed, place, number])
        case.path.write_bytes(damaged(self._content[name], rng))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                case.load()
            return "read"
        except InputError as error:
            line = str(error)
            if "\n" in line or len(line) > 1000 or not line.isprintable():
                return f"not one line: {line!r}"
            return "refused"
        except Exception:
            return traceback.format_exc()
        finally:
            case.path.write_bytes(self._content[name])
