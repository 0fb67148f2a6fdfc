"""The loop: await what happens, decide, act.

`Controller.run` starts the workers, follows one attempt after another, and ends when the function
has returned on every rank or no attempt is left. It is a plain class: a `Host` runs it on an event
loop in a thread, of the driver or of an actor. A wait ends by an event that a worker, the storage
or the user causes. Only two tasks look now and then: `NodeWatcher` and `StallDetector`.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from drawbar.train._controller.attempt import Attempt
from drawbar.train._controller.attempt_failure import AttemptFailure
from drawbar.train._controller.backend_hooks import BackendHooks
from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.decisions import GiveUp
from drawbar.train._controller.diagnosis import DiagnosisWriter
from drawbar.train._controller.failures import classify_startup_error, describe_delay, describe_hang
from drawbar.train._controller.recovery import Recovery
from drawbar.train._controller.run import AssignmentPlanner, ControllerOutcome, OpenRun
from drawbar.train._controller.stall_detector import NodeWatcher, StallDetector
from drawbar.train._controller.validations import ValidationScheduler
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import AttemptStarted, Notice, RunEnded, WorkersStarted
from drawbar.train._storage.contents import is_external
from drawbar.train._storage.manifest import Manifest
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker_group.ranks import assign_ranks, sort_by_rank
from drawbar.train._worker_group.validators import Validator
from drawbar.train._worker_group.worker_group import WorkerGroup

STOP_GRACE_SECONDS = 5.0  # the user's own clean-up; a second Ctrl-C cuts it short


class Controller:
    """Follows one run from its first process to its end. Make it on the event loop that runs it."""

    def __init__(
        self,
        run: OpenRun,
        plan: AssignmentPlanner,
        group: WorkerGroup,
        validator: Validator | None,
        emit: Emit,
    ) -> None:
        self._run = run
        self._plan = plan
        self._group = group
        self._emit = emit
        self._diagnosis = DiagnosisWriter(group, run.directory, emit)
        self._backend = BackendHooks(run.spec.backend_config, group, emit)
        self._attempt: Attempt | None = None
        self._attempt_number = run.next_attempt
        self._should_stop_at_commit = False
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[ControllerOutcome] | None = None
        self._commits = CheckpointCommitter(
            run.directory,
            run.spec.run_config.checkpoint_config,
            plan.metadata,
            emit=emit,
            committed=self._on_committed,
            failed=self._on_commit_failed,
        )
        self._validations = ValidationScheduler(
            validator, self._commits.registry, emit, self._on_validated
        )
        patience = run.spec.run_config.failure_config.stall_warning_after
        assert not isinstance(patience, int | float)  # FailureConfig makes it a timedelta
        self._stall_detector = StallDetector(patience, lambda: self._attempt, group, emit)
        self._node_watcher = NodeWatcher(plan.get_draining_nodes, lambda: self._attempt, emit)
        self._recovery = Recovery(run, group, self._backend, self._commits, emit)

    def stop(self) -> None:
        """Ask for an orderly end, from any thread: functions are interrupted, commits finished."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is None:
            return
        if self._task.done():  # nothing trains any more
            self._commits.stop_waiting()
        self._task.cancel()

    def stop_after_checkpoint(self) -> None:
        """Ask the function for a checkpoint, and end the run when one is committed. Any thread.

        If no function is running, the run ends now.
        """
        self._loop.call_soon_threadsafe(self._request_checkpoint)

    def _request_checkpoint(self) -> None:
        self._should_stop_at_commit = True
        # Nobody would answer: no function runs, or only validations and what follows the run.
        is_over = self._task is not None and self._task.done()
        attempt = self._attempt
        if is_over or attempt is None or (attempt.is_finished and self._validations):
            self._cancel()
        else:
            attempt.request_checkpoint()

    def write_diagnosis(self) -> Future[str]:
        """Write where every rank stands to the run's directory, and say so. From any thread."""
        return asyncio.run_coroutine_threadsafe(self._diagnosis.emit(), self._loop)

    def kill(self) -> None:
        """End every process at once. From any thread."""
        self._loop.call_soon_threadsafe(self._group.kill)

    async def run(self) -> ControllerOutcome:
        """Follow the run to its end. Always leaves no process behind."""
        self._task = asyncio.create_task(self._run_attempts())
        # Beside the attempts, not inside one: a node may be lost while the next attempt is
        # starting.
        watches = [
            asyncio.create_task(each.run()) for each in (self._node_watcher, self._stall_detector)
        ]
        self._validations.resume_pending()
        try:
            outcome = await self._task
        except asyncio.CancelledError:
            outcome = ControllerOutcome()
            if self._attempt is not None:
                self._attempt.close()
            # Interrupted, not killed: the function cleans up, and what it has reported is committed
            # below.
            await self._group.end_attempt(
                grace=STOP_GRACE_SECONDS,
                should_keep=True,
                should_replace=False,
                is_user_request=True,
            )
            self._emit_run_ended("stopped")
        finally:
            for watch in watches:
                watch.cancel()
            # Validations end first, since the commits write down what comes of them, and processes
            # last, since a commit may still await what one of them has to persist.
            await self._validations.cancel()
            await self._commits.close()
            await self._group.stop()
        return outcome

    async def _run_attempts(self) -> ControllerOutcome:
        while True:
            try:
                attempt = await self._start_attempt()
                await self._wait_for_attempt(attempt)
            except AttemptFailure as failed:
                decision = await self._recovery.handle_failure(
                    self._attempt_number, self._attempt, failed
                )
                if isinstance(decision, GiveUp):
                    error = self._recovery.make_error(failed, decision)
                    self._emit_run_ended("failed", error.error_message)
                    return ControllerOutcome(error=error)
                self._attempt_number += 1
                if self._should_stop_at_commit:  # the attempt that was to save first is over
                    raise asyncio.CancelledError from failed
                if decision.delay:
                    self._emit(Notice(describe_delay(failed, decision)))
                    await asyncio.sleep(decision.delay)  # stop() cancels it
            else:
                await self._wait_for_validations()
                for remark in attempt.get_final_notices():
                    self._emit(Notice(remark))
                self._emit_run_ended("finished")
                return ControllerOutcome(finished=attempt.finished)

    async def _wait_for_validations(self) -> None:
        if self._validations:
            if self._should_stop_at_commit:  # the function has returned without another checkpoint
                raise asyncio.CancelledError
            await self._group.stop()  # they may want what the workers hold
            await self._validations.wait_for_all()

    def _emit_run_ended(self, status: str, error: str = "") -> None:
        self._emit(RunEnded(time=time.time(), outcome=status, error=error))

    # -- one attempt

    async def _start_attempt(self) -> Attempt:
        # A commit or a stop() that comes before the next attempt runs belongs to none.
        self._attempt = None
        if self._attempt_number != self._run.next_attempt:  # whoever opened the run has looked
            await self._commits.registry.drop_damaged()
        start = self._make_attempt_started()
        # Told before anything starts: an attempt whose start kills the driver has its number too,
        # or the next driver would give that number, and its staged files, to another one.
        self._emit(start)
        try:
            workers = await self._group.start(self._emit_waiting_notice)
            ranks = assign_ranks(workers)
            # Before the hooks, which speak of workers by rank.
            self._group.set_ranks(ranks)
            await self._backend.run_start_hooks()
            # It may compute datasets for minutes; neither stop() nor the program's end waits.
            assignments = await run_in_daemon_thread(
                self._plan.make_assignments, start, workers, ranks
            )
        except Exception as error:
            end = classify_startup_error(error)
            raise AttemptFailure(end, exception=error, started=start.time) from error
        for text in self._plan.notices:
            self._emit(Notice(text))
        attempt = self._attempt = Attempt(
            number=self._attempt_number,
            run_id=self._run.run_id,
            first_index=start.first_report_index,
            workers=sort_by_rank(workers, ranks),
            order=self._group.send_command,
            emit=self._emit,
            should_emit_rounds=bool(self._run.spec.run_config.callbacks),
            commits=self._commits,
            validations=self._validations,
            on_diagnosis_request=self._diagnosis.reply,
        )
        # Told before the function can say anything, so that in the journal no report comes before
        # the workers that made it.
        places = list(zip(workers, ranks, strict=True))
        self._emit(WorkersStarted(time=time.time(), attempt=self._attempt_number, workers=places))
        self._group.run(assignments, attempt.on_messages)
        return attempt

    def _make_attempt_started(self) -> AttemptStarted:
        newest = self._commits.registry.latest
        initial_checkpoint = self._run.spec.resume_from_checkpoint
        checkpoint = initial_checkpoint.path if initial_checkpoint else None
        if newest is not None:
            outside = is_external(newest.name)
            checkpoint = (
                newest.name if outside else self._commits.registry.get_checkpoint(newest).path
            )
        return AttemptStarted(
            time=time.time(),
            attempt=self._attempt_number,
            first_report_index=newest.index + 1 if newest else 0,
            resume_checkpoint=checkpoint,
        )

    def _emit_waiting_notice(self, up: int, placed: bool) -> None:
        self._emit(Notice(self._plan.describe_wait(up, placed)))

    async def _wait_for_attempt(self, attempt: Attempt) -> None:
        timeout = self._run.spec.run_config.failure_config.hang_timeout
        assert not isinstance(timeout, int | float)  # FailureConfig makes it a timedelta
        patience = timeout.total_seconds() if timeout is not None else None
        if not await attempt.wait(patience):
            assert patience is not None  # nobody is impatient without
            folder, difference = await self._diagnosis.write(f"hang_{attempt.number}")
            hang = describe_hang(
                patience, difference + attempt.batch_counts.describe_ranks_ahead(), folder
            )
            # Asking for the stacks took seconds in which it may have ended by itself: then this
            # does nothing, and what comes next is how it really ended.
            attempt.fail(AttemptFailure("hang", [hang]))
            await attempt.wait(None)
        await self._commits.finish_attempt()
        await self._backend.run_shutdown_hook()

    def _on_committed(self, manifest: Manifest) -> None:
        # Before the look at the attempt: what a failed one had persisted is committed when it is
        # over.
        self._validations.schedule(manifest)
        attempt = self._attempt
        if attempt is None:
            return
        attempt.on_committed(manifest, self._commits.make_committed_command(manifest))
        if self._should_stop_at_commit:
            self.stop()
        elif attempt.requests.preemption is not None:
            attempt.fail(AttemptFailure("preemption"))  # it is to go on elsewhere
        # The cheapest moment for a restart with more workers: nothing is done twice.
        elif self._group.num_idle_workers:
            attempt.fail(AttemptFailure("resize"))

    def _on_commit_failed(self, error: Exception) -> None:
        failed = AttemptFailure("storage", exception=error)
        # Where no attempt is left that could fail of it, it is at least said.
        if self._attempt is None or not self._attempt.fail(failed):
            self._emit(Notice(f"a checkpoint is not committed: {error}"))

    def _on_validated(self) -> None:
        if self._attempt is not None:
            self._attempt.checkpoint_queries.reply_to_ready()
