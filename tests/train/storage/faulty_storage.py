"""Filesystems that fail, and runs that use them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import fsspec
from fsspec.implementations.local import LocalFileSystem

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointUploadMode,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

ASYNC = CheckpointUploadMode.ASYNC


class Faulty(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local filesystem with a hook that is called before a file is opened for writing."""

    protocol = ("faulty",)
    cachable = False

    def __init__(self, before_write: Callable[[str], None]) -> None:
        super().__init__(auto_mkdir=True)
        self.before_write = before_write

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.before_write(re.sub(r"\.drawbar-(.+)\.\d+\.tmp$", r"\1", path))
        return super().open(path, mode, **options)


class Unavailable(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local filesystem, where listings and look-ups fail until `num_failures` is 0.

    As for object stores, `isdir`, `isfile`, and `exists` return False if the request fails.
    """

    protocol = ("unavailable",)
    cachable = False
    isdir = fsspec.AbstractFileSystem.isdir
    isfile = fsspec.AbstractFileSystem.isfile
    exists = fsspec.AbstractFileSystem.exists

    def __init__(self) -> None:
        super().__init__(auto_mkdir=True)
        self.num_failures = 0

    def _fail(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("HTTP status code 503: Please reduce your request rate")

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self._fail()
        return super().ls(path, detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._fail()
        return super().info(path, **options)


def save(content: str, **options: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "model").write_text(content)
        train.report({"step": int(content)}, checkpoint=path, **options)


def content(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    with checkpoint.as_directory() as path:
        return (Path(path) / "model").read_text()


def fit(
    function: Any, path: Path, filesystem: Any = None, num_workers: int = 0, **config: Any
) -> Result:
    filesystem = filesystem or LocalFileSystem(auto_mkdir=True)
    run_config = RunConfig(
        name="run", storage_path=str(path / "far"), storage_filesystem=filesystem, **config
    )
    return DataParallelTrainer(
        function, scaling_config=ScalingConfig(num_workers=num_workers), run_config=run_config
    ).fit()


def make_fault(
    error: Callable[[], Exception], times: int, name: str = "model"
) -> Callable[[str], None]:
    """Return a hook that raises `times` times for files of this name, from the second on."""
    num_writes = 0

    def before_write(path: str) -> None:
        nonlocal num_writes
        if path.endswith(f"/{name}"):
            num_writes += 1
            if 1 < num_writes <= times + 1:
                raise error()

    return before_write


def two_steps() -> None:
    save("0")
    save("1")
