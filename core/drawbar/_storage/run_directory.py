"""Layout of a run directory: paths, checkpoint store, and run files.

    <storage_path>/<name>/
        journal.jsonl             events of the run (_records/journal.py)
        reports/                  metrics of all reports (report_files.py)
        resources.jsonl           resource samples of the nodes (_observe/sample_log.py)
        trainer.pkl               data for restore()
        places.json               index of checkpoints in other places (external_checkpoints.py)
        outcome.pkl               return values and error of a detached run
        trackers/                 positions of trackers in the reports (report_feed.py)
        tensorboard/              event files of a TensorBoard tracker
        logs/rank_N.log           complete output of each rank
        checkpoint_000041/        a committed checkpoint: the user's files and the manifest
        broken/                   quarantined checkpoints and damaged segments of reports
        .staging/                 files that are not committed yet
        .uncommitted/             uncommitted files that the user moved to Drawbar
        .uploads/                 names of uncommitted uploads (unfinished_uploads.py)
        .workers/                 exit reports of worker processes (_process/sentinel.py)

`.staging` and `.workers` are deleted when the run ends.

A run is local if its storage is a local path, and remote if Drawbar accesses its storage through a
filesystem object, such as an object store. For a remote run, the directory above is a work
directory on the driver's node. The remote storage has the checkpoints and copies of journal,
reports, logs, stacks, and `trainer.pkl`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar._storage.checkpoint_store import CheckpointStore
from drawbar._storage.files import remove_tree
from drawbar._storage.filesystem import AnyFileSystem, resolve_path
from drawbar._storage.journal_file import JOURNAL_FILE
from drawbar._storage.local_store import LocalCheckpointStore
from drawbar._storage.remote_path import RemotePath, describe_endpoint, find_mounted_path
from drawbar._storage.remote_store import RemoteCheckpointStore
from drawbar._storage.run_files import OUTCOME_FILE, TRAINER_FILE, RemoteRunFiles, RunFiles
from drawbar._storage.staging import StagingArea
from drawbar._storage.storage_path import LocalPath, StoragePath, read_file_or_none

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_WORKERS_DIRECTORY = ".workers"


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run, as the controller or a worker sees it.

    Attributes:
        local_path: The directory on this node; for a remote run, its work directory.
        remote_path: The directory in remote storage; None for a local run.
    """

    local_path: Path
    remote_path: RemotePath | None = None

    # -- location

    @property
    def root(self) -> StoragePath:
        """Directory of the run, local or remote."""
        return LocalPath(self.local_path) if self.remote_path is None else self.remote_path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.root.name

    @property
    def storage_fs_path(self) -> str:
        """Path of the storage on its filesystem."""
        return self.root.parent.fs_path

    @property
    def uri(self) -> str:
        """Path or URI of the run, for messages and `Result.from_path`."""
        return str(self.root)

    @property
    def filesystem(self) -> FileSystem | None:
        """`pyarrow.fs.FileSystem` of a remote run; None for a local one."""
        return None if self.remote_path is None else self.remote_path.filesystem

    def list_local_paths(self) -> list[Path]:
        """Return the directories of this node that have files of the run."""
        local = None if self.remote_path is None else find_mounted_path(self.remote_path)
        return [self.local_path] if local is None else [self.local_path, local]

    def is_on_this_node(self, run_id: str) -> bool:
        """Return True if this node has the journal of the run with this identifier."""
        try:
            # Check the content: every node has a /tmp, which can have another run of this name.
            with open(self.journal_path, "rb") as file:
                return any(run_id.encode() in line for line in file)
        except FileNotFoundError:
            return False

    # -- content

    @property
    def checkpoints(self) -> CheckpointStore:
        """Checkpoints of the run."""
        if self.remote_path is None:
            return LocalCheckpointStore(self.local_path, self.staging)
        return RemoteCheckpointStore(self.remote_path)

    @property
    def staging(self) -> StagingArea:
        """Staging area for files that are not committed."""
        return StagingArea(self.local_path / ".staging")

    @property
    def run_files(self) -> RunFiles:
        """Files of the run other than checkpoints, as other processes see them."""
        if self.remote_path is None:
            return RunFiles(self.local_path, self.staging.path)
        return RemoteRunFiles(self.local_path, self.staging.path, self.remote_path)

    @property
    def journal_path(self) -> Path:
        """Path of the journal."""
        return self.local_path / JOURNAL_FILE

    @property
    def trainer_path(self) -> Path:
        """Path of the data for `restore()`."""
        return self.local_path / TRAINER_FILE

    def get_log_path(self, rank: int) -> Path:
        """Return the path of the complete output of a rank."""
        return self.local_path / "logs" / f"rank_{rank}.log"

    def read_log(self, rank: int, offset: int = 0) -> bytes | None:
        """Return the output of a rank from an offset, or None if there is no log of this rank.

        The log on this node comes first: if the controller runs here, it is newer than the stored
        one.
        """
        path = self.get_log_path(rank)
        log = read_file_or_none(path.parent, path.name, offset)
        if log is not None:
            return log
        stored = self.run_files.read(f"logs/rank_{rank}.log")
        return None if stored is None else stored[offset:]

    def get_exit_report_path(self, hostname: str, pid: int) -> Path:
        """Return the path of the file that records how a worker process ended."""
        return self.local_path / _WORKERS_DIRECTORY / f"{hostname}-{pid}.json"

    def has_run(self) -> bool:
        """Return True if there is a journal, or a committed checkpoint without one."""
        return self.run_files.read_journal() is not None or bool(self.checkpoints.list_committed())

    # -- start and end of a run

    def create_directories(self) -> None:
        """Create the subdirectories that a run needs."""
        for path in (
            self.staging.path,
            self.local_path / "logs",
            self.local_path / _WORKERS_DIRECTORY,
        ):
            path.mkdir(parents=True, exist_ok=True)

    def clean_up(self) -> None:
        """Remove uncommitted and partly deleted files of earlier processes of this run.

        Raises:
            OSError: The storage cannot be written.
        """
        # Before the staging area is deleted: moved files exist nowhere else.
        self.preserve_uncommitted()
        remove_tree(self.staging.path)
        remove_tree(self.local_path / _WORKERS_DIRECTORY)
        self.run_files.delete(OUTCOME_FILE)
        self.create_directories()
        self.run_files.check_writable()
        self.checkpoints.delete_uncommitted_uploads()
        self.checkpoints.clean_up()

    def preserve_uncommitted(self) -> None:
        """Preserve moved files that did not become part of a checkpoint; log where they are."""
        # Check this first: listing the checkpoints of remote storage costs a request for each.
        if self.staging.list_moved():
            self.staging.preserve_moved(
                [manifest.name for manifest in self.checkpoints.list_committed()]
            )

    def finish(self) -> None:
        """Delete the directories that a run needs only while it is in progress.

        For a remote run, this is the whole work directory. Moved files that are not part of a
        checkpoint are not deleted.
        """
        # A process that was just killed may still write its exit report. A rename removes the path
        # before the files are deleted, so a late report cannot recreate it.
        with contextlib.suppress(OSError):
            self.staging.path.mkdir(exist_ok=True)
            remove_tree(self.staging.move_to_trash(self.local_path / _WORKERS_DIRECTORY))
        if not self.staging.list_moved():
            remove_tree(self.staging.path)
        if self.remote_path is not None and not self.staging.preserved_path.exists():
            remove_tree(self.local_path)


