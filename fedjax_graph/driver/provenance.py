"""Which code a run was made with."""

import pathlib
import subprocess
from typing import Any

import fedjax_graph

_ROOT = pathlib.Path(fedjax_graph.__file__).parents[1]
SECONDS = 10  # that git may take


def source() -> dict[str, Any]:
    """The version and, in a clone, git's commit; `-dirty` where files have changed."""
    return {"version": fedjax_graph.__version__, "git_commit": git_commit()}


def git_commit(folder: pathlib.Path = _ROOT) -> str | None:
    """The commit of the clone in a folder; None of another folder, or without git."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
