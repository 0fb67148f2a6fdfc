"""Collect the stacks of all ranks, and detect ranks that stop responding.

Ranks are polled, because no event reports a stall. `find_stalled_ranks` decides which of them are
stalled.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from datetime import timedelta

from drawbar._process.stack_comparison import Stacks, WrittenStacks, write_stacks
from drawbar._process.stalled_ranks import StalledRank, find_stalled_ranks, find_suspects
from drawbar._process.threads import run_in_daemon_thread
from drawbar._records.event_stream import Emit
from drawbar._records.events import RanksStalled
from drawbar._records.live_events import Notice
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._controller.attempt import Attempt, HangDetected
from drawbar.train._protocol.commands import DiagnosisReply
from drawbar.train._protocol.messages import DiagnosisRequest
from drawbar.train._worker_group.worker_group import WorkerGroup


class DiagnosisWriter:
    """Write the stacks of all ranks to the run directory. Must be used on the event loop.

    Args:
        group: Workers.
        directory: Run directory.
        emit: Callback that publishes events.
    """

    def __init__(self, group: WorkerGroup, directory: RunDirectory, emit: Emit) -> None:
        self._group = group
        self._directory = directory
        self._emit = emit
        self._reply_tasks: set[asyncio.Task[None]] = set()

    async def write(self, name: str) -> WrittenStacks:
        """Collect the stacks of all ranks and write them to the directory `name`."""
        directory = self._directory.local_path / "stacks" / name
        stacks = await self._group.collect_stacks()
        # Use a thread: the ranks may hang because the storage does not respond.
        return await run_in_daemon_thread(write_stacks, directory, stacks)

    async def emit(self) -> str:
        """Write the stacks, and emit and return a text with the location of each rank."""
        stacks = await self.write(f"diagnosis_{int(time.time() * 1000)}")
        text = f"Location of each rank (stacks in {stacks.directory}):\n{stacks.difference}"
        self._emit(Notice(text))
        return stacks.difference

    def reply(self, rank: int, request: DiagnosisRequest) -> None:
        """Start a task that collects the stacks and sends a reply to a rank."""
        task = asyncio.create_task(self._reply(rank, request))
        # asyncio keeps only a weak reference to a task, so it could be deleted before it ends.
        self._reply_tasks.add(task)
        task.add_done_callback(self._reply_tasks.discard)

    async def _reply(self, rank: int, request: DiagnosisRequest) -> None:
        text = await self.emit()
        self._group.send_command(rank, DiagnosisReply(request_id=request.request_id, text=text))


_CHECKS_PER_THRESHOLD = 6  # checks in the time after which an idle rank is reported
_SAMPLES_PER_TIMEOUT = 4  # samples of the logs of idle ranks in `hang_timeout`


class RankSampler:
    """Collect the stacks of all ranks, and record the output of ranks as activity.

    Args:
        group: Workers.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._attempt: Attempt | None = None
        self._log_sizes: dict[int, int] = {}  # by rank, in the previous sample

    async def collect(self, attempt: Attempt) -> Stacks:
        """Return the stacks. A rank whose log has grown since the previous call is active now."""
        stacks = await self._group.collect_stacks()
        if attempt is not self._attempt:
            self._attempt, self._log_sizes = attempt, {}
        for rank, stack in stacks.items():
            if stack is not None and not stack.stopped_reason:
                if stack.log_size > self._log_sizes.get(rank, stack.log_size):
                    attempt.activity_clock.record(rank)
                self._log_sizes[rank] = stack.log_size
        return stacks


