"""Barrier, broadcast, and all-gather of small objects through the controller.

Every rank must call the same functions in the same order. If a rank provably breaks this rule (it
has finished, or waits in another call), the run fails with a `DivergenceError` that names both
lines. With several workers, only one thread of each worker may therefore call these functions and
`report()`; calls from a second thread raise an error.
"""

from __future__ import annotations

from drawbar._base.api import set_public_module
from drawbar.train._worker.context import all_gather, barrier, broadcast_from_rank_zero

__all__ = ["all_gather", "barrier", "broadcast_from_rank_zero"]

__path__: list[str] = []  # Python looks for aliases below this module; see _base/import_paths.py

set_public_module(globals())
