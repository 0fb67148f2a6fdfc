"""`RunHandle`: a run that was started, from here or from another process."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

from drawbar.train._config.checks import parse_duration
from drawbar.train._config.run_config import DEFAULT_STORAGE_PATH
from drawbar.train._controller.run import RunOutcome
from drawbar.train._errors import UserAbort
from drawbar.train._handle.ended_run import EndedRun
from drawbar.train._handle.host_actor_run import attach_to_host_actor, list_detached_runs
from drawbar.train._handle.same_host_run import SameHostRun
from drawbar.train._history.journal import read_events
from drawbar.train._history.result import Result
from drawbar.train._history.timeline import RunState, Timeline
from drawbar.train._metrics import Metrics
from drawbar.train._storage.filesystem import AnyFileSystem
from drawbar.train._storage.journal_file import is_locked
from drawbar.train._storage.run_directory import RunDirectory, open_run_directory
from drawbar.train._worker_group.cluster import try_connect_to_ray

JOIN_INTERVAL_S = (
    1.0  # a Ctrl-C that comes just before Python waits is seen only when the wait ends
)


class RunView(Protocol):
    """A run as this process can reach it: here, in an actor, or in its directory."""

    detached: bool

    @property
    def name(self) -> str:
        """Name of the run."""
        ...

    @property
    def path(self) -> str:
        """Where the run lies."""
        ...

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; tells whether it is."""
        ...

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        ...

    def kill(self) -> None:
        """End every process of the run at once."""
        ...

    def diagnose(self) -> str:
        """Say where every rank stands."""
        ...

    def snapshot(self) -> RunState:
        """Say how the run stands, or stood at its end."""
        ...

    def read_log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        ...

    def ending(self) -> RunOutcome:
        """Give how the run ended."""
        ...

    @property
    def silence(self) -> str:
        """Say that the process that hosts the run does not answer, "" if it does."""
        ...


