"""A run whose storage is not a mounted filesystem: an object store, or anything pyarrow can open.

    <storage>/<name>/
        journal.jsonl, trainer.pkl, logs/, stacks/     copies of the work folder's
        checkpoint_000041/                             the user's files and, last, the manifest

There is no rename, so the manifest is the commit: ranks write their files under the checkpoint's
name, and when the last one has, the controller checks what is there and writes the manifest.
Deleting removes the manifest first. A directory without one that was marked as Drawbar's is a
leftover, swept at the next start.

The journal grows in a local work folder, since an object store cannot append, and is put in the
storage at each commit and at the end. docs/decisions/0005-remote-storage.md says why it is so.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from drawbar.train._storage import fault_points
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.files import (
    CHECKSUMS,
    MANIFEST,
    METADATA,
    PENDING,
    VALIDATION,
    FileEntry,
    is_own,
    remove_tree,
)
from drawbar.train._storage.journal_file import JournalFile, is_held, whole_lines
from drawbar.train._storage.manifest import (
    Manifest,
    check_files,
    read_manifest,
    under_their_names,
    user_files,
)
from drawbar.train._storage.remote_folder import Folder, locate, server_of
from drawbar.train._storage.retries import is_transient, told_when_slow
from drawbar.train._storage.run_directory import OUTCOME, RunDirectory, taken
from drawbar.train._storage.staging import Part

_logger = logging.getLogger("drawbar.train")
_publishing = threading.Lock()


@dataclass(frozen=True)
class RemoteRunDirectory(RunDirectory):
    """The directory of a run in `folder`; `path` is the work folder on this node."""

    folder: Folder = field(kw_only=True)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def parent(self) -> str:
        return self.folder.parent.path

    @property
    def location(self) -> str:
        return str(self.folder)

    @property
    def filesystem(self) -> Any | None:
        return self.folder.filesystem

    def local_places(self) -> list[Path]:
        """List the work folder, and the run's folder if its filesystem is that of this node."""
        return [self.path] if self.folder.local is None else [self.path, self.folder.local]

    # -- the work folder and its copy

    def read_journal(self) -> bytes | None:
        """Read the storage's journal, or the one here, if that goes on from it.

        With none in the storage, the one here is of a run that has just begun, or of one that was
        deleted.
        """
        name = self.journal.name
        there, here = self.folder.read_if_there(name), super().read(name)
        if there is None:
            return here if is_held(self.journal) else None
        return here if here is not None and here.startswith(whole_lines(there)) else there

    def catch_up(self, journal: JournalFile) -> None:
        """Bring the storage's journal into the one here.

        The storage's is the truth. The one here is newer if it only goes on from that: the driver
        died here before it could put the rest there.
        """
        journal.catch_up(self.folder.read_if_there(self.journal.name))

    def read(self, name: str) -> bytes | None:
        """Read one of the run's own files; that of the work folder if the storage has none."""
        there = self.folder.read_if_there(name)
        return super().read(name) if there is None else there

    def write(self, name: str, data: bytes) -> None:
        self.folder.write(name, data)

    def publish(self, *, everything: bool = False) -> bool:
        """Put the journal into the storage; `everything`: also the logs, stacks and `trainer.pkl`.

        Tells whether all of that is there now.
        What fails here is logged: no checkpoint depends on it. A file that is refused does not keep
        the others back; a storage that does not answer does, after it was asked several times.
        """
        complete = True
        with _publishing:
            for name in self._names_to_publish() if everything else (self.journal.name,):
                try:
                    self._publish(name)
                except Exception as error:  # fsspec's filesystems raise what their libraries do
                    complete = False
                    _logger.warning("%s in %s is not up to date: %s", name, self.location, error)
                    if is_transient(error) or not isinstance(error, OSError):
                        break
        return complete

    def leave(self) -> None:
        """Remove the work folder, unless it has what a user has handed over and nobody else has."""
        if not self.uncommitted.exists():
            remove_tree(self.path)

    def _names_to_publish(self) -> list[str]:
        """List what is not hidden in the work folder, the journal first."""
        names = [self.journal.name]
        for root, folders, files in os.walk(self.path):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            found = [os.path.relpath(f"{root}/{file}", self.path) for file in files]
            names += [name for name in found if not name.startswith((".", self.journal.name))]
        return names

    def _publish(self, name: str) -> None:
        if name == self.journal.name:
            self.folder.write(name, whole_lines(self.journal.read_bytes()))
        else:
            path = self.path / name
            self.folder.upload_file(path, FileEntry(name, path.stat().st_size))

    def publish_log(self, rank: int) -> None:
        """Put a rank's log into the storage, from a node that is not the driver's."""
        log = self.log(rank)
        if log.exists():
            (self.folder / "logs").write(log.name, log.read_bytes())

    def sweep(self) -> None:
        """Remove what earlier processes left uncommitted or half deleted, here and there.

        Raises:
            OSError: The storage cannot be written, which is tried first.
        """
        super().sweep()
        self.folder.delete_file(OUTCOME)
        probe = f".drawbar-probe-{os.getpid()}"
        self.folder.write(probe, b"drawbar")
        self.folder.delete_file(probe)
        for name in self.folder.folders():
            folder = self.folder / name
            if _is_leftover(folder):
                folder.delete()

    # -- seen from a worker

    def is_staged(self, path: Path) -> bool:
        """Nothing that is local lies where a commit can take it."""
        return False

    def persist(
        self, source: Path, files: Sequence[FileEntry], *, label: str, name: str, move: bool
    ) -> Part:
        """Write these files under the checkpoint's name. Without the manifest nobody sees them."""
        folder = self.folder / name
        _claim(folder)
        with told_when_slow(f"writing checkpoint {name} of {label} to {self.location}"):
            checksums = folder.upload(source, files)
        return Part(None, tuple(files), checksums)

    def checkpoint(self, name: str) -> Checkpoint:
        return Checkpoint.at(self.folder / name)

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.filesystem is None:
            return None
        folder = Folder(checkpoint.path, checkpoint.filesystem)
        return folder.name if folder.parent.same_as(self.folder) else None

    # -- seen from the controller

    def commit(
        self,
        manifest: Manifest,
        parts: Sequence[Part],
        *,
        durable: bool,
        metadata: bytes | None = None,
        in_place: bool = False,
    ) -> Path | Folder:
        """Check that every rank's files are there, remove what is not theirs, write the manifest.

        Raises:
            FileExistsError: A committed checkpoint has this name already.
            CheckpointError: A file that a rank wrote is not there, or is cut off.
            OSError: The storage refused; nothing is committed.
        """
        fault_points.reached("commit.start")
        folder = self.folder / manifest.name
        self._refuse_committed(manifest.name)
        if not in_place:
            self._remove_leftovers(folder, parts)
        if metadata is not None and folder.read_if_there(METADATA) is None:
            folder.write(METADATA, metadata)
        sums = {path: value for part in parts for path, value in part.checksums.items()}
        if sums:
            folder.write(CHECKSUMS, msgspec.json.encode(sums))
        fault_points.reached("commit.merged")
        check_files(folder, manifest)
        folder.write(MANIFEST, manifest.encode())
        fault_points.reached("commit.manifest")
        fault_points.reached("commit.renamed")
        return folder

    def manifest_in_place(self, manifest: Manifest) -> Manifest:
        """Give the manifest with whatever lies in the checkpoint's directory already."""
        return manifest.holding(user_files(self.folder / manifest.name))

    def _remove_leftovers(self, folder: Folder, parts: Sequence[Part]) -> None:
        wanted = {file.path for part in parts for file in part.files}
        found = [file.path for file in folder.list_files() if file.path not in wanted]
        for path in sorted(found, key=lambda path: path != MANIFEST):
            folder.delete_file(path)

    def place(self, name: str) -> Path | Folder:
        return self.folder / name

    def checkpoints(self) -> list[Manifest]:
        found = {name: read_manifest(self.folder / name) for name in self.folder.folders()}
        return under_their_names({name: each for name, each in found.items() if each is not None})

    def damaged(self) -> list[str]:
        """List the names of committed checkpoints that have lost files.

        A directory without a manifest is no damage here: that is how a kill leaves one.
        """
        return [each.name for each in self.checkpoints() if not self.is_intact(each.name)]

    def delete(self, name: str) -> None:
        """Delete a checkpoint: gone with its manifest, its other files follow."""
        folder = self.folder / name
        folder.write(PENDING, b"")  # what a kill leaves of it is Drawbar's to sweep
        folder.delete_file(MANIFEST)
        folder.delete()

    def write_checksums(self, name: str) -> None:
        """There is nothing left to do: the commit wrote them."""

    def keep_validation(self, manifest: Manifest, *, durable: bool) -> None:
        (self.folder / manifest.name).write(VALIDATION, manifest.encode())


