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

from drawbar.train._carry import Carried, carry, keep
from drawbar.train._controller.run import Ending, RunSpec
from drawbar.train._group.cluster import process_is_gone
from drawbar.train._handle.relay import Position, Relay
from drawbar.train._history.events import Event
from drawbar.train._history.timeline import Snapshot
from drawbar.train._launch.host import Host, host_workers
from drawbar.train._storage.own_files import OUTCOME
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._surroundings import Surroundings
from drawbar.train._worker.environment import by_runtime_env

POLL_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""How long a client may be silent before it counts as gone."""
FAREWELL_SECONDS = 3.0
"""How long another follower may be: it finds the ending in the run's directory."""
START_SECONDS = 60.0
"""How long a driver may take from making the actor to giving it its run."""

_logger = logging.getLogger("drawbar.train")


@dataclass(frozen=True)
class RunFacts:
    """What does not change while a run is hosted. `level`: of its console."""

    directory: RunDirectory
    level: int
    detached: bool


@dataclass(frozen=True)
class News:
    """What has happened since a position. `ending`: the packed `Ending`, when the run is over."""

    events: Sequence[Event]
    position: Position
    ending: Carried | None


class HostActor:
    """Hosts one run. It ends with the run, as soon as all that follow it know how that ended."""

    def __init__(
        self,
        environment: Mapping[str, str],
        surroundings: Surroundings,
        detached: bool,
        driver: str,
    ) -> None:
        os.environ.update({**environment, **by_runtime_env()})
        self._in_surroundings = surroundings.entered()
        self._in_surroundings.__enter__()  # until this process ends
        self._detached = detached
        self._relay = Relay()
        self._followers = _Followers(FAREWELL_SECONDS if detached else SILENCE_SECONDS)
        self._host: Host | None = None
        self._facts: RunFacts | None = None
        self._driver = driver  # its process, as Ray knows it
        self._beginning = threading.Lock()
        self._begun = threading.Event()
        self._ending: Carried | None = None
        threading.Thread(target=self._attend, name="drawbar-attend", daemon=True).start()

    def begin(self, packed: Carried) -> RunFacts:
        """Check, open and start the run."""
        with self._beginning:
            spec: RunSpec = packed.unpack()
            spec.backend_config.preflight(spec.scaling_config)
            self._host = host_workers(spec, lambda path: self._relay)
            level = spec.run_config.logging_config.level
            self._facts = RunFacts(self._host.directory, level, self._detached)
            self._followers.heard_of(_STARTER)
            self._begun.set()
            return self._facts

    def facts(self) -> RunFacts:
        """Say what is hosted, as soon as it has begun."""
        self._begun.wait(START_SECONDS)
        assert self._facts is not None  # it has begun
        return self._facts

    def follow(self, follower: str, seen: Position | None) -> News:
        """Give what has happened since then; waits for something to happen, but not long."""
        self._followers.heard_of(follower)
        ending = self._ending  # before the events: none comes after it
        events, position = self._relay.since(seen, POLL_SECONDS)
        # Once more, since the wait took up to a second, and the time of silence counts from the
        # answer.
        self._followers.heard_of(follower)
        return News(events, position, ending)

    def leave(self, follower: str) -> None:
        """Take note that a follower leaves.

        It says so itself, when the ending has arrived: answers that are still under way end with
        this actor.
        """
        self._followers.forget(follower)

    # -- what its followers ask of the run

    def stop(self, save: bool) -> None:
        """End the run in order."""
        self._run().stop(save=save)

    def kill(self) -> None:
        """End the run at once."""
        self._run().kill()

    def diagnose(self) -> str:
        """Say where every rank stands."""
        return self._run().diagnose()

    def snapshot(self) -> Snapshot:
        """Say how the run stands."""
        return self._run().snapshot()

    def log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        return self._run().log(rank)

    def is_over(self) -> bool:
        """Whether the run has ended, or never begins, and this actor is about to end."""
        return self._ending is not None or self._is_abandoned()

    def outlive(self) -> None:
        """Never return: the caller learns when this actor has ended."""
        threading.Event().wait()

    def _run(self) -> Host:
        self._begun.wait(START_SECONDS)
        assert self._host is not None  # it has begun
        return self._host

    # -- its life

    def _attend(self) -> None:
        """See the run to its end, then end this actor."""
        try:
            if self._is_given_a_run():
                host = self._run()
                # A client's run ends with the client, as any run does with its driver.
                if not self._detached:
                    threading.Thread(target=self._end_with_the_client, daemon=True).start()
                host.join()
                self._keep(host.ending())
                self._followers.wait_until_gone()
        finally:
            # `ray.actor.exit_actor()` raises an exception, which would end this thread alone.
            ray.kill(ray.get_runtime_context().current_actor)

    def _is_given_a_run(self) -> bool:
        """Wait until the run has begun; tells whether it has."""
        until = time.monotonic() + START_SECONDS
        while not self._begun.wait(POLL_SECONDS):
            if self._is_abandoned() or time.monotonic() > until:
                return False
        return True

    def _is_abandoned(self) -> bool:
        """Whether the driver has gone before it gave this actor its run."""
        waits = not self._begun.is_set() and not self._beginning.locked()
        return waits and process_is_gone(self._driver)

    def _end_with_the_client(self) -> None:
        self._followers.wait_until_gone()
        self._run().stop(save=False)

    def _keep(self, ending: Ending) -> None:
        if self._detached:
            try:
                self._run().directory.files.write(OUTCOME, ending.packed(keep))
            except OSError as error:
                _logger.warning("the return values are not kept: %s", error)
        self._ending = ending.packed(carry)
        self._relay.release()


_STARTER = "starter"
"""Who has begun the run, until the first one follows it."""


class _Followers:
    """Who follows a run. One that is silent for longer than `patience` seconds is gone."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard: dict[str, float] = {}  # when each was last heard of
        self._changed = threading.Condition()

    def heard_of(self, follower: str) -> None:
        """Take note that one is there."""
        with self._changed:
            self._heard[follower] = time.monotonic()
            if follower != _STARTER:
                self._heard.pop(_STARTER, None)

    def forget(self, follower: str) -> None:
        """Take note that one leaves."""
        with self._changed:
            self._heard.pop(follower, None)
            self._changed.notify_all()

    def wait_until_gone(self) -> None:
        """Wait until nobody is there any more."""
        with self._changed:
            while self._heard:
                left = max(self._heard.values()) + self._patience - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)
