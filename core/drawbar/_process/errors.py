"""Exceptions of a run. All of them can be pickled.

TrainingFailedError             fit() did not finish
├── WorkerGroupError            one or more workers failed; the root cause comes first
│   ├── DivergenceError         ranks wait for calls that other ranks will never make
│   └── HangError               no rank made progress within the timeout
├── ControllerError             Drawbar itself failed (storage, startup)
├── PreemptionError             more preemptions than the failure budget allows
└── InsufficientResourcesError  the cluster can never provide the requested resources
ResumeError (ValueError)           the run directory conflicts with `RunConfig.resume`
DamagedRunError (ValueError)       the journal of a run cannot be read
UnsupportedFormatError (ValueError)  a newer version of Drawbar has written the run
RunInProgressError (RuntimeError)  the run is in progress in another process or thread
CheckpointError (RuntimeError)     a checkpoint is missing, incomplete, or altered
StorageError (OSError)             the storage rejects a checkpoint: full, read-only, over quota
ProgramFailedError (RuntimeError)  a program that ran as a rank has failed; its exit code
WorkerError (RuntimeError)         replaces a worker's exception that cannot be unpickled
UserAbort (KeyboardInterrupt)      Ctrl-C stopped the run, which can be resumed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import cloudpickle

from drawbar._process.worker_failure import WorkerError, WorkerFailure


def load_exceptions(failures: Iterable[WorkerFailure]) -> dict[int, Exception]:
    """Return the exception of each rank, or a `WorkerError` if it cannot be unpickled."""
    exceptions: dict[int, Exception] = {}
    for failure in failures:
        if failure.rank >= 0:
            exceptions.setdefault(failure.rank, _load_exception(failure))
    return exceptions


def _load_exception(failure: WorkerFailure) -> Exception:
    if failure.pickled_exception is not None:
        # Its class may not be importable in this process, and unpickling runs user code.
        with contextlib.suppress(Exception):
            error = cloudpickle.loads(failure.pickled_exception)
            if isinstance(error, Exception):
                return error
    return WorkerError(failure)


_RebuildArguments = tuple[type[Exception], tuple[object, ...], dict[str, object]]
_ReduceValue = tuple[Callable[..., Exception], _RebuildArguments]


class TrainingFailedError(RuntimeError):
    """`fit()` did not finish. The message states the reason, with the root cause first.

    Args:
        error_message: Reason of the failure.
        path: Run directory, "" if it was not created. Its committed checkpoints can be loaded.

    Attributes:
        should_retry: Whether another start of the same run may succeed. False if it would fail
            again in the same way: the cause is in the code, the data, or the settings. A script
            that ends with this kind of error exits with code 70 instead of 1.

    Example:
        ```python
        try:
            result = trainer.fit()
        except TrainingFailedError as error:
            print(error.path, error.should_retry)
        ```
    """

    should_retry = True

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
        # Not by `__init__`, whose arguments differ from `args` in each subclass.
        error = cls.__new__(cls, *args)
        error.args = args
        error.__dict__.update(state)
        return error


class WorkerGroupError(TrainingFailedError):
    """One or more workers failed, and the maximum number of restarts is reached.

    Args:
        error_message: Reason of the failure.
        worker_failures: Exceptions by rank. Default: created from `failures`.
        failures: All worker failures, the root cause first.
        path: Run directory.

    Example:
        ```python
        except WorkerGroupError as error:
            if isinstance(error.worker_failures.get(0), torch.cuda.OutOfMemoryError):
                ...
        ```
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
        """Exceptions by rank; a `WorkerError` if an exception cannot be unpickled in this process.

        The exceptions are unpickled on first access, since the process that controls the run may
        not be able to import user classes.
        """
        if self._worker_failures is None:
            self._worker_failures = load_exceptions(self.failures)
        return self._worker_failures

    def __reduce__(self) -> _ReduceValue:
        rebuild, (cls, args, state) = super().__reduce__()
        if any(failure.pickled_exception for failure in self.failures):
            state = {**state, "_worker_failures": None}  # recreated from the failures
        return rebuild, (cls, args, state)


class DivergenceError(WorkerGroupError):
    """Ranks wait for calls that other ranks will never make, or their reports conflict.

    Example:
        ```python
        except DivergenceError as error:
            print(error)  # names the line of each rank
        ```
    """

    should_retry = False


class HangError(WorkerGroupError):
    """No rank made progress for `FailureConfig.hang_timeout`.

    Example:
        ```python
        except HangError as error:
            print(error)  # shows the location of each rank
        ```
    """


class ControllerError(TrainingFailedError):
    """Drawbar itself failed, not the training function.

    Args:
        error_message: Reason of the failure.
        controller_failure: Exception that is the cause.
        path: Run directory.

    Example:
        ```python
        except ControllerError as error:
            raise error.controller_failure from error
        ```
    """

    def __init__(
        self, error_message: str, controller_failure: Exception | None = None, *, path: str = ""
    ) -> None:
        super().__init__(error_message, path=path)
        self.controller_failure = controller_failure


