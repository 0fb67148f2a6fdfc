"""Run the backend's hooks outside the controller's event loop."""

from __future__ import annotations

from drawbar.train._config.backend import Backend, BackendConfig
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker_group.worker_group import WorkerGroup


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
            self._emit(Notice(f"{name}.on_shutdown failed: {error!r}"))
