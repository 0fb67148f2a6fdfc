"""Staging area: stage, merge, and preserve files that are not committed.

A staging directory is deleted when its attempt ends, unless it has files that the user moved to
Drawbar. Those files exist nowhere else, so they are preserved.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from drawbar._process.threads import DaemonThreadPool
from drawbar._storage import fault_points
from drawbar._storage import files as _files
from drawbar._storage.contents import (
    DirectoryContents,
    FileEntry,
    find_symlinks,
    format_exact_size,
    scan_directory,
)
from drawbar._storage.retries import add_context

_logger = logging.getLogger("drawbar.train")

_MOVED_PREFIX = "handed-over."
_MERGE_THREADS = 16  # a rename on a network filesystem waits for its server


@dataclass(frozen=True)
class StagedFiles:
    """Files that one rank has staged for a checkpoint.

    Attributes:
        directory: Staging directory; None if the files are already where the checkpoint will be.
        files: The files.
        checksums: The xxh3 of each file by path, if the upload has computed them.
    """

    directory: Path | None
    files: tuple[FileEntry, ...]
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AssignedFiles:
    """Files that one rank contributes to a checkpoint, on the rank's node.

    Attributes:
        source_directory: Directory with the files.
        files: The files.
        label: Label of the rank, such as `rank_3`, for the name of the staging directory.
        checkpoint_name: Name of the checkpoint.
        should_move: Whether the files are moved, because the caller gives up the source directory.
        shared_directory: Name of the staging directory that all ranks share, "" if the rank has a
            separate one. No other rank contributes files of the same paths.
    """

    source_directory: Path
    files: Sequence[FileEntry]
    label: str
    checkpoint_name: str
    should_move: bool
    shared_directory: str = ""

    @property
    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class StagingArea:
    """Directory `.staging` of a run on this node, with one subdirectory for each contribution."""

    path: Path

    @property
    def preserved_path(self) -> Path:
        """Directory of moved files that were not committed before their attempt ended.

        The next commit empties it.
        """
        return self.path.parent / ".uncommitted"

    def make_directory(self, label: str) -> Path:
        """Create an empty staging directory, from which a commit can rename without copying."""
        # A unique name, not the name of the checkpoint: an abandoned attempt may still be writing
        # to its directory.
        path = self.path / f"{label}-{uuid.uuid4().hex[:12]}"
        path.mkdir(parents=True)
        return path

    def make_shared_directory(self, name: str) -> Path:
        """Return a staging directory to which all ranks add files; the first rank creates it."""
        path = self.path / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def has_directory(self, path: Path) -> bool:
        """Return True if `path` is a direct child of the staging area."""
        return path.parent == self.path

    def list_directories(self) -> list[Path]:
        """Return the staging directories, without hidden temporary files.

        Those are created and deleted while files are added to a checkpoint, in any attempt.
        """
        return list(self.path.glob("[!.]*"))

    def stage_files(self, assigned: AssignedFiles) -> Path:
        """Copy or move the files of a rank into a new or shared staging directory.

        If this fails, the files are deleted there.

        Raises:
            OSError: The files cannot be written; the message has the path and the size.
        """
        target = self._make_target(assigned)
        transfer = _files.move_files if assigned.should_move else _files.copy_files
        try:
            transfer(assigned.source_directory, target, assigned.files)
        # Also for KeyboardInterrupt: an incomplete directory must not look complete.
        except BaseException as error:
            if assigned.shared_directory:
                for file in assigned.files:
                    _files.remove_tree(target / file.path)
            else:
                _files.remove_tree(target)
            if not isinstance(error, OSError):
                raise
            size, name = format_exact_size(assigned.nbytes), assigned.checkpoint_name
            raise add_context(
                error, f"writing {size} of checkpoint {name} to {self.path.parent}"
            ) from error
        return target

    def _make_target(self, assigned: AssignedFiles) -> Path:
        if assigned.shared_directory:
            return self.make_shared_directory(assigned.shared_directory)
        if assigned.should_move:
            label = _make_moved_label(assigned.label, assigned.checkpoint_name)
            return self.make_directory(f"{_MOVED_PREFIX}{label}")
        return self.make_directory(assigned.label)

    def stage_moved(self, assigned: AssignedFiles, *, attempt: int) -> Path:
        """Move a whole directory by a rename, including files that were added after `report()`.

        If it cannot be renamed, the listed files are copied, and files added later stay there.

        Raises:
            FileNotFoundError: The directory does not exist. Another rank of this node may have
                moved it; see `find_moved`.
            OSError: The files cannot be written; the message has the path and the size.
        """
        key = _make_source_key(assigned.source_directory, assigned.checkpoint_name, attempt)
        staging_directory = (
            self.path
            / f"{_MOVED_PREFIX}{_make_moved_label(assigned.label, assigned.checkpoint_name)}-{key}"
        )
        fault_points.maybe_stop_at("persist.start")
        with hold_file_lock(self.path / "taking.lock"):
            # A rename would move the links, but their targets are outside the run.
            if not find_symlinks(assigned.source_directory) and _try_rename(
                assigned.source_directory, staging_directory
            ):
                fault_points.maybe_stop_at("persist.half")
                _files.inherit_directory_mode(staging_directory)
                return staging_directory
            identities = _files.FileIdentities.capture(assigned.source_directory, assigned.files)
            copy = self.stage_files(assigned)
            staging_directory = staging_directory if _try_rename(copy, staging_directory) else copy
            identities.remove_unchanged(was_moved=True)
        return staging_directory

    def release_source(self, identities: _files.FileIdentities, *, given: bool) -> None:
        """Delete the sources of committed files, after other ranks have finished deleting.

        When `report()` returns, no other rank is deleting in a shared directory. Files that a rank
        writes there next are therefore not affected by a peer that is still deleting.
        """
        with hold_file_lock(self.path / "letting_go.lock"):
            identities.remove_unchanged(was_moved=given)

    def find_moved(self, source: Path, name: str, *, attempt: int) -> Path | None:
        """Return the directory to which a rank of this node moved the source; None if none did."""
        # Under the lock, because stage_moved() copies first and renames to the final name later.
        with hold_file_lock(self.path / "taking.lock"):
            pattern = f"{_MOVED_PREFIX}*-{_make_source_key(source, name, attempt)}"
            return next(self.path.glob(pattern), None)

    def scan_directory(self, directory: Path) -> DirectoryContents:
        """Scan a directory in which another rank may be replacing links with copies.

        Raises:
            OSError: A link is broken or circular, and no rank is replacing it.
        """
        try:
            return scan_directory(directory)
        except OSError:
            with hold_file_lock(self.path / "links.lock"):
                return scan_directory(directory)

    def replace_symlinks(self, directory: Path) -> None:
        """Replace the links in a directory with copies of their targets.

        Ranks that save into the same directory do this one after another.

        Raises:
            OSError: A link is broken or circular, or the disk is full.
        """
        if not find_symlinks(directory):
            return
        with hold_file_lock(self.path / "links.lock"):
            scratch_directory = self.make_directory("links")
            try:
                _files.replace_symlinks(directory, scratch_directory)
            finally:
                _files.remove_tree(scratch_directory)

    def move_to_trash(self, path: Path) -> Path:
        """Move a directory of the run into the staging area, and return the path to delete."""
        trash = self.path / f"deleted-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, trash)
        return trash

    def list_moved(self) -> list[Path]:
        """Return the staging directories with moved files."""
        return list(self.path.glob(f"{_MOVED_PREFIX}*"))

    def preserve_moved(self, committed: Collection[str]) -> None:
        """Keep moved files that were not committed in `preserved_path`, and log where they are.

        They replace those that the same rank moved for an earlier checkpoint of the same name.

        Args:
            committed: Names of committed checkpoints, whose files are not preserved.
        """
        for staging_directory in self.list_moved():
            label = staging_directory.name.removeprefix(_MOVED_PREFIX).rpartition("-")[0]
            # After a kill between commit and clean-up, both exist.
            if any(label == _make_moved_label(label.partition(".")[0], name) for name in committed):
                continue
            preserved = self.preserved_path / label
            self.preserved_path.mkdir(exist_ok=True)
            _files.remove_tree(preserved)
            os.rename(staging_directory, preserved)
            _logger.warning(
                "A checkpoint was not committed. Its files are in %s and are deleted at the next "
                "commit; copy them to keep them.",
                preserved,
            )


def make_shared_name(attempt: int, report_index: int) -> str:
    """Return the name of the staging directory that the ranks share for one checkpoint.

    No other attempt uses it: an abandoned one may still be writing to its directory.
    """
    return f"attempt_{attempt}.report_{report_index}"


def _make_moved_label(label: str, name: str) -> str:
    """Return the label of a directory with moved files; file names have a maximum length."""
    return f"{label}.{os.fsencode(name)[:100].decode(errors='ignore')}"


def _make_source_key(source: Path, name: str, attempt: int) -> str:
    """Return a key of 12 hex digits for a source directory in a checkpoint and attempt."""
    source_path = os.path.join(os.path.realpath(source.absolute().parent), source.name)
    return hashlib.sha256(os.fsencode(f"{attempt} {name} {source_path}")).hexdigest()[:12]


def _try_rename(source: Path, target: Path) -> bool:
    """Rename a directory if possible, without replacing the target; return True on success."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def merge_staged(staged_files: Sequence[StagedFiles]) -> Path | None:
    """Move all files into the staging directory that most ranks share, and return it.

    Other directories are not deleted: the ranks delete their own after the commit, in parallel.
    Returns None if no files are in the staging area.
    """
    ranks = Counter(staged.directory for staged in staged_files if staged.directory is not None)
    if not ranks:
        return None
    merged = max(ranks, key=lambda directory: ranks[directory])  # the first one of equal ones
    # Delete files that are not in the manifest; move_files() replaces files of the same path.
    _files.remove_unlisted(merged, {file.path for staged in staged_files for file in staged.files})

    def move(staged: StagedFiles) -> None:
        if staged.directory is not None and staged.directory != merged:
            _files.move_files(staged.directory, merged, staged.files)

    if len(ranks) <= _MERGE_THREADS:
        for staged in staged_files:
            move(staged)
    else:
        with DaemonThreadPool(_MERGE_THREADS, "drawbar-merge") as pool:
            list(pool.map(move, staged_files))  # raises the first error
    for directory in ranks.keys() - {merged}:
        # Otherwise the files of a committed checkpoint would look like uncommitted ones.
        if directory.name.startswith(_MOVED_PREFIX):
            _files.remove_tree(directory)
    return merged


@contextmanager
def hold_file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock between processes and threads."""
    # Never deleted: a process that waits for a deleted file would get a lock that no other sees.
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
