"""Signals of the process that waits for a run."""

from __future__ import annotations

import contextlib
import os
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


class FirstSignal:
    """Handler that calls a function in a thread when a signal arrives for the first time.

    It has a thread, because the main thread may be printing, or hold a lock that the function
    needs. A second signal has the previous effect.

    Args:
        number: Signal.
        on_arrival: Function to call.
        applies: Returns whether to call it. If not, the signal has the previous effect.

    Attributes:
        has_arrived: Whether the function was called.
    """

    def __init__(
        self,
        number: signal.Signals,
        on_arrival: Callable[[], object],
        applies: Callable[[], bool] = lambda: True,
    ) -> None:
        self._number = number
        self._on_arrival = on_arrival
        self._applies = applies
        self._first = threading.Lock()
        self.has_arrived = False
        self._previous = signal.signal(number, self)
        _active.append(self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal in the main thread, between two Python instructions."""
        if self.has_arrived or self._applies():
            self.on_arrival()
            self.restore()
        elif callable(self._previous):
            self._previous(number, frame)

    def on_arrival(self) -> None:
        """Call the function, unless it was called before. Can be called in any thread."""
        if self._first.acquire(blocking=False):
            self.has_arrived = True
            threading.Thread(target=self._on_arrival).start()

    @property
    def is_installed(self) -> bool:
        """False after the signal has arrived, or if the user has set another handler."""
        return signal.getsignal(self._number) is self

    def restore(self) -> None:
        """Restore the previous handler."""
        if self.is_installed:
            signal.signal(self._number, self._previous)

    def close(self) -> None:
        """End the use of this handler."""
        self.restore()
        _active.remove(self)


class SigtermReader:
    """Thread that handles SIGTERM while the main thread is in C code, such as a long NumPy call.

    The handler in the main thread runs only when the call returns. So Python also writes the number
    of each signal to a pipe (`signal.set_wakeup_fd`), which the thread reads. It forwards them to
    the file descriptor that the user has set, for example of an event loop.

    Args:
        handler: Handler of SIGTERM.
    """

    def __init__(self, handler: FirstSignal) -> None:
        self._handler = handler
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)  # required by `set_wakeup_fd`
        self._users_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="drawbar-sigterm", daemon=True)
        self._thread.start()
        _active.append(self)

    def _read(self) -> None:
        is_open = True
        while is_open:
            numbers = os.read(self._read_fd, 4096)
            is_open = _END not in numbers
            numbers = numbers.replace(_END, b"")
            if numbers and self._users_fd >= 0:
                with contextlib.suppress(OSError):  # full, or closed
                    os.write(self._users_fd, numbers)
            if signal.SIGTERM in numbers and self._handler.is_installed:
                self._handler.on_arrival()
        os.close(self._read_fd)

    def restore(self) -> None:
        """Restore the file descriptor of the user, unless the user has set another one since."""
        current = signal.set_wakeup_fd(self._users_fd)
        if current != self._write_fd:
            signal.set_wakeup_fd(current)

    def close(self) -> None:
        """Restore the file descriptor of the user, and end the thread."""
        self.restore()
        os.write(self._write_fd, _END)
        self._thread.join()
        os.close(self._write_fd)
        _active.remove(self)


_END = b"\0"  # no signal has this number
_active: list[FirstSignal | SigtermReader] = []


def _restore_in_child() -> None:
    """Restore the handlers in a forked child. Its signals do not concern the run."""
    while _active:
        _active.pop().restore()


os.register_at_fork(after_in_child=_restore_in_child)


@contextlib.contextmanager
def stop_on_signals(
    stop_after_sigterm: Callable[[], object],
    stop_after_ctrl_c: Callable[[], object],
    can_save: Callable[[], bool],
    wait_until_ended: Callable[[], object],
    *,
    is_detached: bool,
) -> Iterator[Callable[[], bool]]:
    """Stop the run at SIGTERM, and at Ctrl-C while a function in this thread can save.

    A detached run continues. A second signal has the previous effect. If a signal has arrived, the
    context ends when the run has ended.

    Args:
        stop_after_sigterm: Stops the run.
        stop_after_ctrl_c: Stops the run, and prints that.
        can_save: Returns whether a function in this thread saves on request.
        wait_until_ended: Returns when the run has ended. A signal may arrive when the caller has
            decided to leave the context.
        is_detached: Whether the run continues when this process ends.

    Yields:
        Function that returns whether one of the signals has stopped the run.

    Raises:
        SystemExit: The process has received SIGTERM, and the run has ended.
    """
    if is_detached or not _is_main_thread():
        yield lambda: False
        return
    with (
        _stop_on_sigterm(stop_after_sigterm, wait_until_ended) as has_sigterm,
        _stop_on_ctrl_c(stop_after_ctrl_c, can_save, wait_until_ended) as has_ctrl_c,
    ):
        yield lambda: has_sigterm() or has_ctrl_c()


@contextlib.contextmanager
def _stop_on_sigterm(
    stop: Callable[[], object], wait_until_ended: Callable[[], object]
) -> Iterator[Callable[[], bool]]:
    """Stop the run when this process receives SIGTERM, and exit when it has ended.

    Schedulers send SIGTERM before they kill a job. A handler of the user is kept; Ray's is not,
    because it exits at once.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if previous is not signal.SIG_DFL and not _is_handler_of_ray(previous):
        yield lambda: False
        return

    def stop_and_print() -> None:
        stop()
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed, or stderr is
            print("SIGTERM: stopping the run.", file=sys.stderr, flush=True)

    handler = FirstSignal(signal.SIGTERM, stop_and_print)
    reader = SigtermReader(handler)
    try:
        yield lambda: handler.has_arrived
    finally:
        reader.close()
        handler.close()
        if handler.has_arrived:
            wait_until_ended()
            sys.exit(SIGTERM_EXIT_CODE)


@contextlib.contextmanager
def _stop_on_ctrl_c(
    stop: Callable[[], object],
    can_save: Callable[[], bool],
    wait_until_ended: Callable[[], object],
) -> Iterator[Callable[[], bool]]:
    """Stop the run at Ctrl-C, if a function in this thread can save before it ends.

    Otherwise, and at the second Ctrl-C, Python raises `KeyboardInterrupt` in this thread. It also
    does so under a debugger, at whose prompt Ctrl-C does not end the program.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    handler = FirstSignal(signal.SIGINT, stop, lambda: sys.gettrace() is None and can_save())
    try:
        yield lambda: handler.has_arrived
    finally:
        handler.close()
        if handler.has_arrived:
            wait_until_ended()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_handler_of_ray(handler: object) -> bool:
    return getattr(handler, "__module__", "").startswith("ray.")
