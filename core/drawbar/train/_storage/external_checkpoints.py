"""Checkpoints that do not lie directly in the run's directory, and the list of them.

The training function has put them where they are, and they stay there. The name of such a
checkpoint is its path in the run, such as "steps/10", or, outside, its address: a local path from
the root on, or a URI. It is listed before it is committed: a place without a manifest is none.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from drawbar.train._errors import DamagedRunError
from drawbar.train._storage.contents import check_checkpoint_name
from drawbar.train._storage.files import NOT_A_FILE_ERRNOS, write_atomically
from drawbar.train._storage.filesystem import RemotePath
from drawbar.train._storage.manifest import DECODE_ERRORS, read_file_or_none

INDEX_FILE = "places.json"

_index_lock = threading.Lock()  # a commit and a deletion have threads of their own


def list_names(run: Path | RemotePath) -> list[str]:
    """List the names of such checkpoints, in the order of their commits.

    Raises:
        DamagedRunError: The list cannot be read.
    """
    try:
        data = read_file_or_none(run, INDEX_FILE)
        names = [] if data is None else msgspec.json.decode(data, type=list[str])
        return [check_checkpoint_name(each) for each in names]
    except (*DECODE_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NOT_A_FILE_ERRNOS:
            raise
        raise DamagedRunError(
            f"{run}/{INDEX_FILE} lists the checkpoints that do not lie directly in {run}, and "
            "cannot "
            f"be read: {error}. Without that file the run goes on from those that do"
        ) from error


def add_name(run: Path | RemotePath, name: str) -> None:
    """List a checkpoint that is about to be committed."""
    with _index_lock:
        listed = list_names(run)
        if name not in listed:
            _write_index(run, [*listed, name])


def remove_name(run: Path | RemotePath, name: str) -> None:
    """Take a checkpoint off the list; what lies there stays."""
    with _index_lock:
        _write_index(run, [each for each in list_names(run) if each != name])


def _write_index(run: Path | RemotePath, names: list[str]) -> None:
    data = msgspec.json.encode(names)
    if isinstance(run, RemotePath):
        run.write(INDEX_FILE, data)
    else:
        write_atomically(run / INDEX_FILE, data)
