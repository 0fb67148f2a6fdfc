"""How often this process and its forebears were forked.

What remembers the number it was made with knows when it is a copy in a child. `os.getpid()` would
tell too, but is a system call, which may cost more than the rest of a `report()` or `print()`.
"""

from __future__ import annotations

import os

count = 0


def _increment() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_increment)
