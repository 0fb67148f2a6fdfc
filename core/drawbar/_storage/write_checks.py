"""Check before a run that its storage can be written, and explain how to fix it."""

from __future__ import annotations

import errno
import os
import pwd
import tempfile
from pathlib import Path

from drawbar._storage.run_directory import RunDirectory


def check_storage_path(path: Path) -> None:
    """Check that a run can write to a local directory, and create it if needed.

    A small file is written, synced, and deleted.

    Raises:
        OSError: The directory cannot be written. The error has the subclass of the system's error
            (`PermissionError`, `NotADirectoryError`, ...). The message has the path, the user, and
            a remedy.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_probe(path)
    except OSError as error:
        raise _make_unwritable_error(path, error) from None


def check_storage_before_start(directory: RunDirectory) -> None:
    """Check that a run can be stored, without creating its directory if it is local.

    The remote storage, or the closest existing parent of a local directory, is written to.

    Raises:
        OSError: The storage cannot be written; see `check_storage_path`.
    """
    if directory.remote_path is not None:
        directory.run_files.check_writable()
        return
    path = directory.local_path
    parent = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        _write_probe(parent)
    except OSError as error:
        raise _make_unwritable_error(path, error) from None


def _write_probe(path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path, prefix=".drawbar-probe-") as probe:
        probe.write(bytes(4096))
        probe.flush()
        os.fsync(probe.fileno())  # a full disk may show only now


def _make_unwritable_error(path: Path, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"storage_path={str(path)!r} cannot be written by user {_get_user_name()}: "
        f"{error.strerror}; {_suggest_fix(error.errno)}",
    )


def _suggest_fix(number: int | None) -> str:
    if number in (errno.EEXIST, errno.ENOTDIR):
        return "the path or a part of it is a file, so choose a directory"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or set RunConfig.storage_path to another disk"
    return "set RunConfig.storage_path to a directory that this user may write to"


def _get_user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a user ID without a name, in a container
        return str(os.geteuid())
