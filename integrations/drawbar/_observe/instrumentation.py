"""Functions for use in the training function that mark phases and steps, and set the progress."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import TypeVar

from drawbar._base.fields import require_type
from drawbar.train._worker.active_session import current_session

T = TypeVar("T")
_MAX_COUNT = 2**63
_MAX_UNIT_LENGTH = 40


def phase(name: str) -> Phase:
    """Mark a part of the training function that is not training, such as an evaluation.

    `Result.goodput` shows the time of each phase separately, and not as productive. In nested
    phases, time counts only for the inner one. If a generator is suspended inside a phase, the time
    of its caller counts for the phase, too. Only the thread of the training function is measured.

    Args:
        name: Name of the phase, with printable characters. Use a fixed set of names, without the
            number of the step: after 100 names, all others are counted together.

    Returns:
        A context manager, which can be used repeatedly and as a decorator.

    Raises:
        RuntimeError: Entered outside a training function.
        TypeError: `name` is not a string.
        ValueError: `name` is empty, or has a character that cannot be printed.

    Example:
        >>> with train.phase("eval"):
        ...     accuracy = evaluate(model)
    """
    if not isinstance(name, str):
        raise TypeError(f"phase() needs the name as a string, found {name!r}.")
    if not name or not name.isprintable():
        raise ValueError(
            f"phase() needs a name of printable characters, found {name!r}. Pass a name such as "
            '"eval".'
        )
    return Phase(name)


class Phase(ContextDecorator, AbstractContextManager[None]):
    """Context manager and decorator that `phase` returns."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        timer = current_session("phase").timer
        timer.begin(timer.make_phase_key(self._name))

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A generator that was suspended in the phase may be closed after the run.
        with contextlib.suppress(RuntimeError):
            timer = current_session("phase").timer
            timer.end(timer.make_phase_key(self._name))

    def __repr__(self) -> str:
        return f"phase({self._name!r})"


def step() -> None:
    """Count a training step, for the times per step in `drawbar show --ranks` and the goodput.

    Call it at the end of each step, on every rank. It only increases a counter of this process.
    Without calls of this function, each report counts as a step.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> for batch in loader:
        ...     train_step(batch)
        ...     train.step()
    """
    current_session("step").timer.on_step()


def measure_data_wait(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches, and measure how long the training function waits for each of them.

    For data loaders of integrations. Waiting for data is shown in the goodput of the run. Outside a
    training function, and in other threads of the process, nothing is measured.

    Args:
        batches: Batches of a data loader.

    Returns:
        An iterator over the batches.

    Example:
        >>> for batch in measure_data_wait(loader):
        ...     train_step(batch)
    """
    try:
        timer = current_session("measure_data_wait").timer
    except RuntimeError:
        return iter(batches)
    return timer.measure_items("data_wait", batches)


def get_forward_callback() -> Callable[[float], None]:
    """Return the function that receives the duration of each forward pass in seconds.

    In data-parallel training, all ranks end the backward pass together. Only the time of the
    forward pass shows which rank computes slowly.

    Returns:
        A function that adds a duration to the times of this rank.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> add_forward_seconds = get_forward_callback()
        >>> add_forward_seconds(0.012)
    """
    return current_session("get_forward_callback").timer.add_forward


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
