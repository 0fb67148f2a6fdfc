"""After a failed attempt: everything brought to a stop, what happened found out, what follows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from drawbar.train._controller.attempt import Attempt
from drawbar.train._controller.attempt_failed import AttemptFailed
from drawbar.train._controller.backend_hooks import BackendHooks
from drawbar.train._controller.commits import Committer
from drawbar.train._controller.decisions import GiveUp, Restart, after_failure, startup_delay
from drawbar.train._controller.failures import (
    describe_death,
    describe_startup_death,
    training_failed,
)
from drawbar.train._controller.run import Run
from drawbar.train._errors import TrainingFailedError, root_cause_first
from drawbar.train._group.worker_group import WorkerGroup
from drawbar.train._history.events import AttemptEnd, AttemptEnded, WorkersFailed
from drawbar.train._history.stream import Emit

RESTART_GRACE_SECONDS = 1.0
FAIL_GRACE_SECONDS = 0.1
CAUSE_SECONDS = 5.0


class Recovery:
    """Ends failed attempts of a run, and decides whether another one follows."""

    def __init__(
        self, run: Run, group: WorkerGroup, backend: BackendHooks, commits: Committer, emit: Emit
    ) -> None:
        self._run = run
        self._group = group
        self._backend = backend
        self._commits = commits
        self._emit = emit
        self._spent = run.spent
        self._failed_starts = 0  # in a row

    async def after(
        self, number: int, attempt: Attempt | None, failed: AttemptFailed
    ) -> Restart | GiveUp:
        """End attempt `number`, and decide. `attempt` is None if it has not come to run."""
        # Before anybody is stopped: who is killed in its clean-up tells nothing any more.
        await failed.first_cause(CAUSE_SECONDS)
        if isinstance(self._decide(failed.end), GiveUp):
            await failed.wait_for_rank_zero_exit()
        # First of all: as long as peers of a dead rank run, they wait for it, and every second of
        # that is a second of no training.
        await self._stop_workers(failed, moves=_moves(attempt))
        if attempt is not None:
            # Only now: until every process had stopped, ranks told what had become of them.
            attempt.close()
            await self._look_into_deaths(attempt, failed)
        elif failed.cause is not None and (
            failure := await describe_startup_death(
                failed.cause, self._run.directory, failed.started
            )
        ):
            failed.failures.append(failure)
        # Only now all are known. By time, since what peers raise after a death comes through the
        # same streams, in any order.
        failed.failures = root_cause_first(failed.failures)
        # What all ranks had persisted becomes a checkpoint yet, which a restart goes on from.
        await self._commits.settle()
        # Otherwise nothing was set up that could be shut down.
        if failed.end not in ("startup", "configuration"):
            await self._backend.shut_down()
        if _moves(attempt):
            self._group.move()
        decision = self._decide(failed.end)
        self._failed_starts = self._failed_starts + 1 if failed.end == "startup" else 0
        if isinstance(decision, Restart):
            decision = replace(decision, delay=startup_delay(self._failed_starts))
        self._tell(number, failed, decision)
        if isinstance(decision, Restart):
            self._spent = decision.spent
        return decision

    def _decide(self, end: AttemptEnd) -> Restart | GiveUp:
        return after_failure(end, self._spent, self._run.spec.run_config.failure_config)

    async def _stop_workers(self, failed: AttemptFailed, *, moves: bool) -> None:
        """Bring every process to a stop; the attempt gathers what other ranks have to say."""
        ends: Sequence[AttemptEnd] = [failed.end]
        if moves or any(gone.preempted for gone in failed.gone.values()):
            ends = [failed.end, "preemption"]  # what ranks raise may come of the loss of a node
        # Decided for all that it may turn out to be: deaths are looked into later, and a process
        # that a restart needs could not be had back.
        restart = any(isinstance(self._decide(end), Restart) for end in ends)
        keep = self._run.spec.run_config.failure_config.keep_survivors and self._backend.reentrant
        await self._group.end_attempt(
            # A second is worth it where the process is kept; without a restart nobody waits for
            # long for who will be killed anyway.
            grace=RESTART_GRACE_SECONDS if restart and keep else FAIL_GRACE_SECONDS,
            keep=keep,
            # After a failed start, the next one creates the processes: it waits first.
            replace=restart and failed.end != "startup",
        )

    async def _look_into_deaths(self, attempt: Attempt, failed: AttemptFailed) -> None:
        if failed.end == "worker" and any(gone.preempted for gone in failed.gone.values()):
            failed.end = "preemption"
        for rank, gone in failed.gone.items():
            worker, reports = attempt.workers[rank], attempt.reports_of(rank)
            failed.failures.append(
                await describe_death(rank, gone, worker, self._run.directory, reports)
            )

    def _tell(self, number: int, failed: AttemptFailed, decision: Restart | GiveUp) -> None:
        headlines = [failure.headline() for failure in failed.failures]
        if failed.cause is not None and not any(f.kind == "startup" for f in failed.failures):
            headlines.append(f"{type(failed.cause).__name__}: {failed.cause}")
        self._emit(
            AttemptEnded(time=time.time(), attempt=number, kind=failed.end, failures=headlines)
        )
        is_last = isinstance(decision, GiveUp)
        budget = "" if isinstance(decision, GiveUp) else decision.budget
        self._emit(WorkersFailed(failed.end, failed.failures, is_raised=is_last, budget=budget))

    def error(self, failed: AttemptFailed, decision: GiveUp) -> TrainingFailedError:
        """Give the error of a run that gives up."""
        return training_failed(
            failed.end,
            failed.failures,
            failed.cause,
            reason=decision.reason,
            path=self._run.directory.location,
            loads=self._commits.what_is_left(),
        )


def _moves(attempt: Attempt | None) -> bool:
    """Whether nodes of the attempt are about to go, which the next one is to leave."""
    return attempt is not None and attempt.wishes.preemption is not None
