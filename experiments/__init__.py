"""Binaries that run the four systems, and what belongs to them."""

import os
import sys


def _end_at_once(kind, error, trace):
    """One line for a Ctrl-C while a binary's modules are imported; see `cli`."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


if sys.argv[:1] == ["-m"]:  # which it is while `python -m experiments.x` imports
    sys.excepthook = _end_at_once
