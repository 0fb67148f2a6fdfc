"""Actor that runs the controller of a detached or Ray Client run.

The actor has an `InProcessRun` and clients (`host_actor_run.py`). A client requests the next
events and receives a reply when there are some, or after a second. This is long polling, because
Ray Client has no streams. Polling also shows that the client is alive: Ray itself needs half a
minute to detect a dead client.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray

from drawbar._base.ray_compat import is_worker_process_dead
from drawbar._handle.in_process_run import InProcessRun
from drawbar._handle.run_outcome import RunOutcome
from drawbar._modes.event_buffer import EventBuffer, EventPosition
from drawbar._modes.start_run import start_ray_run
from drawbar._process.driver_env import DriverEnvironment
from drawbar._process.serialization import Serialized, serialize, serialize_without_references
from drawbar._process.worker_env import get_runtime_env_vars
from drawbar._records.event_stream import Watcher
from drawbar._records.live_events import Event
from drawbar._records.timeline import RunState
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.run_files import OUTCOME_FILE
from drawbar.train._controller.run import MakeWatcher, RunSpec

POLL_SECONDS = 1.0
CLIENT_TIMEOUT_S = 10.0
"""Time without a poll after which a client counts as dead."""
DETACHED_CLIENT_TIMEOUT_S = 3.0
"""The same for a client of a detached run, which can read the outcome from the run directory."""
START_TIMEOUT_S = 60.0
"""Time in which a driver must start its run after it has created the actor."""

_logger = logging.getLogger("drawbar.train")


MakeConsole = Callable[[str], Watcher]


@dataclass(frozen=True)
class HostedRun:
    """A run, and how it is watched.

    Attributes:
        spec: The run.
        watchers: Create watchers in the host actor.
        make_console: Creates the console of each client from the path of the run.
    """

    spec: RunSpec
    watchers: Sequence[MakeWatcher]
    make_console: MakeConsole


@dataclass(frozen=True)
class HostedRunInfo:
    """Constant information about a hosted run.

    Attributes:
        directory: Run directory.
        make_console: Creates the console of a client from the path of the run.
        is_detached: Whether the run is detached.
    """

    directory: RunDirectory
    make_console: MakeConsole
    is_detached: bool


@dataclass(frozen=True)
class EventBatch:
    """Events after a position.

    Attributes:
        events: The events.
        position: Position after the last event.
        outcome: Serialized `RunOutcome` of a run that has ended.
    """

    events: Sequence[Event]
    position: EventPosition
    outcome: Serialized | None


class HostActor:
    """Host of one run. Ends after the run, as soon as all clients know its outcome."""

    def __init__(
        self,
        env_vars: Mapping[str, str],
        driver_env: DriverEnvironment,
        is_detached: bool,
        driver_id: str,
    ) -> None:
        os.environ.update({**env_vars, **get_runtime_env_vars()})
        self._driver_env_context = driver_env.apply()
        self._driver_env_context.__enter__()  # never exited: applies until this process ends
        self._is_detached = is_detached
        self._event_buffer = EventBuffer()
        self._clients = _ClientHeartbeats(
            DETACHED_CLIENT_TIMEOUT_S if is_detached else CLIENT_TIMEOUT_S
        )
        self._controller_thread: InProcessRun | None = None
        self._info: HostedRunInfo | None = None
        self._driver_id = driver_id  # Ray's ID of the driver process
        self._start_lock = threading.Lock()
        self._started = threading.Event()
        self._outcome: Serialized | None = None
        threading.Thread(target=self._supervise, name="drawbar-attend", daemon=True).start()

    def start_run(self, serialized: Serialized) -> HostedRunInfo:
        """Check, open, and start the run."""
        with self._start_lock:
            hosted: HostedRun = serialized.deserialize()
            spec = hosted.spec
            spec.backend_config.check_requirements(spec.scaling_config)
            watchers = [lambda run, emit: self._event_buffer, *hosted.watchers]
            self._controller_thread = start_ray_run(spec, watchers=watchers)
            self._info = HostedRunInfo(
                self._controller_thread.directory, hosted.make_console, self._is_detached
            )
            self._clients.record(_STARTER_ID)
            self._started.set()
            return self._info

    def get_info(self) -> HostedRunInfo:
        """Return information about the run as soon as it has started."""
        self._started.wait(START_TIMEOUT_S)
        assert self._info is not None
        return self._info

    def poll_events(self, client_id: str, position: EventPosition | None) -> EventBatch:
        """Return the events after a position. Waits up to `POLL_SECONDS` for the first one."""
        self._clients.record(client_id)
        # Read first: all events are emitted before the outcome is stored. A batch with an outcome
        # therefore also has the last events.
        outcome = self._outcome
        events, position = self._event_buffer.get_events_after(position, POLL_SECONDS)
        # Again, because the wait took up to a second, and the timeout counts from the reply.
        self._clients.record(client_id)
        return EventBatch(events, position, outcome)

    def disconnect(self, client_id: str) -> None:
        """Remove a client.

        A client calls this when it has received the outcome, because replies in transit are lost
        when this actor ends.
        """
        self._clients.remove(client_id)

    # -- requests of clients

    def stop(self, save: bool | None) -> None:
        """Stop the run. See `Controller.stop`."""
        self._get_controller_thread().stop(save=save)

    def kill(self) -> None:
        """Kill every process of the run immediately."""
        self._get_controller_thread().kill()

    def diagnose(self) -> str:
        """Return a description of what each rank is blocked in."""
        return self._get_controller_thread().diagnose()

    def get_state(self) -> RunState:
        """Return the current state of the run."""
        return self._get_controller_thread().get_state()

    def read_log(self, rank: int) -> bytes | None:
        """Return the output that a rank has written so far, or None if there is none."""
        return self._get_controller_thread().read_log(rank)

    def has_ended(self) -> bool:
        """Return whether the run has ended or will never start, so that this actor will end."""
        return self._outcome is not None or self._is_orphaned()

    def block_until_killed(self) -> None:
        """Block forever, so that the caller learns when this actor has ended."""
        threading.Event().wait()

    def _get_controller_thread(self) -> InProcessRun:
        self._started.wait(START_TIMEOUT_S)
        assert self._controller_thread is not None
        return self._controller_thread

    # -- lifetime

    def _supervise(self) -> None:
        """Wait until the run has ended, then end this actor."""
        try:
            if self._wait_for_start():
                host = self._get_controller_thread()
                # A run that is not detached must end with its driver, so it ends when it has no
                # clients.
                if not self._is_detached:
                    threading.Thread(target=self._stop_without_clients, daemon=True).start()
                host.join()
                self._store_outcome(host.get_outcome())
                self._clients.wait_until_empty()
        finally:
            # `ray.actor.exit_actor()` raises an exception, which would end only this thread.
            ray.kill(ray.get_runtime_context().current_actor)

    def _wait_for_start(self) -> bool:
        """Wait until the run has started and return whether it has."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._started.wait(POLL_SECONDS):
            if self._is_orphaned() or time.monotonic() > deadline:
                return False
        return True

    def _is_orphaned(self) -> bool:
        """Return whether the driver died before it started the run."""
        is_waiting = not self._started.is_set() and not self._start_lock.locked()
        return is_waiting and is_worker_process_dead(self._driver_id)

    def _stop_without_clients(self) -> None:
        self._clients.wait_until_empty()
        self._get_controller_thread().stop(save=False)

    def _store_outcome(self, outcome: RunOutcome) -> None:
        if self._is_detached:
            try:
                self._get_controller_thread().directory.run_files.write(
                    OUTCOME_FILE, outcome.serialize(serialize_without_references)
                )
            except OSError as error:
                _logger.warning("the return values could not be stored: %s", error)
        self._outcome = outcome.serialize(serialize)
        self._event_buffer.wake_clients()


_STARTER_ID = "starter"
"""Client ID of the driver that started the run, until the first client polls."""


class _ClientHeartbeats:
    """Clients of a run. A client that has not polled for `timeout` seconds counts as dead."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last_polls: dict[str, float] = {}  # by client ID
        self._changed = threading.Condition()

    def record(self, client_id: str) -> None:
        """Record that a client is alive."""
        with self._changed:
            self._last_polls[client_id] = time.monotonic()
            if client_id != _STARTER_ID:
                self._last_polls.pop(_STARTER_ID, None)

    def remove(self, client_id: str) -> None:
        """Remove a client that disconnects."""
        with self._changed:
            self._last_polls.pop(client_id, None)
            self._changed.notify_all()

    def wait_until_empty(self) -> None:
        """Wait until there are no live clients."""
        with self._changed:
            while self._last_polls:
                remaining = max(self._last_polls.values()) + self._timeout - time.monotonic()
                if remaining <= 0:
                    return
                self._changed.wait(remaining)
