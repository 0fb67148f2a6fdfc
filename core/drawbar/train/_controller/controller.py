"""The loop: await what happens, decide, act.

`Controller.run` starts the workers, follows one attempt after another, and ends when the function
has returned on every rank or no attempt is left. It is a plain class: a `Host` runs it on an event
loop in a thread, of the driver or of an actor. A wait ends by an event that a worker, the storage
or the user causes. Only two tasks look now and then: `NodeWatch` and `QuietWatch`.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from drawbar.train._controller.attempt import Attempt
from drawbar.train._controller.attempt_failed import AttemptFailed
from drawbar.train._controller.backend_hooks import BackendHooks
from drawbar.train._controller.commits import Committer
from drawbar.train._controller.decisions import GiveUp
from drawbar.train._controller.diagnosis import Diagnoses
from drawbar.train._controller.failures import describe_delay, describe_hang, startup_end
from drawbar.train._controller.recovery import Recovery
from drawbar.train._controller.run import Outcome, Plan, Run
from drawbar.train._controller.validations import Validations
from drawbar.train._controller.watches import NodeWatch, QuietWatch
from drawbar.train._group.ranks import assign, by_rank
from drawbar.train._group.validators import Validator
from drawbar.train._group.worker_group import WorkerGroup
from drawbar.train._history.events import AttemptStarted, Notice, RunEnded, WorkersStarted
from drawbar.train._history.stream import Emit
from drawbar.train._storage.contents import is_outside
from drawbar.train._storage.manifest import Manifest
from drawbar.train._threads import in_daemon_thread

STOP_GRACE_SECONDS = 5.0  # the user's own clean-up; a second Ctrl-C cuts it short


class Controller:
    """Follows one run from its first process to its end. Make it on the event loop that runs it."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        group: WorkerGroup,
        validator: Validator | None,
        emit: Emit,
    ) -> None:
        self._run = run
        self._plan = plan
        self._group = group
        self._emit = emit
        self._diagnoses = Diagnoses(group, run.directory, emit)
        self._backend = BackendHooks(run.spec.backend_config, group, emit)
        self._attempt: Attempt | None = None
        self._number = run.first_attempt
        self._stops_at_commit = False
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Outcome] | None = None
        self._commits = Committer(
            run.directory,
            run.spec.run_config.checkpoint_config,
            plan.metadata,
            emit=emit,
            committed=self._committed,
            failed=self._storage_failed,
        )
        self._validations = Validations(validator, self._commits.kept, emit, self._validated)
        patience = run.spec.run_config.failure_config.quiet_notice
        assert not isinstance(patience, int | float)  # FailureConfig makes it a timedelta
        self._quiet = QuietWatch(patience, lambda: self._attempt, group, emit)
        self._nodes = NodeWatch(plan.draining, lambda: self._attempt, emit)
        self._recovery = Recovery(run, group, self._backend, self._commits, emit)

    def stop(self) -> None:
        """Ask for an orderly end, from any thread: functions are interrupted, commits finished."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is None:
            return
        if self._task.done():  # nothing trains any more
            self._commits.give_up()
        self._task.cancel()

    def stop_after_checkpoint(self) -> None:
        """Ask the function for a checkpoint, and end the run when one is committed. Any thread.

        If no function is running, the run ends now.
        """
        self._loop.call_soon_threadsafe(self._request_checkpoint)

    def _request_checkpoint(self) -> None:
        self._stops_at_commit = True
        # Nobody would answer: no function runs, or only validations and what follows the run.
        is_over = self._task is not None and self._task.done()
        attempt = self._attempt
        if is_over or attempt is None or (attempt.finished and self._validations):
            self._cancel()
        else:
            attempt.request_checkpoint()

    def write_diagnosis(self) -> Future[str]:
        """Write where every rank stands to the run's directory, and say so. From any thread."""
        return asyncio.run_coroutine_threadsafe(self._diagnoses.tell(), self._loop)

    def kill(self) -> None:
        """End every process at once. From any thread."""
        self._loop.call_soon_threadsafe(self._group.kill)

    async def run(self) -> Outcome:
        """Follow the run to its end. Always leaves no process behind."""
        self._task = asyncio.create_task(self._run_attempts())
        # Beside the attempts, not inside one: a node may be lost while the next attempt is
        # starting.
        watches = [asyncio.create_task(each.watch()) for each in (self._nodes, self._quiet)]
        self._validations.resume()
        try:
            outcome = await self._task
        except asyncio.CancelledError:
            outcome = Outcome()
            if self._attempt is not None:
                self._attempt.close()
            # Interrupted, not killed: the function cleans up, and what it has reported is committed
            # below.
            await self._group.end_attempt(
                grace=STOP_GRACE_SECONDS, keep=True, replace=False, by_user=True
            )
            self._end_run("stopped")
        finally:
            for watch in watches:
                watch.cancel()
            # Validations end first, since the commits write down what comes of them, and processes
            # last, since a commit may still await what one of them has to persist.
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
                decision = await self._recovery.after(self._number, self._attempt, failed)
                if isinstance(decision, GiveUp):
                    error = self._recovery.error(failed, decision)
                    self._end_run("failed", error.error_message)
                    return Outcome(error=error)
                self._number += 1
                if self._stops_at_commit:  # the attempt that was to save first is over
                    raise asyncio.CancelledError from failed
                if decision.delay:
                    self._emit(Notice(describe_delay(failed, decision)))
                    await asyncio.sleep(decision.delay)  # stop() cancels it
            else:
                await self._wait_for_validations()
                for remark in attempt.remarks():
                    self._emit(Notice(remark))
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
        # A commit or a stop() that comes before the next attempt runs belongs to none.
        self._attempt = None
        if self._number != self._run.first_attempt:  # whoever opened the run has looked
            await self._commits.kept.pass_over_damaged()
        start = self._start_point()
        # Told before anything starts: an attempt whose start kills the driver has its number too,
        # or the next driver would give that number, and its staged files, to another one.
        self._emit(start)
        try:
            workers = await self._group.start(self._say_what_is_missing)
            ranks = assign(workers)
            # Before the hooks, which speak of workers by rank.
            self._group.take_ranks(ranks)
            await self._backend.set_up()
            # It may compute datasets for minutes; neither stop() nor the program's end waits.
            assignments = await in_daemon_thread(self._plan.assignments, start, workers, ranks)
        except Exception as error:
            end = startup_end(error)
            raise AttemptFailed(end, cause=error, started=start.time) from error
        for text in self._plan.notices:
            self._emit(Notice(text))
        attempt = self._attempt = Attempt(
            number=self._number,
            run_id=self._run.run_id,
            first_index=start.first_index,
            workers=by_rank(workers, ranks),
            order=self._group.order,
            emit=self._emit,
            tells_rounds=bool(self._run.spec.run_config.callbacks),
            commits=self._commits,
            validations=self._validations,
            diagnose=self._diagnoses.answer,
        )
        # Told before the function can say anything, so that in the journal no report comes before
        # the workers that made it.
        places = list(zip(workers, ranks, strict=True))
        self._emit(WorkersStarted(time=time.time(), attempt=self._number, workers=places))
        self._group.run(assignments, attempt.hear)
        return attempt

    def _start_point(self) -> AttemptStarted:
        newest = self._commits.kept.newest
        began_with = self._run.spec.resume_from_checkpoint
        checkpoint = began_with.path if began_with else None
        if newest is not None:
            outside = is_outside(newest.name)
            checkpoint = newest.name if outside else self._commits.kept.checkpoint(newest).path
        return AttemptStarted(
            time=time.time(),
            attempt=self._number,
            first_index=newest.index + 1 if newest else 0,
            checkpoint=checkpoint,
        )

    def _say_what_is_missing(self, up: int, placed: bool) -> None:
        self._emit(Notice(self._plan.waiting_for(up, placed)))

    async def _follow(self, attempt: Attempt) -> None:
        timeout = self._run.spec.run_config.failure_config.hang_timeout
        assert not isinstance(timeout, int | float)  # FailureConfig makes it a timedelta
        patience = timeout.total_seconds() if timeout is not None else None
        if not await attempt.over(patience):
            assert patience is not None  # nobody is impatient without
            folder, difference = await self._diagnoses.write(f"hang_{attempt.number}")
            hang = describe_hang(patience, difference + attempt.passes.apart(), folder)
            # Asking for the stacks took seconds in which it may have ended by itself: then this
            # does nothing, and what comes next is how it really ended.
            attempt.fail(AttemptFailed("hang", [hang]))
            await attempt.over(None)
        await self._commits.settle()
        await self._backend.shut_down()

    def _committed(self, manifest: Manifest) -> None:
        # Before the look at the attempt: what a failed one had persisted is committed when it is
        # over.
        self._validations.begin(manifest)
        attempt = self._attempt
        if attempt is None:
            return
        attempt.committed(manifest, self._commits.committed_order(manifest))
        if self._stops_at_commit:
            self.stop()
        elif attempt.wishes.preemption is not None:
            attempt.fail(AttemptFailed("preemption"))  # it is to go on elsewhere
        # The cheapest moment for a restart with more workers: nothing is done twice.
        elif self._group.spare:
            attempt.fail(AttemptFailed("resize"))

    def _storage_failed(self, error: Exception) -> None:
        failed = AttemptFailed("storage", cause=error)
        # Where no attempt is left that could fail of it, it is at least said.
        if self._attempt is None or not self._attempt.fail(failed):
            self._emit(Notice(f"a checkpoint is not committed: {error}"))

    def _validated(self) -> None:
        if self._attempt is not None:
            self._attempt.questions.answer()
