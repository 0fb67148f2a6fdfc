"""Tests of writes to remote storage that are interrupted by an exception or a kill."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from pyarrow import fs as arrow

from drawbar.train import Result
from drawbar.train.testing import check_run
from tests.train.storage.faulty_storage import content, fit, save, two_steps

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it

BIG = bytes(range(256)) * 4096 * 12  # 12 MiB: several parts in S3


class Objects(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An object store as fsspec's packages implement it: an object exists when it is closed."""

    protocol = ("objects",)
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        pass

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(self.objects[path])}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return ObjectFile(self, path, mode, block_size=5 * 2**20)

    def _rm(self, path: str) -> None:
        del self.objects[path]


class ObjectFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file of `Objects`, with a multipart upload."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> None:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.objects[self.path][start:end])


def _make_filesystem(kind: str, path: Path, s3: Any) -> tuple[Any, str]:
    local = LocalFileSystem(auto_mkdir=True)
    return {
        "pyarrow s3": (s3, f"bucket/{uuid.uuid4().hex}"),
        "pyarrow local": (arrow.SubTreeFileSystem(str(path), arrow.LocalFileSystem()), "far"),
        "fsspec local": (local, str(path / "far")),
        "fsspec directory": (DirFileSystem(str(path), local), "far"),
        "fsspec memory": (MemoryFileSystem(), f"/{uuid.uuid4().hex}"),
        "fsspec objects": (Objects(), "bucket/far"),
    }[kind]


def _write_partly(directory: Any, data: bytes) -> None:
    with directory.open_output("file") as stream:
        stream.write(data)
        raise KeyboardInterrupt


@pytest.mark.parametrize("num_bytes", [0, 1, len(BIG)])
@pytest.mark.parametrize(
    ("kind", "keeps_older"),
    [
        ("pyarrow s3", False),
        ("pyarrow local", True),
        ("fsspec local", True),
        ("fsspec directory", True),
        ("fsspec memory", False),
        ("fsspec objects", True),
    ],
)
def test_exception_during_write_leaves_older_file_or_none(
    tmp_path: Path, s3: Any, kind: str, keeps_older: bool, num_bytes: int
) -> None:
    from drawbar.train._storage.filesystem import to_pyarrow
    from drawbar.train._storage.remote_path import RemotePath

    filesystem, path = _make_filesystem(kind, tmp_path, s3)
    directory = RemotePath(path, to_pyarrow(filesystem))
    directory.write("other", b"other")
    for older in (None, b"older"):
        if older is not None:
            directory.write("file", older)
        with pytest.raises(KeyboardInterrupt):
            _write_partly(directory, BIG[:num_bytes])
        assert directory.read_or_none("file") == (older if keeps_older else None)
    directory.write("file", BIG)
    assert directory.read("file") == BIG
    assert directory.read("other") == b"other"
    if kind != "fsspec objects":
        assert [file.path for file in directory.list_files()] == ["file", "other"]


def make_interrupting(
    is_interrupted: Callable[[str, int], bool], interrupt: Callable[[], object]
) -> tuple[LocalFileSystem, dict[str, list[bytes]]]:
    """Return a local filesystem, where one write stores half of its data and calls a function.

    Args:
        is_interrupted: Decides by the path and the number of files opened before it.
        interrupt: Called after half of the data.

    Returns:
        The filesystem, and the complete data of each write by path.
    """
    filesystem = LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)
    written: dict[str, list[bytes]] = {}
    open_file = filesystem.open

    def open_interrupting(path: str, mode: str = "rb", **options: Any) -> Any:
        file = open_file(path, mode, **options)
        if "w" not in mode:
            return file
        path = re.sub(r"\.drawbar-(.+)\.\d+\.tmp$", r"\1", path)
        should_interrupt = is_interrupted(path, sum(map(len, written.values())))
        contents = written.setdefault(path, [])
        contents.append(b"")

        def write(data: bytes) -> None:
            contents[-1] += data
            file.f.write(data[: len(data) // 2] if should_interrupt else data)
            if should_interrupt:
                file.f.flush()
                interrupt()

        file.write = write
        return file

    filesystem.open = open_interrupting
    return filesystem, written


def _fail() -> None:
    raise OSError(errno.EIO, "on purpose")


def _read_files(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_error_in_any_write_of_a_run_leaves_no_incomplete_file(tmp_path: Path) -> None:
    kinds = set()
    for index in range(1000):
        path = tmp_path / f"{index}"
        fit(two_steps, path)
        older = _read_files(path / "far")

        def is_interrupted(file: str, num_writes: int, index: int = index) -> bool:
            return num_writes == index

        storage, written = make_interrupting(is_interrupted, _fail)
        with contextlib.suppress(Exception):
            fit(lambda: save("2"), path, storage, resume="must")
        for file, data in _read_files(path / "far").items():
            assert data in [*written.get(file, []), older.get(file)], file
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # as on another machine
        result = fit(lambda: save("3"), path, resume="must")
        assert content(result.checkpoint) == "3"
        check_run(path / "far" / "run", LocalFileSystem())
        if sum(map(len, written.values())) <= index:
            break
        kinds |= {Path(file).name.rstrip("0123456789") for file in written}
    expected = {"model", ".drawbar.json", ".drawbar-checksums.json", "journal.jsonl", "trainer.pkl"}
    assert expected <= kinds


def test_kill_during_upload_of_journal_keeps_older_journal(
    tmp_path: Path, drivers: Drivers
) -> None:
    fit(two_steps, tmp_path)
    journal = tmp_path / "far" / "run" / "journal.jsonl"
    older = journal.read_bytes()

    def is_interrupted(path: str, num_writes: int) -> bool:
        return path.endswith("journal.jsonl")

    def main() -> None:
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        storage, _ = make_interrupting(is_interrupted, kill)
        fit(lambda: save("2"), tmp_path, storage, resume="must")

    with drivers(main, XDG_CACHE_HOME=str(tmp_path / "killed")) as driver:
        driver.wait()
    assert driver.returncode == -signal.SIGKILL
    assert journal.read_bytes() == older
    assert [path for path in journal.parent.rglob("*.tmp")]
    result = fit(lambda: save("3"), tmp_path, resume="must")
    assert content(result.checkpoint) == "3"
    assert not [path for path in journal.parent.rglob("*.tmp")]
    assert len(Result.from_path(result.path, LocalFileSystem()).metrics_dataframe) == 3
