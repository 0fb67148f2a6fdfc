"""Storage that is slow, fails now and then or for ever, or is full; kills in the protocol."""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointError,
    CheckpointUploadMode,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
)
from drawbar.train._storage import retries as retry
from drawbar.train.testing import FAULT_POINTS, check_run, kill_at

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ASYNC = CheckpointUploadMode.ASYNC


class Faulty(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local filesystem, where opening a file for writing does what a test wants first."""

    protocol = ("faulty",)
    cachable = False

    def __init__(self, before_write: Callable[[str], None]) -> None:
        super().__init__(auto_mkdir=True)
        self.before_write = before_write

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.before_write(path)
        return super().open(path, mode, **options)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep work folders below the test's own, and do not wait long before trying again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "INITIAL_DELAY_S", 0.001)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder of temporary files, which is the test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def save(content: str, **how: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "model").write_text(content)
        train.report({"step": int(content)}, checkpoint=path, **how)


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


def failing(
    error: Callable[[], Exception], times: int, name: str = "model"
) -> Callable[[str], None]:
    """Make a fault that strikes `times` times at files of this name, from the second one on."""
    seen = 0

    def before_write(path: str) -> None:
        nonlocal seen
        if path.endswith(f"/{name}"):
            seen += 1
            if 1 < seen <= times + 1:
                raise error()

    return before_write


def two_steps() -> None:
    save("0")
    save("1")


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
def test_what_passes_is_tried_again_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Any, name: str
) -> None:
    with caplog.at_level(logging.WARNING, "drawbar.train"):
        result = fit(two_steps, tmp_path, Faulty(failing(error, times=3, name=name)))
    assert content(result.checkpoint) == "1"
    assert len([each for each in caplog.messages if "will be retried" in each]) == 1


def test_what_never_passes_fails_with_path_and_bytes(tmp_path: Path) -> None:
    fault = failing(lambda: ConnectionError("no route"), times=1000)
    with pytest.raises(WorkerGroupError) as raised:
        fit(two_steps, tmp_path, Faulty(fault))
    assert "writing 1 bytes to " in str(raised.value)
    assert "/far/run/checkpoint_000001/model failed 6 times: no route" in str(raised.value)
    assert content(Result.from_path(tmp_path / "far" / "run").checkpoint) == "0"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_what_will_not_pass_fails_at_once(tmp_path: Path, number: int) -> None:
    fault = failing(lambda: OSError(number, os.strerror(number)), times=1)
    with pytest.raises(WorkerGroupError, match=os.strerror(number)):
        fit(two_steps, tmp_path, Faulty(fault))


def test_a_manifest_that_cannot_be_written_fails_the_run(tmp_path: Path) -> None:
    fault = failing(lambda: OSError(errno.ENOSPC, "full"), times=1, name=".drawbar.json")
    with pytest.raises(ControllerError, match=r"checkpoint_000001/\.drawbar\.json failed: full"):
        fit(two_steps, tmp_path, Faulty(fault))
    assert content(Result.from_path(tmp_path / "far" / "run").checkpoint) == "0"


def test_a_slow_upload_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "SLOW_WARNING_PERIOD_S", 0.01)
    told = threading.Event()

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is slow" in record.getMessage():
                told.set()

    handler = Tell()
    logging.getLogger("drawbar.train").addHandler(handler)

    def wait_for_notice(path: str) -> None:
        if path.endswith("/model"):
            assert told.wait(30)

    try:
        fit(lambda: save("0"), tmp_path, Faulty(wait_for_notice))
    finally:
        logging.getLogger("drawbar.train").removeHandler(handler)
    assert any("writing checkpoint checkpoint_000000 of rank_0" in m for m in caplog.messages)


def test_a_slow_storage_holds_back_asynchronous_reports(tmp_path: Path) -> None:
    reported: list[str] = []
    reader, writer = os.pipe()

    def before_write(path: str) -> None:
        if path.endswith("/model"):
            os.read(reader, 1)

    def function() -> None:
        def let_it_go() -> None:
            reported.append("let go")
            os.write(writer, b"...")

        for step in range(3):
            if step == 2:
                threading.Timer(0.2, let_it_go).start()
            save(str(step), checkpoint_upload_mode=ASYNC)
            reported.append(str(step))

    assert content(fit(function, tmp_path, Faulty(before_write)).checkpoint) == "2"
    assert reported == ["0", "1", "let go", "2"]


def test_what_was_persisted_when_the_function_raised_is_committed(tmp_path: Path) -> None:
    def function() -> None:
        save("0", checkpoint_upload_mode=ASYNC)
        raise RuntimeError("on purpose")

    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(function, tmp_path)
    assert content(Result.from_path(tmp_path / "far" / "run").checkpoint) == "0"


def test_a_stuck_upload_does_not_hold_up_the_error_for_long(tmp_path: Path) -> None:
    ended = threading.Event()

    def before_write(path: str) -> None:
        if path.endswith("/model"):
            ended.wait(30)

    def function() -> None:
        save("0", checkpoint_upload_mode=ASYNC)
        raise RuntimeError("on purpose")

    try:
        with pytest.raises(WorkerGroupError, match="on purpose"):
            fit(function, tmp_path, Faulty(before_write))
        assert not ended.is_set()
    finally:
        ended.set()


def test_no_attempt_begins_while_the_one_before_still_uploads(tmp_path: Path) -> None:
    failed, overlaps = threading.Event(), list[bool]()
    reader, writer = os.pipe()

    class Tell(UserCallback):
        def after_exception(self, *_: Any) -> None:
            failed.set()

    def before_write(path: str) -> None:
        if path.endswith("/model") and not overlaps:
            assert failed.wait(30)
            overlaps.append(bool(select.select([reader], [], [], 0.5)[0]))

    def function() -> None:
        again = (tmp_path / "again").exists()
        if again:
            os.write(writer, b"began")
        save("0", checkpoint_upload_mode=ASYNC)
        if not again:
            (tmp_path / "again").touch()
            raise RuntimeError("on purpose")

    once_more = FailureConfig(max_failures=1)
    fit(function, tmp_path, Faulty(before_write), failure_config=once_more, callbacks=[Tell()])
    assert overlaps == [False]


@pytest.mark.usefixtures("ray_cluster")
def test_a_process_whose_upload_is_stuck_is_not_kept(tmp_path: Path) -> None:
    under_way, first_pid = tmp_path / "under_way", tmp_path / "first_pid"
    os.mkfifo(under_way)

    def before_write(path: str) -> None:
        if path.endswith("/model") and not first_pid.exists():
            first_pid.write_text(str(os.getpid()))
            with under_way.open("w"):
                threading.Event().wait()

    def function() -> int:
        again = first_pid.exists()
        if train.get_context().get_world_rank() == 0:
            save("0", checkpoint_upload_mode=ASYNC)
            if not again:
                train.collective.barrier()
        else:
            train.report({})
            if not again:
                with under_way.open():
                    raise RuntimeError("on purpose")
        return os.getpid()

    once_more = FailureConfig(max_failures=1)
    pids = fit(function, tmp_path, Faulty(before_write), 2, failure_config=once_more).return_values
    assert pids[0] != int(first_pid.read_text())


class TokenExpired(Exception):
    """What a library raises below an fsspec filesystem need not be an OSError."""


@pytest.mark.parametrize("error", [lambda: OSError(errno.EACCES, "no"), TokenExpired])
def test_a_failing_journal_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Callable[[], Exception]
) -> None:
    fault = failing(error, times=1000, name="journal.jsonl")
    assert content(fit(two_steps, tmp_path, Faulty(fault)).checkpoint) == "1"
    assert any("Could not upload" in each for each in caplog.messages)


def test_the_end_of_a_run_is_published_whatever_lies_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        work_folder = train.get_context().get_storage()
        for left in (".staging/latest", "logs/latest"):  # as trackers make them
            (work_folder / left).symlink_to("nowhere")
        print("said at the end")

    refused = failing(lambda: OSError(errno.EACCES, "no"), times=1, name="trainer.pkl")
    fit(function, tmp_path, Faulty(refused))
    shutil.rmtree(tmp_path / "cache")
    run = tmp_path / "far" / "run"
    assert Result.from_path(run, LocalFileSystem()).timeline.attempts[-1].outcome == "finished"
    assert "said at the end" in (run / "logs" / "rank_0.log").read_text()
    told = [each.split()[3] for each in caplog.messages if "Could not upload" in each]
    assert sorted(told) == ["logs/latest", "trainer.pkl"]


def test_a_trainer_that_only_this_machine_has_is_restored(tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        if path.endswith("/trainer.pkl"):
            raise OSError(errno.EACCES, "no")

    fit(two_steps, tmp_path, Faulty(refuse))
    far = (tmp_path / "far" / "run", Faulty(lambda path: None))
    assert DataParallelTrainer.can_restore(*far)
    assert DataParallelTrainer.restore(*far).train_loop_per_worker.__name__ == "two_steps"


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_driver_killed_at_any_step_loses_nothing_committed(
    tmp_path: Path, drivers: Drivers, point: str
) -> None:
    def main() -> None:
        kill_at(point, occurrence=2)
        fit(two_steps, tmp_path)

    with drivers(main, XDG_CACHE_HOME=str(tmp_path / "cache")) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.communicate()
    done = FAULT_POINTS.index(point) >= FAULT_POINTS.index("commit.manifest")
    run = tmp_path / "far" / "run"
    newest = Result.from_path(run).checkpoint
    assert content(newest) == ("1" if done else "0")
    assert newest is not None
    newest.verify()
    fit(lambda: None, tmp_path)
    assert len(list(run.glob("checkpoint_*"))) == (2 if done else 1)


@pytest.mark.parametrize("copied", [True, False])
def test_a_full_disk_fails_the_run_with_path_and_bytes(
    tmp_path: Path, drivers: Drivers, copied: bool
) -> None:
    """RLIMIT_FSIZE makes every write beyond 100 kB fail, as a full disk or a quota does."""

    def function() -> None:
        save("0")
        own = tmp_path / "own"
        own.mkdir()
        (own / "model").write_bytes(bytes(90_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        train.report({}, checkpoint=own)

    def main() -> None:
        config = RunConfig(name="run", storage_path=tmp_path)
        if not copied:
            config = RunConfig(
                name="run",
                storage_path=str(tmp_path),
                storage_filesystem=LocalFileSystem(auto_mkdir=True),
            )
        scaling = ScalingConfig(num_workers=0)
        DataParallelTrainer(function, scaling_config=scaling, run_config=config).fit()

    with drivers(main, XDG_CACHE_HOME=str(tmp_path / "cache")) as driver:
        _, err = driver.communicate(timeout=60)
    assert "90 kB (90000 bytes)" in err
    assert f"{tmp_path}/run" in err
    assert "File too large" in err
    assert content(Result.from_path(tmp_path / "run").checkpoint) == "0"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a filesystem of 1 MB, where this machine lets the tests do so."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {path} 2>/dev/null"):
        pytest.skip("mounting a tmpfs needs the right to mount")
    yield path
    os.system(f"umount -l {path}")


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
def test_a_disk_that_is_really_full_is_not_tried_again(
    tiny_disk: Path, tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "model").write_bytes(bytes(2_000_000))

    def function() -> None:
        save("0")
        train.report({}, checkpoint=own, checkpoint_upload_mode=mode)

    restarts = FailureConfig(max_failures=3)
    config = RunConfig(name="run", storage_path=tiny_disk, failure_config=restarts)
    told = r"StorageError: .*writing 2 MB .* No space left on device"
    with pytest.raises(WorkerGroupError, match=told) as raised:
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


def test_a_journal_on_a_disk_that_is_really_full(tiny_disk: Path) -> None:
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
    told = r"writing \d+ bytes to .*/run/journal.jsonl failed: No space left on device"
    with pytest.raises(ControllerError, match=told):
        trainer.fit()
    assert content(Result.from_path(tiny_disk / "run").checkpoint) == "0"
    check_run(tiny_disk / "run")
    (tiny_disk / "filler").unlink()
    assert trainer.fit().error is None
    check_run(tiny_disk / "run")


def test_a_trainer_that_cannot_be_saved_leaves_the_one_before(
    tmp_path: Path, drivers: Drivers
) -> None:
    def main() -> None:
        run_config = RunConfig(name="run", storage_path=tmp_path)
        local = ScalingConfig(num_workers=0)
        small, large = "small", os.urandom(100_000)
        DataParallelTrainer(lambda: small, scaling_config=local, run_config=run_config).fit()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        DataParallelTrainer(lambda: large, scaling_config=local, run_config=run_config).fit()

    with drivers(main) as driver:
        _, err = driver.communicate(timeout=60)
    assert f"to {tmp_path}/run/trainer.pkl failed: File too large" in err
    assert not list((tmp_path / "run").glob(".drawbar*"))
    assert DataParallelTrainer.restore(tmp_path / "run").fit().return_value == "small"


def test_a_storage_that_refuses_to_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError, match=r"\.drawbar-probe-.* failed: Permission denied"):
        fit(two_steps, tmp_path, Faulty(refuse))


def test_a_memory_filesystem_as_an_object(tmp_path: Path) -> None:
    config = RunConfig(
        name="run", storage_path=uuid.uuid4().hex, storage_filesystem=fsspec.filesystem("memory")
    )
    scaling = ScalingConfig(num_workers=0)
    result = DataParallelTrainer(two_steps, scaling_config=scaling, run_config=config).fit()
    assert content(result.checkpoint) == "1"


@pytest.mark.usefixtures("temporary")
def test_what_a_killed_reader_has_left_is_not_read(tmp_path: Path, drivers: Drivers) -> None:
    """The directory is no run's own: nothing in it tells what it was from what it is."""
    place = tmp_path / "pretrained"
    place.mkdir()
    (place / "model").write_text("old")
    checkpoint = Checkpoint(place, LocalFileSystem(auto_mkdir=True))

    def main() -> None:
        with checkpoint.as_directory():
            os.kill(os.getpid(), signal.SIGKILL)

    with drivers(main) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.communicate()
    (place / "model").write_text("new")
    assert content(checkpoint) == "new"


@pytest.mark.usefixtures("temporary")
def test_a_name_given_anew_is_not_read_from_the_copy_of_the_one_before(tmp_path: Path) -> None:
    before = fit(lambda: save("0"), tmp_path).checkpoint
    assert before is not None
    with before.as_directory() as path:
        shutil.rmtree(tmp_path / "far")
        after = fit(lambda: save("1"), tmp_path).checkpoint
        assert after == before
        assert content(after) == "1"
        assert (Path(path) / "model").read_text() == "0"


def test_a_download_that_fails_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    checkpoint = fit(lambda: save("0"), tmp_path).checkpoint
    assert checkpoint is not None

    class Refusing(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            if path.endswith("/model"):
                raise PermissionError(errno.EACCES, "no")
            return super()._open(path, mode, **options)

    with pytest.raises(OSError, match="reading 1 bytes"):
        content(Checkpoint(checkpoint.path, Refusing()))
    assert not list((temporary / f"drawbar-{os.geteuid()}").iterdir())


def test_a_copy_lies_where_nobody_else_can_reach_it(tmp_path: Path, temporary: Path) -> None:
    checkpoint = fit(lambda: save("0"), tmp_path).checkpoint
    assert checkpoint is not None
    own = temporary / f"drawbar-{os.geteuid()}"
    with checkpoint.as_directory() as path:
        assert Path(path).parent == own
        assert own.stat().st_mode & 0o777 == 0o700
    assert list(own.iterdir()) == []


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def link(folder: Path) -> None:
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("plant", [open_to_others, link, Path.touch])
def test_a_folder_that_another_user_may_have_planted_is_refused(
    tmp_path: Path, temporary: Path, plant: Callable[[Path], None]
) -> None:
    (temporary / "elsewhere").mkdir()
    plant(temporary / f"drawbar-{os.geteuid()}")
    checkpoint = fit(lambda: save("0"), tmp_path).checkpoint  # a run does without its socket
    with pytest.raises(CheckpointError, match="Remove it, or set TMPDIR to a private directory"):
        content(checkpoint)
