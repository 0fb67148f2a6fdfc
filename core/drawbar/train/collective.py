"""Meetings of all ranks through the controller: for small things, without any framework.

Every rank must call the same functions in the same order. If that is broken in a way that can be
proved (a rank has finished, or stands in another call), the run fails with a `DivergenceError` that
names both lines. So with several workers one thread of each must call them, and `report()` too; a
second one is refused.
"""

from __future__ import annotations

from drawbar.train._api import set_public_module
from drawbar.train._worker.context import all_gather, barrier, broadcast_from_rank_zero

__all__ = ["all_gather", "barrier", "broadcast_from_rank_zero"]

set_public_module(globals())
