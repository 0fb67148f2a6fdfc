"""Index of committed checkpoints that are not direct children of the run directory.

The training function created these directories, and they are committed in place. A checkpoint in
the run is named by its relative path, such as "steps/10". One outside the run is named by its
absolute local path or URI; only then is `contents.is_external` true. A checkpoint is added to the
index before it is committed; an indexed directory without a manifest is not a checkpoint.
"""

from __future__ import annotations

import threading

import msgspec

from drawbar._process.errors import DamagedRunError
from drawbar._storage.contents import check_checkpoint_name
from drawbar._storage.files import NOT_A_FILE_ERRNOS
from drawbar._storage.manifest import DECODE_ERRORS
from drawbar._storage.storage_path import StoragePath

INDEX_FILE = "places.json"

_index_lock = threading.Lock()  # commits and deletions run in different threads


def list_names(run_path: StoragePath) -> list[str]:
    """Return the names of the indexed checkpoints, in the order of their commits.

    Raises:
        DamagedRunError: The index cannot be read.
    """
    try:
        data = run_path.read_or_none(INDEX_FILE)
        names = [] if data is None else msgspec.json.decode(data, type=list[str])
        return [check_checkpoint_name(name) for name in names]
    except (*DECODE_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NOT_A_FILE_ERRNOS:
            raise
        reason = str(error).removesuffix(".")
        raise DamagedRunError(
            f"{run_path}/{INDEX_FILE} cannot be read: {reason}. It lists the checkpoints in "
            "subdirectories or outside the run directory. To resume from the other checkpoints, "
            "move this file to another directory."
        ) from error


def add_name(run_path: StoragePath, name: str) -> None:
    """Add a checkpoint that is about to be committed to the index."""
    with _index_lock:
        listed = list_names(run_path)
        if name not in listed:
            _write_index(run_path, [*listed, name])


def remove_name(run_path: StoragePath, name: str) -> None:
    """Remove a checkpoint from the index. Its files are not deleted."""
    with _index_lock:
        _write_index(run_path, [listed for listed in list_names(run_path) if listed != name])


def _write_index(run_path: StoragePath, names: list[str]) -> None:
    run_path.write_file(INDEX_FILE, msgspec.json.encode(names))
