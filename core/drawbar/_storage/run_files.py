"""Read and write a run's journal, reports, logs, and state, and upload them to remote storage.

Object stores cannot append. For remote storage, journal and reports are therefore written in a
local work directory and uploaded at each commit and at the end of the run. A closed segment of
reports is uploaded once. Logs, stacks, and `trainer.pkl` are uploaded at the end. See
docs/decisions/0005-remote-storage.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from drawbar._storage.contents import FileEntry
from drawbar._storage.external_checkpoints import INDEX_FILE
from drawbar._storage.files import read_regular_file, remove_tree, write_atomically
from drawbar._storage.journal_file import (
    JOURNAL_FILE,
    PARTS_DIRECTORY,
    JournalFile,
    RemoteJournal,
    is_locked,
    make_not_a_file_error,
    strip_torn_line,
)
from drawbar._storage.remote_path import RemotePath, upload_file
from drawbar._storage.report_files import REPORTS_DIRECTORY, list_superseded, parse_segments
from drawbar._storage.retries import is_transient
from drawbar._storage.storage_path import read_file_or_none

OUTCOME_FILE = "outcome.pkl"
RESOURCES_FILE = "resources.jsonl"
TRAINER_FILE = "trainer.pkl"
TRACKERS_DIRECTORY = "trackers"
RUN_FILE_NAMES = (
    "broken",
    "journal.damaged",
    JOURNAL_FILE,
    "logs",
    OUTCOME_FILE,
    INDEX_FILE,
    PARTS_DIRECTORY,
    "rank_times.jsonl",
    REPORTS_DIRECTORY,
    RESOURCES_FILE,
    "stacks",
    "tensorboard",
    TRACKERS_DIRECTORY,
    TRAINER_FILE,
    "wandb",
)

_logger = logging.getLogger("drawbar.train")
# Commits and the end of a run upload the journal in different threads. Without the lock, an older
# journal could replace a newer one in the storage.
_upload_lock = threading.Lock()


def _list_until_stable(list_names: Callable[[], list[str]]) -> list[str]:
    """List a directory until it is the same twice.

    While another process replaces an open segment by a closed one, a listing may lack both.
    """
    previous, names = None, list_names()
    while names != previous:
        previous, names = names, list_names()
    return names


@dataclass(frozen=True)
class RunFiles:
    """Files of a run in a local or mounted directory.

    Other processes read the files in this directory, so the methods that upload or synchronize
    files do nothing. `RemoteRunFiles` overrides them.

    Attributes:
        path: Run directory on this node.
        temp_directory: Directory on the same filesystem, for files that are being written.
    """

    path: Path
    temp_directory: Path

    def read_journal(self) -> bytes | None:
        """Return the newest journal; None if there is no run."""
        try:
            return read_file_or_none(self.path, JOURNAL_FILE)
        except IsADirectoryError:
            raise make_not_a_file_error(self.path / JOURNAL_FILE) from None

    def sync_journal(self, journal: JournalFile) -> None:
        """Update the journal and the reports from those in the storage.

        Args:
            journal: Journal whose lock this process holds.
        """

    def list_reports(self) -> list[str]:
        """Return the names of the segments with reports; see `parse_segments`."""
        return self.list_local_reports()

    def list_local_reports(self) -> list[str]:
        """Return the names of the segments in `path`."""
        try:
            return _list_until_stable(partial(os.listdir, self.path / REPORTS_DIRECTORY))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read_report(self, name: str, size: int | None = None) -> bytes | None:
        """Return a segment, or its first `size` bytes; None if it does not exist."""
        try:
            return read_regular_file(self.path / REPORTS_DIRECTORY / name, size=size)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str) -> bytes | None:
        """Return a file, such as `logs/rank_0.log`; None if it does not exist."""
        return read_file_or_none(self.path, name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file for other processes to read."""
        # Not in the run directory: a user who copies it would also copy the temporary file. But
        # after the end of the run, `temp_directory` does not exist.
        temp_directory = self.temp_directory if self.temp_directory.is_dir() else None
        write_atomically(self.path / name, data, temp_directory=temp_directory)

    def delete(self, name: str) -> None:
        """Delete a file. A missing file is not an error."""
        (self.path / name).unlink(missing_ok=True)

    def upload(self, *, everything: bool = False) -> bool:
        """Upload journal and reports, or with `everything` all run files. Errors are logged.

        Returns:
            True if every file was uploaded.
        """
        return True

    def upload_log(self, log: Path) -> None:
        """Upload the log of a rank. Only nodes other than the driver's call this."""

    def check_writable(self) -> None:
        """Check that the storage is writable.

        Raises:
            OSError: The storage cannot be written.
        """


