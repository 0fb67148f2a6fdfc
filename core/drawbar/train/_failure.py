"""From an exception or a dead process to a `WorkerFailure`: errors as data."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import StackSummary, TracebackException

from ray.exceptions import RayActorError, RayTaskError, RuntimeEnvSetupError

from drawbar.train._carry import keep
from drawbar.train._decide import AttemptEnd
from drawbar.train._errors import (
    ControllerError,
    DivergenceError,
    FailureKind,
    HangError,
    InsufficientResourcesError,
    PreemptionError,
    StorageError,
    TrainingFailedError,
    WorkerFailure,
    WorkerGroupError,
)
from drawbar.train._exit_status import verdict, wait_for_report
from drawbar.train._messages import Gone, WorkerInfo
from drawbar.train._session import Assignment
from drawbar.train._storage import RunDirectory
from drawbar.train._user_code import is_drawbars, users_lines

EXIT_REPORT_SECONDS = 2.0

_MAX_PICKLED = 1_000_000


def describe_exception(error: BaseException, assignment: Assignment, reports: int) -> WorkerFailure:
    """Describe what a training function, or the set-up before it, raised."""
    now = time.time()  # the earliest counts as the cause: what follows takes its time
    told, where = _account_of(error)
    return WorkerFailure(
        rank=assignment.ranks.world_rank,
        kind=_kind_of(error),
        type_name=type(error).__name__,
        message=_message_of(error),
        traceback=told,
        where=where,
        hostname=os.uname().nodename,
        pid=os.getpid(),
        time=now,
        reports=reports,
        log_path=str(assignment.directory.log(assignment.ranks.world_rank)),
        pickled=_pickled(error),
    )


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


class ConfigurationError(ValueError):
    """The run cannot work as it is configured; it is not tried again."""


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, StorageError):
        return "storage"
    return "configuration" if isinstance(error, ConfigurationError) else "exception"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _account_of(error: BaseException) -> tuple[str, str]:
    """Give the traceback without Drawbar's frames, and the user's innermost line in it."""
    told = TracebackException.from_exception(error)
    for cause in _causes_of(told):
        cause.stack = _without_own(cause.stack)
    if not _is_own_bug(told.stack):
        told.stack = _without_own(told.stack) or told.stack
    return "".join(told.format()), _user_line(told.stack)


def _causes_of(told: TracebackException) -> Iterator[TracebackException]:
    """Give the exceptions that one came of, or consists of."""
    for each in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if each is not None:
            yield each
            yield from _causes_of(each)


def _is_own_bug(stack: StackSummary) -> bool:
    """Whether Drawbar has failed, and not refused something: its frames say where."""
    innermost = stack[-1] if stack else None
    if innermost is None or not is_drawbars(innermost.filename):
        return False
    return not (innermost.line or "").startswith("raise")


def _without_own(stack: StackSummary) -> StackSummary:
    return StackSummary.from_list([each for each in stack if not is_drawbars(each.filename)])


def _user_line(stack: StackSummary) -> str:
    """Give the innermost line that is neither a library's nor Python's own."""
    if not stack:
        return ""
    frame = stack[(users_lines([each.filename for each in stack]) or [-1])[-1]]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = keep(error)
    except Exception:
        return None
    return data if len(data) <= _MAX_PICKLED else None


# -- in the controller


async def describe_death(
    rank: int, gone: Gone, worker: WorkerInfo, directory: RunDirectory, reports: int
) -> WorkerFailure:
    """Describe a process that died: what killed it, as far as this system tells, and when."""
    report = await wait_for_report(
        directory.exit_report(worker.hostname, worker.pid), EXIT_REPORT_SECONDS
    )
    log = directory.log(rank)
    cause = verdict(report, gone.detail, _tail(log))
    if gone.preempted:
        cause = f"its node {worker.node_id[:8]} ({worker.node_ip}) is gone or going; {cause}"
    return WorkerFailure(
        rank=rank,
        kind="died",
        type_name="worker process died",
        message=cause,
        hostname=worker.hostname,
        node_id=worker.node_id,
        pid=worker.pid,
        time=report.time if report is not None else gone.time,
        reports=reports,
        log_path=str(log),
    )


def describe_divergence(reason: str) -> WorkerFailure:
    """Describe ranks that can never meet."""
    return WorkerFailure(
        rank=-1, kind="divergence", type_name="ranks diverged", message=reason, time=time.time()
    )


def describe_broken_worker(rank: int, error: RayTaskError) -> WorkerFailure:
    """Describe a worker whose own code failed outside the training function."""
    return WorkerFailure(
        rank=rank,
        kind="exception",
        type_name=type(error.cause).__name__,
        message=str(error.cause),
        traceback=str(error),  # Ray puts the remote one there
        time=time.time(),
    )


def describe_hang(seconds: float, difference: str, folder: Path) -> WorkerFailure:
    """Describe ranks that have not said anything for so long."""
    return WorkerFailure(
        rank=-1,
        kind="hang",
        type_name="no progress",
        message=f"no rank made progress for {seconds:g} s\n{difference}\nstacks: {folder}",
        time=time.time(),
    )


def describe_interruption(rank: int) -> WorkerFailure:
    """Describe a rank that ended as if the controller had interrupted it, which it had not."""
    return WorkerFailure(
        rank=rank,
        kind="exception",
        type_name="AttemptInterrupted",
        message="the training function ended by an interrupt that was not the controller's",
        time=time.time(),
    )


def startup_end(error: Exception) -> AttemptEnd:
    """Tell a start that may work next time from one that cannot."""
    if isinstance(error, RayActorError) and "its node has died" in str(error):
        return "preemption"
    hopeless = (
        RuntimeEnvSetupError,
        ValueError,
        TypeError,
        ImportError,
        InsufficientResourcesError,
    )
    return "configuration" if isinstance(error, hopeless) else "startup"


def training_failed(
    end: AttemptEnd,
    failures: Sequence[WorkerFailure],
    cause: Exception | None,
    *,
    reason: str,
    path: str,
    loads: str,
) -> TrainingFailedError:
    """Build the error that `fit()` raises: the root cause first, the rest folded under it.

    `reason` says why the run ends, `loads` which checkpoint it has.
    """
    footer = f"\n\nThe run ends: {reason}.\nrun directory: {path}\n{loads}"
    if isinstance(cause, InsufficientResourcesError):
        return InsufficientResourcesError(f"{cause}{footer}", path=path)
    if not failures:
        message = f"the run failed in its {_PART[end]}: {type(cause).__name__}: {cause}{footer}"
        return ControllerError(message, cause, path=path)
    message = failures[0].describe()
    if len(failures) > 1:
        others = "\n".join(f"  {failure.headline()}" for failure in failures[1:])
        message += f"\n\nafter it also failed:\n{others}"
    if end == "preemption":
        return PreemptionError(message + footer, path=path)
    kinds: dict[str, type[WorkerGroupError]] = {"divergence": DivergenceError, "hang": HangError}
    kind = kinds.get(end, WorkerGroupError)
    return kind(message + footer, failures=failures, path=path)


_PART = {
    "startup": "start-up",
    "configuration": "configuration",
    "storage": "storage",
    "worker": "workers",
    "divergence": "ranks",
    "hang": "workers",
    "preemption": "nodes",
    "resize": "workers",
}


def _tail(path: Path, nbytes: int = 20_000) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - nbytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
