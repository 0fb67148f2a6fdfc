"""Folders of the staging area: how they are filled, merged, and emptied of links.

A folder of the staging area is Drawbar's and goes when its attempt is over, unless it holds what
the user has handed over: that is set aside then, since nobody else has those files any more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from drawbar.train._storage import files as _files
from drawbar.train._storage.files import FileEntry

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


def new_stage(staging: Path, label: str) -> Path:
    """Make a new empty folder in the staging area."""
    path = staging / f"{label}-{uuid.uuid4().hex[:12]}"
    path.mkdir(parents=True)
    return path


def label_of_handed_over(label: str, name: str) -> str:
    """Give the label of a stage that holds what a rank has handed over for a checkpoint."""
    return f"{_HANDED_OVER}{_kept_as(label, name)}"


def _kept_as(label: str, name: str) -> str:
    return (
        f"{label}.{os.fsencode(name)[:100].decode(errors='ignore')}"  # a folder's name has limits
    )


def fill(stage: Path, source: Path, files: Sequence[FileEntry], *, move: bool) -> None:
    """Copy or move these files into a new stage; if that fails the stage is gone."""
    act = _files.move_files if move else _files.copy_files
    try:
        act(source, stage, files)
    except BaseException:
        _files.remove_tree(stage)
        raise


def merge(parts: Sequence[Part]) -> Path | None:
    """Bring all parts into the folder of the first one, which then holds their files, no more.

    Several may lie in one folder. None: no part is in the staging area.
    """
    staged = [(part.directory, part.files) for part in parts if part.directory is not None]
    if not staged:
        return None
    merged = staged[0][0]
    others = [each for each in staged if each[0] != merged]
    _files.keep_only(merged, {file.path for part in parts for file in part.files})
    for directory, files in others:
        _files.move_files(directory, merged, files)
    for directory, _ in others:
        _files.remove_tree(directory)
    return merged


def replace_links(directory: Path, staging: Path) -> None:
    """Put copies in the place of a folder's links; what they lead to stays as it is.

    Ranks that save into one folder do so one after another.
    """
    if not _files.find_links(directory):
        return
    with one_at_a_time(staging / "links.lock"):
        spare = new_stage(staging, "links")
        try:
            _files.replace_links(directory, spare)
        finally:
            _files.remove_tree(spare)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock file among all processes and threads."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def handed_over(staging: Path) -> list[Path]:
    """List the stages that hold what was handed over."""
    return list(staging.glob(f"{_HANDED_OVER}*"))


def set_aside(stages: Sequence[Path], target: Path, committed: Collection[str]) -> None:
    """Move what was handed over out of the staging area, and say where it lies now.

    Args:
        stages: As `handed_over` lists them.
        target: The folder that they come into, in the place of the same rank's for a checkpoint.
        committed: Names of checkpoints that are, so that nothing is kept for them.
    """
    for stage in stages:
        label = stage.name.removeprefix(_HANDED_OVER).rpartition("-")[0]
        if any(label == _kept_as(label.partition(".")[0], name) for name in committed):
            continue
        target.mkdir(exist_ok=True)
        _files.remove_tree(target / label)
        os.rename(stage, target / label)
        _logger.warning(
            "a checkpoint that was handed over is not committed; its files lie in %s until the "
            "next one is",
            target / label,
        )
