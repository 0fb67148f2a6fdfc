"""The loop: await what happens, decide, act.

`Controller.run` starts the workers, follows one attempt after another, and ends when the function
has returned on every rank or no attempt is left. It is a plain class: `fit()` hosts it on an event
loop in a thread of the driver. Nothing in it polls; every wait ends by an event that a worker, the
storage or the user causes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from drawbar.train._attempt import Attempt, AttemptFailed
from drawbar.train._callback import Callbacks
from drawbar.train._checkpoint import Manifest
from drawbar.train._commit import Committer
from drawbar.train._config import RunConfig
from drawbar.train._console import Console
from drawbar.train._decide import GiveUp, Restart, Spent, after_failure
from drawbar.train._errors import TrainingFailedError, WorkerFailure, root_cause_first
from drawbar.train._failure import describe_death, exceptions_of, startup_end, training_failed
from drawbar.train._journal import AttemptFailed as AttemptFailedEvent
from drawbar.train._journal import AttemptStarted, Event, RunEnded, WorkersStarted
from drawbar.train._messages import Failed, Finished, Gone, Message, Ranks, WorkerInfo
from drawbar.train._ranks import assign
from drawbar.train._session import Assignment
from drawbar.train._storage import RunDirectory
from drawbar.train._worker_group import WorkerGroup
from drawbar.train.backend import Backend, BackendConfig

RESTART_GRACE_SECONDS = 1.0
FAIL_GRACE_SECONDS = 0.2


class Plan(Protocol):
    """What the trainer contributes to each attempt."""

    def assignments(
        self, start: AttemptStarted, workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]
    ) -> list[Assignment]:
        """Say what each slot is to do; datasets are sharded anew."""
        ...

    def waiting_for(self) -> str:
        """Say in one line what the workers that have not started are waiting for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """What does not change while a run goes on."""

    run_id: str
    directory: RunDirectory
    config: RunConfig
    backend_config: BackendConfig
    metadata: dict[str, Any]
    first_attempt: int
    checkpoint: str | None


@dataclass(frozen=True)
class _Said:
    attempt: int
    rank: int
    messages: Sequence[Message]


@dataclass(frozen=True)
class _StorageFailed:
    error: Exception


@dataclass(frozen=True)
class Outcome:
    """How the run ended: each rank's return value, or the error; neither if the user stopped it."""

    values: dict[int, Finished] = field(default_factory=dict)
    error: TrainingFailedError | None = None


