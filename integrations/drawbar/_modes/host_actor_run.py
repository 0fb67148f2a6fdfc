"""Follow and control a run whose controller runs in a `HostActor`."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar._base.ray_compat import get_actor_id, get_actor_info
from drawbar._handle.run_outcome import RunOutcome
from drawbar._handle.run_view import RunView, read_outcome
from drawbar._modes.control_socket import REPLY_TIMEOUT_S
from drawbar._modes.event_buffer import EventPosition
from drawbar._modes.host_actor import POLL_SECONDS, EventBatch, HostActor, HostedRun, HostedRunInfo
from drawbar._process.errors import ControllerError, RunInProgressError
from drawbar._process.serialization import serialize
from drawbar._records.live_events import Notice
from drawbar._records.timeline import RunState
from drawbar.train._controller.run import ControllerOutcome, RunSpec
from drawbar.train._driver.controller_thread import (
    DIAGNOSIS_TIMEOUT_S,
    EXIT_SECONDS,
    STOPPED_AT_EXIT,
)
from drawbar.train._worker_group.cluster import get_ray_worker_id

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    HostHandle = ActorHandle[HostActor]

T = TypeVar("T")

NAMESPACE = "drawbar"
"""Ray namespace in which each detached run has an actor with the name of the run."""

_MAX_CONCURRENCY = 32  # a client occupies one slot while it polls

_runs_by_actor_id: dict[str, HostActorRun] = {}
"""Runs that this process follows, by the ID of the host actor."""
_attach_lock = threading.Lock()


class HostActorRun(RunView):
    """View of a run in a `HostActor`. It polls the events of the run and prints them here.

    Args:
        actor: Host actor of the run.
        info: Constant information about the run.
        should_replay: Show all events from the start of the run, not only new ones.
    """

    def __init__(self, actor: HostHandle, info: HostedRunInfo, *, should_replay: bool) -> None:
        self._actor = actor
        self.directory = info.directory
        self._console = info.make_console(self.directory.uri)
        self._position = EventPosition(0, 0) if should_replay else None
        self._outcome: RunOutcome | None = None
        self._last_poll_reply = time.monotonic()
        self._has_warned_unresponsive = False
        self._ended = threading.Event()
        self._is_closed = False
        self.is_detached = info.is_detached
        self._thread = threading.Thread(target=self._poll_loop, name="drawbar-follow", daemon=True)
        self._id = get_actor_id(actor)
        _runs_by_actor_id[self._id] = self
        self._thread.start()
        atexit.register(self._stop_at_exit)

    def _poll_loop(self) -> None:
        client_id = uuid.uuid4().hex
        try:
            while self._outcome is None and not self._is_closed:
                reply: ObjectRef[EventBatch] = self._actor.poll_events.remote(
                    client_id, self._position
                )
                while not self._is_closed:
                    # Wait with a timeout: no call to Ray may be active when Ray is shut down.
                    if ray.wait([reply], timeout=POLL_SECONDS)[0]:
                        self._on_batch(ray.get(reply))
                        break
                    self._warn_unresponsive()
        except Exception as error:
            self._outcome = self._recover_outcome(error)
        finally:
            with contextlib.suppress(Exception):  # the actor may be dead
                self._actor.disconnect.remote(client_id)
            self._console.close()
            atexit.unregister(self._stop_at_exit)
            if _runs_by_actor_id.get(self._id) is self:
                del _runs_by_actor_id[self._id]
            self._ended.set()

    def _warn_unresponsive(self) -> None:
        if self.unresponsive_reason and not self._has_warned_unresponsive:
            self._has_warned_unresponsive = True
            self._console.on_event(Notice(self.unresponsive_reason))

    def _on_batch(self, batch: EventBatch) -> None:
        self._last_poll_reply = time.monotonic()
        if self._has_warned_unresponsive:
            self._has_warned_unresponsive = False
            self._console.on_event(Notice("the process that hosts the run responds again"))
        self._position = batch.position
        for event in batch.events:
            self._console.on_event(event)
        if batch.outcome is not None:
            self._outcome = batch.outcome.deserialize()

    def _recover_outcome(self, error: Exception) -> RunOutcome:
        """Return the outcome of the run after the host actor died, from the run directory."""
        path = self.directory.uri
        failure = ControllerError(
            f"the process that hosts the run no longer replies: {error}\n\nrun directory: "
            f'{path}\nIf the run has ended, fit() with resume="auto" resumes from its latest '
            "checkpoint.",
            error,
            path=path,
        )
        try:
            return read_outcome(self.directory, failure)
        except Exception:  # its journal cannot be read
            return RunOutcome(ControllerOutcome(error=failure), RunState(status="failed"))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended and return whether it has."""
        return self._ended.wait(timeout)

    def stop(self, *, save: bool | None) -> None:
        """Stop the run. See `Controller.stop`."""
        self._request(lambda: self._actor.stop.remote(save))

    def kill(self) -> None:
        """Kill every process of the run immediately."""
        self._request(self._actor.kill.remote)

    def diagnose(self) -> str:
        """Return a description of what each rank is blocked in."""
        return self._request(self._actor.diagnose.remote, extra_seconds=DIAGNOSIS_TIMEOUT_S) or ""

    @property
    def unresponsive_reason(self) -> str:
        """Description of an actor that has not replied for a while, or an empty string."""
        if self._ended.is_set() or time.monotonic() - self._last_poll_reply < REPLY_TIMEOUT_S:
            return ""
        return _describe_unresponsive(self._actor, self.directory.name)

    def get_state(self) -> RunState:
        """Return the current or final state of the run."""
        state: RunState | None = self._request(self._actor.get_state.remote)
        return state or self.get_outcome().snapshot

    def read_log(self, rank: int) -> bytes | None:
        """Return the output that a rank has written so far, or None if there is none."""
        log = self._request(lambda: self._actor.read_log.remote(rank))
        return super().read_log(rank) if log is None else log

    def _request(self, call: Callable[[], ObjectRef[T]], *, extra_seconds: float = 0.0) -> T | None:
        """Call the actor and return its reply, or None if the run has ended.

        Args:
            call: Function that calls a method of the actor and returns the reference to the reply.
            extra_seconds: Time that the call may take in addition to the usual timeout.

        Raises:
            TimeoutError: The actor does not reply; raised sooner if it is known to be unresponsive.
        """
        if self._ended.is_set():
            return None
        timeout = POLL_SECONDS if self.unresponsive_reason else REPLY_TIMEOUT_S + extra_seconds
        try:
            return _get_reply(self._actor, self.directory.name, call(), timeout)
        except RayTaskError as error:
            raise _unwrap_cause(error) from None
        except RayError:
            self._ended.wait()  # the actor is dead, which the polling thread detects too
            return None

    def get_outcome(self) -> RunOutcome:
        """Wait until the run has ended and return its outcome."""
        self._ended.wait()
        assert self._outcome is not None
        return self._outcome

    def _stop_at_exit(self) -> None:
        """Stop polling, and stop a run that is not detached."""
        if not self.is_detached:
            self._console.on_event(Notice(STOPPED_AT_EXIT))
            with contextlib.suppress(TimeoutError):
                self.stop(save=False)
                self._ended.wait(EXIT_SECONDS)
        self._is_closed = True
        # Wait for the thread: Ray must not be shut down while a call to it is active.
        self._thread.join(2 * POLL_SECONDS)


