"""A run that a command has started, and its end, which is the command's."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from drawbar.cli._output import CommandError

if TYPE_CHECKING:
    from drawbar.train import RunHandle, TrainingFailedError, WorkerGroupError

EXIT_SIGHUP, EXIT_SIGINT, EXIT_SIGTERM = 129, 130, 143  # what a shell says of these signals
EXIT_STDOUT_CLOSED = 1  # torchrun's, whose script fails by the broken pipe

_STOP_REASONS = {
    EXIT_SIGHUP: "stopped by SIGHUP",
    EXIT_SIGINT: "stopped by Ctrl-C",
    EXIT_SIGTERM: "stopped by SIGTERM",
    EXIT_STDOUT_CLOSED: "stopped, since nobody reads its standard output any more",
}
_EXIT_CODES = {
    signal.SIGHUP: EXIT_SIGHUP,
    signal.SIGTERM: EXIT_SIGTERM,
    signal.SIGPIPE: EXIT_STDOUT_CLOSED,
}


@contextlib.contextmanager
def command_errors() -> Iterator[None]:
    """Have what cannot be done said in one line."""
    from drawbar.train import InsufficientResourcesError, RunInProgressError

    try:
        yield
    except (
        ValueError,
        TypeError,
        ImportError,
        OSError,
        RunInProgressError,
        InsufficientResourcesError,
    ) as error:
        raise CommandError(str(error)) from error


class StopSignals:
    """Signals that stop the run in the foreground, from its start on.

    They are Ctrl-C, SIGTERM, SIGHUP unless it is ignored, as under `nohup`, and SIGPIPE, when rank
    0 writes and the reader of standard output has ended. Each raises KeyboardInterrupt. The first
    one that arrives before `release()` is deferred until then: a run that is being started can be
    stopped only when there is a handle to it.

    Attributes:
        exit_code: Exit code of the command if a signal stops the run.
    """

    def __init__(self) -> None:
        self.exit_code = EXIT_SIGINT
        self._is_deferring = True
        self._is_pending = False
        for number in (signal.SIGINT, *_EXIT_CODES):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def release(self) -> None:
        """Stop deferring signals.

        Raises:
            KeyboardInterrupt: A signal has arrived before.
        """
        self._is_deferring = False
        if self._is_pending:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGPIPE and not _is_broken(sys.stdout):
            return  # a socket's
        if number != signal.SIGINT:
            if self.exit_code != EXIT_SIGINT:
                return  # `timeout` sends its signal twice, and a second one kills the scripts
            self.exit_code = _EXIT_CODES[signal.Signals(number)]
        if self._is_deferring and not self._is_pending:
            self._is_pending = True
            return
        raise KeyboardInterrupt


def wait_for_exit_code(handle: RunHandle, signals: StopSignals) -> int:
    """Wait for the end of a run, print why it failed if it did, and return the exit code."""
    from drawbar.launch import exit_code_for
    from drawbar.train import TrainingFailedError

    code = 0
    try:
        _wait(handle, signals)
    except KeyboardInterrupt:  # a `UserAbort`, or one that came when the run was just over
        code = signals.exit_code
        with contextlib.suppress(OSError):  # the terminal is closed
            print(
                f"drawbar: {_STOP_REASONS[code]}; --name {handle.name} goes on from the newest "
                f"checkpoint in {handle.path}, if it has one",
                file=sys.stderr,
            )
    except TrainingFailedError as error:
        if message := _describe_failure(error):
            print(message, file=sys.stderr)
        code = exit_code_for(error)
    _silence_broken_stdout()
    return code


def _wait(handle: RunHandle, signals: StopSignals) -> None:
    try:
        signals.release()
    except KeyboardInterrupt:
        handle.stop(save=False)
        handle.wait()
        raise
    handle.wait()


def _describe_failure(error: TrainingFailedError) -> str:
    """Describe why a run failed, the cause last; "" if rank 0's own output shows all of it."""
    from drawbar.train import WorkerGroupError

    if not isinstance(error, WorkerGroupError) or not error.failures:
        return str(error)
    first, *others = error.failures
    if first.kind == "exit":
        return _describe_exit(error)
    lines = [f"  {failure.headline()}" for failure in others]
    if lines:
        lines.insert(0, "failed after it:")
    lines.append(f"run directory: {error.path}")
    # The traceback of a script is part of rank 0's output.
    lines += ["", first.summary() if _has_shown_traceback(error) else first.describe()]
    return "\n".join(lines)


def _describe_exit(error: WorkerGroupError) -> str:
    """Name the rank that exited first, unless rank 0 has exited too, whose output is shown."""
    from drawbar.launch import exit_code_for

    if any(failure.rank == 0 and failure.kind == "exit" for failure in error.failures):
        return ""
    first = error.failures[0]
    code = exit_code_for(error)
    return f"drawbar: rank {first.rank} exited with code {code}; its output is in {first.log_path}"


def _has_shown_traceback(error: WorkerGroupError) -> bool:
    """Return whether rank 0's output contains the traceback of the first failure."""
    from drawbar.train import ProgramFailedError

    first = error.failures[0]
    script = error.worker_failures.get(first.rank)
    return first.rank == 0 and isinstance(script, ProgramFailedError)


def _is_broken(stream: TextIO) -> bool:
    """Whether this is a pipe or a socket that nobody reads any more."""
    look = select.poll()
    look.register(stream.fileno(), 0)
    return bool(look.poll(0))


def _silence_broken_stdout() -> None:
    """Let Python end in silence if who has read standard output is gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
