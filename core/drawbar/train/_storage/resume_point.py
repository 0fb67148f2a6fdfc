"""Find the newest intact checkpoint and quarantine damaged newer ones."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from drawbar.train._errors import CheckpointError
from drawbar.train._storage.checkpoint_store import CheckpointStore
from drawbar.train._storage.contents import has_reserved_files
from drawbar.train._storage.manifest import Manifest, check_file_sizes

MAX_HASHED_BYTES = 1_000_000_000
"""Maximum size up to which checksums are verified, which takes less time than loading."""


def split_damaged(
    checkpoints: CheckpointStore, committed: Sequence[Manifest]
) -> tuple[list[Manifest], dict[str, str]]:
    """Remove damaged checkpoints from the end of the list.

    Returns:
        The checkpoints up to the newest intact one, and the reason for each damaged one by name.
    """
    intact, damage = list(committed), dict[str, str]()
    while intact and (reason := _find_damage_reason(checkpoints, intact[-1])):
        damage[intact.pop().name] = reason
    return intact, damage


def quarantine(checkpoints: CheckpointStore, name: str) -> None:
    """Move a damaged checkpoint to `broken` in the run directory, so that its name can be reused.

    These directories are not moved:
      - directories without Drawbar's files, which belong to the user
      - checkpoints in an object store, which cannot rename; the next commit replaces them
      - checkpoints that are not direct children of the run directory
    """
    path = checkpoints.path(name)
    if "/" not in name and isinstance(path, Path) and path.is_dir() and has_reserved_files(path):
        target = path.parent / "broken" / f"{name}-{uuid.uuid4().hex[:6]}"
        target.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # nothing is left of the checkpoint
            os.rename(path, target)


def _find_damage_reason(checkpoints: CheckpointStore, manifest: Manifest) -> str:
    """Return how a checkpoint is damaged; "" if it is intact.

    Each file must have its size. Checksums are compared for local checkpoints of at most
    `MAX_HASHED_BYTES`. Remote checkpoints are not downloaded for this.
    """
    path = checkpoints.path(manifest.name)
    try:
        if isinstance(path, Path) and manifest.nbytes <= MAX_HASHED_BYTES:
            checkpoints.get_checkpoint(manifest.name).verify()
        else:
            check_file_sizes(path, manifest)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:  # EIO: the disk has lost data
            raise
        return str(error)
    return ""
