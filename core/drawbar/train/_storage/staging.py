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
from drawbar.train._storage.contents import Contents, FileEntry, find_links, look_into
from drawbar.train._storage.retries import explained
from drawbar.train._storage.sizes import in_bytes

_logger = logging.getLogger("drawbar.train")

_HANDED_OVER = "handed-over."


@dataclass(frozen=True)
class Part:
    """One rank's share of a checkpoint: these files lie in this directory of the staging area.

    None: they lie where the checkpoint will be already.
    """

    directory: Path | None
    files: tuple[FileEntry, ...]
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """What one rank gives to a checkpoint, as it lies on the rank's node.

    Attributes:
        source: The directory that the files are in.
        files: Which.
        label: Of the rank, for the name of the stage.
        name: Of the checkpoint.
        move: The source is given up.
    """

    source: Path
    files: Sequence[FileEntry]
    label: str
    name: str
    move: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class StagingArea:
    """The run's folder of everything that is not committed, on this node."""

    path: Path

    @property
    def uncommitted(self) -> Path:
        """Folder of what was handed over by `report()` and not committed before its attempt ended.

        The next commit empties it.
        """
        return self.path.parent / ".uncommitted"

    def new(self, label: str) -> Path:
        """Make a new empty folder in the staging area, where a commit moves no byte."""
        # Never by the name of the checkpoint: an attempt that is given up may still be writing
        # there.
        path = self.path / f"{label}-{uuid.uuid4().hex[:12]}"
        path.mkdir(parents=True)
        return path

    def holds(self, path: Path) -> bool:
        """Whether `path` lies directly in the staging area."""
        return path.parent == self.path

    def stages(self) -> list[Path]:
        """List what lies in the staging area, but for files that are on their way elsewhere.

        Those come and go while a checkpoint is added to, whatever becomes of an attempt.
        """
        return list(self.path.glob("[!.]*"))

    def put(self, share: Share) -> Path:
        """Copy or move a rank's share into a new folder; if that fails the folder is gone.

        Raises:
            OSError: They cannot be written; the message has the path and the bytes.
        """
        kept_as = f"{_HANDED_OVER}{_kept_as(share.label, share.name)}"
        target = self.new(kept_as if share.move else share.label)
        act = _files.move_files if share.move else _files.copy_files
        try:
            act(share.source, target, share.files)
        # Also when it is interrupted: half a share must not look like one.
        except BaseException as error:
            _files.remove_tree(target)
            if not isinstance(error, OSError):
                raise
            what = f"writing {in_bytes(share.nbytes)} of checkpoint {share.name}"
            raise explained(error, f"{what} to {self.path.parent}") from error
        return target

    def take_over(self, share: Share, *, attempt: int) -> Path:
        """Move a folder that was handed over here as a whole, also what came into it meanwhile.

        What only a copy can take is taken file by file, and what came meanwhile stays there.

        Raises:
            FileNotFoundError: Another rank of this node may have it; `taken_over` knows.
            OSError: It cannot be written; the message has the path and the bytes.
        """
        key = _key(share.source, share.name, attempt)
        stage = self.path / f"{_HANDED_OVER}{_kept_as(share.label, share.name)}-{key}"
        fault_points.reached("persist.start")
        with one_at_a_time(self.path / "taking.lock"):
            # A rename would take links along, and what they lead to is not in the run.
            if not find_links(share.source) and _moved(share.source, stage):
                fault_points.reached("persist.half")
                _files.take_mode_of_folder(stage)
                return stage
            seen = _files.SeenFiles.of(share.source, share.files)
            copy = self.put(share)
            stage = stage if _moved(copy, stage) else copy
            seen.remove(given=True)
        return stage

    def let_go(self, seen: _files.SeenFiles, *, given: bool) -> None:
        """Delete what was handed over and committed, after all that other ranks are deleting.

        A rank's `report()` then returns when nobody else deletes in a folder that they share: what
        it writes there next must not meet a peer that is in the middle of it.
        """
        with one_at_a_time(self.path / "letting_go.lock"):
            seen.remove(given=given)

    def taken_over(self, source: Path, name: str, *, attempt: int) -> Path | None:
        """Find where a rank of this node has taken a folder that others report too."""
        # Under the lock, or it would look in between a copy and the rename that names it.
        with one_at_a_time(self.path / "taking.lock"):
            pattern = f"{_HANDED_OVER}*-{_key(source, name, attempt)}"
            return next(self.path.glob(pattern), None)

    def look_into(self, directory: Path) -> Contents:
        """Look at a folder in which another rank may be putting copies in the place of links.

        Raises:
            OSError: A link leads nowhere, or back, and stays there.
        """
        try:
            return look_into(directory)
        except OSError:
            with one_at_a_time(self.path / "links.lock"):
                return look_into(directory)

    def replace_links(self, directory: Path) -> None:
        """Put copies in the place of a folder's links; what they lead to stays as it is.

        Ranks that save into one folder do so one after another.

        Raises:
            OSError: One leads nowhere, or back; or there is no room.
        """
        if not find_links(directory):
            return
        with one_at_a_time(self.path / "links.lock"):
            spare = self.new("links")
            try:
                _files.replace_links(directory, spare)
            finally:
                _files.remove_tree(spare)

    def bury(self, path: Path) -> Path:
        """Take a folder of the run away in one step. Gives where it is to be deleted, if it was."""
        grave = self.path / f"deleted-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, grave)
        return grave

    def handed_over(self) -> list[Path]:
        """List the stages that hold what was handed over."""
        return list(self.path.glob(f"{_HANDED_OVER}*"))

    def set_aside(self, committed: Collection[str]) -> None:
        """Move what was handed over into `uncommitted`, and say where it lies now.

        It takes the place of the same rank's for a checkpoint of this name. `committed` are the
        names of checkpoints that are, so that nothing is kept for them.
        """
        for stage in self.handed_over():
            label = stage.name.removeprefix(_HANDED_OVER).rpartition("-")[0]
            # A kill between the commit and the clean-up leaves both.
            if any(label == _kept_as(label.partition(".")[0], name) for name in committed):
                continue
            kept = self.uncommitted / label
            self.uncommitted.mkdir(exist_ok=True)
            _files.remove_tree(kept)
            os.rename(stage, kept)
            _logger.warning(
                "a checkpoint that was handed over is not committed; its files lie in %s until the "
                "next one is",
                kept,
            )


