"""A run in an actor of its own: one that outlives its driver, or whose driver is a Ray Client.

`HostActor` is the actor: it has a `Host`, and those who follow it. `ActorRun` is what a follower
has in its own process. A follower asks for what happens next, and the answer comes when something
does, or after a second: a long poll, since Ray Client has no streams. It also tells a client's host
that the client is still there: Ray itself would give it half a minute.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar.train import _data, _placement
from drawbar.train._console import Console
from drawbar.train._ended_run import EndedRun
from drawbar.train._ending import Ending
from drawbar.train._errors import ControllerError
from drawbar.train._host import ENDS_WITH_THE_PROGRAM, EXIT_SECONDS, Host, Spawn
from drawbar.train._journal import JournalLockedError
from drawbar.train._relay import Call, Position, Relay
from drawbar.train._run import Outcome
from drawbar.train._snapshot import Snapshot
from drawbar.train._spec import Datasets, RunSpec
from drawbar.train._storage import OUTCOME, RunDirectory
from drawbar.train._validator import RayValidator
from drawbar.train._worker_group import RayWorkerGroup, WorkerGroup

NAMESPACE = "drawbar"
"""The Ray namespace in which every detached run has an actor of its name."""

POLL_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""How long a client may be silent before it counts as gone."""
FAREWELL_SECONDS = 3.0
"""How long another follower may be: it finds the ending in the run's directory."""
START_SECONDS = 60.0
"""How long a driver may take from making the actor to giving it its run."""

_THREADS = 32  # a follower holds one while it waits
_LOOK_SECONDS = 0.2

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

    calls: Sequence[Call]
    position: Position
    ending: bytes | None


class HostActor:
    """Hosts one run. It ends with the run, as soon as all that follow it know how that ended."""

    def __init__(
        self,
        environment: Mapping[str, str],
        working_directory: str,
        import_paths: Sequence[str],
        detached: bool,
    ) -> None:
        os.environ.update(environment)
        with contextlib.suppress(OSError):
            os.chdir(working_directory)
        sys.path += [path for path in import_paths if path not in sys.path]
        self._detached = detached
        self._relay = Relay()
        self._host: Host | None = None
        self._facts: RunFacts | None = None
        self._begun = threading.Event()
        self._ending: bytes | None = None
        self._followers: dict[str, float] = {}  # when each was last heard of
        self._lock = threading.Lock()
        threading.Thread(target=self._attend, name="drawbar-attend", daemon=True).start()

    def begin(self, packed: bytes, datasets: Datasets) -> RunFacts:
        """Check, open and start the run."""
        spec = RunSpec.unpacked(packed, datasets)
        spec.backend_config.preflight(spec.scaling_config)
        _placement.check_cluster(spec.scaling_config)
        lazy = _data.lazy(spec.datasets, spec.dataset_config)
        _placement.check_data(spec.scaling_config, lazy)
        if spec.validation is not None:
            _placement.check_validation(spec.validation.resources)

        def make_group(path: str, spawn: Spawn) -> WorkerGroup:
            runtime_env = spec.run_config.worker_runtime_env
            return RayWorkerGroup(spec.scaling_config, path, spec.payload, runtime_env)

        validator = RayValidator(spec.validation) if spec.validation is not None else None
        self._host = Host(spec, make_group, lambda path: self._relay, validator)
        level = spec.run_config.logging_config.level
        self._facts = RunFacts(self._host.directory, level, self._detached)
        self._heard_of("starter")
        self._begun.set()
        return self._facts

    def facts(self) -> RunFacts:
        """Say what is hosted, as soon as it has begun."""
        self._begun.wait(START_SECONDS)
        assert self._facts is not None  # it has begun
        return self._facts

    # -- its followers

    def follow(self, follower: str, seen: Position | None) -> News:
        """Give what has happened since then; waits for something to happen, but not long."""
        self._heard_of(follower)
        ending = self._ending  # before the calls: none comes after it
        calls, position = self._relay.since(seen, POLL_SECONDS)
        self._heard_of(follower)
        if ending is not None:
            self._forget(follower)
        return News(calls, position, ending)

    def _heard_of(self, follower: str) -> None:
        with self._lock:
            self._followers[follower] = time.monotonic()
            if follower != "starter":
                self._followers.pop("starter", None)

    def _forget(self, follower: str) -> None:
        with self._lock:
            self._followers.pop(follower, None)

    def _is_followed(self) -> bool:
        patience = FAREWELL_SECONDS if self._detached else SILENCE_SECONDS
        oldest = time.monotonic() - patience
        with self._lock:
            return any(heard > oldest for heard in self._followers.values())

    # -- what they ask of the run

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
        """Whether the run has ended, and this actor is about to."""
        return self._ending is not None

    def _run(self) -> Host:
        self._begun.wait(START_SECONDS)
        assert self._host is not None  # it has begun
        return self._host

    # -- its life

    def _attend(self) -> None:
        """See the run to its end, then end this actor."""
        try:
            if self._begun.wait(START_SECONDS):
                self._keep(self._see_to_its_end(self._run()))
                while self._is_followed():
                    time.sleep(_LOOK_SECONDS)
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def _see_to_its_end(self, host: Host) -> Ending:
        while not host.join(_LOOK_SECONDS):
            if not self._detached and not self._is_followed():
                host.stop(save=False)  # the client is gone
        return host.ending()

    def _keep(self, ending: Ending) -> None:
        packed = ending.packed()
        if self._detached:
            try:
                self._run().directory.write(OUTCOME, packed)
            except OSError as error:
                _logger.warning("the return values are not kept: %s", error)
        self._ending = packed
        self._relay.release()