def start_host_actor_run(hosted: HostedRun) -> HostActorRun:
    """Start a run in a new host actor, on the node of this driver or of its Ray Client server.

    Args:
        hosted: The run, its watchers, and its console.

    Raises:
        RunInProgressError: A detached run with this name is in progress.
        Exception: The run cannot start.
    """
    actor = _create_host_actor(hosted.spec)
    try:
        reply: ObjectRef[HostedRunInfo] = actor.start_run.remote(serialize(hosted))
        info = ray.get(reply)
    except RayTaskError as error:
        ray.kill(actor)
        raise _unwrap_cause(error) from None
    except BaseException:
        ray.kill(actor)
        raise
    return HostActorRun(actor, info, should_replay=True)


def _create_host_actor(spec: RunSpec) -> HostHandle:
    is_detached = spec.run_config.detached
    node = ray.get_runtime_context().get_node_id()
    options: dict[str, object] = {
        "num_cpus": 0,
        # A restarted host actor would have neither the workers nor the lock of the journal. The
        # user calls fit() again instead, which resumes the run.
        "max_restarts": 0,
        "max_concurrency": _MAX_CONCURRENCY,
        # The actor must run on this node, because the run directory is on a local disk by default.
        # soft=True: with Ray Client, this is the node of its server, which may no longer exist.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
    }
    if spec.run_config.worker_runtime_env:
        options["runtime_env"] = dict(spec.run_config.worker_runtime_env)
    if is_detached:
        _ensure_name_is_free(spec.name)
        options |= {"name": spec.name, "namespace": NAMESPACE, "lifetime": "detached"}
    try:
        # Any, because Ray's type annotations declare the result as a plain object.
        remote: Any = ray.remote
        actor: HostHandle = (
            remote(HostActor)
            .options(**options)
            .remote(
                spec.worker_spec.env_vars,
                spec.worker_spec.driver_env,
                is_detached,
                get_ray_worker_id(),
            )
        )
        return actor
    except ValueError as error:  # another driver claimed the name in the meantime
        raise _make_name_taken_error(spec.name) from error


