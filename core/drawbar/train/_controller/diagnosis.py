"""Collect the stacks of all ranks and find the ranks that differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice
from drawbar.train._protocol.commands import DiagnosisReply
from drawbar.train._protocol.messages import DiagnosisRequest
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker.stack import Stack
from drawbar.train._worker_group.worker_group import WorkerGroup


class DiagnosisWriter:
    """Write the stacks of all ranks to the run directory. Must be used on the event loop.

    Args:
        group: Workers.
        directory: Run directory.
        emit: Callback that publishes events.
    """

    def __init__(self, group: WorkerGroup, directory: RunDirectory, emit: Emit) -> None:
        self._group = group
        self._directory = directory
        self._emit = emit
        self._reply_tasks: set[asyncio.Task[None]] = set()

    async def write(self, name: str) -> tuple[Path, str]:
        """Collect the stacks of all ranks and write them to a directory.

        Args:
            name: Name of the directory.

        Returns:
            The directory, and a text with the location of each rank in the code.
        """
        directory = self._directory.local_path / "stacks" / name
        stacks = await self._group.collect_stacks()
        # Use a thread: the ranks may hang because the storage does not respond.
        return directory, await run_in_daemon_thread(write_stacks, directory, stacks)

    async def emit(self) -> str:
        """Write the stacks, and emit and return a text with the location of each rank."""
        directory, difference = await self.write(f"diagnosis_{int(time.time() * 1000)}")
        self._emit(Notice(f"Location of each rank (stacks in {directory}):\n{difference}"))
        return difference

    def reply(self, rank: int, request: DiagnosisRequest) -> None:
        """Start a task that collects the stacks and sends a reply to a rank."""
        task = asyncio.create_task(self._reply(rank, request))
        # asyncio keeps only a weak reference to a task, so it could be deleted before it ends.
        self._reply_tasks.add(task)
        task.add_done_callback(self._reply_tasks.discard)

    async def _reply(self, rank: int, request: DiagnosisRequest) -> None:
        text = await self.emit()
        self._group.send_command(rank, DiagnosisReply(request_id=request.request_id, text=text))


def format_difference(stacks: Mapping[int, Stack | None]) -> str:
    """Return one line for each location with its ranks, the smallest group of ranks first."""
    groups = _group_by_location(stacks)
    minority = find_minority_ranks(stacks)
    lines = []
    for location, ranks in groups:
        mark = "   <- differs from the others" if ranks == minority else ""
        lines.append(f"  {_format_ranks(ranks)}: {location}{mark}")
    return "\n".join(lines)


def find_minority_ranks(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Return the ranks of the smallest group at one location; empty if two groups are smallest."""
    sizes = [len(ranks) for _, ranks in _group_by_location(stacks)]
    has_minority = len(sizes) > 1 and sizes[0] < sizes[1]
    return _group_by_location(stacks)[0][1] if has_minority else []


def find_outlier_ranks(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Return the minority; all ranks if they differ and there is no minority."""
    return find_minority_ranks(stacks) or (
        list(stacks) if len(_group_by_location(stacks)) > 1 else []
    )


def _group_by_location(stacks: Mapping[int, Stack | None]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        no_reply = "does not respond: in one long call that holds the interpreter lock, or dead"
        groups.setdefault(stack.location if stack else no_reply, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def _format_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" ... {ranks[-1]}" if len(ranks) > 8 else "")
    return f"ranks {shown} ({len(ranks)})"


def write_stacks(directory: Path, stacks: Mapping[int, Stack | None]) -> str:
    """Write each rank's stacks and their difference to a directory, and return the difference."""
    directory.mkdir(parents=True, exist_ok=True)
    summary = format_difference(stacks)
    for rank, stack in stacks.items():
        (directory / f"rank_{rank}.txt").write_text(stack.text if stack else "no reply\n")
    (directory / "difference.txt").write_text(summary + "\n")
    return summary
