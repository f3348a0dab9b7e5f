"""Features of nodes that were spread over the neighbours already, S X in place of X."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpreadRows:
    """Holds S X of features X [N, F], or of several graphs, [K, N, F].

    S is the normalised adjacency with self edges. A GCN's first layer is (S X) W, whose
    first product has no parameters: made once, it is in no step. It has the shape and
    the type of X and nothing else, so that no other layer can read it by mistake.
    """

    rows: jax.Array  # [..., N, F]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of X."""
        return self.rows.shape

    @property
    def dtype(self) -> Any:
        """That of the entries."""
        return self.rows.dtype

    def __len__(self) -> int:
        """The length of the first axis."""
        return len(self.rows)
