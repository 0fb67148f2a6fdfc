"""Wait for a run, handle signals, and compute the exit code."""

from __future__ import annotations

import contextlib
import select
import shlex
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from drawbar.cli._option_names import name_options
from drawbar.cli._output import discard_output

if TYPE_CHECKING:
    from drawbar.train import RunHandle, TrainingFailedError, WorkerGroupError

EXIT_SIGHUP, EXIT_SIGINT, EXIT_SIGTERM = 129, 130, 143  # 128 + signal number, as in a shell
EXIT_STDOUT_CLOSED = 1  # same as torchrun, whose script fails with a broken pipe
EXIT_STDOUT_INCOMPLETE = 120  # same as Python, if the flush at its exit fails

_STOP_REASONS = {
    EXIT_SIGHUP: "Stopped by SIGHUP",
    EXIT_SIGINT: "Stopped by Ctrl-C",
    EXIT_SIGTERM: "Stopped by SIGTERM",
    EXIT_STDOUT_CLOSED: "Stopped because standard output was closed",
}
_EXIT_CODES = {
    signal.SIGHUP: EXIT_SIGHUP,
    signal.SIGTERM: EXIT_SIGTERM,
    signal.SIGPIPE: EXIT_STDOUT_CLOSED,
}


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
                f"drawbar: {_STOP_REASONS[code]}. Use --name {handle.name} to resume from the "
                f"latest checkpoint in {handle.path}.",
                file=sys.stderr,
            )
    except TrainingFailedError as error:
        if message := _describe_failure(error):
            print(message, file=sys.stderr)
        code = exit_code_for(error)
        _write_error_file(error, code)
    if (flush_error := _flush_stdout()) is not None:
        print(
            f"drawbar: error: Standard output is incomplete: {flush_error.strerror}. "
            f"'drawbar logs {shlex.quote(handle.path)}' prints all of it.",
            file=sys.stderr,
        )
        code = code or EXIT_STDOUT_INCOMPLETE
    return code


def _write_error_file(error: TrainingFailedError, exit_code: int) -> None:
    """Write the error for the process that has started this command, as torchrun does."""
    from drawbar.launch import write_error_file

    try:
        write_error_file(error, exit_code)
    except OSError as reason:
        print(
            f"drawbar: error: Cannot write the file in TORCHELASTIC_ERROR_FILE: {reason}",
            file=sys.stderr,
        )


def _wait(handle: RunHandle, signals: StopSignals) -> None:
    try:
        signals.release()
    except KeyboardInterrupt:
        handle.stop(save=False)
        handle.wait()
        raise
    handle.wait()


def _describe_failure(error: TrainingFailedError) -> str:
    """Describe why a run failed, the root cause first; "" if rank 0's output shows all of it."""
    from drawbar.train import WorkerGroupError

    if not isinstance(error, WorkerGroupError) or not error.failures:
        return name_options(str(error))
    first, *others = error.failures
    end = _explain_end(error)
    if first.kind == "exit":
        return "\n".join(filter(None, [_describe_exit(error), end]))
    # The traceback of a script is part of rank 0's output.
    lines = ["", first.summary() if _has_shown_traceback(error) else first.describe(), ""]
    if others:
        lines += ["Other failed ranks:", *(f"  {failure.headline()}" for failure in others)]
    if end:
        lines += [end, ""]
    lines.append(f"Run directory: {error.path}")
    return "\n".join(lines)


def _explain_end(error: WorkerGroupError) -> str:
    """Return why the run has ended although a restart was left; "" if none was."""
    if error.should_retry:
        return ""
    # The message of the error ends with the reason, the directory, and the checkpoint.
    _, heading, reason = str(error).rpartition("The run ends: ")
    return name_options(heading + reason.partition("\nRun directory: ")[0])


def _describe_exit(error: WorkerGroupError) -> str:
    """Name the rank that exited first, unless rank 0 has exited too, whose output is shown."""
    from drawbar.launch import exit_code_for

    if any(failure.rank == 0 and failure.kind == "exit" for failure in error.failures):
        return ""
    first = error.failures[0]
    code = exit_code_for(error)
    return (
        f"drawbar: error: Rank {first.rank} exited with code {code}. "
        f"Its output is in {first.log_path}."
    )


def _has_shown_traceback(error: WorkerGroupError) -> bool:
    """Return whether rank 0's output contains the traceback of the first failure."""
    from drawbar.train import ProgramFailedError

    first = error.failures[0]
    script = error.worker_failures.get(first.rank)
    return first.rank == 0 and isinstance(script, ProgramFailedError)


def _is_broken(stream: TextIO) -> bool:
    """Return whether the reader of this pipe or socket has closed it."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return bool(poll.poll(0))


def _flush_stdout() -> OSError | None:
    """Write the output that could not be written before, for example because the disk was full.

    Returns:
        The error if the output still cannot be written. It is None if the reader has ended.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        discard_output()
        return None if isinstance(error, BrokenPipeError) else error
    return None