class RunHandle:
    """A run: wait for it, stop it, look at it.

    What asks a detached run raises a `TimeoutError` when the process that hosts it has not answered
    for ten seconds.

        run = trainer.start()
        print(run.status, run.metrics)
        run.stop()
        result = run.wait()

    `DataParallelTrainer.start` and `attach` give one.
    """

    def __init__(self, run: RunView) -> None:
        self._run = run

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._run.name

    @property
    def path(self) -> str:
        """The run's directory, or its URI."""
        return self._run.path

    @property
    def status(self) -> str:
        """What the run is doing.

        "starting", "running", "restarting"; in the end "finished", "failed" or "stopped".
        """
        return self._run.snapshot().status

    @property
    def is_done(self) -> bool:
        """Whether the run is over: `wait` returns or raises at once."""
        return self._run.join(0)

    @property
    def metrics(self) -> Metrics | None:
        """What the lowest rank that has reported, usually rank 0, reported last."""
        metrics = self.metrics_by_rank
        return metrics[min(metrics)] if metrics else None

    @property
    def metrics_by_rank(self) -> dict[int, Metrics]:
        """What each rank reported last."""
        return self._run.snapshot().last_metrics

    @property
    def stalled_ranks(self) -> dict[int, str]:
        """The ranks that give no sign of life while others wait for them, and where they stand.

        `FailureConfig.stall_warning_after` says after how long.
        """
        return self._run.snapshot().stalled_ranks

    @property
    def timeline(self) -> Timeline:
        """Where the time went so far: start-up, checkpoints and outcome of every attempt."""
        return self._run.snapshot().timeline

    def get_logs(self, rank: int = 0) -> str:
        """Give all that a rank has written so far, over all attempts; "" if it has not begun.

        The log of a rank on a node that does not share the storage path comes when its attempt has
        ended.

        Raises:
            ValueError: The run has no such rank.
        """
        sizes = [attempt.world_size for attempt in self.timeline.attempts]
        if rank < 0 or 0 < max(sizes, default=0) <= rank:
            raise ValueError(f"run {self.name!r} has the ranks 0 to {max(sizes) - 1}, found {rank}")
        return self._run.read_log(rank)

    def diagnose(self) -> str:
        """Write every rank's stacks to `<run>/stacks`, and say in a few lines who stands where.

        Raises:
            RuntimeError: The run is over.
        """
        if self.is_done:
            raise RuntimeError(f"run {self.name!r} is over ({self.status}): nobody stands anywhere")
        return self._run.diagnose()

    def stop(self, *, save: bool = True) -> None:
        """Ask the run to end; `wait` tells when it has. It can be resumed with `resume="auto"`.

        Args:
            save: `should_checkpoint()` says yes in the function, and the run ends when the next
                checkpoint is committed, or at once where no function is running. If False, the
                functions are interrupted now, and what they did since their last checkpoint is
                lost.
        """
        self._run.stop(save=save)

    def wait(self, timeout: float | timedelta | None = None) -> Result:
        """Wait until the run is over. A run that was stopped has a result too.

        Ctrl-C stops the run in order, a second one kills it; a detached run goes on.

        Args:
            timeout: Seconds, or a timedelta; None waits without limit.

        Raises:
            TypeError, ValueError: `timeout` is no duration.
            TimeoutError: It is not over yet. It goes on.
            TrainingFailedError: The run failed; its subclass and message say why.
            UserAbort: Ctrl-C.
        """
        seconds = None
        if timeout is not None:
            seconds = parse_duration(
                "timeout", timeout, none_meaning="waits without limit", can_be_zero=True
            )
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        interrupts = handled = 0
        with _diagnose_on_signal(self._run.diagnose):
            while True:
                try:
                    # Inside `try`: a second Ctrl-C may come while the first is handled.
                    if handled < interrupts:
                        handled = interrupts
                        self._interrupt(is_first=interrupts == 1)
                    left = max(0.0, deadline - time.monotonic())
                    # In short waits: a Ctrl-C in the moment before one begins does not end it.
                    if self._run.join(min(left, JOIN_INTERVAL_S)):
                        break
                    if time.monotonic() >= deadline:
                        raise TimeoutError(self._describe_timeout(seconds))
                except KeyboardInterrupt:
                    if self._run.detached:
                        raise UserAbort(self._describe_detach()) from None
                    # The timeout does not apply to a run that is being stopped.
                    deadline, interrupts = math.inf, interrupts + 1
        if interrupts:
            raise UserAbort(
                f"stopped by Ctrl-C; the run lies at {self.path} and goes on from its newest "
                f"checkpoint, if it has one, with RunConfig(name={self.name!r}, ...) and the same "
                "storage_path"
            )
        return self._run.ending().get_result()

    def _interrupt(self, *, is_first: bool) -> None:
        if is_first:
            self._run.stop(save=False)
        else:
            self._run.kill()

    def _describe_timeout(self, seconds: float | None) -> str:
        after = f"after {seconds:g} s run {self.name!r} in {self.path} is not over"
        return f"{after}; {self._run.silence or 'it goes on'}"

    def _describe_detach(self) -> str:
        return (
            f"Ctrl-C: no longer waiting for the detached run {self.name!r}, which goes on. "
            f"drawbar.train.attach({self.name!r}) gives a handle on it, whose stop() ends it"
        )

    def __repr__(self) -> str:
        try:
            snapshot = self._run.snapshot()
        except TimeoutError:
            return f"RunHandle({self.name!r}, its host does not answer, path={self.path!r})"
        parts = [repr(self.name), snapshot.status]
        if snapshot.status == "running":
            parts.append(f"world size {snapshot.timeline.attempts[-1].world_size}")
        if snapshot.stalled_ranks:
            parts.append(
                f"no sign of life of rank {', '.join(map(str, sorted(snapshot.stalled_ranks)))}"
            )
        if snapshot.last_metrics:
            parts.append(f"metrics={snapshot.last_metrics[min(snapshot.last_metrics)]!r}")
        return f"RunHandle({', '.join(parts)}, path={self.path!r})"


