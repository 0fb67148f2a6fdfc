"""The loop: await what happens, decide, act.

`Controller.run` starts the workers, follows one attempt after another, and ends when the function
has returned on every rank or no attempt is left. It is a plain class: a `Host` runs it on an event
loop in a thread, of the driver or of an actor. A wait ends by an event that a worker, the storage
or the user causes. Only two tasks look now and then: for nodes that are about to go, of which Ray
says nothing by itself, and for ranks that are quiet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

from drawbar.train._controller.attempt import Attempt, AttemptFailed
from drawbar.train._controller.commits import Committer
from drawbar.train._controller.decisions import GiveUp, Restart, after_failure
from drawbar.train._controller.diagnosis import Diagnoses
from drawbar.train._controller.failures import (
    describe_death,
    describe_hang,
    startup_end,
    training_failed,
)
from drawbar.train._controller.quiet import QuietWatch
from drawbar.train._controller.run import Outcome, Plan, Run
from drawbar.train._controller.validations import Validations
from drawbar.train._errors import WorkerFailure, root_cause_first
from drawbar.train._group.daemon_thread import in_daemon_thread
from drawbar.train._group.ranks import assign, by_rank
from drawbar.train._group.worker_group import WorkerGroup
from drawbar.train._history.events import (
    AttemptEnd,
    AttemptEnded,
    AttemptStarted,
    Notice,
    PreemptionAnnounced,
    RunEnded,
    WorkersFailed,
    WorkersStarted,
)
from drawbar.train._history.stream import Emit
from drawbar.train._messages import Failed, Gone, Message
from drawbar.train._settings.backend import Backend
from drawbar.train._storage.manifest import Manifest

RESTART_GRACE_SECONDS = 1.0
FAIL_GRACE_SECONDS = 0.1
STOP_GRACE_SECONDS = 5.0  # the user's own clean-up; a second Ctrl-C cuts it short
DRAIN_CHECK_SECONDS = 2.0


@dataclass(frozen=True)
class _Said:
    attempt: int
    rank: int
    messages: Sequence[Message]


@dataclass(frozen=True)
class _StorageFailed:
    error: Exception


@dataclass(frozen=True)
class _Interruption:
    """The controller itself wants the attempt to end and another one to follow."""

    end: AttemptEnd


class Controller:
    """Follows one run from its first process to its end. Make it on the event loop that runs it."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        group: WorkerGroup,
        emit: Emit,
    ) -> None:
        self._run = run
        self._plan = plan
        self._group = group
        self._emit = emit
        self._diagnoses = Diagnoses(group, run.directory, emit)
        self._backend: Backend = run.backend_config.backend_cls()
        self._attempt: Attempt | None = None
        self._number = run.first_attempt
        self._spent = run.spent
        self._inbox: asyncio.Queue[_Said | _StorageFailed | _Interruption] = asyncio.Queue()
        self._stops_at_commit = False
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Outcome] | None = None
        self._commits = Committer(
            run.directory,
            run.config.checkpoint_config,
            run.metadata,
            emit=emit,
            committed=self._committed,
            failed=lambda error: self._inbox.put_nowait(_StorageFailed(error)),
        )
        self._validations = Validations(run.validator, self._commits, emit, self._validated)
        patience = run.config.failure_config.quiet_notice
        assert not isinstance(patience, int | float)  # FailureConfig makes it a timedelta
        self._quiet = QuietWatch(patience, lambda: self._attempt, group, emit)

    def stop(self) -> None:
        """Ask for an orderly end, from any thread: functions are interrupted, commits finished."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def stop_after_checkpoint(self) -> None:
        """Ask the function for a checkpoint, and end the run when one is committed. Any thread.

        If no function is running, the run ends now.
        """
        self._loop.call_soon_threadsafe(self._request_checkpoint)

    def _request_checkpoint(self) -> None:
        self._stops_at_commit = True
        if self._attempt is None or (self._attempt.finished and self._validations):
            self._cancel()
        else:
            self._attempt.request_checkpoint()

    def write_diagnosis(self) -> Future[str]:
        """Write where every rank stands to the run's directory, and say so. From any thread."""
        return asyncio.run_coroutine_threadsafe(self._diagnoses.tell(), self._loop)

    def kill(self) -> None:
        """End every process at once. From any thread."""
        self._loop.call_soon_threadsafe(self._group.kill)

    async def run(self) -> Outcome:
        """Follow the run to its end. Always leaves no process behind."""
        self._task = asyncio.create_task(self._run_attempts())
        watches = [asyncio.create_task(self._watch_nodes())]
        watches.append(asyncio.create_task(self._quiet.watch()))
        self._validations.resume()
        try:
            outcome = await self._task
        except asyncio.CancelledError:
            outcome = Outcome()
            await self._group.end_attempt(grace=STOP_GRACE_SECONDS, keep=True, replace=False)
            self._end_run("stopped")
        finally:
            for watch in watches:
                watch.cancel()
            await self._validations.close()
            await self._commits.close()
            await self._group.stop()
        return outcome

    async def _run_attempts(self) -> Outcome:
        while True:
            try:
                attempt = await self._start_attempt()
                await self._follow(attempt)
            except AttemptFailed as failed:
                await self._end_attempt(failed)
                decision = self._decide(failed.end)
                if isinstance(decision, GiveUp):
                    return self._give_up(failed, decision)
                self._spent = decision.spent
                self._number += 1
                if self._stops_at_commit:  # the attempt that was to save first is over
                    raise asyncio.CancelledError from failed
            else:
                await self._wait_for_validations()
                self._end_run("finished")
                return Outcome(values=attempt.values)

    async def _wait_for_validations(self) -> None:
        if self._validations:
            if self._stops_at_commit:  # the function has returned without another checkpoint
                raise asyncio.CancelledError
            await self._group.stop()  # they may want what the workers hold
            await self._validations.settle()

    def _end_run(self, outcome: str, error: str = "") -> None:
        self._emit(RunEnded(time=time.time(), outcome=outcome, error=error))

    # -- one attempt

    async def _start_attempt(self) -> Attempt:
        self._attempt = None
        if self._number != self._run.first_attempt:  # whoever opened the run has looked
            await self._commits.pass_over_damaged()
        start = self._start_point()
        self._emit(start)
        try:
            workers = await self._group.start(self._say_what_is_missing)
            ranks = assign(workers)
            self._group.take_ranks(ranks)
            await in_daemon_thread(self._set_up_backend)
            assignments = await in_daemon_thread(self._plan.assignments, start, workers, ranks)
        except Exception as error:
            raise AttemptFailed(startup_end(error), cause=error) from error
        attempt = self._attempt = Attempt(
            number=self._number,
            run_id=self._run.run_id,
            first_index=start.first_index,
            workers=by_rank(workers, ranks),
            order=self._group.order,
            emit=self._emit,
            tells_rounds=bool(self._run.config.callbacks),
            commits=self._commits,
            validations=self._validations,
            diagnose=self._diagnoses.answer,
        )
        places = list(zip(workers, ranks, strict=True))
        self._emit(WorkersStarted(time=time.time(), attempt=self._number, workers=places))
        self._group.run(assignments, self._hear(self._number))
        return attempt

    def _start_point(self) -> AttemptStarted:
        newest = self._commits.newest
        checkpoint = self._run.checkpoint
        if newest is not None:
            checkpoint = self._commits.checkpoint(newest).path
        return AttemptStarted(
            time=time.time(),
            attempt=self._number,
            first_index=newest.index + 1 if newest else 0,
            checkpoint=checkpoint,
        )

    def _set_up_backend(self) -> None:
        self._backend.on_start(self._group, self._run.backend_config)
        self._backend.on_training_start(self._group, self._run.backend_config)

    def _hear(self, attempt: int) -> Callable[[int, Sequence[Message]], None]:
        return lambda rank, messages: self._inbox.put_nowait(_Said(attempt, rank, messages))

    def _say_what_is_missing(self, up: int, placed: bool) -> None:
        self._emit(Notice(self._plan.waiting_for(up, placed)))

    async def _follow(self, attempt: Attempt) -> None:
        while not attempt.finished:
            match await self._next_event(attempt):
                case _Said(number, rank, messages) if number == attempt.number:
                    for message in messages:
                        attempt.receive(rank, message)
                case _StorageFailed(error):
                    raise AttemptFailed("storage", cause=error)
                case _Interruption(end):
                    raise AttemptFailed(end)
                case _Said():
                    pass  # said by a process of an attempt that is over
        await self._commits.settle()
        await in_daemon_thread(self._shut_down_backend)

    async def _next_event(self, attempt: Attempt) -> _Said | _StorageFailed | _Interruption:
        """Wait for what happens next, `hang_timeout` at the longest."""
        timeout = self._run.config.failure_config.hang_timeout
        if timeout is None:
            return await self._inbox.get()
        assert isinstance(timeout, timedelta)  # FailureConfig makes it one
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                return await self._inbox.get()
        except TimeoutError:
            if attempt.awaits_validation:  # which may take as long as it is given
                return await self._next_event(attempt)
            folder, difference = await self._diagnoses.write(f"hang_{attempt.number}")
            failure = describe_hang(timeout.total_seconds(), difference, folder)
            raise AttemptFailed("hang", [failure]) from None

    def _committed(self, manifest: Manifest) -> None:
        self._validations.begin(manifest)
        attempt = self._attempt
        if attempt is None:
            return
        attempt.committed(manifest, self._commits.committed_order(manifest))
        if self._stops_at_commit:
            self.stop()
        elif attempt.wishes.preemption is not None:
            self._inbox.put_nowait(_Interruption("preemption"))
        elif self._group.spare:
            self._inbox.put_nowait(_Interruption("resize"))

    def _validated(self) -> None:
        if self._attempt is not None:
            self._attempt.answer_questions()

    # -- watching

    async def _watch_nodes(self) -> None:
        """Look for nodes that are about to go: Ray has no event for it, so this is asked for."""
        while True:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
            draining = await in_daemon_thread(self._plan.draining)
            info = self._attempt.preempted(draining) if self._attempt is not None else None
            if info is not None:
                self._emit(PreemptionAnnounced(info))

    # -- failures

    def _decide(self, end: AttemptEnd) -> Restart | GiveUp:
        return after_failure(end, self._spent, self._run.config.failure_config)

    async def _end_attempt(self, failed: AttemptFailed) -> None:
        """Bring every process to a stop and gather what the other ranks have to say about it."""
        restart = any(isinstance(self._decide(end), Restart) for end in self._possible_ends(failed))
        keep = self._run.config.failure_config.keep_survivors and self._backend.reentrant
        await self._group.end_attempt(
            grace=RESTART_GRACE_SECONDS if restart and keep else FAIL_GRACE_SECONDS,
            keep=keep,
            replace=restart,
        )
        self._gather(failed)
        if failed.end == "worker" and any(gone.preempted for gone in failed.gone.values()):
            failed.end = "preemption"
        for rank, gone in failed.gone.items():
            failed.failures.append(await self._describe_death(rank, gone))
        failed.failures = root_cause_first(failed.failures)
        await self._commits.settle()
        if failed.end not in ("startup", "configuration"):
            await in_daemon_thread(self._shut_down_backend)
        if self._attempt is not None and self._attempt.wishes.preemption is not None:
            self._group.move()
        self._note(failed)

    def _possible_ends(self, failed: AttemptFailed) -> Sequence[AttemptEnd]:
        """Give what it may turn out to be: what ranks raise may come of the loss of a node."""
        going = self._attempt is not None and self._attempt.wishes.preemption is not None
        lost = any(gone.preempted for gone in failed.gone.values())
        return (failed.end, "preemption") if going or lost else (failed.end,)

    def _gather(self, failed: AttemptFailed) -> None:
        while not self._inbox.empty():
            match self._inbox.get_nowait():
                case _Said(number, rank, messages) if number == self._number:
                    for message in messages:
                        if isinstance(message, Failed):
                            failed.failures.append(message.failure)
                        elif isinstance(message, Gone):
                            failed.gone[rank] = message
                case _:
                    pass

    async def _describe_death(self, rank: int, gone: Gone) -> WorkerFailure:
        assert self._attempt is not None  # only a started worker dies
        worker, reports = self._attempt.workers[rank], self._attempt.reports_of(rank)
        return await describe_death(rank, gone, worker, self._run.directory, reports)

    def _note(self, failed: AttemptFailed) -> None:
        headlines = [failure.headline() for failure in failed.failures]
        if failed.cause is not None:
            headlines.append(f"{type(failed.cause).__name__}: {failed.cause}")
        self._emit(
            AttemptEnded(
                time=time.time(), attempt=self._number, kind=failed.end, failures=headlines
            )
        )
        is_last = isinstance(self._decide(failed.end), GiveUp)
        self._emit(WorkersFailed(failed.end, failed.failures, is_raised=is_last))

    def _give_up(self, failed: AttemptFailed, decision: GiveUp) -> Outcome:
        error = training_failed(
            failed.end,
            failed.failures,
            failed.cause,
            reason=decision.reason,
            path=self._run.directory.location,
            loads=self._commits.what_loads(),
        )
        self._end_run("failed", error.error_message)
        return Outcome(error=error)

    def _shut_down_backend(self) -> None:
        try:
            self._backend.on_shutdown(self._group, self._run.backend_config)
        except Exception as error:
            name = type(self._backend).__name__
            self._emit(Notice(f"{name}.on_shutdown failed: {error!r}"))
