"""A run's own files, such as its journal, logs and `trainer.pkl`, and where others find them.

In a storage that is not mounted, an object store or the like, the journal grows in a local work
folder, since an object store cannot append, and is put in the storage at each commit and at the
end; logs, stacks and `trainer.pkl` follow at the end. docs/decisions/0005-remote-storage.md says
why it is so.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.external_checkpoints import INDEX_FILE
from drawbar.train._storage.files import write_atomically
from drawbar.train._storage.filesystem import RemotePath
from drawbar.train._storage.journal_file import (
    JOURNAL_FILE,
    JournalFile,
    is_locked,
    make_not_a_file_error,
    strip_torn_line,
)
from drawbar.train._storage.manifest import read_file_or_none
from drawbar.train._storage.retries import is_transient

OUTCOME_FILE = "outcome.pkl"
TRAINER_FILE = "trainer.pkl"
RUN_FILE_NAMES = (
    "broken",
    "journal.damaged",
    JOURNAL_FILE,
    "logs",
    OUTCOME_FILE,
    INDEX_FILE,
    "stacks",
    TRAINER_FILE,
)

_logger = logging.getLogger("drawbar.train")
# Commits and the end of a run publish in different threads: an older journal must not come last.
_upload_lock = threading.Lock()


@dataclass(frozen=True)
class RunFiles:
    """Those of a run whose directory is mounted: what is written there, others find there.

    Attributes:
        path: The run's directory on this node.
        spare: A folder on the same filesystem, for files that are being written.
    """

    path: Path
    temp_directory: Path

    def read_journal(self) -> bytes | None:
        """Read the journal where it is newest; None if there is no run."""
        try:
            return read_file_or_none(self.path, JOURNAL_FILE)
        except IsADirectoryError:
            raise make_not_a_file_error(self.path / JOURNAL_FILE) from None

    def sync_journal(self, journal: JournalFile) -> None:
        """Bring what is newer elsewhere into the journal here, which this process holds."""

    def read(self, name: str) -> bytes | None:
        """Read one of them, such as `logs/rank_0.log`; None if it is not there."""
        return read_file_or_none(self.path, name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file where other processes find it."""
        # Those who copy the run directory must not find temporary files; after the run it has no
        # directory for them.
        spare = self.temp_directory if self.temp_directory.is_dir() else None
        write_atomically(self.path / name, data, temp_directory=spare)

    def delete(self, name: str) -> None:
        """Delete one of them, which may not be there."""
        (self.path / name).unlink(missing_ok=True)

    def upload_journal(self, *, everything: bool = False) -> bool:
        """Put the journal, or the logs and all else too, where others find it.

        Tells whether all of that is there now. What fails is logged.
        """
        return True

    def upload_log(self, log: Path) -> None:
        """Put a rank's log where others find it, from a node that is not the driver's."""

    def check_writable(self) -> None:
        """Check that the storage can be written.

        Raises:
            OSError: It cannot.
        """


@dataclass(frozen=True)
class RemoteRunFiles(RunFiles):
    """Those of a run in an object store: they lie in its work folder, and a copy where it lies.

    Attributes:
        folder: Where it lies.
    """

    remote_path: RemotePath

    def read_journal(self) -> bytes | None:
        """Give the storage's journal, or the one here, if that goes on from it.

        With none in the storage, the one here is of a run that has just begun, or of one that was
        deleted.
        """
        here, there = super().read_journal(), self.remote_path.read_or_none(JOURNAL_FILE)
        if there is None:
            return here if is_locked(self.path / JOURNAL_FILE) else None
        return here if here is not None and here.startswith(strip_torn_line(there)) else there

    def sync_journal(self, journal: JournalFile) -> None:
        """Bring the storage's journal into the one here, which this process holds.

        The storage's is the truth. The one here is newer if it only goes on from that: the driver
        died here before it could put the rest there.
        """
        journal.sync_from(self.remote_path.read_or_none(JOURNAL_FILE))

    def read(self, name: str) -> bytes | None:
        """Read one; that of the work folder if the storage has none."""
        there = self.remote_path.read_or_none(name)
        return super().read(name) if there is None else there

    def write(self, name: str, data: bytes) -> None:
        """Write one into the storage."""
        self.remote_path.write(name, data)

    def delete(self, name: str) -> None:
        """Delete one, here and in the storage."""
        super().delete(name)
        self.remote_path.delete_file(name)

    def upload_journal(self, *, everything: bool = False) -> bool:
        """Put the journal into the storage; `everything`: also the logs, stacks and `trainer.pkl`.

        Tells whether all of that is there now.
        What fails here is logged: no checkpoint depends on it. A file that is refused does not keep
        the others back; a storage that does not answer does, after it was asked several times.
        """
        complete = True
        with _upload_lock:
            for name in (JOURNAL_FILE, *(self._list_other_files() if everything else ())):
                try:
                    self._upload(name)
                except Exception as error:  # fsspec's filesystems raise what their libraries do
                    complete = False
                    _logger.warning("%s in %s is not up to date: %s", name, self.remote_path, error)
                    # A storage that is down would be asked, and waited for, once per file.
                    if is_transient(error) or not isinstance(error, OSError):
                        break
        return complete

    def _list_other_files(self) -> Iterator[str]:
        """List what is not hidden in the work folder, but for the journal."""
        for root, folders, files in os.walk(self.path):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for name in (os.path.relpath(f"{root}/{file}", self.path) for file in files):
                if not name.startswith((".", JOURNAL_FILE)):
                    yield name

    def _upload(self, name: str) -> None:
        path = self.path / name
        if name == JOURNAL_FILE:
            self.remote_path.write(name, strip_torn_line(path.read_bytes()))
        else:
            self.remote_path.upload_file(path, FileEntry(name, path.stat().st_size))

    def upload_log(self, log: Path) -> None:
        """Put a rank's log into the storage, if it has one."""
        if log.exists():
            (self.remote_path / "logs").write(log.name, log.read_bytes())

    def check_writable(self) -> None:
        """Write a small file and delete it."""
        probe = f".drawbar-probe-{os.getpid()}"
        self.remote_path.write(probe, b"drawbar")
        self.remote_path.delete_file(probe)
