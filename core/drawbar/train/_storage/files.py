"""Files of a checkpoint on a local or mounted filesystem: list, copy, move, sync, hash."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from drawbar.train._errors import CheckpointError
from drawbar.train._storage import fault_points
from drawbar.train._storage.retries import explained
from drawbar.train._storage.sizes import in_bytes
from drawbar.train._threads import DaemonThreads

_LEADS_OUT = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\0")


def check_stays_inside(path: str) -> str:
    """Check that a path out of data, with "/" between folders, leads to something below a folder.

    Raises:
        CheckpointError: It is absolute, empty, or has an empty part, "..", "." or NUL in it.
    """
    if _LEADS_OUT.search(path):
        raise CheckpointError(
            f"{path!r} is no path of a file in a checkpoint: it would lead out of it, or nowhere. "
            "What lists it is damaged"
        )
    return path


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint: its path in it, with "/" between folders, and its bytes.

    Raises:
        CheckpointError: The path leads out of the checkpoint, wherever it was read.
    """

    path: str
    size: int

    def __post_init__(self) -> None:
        check_stays_inside(self.path)


# Drawbar's own files in a checkpoint. They are not part of what the user saved.
MANIFEST = ".drawbar.json"
CHECKSUMS = ".drawbar-checksums.json"
VALIDATION = ".drawbar-validation.json"
PENDING = ".drawbar-pending"
METADATA = ".metadata.json"
_OWN = re.compile(
    r"\.drawbar(-checksums|-validation)?\.json|\.drawbar-pending|\.drawbar-.+\.\d+\.tmp"
)

_COPY_THREADS = 8
_LITTLE = 1024 * 1024  # bytes that are copied sooner than threads have started
_CHUNK = 64 * 1024 * 1024
# What copy_file_range() says of files that can be copied in another way.
_NOT_IN_KERNEL = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY}


@dataclass(frozen=True)
class Contents:
    """What lies below a directory.

    Attributes:
        files: Every file but Drawbar's own, sorted by path.
        links: The symbolic links that lead there, as paths; "" if the directory is one itself.
        own: What has the name of one of Drawbar's own files, directly in it.
    """

    files: tuple[FileEntry, ...]
    links: frozenset[str]
    own: tuple[str, ...]


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """List every file below `directory`; see `look_into`."""
    return look_into(directory).files


def look_into(directory: Path) -> Contents:
    """Look at everything below `directory`, once.

    Symbolic links are followed. Empty folders are not listed.

    Raises:
        FileNotFoundError, NotADirectoryError: `directory` is not there, or is a file.
        OSError: Something in it is neither a file nor a folder, leads nowhere, or leads back.
    """
    files, own = [], []
    links = {""} if os.path.islink(directory) else set()
    stack: list[tuple[str, tuple[str, ...]]] = [("", (f"{directory}",))]
    while stack:
        folder, leads_through = stack.pop()
        with os.scandir(leads_through[-1]) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if is_link := entry.is_symlink():
                    links.add(path)
                if is_own(path):
                    own.append(path)
                elif entry.is_dir():
                    if is_link:
                        _check_leads_on(entry.path, leads_through)
                    stack.append((path, (*leads_through, entry.path)))
                elif not entry.is_file():
                    raise OSError(errno.EINVAL, _why_not(entry.path), entry.path)
                else:
                    files.append(FileEntry(path, entry.stat().st_size))
    files.sort(key=lambda file: file.path)
    return Contents(tuple(files), frozenset(links), tuple(sorted(own)))


def _why_not(path: str) -> str:
    where = f" to {os.readlink(path)}, where nothing is" if not os.path.exists(path) else ""
    return f"it is no file, no folder and no link to one{where}, so it cannot be saved"


def _check_leads_on(link: str, leads_through: tuple[str, ...]) -> None:
    """Check that a link to a folder leads to none of those that have led to it."""
    real = os.path.realpath(link)
    if any(os.path.realpath(folder) == real for folder in leads_through):
        raise OSError(errno.ELOOP, f"it is a symbolic link back to {real}", link)


def is_own(path: str) -> bool:
    """Whether a path in a checkpoint is that of a file of Drawbar's."""
    return path.startswith(".drawbar") and _OWN.fullmatch(path) is not None


def holds_own(directory: Path) -> bool:
    """Whether a directory holds a file of Drawbar's, so that Drawbar made it."""
    return any(map(is_own, os.listdir(directory)))


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
    linked = [file for file in files if _leads_through(file.path, links)] if links else []
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


def find_links(directory: Path) -> set[str]:
    """Find the symbolic links below `directory`, as paths in it; "" if it is one itself.

    None is followed.
    """
    if directory.is_symlink():
        return {""}
    return {path for path, entry in _entries(directory) if entry.is_symlink()}


def _entries(directory: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
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


def _leads_through(path: str, links: set[str]) -> bool:
    """Whether the way to a file, or the file itself, is one of these links."""
    return "" in links or path in links or any(way in links for way in _ways(path))


def _ways(path: str) -> list[str]:
    """List the folders on the way to a file."""
    return [str(way) for way in PurePosixPath(path).parents[:-1]]


def replace_links(directory: Path, spare: Path) -> None:
    """Put copies of what they lead to in the place of the symbolic links below `directory`.

    Args:
        directory: Is no link itself.
        spare: An empty folder on the same filesystem, where the copies are made.
    """
    links = find_links(directory)
    linked = [file for file in list_files(directory) if _leads_through(file.path, links)]
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
    for path, entry in list(_entries(directory)):
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


def remove_files(directory: Path, files: Sequence[FileEntry]) -> None:
    """Delete these files and the folders that are empty then; of what is linked, the links.

    What else is there stays. Some of it may be gone already, since peers delete the same.
    """
    if directory.is_symlink():
        remove_tree(directory)
    elif directory.is_dir():
        listed = {part for file in files for part in (file.path, *_ways(file.path))}
        for path, entry in list(_entries(directory)):
            if path in listed:
                remove_tree(Path(entry.path))
        for folder, _, _ in os.walk(directory, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
