"""Files of a checkpoint on a local or mounted filesystem: list, copy, move, sync, hash."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drawbar.train import _faults
from drawbar.train._messages import FileEntry
from drawbar.train._retry import explained, in_bytes

# Drawbar's own files in a checkpoint. They are not part of what the user saved.
MANIFEST = ".drawbar.json"
CHECKSUMS = ".drawbar-checksums.json"
VALIDATION = ".drawbar-validation.json"
METADATA = ".metadata.json"
_OWN = (
    ".drawbar"  # what the names of the first three, and of files that are being written, begin with
)

_COPY_THREADS = 8
_CHUNK = 64 * 1024 * 1024
_NOT_IN_KERNEL = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY}


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """List every file below `directory`, sorted by path, without Drawbar's own.

    Symbolic links are followed. Empty folders are not listed.

    Raises:
        FileNotFoundError, NotADirectoryError: `directory` is not there, or is a file.
        OSError: Something in it is neither a file nor a folder, leads nowhere, or leads back.
    """
    found = []
    stack: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(directory),))]
    while stack:
        folder, leads_through = stack.pop()
        with os.scandir(directory / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir():
                    stack.append((path, (*leads_through, _way_into(entry, leads_through))))
                elif not entry.is_file():
                    raise OSError(
                        errno.EINVAL,
                        "it is no file, no folder and no link to one, so it cannot be saved",
                        entry.path,
                    )
                elif not path.startswith(_OWN):
                    found.append(FileEntry(path, entry.stat().st_size))
    return tuple(sorted(found, key=lambda file: file.path))


def _way_into(entry: os.DirEntry[str], leads_through: tuple[str, ...]) -> str:
    """Give the real path of a folder, which must not be one of those that have led to it."""
    if not entry.is_symlink():
        return f"{leads_through[-1]}/{entry.name}"
    real = os.path.realpath(entry.path)
    if real in leads_through:
        raise OSError(errno.ELOOP, f"it is a symbolic link back to {real}", entry.path)
    return real


def copy_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Copy these files, several at a time, inside the kernel where the filesystem allows it.

    `copy_file_range` shares the blocks instead of copying them on filesystems with reflinks.
    """
    _faults.reached("persist.start")
    _for_each(files, lambda file: _copy_file(source / file.path, target / file.path))


def move_files(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Move these files: a rename each on one filesystem, else copy and delete."""
    _faults.reached("persist.start")
    for number, file in enumerate(files):
        if number == (len(files) + 1) // 2:
            _faults.reached("persist.half")
        destination = target / file.path
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(source / file.path, destination)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy_file(source / file.path, destination)
            os.unlink(source / file.path)


def _for_each(files: Sequence[FileEntry], action: Callable[[FileEntry], None]) -> None:
    if len(files) <= 1:
        for file in files:
            action(file)
        return
    with ThreadPoolExecutor(min(_COPY_THREADS, len(files))) as pool:
        for number, _ in enumerate(pool.map(action, files)):
            if number == 0:
                _faults.reached("persist.half")


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            if not _copy_in_kernel(reader.fileno(), writer.fileno()):
                reader.seek(0)
                writer.seek(0)
                shutil.copyfileobj(reader, writer, _CHUNK)
        shutil.copymode(source, target)
    except OSError:
        target.unlink(missing_ok=True)  # on a full disk, half a file takes the journal's room
        raise


def _copy_in_kernel(reader: int, writer: int) -> bool:
    if not hasattr(os, "copy_file_range"):
        return False
    try:
        while os.copy_file_range(reader, writer, _CHUNK):
            _faults.reached("persist.half")
    except OSError as error:
        if error.errno not in _NOT_IN_KERNEL:
            raise
        return False
    return True


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


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a whole file or none of it: a temporary file beside it, then a rename.

    Raises:
        OSError: It cannot be written; the message has the path and the bytes.
    """
    temporary = path.with_name(f"{_OWN}-{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise explained(error, f"writing {in_bytes(len(data))} to {path}") from error


def checksum(path: Path) -> str:
    """Give the xxh3 (64 bit) of a file's content as 16 hex digits."""
    import xxhash

    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while chunk := file.read(4 * 1024 * 1024):
            digest.update(chunk)
    return str(digest.hexdigest())


def remove_tree(path: Path) -> None:
    """Delete a directory and do not mind if some of it is gone already."""
    shutil.rmtree(path, ignore_errors=True)
