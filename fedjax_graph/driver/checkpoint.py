"""Checkpoints of a whole run with orbax: every array that the next round reads."""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_graph.errors import InputError


class Checkpoints:
    """The checkpoints of one method, in `<folder>/<round>`, the latest two kept.

    Orbax writes into a temporary folder and renames it, so a kill leaves the latest
    complete checkpoint in place. `settings` travel with every checkpoint; resuming
    with others is refused.
    """

    def __init__(self, folder: pathlib.Path, settings: dict[str, Any] | None = None):
        self._settings = settings
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False
            ),
        )

    def latest_round(self) -> int | None:
        return self._manager.latest_step()

    def settings(self) -> dict[str, Any]:
        """The settings stored with the latest checkpoint."""
        restored = self._manager.restore(
            self.latest_round(),
            args=ocp.args.Composite(settings=ocp.args.JsonRestore()),
        )
        return restored["settings"]

    def save(self, round_: int, tree: Any) -> None:
        self._manager.save(
            round_,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(tree),
                settings=ocp.args.JsonSave(self._settings),
            ),
            force=True,
        )

    def restore(self, like: Any) -> Any:
        """The latest state, as NumPy arrays in the structure of `like`.

        Args:
          like: pytree of arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          InputError: if it was saved with other settings or cannot be read.
        """
        if self._settings is not None:
            _check_settings(self.settings(), self._settings, self._manager.directory)
        like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), like)
        try:
            restored = self._manager.restore(
                self.latest_round(),
                args=ocp.args.Composite(state=ocp.args.StandardRestore(like)),
            )
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise InputError(
                f"{self._manager.directory}: the checkpoint cannot be read ({reason}); "
                "start anew in another --workdir"
            ) from error
        return restored["state"]

    def close(self) -> None:
        self._manager.close()


def _check_settings(stored: dict, wanted: dict, folder: Any) -> None:
    for key in sorted(stored.keys() | wanted.keys()):
        if stored.get(key) != wanted.get(key):
            raise InputError(
                f"{folder}: saved with {key}={stored.get(key)}, not {wanted.get(key)}; "
                "resume with the same flags or start anew in another --workdir"
            )
