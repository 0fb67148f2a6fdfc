"""The run directory and the commit protocol.

    <storage_path>/<name>/
        journal.jsonl             what happened, in order (_journal.py)
        trainer.pkl               what restore() needs
        logs/rank_N.log           every rank's full output
        checkpoint_000041/        a committed checkpoint: the user's files and the manifest
        .staging/                 whatever is not committed yet; swept at the next start
        .workers/                 how each worker process ended (_sentinel.py)

A checkpoint exists if and only if its manifest does. Ranks put their files below `.staging`; when
the last rank has, the controller merges them into one directory by renames, writes the manifest
into it, and renames that directory to its final name: one step that either happened or did not.
Deleting goes the same way back.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from drawbar.train import _faults, _files
from drawbar.train._checkpoint import Manifest, check_files, read_manifest, remove_tree
from drawbar.train._errors import CheckpointError
from drawbar.train._messages import FileEntry


@dataclass(frozen=True)
class Part:
    """One rank's share of a checkpoint: these files lie in this directory of the staging area."""

    directory: Path
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run, seen from the controller or from a worker."""

    path: Path

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

    def log(self, rank: int) -> Path:
        """File with one rank's full output."""
        return self.path / "logs" / f"rank_{rank}.log"

    def exit_report(self, hostname: str, pid: int) -> Path:
        """File that tells how a worker process ended."""
        return self.path / ".workers" / f"{hostname}-{pid}.json"

    def create(self) -> None:
        """Make the folders that a run needs."""
        for folder in (self.staging, self.path / "logs", self.path / ".workers"):
            folder.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove what earlier processes of this run left uncommitted or half deleted."""
        remove_tree(self.staging)
        remove_tree(self.path / ".workers")
        self.create()

    def new_stage(self, label: str) -> Path:
        """Make a new empty directory in the staging area, where a commit moves no byte."""
        path = self.staging / f"{label}-{uuid.uuid4().hex[:12]}"
        path.mkdir(parents=True)
        return path

    def is_staged(self, path: Path) -> bool:
        """Whether `path` lies directly in the staging area."""
        return path.parent == self.staging

    def commit(
        self,
        manifest: Manifest,
        parts: Sequence[Part],
        *,
        durable: bool,
        metadata: bytes | None = None,
    ) -> Path:
        """Make one checkpoint of the ranks' staged parts. Returns where it lies.

        `metadata` becomes the checkpoint's metadata file, unless the user saved one.

        Raises:
            FileExistsError: A committed checkpoint has this name already.
            OSError: The filesystem refused; nothing is committed and earlier checkpoints are
                untouched.
        """
        _faults.reached("commit.start")
        target = self.path / manifest.name
        self._make_way(target)
        merged = self._merge(parts)
        if metadata is not None and not (merged / _files.METADATA).exists():
            (merged / _files.METADATA).write_bytes(metadata)
        _faults.reached("commit.merged")
        _write_manifest(merged, manifest, durable=durable)
        _faults.reached("commit.manifest")
        os.rename(merged, target)
        if durable:
            _files.sync(self.path)
        _faults.reached("commit.renamed")
        return target

    def _merge(self, parts: Sequence[Part]) -> Path:
        """Bring all parts into one directory. A single part is that directory already."""
        if not parts:
            return self.new_stage("empty")
        merged = parts[0].directory
        wanted = {file.path for part in parts for file in part.files}
        for part in parts[1:]:
            _files.move_files(part.directory, merged, part.files)
            remove_tree(part.directory)
        for file in _files.list_files(merged):
            if file.path not in wanted:
                os.unlink(merged / file.path)
        return merged

    def _make_way(self, target: Path) -> None:
        if not target.exists():
            return
        if self.is_intact(target):
            raise FileExistsError(
                f"{target} is a committed checkpoint already; give each checkpoint its own "
                "checkpoint_dir_name"
            )
        os.rename(target, self.staging / f"replaced-{uuid.uuid4().hex[:12]}")

    @staticmethod
    def is_intact(directory: Path) -> bool:
        """Whether a checkpoint is committed and has every file with its size."""
        manifest = read_manifest(directory)
        if manifest is None:
            return False
        try:
            check_files(directory, manifest)
        except CheckpointError:
            return False
        return True

    def checkpoints(self) -> list[Manifest]:
        """List the committed checkpoints, oldest first. Their files are not checked."""
        found = []
        for entry in os.scandir(self.path):
            if entry.is_dir() and not entry.name.startswith("."):
                manifest = read_manifest(Path(entry.path))
                if manifest is not None:
                    found.append(msgspec.structs.replace(manifest, name=entry.name))
        return sorted(found, key=lambda manifest: (manifest.index, manifest.time))

    def intact_checkpoints(self) -> list[Manifest]:
        """List the committed checkpoints that have every file with its size, oldest first."""
        return [each for each in self.checkpoints() if self.is_intact(self.path / each.name)]

    def damaged(self) -> list[Path]:
        """List directories that look like checkpoints and are not intact."""
        return [
            Path(entry.path)
            for entry in os.scandir(self.path)
            if entry.is_dir()
            and (Path(entry.path) / _files.MANIFEST).exists() | entry.name.startswith("checkpoint_")
            and not self.is_intact(Path(entry.path))
        ]

    def delete(self, name: str) -> None:
        """Delete a checkpoint: gone in one step, its bytes follow. A missing one is no error."""
        grave = self.staging / f"deleted-{uuid.uuid4().hex[:12]}"
        try:
            os.rename(self.path / name, grave)
        except FileNotFoundError:
            return
        shutil.rmtree(grave, ignore_errors=True)

    def write_checksums(self, name: str) -> None:
        """Hash every file of a checkpoint into its second file, which `verify()` reads."""
        directory = self.path / name
        manifest = read_manifest(directory)
        if manifest is None:
            return
        try:
            sums = {file.path: _files.checksum(directory / file.path) for file in manifest.files}
            _files.write_atomically(directory / _files.CHECKSUMS, msgspec.json.encode(sums))
        except FileNotFoundError:
            return  # retention deleted the checkpoint in the meantime


def _write_manifest(directory: Path, manifest: Manifest, *, durable: bool) -> None:
    path = directory / _files.MANIFEST
    if durable:
        _files.sync_tree(directory)
    _files.write_atomically(path, manifest.encode(), durable=durable)
    if durable:
        _files.sync(directory)


def make_manifest(
    *,
    name: str,
    index: int,
    attempt: int,
    run_id: str,
    parts: Sequence[Part],
    world_size: int,
    metrics: dict[str, object],
    positions: dict[str, object],
) -> Manifest:
    """Describe a checkpoint of these parts, less the user's metadata file, which may change."""
    files = (file for part in parts for file in part.files if file.path != _files.METADATA)
    return Manifest(
        name=name,
        index=index,
        attempt=attempt,
        run_id=run_id,
        world_size=world_size,
        time=time.time(),
        files=tuple(sorted(files, key=lambda file: file.path)),
        metrics=metrics,
        positions=positions,
    )
