"""After a failed attempt: everything brought to a stop, what happened found out, what follows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from drawbar.train._controller.attempt import Attempt
from drawbar.train._controller.attempt_failure import AttemptFailure
from drawbar.train._controller.backend_hooks import BackendHooks
from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.decisions import GiveUp, Restart, decide_after_failure, startup_delay
from drawbar.train._controller.failures import (
    describe_death,
    describe_startup_death,
    make_training_failed_error,
)
from drawbar.train._controller.run import OpenRun
from drawbar.train._errors import TrainingFailedError, sort_root_cause_first
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import AttemptEndCause, AttemptEnded, WorkersFailed
from drawbar.train._worker_group.worker_group import WorkerGroup

RESTART_GRACE_SECONDS = 1.0
FAIL_GRACE_SECONDS = 0.1
ROOT_CAUSE_WAIT_S = 5.0


class Recovery:
    """Ends failed attempts of a run, and decides whether another one follows."""

    def __init__(
        self,
        run: OpenRun,
        group: WorkerGroup,
        backend: BackendHooks,
        commits: CheckpointCommitter,
        emit: Emit,
    ) -> None:
        self._run = run
        self._group = group
        self._backend = backend
        self._commits = commits
        self._emit = emit
        self._used = run.used_budget
        self._failed_starts = 0  # in a row

    async def handle_failure(
        self, number: int, attempt: Attempt | None, failure: AttemptFailure
    ) -> Restart | GiveUp:
        """End attempt `number`, and decide. `attempt` is None if it has not come to run."""
        # Before anybody is stopped: who is killed in its clean-up tells nothing any more.
        await failure.wait_for_root_cause(ROOT_CAUSE_WAIT_S)
        if isinstance(self._decide(failure.cause), GiveUp):
            await failure.wait_for_rank_zero_exit()
        # First of all: as long as peers of a dead rank run, they wait for it, and every second of
        # that is a second of no training.
        await self._stop_workers(failure, should_relocate=_should_relocate(attempt))
        if attempt is not None:
            # Only now: until every process had stopped, ranks told what had become of them.
            attempt.close()
            await self._describe_deaths(attempt, failure)
        elif failure.exception is not None and (
            death := await describe_startup_death(
                failure.exception, self._run.directory, failure.started
            )
        ):
            failure.failures.append(death)
        # Only now all are known. By time, since what peers raise after a death comes through the
        # same streams, in any order.
        failure.failures = sort_root_cause_first(failure.failures)
        # What all ranks had persisted becomes a checkpoint yet, which a restart goes on from.
        await self._commits.finish_attempt()
        # Otherwise nothing was set up that could be shut down.
        if failure.cause not in ("startup", "configuration"):
            await self._backend.run_shutdown_hook()
        if _should_relocate(attempt):
            self._group.relocate_on_next_start()
        decision = self._decide(failure.cause)
        self._failed_starts = self._failed_starts + 1 if failure.cause == "startup" else 0
        if isinstance(decision, Restart):
            decision = replace(decision, delay=startup_delay(self._failed_starts))
        self._emit_failure(number, failure, decision)
        if isinstance(decision, Restart):
            self._used = decision.used
        return decision

    def _decide(self, end: AttemptEndCause) -> Restart | GiveUp:
        return decide_after_failure(end, self._used, self._run.spec.run_config.failure_config)

    async def _stop_workers(self, failed: AttemptFailure, *, should_relocate: bool) -> None:
        """Bring every process to a stop; the attempt gathers what other ranks have to say."""
        ends: Sequence[AttemptEndCause] = [failed.cause]
        if should_relocate or any(gone.preempted for gone in failed.deaths.values()):
            ends = [failed.cause, "preemption"]  # what ranks raise may come of the loss of a node
        # Decided for all that it may turn out to be: deaths are looked into later, and a process
        # that a restart needs could not be had back.
        restart = any(isinstance(self._decide(end), Restart) for end in ends)
        keep = (
            self._run.spec.run_config.failure_config.reuse_workers
            and self._backend.can_reuse_processes
        )
        await self._group.end_attempt(
            # A second is worth it where the process is kept; without a restart nobody waits for
            # long for who will be killed anyway.
            grace=RESTART_GRACE_SECONDS if restart and keep else FAIL_GRACE_SECONDS,
            should_keep=keep,
            # After a failed start, the next one creates the processes: it waits first.
            should_replace=restart and failed.cause != "startup",
        )

    async def _describe_deaths(self, attempt: Attempt, failed: AttemptFailure) -> None:
        if failed.cause == "worker" and any(gone.preempted for gone in failed.deaths.values()):
            failed.cause = "preemption"
        for rank, gone in failed.deaths.items():
            worker, reports = attempt.workers[rank], attempt.count_reports(rank)
            failed.failures.append(
                await describe_death(rank, gone, worker, self._run.directory, reports)
            )

    def _emit_failure(
        self, number: int, failed: AttemptFailure, decision: Restart | GiveUp
    ) -> None:
        headlines = [failure.headline() for failure in failed.failures]
        if failed.exception is not None and not any(f.kind == "startup" for f in failed.failures):
            headlines.append(f"{type(failed.exception).__name__}: {failed.exception}")
        self._emit(
            AttemptEnded(
                time=time.time(), attempt=number, cause=failed.cause, failure_headlines=headlines
            )
        )
        is_last = isinstance(decision, GiveUp)
        budget = "" if isinstance(decision, GiveUp) else decision.budget
        self._emit(WorkersFailed(failed.cause, failed.failures, is_final=is_last, budget=budget))

    def make_error(self, failed: AttemptFailure, decision: GiveUp) -> TrainingFailedError:
        """Give the error of a run that gives up."""
        return make_training_failed_error(
            failed.cause,
            failed.failures,
            failed.exception,
            reason=decision.reason,
            path=self._run.directory.uri,
            recoverable=self._commits.describe_remaining_files(),
        )


def _should_relocate(attempt: Attempt | None) -> bool:
    """Whether nodes of the attempt are about to go, which the next one is to leave."""
    return attempt is not None and attempt.requests.preemption is not None
