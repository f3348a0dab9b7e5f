"""The one error that means: the input is at fault, not the program; and full disks."""

import difflib
import errno
import os
from collections.abc import Iterable


class InputError(ValueError):
    """Says that a file, flag or argument cannot be used as given.

    The message is one line that names the culprit, what was expected and what to do: a
    library's names the argument, a binary's the flag. Binaries print it and exit with
    status 2; a traceback would add nothing.
    """


def meant(name: str, known: Iterable[str]) -> str:
    """Asks in a message whether a known name is meant by one that is nearly it."""
    found = difflib.get_close_matches(name, list(known), 1, cutoff=0.75)
    return f" (is {found[0]} meant?)" if found else ""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is that of a disk without space."""
    if error is None:
        return False
    code = getattr(error, "errno", None)
    is_full = code in (errno.ENOSPC, errno.EDQUOT)
    words = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    is_said = not isinstance(error, OSError) and any(x in str(error) for x in words)
    return is_full or is_said or is_disk_full(error.__cause__ or error.__context__)


def one_line(text: str, most: int = 500) -> str:
    """Text from a file, for a message: on one line, not long, and safe to print."""
    text = " ".join(text.split())
    text = text if len(text) <= most else f"{text[:most]} ..."
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)
