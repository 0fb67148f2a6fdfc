"""Copy, move, fsync, and delete files on a local filesystem."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from drawbar._process.threads import DaemonThreadPool
from drawbar._storage import fault_points
from drawbar._storage.contents import (
    FileEntry,
    find_symlinks,
    format_exact_size,
    has_symlink_in_path,
    list_files,
    list_parents,
    walk_entries,
)
from drawbar._storage.retries import add_context

_COPY_THREADS = 8
_SMALL_COPY_BYTES = 1024 * 1024  # copying this takes less time than starting threads
_COPY_CHUNK_BYTES = 64 * 1024 * 1024
# Errors of copy_file_range() for files that can be copied in another way.
_NO_KERNEL_COPY_ERRNOS = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY}


def copy_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Copy files in several threads.

    If the filesystem supports `copy_file_range`, the kernel copies the data. Filesystems with
    reflinks, such as XFS and Btrfs, then share the blocks instead of copying them.
    """
    fault_points.maybe_stop_at("persist.start")
    _copy(source, target, files)


def _make_directories(target: Path, files: Sequence[FileEntry]) -> None:
    """Create the parent directories of these files, each once."""
    for parent in {os.path.dirname(f"{target}/{file.path}") for file in files}:
        if not os.path.isdir(parent):
            os.makedirs(parent, exist_ok=True)


def move_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Move files by renaming, or by copying if the target is on another filesystem.

    A file that is a symbolic link, or is in a linked directory, is copied. Copied files remain in
    `source`, which the caller removes. After an `OSError`, `source` contains all files again.
    """
    fault_points.maybe_stop_at("persist.start")
    links = find_symlinks(source)
    to_copy = [file for file in files if has_symlink_in_path(file.path, links)] if links else []
    _make_directories(target, files)
    _copy(source, target, to_copy)
    copied_paths = {file.path for file in to_copy}
    to_move = [file for file in files if file.path not in copied_paths]
    moved = []
    try:
        for index, file in enumerate(to_move):
            if index == (len(to_move) + 1) // 2:
                fault_points.maybe_stop_at("persist.half")
            if _rename_or_copy(f"{source}/{file.path}", f"{target}/{file.path}"):
                moved.append(file)
    except OSError:
        # Move them back, so that a retry finds all files in one directory.
        for file in moved:
            os.rename(target / file.path, source / file.path)
        raise


def _rename_or_copy(source: str, target: str) -> bool:
    """Rename or copy a file; return True if it was renamed, so that the source no longer exists."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_file(source, target)
        return False
    return True


def replace_symlinks(directory: Path, scratch_directory: Path) -> None:
    """Replace the symbolic links below `directory` with copies of their targets.

    Args:
        directory: Directory that is not a link itself.
        scratch_directory: Empty directory on the same filesystem, in which copies are made.
    """
    links = find_symlinks(directory)
    to_copy = [file for file in list_files(directory) if has_symlink_in_path(file.path, links)]
    _copy(directory, scratch_directory, to_copy)
    for link in links:
        if (scratch_directory / link).is_dir():
            # A directory can be renamed onto an empty directory, but not onto a link.
            os.unlink(directory / link)
            os.rename(scratch_directory / link, directory / link)
        elif (scratch_directory / link).exists():
            os.replace(scratch_directory / link, directory / link)
        else:
            os.unlink(directory / link)  # a link to an empty directory: nothing was copied


def remove_unlisted(directory: Path, listed_paths: Container[str]) -> None:
    """Delete every file below `directory` except `listed_paths`, and every symbolic link."""
    for path, entry in list(walk_entries(directory)):
        if path not in listed_paths or entry.is_symlink():
            os.unlink(entry.path)


