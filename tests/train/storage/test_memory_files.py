"""Tests of files in shared memory."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from drawbar._async_save.memory_files import MemoryFiles
from drawbar._storage.contents import FileEntry
from drawbar.train import CheckpointError


@pytest.fixture
def files() -> Iterator[MemoryFiles]:
    files = MemoryFiles()
    yield files
    files.release()


def read(files: MemoryFiles) -> dict[str, bytes]:
    descriptors = files.get_descriptors()
    return {
        file.path: os.pread(descriptors[file.path], file.size, 0) for file in files.list_files()
    }


def test_memory_file_has_written_bytes(files: MemoryFiles) -> None:
    parts = [random.Random(size).randbytes(size) for size in (0, 1, 5_000_000, 3, 2_000_000)]
    with files.open("state.pt") as file:
        for part in parts:
            file.write(part)
    assert read(files) == {"state.pt": b"".join(parts)}


def test_memory_file_seek_overwrites_and_fills_gaps_with_zeros(files: MemoryFiles) -> None:
    with files.open("first") as file:
        file.write(b"x" * 100)  # the next file must not show these bytes
    files.clear()
    with files.open("state.pt") as file:
        file.write(b"abc")
        file.seek(3, os.SEEK_CUR)
        file.write(b"def")
        file.seek(1)
        file.write(b"B")
    assert read(files) == {"state.pt": b"aBc\0\0\0def"}


def test_memory_files_reuse_memory(files: MemoryFiles) -> None:
    descriptors = []
    for content in (b"first", b"second"):
        files.clear()
        with files.open("state.pt") as file:
            file.write(content)
        descriptors.append(files.get_descriptors())
        assert read(files) == {"state.pt": content}
    assert descriptors[0] == descriptors[1]


def test_memory_files_use_largest_memory_for_first_file(files: MemoryFiles) -> None:
    for path, size in (("state.pt", 5_000_000), ("metadata", 10)):
        with files.open(path) as file:
            file.write(bytes(size))
    largest = files.get_descriptors()["state.pt"]
    for path in ("state.pt", "__0_0.distcp", "state.pt"):
        files.clear()
        with files.open(path) as file:
            file.write(b"x")
        assert files.get_descriptors() == {path: largest}


def test_memory_files_rename_replaces_file(files: MemoryFiles) -> None:
    for path, content in (("a", b"old"), ("a.tmp", b"new")):
        with files.open(path) as file:
            file.write(content)
    files.rename("a.tmp", "a")
    assert files.list_files() == (FileEntry("a", 3),)
    assert read(files) == {"a": b"new"}
    assert files.exists("a")
    assert not files.exists("a.tmp")


def test_memory_files_reject_path_outside_checkpoint(files: MemoryFiles) -> None:
    with pytest.raises(CheckpointError, match="not a valid path"), files.open("../state.pt"):
        pass
