"""One simulated rank: it sends real messages and handles real commands, which are not encoded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NoReturn

from drawbar._base.metrics import normalize
from drawbar._process.failure import describe_exception
from drawbar._recovery.messages import GroupFormed, RanksLost
from drawbar._storage.checkpoint_store import make_default_name
from drawbar._storage.contents import FileEntry
from drawbar._storage.files import remove_tree
from drawbar._storage.staging import make_shared_name
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import (
    CollectiveResult,
    Command,
    CommitCompleted,
    InterruptFunction,
    PersistFiles,
    RequestAnnounced,
)
from drawbar.train._protocol.messages import (
    CheckpointOffer,
    CollectiveCalled,
    FilesPersisted,
    FunctionStarted,
    GroupMessage,
    RankFailed,
    RankFinished,
    RankInterrupted,
    Report,
    RequestSeen,
    StagedOffer,
    WorkerDied,
)
from drawbar.train._worker.command_queue import CommandKey, get_command_key

_LOCATION = "simulated rank"


class SimulatedRank:
    """One rank of `run_simulated_ranks`, whose function is a coroutine.

    Args:
        assignment: Rank, run directory, and first report of the attempt.
        send: Callback that sends messages to the controller.

    Example:
        ```python
        async def train_func(rank):
            rank.report({"loss": 1.0})
            await rank.barrier()
            await rank.report_checkpoint({"loss": 0.5}, b"weights of this rank")
        ```
    """

    def __init__(self, assignment: WorkerAssignment, send: Callable[[GroupMessage], None]) -> None:
        self._assignment = assignment
        self._send = send
        self._next_report = assignment.first_report_index
        self._next_collective = 0
        self._awaited_commands: dict[CommandKey, asyncio.Future[Command]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def world_rank(self) -> int:
        """Rank of this worker in the group."""
        return self._assignment.ranks.world_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._assignment.ranks.world_size

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 0."""
        return self._assignment.attempt

    # -- calls by the function

    def report(self, metrics: Mapping[str, object]) -> None:
        """Report metrics without a checkpoint, as `drawbar.train.report` does."""
        self._send_report(metrics, None)

    async def report_checkpoint(
        self, metrics: Mapping[str, object], content: bytes = b"", *, is_staged: bool = True
    ) -> None:
        """Report a checkpoint with one file of this rank, and wait for its commit.

        Args:
            metrics: Metrics of the report.
            content: Content of the file `rank_<rank>.bin`.
            is_staged: Whether the file is written before the report, as with `checkpoint_dir()`.
                If False, it is written when the controller requests it, as for a directory of the
                user.
        """
        index = self._next_report
        file = FileEntry(f"rank_{self.world_rank}.bin", len(content))
        staging_directory = self._make_staging_directory() if is_staged else None
        if staging_directory is not None:
            (staging_directory / file.path).write_bytes(content)
        commit = self._expect((CommitCompleted, index))
        persist_request = self._expect((PersistFiles, index))
        self._send_report(metrics, self._make_offer(index, file, staging_directory))
        if staging_directory is None:
            command = await persist_request
            assert isinstance(command, PersistFiles)
            self._send(self._persist(command, file, content))
        await commit
        if staging_directory is not None:
            remove_tree(staging_directory)

    async def barrier(self) -> None:
        """Wait until every rank has called this, as `collective.barrier` does."""
        sequence, self._next_collective = self._next_collective, self._next_collective + 1
        result = self._expect((CollectiveResult, sequence))
        self._send(
            CollectiveCalled(
                sequence=sequence, number=sequence, kind="barrier", payload=None, location=_LOCATION
            )
        )
        await result

    def die(self) -> NoReturn:
        """End the simulated process without a final message, as SIGKILL does."""
        raise SimulatedDeath

    def _send_report(self, metrics: Mapping[str, object], offer: CheckpointOffer | None) -> None:
        index, self._next_report = self._next_report, self._next_report + 1
        self._send(
            Report(
                index=index,
                metrics=normalize(metrics),
                time=time.time(),
                location=_LOCATION,
                offer=offer,
                is_blocking=offer is not None,
            )
        )

    def _make_staging_directory(self) -> Path:
        return self._assignment.run_directory.staging.make_directory(f"rank_{self.world_rank}")

    def _make_offer(
        self, index: int, file: FileEntry, staging_directory: Path | None
    ) -> CheckpointOffer:
        kind = CheckpointOffer if staging_directory is None else StagedOffer
        return kind(
            directory=str(staging_directory or _LOCATION),
            files=(file,),
            checkpoint_name=make_default_name(index),
        )

    def _persist(self, command: PersistFiles, file: FileEntry, content: bytes) -> FilesPersisted:
        directory = self._assignment.run_directory.staging.make_shared_directory(
            make_shared_name(self.attempt, command.report_index)
        )
        (directory / file.path).write_bytes(content)
        return FilesPersisted(report_index=command.report_index, staging_directory=str(directory))

    def _expect(self, key: CommandKey) -> asyncio.Future[Command]:
        """Return a future for a command. Must be called before the message that requests it."""
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._awaited_commands[key] = future
        return future

    # -- calls by the worker group, in the thread of the ranks

    def start(self, function: Callable[[SimulatedRank], Awaitable[object]]) -> None:
        """Start the function."""
        self._task = asyncio.get_running_loop().create_task(self._run(function))

    def handle_command(self, command: Command) -> None:
        """Handle a command from the controller."""
        if isinstance(command, InterruptFunction):
            if self._task is not None:
                self._task.cancel()
            return
        if isinstance(command, RequestAnnounced):  # a simulated rank has no `should_checkpoint()`
            self._send(RequestSeen(request_id=command.request_id, call=1))
            return
        if isinstance(command, RanksLost | GroupFormed):  # it does not recover in place
            return
        future = self._awaited_commands.pop(get_command_key(command), None)
        if future is not None and not future.done():
            future.set_result(command)

    async def _run(self, function: Callable[[SimulatedRank], Awaitable[object]]) -> None:
        self._send(FunctionStarted(time=time.time()))
        final_message: GroupMessage
        try:
            await function(self)
            final_message = RankFinished(time=time.time())
        except asyncio.CancelledError:
            final_message = RankInterrupted()
        except SimulatedDeath:
            final_message = WorkerDied(detail="simulated death", time=time.time())
        except Exception as error:
            num_reports = self._next_report - self._assignment.first_report_index
            rank = self._assignment.ranks.world_rank
            failure = describe_exception(error, rank, self._assignment.log_path, num_reports)
            final_message = RankFailed(failure=failure)
        self._send(final_message)


class SimulatedDeath(Exception):
    """A simulated process dies."""
