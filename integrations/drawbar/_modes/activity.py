"""Detect whether a program writes output or uses CPU time."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

BUSY_CPU_FRACTION = 0.01
"""Minimum CPU use of an active program, as a fraction of one core.

Programs that use less are waiting: monitoring threads of frameworks use some CPU time too.
"""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ActivityMonitor:
    """Activity of a program since the previous check.

    Args:
        process_group_id: ID of the process group of the program.
        log: Log that receives its output.
    """

    def __init__(self, process_group_id: int, log: Path) -> None:
        self._process_group_id = process_group_id
        self._log = log
        self._size = self._get_log_size()
        self._cpu = read_cpu_seconds(process_group_id)
        self._last_check = time.monotonic()

    def has_activity(self) -> bool:
        """Return whether the program was active since the previous call."""
        size, cpu = self._get_log_size(), read_cpu_seconds(self._process_group_id)
        now = time.monotonic()
        is_active = (
            size != self._size or cpu - self._cpu > (now - self._last_check) * BUSY_CPU_FRACTION
        )
        self._size, self._cpu, self._last_check = size, cpu, now
        return is_active

    def _get_log_size(self) -> int:
        with contextlib.suppress(OSError):
            return self._log.stat().st_size
        return 0


def read_cpu_seconds(process_group_id: int) -> float:
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
                if int(fields[2]) == process_group_id:
                    ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_SECOND
