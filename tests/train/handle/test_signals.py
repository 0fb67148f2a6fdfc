"""Ctrl-C and SIGTERM, with the training function in the process that receives the signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from drawbar import train
from drawbar._handle.driver_signals import stop_on_signals
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


def test_ctrl_c_in_calling_thread_saves_if_function_can(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        train.should_checkpoint()
        os.kill(os.getpid(), signal.SIGINT)
        while not train.should_checkpoint():
            pause()
        with train.checkpoint_dir() as path:
            (path / "file").write_text("saved")
            train.report({}, checkpoint=path)
        while True:
            pause()

    with pytest.raises(UserAbort):
        fit(function, tmp_path)
    assert (tmp_path / "run" / "checkpoint_000000" / "file").read_text() == "saved"
    assert Result.from_path(tmp_path / "run").timeline.attempts[0].outcome == "stopped"
    assert "Drawbar saves a checkpoint if" in capfd.readouterr().err


def test_ctrl_c_twice_in_calling_thread_interrupts_function_that_can_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupts: list[type[BaseException]] = []

    def function() -> None:
        train.should_checkpoint()
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            pause()  # until the first signal is handled
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pause()
        except BaseException as interrupt:
            interrupts.append(type(interrupt))
            raise

    with pytest.raises(UserAbort):
        fit(function, tmp_path)
    assert interrupts == [KeyboardInterrupt]
    assert Result.from_path(tmp_path / "run").timeline.attempts[0].outcome == "stopped"
    assert "It has interrupted the training function" in capfd.readouterr().err


def test_ctrl_c_in_debugger_interrupts_function_that_can_save(tmp_path: Path) -> None:
    def function() -> None:
        train.should_checkpoint()
        sys.settrace(lambda frame, event, argument: None)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pause()
        finally:
            sys.settrace(previous)

    previous = sys.gettrace()
    with pytest.raises(UserAbort):
        fit(function, tmp_path)


fail = pytest.fail

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


SAVES_AFTER_END_OF_WAIT = """
import os, signal, sys, threading
from drawbar import train

def function():
    while not train.should_checkpoint():
        threading.Event().wait(0.01)
    with train.checkpoint_dir() as path:
        (path / "file").write_text("saved")
        train.report({}, checkpoint=path)
    threading.Event().wait()

def send(frame, event, argument):
    # wait() has decided to raise TimeoutError, and restores the handlers.
    code = frame.f_code
    if event == "call" and code.co_name == "close" and "signals" in code.co_filename:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGTERM)

run = train.DataParallelTrainer(
    function,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path="."),
).start()
sys.setprofile(send)
run.wait(timeout=0.1)
"""


def test_sigterm_at_end_of_wait_with_timeout_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVES_AFTER_END_OF_WAIT]
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


BLOCKS_IN_C_CODE = """
import ctypes, os, signal, sys, threading
from drawbar import train
from drawbar.train._worker.active_session import current_session

libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)  # zeros: a mutex that is not locked

def block():
    libc.pthread_mutex_lock(mutex)  # signals do not interrupt it

def function():
    train.should_checkpoint()
    libc.pthread_mutex_lock(mutex)
    requests = current_session("function").requests
    threading.Thread(target=send_signal, args=[requests], daemon=True).start()
    block()
    while not train.should_checkpoint():
        threading.Event().wait(0.01)
    with train.checkpoint_dir() as path:
        (path / "file").write_text("saved")
        train.report({}, checkpoint=path)
    while True:
        threading.Event().wait(0.01)

def send_signal(requests):
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "block":
        threading.Event().wait(0.01)
    threading.Event().wait(0.5)  # the frame exists before the call
    os.kill(os.getpid(), signal.SIGTERM)
    while not requests.get_commands():
        threading.Event().wait(0.01)
    libc.pthread_mutex_unlock(mutex)

train.DataParallelTrainer(
    function,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path="."),
).fit()
"""


def test_sigterm_while_main_thread_is_in_c_code_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCKS_IN_C_CODE]
    script = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert script.returncode == 128 + signal.SIGTERM, script.stderr
    assert (tmp_path / "run" / "checkpoint_000000" / "file").read_text() == "saved"


@pytest.fixture
def wakeup_fd() -> Iterator[socket.socket]:
    """The reading end of a socket that the user has set as the wakeup descriptor."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno())
    with reader, writer:
        yield reader
        assert signal.set_wakeup_fd(previous) == writer.fileno()


def test_stop_on_signals_forwards_numbers_to_wakeup_fd_of_user(wakeup_fd: socket.socket) -> None:
    with stop_on_signals(fail, fail, lambda: False, fail, is_detached=False):
        previous = signal.signal(signal.SIGUSR2, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert wakeup_fd.recv(1) == bytes([signal.SIGUSR2])
        signal.signal(signal.SIGUSR2, previous)


def test_stop_on_signals_keeps_wakeup_fd_that_is_set_meanwhile() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with reader, writer:
        with stop_on_signals(
            pytest.fail, pytest.fail, lambda: False, pytest.fail, is_detached=False
        ):
            signal.set_wakeup_fd(writer.fileno())
        assert signal.set_wakeup_fd(-1) == writer.fileno()


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """The default effect of SIGTERM; Ray may have changed it."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("default_sigterm")
def test_stop_on_signals_in_forked_child_has_no_effect() -> None:
    with stop_on_signals(fail, fail, lambda: True, fail, is_detached=False) as has_signal:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)  # not reached
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not has_signal()


def test_stop_on_signals_keeps_handlers_of_user() -> None:
    handler = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    received: list[int] = []
    try:
        with stop_on_signals(
            pytest.fail, pytest.fail, lambda: True, pytest.fail, is_detached=False
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, handler)
