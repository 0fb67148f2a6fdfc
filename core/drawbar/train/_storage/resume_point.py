"""What a start goes on from: the newest checkpoint that is whole, with damaged newer ones aside."""

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
"""Up to this size checksums are compared too: that takes less than loading does."""


def split_damaged(
    checkpoints: CheckpointStore, committed: Sequence[Manifest]
) -> tuple[list[Manifest], dict[str, str]]:
    """Leave out the newest checkpoints as long as they are damaged.

    Returns:
        Those up to the newest that is whole, and what is wrong with each newer one, by its name.
    """
    kept, damage = list(committed), dict[str, str]()
    while kept and (found := _find_damage_reason(checkpoints, kept[-1])):
        damage[kept.pop().name] = found
    return kept, damage


def quarantine(checkpoints: CheckpointStore, name: str) -> None:
    """Move a damaged checkpoint into the run's folder `broken`, where it takes nobody's name.

    A folder of the user's in its place, which holds nothing of Drawbar's, stays.
    On an object store, which cannot rename, it stays until another one of its name is committed;
    so does one that does not lie directly in the run.
    """
    place = checkpoints.path(name)
    if "/" not in name and isinstance(place, Path) and place.is_dir() and has_reserved_files(place):
        target = place.parent / "broken" / f"{name}-{uuid.uuid4().hex[:6]}"
        target.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # nothing is left of it
            os.rename(place, target)


def _find_damage_reason(checkpoints: CheckpointStore, manifest: Manifest) -> str:
    """Say what is wrong with a checkpoint; "" if nothing is.

    Each file must have its size. Checksums, if they were written, are compared where that reads no
    more than `MAX_HASHED_BYTES`, and nothing over a network that the workers will not read again.
    """
    place = checkpoints.path(manifest.name)
    try:
        if isinstance(place, Path) and manifest.nbytes <= MAX_HASHED_BYTES:
            checkpoints.get_checkpoint(manifest.name).verify()
        else:
            check_file_sizes(place, manifest)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:  # a disk that has lost what was written
            raise
        return str(error)
    return ""
