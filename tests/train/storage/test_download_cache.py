"""Tests of the copies of remote checkpoints on this machine."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from drawbar.train import Checkpoint, CheckpointError, DataParallelTrainer, RunConfig, ScalingConfig
from tests.train.storage.faulty_storage import content, fit, save, two_steps

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def temp_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory for temporary files, which belongs to the test."""
    directory = tmp_path / "temp_directory"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return directory


def test_storage_filesystem_accepts_fsspec_memory_filesystem(tmp_path: Path) -> None:
    config = RunConfig(
        name="run", storage_path=uuid.uuid4().hex, storage_filesystem=fsspec.filesystem("memory")
    )
    scaling = ScalingConfig(num_workers=0)
    result = DataParallelTrainer(two_steps, scaling_config=scaling, run_config=config).fit()
    assert content(result.checkpoint) == "1"


@pytest.mark.usefixtures("temp_directory")
def test_cached_copy_of_killed_reader_is_not_reused(tmp_path: Path, drivers: Drivers) -> None:
    """The directory does not belong to a run, so the cache key does not depend on its files."""
    path = tmp_path / "pretrained"
    path.mkdir()
    (path / "model").write_text("old")
    checkpoint = Checkpoint(path, LocalFileSystem(auto_mkdir=True))

    def main() -> None:
        with checkpoint.as_directory():
            os.kill(os.getpid(), signal.SIGKILL)

    with drivers(main) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.communicate()
    (path / "model").write_text("new")
    assert content(checkpoint) == "new"


@pytest.mark.usefixtures("temp_directory")
def test_cached_copy_of_reused_name_is_not_shared(tmp_path: Path) -> None:
    first = fit(lambda: save("0"), tmp_path).checkpoint
    assert first is not None
    with first.as_directory() as path:
        shutil.rmtree(tmp_path / "far")
        second = fit(lambda: save("1"), tmp_path).checkpoint
        assert second == first
        assert content(second) == "1"
        assert (Path(path) / "model").read_text() == "0"


def test_failed_download_leaves_no_files(tmp_path: Path, temp_directory: Path) -> None:
    checkpoint = fit(lambda: save("0"), tmp_path).checkpoint
    assert checkpoint is not None

    class UnreadableFilesystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            if path.endswith("/model"):
                raise PermissionError(errno.EACCES, "no")
            return super()._open(path, mode, **options)

    with pytest.raises(OSError, match="reading 1 bytes"):
        content(Checkpoint(checkpoint.path, UnreadableFilesystem()))
    assert not list((temp_directory / f"drawbar-{os.geteuid()}").iterdir())


def test_cached_copy_is_in_private_directory(tmp_path: Path, temp_directory: Path) -> None:
    checkpoint = fit(lambda: save("0"), tmp_path).checkpoint
    assert checkpoint is not None
    directory = temp_directory / f"drawbar-{os.geteuid()}"
    with checkpoint.as_directory() as path:
        assert Path(path).parent == directory
        assert directory.stat().st_mode & 0o777 == 0o700
    assert list(directory.iterdir()) == []


def open_to_others(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o770)


def link(directory: Path) -> None:
    directory.symlink_to("elsewhere")


@pytest.mark.parametrize("create", [open_to_others, link, Path.touch])
def test_temp_directory_that_others_can_enter_raises(
    tmp_path: Path, temp_directory: Path, create: Callable[[Path], None]
) -> None:
    (temp_directory / "elsewhere").mkdir()
    create(temp_directory / f"drawbar-{os.geteuid()}")
    checkpoint = fit(lambda: save("0"), tmp_path).checkpoint  # runs work without their socket
    with pytest.raises(CheckpointError, match="Remove it, or set TMPDIR to a private directory"):
        content(checkpoint)
