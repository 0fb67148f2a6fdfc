"""What lies below a directory: a checkpoint's files, the links among them, Drawbar's own."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from drawbar.train._errors import CheckpointError

_ESCAPING_PATH = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\0")


def check_relative_path(path: str) -> str:
    """Check that a path out of data, with "/" between folders, leads to something below a folder.

    Raises:
        CheckpointError: It is absolute, empty, or has an empty part, "..", "." or NUL in it.
    """
    if _ESCAPING_PATH.search(path):
        raise CheckpointError(
            f"{path!r} is no path of a file in a checkpoint: it would lead out of it, or nowhere. "
            "What lists it is damaged"
        )
    return path


def is_external(name: str) -> bool:
    """Whether a checkpoint's name is the address of a place outside the run's directory.

    Any other is the path of a folder in there.
    """
    return name.startswith("/") or "://" in name


def check_checkpoint_name(name: str) -> str:
    """Check a checkpoint's name out of data.

    Raises:
        CheckpointError: It is neither an address nor the path of a folder in the run.
    """
    return name if is_external(name) else check_relative_path(name)


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint: its path in it, with "/" between folders, and its bytes.

    Raises:
        CheckpointError: The path leads out of the checkpoint, wherever it was read.
    """

    path: str
    size: int

    def __post_init__(self) -> None:
        check_relative_path(self.path)


# Drawbar's own files in a checkpoint. They are not part of what the user saved.
MANIFEST_FILE = ".drawbar.json"
CHECKSUMS_FILE = ".drawbar-checksums.json"
VALIDATION_FILE = ".drawbar-validation.json"
PENDING_MARKER = ".drawbar-pending"
METADATA_FILE = ".metadata.json"
_RESERVED_NAMES = re.compile(
    r"\.drawbar(-checksums|-validation)?\.json|\.drawbar-pending|\.drawbar-.+\.\d+\.tmp"
)


@dataclass(frozen=True)
class DirectoryContents:
    """What lies below a directory.

    Attributes:
        files: Every file but Drawbar's own, sorted by path.
        links: The symbolic links that lead there, as paths; "" if the directory is one itself.
        own: What has the name of one of Drawbar's own files, directly in it.
    """

    files: tuple[FileEntry, ...]
    symlinks: frozenset[str]
    reserved_files: tuple[str, ...]


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """List every file below `directory`; see `scan_directory`."""
    return scan_directory(directory).files


def scan_directory(directory: Path) -> DirectoryContents:
    """Look at everything below `directory`, once.

    Symbolic links are followed. Empty folders are not listed.

    Raises:
        FileNotFoundError, NotADirectoryError: `directory` is not there, or is a file.
        OSError: Something in it is neither a file nor a folder, leads nowhere, or leads back.
    """
    files, own = [], []
    links = {""} if os.path.islink(directory) else set()
    # Not `os.walk`: it goes round in circles where a link leads back, and does not say so.
    stack: list[tuple[str, tuple[str, ...]]] = [("", (f"{directory}",))]
    while stack:
        folder, leads_through = stack.pop()
        with os.scandir(leads_through[-1]) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if is_link := entry.is_symlink():
                    links.add(path)
                if is_reserved(path):
                    own.append(path)
                elif entry.is_dir():
                    if is_link:
                        _check_no_cycle(entry.path, leads_through)
                    stack.append((path, (*leads_through, entry.path)))
                elif not entry.is_file():
                    raise OSError(errno.EINVAL, _describe_unsupported(entry.path), entry.path)
                else:
                    files.append(FileEntry(path, entry.stat().st_size))
    files.sort(key=lambda file: file.path)
    return DirectoryContents(tuple(files), frozenset(links), tuple(sorted(own)))


def _describe_unsupported(path: str) -> str:
    where = f" to {os.readlink(path)}, where nothing is" if not os.path.exists(path) else ""
    return f"it is no file, no folder and no link to one{where}, so it cannot be saved"


def _check_no_cycle(link: str, leads_through: tuple[str, ...]) -> None:
    """Check that a link to a folder leads to none of those that have led to it."""
    real = os.path.realpath(link)
    if any(os.path.realpath(folder) == real for folder in leads_through):
        raise OSError(errno.ELOOP, f"it is a symbolic link back to {real}", link)


def is_reserved(path: str) -> bool:
    """Whether a path in a checkpoint is that of a file of Drawbar's."""
    return path.startswith(".drawbar") and _RESERVED_NAMES.fullmatch(path) is not None


def has_reserved_files(directory: Path) -> bool:
    """Whether a directory holds a file of Drawbar's, so that Drawbar made it."""
    return any(map(is_reserved, os.listdir(directory)))


def find_symlinks(directory: Path) -> set[str]:
    """Find the symbolic links below `directory`, as paths in it; "" if it is one itself.

    None is followed.
    """
    if directory.is_symlink():
        return {""}
    return {path for path, entry in walk_entries(directory) if entry.is_symlink()}


def walk_entries(directory: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Give everything below `directory` but folders, with its path; no link is followed."""
    stack = [""]
    while stack:
        folder = stack.pop()
        with os.scandir(f"{directory}/{folder}") as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    stack.append(path)
                else:
                    yield path, entry


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether this is a folder, or a link to one; a link that leads back to itself is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_behind_symlink(path: str, links: set[str]) -> bool:
    """Whether the way to a file, or the file itself, is one of these links."""
    return "" in links or path in links or any(way in links for way in list_parents(path))


def list_parents(path: str) -> list[str]:
    """List the folders on the way to a file."""
    return [str(way) for way in PurePosixPath(path).parents[:-1]]
