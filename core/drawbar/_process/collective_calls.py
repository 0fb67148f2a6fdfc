"""Find the collective of a framework in which ranks wait, and the ranks that never entered it.

A framework that numbers its collectives registers a function that returns the latest ones of this
process. They are sent with the stack of the rank. The core imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from drawbar._base.wording import format_ranks

_MAX_CALLS = 20  # per process group; enough to find the first difference between ranks


class GroupCalls(msgspec.Struct, frozen=True):
    """Latest collectives that this rank has entered in one process group.

    Attributes:
        group: Name of the process group, the same on all of its ranks.
        ranks: World ranks of the group; empty if it has all ranks.
        names: Name of each collective by number, in ascending order. All ranks number them alike.
        waiting_in: Number of the first collective that has not ended; None if all have.

    Example:
        >>> GroupCalls("0 (gloo)", ranks=(), names={1: "barrier", 2: "all_reduce"}, waiting_in=2)
    """

    group: str
    ranks: tuple[int, ...]
    names: dict[int, str]
    waiting_in: int | None

    @property
    def last_number(self) -> int:
        """Number of the last collective that the rank has entered; 0 if it has entered none."""
        return max(self.names, default=0)


class CollectiveWait(NamedTuple):
    """Ranks that wait in a collective of a framework.

    Attributes:
        text: Description for the user.
        waiting: Ranks that wait in it.
        missing: Ranks that never entered it.
        ranks: All ranks that the text names.
    """

    text: str
    waiting: Collection[int]
    missing: Collection[int]
    ranks: Collection[int]


ReadCalls = Callable[[], Collection[GroupCalls]]

_readers: list[ReadCalls] = []


@contextmanager
def collective_calls(read: ReadCalls) -> Iterator[None]:
    """Include the collectives of a framework in the diagnosis of hangs, inside a with statement.

    Args:
        read: Returns the latest collectives of this process, by process group. It is called from
            any thread, only when the stack of the rank is read. It must not wait for other ranks,
            and must not raise.

    Returns:
        A context manager.

    Example:
        ```python
        with collective_calls(read_flight_recorder):
            train_func()
        ```
    """
    _readers.append(read)
    try:
        yield
    finally:
        _readers.remove(read)


def read_collective_calls() -> tuple[GroupCalls, ...]:
    """Return the latest collectives of this process, by process group."""
    return tuple(_shorten(calls) for read in tuple(_readers) for calls in read())


def _shorten(calls: GroupCalls) -> GroupCalls:
    """Drop the names that a comparison does not need."""
    last = calls.last_number
    end = last if calls.waiting_in is None else calls.waiting_in
    names = {
        number: name
        for number, name in calls.names.items()
        if end - _MAX_CALLS < number <= end or number == last
    }
    return msgspec.structs.replace(calls, names=names)


def find_collective_waits(
    calls: Mapping[int, Collection[GroupCalls]],
) -> list[CollectiveWait]:
    """Return the collectives in which ranks wait. Pure function.

    Args:
        calls: Collectives of each rank that replied.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, GroupCalls]] = {}
    for rank, rank_calls in sorted(calls.items()):
        for group_calls in rank_calls:
            groups.setdefault((group_calls.group, group_calls.ranks), {})[rank] = group_calls
    waits = (_find_wait(group, by_rank) for (group, _), by_rank in groups.items())
    return [wait for wait in waits if wait is not None]


def find_missing_ranks(waits: Collection[CollectiveWait]) -> set[int]:
    """Return the ranks that never entered a collective and wait in no other one.

    If each of them waits in another one, all of them are returned.
    """
    missing = {rank for wait in waits for rank in wait.missing}
    return missing.difference(*(wait.waiting for wait in waits)) or missing


def _find_wait(group: str, calls: Mapping[int, GroupCalls]) -> CollectiveWait | None:
    waits = {rank: c.waiting_in for rank, c in calls.items() if c.waiting_in is not None}
    if not waits:
        return None
    # A rank can enter further collectives, so the one with the lowest number blocks.
    number = min(waits.values())
    waiting = [rank for rank, waiting_in in waits.items() if waiting_in == number]
    end = f" (process group {group})"
    if difference := _find_difference(calls, number):
        return CollectiveWait(difference + end, waiting, (), list(calls))
    name = f"{calls[waiting[0]].names[number]} #{number}"
    verb = "waits" if len(waiting) == 1 else "wait"
    if missing := [rank for rank, c in calls.items() if c.last_number < number]:
        text = f"{format_ranks(missing)} never entered {name}, in which {format_ranks(waiting)} "
        return CollectiveWait(text + verb + end, waiting, missing, [*missing, *waiting])
    return CollectiveWait(f"{format_ranks(waiting)} {verb} in {name}{end}", waiting, (), waiting)


def _find_difference(calls: Mapping[int, GroupCalls], end: int) -> str:
    """Describe the first number up to `end` at which ranks entered different collectives."""
    for number in range(end - _MAX_CALLS + 1, end + 1):
        ranks: dict[str, list[int]] = {}
        for rank, rank_calls in calls.items():
            if number in rank_calls.names:
                ranks.setdefault(rank_calls.names[number], []).append(rank)
        if len(ranks) > 1:
            texts = (
                f"{format_ranks(each)} entered {name} #{number}" for name, each in ranks.items()
            )
            return ", but ".join(texts)
    return ""
