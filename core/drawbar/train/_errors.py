"""What can go wrong with a run, as exceptions and as data.

A worker never sends an exception object as the only account of a failure: it sends a
`WorkerFailure`, plain data that any process can read, and the pickled exception as an optional
extra. The exceptions below are built from it in the driver, and every one of them pickles.

    TrainingFailedError             fit() did not finish
    ├── WorkerGroupError            one or more workers failed; the root cause comes first
    │   ├── DivergenceError         ranks wait for each other in a way that can never end
    │   └── HangError               no rank made progress for the time allowed
    ├── ControllerError             the run's own machinery failed (storage, start-up)
    ├── PreemptionError             nodes were taken away more often than the budget allows
    └── InsufficientResourcesError  the cluster can never hold what was asked for
    ResumeError (ValueError)           the run directory and `RunConfig.resume` do not go together
    DamagedRunError (ValueError)       the journal of a run cannot be read
    UnsupportedFormatError (ValueError)  a newer version of Drawbar has written the run
    RunInProgressError (RuntimeError)  the run goes on, in another process or thread
    CheckpointError (RuntimeError)     a checkpoint is missing, incomplete or altered
    StorageError (OSError)             the storage refuses a checkpoint: full, read-only, over quota
    ProgramFailedError (RuntimeError)  a program that ran as a rank has failed; its exit code
    WorkerError (RuntimeError)         stands for a worker's exception that could not be unpickled
    UserAbort (KeyboardInterrupt)      the run was stopped by Ctrl-C; its directory can be resumed
"""

from __future__ import annotations

import contextlib
import opcode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import cloudpickle
import msgspec

