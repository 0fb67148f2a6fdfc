"""Run user callbacks and the hooks of the backend outside the controller's event loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from drawbar._process.errors import load_exceptions
from drawbar._process.threads import DaemonThreadPool, run_in_daemon_thread
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records import events, live_events
from drawbar._records.event_stream import Emit
from drawbar.train._config.backend import Backend, BackendConfig
from drawbar.train._config.run_config import AttemptInfo, RunContext, RunEndInfo, UserCallback
from drawbar.train._worker_group.worker_group import WorkerGroup
from drawbar.train.events import Event as PublicEvent

DRAIN_NOTICE_S = 5.0
"""Time that the end of a run waits for callbacks before it emits a notice."""

_IGNORE_EVENT = UserCallback.on_event

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
        self._attempt_started: events.AttemptStarted | None = None
        self._has_ended = False

    def on_run_start(self) -> None:
        """Submit the calls for the start of the run."""
        for callback in self._callbacks:
            self._submit(callback.on_run_start)

    def on_event(self, event: live_events.Event) -> None:
        """Submit the calls for an event. Exceptions of workers are unpickled on the thread."""
        if isinstance(event, events.AttemptStarted):
            self._attempt_started = event
        for callback in self._callbacks:
            # Most callbacks do not override it, and there may be thousands of events per second.
            is_overridden = getattr(callback.on_event, "__func__", None) is not _IGNORE_EVENT
            if is_overridden and isinstance(event, PublicEvent):
                self._submit(callback.on_event, event)
            match event:
                case events.WorkersStarted() if self._attempt_started is not None:
                    info = _describe_attempt(self._attempt_started, len(event.workers))
                    self._submit(callback.on_attempt_start, info)
                case live_events.RoundCompleted():
                    # Use a thread: user code that uploads or sends mail must not block the event
                    # loop, which commits the checkpoints of all ranks.
                    self._submit(callback.after_report, list(event.metrics), event.checkpoint)
                case live_events.WorkersFailed() if event.cause != "resize":
                    self._thread.submit(self._call_after_exception, callback, event.failures)
                case events.PreemptionAnnounced():
                    self._submit(callback.on_preemption, event.info)
                case events.HealthDecided():
                    self._submit(callback.after_health_decision, event.decision)
                # The controller can still fail after the event for the end of the run.
                case events.RunEnded() | live_events.ControllerFailed() if not self._has_ended:
                    self._submit(callback.on_run_end, _describe_end(event))
                case _:
                    pass
        self._has_ended |= isinstance(event, events.RunEnded | live_events.ControllerFailed)

    def _call_after_exception(
        self, callback: UserCallback, failures: Sequence[WorkerFailure]
    ) -> None:
        self._call(callback.after_exception, load_exceptions(failures))

    def _submit(self, method: Callable[..., None], *args: object) -> None:
        self._thread.submit(self._call, method, *args)

    def _call(self, method: Callable[..., None], *args: object) -> None:
        # The user may have set another callable, without a name.
        name = self._current_callback = getattr(method, "__qualname__", "") or repr(method)
        try:
            method(self._context, *args)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            key = name, repr(error)
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
                live_events.Notice(
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


def _describe_attempt(start: events.AttemptStarted, num_workers: int) -> AttemptInfo:
    return AttemptInfo(
        attempt=start.attempt,
        num_workers=num_workers,
        first_report_index=start.first_report_index,
        resume_checkpoint=start.resume_checkpoint,
    )


def _describe_end(event: events.RunEnded | live_events.ControllerFailed) -> RunEndInfo:
    status = "failed" if isinstance(event, live_events.ControllerFailed) else event.outcome
    return RunEndInfo(status=status, error=event.error)


class BackendHooks:
    """Hooks of a backend for the workers of a group.

    Args:
        config: Backend configuration.
        group: Workers.
        emit: Callback that publishes events.
    """

    def __init__(self, config: BackendConfig, group: WorkerGroup, emit: Emit) -> None:
        self._config = config
        self._group = group
        self._emit = emit
        self._backend: Backend = config.backend_cls()

    @property
    def can_reuse_processes(self) -> bool:
        """True if the backend can be set up again in the same process after a failure."""
        return self._backend.can_reuse_processes

    async def run_start_hooks(self) -> None:
        """Run `on_start` and `on_training_start`.

        Raises:
            Exception: A hook failed.
        """
        # Use a thread: a hook blocks on calls to workers, whose messages the event loop must handle
        # meanwhile.
        await run_in_daemon_thread(self._set_up)

    def _set_up(self) -> None:
        self._backend.on_start(self._group, self._config)
        self._backend.on_training_start(self._group, self._config)

    async def run_shutdown_hook(self) -> None:
        """Run `on_shutdown`. An error only causes a notice, since the attempt has ended."""
        await run_in_daemon_thread(self._shut_down)

    def _shut_down(self) -> None:
        try:
            self._backend.on_shutdown(self._group, self._config)
        except Exception as error:
            name = type(self._backend).__name__
            self._emit(live_events.Notice(f"{name}.on_shutdown failed: {error!r}"))
