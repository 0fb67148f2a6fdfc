"""Collect the stacks of all ranks, and detect ranks that stop responding while others wait.

Ranks are polled, because no event reports a stall. A rank is stalled if it sends no message while
other ranks wait for it. If a rank waits in Drawbar (a collective, a checkpoint), the ranks that it
waits for are known. If it waits in a library, for example in an all-reduce, they are not. So when
all ranks are idle, their stacks are collected twice. Of the ranks whose stacks have not changed,
only those that do not respond or differ from the others are stalled. A long epoch in which all
ranks compute therefore does not trigger a warning.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from drawbar._process.stack import Frame, Stack
from drawbar._process.threads import run_in_daemon_thread
from drawbar._records.event_stream import Emit
from drawbar._records.events import RanksStalled
from drawbar._records.live_events import Notice
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._controller.attempt import Attempt
from drawbar.train._controller.rank_progress import RankActivity
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

    async def write(self, name: str) -> tuple[Path, str]:
        """Collect the stacks of all ranks and write them to a directory.

        Args:
            name: Name of the directory.

        Returns:
            The directory, and a text with the location of each rank in the code.
        """
        directory = self._directory.local_path / "stacks" / name
        stacks = await self._group.collect_stacks()
        # Use a thread: the ranks may hang because the storage does not respond.
        return directory, await run_in_daemon_thread(write_stacks, directory, stacks)

    async def emit(self) -> str:
        """Write the stacks, and emit and return a text with the location of each rank."""
        directory, difference = await self.write(f"diagnosis_{int(time.time() * 1000)}")
        self._emit(Notice(f"Location of each rank (stacks in {directory}):\n{difference}"))
        return difference

    def reply(self, rank: int, request: DiagnosisRequest) -> None:
        """Start a task that collects the stacks and sends a reply to a rank."""
        task = asyncio.create_task(self._reply(rank, request))
        # asyncio keeps only a weak reference to a task, so it could be deleted before it ends.
        self._reply_tasks.add(task)
        task.add_done_callback(self._reply_tasks.discard)

    async def _reply(self, rank: int, request: DiagnosisRequest) -> None:
        text = await self.emit()
        self._group.send_command(rank, DiagnosisReply(request_id=request.request_id, text=text))


def format_difference(stacks: Mapping[int, Stack | None]) -> str:
    """Return one line for each location with its ranks, the smallest group of ranks first."""
    groups = _group_by_location(stacks)
    minority = find_minority_ranks(stacks)
    lines = []
    for location, ranks in groups:
        mark = "   <- differs from the others" if ranks == minority else ""
        lines.append(f"  {_format_ranks(ranks)}: {location}{mark}")
    return "\n".join(lines)


def find_minority_ranks(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Return the ranks of the smallest group at one location; empty if two groups are smallest."""
    sizes = [len(ranks) for _, ranks in _group_by_location(stacks)]
    has_minority = len(sizes) > 1 and sizes[0] < sizes[1]
    return _group_by_location(stacks)[0][1] if has_minority else []


