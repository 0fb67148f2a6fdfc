"""Decide which ranks are stalled. Pure functions.

A rank is idle if it sends no message and its log does not grow. These idle ranks are stalled:

- A rank that other idle ranks wait for in Drawbar (a collective, a checkpoint).
- A rank that has reported, but lacks reports that others have made, if its stack has not changed
  and it uses no CPU time.
- If all ranks are idle, they may wait in a library, for example in an all-reduce. Of the ranks
  whose stacks have not changed, those that do not respond, never entered the collective in which
  others wait, or differ from the others are stalled. If other ranks have returned, all of them are.

A long epoch in which all ranks compute therefore does not trigger a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from drawbar._base.wording import format_ranks
from drawbar._process.collective_calls import CollectiveWait, find_missing_ranks
from drawbar._process.stack import Frame, Stack
from drawbar._process.stack_comparison import Stacks, find_outlier_ranks, find_waits

# CPU time between two samples of an active rank, as a fraction of the threshold: 1 % of a core, as
# the samples are collected half of the threshold apart.
_BUSY_CPU_FRACTION = 0.01 / 2
_NO_REPLY = "it does not respond: it is frozen, or in one long call that holds the interpreter lock"


@dataclass(frozen=True)
class RankActivity:
    """Last activity of a rank that has not finished.

    Attributes:
        idle_seconds: Time since its last message.
        waiting_in: Description of the Drawbar call that blocks the rank, "" if there is none.
        waiters: Ranks that wait for this rank in Drawbar calls.
        last_location: Line of its last report or collective.
        lag: How far it is behind the rank with most reports, "" if it has never reported or lacks
            less than two reports.
    """

    idle_seconds: float
    waiting_in: str = ""
    waiters: tuple[int, ...] = ()
    last_location: str = ""
    lag: str = ""

    def is_idle(self, threshold: float) -> bool:
        """Return whether the rank has sent no message for `threshold` seconds."""
        return self.idle_seconds >= threshold


@dataclass(frozen=True)
class StalledRank:
    """Stalled rank. It is reported again if `is_responding` changes.

    Attributes:
        is_responding: Whether the rank's stack could be read.
        text: Description for the user.
    """

    is_responding: bool
    text: str = field(compare=False)


def find_suspects(activity: Mapping[int, RankActivity], threshold: float) -> set[int]:
    """Return the ranks that may be stalled, depending on their stacks."""
    if _is_every_rank_idle(activity, threshold):
        return set(activity)
    return {
        *_find_blocking_ranks(activity, threshold),
        *_find_ranks_behind(activity, threshold),
    }


def find_stalled_ranks(
    activity: Mapping[int, RankActivity],
    threshold: float,
    before: Stacks,
    now: Stacks,
    returned: Collection[int] = (),
) -> dict[int, StalledRank]:
    """Return the stalled ranks.

    Args:
        activity: Last activity of each running rank.
        threshold: Seconds without activity after which a rank counts as idle.
        before: Stacks of all ranks.
        now: Stacks of all ranks, collected half of the threshold later.
        returned: Ranks that have returned, if no rank has done so within the threshold.
    """
    waits = find_waits(now)
    unchanged = {
        rank: now.get(rank) for rank in activity if _is_unchanged(before.get(rank), now.get(rank))
    }
    stalled = {
        *_find_blocking_ranks(activity, threshold),
        *(
            rank
            for rank in _find_ranks_behind(activity, threshold)
            # Others do not need it. So it may compute, also in one long call or at one line.
            if rank in unchanged and not _is_computing(before.get(rank), now.get(rank), threshold)
        ),
    }
    if (
        not stalled
        and _is_every_rank_idle(activity, threshold)
        and len(activity) + len(returned) > 1
    ):
        unresponsive = [rank for rank, stack in unchanged.items() if _get_frames(stack) is None]
        is_any_moving = len(unchanged) < len(activity)
        # Unresponsive ranks are certainly stuck. An unchanged rank that responds is not reported
        # while other ranks move, since it may just be slower.
        if unresponsive or is_any_moving:
            stalled.update(unresponsive)
        else:
            missing = find_missing_ranks(waits)
            stalled.update(unchanged if returned else missing or find_outlier_ranks(unchanged))
    return {
        rank: _describe_stall(rank, activity, now.get(rank), returned, waits)
        for rank in sorted(stalled)
    }


def _find_blocking_ranks(activity: Mapping[int, RankActivity], threshold: float) -> list[int]:
    """Return the idle ranks that other idle ranks wait for in Drawbar calls."""
    idle = {rank for rank, rank_activity in activity.items() if rank_activity.is_idle(threshold)}
    return [
        rank
        for rank, rank_activity in activity.items()
        if rank in idle
        and not rank_activity.waiting_in
        and not idle.isdisjoint(rank_activity.waiters)
    ]


def _find_ranks_behind(activity: Mapping[int, RankActivity], threshold: float) -> list[int]:
    """Return the idle ranks that have reported, but less often than others."""
    return [
        rank
        for rank, rank_activity in activity.items()
        if rank_activity.is_idle(threshold) and not rank_activity.waiting_in and rank_activity.lag
    ]


def _is_every_rank_idle(activity: Mapping[int, RankActivity], threshold: float) -> bool:
    return all(
        rank_activity.is_idle(threshold) and not rank_activity.waiting_in
        for rank_activity in activity.values()
    )


def _is_unchanged(before: Stack | None, now: Stack | None) -> bool:
    return _get_frames(before) == _get_frames(now)


def _is_computing(before: Stack | None, now: Stack | None, threshold: float) -> bool:
    if before is None or now is None:
        return False
    return now.cpu_seconds - before.cpu_seconds > threshold * _BUSY_CPU_FRACTION


def _get_frames(stack: Stack | None) -> tuple[Frame, ...] | None:
    """Return the frames of a rank; None if it does not respond."""
    return None if stack is None or stack.stopped_reason else stack.frames


def _describe_stall(
    rank: int,
    activity: Mapping[int, RankActivity],
    stack: Stack | None,
    returned: Collection[int],
    collective_waits: Collection[CollectiveWait],
) -> StalledRank:
    rank_activity = activity[rank]
    waits = [
        f" while rank {waiter} {activity[waiter].waiting_in}"
        for waiter in rank_activity.waiters
        if activity[waiter].waiting_in
    ]
    if returned:
        waits.append(
            f", and {format_ranks(returned)} {'has' if len(returned) == 1 else 'have'} finished"
        )
    if rank_activity.lag:
        waits.append(f" and is {rank_activity.lag}")
    others = next(iter(waits), "")
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
    text = f"rank {rank} has shown no activity for {seconds}{others}: {state}"
    text += "".join(f"; {wait.text}" for wait in collective_waits if rank in wait.ranks)
    return StalledRank(_get_frames(stack) is not None, text)
