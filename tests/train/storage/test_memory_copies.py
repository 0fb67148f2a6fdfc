"""Tests of copies of checkpoints in the memory of writer processes, without a run."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar._async_save.background_writer import BackgroundWriter
from drawbar._async_save.memory_copies import (
    close_unmapped_files,
    open_memory_copy,
    read_from_memory,
)
from drawbar._storage.contents import FileEntry
from drawbar._storage.manifest import Manifest, write_manifest
from drawbar._storage.storage_path import LocalPath

RUN_ID = "0123456789abcdef"
RUN_KEY = "0123456789abcdef-1"


class Run:
    """Run with one rank, whose checkpoints have one file each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = BackgroundWriter(RUN_KEY, 0)

    def save(self, index: int, content: bytes, *, is_reported: bool = True) -> LocalPath:
        directory = self.path / f"checkpoint_{index:06}"
        directory.mkdir()
        with self.writer.clear_files().open("a/state.pt") as file:
            file.write(content)
        write = self.writer.submit(directory, attempt=0)
        if is_reported:
            write.report_index.set_result(index)
        else:
            write.report_index.cancel()
        write.done.result()
        assert (directory / "a/state.pt").read_bytes() == content
        self.write_manifest(directory, index, len(content))
        return LocalPath(directory)

    def write_manifest(self, directory: Path, index: int, size: int, attempt: int = 0) -> None:
        manifest = Manifest(
            name=directory.name,
            index=index,
            attempt=attempt,
            world_size=1,
            time=1.0,
            files=(FileEntry("a/state.pt", size),),
            metrics={},
            run_id=RUN_ID,
        )
        write_manifest(directory, manifest, durable=False)

    def read(self, path: LocalPath) -> tuple[str, bytes]:
        """Return the source and the content of a checkpoint; b"" if it is not in memory."""
        sources: list[str] = []
        with (
            read_from_memory(path.fs_path, RUN_ID, RUN_KEY, sources.append),
            open_memory_copy(path) as directory,
        ):
            content = b"" if directory is None else (directory / "a/state.pt").read_bytes()
        (source,) = sources
        return source, content


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    del run.writer


def test_memory_copies_of_last_two_checkpoints_are_kept(run: Run) -> None:
    # The sizes differ, because a file in memory must end with its content.
    paths = [run.save(index, bytes([index]) * size) for index, size in enumerate((9, 50_000, 7))]
    assert run.read(paths[0]) == ("storage", b"")
    assert run.read(paths[1]) == ("memory", b"\1" * 50_000)
    assert run.read(paths[2]) == ("memory", b"\2" * 7)


def test_memory_copy_is_not_overwritten_while_it_is_read(run: Run) -> None:
    path = run.save(0, b"first")
    with (
        read_from_memory(path.fs_path, RUN_ID, RUN_KEY, lambda _: None),
        open_memory_copy(path) as copy,
    ):
        assert copy is not None
        for index in range(1, 4):
            run.save(index, b"later")
        assert (copy / "a/state.pt").read_bytes() == b"first"
    assert not copy.exists()


def test_memory_copy_is_not_overwritten_while_it_is_mapped(run: Run) -> None:
    path = run.save(0, b"first")
    with read_from_memory(path.fs_path, RUN_ID, RUN_KEY, lambda _: None):
        with open_memory_copy(path) as copy:
            assert copy is not None
            with open(copy / "a/state.pt", "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for index in range(1, 4):
            run.save(index, b"later")
        assert content[:] == b"first"
        inode = find_mapped_inode()
        content.close()
        close_unmapped_files()
        assert inode not in list_open_inodes()


def find_mapped_inode() -> int:
    """Return the inode of the file in memory that is mapped without permission to write."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (inode,) = {
        int(line.split()[4]) for line in lines if "memfd:drawbar-" in line and "r--" in line
    }
    return inode


def list_open_inodes() -> set[int]:
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listed directory
            inodes.add(os.fstat(int(name)).st_ino)
    return inodes


def test_memory_copy_is_not_used_while_the_rank_overwrites_it(run: Run) -> None:
    path = run.save(0, b"first")
    run.save(1, b"other")
    with run.writer.clear_files().open("a/state.pt") as file:
        file.write(b"new")
        assert run.read(path) == ("storage", b"")


@pytest.mark.parametrize(("size", "attempt"), [(6, 0), (5, 1)])
def test_memory_copy_with_other_size_or_attempt_is_not_used(
    run: Run, size: int, attempt: int
) -> None:
    path = run.save(0, b"first")
    run.write_manifest(Path(path), 0, size, attempt)
    assert run.read(path) == ("storage", b"")


def test_memory_copies_survive_a_checkpoint_without_files(run: Run, tmp_path: Path) -> None:
    path = run.save(0, b"first")
    run.writer.clear_files()
    write = run.writer.submit(tmp_path, attempt=0)
    write.report_index.set_result(1)
    write.done.result()
    assert run.read(path) == ("memory", b"first")


def test_memory_copy_of_unreported_checkpoint_is_not_used(run: Run) -> None:
    assert run.read(run.save(0, b"first", is_reported=False)) == ("storage", b"")


def test_memory_copy_of_ended_writer_is_not_used(run: Run) -> None:
    path = run.save(0, b"first")
    run.writer = BackgroundWriter(RUN_KEY, 0)  # ends the previous one
    assert run.read(path) == ("storage", b"")
