"""Failure of a program: the exception that it has sent, or its exit status."""

from __future__ import annotations

import signal

import msgspec

from drawbar._base.frames import format_user_location
from drawbar._process.errors import ProgramFailedError


class ProgramFailure(msgspec.Struct, frozen=True):
    """Failure of a script, as `program_main` describes it.

    `is_exit` is true for SystemExit and KeyboardInterrupt.
    """

    type_name: str
    message: str
    traceback: str
    lines: list[tuple[str, int, str]]
    time: float
    is_exit: bool


def make_program_error(
    status: int,
    failure: ProgramFailure | None,
    ended_at: float,
    *,
    is_python: bool,
    is_oom_killed: bool,
) -> ProgramFailedError:
    """Return the error of a program that has failed.

    Args:
        status: Exit code, or the negative number of the signal that killed it.
        failure: Failure that the program has sent.
        ended_at: Time of the end, in seconds since the epoch.
        is_python: Whether the program is a Python script, which sends its failures.
        is_oom_killed: Whether the kernel's OOM killer may have killed it.
    """
    if failure is not None:
        return ProgramFailedError(
            failure.message,
            failure.type_name,
            status if status > 0 else 1,
            failure.time,
            failure.traceback,
            format_user_location(failure.lines),
            failure.is_exit,
        )
    if status < 0:
        # The shell's convention: 128 plus the signal number.
        description = _describe_signal(-status, is_oom_killed=is_oom_killed)
        return ProgramFailedError(description, "program died", 128 - status, ended_at)
    if not is_python:
        return ProgramFailedError(
            f"exited with code {status}", "program ended", status, ended_at, is_exit=True
        )
    # A script that closes all descriptors also closes the socket for its exception.
    description = f"exited with code {status} by os._exit, or after closing all descriptors"
    return ProgramFailedError(description, "program ended", status, ended_at)


def _describe_signal(number: int, *, is_oom_killed: bool) -> str:
    is_known = number in set(signal.Signals)
    description = f"killed by {signal.Signals(number).name if is_known else f'signal {number}'}"
    if number == signal.SIGKILL and is_oom_killed:
        return f"{description}, by the kernel's OOM killer: the cgroup's oom_kill count rose"
    return description
