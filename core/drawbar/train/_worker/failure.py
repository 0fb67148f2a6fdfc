"""From an exception to a `WorkerFailure`: an error as data."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary, TracebackException

from drawbar.train._errors import (
    MAX_SHOWN_CHARS,
    FailureKind,
    ProgramFailedError,
    StorageError,
    WorkerFailure,
)
from drawbar.train._messages import Assignment
from drawbar.train._package_files import is_drawbar_file
from drawbar.train._serialization import serialize_without_references
from drawbar.train._worker.user_frames import format_user_location, is_stdlib_file

# Bytes. An exception may hold a whole batch, and travels with whatever is told of it.
_MAX_PICKLED_BYTES = 1_000_000


def describe_exception(
    error: BaseException, assignment: Assignment, reports: int, raised_at: float | None = None
) -> WorkerFailure:
    """Describe what a training function, or the set-up before it, raised: now, if not said when."""
    now = raised_at or time.time()  # the earliest counts as the cause: what follows takes its time
    if isinstance(error, ProgramFailedError):
        now = error.time
    traceback_exception, where = _format_traceback(error)
    log = assignment.directory.get_log_path(assignment.ranks.world_rank)
    if len(traceback_exception) > MAX_SHOWN_CHARS:
        _append_full_traceback(traceback_exception, log)
    return WorkerFailure(
        rank=assignment.ranks.world_rank,
        kind=_classify(error),
        type_name=_get_type_name(error),
        message=_format_message(error),
        traceback=traceback_exception,
        location=where,
        hostname=os.uname().nodename,
        pid=os.getpid(),
        time=now,
        num_reports=reports,
        log_path=str(log),
        pickled_exception=_try_serialize(error),
    )


def _append_full_traceback(traceback_exception: str, log: Path) -> None:
    """Write what is too long to be shown where the failure says that all output is."""
    with contextlib.suppress(OSError), open(log, "a", errors="backslashreplace") as file:
        file.write(traceback_exception)


def format_validation_error(error: BaseException) -> str:
    """Describe in words what a validation function raised."""
    traceback_exception, where = _format_traceback(error)
    failure = WorkerFailure(
        rank=-1,
        kind="exception",
        type_name=type(error).__name__,
        message=_format_message(error),
        traceback=traceback_exception,
        location=where,
    )
    return failure.describe()


def _classify(error: BaseException) -> FailureKind:
    match error:
        case StorageError():
            return "storage"
        case ProgramFailedError() if error.is_exit:
            return "exit"
        case ProgramFailedError() if error.is_killed_by_signal:
            return "died"
        case _:
            return "exception"


def _get_type_name(error: BaseException) -> str:
    return error.type_name if isinstance(error, ProgramFailedError) else type(error).__name__


def _format_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _format_traceback(error: BaseException) -> tuple[str, str]:
    """Give the traceback without Drawbar's frames, and the user's innermost line in it."""
    if isinstance(error, ProgramFailedError):
        return error.traceback, error.location
    traceback_exception = TracebackException.from_exception(error)
    for cause in _iter_causes(traceback_exception):
        # Of causes too: a user reads the whole chain, in which Drawbar's lines explain nothing.
        cause.stack = _drop_drawbar_frames(cause.stack)
    if not _is_drawbar_bug(traceback_exception.stack):
        traceback_exception.stack = (
            _drop_drawbar_frames(traceback_exception.stack) or traceback_exception.stack
        )
    lines = [(each.filename, each.lineno or 0, each.name) for each in traceback_exception.stack]
    return "".join(traceback_exception.format()), format_user_location(lines)


def _iter_causes(traceback_exception: TracebackException) -> Iterator[TracebackException]:
    """Give the exceptions that one came of, or consists of."""
    for each in (
        traceback_exception.__cause__,
        traceback_exception.__context__,
        *(traceback_exception.exceptions or ()),
    ):
        if each is not None:
            yield each
            yield from _iter_causes(each)


def _is_drawbar_bug(stack: StackSummary) -> bool:
    """Whether Drawbar has failed, and not refused something: its frames say where."""
    innermost = stack[-1] if stack else None
    if innermost is None or not is_drawbar_file(innermost.filename):
        return False
    return not (innermost.line or "").startswith("raise")


def _drop_drawbar_frames(stack: StackSummary) -> StackSummary:
    """Leave out Drawbar's frames, and those of Python itself that Drawbar has called."""
    kept = []
    is_own = False
    for frame in stack:
        is_own = is_drawbar_file(frame.filename) or (is_own and is_stdlib_file(frame.filename))
        if not is_own:
            kept.append(frame)
    return StackSummary.from_list(kept)


def _try_serialize(error: BaseException) -> bytes | None:
    try:
        data = serialize_without_references(error)
    except Exception:
        return None
    return data if len(data) <= _MAX_PICKLED_BYTES else None
