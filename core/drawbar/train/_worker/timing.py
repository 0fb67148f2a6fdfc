"""Functions for use in the training function that mark phases and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import TypeVar

from drawbar.train._worker.active_session import current_session

T = TypeVar("T")


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
