"""Whether a program does anything, as seen from outside: it writes, or it computes."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

BUSY = 0.01
"""Of one core: who uses less is taken to wait, as the threads of a framework do that only watch."""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Signs:
    """Looks at a program now and then.

    Args:
        group: The process group that it leads.
        log: Where it writes.
    """

    def __init__(self, group: int, log: Path) -> None:
        self._group = group
        self._log = log
        self._size = self._written()
        self._cpu = cpu_seconds(group)
        self._at = time.monotonic()

    def look(self) -> bool:
        """Tell whether it has written or computed anything since the last look."""
        size, cpu, now = self._written(), cpu_seconds(self._group), time.monotonic()
        is_alive = size != self._size or cpu - self._cpu > BUSY * (now - self._at)
        self._size, self._cpu, self._at = size, cpu, now
        return is_alive

    def _written(self) -> int:
        with contextlib.suppress(OSError):
            return self._log.stat().st_size
        return 0


def cpu_seconds(group: int) -> float:
    """Give what the processes of a group, and those that they have reaped, have computed so far.

    proc(5) has the fields; 0 where there is no /proc.
    """
    ticks = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if not name.isdigit():
                    continue
                # The program's name is in parentheses, and may have blanks and parentheses itself.
                stat = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2]
                fields = stat.split()
                if int(fields[2]) == group:
                    ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_SECOND
