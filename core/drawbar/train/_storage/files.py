"""Files of a checkpoint on a local or mounted filesystem: copy, move, sync, delete."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._storage import fault_points
from drawbar.train._storage.contents import (
    FileEntry,
    find_symlinks,
    is_behind_symlink,
    list_files,
    list_parents,
    walk_entries,
)
from drawbar.train._storage.retries import add_context
from drawbar.train._storage.sizes import format_exact_size
from drawbar.train._threads import DaemonThreadPool

_COPY_THREADS = 8
_SMALL_COPY_BYTES = 1024 * 1024  # bytes that are copied sooner than threads have started
_COPY_CHUNK_BYTES = 64 * 1024 * 1024
# What copy_file_range() says of files that can be copied in another way.
_NO_KERNEL_COPY_ERRNOS = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY}


def copy_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Copy these files, several at a time, inside the kernel where the filesystem allows it.

    `copy_file_range` shares the blocks instead of copying them on filesystems with reflinks.
    """
    fault_points.maybe_stop_at("persist.start")
    _make_directories(target, files)
    _run_parallel(files, lambda file: _copy_file(f"{source}/{file.path}", f"{target}/{file.path}"))


def _make_directories(target: Path, files: Sequence[FileEntry]) -> None:
    """Make the folders that these files are to lie in, each once."""
    for folder in {os.path.dirname(f"{target}/{file.path}") for file in files}:
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)


def move_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Move these files: a rename each on one filesystem, else they are copied.

    What lies behind a symbolic link is copied. The caller removes `source`, once it needs no more
    of it: until then what was copied is there as well, and if this fails all of it is.
    """
    fault_points.maybe_stop_at("persist.start")
    links = find_symlinks(source)
    linked = [file for file in files if is_behind_symlink(file.path, links)] if links else []
    _make_directories(target, files)
    _run_parallel(linked, lambda file: _copy_file(f"{source}/{file.path}", f"{target}/{file.path}"))
    behind = {file.path for file in linked}
    own = [file for file in files if file.path not in behind]
    moved = []
    try:
        for number, file in enumerate(own):
            if number == (len(own) + 1) // 2:
                fault_points.maybe_stop_at("persist.half")
            if _rename_or_copy(f"{source}/{file.path}", f"{target}/{file.path}"):
                moved.append(file)
    except OSError:
        # Back, so that whoever tries again finds all of it in one place.
        for file in moved:
            os.rename(target / file.path, source / file.path)
        raise


def _rename_or_copy(source: str, target: str) -> bool:
    """Put a file elsewhere; says whether that was a rename, after which the source is gone."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_file(source, target)
        return False
    return True


def replace_symlinks(directory: Path, scratch_directory: Path) -> None:
    """Put copies of what they lead to in the place of the symbolic links below `directory`.

    Args:
        directory: Is no link itself.
        spare: An empty folder on the same filesystem, where the copies are made.
    """
    links = find_symlinks(directory)
    linked = [file for file in list_files(directory) if is_behind_symlink(file.path, links)]
    _make_directories(scratch_directory, linked)
    _run_parallel(
        linked,
        lambda file: _copy_file(f"{directory}/{file.path}", f"{scratch_directory}/{file.path}"),
    )
    for link in links:
        if (scratch_directory / link).is_dir():
            # A rename puts a folder in the place of an empty one only, not of a link.
            os.unlink(directory / link)
            os.rename(scratch_directory / link, directory / link)
        elif (scratch_directory / link).exists():
            os.replace(scratch_directory / link, directory / link)
        else:
            os.unlink(directory / link)  # to a folder without files


def remove_unlisted(directory: Path, listed_paths: Container[str]) -> None:
    """Delete every file below `directory` that is not wanted, and every link, wanted or not."""
    for path, entry in list(walk_entries(directory)):
        if path not in listed_paths or entry.is_symlink():
            os.unlink(entry.path)


def _run_parallel(files: Sequence[FileEntry], action: Callable[[FileEntry], None]) -> None:
    total = sum(file.size for file in files)
    if len(files) <= 1 or (len(files) <= _COPY_THREADS and total <= _SMALL_COPY_BYTES):
        for number, file in enumerate(files):
            if number == 1:
                fault_points.maybe_stop_at("persist.half")
            action(file)
        return
    with DaemonThreadPool(min(_COPY_THREADS, len(files)), "drawbar-copy") as pool:
        for number, _ in enumerate(pool.map(action, files)):
            if number == 0:
                fault_points.maybe_stop_at("persist.half")


def _copy_file(source: str, target: str) -> None:
    try:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            if not _copy_in_kernel(reader.fileno(), writer.fileno()):
                # The kernel may have copied a piece before it refused the next one.
                reader.seek(0)
                writer.seek(0)
                shutil.copyfileobj(reader, writer, _COPY_CHUNK_BYTES)
            # A script that is saved along with the model stays executable.
            os.fchmod(writer.fileno(), stat.S_IMODE(os.fstat(reader.fileno()).st_mode))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)  # on a full disk, half a file takes the journal's room
        raise


