"""The run directory and the commit protocol.

    <storage_path>/<name>/
        journal.jsonl             what happened, in order (_history/journal.py)
        trainer.pkl               what restore() needs
        outcome.pkl               return values and error of a detached run
        logs/rank_N.log           every rank's full output
        checkpoint_000041/        a committed checkpoint: the user's files and the manifest
        broken/                   checkpoints that were damaged when a start looked at them
        .staging/                 whatever is not committed yet; emptied when its attempt is over
        .uncommitted/             what was handed over for a checkpoint that did not come about
        .workers/                 how each worker process ended (_worker/sentinel.py)

A checkpoint exists if and only if its manifest does. Ranks put their files below `.staging`; when
the last rank has, the controller merges them into one directory by renames, writes the manifest
into it, and renames that directory to its final name: one step that either happened or did not.
Deleting goes the same way back.

That is the protocol of a local or mounted filesystem. `remote_run_directory.py` has the one for
object stores, where this directory is the work folder on the driver's node.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from drawbar.train._errors import CheckpointError
from drawbar.train._storage import fault_points, staging
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.files import (
    CHECKSUMS,
    METADATA,
    VALIDATION,
    FileEntry,
    checksum,
    holds_own,
    is_same,
    list_files,
    remove_tree,
    sync,
    write_atomically,
)
from drawbar.train._storage.journal_file import JournalFile, committed_names
from drawbar.train._storage.manifest import (
    Manifest,
    check_files,
    committed_already,
    read_manifest,
    under_their_names,
    write_manifest,
)
from drawbar.train._storage.remote_folder import Folder
from drawbar.train._storage.retries import explained, in_bytes
from drawbar.train._storage.staging import Part

OUTCOME = "outcome.pkl"
OWN_NAMES = ("broken", "journal.damaged", "journal.jsonl", "logs", OUTCOME, "stacks", "trainer.pkl")


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run, seen from the controller or from a worker.

    A run whose storage is not a mounted filesystem is a `remote_run_directory.RemoteRunDirectory`.
    """

    path: Path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def parent(self) -> str:
        """The storage path that the run lies in."""
        return str(self.path.parent)

    @property
    def location(self) -> str:
        """Where the run lies, for people and for `Result.from_path`."""
        return str(self.path)

    @property
    def filesystem(self) -> Any | None:
        """The `pyarrow.fs.FileSystem` that the run lies on; None if it is a local one."""
        return None

    @property
    def journal(self) -> Path:
        """File of the run's events."""
        return self.path / "journal.jsonl"

    @property
    def trainer(self) -> Path:
        """File with what `restore()` needs."""
        return self.path / "trainer.pkl"

    @property
    def staging(self) -> Path:
        """Folder of everything that is not committed."""
        return self.path / ".staging"

    @property
    def uncommitted(self) -> Path:
        """Folder of what was handed over by `report()` and not committed before its attempt ended.

        The next commit empties it.
        """
        return self.path / ".uncommitted"

    def log(self, rank: int) -> Path:
        """File with one rank's full output."""
        return self.path / "logs" / f"rank_{rank}.log"

    def exit_report(self, hostname: str, pid: int) -> Path:
        """File that tells how a worker process ended."""
        return self.path / ".workers" / f"{hostname}-{pid}.json"

    def local_places(self) -> list[Path]:
        """List the folders of this node that the run lies in."""
        return [self.path]

    def create(self) -> None:
        """Make the folders that a run needs."""
        for folder in (self.staging, self.path / "logs", self.path / ".workers"):
            folder.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove what earlier processes of this run left uncommitted or half deleted."""
        self.set_aside()
        remove_tree(self.staging)
        remove_tree(self.path / ".workers")
        (self.path / OUTCOME).unlink(missing_ok=True)
        self.create()

    def read_journal(self) -> bytes | None:
        """Read the journal where it is newest; None if there is no run."""
        return self.read(self.journal.name)

    def holds_run(self) -> bool:
        """Whether there is a run: its journal, or checkpoints whose journal is lost."""
        return self.read_journal() is not None or bool(self.checkpoints())

    def catch_up(self, journal: JournalFile) -> None:
        """Bring what was journaled into the journal, which this process holds. It is there."""

    def read(self, name: str) -> bytes | None:
        """Read one of the run's own files, such as `logs/rank_0.log`; None if it is not there."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write one of the run's own files where others find it."""
        write_atomically(self.path / name, data, by_way_of=self.staging)

    def publish(self, *, everything: bool = False) -> bool:
        """Put the journal, or the logs and all else too, where others find it. It is there."""
        return True

    def leave(self) -> None:
        """Remove what lies on this node for the time of the run only. Nothing does."""

    def is_on_this_node(self, run_id: str) -> bool:
        """Whether this node sees the run's journal, rather than none or that of another run."""
        try:
            with open(self.journal, "rb") as file:
                return any(run_id.encode() in line for line in file)
        except FileNotFoundError:
            return False

    def publish_log(self, rank: int) -> None:
        """Put a rank's log where others find it, from a node that is not the driver's."""

    # -- seen from a worker

    def new_stage(self, label: str) -> Path:
        """Make a new empty directory in the staging area, where a commit moves no byte."""
        return staging.new_stage(self.staging, label)

    def stages(self) -> list[Path]:
        """List what lies in the staging area on this node."""
        return list(self.staging.glob("*"))

    def is_staged(self, path: Path) -> bool:
        """Whether `path` lies directly in the staging area."""
        return path.parent == self.staging

    def persist(
        self, source: Path, files: Sequence[FileEntry], *, label: str, name: str, move: bool
    ) -> Part:
        """Put these files of a local directory where a commit can take them.

        Args:
            source: The directory that they are in.
            files: Which.
            label: Of the rank, for the name of the stage.
            name: Of the checkpoint.
            move: The source is given up.

        Raises:
            OSError: They cannot be written; the message has the path and the bytes.
        """
        stage = self.stage(source, files, label=label, name=name, move=move)
        return Part(stage, tuple(files))

    def stage(
        self, source: Path, files: Sequence[FileEntry], *, label: str, name: str, move: bool
    ) -> Path:
        """Put these files into a new directory of the staging area on this node; see `persist`."""
        own = staging.label_of_handed_over(label, name) if move else label
        target = self.new_stage(own)
        try:
            staging.fill(target, source, files, move=move)
        except OSError as error:
            total = in_bytes(sum(file.size for file in files))
            what = f"writing {total} of checkpoint {name} to {self.path}"
            raise explained(error, what) from error
        return target

    def replace_links(self, directory: Path) -> None:
        """Put copies in the place of the links in a directory of the run.

        Raises:
            OSError: One leads nowhere, or back; or there is no room.
        """
        staging.replace_links(directory, self.staging)

    def set_aside(self) -> None:
        """Keep what was handed over and did not become part of a checkpoint, and say where."""
        stages = staging.handed_over(self.staging)
        names = [each.name for each in self.checkpoints()] if stages else []
        staging.set_aside(stages, self.uncommitted, names)

    def give_up_uncommitted(self) -> Path:
        """Take away what was set aside, at once: what is set aside from now on stays.

        Gives the folder where it is to be deleted, if there was any.
        """
        grave = self.staging / f"deleted-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.uncommitted, grave)
        return grave

    def checkpoint(self, name: str) -> Checkpoint:
        """Give the checkpoint of this name."""
        return Checkpoint(self.path / name)

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """Give the name of a checkpoint that lies directly in the run; None for any other."""
        path = Path(checkpoint.path)
        inside = checkpoint.filesystem is None and is_same(path.parent, self.path)
        return path.name if inside and not path.name.startswith(".") else None

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
        """Make one checkpoint of the ranks' staged parts. Returns where it lies.

        `metadata` becomes the checkpoint's metadata file, unless the user saved one. `in_place`:
        the directory lies in the run already, under its name; see `manifest_in_place`.

        Raises:
            FileExistsError: A committed checkpoint has this name already.
            OSError: The filesystem refused; nothing is committed and earlier checkpoints are
                untouched.
        """
        fault_points.reached("commit.start")
        target = self.path / manifest.name
        if in_place:
            self._refuse_committed(manifest.name)
            merged = target
        else:
            self._make_way(target)
            merged = staging.merge(parts) or self.new_stage("empty")
            manifest = manifest.as_stored(merged)
        if metadata is not None and not (merged / METADATA).exists():
            (merged / METADATA).write_bytes(metadata)
        fault_points.reached("commit.merged")
        write_manifest(merged, manifest, durable=durable)
        fault_points.reached("commit.manifest")
        if not in_place:
            os.rename(merged, target)
        if durable:
            sync(self.path)
        fault_points.reached("commit.renamed")
        return target

    def manifest_in_place(self, manifest: Manifest) -> Manifest:
        """Give the manifest with whatever lies in the checkpoint's directory, links replaced."""
        self.replace_links(self.path / manifest.name)
        return manifest.holding(list_files(self.path / manifest.name))

    def _make_way(self, target: Path) -> None:
        if not target.exists():
            return
        self._refuse_committed(target.name)
        if target.name not in self.damaged():
            raise taken(target)
        os.rename(target, self.staging / f"replaced-{uuid.uuid4().hex[:12]}")

    def _refuse_committed(self, name: str) -> None:
        if self.is_intact(name):
            raise committed_already(self.place(name))

    def place(self, name: str) -> Path | Folder:
        """Where the checkpoint of this name lies."""
        return self.path / name

    def is_intact(self, name: str) -> bool:
        """Whether a checkpoint is committed and has every file with its size."""
        place = self.place(name)
        manifest = read_manifest(place)
        if manifest is None:
            return False
        try:
            check_files(place, manifest)
        except CheckpointError:
            return False
        return True

    def checkpoints(self) -> list[Manifest]:
        """List the committed checkpoints, oldest first. Their files are not checked."""
        found = {}
        for entry in os.scandir(self.path) if self.path.is_dir() else ():
            if entry.is_dir() and not entry.name.startswith("."):
                manifest = read_manifest(Path(entry.path))
                if manifest is not None:
                    found[entry.name] = manifest
        return under_their_names(found)

    def intact_checkpoints(self) -> list[Manifest]:
        """List the committed checkpoints that have every file with its size, oldest first."""
        return [each for each in self.checkpoints() if self.is_intact(each.name)]

    def damaged(self) -> list[str]:
        """List the names of directories that were made as checkpoints and are not intact."""
        return [
            entry.name
            for entry in os.scandir(self.path)
            if entry.is_dir() and self._was_made(entry.name) and not self.is_intact(entry.name)
        ]

    def _was_made(self, name: str) -> bool:
        """Whether Drawbar has made a checkpoint of this name: else it is a folder of the user's."""
        if holds_own(self.path / name):
            return True
        if not name.startswith("checkpoint_"):
            return False
        return name in committed_names(self.read_journal() or b"")

    def delete(self, name: str) -> None:
        """Delete a checkpoint: gone in one step, its bytes follow. A missing one is no error."""
        grave = self.staging / f"deleted-{uuid.uuid4().hex[:12]}"
        try:
            os.rename(self.path / name, grave)
        except FileNotFoundError:
            return
        remove_tree(grave)

    def write_checksums(self, name: str) -> None:
        """Hash every file of a checkpoint into its second file, which `verify()` reads."""
        directory = self.path / name
        manifest = read_manifest(directory)
        if manifest is None:
            return
        try:
            sums = {file.path: checksum(directory / file.path) for file in manifest.files}
            path, data = directory / CHECKSUMS, msgspec.json.encode(sums)
            write_atomically(path, data, by_way_of=self.staging)
        except FileNotFoundError:
            return  # retention deleted the checkpoint in the meantime

    def keep_validation(self, manifest: Manifest, *, durable: bool) -> None:
        """Write what came of a checkpoint's validation beside its manifest.

        Raises:
            OSError: It cannot be written; the checkpoint is as it was.
        """
        path = self.path / manifest.name / VALIDATION
        write_atomically(path, manifest.encode(), durable=durable, by_way_of=self.staging)


def taken(place: Path | Folder) -> FileExistsError:
    """Say that something of the user's has the name of a checkpoint."""
    return FileExistsError(
        f"{place} is there and is no checkpoint that Drawbar made; move it away, or give the "
        "checkpoint another checkpoint_dir_name"
    )


def default_name(index: int) -> str:
    """Name the checkpoint of report `index`, if the user does not."""
    return f"checkpoint_{index:06d}"