class ActorRun:
    """A run in a `HostActor`, followed from this process: what it shows is shown here.

    Args:
        actor: The actor.
        facts: What it hosts.
        from_the_start: Show everything from the first line on, not only what comes from now on.
    """

    def __init__(self, actor: Any, facts: RunFacts, *, from_the_start: bool) -> None:
        self._actor = actor
        self._directory = facts.directory
        self._console = Console(facts.level, self.path)
        self._seen = Position(0, 0) if from_the_start else None
        self._ending: Ending | None = None
        self._over = threading.Event()
        self._let_go = False
        self.detached = facts.detached
        self._thread = threading.Thread(target=self._follow, name="drawbar-follow", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_the_program)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._directory.name

    @property
    def path(self) -> str:
        """Where the run lies."""
        return self._directory.location

    def _follow(self) -> None:
        follower = uuid.uuid4().hex
        try:
            while self._ending is None and not self._let_go:
                asked = self._actor.follow.remote(follower, self._seen)
                while not self._let_go:
                    if ray.wait([asked], timeout=POLL_SECONDS)[0]:
                        self._hear(ray.get(asked))
                        break
        except Exception as error:
            self._ending = self._lost(error)
        finally:
            self._console.close()
            atexit.unregister(self._end_with_the_program)
            self._over.set()

    def _hear(self, news: News) -> None:
        self._seen = news.position
        for method, arguments in news.calls:
            getattr(self._console, method)(*arguments)
        if news.ending is not None:
            self._ending = Ending.unpacked(news.ending)

    def _lost(self, error: Exception) -> Ending:
        """Look into the directory of a run whose host does not answer any more."""
        with contextlib.suppress(Exception):
            ended = EndedRun.find(self._directory)
            if ended is not None:
                return ended.ending()
        failed = ControllerError(
            f"the process that hosts the run does not answer any more: {error}\n\nrun directory: "
            f'{self.path}\nif it has ended, resume="auto" goes on from the newest checkpoint',
            error,
            path=self.path,
        )
        return Ending(Outcome(error=failed), Snapshot(status="failed"), None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; tells whether it is."""
        return self._over.wait(timeout)

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._ask("stop", save)

    def kill(self) -> None:
        """End every process of the run at once."""
        self._ask("kill")

    def diagnose(self) -> str:
        """Say where every rank stands."""
        return str(self._ask("diagnose") or "")

    def snapshot(self) -> Snapshot:
        """Say how the run stands, or stood at its end."""
        snapshot: Snapshot | None = self._ask("snapshot")
        return snapshot or self.ending().snapshot

    def log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        text: str | None = self._ask("log", rank)
        return EndedRun(self._directory).log(rank) if text is None else text

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor. None if the run is over."""
        if self._over.is_set():
            return None
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments))
        except RayTaskError as error:
            raise _unwrapped(error) from None
        except RayError:
            self._over.wait()  # the actor is gone, which the follower notices too
            return None

    def ending(self) -> Ending:
        """Give how the run ended."""
        self._over.wait()
        assert self._ending is not None  # it is over
        return self._ending

    def _end_with_the_program(self) -> None:
        """Stop following; a run that is not detached is stopped."""
        if not self.detached:
            self._console.notice(ENDS_WITH_THE_PROGRAM)
            self.stop(save=False)
            self._over.wait(EXIT_SECONDS)
        self._let_go = True
        self._thread.join(2 * POLL_SECONDS)  # Ray must not be shut down under it


