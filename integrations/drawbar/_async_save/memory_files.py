"""Files in shared memory, which another process writes to storage."""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

from drawbar._storage.contents import FileEntry, check_relative_path

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MEMORY_FILE_PREFIX = "/memfd:drawbar-"
"""Beginning of the paths of files in memory in `/proc/self/maps`."""

_MIN_MAPPED_BYTES = 1 << 20


class SharedMemory:
    """Memory that grows, and that another process can read through its file descriptor.

    It has no name that must be deleted, and is not limited by the size of `/dev/shm`, which is 64
    MB in many containers.

    While its content changes, the memory has an exclusive lock, which the writer process releases.
    A process that reads it has a shared lock. Locks end with their processes.

    Attributes:
        fd: File descriptor of the memory.
        mapping: The memory. Only the first `size` bytes may be used.
        size: Number of bytes.
    """

    def __init__(self) -> None:
        self.fd = _create_memory_file()
        os.ftruncate(self.fd, _MIN_MAPPED_BYTES)
        self.mapping = mmap.mmap(self.fd, _MIN_MAPPED_BYTES)
        self.size = 0

    def try_lock(self) -> bool:
        """Acquire the exclusive lock; return False if a process reads the content."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def truncate(self, size: int) -> None:
        """Change the size, so that the memory can be read as a file."""
        os.ftruncate(self.fd, size)
        self.size = size

    def grow(self, size: int) -> None:
        """Provide at least this number of bytes.

        Raises:
            OSError: There is not enough memory.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > len(self.mapping):
            # Doubles the addresses, not the memory.
            self.mapping.resize(max(size, 2 * len(self.mapping)))
        # Without it, a lack of memory would kill the process with SIGBUS.
        os.posix_fallocate(self.fd, self.size, size - self.size)
        self.size = size

    def release(self) -> None:
        """Free the memory."""
        self.mapping.close()
        os.close(self.fd)


def _create_memory_file() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("Checkpoints in shared memory need Linux. Use train.report() instead.")
    return os.memfd_create("drawbar-checkpoint")


class MemoryFile(io.RawIOBase):
    """Writable file in shared memory.

    Args:
        memory: Memory for the content.

    Attributes:
        memory: The memory.
        size: Size of the content in bytes.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.size = 0
        self._position = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position of the next byte, and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def write(self, data: ReadableBuffer) -> int:
        """Copy bytes to the position.

        Raises:
            OSError: There is not enough memory.
        """
        # torch calls it up to 40 times per tensor.
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        start, memory = self._position, self.memory
        end = start + len(view)
        if end > memory.size:
            memory.grow(end)
        if start > self.size:  # the memory may have the bytes of an earlier file
            memory.mapping[self.size : start] = bytes(start - self.size)
        memory.mapping[start:end] = view
        self._position = end
        self.size = max(self.size, end)
        return len(view)


class MemoryFiles:
    """Files of one checkpoint in shared memory.

    Each checkpoint reuses the memory of the previous one, because the first write to a page takes
    several times as long as the next ones.

    Example:
        >>> with files.open("state.pt") as file:
        ...     torch.save(state, file)
    """

    def __init__(self) -> None:
        self._files: dict[str, MemoryFile] = {}  # by path
        self._unused: list[SharedMemory] = []

    def clear(self) -> None:
        """Remove all files, and keep their memory for the next ones."""
        for path in list(self._files):
            self.remove(path)

    @contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """Create a file, and replace an earlier one with this path.

        Args:
            path: Relative path of the file in the checkpoint.

        Yields:
            The file.

        Raises:
            CheckpointError: The path leads out of the checkpoint.
        """
        check_relative_path(path)
        self.remove(path)
        self._files[path] = file = MemoryFile(self._take_memory())
        yield cast("IO[bytes]", file)

    def _take_memory(self) -> SharedMemory:
        # The first file has most of the bytes, so it gets the largest memory.
        self._unused.sort(key=lambda memory: memory.size)
        memory = self._unused.pop() if self._unused else SharedMemory()
        if not memory.try_lock():  # the reader keeps it
            memory.release()
            memory = SharedMemory()
            memory.try_lock()
        return memory

    def truncate(self) -> None:
        """Truncate the memory of each file to the size of the file."""
        for file in self._files.values():
            file.memory.truncate(file.size)

    def rename(self, path: str, new_path: str) -> None:
        """Rename a file, and replace an earlier one with the new path.

        Args:
            path: Path of the file.
            new_path: New path.
        """
        check_relative_path(new_path)
        self.remove(new_path)
        self._files[new_path] = self._files.pop(path)

    def remove(self, path: str) -> None:
        """Remove a file, if it exists.

        Args:
            path: Path of the file.
        """
        file = self._files.pop(path, None)
        if file is not None:
            self._unused.append(file.memory)

    def exists(self, path: str) -> bool:
        """Return whether there is a file with this path.

        Args:
            path: Path of the file.

        Returns:
            Whether it exists.
        """
        return path in self._files

    def list_files(self) -> tuple[FileEntry, ...]:
        """Return the path and the size of each file, sorted by path.

        Returns:
            The files.
        """
        return tuple(FileEntry(path, file.size) for path, file in sorted(self._files.items()))

    def get_descriptors(self) -> dict[str, int]:
        """Return the descriptor of each file's memory.

        Returns:
            The descriptors by path.
        """
        return {path: file.memory.fd for path, file in self._files.items()}

    def release(self) -> None:
        """Remove all files, and free the memory."""
        self.clear()
        while self._unused:
            self._unused.pop().release()
