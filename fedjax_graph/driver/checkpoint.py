"""Checkpoints of a whole run with orbax: every array that the next round reads.

Each is saved with digests of its arrays and of its settings, in one piece, and is
compared with them wherever it is read: what bits on a disk have turned into is never
taken for what was saved.
"""

import errno
import hashlib
import json
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_graph.core import processes
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import limits
from fedjax_graph.driver.digests import digest
from fedjax_graph.driver.writers import to_jsonable

DIGESTS = "sha256"  # name of the item in a checkpoint
# Of a file of arrays, and the most of an array that is compressed in one piece: what
# waits in memory to be written or read. Orbax's default is 2 GiB.
FILE_BYTES = 2**26
# Errors of reads that say nothing of what is there to read.
PASSING = (
    *(errno.EACCES, errno.EAGAIN, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT),
)


class DamagedError(InputError):
    """Says that a checkpoint is not, or not any more, what was saved."""


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
        self._passed_over: list[int] = []  # rounds whose checkpoints are damaged
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False
            ),
        )

    def latest_round(self) -> int | None:
        """Returns the round of the latest checkpoint, damaged or not; None if none."""
        return self._manager.latest_step()

    def settings(self) -> dict[str, Any]:
        """Reads the settings, from the latest checkpoint where they are intact.

        Those of the others are the same.

        Raises:
          InputError: if there are none.
        """
        _, settings, _ = self._newest(self._stored_settings)
        return settings

    def save(self, round_: int, tree: Any) -> None:
        """Saves a state, with the settings, under its round.

        Takes the place of checkpoints that `restore_intact` passed over. Arrays may be
        shared out over devices, also those of several processes, each of which writes
        its own parts: all of them have to call it.
        """
        while self._passed_over:
            self._manager.delete(self._passed_over.pop())
        digests = {
            "state": digest(tree),
            "settings": _digest_of_settings(self._settings),
        }
        self._manager.save(
            round_,
            args=ocp.args.Composite(
                # arrays of devices, not of NumPy, which would be copied first
                state=ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=FILE_BYTES),
                settings=ocp.args.JsonSave(self._settings),
                **{DIGESTS: ocp.args.JsonSave(digests)},
            ),
            force=True,
        )

    def restore(self, like: Any) -> Any:
        """Reads the latest state in the structure of `like`.

        Arrays are NumPy's, but where `like` says on which devices they are: of these
        each process reads its own parts.

        Args:
          like: pytree of arrays or `jax.ShapeDtypeStruct`s, of which one with a
            `sharding` says where the array is going to be.

        Raises:
          InputError: if there is none, it was saved with other settings, or it is not
            what was saved. The best state so far is a part of it, for which that of
            an older checkpoint is no substitute.
        """
        latest = self.latest_round()
        if latest is None:
            raise self._nothing()
        try:
            return self._state(latest, like)
        except DamagedError as error:
            if not pathlib.Path(self._manager.directory, str(latest)).exists():
                self._manager.reload()  # a run that goes on has newer ones by now
                return self.restore(like)
            raise DamagedError(
                f"{self._manager.directory / str(latest)}: the checkpoint is damaged "
                f"({error}); resume the run, which goes on from the one before it, or "
                "start anew in another workdir"
            ) from error

    def restore_intact(self, like: Any) -> Any:
        """Reads the latest state that is what was saved; see `restore`.

        Prints a note of newer ones that are not. They stay until the next `save`.

        Raises:
          InputError: if there is none, or it was saved with other settings.
        """
        round_, state, damaged = self._newest(lambda round_: self._state(round_, like))
        self._passed_over = list(damaged)
        for passed_over, reason in damaged.items():
            folder = self._manager.directory / str(passed_over)
            print(
                f"note: {folder}: the checkpoint is damaged ({reason}); going on from "
                f"that of round {round_}",
                flush=True,
            )
        return state

    def _newest(
        self, read: Callable[[int], Any]
    ) -> tuple[int, Any, dict[int, DamagedError]]:
        """Reads the newest checkpoint that is not damaged.

        Args:
          read: what is read, by round.

        Returns:
          Its round, what was read there, and what is wrong with newer ones.
        """
        damaged: dict[int, DamagedError] = {}
        for round_ in sorted(self._manager.all_steps(), reverse=True):
            try:
                return round_, read(round_), damaged
            except DamagedError as error:
                damaged[round_] = error
        if not damaged:
            raise self._nothing()
        reasons = "; ".join(f"of round {key}: {x}" for key, x in damaged.items())
        raise InputError(
            f"{self._manager.directory}: no checkpoint is intact ({reasons}); start "
            "anew in another workdir"
        )

    def _nothing(self) -> InputError:
        return InputError(f"{self._manager.directory}: no finished round of a run")

    def _stored_settings(self, round_: int) -> Any:
        return self._item(
            round_, "settings", ocp.args.JsonRestore(), _digest_of_settings
        )

    def _state(self, round_: int, like: Any) -> Any:
        if self._settings is not None:
            stored = _flatten(self._stored_settings(round_))
            stored = _younger(self._defaults, stored) | stored
            wanted, folder = _flatten(self._settings), self._manager.directory
            _check_settings(stored, wanted, self._ignored, folder)
        like = jax.tree.map(_wanted, like)
        restore_args = ocp.checkpoint_utils.construct_restore_args(like)
        args = ocp.args.PyTreeRestore(like, restore_args=restore_args)
        state = self._item(round_, "state", args, digest)
        for x, wanted in zip(*map(jax.tree.leaves, (state, like)), strict=True):
            if x.shape != wanted.shape:  # orbax gives what is there
                raise InputError(
                    f"{self._manager.directory / str(round_)}: the checkpoint holds an "
                    f"array of shape {x.shape}, where {wanted.shape} was expected; "
                    "start anew in another workdir"
                )
        return state

    def _item(
        self, round_: int, name: str, args: Any, digest_of: Callable[[Any], str]
    ) -> Any:
        """Reads one item of a checkpoint.

        Raises:
          DamagedError: if it is not what was saved. Says only what is wrong with it.
        """
        wanted = {name: args, DIGESTS: ocp.args.JsonRestore()}
        self._check_version(round_)
        item = expected = failure = None
        try:
            found = self._manager.restore(round_, args=ocp.args.Composite(**wanted))
            item, expected = found[name], found[DIGESTS][name]
        except MemoryError:
            raise
        except Exception as error:  # whatever a parser makes of damaged bytes
            if processes.is_loss(error):
                raise
            failure = self._failure(round_, name, error, args)
        _raise_any(failure)
        if digest_of(item) != expected:
            raise DamagedError(
                self._other_version(round_, name, args)
                or f"the digest of its {name} does not match"
            )
        return item

    def _failure(
        self, round_: int, name: str, error: Exception, args: Any
    ) -> InputError:
        reason = str(error).split(" [tensorstore_spec")[0]
        reason = textwrap.shorten(reason, 200, placeholder=" ...")
        passes = _may_pass(error)
        if not passes and (other := self._other_version(round_, name, args)):
            return DamagedError(other)
        if passes:
            return InputError(
                f"{self._manager.directory / str(round_)}: cannot be read now, "
                f"which need not be damage: {reason}; try again, or move that "
                "folder away to go on from the one before"
            )
        return DamagedError(
            f"its {name}, or its digest, cannot be read: {reason or repr(error)}"
        )

    def _other_version(self, round_: int, name: str, args: Any) -> str:
        """Says what other parts than those to be read a state has; "" if none."""
        if name != "state":
            return ""
        folder = pathlib.Path(self._manager.directory, str(round_), name)
        other = _other_parts(folder / "_METADATA", args.item)
        version = "its state is of another version, or of another method"
        return other and f"{version}: {other}"

    def _check_version(self, round_: int) -> None:
        """Checks that a checkpoint is of this version, if it says what it holds.

        Raises:
          InputError: if not.
        """
        folder = pathlib.Path(self._manager.directory, str(round_))
        try:
            text = (folder / "_CHECKPOINT_METADATA").read_text()
            items = limits.parse_json(text)["item_handlers"]
        except (OSError, ValueError, KeyError, TypeError):
            return  # it is damaged
        if isinstance(items, dict) and "state" in items and DIGESTS not in items:
            raise InputError(
                f"{folder}: the checkpoint is of an older version, which saved other "
                "things; use that version, or start anew in another workdir"
            )

    def close(self) -> None:
        """Frees what Orbax holds; the checkpoints stay."""
        self._manager.close()


