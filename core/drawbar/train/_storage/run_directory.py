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
from drawbar.train._storage.filesystem import (
    AnyFileSystem,
    RemotePath,
    describe_endpoint,
    resolve_path,
)
from drawbar.train._storage.journal_file import JOURNAL_FILE
from drawbar.train._storage.local_store import LocalCheckpointStore
from drawbar.train._storage.remote_store import RemoteCheckpointStore
from drawbar.train._storage.run_files import TRAINER_FILE, RemoteRunFiles, RunFiles
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

    local_path: Path
    remote_path: RemotePath | None = None

    # -- where it is

    @property
    def root(self) -> Path | RemotePath:
        """Where the run lies."""
        return self.local_path if self.remote_path is None else self.remote_path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.root.name

    @property
    def storage_fs_path(self) -> str:
        """The storage path that the run lies in, on its filesystem."""
        return (
            str(self.local_path.parent)
            if self.remote_path is None
            else self.remote_path.parent.fs_path
        )

    @property
    def uri(self) -> str:
        """Where the run lies, for people and for `Result.from_path`."""
        return str(self.root)

    @property
    def filesystem(self) -> FileSystem | None:
        """The `pyarrow.fs.FileSystem` that the run lies on; None if it is a local one."""
        return None if self.remote_path is None else self.remote_path.filesystem

    def list_local_paths(self) -> list[Path]:
        """List the folders of this node that the run lies in."""
        local = None if self.remote_path is None else self.remote_path.local_path
        return [self.local_path] if local is None else [self.local_path, local]

    def is_on_this_node(self, run_id: str) -> bool:
        """Whether this node sees the run's journal, rather than none or that of another run."""
        try:
            # By what is in it: every node has a /tmp, and may have a run of this name there.
            with open(self.journal_path, "rb") as file:
                return any(run_id.encode() in line for line in file)
        except FileNotFoundError:
            return False

    # -- what lies in it

    @property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints."""
        if self.remote_path is None:
            return LocalCheckpointStore(self.local_path, self.staging)
        return RemoteCheckpointStore(self.remote_path)

    @property
    def staging(self) -> StagingArea:
        """The folder of everything that is not committed."""
        return StagingArea(self.local_path / ".staging")

    @property
    def run_files(self) -> RunFiles:
        """The run's own files, as others find them."""
        if self.remote_path is None:
            return RunFiles(self.local_path, self.staging.path)
        return RemoteRunFiles(self.local_path, self.staging.path, self.remote_path)

    @property
    def journal_path(self) -> Path:
        """File of the run's events."""
        return self.local_path / JOURNAL_FILE

    @property
    def trainer_path(self) -> Path:
        """File with what `restore()` needs."""
        return self.local_path / TRAINER_FILE

    def get_log_path(self, rank: int) -> Path:
        """File with one rank's full output."""
        return self.local_path / "logs" / f"rank_{rank}.log"

    def get_exit_report_path(self, hostname: str, pid: int) -> Path:
        """File that tells how a worker process ended."""
        return self.local_path / ".workers" / f"{hostname}-{pid}.json"

    def has_run(self) -> bool:
        """Whether there is a run: its journal, or checkpoints whose journal is lost."""
        return self.run_files.read_journal() is not None or bool(self.checkpoints.list_committed())


def open_run_directory(
    path: str | os.PathLike[str], filesystem: AnyFileSystem | None = None
) -> RunDirectory:
    """Give the directory of a run, wherever it lies. Nothing is read or written yet.

    The work folder of a remote one is `$XDG_CACHE_HOME/drawbar/<name>-<hash of the place>`, by
    default below `~/.cache`.

    Raises:
        ImportError, ValueError, TypeError: The path and the filesystem name no storage.
    """
    return make_run_directory(resolve_path(path, filesystem))


def make_run_directory(place: Path | RemotePath) -> RunDirectory:
    """Give the directory of a run at a place; see `open_run_directory`."""
    if isinstance(place, Path):
        return RunDirectory(place)
    endpoint = describe_endpoint(place.filesystem)
    key = f"{place.filesystem.type_name} {place.fs_path} {endpoint}".rstrip()
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return RunDirectory(_get_cache_directory() / f"{place.name}-{digest}", place)


def list_work_directories() -> list[Path]:
    """List the work folders of this user's remote runs on this machine."""
    cache = _get_cache_directory()
    return sorted(path for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []


def _get_cache_directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    return cache / "drawbar"
