"""Count forks to detect code that runs in a forked child.

An object that stores the count of its creation can detect that it is a copy in a child process.
`os.getpid()` would work too, but is a system call, which may cost more than the rest of a
`report()` or `print()`.
"""

from __future__ import annotations

import os

count = 0


def _increment() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_increment)
