"""Workers in this very process, without Ray: `num_workers=0`, and the worlds of `testing`.

With `num_workers=0` the function runs in the thread that called `fit()`, so that `pdb`, `input()`
and a debugger's breakpoints work, while the controller goes on in its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from drawbar.train._group.worker_group import Hear, OnWait
from drawbar.train._messages import Assignment, Failed, Interrupted, Message, Ranks, WorkerInfo
from drawbar.train._orders import Interrupt, Order
from drawbar.train._threads import in_daemon_thread
from drawbar.train._worker.actor import Payload, perform
from drawbar.train._worker.environment import as_before
from drawbar.train._worker.failure import describe_exception
from drawbar.train._worker.interrupt import AttemptInterrupted
from drawbar.train._worker.output import capture_output
from drawbar.train._worker.session import Session
from drawbar.train._worker.stack import Stack, take_stack

P = ParamSpec("P")
R = TypeVar("R")

STOP_SECONDS = 1.0

Spawn = Callable[[Callable[[], None]], None]


class ThreadWorkerGroup:
    """Workers as threads of this process.

    Args:
        payload: What every rank runs.
        count: Number of ranks.
        spawn: Runs a job in the thread that is to be rank 0's, or None to start a thread for each
            rank.
        gpu_ids: The GPUs that each rank is told it has.
    """

    def __init__(
        self,
        payload: Payload,
        count: int = 1,
        spawn: Spawn | None = None,
        gpu_ids: tuple[str, ...] = (),
    ) -> None:
        self._payload = payload
        self._count = count
        self._spawn = spawn
        self._gpu_ids = gpu_ids
        self._sessions: dict[int, Session] = {}
        self._done: dict[int, asyncio.Event] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._caches: list[dict[object, object]] = [{} for _ in range(count)]

    @property
    def spare(self) -> int:
        """Nobody comes late."""
        return 0

    def __len__(self) -> int:
        return self._count

    async def start(self, on_wait: OnWait) -> list[WorkerInfo]:
        """Wait for uploads of the attempt before: there is no process to end them with."""
        for session in self._sessions.values():
            # An upload that is still writing would give its old bytes to the new attempt's
            # checkpoint of that name.
            await in_daemon_thread(session.uploads.in_flight.join)
        host = os.uname().nodename
        here = WorkerInfo(
            node_id=host,
            node_ip="127.0.0.1",
            hostname=host,
            pid=os.getpid(),
            gpu_ids=self._gpu_ids,
        )
        return [here] * self._count

    def take_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Slots are ranks here."""

    def run(self, assignments: Sequence[Assignment], hear: Hear) -> None:
        """Begin an attempt."""
        loop = asyncio.get_running_loop()
        for assignment in assignments:
            rank = assignment.ranks.world_rank
            done = self._done[rank] = asyncio.Event()
            say = partial(_say_from_thread, loop, hear, rank)
            session = self._sessions[rank] = Session(assignment, say, self._caches[rank])
            end = partial(_end_from_thread, loop, hear, rank, done)
            job = partial(self._perform, rank, session, say, end)
            if self._spawn is not None:
                self._spawn(job)
            else:
                threading.Thread(target=job, name=f"rank-{rank}", daemon=True).start()

    def _perform(
        self,
        rank: int,
        session: Session,
        say: Callable[[Message], None],
        end: Callable[[Message | None], None],
    ) -> None:
        # Only here is it known which one that is: `spawn` runs the job where `fit()` was called.
        self._threads[rank] = threading.current_thread()
        perform_here(self._payload, session, say, end, alone=self._spawn is not None)

    def order(self, rank: int, order: Order) -> None:
        """Give one rank an order."""
        self._sessions[rank].obey(order)

    async def end_attempt(
        self, *, grace: float, keep: bool, replace: bool, by_user: bool = False
    ) -> None:
        """Interrupt every running function and wait for it: a thread cannot be killed."""
        running = [rank for rank, done in self._done.items() if not done.is_set()]
        for rank in running:
            self.order(rank, Interrupt(reason="the attempt is over", by_user=by_user))
        for rank in running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done[rank].wait(), grace)

    async def stacks(self) -> dict[int, Stack | None]:
        """Look where every rank's thread stands."""
        return {rank: take_stack(thread) for rank, thread in self._threads.items()}

    def move(self) -> None:
        """There is nowhere to move to."""

    async def stop(self) -> None:
        """Interrupt what still runs: it would wait for ever for a controller that has failed."""
        await self.end_attempt(grace=STOP_SECONDS, keep=True, replace=False)

    def kill(self) -> None:
        """There is nothing to kill."""

    def execute_single_async(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a function here; gives its result."""
        return function(*args, **kwargs)

    def execute_async(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a function once per rank, here; gives the results."""
        return [function(*args, **kwargs) for _ in range(self._count)]

    execute_single = execute_single_async
    execute = execute_async


def perform_here(
    payload: Payload,
    session: Session,
    say: Callable[[Message], None],
    end: Callable[[Message | None], None],
    *,
    alone: bool,
) -> None:
    """Run the training function in this thread, and say how it ended.

    Args:
        payload: What to run.
        session: This rank's.
        say: Takes what it says.
        end: Gets its last message, or None after a Ctrl-C, which is raised here.
        alone: No other rank is in this process: its environment, folder and streams are the rank's.
    """
    ending: Message | None = Interrupted()
    try:
        with as_before() if alone else contextlib.nullcontext():
            log = session.directory.log(session.assignment.ranks.world_rank)
            with (
                capture_output(log, None, errors_only=False, redirect_fds=False)
                if alone
                else contextlib.nullcontext()
            ):
                config = copy.deepcopy(payload.config)  # as every process gets its own
                own = dataclasses.replace(payload, config=config)
                ending = perform(session, own, say, whole_process=alone)
    except AttemptInterrupted:
        pass  # a second one, while the first was being dealt with
    except KeyboardInterrupt:
        ending = None  # Ctrl-C: it is no failure, and whoever called this stops the run
        raise
    except BaseException as error:
        failure = describe_exception(error, session.assignment, session.reports_made)
        ending = Failed(failure=failure)
    finally:
        end(ending)


def _say_from_thread(
    loop: asyncio.AbstractEventLoop, hear: Hear, rank: int, message: Message
) -> None:
    loop.call_soon_threadsafe(hear, rank, [message])


def _end_from_thread(
    loop: asyncio.AbstractEventLoop,
    hear: Hear,
    rank: int,
    done: asyncio.Event,
    ending: Message | None,
) -> None:
    """Say how the function ended; whoever hears it must not interrupt this thread any more."""

    def end() -> None:
        done.set()
        if ending is not None:
            hear(rank, [ending])

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(end)
