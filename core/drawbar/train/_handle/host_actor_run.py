"""A run that a `HostActor` hosts, as the processes have it that start, follow and find it."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar.train._console.console import Console
from drawbar.train._controller.run import ControllerOutcome, RunOutcome, RunSpec
from drawbar.train._driver.controller_thread import (
    DIAGNOSIS_TIMEOUT_S,
    EXIT_SECONDS,
    STOPPED_AT_EXIT,
)
from drawbar.train._errors import ControllerError, RunInProgressError
from drawbar.train._handle.ended_run import EndedRun
from drawbar.train._handle.host_actor import POLL_SECONDS, EventBatch, HostActor, HostedRunInfo
from drawbar.train._handle.relay import Position
from drawbar.train._history.events import Notice
from drawbar.train._history.timeline import FINAL_STATUSES, RunState
from drawbar.train._serialization import serialize
from drawbar.train._worker_group.cluster import get_actor_info, get_ray_worker_id

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    HostHandle = ActorHandle[HostActor]

T = TypeVar("T")

NAMESPACE = "drawbar"
"""The Ray namespace in which every detached run has an actor of its name."""

REPLY_TIMEOUT_S = 10.0
"""How long the actor may take to answer before it counts as silent."""

_MAX_CONCURRENCY = 32  # a follower holds one while it waits

_runs_by_actor_id: dict[str, HostActorRun] = {}
"""The runs that this process follows, by the actor that hosts each."""
_attach_lock = threading.Lock()


class HostActorRun:
    """A run in a `HostActor`, followed from this process: what it shows is shown here.

    Args:
        actor: The actor.
        facts: What it hosts.
        should_replay: Show everything from the first line on, not only what comes from now on.
    """

    def __init__(self, actor: HostHandle, info: HostedRunInfo, *, should_replay: bool) -> None:
        self._actor = actor
        self._directory = info.directory
        self._console = Console(info.level, self.path)
        self._position = Position(0, 0) if should_replay else None
        self._ending: RunOutcome | None = None
        self._last_reply = time.monotonic()  # when the actor last answered the follower
        self._has_warned_unresponsive = False
        self._over = threading.Event()
        self._is_closed = False
        self.detached = info.detached
        self._thread = threading.Thread(target=self._poll_loop, name="drawbar-follow", daemon=True)
        self._id = _get_actor_id(actor)
        _runs_by_actor_id[self._id] = self
        self._thread.start()
        atexit.register(self._stop_at_exit)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._directory.name

    @property
    def path(self) -> str:
        """Where the run lies."""
        return self._directory.uri

    def _poll_loop(self) -> None:
        follower = uuid.uuid4().hex
        try:
            while self._ending is None and not self._is_closed:
                asked: ObjectRef[EventBatch] = self._actor.poll_events.remote(
                    follower, self._position
                )
                while not self._is_closed:
                    # In waits that end: this thread must be out of Ray when Ray is shut down.
                    if ray.wait([asked], timeout=POLL_SECONDS)[0]:
                        self._on_batch(ray.get(asked))
                        break
                    self._warn_unresponsive()
        except Exception as error:
            self._ending = self._make_lost_outcome(error)
        finally:
            with contextlib.suppress(Exception):  # the actor may be gone
                self._actor.disconnect.remote(follower)
            self._console.close()
            atexit.unregister(self._stop_at_exit)
            if _runs_by_actor_id.get(self._id) is self:
                del _runs_by_actor_id[self._id]
            self._over.set()

    def _warn_unresponsive(self) -> None:
        if self.silence and not self._has_warned_unresponsive:
            self._has_warned_unresponsive = True
            self._console.on_event(Notice(self.silence))

    def _on_batch(self, batch: EventBatch) -> None:
        self._last_reply = time.monotonic()
        if self._has_warned_unresponsive:
            self._has_warned_unresponsive = False
            self._console.on_event(Notice("the process that hosts the run answers again"))
        self._position = batch.position
        for event in batch.events:
            self._console.on_event(event)
        if batch.ending is not None:
            self._ending = batch.ending.deserialize()

    def _make_lost_outcome(self, error: Exception) -> RunOutcome:
        """Look into the directory of a run whose host does not answer any more."""
        snapshot = RunState()
        with contextlib.suppress(Exception):
            run = EndedRun(self._directory)
            snapshot = run.snapshot()
            if snapshot.status in FINAL_STATUSES:
                return run.ending()
        failed = ControllerError(
            f"the process that hosts the run does not answer any more: {error}\n\nrun directory: "
            f'{self.path}\nif it has ended, resume="auto" goes on from the newest checkpoint',
            error,
            path=self.path,
        )
        return RunOutcome(ControllerOutcome(error=failed), replace(snapshot, status="failed"), None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; tells whether it is."""
        return self._over.wait(timeout)

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._request(lambda: self._actor.stop.remote(save))

    def kill(self) -> None:
        """End every process of the run at once."""
        self._request(self._actor.kill.remote)

    def diagnose(self) -> str:
        """Say where every rank stands."""
        return self._request(self._actor.diagnose.remote, extra_seconds=DIAGNOSIS_TIMEOUT_S) or ""

    @property
    def silence(self) -> str:
        """Say that the actor has not answered for a while, "" if it has."""
        if self._over.is_set() or time.monotonic() - self._last_reply < REPLY_TIMEOUT_S:
            return ""
        return _describe_unresponsive(self._actor, self.name)

    def snapshot(self) -> RunState:
        """Say how the run stands, or stood at its end."""
        snapshot: RunState | None = self._request(self._actor.snapshot.remote)
        return snapshot or self.ending().snapshot

    def read_log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        text: str | None = self._request(lambda: self._actor.read_log.remote(rank))
        return EndedRun(self._directory).read_log(rank) if text is None else text

    def _request(self, call: Callable[[], ObjectRef[T]], *, extra_seconds: float = 0.0) -> T | None:
        """Call the actor, which may take so many seconds more. None if the run is over.

        Raises:
            TimeoutError: The actor does not answer; at once if that is known.
        """
        if self._over.is_set():
            return None
        patience = POLL_SECONDS if self.silence else REPLY_TIMEOUT_S + extra_seconds
        try:
            return _get_reply(self._actor, self.name, call(), patience)
        except RayTaskError as error:
            raise _unwrap_cause(error) from None
        except RayError:
            self._over.wait()  # the actor is gone, which the follower notices too
            return None

    def ending(self) -> RunOutcome:
        """Give how the run ended."""
        self._over.wait()
        assert self._ending is not None  # it is over
        return self._ending

    def _stop_at_exit(self) -> None:
        """Stop following; a run that is not detached is stopped."""
        if not self.detached:
            self._console.on_event(Notice(STOPPED_AT_EXIT))
            with contextlib.suppress(TimeoutError):
                self.stop(save=False)
                self._over.wait(EXIT_SECONDS)
        self._is_closed = True
        self._thread.join(2 * POLL_SECONDS)  # Ray must not be shut down under it