def _ensure_name_is_free(name: str) -> None:
    """Check that no detached run in progress has this name.

    If the run of the actor with this name has ended or will never start, kill the actor and wait
    for its end.

    Raises:
        RunInProgressError: A run with this name is in progress.
        TimeoutError: The host actor with this name does not reply.
    """
    actor = get_host_actor(name)
    if actor is None:
        return
    with contextlib.suppress(RayError):
        if not _get_reply(actor, name, actor.has_ended.remote()):
            raise _make_name_taken_error(name)
    # The actor can still exist for two reasons: it waits until all clients have received the
    # outcome of the run, or the driver was killed before it started the run. `ray.kill` returns
    # before the actor has ended, but the name is free only after its end (ray-project/ray#20611).
    ray.kill(actor)
    with contextlib.suppress(RayError):
        _get_reply(actor, name, actor.block_until_killed.remote())


def _make_name_taken_error(name: str) -> RunInProgressError:
    return RunInProgressError(
        f"a detached run {name!r} is in progress. Set another RunConfig.name, or wait for that run "
        f"with drawbar.train.attach({name!r}).wait()"
    )


def get_host_actor(name: str) -> HostHandle | None:
    """Return the host actor of the detached run with this name, or None."""
    try:
        # In a fixed namespace: the default one is different for each driver.
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def list_detached_runs() -> list[str]:
    """Return the names of the detached runs on this cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def attach_to_host_actor(name: str, path: str | None = None) -> HostActorRun | None:
    """Follow the detached run with this name. Events before this call are not shown.

    Args:
        name: Name of the run.
        path: Path or URI that the run must have, or None for any.

    Returns:
        The run, or None if no matching detached run is in progress.

    Raises:
        TimeoutError: The host of the run does not reply.
    """
    actor = get_host_actor(name)
    if actor is None:
        return None
    try:
        _get_reply(actor, name, actor.has_ended.remote())
        info = _get_reply(actor, name, actor.get_info.remote())
    except RayError:
        return None  # the run is ending
    if path not in (None, info.directory.uri):
        return None
    with _attach_lock:
        # One view for all handles of this process, so that output is shown only once.
        return _runs_by_actor_id.get(get_actor_id(actor)) or HostActorRun(
            actor, info, should_replay=False
        )


def _get_reply(
    actor: HostHandle, name: str, reply: ObjectRef[T], timeout: float = REPLY_TIMEOUT_S
) -> T:
    """Wait for the reply of an actor.

    Raises:
        TimeoutError: The actor does not reply in time.
        RayError: The method raised an exception, or the actor died.
    """
    try:
        return ray.get(reply, timeout=timeout)
    except GetTimeoutError:
        raise TimeoutError(_describe_unresponsive(actor, name)) from None


def _describe_unresponsive(actor: HostHandle, name: str) -> str:
    return (
        f"the process that hosts run {name!r} does not reply ({_format_actor_address(actor)}): "
        "it is suspended, still starting, or unreachable. On that node, `kill -CONT <pid>` "
        "continues a suspended process, and `kill -9 <pid>` ends the run and its workers; "
        'fit() with resume="auto" then resumes from its latest checkpoint'
    )


def _format_actor_address(actor: HostHandle) -> str:
    """Return the process ID and node of an actor, according to Ray."""
    info = get_actor_info(get_actor_id(actor))
    address = info.get("Address", {}).get("IPAddress") or "unknown"
    return f"pid {info.get('Pid') or 'unknown'} on node {address}"


def _unwrap_cause(error: RayTaskError) -> BaseException:
    """Return the exception that a method of the actor raised."""
    return error.cause if isinstance(error.cause, BaseException) else error
