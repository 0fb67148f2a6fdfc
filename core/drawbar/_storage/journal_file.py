"""The journal as a locked, append-only file of lines, and its copy in remote storage.

    journal.jsonl                   the journal at the last start or end of the run
    journal.parts/000000000000812   the lines after the first 812 bytes

Object stores cannot append to a file. After each commit, only the last part is uploaded, so that an
upload does not grow with the age of the run.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
import weakref
from pathlib import Path
from typing import IO

from drawbar._process.errors import DamagedRunError, RunInProgressError
from drawbar._storage.contents import format_exact_size
from drawbar._storage.files import is_current_file, write_atomically
from drawbar._storage.remote_path import RemotePath
from drawbar._storage.retries import add_context

JOURNAL_FILE = "journal.jsonl"

LOCK_TIMEOUT_S = 1.0  # `is_locked` holds the lock for a moment, and flock() has no timeout
LOCK_RETRY_S = 0.01


class JournalFile:
    """The open and locked journal of a run. The lock is released when the process ends.

    Args:
        path: File of the journal; it is created if it does not exist.

    Raises:
        RunInProgressError: Another run of this or another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_locked(path)
        _open_journals[path.resolve()] = self
        self._truncate_torn_line()

    def _truncate_torn_line(self) -> None:
        # A killed driver may have left a partial line, which would damage the line appended to it.
        data = self._path.read_bytes()
        complete = strip_torn_line(data)
        if complete != data:
            os.truncate(self._path, len(complete))

    def replace_contents(self, data: bytes) -> None:
        """Replace all lines atomically."""
        write_atomically(self._path, data)
        replaced, self._file = self._file, _open_locked(self._path)
        replaced.close()

    def append_line(self, line: bytes) -> None:
        """Append a line, so that it survives the death of this process."""
        append_lines(self._file, line)

    def close(self) -> None:
        """Release the lock, even if a forked child inherited the file, and close the file."""
        if not self._file.closed:
            _open_journals.pop(self._path.resolve(), None)  # before another run can lock it
            # The lock belongs to the open file, which a forked child shares. Closing alone would
            # not release it.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def append_lines(file: IO[bytes], lines: bytes) -> None:
    """Append lines to an unbuffered file: all, or none if an error is raised.

    Raises:
        OSError: The file cannot be written.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        written = 0
        while written < len(lines):  # after a short write, the next one raises the error
            written += file.write(lines[written:])
    except OSError as error:
        file.truncate(end)  # a torn line must not stay between others
        raise add_context(
            error, f"writing {format_exact_size(len(lines))} to {file.name}"
        ) from error


_open_journals: weakref.WeakValueDictionary[Path, JournalFile] = weakref.WeakValueDictionary()
"""Journals that runs of this process hold, because a lock does not show its owner."""


def make_not_a_file_error(path: Path, file_type: str = "a directory") -> DamagedRunError:
    """Return the error for a journal path that is not a regular file."""
    return DamagedRunError(
        f"{path} must be the journal of a run, but is {file_type}. Move it away, or use another "
        "RunConfig.name."
    )


def _open_locked(path: Path) -> IO[bytes]:
    """Open the journal and lock it; if it is replaced in between, lock the new file.

    The directory can be missing, because the end of a run on remote storage deletes its work
    directory.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():  # opening it would block until there is a reader
            raise make_not_a_file_error(path, "a FIFO")
        try:
            # Unbuffered: the kernel has the line when write() returns, so a kill does not lose it.
            file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by Journal.close()
        except FileNotFoundError:
            continue
        except IsADirectoryError:
            raise make_not_a_file_error(path) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            if time.monotonic() < deadline:
                time.sleep(LOCK_RETRY_S)
                continue
            process = "this" if path.resolve() in _open_journals else "another"
            raise RunInProgressError(
                f"Run directory {path.parent} is in use by a run in {process} process. Use another "
                "RunConfig.name, or wait until that run has ended."
            ) from None
        if is_current_file(path, file.fileno()):
            return file
        file.close()


def strip_torn_line(data: bytes) -> bytes:
    """Return the complete lines of a journal that was read, perhaps while it was written."""
    return data[: data.rfind(b"\n") + 1]


def is_locked(path: Path) -> bool:
    """Return True if a process, on any node that shares this file, is writing the journal."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return True
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    # Locked, or flock() is not supported: assume that the run is in progress.
    except OSError:
        return True
    return False


PARTS_DIRECTORY = "journal.parts"
PART_BYTES = 64 * 1024
"""Size from which on a part is no longer changed."""

_MAX_READS = 3


class RemoteJournal:
    """Copy of a journal in remote storage.

    Args:
        run_path: Directory of the run in the storage.
    """

    def __init__(self, run_path: RemotePath) -> None:
        self._run_path = run_path
        self._parts_path = run_path / PARTS_DIRECTORY

    def read(self) -> bytes | None:
        """Return the journal; None if there is none."""
        for _ in range(_MAX_READS):
            # List the parts first: the end of the run uploads the whole journal and deletes them.
            parts = self._list_parts()
            data = self._run_path.read_or_none(JOURNAL_FILE)
            is_complete = True
            for offset in sorted(parts):
                if data is not None and offset == len(data):
                    part = self._parts_path.read_or_none(_name_part(offset))
                    is_complete = is_complete and part is not None
                    data += part or b""
            if is_complete:
                break
        return data

    def upload(self, data: bytes) -> None:
        """Upload the lines that the copy does not have.

        Args:
            data: The whole journal. The copy, which `upload_all` has written, is the start of it.
        """
        start = self._run_path.get_size(JOURNAL_FILE)
        if start is None or start > len(data):
            self.upload_all(data)
            return
        parts = self._list_parts()
        while parts.get(start, 0) >= PART_BYTES:
            start += parts[start]
        if start < len(data):
            self._parts_path.write_file(_name_part(start), data[start:])

    def upload_all(self, data: bytes) -> None:
        """Upload the whole journal, and delete the parts."""
        self._run_path.write_file(JOURNAL_FILE, data)
        for offset in self._list_parts():
            self._parts_path.delete_file(_name_part(offset))

    def _list_parts(self) -> dict[int, int]:
        """Return the size of each part by its offset."""
        files = self._parts_path.list_files()
        return {int(file.path): file.size for file in files if file.path.isdecimal()}


def _name_part(offset: int) -> str:
    return f"{offset:015d}"
