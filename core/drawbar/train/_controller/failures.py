"""Failures of an attempt: their root cause, their descriptions, and the error of `fit()`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from drawbar._process.errors import (
    ControllerError,
    DivergenceError,
    HangError,
    InsufficientResourcesError,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
)
from drawbar._process.exit_status import (
    describe_exit,
    startup_verdict,
    wait_for_exit_report,
    wait_for_report_of_pid,
)
from drawbar._process.ranks import WorkerInfo
from drawbar._process.stack_comparison import WrittenStacks
from drawbar._process.worker_failure import CONNECTION_LOST, WorkerFailure
from drawbar._records.events import AttemptEndCause
from drawbar._recovery.decisions import Restart
from drawbar._recovery.startup_errors import is_worker_death
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._protocol.messages import (
    FunctionFailed,
    GroupMessage,
    RankFailed,
    RankFinished,
    RollbackRequested,
    WorkerDied,
)

EXIT_REPORT_SECONDS = 2.0
"""Time to wait for the sentinel's report of a death."""

PEER_DEATH_WAIT_S = 2.0
"""Time to wait for the death of a rank after a peer has reported a lost connection."""

EXIT_SECONDS = 2.0
"""Time that rank 0 has to end by itself after another rank has exited, before it is stopped."""


@dataclass(eq=False)
class AttemptFailure:
    """Failure that ended an attempt. Messages that arrive later complete it.

    Attributes:
        cause: Kind of failure.
        failures: Failures of the ranks.
        deaths: Processes that died, by rank.
        exception: Exception in the driver; None if workers failed.
        failure_times: Times at which training functions raised, by rank.
        started: Start time of the attempt if its workers did not start, otherwise 0.
        returned: Ranks whose function has returned.
        request: Call of `rollback()` that ended the attempt, if any.
    """

    cause: AttemptEndCause
    failures: list[WorkerFailure] = field(default_factory=list)
    deaths: dict[int, WorkerDied] = field(default_factory=dict)
    exception: Exception | None = None
    failure_times: dict[int, float] = field(default_factory=dict)
    started: float = 0.0
    returned: set[int] = field(default_factory=set)
    request: RollbackRequested | None = None

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()

    @staticmethod
    def of(message: RankFailed | RollbackRequested) -> AttemptFailure:
        """Return the failure with which a rank ends the attempt."""
        request = message if isinstance(message, RollbackRequested) else None
        return AttemptFailure(get_end_cause(message.failure), [message.failure], request=request)

    def on_message(self, rank: int, message: GroupMessage) -> None:
        """Add a message that arrives after the first failure."""
        match message:
            case RankFailed():
                self.failures.append(message.failure)
            case FunctionFailed():
                self.failure_times[rank] = message.time
            case RankFinished():
                self.returned.add(rank)
            case WorkerDied():
                # Describe it later: its exit report may take two seconds, and this runs on the
                # event loop.
                self.deaths.setdefault(rank, message)  # a new process may end later
        self._changed.set()

    async def wait_for_root_cause(self, timeout: float) -> None:
        """Wait for the failures of the ranks that raised first.

        The first failure to arrive may be a consequence of another one. When a rank raises, its
        peers fail in a collective while it still cleans up, and its own failure is sent after that.
        When a process is killed, its peers notice it before Ray reports it.

        Args:
            timeout: Maximum time in seconds for each of both cases.
        """
        await self._wait_while(self.has_only_lost_connections, min(timeout, PEER_DEATH_WAIT_S))
        # A rank that hangs in its clean-up may never send its failure.
        await self._wait_while(self._has_earlier_failure, timeout)

    async def wait_for_files(self, get_limit: Callable[[Collection[int]], float]) -> None:
        """Wait while the other ranks store files of checkpoints, so that these are committed.

        Args:
            get_limit: Returns the maximum time in seconds, 0 if no file is awaited. It is called
                with the ranks that have failed.
        """

        def get_remaining_limit() -> float:
            return get_limit(self.deaths.keys() | {failure.rank for failure in self.failures})

        # A hang or an error of the storage may concern these files.
        if self.cause not in ("hang", "storage"):
            await self._wait_while(lambda: get_remaining_limit() > 0, get_remaining_limit())

    async def wait_for_rank_zero_exit(self) -> None:
        """Wait until rank 0 has ended by itself, if so far only other ranks have exited.

        All ranks reject wrong arguments in the same way, but the output of rank 0 is the one that
        is shown, and rank 0 may be the last to get there.
        """
        await self._wait_while(self._only_other_ranks_exited, EXIT_SECONDS)

    async def _wait_while(self, is_incomplete: Callable[[], bool], timeout: float) -> None:
        """Wait for further messages while a condition is true, for at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while is_incomplete():
                    self._changed.clear()
                    await self._changed.wait()

    def _only_other_ranks_exited(self) -> bool:
        exits = all(failure.kind == "exit" and failure.rank > 0 for failure in self.failures)
        return bool(self.failures) and exits and not self.deaths and 0 not in self.returned

    def has_only_lost_connections(self) -> bool:
        """Return whether all failures are lost connections, but no death is reported."""
        are_lost_connections = all(
            CONNECTION_LOST.search(failure.message) for failure in self.failures
        )
        return bool(self.failures) and are_lost_connections and not self.deaths

    def _has_earlier_failure(self) -> bool:
        """Return whether a rank raised before all known failures and has not sent its own yet."""
        known_times = {failure.rank: failure.time for failure in self.failures}
        first = min(known_times.values(), default=0.0)
        known = known_times.keys() | self.deaths.keys()
        return any(at < first and rank not in known for rank, at in self.failure_times.items())


async def describe_death(
    rank: int, death: WorkerDied, worker: WorkerInfo, directory: RunDirectory, num_reports: int
) -> WorkerFailure:
    """Describe a worker process that died, and why it died if that is known.

    Args:
        rank: Rank of the worker.
        death: Message that reports the death.
        worker: Host, node, and process of the worker.
        directory: Run directory, with the exit report and the log.
        num_reports: Number of `report()` calls of the rank in this attempt.
    """
    exit_report = await wait_for_exit_report(
        directory.get_exit_report_path(worker.hostname, worker.pid), EXIT_REPORT_SECONDS
    )
    log = directory.get_log_path(rank)
    # faulthandler writes the stack of a crash to stderr, which is redirected to the log.
    cause = describe_exit(exit_report, death.detail, _read_tail(log))
    if death.is_preempted:
        node = f"{worker.node_id[:8]} ({worker.node_ip})"
        cause = f"its node {node} was lost or is being removed; {cause}"
    return WorkerFailure(
        rank=rank,
        kind="died",
        type_name="worker process died",
        message=cause,
        hostname=worker.hostname,
        node_id=worker.node_id,
        pid=worker.pid,
        # The earliest failure of an attempt is the root cause. Prefer the time in the exit report:
        # Ray can report the death only after other ranks have failed because of it.
        time=exit_report.time if exit_report is not None else death.time,
        num_reports=num_reports,
        num_batches=exit_report.num_batches if exit_report is not None else None,
        log_path=str(log),
    )


async def describe_startup_death(
    failure: AttemptFailure, directory: RunDirectory
) -> WorkerFailure | None:
    """Describe a worker process that died before the training function started.

    Args:
        failure: Failure of an attempt whose workers did not start.
        directory: The run's directory.

    Returns:
        None if the exception does not report a death.
    """
    error = failure.exception
    if not is_worker_death(error):
        return None
    text = str(error)
    pid_match = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
    pid = int(pid_match[1]) if pid_match else 0
    exit_report = None
    if pid:
        # The host name is unknown, but only the name of the file depends on it.
        reports_directory = directory.get_exit_report_path("", pid).parent
        exit_report = await wait_for_report_of_pid(
            reports_directory, pid, failure.started, EXIT_REPORT_SECONDS
        )
    ip_match = re.search(r"^\s*ip: (\S+)", text, re.MULTILINE)
    is_init_error = getattr(error, "actor_init_failed", False)
    return WorkerFailure(
        rank=-1,
        kind="startup",
        type_name="a worker process died while it started",
        message=startup_verdict(exit_report, text),
        traceback=text if is_init_error else "",
        hostname=ip_match[1] if ip_match else "",  # Ray's error has the IP address instead
        pid=pid,
        time=exit_report.time if exit_report is not None else time.time(),
    )


def describe_delay(failure: AttemptFailure, restart: Restart) -> str:
    """Return the console line about the wait before the workers are started again."""
    if failure.cause != "startup":
        return f"The failure may be temporary. Starting again in {restart.delay:g} s."
    error = failure.exception
    cause = "" if failure.failures else f" ({type(error).__name__}: {error})"
    return (
        f"The workers did not start{cause}. Starting them again in {restart.delay:g} s "
        f"(startup failure {restart.failure_counts['startup']})"
    )


def describe_divergence(reason: str) -> WorkerFailure:
    """Describe ranks that wait for calls that other ranks will never make."""
    return WorkerFailure(
        rank=-1, kind="divergence", type_name="ranks diverged", message=reason, time=time.time()
    )


def describe_hang(
    seconds: float, stacks: WrittenStacks, ahead: str, first_index: int
) -> WorkerFailure:
    """Describe an attempt in which no rank has made progress for some time.

    Args:
        seconds: `FailureConfig.hang_timeout` in seconds.
        stacks: Stacks of all ranks.
        ahead: Text about ranks that are ahead in the data, "" if there are none.
        first_index: Number of the first report of the attempt.
    """
    return WorkerFailure(
        rank=-1,
        kind="hang",
        type_name="no progress",
        message=(
            f"no rank made progress for {seconds:g} s\n{stacks.difference}{ahead}\n"
            f"stacks: {stacks.directory}"
        ),
        time=time.time(),
        num_reports=max(stacks.report_index - first_index, 0),
        num_batches=stacks.num_batches,
    )


def describe_interruption(rank: int) -> WorkerFailure:
    """Describe a rank that raised `AttemptInterrupted` although Drawbar did not interrupt it."""
    return WorkerFailure(
        rank=rank,
        kind="exception",
        type_name="AttemptInterrupted",
        message="the training function raised AttemptInterrupted, but Drawbar did not interrupt it",
        time=time.time(),
    )


def make_training_failed_error(
    failure: AttemptFailure, *, reason: str, path: str, recoverable: str
) -> TrainingFailedError:
    """Return the error that `fit()` raises.

    Its message describes the root cause in full, and every other failure in one line.

    Args:
        failure: Failure of the last attempt of the run, with the root cause first.
        reason: Why the run does not restart.
        path: Run directory.
        recoverable: Description of the latest checkpoint and of files that were not committed.
    """
    cause, failures, exception = failure.cause, failure.failures, failure.exception
    footer = f"\n\nThe run ends: {reason}.\nRun directory: {path}\n{recoverable}"
    if isinstance(exception, InsufficientResourcesError):
        return InsufficientResourcesError(f"{exception}{footer}", path=path)
    if cause == "preemption" and exception is None and not failures:
        # The workers stopped after a checkpoint, before the node was removed.
        return PreemptionError(f"{_SUMMARY_BY_CAUSE[cause]}{footer}", path=path)
    if not failures or failures[0].kind == "startup":
        error = failures[0].describe() if failures else f"{type(exception).__name__}: {exception}"
        summary = _SUMMARY_BY_CAUSE.get(cause, "the run failed")
        message = f"{summary}: {error}{footer}"
        return ControllerError(message, exception, path=path)
    message = failures[0].describe()
    if len(failures) > 1:
        others = "\n".join(f"  {_in_one_line(other, failures[0])}" for other in failures[1:])
        message += f"\n\nOther failures:\n{others}"
    if cause == "preemption":
        return PreemptionError(message + footer, path=path)
    error_classes: dict[str, type[WorkerGroupError]] = {
        "divergence": DivergenceError,
        "hang": HangError,
    }
    error_class = error_classes.get(cause, WorkerGroupError)
    return error_class(message + footer, failures=failures, path=path)


def _in_one_line(failure: WorkerFailure, first: WorkerFailure) -> str:
    if (failure.type_name, failure.message) != (first.type_name, first.message):
        return failure.headline()
    location = f" ({failure.location})" if failure.location else ""
    return f"rank {failure.rank}: the same {failure.type_name}{location}"


_SUMMARY_BY_CAUSE: dict[AttemptEndCause, str] = {
    "startup": "the workers could not start",
    "configuration": "the run cannot continue with this configuration",
    "storage": "a checkpoint could not be committed",
    "preemption": "a node of the workers was lost or is being removed",
}
"""Summaries of failures that are not failures of a rank in the training function."""


def _read_tail(path: Path, nbytes: int = 20_000) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - nbytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def get_end_cause(failure: WorkerFailure) -> AttemptEndCause:
    """Return why an attempt ends after the failure of a worker."""
    match failure.kind:
        case "configuration" | "storage" | "rollback":
            return failure.kind
        case "evicted":
            return "preemption"
        case _:
            return "worker"
