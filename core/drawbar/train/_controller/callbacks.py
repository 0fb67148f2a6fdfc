"""Run user callbacks in order on one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from drawbar.train._config.run_config import RunContext, UserCallback
from drawbar.train._errors import load_exceptions
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import (
    Event,
    Notice,
    PreemptionAnnounced,
    RoundCompleted,
    WorkersFailed,
)
from drawbar.train._threads import DaemonThreadPool
from drawbar.train._worker_failure import WorkerFailure

DRAIN_NOTICE_S = 5.0
"""Time that the end of a run waits for callbacks before it emits a notice."""

_logger = logging.getLogger("drawbar.train")


class CallbackRunner:
    """Run the user's callbacks in order on one thread. Their exceptions are only logged.

    Args:
        callbacks: Callbacks of the run.
        context: Description of the run that callbacks receive.
    """

    def __init__(self, callbacks: Sequence[UserCallback], context: RunContext) -> None:
        self._callbacks = callbacks
        self._context = context
        self._thread = DaemonThreadPool(1, "drawbar-callbacks")
        self._logged_errors = set[tuple[str, str]]()
        self._current_callback = ""
        self._drained = threading.Event()

    def on_event(self, event: Event) -> None:
        """Submit the calls for an event. Exceptions of workers are unpickled on the thread."""
        for callback in self._callbacks:
            match event:
                case RoundCompleted():
                    # Use a thread: user code that uploads or sends mail must not block the event
                    # loop, which commits the checkpoints of all ranks.
                    self._submit(callback.after_report, event.metrics, event.checkpoint)
                case WorkersFailed() if event.cause != "resize":
                    self._thread.submit(self._call_after_exception, callback, event.failures)
                case PreemptionAnnounced():
                    self._submit(callback.on_preemption, event.info)
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
            key = method.__qualname__, repr(error)
            # Log each error once: it may be raised at every report.
            if key in self._logged_errors:
                return
            self._logged_errors.add(key)
            _logger.exception(
                "Callback %s failed. The run continues, and this error is logged only once.", key[0]
            )

    def drain(self, emit: Emit) -> None:
        """Wait until every submitted call has returned, or until `stop_waiting()`.

        Args:
            emit: Receives a notice if this takes longer than `DRAIN_NOTICE_S`.
        """
        if not self._callbacks:
            return
        last = self._thread.submit(self._drained.set)
        # Wait this long even after `stop_waiting()`, so that calls that are about to return finish.
        wait([last], DRAIN_NOTICE_S)
        if not last.done():
            emit(
                Notice(
                    f"Waiting for callback {self._current_callback}, which has not returned. Call "
                    "stop() or press Ctrl-C to stop waiting."
                )
            )
            self._drained.wait()
        self.close()

    def close(self) -> None:
        """Cancel all calls that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def stop_waiting(self) -> None:
        """Make `drain()` return without waiting beyond `DRAIN_NOTICE_S`."""
        self._drained.set()