def find_outlier_ranks(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Return the minority; all ranks if they differ and there is no minority."""
    return find_minority_ranks(stacks) or (
        list(stacks) if len(_group_by_location(stacks)) > 1 else []
    )


def _group_by_location(stacks: Mapping[int, Stack | None]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        no_reply = "does not respond: in one long call that holds the interpreter lock, or dead"
        groups.setdefault(stack.location if stack else no_reply, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def _format_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" ... {ranks[-1]}" if len(ranks) > 8 else "")
    return f"ranks {shown} ({len(ranks)})"


def write_stacks(directory: Path, stacks: Mapping[int, Stack | None]) -> str:
    """Write each rank's stacks and their difference to a directory, and return the difference."""
    directory.mkdir(parents=True, exist_ok=True)
    summary = format_difference(stacks)
    for rank, stack in stacks.items():
        (directory / f"rank_{rank}.txt").write_text(stack.text if stack else "no reply\n")
    (directory / "difference.txt").write_text(summary + "\n")
    return summary


Stacks = Mapping[int, Stack | None]

_CHECKS_PER_THRESHOLD = 6  # checks in the time after which an idle rank is reported
_NO_REPLY = "it does not respond: it is frozen, or in one long call that holds the interpreter lock"


@dataclass(frozen=True)
class StalledRank:
    """Stalled rank. It is reported again if `is_responding` changes.

    Attributes:
        is_responding: Whether the rank's stack could be read.
        text: Description for the user.
    """

    is_responding: bool
    text: str = field(compare=False)


def should_inspect(activity: Mapping[int, RankActivity], threshold: float) -> bool:
    """Return whether the stacks of the ranks must be inspected."""
    return bool(_find_blocking_ranks(activity, threshold)) or _is_every_rank_idle(
        activity, threshold
    )


def find_stalled_ranks(
    activity: Mapping[int, RankActivity], threshold: float, before: Stacks, now: Stacks
) -> dict[int, StalledRank]:
    """Return the ranks that other ranks wait for.

    Args:
        activity: Last activity of each rank.
        threshold: Seconds without activity after which a rank counts as idle.
        before: Stacks of all ranks.
        now: Stacks of all ranks, collected some seconds later.
    """
    stalled = _find_blocking_ranks(activity, threshold)
    if not stalled and _is_every_rank_idle(activity, threshold):
        unchanged = {
            rank: now[rank] for rank in activity if _is_unchanged(before.get(rank), now.get(rank))
        }
        unresponsive = [rank for rank, stack in unchanged.items() if _get_frames(stack) is None]
        is_any_moving = len(unchanged) < len(activity)
        # Unresponsive ranks are certainly stuck. An unchanged rank that responds is not reported
        # while other ranks move, since it may just be slower.
        stalled = unresponsive if unresponsive or is_any_moving else find_outlier_ranks(unchanged)
    return {
        rank: _describe_stall(rank, activity, now.get(rank))
        for rank in stalled
        if len(activity) > 1
    }


def _find_blocking_ranks(activity: Mapping[int, RankActivity], threshold: float) -> list[int]:
    """Return the idle ranks that other idle ranks wait for in Drawbar calls."""
    idle = {
        rank for rank, rank_activity in activity.items() if rank_activity.idle_seconds >= threshold
    }
    return [
        rank
        for rank, rank_activity in activity.items()
        if rank in idle
        and not rank_activity.waiting_in
        and not idle.isdisjoint(rank_activity.waiters)
    ]


def _is_every_rank_idle(activity: Mapping[int, RankActivity], threshold: float) -> bool:
    return all(
        rank_activity.idle_seconds >= threshold and not rank_activity.waiting_in
        for rank_activity in activity.values()
    )


def _is_unchanged(before: Stack | None, now: Stack | None) -> bool:
    return _get_frames(before) == _get_frames(now)


def _get_frames(stack: Stack | None) -> tuple[Frame, ...] | None:
    """Return the frames of a rank; None if it does not respond."""
    return None if stack is None or stack.stopped_reason else stack.frames


def _describe_stall(
    rank: int, activity: Mapping[int, RankActivity], stack: Stack | None
) -> StalledRank:
    rank_activity = activity[rank]
    waits = (
        f" while rank {waiter} {activity[waiter].waiting_in}"
        for waiter in rank_activity.waiters
        if activity[waiter].waiting_in
    )
    while_waiting = next(waits, "")
    last_location = rank_activity.last_location
    last_call = f"; its last report or collective was at {last_location}" if last_location else ""
    if stack is None:
        state = _NO_REPLY + last_call
    else:
        state = (
            f"it is {stack.stopped_reason}{last_call}"
            if stack.stopped_reason
            else f"it is at {stack.location}"
        )
    seconds = f"{rank_activity.idle_seconds:.0f} s"
    text = f"rank {rank} has shown no activity for {seconds}{while_waiting}: {state}"
    return StalledRank(_get_frames(stack) is not None, text)


class StallDetector:
    """Poll the activity of the ranks and report stalled ones.

    Args:
        threshold: Time without activity after which a rank is inspected; None disables the checks.
        get_attempt: Returns the current attempt; None while there is none.
        group: Workers, whose stacks are collected.
        emit: Callback that publishes events.
        path: Path of the run.
    """

    def __init__(
        self,
        threshold: timedelta | None,
        get_attempt: Callable[[], Attempt | None],
        group: WorkerGroup,
        emit: Emit,
        path: str,
    ) -> None:
        self._threshold = threshold.total_seconds() if threshold is not None else None
        self._get_attempt = get_attempt
        self._group = group
        self._emit = emit
        self._path = shlex.quote(path)
        self._stalled_ranks: dict[int, StalledRank] = {}
        # Idle time of all ranks at which their stacks are collected next. It doubles each time.
        self._next_inspection = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        while self._threshold is not None:
            await asyncio.sleep(self._threshold / _CHECKS_PER_THRESHOLD)
            attempt = self._get_attempt()
            activity = attempt.get_activity() if attempt is not None else {}
            idle_times = [rank_activity.idle_seconds for rank_activity in activity.values()]
            shortest = min(idle_times, default=0.0)
            if attempt is None or not should_inspect(activity, self._threshold):
                self._update(attempt, {})
                self._next_inspection = 0.0
            elif shortest < self._threshold or shortest >= self._next_inspection:
                # Collecting stacks interrupts each rank briefly, and rarely shows anything new
                # while no rank is active.
                self._next_inspection = 2 * shortest
                await self._inspect(attempt, self._threshold)

    async def _inspect(self, attempt: Attempt, threshold: float) -> None:
        before = await self._group.collect_stacks()
        await asyncio.sleep(threshold / _CHECKS_PER_THRESHOLD)
        now = await self._group.collect_stacks()
        # The attempt may have ended meanwhile, since an inspection takes seconds.
        if attempt is self._get_attempt():
            self._update(
                attempt, find_stalled_ranks(attempt.get_activity(), threshold, before, now)
            )

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
