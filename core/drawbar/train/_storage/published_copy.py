"""The copy of a run's own files in a storage that is not mounted: an object store, or the like.

The journal grows in a local work folder, since an object store cannot append, and is put in the
storage at each commit and at the end; logs, stacks and `trainer.pkl` follow at the end.
docs/decisions/0005-remote-storage.md says why it is so.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.journal_file import JOURNAL, is_held, whole_lines
from drawbar.train._storage.remote_folder import Folder
from drawbar.train._storage.retries import is_transient

_logger = logging.getLogger("drawbar.train")
_publishing = threading.Lock()


@dataclass(frozen=True)
class PublishedCopy:
    """What of the work folder `work` lies in `folder` too, where others find it."""

    work: Path
    folder: Folder

    def newer_journal(self, here: bytes | None) -> bytes | None:
        """Give the storage's journal, or the one here, if that goes on from it.

        With none in the storage, the one here is of a run that has just begun, or of one that was
        deleted.
        """
        there = self.folder.read_if_there(JOURNAL)
        if there is None:
            return here if is_held(self.work / JOURNAL) else None
        return here if here is not None and here.startswith(whole_lines(there)) else there

    def publish(self, *, everything: bool) -> bool:
        """Put the journal into the storage; `everything`: also the logs, stacks and `trainer.pkl`.

        Tells whether all of that is there now.
        What fails here is logged: no checkpoint depends on it. A file that is refused does not keep
        the others back; a storage that does not answer does, after it was asked several times.
        """
        complete = True
        with _publishing:
            for name in (JOURNAL, *(self._others() if everything else ())):
                try:
                    self._publish(name)
                except Exception as error:  # fsspec's filesystems raise what their libraries do
                    complete = False
                    _logger.warning("%s in %s is not up to date: %s", name, self.folder, error)
                    # A storage that is down would be asked, and waited for, once per file.
                    if is_transient(error) or not isinstance(error, OSError):
                        break
        return complete

    def _others(self) -> Iterator[str]:
        """List what is not hidden in the work folder, but for the journal."""
        for root, folders, files in os.walk(self.work):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for name in (os.path.relpath(f"{root}/{file}", self.work) for file in files):
                if not name.startswith((".", JOURNAL)):
                    yield name

    def _publish(self, name: str) -> None:
        path = self.work / name
        if name == JOURNAL:
            self.folder.write(name, whole_lines(path.read_bytes()))
        else:
            self.folder.upload_file(path, FileEntry(name, path.stat().st_size))

    def publish_log(self, log: Path) -> None:
        """Put a rank's log into the storage."""
        if log.exists():
            (self.folder / "logs").write(log.name, log.read_bytes())

    def probe(self) -> None:
        """Check that the storage can be written.

        Raises:
            OSError: It cannot.
        """
        probe = f".drawbar-probe-{os.getpid()}"
        self.folder.write(probe, b"drawbar")
        self.folder.delete_file(probe)
