"""Ctrl-C and SIGTERM, with the training function in the process that receives the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from drawbar import train
from drawbar.train import Result, UserAbort
from drawbar.train._controller import controller
from drawbar.train._worker.active_session import current_session
from tests.train.runs import fit


def wait_until_main_thread_waits() -> None:
    """Wait until the main thread is in `RunHandle.wait`, which handles signals."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        frame: FrameType | None = sys._current_frames()[main]
        while frame is not None and frame.f_code.co_name != "run_until":
            frame = frame.f_back
        if frame is not None:
            return
        pause()


def pause() -> None:
    threading.Event().wait(0.01)


def test_ctrl_c_waits_for_clean_up_that_sends_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "STOP_GRACE_SECONDS", 60)
    was_done: list[bool] = []

    def function() -> None:
        run = train.attach(train.get_context().get_storage())
        wait_until_main_thread_waits()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pause()
        finally:
            for step in range(2, 7):
                train.set_progress(step, 1)  # 100 %, which is sent at once
                with suppress(RuntimeError):  # the run has ended
                    run.diagnose()  # the controller handles the progress before it replies
            was_done.append(run.is_done)

    with pytest.raises(UserAbort):
        fit(function, tmp_path, num_workers=1, in_threads=True)
    assert was_done == [False]
    assert Result.from_path(tmp_path / "run").timeline.attempts[0].outcome == "stopped"


def test_ctrl_c_in_calling_thread_ends_run_that_can_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        train.should_checkpoint()
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            train.should_checkpoint()

    with pytest.raises(UserAbort):
        fit(function, tmp_path)
    assert Result.from_path(tmp_path / "run").timeline.attempts[0].outcome == "stopped"
    assert "It has interrupted the training function" in capfd.readouterr().err


SAVES_AFTER_TIMEOUT = """
import os, signal, sys, threading
from drawbar import train

def function():
    train.should_checkpoint()
    while not os.path.exists("signalled"):
        threading.Event().wait(0.01)
    while not train.should_checkpoint():
        threading.Event().wait(0.01)
    while not os.path.exists("timed_out"):
        threading.Event().wait(0.01)
    with train.checkpoint_dir() as path:
        (path / "file").write_text("saved")
        train.report({}, checkpoint=path)
    while True:
        threading.Event().wait(0.01)

class StdErr:  # the terminal is closed
    def write(self, text):
        if text.startswith("SIGTERM"):
            raise OSError(5, "Input/output error")
        return len(text)
    def flush(self):
        pass

run = train.DataParallelTrainer(
    function,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path="."),
).start()
def send():
    while "run_until" not in [name for name in stack_names()]:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    open("signalled", "w").close()
    threading.Event().wait(2.5)  # longer than the timeout
    open("timed_out", "w").close()
def stack_names():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
sys.stderr = StdErr()
threading.Thread(target=send, daemon=True).start()
while True:
    try:
        run.wait(timeout=1)
    except TimeoutError:
        pass
"""


def test_sigterm_during_wait_with_timeout_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVES_AFTER_TIMEOUT]
    script = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert script.returncode == 128 + signal.SIGTERM, script.stderr
    assert (tmp_path / "run" / "checkpoint_000000" / "file").read_text() == "saved"


def test_ctrl_c_while_requested_checkpoint_is_written_keeps_it(tmp_path: Path) -> None:
    def function() -> None:
        train.attach(train.get_context().get_storage()).stop()
        requests = current_session("test").requests
        while not requests.get_commands():
            pause()
        assert train.should_checkpoint()  # agreed at the first call
        with train.checkpoint_dir() as path:
            wait_until_main_thread_waits()
            os.kill(os.getpid(), signal.SIGINT)
            while len(requests.get_commands()) < 4:  # both requests are announced and agreed
                pause()
            (path / "file").write_text("saved")
            train.report({}, checkpoint=path)
        while True:
            pause()

    with pytest.raises(UserAbort):
        fit(function, tmp_path, num_workers=1, in_threads=True)
    assert (tmp_path / "run" / "checkpoint_000000" / "file").read_text() == "saved"
