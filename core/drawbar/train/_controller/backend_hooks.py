"""The backend's part in an attempt: its hooks, called where they may block."""

from __future__ import annotations

from drawbar.train._config.backend import Backend, BackendConfig
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker_group.worker_group import WorkerGroup


class BackendHooks:
    """Has the workers of a group meet, and part, as their backend wants it."""

    def __init__(self, config: BackendConfig, group: WorkerGroup, emit: Emit) -> None:
        self._config = config
        self._group = group
        self._emit = emit
        self._backend: Backend = config.backend_cls()

    @property
    def can_reuse_processes(self) -> bool:
        """Whether a process can meet others once more after a failure."""
        return self._backend.can_reuse_processes

    async def run_start_hooks(self) -> None:
        """Have the workers meet.

        Raises:
            Exception: Whatever keeps them from it.
        """
        # A hook waits for what it has workers do, and the loop has to hear what they say meanwhile.
        await run_in_daemon_thread(self._set_up)

    def _set_up(self) -> None:
        self._backend.on_start(self._group, self._config)
        self._backend.on_training_start(self._group, self._config)

    async def run_shutdown_hook(self) -> None:
        """Have them part; what goes wrong is told, since the attempt is over anyway."""
        await run_in_daemon_thread(self._shut_down)

    def _shut_down(self) -> None:
        try:
            self._backend.on_shutdown(self._group, self._config)
        except Exception as error:
            name = type(self._backend).__name__
            self._emit(Notice(f"{name}.on_shutdown failed: {error!r}"))
