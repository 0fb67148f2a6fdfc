"""What is looked at now and then, since no event tells of it: nodes that go, quiet ranks.

Quiet ranks give no sign of life while others wait for them. A sign of life is any message of a
rank. Of who waits inside Drawbar (a collective, a checkpoint) it is known for whom. Of who waits
inside a library, say in an all-reduce, nothing is; so when all ranks are silent they are looked at
twice, and only what has not moved counts: one that does not answer, or the odd one out. A long
epoch in which all ranks compute is therefore not said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from drawbar.train._controller.attempt import Attempt
from drawbar.train._controller.diagnosis import find_outlier_ranks
from drawbar.train._controller.progress import RankActivity
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice, PreemptionAnnounced, RanksStalled
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker.stack import Frame, Stack
from drawbar.train._worker_group.worker_group import WorkerGroup

Stacks = Mapping[int, Stack | None]

DRAIN_CHECK_SECONDS = 2.0
GCS_NOTICE_S = 10.0
"""How long Ray's control service may take to answer before that is said."""

_GCS_UNRESPONSIVE = (
    "Ray's control service (GCS) does not answer any more. The training goes on for now; if the "
    "service is gone, Ray ends this process a minute later, and after that "
    'RunConfig(resume="auto") goes on from the newest checkpoint'
)

_CHECKS_PER_THRESHOLD = 6  # how often, in the time after which a silent rank is said
_NO_REPLY = "it does not answer: it is frozen, or in one long call that holds the interpreter"


class NodeWatcher:
    """Looks now and then whether nodes of the attempt are about to go, and tells it.

    Args:
        draining: Gives such nodes, by id, as `Plan.draining` does.
        current: Gives the attempt, None while there is none.
        emit: Tells events.
    """

    def __init__(
        self,
        get_draining_nodes: Callable[[], dict[str, int]],
        get_attempt: Callable[[], Attempt | None],
        emit: Emit,
    ) -> None:
        self._draining = get_draining_nodes
        self._current = get_attempt
        self._emit = emit

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
            get_draining_nodes = await self._query_draining_nodes()
            attempt = self._current()
            info = attempt.on_draining_nodes(get_draining_nodes) if attempt is not None else None
            if info is not None:
                self._emit(PreemptionAnnounced(info))

    async def _query_draining_nodes(self) -> dict[str, int]:
        """Ask Ray's control service, which does not answer while a head node is restarted."""
        asked = asyncio.ensure_future(run_in_daemon_thread(self._draining))
        try:
            if not (await asyncio.wait([asked], timeout=GCS_NOTICE_S))[0]:
                self._emit(Notice(_GCS_UNRESPONSIVE))
                await asyncio.wait([asked])
                self._emit(Notice("Ray's control service answers again"))
            return await asked
        finally:
            asked.cancel()


@dataclass(frozen=True)
class StalledRank:
    """What is said of a quiet rank; said again when it begins to answer, or ceases to."""

    is_responding: bool
    text: str = field(compare=False)


def should_inspect(activity: Mapping[int, RankActivity], threshold: float) -> bool:
    """Whether to look where the ranks stand."""
    return bool(_find_blocking_ranks(activity, threshold)) or _is_every_rank_idle(
        activity, threshold
    )


def find_stalled_ranks(
    activity: Mapping[int, RankActivity], threshold: float, before: Stacks, now: Stacks
) -> dict[int, StalledRank]:
    """Give the ranks that others wait for, as two looks and the last signs of life tell."""
    found = _find_blocking_ranks(activity, threshold)
    if not found and _is_every_rank_idle(activity, threshold):
        still = {
            rank: now[rank] for rank in activity if _is_unchanged(before.get(rank), now.get(rank))
        }
        mute = [rank for rank, stack in still.items() if _get_frames(stack) is None]
        moving = len(still) < len(activity)
        # Who gives no answer is surely stuck. Of those that do and stand still, none is blamed
        # while others move: it may just be slower.
        found = mute if mute or moving else find_outlier_ranks(still)
    return {
        rank: _describe_stall(rank, activity, now.get(rank)) for rank in found if len(activity) > 1
    }


