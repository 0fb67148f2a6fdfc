"""Meetings of all ranks through the controller: for small things, without any framework.

Every rank must call the same functions in the same order. If that is broken in a way that can be
proved (a rank has finished, or stands in another call), the run fails with a `DivergenceError` that
names both lines. So with several workers one thread of each must call them, and `report()` too; a
second one is refused.
"""

from __future__ import annotations

from typing import Any, TypeVar

from drawbar.train._context import current_session

__all__ = ["all_gather", "barrier", "broadcast_from_rank_zero"]

T = TypeVar("T")


def barrier() -> None:
    """Wait until every rank has called this."""
    current_session("collective.barrier").collective("barrier")


def broadcast_from_rank_zero(data: T) -> T:
    """Give rank 0's `data` to every rank; what the other ranks pass is ignored.

    Meant for addresses, seeds and settings; anything that pickles is taken.
    """
    session = current_session("collective.broadcast_from_rank_zero")
    (value,) = session.collective("broadcast_from_rank_zero", data)
    if session.assignment.ranks.world_rank == 0:
        return data
    result: T = value
    return result


def all_gather(data: T) -> list[Any]:
    """Give every rank's `data` to every rank, in rank order. Anything that pickles is taken."""
    return current_session("collective.all_gather").collective("all_gather", data)
