"""Several drivers start on one run directory at once: one succeeds, and nothing is damaged."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from fsspec.implementations.local import LocalFileSystem

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    Result,
    RunConfig,
    RunInProgressError,
    ScalingConfig,
)
from drawbar.train.testing import check_run

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # drivers cannot import the tests

DRIVERS = 4


def fit(
    storage: Path, pipe: Pipe | None = None, others_failed: Path | None = None, **where: Any
) -> Result:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path)
        if pipe is not None and others_failed is not None:
            pipe.send("started")
            with others_failed.open():
                pass  # opening a FIFO waits for its other end

    run_config = RunConfig(name="run", storage_path=storage, **where)
    local = ScalingConfig(num_workers=0)
    return DataParallelTrainer(function, scaling_config=local, run_config=run_config).fit()


@pytest.fixture(params=["mounted", "remote"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Return the `storage_filesystem` of a mounted storage and of one that counts as remote."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "mounted":
        return {}
    return {"storage_filesystem": LocalFileSystem(auto_mkdir=True)}


@pytest.mark.parametrize(
    "before", ["nothing", pytest.param("a run", marks=pytest.mark.nightly), "a damaged run"]
)
def test_concurrent_fits_start_exactly_one_run(
    tmp_path: Path, drivers: Drivers, pipe: Pipe, before: str, where: dict[str, Any]
) -> None:
    others_failed = tmp_path / "others_failed"
    os.mkfifo(others_failed)
    if before != "nothing":
        fit(tmp_path, **where)
    if before == "a damaged run":
        journal = tmp_path / "run" / "journal.jsonl"
        journal.write_bytes(b"garbage\n" * 1000 + journal.read_bytes())

    def drive() -> None:
        try:
            fit(tmp_path, pipe, others_failed, **where)
        except RunInProgressError:
            pipe.send("rejected")

    def main() -> None:  # forks, because importing Drawbar in each driver takes most of the time
        started = [
            multiprocessing.get_context("fork").Process(target=drive) for _ in range(DRIVERS)
        ]
        for driver in started:
            driver.start()
        for driver in started:
            driver.join()
        assert [driver.exitcode for driver in started] == [0] * DRIVERS

    with drivers(main) as parent:
        messages = sorted(" ".join(pipe.receive()) for _ in range(DRIVERS))
        assert messages == ["rejected"] * (DRIVERS - 1) + ["started"]
        others_failed.write_text("")
        _, err = parent.communicate()
        assert parent.returncode == 0, err
    check_run(tmp_path / "run", **where)
    runs = 1 if before == "nothing" else 2
    assert len(Result.from_path(tmp_path / "run", **where).timeline.attempts) == runs


def is_locked(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_result_during_resume_is_read_from_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcomes: list[Any] = []

    class Reading(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
        cachable = False

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            for journal in tmp_path.glob("cache/*/*/journal.jsonl"):
                if not outcomes and is_locked(journal) and not journal.stat().st_size:
                    result = Result.from_path(tmp_path / "run", LocalFileSystem())
                    outcomes.append(result.timeline.attempts[-1].outcome)
            return super()._open(path, mode, **options)

    fit(tmp_path, storage_filesystem=LocalFileSystem(auto_mkdir=True))
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    fit(tmp_path, storage_filesystem=Reading(auto_mkdir=True))
    assert outcomes == ["finished"]


def test_reading_remote_run_writes_no_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    where = {"storage_filesystem": LocalFileSystem(auto_mkdir=True)}
    fit(tmp_path, **where)
    shutil.rmtree(tmp_path / "cache")
    result = Result.from_path(tmp_path / "run", **where)
    assert result.metrics == {}
    assert list(result.metrics_dataframe["rank"]) == [0]
    assert train.attach(tmp_path / "run", **where).status == "finished"
    assert DataParallelTrainer.can_restore(tmp_path / "run", **where)
    check_run(tmp_path / "run", **where)
    assert not (tmp_path / "cache").exists()


def test_rejected_fit_changes_no_files(
    tmp_path: Path, drivers: Drivers, pipe: Pipe, where: dict[str, Any]
) -> None:
    others_failed = tmp_path / "others_failed"
    os.mkfifo(others_failed)

    def first() -> None:
        fit(tmp_path, pipe, others_failed, **where)

    def second() -> None:
        Result.from_path(tmp_path / "run", **where)
        try:
            fit(tmp_path, pipe, others_failed, **where)
        except RunInProgressError as error:
            pipe.send("rejected" if "in another process" in str(error) else error)

    with drivers(first) as driver:
        assert pipe.receive() == ["started"]
        (journal,) = tmp_path.glob("run/journal.jsonl" if not where else "cache/*/*/journal.jsonl")
        inode = journal.stat().st_ino
        (journal.parent / ".workers").rmdir()  # as the first driver may do during its start
        if where:
            (tmp_path / "run" / "journal.jsonl").unlink()  # as before its first upload
        with drivers(second) as other:
            assert pipe.receive() == ["rejected"]
            _, err = other.communicate()
            assert other.returncode == 0, err
        assert journal.stat().st_ino == inode
        assert not (journal.parent / ".workers").exists()
        others_failed.write_text("")
        _, err = driver.communicate()
        assert driver.returncode == 0, err
    check_run(tmp_path / "run", **where)
    (attempt,) = Result.from_path(tmp_path / "run", **where).timeline.attempts
    assert attempt.outcome == "finished"
