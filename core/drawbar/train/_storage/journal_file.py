"""The journal as a file: its lock, whole lines, catching up with a copy. Bytes only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import weakref
from pathlib import Path
from typing import IO

import msgspec

from drawbar.train._errors import DamagedRunError, RunInProgressError
from drawbar.train._storage.files import is_current_file, write_atomically
from drawbar.train._storage.retries import add_context
from drawbar.train._storage.sizes import format_exact_size

JOURNAL_FILE = "journal.jsonl"

LOCK_TIMEOUT_S = 1.0  # `is_locked` takes the lock for a moment, and flock() knows no timeout
LOCK_RETRY_S = 0.01


class JournalFile:
    """A run's journal, open. One run at a time holds it; the lock goes with the process.

    Args:
        path: Its file, which is made if it is not there.

    Raises:
        RunInProgressError: Another run holds it, in this process or another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_locked(path)
        _open_journals[path.resolve()] = self
        self._truncate_torn_line()

    def _truncate_torn_line(self) -> None:
        # A killed driver may have left half a line, which would spoil the one that is appended to
        # it.
        data = self._path.read_bytes()
        whole = strip_torn_line(data)
        if whole != data:
            os.truncate(self._path, len(whole))

    def sync_from(self, remote_data: bytes | None) -> None:
        """Take over the journal of another place, unless this one only goes on from that.

        None: there is none in that place, so this one becomes empty. Its last line may be torn.
        """
        there = None if remote_data is None else strip_torn_line(remote_data)
        if there is None or not self._path.read_bytes().startswith(there):
            self.replace_contents(there or b"")

    def replace_contents(self, data: bytes) -> None:
        """Put other lines in place of all, in one step."""
        write_atomically(self._path, data)
        replaced, self._file = self._file, _open_locked(self._path)
        replaced.close()

    def append_line(self, line: bytes) -> None:
        """Write a line. It survives this process's death when this returns."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(end)  # no torn line stays in the middle
            raise add_context(
                error, f"writing {format_exact_size(len(line))} to {self._file.name}"
            ) from error

    def close(self) -> None:
        """Release the lock, also where a forked child has inherited the file, and close it."""
        if not self._file.closed:
            _open_journals.pop(self._path.resolve(), None)  # before another one can have it
            # The lock belongs to the open file, which a forked child shares: closing alone would
            # keep it.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


_open_journals: weakref.WeakValueDictionary[Path, JournalFile] = weakref.WeakValueDictionary()
"""The journals that runs of this process hold: a lock does not tell whose it is."""


def make_not_a_file_error(path: Path, what: str = "a folder") -> DamagedRunError:
    """Say what lies where the journal belongs, and is no file."""
    return DamagedRunError(
        f"{path} is {what}, where the journal of a run belongs; move it away, or give the run "
        "another RunConfig.name"
    )


def _open_locked(path: Path) -> IO[bytes]:
    """Open the journal and take its lock; if it was replaced meanwhile, take the new one's.

    Its folder may be gone: who ends a run on a remote storage removes its work folder.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():  # opening it would wait for a reader
            raise make_not_a_file_error(path, "a FIFO")
        try:
            # Unbuffered: when write() returns the kernel has the line, and no kill undoes that.
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
            where = "this" if path.resolve() in _open_journals else "another"
            raise RunInProgressError(
                f"{path.parent} is the directory of a run that is going on in {where} process; "
                "give this run another RunConfig.name, or wait for the other one"
            ) from None
        if is_current_file(path, file.fileno()):
            return file
        file.close()


def strip_torn_line(data: bytes) -> bytes:
    """Give what was read of a journal, perhaps while it was written, without a torn last line."""
    return data[: data.rfind(b"\n") + 1]


def is_locked(path: Path) -> bool:
    """Whether some process, on a node that shares this file, is writing the journal."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return True
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    # Refused, or it cannot be asked: a run that may go on is left alone.
    except OSError:
        return True
    return False


class _JournalLine(msgspec.Struct):
    """What `parse_committed_names` wants of a line."""

    event: str
    name: str = ""


_line_decoder = msgspec.json.Decoder(_JournalLine)


def parse_committed_names(journal: bytes) -> set[str]:
    """Give the names of all checkpoints that a journal knows of, as far as it can be read."""
    names = set()
    for line in strip_torn_line(journal).splitlines():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = _line_decoder.decode(line)
            if found.event == "checkpoint":
                names.add(found.name)
    return names
