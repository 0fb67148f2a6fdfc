"""Tests of slow and failing storage, and of kills during commits."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from fsspec.implementations.local import LocalFileSystem

from drawbar import train
from drawbar.train import (
    Checkpoint,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    UserCallback,
    WorkerGroupError,
)
from drawbar.train.runs import find_run
from drawbar.train.testing import FAULT_POINTS, check_run, kill_at, run_in_threads
from tests.train.storage.faulty_storage import (
    ASYNC,
    Faulty,
    Unavailable,
    content,
    fit,
    make_fault,
    save,
    two_steps,
)

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

pytestmark = pytest.mark.usefixtures("quick_retries")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


@pytest.mark.parametrize("name", ["model", ".drawbar.json"])
@pytest.mark.parametrize(
    "error",
    [
        lambda: ConnectionResetError(errno.ECONNRESET, "reset"),
        lambda: TimeoutError("slow"),
        lambda: OSError("AWS Error SLOW_DOWN during PutObject: Please reduce your request rate"),
        lambda: OSError("HTTP status code 503"),
    ],
)
def test_transient_errors_are_retried_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Any, name: str
) -> None:
    with caplog.at_level(logging.WARNING, "drawbar.train"):
        result = fit(two_steps, tmp_path, Faulty(make_fault(error, times=3, name=name)))
    assert content(result.checkpoint) == "1"
    assert len([message for message in caplog.messages if "will be retried" in message]) == 1


class Counting(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local filesystem, which counts listings."""

    protocol = ("counting",)
    cachable = False

    def __init__(self) -> None:
        super().__init__(auto_mkdir=True)
        self.num_listings = 0

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.num_listings += 1
        return super().ls(path, detail, **options)


def _save_shards() -> None:
    for step in range(2):
        with train.checkpoint_dir() as path:
            (path / f"shard_{train.get_context().get_world_rank()}").touch()
            train.report({"step": step}, checkpoint=path)


def test_listings_of_remote_storage_do_not_grow_with_number_of_ranks(tmp_path: Path) -> None:
    counts = []
    for num_workers in (2, 8):
        storage = Counting()
        config = RunConfig(
            name="run", storage_path=str(tmp_path / f"{num_workers}"), storage_filesystem=storage
        )
        run_in_threads(_save_shards, num_workers=num_workers, run_config=config)
        counts.append(storage.num_listings)
    assert counts[0] == counts[1]


def _report_number_of_checkpoints() -> None:
    checkpoint = train.get_checkpoint()
    save("0" if checkpoint is None else str(int(content(checkpoint)) + 1))


@pytest.mark.parametrize("num_failures", [1, 2, 3, 4, 5])
def test_resume_with_failing_listings_finds_checkpoints(tmp_path: Path, num_failures: int) -> None:
    storage = Unavailable()
    fit(two_steps, tmp_path, storage)
    storage.num_failures = num_failures
    result = fit(_report_number_of_checkpoints, tmp_path, storage, resume="must")
    assert content(result.checkpoint) == "2"


def test_resume_with_unavailable_store_raises_instead_of_starting_again(tmp_path: Path) -> None:
    storage = Unavailable()
    fit(two_steps, tmp_path, storage)
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    storage.num_failures = 1_000_000
    with pytest.raises(OSError, match=r"failed 6 times: .*503"):
        fit(_report_number_of_checkpoints, tmp_path, storage)
    storage.num_failures = 0
    result = Result.from_path(str(tmp_path / "far" / "run"), storage_filesystem=storage)
    assert content(result.checkpoint) == "1"


def test_checkpoint_in_unavailable_store_is_retried_and_raises(tmp_path: Path) -> None:
    storage = Unavailable()
    saved = fit(two_steps, tmp_path, storage).checkpoint
    assert saved is not None
    checkpoint, run = Checkpoint(saved.path, storage), find_run(tmp_path / "far" / "run", storage)
    storage.num_failures = 1
    checkpoint.verify()
    storage.num_failures = 1
    assert content(checkpoint) == "1"
    storage.num_failures = 1_000_000
    for call in (
        partial(checkpoint.to_directory, tmp_path / "copy"),
        checkpoint.get_metadata,
        partial(Result.from_path, tmp_path / "far" / "run", storage),
        run.list_checkpoints,
    ):
        with pytest.raises(OSError, match="503"):
            call()


