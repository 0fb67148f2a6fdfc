"""Signals of the process that waits for a run."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a program that SIGTERM ended, as in a shell."""


@contextlib.contextmanager
def diagnose_on_signal(diagnose: Callable[[], str]) -> Iterator[None]:
    """Call `diagnose` when this process receives SIGUSR1, unless the signal has a handler."""
    if not _is_main_thread() or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    # In a thread: the handler runs between two lines of the main thread, which may hold a lock
    # that `diagnose` needs.
    signal.signal(signal.SIGUSR1, lambda number, frame: threading.Thread(target=diagnose).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@contextlib.contextmanager
def stop_on_sigterm(
    stop: Callable[[], object], *, is_detached: bool
) -> Iterator[Callable[[], bool]]:
    """Stop the run when this process receives SIGTERM, and exit when it has ended.

    Schedulers send SIGTERM before they kill a job. A handler of the user is kept; Ray's is not,
    because it exits at once. A second SIGTERM has the previous effect. A detached run continues.

    Args:
        stop: Stops the run.
        is_detached: Whether the run continues when this process ends.

    Yields:
        Function that returns whether SIGTERM has arrived.

    Raises:
        SystemExit: The process has received SIGTERM, and the run has ended.
    """
    previous = signal.getsignal(signal.SIGTERM)
    is_users = previous is not signal.SIG_DFL and not _is_handler_of_ray(previous)
    if not _is_main_thread() or is_detached or is_users:
        yield lambda: False
        return
    has_arrived = False

    def stop_and_print() -> None:
        stop()
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed, or stderr is
            print("SIGTERM: stopping the run.", file=sys.stderr, flush=True)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        nonlocal has_arrived
        has_arrived = True
        signal.signal(signal.SIGTERM, previous)
        # In a thread: the main thread may be printing, or hold a lock that `stop` needs.
        threading.Thread(target=stop_and_print).start()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield lambda: has_arrived
    finally:
        if signal.getsignal(signal.SIGTERM) is on_sigterm:
            signal.signal(signal.SIGTERM, previous)
        if has_arrived:
            sys.exit(SIGTERM_EXIT_CODE)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_handler_of_ray(handler: object) -> bool:
    return getattr(handler, "__module__", "").startswith("ray.")