class Controller:
    """Follows one run from its first process to its end. Make it on the event loop that runs it."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        group: WorkerGroup,
        log: Callable[[Event], None],
        console: Console,
        callbacks: Callbacks,
    ) -> None:
        self._run = run
        self._plan = plan
        self._group = group
        self._log = log
        self._console = console
        self._callbacks = callbacks
        self._backend: Backend = run.backend_config.backend_cls()
        self._attempt: Attempt | None = None
        self._number = run.first_attempt
        self._spent = Spent()
        self._inbox: asyncio.Queue[_Said | _StorageFailed] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Outcome] | None = None
        self._commits = Committer(
            run.directory,
            run.config.checkpoint_config,
            run.metadata,
            journal=log,
            committed=self._committed,
            failed=lambda error: self._inbox.put_nowait(_StorageFailed(error)),
        )

    def stop(self) -> None:
        """Ask for an orderly end, from any thread: functions are interrupted, commits finished."""
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def kill(self) -> None:
        """End every process at once. From any thread."""
        self._loop.call_soon_threadsafe(self._group.kill)

    async def run(self) -> Outcome:
        """Follow the run to its end. Always leaves no process behind."""
        self._task = asyncio.create_task(self._run_attempts())
        try:
            outcome = await self._task
        except asyncio.CancelledError:
            outcome = Outcome()
            await self._group.end_attempt(grace=RESTART_GRACE_SECONDS, keep=True, replace=False)
            self._log(RunEnded(time=time.time(), outcome="stopped"))
        finally:
            await self._commits.close()
            await self._group.stop()
        return outcome

    async def _run_attempts(self) -> Outcome:
        while True:
            try:
                attempt = await self._start_attempt()
                await self._follow(attempt)
            except AttemptFailed as failed:
                decision = after_failure(failed.end, self._spent, self._run.config.failure_config)
                await self._end_attempt(failed, restart=isinstance(decision, Restart))
                if isinstance(decision, GiveUp):
                    return self._give_up(failed, decision)
                self._spent = decision.spent
                self._number += 1
            else:
                self._log(RunEnded(time=time.time(), outcome="finished"))
                return Outcome(values=attempt.values)

    # -- one attempt

    async def _start_attempt(self) -> Attempt:
        start = self._start_point()
        self._log(start)
        self._console.state("starting" if self._number == 0 else "restarting", _from(start))
        try:
            workers = await self._group.start(self._say_what_is_missing)
            ranks = assign(workers)
            self._group.take_ranks(ranks)
            await asyncio.to_thread(self._set_up_backend)
            assignments = await asyncio.to_thread(self._plan.assignments, start, workers, ranks)
        except Exception as error:
            raise AttemptFailed(startup_end(error), cause=error) from error
        attempt = self._attempt = Attempt(
            number=self._number,
            run_id=self._run.run_id,
            first_index=start.first_index,
            workers=_by_rank(workers, ranks),
            order=self._group.order,
            log=self._log,
            commits=self._commits,
            console=self._console,
            callbacks=self._callbacks,
        )
        places = list(zip(workers, ranks, strict=True))
        self._log(WorkersStarted(time=time.time(), attempt=self._number, workers=places))
        self._console.workers(len(workers))
        self._group.run(assignments, self._hear(self._number))
        self._console.state("running")
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

    def _say_what_is_missing(self) -> None:
        self._console.notice(self._plan.waiting_for())

    async def _follow(self, attempt: Attempt) -> None:
        while not attempt.finished:
            match await self._inbox.get():
                case _Said(number, rank, messages) if number == attempt.number:
                    for message in messages:
                        attempt.receive(rank, message)
                case _StorageFailed(error):
                    raise AttemptFailed("storage", cause=error)
                case _Said():
                    pass  # said by a process of an attempt that is over
        await self._commits.settle()
        await asyncio.to_thread(self._shut_down_backend)

    def _committed(self, manifest: Manifest, seconds: float) -> None:
        path = self._commits.checkpoint(manifest).path
        self._console.checkpoint(path, manifest.nbytes, seconds)
        if self._attempt is not None:
            self._attempt.committed(manifest, self._commits.committed_order(manifest))

    # -- failures

    async def _end_attempt(self, failed: AttemptFailed, *, restart: bool) -> None:
        """Bring every process to a stop and gather what the other ranks have to say about it."""
        keep = self._run.config.failure_config.keep_survivors and self._backend.reentrant
        await self._group.end_attempt(
            grace=RESTART_GRACE_SECONDS if restart and keep else FAIL_GRACE_SECONDS,
            keep=keep,
            replace=restart,
        )
        self._gather(failed)
        for rank, gone in failed.gone.items():
            failed.failures.append(await self._describe_death(rank, gone))
        failed.failures = root_cause_first(failed.failures)
        await self._commits.settle()
        if failed.end != "startup":
            await asyncio.to_thread(self._shut_down_backend)
        self._note(failed)

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
        self._log(
            AttemptFailedEvent(
                time=time.time(), attempt=self._number, kind=failed.end, failures=headlines
            )
        )
        for failure in failed.failures[:1]:
            self._console.failure(failure)
        if self._callbacks:
            self._callbacks.after_exception(exceptions_of(failed.failures))

    def _give_up(self, failed: AttemptFailed, decision: GiveUp) -> Outcome:
        error = training_failed(
            failed.end,
            failed.failures,
            failed.cause,
            reason=decision.reason,
            path=str(self._run.directory.path),
            newest=self._start_point().checkpoint,
        )
        self._log(RunEnded(time=time.time(), outcome="failed", error=error.error_message))
        return Outcome(error=error)

    def _shut_down_backend(self) -> None:
        try:
            self._backend.on_shutdown(self._group, self._run.backend_config)
        except Exception as error:
            self._console.notice(f"{type(self._backend).__name__}.on_shutdown failed: {error!r}")


def _by_rank(workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]) -> list[WorkerInfo]:
    pairs = zip(workers, ranks, strict=True)
    return [worker for worker, _ in sorted(pairs, key=lambda pair: pair[1].world_rank)]


def _from(start: AttemptStarted) -> str:
    return f"from {start.checkpoint}" if start.checkpoint else ""