def test_persistent_transient_error_raises_with_path_and_size(tmp_path: Path) -> None:
    fault = make_fault(lambda: ConnectionError("no route"), times=1000)
    with pytest.raises(WorkerGroupError) as raised:
        fit(two_steps, tmp_path, Faulty(fault))
    assert "writing 1 bytes to " in str(raised.value)
    assert "/far/run/checkpoint_000001/model failed 6 times: no route" in str(raised.value)
    assert content(Result.from_path(tmp_path / "far" / "run").checkpoint) == "0"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_permanent_error_is_not_retried(tmp_path: Path, number: int) -> None:
    fault = make_fault(lambda: OSError(number, os.strerror(number)), times=1)
    with pytest.raises(WorkerGroupError, match=os.strerror(number)):
        fit(two_steps, tmp_path, Faulty(fault))


def test_failed_manifest_write_fails_the_run(tmp_path: Path) -> None:
    fault = make_fault(lambda: OSError(errno.ENOSPC, "full"), times=1, name=".drawbar.json")
    with pytest.raises(ControllerError, match=r"checkpoint_000001/\.drawbar\.json failed: full"):
        fit(two_steps, tmp_path, Faulty(fault))
    assert content(Result.from_path(tmp_path / "far" / "run").checkpoint) == "0"


@contextlib.contextmanager
def catch_slow_warning() -> Iterator[threading.Event]:
    """Provide an event that is set when Drawbar logs that an operation is slow."""
    has_warned = threading.Event()

    class WarningHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is slow" in record.getMessage():
                has_warned.set()

    handler = WarningHandler()
    logging.getLogger("drawbar.train").addHandler(handler)
    try:
        yield has_warned
    finally:
        logging.getLogger("drawbar.train").removeHandler(handler)


@pytest.mark.usefixtures("early_slow_warning")
def test_slow_upload_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wait_for_notice(path: str) -> None:
        if path.endswith("/model"):
            assert has_warned.wait(300)

    with catch_slow_warning() as has_warned:
        fit(lambda: save("0"), tmp_path, Faulty(wait_for_notice))
    assert any("writing checkpoint checkpoint_000000 of rank_0" in m for m in caplog.messages)


@pytest.mark.usefixtures("early_slow_warning")
def test_slow_upload_fn_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def function() -> None:
        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            assert has_warned.wait(300)
            return checkpoint

        with catch_slow_warning() as has_warned:
            save("0", checkpoint_upload_fn=upload)

    result = fit(function, tmp_path)
    warning = "checkpoint_upload_fn for checkpoint checkpoint_000000 of rank_0 is slow"
    assert any(message.startswith(warning) for message in caplog.messages)
    assert content(result.checkpoint) == "0"


def test_slow_storage_blocks_async_reports(tmp_path: Path) -> None:
    reported: list[str] = []
    reader, writer = os.pipe()

    def before_write(path: str) -> None:
        if path.endswith("/model"):
            os.read(reader, 1)

    def function() -> None:
        def unblock() -> None:
            reported.append("unblocked")
            os.write(writer, b"...")

        for step in range(3):
            if step == 2:
                threading.Timer(0.2, unblock).start()
            save(str(step), checkpoint_upload_mode=ASYNC)
            reported.append(str(step))

    assert content(fit(function, tmp_path, Faulty(before_write)).checkpoint) == "2"
    assert reported == ["0", "1", "unblocked", "2"]


def test_files_persisted_before_function_raises_are_committed(tmp_path: Path) -> None:
    def function() -> None:
        save("0", checkpoint_upload_mode=ASYNC)
        raise RuntimeError("on purpose")

    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(function, tmp_path)
    assert content(Result.from_path(tmp_path / "far" / "run").checkpoint) == "0"


def test_stuck_upload_does_not_delay_error(tmp_path: Path) -> None:
    ended = threading.Event()

    def before_write(path: str) -> None:
        if path.endswith("/model"):
            ended.wait(300)

    def function() -> None:
        save("0", checkpoint_upload_mode=ASYNC)
        raise RuntimeError("on purpose")

    try:
        with pytest.raises(WorkerGroupError, match="on purpose"):
            fit(function, tmp_path, Faulty(before_write))
        assert not ended.is_set()
    finally:
        ended.set()


