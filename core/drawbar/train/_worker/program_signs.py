"""Detect whether a program writes output or uses CPU time."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

BUSY = 0.01
"""Minimum CPU use of an active program, as a fraction of one core.

Programs that use less are waiting: monitoring threads of frameworks use some CPU time too.
"""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Signs:
    """Activity of a program since the previous check.

    Args:
        group: Process group id of the program.
        log: Log that receives its output.
    """

    def __init__(self, group: int, log: Path) -> None:
        self._group = group
        self._log = log
        self._size = self._get_log_size()
        self._cpu = cpu_seconds(group)
        self._last_check = time.monotonic()

    def look(self) -> bool:
        """Return whether the program was active since the previous call."""
        size, cpu, now = self._get_log_size(), cpu_seconds(self._group), time.monotonic()
        is_active = size != self._size or cpu - self._cpu > BUSY * (now - self._last_check)
        self._size, self._cpu, self._last_check = size, cpu, now
        return is_active

    def _get_log_size(self) -> int:
        with contextlib.suppress(OSError):
            return self._log.stat().st_size
        return 0


def cpu_seconds(group: int) -> float:
    """Return the CPU seconds of a process group, including its reaped children.

    See proc(5) for the fields. Returns 0 on systems without /proc.
    """
    ticks = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if not name.isdigit():
                    continue
                # The second field is the name, which may contain spaces and parentheses.
                stat = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2]
                fields = stat.split()
                if int(fields[2]) == group:
                    ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_SECOND