def _kept_as(label: str, name: str) -> str:
    """Name what a rank has handed over for a checkpoint; the name of a folder has limits."""
    return f"{label}.{os.fsencode(name)[:100].decode(errors='ignore')}"


def _key(source: Path, name: str, attempt: int) -> str:
    """Say in 12 letters what was handed over, where it lay, and for what."""
    place = os.path.join(os.path.realpath(source.absolute().parent), source.name)
    return hashlib.sha256(os.fsencode(f"{attempt} {name} {place}")).hexdigest()[:12]


def _moved(folder: Path, target: Path) -> bool:
    """Move a folder by one rename, if that is possible; what is there is not replaced."""
    try:
        os.rename(folder, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def merge(parts: Sequence[Part]) -> Path | None:
    """Bring all parts into the folder of the first one, which then holds their files, no more.

    Several may lie in one folder. None: no part is in the staging area.
    """
    staged = [(part.directory, part.files) for part in parts if part.directory is not None]
    if not staged:
        return None
    merged = staged[0][0]
    others = [each for each in staged if each[0] != merged]
    # What a lower rank gives is taken from there, and what nobody has offered is in no manifest.
    _files.keep_only(merged, {file.path for part in parts for file in part.files})
    for directory, files in others:
        _files.move_files(directory, merged, files)
    for directory, _ in others:
        _files.remove_tree(directory)
    return merged


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock file among all processes and threads."""
    # Never deleted: who waits for the lock of a deleted file would hold one that nobody else sees.
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