def describe_resume(directory: RunDirectory) -> str:
    """Return how to resume a run: the arguments of `RunConfig` to set."""
    name, storage = directory.name, str(directory.root.parent)
    return (
        "To resume from the latest checkpoint, if there is one, call fit() again with these "
        f"arguments of your RunConfig: name={name!r}, storage_path={storage!r}"
    )


def finish_on_node(directory: RunDirectory, rank: int) -> None:
    """Delete the files of a rank on a node other than the driver's, after its log was uploaded.

    Nothing is deleted while there are moved files that exist nowhere else. Logs are not deleted if
    the storage is local to the node.
    """
    if directory.staging.list_moved():
        return
    local_path = directory.local_path
    for path in (
        directory.staging.path,
        local_path / _WORKERS_DIRECTORY,
        local_path / ".bring.lock",
    ):
        remove_tree(path)
    if directory.remote_path is not None:
        remove_tree(directory.get_log_path(rank))
        with contextlib.suppress(OSError):  # contains another rank's log, or files of the user
            directory.get_log_path(rank).parent.rmdir()
            local_path.rmdir()


def open_run_directory(
    path: str | os.PathLike[str], filesystem: AnyFileSystem | None = None
) -> RunDirectory:
    """Return the directory of a run in local or remote storage, without accessing it.

    The work directory of a remote run is `$XDG_CACHE_HOME/drawbar/<name>-<hash of the root>`, by
    default below `~/.cache`.

    Raises:
        ImportError: The package for the filesystem is not installed.
        ValueError: The path is empty, or has an unknown scheme.
        TypeError: `filesystem` is not a filesystem.
    """
    return make_run_directory(resolve_path(path, filesystem))


def make_run_directory(root: StoragePath) -> RunDirectory:
    """Return the directory of a run from its resolved path; see `open_run_directory`."""
    if isinstance(root, LocalPath):
        return RunDirectory(root)
    endpoint = describe_endpoint(root.filesystem)
    key = f"{root.filesystem.type_name} {root.fs_path} {endpoint}".rstrip()
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return RunDirectory(_get_cache_directory() / f"{root.name}-{digest}", root)


def list_work_directories() -> list[Path]:
    """Return the work directories of this user's remote runs on this machine."""
    cache = _get_cache_directory()
    return sorted(path for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []


def _get_cache_directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    return cache / "drawbar"
