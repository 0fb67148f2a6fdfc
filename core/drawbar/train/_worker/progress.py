"""`set_progress()`: report how much of the training is done."""

from __future__ import annotations

import math
import numbers

from drawbar.train._config.fields import require_type
from drawbar.train._worker.active_session import current_session

_MAX_COUNT = 2**63
_MAX_UNIT_LENGTH = 40


def set_progress(done: float, total: float | None = None, *, unit: str = "steps") -> None:
    """Set how much of the training is done, for percent and remaining time.

    The console, notebooks, `drawbar show`, `drawbar runs --json`, and `RunRecord.progress` show
    rank 0's progress; other ranks may call this function too. A call takes microseconds: the
    progress is sent at most once per second and at the end. After a restart, continue with the
    number of the resumed step.

    Args:
        done: Completed steps since the start of the run, at least 0. Numbers above `total` count as
            100 %.
        total: Number of all steps. None if it is unknown: there is then no percent and no ETA.
        unit: Name of the counted items, such as "epochs". At most 40 printable characters.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError: `done` or `total` is no number, or `unit` is no string.
        ValueError: `done` is negative, `total` is not positive, or `unit` is empty, too long, or
            not printable.

    Example:
        >>> for step, batch in enumerate(batches, start=1):
        ...     train_step(batch)
        ...     train.set_progress(step, len(batches))
    """
    session = current_session("set_progress")
    count = _check_count("done", done)
    total_count = None if total is None else _check_count("total", total)
    if total_count == 0:
        raise ValueError(
            f"set_progress: total must be positive, found {total!r}. "
            "Set total=None if it is unknown."
        )
    session.progress.set(count, total_count, check_unit(unit))


def check_unit(unit: str) -> str:
    """Return a unit after checking that it can be printed.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty, too long, or not printable.
    """
    require_type("set_progress: unit", unit, str)
    if not unit.strip() or len(unit) > _MAX_UNIT_LENGTH or not unit.isprintable():
        raise ValueError(
            f"set_progress: unit must have 1 to {_MAX_UNIT_LENGTH} printable characters, "
            f'found {unit!a}. Set unit="epochs", for example.'
        )
    return unit


def _check_count(name: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"set_progress: {name} must be a number, found {value!r} ({type(value).__name__})"
        )
    try:
        count = float(value)
    except OverflowError:
        count = math.inf
    if not 0 <= count < _MAX_COUNT:
        raise ValueError(
            f"set_progress: {name} must be at least 0 and finite, found {count!r}. "
            "Count from the start of the run."
        )
    return int(count) if count.is_integer() else count