def start_host_actor_run(spec: RunSpec) -> HostActorRun:
    """Start a run in an actor of its own, on the node of this driver or of its Ray Client server.

    Raises:
        RunInProgressError: A run of this name goes on.
        Exception: Whatever keeps the run from starting.
    """
    actor = _create_host_actor(spec)
    try:
        asked: ObjectRef[HostedRunInfo] = actor.start_run.remote(serialize(spec))
        info = ray.get(asked)
    except RayTaskError as error:
        ray.kill(actor)
        raise _unwrap_cause(error) from None
    except BaseException:
        ray.kill(actor)
        raise
    return HostActorRun(actor, info, should_replay=True)


def _create_host_actor(spec: RunSpec) -> HostHandle:
    detached = spec.run_config.detached
    node = ray.get_runtime_context().get_node_id()
    options: dict[str, object] = {
        "num_cpus": 0,
        # A host that Ray started again would have lost its workers and the journal's lock; the user
        # starts the run again, and it resumes.
        "max_restarts": 0,
        "max_concurrency": _MAX_CONCURRENCY,
        # On this node, since a run's directory is by default a local one; soft, since a Ray
        # Client's node may have gone.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
    }
    if spec.run_config.worker_runtime_env:
        options["runtime_env"] = dict(spec.run_config.worker_runtime_env)
    if detached:
        _claim_name(spec.name)
        options |= {"name": spec.name, "namespace": NAMESPACE, "lifetime": "detached"}
    try:
        remote: Any = ray.remote  # its stub takes `remote()` for one that makes a plain object
        actor: HostHandle = (
            remote(HostActor)
            .options(**options)
            .remote(
                spec.worker_spec.environment,
                spec.worker_spec.surroundings,
                detached,
                get_ray_worker_id(),
            )
        )
        return actor
    except ValueError as error:  # another one was faster
        raise _make_name_taken_error(spec.name) from error


