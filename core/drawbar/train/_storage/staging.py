"""The staging area: its folders are filled, merged, and emptied of links.

A folder of the staging area is Drawbar's and goes when its attempt is over, unless it holds what
the user has handed over: that is set aside then, since nobody else has those files any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from drawbar.train._storage import fault_points
from drawbar.train._storage import files as _files
from drawbar.train._storage.contents import (
    DirectoryContents,
    FileEntry,
    find_symlinks,
    scan_directory,
)
from drawbar.train._storage.retries import add_context
from drawbar.train._storage.sizes import format_exact_size

_logger = logging.getLogger("drawbar.train")

_MOVED_PREFIX = "handed-over."


@dataclass(frozen=True)
class StagedFiles:
    """One rank's share of a checkpoint: these files lie in this directory of the staging area.

    None: they lie where the checkpoint will be already.
    """

    directory: Path | None
    files: tuple[FileEntry, ...]
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AssignedFiles:
    """What one rank gives to a checkpoint, as it lies on the rank's node.

    Attributes:
        source: The directory that the files are in.
        files: Which.
        label: Of the rank, for the name of the stage.
        name: Of the checkpoint.
        move: The source is given up.
    """

    source_directory: Path
    files: Sequence[FileEntry]
    label: str
    checkpoint_name: str
    should_move: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class StagingArea:
    """The run's folder of everything that is not committed, on this node."""

    path: Path

    @property
    def preserved_path(self) -> Path:
        """Folder of what was handed over by `report()` and not committed before its attempt ended.

        The next commit empties it.
        """
        return self.path.parent / ".uncommitted"

    def make_directory(self, label: str) -> Path:
        """Make a new empty folder in the staging area, where a commit moves no byte."""
        # Never by the name of the checkpoint: an attempt that is given up may still be writing
        # there.
        path = self.path / f"{label}-{uuid.uuid4().hex[:12]}"
        path.mkdir(parents=True)
        return path

    def has_directory(self, path: Path) -> bool:
        """Whether `path` lies directly in the staging area."""
        return path.parent == self.path

    def list_directories(self) -> list[Path]:
        """List what lies in the staging area, but for files that are on their way elsewhere.

        Those come and go while a checkpoint is added to, whatever becomes of an attempt.
        """
        return list(self.path.glob("[!.]*"))

    def stage_files(self, share: AssignedFiles) -> Path:
        """Copy or move a rank's share into a new folder; if that fails the folder is gone.

        Raises:
            OSError: They cannot be written; the message has the path and the bytes.
        """
        kept_as = f"{_MOVED_PREFIX}{_make_moved_label(share.label, share.checkpoint_name)}"
        target = self.make_directory(kept_as if share.should_move else share.label)
        act = _files.move_files if share.should_move else _files.copy_files
        try:
            act(share.source_directory, target, share.files)
        # Also when it is interrupted: half a share must not look like one.
        except BaseException as error:
            _files.remove_tree(target)
            if not isinstance(error, OSError):
                raise
            what = (
                f"writing {format_exact_size(share.nbytes)} of checkpoint {share.checkpoint_name}"
            )
            raise add_context(error, f"{what} to {self.path.parent}") from error
        return target

    def stage_moved(self, share: AssignedFiles, *, attempt: int) -> Path:
        """Move a folder that was handed over here as a whole, also what came into it meanwhile.

        What only a copy can take is taken file by file, and what came meanwhile stays there.

        Raises:
            FileNotFoundError: Another rank of this node may have it; `taken_over` knows.
            OSError: It cannot be written; the message has the path and the bytes.
        """
        key = _make_source_key(share.source_directory, share.checkpoint_name, attempt)
        stage = (
            self.path
            / f"{_MOVED_PREFIX}{_make_moved_label(share.label, share.checkpoint_name)}-{key}"
        )
        fault_points.maybe_stop_at("persist.start")
        with hold_file_lock(self.path / "taking.lock"):
            # A rename would take links along, and what they lead to is not in the run.
            if not find_symlinks(share.source_directory) and _try_rename(
                share.source_directory, stage
            ):
                fault_points.maybe_stop_at("persist.half")
                _files.inherit_directory_mode(stage)
                return stage
            seen = _files.FileIdentities.capture(share.source_directory, share.files)
            copy = self.stage_files(share)
            stage = stage if _try_rename(copy, stage) else copy
            seen.remove_unchanged(was_moved=True)
        return stage

    def release_source(self, seen: _files.FileIdentities, *, given: bool) -> None:
        """Delete what was handed over and committed, after all that other ranks are deleting.

        A rank's `report()` then returns when nobody else deletes in a folder that they share: what
        it writes there next must not meet a peer that is in the middle of it.
        """
        with hold_file_lock(self.path / "letting_go.lock"):
            seen.remove_unchanged(was_moved=given)

    def find_moved(self, source: Path, name: str, *, attempt: int) -> Path | None:
        """Find where a rank of this node has taken a folder that others report too."""
        # Under the lock, or it would look in between a copy and the rename that names it.
        with hold_file_lock(self.path / "taking.lock"):
            pattern = f"{_MOVED_PREFIX}*-{_make_source_key(source, name, attempt)}"
            return next(self.path.glob(pattern), None)

    def scan_directory(self, directory: Path) -> DirectoryContents:
        """Look at a folder in which another rank may be putting copies in the place of links.

        Raises:
            OSError: A link leads nowhere, or back, and stays there.
        """
        try:
            return scan_directory(directory)
        except OSError:
            with hold_file_lock(self.path / "links.lock"):
                return scan_directory(directory)

    def replace_symlinks(self, directory: Path) -> None:
        """Put copies in the place of a folder's links; what they lead to stays as it is.

        Ranks that save into one folder do so one after another.

        Raises:
            OSError: One leads nowhere, or back; or there is no room.
        """
        if not find_symlinks(directory):
            return
        with hold_file_lock(self.path / "links.lock"):
            spare = self.make_directory("links")
            try:
                _files.replace_symlinks(directory, spare)
            finally:
                _files.remove_tree(spare)

    def move_to_trash(self, path: Path) -> Path:
        """Take a folder of the run away in one step. Gives where it is to be deleted, if it was."""
        trash = self.path / f"deleted-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, trash)
        return trash

    def list_moved(self) -> list[Path]:
        """List the stages that hold what was handed over."""
        return list(self.path.glob(f"{_MOVED_PREFIX}*"))

    def preserve_moved(self, committed: Collection[str]) -> None:
        """Move what was handed over into `uncommitted`, and say where it lies now.

        It takes the place of the same rank's for a checkpoint of this name. `committed` are the
        names of checkpoints that are, so that nothing is kept for them.
        """
        for stage in self.list_moved():
            label = stage.name.removeprefix(_MOVED_PREFIX).rpartition("-")[0]
            # A kill between the commit and the clean-up leaves both.
            if any(label == _make_moved_label(label.partition(".")[0], name) for name in committed):
                continue
            kept = self.preserved_path / label
            self.preserved_path.mkdir(exist_ok=True)
            _files.remove_tree(kept)
            os.rename(stage, kept)
            _logger.warning(
                "a checkpoint that was handed over is not committed; its files lie in %s until the "
                "next one is",
                kept,
            )