def _copy_in_kernel(reader: int, writer: int) -> bool:
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
    """Whether an open file is still the one at this path, neither deleted nor moved."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


NOT_A_FILE_ERRNOS = frozenset({errno.EISDIR, errno.EINVAL, errno.ELOOP})
"""The errors by which `read_regular_file` says that something is there, and is no file."""


def read_regular_file(path: Path, start: int = 0) -> bytes:
    """Read a file from a byte on, if it is one: what else lies there may never end, as a FIFO does.

    Raises:
        OSError: It is not there, cannot be read, or is no file; the message says what it is.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        what = "it is a symbolic link that leads back to itself"
        raise OSError(errno.ELOOP, what, str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, and no file", str(path))
    if not stat.S_ISREG(mode):
        what = "it is a FIFO, a socket or a device, and no file"
        raise OSError(errno.EINVAL, what, str(path))
    with open(path, "rb") as file:
        file.seek(start)
        return file.read()


def fsync_tree(directory: Path) -> None:
    """Have the kernel write every file and folder below `directory` to the disk."""
    for root, _, names in os.walk(directory):
        for name in names:
            fsync_path(Path(root) / name)
        fsync_path(Path(root))


def fsync_path(path: Path) -> None:
    """Have the kernel write one file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path, data: bytes, *, durable: bool = False, temp_directory: Path | None = None
) -> None:
    """Write a whole file or none of it: a temporary file, then a rename.

    Args:
        path: The file.
        data: What it is to hold.
        durable: Have it on the disk when this returns.
        by_way_of: The folder of the temporary file, on the same filesystem: who copies the folder
            of `path` meanwhile must not meet what is gone in the next moment. Default: beside it.

    Raises:
        OSError: It cannot be written; the message has the path and the bytes.
    """
    folder = os.fsencode(path.parent.name)[-100:].decode(errors="ignore")  # names have limits
    name = f".drawbar-{folder}-{path.name}.{os.getpid()}.tmp"
    temporary = (temp_directory or path.parent) / name
    try:
        temporary.write_bytes(data)
        if durable:
            fsync_path(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise add_context(error, f"writing {format_exact_size(len(data))} to {path}") from error


def inherit_directory_mode(path: Path) -> None:
    """Let those read and write a file or folder who may do so where it lies.

    What the owner of a place has set, for themselves alone or for a group, then holds whatever the
    umask of the process is. A place that everybody may write to, such as /tmp, says nothing. What
    belongs to another user stays as it is.
    """
    outer, own = os.stat(path.parent).st_mode, os.stat(path).st_mode
    if not outer & 0o002:
        allowed = 0o777 if stat.S_ISDIR(own) else 0o666
        with contextlib.suppress(PermissionError):
            os.chmod(path, (own & 0o7000) | (outer & allowed))


def compute_tree_size(path: Path) -> int:
    """Count the bytes of all files below a directory; of a link, none. They may go meanwhile."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(f"{folder}/{name}")
                total += found.st_size * stat.S_ISREG(found.st_mode)
    return total


def has_open_files(directory: Path) -> bool:
    """Whether a process that this user may look into is in a directory, or has a file of it open.

    False where there is no /proc.
    """
    inside = f"{os.path.realpath(directory)}/"
    with contextlib.suppress(OSError):
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                opened = [process / "cwd", *(process / "fd").iterdir()]
                if any(f"{_read_link(each)}/".startswith(inside) for each in opened):
                    return True
    return False


def _read_link(link: Path) -> str:
    with contextlib.suppress(OSError):  # it is closed by now
        return os.readlink(link)
    return ""


def remove_tree(path: Path) -> None:
    """Delete a directory and do not mind if some of it is gone already.

    Of a link, or a file, that is what is deleted: nothing behind a link is touched.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:  # it is a directory
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class FileIdentities:
    """Files of a folder as they were at one moment, to be deleted later if they still are the same.

    Whoever shares the folder may have written the next ones there by then, under the same names.

    Attributes:
        directory: The folder.
        identities: Of each file and link by its path, none of it behind a link; "" is the folder
            itself where that is one.
    """

    directory: Path
    identities: Mapping[str, tuple[int, ...]]

    @classmethod
    def capture(cls, directory: Path, files: Sequence[FileEntry]) -> FileIdentities:
        """Look at these files.

        Raises:
            FileNotFoundError: One is not there.
        """
        links: set[str] = {""} if directory.is_symlink() else set()
        folders = {way for file in files for way in list_parents(file.path)}
        for folder in sorted(folders):  # outer ones first
            if not is_behind_symlink(folder, links) and os.path.islink(directory / folder):
                links.add(folder)
        own = [file.path for file in files if not is_behind_symlink(file.path, links)]
        return cls(directory, {path: _get_identity(directory, path) for path in (*links, *own)})

    def remove_unchanged(self, *, was_moved: bool) -> None:
        """Delete those that are still the same, and the folders that are empty then.

        Of what is linked, the links go. Any of it may be gone, since peers delete the same.

        Args:
            given: They were moved away from here. Otherwise empty folders stay if none of the files
                is left: a peer has deleted those, and may fill the folders anew.
        """
        for path, identity in self.identities.items():
            with contextlib.suppress(OSError):
                if _get_identity(self.directory, path) == identity:
                    os.unlink(self.directory / path if path else self.directory)
                    was_moved = True
        if was_moved and not self.directory.is_symlink():
            for folder, _, _ in os.walk(self.directory, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def _get_identity(directory: Path, path: str) -> tuple[int, ...]:
    # A file that takes the place of a deleted one may get its inode, but not its time too.
    found = os.lstat(directory / path if path else directory)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
