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
from drawbar.train._controller.diagnosis import stand_apart
from drawbar.train._controller.progress import Sign
from drawbar.train._group.worker_group import WorkerGroup
from drawbar.train._history.events import Notice, PreemptionAnnounced, RanksQuiet
from drawbar.train._history.stream import Emit
from drawbar.train._threads import in_daemon_thread
from drawbar.train._worker.stack import Frame, Stack

Stacks = Mapping[int, Stack | None]

DRAIN_CHECK_SECONDS = 2.0
SILENT_SECONDS = 10.0
"""How long Ray's control service may take to answer before that is said."""

_CONTROL_IS_SILENT = (
    "Ray's control service (GCS) does not answer any more. The training goes on for now; if the "
    "service is gone, Ray ends this process a minute later, and after that "
    'RunConfig(resume="auto") goes on from the newest checkpoint'
)

_LOOKS = 6  # how often, in the time after which a silent rank is said
_NO_ANSWER = "it does not answer: it is frozen, or in one long call that holds the interpreter"


class NodeWatch:
    """Looks now and then whether nodes of the attempt are about to go, and tells it.

    Args:
        draining: Gives such nodes, by id, as `Plan.draining` does.
        current: Gives the attempt, None while there is none.
        emit: Tells events.
    """

    def __init__(
        self,
        draining: Callable[[], dict[str, int]],
        current: Callable[[], Attempt | None],
        emit: Emit,
    ) -> None:
        self._draining = draining
        self._current = current
        self._emit = emit

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
            draining = await self._ask()
            attempt = self._current()
            info = attempt.preempted(draining) if attempt is not None else None
            if info is not None:
                self._emit(PreemptionAnnounced(info))

    async def _ask(self) -> dict[str, int]:
        """Ask Ray's control service, which does not answer while a head node is restarted."""
        asked = asyncio.ensure_future(in_daemon_thread(self._draining))
        try:
            if not (await asyncio.wait([asked], timeout=SILENT_SECONDS))[0]:
                self._emit(Notice(_CONTROL_IS_SILENT))
                await asyncio.wait([asked])
                self._emit(Notice("Ray's control service answers again"))
            return await asked
        finally:
            asked.cancel()


@dataclass(frozen=True)
class Quiet:
    """What is said of a quiet rank; said again when it begins to answer, or ceases to."""

    answers: bool
    text: str = field(compare=False)


def is_suspicious(signs: Mapping[int, Sign], patience: float) -> bool:
    """Whether to look where the ranks stand."""
    return bool(_held_up(signs, patience)) or _all_silent(signs, patience)


def quiet_ranks(
    signs: Mapping[int, Sign], patience: float, before: Stacks, now: Stacks
) -> dict[int, Quiet]:
    """Give the ranks that others wait for, as two looks and the last signs of life tell."""
    found = _held_up(signs, patience)
    if not found and _all_silent(signs, patience):
        still = {rank: now[rank] for rank in signs if _is_still(before.get(rank), now.get(rank))}
        mute = [rank for rank, stack in still.items() if _lines(stack) is None]
        moving = len(still) < len(signs)
        # Who gives no answer is surely stuck. Of those that do and stand still, none is blamed
        # while others move: it may just be slower.
        found = mute if mute or moving else stand_apart(still)
    return {rank: _quiet(rank, signs, now.get(rank)) for rank in found if len(signs) > 1}


def _held_up(signs: Mapping[int, Sign], patience: float) -> list[int]:
    """Give the silent ranks for which silent ones wait inside Drawbar."""
    return [
        rank
        for rank, sign in signs.items()
        if not sign.waits
        and sign.silent >= patience
        and any(signs[waiter].silent >= patience for waiter in sign.waiters)
    ]


def _all_silent(signs: Mapping[int, Sign], patience: float) -> bool:
    return all(sign.silent >= patience and not sign.waits for sign in signs.values())


def _is_still(before: Stack | None, now: Stack | None) -> bool:
    return _lines(before) == _lines(now)


def _lines(stack: Stack | None) -> tuple[Frame, ...] | None:
    """Give the lines where a rank stands; None if it does not answer."""
    return None if stack is None or stack.stopped else stack.frames


def _quiet(rank: int, signs: Mapping[int, Sign], stack: Stack | None) -> Quiet:
    sign = signs[rank]
    others = [f"rank {each} {signs[each].waits}" for each in sign.waiters if signs[each].waits]
    while_others = f" while {others[0]}" if others else ""
    known = f"; it was last heard of at {sign.last}" if sign.last else ""
    if stack is None:
        place = _NO_ANSWER + known
    else:
        place = f"it is {stack.stopped}{known}" if stack.stopped else f"it stands at {stack.place}"
    text = f"rank {rank} gives no sign of life for {sign.silent:.0f} s{while_others}: {place}"
    return Quiet(_lines(stack) is not None, text)


class QuietWatch:
    """Looks now and then whether ranks are quiet, and says so.

    Args:
        patience: How long a rank may be silent; None does not watch.
        current: Gives the attempt, None while there is none.
    """

    def __init__(
        self,
        patience: timedelta | None,
        current: Callable[[], Attempt | None],
        group: WorkerGroup,
        emit: Emit,
    ) -> None:
        self._patience = patience.total_seconds() if patience is not None else None
        self._current = current
        self._group = group
        self._emit = emit
        self._quiet: dict[int, Quiet] = {}
        self._next = 0.0  # the silence of all that is looked into: long ones ever less often

    async def watch(self) -> None:
        """Watch until cancelled."""
        while self._patience is not None:
            await asyncio.sleep(self._patience / _LOOKS)
            attempt = self._current()
            signs = attempt.signs() if attempt is not None else {}
            shortest = min((sign.silent for sign in signs.values()), default=0.0)
            if attempt is None or not is_suspicious(signs, self._patience):
                self._note(attempt, {})
                self._next = 0.0
            elif shortest < self._patience or shortest >= self._next:
                # Looking costs each rank a moment, and nothing new is to be expected of a long
                # silence.
                self._next = 2 * shortest
                await self._look(attempt, self._patience)

    async def _look(self, attempt: Attempt, patience: float) -> None:
        before = await self._group.stacks()
        await asyncio.sleep(patience / _LOOKS)
        now = await self._group.stacks()
        # Looking takes seconds, in which the attempt may have ended.
        if attempt is self._current():
            self._note(attempt, quiet_ranks(attempt.signs(), patience, before, now))

    def _note(self, attempt: Attempt | None, quiet: dict[int, Quiet]) -> None:
        if quiet == self._quiet:
            return
        self._quiet = quiet
        if attempt is None or attempt.finished:
            return
        told = {rank: each.text for rank, each in quiet.items()}
        self._emit(RanksQuiet(time=time.time(), attempt=attempt.number, ranks=told))
        for rank, text in told.items():
            worker = attempt.workers[rank]
            further = (
                "To look further: RunHandle.diagnose(), kill -USR1 of the driver, or "
                f"py-spy dump --pid {worker.pid} on {worker.hostname}"
            )
            self._emit(Notice(f"{text}. {further}"))
        if not told:
            self._emit(Notice("all ranks give signs of life again"))
