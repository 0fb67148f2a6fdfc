"""The actor that hosts a run which outlives its driver, or whose driver is a Ray Client.

It has a `Host`, and those who follow it (`hosted_run.py`). A follower asks for what happens next,
and the answer comes when something does, or after a second: a long poll, since Ray Client has no
streams. It also tells a client's host that the client is still there: Ray itself would give it half
a minute.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from drawbar.train._controller.run import RunOutcome, RunSpec
from drawbar.train._driver.controller_thread import ControllerThread, start_ray_run
from drawbar.train._driver_env import DriverEnvironment
from drawbar.train._handle.relay import Position, Relay
from drawbar.train._history.events import Event
from drawbar.train._history.timeline import RunState
from drawbar.train._serialization import Serialized, serialize, serialize_without_references
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.run_files import OUTCOME_FILE
from drawbar.train._worker.worker_env import get_runtime_env_vars
from drawbar.train._worker_group.cluster import is_process_dead

POLL_SECONDS = 1.0
CLIENT_TIMEOUT_S = 10.0
"""How long a client may be silent before it counts as gone."""
DETACHED_CLIENT_TIMEOUT_S = 3.0
"""How long another follower may be: it finds the ending in the run's directory."""
START_TIMEOUT_S = 60.0
"""How long a driver may take from making the actor to giving it its run."""

_logger = logging.getLogger("drawbar.train")


@dataclass(frozen=True)
class HostedRunInfo:
    """What does not change while a run is hosted. `level`: of its console."""

    directory: RunDirectory
    level: int
    detached: bool


@dataclass(frozen=True)
class EventBatch:
    """What has happened since a position. `ending`: the packed `Ending`, when the run is over."""

    events: Sequence[Event]
    position: Position
    ending: Serialized | None


class HostActor:
    """Hosts one run. It ends with the run, as soon as all that follow it know how that ended."""

    def __init__(
        self,
        environment: Mapping[str, str],
        surroundings: DriverEnvironment,
        detached: bool,
        driver: str,
    ) -> None:
        os.environ.update({**environment, **get_runtime_env_vars()})
        self._driver_env_context = surroundings.apply()
        self._driver_env_context.__enter__()  # until this process ends
        self._detached = detached
        self._event_buffer = Relay()
        self._followers = _ClientHeartbeats(
            DETACHED_CLIENT_TIMEOUT_S if detached else CLIENT_TIMEOUT_S
        )
        self._host: ControllerThread | None = None
        self._facts: HostedRunInfo | None = None
        self._driver = driver  # its process, as Ray knows it
        self._start_lock = threading.Lock()
        self._started = threading.Event()
        self._ending: Serialized | None = None
        threading.Thread(target=self._supervise, name="drawbar-attend", daemon=True).start()

    def start_run(self, packed: Serialized) -> HostedRunInfo:
        """Check, open and start the run."""
        with self._start_lock:
            spec: RunSpec = packed.deserialize()
            spec.backend_config.check_requirements(spec.scaling_config)
            self._host = start_ray_run(spec, lambda path: self._event_buffer)
            level = spec.run_config.logging_config.level_number
            self._facts = HostedRunInfo(self._host.directory, level, self._detached)
            self._followers.record(_STARTER_ID)
            self._started.set()
            return self._facts

    def get_info(self) -> HostedRunInfo:
        """Say what is hosted, as soon as it has begun."""
        self._started.wait(START_TIMEOUT_S)
        assert self._facts is not None  # it has begun
        return self._facts

    def poll_events(self, client_id: str, position: Position | None) -> EventBatch:
        """Give what has happened since then; waits for something to happen, but not long."""
        self._followers.record(client_id)
        ending = self._ending  # before the events: none comes after it
        events, position = self._event_buffer.since(position, POLL_SECONDS)
        # Once more, since the wait took up to a second, and the time of silence counts from the
        # answer.
        self._followers.record(client_id)
        return EventBatch(events, position, ending)

    def disconnect(self, client_id: str) -> None:
        """Take note that a follower leaves.

        It says so itself, when the ending has arrived: answers that are still under way end with
        this actor.
        """
        self._followers.remove(client_id)

    # -- what its followers ask of the run

    def stop(self, save: bool) -> None:
        """End the run in order."""
        self._get_controller_thread().stop(save=save)

    def kill(self) -> None:
        """End the run at once."""
        self._get_controller_thread().kill()

    def diagnose(self) -> str:
        """Say where every rank stands."""
        return self._get_controller_thread().diagnose()

    def snapshot(self) -> RunState:
        """Say how the run stands."""
        return self._get_controller_thread().snapshot()

    def read_log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        return self._get_controller_thread().read_log(rank)

    def has_ended(self) -> bool:
        """Whether the run has ended, or never begins, and this actor is about to end."""
        return self._ending is not None or self._is_orphaned()

    def block_until_killed(self) -> None:
        """Never return: the caller learns when this actor has ended."""
        threading.Event().wait()

    def _get_controller_thread(self) -> ControllerThread:
        self._started.wait(START_TIMEOUT_S)
        assert self._host is not None  # it has begun
        return self._host

    # -- its life

    def _supervise(self) -> None:
        """See the run to its end, then end this actor."""
        try:
            if self._wait_for_start():
                host = self._get_controller_thread()
                # A client's run ends with the client, as any run does with its driver.
                if not self._detached:
                    threading.Thread(target=self._stop_without_clients, daemon=True).start()
                host.join()
                self._store_outcome(host.ending())
                self._followers.wait_until_empty()
        finally:
            # `ray.actor.exit_actor()` raises an exception, which would end this thread alone.
            ray.kill(ray.get_runtime_context().current_actor)

    def _wait_for_start(self) -> bool:
        """Wait until the run has begun; tells whether it has."""
        until = time.monotonic() + START_TIMEOUT_S
        while not self._started.wait(POLL_SECONDS):
            if self._is_orphaned() or time.monotonic() > until:
                return False
        return True

    def _is_orphaned(self) -> bool:
        """Whether the driver has gone before it gave this actor its run."""
        waits = not self._started.is_set() and not self._start_lock.locked()
        return waits and is_process_dead(self._driver)

    def _stop_without_clients(self) -> None:
        self._followers.wait_until_empty()
        self._get_controller_thread().stop(save=False)

    def _store_outcome(self, ending: RunOutcome) -> None:
        if self._detached:
            try:
                self._get_controller_thread().directory.run_files.write(
                    OUTCOME_FILE, ending.serialize(serialize_without_references)
                )
            except OSError as error:
                _logger.warning("the return values are not kept: %s", error)
        self._ending = ending.serialize(serialize)
        self._event_buffer.release()


_STARTER_ID = "starter"
"""Who has begun the run, until the first one follows it."""


class _ClientHeartbeats:
    """Who follows a run. One that is silent for longer than `patience` seconds is gone."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard: dict[str, float] = {}  # when each was last heard of
        self._changed = threading.Condition()

    def record(self, follower: str) -> None:
        """Take note that one is there."""
        with self._changed:
            self._heard[follower] = time.monotonic()
            if follower != _STARTER_ID:
                self._heard.pop(_STARTER_ID, None)

    def remove(self, follower: str) -> None:
        """Take note that one leaves."""
        with self._changed:
            self._heard.pop(follower, None)
            self._changed.notify_all()

    def wait_until_empty(self) -> None:
        """Wait until nobody is there any more."""
        with self._changed:
            while self._heard:
                left = max(self._heard.values()) + self._patience - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)
