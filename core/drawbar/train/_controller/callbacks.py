"""Observers of a run. They only watch: what one raises is logged, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from drawbar.train._errors import WorkerFailure, exceptions_of
from drawbar.train._history.events import (
    Event,
    PreemptionAnnounced,
    RoundReported,
    WorkersFailed,
)
from drawbar.train._settings.run_config import RunContext, UserCallback
from drawbar.train._threads import DaemonThreads

_logger = logging.getLogger("drawbar.train")


class Callbacks:
    """Calls the user's callbacks in order, on one thread."""

    def __init__(self, callbacks: Sequence[UserCallback], context: RunContext) -> None:
        self._callbacks = callbacks
        self._context = context
        self._thread = DaemonThreads(1, "drawbar-callbacks")
        self._said = set[tuple[str, str]]()

    def note(self, event: Event) -> None:
        """Tell every callback what it is for. Exceptions are unpickled on their thread."""
        for each in self._callbacks:
            match event:
                case RoundReported():
                    # In a thread: user code that uploads or sends mail must not hold the event
                    # loop, and with it every rank's commits.
                    self._submit(each.after_report, event.metrics, event.checkpoint)
                case WorkersFailed() if event.end != "resize":
                    self._thread.submit(self._call_after_exception, each, event.failures)
                case PreemptionAnnounced():
                    self._submit(each.on_preemption, event.info)
                case _:
                    pass

    def _call_after_exception(
        self, callback: UserCallback, failures: Sequence[WorkerFailure]
    ) -> None:
        self._call(callback.after_exception, exceptions_of(failures))

    def _submit(self, method: Callable[..., None], *args: object) -> None:
        self._thread.submit(self._call, method, *args)

    def _call(self, method: Callable[..., None], *args: object) -> None:
        try:
            method(self._context, *args)
        except Exception as error:
            name, what = method.__qualname__, repr(error)
            if (name, what) in self._said:  # at every report, say: one traceback tells it all
                return
            self._said.add((name, what))
            _logger.exception("callback %s failed; the run goes on, and this is said once", name)

    def close(self) -> None:
        """Wait until every call has been made."""
        self._thread.shutdown(wait=True)
