"""From an exception to a `WorkerFailure`: an error as data."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary, TracebackException

from drawbar.train._carry import keep
from drawbar.train._errors import (
    SHOWN_CHARS,
    FailureKind,
    ProgramFailedError,
    StorageError,
    WorkerFailure,
)
from drawbar.train._messages import Assignment
from drawbar.train._package_files import is_drawbar_file
from drawbar.train._worker.user_code import is_pythons, users_line

# Bytes. An exception may hold a whole batch, and travels with whatever is told of it.
_MAX_PICKLED = 1_000_000


def describe_exception(
    error: BaseException, assignment: Assignment, reports: int, raised_at: float | None = None
) -> WorkerFailure:
    """Describe what a training function, or the set-up before it, raised: now, if not said when."""
    now = raised_at or time.time()  # the earliest counts as the cause: what follows takes its time
    if isinstance(error, ProgramFailedError):
        now = error.time
    told, where = _account_of(error)
    log = assignment.directory.log(assignment.ranks.world_rank)
    if len(told) > SHOWN_CHARS:
        _write_whole(told, log)
    return WorkerFailure(
        rank=assignment.ranks.world_rank,
        kind=_kind_of(error),
        type_name=_type_name_of(error),
        message=_message_of(error),
        traceback=told,
        where=where,
        hostname=os.uname().nodename,
        pid=os.getpid(),
        time=now,
        reports=reports,
        log_path=str(log),
        pickled=_pickled(error),
    )


def _write_whole(told: str, log: Path) -> None:
    """Write what is too long to be shown where the failure says that all output is."""
    with contextlib.suppress(OSError), open(log, "a", errors="backslashreplace") as file:
        file.write(told)


def describe_validation_failure(error: BaseException) -> str:
    """Describe in words what a validation function raised."""
    told, where = _account_of(error)
    failure = WorkerFailure(
        rank=-1,
        kind="exception",
        type_name=type(error).__name__,
        message=_message_of(error),
        traceback=told,
        where=where,
    )
    return failure.describe()


def _kind_of(error: BaseException) -> FailureKind:
    match error:
        case StorageError():
            return "storage"
        case ProgramFailedError() if error.is_exit:
            return "exit"
        case ProgramFailedError() if error.was_killed:
            return "died"
        case _:
            return "exception"


def _type_name_of(error: BaseException) -> str:
    return error.type_name if isinstance(error, ProgramFailedError) else type(error).__name__


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _account_of(error: BaseException) -> tuple[str, str]:
    """Give the traceback without Drawbar's frames, and the user's innermost line in it."""
    if isinstance(error, ProgramFailedError):
        return error.traceback, error.where
    told = TracebackException.from_exception(error)
    for cause in _causes_of(told):
        # Of causes too: a user reads the whole chain, in which Drawbar's lines explain nothing.
        cause.stack = _without_own(cause.stack)
    if not _is_own_bug(told.stack):
        told.stack = _without_own(told.stack) or told.stack
    lines = [(each.filename, each.lineno or 0, each.name) for each in told.stack]
    return "".join(told.format()), users_line(lines)


def _causes_of(told: TracebackException) -> Iterator[TracebackException]:
    """Give the exceptions that one came of, or consists of."""
    for each in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if each is not None:
            yield each
            yield from _causes_of(each)


def _is_own_bug(stack: StackSummary) -> bool:
    """Whether Drawbar has failed, and not refused something: its frames say where."""
    innermost = stack[-1] if stack else None
    if innermost is None or not is_drawbar_file(innermost.filename):
        return False
    return not (innermost.line or "").startswith("raise")


def _without_own(stack: StackSummary) -> StackSummary:
    """Leave out Drawbar's frames, and those of Python itself that Drawbar has called."""
    kept = []
    is_own = False
    for frame in stack:
        is_own = is_drawbar_file(frame.filename) or (is_own and is_pythons(frame.filename))
        if not is_own:
            kept.append(frame)
    return StackSummary.from_list(kept)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = keep(error)
    except Exception:
        return None
    return data if len(data) <= _MAX_PICKLED else None