def _wanted(x: Any) -> Any:
    is_placed = isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None
    return x if is_placed else np.empty(x.shape, x.dtype)


def _other_parts(path: pathlib.Path, like: Any) -> str:
    """Says what a saved tree has and lacks beside another; "" if nothing, or unread."""
    try:
        entries = limits.parse_json(path.read_text())["tree_metadata"].values()
        saved = {
            ".".join(key["key"] for key in entry["key_metadata"])
            for entry in entries
            if not entry["value_metadata"]["skip_deserialize"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # it is damaged
    paths = (path for path, _ in jax.tree.leaves_with_path(like))
    wanted = {jax.tree_util.keystr(x, simple=True, separator=".") for x in paths}
    differences = (("has", saved - wanted), ("lacks", wanted - saved))
    return " and ".join(f"it {word} {min(x)}" for word, x in differences if x)


def _raise_any(failure: InputError | None) -> None:
    """Raises in all processes what one of them, or more, has met."""
    own = "" if failure is None else f"{isinstance(failure, DamagedError):d}{failure}"
    said = sorted(filter(None, processes.gather(own)))
    if said:
        kind = DamagedError if said[0].startswith("1") else InputError
        raise kind(said[0][1:])


def _may_pass(error: BaseException) -> bool:
    """Whether a read failed for a reason outside the file: it may succeed later."""
    if isinstance(error, OSError):
        return error.errno in PASSING
    said = str(error)  # tensorstore's, which are ValueErrors
    return any(f"[os_error_code='{code}'" in said for code in PASSING)


def _digest_of_settings(settings: Any) -> str:
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


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


def _younger(defaults: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Defaults of what a checkpoint has no setting of, not those of what was None."""
    return {
        name: value
        for name, value in defaults.items()
        if not any(name.startswith(f"{other}.") for other in stored)
    }


def _flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Lists nested settings under names such as `config.hidden_size`."""
    flat = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= (
            _flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
        )
    return flat
