"""From a checked configuration to a running controller: the run directory, Ray, the thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drawbar.train._checkpoint import Manifest
from drawbar.train._config import DEFAULT_STORAGE_PATH, RunConfig
from drawbar.train._controller import Controller
from drawbar.train._decide import AttemptEnd, RunState, Spent, changes, resume_plan, spent_so_far
from drawbar.train._errors import ControllerError, UserAbort
from drawbar.train._filesystem import locate
from drawbar.train._journal import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    Event,
    Journal,
    RunEnded,
    RunStarted,
)
from drawbar.train._preflight import check_storage_path
from drawbar.train._remote import directory_at
from drawbar.train._run import Outcome
from drawbar.train._storage import RunDirectory

Job = Callable[[], None]


@dataclass(frozen=True)
class OpenRun:
    """A run directory that this process holds, ready for the next attempt."""

    name: str
    run_id: str
    directory: RunDirectory
    journal: Journal
    first_attempt: int
    warning: str
    spent: Spent


def directory_of(config: RunConfig) -> RunDirectory:
    """Give the directory that a run is to have. A run without a name gets one.

    Raises:
        ImportError, ValueError, TypeError: `storage_path` and `storage_filesystem` name no storage.
    """
    storage = locate(config.storage_path or DEFAULT_STORAGE_PATH, config.storage_filesystem)
    return directory_at(storage / (config.name or _new_name()))


def _new_name() -> str:
    return f"drawbar_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"


def open_run(directory: RunDirectory, config: RunConfig, settings: dict[str, Any]) -> OpenRun:
    """Take hold of a run directory: look at what is there, decide how to go on, sweep leftovers.

    `settings` are journaled; what differs from the last start is named in the warning.

    Raises:
        ResumeError: What is there and `RunConfig.resume` do not go together.
        JournalLockedError: The run goes on in another process.
        OSError: The storage cannot be written.
    """
    directory.fetch()
    if not directory.journal.exists():  # an error leaves no trace
        resume_plan(RunState.NONE, config.resume, path=directory.location, newest=None)
    check_storage_path(directory.path)
    directory.create()
    journal = Journal(directory.journal)
    try:  # from here on nobody else writes to the run
        state, events = _look(directory, journal)
        intact = directory.intact_checkpoints() if state is not RunState.NONE else []
        newest = intact[-1].name if intact else None
        plan = resume_plan(state, config.resume, path=directory.location, newest=newest)
        directory.sweep()
    except BaseException:
        journal.close()
        raise
    starts = [event for event in events if isinstance(event, RunStarted)]
    run_id = starts[0].run_id if starts else uuid.uuid4().hex
    attempts = [event.attempt for event in events if isinstance(event, AttemptStarted)]
    journal.append(
        RunStarted(time=time.time(), run_id=run_id, name=directory.name, config=settings)
    )
    _journal_last_commit(journal, events, intact)
    return OpenRun(
        name=directory.name,
        run_id=run_id,
        directory=directory,
        journal=journal,
        first_attempt=max(attempts, default=-1) + 1,
        warning=_with_changes(plan.warning, starts, settings),
        spent=spent_so_far(_failed_since_the_end(events)),
    )


def _journal_last_commit(
    journal: Journal, events: Sequence[Event], intact: Sequence[Manifest]
) -> None:
    """Journal the checkpoint that a driver committed in the moment in which it was killed."""
    indices = [event.index for event in events if isinstance(event, CheckpointCommitted)]
    for manifest in intact:
        if manifest.index > max(indices, default=-1):
            journal.append(CheckpointCommitted.of(manifest, seconds=0.0))


def _with_changes(warning: str, starts: list[RunStarted], settings: dict[str, Any]) -> str:
    changed = changes(starts[-1].config, settings) if starts else []
    if not changed:
        return warning
    listed = "changed since the run's last start: " + "; ".join(changed)
    return f"{warning}; {listed}" if warning else listed


def _failed_since_the_end(events: list[Event]) -> list[AttemptEnd]:
    """Give how attempts failed since the run last ended: a dead driver leaves them to the next."""
    ends: list[AttemptEnd] = []
    for event in events:
        if isinstance(event, RunEnded):
            ends = []
        elif isinstance(event, AttemptFailed):
            ends.append(event.kind)
    return ends


def _look(directory: RunDirectory, journal: Journal) -> tuple[RunState, list[Event]]:
    events, whole = journal.salvage()
    if not events:
        return RunState.NONE if whole else RunState.DAMAGED, events
    if not whole or directory.damaged():
        return RunState.DAMAGED, events
    ended = isinstance(events[-1], RunEnded) and events[-1].outcome == "finished"
    return (RunState.FINISHED if ended else RunState.UNFINISHED), events


def connect_to_ray() -> None:
    """Stay in this process's Ray, or join the one `RAY_ADDRESS` names, or start a local one."""
    import logging

    import ray

    if not ray.is_initialized():
        starts_its_own = "RAY_ADDRESS" not in os.environ
        options: dict[str, Any] = {"include_dashboard": False} if starts_its_own else {}
        ray.init(logging_level=logging.WARNING, **options)


