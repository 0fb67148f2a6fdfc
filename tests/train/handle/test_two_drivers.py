"""Several drivers start on one run directory at once: one gets it, and nothing is damaged."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
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
from drawbar.train._storage.journal_file import is_locked
from drawbar.train.testing import check_run

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # drivers cannot import the tests

DRIVERS = 4


def fit(
    storage: Path, pipe: Pipe | None = None, others_gave_up: Path | None = None, **where: Any
) -> Result:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path)
        if pipe is not None and others_gave_up is not None:
            pipe.say("got it")
            with others_gave_up.open():
                pass  # a FIFO opens when its other end is there

    run_config = RunConfig(name="run", storage_path=storage, **where)
    local = ScalingConfig(num_workers=0)
    return DataParallelTrainer(function, scaling_config=local, run_config=run_config).fit()


@pytest.fixture(params=["mounted", "remote"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Give the `storage_filesystem` of a storage that is mounted, or that is taken for a remote."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "mounted":
        return {}
    return {"storage_filesystem": LocalFileSystem(auto_mkdir=True)}


@pytest.mark.parametrize("before", ["nothing", "a run", "a damaged run"])
def test_exactly_one_gets_it(
    tmp_path: Path, drivers: Drivers, pipe: Pipe, before: str, where: dict[str, Any]
) -> None:
    others_gave_up = tmp_path / "others_gave_up"
    os.mkfifo(others_gave_up)
    if before != "nothing":
        fit(tmp_path, **where)
    if before == "a damaged run":
        journal = tmp_path / "run" / "journal.jsonl"
        journal.write_bytes(b"garbage\n" * 1000 + journal.read_bytes())

    def main() -> None:
        try:
            fit(tmp_path, pipe, others_gave_up, **where)
        except RunInProgressError:
            pipe.say("gave up")

    with ExitStack() as stack:
        started = [stack.enter_context(drivers(main)) for _ in range(DRIVERS)]
        said = sorted(" ".join(pipe.hear()) for _ in started)
        assert said == ["gave up"] * (DRIVERS - 1) + ["got it"]
        others_gave_up.write_text("")
        for driver in started:
            _, err = driver.communicate()
            assert driver.returncode == 0, err
    check_run(tmp_path / "run", **where)
    runs = 1 if before == "nothing" else 2
    assert len(Result.from_path(tmp_path / "run", **where).timeline.attempts) == runs


def test_a_run_that_a_driver_takes_up_here_is_read_from_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen: list[Any] = []

    class Reading(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
        cachable = False

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            for journal in tmp_path.glob("cache/*/*/journal.jsonl"):
                if not seen and is_locked(journal) and not journal.stat().st_size:
                    result = Result.from_path(tmp_path / "run", LocalFileSystem())
                    seen.append(result.timeline.attempts[-1].outcome)
            return super()._open(path, mode, **options)

    fit(tmp_path, storage_filesystem=LocalFileSystem(auto_mkdir=True))
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    fit(tmp_path, storage_filesystem=Reading(auto_mkdir=True))
    assert seen == ["finished"]


def test_who_reads_a_run_writes_nothing_here(
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


def test_who_gives_up_touches_nothing(
    tmp_path: Path, drivers: Drivers, pipe: Pipe, where: dict[str, Any]
) -> None:
    others_gave_up = tmp_path / "others_gave_up"
    os.mkfifo(others_gave_up)

    def first() -> None:
        fit(tmp_path, pipe, others_gave_up, **where)

    def second() -> None:
        Result.from_path(tmp_path / "run", **where)
        try:
            fit(tmp_path, pipe, others_gave_up, **where)
        except RunInProgressError as error:
            pipe.say("gave up" if "in another process" in str(error) else error)

    with drivers(first) as driver:
        assert pipe.hear() == ["got", "it"]
        (journal,) = tmp_path.glob("run/journal.jsonl" if not where else "cache/*/*/journal.jsonl")
        held = journal.stat().st_ino
        (journal.parent / ".workers").rmdir()  # as the first one may do while it starts
        if where:
            (tmp_path / "run" / "journal.jsonl").unlink()  # as before the first one puts it there
        with drivers(second) as other:
            assert pipe.hear() == ["gave", "up"]
            _, err = other.communicate()
            assert other.returncode == 0, err
        assert journal.stat().st_ino == held
        assert not (journal.parent / ".workers").exists()
        others_gave_up.write_text("")
        _, err = driver.communicate()
        assert driver.returncode == 0, err
    check_run(tmp_path / "run", **where)
    (attempt,) = Result.from_path(tmp_path / "run", **where).timeline.attempts
    assert attempt.outcome == "finished"
