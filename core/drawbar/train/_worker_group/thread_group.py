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

from drawbar.train._messages import Assignment, Failed, Interrupted, Message, Ranks, WorkerInfo
from drawbar.train._orders import Interrupt, Order
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker.actor import TrainLoop, run_train_loop
from drawbar.train._worker.failure import describe_exception
from drawbar.train._worker.interrupt import AttemptInterrupted
from drawbar.train._worker.output import capture_output
from drawbar.train._worker.session import Session
from drawbar.train._worker.stack import Stack, capture_stack
from drawbar.train._worker.worker_env import preserve_environment
from drawbar.train._worker_group.worker_group import OnMessages, OnWaiting

P = ParamSpec("P")
R = TypeVar("R")

STOP_SECONDS = 1.0

SubmitCall = Callable[[Callable[[], None]], None]


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
        payload: TrainLoop,
        num_workers: int = 1,
        submit_call: SubmitCall | None = None,
        gpu_ids: tuple[str, ...] = (),
    ) -> None:
        self._payload = payload
        self._count = num_workers
        self._spawn = submit_call
        self._gpu_ids = gpu_ids
        self._sessions: dict[int, Session] = {}
        self._functions_ended: dict[int, asyncio.Event] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._caches: list[dict[object, object]] = [{} for _ in range(num_workers)]

    @property
    def num_idle_workers(self) -> int:
        """Nobody comes late."""
        return 0

    def __len__(self) -> int:
        return self._count

    async def start(self, on_wait: OnWaiting) -> list[WorkerInfo]:
        """Wait for uploads of the attempt before: there is no process to end them with."""
        for session in self._sessions.values():
            # An upload that is still writing would give its old bytes to the new attempt's
            # checkpoint of that name.
            await run_in_daemon_thread(session.uploads.async_commits.join)
        host = os.uname().nodename
        here = WorkerInfo(
            node_id=host,
            node_ip="127.0.0.1",
            hostname=host,
            pid=os.getpid(),
            gpu_ids=self._gpu_ids,
        )
        return [here] * self._count

    def set_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Slots are ranks here."""

    def run(self, assignments: Sequence[Assignment], hear: OnMessages) -> None:
        """Begin an attempt."""
        loop = asyncio.get_running_loop()
        for assignment in assignments:
            rank = assignment.ranks.world_rank
            done = self._functions_ended[rank] = asyncio.Event()
            say = partial(_send_from_thread, loop, hear, rank)
            session = self._sessions[rank] = Session(assignment, say, self._caches[rank])
            end = partial(_finish_from_thread, loop, hear, rank, done)
            job = partial(self._run_rank, rank, session, say, end)
            if self._spawn is not None:
                self._spawn(job)
            else:
                threading.Thread(target=job, name=f"rank-{rank}", daemon=True).start()

    def _run_rank(
        self,
        rank: int,
        session: Session,
        say: Callable[[Message], None],
        end: Callable[[Message | None], None],
    ) -> None:
        # Only here is it known which one that is: `spawn` runs the job where `fit()` was called.
        self._threads[rank] = threading.current_thread()
        run_train_loop_in_thread(
            self._payload, session, say, end, is_only_rank=self._spawn is not None
        )

    def send_command(self, rank: int, order: Order) -> None:
        """Give one rank an order."""
        self._sessions[rank].obey(order)

    async def end_attempt(
        self,
        *,
        grace: float,
        should_keep: bool,
        should_replace: bool,
        is_user_request: bool = False,
    ) -> None:
        """Interrupt every running function and wait for it: a thread cannot be killed."""
        running = [rank for rank, done in self._functions_ended.items() if not done.is_set()]
        for rank in running:
            self.send_command(
                rank, Interrupt(reason="the attempt is over", by_user=is_user_request)
            )
        for rank in running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._functions_ended[rank].wait(), grace)

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Look where every rank's thread stands."""
        return {rank: capture_stack(thread) for rank, thread in self._threads.items()}

    def relocate_on_next_start(self) -> None:
        """There is nowhere to move to."""

    async def stop(self) -> None:
        """Interrupt what still runs: it would wait for ever for a controller that has failed."""
        await self.end_attempt(grace=STOP_SECONDS, should_keep=True, should_replace=False)

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


def run_train_loop_in_thread(
    payload: TrainLoop,
    session: Session,
    say: Callable[[Message], None],
    on_end: Callable[[Message | None], None],
    *,
    is_only_rank: bool,
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
        with preserve_environment() if is_only_rank else contextlib.nullcontext():
            log = session.directory.get_log_path(session.assignment.ranks.world_rank)
            with (
                capture_output(log, None, errors_only=False, redirect_fds=False)
                if is_only_rank
                else contextlib.nullcontext()
            ):
                config = copy.deepcopy(payload.config)  # as every process gets its own
                own = dataclasses.replace(payload, config=config)
                ending = run_train_loop(session, own, say, is_process_wide=is_only_rank)
    except AttemptInterrupted:
        pass  # a second one, while the first was being dealt with
    except KeyboardInterrupt:
        ending = None  # Ctrl-C: it is no failure, and whoever called this stops the run
        raise
    except BaseException as error:
        failure = describe_exception(error, session.assignment, session.report_count)
        ending = Failed(failure=failure)
    finally:
        on_end(ending)


def _send_from_thread(
    loop: asyncio.AbstractEventLoop, hear: OnMessages, rank: int, message: Message
) -> None:
    loop.call_soon_threadsafe(hear, rank, [message])


def _finish_from_thread(
    loop: asyncio.AbstractEventLoop,
    hear: OnMessages,
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