@dataclass(frozen=True)
class RemoteRunFiles(RunFiles):
    """Files of a run in remote storage: originals in the work directory, copies in the storage.

    Attributes:
        remote_path: Directory of the run in the storage.
    """

    remote_path: RemotePath

    def read_journal(self) -> bytes | None:
        """Return the newer one of the local journal and the journal in the storage.

        The local journal is newer if it begins with all lines of the one in the storage. If the
        storage has no journal, there are two cases. If a process holds the lock of the local one,
        a new run has not yet uploaded it. Otherwise, the run was deleted from the storage, and
        there is no journal.
        """
        local_data, remote_data = self._read_journals()
        return local_data if self._is_local_newer(local_data, remote_data) else remote_data

    def _read_journals(self) -> tuple[bytes | None, bytes | None]:
        return super().read_journal(), RemoteJournal(self.remote_path).read()

    def _is_local_newer(self, local_data: bytes | None, remote_data: bytes | None) -> bool:
        if remote_data is None:
            return is_locked(self.path / JOURNAL_FILE)
        return local_data is not None and local_data.startswith(strip_torn_line(remote_data))

    def sync_journal(self, journal: JournalFile) -> None:
        """Replace journal and reports with those in the storage, unless the local ones are newer.

        The local journal is newer if it begins with all lines of the one in the storage: a driver
        died on this machine before it uploaded its last lines.
        """
        local_data, remote_data = self._read_journals()
        if remote_data is None or not self._is_local_newer(local_data, remote_data):
            remove_tree(self.path / REPORTS_DIRECTORY)
            journal.replace_contents(strip_torn_line(remote_data or b""))
        self._download_open_segments()

    def _download_open_segments(self) -> None:
        """Download the segments that a driver on another machine did not close."""
        local_names = self.list_local_reports()
        for segment in parse_segments([*self._remote_reports, *local_names]):
            if segment.end is None and segment.file_name not in local_names:
                data = (self.remote_path / REPORTS_DIRECTORY).read_or_none(segment.file_name)
                (self.path / REPORTS_DIRECTORY).mkdir(exist_ok=True)
                write_atomically(self.path / segment.path, data or b"")

    @property
    def _remote_reports(self) -> dict[str, int]:
        """Names and sizes of the segments in the storage."""
        files = (self.remote_path / REPORTS_DIRECTORY).list_files()
        return {file.path: file.size for file in files}

    def list_reports(self) -> list[str]:
        """Return the segments in the storage, and those in the work directory if it is newer."""
        local_names = self.list_local_reports() if self._has_newer_local_files else []
        return list({*_list_until_stable(lambda: list(self._remote_reports)), *local_names})

    def read_report(self, name: str, size: int | None = None) -> bytes | None:
        """Return a segment of the work directory, or of the storage if it is newer."""
        data = super().read_report(name, size) if self._has_newer_local_files else None
        if data is None:
            with contextlib.suppress(FileNotFoundError):
                data = (self.remote_path / REPORTS_DIRECTORY).read(name, size)
        return data

    @cached_property
    def _has_newer_local_files(self) -> bool:
        """True if the work directory was at least as new as the storage at the first access."""
        return self._is_local_newer(*self._read_journals())

    def read(self, name: str) -> bytes | None:
        """Return a file of the storage, or of the work directory if the storage has none."""
        data = self.remote_path.read_or_none(name)
        return super().read(name) if data is None else data

    def write(self, name: str, data: bytes) -> None:
        """Write a file into the storage."""
        self.remote_path.write_file(name, data)

    def delete(self, name: str) -> None:
        """Delete a file in the work directory and in the storage."""
        super().delete(name)
        self.remote_path.delete_file(name)

    def upload(self, *, everything: bool = False) -> bool:
        """Upload journal and reports, and with `everything` also logs, stacks, and `trainer.pkl`.

        Errors are logged, because no checkpoint depends on these files. After an error that
        concerns one file, the others are still uploaded. If the storage does not respond after
        retries, the upload ends.

        Returns:
            True if every file was uploaded.
        """
        complete = True
        with _upload_lock:
            for name in (JOURNAL_FILE, *(self._list_other_files() if everything else ())):
                try:
                    self._upload(name, whole_journal=everything)
                except Exception as error:  # fsspec filesystems raise any type of error
                    complete = False
                    _logger.warning("Could not upload %s to %s: %s", name, self.remote_path, error)
                    # End if the storage is unavailable: each further file would wait for its
                    # retries. An error that is not an OSError can mean the same.
                    if is_transient(error) or not isinstance(error, OSError):
                        break
        return complete

    def _list_other_files(self) -> Iterator[str]:
        """Yield the relative paths of all files except journal, reports, and hidden files."""
        for root, directories, files in os.walk(self.path):
            directories[:] = [
                directory for directory in directories if not directory.startswith(".")
            ]
            for name in (os.path.relpath(f"{root}/{file}", self.path) for file in files):
                if not name.startswith((".", JOURNAL_FILE, f"{REPORTS_DIRECTORY}/")):
                    yield name

    def _upload(self, name: str, *, whole_journal: bool) -> None:
        path = self.path / name
        if name == JOURNAL_FILE:
            # Read the journal first and upload it last, so that the reports before each commit in
            # it are in the storage.
            journal = strip_torn_line(path.read_bytes())
            self._upload_reports()
            copy = RemoteJournal(self.remote_path)
            (copy.upload_all if whole_journal else copy.upload)(journal)
        else:
            upload_file(path, self.remote_path, FileEntry(name, path.stat().st_size))

    def _upload_reports(self) -> None:
        """Upload the open segments, and the closed ones that are not in the storage."""
        stored, directory = self._remote_reports, self.remote_path / REPORTS_DIRECTORY
        segments = parse_segments(self.list_local_reports())
        for segment in segments:
            path = self.path / segment.path
            try:
                is_stored = segment.end is not None and stored.get(path.name) == path.stat().st_size
                if not is_stored:
                    directory.write_file(path.name, path.read_bytes())
            except FileNotFoundError:
                # The segment was closed in the meantime, so list the segments again.
                if path.exists() or not self.path.exists():
                    raise
                return self._upload_reports()
        names = {*stored, *(segment.file_name for segment in segments)}
        for name in list_superseded(names):
            directory.delete_file(name)

    def upload_log(self, log: Path) -> None:
        """Upload the log of a rank, if it exists."""
        if log.exists():
            (self.remote_path / "logs").write_file(log.name, log.read_bytes())

    def check_writable(self) -> None:
        """Write a small file and delete it."""
        probe = f".drawbar-probe-{os.getpid()}"
        self.remote_path.write_file(probe, b"drawbar")
        self.remote_path.delete_file(probe)