FailureKind = Literal[
    "exception", "exit", "died", "configuration", "divergence", "hang", "startup", "storage"
]
"""Kinds of failure. "exit" is a script that ended by itself with a non-zero exit code, by
`sys.exit()` or KeyboardInterrupt."""


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one worker's failure. Plain data: it needs none of the worker's classes.

    `rank` is -1 where no single rank is to blame. `where` is the innermost line of the user's own
    code as `file:line in function`, or "" when there is none. `time` is in seconds since the epoch
    on the worker's node; the earliest failure of an attempt is its root cause. `pickled` holds the
    exception itself if it could be pickled.
    """

    rank: int
    kind: FailureKind
    type_name: str
    message: str
    traceback: str = ""
    location: str = ""
    hostname: str = ""
    node_id: str = ""
    pid: int = 0
    time: float = 0.0
    num_reports: int = 0
    log_path: str = ""
    pickled_exception: bytes | None = None

    def headline(self) -> str:
        """Return the failure in one line: `rank 1: ValueError: boom (train.py:12 in step)`."""
        return self._headline(truncate_middle, 1_000)

    def _headline(self, shorten: Callable[[str, int], str], max_chars: int) -> str:
        message = self.message.strip()
        first_line = f"{self.type_name}: {message}".splitlines()[0] if message else self.type_name
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        return (
            who + shorten(first_line, max_chars) + (f" ({self.location})" if self.location else "")
        )

    def summary(self) -> str:
        """Return the failure in short: headline, process, number of reports, and log file."""
        # With a traceback, `describe` adds the whole message at its end.
        lines = [self._headline(_cut, HEADLINE_CHARS) if self.traceback else self.headline()]
        if self.pid:
            lines.append(f"  pid {self.pid} on {self.hostname}, after {self.num_reports} reports")
        if self.log_path:
            lines.append(f"  its full output: {self.log_path}")
        return "\n".join(lines)

    def describe(self) -> str:
        """Return the failure in full: its summary, and the traceback or the rest of the message.

        The middle of more than `MAX_SHOWN_CHARS` characters is omitted. The rank's log has all of
        it.
        """
        lines = [self.summary()]
        rest = self.message.strip().splitlines()[1:]
        if rest and not self.traceback:
            lines += [f"  {line}" for line in truncate_middle("\n".join(rest)).splitlines()]
        if self.traceback:
            told = truncate_middle(self.traceback.rstrip())
            lines += ["", *(f"  {line}" for line in told.splitlines())]
        return "\n".join(lines)


HEADLINE_CHARS = 160
"""Length of a message above its traceback."""

MAX_SHOWN_CHARS = 20_000
"""How much of what a rank raised is shown."""


def truncate_middle(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Give a text of no more than about `limit` characters, without its middle if it has more."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters are left out ...] {text[-half:]}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()} ..."


def sort_root_cause_first(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """Sort failures by time, which puts the root cause first.

    A death is noticed from outside, up to some milliseconds after the peers' connections broke; it
    counts as a tenth of a second earlier, since a broken connection is what a death leads to and
    never the reverse.
    """
    return sorted(failures, key=lambda f: (f.time - 0.1 * (f.kind == "died"), f.rank))


def load_exceptions(failures: Iterable[WorkerFailure]) -> dict[int, Exception]:
    """Give each rank's exception: the user's own where it unpickles, else a `WorkerError`."""
    found: dict[int, Exception] = {}
    for failure in failures:
        if failure.rank >= 0:
            found.setdefault(failure.rank, _load_exception(failure))
    return found


def _load_exception(failure: WorkerFailure) -> Exception:
    if failure.pickled_exception is not None:
        # Its class may not be importable here, and unpickling runs code of the user's.
        with contextlib.suppress(Exception):
            error = cloudpickle.loads(failure.pickled_exception)
            if isinstance(error, Exception):
                return error
    return WorkerError(failure)


_RebuildArguments = tuple[type[Exception], tuple[object, ...], dict[str, object]]
_ReduceValue = tuple[Callable[..., Exception], _RebuildArguments]


class TrainingFailedError(RuntimeError):
    """`fit()` did not finish. The message says why, with the root cause first.

    `path` is the run directory, or "" if none was made: every checkpoint that was committed is
    there and loads.
    """

    def __init__(self, error_message: str, *, path: str = "") -> None:
        super().__init__(error_message)
        self.error_message = error_message
        self.path = path

    def __reduce__(self) -> _ReduceValue:
        return self._rebuild, (type(self), self.args, self.__dict__)

    @staticmethod
    def _rebuild(
        cls: type[Exception], args: tuple[object, ...], state: dict[str, object]
    ) -> Exception:
        # Not by `__init__`, which takes other arguments in each subclass than `args` has.
        error = cls.__new__(cls, *args)
        error.args = args
        error.__dict__.update(state)
        return error


class WorkerGroupError(TrainingFailedError):
    """One or more workers failed and the failure budget is spent.

    `failures` lists every `WorkerFailure`, the root cause first.
    """

    def __init__(
        self,
        error_message: str,
        worker_failures: Mapping[int, Exception] | None = None,
        *,
        failures: Sequence[WorkerFailure] = (),
        path: str = "",
    ) -> None:
        super().__init__(error_message, path=path)
        self.failures = list(failures)
        self._worker_failures = None if worker_failures is None else dict(worker_failures)

    @property
    def worker_failures(self) -> dict[int, Exception]:
        """Each failed rank's exception, or a `WorkerError` where that does not unpickle here.

        What the workers have sent is unpickled when this is first asked for, by whoever asks: the
        process that hosts the run needs none of the user's classes.
        """
        if self._worker_failures is None:
            self._worker_failures = load_exceptions(self.failures)
        return self._worker_failures

    def __reduce__(self) -> _ReduceValue:
        rebuild, (cls, args, state) = super().__reduce__()
        if any(failure.pickled_exception for failure in self.failures):
            state = {**state, "_worker_failures": None}  # it is made of them again
        return rebuild, (cls, args, state)


class DivergenceError(WorkerGroupError):
    """A rank waits for what a finished or diverged one can never give, or their reports clash."""


class HangError(WorkerGroupError):
    """No rank made progress for `FailureConfig.hang_timeout`."""


class ControllerError(TrainingFailedError):
    """The run's own machinery failed, not the function; `controller_failure` is the cause."""

    def __init__(
        self, error_message: str, controller_failure: Exception | None = None, *, path: str = ""
    ) -> None:
        super().__init__(error_message, path=path)
        self.controller_failure = controller_failure