def _make_moved_label(label: str, name: str) -> str:
    """Name what a rank has handed over for a checkpoint; the name of a folder has limits."""
    return f"{label}.{os.fsencode(name)[:100].decode(errors='ignore')}"


def _make_source_key(source: Path, name: str, attempt: int) -> str:
    """Say in 12 letters what was handed over, where it lay, and for what."""
    place = os.path.join(os.path.realpath(source.absolute().parent), source.name)
    return hashlib.sha256(os.fsencode(f"{attempt} {name} {place}")).hexdigest()[:12]


def _try_rename(folder: Path, target: Path) -> bool:
    """Move a folder by one rename, if that is possible; what is there is not replaced."""
    try:
        os.rename(folder, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def merge_staged(parts: Sequence[StagedFiles]) -> Path | None:
    """Bring all parts into the folder of the first one, which then holds their files, no more.

    Several may lie in one folder. None: no part is in the staging area.
    """
    staged = [(part.directory, part.files) for part in parts if part.directory is not None]
    if not staged:
        return None
    merged = staged[0][0]
    others = [each for each in staged if each[0] != merged]
    # What a lower rank gives is taken from there, and what nobody has offered is in no manifest.
    _files.remove_unlisted(merged, {file.path for part in parts for file in part.files})
    for directory, files in others:
        _files.move_files(directory, merged, files)
    for directory, _ in others:
        _files.remove_tree(directory)
    return merged


@contextmanager
def hold_file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file among all processes and threads."""
    # Never deleted: who waits for the lock of a deleted file would hold one that nobody else sees.
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
