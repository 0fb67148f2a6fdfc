"""Observers of a run. They only watch: what one raises is logged, and the run goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from drawbar.train._config.run_config import RunContext, UserCallback
from drawbar.train._errors import WorkerFailure, load_exceptions
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import (
    Event,
    Notice,
    PreemptionAnnounced,
    RoundCompleted,
    WorkersFailed,
)
from drawbar.train._threads import DaemonThreadPool

DRAIN_NOTICE_S = 5.0
"""So long the end of a run waits for callbacks without a word."""

_logger = logging.getLogger("drawbar.train")


class CallbackRunner:
    """Calls the user's callbacks in order, on one thread."""

    def __init__(self, callbacks: Sequence[UserCallback], context: RunContext) -> None:
        self._callbacks = callbacks
        self._context = context
        self._thread = DaemonThreadPool(1, "drawbar-callbacks")
        self._logged_errors = set[tuple[str, str]]()
        self._current_callback = ""
        self._drained = threading.Event()

    def on_event(self, event: Event) -> None:
        """Tell every callback what it is for. Exceptions are unpickled on their thread."""
        for each in self._callbacks:
            match event:
                case RoundCompleted():
                    # In a thread: user code that uploads or sends mail must not hold the event
                    # loop, and with it every rank's commits.
                    self._submit(each.after_report, event.metrics, event.checkpoint)
                case WorkersFailed() if event.cause != "resize":
                    self._thread.submit(self._call_after_exception, each, event.failures)
                case PreemptionAnnounced():
                    self._submit(each.on_preemption, event.info)
                case _:
                    pass

    def _call_after_exception(
        self, callback: UserCallback, failures: Sequence[WorkerFailure]
    ) -> None:
        self._call(callback.after_exception, load_exceptions(failures))

    def _submit(self, method: Callable[..., None], *args: object) -> None:
        self._thread.submit(self._call, method, *args)

    def _call(self, method: Callable[..., None], *args: object) -> None:
        self._current_callback = method.__qualname__
        try:
            method(self._context, *args)
        except Exception as error:
            name, what = method.__qualname__, repr(error)
            if (
                name,
                what,
            ) in self._logged_errors:  # at every report, say: one traceback tells it all
                return
            self._logged_errors.add((name, what))
            _logger.exception("callback %s failed; the run goes on, and this is said once", name)

    def drain(self, emit: Emit) -> None:
        """Wait until every call has been made, or `give_up`; tell what is waited for."""
        if not self._callbacks:
            return
        last = self._thread.submit(self._drained.set)
        wait([last], DRAIN_NOTICE_S)  # whoever gives up: what is about to return is not lost
        if not last.done():
            waited_for = f"waiting for callback {self._current_callback}, which has not returned"
            emit(Notice(f"{waited_for}; stop() or Ctrl-C gives up on it"))
            self._drained.wait()
        self.close()

    def close(self) -> None:
        """Make no call any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def stop_waiting(self) -> None:
        """Have `finish` wait no longer than it does without a word."""
        self._drained.set()