class PreemptionError(TrainingFailedError):
    """Nodes were taken away more often than `FailureConfig` allows."""

    def __init__(
        self, error_message: str, preemption_info: object | None = None, *, path: str = ""
    ) -> None:
        super().__init__(error_message, path=path)
        self.preemption_info = preemption_info


class InsufficientResourcesError(TrainingFailedError):
    """The cluster can never hold the workers asked for. The message names the largest node."""


class ResumeError(ValueError):
    """The state of the run directory and `RunConfig.resume` do not go together."""


class DamagedRunError(ValueError):
    """The journal of a run cannot be read. The message names the line; checkpoints still load.

    `fit()` with the same name and `resume="auto"` cuts the damage out and goes on.
    """


class UnsupportedFormatError(ValueError):
    """A journal or manifest has a newer format than this version of Drawbar supports.

    Nothing is changed in the run. The message names both format versions.
    """

    @classmethod
    def of(cls, place: object, found: int, supported: int) -> UnsupportedFormatError:
        """Return the error for a file at a place."""
        return cls(
            f"{place} has format version {found}, but this version of Drawbar supports format "
            f"version {supported}. Upgrade Drawbar to the version that wrote the run"
        )


class RunInProgressError(RuntimeError):
    """The run goes on, in another process or in this one, which the message says.

    `drawbar.train.attach` gives a handle on it; a run of another `RunConfig.name` is not affected.
    """


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or was altered. The message names the file."""


class StorageError(OSError):
    """The storage refuses a worker's files, and will again. The message has the path and bytes.

    It ends the run if the training function lets it through: no restart would change it.
    """


class ProgramFailedError(RuntimeError):
    """A script that ran instead of a training function has failed.

    The message is copied from the script's exception.

    Attributes:
        type_name: Name of the exception's class, or a description such as "program died".
        exit_code: Exit code that a shell would report: 128 plus the signal number if a signal
            killed the script.
        time: When the script failed, in seconds since the epoch.
        traceback: Traceback of the exception, "" if there was none.
        where: Innermost line of the user's own code, as `file:line in function`.
        is_exit: Whether the script ended by itself, by `sys.exit()` or KeyboardInterrupt.
    """

    def __init__(
        self,
        message: str,
        type_name: str,
        exit_code: int,
        time: float,
        traceback: str = "",
        where: str = "",
        is_exit: bool = False,
    ) -> None:
        super().__init__(message, type_name, exit_code, time, traceback, where, is_exit)
        self.type_name = type_name
        self.exit_code = exit_code
        self.time = time
        self.traceback = traceback
        self.location = where
        self.is_exit = is_exit

    @property
    def is_killed_by_signal(self) -> bool:
        """Whether a signal has ended it."""
        return self.exit_code > 128 and not self.traceback

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerError(RuntimeError):
    """Stands for a worker's exception that could not be unpickled here. Carries its `failure`."""

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.describe()


class UserAbort(KeyboardInterrupt):
    """Ctrl-C stopped the run. The message says where it lies and how to resume it."""


def without_internal_frames(error: Exception) -> Exception:
    """Return an error without its traceback if Drawbar has raised it on purpose.

    Its message is then for the user, who sees it below the line that called Drawbar. Errors of
    other code, and unexpected errors in Drawbar, keep their tracebacks.
    """
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    if entry is None or not entry.tb_frame.f_globals.get("__name__", "").startswith("drawbar."):
        return error
    is_raised = entry.tb_frame.f_code.co_code[entry.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
    return error.with_traceback(None) if is_raised else error
