"""The run directory.

    <storage_path>/<name>/
        journal.jsonl             what happened, in order (_history/journal.py)
        trainer.pkl               what restore() needs
        places.json               checkpoints that lie elsewhere (places.py)
        outcome.pkl               return values and error of a detached run
        logs/rank_N.log           every rank's full output
        checkpoint_000041/        a committed checkpoint: the user's files and the manifest
        broken/                   checkpoints that were damaged when a start looked at them
        .staging/                 files that are not committed yet
        .uncommitted/             what was handed over for a checkpoint that did not come about
        .workers/                 exit reports of worker processes (_worker/sentinel.py)

`.staging` and `.workers` are deleted when the run ends.

Where the storage is not mounted, such as an object store, that is a work folder on the driver's
node, and checkpoints, journal, logs, stacks and `trainer.pkl` lie in the storage.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar.train._storage.checkpoint_store import CheckpointStore
from drawbar.train._storage.journal_file import JOURNAL
from drawbar.train._storage.local_checkpoints import LocalCheckpoints
from drawbar.train._storage.own_files import TRAINER, OwnFiles, PublishedFiles
from drawbar.train._storage.remote_checkpoints import RemoteCheckpoints
from drawbar.train._storage.remote_folder import AnyFileSystem, Folder, locate, server_of
from drawbar.train._storage.staging import StagingArea

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run, seen from the controller or from a worker.

    Attributes:
        path: The directory on this node.
        folder: Where the run lies if its storage is not mounted; `path` is the work folder then.
    """

    path: Path
    folder: Folder | None = None

    # -- where it is

    @property
    def home(self) -> Path | Folder:
        """Where the run lies."""
        return self.path if self.folder is None else self.folder

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.home.name

    @property
    def parent(self) -> str:
        """The storage path that the run lies in, on its filesystem."""
        return str(self.path.parent) if self.folder is None else self.folder.parent.path

    @property
    def location(self) -> str:
        """Where the run lies, for people and for `Result.from_path`."""
        return str(self.home)

    @property
    def filesystem(self) -> FileSystem | None:
        """The `pyarrow.fs.FileSystem` that the run lies on; None if it is a local one."""
        return None if self.folder is None else self.folder.filesystem

    def local_places(self) -> list[Path]:
        """List the folders of this node that the run lies in."""
        local = None if self.folder is None else self.folder.local
        return [self.path] if local is None else [self.path, local]

    def is_on_this_node(self, run_id: str) -> bool:
        """Whether this node sees the run's journal, rather than none or that of another run."""
        try:
            # By what is in it: every node has a /tmp, and may have a run of this name there.
            with open(self.journal, "rb") as file:
                return any(run_id.encode() in line for line in file)
        except FileNotFoundError:
            return False

    # -- what lies in it

    @property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints."""
        if self.folder is None:
            return LocalCheckpoints(self.path, self.staging)
        return RemoteCheckpoints(self.folder)

    @property
    def staging(self) -> StagingArea:
        """The folder of everything that is not committed."""
        return StagingArea(self.path / ".staging")

    @property
    def files(self) -> OwnFiles:
        """The run's own files, as others find them."""
        if self.folder is None:
            return OwnFiles(self.path, self.staging.path)
        return PublishedFiles(self.path, self.staging.path, self.folder)

    @property
    def journal(self) -> Path:
        """File of the run's events."""
        return self.path / JOURNAL

    @property
    def trainer(self) -> Path:
        """File with what `restore()` needs."""
        return self.path / TRAINER

    def log(self, rank: int) -> Path:
        """File with one rank's full output."""
        return self.path / "logs" / f"rank_{rank}.log"

    def exit_report(self, hostname: str, pid: int) -> Path:
        """File that tells how a worker process ended."""
        return self.path / ".workers" / f"{hostname}-{pid}.json"

    def holds_run(self) -> bool:
        """Whether there is a run: its journal, or checkpoints whose journal is lost."""
        return self.files.read_journal() is not None or bool(self.checkpoints.committed())


def open_directory(
    path: str | os.PathLike[str], filesystem: AnyFileSystem | None = None
) -> RunDirectory:
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
    key = f"{place.filesystem.type_name} {place.path} {server_of(place.filesystem)}".rstrip()
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return RunDirectory(_cache() / f"{place.name}-{digest}", place)


def work_folders() -> list[Path]:
    """List the work folders of this user's remote runs on this machine."""
    cache = _cache()
    return sorted(path for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    return cache / "drawbar"