@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes of the run that will be preempted.

    Attributes:
        deadline_ms: Time at which the nodes stop, in milliseconds since the epoch; None if unknown.
        preempted_node_to_ranks: Ranks on these nodes, by node id.

    Example:
        ```python
        info = train.get_preemption_info()
        if info is not None:
            print(f"ranks {info.preempted_ranks} stop at {info.deadline_ms}")
        ```
    """

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]] = field(default_factory=dict)

    @property
    def preempted_node_ids(self) -> list[str]:
        """Ids of the nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """Ranks on these nodes, sorted."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


class PreemptionError(TrainingFailedError):
    """More preemptions than `FailureConfig.max_preemption_failures` allows.

    Args:
        error_message: Reason of the failure.
        preemption_info: Nodes and ranks of the last preemption.
        path: Run directory.

    Example:
        ```python
        except PreemptionError as error:
            print(error.preemption_info)
        ```
    """

    def __init__(
        self, error_message: str, preemption_info: object | None = None, *, path: str = ""
    ) -> None:
        super().__init__(error_message, path=path)
        self.preemption_info = preemption_info


class InsufficientResourcesError(TrainingFailedError):
    """The cluster can never provide the requested resources. The message names the largest node.

    Example:
        ```python
        except InsufficientResourcesError:
            result = make_trainer(ScalingConfig(num_workers=1)).fit()
        ```
    """

    should_retry = False


class ResumeError(ValueError):
    """The state of the run directory conflicts with `RunConfig.resume`.

    Example:
        ```python
        except ResumeError:
            print("use another RunConfig.name")
        ```
    """


class DamagedRunError(ValueError):
    """The journal of a run cannot be read. The message names the line; checkpoints still load.

    `fit()` with the same name and `resume="auto"` removes the damaged part and continues.

    Example:
        ```python
        try:
            result = Result.from_path(path)
        except DamagedRunError as error:
            print(error)
        ```
    """


class UnsupportedFormatError(ValueError):
    """A journal or manifest has a newer format than this version of Drawbar supports.

    The run is not changed. The message contains both format versions.

    Example:
        ```python
        try:
            result = Result.from_path(path)
        except UnsupportedFormatError as error:
            print(error)
        ```
    """

    @classmethod
    def of(cls, path: object, version: int, supported: int) -> UnsupportedFormatError:
        """Return the error for a file with an unsupported format version."""
        return cls(
            f"{path} has format version {version}, but this version of Drawbar supports format "
            f"version {supported}. Upgrade Drawbar to the version that wrote the run"
        )


class RunInProgressError(RuntimeError):
    """The run is in progress, in this process or in another one that the message names.

    `drawbar.train.attach` returns a handle to it. Runs with another `RunConfig.name` can start.

    Example:
        ```python
        try:
            result = trainer.fit()
        except RunInProgressError:
            result = train.attach("mnist").wait()
        ```
    """


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, or altered. The message names the file.

    Example:
        ```python
        try:
            checkpoint.verify()
        except CheckpointError as error:
            print(error)
        ```
    """


class StorageError(OSError):
    """The storage permanently rejects a worker's files. The message contains the path and size.

    The error ends the run unless the training function handles it, since a restart would not help.

    Example:
        ```python
        try:
            train.report(metrics, checkpoint=checkpoint)
        except StorageError:
            train.report(metrics)
        ```
    """


class ProgramFailedError(RuntimeError):
    """A program that ran in place of a training function has failed.

    Args:
        message: Message of the program's exception.
        type_name: Name of the exception's class, or a description such as "program died".
        exit_code: Exit code that a shell would report: 128 plus the signal number if a signal
            killed the program.
        time: Time of the failure, in seconds since the epoch.
        traceback: Traceback of the exception, "" if there was none.
        where: Innermost line of user code, as `file:line in function`.
        is_exit: Whether the program ended itself with `sys.exit()` or KeyboardInterrupt.

    Attributes:
        pid: Process ID of the program; 0 if it is unknown.
        builtin_type: Nearest built-in class of the program's exception; "" if there is none.
        num_batches: Batches since the last report; None if unknown.
        data_position: Description of the batch; "" if there is none.

    Example:
        ```python
        except WorkerGroupError as error:
            failure = error.worker_failures[0]
            if isinstance(failure, ProgramFailedError):
                sys.exit(failure.exit_code)
        ```
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
        self.pid = 0
        self.builtin_type = ""
        self.num_batches: int | None = None
        self.data_position = ""

    @property
    def is_killed_by_signal(self) -> bool:
        """True if a signal killed the program."""
        return self.exit_code > 128 and not self.traceback

    def __str__(self) -> str:
        return str(self.args[0])


class UserAbort(KeyboardInterrupt):
    """Ctrl-C stopped the run. The message names the run directory and how to resume.

    Example:
        ```python
        try:
            trainer.fit()
        except UserAbort as abort:
            print(abort)
        ```
    """
