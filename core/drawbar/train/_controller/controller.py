"""Supervise a run: start attempts, handle their end, and decide on restarts.

The controller is the only consumer of one event queue. Messages of ranks, deaths, timers, draining
nodes, requests of the user, and finished commits and validations are events on the queue, and only
the controller changes the state of the run. While it waits, for example for processes to start, it
continues to handle events. `ControllerThread` runs it on the event loop of a thread, in the driver
or in an actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from drawbar._process.event_queue import EventQueue
from drawbar._process.ranks import WorkerInfo
from drawbar._process.threads import run_in_daemon_thread
from drawbar._records import events
from drawbar._records.event_stream import Emit
from drawbar._records.live_events import AttemptEnding, Event, Notice
from drawbar._recovery import time_limit
from drawbar._recovery.attempt_recovery import JOIN_TIMEOUT_S, AttemptRecovery, Recovered
from drawbar._recovery.decisions import GiveUp
from drawbar._recovery.failure_policy import FailurePolicy
from drawbar._recovery.messages import JoinTimedOut, RanksLost, RankStalled
from drawbar._recovery.node_watcher import NodesDraining, NodeWatcher
from drawbar._recovery.startup_errors import classify_startup_error
from drawbar.train._controller import failures
from drawbar.train._controller.assignments import RunAssignmentPlanner
from drawbar.train._controller.attempt import Attempt, HangDetected, MessagesReceived
from drawbar.train._controller.callbacks import BackendHooks
from drawbar.train._controller.checkpoint_coordinator import CheckpointCoordinator, CheckpointEvent
from drawbar.train._controller.commits import CommitFinished, StorageFailed
from drawbar.train._controller.diagnosis import (
    DiagnosisWriter,
    HangDetector,
    RankSampler,
    StallDetector,
)
from drawbar.train._controller.recovery import Recovery
from drawbar.train._controller.request_agreement import RepliesDue, StopRequested
from drawbar.train._controller.run import ControllerOutcome, OpenRun
from drawbar.train._controller.validations import ValidationFinished, ValidationSaved
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.messages import WorkerDied
from drawbar.train._worker_group.validator import Validator
from drawbar.train._worker_group.worker_group import (
    AttemptEnd,
    OnMessages,
    Replacement,
    WorkerGroup,
)

T = TypeVar("T")

_NOTHING_TRAINED = (
    "already finished: the training function returned without a report, and the metrics are those "
    "of the earlier start. To train longer, raise the number of epochs or steps of the training "
    "function. To train from scratch, choose another name for the run"
)
STOP_GRACE_SECONDS = 5.0  # for clean-up in the training function; a second Ctrl-C cuts it short


ControllerEvent = (
    MessagesReceived | StopRequested | RepliesDue | HangDetected | NodesDraining | CheckpointEvent
)


class Controller:
    """Supervise one run. Must be created on the event loop that runs it.

    Args:
        run: Open run.
        planner: Plans the workers of each attempt.
        group: Workers.
        validator: Runs validations; None if the trainer has no `validation_config`.
        policy: Finds the causes of failures.
        emit: Callback that publishes events.
    """

    def __init__(
        self,
        run: OpenRun,
        planner: RunAssignmentPlanner,
        group: WorkerGroup,
        validator: Validator | None,
        policy: FailurePolicy,
        emit: Emit,
    ) -> None:
        self._run = run
        self._planner = planner
        self._group = group
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._queue = EventQueue[ControllerEvent](self._handle_event)
        put_event = self._queue.put
        self._attempt: Attempt | None = None
        self._attempt_number = run.next_attempt
        self._hang: HangDetected | None = None
        self._should_stop_at_commit = False
        self._should_stop_if_unused = False
        self._is_stopping = False
        self._recordings: list[asyncio.Task[None]] = []  # of recoveries in place
        self._has_ended = False  # training has ended, and only background tasks are left
        self._diagnosis = DiagnosisWriter(group, run.directory, emit)
        self._backend = BackendHooks(run.spec.backend_config, group, emit)
        config = run.spec.run_config
        self._checkpoints = CheckpointCoordinator(
            run.directory, config.checkpoint_config, planner.metadata, validator, emit, put_event
        )
        stall_threshold = config.failure_config.stall_warning_after
        hang_timeout = config.failure_config.hang_timeout
        # FailureConfig makes them a timedelta.
        assert not isinstance(stall_threshold, int | float)
        assert not isinstance(hang_timeout, int | float)
        sampler = RankSampler(group)
        self._monitors = (
            HangDetector(hang_timeout, lambda: self._attempt, sampler, put_event),
            StallDetector(
                stall_threshold,
                lambda: self._attempt,
                sampler,
                self._emit_stall,
                run.directory.uri,
            ),
            NodeWatcher(planner.get_draining_nodes, put_event, emit),
            time_limit.TimeLimit(
                config.max_time, config.stop_before, lambda: self.stop(save=True), emit
            ),
        )
        self._recovery = Recovery(
            run, group, self._backend, self._checkpoints, policy, emit, self._queue.join
        )

    # -- called from any thread

    def stop(self, *, save: bool | None) -> None:
        """Stop the run: interrupt the functions, and finish the commits.

        Args:
            save: Whether to request a checkpoint first, and stop when it is committed. If no
                function is running, the run stops now. None: only if the functions call
                `should_checkpoint()`.
        """
        self._queue.put_from_thread(StopRequested(save))

    def write_diagnosis(self) -> Future[str]:
        """Write the stacks of all ranks to the run directory and emit a notice."""
        return asyncio.run_coroutine_threadsafe(self._diagnosis.emit(), self._loop)

    def kill(self) -> None:
        """Kill every worker process immediately."""
        # Not an event: it must not wait for the events on the queue, and changes no state.
        self._loop.call_soon_threadsafe(self._group.kill)

    # -- the run

    async def run(self) -> ControllerOutcome:
        """Supervise the run to its end. All worker processes have ended when this returns."""
        # These tasks span all attempts: a node may be lost while an attempt is starting.
        monitors = [asyncio.create_task(monitor.run()) for monitor in self._monitors]
        self._checkpoints.validations.resume_pending()
        try:
            outcome = await self._run_attempts()
            self._has_ended = True
            if outcome is None:
                outcome = ControllerOutcome()
                await self._call(self._stop_workers())
                self._emit_run_ended("stopped")
        finally:
            self._has_ended = True
            for task in monitors:
                task.cancel()
            # Processes end last, because a commit may still need files from them.
            await self._call(self._checkpoints.close())
            await self._call(self._group.stop())
        return outcome

    async def _run_attempts(self) -> ControllerOutcome | None:
        """Run attempts until one succeeds or no other one follows. Return None if stopped."""
        while True:
            failure = await self._call(self._start_attempt())
            if failure is None and self._attempt is not None:
                failure = await self._wait_for_attempt(self._attempt)
            if self._is_stopping:
                return None
            if failure is None:
                return await self._finish()
            decision = await self._call(
                self._recovery.handle_failure(self._attempt_number, self._attempt, failure)
            )
            if isinstance(decision, GiveUp):
                error = self._recovery.make_error(failure, decision)
                self._emit_run_ended("failed", error.error_message)
                return ControllerOutcome(error=error)
            self._attempt_number += 1
            # With `_should_stop_at_commit`, the attempt failed before it saved a checkpoint.
            if decision is None or self._should_stop_at_commit:
                return None
            if decision.delay:
                self._emit(Notice(failures.describe_delay(failure, decision)))
                await self._call(asyncio.sleep(decision.delay))
                if self._is_stopping:
                    return None

    async def _finish(self) -> ControllerOutcome | None:
        """End a run whose functions have returned. Return None if stopped."""
        attempt, validations = self._attempt, self._checkpoints.validations
        assert attempt is not None  # it has succeeded
        if validations.has_running():
            if self._should_stop_at_commit:  # the function has returned without another checkpoint
                return None
            # Validations may need the resources of the workers.
            await self._call(self._group.stop())
            await self._call(validations.wait_for_all())
            if self._is_stopping:
                return None
        outcome = ControllerOutcome(finished=attempt.finished)
        for notice in outcome.get_final_notices():
            self._emit(Notice(notice))
        is_first_attempt = self._attempt_number == self._run.next_attempt
        if self._run.had_finished and is_first_attempt and not attempt.reports.num_reports:
            self._emit(Notice(_NOTHING_TRAINED))
        self._emit_run_ended("finished")
        return outcome

    async def _stop_workers(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
        # Interrupt instead of kill, so that the function can clean up. Its last reports are
        # committed afterwards.
        await self._group.end_attempt(AttemptEnd(grace=STOP_GRACE_SECONDS, is_user_request=True))

    def _emit_run_ended(self, status: str, error: str = "") -> None:
        num_reports = None
        if self._attempt is not None:
            num_reports = self._attempt.reports.num_reports
            self._emit(AttemptEnding(self._attempt.number))
        self._emit(
            events.RunEnded(time=time.time(), outcome=status, error=error, num_reports=num_reports)
        )

    # -- one attempt

    async def _start_attempt(self) -> failures.AttemptFailure | None:
        """Start the workers and their functions. Return the failure if they do not start."""
        # A commit or a stop() before the next attempt runs does not belong to any attempt.
        self._attempt = None
        if self._attempt_number != self._run.next_attempt:  # `open_run` verified the checkpoints
            await self._checkpoints.registry.drop_damaged()
        start = self._make_attempt_started()
        # Emit before anything starts. If the start kills the driver, the next driver must not use
        # the same attempt number, because it would also use the staged files of this attempt.
        self._emit(start)
        try:
            workers = await self._group.start(
                lambda *missing: self._emit(Notice(self._planner.describe_wait(*missing)))
            )
            await self._backend.run_start_hooks()
            # Computing datasets may take minutes. In a daemon thread, it delays neither stop() nor
            # the exit of the program.
            assignments = await run_in_daemon_thread(self._planner.make_assignments, start, workers)
        except Exception as error:
            cause = classify_startup_error(error)
            return failures.AttemptFailure(cause, exception=error, started=start.time)
        for text in [*self._planner.describe_fork_errors(workers), *self._planner.notices]:
            self._emit(Notice(text))
        attempt = self._attempt = Attempt(
            start,
            [worker for worker, _ in workers],
            run=self._run,
            group=self._group,
            checkpoints=self._checkpoints,
            emit=self._emit,
            on_diagnosis_request=self._diagnosis.reply,
            in_place=self._make_in_place_recovery(assignments),
        )
        # Emit before the functions start, so that the journal has the workers before their reports.
        self._emit(
            events.WorkersStarted(time=time.time(), attempt=self._attempt_number, workers=workers)
        )
        self._group.run(assignments, self._make_receiver(attempt))
        return None

    def _make_receiver(self, attempt: Attempt) -> OnMessages:
        put = self._queue.put
        return lambda rank, batch: put(MessagesReceived(attempt, rank, batch))

    def _make_in_place_recovery(
        self, assignments: Sequence[WorkerAssignment]
    ) -> AttemptRecovery[WorkerDied] | None:
        if not assignments[0].is_recovered_in_place:
            return None
        return AttemptRecovery(
            len(assignments),
            self._group.broadcast_command,
            lambda rank, lost, death: self._replace_worker(assignments[rank], lost, death),
            self._on_recovered,
            self._recovery.check_budget,
        )

    def _replace_worker(
        self, assignment: WorkerAssignment, lost: RanksLost, death: WorkerDied
    ) -> None:
        """Start a new process for a rank of the current attempt."""
        attempt, rank = self._attempt, assignment.ranks.world_rank
        assert attempt is not None

        def make_assignment(worker: WorkerInfo) -> WorkerAssignment:
            attempt.workers[rank] = worker
            reports = attempt.progress.ranks[rank].reports
            assigned = replace(assignment, gpu_ids=worker.gpu_ids, replaced=lost)
            return replace(assigned, num_received_reports=reports)

        put = self._make_receiver(attempt)
        attempt.dead_workers.setdefault(rank, attempt.workers[rank])
        new = Replacement(make_assignment, put)
        self._group.replace_worker(rank, new, shares_node=death.is_preempted)
        self._loop.call_later(JOIN_TIMEOUT_S, put, rank, [JoinTimedOut(lost.generation)])

    def _emit_stall(self, event: Event) -> None:
        self._emit(event)
        if isinstance(event, events.RanksStalled) and self._attempt is not None:
            for rank in event.descriptions:
                self._queue.put(MessagesReceived(self._attempt, rank, [RankStalled()]))

    def _on_recovered(self, recovered: Recovered[WorkerDied]) -> None:
        assert self._attempt is not None
        workers = {rank: self._attempt.dead_workers.pop(rank) for rank in recovered.deaths}
        record = self._recovery.record_recovered(self._attempt, recovered, workers)
        self._recordings.append(self._loop.create_task(record))

    def _make_attempt_started(self) -> events.AttemptStarted:
        registry = self._checkpoints.registry
        initial_checkpoint = self._run.spec.resume_from_checkpoint
        checkpoint = initial_checkpoint.path if initial_checkpoint else None
        latest = registry.latest
        return events.AttemptStarted(
            time=time.time(),
            attempt=self._attempt_number,
            first_report_index=latest.index + 1 if latest else 0,
            resume_checkpoint=registry.get_path(latest) if latest else checkpoint,
        )

    async def _wait_for_attempt(self, attempt: Attempt) -> failures.AttemptFailure | None:
        """Wait until an attempt has ended or the run is stopped. Return the failure, if any."""
        self._hang = None
        await self._queue.handle_until(
            lambda: attempt.has_ended or self._hang is not None or self._is_stopping
        )
        await asyncio.gather(*self._recordings)
        if (hang := self._hang) is not None:
            stacks = await self._call(self._diagnosis.write(f"hang_{attempt.number}"))
            # Collecting the stacks took seconds, in which the attempt may have ended. Then `fail`
            # has no effect.
            if stacks is not None:
                ahead = attempt.batch_counts.describe_ranks_ahead()
                first_index = attempt.progress.first_index
                failure = failures.describe_hang(hang.hang_timeout, stacks, ahead, first_index)
                attempt.fail(failures.AttemptFailure("hang", [failure]))
        if attempt.error is not None:
            raise attempt.error
        if attempt.failure is None:
            await self._call(self._checkpoints.finish_attempt())
            await self._call(self._backend.run_shutdown_hook())
        return attempt.failure

    # -- events

    async def _call(self, operation: Coroutine[Any, Any, T]) -> T | None:
        """Handle events until an operation has ended.

        Returns:
            The result of the operation; None if it was cancelled, because the user stops the run.
            After the end of training, operations are not cancelled.
        """
        if self._is_stopping and not self._has_ended:
            operation.close()
            return None
        return await self._queue.call(operation)

    def _handle_event(self, event: ControllerEvent) -> None:
        match event:
            case MessagesReceived():
                event.attempt.on_messages(event.rank, event.batch)
                if self._should_stop_if_unused and event.attempt.requests.is_unused:
                    self._stop()
            case CommitFinished():
                self._on_commit_finished(event)
            case StorageFailed():
                self._on_storage_failed(event.error)
            case ValidationFinished() | ValidationSaved():
                self._checkpoints.on_validation_event(event)
            case StopRequested():
                self._on_stop_requested(event.save)
            case RepliesDue():
                self._on_replies_due(event)
            case HangDetected():
                # An earlier event on the queue may have been a message of a rank.
                if not event.attempt.get_remaining_seconds(event.hang_timeout):
                    self._hang = event
            case NodesDraining():
                if self._attempt is not None:
                    self._attempt.on_draining_nodes(event.nodes)

    def _on_stop_requested(self, save: bool | None) -> None:
        if self._has_ended:
            self._checkpoints.stop_waiting()
            return
        if save is None and self._should_stop_if_unused:
            return  # under torchrun, each rank receives the signal
        should_save = save is not False
        self._emit(events.RunStopRequested(time=time.time(), save=should_save))
        self._should_stop_at_commit |= should_save
        attempt = self._attempt
        has_validations = self._checkpoints.validations.has_running()
        # In these cases no function is running that could report a checkpoint.
        if not should_save or attempt is None or (attempt.is_finished and has_validations):
            self._stop()
            return
        _request_checkpoint(RepliesDue(attempt.requests), self._queue.put)
        if save is None:
            self._should_stop_if_unused = True
            if attempt.requests.is_unused:
                self._stop()

    def _on_replies_due(self, event: RepliesDue) -> None:
        """Stop the run if no rank will save a checkpoint. Otherwise, request it again later."""
        requests = event.requests
        is_uploading = any(map(self._checkpoints.is_waiting_for, requests.positions))
        has_advanced = requests.is_saving or requests.positions != event.previous
        if requests.is_pending and self._should_stop_if_unused:
            self._stop()  # a rank does not reply, or its function has not started
        elif requests.is_pending or has_advanced or is_uploading:
            seconds = time_limit.MIN_SAVE_WAIT_S + requests.longest_interval
            following = RepliesDue(requests, dict(requests.positions))
            self._loop.call_later(seconds, _request_checkpoint, following, self._queue.put)
        elif not (requests.is_unused or self._has_ended):
            self._emit(Notice(time_limit.NO_RANK_SAVES))
            self._stop()

    def _stop(self) -> None:
        """Cancel the current operation, and end the run. Do not cancel the end of the run."""
        if self._is_stopping or self._has_ended:
            return
        self._is_stopping = True
        self._queue.cancel_operation()

    def _on_commit_finished(self, event: CommitFinished) -> None:
        attempt = self._attempt
        try:
            manifest, command = self._checkpoints.on_commit_finished(event)
            if attempt is not None:
                attempt.on_committed(manifest, command)
                self._end_attempt_after_commit(attempt, manifest.index)
            self._checkpoints.clean_up_after_commit(manifest)
        except Exception as error:
            self._on_storage_failed(error)
        self._checkpoints.commit_next()

    def _end_attempt_after_commit(self, attempt: Attempt, index: int) -> None:
        """End an attempt if that was planned for its next commit: a restart loses no progress."""
        is_requested = attempt.requests.is_served_by(index)
        if self._should_stop_at_commit and is_requested and not self._has_ended:
            self._stop()
        elif attempt.requests.latest.preemption is not None and is_requested:
            attempt.fail(failures.AttemptFailure("preemption"))  # restart on other nodes
        elif self._group.num_idle_workers:
            attempt.fail(failures.AttemptFailure("resize"))  # restart with more workers

    def _on_storage_failed(self, error: Exception) -> None:
        failure = failures.AttemptFailure("storage", exception=error)
        # Emit a notice if there is no running attempt that could fail with this error.
        if self._attempt is None or not self._attempt.fail(failure):
            self._emit(Notice(f"A checkpoint was not committed: {error}"))


def _request_checkpoint(event: RepliesDue, put: Callable[[RepliesDue], object]) -> None:
    """Request a checkpoint, and check soon whether all ranks have replied."""
    event.requests.request(is_repeated=True)
    asyncio.get_running_loop().call_later(STOP_GRACE_SECONDS, put, event)
