"""Tests of writes to remote storage that are interrupted by an exception or a kill."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from pyarrow import fs as arrow

from drawbar import train
from drawbar.train import DataParallelTrainer, Result, RunConfig, ScalingConfig
from drawbar.train.testing import check_run
from tests.train.storage.faulty_storage import content, fit, save, two_steps

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it

BIG = bytes(range(256)) * 4096 * 12  # 12 MiB: several parts in S3


class Objects(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An object store as fsspec's packages implement it: an object exists when it is closed.

    Args:
        root: Directory whose files are the objects.
    """

    protocol = ("objects",)
    cachable = False

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root
        self.local = LocalFileSystem(auto_mkdir=True)

    def locate(self, path: str) -> str:
        return f"{self.root}/{path.strip('/')}"

    def _describe(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "name": info["name"].removeprefix(f"{self.root}/")}

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._describe(self.local.info(self.locate(path)))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        infos = map(self._describe, self.local.ls(self.locate(path), detail=True))
        return [info if detail else info["name"] for info in infos]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return ObjectFile(self, path, mode, block_size=5 * 2**20, cache_type="none")

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.local.rm(self.locate(path), recursive=recursive)

    def _rm(self, path: str) -> None:
        self.rm(path)


class ObjectFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file of `Objects`, with a multipart upload."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> None:
        self.parts.append(self.buffer.getvalue())
        if final:
            with self.fs.local.open(f"{self.fs.root}-uploads/{os.getpid()}", "wb") as file:
                file.write(b"".join(self.parts))
            self.fs.local.mv(file.name, self.fs.locate(self.path))

    def _fetch_range(self, start: int, end: int) -> bytes:
        return Path(self.fs.locate(self.path)).read_bytes()[start:end]


def _make_filesystem(kind: str, path: Path, s3: Any) -> tuple[Any, str]:
    local = LocalFileSystem(auto_mkdir=True)
    return {
        "pyarrow s3": (s3, f"bucket/{uuid.uuid4().hex}"),
        "pyarrow local": (arrow.SubTreeFileSystem(str(path), arrow.LocalFileSystem()), "far"),
        "fsspec local": (local, str(path / "far")),
        "fsspec directory": (DirFileSystem(str(path), local), "far"),
        "fsspec memory": (MemoryFileSystem(), f"/{uuid.uuid4().hex}"),
        "fsspec objects": (Objects(str(path / "objects")), "bucket/far"),
    }[kind]


def _write_partly(directory: Any, data: bytes, **options: Any) -> None:
    with directory.open_output("file", **options) as stream:
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
    from drawbar._storage.filesystem import to_pyarrow
    from drawbar._storage.remote_path import RemotePath

    filesystem, path = _make_filesystem(kind, tmp_path, s3)
    directory = RemotePath(path, to_pyarrow(filesystem))
    directory.write_file("other", b"other")
    for older in (None, b"older"):
        if older is not None:
            directory.write_file("file", older)
        with pytest.raises(KeyboardInterrupt):
            _write_partly(directory, BIG[:num_bytes], keeps_older=True)
        assert directory.read_or_none("file") == (None if kind == "fsspec memory" else older)
        with pytest.raises(KeyboardInterrupt):
            _write_partly(directory, BIG[:num_bytes])
        assert directory.read_or_none("file") == (older if keeps_older else None)
    directory.write_file("file", BIG)
    assert directory.read("file") == BIG
    assert directory.read("other") == b"other"
    assert [file.path for file in directory.list_files()] == ["file", "other"]


def test_kill_during_upload_to_s3_keeps_older_object(s3: Any, drivers: Drivers) -> None:
    from drawbar._storage.remote_path import RemotePath, delete_temporary_files

    path = f"bucket/{uuid.uuid4().hex}"
    directory = RemotePath(path, s3)
    for name in ("copied", "streamed"):
        directory.write_file(name, b"older")

    def main() -> None:
        from tests.train.storage.test_interrupted_writes import kill_in_uploads

        kill_in_uploads(s3, path)

    with drivers(main, PYTHONPATH=str(Path(__file__).parents[3])) as driver:
        driver.wait()
    assert driver.returncode == -signal.SIGKILL
    delete_temporary_files(directory)
    assert [(file.path, file.size) for file in directory.list_files()] == [
        ("copied", 5),
        ("streamed", 5),
    ]


def kill_in_uploads(filesystem: Any, path: str) -> None:
    from drawbar._storage.remote_path import RemotePath

    directory = RemotePath(path, filesystem)
    size = Random(0).randrange(len(BIG))
    with (
        directory.open_output("copied", keeps_older=True) as copied,
        directory.open_output("streamed") as streamed,
    ):
        copied.write(BIG)
        streamed.write(BIG[:size])
        os.kill(os.getpid(), signal.SIGKILL)