def test_restart_waits_for_uploads_of_previous_attempt(tmp_path: Path) -> None:
    failed, overlaps = threading.Event(), list[bool]()
    reader, writer = os.pipe()

    class FailureRecorder(UserCallback):
        def after_exception(self, *_: Any) -> None:
            failed.set()

    def before_write(path: str) -> None:
        if path.endswith("/model") and not overlaps:
            assert failed.wait(300)
            overlaps.append(bool(select.select([reader], [], [], 0.5)[0]))

    def function() -> None:
        is_restart = (tmp_path / "is_restart").exists()
        if is_restart:
            os.write(writer, b"began")
        save("0", checkpoint_upload_mode=ASYNC)
        if not is_restart:
            (tmp_path / "is_restart").touch()
            raise RuntimeError("on purpose")

    once_more = FailureConfig(max_failures=1)
    fit(
        function,
        tmp_path,
        Faulty(before_write),
        failure_config=once_more,
        callbacks=[FailureRecorder()],
    )
    assert overlaps == [False]


@pytest.mark.usefixtures("ray_cluster")
def test_process_with_stuck_upload_is_not_reused(tmp_path: Path) -> None:
    upload_started, first_pid = tmp_path / "upload_started", tmp_path / "first_pid"
    os.mkfifo(upload_started)

    def before_write(path: str) -> None:
        if path.endswith("/model") and not first_pid.exists():
            first_pid.write_text(str(os.getpid()))
            with upload_started.open("w"):
                threading.Event().wait()

    def function() -> int:
        is_restart = first_pid.exists()
        if train.get_context().get_world_rank() == 0:
            save("0", checkpoint_upload_mode=ASYNC)
            if not is_restart:
                train.collective.barrier()
        else:
            train.report({})
            if not is_restart:
                with upload_started.open():
                    raise RuntimeError("on purpose")
        return os.getpid()

    once_more = FailureConfig(max_failures=1)
    pids = fit(function, tmp_path, Faulty(before_write), 2, failure_config=once_more).return_values
    assert pids[0] != int(first_pid.read_text())


class TokenExpired(Exception):
    """An error that is not an OSError, as libraries below fsspec filesystems may raise."""


@pytest.mark.parametrize("error", [lambda: OSError(errno.EACCES, "no"), TokenExpired])
def test_failed_journal_upload_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Callable[[], Exception]
) -> None:
    fault = make_fault(error, times=1000, name="journal.jsonl")
    assert content(fit(two_steps, tmp_path, Faulty(fault)).checkpoint) == "1"
    assert any("Could not upload" in message for message in caplog.messages)


def test_end_of_run_is_uploaded_despite_other_failed_uploads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        work_directory = train.get_context().get_storage()
        for link in (".staging/latest", "logs/latest"):  # as experiment trackers create them
            (work_directory / link).symlink_to("nowhere")
        print("printed at the end")

    refused = make_fault(lambda: OSError(errno.EACCES, "no"), times=1, name="trainer.pkl")
    fit(function, tmp_path, Faulty(refused))
    shutil.rmtree(tmp_path / "cache")
    run = tmp_path / "far" / "run"
    assert Result.from_path(run, LocalFileSystem()).timeline.attempts[-1].outcome == "finished"
    assert "printed at the end" in (run / "logs" / "rank_0.log").read_text()
    names = [message.split()[3] for message in caplog.messages if "Could not upload" in message]
    assert sorted(names) == ["logs/latest", "trainer.pkl"]


