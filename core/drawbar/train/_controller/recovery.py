"""Stop a failed attempt, determine the root cause, and decide on a restart."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from drawbar._process.errors import TrainingFailedError
from drawbar._process.ranks import WorkerInfo
from drawbar._process.threads import run_in_daemon_thread
from drawbar._process.worker_failure import WorkerFailure, sort_root_cause_first
from drawbar._records.event_stream import Emit
from drawbar._records.events import AttemptEndCause, AttemptEnded, RanksRecovered
from drawbar._records.live_events import AttemptEnding, Notice, WorkersFailed
from drawbar._records.rollback import Rollback, decide_rollback
from drawbar._records.verdict import Verdict
from drawbar._recovery.attempt_recovery import Recovered
from drawbar._recovery.decisions import GiveUp, Restart, decide_after_failure, startup_delay
from drawbar._recovery.failure_policy import AttemptFailures, FailurePolicy
from drawbar.train._controller.attempt import Attempt
from drawbar.train._controller.callbacks import BackendHooks
from drawbar.train._controller.checkpoint_coordinator import CheckpointCoordinator
from drawbar.train._controller.failures import (
    AttemptFailure,
    describe_death,
    describe_startup_death,
    make_training_failed_error,
)
from drawbar.train._controller.run import OpenRun
from drawbar.train._protocol.messages import WorkerDied
from drawbar.train._worker_group.worker_group import AttemptEnd, WorkerGroup

RESTART_GRACE_SECONDS = 1.0
"""Time that a training function has to stop if its process can then be reused by a restart."""

FAIL_GRACE_SECONDS = 0.1
"""Time that a training function has to stop if its process is killed in any case."""

ROOT_CAUSE_WAIT_S = 5.0
"""Maximum time to wait for failures of ranks that failed earlier than the known ones."""


_NO_CHECKPOINT = (
    "The run starts again from the beginning, because it has no checkpoint. To keep work, pass "
    "checkpoints to train.report(), or let the report callback of your framework save more often."
)


class Recovery:
    """Handle the failed attempts of a run.

    Args:
        run: Open run.
        group: Workers.
        backend: Hooks of the backend.
        checkpoints: Checkpoints of the run. After a failure, its commits are completed.
        policy: Finds the causes of failures.
        emit: Callback that publishes events.
        wait_for_events: Waits until the controller has handled the events on its queue.
    """

    def __init__(
        self,
        run: OpenRun,
        group: WorkerGroup,
        backend: BackendHooks,
        checkpoints: CheckpointCoordinator,
        policy: FailurePolicy,
        emit: Emit,
        wait_for_events: Callable[[], Awaitable[None]],
    ) -> None:
        self._run = run
        self._group = group
        self._backend = backend
        self._checkpoints = checkpoints
        self._policy = policy
        self._emit = emit
        self._wait_for_events = wait_for_events
        self._failure_counts = run.failure_counts
        self._failed_starts = 0  # in a row
        self._has_warned = False  # that work is lost

    async def handle_failure(
        self, number: int, attempt: Attempt | None, failure: AttemptFailure
    ) -> Restart | GiveUp:
        """Stop the workers, describe the failures, and decide whether the run restarts.

        Meanwhile, the controller handles the messages of the workers.

        Args:
            number: Number of the attempt.
            attempt: Failed attempt; None if its workers did not start.
            failure: Failure that ended it.
        """
        # Wait before the workers are stopped. A rank sends its exception only after the function
        # has cleaned up (`finally` blocks), so a rank that is killed earlier sends none.
        await failure.wait_for_files(self._checkpoints.get_storing_limit)
        await failure.wait_for_root_cause(ROOT_CAUSE_WAIT_S)
        if isinstance(self._decide(failure.cause), GiveUp):
            # The console shows the output of rank 0, so let rank 0 print its error message.
            await failure.wait_for_rank_zero_exit()
        # Stop the workers before the next steps: until then, the peers of a dead rank only wait for
        # it.
        await self._stop_workers(failure, should_relocate=_should_relocate(attempt))
        if attempt is not None:
            # Ranks send failures until their process has stopped, so close the attempt only now.
            await self._wait_for_events()
            attempt.close()
            await self._add_deaths(attempt, failure)
        elif startup_failure := await describe_startup_death(failure, self._run.directory):
            failure.failures.append(startup_failure)
        # All failures are known now. Sort them by time: they arrive in any order.
        failure.failures = sort_root_cause_first(failure.failures)
        if attempt is not None and (early_return := _describe_early_return(attempt, failure)):
            failure.failures.insert(0, early_return)
        # Commit the checkpoints of which all files were persisted before the ranks were
        # stopped. A restart resumes from them.
        await self._checkpoints.finish_attempt()
        # After these causes the backend was not set up.
        if failure.cause not in ("startup", "configuration"):
            await self._backend.run_shutdown_hook()
        verdict = None
        if attempt is not None and failure.request is None:
            verdict = await self._judge(attempt, failure)
        if _should_relocate(attempt) or (verdict is not None and verdict.excluded_node):
            self._group.kill()  # the next start places all processes again
        decision = self._decide(failure.cause, verdict)
        self._failed_starts = self._failed_starts + 1 if failure.cause == "startup" else 0
        if isinstance(decision, Restart):
            delay = max(decision.delay, startup_delay(self._failed_starts))
            decision = replace(decision, delay=delay)
        rollback = self._decide_rollback(number, failure)
        self._emit_failure(number, attempt, failure, decision, verdict, rollback)
        if rollback is not None:
            self._run.rollbacks.append(rollback)
            await self._checkpoints.roll_back(rollback)
        if isinstance(decision, Restart):
            self._failure_counts = decision.failure_counts
            if attempt is not None:
                self._warn_if_work_is_lost()
        return decision

    def check_budget(self, cause: AttemptEndCause, num_deaths: Counter[AttemptEndCause]) -> str:
        """Return why a further death cannot be recovered in place, "" if it can."""
        config = self._run.spec.run_config.failure_config
        decision = decide_after_failure(cause, self._failure_counts + num_deaths, config)
        return decision.reason if isinstance(decision, GiveUp) else ""

    async def record_recovered(
        self, attempt: Attempt, recovered: Recovered[WorkerDied], workers: Mapping[int, WorkerInfo]
    ) -> None:
        """Record deaths that were recovered in place. Each of them uses the failure budget.

        Args:
            attempt: Attempt that continues.
            recovered: The recovery.
            workers: The processes that have died, by rank.
        """
        budget = ""
        for cause in recovered.num_deaths.elements():
            decision = self._decide(cause)
            if isinstance(decision, Restart):
                self._failure_counts, budget = decision.failure_counts, decision.budget
        described = await self._describe_deaths(attempt, recovered.deaths, workers)
        num_deaths, seconds = recovered.num_deaths, recovered.stopped_seconds
        self._emit(RanksRecovered.of(attempt.number, described, num_deaths, seconds, budget))

    def _warn_if_work_is_lost(self) -> None:
        """Warn once if the run restarts without a checkpoint."""
        has_checkpoint = self._checkpoints.registry.latest or self._run.spec.resume_from_checkpoint
        if not has_checkpoint and not self._has_warned:
            self._has_warned = True
            self._emit(Notice(_NO_CHECKPOINT))

    def _decide(self, cause: AttemptEndCause, verdict: Verdict | None = None) -> Restart | GiveUp:
        spec = self._run.spec
        return decide_after_failure(
            cause,
            self._failure_counts,
            spec.run_config.failure_config,
            verdict,
            has_launcher=spec.is_restarted_by_launcher,
        )

    async def _judge(self, attempt: Attempt, failure: AttemptFailure) -> Verdict | None:
        """Return why the attempt failed. A bad node is excluded from later attempts."""
        failed = AttemptFailures(
            attempt=attempt.number,
            cause=failure.cause,
            failures=failure.failures,
            workers=attempt.workers,
            first_report_index=attempt.progress.first_index,
            last_report_times=attempt.last_report_times,
        )
        return await run_in_daemon_thread(self._policy.judge, failed, self._group.exclude_node)

    async def _stop_workers(self, failure: AttemptFailure, *, should_relocate: bool) -> None:
        """End the attempt on all workers. Processes that a restart can reuse are kept.

        Meanwhile, the attempt collects the failures of other ranks.
        """
        possible_causes: Sequence[AttemptEndCause] = [failure.cause]
        if should_relocate or any(death.is_preempted for death in failure.deaths.values()):
            # A node was lost, or will be. It may be the cause of the exceptions of other ranks.
            possible_causes = [failure.cause, "preemption"]
        # The cause is known only when all deaths are described, and a killed process cannot be
        # reused. Therefore, prepare for a restart if one of the possible causes leads to it.
        is_restart_possible = any(
            isinstance(self._decide(cause), Restart) for cause in possible_causes
        )
        should_keep = (
            self._run.spec.run_config.failure_config.reuse_workers
            and self._backend.can_reuse_processes
        )
        # Wait longer only for processes that are reused. All others are killed anyway.
        can_reuse = is_restart_possible and should_keep
        await self._group.end_attempt(
            AttemptEnd(
                grace=RESTART_GRACE_SECONDS if can_reuse else FAIL_GRACE_SECONDS,
                should_keep=should_keep,
                # After a failed start, the next attempt creates the processes, after a delay.
                should_replace=is_restart_possible and failure.cause != "startup",
                failed_ranks=self._policy.list_ranks_to_replace(
                    failure.failures if failure.request is None else ()
                ),
            )
        )

    async def _describe_deaths(
        self, attempt: Attempt, deaths: Mapping[int, WorkerDied], workers: Mapping[int, WorkerInfo]
    ) -> list[WorkerFailure]:
        describe = partial(describe_death, directory=self._run.directory)
        return await asyncio.gather(
            *(
                describe(rank, death, workers[rank], num_reports=attempt.count_reports(rank))
                for rank, death in sorted(deaths.items())
            )
        )

    async def _add_deaths(self, attempt: Attempt, failure: AttemptFailure) -> None:
        """Add a failure for each dead process. Set the cause if a preemption killed one of them."""
        if failure.cause == "worker" and any(
            death.is_preempted for death in failure.deaths.values()
        ):
            failure.cause = "preemption"
        workers = {**dict(enumerate(attempt.workers)), **attempt.dead_workers}
        failure.failures += await self._describe_deaths(attempt, failure.deaths, workers)

    def _emit_failure(
        self,
        number: int,
        attempt: Attempt | None,
        failure: AttemptFailure,
        decision: Restart | GiveUp,
        verdict: Verdict | None,
        rollback: Rollback | None,
    ) -> None:
        headlines = [worker_failure.headline() for worker_failure in failure.failures]
        if failure.exception is not None and not any(
            worker_failure.kind == "startup" for worker_failure in failure.failures
        ):
            headlines.append(f"{type(failure.exception).__name__}: {failure.exception}")
        if attempt is not None:
            self._emit(AttemptEnding(number))
        is_final = isinstance(decision, GiveUp)
        budget = "" if isinstance(decision, GiveUp) else decision.budget
        self._emit(
            AttemptEnded(
                time=time.time(),
                attempt=number,
                cause=failure.cause,
                failure_headlines=headlines,
                num_reports=0 if attempt is None else attempt.reports.num_reports,
                failure_time=_get_failure_time(attempt, failure),
                verdict=verdict,
                budget=budget,
                rollback=rollback,
            )
        )
        self._emit(
            WorkersFailed(
                failure.cause, failure.failures, is_final=is_final, budget=budget, verdict=verdict
            )
        )

    def _decide_rollback(self, number: int, failure: AttemptFailure) -> Rollback | None:
        request = failure.request
        if request is None:
            return None
        return decide_rollback(
            [manifest.name for manifest in self._checkpoints.registry.manifests],
            attempt=number,
            reason=request.reason,
            skip=request.skip,
            to=request.to,
            report_index=request.report_index,
            data_positions=request.data_positions,
        )

    def make_error(self, failure: AttemptFailure, decision: GiveUp) -> TrainingFailedError:
        """Return the error of a run that does not restart."""
        error = make_training_failed_error(
            failure,
            reason=decision.reason,
            path=self._run.directory.uri,
            recoverable=self._checkpoints.describe_remaining_files(),
        )
        error.should_retry = decision.should_retry
        return error


def _get_failure_time(attempt: Attempt | None, failure: AttemptFailure) -> float | None:
    """Return the time of the root cause, or of the last message of a rank after a hang."""
    if failure.cause == "hang" and attempt is not None:
        return time.time() - attempt.activity_clock.get_idle_seconds()
    return failure.failures[0].time if failure.failures else None


def _describe_early_return(attempt: Attempt, failure: AttemptFailure) -> WorkerFailure | None:
    """Describe the rank that returned while others were in a framework's collective with it.

    The others only raise errors about a lost connection.

    Returns:
        None if the failures have another cause.
    """
    returned = failure.returned - {other.rank for other in failure.failures}
    if not (returned and failure.has_only_lost_connections()):
        return None
    rank, waiting = min(returned), failure.failures[0].rank
    worker = attempt.workers[rank]
    return WorkerFailure(
        rank=rank,
        kind="exception",
        type_name="left its training function",
        message=(
            f"rank {rank} returned while rank {waiting} waited for it in a collective of the "
            "framework. Make all ranks run the same steps, and agree on when to stop"
        ),
        location=attempt.progress.ranks[rank].last,
        hostname=worker.hostname,
        node_id=worker.node_id,
        pid=attempt.get_pid(rank),
        time=failure.failures[0].time,
        num_reports=attempt.count_reports(rank),
    )


def _should_relocate(attempt: Attempt | None) -> bool:
    """Return whether the next attempt must leave nodes that are being drained."""
    return attempt is not None and attempt.requests.latest.preemption is not None