def make_interrupting(
    filesystem: Any, index: int, interrupt: Callable[[], object], fraction: float = 0.5
) -> dict[str, list[bytes]]:
    """Let one write to a filesystem store a part of its data and call a function.

    Args:
        filesystem: The filesystem, which is changed.
        index: Number of the files that are opened before it.
        interrupt: Called after the part of the data.
        fraction: Size of the part.

    Returns:
        The complete data of each write by path, which the writes extend.
    """
    written: dict[str, list[bytes]] = {}
    open_file = filesystem.open

    def open_interrupting(path: str, mode: str = "rb", **options: Any) -> Any:
        file = open_file(path, mode, **options)
        if "w" not in mode:
            return file
        path = re.sub(r"\.drawbar-(.+)\.\d+\.tmp$", r"\1", path)
        should_interrupt = sum(map(len, written.values())) == index
        contents = written.setdefault(path, [])
        contents.append(b"")
        store = getattr(file, "f", file)  # the file that a `LocalFileOpener` wraps
        write_data = store.write

        def write(data: bytes) -> None:
            contents[-1] += data
            write_data(data[: int(len(data) * fraction)] if should_interrupt else data)
            if should_interrupt:
                store.flush()
                interrupt()

        file.write = write
        return file

    filesystem.open = open_interrupting
    return written


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

        storage = LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)
        written = make_interrupting(storage, index, _fail)
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


def save_large(step: str) -> None:
    with train.checkpoint_dir() as path:
        (path / "model").write_text(step * 50_000)
        train.report({"step": int(step)}, checkpoint=path)


def save_older() -> None:
    save_large("0")
    save_large("1")


def make_storage(kind: str, path: Path) -> Any:
    """Return a local filesystem, or one that is an object store; None for a local path."""
    if kind == "local":
        return None
    is_object_store = kind == "objects"
    local = LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)
    return Objects(str(path)) if is_object_store else local


def fit_in(path: Path, kind: str, function: Any, storage: Any = None, **config: Any) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path="far" if kind == "objects" else str(path / "far"),
            storage_filesystem=storage or make_storage(kind, path),
            **config,
        ),
    ).fit()


def kill_at_random_byte(path: Path, kind: str, number: int) -> None:
    """Continue a run until the process is killed in one of its writes.

    Object stores and fsspec: in the write of this number. Local files: the kernel sends a signal
    when a file exceeds a size, which no program survives unless it handles the signal.
    """
    random = Random(number)
    storage = make_storage(kind, path)
    if storage is None:
        size = random.choice([random.randrange(1, 12_000), random.randrange(50_000)])
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    else:
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        make_interrupting(storage, number, kill, random.random())
    fit_in(path, kind, partial(save_large, "2"), storage, resume="must")


def is_killed(path: Path, kind: str, number: int) -> bool:
    """Call `kill_at_random_byte` in a fork; return whether it was killed."""
    pid = os.fork()
    if not pid:
        os.environ["XDG_CACHE_HOME"] = str(path / "cache")  # as on another machine
        try:
            kill_at_random_byte(path, kind, number)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def count_kills(folder: Path, kind: str) -> int:
    """Continue copies of a run until they are killed, each in another write."""
    for number in range(100):
        path = folder / f"{number}"
        shutil.copytree(folder / "older", path)
        if not is_killed(path, kind, number):
            return number  # all writes of the run have been interrupted
        if kind == "local" and number == 7:
            break
    return number + 1


@pytest.mark.parametrize("kind", ["local", "renaming", "objects"])
def test_kill_at_any_byte_of_a_write_keeps_committed_checkpoints(
    tmp_path: Path, drivers: Drivers, kind: str
) -> None:
    fit_in(tmp_path / "older", kind, save_older)

    def main() -> None:
        from tests.train.storage.test_interrupted_writes import count_kills

        print(count_kills(tmp_path, kind))

    output, _ = drivers.run(main, PYTHONPATH=str(Path(__file__).parents[3]))
    num_killed = int(output.split()[-1])
    assert num_killed > 6
    num_torn = 0
    for number in range(num_killed):
        path = tmp_path / f"{number}"
        storage = make_storage(kind, path)
        uri = "far/run" if kind == "objects" else str(path / "far" / "run")
        num_torn += len([*path.rglob(".drawbar-*.tmp")])
        steps = [content(found)[:1] for found, _ in Result.from_path(uri, storage).best_checkpoints]
        assert steps in (["0", "1"], ["0", "1", "2"]), number
        result = fit_in(path, kind, partial(save_large, "3"), resume="must")
        checkpoints = [content(checkpoint) for checkpoint, _ in result.best_checkpoints]
        assert checkpoints in [[step * 50_000 for step in steps] for steps in ("013", "0123")], (
            number
        )
        check_run(uri if kind == "objects" else Path(uri), storage)
        assert not [*path.rglob(".drawbar-*.tmp")], number
    assert num_torn or kind != "renaming"
