"""Tests of full and unwritable disks."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import pytest
from fsspec.implementations.local import LocalFileSystem

from drawbar import train
from drawbar.train import (
    CheckpointUploadMode,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from drawbar.train.testing import check_run
from tests.train.storage.faulty_storage import ASYNC, Faulty, content, fit, save, two_steps

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.mark.parametrize("is_local", [True, False])
def test_full_disk_fails_the_run_with_path_and_size(
    tmp_path: Path, drivers: Drivers, is_local: bool
) -> None:
    """RLIMIT_FSIZE makes every write beyond 100 kB fail, like a full disk or a quota."""

    def function() -> None:
        save("0")
        source = tmp_path / "source"
        source.mkdir()
        (source / "model").write_bytes(bytes(90_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        train.report({}, checkpoint=source)

    def main() -> None:
        config = RunConfig(name="run", storage_path=tmp_path)
        if not is_local:
            config = RunConfig(
                name="run",
                storage_path=str(tmp_path),
                storage_filesystem=LocalFileSystem(auto_mkdir=True),
            )
        scaling = ScalingConfig(num_workers=0)
        DataParallelTrainer(function, scaling_config=scaling, run_config=config).fit()

    with drivers(main, XDG_CACHE_HOME=str(tmp_path / "cache")) as driver:
        _, err = driver.communicate(timeout=300)
    assert "90 kB (90000 bytes)" in err
    assert f"{tmp_path}/run" in err
    assert "File too large" in err
    assert content(Result.from_path(tmp_path / "run").checkpoint) == "0"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a filesystem of 1 MB, if this machine permits it."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {path} 2>/dev/null"):
        pytest.skip("needs permission to mount a tmpfs")
    yield path
    os.system(f"umount -l {path}")


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
def test_full_disk_is_not_retried(
    tiny_disk: Path, tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model").write_bytes(bytes(2_000_000))

    def function() -> None:
        save("0")
        train.report({}, checkpoint=source, checkpoint_upload_mode=mode)

    restarts = FailureConfig(max_failures=3)
    config = RunConfig(name="run", storage_path=tiny_disk, failure_config=restarts)
    message = r"StorageError: .*writing 2 MB .* No space left on device"
    with pytest.raises(WorkerGroupError, match=message) as raised:
        DataParallelTrainer(
            function, scaling_config=ScalingConfig(num_workers=0), run_config=config
        ).fit()
    assert "The run ends: it would fail again in the same way" in str(raised.value)
    (failure,) = raised.value.failures
    lines = [line for line in failure.traceback.splitlines() if 'File "' in line]
    assert all(__file__ in line for line in lines)
    result = Result.from_path(tiny_disk / "run")
    assert content(result.checkpoint) == "0"
    assert len(result.timeline.attempts) == 1


def test_journal_on_full_disk_fails_run_and_stays_intact(tiny_disk: Path) -> None:
    def function() -> None:
        if train.get_checkpoint() is not None:
            return
        save("0")
        with suppress(OSError), (tiny_disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1000))
        for step in range(10_000):
            train.report({"step": step})

    config = RunConfig(name="run", storage_path=tiny_disk)
    trainer = DataParallelTrainer(
        function, scaling_config=ScalingConfig(num_workers=0), run_config=config
    )
    message = (
        r"writing \d+ bytes to .*/run/(journal|reports/0-0)\.jsonl failed: No space left on device"
    )
    with pytest.raises(ControllerError, match=message):
        trainer.fit()
    assert content(Result.from_path(tiny_disk / "run").checkpoint) == "0"
    check_run(tiny_disk / "run")
    (tiny_disk / "filler").unlink()
    assert trainer.fit().error is None
    check_run(tiny_disk / "run")


def test_trainer_that_cannot_be_saved_keeps_previous_one(tmp_path: Path, drivers: Drivers) -> None:
    def main() -> None:
        run_config = RunConfig(name="run", storage_path=tmp_path)
        local = ScalingConfig(num_workers=0)
        small, large = "small", os.urandom(100_000)
        DataParallelTrainer(lambda: small, scaling_config=local, run_config=run_config).fit()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        DataParallelTrainer(lambda: large, scaling_config=local, run_config=run_config).fit()

    with drivers(main) as driver:
        _, err = driver.communicate(timeout=300)
    assert f"to {tmp_path}/run/trainer.pkl failed: File too large" in err
    assert not list((tmp_path / "run").glob(".drawbar*"))
    assert DataParallelTrainer.restore(tmp_path / "run").fit().return_value == "small"


def test_unwritable_storage_fails_at_start(tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError, match=r"\.drawbar-probe-.* failed: Permission denied"):
        fit(two_steps, tmp_path, Faulty(refuse))
