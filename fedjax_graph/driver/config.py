"""How a run is done: the settings of the driver."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import no_leaf
from fedjax_graph.driver.divergence import OnNaN


@dataclasses.dataclass(frozen=True)
class RunConfig(Checked):
    """Says how a method is run: how long, on which seeds, how often it is scored."""

    num_rounds: int = dataclasses.field(metadata=limits(lower=0, below=2**31))
    eval_every: int = limited(1, lower=1, below=2**31)
    patience: int = limited(
        20, lower=1, below=2**31
    )  # rounds without a better validation figure, of a method's last phase
    seeds: tuple[int, ...] = limited((0,), lower=0, below=2**32, is_filled=True)
    # as `clients_per_chunk`, for seeds
    seeds_per_chunk: int | None = limited(None, lower=1)
    examples_per_round: int = limited(0, lower=0)  # for the rate shown, of one seed
    rate_name: str = "windows_per_s"
    is_drawn: Callable[[tuple[Any, ...]], bool] = no_leaf
    """Path of a leaf in a split -> whether it has a leading axis of seeds, as where
    each seed draws other examples. The other leaves are the same for all seeds."""
    profile: str | None = None
    """Folder for a trace of some rounds, see `driver.profile`."""
    on_nan: OnNaN = "stop"
    """What is done where a training loss or the model is not finite: the run stops and
    keeps its last checkpoint; clients whose update is not finite have weight 0 in that
    round, and the run stops if that does not help; or it goes on."""
    checkpoint_seconds: float = limited(0.0, lower=0)
    """Least time between checkpoints, which are made after evaluations, always after
    the last one and before a SIGTERM ends the run; several processes make all."""
    check_memory: bool = True
    """Whether data or a compiled round that would not fit in memory is refused."""
    keep_last: bool = False
    """Whether the state after the last round counts as the best one, whatever the
    validation figure; no seed stops early."""

    def __post_init__(self) -> None:
        """Checks types and limits, and that no seed is there twice.

        Raises:
          InputError: if one is wrong.
        """
        super().__post_init__()
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"RunConfig seeds={self.seeds}: expected different ones")
