"""A run whose ranks are the processes that a launcher such as torchrun has started.

Each of them calls `fit()` or `start()`. Rank 0 hosts the run; the others take part in it from here,
and end as it ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial

import cloudpickle

from drawbar.train._carry import keep
from drawbar.train._console.console import Console
from drawbar.train._controller.run import Ending, Outcome, RunSpec
from drawbar.train._errors import ControllerError
from drawbar.train._group.launched_group import LaunchedWorkerGroup, launched_here
from drawbar.train._group.peers import (
    Answer,
    Begin,
    Ended,
    Execute,
    Hello,
    Obey,
    Over,
    Peers,
    Said,
    StackAsked,
    StopAsked,
    ToPeer,
    meet_rank_zero,
    peer_address,
)
from drawbar.train._group.ranks import local_gpu_ids
from drawbar.train._group.thread_group import Spawn, ThreadWorkerGroup, perform_here
from drawbar.train._group.validators import ThreadValidator
from drawbar.train._group.worker_group import WorkerGroup
from drawbar.train._handle.ended_run import EndedRun
from drawbar.train._history.journal import events_of
from drawbar.train._history.timeline import Snapshot
from drawbar.train._launch.host import Host
from drawbar.train._launch.jobs import Jobs
from drawbar.train._messages import Assignment, Message, Ranks
from drawbar.train._orders import Interrupt
from drawbar.train._settings.backend import LauncherStore
from drawbar.train._settings.validation_config import ValidationConfig
from drawbar.train._threads import DaemonThreads
from drawbar.train._worker.actor import Payload, within_reach
from drawbar.train._worker.environment import ranks_by_launcher
from drawbar.train._worker.session import Session
from drawbar.train._worker.stack import take_stack

_runs = itertools.count()  # of this process: the ranks call fit() equally often


def host_or_join(
    store: LauncherStore,
    spec: RunSpec,
    payload: Payload,
    validation_config: ValidationConfig | None,
    make_console: Callable[[str], Console],
    *,
    jobs_wait: bool,
) -> Host | LaunchedRun:
    """Host a run in the process of rank 0, or take part in it.

    Args:
        store: The launcher's.
        spec, payload, validation_config, make_console, jobs_wait: As for `host_function`.

    Raises:
        ValueError: The trainer has datasets.
        Exception: Whatever keeps the run from starting, on every rank.
    """
    ranks = ranks_by_launcher(os.environ)
    _refuse_datasets(spec, ranks)
    key = f"drawbar/run/{next(_runs)}"
    if ranks.world_rank > 0:
        return LaunchedRun(store, key, spec, payload, ranks, jobs_wait=jobs_wait)
    peers = Peers(ranks.world_size - 1, peer_address(ranks))
    try:
        host = _host(spec, payload, ranks, peers, validation_config, make_console, jobs_wait)
    except Exception as error:
        peers.refuse(store, key, error)
        raise
    peers.invite(store, key, host.directory)
    return host


def _host(
    spec: RunSpec,
    payload: Payload,
    ranks: Ranks,
    peers: Peers,
    validation_config: ValidationConfig | None,
    make_console: Callable[[str], Console],
    jobs_wait: bool,
) -> Host:
    gpu_ids = _gpu_ids(spec, ranks)

    def make_group(path: str, spawn: Spawn) -> WorkerGroup:
        own = ThreadWorkerGroup(payload, spawn=spawn, gpu_ids=gpu_ids)
        here = launched_here(ranks, gpu_ids)
        return LaunchedWorkerGroup(own, here, peers, lambda save: host.stop(save=save))

    validator = ThreadValidator(validation_config) if validation_config is not None else None
    host = Host(
        _without_restarts(spec),
        make_group,
        make_console,
        validator,
        jobs_wait=jobs_wait,
        at_end=lambda ending: peers.send_all(Over(ending.packed(keep))),
    )
    return host


def _without_restarts(spec: RunSpec) -> RunSpec:
    """Leave restarts to the launcher, which alone can replace a process."""
    failures = spec.run_config.failure_config
    if failures.max_failures:
        warnings.warn(
            f"FailureConfig.max_failures={failures.max_failures} is not used in processes that a "
            "launcher has started: it restarts them, as torchrun does with --max-restarts, and a "
            'run that has a name and resume="auto" goes on from its newest checkpoint',
            stacklevel=7,
        )
    failures = dataclasses.replace(failures, max_failures=0)
    config = dataclasses.replace(spec.run_config, failure_config=failures)
    return dataclasses.replace(spec, run_config=config)


def _refuse_datasets(spec: RunSpec, ranks: Ranks) -> None:
    if spec.datasets:
        raise ValueError(
            f"datasets={sorted(spec.datasets)} cannot be split among the {ranks.world_size} "
            "processes that a launcher has started, which share no Ray; start the script with "
            f"python and ScalingConfig(num_workers={ranks.world_size}), or read the data in the "
            "training function"
        )


def _gpu_ids(spec: RunSpec, ranks: Ranks) -> tuple[str, ...]:
    return local_gpu_ids(math.ceil(spec.scaling_config.num_gpus_per_worker), ranks.local_rank)


class LaunchedRun:
    """A run that the process of rank 0 hosts, and this one takes part in as another rank.

    Args:
        store: The launcher's.
        key: Where rank 0 says how to reach it.
        spec: The run, as this process would start it.
        payload: The function.
        ranks: Of this process.
        jobs_wait: The function runs in the thread that calls `join`, else in one of its own.

    Raises:
        ControllerError: Rank 0 is gone.
        Exception: Whatever keeps rank 0 from opening the run.
    """

    detached = False
    silence = ""

    def __init__(
        self,
        store: LauncherStore,
        key: str,
        spec: RunSpec,
        payload: Payload,
        ranks: Ranks,
        *,
        jobs_wait: bool,
    ) -> None:
        self._payload = payload
        self._environment = spec.worker.environment
        self._cache: dict[object, object] = {}
        self._session: Session | None = None
        self._function: threading.Thread | None = None
        self._jobs = Jobs(wait=jobs_wait)
        self._hooks = DaemonThreads(1, "drawbar-hooks")  # one may hang, and the run still ends
        self._over = threading.Event()
        self._ending: Ending | None = None
        hello = Hello(ranks.world_rank, launched_here(ranks, _gpu_ids(spec, ranks)))
        try:
            self._wire, self._directory = meet_rank_zero(store, key, hello)
        except (OSError, EOFError) as error:
            raise _rank_zero_is_gone(error) from error
        threading.Thread(target=self._listen, name="drawbar-rank-zero", daemon=True).start()

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._directory.name

    @property
    def path(self) -> str:
        """Where the run lies."""
        return self._directory.location

    # -- what rank 0 says

    def _listen(self) -> None:
        try:
            while self._ending is None:
                self._take(self._wire.receive())
        except (OSError, EOFError) as error:
            gone = _rank_zero_is_gone(error, self.path)
            self._ending = Ending(Outcome(error=gone), Snapshot(status="failed"), None)
            if self._session is not None:
                self._session.obey(Interrupt(reason=str(gone)))
        self._over.set()
        self._jobs.release()

    def _take(self, told: ToPeer) -> None:
        session = self._session
        match told:
            case Begin(assignment):
                self._begin(assignment)
            case Obey(attempt, order):
                if session is not None and session.assignment.attempt == attempt:
                    session.obey(order)
            case StackAsked(number):
                self._wire.send(Answer(number, take_stack(self._function)))
            case Execute():
                # In a thread: rank 0 may ask for the stack of one that hangs in there.
                self._hooks.submit(lambda: self._wire.send(told.answer()))
            case Over(ending):
                self._ending = cloudpickle.loads(ending)

    def _begin(self, assignment: Assignment) -> None:
        variables = {**self._environment, **_devices_of(assignment)}
        # Rank 0's environment is another process's, which the launcher has given other variables.
        own = dataclasses.replace(assignment.spec, environment=variables)
        assignment = dataclasses.replace(assignment, spec=own)
        self._session = session = Session(assignment, self._say, self._cache)
        self._jobs.spawn(partial(self._perform, session))

    def _say(self, message: Message) -> None:
        self._wire.send(Said(message))

    def _perform(self, session: Session) -> None:
        self._function = threading.current_thread()
        with within_reach(session, self._say):
            perform_here(self._payload, session, self._say, self._end, alone=True)

    def _end(self, ending: Message | None) -> None:
        self._wire.send(Ended(ending))

    # -- from any thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over, running the function meanwhile; tells whether it is."""
        return self._jobs.do_until(self._over, timeout)

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._wire.send(StopAsked(save))

    def kill(self) -> None:
        """End the run now: its processes are the launcher's."""
        self.stop(save=False)

    def diagnose(self) -> str:
        """Rank 0 says where every rank stands."""
        return ""

    def snapshot(self) -> Snapshot:
        """Say how the run stands."""
        if self._ending is not None:
            return self._ending.snapshot
        return Snapshot.of(events_of(self._directory))

    def log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        return EndedRun(self._directory).log(rank)

    def ending(self) -> Ending:
        """Give how the run ended."""
        self._over.wait()
        assert self._ending is not None  # it is over
        return self._ending


def _devices_of(assignment: Assignment) -> dict[str, str]:
    name = "CUDA_VISIBLE_DEVICES"
    variables = assignment.spec.environment
    return {name: variables[name]} if name in variables else {}


def _rank_zero_is_gone(error: Exception, path: str = "") -> ControllerError:
    return ControllerError(
        f"the process of rank 0, which hosts the run, is gone: {error or type(error).__name__}; "
        "what it has written says why",
        error,
        path=path,
    )
