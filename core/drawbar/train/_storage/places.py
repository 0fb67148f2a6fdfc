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
from drawbar.train._storage.files import NO_FILE, write_atomically
from drawbar.train._storage.manifest import UNREADABLE, read_file
from drawbar.train._storage.remote_folder import Folder

PLACES = "places.json"

_changing = threading.Lock()  # a commit and a deletion have threads of their own


def places_of(run: Path | Folder) -> list[str]:
    """List the names of such checkpoints, in the order of their commits.

    Raises:
        DamagedRunError: The list cannot be read.
    """
    try:
        data = read_file(run, PLACES)
        names = [] if data is None else msgspec.json.decode(data, type=list[str])
        return [check_checkpoint_name(each) for each in names]
    except (*UNREADABLE, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_FILE:
            raise
        raise DamagedRunError(
            f"{run}/{PLACES} lists the checkpoints that do not lie directly in {run}, and cannot "
            f"be read: {error}. Without that file the run goes on from those that do"
        ) from error


def add_place(run: Path | Folder, name: str) -> None:
    """List a checkpoint that is about to be committed."""
    with _changing:
        listed = places_of(run)
        if name not in listed:
            _write(run, [*listed, name])


def remove_place(run: Path | Folder, name: str) -> None:
    """Take a checkpoint off the list; what lies there stays."""
    with _changing:
        _write(run, [each for each in places_of(run) if each != name])


def _write(run: Path | Folder, names: list[str]) -> None:
    data = msgspec.json.encode(names)
    if isinstance(run, Folder):
        run.write(PLACES, data)
    else:
        write_atomically(run / PLACES, data)