def host(make_controller: Callable[[Callable[[Job], None]], Controller], path: str) -> Outcome:
    """Run a controller on an event loop in a thread of its own; this thread does its jobs.

    `make_controller` is called on that loop with a function that runs a job in this thread, which
    is how `num_workers=0` keeps the training function where `pdb` works. The first Ctrl-C stops the
    run in order, the second one kills it.

    Raises:
        UserAbort: The user stopped the run.
    """
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    hosted = _Hosted(make_controller, jobs)
    thread = threading.Thread(target=hosted.run, name="drawbar-controller", daemon=True)
    jobs.put(thread.start)  # as a job, so that Ctrl-C is caught there too
    interrupts = 0
    with _diagnosis_on_signal(hosted.diagnose):
        while True:
            try:
                job = jobs.get()
                if job is None:
                    break
                job()
            except KeyboardInterrupt:
                interrupts += 1
                hosted.stop(at_once=interrupts > 1)
    thread.join()
    if interrupts:
        raise UserAbort(f'stopped by Ctrl-C; the run lies at {path} and goes on with resume="auto"')
    return hosted.outcome()


@contextlib.contextmanager
def _diagnosis_on_signal(diagnose: Callable[[], None]) -> Iterator[None]:
    """Have `kill -USR1 <driver>` write where every rank stands, if the signal is not taken."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGUSR1, lambda number, frame: diagnose())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class _Hosted:
    """A controller on an event loop of its own. `jobs` gets None when it has ended."""

    def __init__(
        self,
        make_controller: Callable[[Callable[[Job], None]], Controller],
        jobs: queue.SimpleQueue[Job | None],
    ) -> None:
        self._make = make_controller
        self._jobs = jobs
        self._controller: Controller | None = None
        self._stop_asked = False
        self._ended: Outcome | BaseException | None = None

    def run(self) -> None:
        """Run the controller to its end, in the calling thread."""
        try:
            self._ended = asyncio.run(self._run())
        except BaseException as error:
            self._ended = error
        finally:
            self._jobs.put(None)

    async def _run(self) -> Outcome:
        self._controller = self._make(self._jobs.put)
        if self._stop_asked:  # Ctrl-C came while it was made
            self._controller.stop()
        running: Coroutine[Any, Any, Outcome] = self._controller.run()
        return await running

    def stop(self, *, at_once: bool) -> None:
        """End the run: in order, or at once."""
        self._stop_asked = True
        if self._controller is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
                (self._controller.kill if at_once else self._controller.stop)()

    def diagnose(self) -> None:
        """Write where every rank stands."""
        if self._controller is not None:
            self._controller.write_diagnosis()

    def outcome(self) -> Outcome:
        """Give how the run ended; raises what the controller raised."""
        if isinstance(self._ended, Exception):
            message = f"the run's controller failed: {type(self._ended).__name__}: {self._ended}"
            raise ControllerError(message, self._ended) from self._ended
        if isinstance(self._ended, BaseException):
            raise self._ended
        assert self._ended is not None  # run() has ended
        return self._ended
