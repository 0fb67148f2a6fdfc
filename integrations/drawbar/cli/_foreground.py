"""A run that a command has started, and its end, which is the command's."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from drawbar.cli._output import CommandError

if TYPE_CHECKING:
    from drawbar.train import RunHandle, TrainingFailedError, WorkerFailure

HUNG_UP, INTERRUPTED, TERMINATED = 129, 130, 143  # what a shell says of these signals
UNREAD = 1  # torchrun's, whose script fails by the broken pipe

_STOPPED_BY = {
    HUNG_UP: "stopped by SIGHUP",
    INTERRUPTED: "stopped by Ctrl-C",
    TERMINATED: "stopped by SIGTERM",
    UNREAD: "stopped, since nobody reads its standard output any more",
}
_STOPS = {signal.SIGHUP: HUNG_UP, signal.SIGTERM: TERMINATED, signal.SIGPIPE: UNREAD}


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Have what cannot be done said in one line."""
    from drawbar.train import InsufficientResourcesError, JournalLockedError

    try:
        yield
    except (
        ValueError,
        TypeError,
        ImportError,
        OSError,
        JournalLockedError,
        InsufficientResourcesError,
    ) as error:
        raise CommandError(str(error)) from error


def exit_code_when_over(handle: RunHandle) -> int:
    """Wait for the end of a run, say why it has failed if it has, and give the exit code.

    What ends it before: Ctrl-C, SIGTERM, SIGHUP unless it is ignored, as under `nohup`, and what
    rank 0 writes when nobody reads it any more.
    """
    from drawbar.launch import exit_code_of
    from drawbar.train import TrainingFailedError

    interrupted = INTERRUPTED

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if number == signal.SIGPIPE and not _is_broken(sys.stdout):
            return  # a socket's
        if interrupted != INTERRUPTED:
            return  # `timeout` sends its signal twice, and a second interruption kills the scripts
        interrupted = _STOPS[signal.Signals(number)]
        raise KeyboardInterrupt

    for each in _STOPS:
        if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, interrupt)
    code = 0
    try:
        handle.wait()
    except KeyboardInterrupt:  # a `UserAbort`, or one that came when the run was just over
        code = interrupted
        with contextlib.suppress(OSError):  # the terminal is closed
            print(
                f"drawbar: {_STOPPED_BY[code]}; --name {handle.name} goes on from the newest "
                f"checkpoint in {handle.path}, if it has one",
                file=sys.stderr,
            )
    except TrainingFailedError as error:
        print(_told(error), file=sys.stderr)
        code = exit_code_of(error)
    _leave_stdout()
    return code


def _told(error: TrainingFailedError) -> str:
    """Tell why a run has failed, the traceback that is its cause last."""
    from drawbar.train import WorkerGroupError

    if not isinstance(error, WorkerGroupError) or not error.failures:
        return str(error)
    first, *others = error.failures
    return "\n".join([*_folded(others), f"run directory: {error.path}", "", first.describe()])


def _folded(failures: Sequence[WorkerFailure]) -> list[str]:
    if not failures:
        return []
    return ["failed after it:", *(f"  {each.headline()}" for each in failures)]


def _is_broken(stream: TextIO) -> bool:
    """Whether this is a pipe or a socket that nobody reads any more."""
    look = select.poll()
    look.register(stream.fileno(), 0)
    return bool(look.poll(0))


def _leave_stdout() -> None:
    """Let Python end in silence if who has read standard output is gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
