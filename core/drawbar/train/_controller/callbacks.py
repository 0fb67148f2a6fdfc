"""Observers of a run. They only watch: what one raises is logged, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from drawbar.train._errors import WorkerFailure, exceptions_of
from drawbar.train._settings.run_config import RunContext, UserCallback

if TYPE_CHECKING:
    from drawbar.train._messages import PreemptionInfo
    from drawbar.train._storage.checkpoint import Checkpoint

_logger = logging.getLogger("drawbar.train")


class Callbacks:
    """Calls the user's callbacks in order, on one thread."""

    def __init__(self, callbacks: Sequence[UserCallback], context: RunContext) -> None:
        self._callbacks = callbacks
        self._context = context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drawbar-callbacks")

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def after_report(self, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        """Tell every callback of a complete round of reports."""
        for each in self._callbacks:
            self._submit(each.after_report, metrics, checkpoint)

    def after_exception(self, failures: Sequence[WorkerFailure]) -> None:
        """Tell every callback of a failed attempt; exceptions are unpickled on their thread."""
        for each in self._callbacks:
            self._thread.submit(self._call_after_exception, each, failures)

    def _call_after_exception(
        self, callback: UserCallback, failures: Sequence[WorkerFailure]
    ) -> None:
        self._call(callback.after_exception, exceptions_of(failures))

    def on_preemption(self, info: PreemptionInfo) -> None:
        """Tell every callback that nodes are about to go."""
        for each in self._callbacks:
            self._submit(each.on_preemption, info)

    def _submit(self, method: Callable[..., None], *args: Any) -> None:
        self._thread.submit(self._call, method, *args)

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        try:
            method(self._context, *args)
        except Exception:
            _logger.exception("callback %s failed; the run goes on", method.__qualname__)

    def close(self) -> None:
        """Wait until every call has been made."""
        self._thread.shutdown(wait=True)
