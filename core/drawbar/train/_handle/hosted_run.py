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

from drawbar.train._carry import carry
from drawbar.train._console.console import Console
from drawbar.train._controller.run import Ending, Outcome, RunSpec
from drawbar.train._errors import ControllerError, JournalLockedError
from drawbar.train._group.cluster import noted_of, this_process
from drawbar.train._handle.ended_run import EndedRun
from drawbar.train._handle.host_actor import POLL_SECONDS, HostActor, News, RunFacts
from drawbar.train._handle.relay import Position
from drawbar.train._history.events import Notice
from drawbar.train._history.timeline import ENDS, Snapshot
from drawbar.train._launch.host import DIAGNOSIS_SECONDS, ENDS_WITH_THE_PROGRAM, EXIT_SECONDS

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    HostHandle = ActorHandle[HostActor]

T = TypeVar("T")

NAMESPACE = "drawbar"
"""The Ray namespace in which every detached run has an actor of its name."""

ANSWER_SECONDS = 10.0
"""How long the actor may take to answer before it counts as silent."""

_THREADS = 32  # a follower holds one while it waits

_followed: dict[str, HostedRun] = {}
"""The runs that this process follows, by the actor that hosts each."""
_attaching = threading.Lock()


class HostedRun:
    """A run in a `HostActor`, followed from this process: what it shows is shown here.

    Args:
        actor: The actor.
        facts: What it hosts.
        from_the_start: Show everything from the first line on, not only what comes from now on.
    """

    def __init__(self, actor: HostHandle, facts: RunFacts, *, from_the_start: bool) -> None:
        self._actor = actor
        self._directory = facts.directory
        self._console = Console(facts.level, self.path)
        self._seen = Position(0, 0) if from_the_start else None
        self._ending: Ending | None = None
        self._heard = time.monotonic()  # when the actor last answered the follower
        self._silence_told = False
        self._over = threading.Event()
        self._let_go = False
        self.detached = facts.detached
        self._thread = threading.Thread(target=self._follow, name="drawbar-follow", daemon=True)
        self._id = _id_of(actor)
        _followed[self._id] = self
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
                asked: ObjectRef[News] = self._actor.follow.remote(follower, self._seen)
                while not self._let_go:
                    # In waits that end: this thread must be out of Ray when Ray is shut down.
                    if ray.wait([asked], timeout=POLL_SECONDS)[0]:
                        self._hear(ray.get(asked))
                        break
                    self._tell_silence()
        except Exception as error:
            self._ending = self._lost(error)
        finally:
            with contextlib.suppress(Exception):  # the actor may be gone
                self._actor.leave.remote(follower)
            self._console.close()
            atexit.unregister(self._end_with_the_program)
            if _followed.get(self._id) is self:
                del _followed[self._id]
            self._over.set()

    def _tell_silence(self) -> None:
        if self.silence and not self._silence_told:
            self._silence_told = True
            self._console.note(Notice(self.silence))

    def _hear(self, news: News) -> None:
        self._heard = time.monotonic()
        if self._silence_told:
            self._silence_told = False
            self._console.note(Notice("the process that hosts the run answers again"))
        self._seen = news.position
        for event in news.events:
            self._console.note(event)
        if news.ending is not None:
            self._ending = news.ending.unpack()

    def _lost(self, error: Exception) -> Ending:
        """Look into the directory of a run whose host does not answer any more."""
        snapshot = Snapshot()
        with contextlib.suppress(Exception):
            run = EndedRun(self._directory)
            snapshot = run.snapshot()
            if snapshot.status in ENDS:
                return run.ending()
        failed = ControllerError(
            f"the process that hosts the run does not answer any more: {error}\n\nrun directory: "
            f'{self.path}\nif it has ended, resume="auto" goes on from the newest checkpoint',
            error,
            path=self.path,
        )
        return Ending(Outcome(error=failed), replace(snapshot, status="failed"), None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; tells whether it is."""
        return self._over.wait(timeout)

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._ask(lambda: self._actor.stop.remote(save))

    def kill(self) -> None:
        """End every process of the run at once."""
        self._ask(self._actor.kill.remote)

    def diagnose(self) -> str:
        """Say where every rank stands."""
        return self._ask(self._actor.diagnose.remote, more=DIAGNOSIS_SECONDS) or ""

    @property
    def silence(self) -> str:
        """Say that the actor has not answered for a while, "" if it has."""
        if self._over.is_set() or time.monotonic() - self._heard < ANSWER_SECONDS:
            return ""
        return _silence_of(self._actor, self.name)

    def snapshot(self) -> Snapshot:
        """Say how the run stands, or stood at its end."""
        snapshot: Snapshot | None = self._ask(self._actor.snapshot.remote)
        return snapshot or self.ending().snapshot

    def log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        text: str | None = self._ask(lambda: self._actor.log.remote(rank))
        return EndedRun(self._directory).log(rank) if text is None else text

    def _ask(self, call: Callable[[], ObjectRef[T]], *, more: float = 0.0) -> T | None:
        """Call the actor, which may take so many seconds more. None if the run is over.

        Raises:
            TimeoutError: The actor does not answer; at once if that is known.
        """
        if self._over.is_set():
            return None
        patience = POLL_SECONDS if self.silence else ANSWER_SECONDS + more
        try:
            return _answer(self._actor, self.name, call(), patience)
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
            self._console.note(Notice(ENDS_WITH_THE_PROGRAM))
            with contextlib.suppress(TimeoutError):
                self.stop(save=False)
                self._over.wait(EXIT_SECONDS)
        self._let_go = True
        self._thread.join(2 * POLL_SECONDS)  # Ray must not be shut down under it


def start_in_actor(spec: RunSpec) -> HostedRun:
    """Start a run in an actor of its own, on the node of this driver or of its Ray Client server.

    Raises:
        JournalLockedError: A run of this name goes on.
        Exception: Whatever keeps the run from starting.
    """
    actor = _make_actor(spec)
    try:
        asked: ObjectRef[RunFacts] = actor.begin.remote(carry(spec))
        facts = ray.get(asked)
    except RayTaskError as error:
        ray.kill(actor)
        raise _unwrapped(error) from None
    except BaseException:
        ray.kill(actor)
        raise
    return HostedRun(actor, facts, from_the_start=True)


def _make_actor(spec: RunSpec) -> HostHandle:
    detached = spec.run_config.detached
    node = ray.get_runtime_context().get_node_id()
    options: dict[str, object] = {
        "num_cpus": 0,
        # A host that Ray started again would have lost its workers and the journal's lock; the user
        # starts the run again, and it resumes.
        "max_restarts": 0,
        "max_concurrency": _THREADS,
        # On this node, since a run's directory is by default a local one; soft, since a Ray
        # Client's node may have gone.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
    }
    if spec.run_config.worker_runtime_env:
        options["runtime_env"] = dict(spec.run_config.worker_runtime_env)
    if detached:
        _make_way(spec.name)
        options |= {"name": spec.name, "namespace": NAMESPACE, "lifetime": "detached"}
    try:
        remote: Any = ray.remote  # its stub takes `remote()` for one that makes a plain object
        actor: HostHandle = (
            remote(HostActor)
            .options(**options)
            .remote(spec.worker.environment, spec.worker.surroundings, detached, this_process())
        )
        return actor
    except ValueError as error:  # another one was faster
        raise _taken(spec.name) from error


def _make_way(name: str) -> None:
    """Refuse a name that a run has; wait for a host whose run is over already, or never begins.

    Raises:
        JournalLockedError: The run goes on.
        TimeoutError: Its host does not answer.
    """
    actor = hosted_run(name)
    if actor is None:
        return
    with contextlib.suppress(RayError):
        if not _answer(actor, name, actor.is_over.remote()):
            raise _taken(name)
    # Its run is over, and it only waits for followers that may never ask again; or its driver was
    # killed. `ray.kill` returns before the actor has ended, and only then its name is free
    # (ray-project/ray#20611).
    ray.kill(actor)
    with contextlib.suppress(RayError):
        _answer(actor, name, actor.outlive.remote())


def _taken(name: str) -> JournalLockedError:
    return JournalLockedError(
        f"a detached run {name!r} is going on; drawbar.train.attach({name!r}) gives a handle on "
        "it. Give this run another RunConfig.name, or wait for the other one"
    )


def hosted_run(name: str) -> HostHandle | None:
    """Give the actor of the detached run of this name, None if there is none."""
    try:
        # In a namespace of its own: that of a job is made up anew for each driver.
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def hosted_runs() -> list[str]:
    """List the names of the detached runs on this cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def attached(name: str, path: str | None = None) -> HostedRun | None:
    """Follow the detached run of this name from now on; None if none goes on, or not at `path`.

    Raises:
        TimeoutError: Its host does not answer.
    """
    actor = hosted_run(name)
    if actor is None:
        return None
    try:
        _answer(actor, name, actor.is_over.remote())
        facts = _answer(actor, name, actor.facts.remote())
    except RayError:
        return None  # it is just ending
    if path not in (None, facts.directory.location):
        return None
    with _attaching:
        # What it shows is shown once, however many handles this process has.
        return _followed.get(_id_of(actor)) or HostedRun(actor, facts, from_the_start=False)


def _answer(
    actor: HostHandle, name: str, asked: ObjectRef[T], seconds: float = ANSWER_SECONDS
) -> T:
    """Wait for what an actor answers, so long at the most.

    Raises:
        TimeoutError: It does not answer.
        RayError: It has raised, or is gone.
    """
    try:
        return ray.get(asked, timeout=seconds)
    except GetTimeoutError:
        raise TimeoutError(_silence_of(actor, name)) from None


def _silence_of(actor: HostHandle, name: str) -> str:
    return (
        f"the process that hosts run {name!r} does not answer ({_place_of(actor)}): it is stopped, "
        "still starting, or cut off. There, `kill -CONT <pid>` lets a stopped one go on, and "
        '`kill -9 <pid>` ends the run and its workers; fit() with resume="auto" then goes on from '
        "its newest checkpoint"
    )


def _place_of(actor: HostHandle) -> str:
    """Say where an actor is, by what Ray has noted."""
    noted = noted_of(_id_of(actor))
    address = noted.get("Address", {}).get("IPAddress") or "unknown"
    return f"pid {noted.get('Pid') or 'unknown'} on node {address}"


def _id_of(actor: HostHandle) -> str:
    return str(actor._actor_id.hex())


def _unwrapped(error: RayTaskError) -> BaseException:
    """Give what a method of the actor raised."""
    return error.cause if isinstance(error.cause, BaseException) else error