def _claim_name(name: str) -> None:
    """Refuse a name that a run has; wait for a host whose run is over already, or never begins.

    Raises:
        RunInProgressError: The run goes on.
        TimeoutError: Its host does not answer.
    """
    actor = get_host_actor(name)
    if actor is None:
        return
    with contextlib.suppress(RayError):
        if not _get_reply(actor, name, actor.has_ended.remote()):
            raise _make_name_taken_error(name)
    # Its run is over, and it only waits for followers that may never ask again; or its driver was
    # killed. `ray.kill` returns before the actor has ended, and only then its name is free
    # (ray-project/ray#20611).
    ray.kill(actor)
    with contextlib.suppress(RayError):
        _get_reply(actor, name, actor.block_until_killed.remote())


def _make_name_taken_error(name: str) -> RunInProgressError:
    return RunInProgressError(
        f"a detached run {name!r} is going on; drawbar.train.attach({name!r}) gives a handle on "
        "it. Give this run another RunConfig.name, or wait for the other one"
    )


def get_host_actor(name: str) -> HostHandle | None:
    """Give the actor of the detached run of this name, None if there is none."""
    try:
        # In a namespace of its own: that of a job is made up anew for each driver.
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def list_detached_runs() -> list[str]:
    """List the names of the detached runs on this cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def attach_to_host_actor(name: str, path: str | None = None) -> HostActorRun | None:
    """Follow the detached run of this name from now on; None if none goes on, or not at `path`.

    Raises:
        TimeoutError: Its host does not answer.
    """
    actor = get_host_actor(name)
    if actor is None:
        return None
    try:
        _get_reply(actor, name, actor.has_ended.remote())
        info = _get_reply(actor, name, actor.get_info.remote())
    except RayError:
        return None  # it is just ending
    if path not in (None, info.directory.uri):
        return None
    with _attach_lock:
        # What it shows is shown once, however many handles this process has.
        return _runs_by_actor_id.get(_get_actor_id(actor)) or HostActorRun(
            actor, info, should_replay=False
        )


def _get_reply(
    actor: HostHandle, name: str, asked: ObjectRef[T], seconds: float = REPLY_TIMEOUT_S
) -> T:
    """Wait for what an actor answers, so long at the most.

    Raises:
        TimeoutError: It does not answer.
        RayError: It has raised, or is gone.
    """
    try:
        return ray.get(asked, timeout=seconds)
    except GetTimeoutError:
        raise TimeoutError(_describe_unresponsive(actor, name)) from None


def _describe_unresponsive(actor: HostHandle, name: str) -> str:
    return (
        f"the process that hosts run {name!r} does not answer ({_format_actor_address(actor)}): "
        "it is stopped, "
        "still starting, or cut off. There, `kill -CONT <pid>` lets a stopped one go on, and "
        '`kill -9 <pid>` ends the run and its workers; fit() with resume="auto" then goes on from '
        "its newest checkpoint"
    )


def _format_actor_address(actor: HostHandle) -> str:
    """Say where an actor is, by what Ray has noted."""
    noted = get_actor_info(_get_actor_id(actor))
    address = noted.get("Address", {}).get("IPAddress") or "unknown"
    return f"pid {noted.get('Pid') or 'unknown'} on node {address}"


def _get_actor_id(actor: HostHandle) -> str:
    return str(actor._actor_id.hex())


def _unwrap_cause(error: RayTaskError) -> BaseException:
    """Give what a method of the actor raised."""
    return error.cause if isinstance(error.cause, BaseException) else error