def _claim(folder: Folder) -> None:
    """Mark a folder as one that a checkpoint is written into, unless it is the user's.

    Raises:
        FileExistsError: It is.
    """
    found = [file.path for file in folder.list_files()]
    if found and not any(map(is_own, found)):
        raise taken(folder)
    if PENDING not in found:
        folder.write(PENDING, b"")


def _is_leftover(folder: Folder) -> bool:
    """Whether Drawbar has written into a folder that is no checkpoint."""
    if read_manifest(folder) is not None:
        return False
    return any(is_own(file.path) for file in folder.list_files())


def open_directory(path: str | os.PathLike[str], filesystem: Any | None = None) -> RunDirectory:
    """Give the directory of a run, wherever it lies. Nothing is read or written yet.

    The work folder of a remote one is `$XDG_CACHE_HOME/drawbar/<name>-<hash of the place>`, by
    default below `~/.cache`.

    Raises:
        ImportError, ValueError, TypeError: The path and the filesystem name no storage.
    """
    return directory_at(locate(path, filesystem))


def directory_at(place: Path | Folder) -> RunDirectory:
    """Give the directory of a run at a place; see `open_directory`."""
    if isinstance(place, Path):
        return RunDirectory(place)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    key = f"{place.filesystem.type_name} {place.path} {server_of(place.filesystem)}".rstrip()
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return RemoteRunDirectory(cache / "drawbar" / f"{place.name}-{digest}", folder=place)