def test_trainer_that_was_not_uploaded_is_restored_locally(tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        if path.endswith("/trainer.pkl"):
            raise OSError(errno.EACCES, "no")

    fit(two_steps, tmp_path, Faulty(refuse))
    far = (tmp_path / "far" / "run", Faulty(lambda path: None))
    assert DataParallelTrainer.can_restore(*far)
    assert DataParallelTrainer.restore(*far).train_loop_per_worker.__name__ == "two_steps"


def test_driver_killed_at_any_step_keeps_committed_checkpoints(
    tmp_path: Path, drivers: Drivers
) -> None:
    def drive(point: str) -> None:
        # The segment of an attempt is compressed once, at its end.
        kill_at(point, occurrence=1 if point == "reports.compressed" else 2)
        fit(two_steps, tmp_path / point)

    def main() -> None:  # forks, because importing Drawbar in each driver takes most of the time
        for point in FAULT_POINTS:
            driver = multiprocessing.get_context("fork").Process(target=drive, args=[point])
            driver.start()
            driver.join()
            assert driver.exitcode == -signal.SIGKILL, point

    drivers.run(main, XDG_CACHE_HOME=str(tmp_path / "cache"))
    for number, point in enumerate(FAULT_POINTS):
        is_committed = number >= FAULT_POINTS.index("commit.manifest")
        run = tmp_path / point / "far" / "run"
        # The journal on remote storage is uploaded after the commit, so it may lag behind it.
        newest = Result.from_path(str(run), LocalFileSystem(auto_mkdir=True)).checkpoint
        assert content(newest) == ("1" if is_committed else "0"), point
        assert newest is not None
        newest.verify()
        fit(lambda: None, tmp_path / point, resume="must")
        assert len(list(run.glob("checkpoint_*"))) == (2 if is_committed else 1), point


@pytest.mark.usefixtures("small_files")
def test_closed_segments_of_reports_are_uploaded_once(tmp_path: Path) -> None:
    def function() -> None:
        for step in range(12):
            for _ in range(20):
                train.report({"step": step})
            save(str(step))

    written: list[str] = []
    result = fit(function, tmp_path, Faulty(lambda path: written.append(Path(path).name)))
    closed = [name for name in written if name.endswith(".jsonl.gz")]
    assert len(closed) == len(set(closed)) > 10
    run = tmp_path / "far" / "run"
    assert sorted(path.name for path in (run / "reports").iterdir()) == sorted(closed)
    assert not any((tmp_path / "cache").rglob("*.jsonl*"))
    assert len(result.metrics_dataframe) == 12 * 21
    check_run(run)


@pytest.mark.usefixtures("small_files")
def test_upload_after_commit_does_not_grow_with_the_run(tmp_path: Path) -> None:
    sizes: list[int] = []

    def record_size(path: str) -> None:
        journal = next((tmp_path / "cache").rglob("journal.jsonl"))
        if "journal.parts" in path:
            sizes.append(journal.stat().st_size - int(Path(path).name))

    def function() -> None:
        for step in range(40):
            save(str(step))

    result = fit(function, tmp_path, Faulty(record_size))
    run = tmp_path / "far" / "run"
    assert len(sizes) > 5  # a busy machine uploads several commits at once
    assert max(sizes) < 4000 < (run / "journal.jsonl").stat().st_size
    assert not list((run / "journal.parts").iterdir())
    assert len(result.best_checkpoints) == 40
    check_run(run)


def read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):  # not there yet, or replaced
        return path.read_bytes()
    return b""


def wait_for_part(run: Path) -> Path:
    while not (parts := list((run / "journal.parts").glob("*"))):
        os.sched_yield()
    return parts[0]


def test_open_segment_in_remote_storage_is_closed_by_resume_on_another_machine(
    tmp_path: Path, drivers: Drivers
) -> None:
    run = tmp_path / "far" / "run"

    def function() -> None:
        train.report({"step": 0})
        save("0")
        while read(run / "reports" / "0-0.jsonl") == b"":
            os.sched_yield()
        while b"checkpoint_000001" not in read(wait_for_part(run)):
            os.sched_yield()
        threading.Event().wait(0.5)  # this filesystem, unlike an object store, truncates first
        os._exit(9)

    with drivers(lambda: fit(function, tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache")) as driver:
        assert driver.wait() == 9, driver.communicate()
    shutil.rmtree(tmp_path / "cache")
    far = (str(run), LocalFileSystem(auto_mkdir=True))
    assert len(Result.from_path(*far).metrics_dataframe) == 2
    result = fit(lambda: train.report({"step": 2}), tmp_path)
    assert result.metrics_dataframe["index"].tolist() == [0, 1, 2]
    names = sorted(path.name for path in (run / "reports").iterdir())
    assert names == ["0-0-2.jsonl.gz", "1-0-1.jsonl.gz"]
    check_run(*far)