def _copy(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Copy files and create their parent directories."""
    _make_directories(target, files)

    def copy(file: FileEntry) -> None:
        _copy_file(f"{source}/{file.path}", f"{target}/{file.path}")

    total = sum(file.size for file in files)
    if len(files) <= 1 or (len(files) <= _COPY_THREADS and total <= _SMALL_COPY_BYTES):
        for count, file in enumerate(files):
            if count == 1:
                fault_points.maybe_stop_at("persist.half")
            copy(file)
        return
    with DaemonThreadPool(_COPY_THREADS, "drawbar-copy") as pool:
        for count, _ in enumerate(pool.map(copy, files)):
            if count == 0:
                fault_points.maybe_stop_at("persist.half")


def _copy_file(source: str, target: str) -> None:
    try:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            if not _copy_in_kernel(reader.fileno(), writer.fileno()):
                # The kernel may have copied some chunks before it refused one.
                reader.seek(0)
                writer.seek(0)
                shutil.copyfileobj(reader, writer, _COPY_CHUNK_BYTES)
            # Keep the mode, so that a script saved with the model stays executable.
            os.fchmod(writer.fileno(), stat.S_IMODE(os.fstat(reader.fileno()).st_mode))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            # On a full disk, the partial file takes space that the run's journal needs.
            os.unlink(target)
        raise


def _copy_in_kernel(reader: int, writer: int) -> bool:
    """Copy between file descriptors; return False if the filesystem does not support this."""
    if not hasattr(os, "copy_file_range"):
        return False
    try:
        while os.copy_file_range(reader, writer, _COPY_CHUNK_BYTES):
            fault_points.maybe_stop_at("persist.half")
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY_ERRNOS:
            raise
        return False
    return True


def is_current_file(path: Path, descriptor: int) -> bool:
    """Return True if an open file is still the file at this path, neither deleted nor replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


NOT_A_FILE_ERRNOS = frozenset({errno.EISDIR, errno.EINVAL, errno.ELOOP})
"""Errors by which `open_regular_file` reports that the path exists, but is not a regular file."""


def read_regular_file(path: Path, start: int = 0, size: int | None = None) -> bytes:
    """Read a regular file from an offset, at most `size` bytes; see `open_regular_file`."""
    with open_regular_file(path) as file:
        file.seek(start)
        return file.read(size)


def open_regular_file(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Other types of files are an error: reading a FIFO, for example, could block forever.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        reason = "is a symbolic link that leads back to itself"
        raise OSError(errno.ELOOP, reason, str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", str(path))
    if not stat.S_ISREG(mode):
        reason = "is a FIFO, socket, or device, not a file"
        raise OSError(errno.EINVAL, reason, str(path))
    return open(path, "rb")


def fsync_tree(directory: Path) -> None:
    """Call fsync for every file and directory below `directory`."""
    for root, _, names in os.walk(directory):
        for name in names:
            fsync_path(Path(root) / name)
        fsync_path(Path(root))


def fsync_path(path: Path) -> None:
    """Call fsync for one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path,
    data: bytes | Iterable[bytes],
    *,
    durable: bool = False,
    temp_directory: Path | None = None,
) -> None:
    """Write a file atomically, with a temporary file and a rename.

    Args:
        path: File to write.
        data: New content, complete or in chunks.
        durable: Whether the file must be on disk when this returns.
        temp_directory: Directory for the temporary file, on the same filesystem. Default: the
            directory of `path`. Set it if another process may copy that directory meanwhile, since
            the copy fails if the temporary file disappears.

    Raises:
        OSError: The file cannot be written; the message has the path and the size.
    """
    # Include the directory's name, since several directories may use one `temp_directory`. Truncate
    # it, since file names have a maximum length.
    directory_name = os.fsencode(path.parent.name)[-100:].decode(errors="ignore")
    name = f".drawbar-{directory_name}-{path.name}.{os.getpid()}.tmp"
    temporary = (temp_directory or path.parent) / name
    nbytes = 0
    try:
        with open(temporary, "wb") as file:
            for chunk in [data] if isinstance(data, bytes) else data:
                nbytes += len(chunk)
                file.write(chunk)
        if durable:
            fsync_path(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise add_context(error, f"writing {format_exact_size(nbytes)} to {path}") from error


def inherit_directory_mode(path: Path) -> None:
    """Copy the permissions of the parent directory to a file or directory in it.

    In a private directory, or one that is shared with a group, new files are then accessible to the
    same users as the directory, independently of the umask of this process. Nothing changes if the
    parent is world-writable, such as /tmp, or if the file belongs to another user.
    """
    parent_mode, mode = os.stat(path.parent).st_mode, os.stat(path).st_mode
    if not parent_mode & 0o002:
        allowed = 0o777 if stat.S_ISDIR(mode) else 0o666
        with contextlib.suppress(PermissionError):
            os.chmod(path, (mode & 0o7000) | (parent_mode & allowed))


def compute_tree_size(path: Path) -> int:
    """Return the total size of all regular files below a directory. Links are not followed."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # deleted in the meantime
                status = os.lstat(f"{root}/{name}")
                if stat.S_ISREG(status.st_mode):
                    total += status.st_size
    return total


def has_open_files(directory: Path) -> bool:
    """Return True if a process has a file in a directory open, or its working directory is in it.

    Processes that this user may not inspect are ignored. Always False without /proc.
    """
    prefix = f"{os.path.realpath(directory)}/"
    with contextlib.suppress(OSError):
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                opened = [process / "cwd", *(process / "fd").iterdir()]
                if any(f"{_read_link(link)}/".startswith(prefix) for link in opened):
                    return True
    return False


def _read_link(link: Path) -> str:
    with contextlib.suppress(OSError):  # closed in the meantime
        return os.readlink(link)
    return ""


def remove_tree(path: Path) -> None:
    """Delete a directory tree, file, or link, and ignore missing files.

    The target of a link is not deleted.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:  # it is a directory
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class FileIdentities:
    """Identities of the files in a directory, by which unchanged files are recognized later.

    An identity consists of the device, inode, mtime, and size. Other ranks may share the directory
    and write new files with the same names, which must not be deleted.

    Attributes:
        directory: Directory of the files.
        identities: Identity of each file and link by path, without files in linked directories.
            If the directory itself is a link, its path is "".
    """

    directory: Path
    identities: Mapping[str, tuple[int, ...]]

    @classmethod
    def capture(cls, directory: Path, files: Sequence[FileEntry]) -> FileIdentities:
        """Record the identities of these files.

        Raises:
            FileNotFoundError: A file does not exist.
        """
        links: set[str] = {""} if directory.is_symlink() else set()
        parents = {parent for file in files for parent in list_parents(file.path)}
        for parent in sorted(parents):  # outer directories first
            if not has_symlink_in_path(parent, links) and os.path.islink(directory / parent):
                links.add(parent)
        direct_paths = [file.path for file in files if not has_symlink_in_path(file.path, links)]
        return cls(
            directory, {path: _get_identity(directory, path) for path in (*links, *direct_paths)}
        )

    def remove_unchanged(self, *, was_moved: bool) -> None:
        """Delete the files that have not changed, and the directories that are empty afterwards.

        Links are deleted, but not their targets. Missing files are ignored, because other ranks
        delete the same files.

        Args:
            was_moved: Whether this rank has moved files out of the directory. If not, and no
                unchanged file is left, another rank has deleted them and may be writing new files.
                The directories are then kept.
        """
        should_remove_directories = was_moved
        for path, identity in self.identities.items():
            with contextlib.suppress(OSError):
                if _get_identity(self.directory, path) == identity:
                    os.unlink(self.directory / path if path else self.directory)
                    should_remove_directories = True
        if should_remove_directories and not self.directory.is_symlink():
            for root, _, _ in os.walk(self.directory, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(root)


def _get_identity(directory: Path, path: str) -> tuple[int, ...]:
    # The inode of a deleted file can be reused by its replacement, but not with the same mtime.
    status = os.lstat(directory / path if path else directory)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