def _find_blocking_ranks(activity: Mapping[int, RankActivity], threshold: float) -> list[int]:
    """Give the silent ranks for which silent ones wait inside Drawbar."""
    return [
        rank
        for rank, sign in activity.items()
        if not sign.waiting_in
        and sign.idle_seconds >= threshold
        and any(activity[waiter].idle_seconds >= threshold for waiter in sign.waiters)
    ]


def _is_every_rank_idle(activity: Mapping[int, RankActivity], threshold: float) -> bool:
    return all(sign.idle_seconds >= threshold and not sign.waiting_in for sign in activity.values())


def _is_unchanged(before: Stack | None, now: Stack | None) -> bool:
    return _get_frames(before) == _get_frames(now)


def _get_frames(stack: Stack | None) -> tuple[Frame, ...] | None:
    """Give the lines where a rank stands; None if it does not answer."""
    return None if stack is None or stack.stopped_reason else stack.frames


def _describe_stall(
    rank: int, activity: Mapping[int, RankActivity], stack: Stack | None
) -> StalledRank:
    sign = activity[rank]
    others = [
        f"rank {each} {activity[each].waiting_in}"
        for each in sign.waiters
        if activity[each].waiting_in
    ]
    while_others = f" while {others[0]}" if others else ""
    known = f"; it was last heard of at {sign.last_location}" if sign.last_location else ""
    if stack is None:
        place = _NO_REPLY + known
    else:
        place = (
            f"it is {stack.stopped_reason}{known}"
            if stack.stopped_reason
            else f"it stands at {stack.location}"
        )
    text = f"rank {rank} gives no sign of life for {sign.idle_seconds:.0f} s{while_others}: {place}"
    return StalledRank(_get_frames(stack) is not None, text)


class StallDetector:
    """Looks now and then whether ranks are quiet, and says so.

    Args:
        patience: How long a rank may be silent; None does not watch.
        current: Gives the attempt, None while there is none.
    """

    def __init__(
        self,
        threshold: timedelta | None,
        get_attempt: Callable[[], Attempt | None],
        group: WorkerGroup,
        emit: Emit,
    ) -> None:
        self._patience = threshold.total_seconds() if threshold is not None else None
        self._current = get_attempt
        self._group = group
        self._emit = emit
        self._describe_stall: dict[int, StalledRank] = {}
        self._next_inspection = (
            0.0  # the silence of all that is looked into: long ones ever less often
        )

    async def run(self) -> None:
        """Watch until cancelled."""
        while self._patience is not None:
            await asyncio.sleep(self._patience / _CHECKS_PER_THRESHOLD)
            attempt = self._current()
            activity = attempt.get_activity() if attempt is not None else {}
            shortest = min((sign.idle_seconds for sign in activity.values()), default=0.0)
            if attempt is None or not should_inspect(activity, self._patience):
                self._update(attempt, {})
                self._next_inspection = 0.0
            elif shortest < self._patience or shortest >= self._next_inspection:
                # Looking costs each rank a moment, and nothing new is to be expected of a long
                # silence.
                self._next_inspection = 2 * shortest
                await self._inspect(attempt, self._patience)

    async def _inspect(self, attempt: Attempt, threshold: float) -> None:
        before = await self._group.collect_stacks()
        await asyncio.sleep(threshold / _CHECKS_PER_THRESHOLD)
        now = await self._group.collect_stacks()
        # Looking takes seconds, in which the attempt may have ended.
        if attempt is self._current():
            self._update(
                attempt, find_stalled_ranks(attempt.get_activity(), threshold, before, now)
            )

    def _update(self, attempt: Attempt | None, quiet: dict[int, StalledRank]) -> None:
        if quiet == self._describe_stall:
            return
        self._describe_stall = quiet
        if attempt is None or attempt.is_finished:
            return
        told = {rank: each.text for rank, each in quiet.items()}
        self._emit(RanksStalled(time=time.time(), attempt=attempt.number, descriptions=told))
        for rank, text in told.items():
            worker = attempt.workers[rank]
            further = (
                "To look further: RunHandle.diagnose(), kill -USR1 of the driver, or "
                f"py-spy dump --pid {worker.pid} on {worker.hostname}"
            )
            self._emit(Notice(f"{text}. {further}"))
        if not told:
            self._emit(Notice("all ranks give signs of life again"))