class StallDetector:
    """Poll the activity of the ranks and report stalled ones.

    Args:
        threshold: Time without activity after which a rank is inspected; None disables the checks.
        get_attempt: Returns the current attempt; None while there is none.
        sampler: Collects the stacks.
        emit: Callback that publishes events.
        path: Path of the run.
    """

    def __init__(
        self,
        threshold: timedelta | None,
        get_attempt: Callable[[], Attempt | None],
        sampler: RankSampler,
        emit: Emit,
        path: str,
    ) -> None:
        self._threshold = threshold.total_seconds() if threshold is not None else None
        self._get_attempt = get_attempt
        self._sampler = sampler
        self._emit = emit
        self._path = shlex.quote(path)
        self._stalled_ranks: dict[int, StalledRank] = {}
        self._suspects: set[int] = set()
        # Time of the next inspection of the same suspects, and the delay before it, which doubles.
        self._next_inspection = self._delay = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        while self._threshold is not None:
            await asyncio.sleep(self._threshold / _CHECKS_PER_THRESHOLD)
            attempt = self._get_attempt()
            activity = attempt.get_activity() if attempt is not None else {}
            # Earlier than the warning: its second half shows whether stacks and logs change.
            suspects = find_suspects(activity, self._threshold / 2)
            if suspects != self._suspects:
                self._suspects, self._next_inspection, self._delay = suspects, 0.0, 0.0
            if attempt is None or not suspects:
                self._update(attempt, {})
            elif (now := time.monotonic()) >= self._next_inspection:
                # Collecting stacks interrupts each rank briefly, and rarely shows anything new
                # while the same ranks are idle.
                self._delay = max(2 * self._delay, self._threshold)
                self._next_inspection = now + self._delay
                await self._inspect(attempt, self._threshold)

    async def _inspect(self, attempt: Attempt, threshold: float) -> None:
        before = await self._sampler.collect(attempt)
        await asyncio.sleep(threshold / 2)
        now = await self._sampler.collect(attempt)
        # The attempt may have ended meanwhile, since an inspection takes seconds.
        if attempt is not self._get_attempt():
            return
        activity = attempt.get_activity()
        # A rank may have more to do than the others, so wait again after one of them has returned.
        has_recent = attempt.activity_clock.get_idle_seconds() < threshold
        returned = () if has_recent else tuple(attempt.finished)
        self._update(attempt, find_stalled_ranks(activity, threshold, before, now, returned))

    def _update(self, attempt: Attempt | None, stalled_ranks: dict[int, StalledRank]) -> None:
        if stalled_ranks == self._stalled_ranks:
            return
        self._stalled_ranks = stalled_ranks
        if attempt is None or attempt.is_finished:
            return
        texts = {rank: stalled.text for rank, stalled in stalled_ranks.items()}
        self._emit(RanksStalled(time=time.time(), attempt=attempt.number, descriptions=texts))
        for rank, text in texts.items():
            worker = attempt.workers[rank]
            remedy = (
                f"For stacks of all ranks, run drawbar stacks {self._path}; for this rank, run "
                f"py-spy dump --pid {attempt.get_pid(rank)} on {worker.hostname}."
            )
            self._emit(Notice(f"{text}. {remedy}"))
        if not texts:
            self._emit(Notice("All ranks are active again."))


class HangDetector:
    """Report an attempt in which no rank has been active for `FailureConfig.hang_timeout`.

    Args:
        timeout: The timeout; None disables the check.
        get_attempt: Returns the current attempt; None while there is none.
        sampler: Collects the stacks, to find output that is not sent to the driver.
        put_event: Puts `HangDetected` on the event queue.
    """

    def __init__(
        self,
        timeout: timedelta | None,
        get_attempt: Callable[[], Attempt | None],
        sampler: RankSampler,
        put_event: Callable[[HangDetected], None],
    ) -> None:
        self._timeout = timeout.total_seconds() if timeout is not None else None
        self._get_attempt = get_attempt
        self._sampler = sampler
        self._put_event = put_event

    async def run(self) -> None:
        """Watch until cancelled."""
        while self._timeout is not None:
            attempt, interval = self._get_attempt(), self._timeout / _SAMPLES_PER_TIMEOUT
            remaining = self._timeout
            if attempt is not None and not attempt.has_ended:
                remaining = attempt.get_remaining_seconds(self._timeout)
                if remaining <= self._timeout - interval:
                    await self._sampler.collect(attempt)
                    remaining = attempt.get_remaining_seconds(self._timeout)
                if not remaining:
                    self._put_event(HangDetected(attempt, self._timeout))
            await asyncio.sleep(min(remaining or interval, interval))
