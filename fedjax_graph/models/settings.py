"""Modules whose settings are checked where they are made."""

import flax.linen as nn

from fedjax_graph.core import checks


class CheckedModule(nn.Module):
    """Checks the fields of a module that inherits it; see `core.checks.check`."""

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        checks.check(self, skipped=("parent", "name"))
        super().__post_init__()
