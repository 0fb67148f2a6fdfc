"""Convert exceptions to WorkerFailure records."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary, TracebackException

from drawbar._base.frames import format_user_location, is_drawbar_file, is_stdlib_file
from drawbar._base.wording import escape_surrogates
from drawbar._process.batch_counter import describe_batch, get_num_batches
from drawbar._process.errors import ProgramFailedError, StorageError
from drawbar._process.serialization import serialize_without_references
from drawbar._process.standalone import get_builtin_type
from drawbar._process.worker_failure import MAX_SHOWN_CHARS, FailureKind, WorkerFailure

# An exception may contain a full batch, and is sent with every failure message.
_MAX_PICKLED_BYTES = 1_000_000

_SIGNAL_NOTE = (
    "Python sets signal handlers only in the main thread, but a worker runs the training function "
    "in another thread. To save before a stop or a preemption, call train.should_checkpoint(). "
    "With drawbar launch, and with fit() and num_workers=0, the code runs in the main thread."
)


def describe_exception(
    error: BaseException,
    rank: int,
    log: Path,
    num_reports: int,
    raised_at: float | None = None,
) -> WorkerFailure:
    """Convert an exception of a training function, or of the setup before it, to a record.

    Must be called in the thread of the function.

    Args:
        error: The exception.
        rank: Rank of the function.
        log: Log of the rank, to which a long traceback is appended.
        num_reports: Number of reports of the rank in this attempt.
        raised_at: Time of the exception. Default: now.
    """
    if isinstance(error, ValueError) and str(error).startswith("signal only works in main thread"):
        error.add_note(_SIGNAL_NOTE)
    # The earliest failure counts as the root cause, so use the time of the exception.
    failed_at, pid = raised_at or time.time(), os.getpid()
    num_batches, data_position = get_num_batches(), describe_batch()
    if isinstance(error, ProgramFailedError):
        failed_at, pid = error.time, error.pid or pid
        num_batches, data_position = error.num_batches, error.data_position
    traceback, location = _format_traceback(error)
    if len(traceback) > MAX_SHOWN_CHARS:
        _append_full_traceback(traceback, log)
    return WorkerFailure(
        rank=rank,
        kind=_classify(error),
        type_name=_get_type_name(error),
        message=_format_message(error),
        traceback=traceback,
        location=location,
        hostname=os.uname().nodename,
        pid=pid,
        time=failed_at,
        num_reports=num_reports,
        num_batches=num_batches,
        data_position=data_position,
        builtin_type=_get_builtin_type(error),
        log_path=str(log),
        pickled_exception=_try_serialize(error),
    )


def _append_full_traceback(traceback: str, log: Path) -> None:
    """Append a traceback to the log, because the failure message only shows a part of it."""
    with contextlib.suppress(OSError), open(log, "a", errors="backslashreplace") as file:
        file.write(traceback)


def format_validation_error(error: BaseException) -> str:
    """Format an exception of a validation function for a message."""
    traceback, location = _format_traceback(error)
    failure = WorkerFailure(
        rank=-1,
        kind="exception",
        type_name=type(error).__name__,
        message=_format_message(error),
        traceback=traceback,
        location=location,
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


def _get_builtin_type(error: BaseException) -> str:
    if isinstance(error, ProgramFailedError):
        return error.builtin_type
    return get_builtin_type(error)


def _format_message(error: BaseException) -> str:
    try:
        return escape_surrogates(str(error))
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _format_traceback(error: BaseException) -> tuple[str, str]:
    """Return the traceback without Drawbar's frames, and the user's innermost line in it.

    Both are "" if no other frame is left.
    """
    if isinstance(error, ProgramFailedError):
        return error.traceback, error.location
    traceback_exception = TracebackException.from_exception(error)
    for cause in _iter_causes(traceback_exception):
        # Clean the causes too: users read the complete chain.
        cause.stack = _drop_drawbar_frames(cause.stack)
    if not _is_drawbar_bug(traceback_exception.stack):
        traceback_exception.stack = _drop_drawbar_frames(traceback_exception.stack)
        if not traceback_exception.stack and not any(_iter_causes(traceback_exception)):
            # Only Drawbar's code ran, for example a check of a dataset. The message is enough.
            return "", ""
    frames = [
        (frame.filename, frame.lineno or 0, frame.name) for frame in traceback_exception.stack
    ]
    traceback = escape_surrogates("".join(traceback_exception.format()))
    return traceback, escape_surrogates(format_user_location(frames))


def _iter_causes(traceback_exception: TracebackException) -> Iterator[TracebackException]:
    """Yield the causes of an exception and the members of an exception group, recursively."""
    for cause in (
        traceback_exception.__cause__,
        traceback_exception.__context__,
        *(traceback_exception.exceptions or ()),
    ):
        if cause is not None:
            yield cause
            yield from _iter_causes(cause)


def _is_drawbar_bug(stack: StackSummary) -> bool:
    """Return whether an exception is a bug of Drawbar and not a deliberate `raise`."""
    innermost = stack[-1] if stack else None
    if innermost is None or not is_drawbar_file(innermost.filename):
        return False
    return not (innermost.line or "").startswith("raise")


def _drop_drawbar_frames(stack: StackSummary) -> StackSummary:
    """Drop Drawbar's frames, and frames of the standard library below them."""
    frames = []
    is_internal = False
    for frame in stack:
        is_internal = is_drawbar_file(frame.filename) or (
            is_internal and is_stdlib_file(frame.filename)
        )
        if not is_internal:
            frames.append(frame)
    return StackSummary.from_list(frames)


def _try_serialize(error: BaseException) -> bytes | None:
    try:
        data = serialize_without_references(error)
    except Exception:
        return None
    return data if len(data) <= _MAX_PICKLED_BYTES else None
