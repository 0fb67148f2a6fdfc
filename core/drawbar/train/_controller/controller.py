"""Supervise a run: start attempts, handle their end, and decide on restarts.

`Controller.run` starts the workers and waits for one attempt after another. It ends when the
training function has returned on every rank, or when the failure budget is used. `ControllerThread`
runs it on the event loop of a thread, in the driver or in an actor. Everything is driven by events
of workers, storage, and user; only `NodeWatcher` and `StallDetector` poll.
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
from drawbar.train._controller.node_watcher import NodeWatcher
from drawbar.train._controller.recovery import Recovery
from drawbar.train._controller.run import AssignmentPlanner, ControllerOutcome, OpenRun
from drawbar.train._controller.stall_detector import StallDetector
from drawbar.train._controller.validations import ValidationScheduler
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import AttemptStarted, Notice, RunEnded, WorkersStarted
from drawbar.train._storage.contents import is_external
from drawbar.train._storage.manifest import Manifest
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker_group.ranks import assign_ranks, sort_by_rank
from drawbar.train._worker_group.validators import Validator
from drawbar.train._worker_group.worker_group import WorkerGroup

STOP_GRACE_SECONDS = 5.0  # for clean-up in the training function; a second Ctrl-C cuts it short


class Controller:
    """Supervise one run. Must be created on the event loop that runs it.

    Args:
        run: Open run.
        planner: Plans the workers of each attempt.
        group: Workers.
        validator: Runs validations; None if the trainer has no `validation_config`.
        emit: Callback that publishes events.
    """

    def __init__(
        self,
        run: OpenRun,
        planner: AssignmentPlanner,
        group: WorkerGroup,
        validator: Validator | None,
        emit: Emit,
    ) -> None:
        self._run = run
        self._planner = planner
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
            planner.metadata,
            emit=emit,
            on_committed=self._on_committed,
            on_failed=self._on_commit_failed,
        )
        self._validations = ValidationScheduler(
            validator, self._commits.registry, emit, self._on_validated
        )
        threshold = run.spec.run_config.failure_config.stall_warning_after
        assert not isinstance(threshold, int | float)  # FailureConfig makes it a timedelta
        self._stall_detector = StallDetector(threshold, lambda: self._attempt, group, emit)
        self._node_watcher = NodeWatcher(planner.get_draining_nodes, lambda: self._attempt, emit)
        self._recovery = Recovery(run, group, self._backend, self._commits, emit)

    def stop(self) -> None:
        """Request a graceful stop: interrupt the functions and finish the commits. Thread-safe."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is None:
            return
        if self._task.done():  # training has ended, and only background tasks are left
            self._commits.stop_waiting()
        self._task.cancel()

    def stop_after_checkpoint(self) -> None:
        """Request a checkpoint, and stop the run when it is committed. Thread-safe.

        If no function is running, the run stops now.
        """
        self._loop.call_soon_threadsafe(self._request_checkpoint)

    def _request_checkpoint(self) -> None:
        self._should_stop_at_commit = True
        has_ended = self._task is not None and self._task.done()
        attempt = self._attempt
        is_only_validating = (
            attempt is not None and attempt.is_finished and self._validations.has_running()
        )
        # In these cases no function is running that could report a checkpoint.
        if has_ended or attempt is None or is_only_validating:
            self._cancel()
        else:
            attempt.request_checkpoint()

    def write_diagnosis(self) -> Future[str]:
        """Write the stacks of all ranks to the run directory and emit a notice. Thread-safe."""
        return asyncio.run_coroutine_threadsafe(self._diagnosis.emit(), self._loop)

    def kill(self) -> None:
        """Kill every worker process immediately. Thread-safe."""
        self._loop.call_soon_threadsafe(self._group.kill)

    async def run(self) -> ControllerOutcome:
        """Supervise the run to its end. All worker processes have ended when this returns."""
        self._task = asyncio.create_task(self._run_attempts())
        # These tasks span all attempts: a node may be lost while an attempt is starting.
        watchers = [
            asyncio.create_task(watcher.run())
            for watcher in (self._node_watcher, self._stall_detector)
        ]
        self._validations.resume_pending()
        try:
            outcome = await self._task
        except asyncio.CancelledError:
            outcome = ControllerOutcome()
            if self._attempt is not None:
                self._attempt.close()
            # Interrupt instead of kill, so that the function can clean up. Its last reports are
            # committed below.
            await self._group.end_attempt(
                grace=STOP_GRACE_SECONDS,
                should_keep=True,
                should_replace=False,
                is_user_request=True,
            )
            self._emit_run_ended("stopped")
        finally:
            for task in watchers:
                task.cancel()
            # Validations end first, because their results are saved by background tasks of the
            # commits. Processes end last, because a commit may still need files from them.
            await self._validations.cancel()
            await self._commits.close()
            await self._group.stop()
        return outcome

    async def _run_attempts(self) -> ControllerOutcome:
        while True:
            try:
                attempt = await self._start_attempt()
                await self._wait_for_attempt(attempt)
            except AttemptFailure as failure:
                decision = await self._recovery.handle_failure(
                    self._attempt_number, self._attempt, failure
                )
                if isinstance(decision, GiveUp):
                    error = self._recovery.make_error(failure, decision)
                    self._emit_run_ended("failed", error.error_message)
                    return ControllerOutcome(error=error)
                self._attempt_number += 1
                if self._should_stop_at_commit:  # the attempt failed before it saved a checkpoint
                    raise asyncio.CancelledError from failure
                if decision.delay:
                    self._emit(Notice(describe_delay(failure, decision)))
                    await asyncio.sleep(decision.delay)  # stop() cancels it
            else:
                await self._wait_for_validations()
                for notice in attempt.get_final_notices():
                    self._emit(Notice(notice))
                self._emit_run_ended("finished")
                return ControllerOutcome(finished=attempt.finished)

    async def _wait_for_validations(self) -> None:
        if self._validations.has_running():
            if self._should_stop_at_commit:  # the function has returned without another checkpoint
                raise asyncio.CancelledError
            await self._group.stop()  # validations may need the resources of the workers
            await self._validations.wait_for_all()

    def _emit_run_ended(self, status: str, error: str = "") -> None:
        num_reports = None if self._attempt is None else self._attempt.reports.num_reports
        self._emit(RunEnded(time=time.time(), outcome=status, error=error, num_reports=num_reports))

    # -- one attempt

    async def _start_attempt(self) -> Attempt:
        # A commit or a stop() before the next attempt runs does not belong to any attempt.
        self._attempt = None
        if self._attempt_number != self._run.next_attempt:  # `open_run` verified the checkpoints
            await self._commits.registry.drop_damaged()
        start = self._make_attempt_started()
        # Emit before anything starts. If the start kills the driver, the next driver must not use
        # the same attempt number, because it would also use the staged files of this attempt.
        self._emit(start)
        try:
            workers = await self._group.start(self._emit_waiting_notice)
            ranks = assign_ranks(workers)
            # Set before the hooks, which address workers by rank.
            self._group.set_ranks(ranks)
            await self._backend.run_start_hooks()
            # Computing datasets may take minutes. In a daemon thread, it delays neither stop() nor
            # the exit of the program.
            assignments = await run_in_daemon_thread(
                self._planner.make_assignments, start, workers, ranks
            )
        except Exception as error:
            cause = classify_startup_error(error)
            raise AttemptFailure(cause, exception=error, started=start.time) from error
        for text in self._planner.notices:
            self._emit(Notice(text))
        attempt = self._attempt = Attempt(
            number=self._attempt_number,
            run_id=self._run.run_id,
            first_index=start.first_report_index,
            workers=sort_by_rank(workers, ranks),
            send_command=self._group.send_command,
            broadcast_command=self._group.broadcast_command,
            emit=self._emit,
            should_emit_rounds=bool(self._run.spec.run_config.callbacks),
            commits=self._commits,
            validations=self._validations,
            on_diagnosis_request=self._diagnosis.reply,
        )
        # Emit before the functions start, so that the journal has the workers before their reports.
        self._emit(
            WorkersStarted(
                time=time.time(),
                attempt=self._attempt_number,
                workers=list(zip(workers, ranks, strict=True)),
            )
        )
        self._group.run(assignments, attempt.on_messages)
        return attempt

    def _make_attempt_started(self) -> AttemptStarted:
        latest = self._commits.registry.latest
        initial_checkpoint = self._run.spec.resume_from_checkpoint
        checkpoint = initial_checkpoint.path if initial_checkpoint else None
        if latest is not None:
            checkpoint = (
                latest.name
                if is_external(latest.name)
                else self._commits.registry.get_checkpoint(latest).path
            )
        return AttemptStarted(
            time=time.time(),
            attempt=self._attempt_number,
            first_report_index=latest.index + 1 if latest else 0,
            resume_checkpoint=checkpoint,
        )

    def _emit_waiting_notice(self, num_ready: int, is_placed: bool) -> None:
        self._emit(Notice(self._planner.describe_wait(num_ready, is_placed)))

    async def _wait_for_attempt(self, attempt: Attempt) -> None:
        hang_timeout = self._run.spec.run_config.failure_config.hang_timeout
        assert not isinstance(hang_timeout, int | float)  # FailureConfig makes it a timedelta
        timeout = hang_timeout.total_seconds() if hang_timeout is not None else None
        if not await attempt.wait(timeout):
            assert timeout is not None  # otherwise `wait` never returns False
            directory, difference = await self._diagnosis.write(f"hang_{attempt.number}")
            hang = describe_hang(
                timeout, difference + attempt.batch_counts.describe_ranks_ahead(), directory
            )
            # Collecting the stacks took seconds, in which the attempt may have ended. Then `fail`
            # has no effect, and `wait` returns or raises how it ended.
            attempt.fail(AttemptFailure("hang", [hang]))
            await attempt.wait(None)
        await self._commits.finish_attempt()
        await self._backend.run_shutdown_hook()

    def _on_committed(self, manifest: Manifest) -> None:
        # Schedule first: checkpoints of a failed attempt are committed while there is no attempt.
        self._validations.schedule(manifest)
        attempt = self._attempt
        if attempt is None:
            return
        attempt.on_committed(manifest, self._commits.make_committed_command(manifest))
        if self._should_stop_at_commit:
            self.stop()
        elif attempt.requests.preemption is not None:
            attempt.fail(AttemptFailure("preemption"))  # restart on other nodes
        # Right after a commit, a restart with more workers loses no progress.
        elif self._group.num_idle_workers:
            attempt.fail(AttemptFailure("resize"))

    def _on_commit_failed(self, error: Exception) -> None:
        failure = AttemptFailure("storage", exception=error)
        # Emit a notice if there is no running attempt that could fail with this error.
        if self._attempt is None or not self._attempt.fail(failure):
            self._emit(Notice(f"A checkpoint was not committed: {error}"))

    def _on_validated(self) -> None:
        if self._attempt is not None:
            self._attempt.checkpoint_queries.send_ready_replies()