def start_in_actor(spec: RunSpec) -> ActorRun:
    """Start a run in an actor of its own, on the node of this driver or of its Ray Client server.

    Raises:
        JournalLockedError: A run of this name goes on.
        Exception: Whatever keeps the run from starting.
    """
    actor = _make_actor(spec)
    try:
        facts = ray.get(actor.begin.remote(spec.packed(), dict(spec.datasets)))
    except RayTaskError as error:
        ray.kill(actor)
        raise _unwrapped(error) from None
    except BaseException:
        ray.kill(actor)
        raise
    return ActorRun(actor, facts, from_the_start=True)


def _make_actor(spec: RunSpec) -> Any:
    detached = spec.run_config.detached
    node = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_concurrency": _THREADS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
    }
    if spec.run_config.worker_runtime_env:
        options["runtime_env"] = dict(spec.run_config.worker_runtime_env)
    if detached:
        _make_way(spec.name)
        options |= {"name": spec.name, "namespace": NAMESPACE, "lifetime": "detached"}
    try:
        return (
            ray.remote(HostActor)
            .options(**options)
            .remote(spec.environment, spec.working_directory, spec.import_paths, detached)
        )
    except ValueError as error:  # another one was faster
        raise _taken(spec.name) from error


def _make_way(name: str) -> None:
    """Refuse a name that a run has; wait for a host whose run is over already."""
    actor = hosted_run(name)
    if actor is None:
        return
    with contextlib.suppress(RayError):
        if not ray.get(actor.is_over.remote()):
            raise _taken(name)
    ray.kill(actor)
    while hosted_run(name) is not None:
        time.sleep(_LOOK_SECONDS)


def _taken(name: str) -> JournalLockedError:
    return JournalLockedError(
        f"a detached run {name!r} is going on; drawbar.train.attach({name!r}) gives a handle on "
        "it. Give this run another RunConfig.name, or wait for the other one"
    )


def hosted_run(name: str) -> Any | None:
    """Give the actor of the detached run of this name, None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def hosted_runs() -> list[str]:
    """List the names of the detached runs on this cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def attached(name: str, path: str | None = None) -> ActorRun | None:
    """Follow the detached run of this name from now on; None if none goes on, or not at `path`."""
    actor = hosted_run(name)
    if actor is None:
        return None
    try:
        facts: RunFacts = ray.get(actor.facts.remote())
    except RayError:
        return None  # it is just ending
    if path not in (None, facts.directory.location):
        return None
    return ActorRun(actor, facts, from_the_start=False)


def _unwrapped(error: RayTaskError) -> BaseException:
    """Give what a method of the actor raised."""
    return error.cause if isinstance(error.cause, BaseException) else error
