"""List the files of a checkpoint directory, validate paths in it, and format sizes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from drawbar._base.wording import format_size
from drawbar._process.errors import CheckpointError

# Matches a path with NUL, or with a part that is "", ".", or "..". An absolute path begins with "".
_ESCAPING_PATH = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\0")


def check_relative_path(path: str) -> str:
    """Check that a path which this process did not create cannot lead out of its directory.

    Args:
        path: Path with "/" as the separator, for example from a manifest or a storage listing.

    Returns:
        The path.

    Raises:
        CheckpointError: The path is absolute or empty, or has an empty part, "..", ".", or NUL.
    """
    if _ESCAPING_PATH.search(path):
        raise CheckpointError(
            f"{path!r} is not a valid path of a file in a checkpoint. A valid path is relative and "
            "has no empty part, '.', or '..'."
        )
    return path


def is_external(name: str) -> bool:
    """Return True if the name of a checkpoint is an absolute path or a URI.

    Other names are relative paths in the run directory.
    """
    return name.startswith("/") or "://" in name


def check_checkpoint_name(name: str) -> str:
    """Check the name of a checkpoint that was read from a file, such as the journal.

    Returns:
        The name.

    Raises:
        CheckpointError: The name is neither an absolute path or URI nor a valid relative path.
    """
    return name if is_external(name) else check_relative_path(name)


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint: its relative path, with "/" as the separator, and its size.

    Raises:
        CheckpointError: The path refers to a file outside the checkpoint.
    """

    path: str
    size: int

    def __post_init__(self) -> None:
        check_relative_path(self.path)


# Files of Drawbar in a checkpoint. They are not part of the user's files.
MANIFEST_FILE = ".drawbar.json"
CHECKSUMS_FILE = ".drawbar-checksums.json"
VALIDATION_FILE = ".drawbar-validation.json"
PENDING_MARKER = ".drawbar-pending"
# Drawbar writes it too, but it counts as a user's file. Manifests do not list it.
METADATA_FILE = ".metadata.json"
_TEMPORARY_NAME = re.compile(r"\.drawbar-[^/]+\.\d+\.tmp")
_RESERVED_NAMES = re.compile(
    rf"\.drawbar(-checksums|-validation)?\.json|\.drawbar-pending|{_TEMPORARY_NAME.pattern}"
)


@dataclass(frozen=True)
class DirectoryContents:
    """Files and links below a directory.

    Attributes:
        files: All files except Drawbar's, sorted by path.
        symlinks: Relative paths of symbolic links; "" if the directory is a link itself.
        reserved_files: Names of Drawbar's files directly in the directory.
    """

    files: tuple[FileEntry, ...]
    symlinks: frozenset[str]
    reserved_files: tuple[str, ...]


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Return every file below `directory` except Drawbar's; see `scan_directory`."""
    return scan_directory(directory).files


def scan_directory(directory: Path) -> DirectoryContents:
    """Return all files and symbolic links below `directory`.

    Symbolic links are followed. Empty directories are not listed.

    Raises:
        FileNotFoundError, NotADirectoryError: `directory` does not exist, or is a file.
        OSError: An entry is neither a file nor a directory, or a link is broken or circular.
    """
    files, reserved = [], []
    links = {""} if os.path.islink(directory) else set()
    # Not os.walk(followlinks=True), which never ends if there is a circular link.
    stack: list[tuple[str, tuple[str, ...]]] = [("", (f"{directory}",))]
    while stack:
        parent, ancestors = stack.pop()
        with os.scandir(ancestors[-1]) as entries:
            for entry in entries:
                path = f"{parent}/{entry.name}" if parent else entry.name
                if is_link := entry.is_symlink():
                    links.add(path)
                if is_reserved(path):
                    reserved.append(path)
                elif entry.is_dir():
                    if is_link:
                        _check_no_cycle(entry.path, ancestors)
                    stack.append((path, (*ancestors, entry.path)))
                elif not entry.is_file():
                    raise OSError(errno.EINVAL, _describe_unsupported(entry.path), entry.path)
                else:
                    files.append(FileEntry(path, entry.stat().st_size))
    files.sort(key=lambda file: file.path)
    return DirectoryContents(tuple(files), frozenset(links), tuple(sorted(reserved)))


def _describe_unsupported(path: str) -> str:
    if not os.path.exists(path):
        target = os.readlink(path)
        return f"cannot be saved: it is a symbolic link to {target}, which does not exist"
    return "cannot be saved: it is neither a file nor a directory"


def _check_no_cycle(link: str, ancestors: tuple[str, ...]) -> None:
    """Check that a link to a directory does not lead back to a directory that contains it."""
    real = os.path.realpath(link)
    if any(os.path.realpath(ancestor) == real for ancestor in ancestors):
        reason = f"cannot be saved: it is a symbolic link back to {real}"
        raise OSError(errno.ELOOP, reason, link)


def is_reserved(path: str) -> bool:
    """Return True if a relative path in a checkpoint is the name of a Drawbar file."""
    return path.startswith(".drawbar") and _RESERVED_NAMES.fullmatch(path) is not None


def is_temporary(path: str) -> bool:
    """Return True if a path has the name of a file that Drawbar was writing when it was killed."""
    return _TEMPORARY_NAME.fullmatch(path.rpartition("/")[2]) is not None


def has_reserved_files(directory: Path) -> bool:
    """Return True if a directory has a Drawbar file, so that Drawbar created the directory."""
    return any(map(is_reserved, os.listdir(directory)))


def find_symlinks(directory: Path) -> set[str]:
    """Return the relative paths of symbolic links below `directory`; "" if it is a link itself.

    Links are not followed.
    """
    if directory.is_symlink():
        return {""}
    return {path for path, entry in walk_entries(directory) if entry.is_symlink()}


def walk_entries(directory: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every file and link below `directory` with its path, without following links."""
    stack = [""]
    while stack:
        parent = stack.pop()
        with os.scandir(f"{directory}/{parent}") as entries:
            for entry in entries:
                path = f"{parent}/{entry.name}" if parent else entry.name
                if entry.is_dir(follow_symlinks=False):
                    stack.append(path)
                else:
                    yield path, entry


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Return True for a directory or a link to one; False for a circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def has_symlink_in_path(path: str, links: set[str]) -> bool:
    """Return True if a file or one of its parents is one of these links."""
    return "" in links or path in links or any(parent in links for parent in list_parents(path))


def list_parents(path: str) -> list[str]:
    """Return the parent directories of a file, as relative paths."""
    return [str(parent) for parent in PurePosixPath(path).parents[:-1]]


def format_exact_size(nbytes: int) -> str:
    """Return a size with a suitable unit and the exact number of bytes."""
    return f"{nbytes} bytes" if nbytes < 1000 else f"{format_size(nbytes)} ({nbytes} bytes)"
