"""Worker group of threads in this process.

Used without Ray: for `num_workers=0`, by `drawbar.train.testing`, and by `drawbar launch` on one
machine, where each thread runs the script of its rank in a child process. With `num_workers=0` the
function runs in the thread that called `fit()`, so that `pdb`, `input()`, and breakpoints of a
debugger work. The controller runs in a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Collection, Sequence, Sized
from functools import partial
from typing import ParamSpec, TypeVar

from drawbar._modes.fixed_processes import FixedProcesses
from drawbar._process.rank_assignment import rank_workers
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.stack import Stack
from drawbar._process.threads import run_in_daemon_thread
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import Message
from drawbar.train._worker.rank_runner import RankRunner, use_caller_process
from drawbar.train._worker.train_loop import TrainLoop
from drawbar.train._worker_group.worker_group import (
    AttemptEnd,
    OnMessages,
    OnWaiting,
    SubmitCall,
)

P = ParamSpec("P")
R = TypeVar("R")

STOP_SECONDS = 1.0
KILL_SECONDS = 5.0
"""Time limit for the output and the descendants of killed programs."""


class InProcessExecution(Sized):
    """Methods of a group whose ranks are all in this process, and its methods for backends."""

    def execute_single_async(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function in this thread and return its result."""
        return function(*args, **kwargs)

    def execute_async(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a function once per rank in this thread and return the results."""
        return [function(*args, **kwargs) for _ in range(len(self))]

    execute_single = execute_single_async
    execute = execute_async


class ThreadWorkerGroup(FixedProcesses, InProcessExecution):
    """Workers as threads of this process.

    Args:
        train_loop: Training function that every rank runs.
        num_workers: Number of ranks.
        submit_call: Runs a call in the thread of rank 0, or None to start a thread for each rank.
        gpu_ids: GPU IDs of each rank. Default: none.
    """

    def __init__(
        self,
        train_loop: TrainLoop,
        num_workers: int = 1,
        submit_call: SubmitCall | None = None,
        gpu_ids: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        self._train_loop = train_loop
        self._num_workers = num_workers
        self._submit_call = submit_call
        self._gpu_ids = gpu_ids or [()] * num_workers
        self._runners = [RankRunner() for _ in range(num_workers)]
        self._functions_ended: dict[int, asyncio.Event] = {}

    @property
    def num_idle_workers(self) -> int:
        """Always 0: threads start at once."""
        return 0

    def __len__(self) -> int:
        return self._num_workers

    async def start(self, on_waiting: OnWaiting) -> list[tuple[WorkerInfo, Ranks]]:
        """Return the workers after the uploads of the previous attempt have ended."""
        for runner in self._runners:
            # No process dies with the attempt, so an upload that is still writing would put its old
            # bytes into a checkpoint of the same name in the new attempt.
            if runner.session is not None:
                await run_in_daemon_thread(runner.session.uploads.async_commits.join)
        hostname = os.uname().nodename
        return rank_workers(
            [
                WorkerInfo(
                    node_id=hostname,
                    node_ip="127.0.0.1",
                    hostname=hostname,
                    pid=os.getpid(),
                    gpu_ids=gpu_ids,
                )
                for gpu_ids in self._gpu_ids
            ]
        )

    def run(self, assignments: Sequence[WorkerAssignment], on_messages: OnMessages) -> None:
        """Start an attempt."""
        loop = asyncio.get_running_loop()
        for assignment in assignments:
            rank = assignment.ranks.world_rank
            ended = self._functions_ended[rank] = asyncio.Event()
            send = partial(_send_from_thread, loop, on_messages, rank)
            runner = self._runners[rank]
            session = runner.start_attempt(assignment, send)
            is_only_rank = self._submit_call is not None
            call = partial(
                runner.run,
                session,
                self._train_loop,
                partial(_finish_from_thread, loop, on_messages, rank, ended),
                use_environment=use_caller_process if is_only_rank else None,
            )
            if self._submit_call is not None:
                self._submit_call(call)
            else:
                threading.Thread(target=call, name=f"rank-{rank}", daemon=True).start()

    def send_command(self, rank: int, command: Command) -> None:
        """Send a command to a rank."""
        self._runners[rank].handle_command(command)

    def broadcast_command(self, ranks: Collection[int], command: Command) -> None:
        """Send a command to several ranks."""
        for rank in ranks:
            self.send_command(rank, command)

    async def end_attempt(self, end: AttemptEnd) -> None:
        """Interrupt and wait for every running function.

        Threads cannot be killed, but the programs that they run can.
        """
        for rank in self._list_running():
            self.send_command(rank, end.interrupt)
        await self._wait_until_ended(end.grace)
        self.kill()
        if any(self._runners[rank].program is not None for rank in self._list_running()):
            await self._wait_until_ended(KILL_SECONDS)

    def _list_running(self) -> list[int]:
        return [rank for rank, ended in self._functions_ended.items() if not ended.is_set()]

    async def _wait_until_ended(self, timeout: float) -> None:
        waits = [self._functions_ended[rank].wait() for rank in self._list_running()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), timeout)

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Return the stack of every rank's thread or program; None if a program does not reply."""
        # In threads, because a program may take a second to reply.
        stacks = await asyncio.gather(
            *[
                run_in_daemon_thread(self._runners[rank].capture_stack)
                for rank in self._functions_ended
            ]
        )
        return dict(zip(self._functions_ended, stacks, strict=True))

    async def stop(self) -> None:
        """Interrupt running functions, which would wait forever for a failed controller."""
        await self.end_attempt(AttemptEnd(grace=STOP_SECONDS))
        for runner in self._runners:
            runner.end_run()

    def kill(self) -> None:
        """Kill the programs of running functions. Threads cannot be killed."""
        for rank in self._list_running():
            program = self._runners[rank].program
            if program is not None:
                program.kill()


def _send_from_thread(
    loop: asyncio.AbstractEventLoop, on_messages: OnMessages, rank: int, message: Message
) -> None:
    loop.call_soon_threadsafe(on_messages, rank, [message])


def _finish_from_thread(
    loop: asyncio.AbstractEventLoop,
    on_messages: OnMessages,
    rank: int,
    ended: asyncio.Event,
    last_message: Message | None,
) -> None:
    """Report the end of the function. The thread must not be interrupted after this."""

    def finish() -> None:
        ended.set()
        if last_message is not None:
            on_messages(rank, [last_message])

    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the message
        loop.call_soon_threadsafe(finish)
