"""Checkpoints of a whole run with orbax: every array that the next round reads."""

import pathlib
import textwrap
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_graph.core.errors import InputError
from fedjax_graph.driver.writers import to_jsonable


class Checkpoints:
    """Keeps the latest two checkpoints of one method, in `<folder>/<round>`.

    Orbax writes into a temporary folder and renames it, so a kill leaves the latest
    complete checkpoint in place. `settings` travel with every checkpoint; resuming
    with others is refused, but for those `ignored`. What the stored ones lack, because
    they are older than a setting, is taken from `defaults`.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        settings: dict[str, Any] | None = None,
        ignored: tuple[str, ...] = (),
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self._settings, self._ignored = to_jsonable(settings), ignored
        self._defaults = _flatten(to_jsonable(defaults or {}))
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False
            ),
        )

    def latest_round(self) -> int | None:
        """Returns the round of the latest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def settings(self) -> dict[str, Any]:
        """Reads the settings stored with the latest checkpoint.

        Raises:
          InputError: if there is none or it cannot be read.
        """
        return self._restore(settings=ocp.args.JsonRestore())["settings"]

    def save(self, round_: int, tree: Any) -> None:
        """Saves a state, with the settings, under its round."""
        self._manager.save(
            round_,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(tree),
                settings=ocp.args.JsonSave(self._settings),
            ),
            force=True,
        )

    def restore(self, like: Any) -> Any:
        """Reads the latest state, as NumPy arrays in the structure of `like`.

        Args:
          like: pytree of arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          InputError: if there is none, it was saved with other settings or cannot be
            read.
        """
        if self._settings is not None:
            stored = self._defaults | _flatten(self.settings())
            wanted, folder = _flatten(self._settings), self._manager.directory
            _check_settings(stored, wanted, self._ignored, folder)
        like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), like)
        restored = self._restore(state=ocp.args.StandardRestore(like))["state"]
        for x, wanted in zip(*map(jax.tree.leaves, (restored, like)), strict=True):
            if x.shape != wanted.shape:  # orbax gives what is there
                raise InputError(
                    f"{self._manager.directory}: the checkpoint cannot be read (it "
                    f"holds an array of shape {x.shape}, where {wanted.shape} was "
                    "expected); start anew in another workdir"
                )
        return restored

    def _restore(self, **items: Any) -> Any:
        """Reads items of the latest checkpoint."""
        folder, round_ = self._manager.directory, self.latest_round()
        if round_ is None:
            raise InputError(f"{folder}: no finished round of a run")
        try:
            return self._manager.restore(round_, args=ocp.args.Composite(**items))
        except (LookupError, OSError, TypeError, ValueError) as error:
            reason = str(error).split(" [tensorstore_spec")[0]
            reason = textwrap.shorten(reason, 200, placeholder=" ...")
            raise InputError(
                f"{folder / str(round_)}: the checkpoint cannot be read ({reason}); "
                "delete this folder to go on from the checkpoint before it, or start "
                "anew in another workdir"
            ) from error

    def close(self) -> None:
        """Frees what Orbax holds; the checkpoints stay."""
        self._manager.close()


def _check_settings(stored: dict, wanted: dict, ignored, folder: Any) -> None:
    differences = [
        f"{key}={stored.get(key)}, not {wanted.get(key)}"
        for key in sorted((stored.keys() | wanted.keys()) - set(ignored))
        if stored.get(key) != wanted.get(key)
    ]
    if differences:
        raise InputError(
            f"{folder}: saved with {'; '.join(differences)}; resume with the same "
            "flags or start anew in another workdir"
        )


def _flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Lists nested settings under names such as `config.hidden_size`."""
    flat = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= (
            _flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
        )
    return flat
