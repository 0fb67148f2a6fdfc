"""Where the ranks of a running job stand, and the difference that names the odd rank out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice
from drawbar.train._messages import DiagnosisAsked
from drawbar.train._orders import Diagnosis
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker.stack import Stack
from drawbar.train._worker_group.worker_group import WorkerGroup


class DiagnosisWriter:
    """Writes where every rank stands to the run's directory. Its methods run on the event loop."""

    def __init__(self, group: WorkerGroup, directory: RunDirectory, emit: Emit) -> None:
        self._group = group
        self._directory = directory
        self._emit = emit
        self._reply_tasks: set[asyncio.Task[None]] = set()

    async def write(self, name: str) -> tuple[Path, str]:
        """Ask every rank for its stacks; gives the folder with them, and how the ranks differ."""
        folder = self._directory.local_path / "stacks" / name
        stacks = await self._group.collect_stacks()
        # In a thread: a storage that does not answer may be why the ranks hang.
        return folder, await run_in_daemon_thread(write_stacks, folder, stacks)

    async def emit(self) -> str:
        """Say how the ranks differ, and give it."""
        folder, difference = await self.write(f"diagnosis_{int(time.time() * 1000)}")
        self._emit(Notice(f"where the ranks stand ({folder}):\n{difference}"))
        return difference

    def reply(self, rank: int, request: DiagnosisAsked) -> None:
        """Tell the rank that has asked, without waiting."""
        task = asyncio.create_task(self._answer(rank, request))
        # asyncio itself holds a task only weakly, and it could be gone before it has answered.
        self._reply_tasks.add(task)
        task.add_done_callback(self._reply_tasks.discard)

    async def _answer(self, rank: int, asked: DiagnosisAsked) -> None:
        text = await self.emit()
        self._group.send_command(rank, Diagnosis(number=asked.number, text=text))


def format_difference(stacks: Mapping[int, Stack | None]) -> str:
    """Say which ranks stand where, the smallest group first: it holds the odd ranks out."""
    groups = _group_by_location(stacks)
    odd = find_minority_ranks(stacks)
    lines = []
    for place, ranks in groups:
        mark = "   <- the odd one out" if ranks == odd else ""
        lines.append(f"  {_format_ranks(ranks)}: {place}{mark}")
    return "\n".join(lines)


def find_minority_ranks(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Give the ranks of the smallest group that stands in one place, if just one is smallest."""
    sizes = [len(ranks) for _, ranks in _group_by_location(stacks)]
    is_odd = len(sizes) > 1 and sizes[0] < sizes[1]
    return _group_by_location(stacks)[0][1] if is_odd else []


def find_outlier_ranks(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Give the odd ranks out; all of them where they differ and none is odd."""
    return find_minority_ranks(stacks) or (
        list(stacks) if len(_group_by_location(stacks)) > 1 else []
    )


def _group_by_location(stacks: Mapping[int, Stack | None]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        silent = "does not answer: one long call that holds the interpreter, or a dead process"
        groups.setdefault(stack.location if stack else silent, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def _format_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" ... {ranks[-1]}" if len(ranks) > 8 else "")
    return f"ranks {shown} ({len(ranks)})"


def write_stacks(folder: Path, stacks: Mapping[int, Stack | None]) -> str:
    """Write every rank's stacks and their difference below `folder`; gives the difference."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = format_difference(stacks)
    for rank, stack in stacks.items():
        (folder / f"rank_{rank}.txt").write_text(stack.text if stack else "no answer\n")
    (folder / "difference.txt").write_text(summary + "\n")
    return summary
