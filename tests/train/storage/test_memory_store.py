"""Tests of the memory store of a node, without Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from drawbar._async_save.memory_store import CHUNK_BYTES, MemoryStore, OpenFile, StoredFile
from drawbar._storage.contents import FileEntry


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def write(store: MemoryStore, name: str, content: bytes, path: str = "a/state.pt") -> None:
    file = StoredFile(len(content), xxhash.xxh3_64(content).hexdigest())
    for offset in range(0, max(len(content), 1), CHUNK_BYTES):
        store.write(name, path, file, offset, content[offset : offset + CHUNK_BYTES])


def open_files(store: MemoryStore, name: str, *sizes: int) -> list[bytes]:
    """Return the content of the files of these sizes that the store has."""
    files = [FileEntry(path, size) for path, size in zip(("a/state.pt", "b"), sizes, strict=False)]
    return [read(file) for _, file in sorted(store.open_files(name, files).items())]


def read(file: OpenFile) -> bytes:
    path = Path(f"/proc/{file.pid}/fd/{file.descriptor}")
    assert path.stat().st_ino == file.inode
    return path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_memory_store_provides_received_files(store: MemoryStore, size: int) -> None:
    contents = os.urandom(size), b"second file"
    write(store, "0/1", contents[0])
    write(store, "0/1", contents[1], "b")
    assert store.list_files("0/1").keys() == {"a/state.pt", "b"}
    assert open_files(store, "0/1", size, 11) == list(contents)
    chunks = [bytes(store.read("0/1", "a/state.pt", at)) for at in range(0, size, CHUNK_BYTES)]
    assert b"".join(chunks) == contents[0]


def test_memory_store_keeps_the_two_newest_checkpoints(store: MemoryStore) -> None:
    for name in ("0/9", "0/10", "1/2"):
        write(store, name, b"content")
    with pytest.raises(LookupError, match="two newer checkpoints"):
        write(store, "0/9", b"content")
    found = {name: open_files(store, name, 7) for name in ("0/9", "0/10", "1/2")}
    assert found == {"0/9": [], "0/10": [b"content"], "1/2": [b"content"]}


def test_memory_store_drop_frees_checkpoints_of_earlier_attempts(store: MemoryStore) -> None:
    for name in ("0/1", "1/2"):
        write(store, name, b"content")
    store.drop(1)
    assert not store.list_files("0/1")
    assert store.list_files("1/2")


def test_memory_store_provides_no_incomplete_or_other_file(store: MemoryStore) -> None:
    file = StoredFile(CHUNK_BYTES + 1, "")
    store.write("0/1", "a/state.pt", file, 0, bytes(CHUNK_BYTES))
    with pytest.raises(ValueError, match="expected bytes from"):
        store.write("0/1", "a/state.pt", file, 1, b"x")
    assert open_files(store, "0/1", CHUNK_BYTES + 1) == []
    write(store, "0/2", b"content")
    assert open_files(store, "0/2", 6) == []


def test_memory_store_provides_no_file_with_wrong_checksum(store: MemoryStore) -> None:
    checksum = xxhash.xxh3_64(b"content").hexdigest()
    store.write("0/1", "a/state.pt", StoredFile(7, checksum), 0, b"CONTENT")
    assert open_files(store, "0/1", 7) == []


def test_memory_store_frees_memory_of_replaced_file(store: MemoryStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        write(store, f"0/{number}", b"content")
        write(store, f"0/{number}", b"again")
    assert len(os.listdir("/proc/self/fd")) == before + 2
