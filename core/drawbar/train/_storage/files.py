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
    entries_below,
    find_links,
    leads_through,
    list_files,
    ways_to,
)
from drawbar.train._storage.retries import explained
from drawbar.train._storage.sizes import in_bytes
from drawbar.train._threads import DaemonThreads

_COPY_THREADS = 8
_LITTLE = 1024 * 1024  # bytes that are copied sooner than threads have started
_CHUNK = 64 * 1024 * 1024
# What copy_file_range() says of files that can be copied in another way.
_NOT_IN_KERNEL = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY}


def copy_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Copy these files, several at a time, inside the kernel where the filesystem allows it.

    `copy_file_range` shares the blocks instead of copying them on filesystems with reflinks.
    """
    fault_points.reached("persist.start")
    _make_folders(target, files)
    _for_each(files, lambda file: _copy_file(f"{source}/{file.path}", f"{target}/{file.path}"))


def _make_folders(target: Path, files: Sequence[FileEntry]) -> None:
    """Make the folders that these files are to lie in, each once."""
    for folder in {os.path.dirname(f"{target}/{file.path}") for file in files}:
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)


def move_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Move these files: a rename each on one filesystem, else they are copied.

    What lies behind a symbolic link is copied. The caller removes `source`, once it needs no more
    of it: until then what was copied is there as well, and if this fails all of it is.
    """
    fault_points.reached("persist.start")
    links = find_links(source)
    linked = [file for file in files if leads_through(file.path, links)] if links else []
    _make_folders(target, files)
    _for_each(linked, lambda file: _copy_file(f"{source}/{file.path}", f"{target}/{file.path}"))
    behind = {file.path for file in linked}
    own = [file for file in files if file.path not in behind]
    moved = []
    try:
        for number, file in enumerate(own):
            if number == (len(own) + 1) // 2:
                fault_points.reached("persist.half")
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


def replace_links(directory: Path, spare: Path) -> None:
    """Put copies of what they lead to in the place of the symbolic links below `directory`.

    Args:
        directory: Is no link itself.
        spare: An empty folder on the same filesystem, where the copies are made.
    """
    links = find_links(directory)
    linked = [file for file in list_files(directory) if leads_through(file.path, links)]
    _make_folders(spare, linked)
    _for_each(linked, lambda file: _copy_file(f"{directory}/{file.path}", f"{spare}/{file.path}"))
    for link in links:
        if (spare / link).is_dir():
            # A rename puts a folder in the place of an empty one only, not of a link.
            os.unlink(directory / link)
            os.rename(spare / link, directory / link)
        elif (spare / link).exists():
            os.replace(spare / link, directory / link)
        else:
            os.unlink(directory / link)  # to a folder without files


def keep_only(directory: Path, wanted: Container[str]) -> None:
    """Delete every file below `directory` that is not wanted, and every link, wanted or not."""
    for path, entry in list(entries_below(directory)):
        if path not in wanted or entry.is_symlink():
            os.unlink(entry.path)


def _for_each(files: Sequence[FileEntry], action: Callable[[FileEntry], None]) -> None:
    total = sum(file.size for file in files)
    if len(files) <= 1 or (len(files) <= _COPY_THREADS and total <= _LITTLE):
        for number, file in enumerate(files):
            if number == 1:
                fault_points.reached("persist.half")
            action(file)
        return
    with DaemonThreads(min(_COPY_THREADS, len(files)), "drawbar-copy") as pool:
        for number, _ in enumerate(pool.map(action, files)):
            if number == 0:
                fault_points.reached("persist.half")


def _copy_file(source: str, target: str) -> None:
    try:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            if not _copy_in_kernel(reader.fileno(), writer.fileno()):
                # The kernel may have copied a piece before it refused the next one.
                reader.seek(0)
                writer.seek(0)
                shutil.copyfileobj(reader, writer, _CHUNK)
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
        while os.copy_file_range(reader, writer, _CHUNK):
            fault_points.reached("persist.half")
    except OSError as error:
        if error.errno not in _NOT_IN_KERNEL:
            raise
        return False
    return True


def is_open_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at this path, neither deleted nor moved."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


NO_FILE = frozenset({errno.EISDIR, errno.EINVAL, errno.ELOOP})
"""The errors by which `read_regular` says that something is there, and is no file."""


def read_regular(path: Path, start: int = 0) -> bytes:
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


def sync_tree(directory: Path) -> None:
    """Have the kernel write every file and folder below `directory` to the disk."""
    for root, _, names in os.walk(directory):
        for name in names:
            sync(Path(root) / name)
        sync(Path(root))


def sync(path: Path) -> None:
    """Have the kernel write one file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path, data: bytes, *, durable: bool = False, by_way_of: Path | None = None
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
    temporary = (by_way_of or path.parent) / name
    try:
        temporary.write_bytes(data)
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise explained(error, f"writing {in_bytes(len(data))} to {path}") from error


def take_mode_of_folder(path: Path) -> None:
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


def tree_size(path: Path) -> int:
    """Count the bytes of all files below a directory; of a link, none. They may go meanwhile."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(f"{folder}/{name}")
                total += found.st_size * stat.S_ISREG(found.st_mode)
    return total


def is_open_below(directory: Path) -> bool:
    """Whether a process that this user may look into is in a directory, or has a file of it open.

    False where there is no /proc.
    """
    inside = f"{os.path.realpath(directory)}/"
    with contextlib.suppress(OSError):
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                opened = [process / "cwd", *(process / "fd").iterdir()]
                if any(f"{_target(each)}/".startswith(inside) for each in opened):
                    return True
    return False


def _target(link: Path) -> str:
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
class SeenFiles:
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
    def of(cls, directory: Path, files: Sequence[FileEntry]) -> SeenFiles:
        """Look at these files.

        Raises:
            FileNotFoundError: One is not there.
        """
        links: set[str] = {""} if directory.is_symlink() else set()
        folders = {way for file in files for way in ways_to(file.path)}
        for folder in sorted(folders):  # outer ones first
            if not leads_through(folder, links) and os.path.islink(directory / folder):
                links.add(folder)
        own = [file.path for file in files if not leads_through(file.path, links)]
        return cls(directory, {path: _identity(directory, path) for path in (*links, *own)})

    def remove(self, *, given: bool) -> None:
        """Delete those that are still the same, and the folders that are empty then.

        Of what is linked, the links go. Any of it may be gone, since peers delete the same.

        Args:
            given: They were moved away from here. Otherwise empty folders stay if none of the files
                is left: a peer has deleted those, and may fill the folders anew.
        """
        for path, identity in self.identities.items():
            with contextlib.suppress(OSError):
                if _identity(self.directory, path) == identity:
                    os.unlink(self.directory / path if path else self.directory)
                    given = True
        if given and not self.directory.is_symlink():
            for folder, _, _ in os.walk(self.directory, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def _identity(directory: Path, path: str) -> tuple[int, ...]:
    # A file that takes the place of a deleted one may get its inode, but not its time too.
    found = os.lstat(directory / path if path else directory)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
