"""Where the ranks of a running job stand, on demand."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from drawbar.train._console import Console
from drawbar.train._messages import Diagnosis, DiagnosisAsked
from drawbar.train._stacks import write_stacks
from drawbar.train._storage import RunDirectory
from drawbar.train._worker_group import WorkerGroup


class Diagnoses:
    """Writes where every rank stands to the run's directory. Its methods run on the event loop."""

    def __init__(self, group: WorkerGroup, directory: RunDirectory, console: Console) -> None:
        self._group = group
        self._directory = directory
        self._console = console
        self._answers: set[asyncio.Task[None]] = set()

    async def write(self, name: str) -> tuple[Path, str]:
        """Ask every rank for its stacks; gives the folder with them, and how the ranks differ."""
        folder = self._directory.path / "stacks" / name
        stacks = await self._group.stacks()
        return folder, await asyncio.to_thread(write_stacks, folder, stacks)

    async def tell(self) -> str:
        """Show on the console how the ranks differ, and give it."""
        folder, difference = await self.write(f"diagnosis_{int(time.time() * 1000)}")
        self._console.notice(f"where the ranks stand ({folder}):\n{difference}")
        return difference

    def answer(self, rank: int, asked: DiagnosisAsked) -> None:
        """Tell the rank that has asked, without waiting."""
        task = asyncio.create_task(self._answer(rank, asked))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, rank: int, asked: DiagnosisAsked) -> None:
        text = await self.tell()
        self._group.order(rank, Diagnosis(number=asked.number, text=text))