def attach(
    path_or_name: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> RunHandle:
    """Give a handle on a run that goes on, or is over.

    A detached run is reached from the whole cluster, any other one from other processes of its
    user on its driver's machine. What a detached run shows from now on is shown here too.

    Args:
        path_or_name: The run's directory, its URI, or its name: that of a detached run which goes
            on, else that of a run in the default storage path.
        storage_filesystem: The filesystem that the path lies on, as for `RunConfig`.

    Raises:
        ValueError: The path or name is empty.
        LookupError: There is no such run, or it was cut off; the message says which, and where a
            Ray was asked, the detached runs that go on there.
        TimeoutError: The process that hosts the run does not answer; the message says where it is.
    """
    given = os.fspath(path_or_name)
    if not given:
        raise ValueError("attach() takes a run's name, its directory or its URI, found ''")
    is_name = "/" not in given and storage_filesystem is None
    place = os.path.join(DEFAULT_STORAGE_PATH, given) if is_name else given
    directory = open_run_directory(place, storage_filesystem)
    ended = None if is_name else EndedRun.find(directory)
    if ended is not None and ended.is_complete:
        return RunHandle(ended)
    # Before Ray is looked for: joining a cluster takes a second, and a run beside this needs none.
    neighbour = SameHostRun.find(directory)
    if neighbour is not None and not neighbour.snapshot().is_detached:
        return RunHandle(neighbour)
    if neighbour is None and not is_name and not _can_be_detached(directory):
        raise LookupError(_describe_directory(directory))
    unjoined = try_connect_to_ray()
    path = None if is_name else directory.uri
    hosted = attach_to_host_actor(directory.name, path) if not unjoined else None
    run = hosted or neighbour or EndedRun.find(directory)
    if run is not None:
        return RunHandle(run)
    going_on = (
        f"unknown, since {unjoined}" if unjoined else ", ".join(list_detached_runs()) or "none"
    )
    raise LookupError(f"{_describe_directory(directory)}; detached runs that go on: {going_on}")


def _can_be_detached(directory: RunDirectory) -> bool:
    """Whether a run may go on in an actor of a Ray, as far as its directory tells."""
    try:
        events = read_events(directory)
    except FileNotFoundError:
        return True  # its directory may lie on another machine
    return not events or RunState.from_events(events).is_detached


def _describe_directory(directory: RunDirectory) -> str:
    name, location = directory.name, directory.uri
    if directory.run_files.read_journal() is None:
        return f"no detached run {name!r} goes on, and {location} holds no run that is over"
    if is_locked(directory.journal_path) and _can_be_detached(directory):
        return (
            f"run {name!r} in {location} goes on, detached, on a cluster that this process is not "
            "connected to: RAY_ADDRESS or ray.init(address=...) says which"
        )
    if is_locked(directory.journal_path):
        return (
            f"run {name!r} in {location} goes on in a driver of another user or machine, or with "
            "another TMPDIR: it is reached from there alone, since it is not detached"
        )
    if directory.remote_path is not None:
        return (
            f"run {name!r} in {location} has not ended, as far as is told there, and no process of "
            'this machine hosts it: it goes on elsewhere, or was cut off; fit() with resume="auto" '
            "then goes on from its newest checkpoint"
        )
    return (
        f"run {name!r} in {location} has not ended, and the process that hosted it is gone; "
        'fit() with resume="auto" goes on from its newest checkpoint'
    )


@contextlib.contextmanager
def _diagnose_on_signal(diagnose: Callable[[], str]) -> Iterator[None]:
    """Have `kill -USR1 <driver>` write where every rank stands, if the signal is not taken."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    # In a thread: the handler runs between two lines of the main one, which may hold what it needs.
    signal.signal(signal.SIGUSR1, lambda number, frame: threading.Thread(target=diagnose).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
