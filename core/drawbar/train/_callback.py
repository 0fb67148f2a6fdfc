"""Observers of a run. They only watch: what one raises is logged, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drawbar.train._errors import WorkerFailure, exceptions_of

if TYPE_CHECKING:  # what a callback is given; RunConfig takes callbacks itself
    from drawbar.train._checkpoint import Checkpoint
    from drawbar.train._config import RunConfig
    from drawbar.train._preemption import PreemptionInfo
    from drawbar.train._scaling import ScalingConfig

_logger = logging.getLogger("drawbar.train")


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Which run a callback watches."""

    name: str
    run_id: str
    path: str
    scaling_config: ScalingConfig
    run_config: RunConfig


class UserCallback:
    """Subclass it and pass instances as `RunConfig(callbacks=[...])`.

    The methods are called in the process of the controller, one after the other in the order of
    events, on a thread of their own: a slow one delays later calls, never the training.
    """

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Run when every rank has made its k-th report and its checkpoint, if any, is committed.

        `metrics` has one entry per rank, in rank order.
        """

    def on_preemption(self, run_context: RunContext, info: PreemptionInfo) -> None:
        """Run when nodes of this run are about to be taken away."""

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Run when an attempt has failed, also if another one follows. Maps rank to exception."""


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
